"""Quantile balancing of the router's correction bias: no auxiliary loss, no step size."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def quantile_balance(
    scores_NE: Float[Array, "N E"], bias_E: Float[Array, " E"], top_k: int
) -> Float[Array, " E"]:
    """The bias that gives every expert its even share of these tokens, for use from the next step on.

    alpha_i is the (top_k + 1)-th highest biased score of token i; expert j's new bias is minus the
    (N top_k / E + 1)-th highest margin s_ij - alpha_i, interpolated; the result is centred at zero (K3 report,
    eq. 14 with the sign its counting argument needs). scores: unbiased, in (0, 1).
    """
    count, experts = scores_NE.shape
    alpha_N1 = jax.lax.top_k(scores_NE + bias_E, top_k + 1)[0][:, -1:]
    margins_EN = jnp.sort((scores_NE - alpha_N1).T, axis=1)
    # Descending rank q lies between ascending positions count - q - 1 and count - q.
    share = count * top_k / experts
    position = min(max(count - share - 0.5, 0.0), count - 1.0)
    low = math.floor(position)
    high, part = min(low + 1, count - 1), position - low
    quantile_E = margins_EN[:, low] * (1 - part) + margins_EN[:, high] * part
    return -(quantile_E - jnp.mean(quantile_E))


def max_violation(load_E: Float[Array, " E"]) -> Float[Array, ""]:
    """Highest load over the mean load, minus 1; 0 without any load."""
    mean = jnp.mean(load_E)
    return jnp.where(mean > 0, jnp.max(load_E) / jnp.where(mean > 0, mean, 1) - 1, 0)
