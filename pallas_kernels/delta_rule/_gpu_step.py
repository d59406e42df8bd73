"""Mosaic GPU kernels of the gated delta rule for one token: the plain step, and a whole decode step of a layer.

One warpgroup holds a part of one head's state in registers, reads it once and writes it once, which is what
bounds the step. The columns of the state do not depend on each other: `step` gives every block of columns to a
thread block of its own. `fused_step` needs all columns of a head for the norm of its output.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic_gpu
from pallas_kernels._typing import Array
from pallas_kernels.delta_rule._fused_step import L2_EPSILON

COLUMNS = 32
"""Columns of the state that a warpgroup works on at once: 8 for each of its 4 warps."""

ROWS = 32
"""The key channels come in multiples of it."""

FUSED_SIZE = 128
"""Key and value channels of `fused_step`: one for each thread of its warpgroup."""

MAXIMUM_ROWS = 256
"""A quarter of the key channels is what a thread holds of its columns in registers."""

# A thread holds two neighbouring columns of four neighbouring rows in every 32: sums over rows stay within a
# warp, a row's values are read by fours, and what is read or written of the state is whole sectors of 32 bytes.
STATE = plgpu.Layout.TILED(
    plgpu.Tiling(((32, COLUMNS), (32, COLUMNS // 4), (4, 2))),
    warp_dims=(-5,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
PER_ROW = STATE.reduce(1)
PER_COLUMN = STATE.reduce(0)


# The layouts are stated at every step: the search that infers them grows exponentially with what is left open.
def over_columns(x_K: Array, columns: int) -> Array:
    """[K] -> [K, V]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_K, (*x_K.shape, columns), (0,)), STATE)


def over_rows(x_V: Array, rows: int) -> Array:
    """[V] -> [K, V]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_V, (rows, *x_V.shape), (1,)), STATE)


def total(x_KV: Array) -> Array:
    """[K, V] -> [V]."""
    return plgpu.layout_cast(jnp.sum(x_KV, axis=0), PER_COLUMN)


def load(ref: Any, layout: Any) -> Array:
    """In float32."""
    # Vectors of a row's or a column's values are read by several threads at once: no one pattern is optimal.
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def store(ref: Any, value: Array) -> None:
    """In the reference's dtype."""
    _mosaic_gpu.store(ref, value.astype(ref.dtype))


def advance(state_KV: Array, k_K: Array, decay_K: Array, v_V: Array, beta: Any) -> Array:
    """The state after one token, all in float32 registers."""
    rows, columns = state_KV.shape
    k_KV = over_columns(k_K, columns)
    decayed_KV = over_columns(decay_K, columns) * state_KV
    update_V = beta * (v_V - total(decayed_KV * k_KV))
    return decayed_KV + k_KV * over_rows(update_V, rows)


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
    batch, heads, value_dim = v_BHV.shape

    def delta_rule_step(
        q_ref: Any, k_ref: Any, v_ref: Any, g_ref: Any, beta_ref: Any, s_ref: Any, o_ref: Any
    ) -> None:
        b, h = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        columns = pl.ds(jax.lax.axis_index("columns") * COLUMNS, COLUMNS)
        part = s_ref.at[b, h, :, columns]
        q_K, k_K, log_decay_K = (load(ref.at[b, h], PER_ROW) for ref in (q_ref, k_ref, g_ref))
        v_V = load(v_ref.at[b, h, columns], PER_COLUMN)
        beta = beta_ref[b, h].astype(jnp.float32)
        state_KV = advance(load(part, STATE), k_K, jnp.exp(log_decay_K), v_V, beta)
        store(part, state_KV)
        store(o_ref.at[b, h, columns], total(state_KV * over_columns(q_K, COLUMNS)))

    run = plgpu.kernel(
        delta_rule_step,
        out_type=[jax.ShapeDtypeStruct(v_BHV.shape, v_BHV.dtype)],
        grid=(value_dim // COLUMNS, heads, batch),
        grid_names=("columns", "head", "row"),
        interpret=interpret,
    )
    state_ref = jax.new_ref(state_BHKV)
    (o_BHV,) = run(q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_ref)
    return o_BHV, jax.freeze(state_ref)


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
    batch, kept, _, heads, size = window_BW3HK.shape
    low = x_B3HK.dtype
    # One channel for each of the warpgroup's 128 threads, for all that is not the state.
    channels = plgpu.Layout.WG_STRIDED((size,), vec_size=1)

    def delta_rule_fused_step(*refs: Any) -> None:
        x_ref, taps_ref, g_ref, beta_ref, gate_ref, gain_ref, active_ref, window_ref, s_ref, y_ref, shared = (
            refs
        )
        b, h = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        active = active_ref[b] > 0

        def convolved(part: int) -> Array:
            """Also moves the window on, which no other thread block reads."""
            inputs = [plgpu.load(window_ref.at[b, tap, part, h], layout=channels) for tap in range(kept)]
            newest = plgpu.load(x_ref.at[b, part, h], layout=channels)
            sums_K = newest.astype(jnp.float32) * load(taps_ref.at[kept, part, h], channels)
            for tap, before in enumerate(inputs):
                before_K = before.astype(low).astype(jnp.float32)
                sums_K = sums_K + before_K * load(taps_ref.at[tap, part, h], channels)
            for tap, following in enumerate([*inputs[1:], newest]):
                store(window_ref.at[b, tap, part, h], following)
            return rounded(sums_K * jax.nn.sigmoid(sums_K))

        def rounded(x_K: Array) -> Array:
            return plgpu.layout_cast(x_K.astype(low).astype(jnp.float32), channels)

        def unit(x_K: Array, factor: float) -> Array:
            return rounded(x_K * jax.lax.rsqrt(jnp.sum(x_K * x_K) + L2_EPSILON) * factor)

        @pl.when(active)
        def _() -> None:
            rows = (
                unit(convolved(0), scale),
                unit(convolved(1), 1.0),
                jnp.exp(load(g_ref.at[b, h], channels)),
                convolved(2),
            )
            for i, row in enumerate(rows):
                store(shared.at[i], row)
            q_K, k_K, decay_K = (load(shared.at[i], PER_ROW) for i in range(3))
            part = s_ref.at[b, h]
            v_V, beta = load(shared.at[3], PER_COLUMN), beta_ref[b, h].astype(jnp.float32)
            state_KV = advance(load(part, STATE), k_K, decay_K, v_V, beta)
            store(part, state_KV)
            store(shared.at[4], total(state_KV * over_columns(q_K, size)))
            o_K = rounded(load(shared.at[4], channels))
            normed_K = o_K * jax.lax.rsqrt(jnp.sum(o_K * o_K) * (1.0 / size) + epsilon)
            gate_K = jax.nn.sigmoid(load(gate_ref.at[b, h], channels))
            store(y_ref.at[b, h], normed_K * load(gain_ref, channels) * gate_K)

        @pl.when(jnp.logical_not(active))
        def _() -> None:
            # What the row holds is never read: state and window stay where they are.
            store(y_ref.at[b, h], plgpu.layout_cast(jnp.zeros((size,), jnp.float32), channels))

    run = plgpu.kernel(
        delta_rule_fused_step,
        out_type=[jax.ShapeDtypeStruct(gate_BHK.shape, gate_BHK.dtype)],
        scratch_types=[plgpu.SMEM((5, size), jnp.float32)],
        grid=(heads, batch),
        grid_names=("head", "row"),
        interpret=interpret,
    )
    window_ref, state_ref = jax.new_ref(window_BW3HK), jax.new_ref(state_BHKV)
    (y_BHK,) = run(
        x_B3HK, taps_J3HK, log_decay_BHK, beta_BH, gate_BHK, gain_K, active_B, window_ref, state_ref
    )
    return y_BHK, jax.freeze(state_ref), jax.freeze(window_ref)
