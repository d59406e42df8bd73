"""The MXFP4 matmul for TPU compiles for every chip, and its packed weights are neither copied nor unpacked in HBM."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.mxfp4_matmul import MXFP4Tensor, tpu
from pallas_kernels.mxfp4_matmul.shapes import SHAPES, GroupedMatmulShape
from tests.compile.topologies import CHIPS, compile_for_tpu, temporary_bytes

SHAPE = SHAPES["decode_2p8t_up_experts_over_64"]
SITU = ("situ", 4.0, 25.0)
LAYERS = 4
SMALL = 2**20
"""Bytes for what surrounds a kernel: the list of visits."""
# The chips before tpu7x have no 4-bit floats in their vector unit.
CASES = (("v5p", "packed_kn"), ("v6e", "packed_kn"), ("tpu7x", "packed_kn"), ("tpu7x", "float4_kn"))


def arguments(shape: GroupedMatmulShape, layout: str, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    like = jax.ShapeDtypeStruct
    lead, inputs, outputs = (LAYERS, shape.experts), shape.inputs, shape.outputs
    if layout == "float4_kn":
        codes = like((*lead, inputs, outputs), jnp.float4_e2m1fn)
    else:
        codes = like((*lead, inputs // 2, outputs), jnp.uint8)
    w = MXFP4Tensor(codes, like((*lead, inputs // 32, outputs), jnp.uint8), layout)
    return like((shape.rows, inputs), dtype), w, w, like((shape.experts,), jnp.int32), like((), jnp.int32)


def product(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    del up
    return tpu.grouped_matmul(x, w, sizes, layer, None)


def gated(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    return tpu.grouped_glu(x, w, up, sizes, SITU, layer, None)


def gated_rounded(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    return tpu.grouped_glu(x, w, up, sizes, SITU, layer, jnp.float8_e4m3fn)


def gradient(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    return jax.grad(lambda x: product(x, w, up, sizes, layer).astype(jnp.float32).sum())(x)


def remade_weights(text: str, shape: GroupedMatmulShape) -> set[str]:
    """Operations that make an array of every expert's codes, scales or weights in HBM, in one layer or all. Weights of
    a small model may be fetched to on-chip memory, S(1), before the kernel reads them."""
    per_expert = rf"\[(?:\d+,)*{shape.experts},\d+,{shape.outputs}\](\S*) (?!parameter\()([\w-]+)\("
    return {name for layout, name in re.findall(per_expert, text) if "S(1)" not in layout} - {"bitcast"}


def check(
    function: Any, chip: str, layout: str, shape: GroupedMatmulShape, dtype: Any = jnp.bfloat16
) -> None:
    compiled = compile_for_tpu(chip, function, *arguments(shape, layout, dtype))
    row_bytes = shape.rows * max(shape.inputs, shape.outputs) * 4
    # Rounded rows and a cotangent are arrays of rows, rounding holds them by blocks of 32 that fill a quarter of the
    # lanes; the plain products need nothing.
    allowed = SMALL + {gated_rounded: 4, gradient: 2}.get(function, 0) * row_bytes
    assert temporary_bytes(compiled) <= allowed
    text = compiled.as_text()
    assert text is not None and "tpu_custom_call" in text
    # Outputs that fill no whole lanes are not what a kernel reads in place.
    made = set() if shape.outputs % 128 else remade_weights(text, shape)
    assert not made, f"weights are made again in memory by {made}"


@pytest.mark.parametrize(("chip", "layout"), CASES)
@pytest.mark.parametrize("function", [product, gated], ids=lambda f: f.__name__)
def test_decode(chip: str, layout: str, function: Any) -> None:
    check(function, chip, layout, SHAPE)


@pytest.mark.parametrize("chip", CHIPS)
def test_gradient(chip: str) -> None:
    check(gradient, chip, "packed_kn", SHAPE)


def test_a_layer_sliced_out_of_the_stack_is_noticed() -> None:
    def sliced(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
        one_layer = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), w)
        return tpu.grouped_matmul(x, one_layer, sizes, None, None)

    compiled = compile_for_tpu("v6e", sliced, *arguments(SHAPE, "packed_kn"))
    text = compiled.as_text()
    assert text is not None and remade_weights(text, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "layout"), CASES)
def test_float32_rows(chip: str, layout: str) -> None:
    check(product, chip, layout, SHAPE, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "layout"), CASES)
@pytest.mark.parametrize("function", [product, gated, gated_rounded, gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(name: str, function: Any, chip: str, layout: str) -> None:
    check(function, chip, layout, SHAPES[name])


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_four_bit_floats_need_the_newest_chip(chip: str) -> None:
    """If this compiles one day, the layout can be recommended there too."""
    with pytest.raises(Exception, match=r"(?i)unsupported"):
        check(product, chip, "float4_kn", SHAPE)
