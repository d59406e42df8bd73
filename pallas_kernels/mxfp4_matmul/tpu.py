"""(Grouped) matmul with MXFP4 weights as a Pallas kernel for TPU (Mosaic).

Layouts: "packed_kn" on every chip (nibbles are taken apart by integer arithmetic), "float4_kn" on tpu7x, the
first whose vector unit reads 4-bit floats.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying
from pallas_kernels.mxfp4_matmul._packed import as_one_group, differentiable
from pallas_kernels.mxfp4_matmul._tpu_kernel import Options, grouped_products
from pallas_kernels.mxfp4_matmul._tpu_mxfp8 import round_rows
from pallas_kernels.mxfp4_matmul.activations import Activation
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor


def grouped_matmul(
    x: Array,
    w: Any,
    group_sizes: Array,
    layer: Array | None,
    activation_dtype: Any,
    interpret: Any = False,
) -> Array:
    """See `api.grouped_matmul`; arguments are already checked. `interpret` as in `pallas_call`.

    Raises:
      NotImplementedError: for float64 rows, float weights, the layout "packed_nk", or sizes off the kernel's.
    """
    _refuse(x, w)
    x, group_sizes = _shared_out(x, group_sizes, w)
    x = _activations(x, activation_dtype, interpret)
    return _grouped(Options(None, False, interpret), x, (w,), group_sizes, layer)


def grouped_glu(
    x: Array,
    w_gate: Any,
    w_up: Any,
    group_sizes: Array,
    activation: Activation,
    layer: Array | None,
    activation_dtype: Any,
    interpret: Any = False,
) -> Array:
    """See `api.grouped_glu`; arguments are already checked. `interpret` as in `pallas_call`.

    Raises:
      NotImplementedError: as `grouped_matmul`, and for two weights of different layouts.
    """
    _refuse(x, w_gate, w_up)
    options = Options(activation, False, interpret)
    x, group_sizes = _shared_out(x, group_sizes, w_gate, w_up)
    x = _activations(x, activation_dtype, interpret)
    return _grouped(options, x, (w_gate, w_up), group_sizes, layer)


def matmul(
    x: Array, w: MXFP4Tensor, layer: Array | None, activation_dtype: Any, interpret: Any = False
) -> Array:
    """See `api.matmul`: one group that holds every row."""
    return as_one_group(grouped_matmul, x, w, layer, activation_dtype, interpret)


def _shared_out(x: Array, group_sizes: Array, *weights: MXFP4Tensor) -> tuple[Array, Array]:
    """Rows and sizes with the marks of the weights: rows that all devices share get the sum of their gradients."""
    x, group_sizes, *_ = match_varying(x, group_sizes, *jax.tree.leaves(weights))
    return x, group_sizes


def _activations(x: Array, activation_dtype: Any, interpret: Any) -> Array:
    return x if activation_dtype is None else round_rows(x, interpret)


def _refuse(x: Array, *weights: Any) -> None:
    if x.dtype == jnp.float64:
        raise NotImplementedError(
            "the TPU kernels compute in float32 and got float64; pass float32, or another implementation"
        )
    for w in weights:
        if not isinstance(w, MXFP4Tensor):
            raise NotImplementedError(
                f"the TPU kernels read packed weights and got a {w.dtype} array; quantise it, or pass another "
                "implementation"
            )
        if w.layout not in ("packed_kn", "float4_kn") or w.layout != weights[0].layout:
            raise NotImplementedError(
                f"the TPU kernels read weights of one layout, packed_kn or float4_kn, and got {w.layout!r}; "
                'change it with w.to_layout("packed_kn"), or pass another implementation'
            )


_grouped = differentiable(grouped_products)
