"""Block attention residuals (AttnRes): every sub-layer reads a learned mix of earlier blocks.

Every `residual_block_size` layers the running sum is pushed as a snapshot and restarts. A sub-layer's input is
the softmax mix of all snapshots and the running sum, weighted by a pseudo query against their normalised
content. The mix feeds the sub-layer only; it never enters the running sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe28t_jax.model.numerics import compute_dtype


def mixing_weights(
    candidates: Sequence[Float[Array, "*batch n"]],
    gain: Float[Array, " n"],
    query: Float[Array, " n"],
    eps: float,
    count: Int[Array, ""] | None = None,
) -> Float[Array, "*batch J"]:
    """softmax_j( <rms(v_j) * gain, query> ) over the candidates v_j, in float32; see `mix`."""
    dtype = compute_dtype(candidates[0].dtype)
    direction = gain.astype(dtype) * query.astype(dtype)
    scores = []
    for index, candidate in enumerate(candidates):
        wide = candidate.astype(dtype)
        score = jnp.sum(wide * direction, axis=-1) * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1) + eps)
        if count is not None and index < len(candidates) - 1:
            score = jnp.where(index < count, score, -jnp.inf)
        scores.append(score)
    return jax.nn.softmax(jnp.stack(scores, axis=-1), axis=-1)


def mix(
    candidates: Sequence[Float[Array, "*batch n"]],
    gain: Float[Array, " n"],
    query: Float[Array, " n"],
    eps: float,
    count: Int[Array, ""] | None = None,
) -> Float[Array, "*batch n"]:
    """sum_j softmax_j( <rms(v_j) * gain, query> ) v_j over the candidates v_j, in float32, one cast at the end.

    The last candidate is the running sum. With `count`, only the first `count` of the others exist (the rest
    of a fixed buffer is masked).
    """
    if len(candidates) == 1:
        return candidates[0]
    dtype = compute_dtype(candidates[0].dtype)
    with jax.named_scope("attention_residual"):
        weights = mixing_weights(candidates, gain, query, eps, count)
        mixed = sum(
            weights[..., index, None] * candidate.astype(dtype) for index, candidate in enumerate(candidates)
        )
        return jnp.asarray(mixed).astype(candidates[0].dtype)
