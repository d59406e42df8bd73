"""Gated delta attention (KDA): short convolutions, per-channel decay, delta-rule state, gated output norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe28t_jax.config import KDAConfig, ModelConfig
from moe28t_jax.model.cache import KDACache, read, replace
from moe28t_jax.model.numerics import compute_dtype, gated_rms_norm, l2_norm, linear
from moe28t_jax.model.parameters import Group
from pallas_kernels import delta_rule


def short_convolution(
    window_BWC: Float[Array, "B W C"],
    x_BTC: Float[Array, "B T C"],
    weight_JC: Float[Array, "J C"],
    lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
    """Causal depthwise convolution then SiLU: silu(sum_j weight[j] * u[t - 3 + j]), the last tap on the current
    token; float32 taps and sums, result in the dtype of `x`. Also the window that the next call continues from:
    the last W inputs of each row before its padding."""
    count, taps = x_BTC.shape[1], weight_JC.shape[0]
    u_BSC = jnp.concatenate([window_BWC.astype(x_BTC.dtype), x_BTC], axis=1)
    dtype = compute_dtype(x_BTC.dtype)
    y_BTC = sum(u_BSC[:, j : j + count].astype(dtype) * weight_JC[j].astype(dtype) for j in range(taps))
    kept_BW = lengths_B[:, None] + jnp.arange(taps - 1, dtype=jnp.int32)[None, :]
    next_BWC = jnp.take_along_axis(u_BSC, kept_BW[:, :, None], axis=1)
    return jax.nn.silu(jnp.asarray(y_BTC)).astype(x_BTC.dtype), next_BWC


def log_decay(
    raw_BTHK: Float[Array, "B T H K"],
    A_log_H: Float[Array, " H"],
    dt_bias_HK: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "B T H K"]:
    """Natural-log forget gate, float32: bound * sigmoid(exp(A) (z + bias)) with a lower bound, otherwise
    -exp(A) softplus(z + bias)."""
    dtype = compute_dtype(raw_BTHK.dtype)
    shifted = raw_BTHK.astype(dtype) + dt_bias_HK.astype(dtype)
    rate = jnp.exp(A_log_H.astype(dtype))[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def gates(
    parameters: Group, x_BTD: Float[Array, "B T D"], config: ModelConfig
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """What a delta layer does to its state at each token, float32: the natural-log forget gate of every key
    channel, and the write strength of every head (0 to 1)."""
    kda = config.kda
    assert isinstance(kda, KDAConfig)
    heads = (*x_BTD.shape[:2], kda.num_heads, kda.head_dim)
    raw_BTHK = linear(linear(x_BTD, parameters["f_a_proj"]), parameters["f_b_proj"]).reshape(heads)
    beta_BTH = jax.nn.sigmoid(linear(x_BTD, parameters["b_proj"]).astype(compute_dtype(x_BTD.dtype)))
    decay_BTHK = log_decay(
        raw_BTHK, parameters["A_log"][: kda.num_heads], parameters["dt_bias"], kda.gate_lower_bound
    )
    return decay_BTHK, beta_BTH


def kda_attention(
    parameters: Group,
    x_BTD: Float[Array, "B T D"],
    cache: KDACache,
    lengths_B: Int[Array, " B"],
    config: ModelConfig,
    repeat: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B T D"], KDACache]:
    """One delta layer on its normalised input. Tokens from `lengths_B` on are padding: they leave the state and
    the window untouched, and their output has no meaning. `repeat` indexes a stacked cache."""
    kda = config.kda
    assert isinstance(kda, KDAConfig)
    batch, count, _ = x_BTD.shape
    heads = (batch, count, kda.num_heads, kda.head_dim)

    with jax.named_scope("kda_projections"):
        u_BTC = jnp.concatenate([linear(x_BTD, parameters[f"{name}_proj"]) for name in "qkv"], axis=-1)
        taps_JC = jnp.concatenate([parameters[f"{name}_conv"] for name in "qkv"], axis=-1)
        decay_BTHK, beta_BTH = gates(parameters, x_BTD, config)
        if kda.full_rank_gate:
            gate_BTC = linear(x_BTD, parameters["g_proj"])
        else:
            gate_BTC = linear(linear(x_BTD, parameters["g_a_proj"]), parameters["g_b_proj"])
    window_BWC, state_BHKV = read(cache.window_BWC, repeat), read(cache.state_BHKV, repeat)
    if count == 1:
        by_head = (-1, 3, kda.num_heads, kda.head_dim)
        with jax.named_scope("kda_step"):
            gated_BHV, state_BHKV, window_BW3HK = delta_rule.fused_step(
                u_BTC.reshape(by_head),
                window_BWC.reshape(batch, *by_head),
                taps_JC.reshape(by_head),
                decay_BTHK[:, 0],
                beta_BTH[:, 0],
                gate_BTC.reshape(heads)[:, 0],
                parameters["o_norm"],
                state_BHKV,
                lengths_B > 0,
                config.rms_norm_eps,
            )
            gated_BTC, window_BWC = (
                gated_BHV.reshape(batch, 1, kda.size),
                window_BW3HK.reshape(window_BWC.shape),
            )
    else:
        with jax.named_scope("kda_convolution"):
            u_BTC, window_BWC = short_convolution(window_BWC, u_BTC, taps_JC, lengths_B)
            q_BTC, k_BTC, v_BTC = jnp.split(u_BTC, 3, axis=-1)
            q_BTHK = (l2_norm(q_BTC.reshape(heads)) * kda.head_dim**-0.5).astype(x_BTD.dtype)
            k_BTHK = l2_norm(k_BTC.reshape(heads)).astype(x_BTD.dtype)
        with jax.named_scope("kda_delta_rule"):
            o_BTHV, state_BHKV, *_ = delta_rule.delta_rule(
                q_BTHK, k_BTHK, v_BTC.reshape(heads), decay_BTHK, beta_BTH, state_BHKV, lengths_B
            )
        with jax.named_scope("kda_norm"):
            gated_BTHV = gated_rms_norm(
                o_BTHV, parameters["o_norm"], gate_BTC.reshape(heads), config.rms_norm_eps
            )
            gated_BTC = gated_BTHV.reshape(batch, count, kda.size)
    with jax.named_scope("kda_output"):
        out_BTD = linear(gated_BTC, parameters["o_proj"])
    return out_BTD, KDACache(
        replace(cache.state_BHKV, repeat, state_BHKV), replace(cache.window_BWC, repeat, window_BWC)
    )
