"""The MXFP4 matmul for TPU compiles for every chip, and its packed weights are neither copied nor unpacked in HBM."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.mxfp4_matmul import SHAPES, GroupedMatmulShape, _tpu_kernel
from tests.compile import mxfp4_programs as programs
from tests.compile.mxfp4_programs import SHAPE
from tests.compile.topologies import CHIPS, compile_for_tpu, temporary_bytes

SMALL = 2**20
"""Bytes for what surrounds a kernel: the list of visits."""
# The chips before tpu7x have no 4-bit floats in their vector unit.
CASES = (("v5p", "packed_kn"), ("v6e", "packed_kn"), ("tpu7x", "packed_kn"), ("tpu7x", "float4_kn"))


def check(kind: str, chip: str, layout: str, shape: GroupedMatmulShape, dtype: Any = jnp.bfloat16) -> None:
    arguments = programs.arguments(shape, layout, dtype)
    compiled = compile_for_tpu(chip, programs.program(kind, "tpu"), *arguments)
    # Rounded rows are one array more (in a program that does not need its rows again, none), a cotangent and its
    # product two; the plain products need nothing.
    rows = {
        "gated_rounded": shape.rows * shape.inputs * dtype(0).itemsize,
        "gradient": 2 * shape.rows * max(shape.inputs, shape.outputs) * 4,
        # What it does besides.
        "looped": 2 * shape.inputs * (shape.inputs + 4 * shape.rows) * dtype(0).itemsize,
    }
    allowed = SMALL + rows.get(kind, 0)
    assert temporary_bytes(compiled) <= allowed
    text = compiled.as_text()
    assert text is not None and "tpu_custom_call" in text
    # Outputs that fill no whole lanes are not what a kernel reads in place.
    made = set() if shape.outputs % 128 else programs.remade_weights(text, shape, layout)
    assert not made, f"weights are made again in memory by {made}"


@pytest.mark.parametrize(("chip", "layout"), CASES)
@pytest.mark.parametrize("kind", ["product", "gated"])
def test_decode(chip: str, layout: str, kind: str) -> None:
    check(kind, chip, layout, SHAPE)


@pytest.mark.parametrize("chip", CHIPS)
def test_gradient(chip: str) -> None:
    check("gradient", chip, "packed_kn", SHAPE)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_loop_fetches_no_stack(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of all layers fit into a v6e's on-chip memory, and the compiler fetched them once for each layer."""
    check("looped", chip, "packed_kn", SHAPE)
    if chip == "v6e":
        monkeypatch.setattr(_tpu_kernel, "in_hbm", lambda array, interpret: array)
        jax.clear_caches()
        with pytest.raises(AssertionError, match="made again in memory by"):
            check("looped", chip, "packed_kn", SHAPE)


def test_a_layer_sliced_out_of_the_stack_is_noticed() -> None:
    sliced = programs.program("sliced", "tpu")
    compiled = compile_for_tpu("v6e", sliced, *programs.arguments(SHAPE, "packed_kn"))
    text = compiled.as_text()
    assert text is not None and programs.remade_weights(text, SHAPE, "packed_kn")


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "layout"), CASES)
def test_float32_rows(chip: str, layout: str) -> None:
    check("product", chip, layout, SHAPE, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "layout"), CASES)
@pytest.mark.parametrize("kind", ["product", "gated", "gradient"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name: str, kind: str, chip: str, layout: str) -> None:
    check(kind, chip, layout, SHAPES[name])


# The kernel is that of other rows: what rounding adds depends on their number and length, not on experts and layouts.
ROUNDED = {(shape.rows, shape.inputs): name for name, shape in reversed(SHAPES.items())}


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", sorted(ROUNDED.values()))
def test_rounded_rows_of_every_shape(name: str, chip: str) -> None:
    check("gated_rounded", chip, "packed_kn", SHAPES[name])


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_four_bit_floats_need_the_newest_chip(chip: str) -> None:
    """If this compiles one day, the layout can be recommended there too."""
    with pytest.raises(Exception, match=r"(?i)unsupported"):
        check("product", chip, "float4_kn", SHAPE)
