"""The gated delta rule as its definition: one token after the other.

Per head, with state S [K, V] (Kimi Linear, arXiv 2510.26692):

    S <- diag(exp(log_decay_t)) S;   u = beta_t (v_t - S^T k_t);   S <- S + k_t u^T;   o_t = S^T q_t
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels.delta_rule import _inputs
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE


def _recurrence(
    state_BHKV: Array, q_BHK: Array, k_BHK: Array, v_BHV: Array, log_decay_BHK: Array, beta_BH: Array
) -> tuple[Array, Array]:
    decayed_BHKV = jnp.exp(log_decay_BHK)[..., None] * state_BHKV
    error_BHV = v_BHV - _inputs.einsum("bhkv,bhk->bhv", decayed_BHKV, k_BHK)
    update_BHV = beta_BH[..., None] * error_BHV
    state_BHKV = decayed_BHKV + k_BHK[..., None] * update_BHV[..., None, :]
    return state_BHKV, _inputs.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK)


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
    """`pallas_kernels.delta_rule.delta_rule`, token by token."""
    x = _inputs.prepare(
        q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, initial_state_BHKV, lengths_B, segment_ids_BT
    )
    batch, tokens = k_BTHK.shape[:2]
    reset_BT = jnp.zeros((batch, tokens), jnp.bool_) if x.reset_BT is None else x.reset_BT

    def advance(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_decay, beta, reset = token
        state = jnp.where(reset[:, None, None, None], jnp.zeros((), state.dtype), state)
        return _recurrence(state, q, k, v, log_decay, beta)

    def run(state: Array, start: int, stop: int) -> tuple[Array, Array]:
        per_token = (x.q_BTHK, x.k_BTHK, x.v_BTHV, x.log_decay_BTHK, x.beta_BTH, reset_BT)
        return jax.lax.scan(advance, state, tuple(jnp.moveaxis(a[:, start:stop], 1, 0) for a in per_token))

    if return_boundary_states:
        state, outputs, boundaries = x.state_BHKV, [], []
        for start in range(0, tokens, CHUNK_SIZE):
            state, o = run(state, start, min(start + CHUNK_SIZE, tokens))
            outputs.append(o)
            boundaries.append(state)
        o_BTHV = jnp.moveaxis(jnp.concatenate(outputs), 0, 1).astype(v_BTHV.dtype)
        return o_BTHV, state, jnp.stack(boundaries, axis=1)
    state, o = run(x.state_BHKV, 0, tokens)
    return jnp.moveaxis(o, 0, 1).astype(v_BTHV.dtype), state


@jax.jit
def step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    log_decay_BHK: Float[Array, "B H K"],
    beta_BH: Float[Array, "B H"],
    state_BHKV: Float[Array, "B H K V"],
) -> tuple[Array, Array]:
    """`pallas_kernels.delta_rule.step`, by the definition."""
    dtype = _inputs.compute_dtype(q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_BHKV)
    q, k, v, log_decay, beta, state = (
        a.astype(dtype) for a in (q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_BHKV)
    )
    state, o = _recurrence(state, q, k, v, log_decay, beta)
    return o.astype(v_BHV.dtype), state


@jax.jit
def segment_map(
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    lengths_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """`pallas_kernels.delta_rule.segment_map`, multiplying M <- (I - beta k k^T) diag(exp(log_decay)) M."""
    x = _inputs.prepare(k_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, None, lengths_B, None)
    batch, _, heads, key_dim = k_BTHK.shape
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=x.k_BTHK.dtype), (batch, heads, key_dim, key_dim))

    def advance(carry: tuple[Array, Array], token: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        m, s = carry
        k, v, log_decay, beta = token
        m, _ = _recurrence(m, k, k, jnp.zeros_like(k), log_decay, beta)
        s, _ = _recurrence(s, k, k, v, log_decay, beta)
        return (m, s), None

    per_token = (x.k_BTHK, x.v_BTHV, x.log_decay_BTHK, x.beta_BTH)
    carry, _ = jax.lax.scan(
        advance, (identity, x.state_BHKV), tuple(jnp.moveaxis(a, 1, 0) for a in per_token)
    )
    return carry
