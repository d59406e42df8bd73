"""Loading: values, orientation, layouts, spellings, stacks."""

import json
import os
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
from safetensors.numpy import load_file

from moe28t_jax.config import VisionConfig, declare
from moe28t_jax.config.declaration import declare_vision
from moe28t_jax.model.parameters import PackedWeight, Parameters
from moe28t_jax.weights import (
    CheckpointError,
    convert,
    declared_values,
    describe,
    load_parameters,
    quantize_experts,
    save_parameters,
)
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def exact(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """MXFP4 by table, in float64."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return TABLE[codes] * np.repeat(2.0 ** (scale.astype(np.int64) - 127), 32, axis=1)


def expected_values(path: Path, config: Any, vision: bool = False) -> dict[str, np.ndarray]:
    """Declared name and layer -> program array in float64, by the public library and plain NumPy."""
    stored = load_file(path / "model.safetensors")
    values = {}
    for declared in declare(config, vision=vision):
        parameter = declared.parameter
        parts = []
        for expert in range(parameter.num_stored):
            name = declared.stored_name.replace("{expert}", str(expert))
            if name in stored:
                part = stored[name].astype(np.float64)
            else:
                part = exact(stored[f"{name}_packed"], stored[f"{name}_scale"])
            if parameter.transform == "transpose":
                part = part.reshape(part.shape[0], -1).T
            parts.append(part)
        values[f"{declared.layer}.{parameter.name}"] = np.stack(parts).reshape(parameter.shape)
    return values


def actual_values(parameters: Parameters, config: Any) -> dict[str, np.ndarray]:
    values = {}
    for declared, value in declared_values(parameters, config):
        if isinstance(value, MXFP4Tensor):
            value = value.dequantize(jnp.float32).swapaxes(-1, -2)
        values[f"{declared.layer}.{declared.parameter.name}"] = np.asarray(value).astype(np.float64)
    return values


def assert_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert list(first) == list(second)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_values_of_the_tiny_checkpoints(tiny: Path, dtype: Any, stacked: bool) -> None:
    parameters, config = load_parameters(tiny, dtype=dtype, stacked=stacked)
    assert_equal(actual_values(parameters, config), expected_values(tiny, config))
    assert config.expert_quantization == ("mxfp4" if tiny.name.endswith("mxfp4") else None)
    for declared, value in declared_values(parameters, config):
        if not isinstance(value, MXFP4Tensor):
            assert value.dtype == (jnp.float32 if declared.parameter.dtype == "float32" else dtype)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layout", ["packed_kn", "packed_nk", "float4_kn"])
def test_every_layout_holds_the_same_experts(data: Path, layout: str, stacked: bool) -> None:
    path = data / "k31_tiny_mxfp4"
    parameters, config = load_parameters(path, layout=layout, stacked=stacked)
    assert_equal(actual_values(parameters, config), expected_values(path, config))
    experts = [v for d, v in declared_values(parameters, config) if d.parameter.quantizable]
    assert experts and all(isinstance(expert, MXFP4Tensor) and expert.layout == layout for expert in experts)
    assert isinstance(parameters.segments[-1][-1].mlp.experts.gate, PackedWeight)


def test_a_stack_is_smaller_than_its_layers(tiny: Path) -> None:
    stacked, config = load_parameters(tiny, stacked=True)
    plain, _ = load_parameters(tiny)
    assert len(stacked.segments) < config.num_layers == len(plain.segments)


@pytest.mark.usefixtures("x64")
def test_float64(data: Path) -> None:
    path = data / "kimi_linear_tiny"
    parameters, config = load_parameters(path, dtype=jnp.float64)
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters)} == {jnp.dtype("float64")}
    assert_equal(actual_values(parameters, config), expected_values(path, config))


def test_impossible_requests(data: Path) -> None:
    path = data / "kimi_linear_tiny"
    with pytest.raises(ValueError, match="jax_enable_x64"):
        load_parameters(path, dtype=jnp.float64)
    with pytest.raises(ValueError, match="int8"):
        load_parameters(path, dtype=jnp.int8)
    with pytest.raises(ValueError, match="layout is 'packed'"):
        load_parameters(path, layout="packed")


def test_single_file_and_given_configuration(data: Path, tmp_path: Path) -> None:
    path = data / "k3_tiny_mxfp4"
    whole, config = load_parameters(path)
    (tmp_path / "weights.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    # The configuration claims unquantised experts and another prefix: the tensors decide.
    claimed = config.override({"expert_quantization": None, "checkpoint_prefix": ""})
    single, found = load_parameters(tmp_path / "weights.safetensors", config=claimed)
    assert found == config
    assert_equal(actual_values(single, found), actual_values(whole, config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_parameters(tmp_path / "weights.safetensors")


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("name", ["k31_tiny", "kimi_linear_tiny"])
def test_prefix_is_found_in_the_names(folder: Callable, data: Path, name: str, prefix: str) -> None:
    copy = folder(name)
    copy.rename(lambda tensor: prefix + tensor.removeprefix("language_model."))
    parameters, config = load_parameters(copy.write())
    assert config.checkpoint_prefix == prefix
    original, original_config = load_parameters(data / name)
    assert_equal(actual_values(parameters, config), actual_values(original, original_config))


def test_other_spelling_of_the_mix_tensors(folder: Callable, data: Path) -> None:
    copy = folder("k31_tiny")
    count = len(copy.tensors)
    copy.rename(
        lambda name: name.replace("_res_norm.weight", "_res.norm_weight").replace(
            "_res_proj.weight", "_res.proj_weight"
        )
    )
    assert len(copy.tensors) == count and any("mlp_res.proj_weight" in name for name in copy.tensors)
    parameters, config = load_parameters(copy.write())
    assert_equal(actual_values(parameters, config), expected_values(data / "k31_tiny", config))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k3_tiny_bf16", (1, 1, 32, 1)), ("k3_tiny_bf16", (4,)), ("kimi_linear_tiny", (4,))],
)
def test_forms_of_A_log(folder: Callable, data: Path, name: str, shape: tuple[int, ...]) -> None:
    copy = folder(name)
    for tensor, (dtype, _, content) in list(copy.tensors.items()):
        if tensor.endswith("A_log"):
            copy.tensors[tensor] = (dtype, shape, content[: 4 * int(np.prod(shape))])
    parameters, config = load_parameters(copy.write())
    actual, heads = actual_values(parameters, config), config.kda.num_heads
    for key, expected in expected_values(data / name, config).items():
        if key.endswith("A_log"):
            np.testing.assert_array_equal(actual[key][:heads], expected[:heads])
            assert shape != (4,) or not actual[key][heads:].any()
        else:
            np.testing.assert_array_equal(actual[key], expected)


def test_scales_and_codes_under_their_own_types(folder: Callable, data: Path) -> None:
    copy = folder("k3_tiny_mxfp4")
    for name, (_, shape, content) in list(copy.tensors.items()):
        if name.endswith("_scale"):
            copy.tensors[name] = ("F8_E8M0", shape, content)
        elif name.endswith("_packed"):
            copy.tensors[name] = ("F4", (shape[0], 2 * shape[1]), content)
    parameters, config = load_parameters(copy.write())
    assert_equal(actual_values(parameters, config), expected_values(data / "k3_tiny_mxfp4", config))


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_other_float_widths(folder: Callable, data: Path, dtype: str) -> None:
    kind = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[dtype]
    copy = folder("kimi_linear_tiny")
    for name, (stored, shape, content) in list(copy.tensors.items()):
        if stored == "BF16":
            wide = content.view(ml_dtypes.bfloat16).astype(kind)
            copy.tensors[name] = (dtype, shape, wide.view(np.uint8))
    parameters, config = load_parameters(copy.write(), dtype=jnp.float32)
    actual, expected = actual_values(parameters, config), expected_values(data / "kimi_linear_tiny", config)
    for name, value in expected.items():
        # Half precision rounds what lies below its normal range.
        np.testing.assert_allclose(
            actual[name], value, rtol=0, atol=2.0**-25 if dtype == "F16" else 0, err_msg=name
        )


def test_layers_quantised_in_part(folder: Callable) -> None:
    copy = folder("k31_tiny_mxfp4")
    for name in [n for n in copy.tensors if ".layers.1." in n and n.endswith("_packed")]:
        base = name.removesuffix("_packed")
        (_, shape, packed), (_, _, scale) = copy.tensors.pop(name), copy.tensors.pop(f"{base}_scale")
        value = exact(packed.reshape(shape), scale.reshape(shape[0], -1)).astype(ml_dtypes.bfloat16)
        copy.tensors[base] = ("BF16", value.shape, value.reshape(-1).view(np.uint8))
    path = copy.write()
    plain, config = load_parameters(path)
    kinds = {
        d.layer: isinstance(v, MXFP4Tensor)
        for d, v in declared_values(plain, config)
        if d.parameter.quantizable
    }
    assert not kinds[1] and all(packed for layer, packed in kinds.items() if layer != 1)
    with pytest.raises(CheckpointError, match="share one stack") as caught:
        load_parameters(path, stacked=True)
    assert ".layers.1." in str(caught.value) and "_packed" in str(caught.value)


def test_vision_tensors_are_loaded_or_checked_and_skipped(
    folder: Callable, data: Path, tmp_path: Path
) -> None:
    copy = folder("k3_tiny_bf16")
    _, config = load_parameters(data / "k3_tiny_bf16")
    config = config.override(
        {"vision": VisionConfig(num_layers=1, hidden_size=24, intermediate_size=32, qkv_size=36)}
    )
    assert config.vision is not None
    names, rng = [], np.random.default_rng(0)
    for parameter in declare_vision(config.vision, config.hidden_size):
        shape = parameter.stored_shapes[0]
        value = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        copy.tensors[parameter.stored_name] = ("BF16", shape, value.reshape(-1).view(np.uint8))
        names.append(parameter.stored_name)
    path = copy.write()
    stored = load_file(path / "model.safetensors")
    parameters, found = load_parameters(path, config=config, vision=False)
    assert not parameters.has_vision
    assert_equal(actual_values(parameters, found), expected_values(data / "k3_tiny_bf16", found))
    for stacked in (False, True):
        progress = Progress(disable=True)
        parameters, found = load_parameters(path, config=config, stacked=stacked, progress=progress)
        assert parameters.has_vision and not parameters.text_only().has_vision
        assert progress.tasks[0].completed == sum(value.nbytes for value in stored.values())
        assert_equal(actual_values(parameters, found), expected_values(path, found, vision=True))
        save_parameters(tmp_path / str(stacked), parameters, found)
        again = load_file(tmp_path / str(stacked) / "model.safetensors")
        for name in names:
            np.testing.assert_array_equal(again[name].view(np.uint16), stored[name].view(np.uint16))
    convert(tmp_path / "True", tmp_path / "packed", to="mxfp4")
    packed = load_file(tmp_path / "packed" / "model.safetensors")
    for name in names:
        np.testing.assert_array_equal(packed[name].view(np.uint16), stored[name].view(np.uint16))
    both, _ = load_parameters(tmp_path / "packed")
    assert both.has_vision and quantize_experts(parameters, found).has_vision
    del copy.tensors[names[3]]
    with pytest.raises(CheckpointError, match=names[3].replace(".", r"\.")):
        load_parameters(copy.write(), config=config)
    parameters, found = load_parameters(
        data / "k3_tiny_bf16", config=config
    )  # text only: none of them is there
    assert not parameters.has_vision and found.vision == config.vision


def test_describe_lists_everything(tiny: Path) -> None:
    infos = describe(tiny)
    stored = load_file(tiny / "model.safetensors")
    assert {info.name: (info.shape, info.nbytes) for info in infos} == {
        name: (value.shape, value.nbytes) for name, value in stored.items()
    }
    assert {info.shard for info in infos} == {"model.safetensors"}


def test_progress_ends_at_the_number_of_bytes(tiny: Path) -> None:
    progress = Progress(disable=True)
    load_parameters(tiny, progress=progress)
    (task,) = progress.tasks
    assert task.completed == task.total == sum(info.nbytes for info in describe(tiny))


@pytest.mark.slow
def test_memory_beside_the_packed_bytes_is_bounded() -> None:
    """64 MB of packed experts: threads, header and mapped pages may take 32 MB more (a second copy would be
    64)."""
    script = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"
    for options in ([], ["--stacked"]):
        output = subprocess.run(
            [sys.executable, str(script), "--megabytes", "64", *options],
            check=True, capture_output=True, text=True, env=dict(os.environ),
        ).stdout  # fmt: skip
        result = json.loads(output)
        assert result["packed_bytes"] > 60e6
        assert result["peak_bytes_above_packed"] < 32e6, result
