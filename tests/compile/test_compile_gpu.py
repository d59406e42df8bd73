"""The GPU kernels of the delta rule compile for Hopper and Blackwell; nothing is spilled, nothing copied."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import CHUNK_SIZE, SHAPES, DeltaRuleShape
from tests.compile.gpu_topologies import (
    ARCHITECTURES,
    SHARED_MEMORY_LIMIT,
    Program,
    compile_for_gpu,
    needs_gpu_compiler,
)

pytestmark = needs_gpu_compiler

CHIPS = ("h200", "b200")
SHAPE = SHAPES["prefill_2p8t_heads_over_8"]
SEQUENCES = tuple(name for name, shape in SHAPES.items() if shape.tokens > 1 and shape.key_dim == 128)
STEPS = tuple(name for name, shape in SHAPES.items() if shape.tokens == 1)
SMALL = 2**12
"""Bytes for what surrounds a kernel: lengths, which rows are active."""
LIKE = jax.ShapeDtypeStruct


def sequence(shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    batch, tokens, heads, key_dim, value_dim = shape
    return {
        "q": LIKE((batch, tokens, heads, key_dim), dtype),
        "k": LIKE((batch, tokens, heads, key_dim), dtype),
        "v": LIKE((batch, tokens, heads, value_dim), dtype),
        "log_decay": LIKE((batch, tokens, heads, key_dim), jnp.float32),
        "beta": LIKE((batch, tokens, heads), jnp.float32),
        "initial_state": LIKE((batch, heads, key_dim, value_dim), jnp.float32),
    }


def scalar_bytes(shape: DeltaRuleShape) -> int:
    """beta with its tokens last, and the same for the segment starts."""
    return 4 * shape.batch * (shape.heads + 1) * (shape.tokens + 3)


def check_kernels(program: Program, chip: str, count: int = 1) -> None:
    assert len(program.kernels) == count
    for kernel in program.kernels:
        assert kernel.architecture == ARCHITECTURES[chip]
        assert kernel.spilled_bytes == kernel.stack_bytes == 0, kernel
        assert kernel.shared_memory_bytes <= SHARED_MEMORY_LIMIT, kernel


def run(x: dict[str, Any], *lengths_and_segments: Any, boundaries: bool = False) -> tuple[Any, ...]:
    names = ("lengths", "segment_ids")
    rest = dict(zip(names, lengths_and_segments, strict=False))
    return delta_rule.delta_rule(**x, **rest, return_boundary_states=boundaries, implementation="gpu")


def gradient(x: dict[str, Any], ct: tuple[Any, ...]) -> Any:
    return jax.vjp(run, x)[1](ct)


def segment_map(x: dict[str, Any]) -> tuple[Any, ...]:
    return delta_rule.segment_map(x["k"], x["v"], x["log_decay"], x["beta"], implementation="gpu")


def step(state: Any, token: tuple[Any, ...]) -> tuple[Any, ...]:
    return delta_rule.step(*token, state, implementation="gpu")


def fused_step(caches: dict[str, Any], x: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    y, state, window = delta_rule.fused_step(**caches, **x, implementation="gpu")
    return y, {"window": window, "state": state}


def check_forward(chip: str, shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> None:
    program = compile_for_gpu(chip, run, sequence(shape, dtype))
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
    program = compile_for_gpu(chip, run, sequence(shape))
    check_kernels(program, chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_forward_in_float32_with_lengths_segments_and_boundaries(chip: str) -> None:
    rest = (LIKE(shape, jnp.int32) for shape in ((SHAPE.batch,), (SHAPE.batch, SHAPE.tokens)))
    program = compile_for_gpu(
        chip, functools.partial(run, boundaries=True), sequence(SHAPE, jnp.float32), *rest
    )
    check_kernels(program, chip)
    assert program.temporary_bytes <= 2 * scalar_bytes(SHAPE) + SMALL


def check_gradient(chip: str, shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> None:
    x = sequence(shape, dtype)
    batch, tokens, heads, key_dim, value_dim = shape
    program = compile_for_gpu(chip, gradient, x, (x["v"], x["initial_state"]))
    check_kernels(program, chip, 4)
    states = batch * -(-tokens // CHUNK_SIZE) * heads * key_dim * value_dim
    # Errors, ct_u and what they leave for v; ct_q, what is read, what is written and what becomes of log_decay.
    per_token = batch * tokens * heads * (3 * value_dim + 5 * key_dim)
    assert program.temporary_bytes <= 4 * (states + per_token) + 2 * scalar_bytes(shape) + SMALL


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
    program = compile_for_gpu(chip, segment_map, sequence(shape))
    check_kernels(program, chip)
    maps = 4 * shape.batch * shape.heads * shape.key_dim * (shape.key_dim + shape.value_dim)
    assert program.temporary_bytes <= scalar_bytes(shape) + maps + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_segment_map(chip: str) -> None:
    check_segment_map(chip, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", SEQUENCES)
def test_segment_map_at_every_shape(name: str, chip: str) -> None:
    check_segment_map(chip, SHAPES[name])


def check_step(chip: str, shape: DeltaRuleShape) -> None:
    batch, _, heads, key_dim, value_dim = shape
    keys, values = (LIKE((batch, heads, size), jnp.bfloat16) for size in (key_dim, value_dim))
    log_decay, beta = LIKE((batch, heads, key_dim), jnp.float32), LIKE((batch, heads), jnp.float32)
    state = LIKE((batch, heads, key_dim, value_dim), jnp.float32)
    program = compile_for_gpu(chip, step, state, (keys, keys, values, log_decay, beta), donate=(0,))
    check_kernels(program, chip)
    assert program.alias_bytes >= 4 * batch * heads * key_dim * value_dim
    assert program.temporary_bytes <= SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_step(chip: str) -> None:
    check_step(chip, SHAPES["decode_8_heads_over_8"])


def check_fused_step(chip: str, shape: DeltaRuleShape) -> None:
    batch, _, heads, size, _ = shape
    caches = {
        "window": LIKE((batch, 3, 3, heads, size), jnp.bfloat16),
        "state": LIKE((batch, heads, size, size), jnp.float32),
    }
    x = {
        "x": LIKE((batch, 3, heads, size), jnp.bfloat16),
        "taps": LIKE((4, 3, heads, size), jnp.float32),
        "log_decay": LIKE((batch, heads, size), jnp.float32),
        "beta": LIKE((batch, heads), jnp.float32),
        "gate": LIKE((batch, heads, size), jnp.bfloat16),
        "norm_weight": LIKE((size,), jnp.bfloat16),
        "active": LIKE((batch,), jnp.bool_),
    }
    program = compile_for_gpu(chip, fused_step, caches, x, donate=(0,))
    check_kernels(program, chip)
    # Updated in place: the results share the memory of the caches, and there is no second copy on the way.
    assert program.alias_bytes >= sum(a.size * a.dtype.itemsize for a in caches.values())
    assert program.temporary_bytes <= SMALL


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
        compile_for_gpu("h200", too_much_shared_memory, LIKE((128,), jnp.float32))


def too_much_shared_memory(x: Any) -> Any:
    def body(x_ref: Any, o_ref: Any, shared: Any) -> None:
        shared[0] = x_ref[...]
        o_ref[...] = shared[0]

    rows = SHARED_MEMORY_LIMIT // (4 * 128) + 1
    return plgpu.kernel(body, out_type=x, scratch_types=[plgpu.SMEM((rows, 128), jnp.float32)])(x)
