"""The MXFP4 matmul for GPU compiles for Hopper and Blackwell, and its packed weights are neither copied nor unpacked in
memory."""

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.mxfp4_matmul import SHAPES, GroupedMatmulShape
from tests.compile import mxfp4_programs as programs
from tests.compile.gpu_topologies import (
    ARCHITECTURES,
    SHARED_MEMORY_LIMIT,
    Program,
    compile_for_gpu,
    needs_gpu_compiler,
)
from tests.compile.mxfp4_programs import KINDS, SHAPE

pytestmark = needs_gpu_compiler
CHIPS = ("h200", "b200")
# The kernel reads multiples of 128 inputs and outputs.
NAMES = [name for name, shape in SHAPES.items() if shape.inputs % 128 == 0 == shape.outputs % 128]
LAYOUT = "packed_nk"
SMALL = 2**20
"""Bytes for what surrounds a kernel: the list of visits, the rows added to the last tile."""


def check(chip: str, kind: str, shape: GroupedMatmulShape, dtype: Any = jnp.bfloat16) -> Program:
    arguments = programs.arguments(shape, LAYOUT, dtype)
    program = compile_for_gpu(chip, programs.program(kind, "gpu"), *arguments)
    parts = 1 if dtype == jnp.bfloat16 else 3
    # Rows in the order and the parts that the kernel reads, with up to 256 more; rounded rows; a cotangent.
    row_bytes = (shape.rows + 256) * max(shape.inputs, shape.outputs) * 2 * parts
    assert program.temporary_bytes <= SMALL + row_bytes * (3 if kind in ("gated_rounded", "gradient") else 1)
    made = programs.remade_weights(program.text, shape, LAYOUT)
    assert not made, f"weights are made again in memory by {made}"
    assert program.kernels
    for kernel in program.kernels:
        assert kernel.architecture == ARCHITECTURES[chip]
        assert kernel.spilled_bytes == 0 and kernel.stack_bytes == 0, kernel
        assert kernel.shared_memory_bytes <= SHARED_MEMORY_LIMIT
    return program


def test_decode() -> None:
    (kernel,) = check("h200", "gated", SHAPE).kernels
    # Two thread blocks of three warpgroups fit into a multiprocessor; registers are given out by eights.
    assert 2 * (kernel.shared_memory_bytes + 2048) <= 233472
    assert 2 * 3 * 128 * -(-kernel.registers // 8) * 8 <= 65536


def test_decode_on_blackwell() -> None:
    check("b200", "gated", SHAPE)


@pytest.mark.parametrize("chip", CHIPS)
def test_gradient(chip: str) -> None:
    check(chip, "gradient", SHAPE)


@pytest.mark.slow
def test_a_layer_sliced_out_of_the_stack_is_noticed() -> None:
    sliced = programs.program("sliced", "gpu")
    program = compile_for_gpu("h200", sliced, *programs.arguments(SHAPE, LAYOUT))
    assert programs.remade_weights(program.text, SHAPE, LAYOUT)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", ["product", "gated", "gradient"])
@pytest.mark.parametrize("name", ["decode_2p8t_up_experts_over_64", "prefill_48b_down"])
def test_float32_rows(name: str, kind: str, chip: str) -> None:
    check(chip, kind, SHAPES[name], jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_shape(name: str, kind: str, chip: str) -> None:
    check(chip, kind, SHAPES[name])
