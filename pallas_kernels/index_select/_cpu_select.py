"""The candidates of blocks of queries on a CPU: small steps, whose products its cores share.

A step takes `_PIECES` pieces of keys, transposed once for all queries of the block, and multiplies a query with all of
them by one batched product: XLA keeps a single small product on one core, and does not run loops side by side, but
divides a batch. Many steps are ranked together with the candidates, which stand first: `jax.lax.top_k` keeps the best
entries so far and passes quickly over what is below them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying
from pallas_kernels.index_select import _scores
from pallas_kernels.index_select._scores import CPU_KEYS
from pallas_kernels.index_select.keys import Keys, QuantizedKeys, dequantize_keys

NO_INDEX = jnp.iinfo(jnp.int32).max
_PIECES = 2


class Sizes(NamedTuple):
    """What memory and speed depend on, and the result does not.

    Queries of a block, at most or as many as a product takes; scores of a block, and of each of its queries, that are
    ranked together, at most or those of a step.
    """

    block: int = 16
    ranked: int = 131072
    ranked_of_query: int = 32768


SIZES = Sizes()


def _keys_of(
    k_index: Keys, page_table_BP: Array | None, sequence: Array, start: Array, size: int
) -> Array | QuantizedKeys:
    """The `size` keys [1, size, ...] of a sequence from `start` on."""
    physical, page = jax.tree.leaves(k_index)[0].shape[:2]

    def slice_of(row: Array, start: Array) -> Array | QuantizedKeys:
        def take(a: Array) -> Array:
            place = (row, start, *(jnp.int32(0),) * (a.ndim - 2))
            return jax.lax.dynamic_slice(a, place, (1, size, *a.shape[2:]))

        return jax.tree.map(take, k_index)

    if page_table_BP is None:
        return slice_of(sequence, start)
    # The page of keys that nobody sees may have any number, in bounds or not.
    if page % size == 0:
        return slice_of(jnp.clip(page_table_BP[sequence, start // page], 0, physical - 1), start % page)
    places_S = start + jnp.arange(size, dtype=jnp.int32)
    pages_S = jnp.clip(page_table_BP[sequence, places_S // page], 0, physical - 1)
    return jax.tree.map(lambda a: a[pages_S, places_S % page][None], k_index)


def select(
    q_BQHD: Array,
    k_index: Keys,
    weights_BQH: Array,
    positions_BQ: Array,
    page_table_BP: Array | None,
    offset: Array,
    top_k: int,
    use_relu: bool,
    finish: Callable[[Array, Array], tuple[Array, ...]],
    sizes: Sizes = SIZES,
) -> tuple[Array, ...]:
    """What `finish` makes [..., top_k] of scores and global indices of the best of the local keys, [B, Q, ...].

    `finish` gets a block of queries, with `NO_INDEX` and -inf where there is no such key; its arrays have its shape.
    `positions_BQ` are those of all keys and `offset` the position of the first local one.
    """
    dtype = weights_BQH.dtype
    batch, queries, heads, channels = q_BQHD.shape
    page = jax.tree.leaves(k_index)[0].shape[1]
    keys = page if page_table_BP is None else page_table_BP.shape[1] * page
    group = _scores.queries_per_product(heads)
    blocks = -(-queries // max(sizes.block, group))
    groups = -(-queries // (blocks * group))
    block = groups * group
    step = _PIECES * CPU_KEYS
    size = min(step, keys)
    steps = max(1, min(sizes.ranked_of_query, sizes.ranked // block, keys + size - 1) // size)

    missing = ((0, 0), (0, blocks * block - queries))
    q_NGRD = jnp.pad(q_BQHD, (*missing, (0, 0), (0, 0))).reshape(-1, groups, group * heads, channels)
    weights_NGQH = jnp.pad(weights_BQH, (*missing, (0, 0))).reshape(-1, groups, group, heads)
    positions_NGQ = jnp.pad(positions_BQ, missing, constant_values=-1).reshape(-1, groups, group)
    local_NGQ = positions_NGQ - offset
    paged = () if page_table_BP is None else (page_table_BP,)
    marks = (q_NGRD, *jax.tree.leaves(k_index), weights_NGQH, local_NGQ, *paged)

    def start_of(number: Array) -> Array:
        """The last step is moved back to end with the cache, and the keys it repeats are not visible again."""
        return jnp.minimum(number * size, keys - size)

    def keys_at(place: tuple[Array, Array]) -> Array:
        """Pieces of keys with the keys along the lanes of a vector: twice as fast as one key after another."""
        found = _keys_of(k_index, page_table_BP, *place, size)
        if isinstance(found, QuantizedKeys):
            found = dequantize_keys(found, dtype)
        k_SD = jnp.pad(found[0].astype(dtype), ((0, step - size), (0, 0)))
        return k_SD.reshape(_PIECES, CPU_KEYS, channels).swapaxes(1, 2)

    narrow = any(a.dtype.itemsize < 4 for a in jax.tree.leaves(k_index))

    def no_keys(_: tuple[Array, Array]) -> Array:
        return match_varying(jnp.zeros((_PIECES, channels, CPU_KEYS), dtype), *marks)[0]

    def of_block(here: Array) -> tuple[Array, ...]:
        sequence, local_GQ = here // blocks, local_NGQ[here]
        # Every query sees a prefix of the keys, so the steps without a visible key are the last ones.
        visible = jnp.clip(jnp.max(local_GQ) + 1, 0, keys)

        def rank(turn: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            def score_step(nth: Array, ranked_QN: Array) -> Array:
                number = turn * steps + nth
                start = start_of(number)
                # XLA would convert all keys of a narrow type before the loop; out of a branch it takes nothing.
                k_PDS = (
                    jax.lax.cond(number * size < visible, keys_at, no_keys, (sequence, start))
                    if narrow
                    else keys_at((sequence, start))
                )
                places_S = start + jnp.arange(step, dtype=jnp.int32)
                new_S = (places_S >= number * size) & (places_S < keys)

                def score(nth_group: Array, ranked_QN: Array) -> Array:
                    q_RD = q_NGRD[here, nth_group].astype(dtype)
                    scores_QS = _scores.row_scores(q_RD, k_PDS, weights_NGQH[here, nth_group], use_relu)
                    visible_QS = new_S & (places_S <= local_GQ[nth_group][:, None])
                    place = (nth_group * group, top_k + nth * step)
                    return jax.lax.dynamic_update_slice(
                        ranked_QN, _scores.rankable(scores_QS, visible_QS), place
                    )

                # A loop of one turn, if the compiler knew, would be undone, and the keys transposed in each product.
                rounds = jnp.where(visible > 0, jnp.int32(groups), jnp.int32(0))
                return jax.lax.fori_loop(jnp.int32(0), rounds, score, ranked_QN)

            ranked_QN, indices_QK = carry
            live = jnp.clip((visible - turn * steps * size + size - 1) // size, 0, steps)
            with jax.named_scope("scores"):
                ranked_QN = jax.lax.fori_loop(jnp.int32(0), live, score_step, ranked_QN)
            with jax.named_scope("merge"):
                # After the last scores are those of the turn before.
                scored_N = jnp.arange(top_k + steps * step, dtype=jnp.int32) < top_k + live * step
                ranked_QN = jnp.where(scored_N, ranked_QN, -jnp.inf)
                best_QK, places_QK = jax.lax.top_k(ranked_QN, top_k)
                kept_QK = jnp.take_along_axis(indices_QK, jnp.minimum(places_QK, top_k - 1), axis=-1)
                place_QK = places_QK - top_k
                new_QK = start_of(turn * steps + place_QK // step) + place_QK % step + offset
                indices_QK = jnp.where(places_QK < top_k, kept_QK, new_QK)
                indices_QK = jnp.where(jnp.isneginf(best_QK), NO_INDEX, indices_QK)
                return jax.lax.dynamic_update_slice(ranked_QN, best_QK, (0, 0)), indices_QK

        ranked = jnp.full((block, top_k + steps * step), -jnp.inf, dtype)
        indices = jnp.full((block, top_k), NO_INDEX, jnp.int32)
        ranked, indices, *_ = match_varying(ranked, indices, *marks)
        turns = (visible + (steps * size - 1)) // (steps * size)
        ranked, indices = jax.lax.fori_loop(jnp.int32(0), turns, rank, (ranked, indices))
        return finish(ranked[:, :top_k], indices)

    found = jax.lax.map(of_block, jnp.arange(batch * blocks, dtype=jnp.int32))
    return tuple(a.reshape(batch, blocks * block, top_k)[:, :queries] for a in found)
