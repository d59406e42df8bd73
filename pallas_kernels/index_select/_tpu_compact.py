"""Exact top-k of rows in vector memory without a sort: rank by counting, then close the gaps.

A row is a list of ranks (the order-preserving integer image of a score) with their indices, ascending by index.
The k best are those above a threshold and the first of those equal to it. The threshold is found by bisection of
the integers, counting the row each time; the kept entries then move left over the dropped ones, whose number
before each is a prefix sum. What is kept stays ascending by index, so the tie rule needs no comparison of
indices, here or in later rounds, and the result needs no sort.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array

LANES = 128
SUBLANES = 8

ABSENT = np.int32(-(2**31))
"""Rank of a key that is not visible, or of an empty place: below that of every score."""

_NAN_RANK = np.int32(2**31 - 2)
_LOWEST_RANK = np.int32(-(2**31) + 1)


def rank_of(scores: Array) -> Array:
    """int32 in the order of float32 scores: -0.0 as 0.0, -inf as the lowest finite number, NaN above all."""
    lowest = np.float32(np.finfo(np.float32).min)
    bounded = jnp.where(scores < lowest, lowest, scores)
    bits = lax.bitcast_convert_type(jnp.where(bounded == 0, np.float32(0), bounded), jnp.int32)
    # Negative floats are ordered by their magnitude; the sign bit of the integer stays.
    ordered = jnp.where(bits < 0, bits ^ np.int32(2**31 - 1), bits)
    return jnp.where(scores != scores, _NAN_RANK, ordered)


def _any(condition: Array) -> Array:
    return jnp.max(jnp.where(condition, np.float32(1), np.float32(0))) > 0


def _count(condition: Array) -> Array:
    """Per row, exact in float32."""
    return jnp.sum(jnp.where(condition, np.float32(1), np.float32(0)), axis=1, keepdims=True)


def threshold(ranks: Array, top_k: int, lowest: Array) -> Array:
    """[rows, 1]: at least `top_k` ranks are not below it and at most `top_k` above, or nothing is below it.

    `lowest` [rows, 1] is a rank that at least `top_k` of the row are not below, or `ABSENT`.
    """
    wanted = np.float32(top_k)
    highest = jnp.max(ranks, axis=1, keepdims=True)

    def narrow(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The mean rounded down, without a sum that could overflow.
        middle = (low & high) + ((low ^ high) >> 1)
        count = _count(ranks >= middle)
        low, high = jnp.where(count >= wanted, middle, low), jnp.where(count >= wanted, high, middle)
        # Exactly top_k: any threshold with this count selects the same.
        return low, jnp.where(count == wanted, middle + 1, high)

    low = jnp.maximum(lowest, _LOWEST_RANK)
    return lax.while_loop(lambda bounds: _any(bounds[0] + 1 < bounds[1]), narrow, (low, highest + 1))[0]


def _running_counts(conditions: list[Array]) -> list[Array]:
    """For each condition [rows, columns], how many hold in the row up to and including the column, float32."""
    rows, columns = conditions[0].shape
    row = lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), 0)
    column = lax.broadcasted_iota(jnp.int32, (LANES, 2 * LANES), 1)
    # The right half counts the whole chunk, in every lane.
    before = jnp.where((row <= column) | (column >= LANES), np.float32(1), np.float32(0)).astype(jnp.bfloat16)
    stacked = jnp.concatenate([jnp.where(c, np.float32(1), np.float32(0)) for c in conditions], axis=0)
    height = stacked.shape[0]
    # One product for all chunks, one under the other: the triangle is loaded once.
    starts = range(0, columns, LANES)
    chunks = jnp.concatenate([stacked[:, first : first + LANES] for first in starts], axis=0)
    # Zeros and ones are exact in bfloat16, and their sums in float32.
    counts = lax.dot_general(
        chunks.astype(jnp.bfloat16), before, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    total = jnp.zeros((height, LANES), jnp.float32)
    running = []
    for first in range(0, counts.shape[0], height):
        chunk = counts[first : first + height]
        running.append(total + chunk[:, :LANES])
        total = total + chunk[:, LANES:]
    counted = jnp.concatenate(running, axis=1)
    return [counted[i * rows : (i + 1) * rows] for i in range(len(conditions))]


def keep_best(ranks: Array, indices: Array, top_k: int, lowest: Array) -> tuple[Array, Array]:
    """The `top_k` best of each row, moved to the left in their order; `ABSENT` after them.

    Of equal ranks the ones further left. Rows of `ranks` and `indices` [8, columns], columns a multiple of 128.
    """
    columns = ranks.shape[1]
    limit = threshold(ranks, top_k, lowest)
    above, equal = ranks > limit, ranks == limit
    above_until, equal_until = _running_counts([above, equal])
    room = np.float32(top_k) - _count(above)
    kept = above | (equal & (equal_until <= room))
    place = above_until + jnp.minimum(equal_until, room)
    column = lax.broadcasted_iota(jnp.int32, ranks.shape, 1)
    distance = jnp.where(kept, column + 1 - place.astype(jnp.int32), 0)
    # Distances do not decrease from left to right, and by less than the columns do: moving by their bits, the
    # lowest first, never puts an entry on another.
    for bit in range((columns - 1).bit_length()):
        step = 1 << bit
        leaving = jnp.where((distance & np.int32(step)) != 0, distance, 0)
        arriving = pltpu.roll(leaving, columns - step, 1)
        ranks = jnp.where(arriving != 0, pltpu.roll(ranks, columns - step, 1), ranks)
        indices = jnp.where(arriving != 0, pltpu.roll(indices, columns - step, 1), indices)
        distance = distance - leaving + arriving
    return jnp.where(column < _count(kept).astype(jnp.int32), ranks, ABSENT), indices


def update(
    candidates: Any, found: Any, rows: tuple[Any, ...], new_ranks: Array, new_indices: Array, top_k: int
) -> None:
    """Merge new entries, whose indices are all higher, into the candidates of some rows, in place.

    `candidates` and `found` are references to ranks and indices; `rows` picks 8 rows [8, columns] of each.
    """
    old = candidates[rows]
    column = lax.broadcasted_iota(jnp.int32, old.shape, 1)
    # The lowest candidate, if the list is full; a new one has to be better, for its index is higher.
    lowest = jnp.min(jnp.where(column < top_k, old, np.int32(2**31 - 1)), axis=1, keepdims=True)

    @pl.when(_any(new_ranks > lowest))
    def _() -> None:
        with jax.named_scope("compact"):
            ranks, indices = keep_best(
                jnp.concatenate([old, new_ranks], axis=1),
                jnp.concatenate([found[rows], new_indices], axis=1),
                top_k,
                lowest,
            )
        candidates[rows] = ranks[:, : old.shape[1]]
        found[rows] = indices[:, : old.shape[1]]
