"""The MXFP4 matmul for GPU compiles for Hopper and Blackwell, and its packed weights are neither copied nor unpacked in
memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.mxfp4_matmul import MXFP4Tensor, gpu
from pallas_kernels.mxfp4_matmul.shapes import SHAPES, GroupedMatmulShape
from tests.compile.gpu_topologies import (
    ARCHITECTURES,
    SHARED_MEMORY_LIMIT,
    Program,
    compile_for_gpu,
    needs_gpu_compiler,
)

pytestmark = needs_gpu_compiler
CHIPS = ("h200", "b200")
SHAPE = SHAPES["decode_2p8t_up_experts_over_64"]
# The kernel reads multiples of 128 inputs and outputs.
NAMES = [name for name, shape in SHAPES.items() if shape.inputs % 128 == 0 == shape.outputs % 128]
SITU = ("situ", 4.0, 25.0)
LAYERS = 4
SMALL = 2**20
"""Bytes for what surrounds a kernel: the list of visits, the rows added to the last tile."""


def arguments(shape: GroupedMatmulShape, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    like = jax.ShapeDtypeStruct
    lead, inputs, outputs = (LAYERS, shape.experts), shape.inputs, shape.outputs
    w = MXFP4Tensor(
        like((*lead, outputs, inputs // 2), jnp.uint8),
        like((*lead, outputs, inputs // 32), jnp.uint8),
        "packed_nk",
    )
    return like((shape.rows, inputs), dtype), w, w, like((shape.experts,), jnp.int32), like((), jnp.int32)


def product(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    del up
    return gpu.grouped_matmul(x, w, sizes, layer, None)


def gated(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    return gpu.grouped_glu(x, w, up, sizes, SITU, layer, None)


def gated_rounded(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    return gpu.grouped_glu(x, w, up, sizes, SITU, layer, jnp.float8_e4m3fn)


def gradient(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    return jax.grad(lambda x: product(x, w, up, sizes, layer).astype(jnp.float32).sum())(x)


def sliced(x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    one_layer = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), w)
    return product(x, one_layer, up, sizes, None)


def remade_weights(text: str, shape: GroupedMatmulShape) -> set[str]:
    """Operations that make an array of every expert's codes, scales or weights, in one layer or all."""
    per_expert = rf"\[(?:\d+,)*{shape.experts},{shape.outputs},\d+\]\S* (?!parameter\()([\w-]+)\("
    return set(re.findall(per_expert, text)) - {"bitcast"}


def check(chip: str, function: Any, shape: GroupedMatmulShape, dtype: Any = jnp.bfloat16) -> Program:
    program = compile_for_gpu(chip, function, *arguments(shape, dtype))
    parts = 1 if dtype == jnp.bfloat16 else 3
    # Rows in the order and the parts that the kernel reads, with up to 256 more; rounded rows; a cotangent.
    row_bytes = (shape.rows + 256) * max(shape.inputs, shape.outputs) * 2 * parts
    assert program.temporary_bytes <= SMALL + row_bytes * (3 if function in (gated_rounded, gradient) else 1)
    made = remade_weights(program.text, shape)
    assert not made, f"weights are made again in memory by {made}"
    assert program.kernels
    for kernel in program.kernels:
        assert kernel.architecture == ARCHITECTURES[chip]
        assert kernel.spilled_bytes == 0 and kernel.stack_bytes == 0, kernel
        assert kernel.shared_memory_bytes <= SHARED_MEMORY_LIMIT
    return program


def test_decode() -> None:
    (kernel,) = check("h200", gated, SHAPE).kernels
    # Two thread blocks of three warpgroups fit into a multiprocessor; registers are given out by eights.
    assert 2 * (kernel.shared_memory_bytes + 2048) <= 233472
    assert 2 * 3 * 128 * -(-kernel.registers // 8) * 8 <= 65536


def test_decode_on_blackwell() -> None:
    check("b200", gated, SHAPE)


@pytest.mark.parametrize("chip", CHIPS)
def test_gradient(chip: str) -> None:
    check(chip, gradient, SHAPE)


@pytest.mark.slow
def test_a_layer_sliced_out_of_the_stack_is_noticed() -> None:
    program = compile_for_gpu("h200", sliced, *arguments(SHAPE))
    assert remade_weights(program.text, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("function", [product, gated, gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["decode_2p8t_up_experts_over_64", "prefill_48b_down"])
def test_float32_rows(name: str, function: Any, chip: str) -> None:
    check(chip, function, SHAPES[name], jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("function", [product, gated, gated_rounded, gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_every_shape(name: str, function: Any, chip: str) -> None:
    check(chip, function, SHAPES[name])
