"""Index selection in portable JAX: a running list of candidates over tiles of keys.

For each block of queries, tiles of keys are scored in the order of their positions and merged into the best
`top_k` so far, a few at a time. Heads are summed inside the tile, so the largest tensor is [block, heads, tile].

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

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Bool, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.index_select._top_k import top_k as top_k_of_long_rows
from pallas_kernels.index_select.keys import Keys, QuantizedKeys, dequantize_keys
from pallas_kernels.index_select.reference import MASKED_SCORE
from pallas_kernels.index_select.shapes import KEY_TILE, QUERY_BLOCK
from pallas_kernels.sparse_attention import rows as key_rows

_HIGHEST = jax.lax.Precision.HIGHEST
_NO_INDEX = jnp.iinfo(jnp.int32).max
_CPU_ROWS, _CPU_KEYS = 32, 256

_LARGEST_GROUP = 8
_RANKED_BYTES = 8 * 2**20
"""About the size of the scores that are ranked at once."""


def _weigh_heads(weights_xH: Array, dots_xHS: Array, channels: int, use_relu: bool) -> Array:
    """Sum over the heads, one after the other, then the scale: one order of additions on every backend."""
    heads = dots_xHS.shape[-2]
    if use_relu:
        dots_xHS = jax.nn.relu(dots_xHS)
    total = weights_xH[..., 0, None] * dots_xHS[..., 0, :]
    for head in range(1, heads):
        total = total + weights_xH[..., head, None] * dots_xHS[..., head, :]
    return (heads * channels) ** -0.5 * total


def tile_scores_blocked(q_BQHD: Array, k_BSD: Array, weights_BQH: Array, use_relu: bool) -> Array:
    """Scores [B, Q, S] of a block of queries and a tile of keys, by one matrix product."""
    dtype = weights_BQH.dtype
    if q_BQHD.dtype != k_BSD.dtype or q_BQHD.dtype != jnp.bfloat16:
        q_BQHD, k_BSD = q_BQHD.astype(dtype), k_BSD.astype(dtype)
    dots_BQHS = jnp.einsum("bqhd,bsd->bqhs", q_BQHD, k_BSD, precision=_HIGHEST, preferred_element_type=dtype)
    return _weigh_heads(weights_BQH, dots_BQHS, q_BQHD.shape[-1], use_relu)


def tile_scores_rowwise(q_BQHD: Array, k_BSD: Array, weights_BQH: Array, use_relu: bool) -> Array:
    """The same scores by small products of one shape: a few queries (`_CPU_ROWS` rows of heads), `_CPU_KEYS` keys.

    On CPU the order in which a matrix product adds depends on its shape, so the bits of a score would depend
    on how many queries and keys it is computed with. With a fixed shape they cannot.
    """
    dtype = weights_BQH.dtype
    batch, queries, heads, channels = q_BQHD.shape
    keys = k_BSD.shape[1]
    group = max(1, _CPU_ROWS // heads)
    groups, pieces = -(-queries // group), -(-keys // _CPU_KEYS)
    padded_BSD = jnp.pad(k_BSD.astype(dtype), ((0, 0), (0, pieces * _CPU_KEYS - keys), (0, 0)))
    # Keys along the lanes of a vector: twice as fast as one key after another.
    k_BPDS = padded_BSD.reshape(batch, pieces, _CPU_KEYS, channels).swapaxes(2, 3)
    missing = ((0, 0), (0, groups * group - queries), (0, 0))
    q_BGRD = jnp.pad(q_BQHD.astype(dtype), (*missing, (0, 0))).reshape(batch, groups, group * heads, channels)
    weights_BGQH = jnp.pad(weights_BQH, missing).reshape(batch, groups, group, heads)

    def score(position: Array, scores_BQS: Array) -> Array:
        # Queries vary fastest, so that a piece of keys stays in the core's cache.
        sequence, rest = position // (groups * pieces), position % (groups * pieces)
        piece, number = rest // groups, rest % groups
        dots_RS = jnp.einsum(
            "rd,ds->rs", q_BGRD[sequence, number], k_BPDS[sequence, piece], precision=_HIGHEST
        )
        dots_QHS = dots_RS.reshape(group, heads, _CPU_KEYS)
        scores_QS = _weigh_heads(weights_BGQH[sequence, number], dots_QHS, channels, use_relu)
        place = (sequence, number * group, piece * _CPU_KEYS)
        return jax.lax.dynamic_update_slice(scores_BQS, scores_QS[None], place)

    empty = jnp.zeros((batch, groups * group, pieces * _CPU_KEYS), dtype)
    empty = match_varying(empty, q_BGRD, k_BPDS, weights_BGQH)[0]
    return jax.lax.fori_loop(0, batch * groups * pieces, score, empty)[:, :queries, :keys]


def tile_scores(q_BQHD: Array, k_BSD: Array, weights_BQH: Array, use_relu: bool) -> Array:
    """Scores [B, Q, S] in the dtype of the weights; the bits of a score do not depend on its neighbours."""
    arrays = match_varying(q_BQHD, k_BSD, weights_BQH)
    return jax.lax.platform_dependent(
        *arrays,
        cpu=functools.partial(tile_scores_rowwise, use_relu=use_relu),
        default=functools.partial(tile_scores_blocked, use_relu=use_relu),
    )


def rankable(scores_BQS: Float[Array, "B Q S"], visible_BQS: Bool[Array, "B Q S"]) -> Array:
    """Scores as `top_k` ranks them by the rule: invisible is -inf and nothing else is, -0.0 is 0.0."""
    scores_BQS = jnp.maximum(scores_BQS, jnp.finfo(scores_BQS.dtype).min)
    scores_BQS = jnp.where(scores_BQS == 0, jnp.zeros((), scores_BQS.dtype), scores_BQS)
    # One sign for NaN: they rank by it.
    scores_BQS = jnp.where(jnp.isnan(scores_BQS), jnp.nan, scores_BQS)
    return jnp.where(visible_BQS, scores_BQS, -jnp.inf)


def merge_candidates(scores_BQN: Array, indices_BQN: Array, top_k: int) -> tuple[Array, Array]:
    """The best `top_k` of a list in which equal scores are in the order of their index."""
    best_BQK, places_BQK = jax.lax.top_k(scores_BQN, top_k)
    return best_BQK, jnp.take_along_axis(indices_BQN, places_BQK, axis=-1)


def ascending(indices_BQK: Array) -> Array:
    """Indices in ascending order, with the absent ones (`_NO_INDEX`) at the end as -1."""
    sorted_BQK = jnp.sort(indices_BQK, axis=-1)
    return jnp.where(sorted_BQK == _NO_INDEX, -1, sorted_BQK)


def select_from_scores(
    scores_BQS: Float[Array, "B Q S"], visible_BQS: Bool[Array, "B Q S"], top_k: int, key_tile: int = KEY_TILE
) -> Int[Array, "B Q top_k"]:
    """The selection stage alone: the `top_k` best visible keys of given scores, tile by tile."""
    scores_BQS = rankable(scores_BQS, visible_BQS)
    best = jnp.full((*scores_BQS.shape[:2], top_k), -jnp.inf, scores_BQS.dtype)
    indices = jnp.full(best.shape, _NO_INDEX, jnp.int32)
    positions = jnp.where(visible_BQS, jnp.arange(scores_BQS.shape[2], dtype=jnp.int32), _NO_INDEX)
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
            indices_BQK = jnp.where(jnp.isneginf(best_BQK), _NO_INDEX, indices_BQK)
            return jax.lax.dynamic_update_slice_in_dim(ranked_BQN, best_BQK, 0, axis=2), indices_BQK

    # The candidates, and after them the scores of a group of tiles.
    ranked = jnp.full((batch, queries, top_k + group * tile), -jnp.inf, dtype)
    indices = jnp.full((batch, queries, top_k), _NO_INDEX, jnp.int32)
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
    query_block: int = QUERY_BLOCK,
    key_tile: int = KEY_TILE,
    scores_of: Callable[[Array, Array, Array, bool], Array] = tile_scores,
) -> Int[Array, "B Q top_k"]:
    """`pallas_kernels.index_select.select` by tiles, whose sizes do not change the result.

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

        def candidates(block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            q, w, positions = block
            return _local_candidates(
                q, k_index, w, positions, page_table, offset, top_k, use_relu, key_tile, scores_of
            )

        block = min(queries, max(1, query_block // batch))
        scores, indices = jax.lax.map(
            candidates,
            (
                key_rows.split_queries(q_index, block, 0),
                key_rows.split_queries(weights.astype(dtype), block, 0),
                key_rows.split_queries(positions_BQ, block, -1),
            ),
        )
        scores = key_rows.join_queries(scores, queries)
        indices = key_rows.join_queries(indices, queries)
        if axis_name is not None:
            with jax.named_scope("merge_shards"):
                gather = functools.partial(
                    jax.lax.all_gather, axis_name=axis_name, axis=2, tiled=True, to="invarying"
                )
                _, indices = merge_candidates(gather(scores), gather(indices), top_k)
        return ascending(indices)


def _scores_of_rows(
    q_BQHD: Array, k_BQND: Array, weights_BQH: Array, exists_BQN: Array, use_relu: bool, dtype: jnp.dtype
) -> Array:
    dots_BQHN = jnp.einsum("bqhd,bqnd->bqhn", q_BQHD.astype(dtype), k_BQND.astype(dtype), precision=_HIGHEST)
    scores_BQN = _weigh_heads(weights_BQH.astype(dtype), dots_BQHN, q_BQHD.shape[-1], use_relu)
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
