"""The gated delta rule chunk by chunk, in portable JAX; differentiable, any log_decay <= 0.

What a chunk needs before its state is known is computed for a few chunks together (`_xla_chunk`), then the state is
carried through them, all heads at once. Rows of the batch are walked one after another where they are long, so that
every piece is a view of the inputs as they lie in memory. On CPUs with few cores long sequences go head by head
(`_xla_by_head`).
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.delta_rule import _inputs, _xla_by_head
from pallas_kernels.delta_rule._xla_chunk import (
    SMALLEST_LOG_DECAY,
    Chunk,
    Inputs,
    advance,
    prepare_chunks,
)
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE

_CHUNK_SIZE = 32
"""Tokens of a chunk here: on CPUs as fast as 64 forward and faster backward. Divides the grid of boundary states."""

_GROUP_CHUNKS = 16
"""Chunks x rows x heads whose state-independent part is computed together; bounds temporary memory."""

_LARGE_STATE = 64 * 64
"""K x V from which a few cores take sequences head by head: below, the products take less time than the calls of their
kernels, and heads together are fewer calls."""


def _chunk_size(tokens: int) -> int:
    size = 2
    while size < min(tokens, _CHUNK_SIZE):
        size *= 2
    return size


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(max(1, min(number, limit)), 0, -1) if number % divisor == 0)


def _chunked(
    q_BTHK: Array | None,
    k_BTHK: Array,
    v_BTHV: Array,
    log_decay_BTHK: Array,
    beta_BTH: Array,
    state_BHKV: Array,
    return_boundary_states: bool = False,
) -> tuple[Array | None, Array, Array | None]:
    """Output (if q is given), final state, and (if asked for) the state at every boundary [B, N, H, K, V]."""
    inputs = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH)
    together = functools.partial(_heads_together, return_boundary_states)
    is_small = k_BTHK.shape[1] <= CHUNK_SIZE or k_BTHK.shape[-1] * v_BTHV.shape[-1] < _LARGE_STATE
    if is_small or not _xla_by_head.few_cores():
        return together(inputs, state_BHKV)
    by_head = functools.partial(_xla_by_head.walk, return_boundary_states)
    # Outside of the custom gradient: what all devices share receives the sum of their gradients.
    leaves, structure = jax.tree.flatten((inputs, state_BHKV))
    operands = jax.tree.unflatten(structure, match_varying(*leaves))
    return jax.lax.platform_dependent(*operands, cpu=by_head, default=together)


def _heads_together(
    return_boundary_states: bool, inputs: Inputs, state_BHKV: Array
) -> tuple[Array | None, Array, Array | None]:
    """`_chunked`, a few chunks of all heads at a time."""
    k_BTHK = inputs[1]
    batch, tokens, heads = k_BTHK.shape[:3]
    size = _chunk_size(tokens)
    per_boundary = CHUNK_SIZE // size if tokens > size else 1
    # Whole boundaries in a group, so that the states that a gradient keeps are as few as those.
    wanted = max(_GROUP_CHUNKS // heads, per_boundary)
    groups = -(-tokens // (size * wanted))
    per_group = -(-tokens // (size * groups))
    per_group = -(-per_group // per_boundary) * per_boundary
    # Several rows together only where each is a single group: then they lie side by side.
    rows = _largest_divisor(batch, _GROUP_CHUNKS // (heads * per_group)) if groups == 1 else 1
    padding = groups * per_group * size - tokens

    def by_group(x: Array) -> Array:
        """[B, T, ...] -> [B / rows, groups, rows, T / groups, ...], padded with neutral tokens; T / groups is whole."""
        if padding:
            x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(batch // rows, rows, groups, per_group * size, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2)

    def in_chunks(x: Array) -> Array:
        """[rows, tokens of a group, H, ...] -> [chunks, rows, H, C, ...]."""
        x = x.reshape(rows, per_group, size, *x.shape[2:])
        return jnp.transpose(x, (1, 0, 3, 2, *range(4, x.ndim)))

    def carry(state: Array, chunk: Chunk) -> tuple[Array, tuple[Array | None, Array | None]]:
        state, o = advance(state, chunk)
        return state, (o, state if return_boundary_states else None)

    # The backward pass recomputes a group from its inputs and first state: nothing of size [T, C] is kept.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def advance_group(
        state: Array, xs: tuple[Array | None, Array, Array, Array, Array]
    ) -> tuple[Array, tuple[Array | None, Array | None]]:
        with jax.named_scope("delta_rule_within_chunks"):
            prepared = prepare_chunks(*jax.tree.map(in_chunks, xs))
        with jax.named_scope("delta_rule_across_chunks"):
            state, (o, boundaries) = jax.lax.scan(carry, state, prepared)
        if o is not None:
            o = jnp.transpose(o, (1, 0, 3, 2, 4)).reshape(rows, per_group * size, heads, -1)
        return state, (o, None if boundaries is None else boundaries[per_boundary - 1 :: per_boundary])

    def advance_rows(_: None, x: tuple[Array, tuple[Array | None, Array, Array, Array, Array]]):
        return None, jax.lax.scan(advance_group, *x)

    # -inf is a valid decay, but 0 x -inf in a sum of selected exponents is not.
    q, k, v, log_decay, beta = inputs
    log_decay = jnp.maximum(log_decay, jnp.asarray(SMALLEST_LOG_DECAY, log_decay.dtype))
    xs = jax.tree.map(by_group, (q, k, v, log_decay, beta))
    states = state_BHKV.reshape(batch // rows, rows, *state_BHKV.shape[1:])
    _, (states, (o, boundaries)) = jax.lax.scan(advance_rows, None, (states, xs))
    if boundaries is not None:
        # [B / rows, groups, boundaries of a group, rows, H, K, V]
        boundaries = jnp.moveaxis(boundaries, 3, 1)
        boundaries = boundaries.reshape(batch, -1, *boundaries.shape[4:])[:, : -(-tokens // CHUNK_SIZE)]
    if o is not None:
        o = jnp.swapaxes(o, 1, 2).reshape(batch, groups * per_group * size, heads, -1)[:, :tokens]
    return o, states.reshape(state_BHKV.shape), boundaries


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
        o_BTHV, boundaries = o_BHV[:, None], state[:, None]
    else:
        log_decay = x.log_decay_BTHK
        if x.reset_BT is not None:
            erase = jnp.asarray(SMALLEST_LOG_DECAY, log_decay.dtype)
            log_decay = jnp.where(x.reset_BT[:, :, None, None], erase, log_decay)
        o_BTHV, state, boundaries = _chunked(
            x.q_BTHK, x.k_BTHK, x.v_BTHV, log_decay, x.beta_BTH, x.state_BHKV, return_boundary_states
        )
        assert o_BTHV is not None
    o_BTHV = o_BTHV.astype(v_BTHV.dtype)
    if return_boundary_states:
        assert boundaries is not None
        return o_BTHV, state, boundaries
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
