"""Programs of the gated delta rule that are compiled for chips that are not there, with their arguments."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import CHUNK_SIZE, SHAPES, DeltaRuleShape

SHAPE = SHAPES["prefill_2p8t_heads_over_8"]
SEQUENCES = tuple(name for name, shape in SHAPES.items() if shape.tokens > 1)
WHOLE_LANES = tuple(name for name in SEQUENCES if SHAPES[name].key_dim % 128 == 0)
STEPS = tuple(name for name, shape in SHAPES.items() if shape.tokens == 1)
LIKE = jax.ShapeDtypeStruct
_PER_TOKEN = ("q", "k", "v", "log_decay")


def sequence(shape: DeltaRuleShape, dtype: Any = jnp.bfloat16, heads_first: bool = False) -> dict[str, Any]:
    """Arguments of the sequence programs; heads lie before tokens in memory where XLA lays them out so."""
    batch, tokens, heads, key_dim, value_dim = shape
    axes = (batch, heads, tokens) if heads_first else (batch, tokens, heads)
    return {
        "q": LIKE((*axes, key_dim), dtype),
        "k": LIKE((*axes, key_dim), dtype),
        "v": LIKE((*axes, value_dim), dtype),
        "log_decay": LIKE((*axes, key_dim), jnp.float32),
        "beta": LIKE((batch, tokens, heads), jnp.float32),
        "initial_state": LIKE((batch, heads, key_dim, value_dim), jnp.float32),
    }


def lengths_and_segments(shape: DeltaRuleShape) -> tuple[Any, Any]:
    return LIKE((shape.batch,), jnp.int32), LIKE((shape.batch, shape.tokens), jnp.int32)


def decode_step(shape: DeltaRuleShape) -> tuple[Any, tuple[Any, ...]]:
    """The state, and what a token brings: arguments of `step`."""
    batch, _, heads, key_dim, value_dim = shape
    keys, values = (LIKE((batch, heads, size), jnp.bfloat16) for size in (key_dim, value_dim))
    log_decay, beta = LIKE((batch, heads, key_dim), jnp.float32), LIKE((batch, heads), jnp.float32)
    return LIKE((batch, heads, key_dim, value_dim), jnp.float32), (keys, keys, values, log_decay, beta)


def fused_decode_step(shape: DeltaRuleShape) -> tuple[dict[str, Any], dict[str, Any]]:
    """The caches, and what a token brings: arguments of `fused_step`."""
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
    return caches, x


def _tokens_first(x: dict[str, Any], heads_first: bool) -> dict[str, Any]:
    if not heads_first:
        return x
    return {name: jnp.swapaxes(a, 1, 2) if name in _PER_TOKEN else a for name, a in x.items()}


def _run(
    implementation: str, heads_first: bool, boundaries: bool, x: dict[str, Any], *rest: Any
) -> tuple[Any, ...]:
    lengths, segment_ids = rest or (None, None)
    o, *states = delta_rule.delta_rule(
        **_tokens_first(x, heads_first),
        lengths=lengths,
        segment_ids=segment_ids,
        return_boundary_states=boundaries,
        implementation=implementation,
    )
    return jnp.swapaxes(o, 1, 2) if heads_first else o, *states


def forward(
    implementation: str, heads_first: bool = False, boundaries: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Of `sequence` and perhaps `lengths_and_segments`. Like all programs here it may go to another process."""
    return functools.partial(_run, implementation, heads_first, boundaries)


def _gradient(implementation: str, heads_first: bool, x: dict[str, Any], ct: tuple[Any, ...]) -> Any:
    return jax.vjp(forward(implementation, heads_first), x)[1](ct)


def gradient(implementation: str, heads_first: bool = False) -> Callable[..., Any]:
    """Of `sequence` and cotangents of the outputs (like v) and of the final state."""
    return functools.partial(_gradient, implementation, heads_first)


def _segment_map(implementation: str, heads_first: bool, x: dict[str, Any]) -> tuple[Any, ...]:
    x = _tokens_first(x, heads_first)
    arrays = (x[name] for name in ("k", "v", "log_decay", "beta"))
    return delta_rule.segment_map(*arrays, implementation=implementation)


def segment_map(implementation: str, heads_first: bool = False) -> Callable[..., tuple[Any, ...]]:
    """Of `sequence`."""
    return functools.partial(_segment_map, implementation, heads_first)


def _step(implementation: str, state: Any, token: tuple[Any, ...]) -> tuple[Any, ...]:
    return delta_rule.step(*token, state, implementation=implementation)


def step(implementation: str) -> Callable[..., tuple[Any, ...]]:
    """Of `decode_step`."""
    return functools.partial(_step, implementation)


def _fused_step(implementation: str, caches: dict[str, Any], x: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    y, state, window = delta_rule.fused_step(**caches, **x, implementation=implementation)
    return y, {"window": window, "state": state}


def fused_step(implementation: str) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Of `fused_decode_step`."""
    return functools.partial(_fused_step, implementation)


def array_bytes(arrays: Any) -> int:
    """Of all arrays of a tree: what is updated in place shares at least as many with the arguments."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def state_bytes(shape: DeltaRuleShape) -> int:
    return 4 * shape.batch * shape.heads * shape.key_dim * shape.value_dim


def boundary_bytes(shape: DeltaRuleShape) -> int:
    """The states at the ends of chunks."""
    return -(-shape.tokens // CHUNK_SIZE) * state_bytes(shape)


def map_bytes(shape: DeltaRuleShape) -> int:
    return 4 * shape.batch * shape.heads * shape.key_dim * (shape.key_dim + shape.value_dim)
