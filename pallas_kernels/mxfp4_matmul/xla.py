"""Grouped matmul with MXFP4 or float weights in plain JAX: the fast portable implementation.

One loop runs over the experts that have rows. Each turn reads that expert's weight out of the (stacked)
array, unpacks it once, and multiplies the expert's rows a fixed-size tile at a time; the tile count is
dynamic, so an empty expert costs nothing and no padded copy of the rows is made. No unpacked weight of more
than one expert ever exists.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._typing import AnyArray, Array
from pallas_kernels.mxfp4_matmul import _codec
from pallas_kernels.mxfp4_matmul._codec import BLOCK
from pallas_kernels.mxfp4_matmul.activations import Activation, apply_activation
from pallas_kernels.mxfp4_matmul.quantize import fake_quantize_mxfp8
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor

Weight = MXFP4Tensor | Array


def grouped_matmul(
    x: Array, w: Weight, group_sizes: Array, layer: Array | None, activation_dtype: Any
) -> Array:
    """See `api.grouped_matmul`; arguments are already checked and `layer` is an int32 scalar or None."""
    return _grouped(None, _activations(x, activation_dtype), (w,), group_sizes, layer)


def grouped_glu(
    x: Array,
    w_gate: Weight,
    w_up: Weight,
    group_sizes: Array,
    activation: Activation,
    layer: Array | None,
    activation_dtype: Any,
) -> Array:
    """See `api.grouped_glu`; arguments are already checked and `layer` is an int32 scalar or None."""
    return _grouped(activation, _activations(x, activation_dtype), (w_gate, w_up), group_sizes, layer)


def _activations(x: Array, activation_dtype: Any) -> Array:
    return x if activation_dtype is None else fake_quantize_mxfp8(x)


class _Groups(NamedTuple):
    """Experts that have rows, first and in order: ids, where their rows start and end, their number."""

    experts: Array
    starts: Array
    ends: Array
    count: Array


def _active_groups(group_sizes: Array, rows: int) -> _Groups:
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.minimum(jnp.cumsum(sizes), rows)
    has_rows = sizes > 0
    (experts,) = jnp.nonzero(has_rows, size=min(rows, sizes.shape[0]), fill_value=0)
    experts = experts.astype(jnp.int32)
    return _Groups(experts, (ends - sizes)[experts], ends[experts], has_rows.sum(dtype=jnp.int32))


def row_tile(rows: int, experts: int) -> int:
    """Rows multiplied at a time, from the mean group: padding little, yet large enough for the matmul.

    On CPU a product of up to 16 rows costs little more than one of 8, and 128 rows reach the full speed.
    """
    mean = rows / experts
    tile = 128 if mean >= 192 else 64 if mean >= 48 else 16 if mean >= 4 else 8
    return min(tile, rows)


def _expert_weight(w: Weight, layer: Array | None, expert: Array, compute: Any) -> tuple[Array, int]:
    """One expert's unpacked weight in the compute dtype, and the axis of it that holds the inputs."""
    with jax.named_scope("unpack_expert"):
        if not isinstance(w, MXFP4Tensor):
            return _slice(w, layer, expert).astype(compute), 0
        packed, scale_bytes = _slice(w.packed, layer, expert), _slice(w.scale_bytes, layer, expert)
        scale = _codec.scale_values(scale_bytes, compute)
        input_axis = 1 if w.layout == "packed_nk" else 0
        if w.layout == "float4_kn":
            inputs, outputs = packed.shape
            blocks = packed.astype(compute).reshape(inputs // BLOCK, BLOCK, outputs)
            return (blocks * scale[:, None, :]).reshape(inputs, outputs), input_axis
        wide = packed.astype(jnp.int32)
        if w.layout == "packed_kn":
            half, outputs = packed.shape
            pairs = wide.reshape(half * 2 // BLOCK, BLOCK // 2, 1, outputs)
            shifts = jnp.array([0, 4], jnp.int32)[:, None]
            values = _codec.code_values((pairs >> shifts) & 15).astype(compute)
            return (values * scale[:, None, None, :]).reshape(half * 2, outputs), input_axis
        outputs, half = packed.shape
        pairs = wide.reshape(outputs, half * 2 // BLOCK, BLOCK // 2, 1)
        values = _codec.code_values((pairs >> jnp.array([0, 4], jnp.int32)) & 15).astype(compute)
        return (values * scale[:, :, None, None]).reshape(outputs, half * 2), input_axis


def _slice(stack: Array, layer: Array | None, expert: Array) -> Array:
    """stack[layer, expert] or stack[expert], as one dynamic slice."""
    leading = (expert,) if layer is None else (layer, expert)
    zero = jnp.zeros((), jnp.int32)
    sizes = (1,) * len(leading) + stack.shape[-2:]
    return lax.dynamic_slice(stack, (*leading, zero, zero), sizes).reshape(stack.shape[-2:])


def _dot(left: Array, right: Array, left_axis: int, right_axis: int, compute: Any) -> Array:
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=compute,
    )


def _row_slice(array: Array, row: Array, tile: int) -> Array:
    return lax.dynamic_slice(array, (row, jnp.zeros((), jnp.int32)), (tile, array.shape[1]))


def _in_group(row: Array, tile: int, end: Array) -> Array:
    return (row + lax.iota(jnp.int32, tile) < end)[:, None]


def _pad_rows(array: Array, tile: int) -> Array:
    return jnp.pad(array, ((0, tile - 1), (0, 0)))


def _tiles(start: Array, end: Array, tile: int) -> Array:
    return (end - start + (tile - 1)) // tile


# Compiled as one function so that calls outside jit do not compile their loops again each time.
@functools.partial(jax.jit, static_argnames=("activation", "transposed"))
def _products(
    activation: Activation | None,
    x: Array,
    weights: tuple[Weight, ...],
    group_sizes: Array,
    layer: Array | None,
    transposed: bool = False,
) -> Array:
    """Rows times their expert's weight (or its transpose), or the gated activation of two such products."""
    rows = x.shape[0]
    experts, inputs, outputs = program_shape(weights[0])
    width = inputs if transposed else outputs
    if rows == 0 or experts == 0:
        return jnp.zeros((rows, width), x.dtype)
    compute = _codec.compute_dtype(x.dtype)
    # Where groups mostly have one row (decoding) a second row costs nothing. One alone would be a matrix-vector
    # product, and XLA compiles a loop of these for CPUs as one call on one core.
    tile = row_tile(rows, experts) if 2 * rows > experts else 2
    groups = _active_groups(group_sizes, rows)
    x_padded = _pad_rows(x, tile)

    def one_expert(index: Array, result: Array) -> Array:
        unpacked = [_expert_weight(w, layer, groups.experts[index], compute) for w in weights]
        start, end = groups.starts[index], groups.ends[index]

        def one_tile(turn: Array, result: Array) -> Array:
            row = start + turn * tile
            x_tile = _row_slice(x_padded, row, tile).astype(compute)
            products = [
                _dot(x_tile, matrix, 1, 1 - input_axis if transposed else input_axis, compute)
                for matrix, input_axis in unpacked
            ]
            product = (
                products[0] if activation is None else apply_activation(activation, products[0], products[1])
            )
            # The tile may reach into later groups: those rows become 0 here and are written later.
            product = jnp.where(_in_group(row, tile, end), product, 0).astype(x.dtype)
            return lax.dynamic_update_slice(result, product, (row, jnp.zeros((), jnp.int32)))

        return lax.fori_loop(0, _tiles(start, end, tile), one_tile, result)

    with jax.named_scope("grouped_matmul"):
        result = jnp.zeros((rows + tile - 1, width), x.dtype)
        return lax.fori_loop(0, groups.count, one_expert, result)[:rows]


@jax.jit
def _weight_gradient(x: Array, cotangent: Array, w: Array, group_sizes: Array, layer: Array | None) -> Array:
    """Gradient of a float weight: per expert x^T cotangent, summed over its tiles, written in place."""
    rows = x.shape[0]
    gradient = jnp.zeros(w.shape, w.dtype)
    if rows == 0 or w.shape[-3] == 0:
        return gradient
    compute = _codec.compute_dtype(x.dtype)
    tile = row_tile(rows, w.shape[-3])
    groups = _active_groups(group_sizes, rows)
    x_padded, cotangent_padded = _pad_rows(x, tile), _pad_rows(cotangent, tile)

    def one_expert(index: Array, gradient: Array) -> Array:
        start, end = groups.starts[index], groups.ends[index]

        def one_tile(turn: Array, total: Array) -> Array:
            row = start + turn * tile
            inside = _in_group(row, tile, end)
            x_tile = jnp.where(inside, _row_slice(x_padded, row, tile).astype(compute), 0)
            cotangent_tile = jnp.where(inside, _row_slice(cotangent_padded, row, tile).astype(compute), 0)
            return total + _dot(x_tile, cotangent_tile, 0, 0, compute)

        total = lax.fori_loop(0, _tiles(start, end, tile), one_tile, jnp.zeros(w.shape[-2:], compute))
        leading = (groups.experts[index],) if layer is None else (layer, groups.experts[index])
        zero = jnp.zeros((), jnp.int32)
        update = total.astype(w.dtype).reshape((1,) * len(leading) + total.shape)
        return lax.dynamic_update_slice(gradient, update, (*leading, zero, zero))

    with jax.named_scope("grouped_matmul_weight_gradient"):
        return lax.fori_loop(0, groups.count, one_expert, gradient)


def program_shape(w: Weight | AnyArray) -> tuple[int, int, int]:
    """(experts, inputs, outputs) of a weight of either kind."""
    if isinstance(w, MXFP4Tensor):
        experts, outputs, inputs = w.shape[-3:]
        return experts, inputs, outputs
    experts, inputs, outputs = w.shape[-3:]
    return experts, inputs, outputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    activation: Activation | None,
    x: Array,
    weights: tuple[Weight, ...],
    group_sizes: Array,
    layer: Array | None,
) -> Array:
    return _products(activation, x, weights, group_sizes, layer)


def _forward(
    activation: Activation | None, x: Any, weights: Any, group_sizes: Any, layer: Any
) -> tuple[Array, Any]:
    """Arguments arrive with a flag that says whether a derivative with respect to them is wanted."""
    leaf = lambda node: hasattr(node, "perturbed")  # noqa: E731
    values = jax.tree.map(lambda node: node.value, (x, weights, group_sizes, layer), is_leaf=leaf)
    for w in weights:
        if isinstance(w, MXFP4Tensor) and (w.packed.perturbed or w.scale_bytes.perturbed):
            raise TypeError(
                "A gradient with respect to a packed MXFP4 weight was asked for, and there is none; "
                "differentiate with respect to float master weights passed through fake_quantize, or close "
                "over the packed weight."
            )
    # None or (): whether to compute a weight's gradient, carried in the structure because it must be static.
    wanted = tuple(() if not isinstance(w, MXFP4Tensor) and w.perturbed else None for w in weights)
    return _grouped(activation, *values), (*values, wanted)


def _backward(activation: Activation | None, residuals: Any, cotangent: Any) -> tuple[Any, Any, None, None]:
    x, weights, group_sizes, layer, wanted = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        cotangent = jnp.zeros(cotangent.shape, x.dtype)
    if activation is None:
        cotangents = (cotangent,)
    else:
        products = [_products(None, x, (w,), group_sizes, layer) for w in weights]
        _, pull_back = jax.vjp(functools.partial(apply_activation, activation), *products)
        cotangents = pull_back(cotangent)
    parts = [
        _products(None, part, (w,), group_sizes, layer, transposed=True)
        for part, w in zip(cotangents, weights, strict=True)
    ]
    x_gradient = functools.reduce(jnp.add, parts)
    weight_gradients = tuple(
        None if flag is None else _weight_gradient(x, part, w, group_sizes, layer)
        for flag, part, w in zip(wanted, cotangents, weights, strict=True)
    )
    return x_gradient, weight_gradients, None, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def matmul(x: Array, w: MXFP4Tensor, layer: Array | None, activation_dtype: Any) -> Array:
    """See `api.matmul`: one group that holds every row."""
    rows = x.reshape(-1, x.shape[-1])
    axis = w.packed.ndim - 2
    one_expert = MXFP4Tensor(jnp.expand_dims(w.packed, axis), jnp.expand_dims(w.scale_bytes, axis), w.layout)
    sizes = jnp.full((1,), rows.shape[0], jnp.int32)
    result = grouped_matmul(rows, one_expert, sizes, layer, activation_dtype)
    return result.reshape(*x.shape[:-1], result.shape[-1])
