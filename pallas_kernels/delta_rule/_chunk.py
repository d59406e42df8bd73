"""One chunk of the gated delta rule for two heads at once, on values that fit a core's vector memory.

With gc the inclusive cumulative log decay and S the state at the chunk's start (Kimi Linear, arXiv 2510.26692):

    A[i, j] = <q_i exp(gc_i - gc_j), k_j>, j <= i;   L[i, j] = beta_i <k_i exp(gc_i - gc_j), k_j>, j < i
    u = (I + L)^-1 diag(beta) (v - (k exp(gc)) S)
    o = A u + (q exp(gc)) S;   S <- diag(exp(gc_C)) S + (k exp(gc_C - gc))^T u

The tokens of the heads lie below each other, R = 2 x 64 rows: the matrices A and L of both are the blocks on the
diagonal of one [R, R], which fills the matrix unit and gives its long chains of products twice the work. Written with
what a TPU core has: two-dimensional products, rotations of rows, selects. Differentiable, so that the backward kernel
is the derivative of this function; the derivatives of the pieces that matter are given here in the same vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array

SMALLEST_LOG_DECAY = -1e30
"""exp of it, and of any sum that contains it, is exactly zero; a sum over one chunk is finite in float32."""

_NEAR = 16
"""Tokens of the blocks on the diagonal, whose scores are one product where the decays allow."""

_NEAR_BOUND = -40.5
"""Smallest sum of log decays over half a near block for that: exp of twice its negative is finite in float32. A decay
of at least exp(-5) per token, the bound of the public configurations, always passes."""


def _plain_dot(
    a: Array, b: Array, contract_a: int, contract_b: int, precision: jax.lax.Precision | None
) -> Array:
    return jax.lax.dot_general(
        a,
        b,
        (((contract_a,), (contract_b,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _halves(x: Array) -> tuple[Array, Array]:
    """bfloat16 x_1 + x_2 = x to 16 bits."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _dot(split: bool, a: Array, b: Array, contract_a: int, contract_b: int) -> Array:
    """A float32 product: by three bfloat16 products (relative error about 2^-16) if `split`, else by six (2^-24)."""
    if not split:
        return _plain_dot(a, b, contract_a, contract_b, jax.lax.Precision.HIGHEST)
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    small = _plain_dot(a1, b2, contract_a, contract_b, None) + _plain_dot(
        a2, b1, contract_a, contract_b, None
    )
    return _plain_dot(a1, b1, contract_a, contract_b, None) + small


# The products and their derivatives stay in these three forms, which the matrix unit takes as they are.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(split: bool, a: Array, b: Array) -> Array:
    return _dot(split, a, b, 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_transposed_right(split: bool, a: Array, b: Array) -> Array:
    return _dot(split, a, b, 1, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_transposed_left(split: bool, a: Array, b: Array) -> Array:
    return _dot(split, a, b, 0, 0)


_matmul.defvjp(
    lambda split, a, b: (_dot(split, a, b, 1, 0), (a, b)),
    lambda split, r, ct: (_dot(split, ct, r[1], 1, 1), _dot(split, r[0], ct, 0, 0)),
)
_matmul_transposed_right.defvjp(
    lambda split, a, b: (_dot(split, a, b, 1, 1), (a, b)),
    lambda split, r, ct: (_dot(split, ct, r[1], 1, 0), _dot(split, ct, r[0], 0, 0)),
)
_matmul_transposed_left.defvjp(
    lambda split, a, b: (_dot(split, a, b, 0, 0), (a, b)),
    lambda split, r, ct: (_dot(split, r[1], ct, 1, 1), _dot(split, r[0], ct, 1, 0)),
)


@jax.custom_vjp
def _row_sums(x: Array) -> Array:
    """[R, L] -> [R, 1]."""
    return jnp.sum(x, axis=1, keepdims=True)


_row_sums.defvjp(lambda x: (_row_sums(x), x), lambda x, ct: (jnp.broadcast_to(ct, x.shape),))


def _rows(shape: tuple[int, ...]) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _columns(shape: tuple[int, ...]) -> Array:
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


def _is_pair(shape: tuple[int, int], half: int) -> Array:
    """Rows in the second half and columns in the first half of the same block of 2 `half` tokens; the rows repeat
    where there are more than columns."""
    row, column = _rows(shape) & (shape[1] - 1), _columns(shape)
    same_block = (row ^ column) < 2 * half
    return same_block & ((row & half) != 0) & ((column & half) == 0)


def _sibling(x: Array, half: int) -> Array:
    """Row i holds row i ^ half: in a block of 2 `half` rows that is the same row of its other half."""
    size = x.shape[0]
    second = (_rows(x.shape) & half) != 0
    return jnp.where(second, pltpu.roll(x, half, 0), pltpu.roll(x, size - half, 0))


def _take_rows(x: Array, half: int) -> Array:
    """[R, L] -> [R / 2, L]: the rows of the second halves of all blocks of 2 `half` rows."""
    return jnp.concatenate([x[i : i + half] for i in range(half, x.shape[0], 2 * half)], axis=0)


def _put_rows(x: Array, half: int) -> Array:
    """[R / 2, L] -> [R, L]: the transpose of `_take_rows`, zeros in the first halves."""
    nothing = jnp.zeros((half, x.shape[1]), x.dtype)
    pieces = [part for i in range(0, x.shape[0], half) for part in (nothing, x[i : i + half])]
    return jnp.concatenate(pieces, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _second_halves(x: Array, half: int) -> Array:
    return _take_rows(x, half)


_second_halves.defvjp(lambda x, half: (_take_rows(x, half), None), lambda half, _, ct: (_put_rows(ct, half),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _split_rows(x: Array, parts: int) -> tuple[Array, ...]:
    size = x.shape[0] // parts
    return tuple(x[i * size : (i + 1) * size] for i in range(parts))


_split_rows.defvjp(
    lambda x, parts: (_split_rows(x, parts), None), lambda parts, _, ct: (jnp.concatenate(ct, axis=0),)
)


_TILE = 8
"""Rows of a vector register."""


def _sums_within_tiles(x_NTK: Array, backwards: bool, own: bool) -> Array:
    """Sums over the rows before each row of its tile, or after it, with or without its own."""
    row = jax.lax.broadcasted_iota(jnp.int32, x_NTK.shape, 1)
    zeros = jnp.zeros_like(x_NTK)

    def shifted(x: Array, by: int) -> Array:
        if backwards:
            return jnp.where(row < _TILE - by, pltpu.roll(x, _TILE - by, 1), zeros)
        return jnp.where(row >= by, pltpu.roll(x, by, 1), zeros)

    sums = x_NTK if own else shifted(x_NTK, 1)
    for by in (1, 2, 4):
        sums = sums + shifted(sums, by)
    return sums


# Each is the transpose of the same sums in the other direction.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _tile_sums(x_NTK: Array, backwards: bool, own: bool) -> Array:
    return _sums_within_tiles(x_NTK, backwards, own)


_tile_sums.defvjp(
    lambda x, backwards, own: (_sums_within_tiles(x, backwards, own), None),
    lambda backwards, own, _, ct: (_sums_within_tiles(ct, not backwards, own),),
)


@jax.custom_vjp
def _last_row(x_TK: Array) -> Array:
    """[T, K] -> its last row, in every row."""
    return jnp.broadcast_to(x_TK[-1:], x_TK.shape)


def _last_row_backward(_: None, ct_TK: Array) -> tuple[Array]:
    total = jnp.broadcast_to(jnp.sum(ct_TK, axis=0, keepdims=True), ct_TK.shape)
    return (jnp.where(_rows(ct_TK.shape) == ct_TK.shape[0] - 1, total, jnp.zeros_like(total)),)


_last_row.defvjp(lambda x_TK: (_last_row(x_TK), None), _last_row_backward)


class _Sums(NamedTuple):
    """Sums of log decays over a chunk's tokens, [R, K]; `total` as one tile of equal rows for each chunk.

    `at[half]`: at the halving into blocks of `half` tokens a row of a second half sums from the middle through itself,
    a row of a first half from after itself to the middle.
    """

    at: dict[int, Array]
    since_start: Array
    until_end: Array
    total: tuple[Array, ...]


def _below(tiles: Sequence[Array]) -> Array:
    return jnp.concatenate(tiles, axis=0)


def _sums(log_decay_RK: Array, size: int) -> _Sums:
    """Of chunks of `size` tokens. No sum is a difference: none overflows as an exponent and none loses small decays
    beside large ones."""
    rows, width = log_decay_RK.shape
    count = rows // _TILE
    since, until = (
        list(
            _split_rows(
                _tile_sums(log_decay_RK.reshape(count, _TILE, width), backwards, own).reshape(rows, width),
                count,
            )
        )
        for backwards, own in ((False, True), (True, False))
    )
    # One for each block of the halving; a block's rows share it.
    totals = [_last_row(tile) for tile in since]
    at = {}
    half = 1
    while half * _TILE < size:
        second = [(i & half) != 0 for i in range(count)]
        at[half * _TILE] = _below([since[i] if second[i] else until[i] for i in range(count)])
        for i in range(count):
            sibling = totals[(i // half) ^ 1]
            if second[i]:
                since[i] = since[i] + sibling
            else:
                until[i] = until[i] + sibling
        totals = [totals[i] + totals[i + 1] for i in range(0, len(totals), 2)]
        half *= 2
    return _Sums(at, _below(since), _below(until), tuple(totals))


@jax.custom_vjp
def _near_exponents(log_decay_RK: Array) -> tuple[Array, ...]:
    """Sums of log decays, as `_Sums.at`, at the halvings into blocks of 1 to `_NEAR` / 2 tokens."""
    since_middle, until_middle, total = log_decay_RK, jnp.zeros_like(log_decay_RK), log_decay_RK
    exponents = []
    half = 1
    while half < _NEAR:
        second = (_rows(log_decay_RK.shape) & half) != 0
        exponents.append(jnp.where(second, since_middle, until_middle))
        other = _sibling(total, half)
        nothing = jnp.zeros_like(other)
        since_middle = since_middle + jnp.where(second, other, nothing)
        until_middle = until_middle + jnp.where(second, nothing, other)
        total = total + other
        half *= 2
    return tuple(exponents)


def _near_exponents_backward(_: None, ct_exponents: tuple[Array, ...]) -> tuple[Array]:
    ct_since = ct_until = ct_total = jnp.zeros_like(ct_exponents[0])
    for level in reversed(range(len(ct_exponents))):
        half = 2**level
        second = (_rows(ct_total.shape) & half) != 0
        # The exchange of halves is its own transpose.
        ct_total = ct_total + _sibling(ct_total + jnp.where(second, ct_since, ct_until), half)
        ct_level, nothing = ct_exponents[level], jnp.zeros_like(ct_total)
        ct_since = ct_since + jnp.where(second, ct_level, nothing)
        ct_until = ct_until + jnp.where(second, nothing, ct_level)
    return (ct_total + ct_since,)


_near_exponents.defvjp(lambda log_decay_RK: (_near_exponents(log_decay_RK), None), _near_exponents_backward)


def _repeat(x: Array, rows: int) -> Array:
    return x if x.shape[0] == rows else jnp.concatenate([x] * (rows // x.shape[0]), axis=0)


def _near_by_halvings(
    split: bool, rows_SK: Array, k_RK: Array, log_decay_RK: Array, middle_RK: Array
) -> Array:
    """Any decays: every pair of tokens of a near block meets at the one halving that parts them."""
    del middle_RK
    shape = (rows_SK.shape[0], k_RK.shape[0])
    scores_SR = jnp.zeros(shape, jnp.float32)
    for level, exponent in enumerate(_near_exponents(log_decay_RK)):
        decay_RK = jnp.exp(exponent)
        scores = _matmul_transposed_right(split, rows_SK * _repeat(decay_RK, shape[0]), k_RK * decay_RK)
        scores_SR = scores_SR + jnp.where(_is_pair(shape, 2**level), scores, jnp.zeros_like(scores))
    return scores_SR


def _near_at_once(split: bool, rows_SK: Array, k_RK: Array, log_decay_RK: Array, middle_RK: Array) -> Array:
    """Decays within `_NEAR_BOUND`: one product, with the exponents counted from the block's middle."""
    del log_decay_RK
    second = (_rows(middle_RK.shape) & (_NEAR // 2)) != 0
    since_middle_RK = jnp.where(second, middle_RK, -middle_RK)
    left_SK = rows_SK * _repeat(jnp.exp(since_middle_RK), rows_SK.shape[0])
    return _matmul_transposed_right(split, left_SK, k_RK * jnp.exp(-since_middle_RK))


Operands = tuple[Array, Array, Array, Array]


def _near_products(split: bool, function: Any, *operands: Operands) -> list[Array]:
    return [function(split, *x) for x in operands]


def _near_gradients(split: bool, function: Any, ct: Sequence[Array], *operands: Operands) -> list[Any]:
    return [jax.vjp(functools.partial(function, split), *x)[1](c) for x, c in zip(operands, ct, strict=True)]


def _by_decays(split: bool, body: Callable[..., Any], operands: Sequence[Operands], *others: Any) -> Any:
    """`body` with the one product where that is exact to `split`, else with the halvings."""
    at_once, halvings = (functools.partial(body, split, f) for f in (_near_at_once, _near_by_halvings))
    if not split:
        # Sums from a block's middle round the exponent of each pair at the size of the block's.
        return halvings(*others, *operands)
    smallest = functools.reduce(jnp.minimum, [jnp.min(x[3]) for x in operands])
    return jax.lax.cond(smallest > _NEAR_BOUND, at_once, halvings, *others, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _near_scores(split: bool, operands: Sequence[Operands]) -> list[Array]:
    """<row_i exp(gc_i - gc_j), k_j> at the earlier tokens j in the near block of token i, anything elsewhere: [S, R]
    for each pair of heads.

    The operands of each are rows [S, K], where S is R, or twice R where two rows belong to each token; k [R, K];
    log decays, and their sums to and from the middle of the near blocks.
    """
    return _by_decays(split, _near_products, operands)


_near_scores.defvjp(
    lambda split, operands: (_near_scores(split, operands), operands),
    lambda split, operands, ct: (_by_decays(split, _near_gradients, operands, ct),),
)


def _lane_block(shape: tuple[int, ...], size: int) -> Array:
    return _columns(shape) >> (size.bit_length() - 1)


def _near_mask(columns: int, block: int) -> Array:
    """Of the rows of a near block, the earlier tokens in it: [_NEAR, columns]."""
    shape = (_NEAR, columns)
    return ((_columns(shape) & (_NEAR - 1)) < _rows(shape)) & (_lane_block(shape, _NEAR) == block)


@jax.custom_vjp
def _assemble(near_SR: Array, far: dict[int, Array]) -> Array:
    """All scores [S, R]: those within near blocks, and for each halving those of the second halves' rows [S / 2, R]
    with the first halves' columns; zeros elsewhere."""
    columns = near_SR.shape[1]
    shape, tiles = (_NEAR, columns), []
    for tile in range(near_SR.shape[0] // _NEAR):
        rows = near_SR[tile * _NEAR : (tile + 1) * _NEAR]
        rows = jnp.where(_near_mask(columns, tile % (columns // _NEAR)), rows, jnp.zeros_like(rows))
        for half, scores in far.items():
            block, inside = divmod(tile, half // _NEAR)
            if block % 2:
                start = block // 2 * half + inside * _NEAR
                first = block % (columns // half) - 1
                rows = jnp.where(_lane_block(shape, half) == first, scores[start : start + _NEAR], rows)
        tiles.append(rows)
    return jnp.concatenate(tiles, axis=0)


def _assemble_backward(halves: tuple[int, ...], ct_SR: Array) -> tuple[Array, dict[int, Array]]:
    columns = ct_SR.shape[1]
    near = []
    for tile in range(ct_SR.shape[0] // _NEAR):
        rows = ct_SR[tile * _NEAR : (tile + 1) * _NEAR]
        near.append(jnp.where(_near_mask(columns, tile % (columns // _NEAR)), rows, jnp.zeros_like(rows)))
    return jnp.concatenate(near, axis=0), {half: _corners(ct_SR, half) for half in halves}


_assemble.defvjp(lambda near, far: (_assemble(near, far), tuple(far)), _assemble_backward)


def _corners(x_SR: Array, half: int) -> Array:
    """[S / 2, R]: second halves' rows of the blocks of 2 `half` tokens, zero outside their first halves' columns."""
    columns = x_SR.shape[1]
    pieces = []
    for block in range(1, x_SR.shape[0] // half, 2):
        rows = x_SR[block * half : (block + 1) * half]
        here = _lane_block(rows.shape, half) == block % (columns // half) - 1
        pieces.append(jnp.where(here, rows, jnp.zeros_like(rows)))
    return jnp.concatenate(pieces, axis=0)


Matrices = Sequence[Array]
"""One for each pair of heads. Their long chains of steps are written side by side, for the machine to overlap."""


def _inverses_of_near_blocks(lower: Matrices) -> list[Array]:
    """(I + L)^-1 of each near block on the diagonals, by substitution in all of them at once."""
    size = lower[0].shape[0]
    shape = (_NEAR, size)
    block, lane = _lane_block(shape, _NEAR), _columns(shape) & (_NEAR - 1)
    zeros = jnp.zeros(shape, jnp.float32)
    places = [(b, slice(b * _NEAR, (b + 1) * _NEAR)) for b in range(size // _NEAR)]
    # Block b's entry [i, j] at [i, 16 b + j].
    packed = [
        functools.reduce(lambda x, place: jnp.where(block == place[0], low[place[1]], x), places, zeros)
        for low in lower
    ]
    inverse = [jnp.where(lane == _rows(shape), jnp.ones_like(zeros), zeros) for _ in lower]
    for j in range(_NEAR - 1):
        column = [jnp.take_along_axis(x, _columns(shape) - lane + j, axis=1) for x in packed]
        inverse = [
            x - c * jnp.broadcast_to(x[j : j + 1], shape) for x, c in zip(inverse, column, strict=True)
        ]
    return [jnp.concatenate([jnp.where(block == b, x, zeros) for b, _ in places], axis=0) for x in inverse]


def _inverses(split: bool, lower: Matrices, size: int) -> list[Array]:
    """(I + L)^-1 by block forward substitution, [[P, 0], [-Q X P, Q]].

    With the inverses of the halves on the diagonal the corners of one halving are one masked product. Never a
    product of doubled powers, which cancels; the entries stay bounded because every I - beta k k^T contracts.
    """
    inverse = _inverses_of_near_blocks(lower)
    half = _NEAR
    while half < size:
        right = [_dot(split, _corners(low, half), x, 1, 0) for low, x in zip(lower, inverse, strict=True)]
        corner = [
            _dot(split, _take_rows(x, half), _put_rows(r, half), 1, 0)
            for x, r in zip(inverse, right, strict=True)
        ]
        inverse = [x - _put_rows(c, half) for x, c in zip(inverse, corner, strict=True)]
        half *= 2
    return inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _solve(split: bool, lower: Matrices, right: Matrices, size: int) -> list[Array]:
    """(I + L)^-1 right, in blocks of `size` rows."""
    return _solve_forward(split, lower, right, size)[0]


def _solve_forward(
    split: bool, lower: Matrices, right: Matrices, size: int
) -> tuple[list[Array], tuple[list[Array], list[Array]]]:
    inverse = _inverses(split, lower, size)
    update = [_dot(split, x, r, 1, 0) for x, r in zip(inverse, right, strict=True)]
    return update, (inverse, update)


def _solve_backward(
    split: bool, size: int, residuals: tuple[list[Array], list[Array]], ct: list[Array]
) -> tuple[list[Array], list[Array]]:
    del size
    inverse, update = residuals
    ct_right = [_dot(split, x, c, 0, 0) for x, c in zip(inverse, ct, strict=True)]
    # Only entries below the diagonal are read, and the mask that made them zeroes the rest here too.
    ct_lower = [-_dot(split, c, u, 1, 1) for c, u in zip(ct_right, update, strict=True)]
    return ct_lower, ct_right


_solve.defvjp(_solve_forward, _solve_backward)


@jax.custom_vjp
def _as_column(total_TK: Array) -> Array:
    """[T, K] with equal rows -> [K, 1]."""
    # The mean over a power of two of equal numbers is exact.
    return jnp.sum(jnp.transpose(total_TK), axis=1, keepdims=True) * (1.0 / total_TK.shape[0])


def _as_column_backward(total_TK: Array, ct_K1: Array) -> tuple[Array]:
    count, width = total_TK.shape
    return (jnp.transpose(jnp.broadcast_to(ct_K1 * (1.0 / count), (width, count))),)


_as_column.defvjp(lambda total_TK: (_as_column(total_TK), total_TK), _as_column_backward)


class Pair(NamedTuple):
    """What a chunk takes of two heads: their states [K, V], and their tokens below each other, R = 128 rows.

    All float32; every log decay lies between SMALLEST_LOG_DECAY and 0.
    """

    states: tuple[Array, ...]
    q_RK: Array | None
    k_RK: Array
    v_RV: Array
    log_decay_RK: Array
    beta_R1: Array


def _scores(split: bool, pairs: Sequence[Pair], sums: Sequence[_Sums]) -> list[Array]:
    """A (where q is given) above L, without A's diagonal: [S, R]."""
    rows = [x.k_RK * x.beta_R1 for x in pairs]
    rows = [r if x.q_RK is None else _below([x.q_RK, r]) for x, r in zip(pairs, rows, strict=True)]
    near = _near_scores(
        split,
        [(r, x.k_RK, x.log_decay_RK, s.at[_NEAR // 2]) for r, x, s in zip(rows, pairs, sums, strict=True)],
    )
    far = []
    for rows_SK, x, s in zip(rows, pairs, sums, strict=True):
        products = {}
        for half in (half for half in s.at if half >= _NEAR):
            decay_RK = jnp.exp(s.at[half])
            # Only the second halves' rows have scores here.
            left = _second_halves(rows_SK, half)
            left = left * _repeat(_second_halves(decay_RK, half), left.shape[0])
            products[half] = _matmul_transposed_right(split, left, x.k_RK * decay_RK)
        far.append(products)
    return [_assemble(n, f) for n, f in zip(near, far, strict=True)]


def advance(pairs: Sequence[Pair], split: bool) -> list[tuple[tuple[Array, ...], Array | None]]:
    """For each pair of heads their states after the chunk, and their outputs [R, V] where q is given.

    `split` as in `_dot`.
    """
    size = pairs[0].k_RK.shape[0] // 2
    sums = [_sums(x.log_decay_RK, size) for x in pairs]
    parts = [_split_rows(s, s.shape[0] // s.shape[1]) for s in _scores(split, pairs, sums)]
    decays = [jnp.exp(s.since_start) for s in sums]

    def state_products(x: Pair, decay_RK: Array) -> list[tuple[Array, ...]]:
        """By head, what the state holds for the keys, and for the queries."""
        reads = [_split_rows(x.k_RK * decay_RK, 2)]
        if x.q_RK is not None:
            reads.append(_split_rows(x.q_RK * decay_RK, 2))
        return [
            _split_rows(_matmul(split, jnp.concatenate([r[i] for r in reads], axis=0), state), len(reads))
            for i, state in enumerate(x.states)
        ]

    read = [state_products(x, decay) for x, decay in zip(pairs, decays, strict=True)]
    errors = [
        x.beta_R1 * (x.v_RV - jnp.concatenate([head[0] for head in r], axis=0))
        for x, r in zip(pairs, read, strict=True)
    ]
    updates = _solve(split, [part[-1] for part in parts], errors, size)

    def output(x: Pair, r: list[tuple[Array, ...]], scores_RR: Array, update_RV: Array) -> Array | None:
        if x.q_RK is None:
            return None
        carried_RV = jnp.concatenate([head[1] for head in r], axis=0)
        own_R1 = _row_sums(x.q_RK * x.k_RK)
        return carried_RV + _matmul(split, scores_RR, update_RV) + own_R1 * update_RV

    def states_after(x: Pair, s: _Sums, update_RV: Array) -> tuple[Array, ...]:
        written = _split_rows(x.k_RK * jnp.exp(s.until_end), 2)
        return tuple(
            _as_column(jnp.exp(total)) * state + _matmul_transposed_left(split, k, u)
            for total, state, k, u in zip(s.total, x.states, written, _split_rows(update_RV, 2), strict=True)
        )

    outputs = [output(x, r, p[0], u) for x, r, p, u in zip(pairs, read, parts, updates, strict=True)]
    states = [states_after(x, s, u) for x, s, u in zip(pairs, sums, updates, strict=True)]
    return list(zip(states, outputs, strict=True))
