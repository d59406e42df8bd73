"""The best entries of a long row, faster than one pass of `jax.lax.top_k` over all of it."""

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int

_SMALLEST_GROUP = 4
"""With smaller groups the second pass is as long as the first would have been."""


def _mirror(bits: Int[Array, "*x"]) -> Int[Array, "*x"]:
    """Between the bits of floats and integers of their order: negative floats the other way round. Its own inverse."""
    return bits ^ ((bits >> (bits.dtype.itemsize * 8 - 1)) & jnp.iinfo(bits.dtype).max)


def top_k(scores_xN: Float[Array, "*x N"], count: int) -> tuple[Float[Array, "*x K"], Int[Array, "*x K"]]:
    """What `jax.lax.top_k` gives, order and ties included: values and places, best first, of equal ones the earlier.

    Groups of neighbours are ranked by their maxima, and then the entries of the best `count` groups: each of the best
    `count` entries is in one of these, since otherwise every one of them would hold an entry that comes before it, by
    value or, among equal ones, by place.
    """
    *leading, entries = scores_xN.shape
    # Both passes are shortest together near the square root; a power of two.
    group = 1 << (entries // count).bit_length() // 2
    if group < _SMALLEST_GROUP:
        values_xK, places_xK = jax.lax.top_k(scores_xN, count)
        return values_xK, places_xK
    groups = -(-entries // group)
    padding = [(0, 0)] * len(leading) + [(0, groups * group - entries)]
    padded_xN = jnp.pad(scores_xN, padding, constant_values=-jnp.inf)
    scores_xPG = padded_xN.reshape(*leading, groups, group)
    # As integers of the same order, for a maximum of floats may overlook NaN, which ranks highest; as floats again,
    # since the fast top_k of a CPU knows no others.
    integer = jnp.dtype(f"int{8 * scores_xN.dtype.itemsize}")
    highest_xP = jnp.max(_mirror(jax.lax.bitcast_convert_type(scores_xPG, integer)), axis=-1)
    _, best_xK = jax.lax.top_k(jax.lax.bitcast_convert_type(_mirror(highest_xP), scores_xN.dtype), count)
    # In the order of their places again, so that ties are.
    best_xK = jnp.sort(best_xK, axis=-1)
    kept_xKG = jnp.take_along_axis(scores_xPG, best_xK[..., None], axis=-2)
    values_xK, places_xK = jax.lax.top_k(kept_xKG.reshape(*leading, count * group), count)
    group_xK = jnp.take_along_axis(best_xK, places_xK // group, axis=-1)
    return values_xK, group_xK * group + places_xK % group
