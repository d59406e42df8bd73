"""The TPU kernels compile for every chip, with no memory beyond arguments, results and what is stated here."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.delta_rule import SHAPES, DeltaRuleShape
from tests.compile import delta_rule_programs as programs
from tests.compile.delta_rule_programs import SEQUENCES, SHAPE, STEPS, WHOLE_LANES
from tests.compile.topologies import CHIPS, compile_for_tpu, temporary_bytes

SMALL = 2**20
"""Bytes for what surrounds a kernel: lengths, masks."""


def sequence(shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> dict[str, jax.ShapeDtypeStruct]:
    """Heads before tokens in memory, as the model's own programs lay them out."""
    return programs.sequence(shape, dtype, heads_first=True)


def scalar_bytes(shape: DeltaRuleShape) -> int:
    """beta with its tokens in lanes, whole tiles of 8 x 128, and the same for the segment starts."""
    rows = shape.batch * (-(-shape.heads // 8) + 1) * 8
    return 4 * rows * -(-shape.tokens // 128) * 128


def widened_bytes(shape: DeltaRuleShape) -> int:
    """Copies of all arrays with K and V filled up to whole lanes, where they are not; tokens in tiles of 16."""
    if shape.key_dim % 128 == 0 and shape.value_dim % 128 == 0:
        return 0
    rows = shape.batch * shape.heads * 128
    tokens, tokens_of_states = -(-shape.tokens // 16) * 16, 2 * 128
    return rows * (tokens * (4 * 2 + 4) + tokens_of_states * 4)


def check_forward(chip: str, shape: DeltaRuleShape) -> None:
    compiled = compile_for_tpu(chip, programs.forward("tpu", heads_first=True), sequence(shape))
    assert temporary_bytes(compiled) <= scalar_bytes(shape) + widened_bytes(shape) + SMALL


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
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_forward_with_lengths_segments_and_boundaries(chip: str, dtype: Any) -> None:
    function = programs.forward("tpu", heads_first=True, boundaries=True)
    compiled = compile_for_tpu(chip, function, sequence(SHAPE, dtype), *programs.lengths_and_segments(SHAPE))
    assert temporary_bytes(compiled) <= 2 * scalar_bytes(SHAPE) + SMALL


def check_gradient(chip: str, shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> None:
    x = sequence(shape, dtype)
    ct = x["v"], x["initial_state"]
    compiled = compile_for_tpu(chip, programs.gradient("tpu", heads_first=True), x, ct)
    whole_tiles = -(-shape.tokens // 16) * 16
    outputs = x["v"].dtype.itemsize * shape.batch * whole_tiles * shape.heads * shape.value_dim
    # The forward pass's results, which the gradient alone does not need, are written too.
    results = programs.boundary_bytes(shape) + outputs + programs.state_bytes(shape)
    allowed = results + 2 * scalar_bytes(shape) + SMALL
    assert temporary_bytes(compiled) <= allowed


@pytest.mark.parametrize("chip", CHIPS)
def test_gradient(chip: str) -> None:
    check_gradient(chip, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", WHOLE_LANES)
def test_gradient_at_every_shape(name: str, chip: str) -> None:
    check_gradient(chip, SHAPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_gradient_in_float32(chip: str) -> None:
    check_gradient(chip, SHAPE, jnp.float32)


def check_segment_map(chip: str, shape: DeltaRuleShape) -> None:
    compiled = compile_for_tpu(chip, programs.segment_map("tpu", heads_first=True), sequence(shape))
    # Where T fills no whole lanes, beta is there before and after its padding: 28.3 MB of 16 x 1,000 tokens on v5p,
    # 25.2 of them the maps.
    scalars = scalar_bytes(shape) * (2 if shape.tokens % 128 else 1)
    assert temporary_bytes(compiled) <= scalars + programs.map_bytes(shape) + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_segment_map(chip: str) -> None:
    check_segment_map(chip, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", WHOLE_LANES)
def test_segment_map_at_every_shape(name: str, chip: str) -> None:
    check_segment_map(chip, SHAPES[name])


def compile_in_place(chip: str, function: Any, cached: Any, token: Any) -> int:
    """Temporary bytes of a step that updates its caches in place: the results share the memory of the arguments."""
    compiled = compile_for_tpu(chip, function, cached, token, donate=(0,))
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= programs.array_bytes(cached)
    return analysis.temp_size_in_bytes


def token_bytes(shape: DeltaRuleShape) -> int:
    """beta spread to tiles; and, with heads that fill no tiles of 8, copies in tiles of what a token brings, and of
    the window, in and out."""
    tiles = shape.batch * -(-shape.heads // 8) * 8 * 128
    beta = 4 * tiles
    return beta if shape.heads % 8 == 0 else beta + tiles * (2 * (3 + 2 * 9 + 2) + 4)


def check_fused_step(chip: str, shape: DeltaRuleShape) -> None:
    temporaries = compile_in_place(chip, programs.fused_step("tpu"), *programs.fused_decode_step(shape))
    # No second copy of the state on the way.
    assert temporaries <= min(token_bytes(shape), programs.state_bytes(shape) // 4) + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_fused_step(chip: str) -> None:
    check_fused_step(chip, DeltaRuleShape(4, 1, 12, 128, 128))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", STEPS)
def test_fused_step_at_every_shape(name: str, chip: str) -> None:
    check_fused_step(chip, SHAPES[name])


def check_step(chip: str, shape: DeltaRuleShape) -> None:
    temporaries = compile_in_place(chip, programs.step("tpu"), *programs.decode_step(shape))
    tiles = shape.batch * -(-shape.heads // 8) * 8 * 128
    # With heads that fill no tiles of 8, copies in tiles of what a token brings and gets.
    copies = tiles * (2 * 4 + 4) if shape.heads % 8 else 0
    assert temporaries <= 4 * tiles + copies + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_step(chip: str) -> None:
    check_step(chip, SHAPES["decode_8_heads_over_8"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", STEPS)
def test_step_at_every_shape(name: str, chip: str) -> None:
    check_step(chip, SHAPES[name])
