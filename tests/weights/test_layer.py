"""Loading one layer: the values of the whole, and nothing read but its own tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.progress import Progress

from moe28t_jax.config import declare
from moe28t_jax.weights import CheckpointError, load_layer, load_parameters, save_parameters
from moe28t_jax.weights.checkpoint import INDEX_FILE
from moe28t_jax.weights.safetensors import SafetensorsFile, SafetensorsWriter


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, value), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert value.dtype == other.dtype, path
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other), err_msg=str(path))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_layer_equals_that_of_the_whole(tiny: Path, dtype: Any) -> None:
    parameters, config = load_parameters(tiny, dtype=dtype)
    layers = dict(parameters.layers(config))
    assert list(layers) == list(range(config.num_layers))
    for layer, expected in layers.items():
        assert_same(load_layer(tiny, layer, dtype=dtype), expected)


def test_the_layout_is_taken(data: Path) -> None:
    source = data / "k31_tiny_mxfp4"
    parameters, config = load_parameters(source, layout="packed_nk")
    layer = config.mlp_kinds.index("moe")
    group = load_layer(source, layer, layout="packed_nk")
    assert group.mlp.experts["gate"].layout == "packed_nk"
    assert_same(group, dict(parameters.layers(config))[layer])


@pytest.fixture
def sharded(data: Path, tmp_path: Path) -> Path:
    """A tiny checkpoint in many shards whose borders lie inside layers."""
    parameters, config = load_parameters(data / "k31_tiny_mxfp4")
    save_parameters(tmp_path / "sharded", parameters, config, max_shard_bytes=200_000)
    return tmp_path / "sharded"


def shards_of(folder: Path, layer: int) -> set[str]:
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return {shard for name, shard in weight_map.items() if f"model.layers.{layer}." in name}


def test_other_shards_may_be_absent_or_damaged(sharded: Path) -> None:
    parameters, config = load_parameters(sharded)
    layer = config.num_layers // 2
    expected = dict(parameters.layers(config))[layer]
    needed = shards_of(sharded, layer)
    others = sorted(path for path in sharded.glob("*.safetensors") if path.name not in needed)
    assert needed and len(others) > 2
    others[0].write_bytes(b"damaged")
    for path in others[1:]:
        path.unlink()
    assert_same(load_layer(sharded, layer), expected)
    with pytest.raises(CheckpointError, match="names shards that are not there"):
        load_parameters(sharded)


def test_only_its_own_tensors_are_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = load_parameters(sharded)
    layer = config.num_layers // 2
    own = f"model.layers.{layer}."
    viewed: dict[str, int] = {}
    opened: set[str] = set()
    view, init = SafetensorsFile.view, SafetensorsFile.__init__

    def counted_view(self: SafetensorsFile, name: str) -> np.ndarray:
        viewed[name] = self.entries[name].nbytes
        return view(self, name)

    def counted_init(self: SafetensorsFile, path: str | Path) -> None:
        opened.add(Path(path).name)
        init(self, path)

    monkeypatch.setattr(SafetensorsFile, "view", counted_view)
    monkeypatch.setattr(SafetensorsFile, "__init__", counted_init)
    progress = Progress(disable=True)
    load_layer(sharded, layer, progress=progress)
    stored = {name for name in json.loads((sharded / INDEX_FILE).read_text())["weight_map"] if own in name}
    assert set(viewed) == stored
    assert opened == shards_of(sharded, layer)
    [task] = progress.tasks
    assert task.completed == task.total == sum(viewed.values())


def test_damage_beside_the_layer_in_the_same_shard_is_not_seen(folder: Callable[[str], Any]) -> None:
    """The scale byte 255 is NaN, which loading refuses: a loader that read its neighbours would stumble."""
    copy = folder("k31_tiny_mxfp4")
    scales = [name for name in copy.tensors if name.endswith("_scale")]
    victim = scales[0]
    damaged = int(victim.split("model.layers.")[1].split(".")[0])
    copy.tensors[victim][2][:] = 255
    path = copy.write()
    spared = next(
        layer
        for layer in range(20)
        if layer != damaged and any(f"layers.{layer}." in name for name in scales)
    )
    load_layer(path, spared)
    with pytest.raises(CheckpointError, match="NaN"):
        load_layer(path, damaged)


def test_layer_1_is_not_mistaken_for_layer_10(sharded: Path) -> None:
    """Names of layer 10 begin as those of layer 1 do."""
    weight_map = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    renamed = next(name for name in weight_map if "model.layers.1." in name)
    other = renamed.replace("model.layers.1.", "model.layers.10.")
    shard = "model-ten.safetensors"
    with SafetensorsWriter(sharded / shard, {other: ("U8", (1,))}) as writer:
        writer.write(other, np.zeros(1, np.uint8))
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map | {other: shard}}))
    (sharded / shard).unlink()
    load_layer(sharded, 1)


@pytest.mark.parametrize("layer", [-1, 1000])
def test_a_layer_that_does_not_exist(tiny: Path, layer: int) -> None:
    with pytest.raises(ValueError, match=f"The layer is {layer}, but this configuration has the layers 0 to"):
        load_layer(tiny, layer)


def test_arguments_are_checked_as_for_the_whole(data: Path) -> None:
    with pytest.raises(ValueError, match="floating-point"):
        load_layer(data / "k31_tiny", 0, dtype=jnp.int8)
    with pytest.raises(ValueError, match="The layout is 'kn'"):
        load_layer(data / "k31_tiny", 0, layout="kn")


def test_a_missing_shard_of_the_layer_is_named(sharded: Path) -> None:
    absent = min(shards_of(sharded, 1))
    (sharded / absent).unlink()
    with pytest.raises(CheckpointError, match=f"not there: '?{absent}"):
        load_layer(sharded, 1)


def test_missing_and_unknown_tensors_are_named(folder: Callable[[str], Any], tmp_path: Path) -> None:
    copy = folder("k31_tiny")
    name = next(declared.stored_name for declared in declare(load_parameters(copy.write())[1], vision=False))
    dtype, shape, content = copy.tensors.pop(name)
    path = copy.write()
    with pytest.raises(CheckpointError, match=r"lacks the tensor .*input_layernorm.* of layer 0"):
        load_layer(path, 0)
    load_layer(path, 1)
    copy.tensors[name] = (dtype, shape, content)
    copy.tensors[name.replace("input_layernorm", "novel_norm")] = (dtype, shape, content)
    path = copy.write()
    with pytest.raises(CheckpointError, match="novel_norm"):
        load_layer(path, 0)
    copy.tensors.pop(name.replace("input_layernorm", "novel_norm"))
    copy.tensors[name] = (dtype, (1, *shape), content)
    with pytest.raises(CheckpointError, match="has shape"):
        load_layer(copy.write(), 0)
