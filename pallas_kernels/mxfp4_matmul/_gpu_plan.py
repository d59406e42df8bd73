"""What the GPU kernel of the grouped matmul is given: visits, rows in parts, and sizes of tiles. Plain JAX."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._typing import Array

COLUMNS = 128
"""Columns of the result per thread block, and the number inputs and outputs must be a multiple of."""
WARPGROUP_COLUMNS = 64
COMPUTE = COLUMNS // WARPGROUP_COLUMNS
"""Warpgroups that unpack and multiply."""
SWIZZLED_COLUMNS = 32
"""Columns of bfloat16 in the tiles of shared memory from which products into tensor memory are made."""
_ALIGNMENT = 8
# Of the 232448 bytes that a thread block can have, or half of the 233472 of a multiprocessor, with some left for
# barriers and alignment.
_SHARED_MEMORY = 220 * 1024
_HALF_SHARED_MEMORY = 110 * 1024
_FEWEST_STAGES, _MOST_STAGES = 3, 4


class Visits(NamedTuple):
    """Per visit, int32: the expert (-1 for rows of nobody), the first row fetched, the first and number of its own.

    Up to seven rows of the group before are fetched with a group's first tile, multiplied and not written: bulk
    copies into the tensor core's layout of shared memory start at multiples of eight rows.
    """

    experts: Array
    fetched: Array
    starts: Array
    counts: Array


class Tiles(NamedTuple):
    """Rows per visit, packed bytes per row of weights and step, fetched steps held."""

    rows: int
    bytes: int
    stages: int


def plan_visits(group_sizes_E: Array, rows: int, tile: int) -> Visits:
    """The visits that cover every row once: each group cut from its first row on, then the rows after the last.

    Their number is the largest that any group sizes need; the visits that are left over have no rows.
    """
    experts = group_sizes_E.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes_E.astype(jnp.int32), dtype=jnp.int32), jnp.int32(rows))
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    aligned = starts - starts % _ALIGNMENT
    tiles = jnp.where(ends > starts, (ends - aligned + (tile - 1)) // tile, 0)
    after = jnp.cumsum(tiles, dtype=jnp.int32)
    groups = min(experts + 1, rows)
    visit = jnp.arange((rows + (_ALIGNMENT - 2) * groups) // tile + groups, dtype=jnp.int32)
    group = jnp.searchsorted(after, visit, side="right", method="compare_all").astype(jnp.int32)
    real = group <= experts
    group = jnp.minimum(group, experts)
    fetched = jnp.where(real, aligned[group] + (visit - (after - tiles)[group]) * tile, 0)
    start = jnp.maximum(starts[group], fetched)
    count = jnp.where(real, jnp.minimum(ends[group], fetched + tile) - start, 0)
    return Visits(jnp.where(group < experts, group, -1), fetched, jnp.where(real, start, 0), count)


def split_rows(x_MK: Array, tile: int, exact: bool, deinterleave: bool) -> Array:
    """Rows as planes of bfloat16 [plane, M', length], zeros after the last row; M' is M + tile, rounded up to 8.

    float32 becomes three parts of eight bits that sum to it exactly (their exponents permitting: parts below
    2^-133 are lost), float16 two, bfloat16 and `exact` values one. With `deinterleave` the even columns come
    first, part by part, then the odd ones.
    """
    if exact or x_MK.dtype == jnp.bfloat16:
        parts = [x_MK.astype(jnp.bfloat16)]
    else:
        parts, rest = [], x_MK.astype(jnp.float32)
        for _ in range(2 if x_MK.dtype == jnp.float16 else 3):
            # Cut off, not rounded: every remainder is exact, and the largest values do not become infinite.
            bits = lax.bitcast_convert_type(rest, jnp.int32)
            part = lax.bitcast_convert_type((bits >> 16).astype(jnp.int16), jnp.bfloat16)
            # A NaN may have no bits in its upper half.
            parts.append(jnp.where(jnp.isfinite(rest), part, rest.astype(jnp.bfloat16)))
            cut = lax.bitcast_convert_type(bits & np.int32(-(2**16)), jnp.float32)
            rest = jnp.where(jnp.isfinite(rest), rest - cut, np.float32(0))
    after = tile + -x_MK.shape[0] % _ALIGNMENT
    planes = jnp.pad(jnp.stack(parts), ((0, 0), (0, after), (0, 0)))
    if not deinterleave:
        return planes
    pairs = planes.reshape(*planes.shape[:-1], planes.shape[-1] // 2, 2)
    return jnp.moveaxis(pairs, -1, 0).reshape(2 * planes.shape[0], planes.shape[1], -1)


def row_tile(rows: int, experts: int, largest: int) -> int:
    """Rows per visit, from the mean group: a visit costs a whole tile however few rows it has."""
    mean = rows / experts
    tile = 256 if mean >= 192 else 128 if mean >= 96 else 64 if mean >= 32 else 32 if mean >= 12 else 16
    return min(tile, largest)


def choose_tiles(
    rows: int, experts: int, planes: int, itemsize: int, count: int, transposed: bool, tensor_memory: bool
) -> Tiles:
    """Sizes for `planes` planes of rows, results of `itemsize` bytes, and `count` weights.

    Fetched rows and bytes, unpacked weights (two steps of them) and the result share a thread block's memory;
    accumulators share 128 registers of a thread, those in tensor memory in the end too. Where few rows are multiplied
    and accumulators are small, two thread blocks share a multiprocessor if they can, so that one fetches while the
    other unpacks.
    """
    parities = 1 if transposed else 2
    parts = planes // parities
    tile = row_tile(rows, experts, (256 // count) if parts == 1 else 64)
    if tensor_memory:
        # Products with 64 rows of weights leave two halves of their columns in tensor memory, each whole tiles.
        tile = max(tile, 2 * SWIZZLED_COLUMNS)
    while True:
        width = 64 if transposed or (tile <= 64 and parts * count == 1) else 32
        stage = planes * tile * width * 2 + count * (64 if transposed else COLUMNS) * width
        unpacked = 2 * COMPUTE * count * parities * 64 * width * 2
        fixed = unpacked + tile * COLUMNS * itemsize
        halved = (_HALF_SHARED_MEMORY - fixed) // stage if tile * count <= 32 else 0
        stages = halved if halved >= _FEWEST_STAGES else (_SHARED_MEMORY - fixed) // stage
        if stages >= _FEWEST_STAGES:
            return Tiles(tile, width, min(stages, _MOST_STAGES))
        tile //= 2
