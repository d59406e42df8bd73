"""The declared inventory against real checkpoints, and the declaration against itself."""

import json
import struct
from math import prod
from pathlib import Path

import pytest

from moe28t_jax.config import PRESETS, ModelConfig, declare

DATA = Path(__file__).parent.parent / "golden" / "data"
TINY = ("k3_tiny_bf16", "k3_tiny_mxfp4", "k31_tiny", "k31_tiny_mxfp4", "kimi_linear_tiny")
DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of a safetensors file."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(size))
    return {n: (e["dtype"], tuple(e["shape"])) for n, e in entries.items() if n != "__metadata__"}


def inventory(config: ModelConfig) -> dict[str, tuple[str, tuple[tuple[int, ...], ...]]]:
    """Stored name -> (dtype, accepted shapes) of every tensor that the declaration expects."""
    expected = {}
    for declared in declare(config):
        parameter = declared.parameter
        for expert in range(parameter.num_stored):
            name = declared.stored_name.format(expert=expert)
            if parameter.quantizable and config.expert_quantization == "mxfp4":
                ((rows, columns),) = parameter.stored_shapes
                expected[f"{name}_packed"] = ("U8", ((rows, columns // 2),))
                expected[f"{name}_scale"] = ("U8", ((rows, columns // 32),))
            else:
                expected[name] = (DTYPES[parameter.dtype], parameter.stored_shapes)
    return expected


@pytest.mark.golden
@pytest.mark.parametrize("name", TINY)
def test_inventory_of_checkpoints(name):
    config = ModelConfig.from_hf(DATA / name)
    stored, expected = header(DATA / name / "model.safetensors"), inventory(config)
    assert sorted(stored) == sorted(expected)
    for tensor, (dtype, shape) in stored.items():
        assert shape in expected[tensor][1], tensor
        # These files store some parameters in bfloat16 that the published ones store in float32.
        assert dtype == expected[tensor][0] or (dtype, expected[tensor][0]) == ("BF16", "F32"), tensor
    assert len(stored) == config.parameter_count().stored_tensors


@pytest.mark.golden
@pytest.mark.parametrize("name", TINY)
def test_counts_of_checkpoints(name):
    config = ModelConfig.from_hf(DATA / name)
    stored = header(DATA / name / "model.safetensors")
    sizes = {"BF16": 2, "F32": 4, "U8": 1}
    expected = inventory(config)
    total = sum(sizes[expected[tensor][0]] * prod(shape) for tensor, (_, shape) in stored.items())
    assert config.parameter_count().stored_bytes == total


@pytest.mark.parametrize("name", PRESETS)
def test_declarations_are_consistent(name):
    config = ModelConfig.preset(name)
    names, places = set(), set()
    for declared in declare(config):
        parameter = declared.parameter
        place = (declared.layer, parameter.name)
        assert place not in places
        places.add(place)
        for stored in (declared.stored_name, *declared.stored_aliases):
            assert stored not in names
            names.add(stored)
        assert len(parameter.axes) == len(parameter.shape)
        canonical = parameter.stored_shapes[0]
        assert prod(canonical) * parameter.num_stored == parameter.size
        if parameter.transform == "transpose":
            matrix = (canonical[0], prod(canonical[1:]))
            assert parameter.shape[-2:] == matrix[::-1]
        if parameter.quantizable:
            assert parameter.group == "routed_experts"
        is_vision = parameter.group in ("vision", "projector")
        assert (
            declared.stored_name.startswith(config.checkpoint_prefix) != is_vision
            or not config.checkpoint_prefix
        )


def test_vision_can_be_left_out():
    config = ModelConfig.preset("moe28t")
    text = list(declare(config, vision=False))
    everything = list(declare(config))
    assert everything[: len(text)] == text
    assert {d.parameter.group for d in everything[len(text) :]} == {"vision", "projector"}


def test_public_names_of_kimi_k3():
    stored = {d.stored_name: d.parameter.stored_shapes[0] for d in declare(ModelConfig.preset("kimi-k3"))}
    layer = "language_model.model.layers.92."
    assert stored["language_model.model.embed_tokens.weight"] == (163840, 7168)
    assert stored["language_model.model.output_attn_res_proj.weight"] == (1, 7168)
    assert stored["language_model.model.layers.0.mlp.down_proj.weight"] == (7168, 33792)
    assert stored["language_model.model.layers.0.self_attn.A_log"] == (128,)
    assert stored["language_model.model.layers.0.self_attn.q_conv1d.weight"] == (12288, 1, 4)
    assert stored[f"{layer}self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert stored[layer + "block_sparse_moe.experts.{expert}.w2.weight"] == (3584, 3072)
    assert stored[f"{layer}block_sparse_moe.gate.e_score_correction_bias"] == (896,)
    assert stored["vision_tower.encoder.blocks.26.wqkv.weight"] == (4608, 1024)
    assert stored["mm_projector.proj.2.weight"] == (7168, 4096)
