"""Dense causal attention over latents, streamed over tiles of keys with a running softmax.

Keys and values of a tile exist only while the tile is read: with many queries they are expanded from the latents
once per tile (fewer multiplications), with few queries the up-projections are absorbed into the queries instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe28t_jax.model.numerics import compute_dtype, head_product, widened

# Scores held at once, in elements: 4 MiB of float32, which stay in a CPU's cache. Far larger temporaries also
# cost a CPU more in page faults than in arithmetic, because the allocator returns them after every call.
_SCORE_BUDGET = 1024 * 1024
# From about this many queries on, expanding a tile costs less than attending to it in the wider latent.
EXPAND_FROM_QUERIES = 64


def latent_attention(
    q_nope_BTHN: Float[Array, "B T H N"],
    q_rope_BTHR: Float[Array, "B T H R"],
    latent_BSC: Float[Array, "B S C"],
    up_k_HNL: Float[Array, "H N L"],
    up_v_HVL: Float[Array, "H V L"],
    positions_BT: Int[Array, "B T"],
    scale: float,
    expand: bool | None = None,
) -> Float[Array, "B T H V"]:
    """softmax(scale * (q_nope . (c U_k) + q_rope . k_rope)) (c U_v) over the cached rows s <= position.

    Rows of `latent_BSC` are (c | k_rope), C = L + R. A position of -1 sees nothing and gives 0. Rows beyond
    every position are never read into the result, whatever they hold. `expand` forces one of the two forms.
    """
    return attend_to_latents(
        q_nope_BTHN, q_rope_BTHR, latent_BSC, up_k_HNL, up_v_HVL, positions_BT, scale, expand
    )[0]


def attend_to_latents(
    q_nope_BTHN: Float[Array, "B T H N"],
    q_rope_BTHR: Float[Array, "B T H R"],
    latent_BSC: Float[Array, "B S C"],
    up_k_HNL: Float[Array, "H N L"],
    up_v_HVL: Float[Array, "H V L"],
    positions_BT: Int[Array, "B T"],
    scale: float,
    expand: bool | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B T H"]]:
    """`latent_attention` and the natural-log sum of exponentials of the scaled scores, float32 (float64), -inf where a
    query sees nothing: what merges the parts of a cache that lies on several devices.
    """
    _, queries, heads, _ = q_nope_BTHN.shape
    rank = up_k_HNL.shape[2]
    dtype = compute_dtype(q_nope_BTHN.dtype)
    if expand is None:
        expand = queries >= EXPAND_FROM_QUERIES
    if not expand:
        absorbed = head_product("BTHN,HNL->BTHL", q_nope_BTHN, up_k_HNL).astype(q_nope_BTHN.dtype)
        shared = (jnp.concatenate([absorbed, q_rope_BTHR], axis=-1),)
    else:
        # One product per tile gives whole scores; the transposed queries serve all tiles.
        q_BHTD = jnp.concatenate([q_nope_BTHN, q_rope_BTHR], axis=-1).transpose(0, 2, 1, 3)
        shared = (q_BHTD, up_k_HNL, up_v_HVL)
    narrow = widened(shared)

    def tile_scores(tile_BSC):
        if not expand:
            [q_BTHC] = narrow()
            # Whole rows serve as values, and the result is cut: cutting the tile would copy it.
            return head_product("BTHC,BSC->BHTS", q_BTHC, tile_BSC), tile_BSC
        q_BHTD, up_k_HNL, up_v_HVL = narrow()
        latent_BSL, k_rope_BSR = tile_BSC[..., :rank], tile_BSC[..., rank:]
        k_BSHN = head_product("BSL,HNL->BSHN", latent_BSL, up_k_HNL).astype(tile_BSC.dtype)
        v_BSHV = head_product("BSL,HVL->BSHV", latent_BSL, up_v_HVL).astype(tile_BSC.dtype)
        k_rope_BSHR = jnp.broadcast_to(k_rope_BSR[:, :, None], (*k_BSHN.shape[:-1], k_rope_BSR.shape[-1]))
        k_BSHD = jnp.concatenate([k_BSHN, k_rope_BSHR], axis=-1)
        return head_product("BHTD,BSHD->BHTS", q_BHTD, k_BSHD), v_BSHV

    def attend(carry, tile_BSC, key_positions_S):
        highest_BHT, total_BHT, sum_BHTV = carry
        visible_BTS = key_positions_S[None, None, :] <= positions_BT[:, :, None]
        # Rows that no query of the batch row sees may hold anything, NaN included.
        seen_BS = jnp.any(visible_BTS, axis=1)
        tile_BSC = jnp.where(seen_BS[:, :, None], tile_BSC, jnp.zeros((), tile_BSC.dtype))
        scores_BHTS, values = tile_scores(tile_BSC)
        scores_BHTS = jnp.where(visible_BTS[:, None], scores_BHTS * scale, -jnp.inf)
        new_highest_BHT = jnp.maximum(highest_BHT, jnp.max(scores_BHTS, axis=-1))
        # A query that has seen nothing yet keeps -inf; subtracting a finite stand-in avoids inf - inf.
        reference_BHT = jnp.where(jnp.isfinite(new_highest_BHT), new_highest_BHT, 0.0)
        weights_BHTS = jnp.exp(scores_BHTS - reference_BHT[..., None])
        kept_BHT = jnp.exp(highest_BHT - reference_BHT)
        total_BHT = total_BHT * kept_BHT + jnp.sum(weights_BHTS, axis=-1)
        weights_BHTS = weights_BHTS.astype(values.dtype)
        read = head_product("BHTS,BSHV->BHTV" if expand else "BHTS,BSC->BHTC", weights_BHTS, values)
        return new_highest_BHT, total_BHT, sum_BHTV * kept_BHT[..., None] + read

    batch, keys, width = latent_BSC.shape
    tile = max(128, _SCORE_BUDGET // (batch * queries * heads) // 128 * 128)
    value_dim = up_v_HVL.shape[1] if expand else width
    carry = (
        jnp.full((batch, heads, queries), -jnp.inf, dtype),
        jnp.zeros((batch, heads, queries), dtype),
        jnp.zeros((batch, heads, queries, value_dim), dtype),
    )
    if keys <= tile:
        carry = attend(carry, latent_BSC, jnp.arange(keys, dtype=jnp.int32))
    else:
        last = jnp.max(positions_BT)

        def body(carry, start):
            def visit(carry):
                # The last tile is moved back to fit; keys it repeats are masked by an impossible position.
                begin = jnp.minimum(start, keys - tile)
                key_positions_S = begin + jnp.arange(tile, dtype=jnp.int32)
                key_positions_S = jnp.where(
                    key_positions_S < start, jnp.iinfo(jnp.int32).max, key_positions_S
                )
                return attend(
                    carry, jax.lax.dynamic_slice_in_dim(latent_BSC, begin, tile, 1), key_positions_S
                )

            return jax.lax.cond(start <= last, visit, lambda carry: carry, carry), None

        starts = jnp.arange(0, keys, tile, dtype=jnp.int32)
        carry, _ = jax.lax.scan(jax.checkpoint(body), carry, starts)
    highest_BHT, total_BHT, sum_BHTV = carry
    some_BHT = total_BHT > 0
    safe_BHT = jnp.where(some_BHT, total_BHT, 1.0)
    logsumexp_BHT = jnp.where(some_BHT, jnp.where(some_BHT, highest_BHT, 0.0) + jnp.log(safe_BHT), -jnp.inf)
    logsumexp_BTH = logsumexp_BHT.transpose(0, 2, 1)
    o_BHTV = sum_BHTV / safe_BHT[..., None]
    if expand:
        return o_BHTV.transpose(0, 2, 1, 3).astype(q_nope_BTHN.dtype), logsumexp_BTH
    o_BHTL = o_BHTV[..., :rank].astype(q_nope_BTHN.dtype)
    o_BTHV = head_product("BHTL,HVL->BTHV", o_BHTL, up_v_HVL)
    return o_BTHV.astype(q_nope_BTHN.dtype), logsumexp_BTH
