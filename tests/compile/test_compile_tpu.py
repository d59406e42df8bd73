"""The TPU kernels compile for every chip, with no memory beyond arguments, results and what is stated here."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import CHUNK_SIZE, SHAPES, DeltaRuleShape
from tests.compile.topologies import CHIPS, compile_for_tpu, temporary_bytes

SHAPE = SHAPES["prefill_2p8t_heads_over_8"]
SEQUENCES = tuple(name for name, shape in SHAPES.items() if shape.tokens > 1)
WHOLE_LANES = tuple(name for name in SEQUENCES if SHAPES[name].key_dim % 128 == 0)
STEPS = tuple(name for name, shape in SHAPES.items() if shape.tokens == 1)
SMALL = 2**20
"""Bytes for what surrounds a kernel: lengths, masks."""


def sequence(shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> dict[str, jax.ShapeDtypeStruct]:
    """Arguments with heads before tokens in memory, as the model's own programs lay them out."""
    batch, tokens, heads, key_dim, value_dim = shape
    like = jax.ShapeDtypeStruct
    return {
        "q": like((batch, heads, tokens, key_dim), dtype),
        "k": like((batch, heads, tokens, key_dim), dtype),
        "v": like((batch, heads, tokens, value_dim), dtype),
        "log_decay": like((batch, heads, tokens, key_dim), jnp.float32),
        "beta": like((batch, tokens, heads), jnp.float32),
        "initial_state": like((batch, heads, key_dim, value_dim), jnp.float32),
    }


def tokens_first(x: dict[str, Any]) -> dict[str, Any]:
    return {
        name: jnp.swapaxes(a, 1, 2) if name in ("q", "k", "v", "log_decay") else a for name, a in x.items()
    }


def run(x: dict[str, Any], lengths: Any = None, segment_ids: Any = None, **options: Any) -> tuple[Any, ...]:
    o, *states = delta_rule.delta_rule(
        **tokens_first(x), lengths=lengths, segment_ids=segment_ids, implementation="tpu", **options
    )
    return jnp.swapaxes(o, 1, 2), *states


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
    compiled = compile_for_tpu(chip, run, sequence(shape))
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
    batch, tokens = SHAPE.batch, SHAPE.tokens
    lengths, segment_ids = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((batch,), (batch, tokens)))

    def function(x: dict[str, Any], lengths: Any, segment_ids: Any) -> tuple[Any, ...]:
        return run(x, lengths, segment_ids, return_boundary_states=True)

    compiled = compile_for_tpu(chip, function, sequence(SHAPE, dtype), lengths, segment_ids)
    assert temporary_bytes(compiled) <= 2 * scalar_bytes(SHAPE) + SMALL


def check_gradient(chip: str, shape: DeltaRuleShape, dtype: Any = jnp.bfloat16) -> None:
    x = sequence(shape, dtype)
    batch, tokens, heads, key_dim, value_dim = shape
    ct = x["v"], x["initial_state"]
    compiled = compile_for_tpu(chip, lambda x, ct: jax.vjp(run, x)[1](ct), x, ct)
    boundary_states = 4 * batch * -(-tokens // CHUNK_SIZE) * heads * key_dim * value_dim
    whole_tiles = -(-tokens // 16) * 16
    outputs = x["v"].dtype.itemsize * batch * whole_tiles * heads * value_dim
    assert temporary_bytes(compiled) <= boundary_states + outputs + 2 * scalar_bytes(shape) + SMALL


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
    x = sequence(shape)

    def function(x: dict[str, Any]) -> tuple[Any, ...]:
        x = tokens_first(x)
        return delta_rule.segment_map(x["k"], x["v"], x["log_decay"], x["beta"], implementation="tpu")

    compiled = compile_for_tpu(chip, function, x)
    maps = 4 * shape.batch * shape.heads * shape.key_dim * (shape.key_dim + shape.value_dim)
    assert temporary_bytes(compiled) <= scalar_bytes(shape) + maps + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_segment_map(chip: str) -> None:
    check_segment_map(chip, SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", WHOLE_LANES)
def test_segment_map_at_every_shape(name: str, chip: str) -> None:
    check_segment_map(chip, SHAPES[name])


def decode_step(shape: DeltaRuleShape) -> dict[str, jax.ShapeDtypeStruct]:
    batch, _, heads, key_dim, _ = shape
    like = jax.ShapeDtypeStruct
    return {
        "x": like((batch, 3, heads, key_dim), jnp.bfloat16),
        "window": like((batch, 3, 3, heads, key_dim), jnp.bfloat16),
        "taps": like((4, 3, heads, key_dim), jnp.float32),
        "log_decay": like((batch, heads, key_dim), jnp.float32),
        "beta": like((batch, heads), jnp.float32),
        "gate": like((batch, heads, key_dim), jnp.bfloat16),
        "norm_weight": like((key_dim,), jnp.bfloat16),
        "state": like((batch, heads, key_dim, key_dim), jnp.float32),
        "active": like((batch,), jnp.bool_),
    }


def check_fused_step(chip: str, shape: DeltaRuleShape) -> None:
    x = decode_step(shape)
    caches = {name: x.pop(name) for name in ("window", "state")}

    def function(caches: dict[str, Any], x: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        y, state, window = delta_rule.fused_step(**caches, **x, implementation="tpu")
        return y, {"window": window, "state": state}

    compiled = compile_for_tpu(chip, function, caches, x, donate=(0,))
    analysis = compiled.memory_analysis()
    assert analysis is not None
    # Updated in place: the results share the memory of the caches, and there is no second copy of the state on the way.
    cached = sum(a.size * a.dtype.itemsize for a in caches.values())
    assert analysis.alias_size_in_bytes >= cached
    assert temporary_bytes(compiled) <= min(token_bytes(shape), state_bytes(shape) // 4) + SMALL


def state_bytes(shape: DeltaRuleShape) -> int:
    return 4 * shape.batch * shape.heads * shape.key_dim * shape.value_dim


def token_bytes(shape: DeltaRuleShape) -> int:
    """beta spread to tiles; and, with heads that fill no tiles of 8, copies in tiles of what a token brings, and of
    the window, in and out."""
    tiles = shape.batch * -(-shape.heads // 8) * 8 * 128
    beta = 4 * tiles
    return beta if shape.heads % 8 == 0 else beta + tiles * (2 * (3 + 2 * 9 + 2) + 4)


@pytest.mark.parametrize("chip", CHIPS)
def test_fused_step(chip: str) -> None:
    check_fused_step(chip, DeltaRuleShape(4, 1, 12, 128, 128))


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", STEPS)
def test_fused_step_at_every_shape(name: str, chip: str) -> None:
    check_fused_step(chip, SHAPES[name])


def check_step(chip: str, shape: DeltaRuleShape) -> None:
    batch, _, heads, key_dim, value_dim = shape
    like = jax.ShapeDtypeStruct
    compiled = compile_for_tpu(
        chip,
        lambda state, *token: delta_rule.step(*token, state, implementation="tpu"),
        like((batch, heads, key_dim, value_dim), jnp.float32),
        like((batch, heads, key_dim), jnp.bfloat16),
        like((batch, heads, key_dim), jnp.bfloat16),
        like((batch, heads, value_dim), jnp.bfloat16),
        like((batch, heads, key_dim), jnp.float32),
        like((batch, heads), jnp.float32),
        donate=(0,),
    )
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.alias_size_in_bytes >= 4 * batch * heads * key_dim * value_dim
    tiles = batch * -(-heads // 8) * 8 * 128
    # With heads that fill no tiles of 8, copies in tiles of what a token brings and gets.
    copies = tiles * (2 * 4 + 4) if heads % 8 else 0
    assert temporary_bytes(compiled) <= 4 * tiles + copies + SMALL


@pytest.mark.parametrize("chip", CHIPS)
def test_step(chip: str) -> None:
    check_step(chip, SHAPES["decode_8_heads_over_8"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", STEPS)
def test_step_at_every_shape(name: str, chip: str) -> None:
    check_step(chip, SHAPES[name])
