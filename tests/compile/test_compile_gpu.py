"""The GPU kernels of the delta rule compile for Hopper and Blackwell; nothing is spilled, nothing copied."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule import SHAPES, DeltaRuleShape
from tests.compile import delta_rule_programs as programs
from tests.compile.delta_rule_programs import SHAPE, STEPS
from tests.compile.delta_rule_programs import WHOLE_LANES as SEQUENCES
from tests.compile.gpu_topologies import (
    ARCHITECTURES,
    SHARED_MEMORY_LIMIT,
    Program,
    compile_for_gpu,
    needs_gpu_compiler,
)

pytestmark = needs_gpu_compiler

CHIPS = ("h200", "b200")
SMALL = 2**12
"""Bytes for what surrounds a kernel: lengths, which rows are active."""


def scalar_bytes(shape: DeltaRuleShape) -> int:
    """beta with its tokens last, and the same for the segment starts."""
    return 4 * shape.batch * (shape.heads + 1) * (shape.tokens + 3)


def check_kernels(program: Program, chip: str, count: int = 1) -> None:
    assert len(program.kernels) == count
    for kernel in program.kernels:
        assert kernel.architecture == ARCHITECTURES[chip]
        assert kernel.spilled_bytes == kernel.stack_bytes == 0, kernel
        assert kernel.shared_memory_bytes <= SHARED_MEMORY_LIMIT, kernel


def check_forward(chip: str, shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> None:
    program = compile_for_gpu(chip, programs.forward("gpu"), programs.sequence(shape, dtype))
    check_kernels(program, chip)
    assert program.temporary_bytes <= scalar_bytes(shape) + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_forward(chip: str) -> None:
    check_forward(chip, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_forward_at_every_shape(name: str, chip: str) -> None:
    check_forward(chip, SHAPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_forward_of_sizes_that_are_padded(chip: str) -> None:
    shape = SHAPES["tiny"]._replace(key_dim=40, value_dim=48)
    program = compile_for_gpu(chip, programs.forward("gpu"), programs.sequence(shape))
    check_kernels(program, chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_forward_in_float32_with_lengths_segments_and_boundaries(chip: str) -> None:
    arguments = programs.sequence(SHAPE, jnp.float32), *programs.lengths_and_segments(SHAPE)
    program = compile_for_gpu(chip, programs.forward("gpu", boundaries=True), *arguments)
    check_kernels(program, chip)
    assert program.temporary_bytes <= 2 * scalar_bytes(SHAPE) + SMALL


def check_gradient(chip: str, shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> None:
    x = programs.sequence(shape, dtype)
    program = compile_for_gpu(chip, programs.gradient("gpu"), x, (x["v"], x["initial_state"]))
    check_kernels(program, chip, 4)
    # Errors, ct_u and what they leave for v; ct_q, what is read, what is written and what becomes of log_decay.
    channels = 3 * shape.value_dim + 5 * shape.key_dim
    per_token = 4 * shape.batch * shape.tokens * shape.heads * channels
    allowed = programs.boundary_bytes(shape) + per_token + 2 * scalar_bytes(shape) + SMALL
    assert program.temporary_bytes <= allowed


@pytest.mark.parametrize("chip", CHIPS)
def test_gradient(chip: str) -> None:
    check_gradient(chip, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_gradient_at_every_shape(name: str, chip: str) -> None:
    check_gradient(chip, SHAPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_gradient_in_float32(chip: str) -> None:
    check_gradient(chip, SHAPE, jnp.float32)


def check_segment_map(chip: str, shape: DeltaRuleShape) -> None:
    program = compile_for_gpu(chip, programs.segment_map("gpu"), programs.sequence(shape))
    check_kernels(program, chip)
    assert program.temporary_bytes <= scalar_bytes(shape) + programs.map_bytes(shape) + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_segment_map(chip: str) -> None:
    check_segment_map(chip, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_segment_map_at_every_shape(name: str, chip: str) -> None:
    check_segment_map(chip, SHAPES[name])


def check_in_place(chip: str, function: Any, cached: Any, token: Any) -> None:
    """A step updates its caches in place: the results share the memory of the arguments, with no copy on the way."""
    program = compile_for_gpu(chip, function, cached, token, donate=(0,))
    check_kernels(program, chip)
    assert program.alias_bytes >= programs.array_bytes(cached)
    assert program.temporary_bytes <= SMALL


def check_step(chip: str, shape: DeltaRuleShape) -> None:
    check_in_place(chip, programs.step("gpu"), *programs.decode_step(shape))


@pytest.mark.parametrize("chip", CHIPS)
def test_step(chip: str) -> None:
    check_step(chip, SHAPES["decode_8_heads_over_8"])


def check_fused_step(chip: str, shape: DeltaRuleShape) -> None:
    check_in_place(chip, programs.fused_step("gpu"), *programs.fused_decode_step(shape))


@pytest.mark.parametrize("chip", CHIPS)
def test_fused_step(chip: str) -> None:
    check_fused_step(chip, SHAPES["decode_8_heads_over_8"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", STEPS)
def test_steps_at_every_shape(name: str, chip: str) -> None:
    check_step(chip, SHAPES[name])
    check_fused_step(chip, SHAPES[name])


@pytest.mark.slow
def test_what_does_not_fit_is_refused_by_the_compiler() -> None:
    """The account of shared memory is the compiler's own: beyond its limit it does not compile."""
    with pytest.raises(Exception, match=r"(?i)shared memory|smem"):
        compile_for_gpu("h200", too_much_shared_memory, programs.LIKE((128,), jnp.float32))


def too_much_shared_memory(x: Any) -> Any:
    def body(x_ref: Any, o_ref: Any, shared: Any) -> None:
        shared[0] = x_ref[...]
        o_ref[...] = shared[0]

    rows = SHARED_MEMORY_LIMIT // (4 * 128) + 1
    return plgpu.kernel(body, out_type=x, scratch_types=[plgpu.SMEM((rows, 128), jnp.float32)])(x)
