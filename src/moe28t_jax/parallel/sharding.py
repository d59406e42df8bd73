"""Where parameters, caches and inputs lie on a mesh, read from the parameter declaration and the names of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from moe28t_jax.config import ModelConfig, Parameter, declare_globals, declare_layer, declare_vision, segments
from moe28t_jax.parallel.rules import batch_layout, partition

_CACHE_AXES: Mapping[str, tuple[str | None, ...]] = {
    "lengths_B": ("batch",),
    "state_BHKV": ("batch", "kda_heads", None, None),
    "window_BWC": ("batch", None, None, "kda_heads", None),
    "latent_BSC": ("batch", "token", None),
    "index_key_BSD": ("batch", "token", None),
}
"""Logical axes of a cache's arrays; stacked layers have one more in front."""

_INPUT_AXES: Mapping[str, tuple[str | None, ...]] = {
    "token_ids": ("batch", "token"),
    "lengths": ("batch",),
    "image_features": (None, None),
}


@lru_cache(maxsize=8)
def _declared(config: ModelConfig) -> Mapping[tuple[int | None, str], Parameter]:
    """Every parameter by its layer (None for a global one) and name."""
    found: dict[tuple[int | None, str], Parameter] = {}
    for layer in range(config.num_layers):
        found |= {(layer, parameter.name): parameter for parameter in declare_layer(config, layer)}
    vision = () if config.vision is None else declare_vision(config.vision, config.hidden_size)
    found |= {(None, parameter.name): parameter for parameter in (*declare_globals(config), *vision)}
    return found


def _keys(path: tuple[Any, ...]) -> list[Any]:
    return [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path]


def parameter_shardings(parameters: Any, config: ModelConfig, mesh: Any, masters: bool = False) -> Any:
    """A tree like `parameters` of the sharding of every leaf.

    parameters: arrays or `jax.ShapeDtypeStruct`s in the structure of `moe28t_jax.model.Parameters`, stacked or not,
    experts packed or not; or a part of it with the paths of the whole.
    masters: for what training holds: matrices are divided further, over the devices that would repeat them
    (`divide_further`), and are brought together where a layer is computed.
    Raises ValueError where the mesh does not divide an axis (see `partition`).
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(parameters)
    numbers = {key[1] for key in map(_keys, (path for path, _ in paths)) if key[0] == "segments"}
    stacked = bool(numbers) and max(numbers) + 1 != config.num_layers
    if mesh.shape["stage"] > 1 and not stacked:
        raise ValueError(
            f"A mesh with {mesh.shape['stage']} pipeline stages needs stacked layers, and these are one by one; load "
            "them stacked, or take a mesh with stage 1."
        )
    plan = segments(config, stacked)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        layer = None
        if _keys(path[:1]) == ["segments"]:
            _, segment, place = _keys(path[:3])
            layer, path = plan[segment].layer(0, place), path[3:]
        return parameter_sharding(path, leaf, layer, config, mesh, masters)

    return jax.tree_util.tree_unflatten(structure, [place(path, leaf) for path, leaf in paths])


def declared_at(path: tuple[Any, ...], layer: int | None, config: ModelConfig) -> Parameter:
    """The declaration of a leaf of one layer's parameters (of the global ones with `layer` None), by its path there."""
    # Below the name follow the variable's value and the two arrays of a packed weight.
    name = ".".join(str(key) for key in _keys(path) if key not in ("value", "packed", "scale_bytes"))
    return _declared(config)[layer, name]


def parameter_sharding(
    path: tuple[Any, ...], leaf: Any, layer: int | None, config: ModelConfig, mesh: Any, masters: bool = False
) -> NamedSharding:
    """As `parameter_shardings`, of the leaf that `declared_at` finds; stacked layers have an axis more."""
    parameter = declared_at(path, layer, config)
    stacks = len(leaf.shape) - len(parameter.axes)
    spec = partition(("layer",) * stacks + parameter.axes, leaf.shape, mesh, parameter.name)
    return NamedSharding(mesh, divide_further(spec, leaf.shape, mesh, stacks) if masters else spec)


_LEAST_PIECE = 8
"""Rows or columns of a matrix that a device holds at least, the height of a tile: smaller pieces would be padded."""


def divide_further(spec: PartitionSpec, shape: Sequence[int], mesh: Any, first: int = 0) -> PartitionSpec:
    """The partition with its last undivided axis (from `first` on) that is large enough divided over all mesh axes of
    rows and tokens that it leaves free: no device repeats what another holds. Vectors stay as they are."""
    entries = list(spec)
    used = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))}
    free = tuple(axis for axis in ("data", "expert", "context") if axis not in used and mesh.shape[axis] > 1)
    pieces = prod(mesh.shape[axis] for axis in free)
    if len(shape) - first < 2 or pieces == 1:
        return spec
    for axis in reversed(range(first, len(shape))):
        if entries[axis] is None and shape[axis] % pieces == 0 and shape[axis] // pieces >= _LEAST_PIECE:
            single, *more = free
            entries[axis] = free if more else single
            return PartitionSpec(*entries)
    return spec


def cache_shardings(cache: Any, mesh: Any) -> Any:
    """A tree like `cache` (`moe28t_jax.model.Cache` of arrays or `jax.ShapeDtypeStruct`s) of shardings.

    Rows lie over `data` x `expert`, or positions over `expert` x `context` where the rows are too few (`batch_layout`).
    """
    where = batch_layout(cache.lengths_B.shape[0], mesh)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = _keys(path)[-1]
        axes = _CACHE_AXES[name]
        axes = ("layer",) * (len(leaf.shape) - len(axes)) + axes
        return NamedSharding(mesh, partition(axes, leaf.shape, mesh, name, where))

    return jax.tree_util.tree_map_with_path(place, cache)


def input_shardings(inputs: Any, mesh: Any) -> Any:
    """A tree like `inputs` (`moe28t_jax.model.Inputs`) of shardings; tokens are whole where they are few."""
    batch, count = inputs.token_ids.shape
    where = batch_layout(batch, mesh)
    assert where is not None

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = _keys(path)[-1]
        axes = _INPUT_AXES[name]
        if not where.token_axes(count):
            axes = tuple(None if axis == "token" else axis for axis in axes)
        return NamedSharding(mesh, partition(axes, leaf.shape, mesh, name, where))

    return jax.tree_util.tree_map_with_path(place, inputs)


def replicated(mesh: Any) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def shard_abstract(tree: Any, shardings: Any) -> Any:
    """`jax.ShapeDtypeStruct`s of `tree` with the shardings, for lowering without any memory."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def place_parameters(parameters: Any, config: ModelConfig, mesh: Any) -> Any:
    """The same parameters, each array on the devices that hold a part of it."""
    return jax.device_put(parameters, parameter_shardings(parameters, config, mesh))
