"""A delta layer's decode step between its projections: convolution, delta rule, gated norm.

Per row, with u the three projections of the token and of the window before it (Kimi Linear, arXiv 2510.26692):

    c = silu(sum_j taps_j u_j);   q = c_q / |c_q| K^-1/2;   k = c_k / |c_k|;   v = c_v
    S, o = step(S, q, k, v);   y = o / rms(o) * gain * sigmoid(gate)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array
from pallas_kernels.delta_rule import _inputs, reference, xla

L2_EPSILON = 1e-6
"""Added to the sum of squares under the root of the norm of q and k."""


@functools.partial(jax.jit, static_argnames=("delta_step", "norm_epsilon"))
def _composed(
    delta_step: Callable[..., tuple[Array, Array]],
    x_B3HK: Array,
    window_BW3HK: Array,
    taps_J3HK: Array,
    log_decay_BHK: Array,
    beta_BH: Array,
    gate_BHK: Array,
    gain_K: Array,
    state_BHKV: Array,
    active_B: Array | None,
    norm_epsilon: float,
) -> tuple[Array, Array, Array]:
    low = x_B3HK.dtype
    wide: Any = _inputs.compute_dtype(x_B3HK, window_BW3HK, state_BHKV, log_decay_BHK, beta_BH)

    def unit(c_BHK: Array) -> Array:
        return c_BHK * jax.lax.rsqrt(jnp.sum(c_BHK * c_BHK, axis=-1, keepdims=True) + L2_EPSILON)

    u_BJ3HK = jnp.concatenate([window_BW3HK.astype(low), x_B3HK[:, None]], axis=1)
    # In the order of the taps, as over a sequence.
    c_B3HK: Any = sum(
        u_BJ3HK[:, j].astype(wide) * taps_J3HK[j].astype(wide) for j in range(taps_J3HK.shape[0])
    )
    c_B3HK = jax.nn.silu(c_B3HK).astype(low).astype(wide)
    q_BHK = (unit(c_B3HK[:, 0]) * x_B3HK.shape[-1] ** -0.5).astype(low)
    k_BHK = unit(c_B3HK[:, 1]).astype(low)
    o_BHV, next_state = delta_step(q_BHK, k_BHK, c_B3HK[:, 2].astype(low), log_decay_BHK, beta_BH, state_BHKV)
    o_BHV = o_BHV.astype(wide)
    normed_BHV = o_BHV * jax.lax.rsqrt(jnp.mean(o_BHV * o_BHV, axis=-1, keepdims=True) + norm_epsilon)
    y_BHV = (normed_BHV * gain_K.astype(wide) * jax.nn.sigmoid(gate_BHK.astype(wide))).astype(gate_BHK.dtype)
    next_window = u_BJ3HK[:, 1:].astype(window_BW3HK.dtype)
    if active_B is None:
        return y_BHV, next_state, next_window

    def only_if_active(x: Array, otherwise: Array) -> Array:
        return jnp.where(active_B.reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise.astype(x.dtype))

    return (
        only_if_active(y_BHV, jnp.zeros_like(y_BHV)),
        only_if_active(next_state, state_BHKV),
        only_if_active(next_window, window_BW3HK),
    )


reference_fused_step = functools.partial(_composed, reference.step)
"""By the definition."""

xla_fused_step = functools.partial(_composed, xla.step)
"""The state read once and written once; what surrounds it is left to the compiler."""
