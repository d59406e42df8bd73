"""Public matmuls with MXFP4 weights: checked arguments, then the best implementation for them."""

import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels._dispatch import dispatch
from pallas_kernels._typing import AnyArray, Array, Float, Int, Integer
from pallas_kernels.mxfp4_matmul import reference, xla
from pallas_kernels.mxfp4_matmul._codec import BLOCK
from pallas_kernels.mxfp4_matmul.activations import Activation
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor

Layer = int | np.integer | Integer[AnyArray, ""] | None
FloatStack = Float[AnyArray, "*stack K N"]


def _tpu(name: str) -> Callable[..., Any]:
    """A TPU kernel, imported when it is first called: Pallas takes its time, and most programs run without."""

    def call(*args: Any) -> Any:
        from pallas_kernels.mxfp4_matmul import tpu

        return getattr(tpu, name)(*args)

    return call


def _gpu(name: str) -> Callable[..., Any]:
    """A GPU kernel, imported when it is first called."""

    def call(*args: Any) -> Any:
        from pallas_kernels.mxfp4_matmul import gpu

        return getattr(gpu, name)(*args)

    return call


_GROUPED_MATMUL = {
    "xla": xla.grouped_matmul,
    "reference": reference.grouped_matmul,
    "tpu": _tpu("grouped_matmul"),
    "gpu": _gpu("grouped_matmul"),
}
_GROUPED_GLU = {
    "xla": xla.grouped_glu,
    "reference": reference.grouped_glu,
    "tpu": _tpu("grouped_glu"),
    "gpu": _gpu("grouped_glu"),
}
_MATMUL = {
    "xla": xla.matmul,
    "reference": reference.matmul,
    "tpu": _tpu("matmul"),
    "gpu": _gpu("matmul"),
}
# The TPU and GPU kernels compile for their chips but have not run on one: by name only.
_DEFAULT = ("xla",)


def grouped_matmul(
    x: Float[AnyArray, "M K"],
    w: MXFP4Tensor | FloatStack,
    group_sizes: Int[AnyArray, " E"],
    layer: Layer = None,
    activation: None = None,
    activation_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Multiply each row by the weight of its expert; the rows are sorted by expert.

    Args:
      x: rows; the first `group_sizes[0]` belong to expert 0, and so on. Rows after the sum give 0.
      w: MXFP4Tensor of logical shape [E, N, K], or float array [E, K, N]; with `layer`, a stack of them with
        a leading layer axis, of which only the rows' experts of that layer are read.
      group_sizes: rows of each expert, summing to at most M.
      layer: index into the leading axis of a stacked `w`, a Python integer or a traced scalar.
      activation: None; the fused gated form is `grouped_glu`.
      activation_dtype: None to multiply x as it is, or float8_e4m3fn to round it to MXFP8 first (blocks of
        32, E8M0 scales, saturating; gradients pass straight through).
      implementation: "xla", "reference", "tpu" (Pallas: packed weights of layout "packed_kn", or "float4_kn" on
        tpu7x; not float64; not yet run on a TPU), "gpu" (Pallas for Hopper and Blackwell: packed weights of
        layout "packed_nk", inputs and outputs multiples of 128; not float64; not yet run on a GPU), or None for the
        best available.

    Returns:
      [M, N] in `x.dtype`, accumulated in float32 (float64 for float64 x). Differentiable in x and in a float
      w; asking for the gradient of a packed weight is an error.

    Raises:
      ValueError: if shapes, `layer` or `activation_dtype` do not fit.
    """
    if activation is not None:
        raise ValueError(
            f"activation is {activation!r} but grouped_matmul has none; use grouped_glu for gate and up."
        )
    x, w, sizes, index = _check(x, w, group_sizes, layer, activation_dtype)
    return dispatch(
        "grouped_matmul", _GROUPED_MATMUL, _DEFAULT, implementation, x, w, sizes, index, activation_dtype
    )


def grouped_glu(
    x: Float[AnyArray, "M K"],
    w_gate: MXFP4Tensor | FloatStack,
    w_up: MXFP4Tensor | FloatStack,
    group_sizes: Int[AnyArray, " E"],
    activation: Activation = ("situ", 4.0, 25.0),
    layer: Layer = None,
    activation_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Gated activation of two grouped products, act(x W_gate, x W_up), in one pass over the experts.

    Args:
      x, group_sizes, layer, activation_dtype, implementation: as in `grouped_matmul`.
      w_gate, w_up: two weights of one shape, as in `grouped_matmul`.
      activation: ("situ", beta, linear_beta) or ("silu",), applied in float32 (float64 for float64 x) before
        the cast to `x.dtype`.

    Returns:
      [M, N] in `x.dtype`; rows after the sum of the sizes give 0.

    Raises:
      ValueError: if shapes, `layer`, `activation` or `activation_dtype` do not fit.
    """
    if tuple(w_gate.shape) != tuple(w_up.shape):
        raise ValueError(
            f"w_gate has shape {tuple(w_gate.shape)} and w_up {tuple(w_up.shape)}; "
            "both projections must have one shape."
        )
    if activation[0] not in ("situ", "silu") or len(activation) != (3 if activation[0] == "situ" else 1):
        raise ValueError(f'activation is {activation!r}; pass ("situ", beta, linear_beta) or ("silu",).')
    rows, w_gate, sizes, index = _check(x, w_gate, group_sizes, layer, activation_dtype)
    _, w_up, _, _ = _check(x, w_up, group_sizes, layer, activation_dtype)
    return dispatch(
        "grouped_glu", _GROUPED_GLU, _DEFAULT, implementation,
        rows, w_gate, w_up, sizes, activation, index, activation_dtype,
    )  # fmt: skip


def matmul(
    x: Float[AnyArray, "*batch K"],
    w: MXFP4Tensor,
    layer: Layer = None,
    activation_dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*batch N"]:
    """x W^T for one MXFP4 weight of logical shape [N, K], or [L, N, K] with `layer`.

    `layer`, `activation_dtype`, `implementation`, the result's dtype and the gradient are as in
    `grouped_matmul`.

    Raises:
      ValueError: if shapes, `layer` or `activation_dtype` do not fit.
    """
    _check_activation_dtype(activation_dtype)
    index = _layer_index(layer, w.shape, 2)
    if x.shape[-1] != w.shape[-1]:
        raise ValueError(
            f"x has {x.shape[-1]} columns but w has logical shape {w.shape} [..., out, in]; pass x with "
            f"{w.shape[-1]} columns."
        )
    return dispatch(
        "matmul", _MATMUL, _DEFAULT, implementation, jnp.asarray(x), _as_jax(w), index, activation_dtype
    )


def _as_jax(w: Any) -> Any:
    if isinstance(w, MXFP4Tensor):
        return MXFP4Tensor(jnp.asarray(w.packed), jnp.asarray(w.scale_bytes), w.layout)
    return jnp.asarray(w)


def _check(
    x: Any, w: Any, group_sizes: Any, layer: Layer, activation_dtype: Any
) -> tuple[Array, Any, Array, Any]:
    _check_activation_dtype(activation_dtype)
    packed = isinstance(w, MXFP4Tensor)
    index = _layer_index(layer, tuple(w.shape), 3)
    experts, inputs, _ = xla.program_shape(w)
    if x.ndim != 2 or x.shape[1] != inputs:
        kind = "MXFP4, [..., expert, out, in]" if packed else "float, [..., expert, in, out]"
        raise ValueError(
            f"x has shape {tuple(x.shape)} but w has shape {tuple(w.shape)} ({kind}); "
            f"x must be [rows, {inputs}]."
        )
    if tuple(group_sizes.shape) != (experts,):
        raise ValueError(
            f"group_sizes has shape {tuple(group_sizes.shape)} but w holds {experts} experts; "
            "pass one size per expert."
        )
    if activation_dtype is not None and inputs % BLOCK:
        raise ValueError(f"x has {inputs} columns, not a multiple of {BLOCK}; leave activation_dtype None.")
    return jnp.asarray(x), _as_jax(w), jnp.asarray(group_sizes), index


def _check_activation_dtype(activation_dtype: Any) -> None:
    if activation_dtype is not None and jnp.dtype(activation_dtype) != jnp.float8_e4m3fn:
        raise ValueError(f"activation_dtype is {activation_dtype!r}; pass None or jax.numpy.float8_e4m3fn.")


def _layer_index(layer: Layer, shape: tuple[int, ...], single_ndim: int) -> Array | None:
    wanted = single_ndim if layer is None else single_ndim + 1
    if len(shape) != wanted:
        hint = (
            "pass layer=, the index into a stack" if layer is None else "leave layer None for a single layer"
        )
        raise ValueError(f"w has shape {shape} but {wanted} axes are expected with layer={layer!r}; {hint}.")
    if layer is None:
        return None
    if isinstance(layer, int | np.integer):
        index = operator.index(layer)
        if not 0 <= index < shape[0]:
            raise ValueError(f"layer is {index} but w stacks {shape[0]} layers; pass 0 to {shape[0] - 1}.")
        return jnp.asarray(index, jnp.int32)
    return jnp.asarray(layer).astype(jnp.int32)
