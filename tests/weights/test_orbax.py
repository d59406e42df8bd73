"""Orbax checkpoints: bit-equal across layouts and meshes, one layer alone, killed saves, conversion both ways."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.weights import (
    CheckpointError,
    convert,
    convert_to_orbax,
    export_orbax,
    fake_checkpoint,
    is_orbax,
    load_layer,
    load_orbax,
    load_orbax_layer,
    load_parameters,
    orbax,
    save_orbax,
    save_parameters,
)
from pallas_kernels import mxfp4_matmul
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

HERE = Path(__file__).parent
ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four drawn layers, one of each kind and two that are stacked."""
    folder = tmp_path_factory.mktemp("fake") / "small"
    fake_checkpoint(folder, ModelConfig.from_hf(HERE.parent / "golden" / "data" / "k31_tiny_mxfp4"), layers=4)
    return folder


def assert_equal(first: Any, second: Any) -> None:
    a, b = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (first, second))
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        assert leaf.dtype == b[path].dtype and leaf.shape == b[path].shape, path
        np.testing.assert_array_equal(
            np.asarray(leaf).view(np.uint8), np.asarray(b[path]).view(np.uint8), err_msg=str(path)
        )


def test_round_trip_and_other_stacking(small: Path, tmp_path: Path) -> None:
    parameters, config = load_parameters(small, stacked=True)
    (tmp_path / "tiktoken.model").write_text("tokens")
    progress = Progress(disable=True)
    save_orbax(
        tmp_path / "x", parameters, config, extra_files=[tmp_path / "tiktoken.model"], progress=progress
    ).wait()
    assert is_orbax(tmp_path / "x") and not is_orbax(small)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiktoken.model", "x"]
    assert (tmp_path / "x" / "tiktoken.model").read_text() == "tokens"
    assert progress.tasks[0].completed == progress.tasks[0].total
    restored, restored_config = load_orbax(tmp_path / "x", progress=progress)
    assert_equal(restored, parameters)
    assert restored_config == config
    flat, _ = load_parameters(small, stacked=False)
    assert_equal(load_orbax(tmp_path / "x", stacked=False)[0], flat)
    # One layer in a notebook: no other item need be there.
    for item in (tmp_path / "x" / "layers").iterdir():
        if item.name != "00003":
            shutil.rmtree(item)
    assert_equal(load_orbax_layer(tmp_path / "x", 3), load_layer(small, 3))
    with pytest.raises(CheckpointError, match=r"lacks the item 'layers/00002'"):
        load_orbax_layer(tmp_path / "x", 2)
    with pytest.raises(CheckpointError, match=r"lacks the item 'layers/00000' \(and 2 more\)"):
        load_orbax(tmp_path / "x")
    with pytest.raises(ValueError, match="The layer is 8, but this checkpoint has the layers 0 to 3"):
        load_orbax_layer(tmp_path / "x", 8)


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        ("k31_tiny_mxfp4", "float4_kn", "bfloat16"),
        pytest.param("k3_tiny_mxfp4", "packed_nk", "float32", marks=pytest.mark.slow),
        pytest.param("k3_tiny_bf16", "packed_kn", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_every_dtype_is_bit_equal(data: Path, tmp_path: Path, name: str, layout: str, dtype: str) -> None:
    parameters, config = load_parameters(data / name, dtype=jnp.dtype(dtype), layout=layout)
    save_orbax(tmp_path / "x", parameters, config)
    restored, found = load_orbax(tmp_path / "x", stacked=False)
    assert_equal(restored, parameters)
    assert found == config
    if config.expert_quantization == "mxfp4":
        # Into the layout of another chip.
        other = "packed_kn"
        expected, _ = load_parameters(data / name, dtype=jnp.dtype(dtype), layout=other)
        assert_equal(load_orbax(tmp_path / "x", stacked=False, layout=other)[0], expected)
        assert parameters.has_vision == restored.has_vision
        text, _ = load_orbax(tmp_path / "x", stacked=False, vision=False)
        assert not text.has_vision


@pytest.mark.parametrize(
    "dtype", ["float8_e8m0fnu", "float4_e2m1fn", "bfloat16", "float32", "uint8", "float8_e4m3fn"]
)
def test_an_item_holds_any_type(tmp_path: Path, dtype: str) -> None:
    import orbax.checkpoint as ocp

    values = np.random.default_rng(0).integers(0, 255, (16, 32), np.uint8)
    values = values & 15 if dtype == "float4_e2m1fn" else values
    array = np.frombuffer(values.tobytes(), getattr(ml_dtypes, dtype, dtype)).reshape(16, -1)
    orbax.write_item(tmp_path, "globals", {"x.y": jnp.asarray(array)})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = {"x": {"y": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=device)}}
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        restored = checkpointer.restore(
            tmp_path / "globals", args=ocp.args.PyTreeRestore(item=target, restore_args=arguments)
        )
    found = np.asarray(restored["x"]["y"])
    assert found.dtype == array.dtype and found.tobytes() == array.tobytes()


ACROSS = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from moe28t_jax.weights import load_orbax, load_parameters, save_orbax, stream_parameters
source, target, layout, few = sys.argv[1:]
def rule_of(devices, experts, tensor):
    devices = np.asarray(devices).reshape(experts, tensor)
    mesh = jax.sharding.Mesh(devices, ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    def rule(parameter, layers):
        spec = [None] * len(parameter.shape)
        if parameter.quantizable:
            spec[0] = ("expert", "tensor")
        elif len(spec) == 2 and parameter.shape[1] % tensor == 0:
            spec[1] = "tensor"
        elif len(spec) == 2 and parameter.shape[0] % 2 == 0:
            spec[0] = "expert"
        if layers is not None and len(layers) > 1:
            # The two layers of the stack on different devices, where nothing else is divided.
            spec.insert(0, "tensor" if tensor == 2 and not any(spec) else None)
        return NamedSharding(mesh, PartitionSpec(*spec))
    return rule
def check(found, wanted):
    a, b = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (found, wanted))
    assert a.keys() == b.keys()
    for path, leaf in a.items():
        assert leaf.dtype == b[path].dtype
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), np.asarray(b[path]).view(np.uint8), str(path))
devices = jax.devices()
assert len(devices) == 8
expected, config = load_parameters(source, stacked=True, layout=layout)
first, _, _ = stream_parameters(source, layout=layout, sharding=rule_of(devices, 2, 4))
check(first, expected)
save_orbax(target, first, config)
for onto in (rule_of(devices[::-1], 4, 2), rule_of(devices, 2, 4), rule_of(devices[:4], 4, 1), None)[: int(few)]:
    found, _ = load_orbax(target, sharding=onto)
    check(found, expected)
    if onto is not None:
        experts = found.segments[-1][0].mlp.experts.gate.get_value().packed
        assert experts.sharding.shard_shape(experts.shape)[-3] * len(experts.sharding.device_set) == experts.shape[-3]
print("equal")
"""


@pytest.mark.parametrize(
    ("layout", "meshes"),
    [
        ("float4_kn", 1),
        *(pytest.param(layout, 4, marks=pytest.mark.slow) for layout in ("float4_kn", "packed_kn")),
    ],
)
def test_onto_other_meshes(small: Path, tmp_path: Path, layout: str, meshes: int) -> None:
    """Saved from 2 x 4 devices; restored onto 4 x 2 in another order, and 2 x 4, 4 x 1, one device."""
    done = subprocess.run(
        [sys.executable, "-c", ACROSS, str(small), str(tmp_path / "x"), layout, str(meshes)],
        env=os.environ | ENVIRONMENT | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-4000:]


def test_asynchronous_saves(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameters, config = load_parameters(data / "kimi_linear_tiny")
    save = save_orbax(tmp_path / "x", parameters, config, asynchronous=True)
    save.wait()
    assert save.done
    assert_equal(load_orbax(tmp_path / "x", stacked=False)[0], parameters)
    before = (tmp_path / "x" / "orbax.json").stat().st_ino
    write_item = orbax.write_item

    def full(folder: Path, item: str, values: Any, *others: Any) -> None:
        if item == "layers/00002":
            raise OSError(28, "No space left on device")
        write_item(folder, item, values, *others)

    monkeypatch.setattr(orbax, "write_item", full)
    caplog.clear()
    failing = save_orbax(tmp_path / "x", changed(parameters), config, asynchronous=True)
    with pytest.raises(OSError, match="No space left"):
        failing.wait()
    failing.wait()
    assert "A save in the background failed" in caplog.text
    assert (tmp_path / "x" / "orbax.json").stat().st_ino == before
    assert_equal(load_orbax(tmp_path / "x", stacked=False)[0], parameters)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def changed(parameters: Parameters) -> Parameters:
    return jax.tree.map(lambda x: x if x.dtype == jnp.uint8 else x + jnp.ones((), x.dtype), parameters)


KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp
from moe28t_jax.weights import load_parameters, orbax, orbax_convert, save_orbax, convert_to_orbax
action, source, target, where, count = sys.argv[1:]
import orbax.checkpoint as ocp
calls = 0
def killing(module, name):
    original = getattr(module, name)
    def replaced(*arguments, **options):
        global calls
        calls += 1
        if calls == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(module, name, replaced)
if where == "item":
    killing(orbax if action == "save" else orbax_convert, "write_item")
elif where == "inside":
    # Within Orbax, when an item is written and not yet renamed.
    from orbax.checkpoint._src.path import atomicity
    killing(atomicity.AtomicRenameTemporaryPath, "finalize")
else:
    killing(orbax if action == "save" else orbax_convert, "publish")
if action == "save":
    parameters, config = load_parameters(source)
    change = lambda x: x if x.dtype == jnp.uint8 else x + jnp.ones((), x.dtype)
    save_orbax(target, jax.tree.map(change, parameters), config)
else:
    convert_to_orbax(source, target)
print("finished")
"""


def run_killed(action: str, source: Path, target: Path, where: str, count: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, action, str(source), str(target), where, str(count)],
        env=os.environ | ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("inside", 3),
        *(
            pytest.param(*point, marks=pytest.mark.slow)
            for point in (("item", 1), ("item", 5), ("publish", 1))
        ),
    ],
)
def test_a_killed_save_leaves_the_previous_one(small: Path, tmp_path: Path, where: str, count: int) -> None:
    source, target = small, tmp_path / "x"
    parameters, config = load_parameters(source)
    save_orbax(target, parameters, config)
    assert run_killed("save", source, target, where, count) == -signal.SIGKILL
    assert_equal(load_orbax(target, stacked=False)[0], parameters)
    save_orbax(target, changed(parameters), config)
    assert_equal(load_orbax(target, stacked=False)[0], changed(parameters))
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("inside", 4),
        *(pytest.param(*point, marks=pytest.mark.slow) for point in (("item", 3), ("publish", 1))),
    ],
)
def test_a_killed_conversion_goes_on(small: Path, tmp_path: Path, where: str, count: int) -> None:
    source, target = tmp_path / "source", tmp_path / "x"
    shutil.copytree(small, source)
    (source / "LICENSE").write_text("terms")
    assert run_killed("convert", source, target, where, count) == -signal.SIGKILL
    assert not target.exists()
    work = tmp_path / ".x.converting" / "layers"
    finished = {item.name: item.stat().st_ino for item in work.iterdir() if item.name.isdecimal()}
    assert len(finished) == {"inside": 3, "item": 2, "publish": 4}[where]
    progress = Progress(disable=True)
    convert_to_orbax(source, target, progress=progress)
    assert progress.tasks[0].completed == progress.tasks[0].total
    assert {item: (target / "layers" / item).stat().st_ino for item in finished} == finished
    assert {file.name for file in target.iterdir()} >= {"LICENSE", "config.json", "orbax.json"}
    assert not list(target.rglob("*tmp*"))
    expected, config = load_parameters(source)
    found, found_config = load_orbax(target, stacked=False)
    assert_equal(found, expected)
    assert found_config == config
    assert sorted(file.name for file in tmp_path.iterdir()) == ["source", "x"]


@pytest.mark.parametrize("name", [None, pytest.param("k3_tiny_bf16", marks=pytest.mark.slow)])
def test_exports_equal_conversions(data: Path, small: Path, tmp_path: Path, name: str | None) -> None:
    """What comes back from Orbax has the bytes that saving and converting in the public layout give."""
    source = small if name is None else data / name
    convert_to_orbax(source, tmp_path / "orbax")
    save_parameters(tmp_path / "saved", *load_parameters(source))
    export_orbax(tmp_path / "orbax", tmp_path / "same")
    assert read(tmp_path / "same") == read(tmp_path / "saved")
    for experts in ("mxfp4", "bfloat16"):
        progress = Progress(disable=True)
        export_orbax(tmp_path / "orbax", tmp_path / "exported", experts, progress)
        convert(tmp_path / "saved", tmp_path / "converted", experts)
        assert read(tmp_path / "exported") == read(tmp_path / "converted")
        assert progress.tasks[0].completed == progress.tasks[0].total
        configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("exported", "converted")]
        assert configs[0] == configs[1]
    with pytest.raises(ValueError, match="not as 'fp8'"):
        export_orbax(tmp_path / "orbax", tmp_path / "exported", "fp8")
    # The folder of one format replaced by the other keeps nothing of the old one.
    convert_to_orbax(source, tmp_path / "exported")
    assert is_orbax(tmp_path / "exported") and not list((tmp_path / "exported").glob("*.safetensors*"))
    export_orbax(tmp_path / "orbax", tmp_path / "exported")
    assert not is_orbax(tmp_path / "exported") and not (tmp_path / "exported" / "layers").exists()


@pytest.mark.parametrize("layout", ["packed_kn", pytest.param("float4_kn", marks=pytest.mark.slow)])
def test_an_export_holds_one_expert_beside_the_layer(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    shapes: list[tuple[int, ...]] = []
    quantize, dequantize = mxfp4_matmul.quantize, MXFP4Tensor.dequantize

    def quantizing(w: Any, *arguments: Any, **options: Any) -> Any:
        shapes.append(w.shape)
        return quantize(w, *arguments, **options)

    def dequantizing(self: MXFP4Tensor, *arguments: Any) -> Any:
        shapes.append(self.shape)
        return dequantize(self, *arguments)

    monkeypatch.setattr(mxfp4_matmul, "quantize", quantizing)
    monkeypatch.setattr(MXFP4Tensor, "dequantize", dequantizing)
    convert_to_orbax(small, tmp_path / "packed", layout=layout)
    assert shapes == []
    experts = sum(name.endswith("_packed") for name in read(small))
    assert experts > 3
    export_orbax(tmp_path / "packed", tmp_path / "wide", "bfloat16")
    assert len(shapes) == experts and all(len(shape) == 2 for shape in shapes)
    shapes.clear()
    convert(small, tmp_path / "expected", "bfloat16")
    assert read(tmp_path / "wide") == read(tmp_path / "expected")
    shapes.clear()
    convert_to_orbax(tmp_path / "wide", tmp_path / "unpacked")
    export_orbax(tmp_path / "unpacked", tmp_path / "again", "mxfp4")
    assert len(shapes) == experts and all(len(shape) == 2 for shape in shapes)


def read(folder: Path) -> dict[str, tuple[str, bytes]]:
    from moe28t_jax.weights import Checkpoint

    checkpoint = Checkpoint(folder)
    return {name: (checkpoint.entry(name).dtype, checkpoint.raw(name).tobytes()) for name in checkpoint}


@pytest.mark.parametrize("layout", ["packed_kn", pytest.param("float4_kn", marks=pytest.mark.slow)])
def test_a_scale_byte_that_is_no_number_is_refused(data: Path, tmp_path: Path, layout: str) -> None:
    """As by the loaders of the public layout."""
    parameters, config = load_parameters(data / "k31_tiny_mxfp4", layout=layout)
    count = 0

    def damage(leaf: Any) -> Any:
        nonlocal count
        count += isinstance(leaf, MXFP4Tensor)
        if isinstance(leaf, MXFP4Tensor) and count == 1:
            return MXFP4Tensor(leaf.packed, leaf.scale_bytes.at[1, 0, 3].set(255), leaf.layout)
        return leaf

    damaged = jax.tree.map(damage, parameters, is_leaf=lambda leaf: isinstance(leaf, MXFP4Tensor))
    save_orbax(tmp_path / "x", damaged, config)
    message = (
        r"'mlp\.experts\.\w+' in item 'layers/00001' of '.*x' has the scale byte 255 \(NaN\) at \[1, 0, 3\]"
    )
    for load in (load_orbax, lambda path: load_orbax_layer(path, 1)):
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "x")
    load_orbax_layer(tmp_path / "x", 2)
    with pytest.raises(CheckpointError, match=message):
        export_orbax(tmp_path / "x", tmp_path / "exported")


@pytest.mark.parametrize("stored", ["F32", "F16"])
def test_a_conversion_rounds_nothing_unless_told(folder: Callable, tmp_path: Path, stored: str) -> None:
    copy = folder("kimi_linear_tiny")
    name = next(name for name, (dtype, _, _) in copy.tensors.items() if dtype == "BF16" and "o_proj" in name)
    _, shape, _ = copy.tensors[name]
    wide = (
        np.random.default_rng(0).standard_normal(shape).astype({"F32": np.float32, "F16": np.float16}[stored])
    )
    copy.tensors[name] = (stored, shape, wide.reshape(-1).view(np.uint8))
    source = copy.write()
    convert_to_orbax(source, tmp_path / "exact")
    exact, _ = load_parameters(source, dtype=jnp.float32)
    assert_equal(load_orbax(tmp_path / "exact", stacked=False)[0], exact)
    convert_to_orbax(source, tmp_path / "rounded", dtype=jnp.bfloat16)
    assert_equal(load_orbax(tmp_path / "rounded", stacked=False)[0], load_parameters(source)[0])
    copy.tensors[name] = ("F64", shape, wide.astype(np.float64).reshape(-1).view(np.uint8))
    if not jax.config.jax_enable_x64:
        with pytest.raises(
            CheckpointError, match=r"is float64, which would be rounded; .* \(--dtype float32\)"
        ):
            convert_to_orbax(copy.write(), tmp_path / "y")


REFUSED = """
import sys
from moe28t_jax.weights import CheckpointError, load_orbax
try:
    load_orbax(sys.argv[1])
except CheckpointError as error:
    print(error)
"""


def test_an_item_that_is_gone(data: Path, tmp_path: Path) -> None:
    """In a process of its own: Orbax leaves the reads of other arrays unattended when one fails, and what they say when
    they are collected, at any time, would be another test's failure."""
    parameters, config = load_parameters(data / "kimi_linear_tiny")
    save_orbax(tmp_path / "x", parameters, config)
    shutil.rmtree(tmp_path / "x" / "globals" / "ocdbt.process_0")
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert "globals' cannot be restored" in done.stdout


def test_refused(data: Path, tmp_path: Path) -> None:
    parameters, config = load_parameters(data / "kimi_linear_tiny")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="no checkpoint to replace"):
        save_orbax(tmp_path / "home", parameters, config)
    save_orbax(tmp_path / "x", parameters, config)
    with pytest.raises(CheckpointError, match=r"There is no file '.*absent' to copy along"):
        save_orbax(tmp_path / "x", parameters, config, extra_files=[tmp_path / "absent"])
    assert config.moe is not None
    other = config.override({"moe.intermediate_size": 2 * config.moe.intermediate_size})
    with pytest.raises(CheckpointError, match=r"'mlp.experts.gate' in item .* shape"):
        load_orbax(tmp_path / "x", other)
    with pytest.raises(CheckpointError, match="is the source"):
        export_orbax(tmp_path / "x", tmp_path / "x")
    damage: list[tuple[str, Callable[[Path], Any], str]] = [
        ("other", lambda x: edit(x, "orbax.json", "format", "other"), "is not the description"),
        (
            "shape",
            lambda x: edit(x, "config.json", "vocab_size", 512),
            r"'embedding' in item 'globals' .* shape",
        ),
        (
            "swapped",
            lambda x: swap(x / "layers" / "00001", x / "layers" / "00002"),
            "was saved as 'layers/00002'",
        ),
        (
            "fewer",
            lambda x: shutil.copytree(x / "layers" / "00000", x / "layers" / f"{config.num_layers:05d}"),
            "more layers than",
        ),
    ]
    for name, damaging, message in damage:
        shutil.copytree(tmp_path / "x", tmp_path / name)
        damaging(tmp_path / name)
        with pytest.raises(CheckpointError, match=message):
            load_orbax(tmp_path / name)


def edit(folder: Path, file: str, key: str, value: Any) -> None:
    content = json.loads((folder / file).read_text())
    assert key in content
    content[key] = value
    (folder / file).write_text(json.dumps(content))


def swap(first: Path, second: Path) -> None:
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)
