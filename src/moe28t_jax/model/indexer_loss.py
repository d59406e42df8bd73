"""The indexer's own training signal: KL divergence from the attention's distribution to the indexer's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe28t_jax.model.numerics import compute_dtype
from pallas_kernels import index_select


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
    dtype = compute_dtype(q_latent_BTHC.dtype)
    valid_BTN = indices_BTN >= 0
    some_BT = jnp.any(valid_BTN, axis=-1)

    def attention(inputs):
        q_THC, rows_SC, indices_TN = inputs
        gathered_TNC = rows_SC[jnp.maximum(indices_TN, 0)]
        logits_THN = scale * jnp.einsum(
            "THC,TNC->THN", q_THC, gathered_TNC, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype
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
        scores_BTN = index_select.scores_at(q_index_BTID, key_BSD, weights_BTI, indices_BTN, use_relu=use_relu)
        scores_BTN = jnp.where(valid_BTN, scores_BTN, -1e30)
        log_index_BTN = jax.nn.log_softmax(scores_BTN, axis=-1)
        log_target_BTN = jnp.log(jnp.maximum(target_BTN, 1e-10))
        terms_BTN = jnp.where(valid_BTN, target_BTN * (log_target_BTN - log_index_BTN), 0.0)
        return jnp.where(some_BT, jnp.sum(terms_BTN, axis=-1), 0.0)
