"""What the device kernels with packed weights share: their gradient, and the plain product as one group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array
from pallas_kernels.mxfp4_matmul.activations import apply_activation
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor


def differentiable(grouped_products: Callable[..., Array]) -> Callable[..., Array]:
    """`grouped_products(options, x, weights, group_sizes, layer)`, compiled as one function and differentiable in x.

    `options` is a named tuple with the field `activation`, whose method `of_gradient` gives those of the product of a
    cotangent with a transposed weight.
    """
    # Compiled as one function so that calls outside jit do not compile again each time.
    products = functools.partial(jax.jit, static_argnums=(0,))(grouped_products)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def grouped(options: Any, x: Any, weights: Any, group_sizes: Any, layer: Any) -> Array:
        return products(options, x, weights, group_sizes, layer)

    def forward(options: Any, x: Any, weights: Any, group_sizes: Any, layer: Any) -> tuple[Array, Any]:
        """Arguments arrive with a flag that says whether a derivative with respect to them is wanted."""
        for w in weights:
            if w.packed.perturbed or w.scale_bytes.perturbed:
                raise TypeError(
                    "A gradient with respect to a packed MXFP4 weight was asked for, and there is none; "
                    "differentiate with respect to float master weights passed through fake_quantize, or close "
                    "over the packed weight."
                )
        values = jax.tree.map(
            lambda node: node.value,
            (x, weights, group_sizes, layer),
            is_leaf=lambda node: hasattr(node, "perturbed"),
        )
        return grouped(options, *values), values

    def backward(options: Any, residuals: Any, cotangent: Any) -> tuple[Any, Any, None, None]:
        x, weights, group_sizes, layer = residuals
        if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            cotangent = jnp.zeros(cotangent.shape, x.dtype)
        cotangents = (cotangent,)
        if options.activation is not None:
            plain = options._replace(activation=None)
            factors = [products(plain, x, (w,), group_sizes, layer) for w in weights]
            _, pull_back = jax.vjp(functools.partial(apply_activation, options.activation), *factors)
            cotangents = pull_back(cotangent)
        parts = [
            products(options.of_gradient(), part, (w,), group_sizes, layer)
            for part, w in zip(cotangents, weights, strict=True)
        ]
        return functools.reduce(jnp.add, parts), tuple(None for _ in weights), None, None

    grouped.defvjp(forward, backward, symbolic_zeros=True)
    return grouped


def as_one_group(grouped_matmul: Callable[..., Array], x: Array, w: MXFP4Tensor, *arguments: Any) -> Array:
    """The product of `api.matmul`, from the grouped one: one group that holds every row."""
    rows = x.reshape(-1, x.shape[-1])
    axis = w.packed.ndim - 2
    one_expert = MXFP4Tensor(jnp.expand_dims(w.packed, axis), jnp.expand_dims(w.scale_bytes, axis), w.layout)
    sizes = jnp.full((1,), rows.shape[0], jnp.int32)
    result = grouped_matmul(rows, one_expert, sizes, *arguments)
    return result.reshape(*x.shape[:-1], result.shape[-1])
