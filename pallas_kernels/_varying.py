"""Marks of the manual mesh axes that an array varies over, which `jax.shard_map` checks."""

from typing import Any

import jax

from pallas_kernels._typing import Array


def _varying_axes(array: Array) -> frozenset[str]:
    aval = jax.typeof(array)
    # The attribute of JAX 0.12, and its name before that.
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


def match_varying(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each marked as varying over every manual mesh axis that any of them varies over.

    Loops, kernels and custom gradients need equal marks on everything they mix. The transpose of the mark is the sum
    over the axis, so an array that all devices share receives the sum of the devices' gradients.
    """
    axes = frozenset[str]().union(*(_varying_axes(a) for a in arrays))

    def mark(a: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(a)))
        return jax.lax.pcast(a, missing, to="varying") if missing else a

    return tuple(mark(a) for a in arrays)


def result_like(array: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a kernel's result that varies over the manual mesh axes that `array` varies over."""
    aval: Any = jax.typeof(array)
    marks: dict[str, Any] = (
        {"manual_axis_type": aval.manual_axis_type}
        if hasattr(aval, "manual_axis_type")
        else {"vma": aval.vma}
    )
    return jax.ShapeDtypeStruct(shape, dtype, **marks)
