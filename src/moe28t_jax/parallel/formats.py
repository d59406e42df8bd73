"""Memory layouts of arrays on a device, where the default one would cost a copy at every step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

# The compiler for TPU7x multiplies bfloat16 matrices out of tiles of 16 rows, and arguments come in tiles of 8. A
# matrix that stands alone is read as it is, but of a stack that a loop indexes the whole is copied before the loop.
_TILES = {"TPU7x": ((16, 128), (2, 1))}


_SMALL = 1 << 20
"""Elements of one matrix below which the compiler keeps to its own layout."""


def weight_formats(parameters: Any, shardings: Any) -> Any:
    """A tree like `parameters`: of each leaf its sharding, with a layout where the device needs another than its own.

    parameters: arrays or `jax.ShapeDtypeStruct`s. shardings: a tree of `jax.sharding.NamedSharding`s. The result goes
    to `jax.device_put`, or into `jax.ShapeDtypeStruct(sharding=...)` for compiling ahead of time: a program is compiled
    for the layouts that its arguments have.
    """
    return jax.tree.map(_format, parameters, shardings)


def _format(leaf: Any, sharding: Any) -> Any:
    device = next(iter(sharding.mesh.devices.flat))
    tiles = _TILES.get(getattr(device, "device_kind", ""))
    if tiles is None or len(leaf.shape) < 3 or leaf.dtype != jnp.bfloat16:
        return sharding
    *_, rows, columns = sharding.shard_shape(leaf.shape)
    if rows * columns < _SMALL or columns <= tiles[0][1]:
        return sharding
    return Format(Layout(tuple(range(len(leaf.shape))), tiles), sharding)
