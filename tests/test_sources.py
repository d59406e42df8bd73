"""What `load` can be given: object stores, Orbax folders, meshes; and the licence beside the weights."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax import parallel
from moe28t_jax.cli import main
from moe28t_jax.config import shipped_folder
from moe28t_jax.config.declaration import declare_layer
from moe28t_jax.planning import LicenceError, accept, check_licence, licence_hash, require_licence
from moe28t_jax.sources import mesh_rule, resolve
from moe28t_jax.weights import convert_to_orbax, load_orbax_layer, stream_parameters

IDS = [[5, 6, 7, 8], [9, 10, 11, 12]]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))


@pytest.fixture(scope="module")
def logits(small_checkpoint: Path) -> np.ndarray:
    return np.asarray(m.load(small_checkpoint, dtype="float32").logits(IDS))


def upload(folder: Path, name: str) -> str:
    files = fsspec.filesystem("memory")
    for file in folder.iterdir():
        files.pipe_file(f"/{name}/{file.name}", file.read_bytes())
    return f"memory://{name}"


def test_an_address(small_checkpoint: Path, logits: np.ndarray, tmp_path: Path) -> None:
    address = upload(small_checkpoint, "bucket/small")
    model = m.load(address, dtype="float32", cache=tmp_path / "cache", overrides={"dsa.top_k": 3})
    assert model.name == "small" and model.config.dsa is not None and model.config.dsa.top_k == 3
    assert model.tokenizer is not None and list((tmp_path / "cache").iterdir())
    np.testing.assert_array_equal(m.load(address, dtype="float32").logits(IDS), logits)
    fsspec.filesystem("memory").pipe_file("/bucket/small/config.json", b"{")
    with pytest.raises(m.CheckpointError, match=r"bucket/small/config.json' is not valid JSON"):
        m.load(address)


def test_a_cache_is_for_object_stores(small_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cache is '.*/cache', which keeps what an object store sent"):
        m.load(small_checkpoint, cache=tmp_path / "cache")


def test_an_accelerator_is_filled_slice_by_slice(
    small_checkpoint: Path, logits: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that holds a whole stack of experts, as loading to a CPU does, may not be large enough for one."""
    source, config = resolve(str(small_checkpoint)), m.load(small_checkpoint).config
    expected, _ = source.parameters(config, np.dtype("float32"), stacked=True)
    used, devices = [], jax.devices

    def stream(*arguments, **keywords):
        monkeypatch.setattr(jax, "devices", devices)
        used.append(keywords["sharding"])
        return stream_parameters(*arguments, fill="device", **keywords)

    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="tpu")])
    monkeypatch.setattr("moe28t_jax.sources.stream_parameters", stream)
    found, _ = source.parameters(config, np.dtype("float32"), stacked=True)
    assert used == [None]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_commands_take_addresses(
    small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = upload(small_checkpoint, "bucket/commands")
    reports = []
    for source in (address, str(small_checkpoint)):
        assert main(["inspect", source, "--tensors", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out) | {"name": ""})
    assert reports[0] == reports[1] and reports[0]["tensors"]
    assert main(["licence", address]) == 2
    assert f"{address!r} holds no licence file" in capsys.readouterr().err
    fsspec.filesystem("memory").pipe_file("/bucket/commands/LICENSE", b"Ask first.")
    digest = licence_hash("Ask first.")
    assert main(["licence", address]) == 1
    assert f"moe28t licence {address!r} --accept {digest}" in capsys.readouterr().out
    with pytest.raises(LicenceError):
        m.load(address)
    assert main(["licence", address, "--accept", digest]) == 0
    m.load(address)
    # What is written, or mapped, is a folder.
    capsys.readouterr()
    for arguments in (
        ["convert", address, str(tmp_path / "x")],
        ["convert", str(small_checkpoint), address],
        ["checksums", address],
        ["fake-checkpoint", "--preset", "nano", "--out", address],
    ):
        assert main(arguments) == 2
        assert f"{address!r} is an address, but" in capsys.readouterr().err
    assert not list(tmp_path.glob("memory*"))


def test_convert_chooses_a_type_for_orbax_alone(
    small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(small_checkpoint), str(tmp_path / "x"), "--dtype", "float32"]
    assert main(command) == 2
    assert "--dtype goes with --to orbax" in capsys.readouterr().err
    assert main([*command, "--to", "orbax"]) == 0
    assert load_orbax_layer(tmp_path / "x", 0).attention_norm.get_value().dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_orbax_folder(small_checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    convert_to_orbax(small_checkpoint, tmp_path / "x")
    with pytest.raises(m.CheckpointError, match=r"'embedding' .* has shape"):
        m.load(tmp_path / "x", overrides={"vocab_size": 640})
    model, expected = (m.load(folder, dtype=dtype) for folder in (tmp_path / "x", small_checkpoint))
    assert model.tokenizer is not None and model.config == expected.config
    found, wanted = (jax.tree.leaves_with_path(one.parameters) for one in (model, expected))
    for (path, leaf), (_, other) in zip(found, wanted, strict=True):
        assert leaf.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=str(path))


def test_a_mesh_of_one_device(small_checkpoint: Path, tmp_path: Path, logits: np.ndarray) -> None:
    """Streaming onto a mesh gives the arrays and shardings that placing loaded ones gives."""
    mesh = parallel.make_mesh({"expert": 1})
    model = m.load(small_checkpoint, mesh=mesh, dtype="float32")
    plain = m.load(small_checkpoint, dtype="float32")
    expected = parallel.place_parameters(plain.parameters, plain.config, mesh)
    for leaf, other in zip(jax.tree.leaves(model.parameters), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))
    rule = mesh_rule(plain.config, mesh, True)
    for layer in range(plain.config.num_layers):
        for parameter in declare_layer(plain.config, layer):
            # A layer of a stack has one axis less than the stack.
            assert len(rule(parameter, (layer,)).spec) <= len(parameter.shape)
    with pytest.raises(ValueError, match="single file; give its folder"):
        m.load(small_checkpoint / "model.safetensors", mesh=mesh, dtype="float32")


# -- licence ---------------------------------------------------------------------------------------------------
def licensed(source: Path, target: Path, text: str) -> Path:
    shutil.copytree(source, target)
    (target / "LICENSE").write_text(text)
    return target


def test_unknown_licences_are_not_loaded_until_accepted(small_checkpoint: Path, tmp_path: Path) -> None:
    text = "You may do anything on Tuesdays."
    folder = licensed(small_checkpoint, tmp_path / "x", text)
    digest = licence_hash(text)
    with pytest.raises(LicenceError, match=rf"LICENSE\): The text is none of .* accept_licence='{digest}'"):
        m.load(folder)
    with pytest.raises(ValueError, match=rf"is not the hash of a licence of .*; that is {digest}"):
        m.load(folder, accept_licence="0" * 64)
    model = m.load(folder, accept_licence=digest.upper())
    assert model.licence is not None and model.licence.accepted and model.licence.status == "unknown"
    # For this time only.
    with pytest.raises(LicenceError):
        m.load(folder)
    address = upload(folder, "bucket/licensed")
    with pytest.raises(LicenceError, match="bucket/licensed/LICENSE"):
        m.load(address)
    assert m.load(address, accept_licence=digest).licence is not None
    # For good.
    accept(folder, digest)
    assert m.load(folder).licence is not None
    # An altered text is another one.
    (folder / "LICENSE").write_text(text + " And Wednesdays.")
    with pytest.raises(LicenceError):
        m.load(folder)


def test_one_of_several_licences_may_be_unknown(small_checkpoint: Path, tmp_path: Path) -> None:
    apache = (Path(__file__).parents[1] / "LICENSE").read_text("utf-8")
    folder = licensed(small_checkpoint, tmp_path / "x", apache)
    found = m.load(folder).licence
    assert found is not None and (found.status, found.name) == ("ok", "Apache License 2.0")
    (folder / "LICENSE-MODEL").write_text("Ask me.")
    with pytest.raises(LicenceError, match="LICENSE-MODEL"):
        m.load(folder)
    assert m.load(folder, accept_licence=licence_hash("Ask me.")).licence is not None


def test_a_folder_without_a_licence_is_loaded_but_not_for_others(
    small_checkpoint: Path, tmp_path: Path
) -> None:
    model = m.load(small_checkpoint)
    assert model.licence is None
    with pytest.raises(LicenceError, match="no licence file"):
        require_licence(small_checkpoint)
    with pytest.raises(ValueError, match="holds no licence file, so that nothing need be accepted"):
        m.load(small_checkpoint, accept_licence="0" * 64)
    # An Orbax folder carries the licence along.
    folder = licensed(small_checkpoint, tmp_path / "x", "Ask me.")
    convert_to_orbax(folder, tmp_path / "orbax")
    with pytest.raises(LicenceError):
        m.load(tmp_path / "orbax")


def test_nano_has_a_known_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_licence(shipped_folder("nano")).status == "ok"
    assert main(["licence", "nano", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["licence"], result["allowed"]) == ("ok", "Apache License 2.0", True)
    licence = resolve("nano").licence(None)
    assert licence is not None and licence.allowed


def test_commands_accept_by_hash(
    small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = licensed(small_checkpoint, tmp_path / "x", "Ask me.")
    command = ["generate", "--model", str(folder), "--prompt", "a", "--max-new-tokens", "1"]
    assert main(command) == 2
    assert f"--accept-licence {licence_hash('Ask me.')}" in capsys.readouterr().err
    assert main([*command, "--accept-licence", licence_hash("Ask me.")]) == 0


def test_conversions_by_command(
    small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, orbax, back = str(small_checkpoint), str(tmp_path / "orbax"), str(tmp_path / "back")
    assert main(["convert", source, orbax, "--to", "orbax", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == orbax
    assert main(["convert", orbax, back, "--to", "mxfp4"]) == 0
    found, expected = m.load(back, dtype=jnp.float32), m.load(source, dtype=jnp.float32)
    for leaf, other in zip(
        jax.tree.leaves(found.parameters), jax.tree.leaves(expected.parameters), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))
    capsys.readouterr()
    assert main(["convert", orbax, str(tmp_path / "again"), "--to", "orbax"]) == 2
    assert "is an Orbax checkpoint already" in capsys.readouterr().err
    assert main(["convert", source, orbax, "--to", "orbax"]) == 2
    assert "--overwrite" in capsys.readouterr().err
