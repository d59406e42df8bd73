"""Choosing the next token from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

NOT_A_TOKEN = -1
"""What is drawn from logits that are not numbers."""


def sample(
    logits_BV: Float[Array, "B V"],
    key: Key[Array, ""],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
) -> Int[Array, " B"]:
    """One token per row: the highest logit at temperature 0 (lowest id on ties), otherwise a draw from
    softmax(logits / temperature) restricted to the smallest set of most likely tokens whose probability
    reaches `top_p` (the most likely token always remains). `NOT_A_TOKEN` where a row's highest logit is NaN or
    infinite: argmax would give id 0 for ever.
    """
    greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        scaled_BV = logits_BV / jnp.maximum(temperature, 1e-6).astype(logits_BV.dtype)
        order_BV = jnp.argsort(-scaled_BV, axis=-1, stable=True)
        sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
        probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
        # top_p = 1 keeps everything, whatever the rounding of the running sum.
        kept_BV = (before_BV < top_p.astype(before_BV.dtype)) | (top_p >= 1.0)
        kept_BV = kept_BV.at[:, 0].set(True)
        choice_B = jax.random.categorical(key, jnp.where(kept_BV, sorted_BV, -jnp.inf), axis=-1)
        return jnp.take_along_axis(order_BV, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)

    tokens_B = jax.lax.cond(temperature > 0, draw, lambda: greedy_B)
    return jnp.where(jnp.isfinite(jnp.max(logits_BV, axis=-1)), tokens_B, NOT_A_TOKEN)
