"""Choosing the next token from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

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
        # top_p = 1 keeps everything, whatever the rounding of the sums.
        kept_BV = nucleus(scaled_BV, top_p) | (top_p >= 1.0)
        choice_B = jax.random.categorical(key, jnp.where(kept_BV, scaled_BV, -jnp.inf), axis=-1)
        return choice_B.astype(jnp.int32)

    tokens_B = jax.lax.cond(temperature > 0, draw, lambda: greedy_B)
    return jnp.where(jnp.isfinite(jnp.max(logits_BV, axis=-1)), tokens_B, NOT_A_TOKEN)


def nucleus(logits_BV: Float[Array, "B V"], top_p: Float[Array, ""]) -> Bool[Array, "B V"]:
    """The tokens before which, from the most likely on (lowest id first of equals), less than `top_p` of the
    probability lies; the most likely token always is one.

    Without sorting, which would move a vocabulary that lies on many devices between them: the least logit that is kept
    is found bit by bit, and then the highest id that is kept among the tokens with just this logit; each turn is one
    sum per row.
    """
    probability_BV = jax.nn.softmax(logits_BV, axis=-1)
    rank_BV = _order_preserving(logits_BV)
    share = top_p.astype(probability_BV.dtype)

    def above(least_B: Array) -> Array:
        return jnp.sum(jnp.where(rank_BV > least_B[:, None], probability_BV, 0), axis=-1)

    least_B = _least(rank_BV.shape[:1], rank_BV.dtype, lambda rank_B: above(rank_B) < share)
    equal_BV = rank_BV == least_B[:, None]
    one_B = jnp.max(jnp.where(equal_BV, probability_BV, 0), axis=-1)
    ids_V = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)
    before_B = above(least_B)

    def reaches(id_B: Array) -> Array:
        """Whether less than `top_p` lies before the last of the equals up to this id no more."""
        count_B = jnp.sum(equal_BV & (ids_V <= id_B[:, None]), axis=-1, dtype=jnp.int32)
        return before_B + count_B.astype(one_B.dtype) * one_B >= share

    last_B = _least(rank_BV.shape[:1], jnp.dtype(jnp.int32), reaches)
    return (rank_BV > least_B[:, None]) | (equal_BV & (ids_V <= last_B[:, None]))


def _order_preserving(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers that compare as the numbers do; -0.0 is 0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), f"int{8 * x.dtype.itemsize}")
    return jnp.where(bits < 0, bits ^ np.array(np.iinfo(bits.dtype).max, bits.dtype), bits)


def _least(shape: tuple[int, ...], dtype: jnp.dtype, holds: Callable[[Array], Array]) -> Array:
    """The least integer per row for which `holds`; the largest of the dtype where it holds for none. What holds for one
    holds for all above."""
    limits = np.iinfo(dtype)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # Halfway without overflow, rounded down.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        found = holds(middle)
        return jnp.where(found, low, jnp.minimum(middle, limits.max - 1) + 1), jnp.where(found, middle, high)

    bounds = (jnp.full(shape, limits.min, dtype), jnp.full(shape, limits.max, dtype))
    return jax.lax.fori_loop(0, limits.bits, halve, bounds)[1]
