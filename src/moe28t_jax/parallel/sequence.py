"""Rows whose tokens lie on several devices: what a recurrence needs from the devices before it.

Everything here runs inside of `jax.shard_map`. `axes` are the mesh axes that divide the tokens, the slowest first: each
device holds the same number of consecutive ones. Lengths, states and windows are those of whole rows, the same on all.

A segment of a delta layer maps its state affinely, S -> M S + N, and maps compose (Kimi K3's context parallelism): one
all-gather of every device's (M, N), whose size does not depend on the number of tokens, gives each its initial state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import delta_rule

Axes = tuple[str, ...]


def local_lengths(lengths_B: Int[Array, " B"], tokens: int, axes: Axes) -> Int[Array, " B"]:
    """How many of this device's `tokens` are real in each row."""
    first = (jax.lax.axis_index(axes) * tokens).astype(lengths_B.dtype)
    return jnp.clip(lengths_B - first, 0, tokens)


def inputs_before(
    window_BWC: Float[Array, "B W C"], x_BTC: Float[Array, "B T C"], axes: Axes
) -> Float[Array, "B W C"]:
    """The W inputs before this device's first token: the last ones of the device before it, on the first device the
    window of the row. A device holds at least W tokens."""
    count = window_BWC.shape[1]
    last_BWC = x_BTC[:, x_BTC.shape[1] - count :]
    devices = jax.lax.axis_size(axes)
    before_BWC = jax.lax.ppermute(last_BWC, axes, [(i, i + 1) for i in range(devices - 1)])
    return jnp.where(jax.lax.axis_index(axes) == 0, window_BWC.astype(x_BTC.dtype), before_BWC)


def from_last_token(
    x_Bx: Float[Array, "B ..."], lengths_B: Int[Array, " B"], tokens: int, axes: Axes
) -> Float[Array, "B ..."]:
    """`x` of the device that holds each row's end (its last real token, and the place behind it where both are on
    one device), given to all."""
    devices = jax.lax.axis_size(axes)
    owner_B = jnp.minimum(lengths_B // tokens, devices - 1)
    mine_B = owner_B == jax.lax.axis_index(axes)
    mine_Bx = mine_B.reshape(-1, *(1,) * (x_Bx.ndim - 1))
    return jax.lax.psum(jnp.where(mine_Bx, x_Bx, jnp.zeros((), x_Bx.dtype)), axes)


def delta_rule_over(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    state_BHKV: Float[Array, "B H K V"],
    lengths_B: Int[Array, " B"],
    axes: Axes,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`pallas_kernels.delta_rule.delta_rule` of rows that lie on several devices: this device's outputs and the state
    after the whole rows, the same on all."""
    here_B = local_lengths(lengths_B, k_BTHK.shape[1], axes)
    key_dim = k_BTHK.shape[-1]
    with jax.named_scope("segment_map"):
        map_BHKK, added_BHKV = delta_rule.segment_map(k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, here_B)
    with jax.named_scope("compose_segments"):
        maps = jax.lax.all_gather(jnp.concatenate([map_BHKK, added_BHKV], axis=-1), axes)

        def follow(state_BHKV: Array, segment: Array) -> tuple[Array, Array]:
            moved_BHKV = jnp.einsum(
                "BHKJ,BHJV->BHKV",
                segment[..., :key_dim],
                state_BHKV,
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=state_BHKV.dtype,
            )
            return moved_BHKV + segment[..., key_dim:], state_BHKV

        final_BHKV, starts = jax.lax.scan(follow, state_BHKV.astype(maps.dtype), maps)
        start_BHKV = jax.lax.dynamic_index_in_dim(starts, jax.lax.axis_index(axes), keepdims=False)
    o_BTHV, *_ = delta_rule.delta_rule(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, start_BHKV, here_B)
    return o_BTHV, final_BHKV
