"""Differentiable index scores of all keys, in blocks of queries and tiles of keys.

The products [block, heads, tile] are made anew in the backward pass; what is kept and returned has no heads.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.index_select.reference import MASKED_SCORE
from pallas_kernels.index_select.shapes import QUERY_BLOCK
from pallas_kernels.sparse_attention import rows as key_rows

_HIGHEST = jax.lax.Precision.HIGHEST

_PRODUCT_BYTES = 32 * 2**20
"""About the size of the products of one block and tile."""


def _tile_scores(q_BQHD: Array, k_BSD: Array, weights_BQH: Array, seen_BQS: Array, use_relu: bool) -> Array:
    dots_BQHS = jnp.einsum("bqhd,bsd->bqhs", q_BQHD, k_BSD, precision=_HIGHEST)
    if use_relu:
        dots_BQHS = jax.nn.relu(dots_BQHS)
    scale = (q_BQHD.shape[2] * q_BQHD.shape[3]) ** -0.5
    scores_BQS = scale * jnp.einsum("bqh,bqhs->bqs", weights_BQH, dots_BQHS, precision=_HIGHEST)
    return jnp.where(seen_BQS, scores_BQS, MASKED_SCORE)


def _split_keys(k_BSD: Array, tile: int) -> Array:
    """[B, S, D] as [tiles, B, tile, D], the last tile filled up."""
    return key_rows.split_queries(k_BSD, tile, 0)


def _sizes(batch: int, queries: int, heads: int, keys: int) -> tuple[int, int]:
    """Queries of a block and keys of a tile."""
    block = min(queries, max(1, QUERY_BLOCK // batch))
    return block, min(keys, max(128, _PRODUCT_BYTES // (4 * batch * block * heads)))


def _seen(positions_BQ: Array, first: Array, tile: int) -> Array:
    return first + jnp.arange(tile, dtype=jnp.int32) <= positions_BQ[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scores(q_BQHD, k_BSD, weights_BQH, positions_BQ, use_relu):
    batch, queries, heads, _ = q_BQHD.shape
    keys = k_BSD.shape[1]
    block, tile = _sizes(batch, queries, heads, keys)
    tiles = _split_keys(k_BSD, tile)
    starts = jnp.arange(tiles.shape[0], dtype=jnp.int32) * tile

    def of_block(part):
        q, w, positions = part

        def of_tile(step):
            k, first = step
            return _tile_scores(q, k, w, _seen(positions, first, tile), use_relu)

        scores = jnp.moveaxis(jax.lax.map(of_tile, (tiles, starts)), 0, 2)
        return scores.reshape(*positions.shape, -1)[..., :keys]

    blocks = tuple(
        key_rows.split_queries(a, block, fill)
        for a, fill in ((q_BQHD, 0), (weights_BQH, 0), (positions_BQ, -1))
    )
    return key_rows.join_queries(jax.lax.map(of_block, blocks), queries)


def _forward(q_BQHD, k_BSD, weights_BQH, positions_BQ, use_relu):
    residuals = (q_BQHD, k_BSD, weights_BQH, positions_BQ)
    return _scores(*residuals, use_relu), residuals


def _backward(use_relu, residuals, cotangent_BQS):
    q_BQHD, k_BSD, weights_BQH, positions_BQ = residuals
    batch, queries, heads, _ = q_BQHD.shape
    keys = k_BSD.shape[1]
    block, tile = _sizes(batch, queries, heads, keys)
    tiles = _split_keys(k_BSD, tile)
    starts = jnp.arange(tiles.shape[0], dtype=jnp.int32) * tile

    def of_block(dk, part):
        q, w, positions, cotangent = part
        per_tile = jnp.pad(cotangent, ((0, 0), (0, 0), (0, tiles.shape[0] * tile - keys)))
        per_tile = jnp.moveaxis(per_tile.reshape(*positions.shape, -1, tile), 2, 0)

        def of_tile(sums, step):
            k, first, ct = step
            seen = _seen(positions, first, tile)
            _, pullback = jax.vjp(lambda q, k, w: _tile_scores(q, k, w, seen, use_relu), q, k, w)
            dq, dk_tile, dw = pullback(ct)
            return (sums[0] + dq, sums[1] + dw), dk_tile

        zeros = match_varying(jnp.zeros_like(q), jnp.zeros_like(w), q)[:2]
        sums, dk_block = jax.lax.scan(of_tile, zeros, (tiles, starts, per_tile))
        return dk + dk_block, sums

    arrays = ((q_BQHD, 0), (weights_BQH, 0), (positions_BQ, -1), (cotangent_BQS, 0))
    blocks = tuple(key_rows.split_queries(a, block, fill) for a, fill in arrays)
    dk, (dq, dw) = jax.lax.scan(of_block, match_varying(jnp.zeros_like(tiles), tiles)[0], blocks)
    dk = key_rows.join_queries(dk, keys)
    return key_rows.join_queries(dq, queries), dk, key_rows.join_queries(dw, queries), None


_scores.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("use_relu",))
def scores_at(
    q_index: Float[Array, "B Q H D"],
    k_index: Float[Array, "B S D"],
    weights: Float[Array, "B Q H"],
    query_positions: Int[Array, "B Q"],
    use_relu: bool = True,
) -> Float[Array, "B Q S"]:
    """The dense form of `pallas_kernels.index_select.scores_at`."""
    with jax.named_scope("index_scores_dense"):
        dtype = key_rows.compute_dtype(q_index, k_index, weights)
        positions_BQ = query_positions.astype(jnp.int32)
        # What a query without keys holds meets a gradient of zero, which would not stop a NaN either.
        sees_BQ = positions_BQ >= 0
        q_index = jnp.where(sees_BQ[..., None, None], q_index, jnp.zeros((), q_index.dtype))
        weights = jnp.where(sees_BQ[..., None], weights, jnp.zeros((), weights.dtype))
        # A key that nobody sees may be NaN, which a gradient of zero would not stop.
        last_B1 = jnp.max(positions_BQ, axis=1, keepdims=True, initial=-1)
        used_BS = jnp.arange(k_index.shape[1], dtype=jnp.int32) <= last_B1
        k_BSD = jnp.where(used_BS[..., None], k_index, jnp.zeros((), k_index.dtype)).astype(dtype)
        arrays = match_varying(q_index.astype(dtype), k_BSD, weights.astype(dtype), positions_BQ)
        return _scores(*arrays, use_relu)
