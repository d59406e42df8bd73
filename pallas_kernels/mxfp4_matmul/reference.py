"""Grouped matmul, naively: every weight dequantised, every row through every expert, one product kept.

Differentiable in x and in float weights by JAX's own rules. For tests: it holds the whole unpacked stack.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._typing import Array
from pallas_kernels.mxfp4_matmul._codec import compute_dtype
from pallas_kernels.mxfp4_matmul.activations import Activation, apply_activation
from pallas_kernels.mxfp4_matmul.quantize import fake_quantize_mxfp8
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor

Weight = MXFP4Tensor | Array


def grouped_matmul(
    x: Array, w: Weight, group_sizes: Array, layer: Array | None, activation_dtype: Any
) -> Array:
    """See `api.grouped_matmul`."""
    return _wide(x, w, group_sizes, layer, activation_dtype).astype(x.dtype)


def grouped_glu(
    x: Array,
    w_gate: Weight,
    w_up: Weight,
    group_sizes: Array,
    activation: Activation,
    layer: Array | None,
    activation_dtype: Any,
) -> Array:
    """See `api.grouped_glu`."""
    gate = _wide(x, w_gate, group_sizes, layer, activation_dtype)
    up = _wide(x, w_up, group_sizes, layer, activation_dtype)
    return apply_activation(activation, gate, up).astype(x.dtype)


def matmul(x: Array, w: MXFP4Tensor, layer: Array | None, activation_dtype: Any) -> Array:
    """See `api.matmul`."""
    compute = compute_dtype(x.dtype)
    matrix = _dense(w, layer, compute)
    wide = (x if activation_dtype is None else fake_quantize_mxfp8(x)).astype(compute)
    product = jnp.einsum(
        "...k,kn->...n", wide, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=compute
    )
    return product.astype(x.dtype)


def _dense(w: Weight, layer: Array | None, compute: Any) -> Array:
    """The weight of one layer in the compute dtype, inputs before outputs."""
    unpack = isinstance(w, MXFP4Tensor)
    dense = jnp.asarray(w.dequantize(compute)).swapaxes(-1, -2) if unpack else w.astype(compute)
    return dense if layer is None else dense[layer]


def _wide(x: Array, w: Weight, group_sizes: Array, layer: Array | None, activation_dtype: Any) -> Array:
    with jax.named_scope("grouped_matmul_reference"):
        compute = compute_dtype(x.dtype)
        wide = (x if activation_dtype is None else fake_quantize_mxfp8(x)).astype(compute)
        products = jnp.einsum(
            "mk,ekn->men",
            wide,
            _dense(w, layer, compute),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=compute,
        )
        ends = jnp.cumsum(group_sizes.astype(jnp.int32))
        starts = ends - group_sizes.astype(jnp.int32)
        rows = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
        belongs = (rows >= starts) & (rows < ends)
        return jnp.where(belongs[:, :, None], products, 0).sum(axis=1)
