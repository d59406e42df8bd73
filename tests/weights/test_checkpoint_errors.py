"""Every fault of a checkpoint is one sentence that names it, and never a half-read model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe28t_jax.weights import Checkpoint, CheckpointError, describe, load_parameters

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight"
NORM = "language_model.model.norm.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


def refused(path: Path, *words: str, **options: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_parameters(path, **options)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize("name", [NORM, EXPERT + "_packed", EXPERT + "_scale", A_LOG])
def test_missing_tensor(folder: Callable, name: str) -> None:
    copy = folder()
    del copy.tensors[name]
    refused(copy.write(), name, "lacks")


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.0.self_attn.q_proj.bias",
        "other",
        EXPERT.replace("experts.2", "experts.8"),
    ],
)
def test_extra_tensor(folder: Callable, name: str) -> None:
    copy = folder()
    copy.tensors[name] = ("BF16", (2,), np.zeros(4, np.uint8))
    refused(copy.write(), name, "does not know")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        (NORM, "BF16", (63,)),
        ("language_model.lm_head.weight", "BF16", (64, 256)),
        (EXPERT + "_packed", "U8", (32, 32)),
        (EXPERT + "_scale", "U8", (1, 64)),
    ],
)
def test_misshaped_tensor(folder: Callable, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    copy = folder()
    size = int(np.prod(shape)) * (2 if dtype == "BF16" else 1)
    copy.tensors[name] = (dtype, shape, np.zeros(size, np.uint8))
    refused(copy.write(), name, str(list(shape)), str(list(Checkpoint(copy.path).entry(name).shape)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (NORM, "I16"),
        (NORM, "U16"),
        (A_LOG, "I32"),
        (EXPERT + "_packed", "I8"),
        (EXPERT + "_scale", "F8_E4M3"),
    ],
)
def test_wrong_dtype(folder: Callable, name: str, dtype: str) -> None:
    copy = folder()
    _, shape, content = copy.tensors[name]
    copy.tensors[name] = (dtype, shape, content)
    refused(copy.write(), name, dtype, "expected")


@pytest.mark.parametrize("layout", ["packed_kn", "packed_nk", "float4_kn"])
def test_nan_scale_byte(folder: Callable, layout: str) -> None:
    copy = folder()
    name = "language_model.model.layers.3.block_sparse_moe.experts.5.w2.weight_scale"
    dtype, shape, content = copy.tensors[name]
    content = content.copy()
    content[2 * 7 + 1] = 255  # [32, 2]: output 7, block 1
    copy.tensors[name] = (dtype, shape, content)
    refused(copy.write(), name, "output 7, block 1", "255", layout=layout)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 6), ("vocab_size", 512), ("num_experts", 4), ("attn_res_block_size", None)],
)
def test_config_that_contradicts_the_tensors(folder: Callable, field: str, value: int | None) -> None:
    def change(config: dict[str, Any]) -> None:
        text = config["text_config"]
        text[field] = value
        if field == "num_hidden_layers":
            text["linear_attn_config"]["full_attn_layers"] = [4]

    copy = folder()
    copy.edit_config(change)
    refused(copy.write(), "config.json")


def test_config_absent_or_broken(folder: Callable) -> None:
    copy = folder()
    copy.write()
    (copy.path / "config.json").write_text("{")
    refused(copy.path, "config.json", "not valid JSON")
    (copy.path / "config.json").write_text("[]")
    refused(copy.path, "config.json")
    (copy.path / "config.json").unlink()
    refused(copy.path, "config.json", "cannot be read")


def test_experts_packed_in_part(folder: Callable) -> None:
    copy = folder()
    del copy.tensors[EXPERT + "_packed"], copy.tensors[EXPERT + "_scale"]
    copy.tensors[EXPERT] = ("BF16", (64, 32), np.zeros(64 * 32 * 2, np.uint8))
    refused(copy.write(), EXPERT, EXPERT.replace("experts.2", "experts.0") + "_packed")


def test_tensor_stored_packed_and_plain(folder: Callable) -> None:
    copy = folder()
    copy.tensors[EXPERT] = ("BF16", (64, 32), np.zeros(64 * 32 * 2, np.uint8))
    refused(copy.write(), EXPERT, EXPERT + "_packed", "twice")


def test_both_spellings_of_one_tensor(folder: Callable) -> None:
    copy = folder()
    name = "language_model.model.output_attn_res_norm.weight"
    copy.tensors["language_model.model.output_attn_res.norm_weight"] = copy.tensors[name]
    refused(copy.write(), name, "twice")


def test_vision_tensors_of_a_model_without_vision(folder: Callable) -> None:
    copy = folder()
    copy.tensors["vision_tower.patch_embed.proj.weight"] = ("BF16", (1,), np.zeros(2, np.uint8))
    refused(copy.write(), "vision_tower.patch_embed.proj.weight")


def test_absent_sources(tmp_path: Path, folder: Callable) -> None:
    refused(tmp_path / "nothing", "no such folder")
    (tmp_path / "file.bin").write_bytes(b"")
    refused(tmp_path / "file.bin", "neither a folder nor")
    refused(folder().path, "neither model.safetensors nor")


def test_index_faults(folder: Callable) -> None:
    copy = folder()
    path = copy.write_shards(3)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    loaded, _ = load_parameters(path)
    assert len(jax.tree.leaves(loaded)) > 100
    name = next(iter(good))

    (path / "model-00002-of-00003.safetensors").rename(path / "moved")
    refused(path, "model-00002-of-00003.safetensors", "not there")
    (path / "moved").rename(path / "model-00002-of-00003.safetensors")

    copy.write_index(good | {name: "model-00002-of-00003.safetensors"})
    refused(path, name, "model-00002-of-00003.safetensors", "does not hold it")
    copy.write_index(good | {"ghost": "model-00001-of-00003.safetensors"})
    refused(path, "ghost", "does not hold it")
    copy.write_index({key: value for key, value in good.items() if key != name})
    refused(path, name, "does not list")
    for bad in ("../config.json", "/etc/x.safetensors", "a/b.safetensors", 3):
        copy.write_index(good | {name: bad})
        refused(path, name, "names no shard file")
    for bad in ({}, None, [1]):
        copy.write_index(bad)
        refused(path, "weight_map")
    index.write_text("{")
    refused(path, "not valid JSON")
    index.unlink()
    refused(path, "which only an index can join")
    copy.write_index(good)
    copy.write()
    refused(path, "both model.safetensors and")


def test_tensor_in_two_shards(folder: Callable) -> None:
    copy = folder()
    path = copy.write_shards(2)
    (path / "model-00002-of-00002.safetensors").write_bytes(
        (path / "model-00001-of-00002.safetensors").read_bytes()
    )
    refused(path, "stored twice", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_a_truncated_shard_is_named_by_file_and_tensor(folder: Callable) -> None:
    path = folder().write_shards(2)
    shard = path / "model-00002-of-00002.safetensors"
    last = [info.name for info in describe(path) if info.shard == shard.name][-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(path, shard.name, last, "truncated")


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[np.ndarray]]:
    """A folder to damage again and again, its file, and what it should load as."""
    source = Path(__file__).parents[1] / "golden" / "data" / "kimi_linear_tiny"
    path = tmp_path_factory.mktemp("victim")
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    content = (source / "model.safetensors").read_bytes()
    parameters, _ = load_parameters(source)
    return path, content, [np.asarray(leaf) for leaf in jax.tree.leaves(parameters)]


@settings(max_examples=25)
@given(st.data())
def test_any_cut_is_refused(victim: tuple[Path, bytes, list[np.ndarray]], data: st.DataObject) -> None:
    path, content, _ = victim
    header = 8 + int.from_bytes(content[:8], "little")
    limit = data.draw(st.sampled_from([16, header, len(content) - 1]))
    cut = data.draw(st.integers(0, limit))
    (path / "model.safetensors").write_bytes(content[:cut])
    refused(path, "model.safetensors")


@settings(max_examples=25)
@given(st.data())
def test_a_changed_header_byte_is_refused_or_harmless(
    victim: tuple[Path, bytes, list[np.ndarray]], data: st.DataObject
) -> None:
    path, content, expected = victim
    header = 8 + int.from_bytes(content[:8], "little")
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 2))):
        changed[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (path / "model.safetensors").write_bytes(bytes(changed))
    try:
        parameters, _ = load_parameters(path)
    except CheckpointError:
        return
    for leaf, value in zip(jax.tree.leaves(parameters), expected, strict=True):
        assert leaf.tobytes() == value.tobytes()


def test_a_refused_checkpoint_is_left_as_it_was(folder: Callable, snapshot: Callable) -> None:
    copy = folder()
    del copy.tensors[NORM]
    before = snapshot(copy.write())
    refused(copy.path, NORM)
    assert snapshot(copy.path) == before
