"""Norms and linear maps with the cast order of the public network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def compute_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """float32 for narrower types, float64 for float64: what reductions, gates and routers compute in."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def widened(arrays: Sequence[Array]) -> Callable[[], tuple[Array, ...]]:
    """A function that gives these arrays again, for the body of a scan or map that reads them at every step.

    The gradient of what such a body closes over is added up step by step in the array's own dtype, and a sum of
    bfloat16 stops growing after a few hundred terms. What is closed over here is float32 (float64), so that the sum is;
    it is exactly the narrower array again.
    """
    wide = tuple(x.astype(compute_dtype(x.dtype)) for x in arrays)
    dtypes = tuple(x.dtype for x in arrays)
    return lambda: tuple(x.astype(dtype) for x, dtype in zip(wide, dtypes, strict=True))


def linear(x: Float[Array, "*batch n"], weight: Float[Array, "n m"]) -> Float[Array, "*batch m"]:
    """x @ weight with a float32 (float64) accumulator, rounded once to the dtype of `x`."""
    y = jax.lax.dot_general(
        x,
        weight.astype(x.dtype),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=compute_dtype(x.dtype),
    )
    return y.astype(x.dtype)


def head_product(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """`jnp.einsum` of two arrays of one dtype with a float32 (float64) accumulator, which is what it returns."""
    dtype = compute_dtype(x.dtype)
    product = partial(jnp.einsum, equation, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
    if x.dtype == dtype:
        return product(x, y)
    # XLA refuses some batched products of bfloat16 on CPUs, and widens the operands of the others itself.
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: product(x.astype(dtype), y.astype(dtype)), default=product
    )


def rms_norm(x: Float[Array, "*batch n"], gain: Float[Array, " n"], eps: float) -> Float[Array, "*batch n"]:
    """x * rsqrt(mean(x^2) + eps) in float32, cast to the dtype of `x`, then times the gain (not 1 + gain)."""
    wide = x.astype(compute_dtype(x.dtype))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * gain.astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*batch n"], gain: Float[Array, " n"], gate: Float[Array, "*batch n"], eps: float
) -> Float[Array, "*batch n"]:
    """rms(x) * gain * sigmoid(gate), all in float32, one cast at the end (the KDA output norm)."""
    dtype = compute_dtype(x.dtype)
    wide = x.astype(dtype)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (normed * gain.astype(dtype) * jax.nn.sigmoid(gate.astype(dtype))).astype(gate.dtype)


def layer_norm(
    x: Float[Array, "*batch n"], gain: Float[Array, " n"], bias: Float[Array, " n"], eps: float
) -> Float[Array, "*batch n"]:
    """LayerNorm with gain and bias, computed in float32, cast to the dtype of `x` (the index-key norm)."""
    wide = x.astype(compute_dtype(x.dtype))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (normed * gain.astype(wide.dtype) + bias.astype(wide.dtype)).astype(x.dtype)


def l2_norm(x: Float[Array, "*batch n"], eps: float = 1e-6) -> Float[Array, "*batch n"]:
    """x * rsqrt(sum(x^2) + eps) in float32: eps inside the root, on the sum (KDA queries and keys)."""
    wide = x.astype(compute_dtype(x.dtype))
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + eps)


@jax.custom_vjp
def pick(values_xN: Float[Array, "*x N"], index_xK: Int[Array, "*x K"]) -> Float[Array, "*x K"]:
    """Elements of the last axis by number, each from 0 to N - 1. Their gradients are summed by comparison: the scatter
    of a gather takes TPU compilers long and adds in no fixed order on GPUs."""
    return jnp.take_along_axis(values_xN, index_xK, axis=-1)


def _pick_forward(values_xN: Array, index_xK: Array) -> tuple[Array, tuple[Array, Array]]:
    # An array without elements carries the length of the axis.
    return pick(values_xN, index_xK), (index_xK, jnp.zeros((values_xN.shape[-1], 0), jnp.int8))


def _pick_backward(residuals: tuple[Array, Array], cotangent_xK: Array) -> tuple[Array, None]:
    index_xK, like = residuals
    is_it_xKN = index_xK[..., None] == jnp.arange(like.shape[0], dtype=index_xK.dtype)
    terms_xKN = jnp.where(is_it_xKN, cotangent_xK[..., None], jnp.zeros((), cotangent_xK.dtype))
    return jnp.sum(terms_xKN, axis=-2, dtype=cotangent_xK.dtype), None


pick.defvjp(_pick_forward, _pick_backward)
