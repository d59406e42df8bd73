"""Pallas TPU kernels of the gated delta rule for one token: the plain step, and a whole decode step of a layer.

Grid (batch, block of heads); a block reads and writes its part of the state once, which is what bounds it. The
products with the state are sums over its rows in float32: one or two rows would leave the matrix unit idle.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying, result_like
from pallas_kernels.delta_rule._fused_step import L2_EPSILON
from pallas_kernels.delta_rule._tpu_sequence import heads_per_block

_VMEM_LIMIT = 48 * 2**20


def _advance_heads(
    q_HK: Array, k_HK: Array, v_HV: Array, log_decay_HK: Array, beta_H1: Array, state_ref: Any, next_ref: Any
) -> Array:
    """Step a block of heads; returns o [H, V]."""
    q_KH, k_KH, decay_KH = (jnp.transpose(x) for x in (q_HK, k_HK, jnp.exp(log_decay_HK)))
    rows = []
    for head in range(q_HK.shape[0]):
        one = slice(head, head + 1)
        decayed_KV = decay_KH[:, one] * state_ref[0, head]
        error_1V = v_HV[one] - jnp.sum(k_KH[:, one] * decayed_KV, axis=0, keepdims=True)
        state_KV = decayed_KV + k_KH[:, one] * (beta_H1[one] * error_1V)
        next_ref[0, head] = state_KV
        rows.append(jnp.sum(q_KH[:, one] * state_KV, axis=0, keepdims=True))
    return jnp.concatenate(rows, axis=0)


def _step_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, g_ref: Any, beta_ref: Any, state_ref: Any, o_ref: Any, next_ref: Any
) -> None:
    q, k, v, log_decay, beta = (x[0].astype(jnp.float32) for x in (q_ref, k_ref, v_ref, g_ref, beta_ref))
    o_ref[0] = _advance_heads(q, k, v, log_decay, beta, state_ref, next_ref).astype(o_ref.dtype)


def _per_head(block: int, *rest: int, before: tuple[int, ...] = ()) -> pl.BlockSpec:
    """[B, *before, H, *rest] in blocks of one row and `block` heads."""

    def index(b: Any, h: Any, *_: Any) -> tuple[Any, ...]:
        return (b, *(0,) * len(before), h, *(0,) * len(rest))

    return pl.BlockSpec((1, *before, block, *rest), index)


def _parameters() -> Any:
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_VMEM_LIMIT)


def step(
    q_BHK: Array,
    k_BHK: Array,
    v_BHV: Array,
    log_decay_BHK: Array,
    beta_BH: Array,
    state_BHKV: Array,
    interpret: Any,
) -> tuple[Array, Array]:
    """Output in v's dtype and the state after the token, in place where the state is donated."""
    batch, heads, key_dim = k_BHK.shape
    value_dim, block = v_BHV.shape[-1], heads_per_block(heads)
    key, value = _per_head(block, key_dim), _per_head(block, value_dim)
    state = _per_head(block, key_dim, value_dim)
    q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_BHKV = match_varying(
        q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_BHKV
    )
    o_BHV, next_BHKV = pl.pallas_call(
        _step_kernel,
        grid=(batch, pl.cdiv(heads, block)),
        in_specs=[key, key, value, key, _per_head(block, 1), state],
        out_specs=[value, state],
        out_shape=[
            result_like(v_BHV, v_BHV.shape, v_BHV.dtype),
            result_like(v_BHV, state_BHKV.shape, jnp.float32),
        ],
        input_output_aliases={5: 1},
        compiler_params=_parameters(),
        interpret=interpret,
        name="delta_rule_step",
    )(q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH[:, :, None], state_BHKV)
    return o_BHV, next_BHKV


def _fused_kernel(
    scale: float,
    epsilon: float,
    active_ref: Any,
    x_ref: Any,
    window_ref: Any,
    taps_ref: Any,
    g_ref: Any,
    beta_ref: Any,
    gate_ref: Any,
    gain_ref: Any,
    state_ref: Any,
    o_ref: Any,
    next_window_ref: Any,
    next_ref: Any,
) -> None:
    kept = window_ref.shape[1]
    # An inactive row is made a neutral token, whatever it holds: its state and window come back as they were.
    # Numbers, not booleans: a select needs its condition in the shape of its operands.
    active = active_ref[pl.program_id(0)] > 0

    def only_if_active(x: Array, otherwise: Array) -> Array:
        return jnp.where(jnp.broadcast_to(active, x.shape), x, otherwise)

    convolved = []
    for part in range(3):
        u_HK = only_if_active(x_ref[0, part], jnp.zeros_like(x_ref[0, part]))
        sums_HK = u_HK.astype(jnp.float32) * taps_ref[kept, part].astype(jnp.float32)
        for tap in range(kept):
            before_HK = window_ref[0, tap, part].astype(x_ref.dtype).astype(jnp.float32)
            sums_HK = sums_HK + before_HK * taps_ref[tap, part].astype(jnp.float32)
        convolved.append((sums_HK * jax.nn.sigmoid(sums_HK)).astype(x_ref.dtype).astype(jnp.float32))
        for tap in range(kept):
            following = window_ref[0, tap + 1, part] if tap + 1 < kept else u_HK.astype(window_ref.dtype)
            next_window_ref[0, tap, part] = only_if_active(following, window_ref[0, tap, part])

    def unit(x_HK: Array, scale: float) -> Array:
        norm = jax.lax.rsqrt(jnp.sum(x_HK * x_HK, axis=1, keepdims=True) + L2_EPSILON)
        return (x_HK * norm * scale).astype(x_ref.dtype).astype(jnp.float32)

    log_decay_HK, beta_H1 = g_ref[0].astype(jnp.float32), beta_ref[0].astype(jnp.float32)
    k_HK = unit(convolved[1], 1.0)
    o_HV = _advance_heads(
        unit(convolved[0], scale),
        only_if_active(k_HK, jnp.zeros_like(k_HK)),
        convolved[2],
        only_if_active(log_decay_HK, jnp.zeros_like(log_decay_HK)),
        only_if_active(beta_H1, jnp.zeros_like(beta_H1)),
        state_ref,
        next_ref,
    )
    o_HV = o_HV.astype(x_ref.dtype).astype(jnp.float32)
    normed_HV = o_HV * jax.lax.rsqrt(jnp.mean(o_HV * o_HV, axis=1, keepdims=True) + epsilon)
    gated_HV = normed_HV * gain_ref[...].astype(jnp.float32) * jax.nn.sigmoid(gate_ref[0].astype(jnp.float32))
    o_ref[0] = only_if_active(gated_HV, jnp.zeros_like(gated_HV)).astype(o_ref.dtype)


def fused_step(
    x_B3HK: Array,
    window_BW3HK: Array,
    taps_J3HK: Array,
    log_decay_BHK: Array,
    beta_BH: Array,
    gate_BHK: Array,
    gain_K: Array,
    state_BHKV: Array,
    active_B: Array,
    scale: float,
    epsilon: float,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """Gated output in the gate's dtype, state and window, the last two in place where they are donated."""
    x_B3HK, window_BW3HK, taps_J3HK, log_decay_BHK, beta_BH, gate_BHK, gain_K, state_BHKV, active_B = (
        match_varying(
            x_B3HK, window_BW3HK, taps_J3HK, log_decay_BHK, beta_BH, gate_BHK, gain_K, state_BHKV, active_B
        )
    )
    batch, kept, _, heads, key_dim = window_BW3HK.shape
    block = heads_per_block(heads)
    window = _per_head(block, key_dim, before=(kept, 3))
    head, state = _per_head(block, key_dim), _per_head(block, key_dim, key_dim)
    o_BHV, next_window, next_state = pl.pallas_call(
        lambda *refs: _fused_kernel(scale, epsilon, *refs),
        out_shape=[
            result_like(gate_BHK, gate_BHK.shape, gate_BHK.dtype),
            result_like(gate_BHK, window_BW3HK.shape, window_BW3HK.dtype),
            result_like(gate_BHK, state_BHKV.shape, state_BHKV.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(heads, block)),
            in_specs=[
                _per_head(block, key_dim, before=(3,)),
                window,
                pl.BlockSpec((kept + 1, 3, block, key_dim), lambda b, h, *_: (0, 0, h, 0)),
                head,
                _per_head(block, 1),
                head,
                pl.BlockSpec((1, key_dim), lambda b, h, *_: (0, 0)),
                state,
            ],
            out_specs=[head, window, state],
        ),
        # Counted with the prefetched scalars.
        input_output_aliases={2: 1, 8: 2},
        compiler_params=_parameters(),
        interpret=interpret,
        name="delta_rule_fused_step",
    )(
        active_B,
        x_B3HK,
        window_BW3HK,
        taps_J3HK,
        log_decay_BHK,
        beta_BH[:, :, None],
        gate_BHK,
        gain_K[None],
        state_BHKV,
    )
    return o_BHV, next_state, next_window
