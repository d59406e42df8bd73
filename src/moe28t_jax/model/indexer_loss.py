"""The indexer's own training signal: KL divergence from the attention's distribution to the indexer's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe28t_jax.model.numerics import compute_dtype, head_product
from pallas_kernels import index_select

# Up to this many keys per selected one, products over all keys cost less than gathering rows per query.
_DENSE_KEYS_PER_SELECTED = 16

_DIGIT = 128


def named_keys(indices_TN: Int[Array, "T N"], keys: int) -> Bool[Array, "T S"]:
    """Which of S = `keys` keys each query names; -1 names none.

    A scatter says the same, which takes TPU compilers and TPUs long: here a key is a number of two digits, and the
    product of both digits' indicators counts how often it is named.
    """
    digits_TN = jnp.where(indices_TN >= 0, indices_TN, -(-keys // _DIGIT) * _DIGIT)
    high_H = jnp.arange(-(-keys // _DIGIT), dtype=jnp.int32)
    low_L = jnp.arange(_DIGIT, dtype=jnp.int32)
    # 0 and 1 are exact in any float.
    high_TNH = (digits_TN[:, :, None] // _DIGIT == high_H).astype(jnp.bfloat16)
    low_TNL = (digits_TN[:, :, None] % _DIGIT == low_L).astype(jnp.bfloat16)
    counts_THL = head_product("TNH,TNL->THL", high_TNH, low_TNL)
    return counts_THL.reshape(indices_TN.shape[0], -1)[:, :keys] > 0


def _dense_target(
    q_THC: Float[Array, "T H C"], rows_SC: Float[Array, "S C"], keep_TS: Bool[Array, "T S"], scale: float
) -> Float[Array, "T S"]:
    """The attention's distribution over all keys, averaged over the heads. One head after the other: all logits at
    once are the largest array of a training step, and written and read several times."""
    dtype = compute_dtype(q_THC.dtype)

    def add(total_TS: Array, q_TC: Array) -> tuple[Array, None]:
        logits_TS = scale * jnp.einsum(
            "TC,SC->TS", q_TC, rows_SC, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype
        )
        return total_TS + jax.nn.softmax(jnp.where(keep_TS, logits_TS, -1e30), axis=-1), None

    total_TS, _ = jax.lax.scan(add, jnp.zeros(keep_TS.shape, dtype), jnp.moveaxis(q_THC, 1, 0))
    return jnp.where(keep_TS, total_TS / q_THC.shape[1], 0.0)


def _dense_loss(q_latent_BTHC, latent_BSC, q_index_BTID, key_BSD, weights_BTI, indices_BTN, scale, use_relu):
    """`indexer_loss` over all keys with those that are not named masked, one batch row at a time."""
    keys = latent_BSC.shape[1]

    @jax.checkpoint
    def divergence_T(target_TS, keep_TS, q_TID, key_SD, weights_TI, positions_T):
        scores_TS = index_select.scores_at(
            q_TID[None], key_SD[None], weights_TI[None], query_positions=positions_T[None], use_relu=use_relu
        )[0]
        log_index_TS = jax.nn.log_softmax(jnp.where(keep_TS, scores_TS, -1e30), axis=-1)
        log_target_TS = jnp.log(jnp.maximum(target_TS, 1e-10))
        return jnp.sum(jnp.where(keep_TS, target_TS * (log_target_TS - log_index_TS), 0.0), axis=-1)

    def row_loss(row):
        q_THC, rows_SC, q_TID, key_SD, weights_TI, indices_TN = row
        keep_TS = named_keys(indices_TN, keys)
        # Kept for the backward pass, which would else make it again.
        target_TS = jax.lax.stop_gradient(_dense_target(q_THC, rows_SC, keep_TS, scale))
        positions_T = jnp.max(indices_TN, axis=-1, initial=-1)
        return divergence_T(target_TS, keep_TS, q_TID, key_SD, weights_TI, positions_T)

    with jax.named_scope("indexer_loss"):
        detached = jax.lax.stop_gradient((q_latent_BTHC, latent_BSC))
        return jax.lax.map(row_loss, (*detached, q_index_BTID, key_BSD, weights_BTI, indices_BTN))


def indexer_loss(
    q_latent_BTHC: Float[Array, "B T H C"],
    latent_BSC: Float[Array, "B S C"],
    q_index_BTID: Float[Array, "B T I D"],
    key_BSD: Float[Array, "B S D"],
    weights_BTI: Float[Array, "B T I"],
    indices_BTN: Int[Array, "B T N"],
    scale: float,
    use_relu: bool,
) -> Float[Array, "B T"]:
    """KL(p || softmax(I)) per query over the given keys (DeepSeek-V3.2, sparse stage; dense where the indices
    name every visible key). p is the head average of the attention probabilities, detached: the loss trains
    the indexer alone. Index -1 is skipped; a query without keys gives 0.
    """
    if latent_BSC.shape[1] <= _DENSE_KEYS_PER_SELECTED * indices_BTN.shape[2]:
        return _dense_loss(
            q_latent_BTHC, latent_BSC, q_index_BTID, key_BSD, weights_BTI, indices_BTN, scale, use_relu
        )
    dtype = compute_dtype(q_latent_BTHC.dtype)
    valid_BTN = indices_BTN >= 0
    some_BT = jnp.any(valid_BTN, axis=-1)

    def attention(inputs):
        q_THC, rows_SC, indices_TN = inputs
        gathered_TNC = rows_SC[jnp.maximum(indices_TN, 0)]
        logits_THN = scale * jnp.einsum(
            "THC,TNC->THN",
            q_THC,
            gathered_TNC,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=dtype,
        )
        keep_T1N = (indices_TN >= 0)[:, None]
        logits_THN = jnp.where(keep_T1N, logits_THN, -jnp.inf)
        highest = jnp.max(logits_THN, axis=-1, keepdims=True, where=keep_T1N, initial=-1e30)
        weights = jnp.exp(logits_THN - highest)
        return jnp.mean(weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30), axis=1)

    with jax.named_scope("indexer_loss"):
        target_BTN = jax.lax.map(
            attention, jax.lax.stop_gradient((q_latent_BTHC, latent_BSC, jnp.asarray(indices_BTN)))
        )
        scores_BTN = index_select.scores_at(
            q_index_BTID, key_BSD, weights_BTI, indices_BTN, use_relu=use_relu
        )
        scores_BTN = jnp.where(valid_BTN, scores_BTN, -1e30)
        log_index_BTN = jax.nn.log_softmax(scores_BTN, axis=-1)
        log_target_BTN = jnp.log(jnp.maximum(target_BTN, 1e-10))
        terms_BTN = jnp.where(valid_BTN, target_BTN * (log_target_BTN - log_index_BTN), 0.0)
        return jnp.where(some_BT, jnp.sum(terms_BTN, axis=-1), 0.0)
