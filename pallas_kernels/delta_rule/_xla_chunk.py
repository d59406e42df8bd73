"""What one chunk of the gated delta rule needs before its state is known, in portable JAX.

Within a chunk, with gc the inclusive cumulative log decay and S the state at its start (Kimi Linear,
arXiv 2510.26692):

    A[i, j] = <q_i exp(gc_i - gc_j), k_j>, j <= i;   L[i, j] = beta_i <k_i exp(gc_i - gc_j), k_j>, j < i
    u = (I + L)^-1 diag(beta) (v - (k exp(gc)) S)
    o = A u + (q exp(gc)) S;   S <- diag(exp(gc_C)) S + (k exp(gc_C - gc))^T u

No exponent here is a difference of sums over the chunk: exp(gc_i) exp(-gc_j) overflows under strong decay, and
gc_i - gc_j loses the small decays that follow a large one. The chunk is cut into blocks of 16 tokens. Between
blocks, the decay from j to i is the product of the row's decay since a boundary between them and the column's up to
it: both exponents are sums of values <= 0, so both factors are at most 1 and accurate. Within a block one boundary,
its middle, serves all pairs at once while every exponent seen from there is small (always when no token decays by
more than exp(-5.5)); the factors are then above 1 on one side and below on the other. Else the block is halved
recursively, and again no factor exceeds 1.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying
from pallas_kernels.delta_rule._inputs import einsum

SMALLEST_LOG_DECAY = -1e30
"""exp of it, and of any sum that contains it, is exactly zero; a sum over one chunk is finite in float32."""

_BLOCK_SIZE = 16

_LARGEST_EXPONENT = 44.0
"""Seen from a block's middle. exp of twice it is finite in float32, and a sum of this size is rounded by less than
2e-6, which is then the relative error of a factor."""


Inputs = tuple[Array | None, Array, Array, Array, Array]
"""q (None: no output is wanted), k, v, log_decay [B, T, H, K or V] and beta [B, T, H]."""


class Chunk(NamedTuple):
    """State-independent quantities of chunks; leading axes are free, C is the position in the chunk."""

    decayed_RK: Array
    """q exp(gc) above beta k exp(gc): [..., 2C, K] (only k's rows when no output is wanted)."""
    k_remaining_KC: Array
    """k exp(gc_C - gc): [..., K, C], as the product that needs it reads it."""
    total_decay_K: Array
    """exp(gc_C): [..., K]."""
    scores_CC: Array | None
    """A: [..., C, C]."""
    inverse_CC: Array
    """(I + L)^-1: [..., C, C]."""
    v_CV: Array
    """beta v: [..., C, V]."""


@functools.cache
def _sums_of_a_block(size: int) -> np.ndarray:
    """Weights [3 size, size] of a block's log decays: their sums from its start through each token, from after each
    token to its end, and from its middle through each token (less, for tokens before the middle, what follows)."""
    token = np.arange(size)
    since_start = token[None, :] <= token[:, None]
    middle = size // 2
    since_middle = (token >= middle)[None, :] & since_start
    until_middle = (token < middle)[None, :] & ~since_start
    from_middle = np.where((token >= middle)[:, None], since_middle, -1.0 * until_middle)
    return np.concatenate([since_start, ~since_start, from_middle]).astype(np.float64)


@functools.cache
def _halvings(size: int) -> tuple[np.ndarray, np.ndarray]:
    """All halvings of a block of `size` tokens.

    Returns 0/1 weights [levels, size, size] and the pairs of a row and a column that belong to each level
    [levels, size, size]. weights[level, i] selects the tokens whose log decays add up to token i's exponent:
    from the middle through i for a row, after i up to the middle for a column.
    """
    token = np.arange(size)
    weights, is_pair = [], []
    half = 1
    while half < size:
        middle = token // (2 * half) * 2 * half + half
        row = token >= middle
        since_middle = (token[None, :] >= middle[:, None]) & (token[None, :] <= token[:, None])
        until_middle = (token[None, :] > token[:, None]) & (token[None, :] < middle[:, None])
        weights.append(np.where(row[:, None], since_middle, until_middle))
        is_pair.append(row[:, None] & ~row[None, :] & (middle[:, None] == middle[None, :]))
        half *= 2
    return np.stack(weights), np.stack(is_pair)


def _weighted(weights: np.ndarray, log_decay_NIK: Array) -> Array:
    """[R, I] by [..., N, I, K] -> [..., N, R, K]. The weights are repeated for every block: a product that shares
    them would be done on a transposed copy of the decays."""
    repeated = jnp.broadcast_to(
        jnp.asarray(weights, log_decay_NIK.dtype), (*log_decay_NIK.shape[:-2], *weights.shape)
    )
    return einsum("...ri,...ik->...rk", repeated, log_decay_NIK)


def _near_at_once(rows_NRK: Array, k_NJK: Array, from_middle_NIK: Array, log_decay_NIK: Array) -> Array:
    """Scores within blocks, [..., N, R, J], each decay as one product of factors seen from the block's middle."""
    size = k_NJK.shape[-2]
    # Where the other branch is taken and both are computed (a vmapped condition), nothing may overflow, in the gradient
    # neither: that of a quotient divides by the square.
    exponent_NIK = jnp.clip(from_middle_NIK, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    row_NIK = jnp.exp(exponent_NIK)
    row_NRK = jnp.concatenate([row_NIK] * (rows_NRK.shape[-2] // size), axis=-2)
    return einsum("...rk,...jk->...rj", rows_NRK * row_NRK, k_NJK * jnp.exp(-exponent_NIK))


def _near_by_halvings(rows_NRK: Array, k_NJK: Array, from_middle_NIK: Array, log_decay_NIK: Array) -> Array:
    """As `_near_at_once`, for any decay."""
    size = k_NJK.shape[-2]
    copies = rows_NRK.shape[-2] // size
    weights, is_pair = _halvings(size)
    scores = jnp.concatenate([jnp.eye(size, dtype=k_NJK.dtype)] * copies) * jnp.sum(
        rows_NRK * jnp.concatenate([k_NJK] * copies, axis=-2), axis=-1, keepdims=True
    )
    for level in range(len(weights)):
        decay_NIK = jnp.exp(_weighted(weights[level], log_decay_NIK))
        level_scores = einsum(
            "...rk,...jk->...rj",
            rows_NRK * jnp.concatenate([decay_NIK] * copies, axis=-2),
            k_NJK * decay_NIK,
        )
        pairs = np.concatenate([is_pair[level]] * copies)
        scores = jnp.where(pairs, level_scores, scores)
    return scores


def _near_scores(rows_NRK: Array, k_NJK: Array, from_middle_NIK: Array, log_decay_NIK: Array) -> Array:
    # Each branch is computed again in the backward pass; else both branches' intermediate arrays would be kept,
    # filled with zeros for the one that was not taken.
    at_once, by_halvings = (jax.checkpoint(f, prevent_cse=False) for f in (_near_at_once, _near_by_halvings))
    # The sums grow away from the middle, so the first and the last token tell. A reduction of truth values: XLA for
    # CPUs would divide a maximum among threads.
    ends_N2K = jnp.stack([from_middle_NIK[..., 0, :], from_middle_NIK[..., -1, :]], axis=-2)
    small = jnp.all(jnp.abs(ends_N2K) <= _LARGEST_EXPONENT)
    return jax.lax.cond(small, at_once, by_halvings, rows_NRK, k_NJK, from_middle_NIK, log_decay_NIK)


def _block_lower(upper_left: Array, lower_left: Array, lower_right: Array) -> Array:
    top = jnp.concatenate([upper_left, jnp.zeros_like(lower_left)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([lower_left, lower_right], axis=-1)], axis=-2)


def _halves(x: Array) -> tuple[Array, Array]:
    """Even and odd blocks of [..., N, size, M]."""
    x = x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2, *x.shape[-2:])
    return x[..., 0, :, :], x[..., 1, :, :]


def _substitute(lower_NN: Array) -> Array:
    """(I + L)^-1 of strictly lower triangular blocks [..., N, N], row by row, in all of them at once."""
    size = lower_NN.shape[-1]
    # Rows first: [I, J, ...] of L and [I, ..., N] of the inverse, so that a step takes whole pieces of memory.
    lower = jnp.moveaxis(lower_NN, (-2, -1), (0, 1))
    identity = jnp.eye(size, dtype=lower.dtype).reshape(size, *(1,) * (lower.ndim - 2), size)
    inverse = jnp.broadcast_to(identity, (size, *lower.shape[2:], size))

    def row(i: Array, inverse: Array) -> Array:
        weights = jax.lax.dynamic_index_in_dim(lower, i, keepdims=False)
        solved = jax.lax.dynamic_index_in_dim(inverse, i, keepdims=False)
        # Written out: a sum over an axis would be divided among threads. Rows from i on have no weight.
        for j in range(size - 1):
            solved = solved - weights[j][..., None] * inverse[j]
        return jax.lax.dynamic_update_index_in_dim(inverse, solved, i, 0)

    inverse = jax.lax.fori_loop(1, size, row, match_varying(inverse, lower)[0])
    return jnp.moveaxis(inverse, 0, -2)


def _substitute_in_blocks(lower_CC: Array) -> Array:
    """(I + L)^-1 by substitution in the blocks on the diagonal, and from two inverses P and Q that of their block,
    [[P, 0], [-Q X P, Q]]."""
    chunk = lower_CC.shape[-1]
    size = min(chunk, _BLOCK_SIZE)

    def blocks(first: int, size: int) -> Array:
        """Of size x size, every second block below the diagonal (first = 1), or those on it (first = 0)."""
        count = chunk // size
        parts = lower_CC.reshape(*lower_CC.shape[:-2], count, size, count, size)
        return jnp.stack([parts[..., i, :, i - first, :] for i in range(first, count, 1 + first)], axis=-3)

    inverse = _substitute(blocks(0, size))
    while size < chunk:
        upper, lower = _halves(inverse)
        corner = einsum("...ij,...jk->...ik", einsum("...ij,...jk->...ik", lower, blocks(1, size)), upper)
        inverse = _block_lower(upper, -corner, lower)
        size *= 2
    return inverse[..., 0, :, :]


def _solve(lower_CC: Array) -> Array:
    identity = jnp.broadcast_to(jnp.eye(lower_CC.shape[-1], dtype=lower_CC.dtype), lower_CC.shape)
    return jax.lax.linalg.triangular_solve(lower_CC, identity, left_side=True, lower=True, unit_diagonal=True)


@jax.custom_vjp
def _unit_lower_inverse(lower_CC: Array) -> Array:
    """(I + L)^-1 by substitution: its entries stay bounded because every I - beta k k^T contracts.

    On CPUs not by LAPACK, whose threads wait for each other far longer than such small systems take.
    """
    return jax.lax.platform_dependent(lower_CC, cpu=_substitute_in_blocks, default=_solve)


def _unit_lower_inverse_forward(lower_CC: Array) -> tuple[Array, Array]:
    inverse_CC = _unit_lower_inverse(lower_CC)
    return inverse_CC, inverse_CC


def _unit_lower_inverse_backward(inverse_CC: Array, ct_CC: Array) -> tuple[Array]:
    transposed = jnp.swapaxes(inverse_CC, -2, -1)
    ct_lower = -einsum("...ij,...jk->...ik", einsum("...ij,...jk->...ik", transposed, ct_CC), transposed)
    return (jnp.tril(ct_lower, -1),)


_unit_lower_inverse.defvjp(_unit_lower_inverse_forward, _unit_lower_inverse_backward)


def prepare_chunks(q_CK: Array | None, k_CK: Array, v_CV: Array, log_decay_CK: Array, beta_C: Array) -> Chunk:
    """Everything about chunks that does not depend on the state.

    The chunk's size must be a power of two and at least 2.
    """
    chunk = k_CK.shape[-2]
    size = min(chunk, _BLOCK_SIZE)

    def in_blocks(x: Array) -> Array:
        """[..., C, K] -> [..., blocks, size, K]."""
        return x.reshape(*x.shape[:-2], chunk // size, size, x.shape[-1])

    # Rows R: beta k for L and, above it, q for A when an output is wanted; `sources` are these, one after another.
    # N: blocks, I and J: tokens of a block.
    sources = [in_blocks(x) for x in ([] if q_CK is None else [q_CK]) + [k_CK * beta_C[..., None]]]
    k_NJK, log_decay_NIK = in_blocks(k_CK), in_blocks(log_decay_CK)
    sums = _weighted(_sums_of_a_block(size), log_decay_NIK)
    near = _near_scores(jnp.concatenate(sources, axis=-2), k_NJK, sums[..., 2 * size :, :], log_decay_NIK)
    lower = np.tril(np.ones((size, size), bool), -1)
    zero = jnp.zeros((), near.dtype)
    # Of A the diagonal is kept.
    scores = [
        jnp.where(lower if source is sources[-1] else np.tril(np.ones((size, size), bool)), part, zero)
        for source, part in zip(sources, jnp.split(near, len(sources), axis=-2), strict=True)
    ]
    since_start = jnp.exp(sums[..., :size, :])
    decayed = [source * since_start for source in sources]
    remaining = k_NJK * jnp.exp(sums[..., size : 2 * size, :])
    total = since_start[..., -1:, :]
    while size < chunk:
        lasts = [_halves(x) for x in decayed]
        remaining_first, remaining_second = _halves(remaining)
        corner = einsum(
            "...rk,...jk->...rj", jnp.concatenate([second for _, second in lasts], axis=-2), remaining_first
        )
        scores = [
            _block_lower(first, part, second)
            for (first, second), part in zip(
                map(_halves, scores), jnp.split(corner, len(sources), axis=-2), strict=True
            )
        ]
        total_first, total_second = _halves(total)
        decayed = [jnp.concatenate([first, second * total_first], axis=-2) for first, second in lasts]
        remaining = jnp.concatenate([remaining_first * total_second, remaining_second], axis=-2)
        total = total_first * total_second
        size *= 2
    scores, decayed = [x[..., 0, :, :] for x in scores], [x[..., 0, :, :] for x in decayed]
    inverse_CC = _unit_lower_inverse(scores[-1])
    return Chunk(
        decayed_RK=jnp.concatenate(decayed, axis=-2),
        k_remaining_KC=jnp.swapaxes(remaining[..., 0, :, :], -2, -1),
        total_decay_K=total[..., 0, 0, :],
        scores_CC=None if q_CK is None else scores[0],
        inverse_CC=inverse_CC,
        v_CV=v_CV * beta_C[..., None],
    )


def advance(state_KV: Array, chunk: Chunk) -> tuple[Array, Array | None]:
    """Carry the state through one chunk; the output [..., C, V] if scores are there."""
    from_state = einsum("...rk,...kv->...rv", chunk.decayed_RK, state_KV)
    size = chunk.v_CV.shape[-2]
    update_CV = einsum("...ij,...jv->...iv", chunk.inverse_CC, chunk.v_CV - from_state[..., -size:, :])
    o_CV = None
    if chunk.scores_CC is not None:
        o_CV = from_state[..., :size, :] + einsum("...ij,...jv->...iv", chunk.scores_CC, update_CV)
    added_KV = einsum("...ki,...iv->...kv", chunk.k_remaining_KC, update_CV)
    return chunk.total_decay_K[..., None] * state_KV + added_KV, o_CV
