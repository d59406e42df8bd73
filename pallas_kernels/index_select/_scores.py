"""Scores of queries and a tile of keys, with one order of additions, and how they rank."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Bool, Float
from pallas_kernels._varying import match_varying

_HIGHEST = jax.lax.Precision.HIGHEST
CPU_ROWS, CPU_KEYS = 32, 256
"""On a CPU a product has about this many rows, queries times heads, and this many keys."""


def _sum_heads(weights_xH: Array, dots_of: Callable[[int], Array], channels: int) -> Array:
    """Sum over the heads, one after the other, then the scale: one order of additions on every backend."""
    heads = weights_xH.shape[-1]
    total = weights_xH[..., 0, None] * dots_of(0)
    for head in range(1, heads):
        total = total + weights_xH[..., head, None] * dots_of(head)
    return (heads * channels) ** -0.5 * total


def weigh_heads(weights_xH: Array, dots_xHS: Array, channels: int, use_relu: bool) -> Array:
    """Scores [..., S] from the products [..., H, S] of a query's heads with keys."""
    if use_relu:
        dots_xHS = jax.nn.relu(dots_xHS)
    return _sum_heads(weights_xH, lambda head: dots_xHS[..., head, :], channels)


def tile_scores_blocked(q_BQHD: Array, k_BSD: Array, weights_BQH: Array, use_relu: bool) -> Array:
    """Scores [B, Q, S] of a block of queries and a tile of keys, by one matrix product."""
    dtype = weights_BQH.dtype
    if q_BQHD.dtype != k_BSD.dtype or q_BQHD.dtype != jnp.bfloat16:
        q_BQHD, k_BSD = q_BQHD.astype(dtype), k_BSD.astype(dtype)
    dots_BQHS = jnp.einsum("bqhd,bsd->bqhs", q_BQHD, k_BSD, precision=_HIGHEST, preferred_element_type=dtype)
    return weigh_heads(weights_BQH, dots_BQHS, q_BQHD.shape[-1], use_relu)


def queries_per_product(heads: int) -> int:
    """How many queries a product on a CPU takes: never fewer, nor more, so that bits do not depend on it."""
    return max(1, CPU_ROWS // heads)


def row_scores(q_RD: Array, k_PDS: Array, weights_QH: Array, use_relu: bool) -> Array:
    """Scores [Q, P S] on a CPU of the rows of `queries_per_product` queries and pieces of `CPU_KEYS` keys.

    On a CPU the order in which a matrix product adds depends on its shape, so the bits of a score would depend
    on how many queries and keys it is computed with. With a fixed shape they cannot.
    """
    (queries, heads), (pieces, channels, keys) = weights_QH.shape, k_PDS.shape
    q_PRD = jnp.broadcast_to(q_RD, (pieces, *q_RD.shape))
    dots_PRS = jnp.einsum("prd,pds->prs", q_PRD, k_PDS, precision=_HIGHEST)
    dots_PQHS = dots_PRS.reshape(pieces, queries, heads, keys)

    def dots_of(head: int) -> Array:
        # Head by head, for XLA would write the products again after a ReLU of all of them.
        dots_PQS = dots_PQHS[:, :, head]
        return jax.nn.relu(dots_PQS) if use_relu else dots_PQS

    scores_PQS = _sum_heads(weights_QH[None], dots_of, channels)
    return scores_PQS.swapaxes(0, 1).reshape(queries, pieces * keys)


def tile_scores_rowwise(q_BQHD: Array, k_BSD: Array, weights_BQH: Array, use_relu: bool) -> Array:
    """The scores of `tile_scores_blocked` by the small products of `row_scores`."""
    dtype = weights_BQH.dtype
    batch, queries, heads, channels = q_BQHD.shape
    keys = k_BSD.shape[1]
    group = queries_per_product(heads)
    groups, pieces = -(-queries // group), -(-keys // CPU_KEYS)
    padded_BSD = jnp.pad(k_BSD.astype(dtype), ((0, 0), (0, pieces * CPU_KEYS - keys), (0, 0)))
    # Keys along the lanes of a vector: twice as fast as one key after another.
    k_BPDS = padded_BSD.reshape(batch, pieces, CPU_KEYS, channels).swapaxes(2, 3)
    missing = ((0, 0), (0, groups * group - queries), (0, 0))
    q_BGRD = jnp.pad(q_BQHD.astype(dtype), (*missing, (0, 0))).reshape(batch, groups, group * heads, channels)
    weights_BGQH = jnp.pad(weights_BQH, missing).reshape(batch, groups, group, heads)

    def score(position: Array, scores_BQS: Array) -> Array:
        # Queries vary fastest, so that a piece of keys stays in the core's cache.
        sequence, rest = position // (groups * pieces), position % (groups * pieces)
        piece, number = rest // groups, rest % groups
        scores_QS = row_scores(
            q_BGRD[sequence, number], k_BPDS[sequence, piece][None], weights_BGQH[sequence, number], use_relu
        )
        place = (sequence, number * group, piece * CPU_KEYS)
        return jax.lax.dynamic_update_slice(scores_BQS, scores_QS[None], place)

    empty = jnp.zeros((batch, groups * group, pieces * CPU_KEYS), dtype)
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


def rankable(scores_BQS: Float[Array, "*x S"], visible_BQS: Bool[Array, "*x S"]) -> Array:
    """Scores as `top_k` ranks them by the rule: invisible is -inf and nothing else is, -0.0 is 0.0."""
    scores_BQS = jnp.maximum(scores_BQS, jnp.finfo(scores_BQS.dtype).min)
    scores_BQS = jnp.where(scores_BQS == 0, jnp.zeros((), scores_BQS.dtype), scores_BQS)
    # One sign for NaN: they rank by it.
    scores_BQS = jnp.where(jnp.isnan(scores_BQS), jnp.nan, scores_BQS)
    return jnp.where(visible_BQS, scores_BQS, -jnp.inf)
