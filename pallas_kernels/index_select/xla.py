"""Index selection in portable JAX: a running list of candidates over tiles of keys.

For each block of queries, tiles of keys are scored in the order of their positions and merged into the best
`top_k` so far, a few at a time. Heads are summed inside the tile, so the largest tensor is [block, heads, tile].
On a CPU `_cpu_select.py` does the same in smaller steps.

The tie rule (higher score, then lowest index) follows from `jax.lax.top_k`, which puts the earlier of two
equal elements first. Invariant: the candidates are the best of all keys before the tile, ordered by (score
descending, index ascending). It holds for the empty list. The merge ranks the list [candidates, tile]: two
equal candidates are in the order of their index by the invariant, two equal tile entries by construction, and
a candidate equal to a tile entry comes first and has the lower index. So the result is the best of all keys
including the tile, in the same order. The same argument with "shard" for "tile" covers keys sharded in the
order of their positions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Bool, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.index_select import _cpu_select
from pallas_kernels.index_select._cpu_select import NO_INDEX
from pallas_kernels.index_select._scores import rankable, tile_scores, weigh_heads
from pallas_kernels.index_select._scores import tile_scores_blocked as tile_scores_blocked
from pallas_kernels.index_select._scores import tile_scores_rowwise as tile_scores_rowwise
from pallas_kernels.index_select._top_k import top_k as top_k_of_long_rows
from pallas_kernels.index_select.keys import Keys, QuantizedKeys, dequantize_keys
from pallas_kernels.index_select.reference import MASKED_SCORE
from pallas_kernels.index_select.shapes import KEY_TILE, QUERY_BLOCK
from pallas_kernels.sparse_attention import rows as key_rows

_HIGHEST = jax.lax.Precision.HIGHEST
_LARGEST_GROUP = 8
_RANKED_BYTES = 8 * 2**20
"""About the size of the scores that are ranked at once."""
_MERGED_BYTES = 64 * 2**20
"""About the size of the candidates of all shards that are brought together at once."""


def merge_candidates(scores_BQN: Array, indices_BQN: Array, top_k: int) -> tuple[Array, Array]:
    """The best `top_k` of a list in which equal scores are in the order of their index."""
    best_BQK, places_BQK = jax.lax.top_k(scores_BQN, top_k)
    return best_BQK, jnp.take_along_axis(indices_BQN, places_BQK, axis=-1)


def ascending(indices_BQK: Array) -> Array:
    """Indices in ascending order, with the absent ones (`NO_INDEX`) at the end as -1."""
    sorted_BQK = jnp.sort(indices_BQK, axis=-1)
    return jnp.where(sorted_BQK == NO_INDEX, -1, sorted_BQK)


def select_from_scores(
    scores_BQS: Float[Array, "B Q S"], visible_BQS: Bool[Array, "B Q S"], top_k: int, key_tile: int = KEY_TILE
) -> Int[Array, "B Q top_k"]:
    """The selection stage alone: the `top_k` best visible keys of given scores, tile by tile."""
    scores_BQS = rankable(scores_BQS, visible_BQS)
    best = jnp.full((*scores_BQS.shape[:2], top_k), -jnp.inf, scores_BQS.dtype)
    indices = jnp.full(best.shape, NO_INDEX, jnp.int32)
    positions = jnp.where(visible_BQS, jnp.arange(scores_BQS.shape[2], dtype=jnp.int32), NO_INDEX)
    for start in range(0, scores_BQS.shape[2], key_tile):
        tile = slice(start, start + key_tile)
        best, indices = merge_candidates(
            jnp.concatenate([best, scores_BQS[..., tile]], axis=-1),
            jnp.concatenate([indices, positions[..., tile]], axis=-1),
            top_k,
        )
    return ascending(indices)


def first_keys(positions_BQ: Array, keys: int, top_k: int) -> Array:
    """The selection [B, Q, top_k] where there are no more than `top_k` keys: every visible one."""
    first_BQK = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.int32), (*positions_BQ.shape, top_k))
    return jnp.where((first_BQK <= positions_BQ[..., None]) & (first_BQK < keys), first_BQK, -1)


def _local_candidates(
    q_BQHD: Array,
    k_index: Keys,
    weights_BQH: Array,
    positions_BQ: Array,
    page_table_BP: Array | None,
    offset: Array,
    top_k: int,
    use_relu: bool,
    key_tile: int,
    scores_of: Callable[[Array, Array, Array, bool], Array],
) -> tuple[Array, Array]:
    """Scores and global indices [B, Q, top_k] of the candidates of one block among the local keys."""
    parts = jax.tree.leaves(k_index)
    physical, page = parts[0].shape[:2]
    keys = page if page_table_BP is None else page_table_BP.shape[1] * page
    # A tile of pages is a whole number of them.
    tile = min(key_tile, keys) if page_table_BP is None else page * min(-(-key_tile // page), keys // page)
    tiles = -(-keys // tile)
    local_positions_BQ = positions_BQ - offset

    def keys_at(start: Array) -> Array:
        if page_table_BP is None:
            found = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, tile, axis=1), k_index)
        else:
            pages_BP = jax.lax.dynamic_slice_in_dim(page_table_BP, start // page, tile // page, axis=1)
            # The page of keys that nobody sees may have any number, in bounds or not.
            pages_BP = jnp.clip(pages_BP, 0, physical - 1)
            found = jax.tree.map(
                lambda a: a[pages_BP].reshape(pages_BP.shape[0], tile, *a.shape[2:]), k_index
            )
        if isinstance(found, QuantizedKeys):
            # Exact in bfloat16, so that the products are those of either type.
            return dequantize_keys(found, q_BQHD.dtype if q_BQHD.dtype == jnp.bfloat16 else weights_BQH.dtype)
        return found

    batch, queries = positions_BQ.shape
    dtype = weights_BQH.dtype
    # Ranking costs by the list more than by the tile, so that a few tiles are ranked together.
    group = max(1, min(_LARGEST_GROUP, tiles, _RANKED_BYTES // (batch * queries * tile * dtype.itemsize)))
    # Every query sees a prefix of the keys, so the tiles without a visible key are the last ones.
    visible_keys = jnp.clip(jnp.max(local_positions_BQ) + 1, 0, keys)
    paged = () if page_table_BP is None else (page_table_BP,)
    marks = (q_BQHD, *parts, weights_BQH, local_positions_BQ, *paged)
    nothing = match_varying(jnp.full((batch, queries, tile), -jnp.inf, dtype), *marks)[0]

    def start_of(number: Array) -> Array:
        """The last tile is moved back to end with the cache, and the keys it repeats are not visible again."""
        return jnp.minimum(number * tile, keys - tile)

    def score_tile(number: Array) -> Array:
        start = start_of(number)
        places_S = start + jnp.arange(tile, dtype=jnp.int32)
        visible_BQS = (places_S <= local_positions_BQ[..., None]) & (places_S >= number * tile)
        return rankable(scores_of(q_BQHD, keys_at(start), weights_BQH, use_relu), visible_BQS)

    def merge_group(turn: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def add(nth: Array, ranked: Array) -> Array:
            number = turn * group + nth
            with jax.named_scope("scores"):
                scores_BQS = jax.lax.cond(
                    number * tile < visible_keys, lambda: score_tile(number), lambda: nothing
                )
            return jax.lax.dynamic_update_slice_in_dim(ranked, scores_BQS, top_k + nth * tile, axis=2)

        ranked_BQN, indices_BQK = carry
        ranked_BQN = jax.lax.fori_loop(jnp.int32(0), jnp.int32(group), add, ranked_BQN)
        with jax.named_scope("merge"):
            best_BQK, places_BQK = top_k_of_long_rows(ranked_BQN, top_k)
            kept_BQK = jnp.take_along_axis(indices_BQK, jnp.minimum(places_BQK, top_k - 1), axis=-1)
            place_BQK = places_BQK - top_k
            new_BQK = start_of(turn * group + place_BQK // tile) + place_BQK % tile + offset
            indices_BQK = jnp.where(places_BQK < top_k, kept_BQK, new_BQK)
            indices_BQK = jnp.where(jnp.isneginf(best_BQK), NO_INDEX, indices_BQK)
            return jax.lax.dynamic_update_slice_in_dim(ranked_BQN, best_BQK, 0, axis=2), indices_BQK

    # The candidates, and after them the scores of a group of tiles.
    ranked = jnp.full((batch, queries, top_k + group * tile), -jnp.inf, dtype)
    indices = jnp.full((batch, queries, top_k), NO_INDEX, jnp.int32)
    ranked, indices, *_ = match_varying(ranked, indices, *marks)
    turns = (visible_keys + (group * tile - 1)) // (group * tile)
    ranked, indices = jax.lax.fori_loop(jnp.int32(0), turns, merge_group, (ranked, indices))
    return ranked[..., :top_k], indices


@functools.partial(
    jax.jit, static_argnames=("top_k", "axis_name", "use_relu", "query_block", "key_tile", "scores_of")
)
def select(
    q_index: Float[Array, "B Q H D"],
    k_index: Keys,
    weights: Float[Array, "B Q H"],
    query_positions: Int[Array, "B Q"],
    top_k: int,
    page_table: Int[Array, "B pages"] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    use_relu: bool = True,
    query_block: int | None = None,
    key_tile: int | None = None,
    scores_of: Callable[[Array, Array, Array, bool], Array] = tile_scores,
) -> Int[Array, "B Q top_k"]:
    """`pallas_kernels.index_select.select` by tiles, whose sizes (None: the platform's) do not change the result.

    `scores_of` queries, a tile of keys, weights and `use_relu` gives the scores of the tile [B, Q, S].
    """
    with jax.named_scope("index_select"):
        dtype = key_rows.compute_dtype(q_index, *jax.tree.leaves(k_index), weights)
        # A selection has no gradient.
        q_index, k_index, weights = jax.lax.stop_gradient((q_index, k_index, weights))
        batch, queries = query_positions.shape
        page = jax.tree.leaves(k_index)[0].shape[1]
        local_keys = page if page_table is None else page_table.shape[1] * page
        shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        offset = jnp.zeros((), jnp.int32)
        if axis_name is not None:
            offset = (jax.lax.axis_index(axis_name) * local_keys).astype(jnp.int32)
        positions_BQ = query_positions.astype(jnp.int32)
        if local_keys * shards <= top_k or query_positions.size == 0:
            return first_keys(positions_BQ, local_keys * shards, top_k)

        def finish(scores: Array, indices: Array) -> tuple[Array, ...]:
            # Shards are merged by score.
            return (ascending(indices),) if axis_name is None else (scores, indices)

        def in_tiles(q: Array, k: Keys, w: Array, positions: Array, offset: Array, *table: Array) -> Any:
            pages = table[0] if table else None
            tile = key_tile or KEY_TILE

            def candidates(block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
                q, w, positions = block
                return _local_candidates(q, k, w, positions, pages, offset, top_k, use_relu, tile, scores_of)

            block = min(queries, max(1, (query_block or QUERY_BLOCK) // batch))
            filled = ((q, 0), (w, 0), (positions, -1))
            found = jax.lax.map(
                candidates, tuple(key_rows.split_queries(a, block, fill) for a, fill in filled)
            )
            return finish(*(key_rows.join_queries(a, queries) for a in found))

        def on_cpu(q: Array, k: Keys, w: Array, positions: Array, offset: Array, *table: Array) -> Any:
            pages = table[0] if table else None
            return _cpu_select.select(q, k, w, positions, pages, offset, top_k, use_relu, finish)

        paged = () if page_table is None else (page_table,)
        leaves, structure = jax.tree.flatten(
            (q_index, k_index, weights.astype(dtype), positions_BQ, offset, *paged)
        )
        arguments = structure.unflatten(match_varying(*leaves))
        if query_block is None and key_tile is None and scores_of is tile_scores:
            found = jax.lax.platform_dependent(*arguments, cpu=on_cpu, default=in_tiles)
        else:
            found = in_tiles(*arguments)
        if axis_name is None:
            return found[0]
        scores, indices = found
        with jax.named_scope("merge_shards"):
            gather = functools.partial(
                jax.lax.all_gather, axis_name=axis_name, axis=2, tiled=True, to="invarying"
            )

            def merge(part: tuple[Array, Array]) -> Array:
                return ascending(merge_candidates(gather(part[0]), gather(part[1]), top_k)[1])

            # Candidates of all devices, a few queries at a time.
            block = max(1, _MERGED_BYTES // (scores.shape[0] * shards * top_k * 2 * scores.dtype.itemsize))
            if queries <= block:
                return merge((scores, indices))
            parts = key_rows.split_queries(scores, block, 0), key_rows.split_queries(indices, block, 0)
            return key_rows.join_queries(jax.lax.map(merge, parts), queries)


def _scores_of_rows(
    q_BQHD: Array, k_BQND: Array, weights_BQH: Array, exists_BQN: Array, use_relu: bool, dtype: jnp.dtype
) -> Array:
    dots_BQHN = jnp.einsum("bqhd,bqnd->bqhn", q_BQHD.astype(dtype), k_BQND.astype(dtype), precision=_HIGHEST)
    scores_BQN = weigh_heads(weights_BQH.astype(dtype), dots_BQHN, q_BQHD.shape[-1], use_relu)
    return jnp.where(exists_BQN, scores_BQN, MASKED_SCORE)


def _row_blocks(arrays: tuple[Array, ...], rows_BQN: Array, heads: int, channels: int) -> tuple[Array, ...]:
    batch, queries, selected = rows_BQN.shape
    block = key_rows.query_block(batch, queries, selected * max(heads, channels) * 4)
    return tuple(key_rows.split_queries(a, block, 0) for a in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _scores_at(q_BQHD, k_BSD, weights_BQH, rows_BQN, exists_BQN, use_relu):
    dtype = key_rows.compute_dtype(q_BQHD, k_BSD, weights_BQH)

    def score(block: tuple[Array, ...]) -> Array:
        q, w, rows, exists = block
        return _scores_of_rows(q, key_rows.gather(k_BSD, rows, exists, False), w, exists, use_relu, dtype)

    blocks = _row_blocks((q_BQHD, weights_BQH, rows_BQN, exists_BQN), rows_BQN, *q_BQHD.shape[2:])
    return key_rows.join_queries(jax.lax.map(score, blocks), q_BQHD.shape[1])


def _scores_at_forward(q_BQHD, k_BSD, weights_BQH, rows_BQN, exists_BQN, use_relu):
    residuals = (q_BQHD, k_BSD, weights_BQH, rows_BQN, exists_BQN)
    return _scores_at(*residuals, use_relu), residuals


def _scores_at_backward(use_relu, residuals, cotangent_BQN):
    q_BQHD, k_BSD, weights_BQH, rows_BQN, exists_BQN = residuals
    dtype = key_rows.compute_dtype(q_BQHD, k_BSD, weights_BQH)

    def accumulate(dk: Array, block: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        q, w, rows, exists, cotangent = block
        k_BQND = key_rows.gather(k_BSD, rows, exists, False).astype(dtype)
        _, pullback = jax.vjp(lambda q, k, w: _scores_of_rows(q, k, w, exists, use_relu, dtype), q, k_BQND, w)
        dq, dk_BQND, dw = pullback(cotangent)
        return key_rows.scatter_add(dk, rows, exists, dk_BQND, False), (dq, dw)

    arrays = (q_BQHD, weights_BQH, rows_BQN, exists_BQN, cotangent_BQN)
    start = match_varying(jnp.zeros(k_BSD.shape, dtype), k_BSD)[0]
    dk, gradients = jax.lax.scan(accumulate, start, _row_blocks(arrays, rows_BQN, *q_BQHD.shape[2:]))
    dq, dw = (key_rows.join_queries(g, q_BQHD.shape[1]) for g in gradients)
    return dq, dk.astype(k_BSD.dtype), dw, None, None


_scores_at.defvjp(_scores_at_forward, _scores_at_backward)


@functools.partial(jax.jit, static_argnames=("use_relu",))
def scores_at(
    q_index: Float[Array, "B Q H D"],
    k_index: Float[Array, "B S D"],
    weights: Float[Array, "B Q H"],
    indices: Int[Array, "B Q N"],
    use_relu: bool = True,
) -> Float[Array, "B Q N"]:
    """`pallas_kernels.index_select.scores_at` by gathering the keys, in blocks of queries."""
    with jax.named_scope("index_scores_at"):
        rows_BQN, exists_BQN = key_rows.physical_rows(indices, k_index, None)
        arrays = match_varying(q_index, k_index, weights, rows_BQN, exists_BQN)
        return _scores_at(*arrays, use_relu)
