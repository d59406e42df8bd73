"""Saving and converting: same bytes, nothing lost, resumable."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.progress import Progress
from safetensors.numpy import load_file, save_file

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.parameters import initialize
from moe28t_jax.weights import (
    Checkpoint,
    CheckpointError,
    convert,
    declared_values,
    describe,
    load_parameters,
    save_parameters,
    write_checksums,
)
from moe28t_jax.weights.checksums import CHECKSUM_FILE
from moe28t_jax.weights.publish import publish
from moe28t_jax.weights.safetensors import SafetensorsFile
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"


def read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, by the public library."""
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(path.glob("model*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def assert_same_tensors(first: Path, second: Path, same_dtype: bool = True) -> None:
    a, b = read(first), read(second)
    assert set(a) == set(b)
    for name, value in a.items():
        assert value.shape == b[name].shape, name
        if same_dtype:
            assert value.dtype == b[name].dtype, name
        np.testing.assert_array_equal(value.astype(np.float64), b[name].astype(np.float64), err_msg=name)


@pytest.mark.parametrize("stacked", [False, True])
def test_round_trip_gives_the_same_file(tiny: Path, tmp_path: Path, stacked: bool) -> None:
    round_trip(tiny, tmp_path, stacked, "packed_kn")


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layout", ["packed_nk", "float4_kn"])
def test_round_trip_from_other_layouts(data: Path, tmp_path: Path, stacked: bool, layout: str) -> None:
    round_trip(data / "k31_tiny_mxfp4", tmp_path, stacked, layout)


def round_trip(source: Path, tmp_path: Path, stacked: bool, layout: str) -> None:
    parameters, config = load_parameters(source, stacked=stacked, layout=layout)
    save_parameters(tmp_path / "x", parameters, config, like=source)
    assert (tmp_path / "x/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    saved, original = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "x", source))
    assert saved == original
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_canonical_form_is_stable(tiny: Path, tmp_path: Path) -> None:
    parameters, config = load_parameters(tiny)
    save_parameters(tmp_path / "a", parameters, config)
    assert_same_tensors(tiny, tmp_path / "a", same_dtype=False)
    saved = Checkpoint(tmp_path / "a")
    for declared, _ in declared_values(parameters, config):
        if not declared.parameter.quantizable:
            dtype = {"bfloat16": "BF16", "float32": "F32"}[declared.parameter.dtype]
            assert saved.entry(declared.stored_name)[:2] == (dtype, declared.parameter.stored_shapes[0])
    again, config = load_parameters(tmp_path / "a", dtype=jnp.float32, stacked=True)
    save_parameters(tmp_path / "b", again, config)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_shards_index_and_tokenizer_files(data: Path, tmp_path: Path) -> None:
    source = data / "k3_tiny_mxfp4"
    parameters, config = load_parameters(source)
    (tmp_path / "tiktoken.model").write_text("tokens")
    progress = Progress(disable=True)
    save_parameters(
        tmp_path / "x", parameters, config, max_shard_bytes=200_000, like=source, progress=progress,
        tokenizer_files=[tmp_path / "tiktoken.model"],
    )  # fmt: skip
    assert (
        progress.tasks[0].completed
        == progress.tasks[0].total
        == sum(info.nbytes for info in describe(source))
    )
    assert (tmp_path / "x/tiktoken.model").read_text() == "tokens"
    shards = sorted((tmp_path / "x").glob("*.safetensors"))
    assert len(shards) > 5 and shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        assert sum(value.nbytes for value in load_file(shard).values()) <= 200_000
    index = json.loads((tmp_path / "x/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in describe(source))
    assert index["weight_map"] == {info.name: info.shard for info in describe(tmp_path / "x")}
    assert_same_tensors(source, tmp_path / "x")
    # One file again: the old shards and their index must not stay, the tokenizer must.
    save_parameters(tmp_path / "x", parameters, config)
    assert sorted(file.name for file in (tmp_path / "x").iterdir()) == [
        "config.json", "model.safetensors", "tiktoken.model",
    ]  # fmt: skip


def test_refused_targets(data: Path, tmp_path: Path, snapshot: Callable) -> None:
    parameters, config = load_parameters(data / "kimi_linear_tiny")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/diary.txt").write_text("dear")
    (tmp_path / "file").write_text("x")
    before = snapshot(tmp_path)
    for target, message in (
        ("home", "no checkpoint to replace"), ("file", "is a file"), ("no/where", "create it first"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            save_parameters(tmp_path / target, parameters, config)
        with pytest.raises(CheckpointError, match=message):
            convert(data / "kimi_linear_tiny", tmp_path / target)
    with pytest.raises(CheckpointError, match=r"absent\.model"):
        save_parameters(tmp_path / "x", parameters, config, tokenizer_files=["absent.model"])
    _, other = load_parameters(data / "k31_tiny")
    with pytest.raises(CheckpointError, match="pass the configuration"):
        save_parameters(tmp_path / "x", parameters, other)
    wide = config.override({"vocab_size": 512})
    with pytest.raises(CheckpointError, match=r"'embedding' .* has shape \[256, 64\]"):
        save_parameters(tmp_path / "x", parameters, wide)
    assert snapshot(tmp_path) == before


def test_float32_masters_are_rounded_to_bfloat16(data: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(data / "k31_tiny")
    parameters = initialize(config, jax.random.key(0), np.dtype(np.float32))
    save_parameters(tmp_path / "x", parameters, config)
    stored = read(tmp_path / "x")
    head = np.asarray(parameters["head"]).T
    np.testing.assert_array_equal(stored["language_model.lm_head.weight"], head.astype(ml_dtypes.bfloat16))


def test_publish_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe28t_jax.weights.publish._exchange", lambda *_: False)
    for name, text in (("target", "old"), (".target.saving", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "target/notes.md").write_text("keep me")
    publish(tmp_path / ".target.saving", tmp_path / "target", same_model=True)
    assert [file.name for file in tmp_path.iterdir()] == ["target"]
    assert (tmp_path / "target/config.json").read_text() == "new"
    assert (tmp_path / "target/notes.md").read_text() == "keep me"


# -- converting --------------------------------------------------------------------------------------------


def test_conversion_follows_the_recorded_rounding(data: Path, tmp_path: Path) -> None:
    golden = load_file(data / "mxfp4_quant.safetensors")
    config = ModelConfig.from_hf(data / "k3_tiny_bf16").override(
        {"moe.latent_size": 128, "moe.intermediate_size": 32, "moe.num_shared_experts": 4}
    )
    save_parameters(tmp_path / "a", initialize(config, jax.random.key(1), np.dtype(np.float32)), config)
    tensors = load_file(tmp_path / "a/model.safetensors")
    assert tensors[EXPERT].shape == (32, 128)
    tensors[EXPERT] = np.concatenate([golden["w"], np.zeros((8, 128), np.float32)])
    save_file(tensors, tmp_path / "a/model.safetensors")
    convert(tmp_path / "a", tmp_path / "b")
    quantised = read(tmp_path / "b")
    np.testing.assert_array_equal(quantised[f"{EXPERT}_packed"][:24], golden["weight_packed"])
    np.testing.assert_array_equal(quantised[f"{EXPERT}_scale"][:24], golden["weight_scale"])
    parameters, _ = load_parameters(tmp_path / "b")
    loaded = parameters.segments[1][0].mlp.experts.gate.get_value().dequantize(jnp.float32)
    np.testing.assert_array_equal(np.asarray(loaded)[0, :24], golden["dequant"])


def test_conversion_changes_experts_alone(data: Path, tmp_path: Path) -> None:
    source = data / "k31_tiny"
    progress = Progress(disable=True)
    convert(source, tmp_path / "a", progress=progress)
    assert progress.tasks[0].completed == progress.tasks[0].total
    before, after = read(source), read(tmp_path / "a")
    for name, value in before.items():
        if ".experts." in name:
            assert name not in after and f"{name}_packed" in after and f"{name}_scale" in after
        else:
            assert value.dtype == after[name].dtype
            np.testing.assert_array_equal(value.view(np.uint8), after[name].view(np.uint8))
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    parameters, found = load_parameters(tmp_path / "a")
    assert found.expert_quantization == "mxfp4"
    assert any(isinstance(value, MXFP4Tensor) for _, value in declared_values(parameters, found))


def test_conversion_is_idempotent_and_reversible(data: Path, tmp_path: Path) -> None:
    source = data / "k3_tiny_mxfp4"
    convert(source, tmp_path / "same")
    assert (tmp_path / "same/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    convert(source, tmp_path / "wide", to="bfloat16")
    config = json.loads((tmp_path / "wide/config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    values, expected = (load_parameters(path)[0] for path in (tmp_path / "wide", source))
    for layer in range(1, 7):
        wide = values.segments[layer][0].mlp.experts.up.get_value()
        packed = expected.segments[layer][0].mlp.experts.up.get_value().dequantize(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(wide).swapaxes(-1, -2), np.asarray(packed))
    # A grid of MXFP4 values stays on it, whatever scale the second quantisation chooses.
    convert(tmp_path / "wide", tmp_path / "narrow")
    convert(tmp_path / "narrow", tmp_path / "wide2", to="bfloat16")
    assert_same_tensors(tmp_path / "wide", tmp_path / "wide2")


def test_shards_and_other_files_are_kept(folder: Callable, data: Path, tmp_path: Path) -> None:
    copy = folder("k3_tiny_bf16")
    path = copy.write_shards(3)
    (path / "tiktoken.model").write_text("tokens")
    (path / "pytorch_model.bin").write_text("another format")
    convert(path, tmp_path / "a")
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        "config.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json", "tiktoken.model",
    ]  # fmt: skip
    convert(data / "k3_tiny_bf16", tmp_path / "b")
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    load_parameters(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "c", to="bfloat16")
    load_parameters(tmp_path / "c")


def test_a_conversion_compares_checksums_and_writes_its_own(
    folder: Callable, data: Path, tmp_path: Path
) -> None:
    path = folder("k3_tiny_bf16").write_shards(2)
    write_checksums(path)
    convert(path, tmp_path / "packed")
    convert(tmp_path / "packed", tmp_path / "wide", to="bfloat16")
    for made in ("packed", "wide"):
        written = (tmp_path / made / CHECKSUM_FILE).read_bytes()
        write_checksums(tmp_path / made)
        assert (tmp_path / made / CHECKSUM_FILE).read_bytes() == written
    # One bit of a dense weight, of an expert, and of a packed expert's scales.
    for source, name, to in (
        (path, "self_attn.q_proj.weight", "mxfp4"),
        (path, "experts.3.w3.weight", "mxfp4"),
        (tmp_path / "packed", "experts.3.w3.weight_scale", "bfloat16"),
    ):
        found, file = next(
            (tensor, file)
            for file in sorted(source.glob("*.safetensors"))
            for tensor in SafetensorsFile(file).entries
            if tensor.endswith(name)
        )
        flip_bit(file, found)
        with pytest.raises(CheckpointError, match=rf"{re.escape(found)}.*CRC-32.*damaged"):
            convert(source, tmp_path / "x", to=to)
        assert not (tmp_path / "x").exists()
        flip_bit(file, found)


def flip_bit(file: Path, tensor: str) -> None:
    """Of a tensor's first byte."""
    with file.open("r+b") as stream:
        place = 8 + int.from_bytes(stream.read(8), "little") + SafetensorsFile(file).entries[tensor].start
        stream.seek(place)
        value = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([value ^ 1]))


def test_refused_conversions(folder: Callable, tmp_path: Path) -> None:
    copy = folder("k3_tiny_bf16")
    dtype, shape, content = copy.tensors[EXPERT]
    values = content.copy().view(ml_dtypes.bfloat16)
    values[32 * 5 + 3] = np.inf  # [64, 32]: output 5
    copy.tensors[EXPERT] = (dtype, shape, values.view(np.uint8))
    path = copy.write()
    with pytest.raises(CheckpointError, match="not finite at output 5, inputs 0 to 31") as caught:
        convert(path, tmp_path / "x")
    assert EXPERT in str(caught.value)
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="is the source"):
        convert(path, path)
    with pytest.raises(ValueError, match="int4"):
        convert(path, tmp_path / "x", to="int4")


# -- interruption ------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from moe28t_jax.weights import convert, load_parameters, publish, safetensors, save_parameters

what, source, target, place, count = sys.argv[1:]
source, target, count = Path(source), Path(target), int(count)

def killing(function):
    def wrapper(*arguments, **options):
        global count
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        count -= 1
        return function(*arguments, **options)
    return wrapper

if place == "write":
    safetensors.SafetensorsWriter.write = killing(safetensors.SafetensorsWriter.write)
elif place == "fsync":
    os.fsync = killing(os.fsync)
elif place == "cleanup":
    publish.shutil.rmtree = killing(publish.shutil.rmtree)
if what == "save":
    parameters, config = load_parameters(source)
    save_parameters(target, parameters, config, max_shard_bytes=400_000)
else:
    convert(source, target)
"""


def run_killed(*arguments: object) -> int:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    command = [sys.executable, "-c", KILLED, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=False, capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.parametrize(("place", "count"), [("write", 100), ("fsync", 2), ("cleanup", 0)])
def test_a_killed_save_leaves_a_whole_folder(
    data: Path, tmp_path: Path, snapshot: Callable, place: str, count: int
) -> None:
    old, new = data / "kimi_linear_tiny", data / "k31_tiny"
    convert(old, tmp_path / "x", to="bfloat16")
    before = snapshot(tmp_path / "x")
    assert run_killed("save", new, tmp_path / "x", place, count) == -signal.SIGKILL
    if place == "cleanup":  # the new folder is in place, the old one was about to go
        assert_same_tensors(tmp_path / "x", new, same_dtype=False)
    else:
        assert snapshot(tmp_path / "x") == before
    parameters, config = load_parameters(new)
    save_parameters(tmp_path / "x", parameters, config)
    assert_same_tensors(tmp_path / "x", new, same_dtype=False)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


@pytest.mark.slow
def test_a_killed_conversion_goes_on(
    folder: Callable, data: Path, tmp_path: Path, snapshot: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder("k3_tiny_bf16").write_shards(4)
    target = tmp_path / "x"
    convert(data / "kimi_linear_tiny", target, to="bfloat16")
    before = snapshot(target)
    assert run_killed("convert", source, target, "write", 300) == -signal.SIGKILL
    assert snapshot(target) == before
    work = tmp_path / ".x.converting"
    finished = {file.name: file.stat().st_mtime_ns for file in work.glob("*.safetensors")}
    assert 1 <= len(finished) < 4
    # A finished shard that was damaged meanwhile is not trusted.
    broken = sorted(finished)[0]
    (work / broken).write_bytes((work / broken).read_bytes()[:-1])
    convert(source, target)
    for name in finished:
        assert ((target / name).stat().st_mtime_ns == finished[name]) == (name != broken)
    convert(source, tmp_path / "fresh")
    assert snapshot(target) == snapshot(tmp_path / "fresh")
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_leftovers_of_another_conversion_are_not_used(data: Path, tmp_path: Path) -> None:
    work = tmp_path / ".x.converting"
    work.mkdir()
    convert(data / "k31_tiny", tmp_path / "other")
    (work / "model.safetensors").write_bytes((tmp_path / "other/model.safetensors").read_bytes())
    (work / "stray.txt").write_text("stray")
    (work / ".unfinished.json").write_text("{}")
    convert(data / "k31_tiny", tmp_path / "x")
    assert sorted(file.name for file in (tmp_path / "x").iterdir()) == ["config.json", "model.safetensors"]
    assert not work.exists()


def test_two_writers_of_one_folder(data: Path, tmp_path: Path) -> None:
    import fcntl

    parameters, config = load_parameters(data / "kimi_linear_tiny")
    lock = tmp_path / ".x.lock"
    handle = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="Another process is writing"):
            save_parameters(tmp_path / "x", parameters, config)
    finally:
        os.close(handle)
    save_parameters(tmp_path / "x", parameters, config)


def test_a_checkpoint_that_was_moved_aside_is_moved_back(data: Path, tmp_path: Path) -> None:
    """What a kill between two renames leaves on a file system that cannot exchange folders."""
    parameters, config = load_parameters(data / "kimi_linear_tiny")
    save_parameters(tmp_path / "x", parameters, config)
    (tmp_path / "x" / "tiktoken.model").write_text("tokens")
    (tmp_path / "x").rename(tmp_path / ".x.replaced")
    save_parameters(tmp_path / "x", parameters, config)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "tiktoken.model").read_text() == "tokens"
