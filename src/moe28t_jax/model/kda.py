"""Gated delta attention (KDA): short convolutions, per-channel decay, delta-rule state, gated output norm."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe28t_jax.config import KDAConfig, ModelConfig
from moe28t_jax.model.cache import KDACache, read, replace
from moe28t_jax.model.numerics import compute_dtype, gated_rms_norm, l2_norm, linear
from moe28t_jax.model.parameters import Group
from moe28t_jax.parallel import sequence
from moe28t_jax.parallel.rules import Layout, batch_layout, constrain
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
    if x_BTD.shape[1] == 1:
        # Otherwise the compiler for GPUs copies two small weights together to multiply by both at once.
        x_BTD = jax.lax.optimization_barrier(x_BTD)
    beta_BTH = jax.nn.sigmoid(linear(x_BTD, parameters["b_proj"]).astype(compute_dtype(x_BTD.dtype)))
    decay_BTHK = log_decay(
        raw_BTHK, parameters["A_log"][: kda.num_heads], parameters["dt_bias"], kda.gate_lower_bound
    )
    return decay_BTHK, beta_BTH


def _between_projections(
    u_BTC: Float[Array, "B T C"],
    taps_JC: Float[Array, "J C"],
    decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    gate_BTC: Float[Array, "B T G"],
    o_norm_K: Float[Array, " K"],
    state_BHKV: Float[Array, "B H K K"],
    window_BWC: Float[Array, "B W C"],
    lengths_B: Int[Array, " B"],
    eps: float,
    tokens: tuple[str, ...] = (),
) -> tuple[Float[Array, "B T G"], Float[Array, "B H K K"], Float[Array, "B W C"]]:
    """What a delta layer does between its projections, for any of its heads: gated output, state and window.

    `tokens` are the mesh axes that divide the row inside of `jax.shard_map`; lengths, state and window are then those
    of the whole row.
    """
    batch, count, num_heads, head_dim = decay_BTHK.shape
    heads = (batch, count, num_heads, head_dim)
    if count == 1 and not tokens:
        by_head = (-1, 3, num_heads, head_dim)
        with jax.named_scope("kda_step"):
            gated_BHV, state_BHKV, window_BW3HK = delta_rule.fused_step(
                u_BTC.reshape(by_head),
                window_BWC.reshape(batch, *by_head),
                taps_JC.reshape(by_head),
                decay_BTHK[:, 0],
                beta_BTH[:, 0],
                gate_BTC.reshape(heads)[:, 0],
                o_norm_K,
                state_BHKV,
                lengths_B > 0,
                eps,
            )
        return (
            gated_BHV.reshape(batch, 1, num_heads * head_dim),
            state_BHKV,
            window_BW3HK.reshape(window_BWC.shape),
        )
    with jax.named_scope("kda_convolution"):
        if tokens:
            before_BWC = sequence.inputs_before(window_BWC, u_BTC, tokens)
            here_B = sequence.local_lengths(lengths_B, count, tokens)
            u_BTC, last_BWC = short_convolution(before_BWC, u_BTC, taps_JC, here_B)
            window_BWC = sequence.from_last_token(last_BWC, lengths_B, count, tokens)
        else:
            u_BTC, window_BWC = short_convolution(window_BWC, u_BTC, taps_JC, lengths_B)
        q_BTC, k_BTC, v_BTC = jnp.split(u_BTC, 3, axis=-1)
        q_BTHK = (l2_norm(q_BTC.reshape(heads)) * head_dim**-0.5).astype(u_BTC.dtype)
        k_BTHK = l2_norm(k_BTC.reshape(heads)).astype(u_BTC.dtype)
    with jax.named_scope("kda_delta_rule"):
        v_BTHV = v_BTC.reshape(heads)
        if tokens:
            o_BTHV, state_BHKV = sequence.delta_rule_over(
                q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH, state_BHKV, lengths_B, tokens
            )
        else:
            o_BTHV, state_BHKV, *_ = delta_rule.delta_rule(
                q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta_BTH, state_BHKV, lengths_B
            )
    with jax.named_scope("kda_norm"):
        gated_BTHV = gated_rms_norm(o_BTHV, o_norm_K, gate_BTC.reshape(heads), eps)
    return gated_BTHV.reshape(batch, count, num_heads * head_dim), state_BHKV, window_BWC


def _between_projections_on_mesh(
    where: Layout,
    u_BTHK: Sequence[Float[Array, "B T H K"]],
    taps_JHK: Sequence[Float[Array, "J H K"]],
    decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    gate_BTHK: Float[Array, "B T H K"],
    o_norm_K: Float[Array, " K"],
    state_BHKV: Float[Array, "B H K K"],
    window_BW3HK: Float[Array, "B W 3 H K"],
    lengths_B: Int[Array, " B"],
    eps: float,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K K"], Float[Array, "B W 3 H K"]]:
    """`_between_projections` with the inputs of q, k and v apart: every device computes its rows and heads, and where
    tokens are divided its tokens."""
    batch_axes = where.rows
    tokens = where.token_axes(decay_BTHK.shape[1], window_BW3HK.shape[1])

    def local(u_BTHK, taps_JHK, decay_BTHK, beta_BTH, gate_BTHK, o_norm_K, state, window_BW3HK, lengths_B):
        batch, count, heads, dim = decay_BTHK.shape
        gated_BTC, state, window_BWC = _between_projections(
            jnp.concatenate([u.reshape(batch, count, heads * dim) for u in u_BTHK], axis=-1),
            jnp.concatenate([taps.reshape(-1, heads * dim) for taps in taps_JHK], axis=-1),
            decay_BTHK,
            beta_BTH,
            gate_BTHK.reshape(batch, count, heads * dim),
            o_norm_K,
            state,
            window_BW3HK.reshape(batch, -1, 3 * heads * dim),
            lengths_B,
            eps,
            tokens,
        )
        return gated_BTC.reshape(decay_BTHK.shape), state, window_BWC.reshape(window_BW3HK.shape)

    by_token = P(batch_axes, tokens, "tensor", None)
    state, window = P(batch_axes, "tensor", None, None), P(batch_axes, None, None, "tensor", None)
    return jax.shard_map(
        local,
        in_specs=(
            [by_token] * 3,
            [P(None, "tensor", None)] * 3,
            by_token,
            P(batch_axes, tokens, "tensor"),
            by_token,
            P(None),
            state,
            window,
            P(batch_axes),
        ),
        out_specs=(by_token, state, window),
        check_vma=False,
    )(
        list(u_BTHK),
        list(taps_JHK),
        decay_BTHK,
        beta_BTH,
        gate_BTHK,
        o_norm_K,
        state_BHKV,
        window_BW3HK,
        lengths_B,
    )


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
        u_qkv = [linear(x_BTD, parameters[f"{name}_proj"]) for name in "qkv"]
        taps_qkv = [parameters[f"{name}_conv"] for name in "qkv"]
        decay_BTHK, beta_BTH = gates(parameters, x_BTD, config)
        if kda.full_rank_gate:
            gate_BTC = linear(x_BTD, parameters["g_proj"])
        else:
            gate_BTC = linear(linear(x_BTD, parameters["g_a_proj"]), parameters["g_b_proj"])
    window, state_BHKV = read(cache.window_BWC, repeat), read(cache.state_BHKV, repeat)
    where = batch_layout(batch)
    if where is None:
        gated_BTC, state_BHKV, window_BWC = _between_projections(
            jnp.concatenate(u_qkv, axis=-1),
            jnp.concatenate(taps_qkv, axis=-1),
            decay_BTHK,
            beta_BTH,
            gate_BTC,
            parameters["o_norm"],
            state_BHKV,
            window.reshape(batch, kda.conv_size - 1, 3 * kda.size),
            lengths_B,
            config.rms_norm_eps,
        )
    else:
        if count == 1:
            # Otherwise the compiler divides into heads inside of the products, and transposes their weights for it.
            u_qkv, gate_BTC = jax.lax.optimization_barrier((u_qkv, gate_BTC))
        gated_BTHK, state_BHKV, window_BWC = _between_projections_on_mesh(
            where,
            [u_BTC.reshape(heads) for u_BTC in u_qkv],
            [taps_JC.reshape(-1, kda.num_heads, kda.head_dim) for taps_JC in taps_qkv],
            decay_BTHK,
            beta_BTH,
            gate_BTC.reshape(heads),
            parameters["o_norm"],
            state_BHKV,
            window.reshape(batch, kda.conv_size - 1, 3, kda.num_heads, kda.head_dim),
            lengths_B,
            config.rms_norm_eps,
        )
        gated_BTC = gated_BTHK.reshape(batch, count, kda.size)
    with jax.named_scope("kda_output"):
        out_BTD = constrain(linear(gated_BTC, parameters["o_proj"]), "batch", "token", None)
    return out_BTD, KDACache(
        replace(cache.state_BHKV, repeat, state_BHKV),
        replace(cache.window_BWC, repeat, window_BWC.reshape(window.shape)),
    )
