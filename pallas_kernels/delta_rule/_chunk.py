"""One chunk of the gated delta rule for one head, on values that fit a core's registers and vector memory.

The mathematics of `pallas_kernels.delta_rule.xla`, written with what a TPU core has: two-dimensional matrix
products, rotations of rows, selects. Differentiable, so that the backward kernel is the derivative of this
function; the derivatives of the pieces that matter are given here in the same vocabulary.

With gc the inclusive cumulative log decay and S the state at the chunk's start (Kimi Linear, arXiv 2510.26692):

    A[i, j] = <q_i exp(gc_i - gc_j), k_j>, j <= i;   L[i, j] = beta_i <k_i exp(gc_i - gc_j), k_j>, j < i
    u = (I + L)^-1 diag(beta) (v - (k exp(gc)) S)
    o = A u + (q exp(gc)) S;   S <- diag(exp(gc_C)) S + (k exp(gc_C - gc))^T u
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array

SMALLEST_LOG_DECAY = -1e30
"""exp of it, and of any sum that contains it, is exactly zero; a sum over one chunk is finite in float32."""


def _dot(a: Array, b: Array, contract_a: int, contract_b: int) -> Array:
    return jax.lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


# The products and their derivatives stay in these three forms, which the matrix unit takes as they are.
@jax.custom_vjp
def _matmul(a: Array, b: Array) -> Array:
    return _dot(a, b, 1, 0)


@jax.custom_vjp
def _matmul_transposed_right(a: Array, b: Array) -> Array:
    return _dot(a, b, 1, 1)


@jax.custom_vjp
def _matmul_transposed_left(a: Array, b: Array) -> Array:
    return _dot(a, b, 0, 0)


_matmul.defvjp(
    lambda a, b: (_dot(a, b, 1, 0), (a, b)), lambda r, ct: (_dot(ct, r[1], 1, 1), _dot(r[0], ct, 0, 0))
)
_matmul_transposed_right.defvjp(
    lambda a, b: (_dot(a, b, 1, 1), (a, b)), lambda r, ct: (_dot(ct, r[1], 1, 0), _dot(ct, r[0], 0, 0))
)
_matmul_transposed_left.defvjp(
    lambda a, b: (_dot(a, b, 0, 0), (a, b)), lambda r, ct: (_dot(r[1], ct, 1, 1), _dot(r[0], ct, 1, 0))
)


@jax.custom_vjp
def _row_sums(x: Array) -> Array:
    """[R, L] -> [R, 1]."""
    return jnp.sum(x, axis=1, keepdims=True)


_row_sums.defvjp(lambda x: (_row_sums(x), x), lambda x, ct: (jnp.broadcast_to(ct, x.shape),))


def _rows(shape: tuple[int, ...]) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _columns(shape: tuple[int, int]) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def diagonal(size: int) -> Array:
    """[size, size], True on the diagonal."""
    return _rows((size, size)) == _columns((size, size))


def to_column(row: Array) -> Array:
    """[1, C] -> [C, 1]."""
    size = row.shape[1]
    spread = jnp.broadcast_to(row, (size, size))
    return jnp.sum(jnp.where(diagonal(size), spread, jnp.zeros_like(spread)), axis=1, keepdims=True)


def to_row(column: Array) -> Array:
    """[C, 1] -> [1, C]."""
    size = column.shape[0]
    spread = jnp.broadcast_to(column, (size, size))
    return jnp.sum(jnp.where(diagonal(size), spread, jnp.zeros_like(spread)), axis=0, keepdims=True)


def _is_pair(size: int, half: int) -> Array:
    """Rows in the second half and columns in the first half of the same block of 2 `half` tokens."""
    row, column = _rows((size, size)), _columns((size, size))
    same_block = (row ^ column) < 2 * half
    return same_block & ((row & half) != 0) & ((column & half) == 0)


def _sibling(x: Array, half: int) -> Array:
    """Row i holds row i ^ half: in a block of 2 `half` rows that is the same row of its other half."""
    size = x.shape[0]
    second = (_rows(x.shape) & half) != 0
    return jnp.where(second, pltpu.roll(x, half, 0), pltpu.roll(x, size - half, 0))


@jax.custom_vjp
def _exponents(log_decay_CK: Array) -> tuple[Array, ...]:
    """Sums of log decays at every halving of the chunk, then from its start and to its end, then over it.

    At the halving into blocks of `half` tokens a row of a second half sums from the middle through itself, a
    row of a first half from after itself to the middle. No sum is a difference: none overflows as an exponent
    and none loses small decays beside large ones.
    """
    size = log_decay_CK.shape[0]
    since_start, until_end, total = log_decay_CK, jnp.zeros_like(log_decay_CK), log_decay_CK
    exponents = []
    half = 1
    while half < size:
        second = (_rows(log_decay_CK.shape) & half) != 0
        exponents.append(jnp.where(second, since_start, until_end))
        other = _sibling(total, half)
        nothing = jnp.zeros_like(other)
        since_start = since_start + jnp.where(second, other, nothing)
        until_end = until_end + jnp.where(second, nothing, other)
        total = total + other
        half *= 2
    return (*exponents, since_start, until_end, total)


def _exponents_backward(_: None, ct: tuple[Array, ...]) -> tuple[Array]:
    *ct_exponents, ct_start, ct_end, ct_total = ct
    for level in reversed(range(len(ct_exponents))):
        half = 2**level
        second = (_rows(ct_total.shape) & half) != 0
        # The exchange of halves is its own transpose.
        ct_total = ct_total + _sibling(ct_total + jnp.where(second, ct_start, ct_end), half)
        ct_level, nothing = ct_exponents[level], jnp.zeros_like(ct_total)
        ct_start = ct_start + jnp.where(second, ct_level, nothing)
        ct_end = ct_end + jnp.where(second, nothing, ct_level)
    return (ct_total + ct_start,)


_exponents.defvjp(lambda log_decay_CK: (_exponents(log_decay_CK), None), _exponents_backward)


def _inverse(lower_CC: Array) -> Array:
    """(I + L)^-1 by block forward substitution along the halvings, [[P, 0], [-Q X P, Q]].

    With the inverses of the halves on the diagonal the corners of one halving are one masked product. Never a
    product of doubled powers, which cancels; the entries stay bounded because every I - beta k k^T contracts.
    """
    size = lower_CC.shape[0]
    zeros = jnp.zeros_like(lower_CC)
    inverse = jnp.where(diagonal(size), jnp.ones_like(lower_CC), zeros)
    half = 1
    while half < size:
        corner = jnp.where(_is_pair(size, half), lower_CC, zeros)
        if half > 1:
            corner = _dot(inverse, _dot(corner, inverse, 1, 0), 1, 0)
        inverse = inverse - corner
        half *= 2
    return inverse


@jax.custom_vjp
def _solve(lower_CC: Array, right_CV: Array) -> Array:
    """(I + L)^-1 right."""
    return _dot(_inverse(lower_CC), right_CV, 1, 0)


def _solve_forward(lower_CC: Array, right_CV: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = _inverse(lower_CC)
    update_CV = _dot(inverse, right_CV, 1, 0)
    return update_CV, (inverse, update_CV)


def _solve_backward(residuals: tuple[Array, Array], ct_CV: Array) -> tuple[Array, Array]:
    inverse, update_CV = residuals
    ct_right_CV = _dot(inverse, ct_CV, 0, 0)
    # Only entries below the diagonal are read, and the mask that made them zeroes the rest here too.
    return -_dot(ct_right_CV, update_CV, 1, 1), ct_right_CV


_solve.defvjp(_solve_forward, _solve_backward)


@jax.custom_vjp
def _as_column(total_CK: Array) -> Array:
    """[C, K] with equal rows -> [K, 1]."""
    # The mean over a power of two of equal numbers is exact.
    return jnp.sum(jnp.transpose(total_CK), axis=1, keepdims=True) * (1.0 / total_CK.shape[0])


def _as_column_backward(total_CK: Array, ct_K1: Array) -> tuple[Array]:
    size, width = total_CK.shape
    return (jnp.transpose(jnp.broadcast_to(ct_K1 * (1.0 / size), (width, size))),)


_as_column.defvjp(lambda total_CK: (_as_column(total_CK), total_CK), _as_column_backward)


def advance(
    state_KV: Array, q_CK: Array | None, k_CK: Array, v_CV: Array, log_decay_CK: Array, beta_C1: Array
) -> tuple[Array, Array | None]:
    """The state after the chunk, and its outputs where q is given.

    All float32; the number of rows is a power of two; every log decay between SMALLEST_LOG_DECAY and 0.
    """
    size = k_CK.shape[0]
    *exponents, since_start, until_end, total = _exponents(log_decay_CK)
    scaled_CK = k_CK * beta_C1
    zeros = jnp.zeros((size, size), jnp.float32)
    lower_CC, scores_CC = zeros, zeros
    for level, exponent in enumerate(exponents):
        pair, decay_CK = _is_pair(size, 2**level), jnp.exp(exponent)
        columns_CK = k_CK * decay_CK
        lower = _matmul_transposed_right(scaled_CK * decay_CK, columns_CK)
        lower_CC = lower_CC + jnp.where(pair, lower, zeros)
        if q_CK is not None:
            scores = _matmul_transposed_right(q_CK * decay_CK, columns_CK)
            scores_CC = scores_CC + jnp.where(pair, scores, zeros)
    decay_CK = jnp.exp(since_start)
    error_CV = v_CV - _matmul(k_CK * decay_CK, state_KV)
    update_CV = _solve(lower_CC, beta_C1 * error_CV)
    o_CV = None
    if q_CK is not None:
        own_C1 = _row_sums(q_CK * k_CK)
        o_CV = _matmul(q_CK * decay_CK, state_KV) + _matmul(scores_CC, update_CV) + own_C1 * update_CV
    added_KV = _matmul_transposed_left(k_CK * jnp.exp(until_end), update_CV)
    return _as_column(jnp.exp(total)) * state_KV + added_KV, o_CV
