"""Sorting rows by a key, and moving them between the two orders with gathers alone, forward and backward.

A *parent* (a token, or a copy of one) has a fixed number of *entries*, each of which is one *child* row (a copy, or a
row of an expert) or nothing. Children are sorted by their key; a parent's row is spread over its children, and the
children's rows are summed into their parents. Each is the transpose of the other, and both read: a scatter would add
in no fixed order on a GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Up to here all children of a parent are read at once; beyond, one child per parent at a time.
_ELEMENTS_AT_ONCE = 2**23

# Up to this many entries are sorted; more are counted. XLA's sort for TPUs takes a second or two to compile up to here,
# and a sixth of a minute for a quarter of a million.
_SORTED_AT_MOST = 2**14

# Entries that are counted together, and starts that are searched together: the lanes of a TPU's register.
_BLOCK = 128


class RowMap(NamedTuple):
    """The correspondence of C parents with S entries each and M children.

    entry_M: parent * S + entry of each child, C * S for a row that is no child. child_CS: the child of each entry, M
    where there is none.
    """

    entry_M: Int[Array, " M"]
    child_CS: Int[Array, "C S"]


class Sorted(NamedTuple):
    """Children in the order of their keys, how many each key has, and whether all of them found a row."""

    rows: RowMap
    sizes_G: Int[Array, " G"]
    fits: Bool[Array, ""]


def sort_entries(key_CS: Int[Array, "C S"], num_keys: int, capacity: int) -> Sorted:
    """Sort the entries by key, keeping the order of parents within one key; `num_keys` marks an entry without child.

    `capacity` is the number of rows M; children beyond it are lost, and `fits` says whether there are any.
    """
    count = key_CS.size
    key_F = key_CS.reshape(-1)
    order = _by_sorting if count <= _SORTED_AT_MOST else _by_counting
    entry_M, place_F, sizes_G = order(key_F, num_keys, capacity)
    total = jnp.sum(sizes_G, dtype=jnp.int32)
    entry_M = jnp.where(jnp.arange(capacity, dtype=jnp.int32) < total, entry_M, count)
    place_CS = place_F.reshape(key_CS.shape)
    child_CS = jnp.where(key_CS < num_keys, jnp.minimum(place_CS, capacity), capacity)
    return Sorted(RowMap(entry_M, child_CS), sizes_G, total <= capacity)


def _by_sorting(
    key_F: Int[Array, " F"], num_keys: int, capacity: int
) -> tuple[Int[Array, " M"], Int[Array, " F"], Int[Array, " G"]]:
    """The entry at each place of the sorted order, the place of each entry, and how many entries each key has.

    What is behind the last entry that has a key has no meaning, nor has the place of an entry without one.
    """
    count = key_F.shape[0]
    order_F = jnp.argsort(key_F, stable=True).astype(jnp.int32)
    sizes_G = jnp.sum(key_F[:, None] == jnp.arange(num_keys, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    entry_M = jnp.pad(order_F, (0, max(capacity - count, 0)), constant_values=count)[:capacity]
    return entry_M, jnp.argsort(order_F).astype(jnp.int32), sizes_G


def _by_counting(
    key_F: Int[Array, " F"], num_keys: int, capacity: int
) -> tuple[Int[Array, " M"], Int[Array, " F"], Int[Array, " G"]]:
    """`_by_sorting` by how many entries precede each, in its block and before it: sums of comparisons, without a sort
    and without a scatter."""
    count = key_F.shape[0]
    blocks = -(-count // _BLOCK)
    key_NB = jnp.pad(key_F.astype(jnp.int32), (0, blocks * _BLOCK - count), constant_values=num_keys).reshape(
        blocks, _BLOCK
    )
    lane_B = jnp.arange(_BLOCK, dtype=jnp.int32)
    earlier_BB = lane_B[None, :] < lane_B[:, None]
    within_NB = jnp.sum((key_NB[:, :, None] == key_NB[:, None, :]) & earlier_BB, axis=2, dtype=jnp.int32)
    key_GNB = jnp.arange(num_keys, dtype=jnp.int32)[:, None, None]
    counts_GN = jnp.sum(key_NB == key_GNB, axis=2, dtype=jnp.int32)
    # Where the entries of each key and block begin in the sorted order: rising, since keys come first.
    starts_P = _exclusive_sum(counts_GN.reshape(-1))
    starts_GN = starts_P.reshape(counts_GN.shape)
    # One term of the sum is not zero.
    before_NB = jnp.sum(jnp.where(key_NB == key_GNB, starts_GN[:, :, None], 0), axis=0, dtype=jnp.int32)
    place_F = (before_NB + within_NB).reshape(-1)[:count]

    # The other way: the last key and block that begin at or before each place; an empty one never is the last.
    place_M = jnp.arange(capacity, dtype=jnp.int32)
    found_M, start_M = _search(starts_P, place_M)
    group_M, block_M = found_M // blocks, found_M % blocks
    # In its block, an entry is named by its key and how many of the key precede it.
    name_MB = (key_NB * _BLOCK + within_NB)[block_M]
    wanted_M = group_M * _BLOCK + place_M - start_M
    lane_M = jnp.sum(jnp.where(name_MB == wanted_M[:, None], lane_B, 0), axis=1, dtype=jnp.int32)
    return block_M * _BLOCK + lane_M, place_F, jnp.sum(counts_GN, axis=1, dtype=jnp.int32)


def _exclusive_sum(counts_P: Int[Array, " P"]) -> Int[Array, " P"]:
    """Sums of the elements before each, in two levels: a sum over all at once takes long to compile."""
    count = counts_P.shape[0]
    rows = -(-count // _BLOCK)
    counts_RB = jnp.pad(counts_P, (0, rows * _BLOCK - count)).reshape(rows, _BLOCK)
    up_to_RB = jnp.cumsum(counts_RB, axis=1, dtype=jnp.int32)
    before_R = jnp.cumsum(up_to_RB[:, -1], dtype=jnp.int32) - up_to_RB[:, -1]
    return (before_R[:, None] + up_to_RB - counts_RB).reshape(-1)[:count]


def _search(
    starts_P: Int[Array, " P"], place_M: Int[Array, " M"]
) -> tuple[Int[Array, " M"], Int[Array, " M"]]:
    """Number and value of the last of the rising `starts`, of which the first is 0, that is not above each place; in
    two levels, of which each compares with all at once."""
    count = starts_P.shape[0]
    rows = -(-count // _BLOCK)
    above = jnp.iinfo(jnp.int32).max
    starts_RB = jnp.pad(starts_P, (0, rows * _BLOCK - count), constant_values=above).reshape(rows, _BLOCK)
    row_M = jnp.sum(starts_RB[:, 0] <= place_M[:, None], axis=1, dtype=jnp.int32) - 1
    starts_MB = starts_RB[row_M]
    below_MB = starts_MB <= place_M[:, None]
    lane_M = jnp.sum(below_MB, axis=1, dtype=jnp.int32) - 1
    start_M = jnp.max(jnp.where(below_MB, starts_MB, 0), axis=1)
    return row_M * _BLOCK + lane_M, start_M


def take_rows(values_RX: Float[Array, "R *X"], index_M: Int[Array, " M"]) -> Float[Array, "M *X"]:
    """values[index], zero where the index is past the end."""
    return values_RX.at[index_M].get(mode="fill", fill_value=0)


@jax.custom_vjp
def take_entries(values_CS: Float[Array, "C S"], rows: RowMap) -> Float[Array, " M"]:
    """Each child's own value among those of its parent's entries, 0 where there is no child."""
    return take_rows(values_CS.reshape(-1), rows.entry_M)


def _take_forward(values_CS: Array, rows: RowMap) -> tuple[Array, RowMap]:
    return take_entries(values_CS, rows), rows


def _take_backward(rows: RowMap, cotangent_M: Array) -> tuple[Array, None]:
    shape = rows.child_CS.shape
    return take_rows(cotangent_M, rows.child_CS.reshape(-1)).reshape(shape), None


take_entries.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def spread(x_CL: Float[Array, "C L"], rows: RowMap) -> Float[Array, "M L"]:
    """Each child's row: that of its parent, 0 where there is no child."""
    return take_rows(x_CL, rows.entry_M // rows.child_CS.shape[1])


def _spread_forward(x_CL: Array, rows: RowMap) -> tuple[Array, RowMap]:
    return spread(x_CL, rows), rows


def _spread_backward(rows: RowMap, cotangent_ML: Array) -> tuple[Array, None]:
    wide = jnp.dtype(jnp.float64 if cotangent_ML.dtype == jnp.float64 else jnp.float32)
    return _sum(cotangent_ML, rows.child_CS, wide).astype(cotangent_ML.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sum_rows(x_ML: Float[Array, "M L"], rows: RowMap, dtype: jnp.dtype) -> Float[Array, "C L"]:
    """Each parent's sum of its children's rows, accumulated in `dtype` in the order of the children."""
    return _sum(x_ML, rows.child_CS, dtype)


def _sum_forward(x_ML: Array, rows: RowMap, dtype: jnp.dtype) -> tuple[Array, tuple[RowMap, Array]]:
    # An empty array carries the dtype of the rows.
    return sum_rows(x_ML, rows, dtype), (rows, jnp.zeros((0,), x_ML.dtype))


def _sum_backward(
    dtype: jnp.dtype, residuals: tuple[RowMap, Array], cotangent_CL: Array
) -> tuple[Array, None]:
    rows, like = residuals
    return spread(cotangent_CL, rows).astype(like.dtype), None


sum_rows.defvjp(_sum_forward, _sum_backward)


def _sum(x_ML: Array, child_CS: Array, dtype: jnp.dtype) -> Array:
    parents, entries = child_CS.shape
    children, width = x_ML.shape
    # Entries without a child are last, so that no more are read than some parent has.
    child_CS = jnp.sort(child_CS, axis=1)
    total = jnp.zeros((parents, width), dtype)
    if parents * entries * width <= _ELEMENTS_AT_ONCE:
        read_SCL = take_rows(x_ML, child_CS.T.reshape(-1)).reshape(entries, parents, width)
        # Added one by one and not as a reduction, whose order would be the compiler's.
        for entry in range(entries):
            total = total + read_SCL[entry].astype(dtype)
        return total
    used = jnp.max(jnp.sum(child_CS < children, axis=1, dtype=jnp.int32), initial=0)

    def add(entry: Array, total: Array) -> Array:
        index_C = lax.dynamic_index_in_dim(child_CS, entry, axis=1, keepdims=False)
        return total + take_rows(x_ML, index_C).astype(dtype)

    return lax.fori_loop(0, used, add, total)
