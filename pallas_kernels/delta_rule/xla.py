"""The gated delta rule in chunks of 64 tokens, in portable JAX; differentiable, any log_decay <= 0.

Within a chunk, with gc the inclusive cumulative log decay and S the state at its start (Kimi Linear,
arXiv 2510.26692):

    A[i, j] = <q_i exp(gc_i - gc_j), k_j>, j <= i;   L[i, j] = beta_i <k_i exp(gc_i - gc_j), k_j>, j < i
    u = (I + L)^-1 diag(beta) (v - (k exp(gc)) S)
    o = A u + (q exp(gc)) S;   S <- diag(exp(gc_C)) S + (k exp(gc_C - gc))^T u

No exponent here is a difference of cumulative sums: exp(gc_i) exp(-gc_j) overflows under strong decay, and
gc_i - gc_j loses the small decays that follow a large one. Instead the chunk is halved recursively. For rows
in the second half of a block and columns in its first half, the decay from j to i is the product of the row's
decay since the middle and the column's decay up to the middle. Both exponents are sums of values <= 0, so
both factors are at most 1 and accurate, and each block of scores is a plain matrix product.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels.delta_rule import _inputs
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE

_SMALLEST_LOG_DECAY = -1e30
"""exp of it, and of any sum that contains it, is exactly zero; a sum over one chunk is finite in float32."""

_BASE_SIZE = 16
"""Blocks up to this size do all their halvings in one matrix product; larger ones one product per halving."""

_GROUP_ROWS = 32
"""Chunks x batch x heads whose state-independent part is computed together; bounds temporary memory."""


class _Chunk(NamedTuple):
    """State-independent quantities of chunks; leading axes are free, C is the position in the chunk."""

    qk_decayed_RK: Array
    """q exp(gc) above k exp(gc): [..., 2C, K] (only k's rows when no output is wanted)."""
    k_remaining_CK: Array
    """k exp(gc_C - gc): [..., C, K]."""
    total_decay_K: Array
    """exp(gc_C): [..., K]."""
    scores_CC: Array | None
    """A: [..., C, C]."""
    solve_CC: Array
    """(I + L)^-1 diag(beta): [..., C, C]."""
    v_CV: Array


@functools.cache
def _halvings(size: int) -> tuple[np.ndarray, np.ndarray]:
    """All halvings of a block of `size` tokens.

    Returns 0/1 weights [levels + 2, size, size] and the pairs of a row and a column that belong to each level
    [levels, size, size]. weights[level, i] selects the tokens whose log decays add up to token i's exponent:
    from the middle through i for a row, after i up to the middle for a column. The last two entries do the
    same from the block's start through i, and from after i to the block's end.
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
    since_start = token[None, :] <= token[:, None]
    return np.stack([*weights, since_start, ~since_start]), np.stack(is_pair)


def _block_lower(upper_left: Array, lower_left: Array, lower_right: Array) -> Array:
    top = jnp.concatenate([upper_left, jnp.zeros_like(lower_left)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([lower_left, lower_right], axis=-1)], axis=-2)


def _prepare_chunks(x: tuple[Array | None, Array, Array, Array, Array]) -> _Chunk:
    """Everything about chunks of (q, k, v, log_decay, beta) that does not depend on the state.

    The chunk's size must be a power of two and at least 2.
    """
    q_CK, k_CK, v_CV, log_decay_CK, beta_C = x
    chunk = k_CK.shape[-2]
    dtype = k_CK.dtype
    size = min(chunk, _BASE_SIZE)
    # Rows: k for L and, above it, q for A when an output is wanted. S stands for these one or two sources.
    k_scaled_CK = k_CK * beta_C[..., None]
    sources_SCK = jnp.stack([k_scaled_CK] if q_CK is None else [q_CK, k_scaled_CK], axis=-3)

    def in_blocks(x: Array, size: int) -> Array:
        """[..., C, K] -> [..., blocks, size, K]."""
        return x.reshape(*x.shape[:-2], chunk // size, size, x.shape[-1])

    # N: blocks, I and J: tokens of a block, L: halvings.
    weights, is_pair = _halvings(size)
    levels = is_pair.shape[0]
    exponents = _inputs.einsum(
        "lim,...nmk->...nlik", jnp.asarray(weights, dtype), in_blocks(log_decay_CK, size)
    )
    decay_NLIK = jnp.exp(exponents[..., :levels, :, :])
    rows = in_blocks(sources_SCK, size)[..., None, :, :] * decay_NLIK[..., None, :, :, :, :]
    columns = in_blocks(k_CK, size)[..., None, :, :] * decay_NLIK
    scores_SNLIJ = _inputs.einsum("...snlik,...nljk->...snlij", rows, columns)
    scores_SNIJ = jnp.sum(jnp.where(is_pair, scores_SNLIJ, jnp.zeros((), dtype)), axis=-3)
    # (I + L)^-1 by block forward substitution along the halvings, [[P, 0], [-Q X P, Q]]: with the inverses of
    # the halves on the diagonal, the corners of one level are one masked product. The entries stay
    # bounded because every I - beta k k^T contracts.
    inverse_NIJ = jnp.eye(size, dtype=dtype)
    for level in range(levels):
        corner = jnp.where(is_pair[level], scores_SNIJ[..., -1, :, :, :], jnp.zeros((), dtype))
        if level > 0:
            corner = _inputs.einsum("...ij,...jk->...ik", corner, inverse_NIJ)
            corner = _inputs.einsum("...ij,...jk->...ik", inverse_NIJ, corner)
        inverse_NIJ = inverse_NIJ - corner
    since_start, until_end = exponents[..., levels, :, :], exponents[..., levels + 1, :, :]
    total = since_start[..., -1, :]
    while size < chunk:

        def halves(x: Array, size: int = size) -> tuple[Array, Array]:
            """Even and odd blocks of [..., blocks, size, M]."""
            x = x.reshape(*x.shape[:-3], chunk // (2 * size), 2, *x.shape[-2:])
            return x[..., 0, :, :], x[..., 1, :, :]

        start_first, start_second = halves(since_start)
        end_first, end_second = halves(until_end)
        total_first, total_second = total[..., 0::2, :], total[..., 1::2, :]
        rows = halves(in_blocks(sources_SCK, size))[1] * jnp.exp(start_second)[..., None, :, :, :]
        columns = halves(in_blocks(k_CK, size))[0] * jnp.exp(end_first)
        corner = _inputs.einsum("...snik,...njk->...snij", rows, columns)
        scores_first, scores_second = halves(scores_SNIJ)
        scores_SNIJ = _block_lower(scores_first, corner, scores_second)
        inverse_first, inverse_second = halves(inverse_NIJ)
        corner = _inputs.einsum("...ij,...jk->...ik", corner[..., -1, :, :, :], inverse_first)
        corner = _inputs.einsum("...ij,...jk->...ik", inverse_second, corner)
        inverse_NIJ = _block_lower(inverse_first, -corner, inverse_second)
        since_start = jnp.concatenate([start_first, start_second + total_first[..., None, :]], axis=-2)
        until_end = jnp.concatenate([end_first + total_second[..., None, :], end_second], axis=-2)
        total = total_first + total_second
        size *= 2
    scores_SCC = scores_SNIJ[..., 0, :, :]
    eye_CC = jnp.eye(chunk, dtype=dtype)
    decay_CK = jnp.exp(since_start[..., 0, :, :])
    qk_decayed_RK, scores_CC = k_CK * decay_CK, None
    if q_CK is not None:
        qk_decayed_RK = jnp.concatenate([q_CK * decay_CK, qk_decayed_RK], axis=-2)
        scores_CC = scores_SCC[..., 0, :, :] + eye_CC * jnp.sum(q_CK * k_CK, axis=-1)[..., None]
    return _Chunk(
        qk_decayed_RK=qk_decayed_RK,
        k_remaining_CK=k_CK * jnp.exp(until_end[..., 0, :, :]),
        total_decay_K=jnp.exp(total[..., 0, :]),
        scores_CC=scores_CC,
        solve_CC=inverse_NIJ[..., 0, :, :] * beta_C[..., None, :],
        v_CV=v_CV,
    )


def _advance(state_KV: Array, chunk: _Chunk) -> tuple[Array, Array | None]:
    """Carry the state through one chunk."""
    from_state = _inputs.einsum("...rk,...kv->...rv", chunk.qk_decayed_RK, state_KV)
    size = chunk.v_CV.shape[-2]
    update_CV = _inputs.einsum("...ij,...jv->...iv", chunk.solve_CC, chunk.v_CV - from_state[..., -size:, :])
    o_CV = None
    if chunk.scores_CC is not None:
        within = _inputs.einsum("...ij,...jv->...iv", chunk.scores_CC, update_CV)
        o_CV = from_state[..., :size, :] + within
    added_KV = _inputs.einsum("...ik,...iv->...kv", chunk.k_remaining_CK, update_CV)
    return chunk.total_decay_K[..., None] * state_KV + added_KV, o_CV


def _chunk_size(tokens: int) -> int:
    size = 2
    while size < min(tokens, CHUNK_SIZE):
        size *= 2
    return size


def _chunked(
    q_BTHK: Array | None,
    k_BTHK: Array,
    v_BTHV: Array,
    log_decay_BTHK: Array,
    beta_BTH: Array,
    state_BHKV: Array,
    return_boundary_states: bool = False,
) -> tuple[Array | None, Array, Array | None]:
    """Output (if q is given), final state, and (if asked for) the state after each chunk [N, B, H, K, V]."""
    batch, tokens, heads = k_BTHK.shape[:3]
    size = _chunk_size(tokens)
    chunks = -(-tokens // size)
    groups = -(-chunks // max(1, _GROUP_ROWS // (batch * heads)))
    per_group = -(-chunks // groups)
    padding = groups * per_group * size - tokens

    def by_group(x: Array) -> Array:
        """[B, T, H, ...] -> [groups, chunks per group, B, H, C, ...], padded with neutral tokens."""
        x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(batch, groups, per_group, size, heads, *x.shape[3:])
        return jnp.transpose(x, (1, 2, 0, 4, 3, *range(5, x.ndim)))

    # The backward pass recomputes a group from its inputs and first state: nothing of size [T, C] is kept.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def advance_group(
        state: Array, xs: tuple[Array | None, Array, Array, Array, Array]
    ) -> tuple[Array, tuple[Array | None, Array | None]]:
        with jax.named_scope("delta_rule_within_chunks"):
            prepared = _prepare_chunks(xs)

        def advance(state: Array, chunk: _Chunk) -> tuple[Array, tuple[Array | None, Array | None]]:
            state, o = _advance(state, chunk)
            return state, (o, state if return_boundary_states else None)

        with jax.named_scope("delta_rule_across_chunks"):
            return jax.lax.scan(advance, state, prepared)

    # -inf is a valid decay, but 0 x -inf in a sum of selected exponents is not.
    log_decay_BTHK = jnp.maximum(log_decay_BTHK, jnp.asarray(_SMALLEST_LOG_DECAY, log_decay_BTHK.dtype))
    q = None if q_BTHK is None else by_group(q_BTHK)
    xs = (q, by_group(k_BTHK), by_group(v_BTHV), by_group(log_decay_BTHK), by_group(beta_BTH))
    state_BHKV, (o, boundaries) = jax.lax.scan(advance_group, state_BHKV, xs)
    if boundaries is not None:
        boundaries = boundaries.reshape(-1, *boundaries.shape[2:])[:chunks]
    if o is not None:
        o = jnp.transpose(o, (2, 0, 1, 4, 3, 5))
        o = o.reshape(batch, groups * per_group * size, heads, -1)[:, :tokens]
    return o, state_BHKV, boundaries


def _step(
    q_BHK: Array, k_BHK: Array, v_BHV: Array, log_decay_BHK: Array, beta_BH: Array, state_BHKV: Array
) -> tuple[Array, Array]:
    """One token; the state is read once and written once."""
    decay = jnp.exp(log_decay_BHK)
    rows_BHRK = jnp.stack([q_BHK * decay, k_BHK * decay], axis=2)
    from_state_BHRV = _inputs.einsum("bhrk,bhkv->bhrv", rows_BHRK, state_BHKV)
    update_BHV = beta_BH[..., None] * (v_BHV - from_state_BHRV[:, :, 1])
    o_BHV = from_state_BHRV[:, :, 0] + jnp.sum(q_BHK * k_BHK, axis=-1, keepdims=True) * update_BHV
    return o_BHV, decay[..., None] * state_BHKV + k_BHK[..., None] * update_BHV[..., None, :]


@functools.partial(jax.jit, static_argnames=("return_boundary_states",))
def delta_rule(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    initial_state_BHKV: Float[Array, "B H K V"] | None = None,
    lengths_B: Int[Array, " B"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    return_boundary_states: bool = False,
) -> tuple[Array, ...]:
    """`pallas_kernels.delta_rule.delta_rule`, chunk by chunk; one token takes the path of `step`."""
    x = _inputs.prepare(
        q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, initial_state_BHKV, lengths_B, segment_ids_BT
    )
    if k_BTHK.shape[1] == 1:
        with jax.named_scope("delta_rule_step"):
            q, k, v, g, beta = (a[:, 0] for a in (x.q_BTHK, x.k_BTHK, x.v_BTHV, x.log_decay_BTHK, x.beta_BTH))
            o_BHV, state = _step(q, k, v, g, beta, x.state_BHKV)
        o_BTHV, boundaries = o_BHV[:, None], state[None]
    else:
        log_decay = x.log_decay_BTHK
        if x.reset_BT is not None:
            erase = jnp.asarray(_SMALLEST_LOG_DECAY, log_decay.dtype)
            log_decay = jnp.where(x.reset_BT[:, :, None, None], erase, log_decay)
        o_BTHV, state, boundaries = _chunked(
            x.q_BTHK, x.k_BTHK, x.v_BTHV, log_decay, x.beta_BTH, x.state_BHKV, return_boundary_states
        )
        assert o_BTHV is not None
    o_BTHV = o_BTHV.astype(v_BTHV.dtype)
    if return_boundary_states:
        assert boundaries is not None
        return o_BTHV, state, jnp.moveaxis(boundaries, 0, 1)
    return o_BTHV, state


@jax.jit
def step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    log_decay_BHK: Float[Array, "B H K"],
    beta_BH: Float[Array, "B H"],
    state_BHKV: Float[Array, "B H K V"],
) -> tuple[Array, Array]:
    """`pallas_kernels.delta_rule.step` in one pass over the state."""
    inputs = (q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_BHKV)
    dtype = _inputs.compute_dtype(*inputs)
    with jax.named_scope("delta_rule_step"):
        o_BHV, state = _step(*(a.astype(dtype) for a in inputs))
    return o_BHV.astype(v_BHV.dtype), state


@jax.jit
def segment_map(
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    lengths_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """`pallas_kernels.delta_rule.segment_map`: the chunked form on the columns [M | S] at once.

    The recurrence acts on each column of the state alone, so M is the final state that starts from the
    identity with v = 0, and S the one that starts from zero with v.
    """
    x = _inputs.prepare(k_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, None, lengths_B, None)
    batch, _, heads, key_dim = k_BTHK.shape
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=x.k_BTHK.dtype), (batch, heads, key_dim, key_dim))
    state = jnp.concatenate([identity, x.state_BHKV], axis=-1)
    v = jnp.concatenate([jnp.zeros_like(x.k_BTHK), x.v_BTHV], axis=-1)
    _, state, _ = _chunked(None, x.k_BTHK, v, x.log_decay_BTHK, x.beta_BTH, state)
    return state[..., :key_dim], state[..., key_dim:]
