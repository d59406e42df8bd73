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
    order_F = jnp.argsort(key_F, stable=True).astype(jnp.int32)
    sizes_G = jnp.sum(key_F[:, None] == jnp.arange(num_keys, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    total = jnp.sum(sizes_G, dtype=jnp.int32)
    entry_M = jnp.pad(order_F, (0, max(capacity - count, 0)), constant_values=count)[:capacity]
    entry_M = jnp.where(jnp.arange(capacity, dtype=jnp.int32) < total, entry_M, count)
    child_CS = jnp.argsort(order_F).astype(jnp.int32).reshape(key_CS.shape)
    child_CS = jnp.where(key_CS < num_keys, jnp.minimum(child_CS, capacity), capacity)
    return Sorted(RowMap(entry_M, child_CS), sizes_G, total <= capacity)


def take_rows(values_RX: Float[Array, "R *X"], index_M: Int[Array, " M"]) -> Float[Array, "M *X"]:
    """values[index], zero where the index is past the end."""
    return values_RX.at[index_M].get(mode="fill", fill_value=0)


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
