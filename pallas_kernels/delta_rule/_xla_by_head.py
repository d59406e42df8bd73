"""The chunked gated delta rule for a few cores: the heads of each row one after the other.

XLA for CPUs divides a batched product among threads, which meet again before the next operation begins. The products of
a chunk are too small for that: two threads took longer over them than one, and many times longer where other work ran
on their cores. Here the products with the state have no batch and stay on one thread. A loop takes the tokens of a head
in groups, reads them from the inputs where they lie and writes its results in place, so that temporary memory is that
of one group. The backward pass takes the groups in reverse, each from its inputs and the state at its start.
"""

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying
from pallas_kernels.delta_rule._xla_chunk import (
    SMALLEST_LOG_DECAY,
    Chunk,
    Inputs,
    advance,
    prepare_chunks,
)
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE

_CHUNK_SIZE = 32
_GROUP_CHUNKS = 8
"""Chunks of a head whose state-independent part is computed together."""

_FEW_CORES = 2

Results = tuple[Array | None, Array, Array | None]
"""Outputs [B, T, H, V], final state [B, H, K, V], states on the grid of boundaries [B, N, H, K, V]."""


def few_cores() -> bool:
    """Whether this process may use so few cores that dividing products among them does not pay."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable <= _FEW_CORES


class _Cut(NamedTuple):
    """The tokens of a row as groups of equal size."""

    groups: int
    size: int
    """Tokens of a group; a multiple of the grid of boundary states."""


def _cut(tokens: int) -> _Cut:
    groups = -(-tokens // (_CHUNK_SIZE * _GROUP_CHUNKS))
    size = -(-tokens // groups)
    return _Cut(groups, -(-size // CHUNK_SIZE) * CHUNK_SIZE)


def _advance_group(
    with_boundaries: bool, state_KV: Array, group: Inputs
) -> tuple[Array, Array | None, Array | None]:
    """State after a group [tokens, ...] of one head, its outputs, and the states on the grid of boundaries."""
    q, k, v, log_decay, beta = group
    # -inf is a valid decay, but 0 x -inf in a sum of selected exponents is not.
    log_decay = jnp.maximum(log_decay, jnp.asarray(SMALLEST_LOG_DECAY, log_decay.dtype))

    def in_chunks(x: Array) -> Array:
        return x.reshape(-1, _CHUNK_SIZE, *x.shape[1:])

    def carry(state: Array, chunk: Chunk) -> tuple[Array, tuple[Array | None, Array | None]]:
        state, o = advance(state, chunk)
        return state, (o, state if with_boundaries else None)

    with jax.named_scope("delta_rule_within_chunks"):
        prepared = prepare_chunks(*jax.tree.map(in_chunks, (q, k, v, log_decay, beta)))
    with jax.named_scope("delta_rule_across_chunks"):
        state_KV, (o, boundaries) = jax.lax.scan(carry, state_KV, prepared)
    per_boundary = CHUNK_SIZE // _CHUNK_SIZE
    return (
        state_KV,
        None if o is None else o.reshape(-1, o.shape[-1]),
        None if boundaries is None else boundaries[per_boundary - 1 :: per_boundary],
    )


class _Place(NamedTuple):
    """Which row, group and head."""

    row: Array
    group: Array
    head: Array

    def _start(self, x: Array, count: int) -> tuple[Array, ...]:
        zero = jnp.zeros_like(self.row)
        return (self.row, self.group * count, self.head, *(zero,) * (x.ndim - 3))

    def read(self, x: Array, count: int) -> Array:
        """[B, groups * count, H, ...] -> [count, ...]."""
        part = jax.lax.dynamic_slice(x, self._start(x, count), (1, count, 1, *x.shape[3:]))
        return part.reshape(count, *x.shape[3:])

    def write(self, x: Array, part: Array) -> Array:
        """[count, ...] into [B, groups * count, H, ...]."""
        part = part.reshape(1, part.shape[0], 1, *part.shape[1:])
        return jax.lax.dynamic_update_slice(x, part, self._start(x, part.shape[1]))

    def of_row(self) -> "_Place":
        """For what there is once in a row: [B, 1, H, ...]."""
        return self._replace(group=jnp.zeros_like(self.group))


def _place(n: Array, groups: int, heads: int) -> _Place:
    """Of the n-th piece of work: all groups of a head, then the next head, then the next row."""
    return _Place(n // (groups * heads), n % groups, n // groups % heads)


def _padded(x: Array, size: int) -> Array:
    """[B, T, ...] with zeros up to `size`: neutral tokens."""
    missing = size - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))) if missing else x


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    return match_varying(jnp.zeros(shape, like.dtype), like)[0]


def _forward(
    inputs: Inputs, state_BHKV: Array, with_boundaries: bool, with_starts: bool
) -> tuple[Results, Array | None]:
    """Results, and the states at the start of each group [B, groups, H, K, V] if wanted."""
    batch, tokens, heads, key_dim = inputs[1].shape
    value_dim = inputs[2].shape[-1]
    groups, size = _cut(tokens)
    padded: Inputs = jax.tree.map(lambda x: _padded(x, groups * size), inputs)
    first_B1HKV = state_BHKV[:, None]

    def body(n: Array, carry: Any) -> Any:
        state, final, o, starts, boundaries = carry
        place = _place(n, groups, heads)
        state = jnp.where(place.group == 0, place.of_row().read(first_B1HKV, 1)[0], state)
        if starts is not None:
            starts = place.write(starts, state[None])
        group = jax.tree.map(lambda x: place.read(x, size), padded)
        state, o_TV, boundaries_NKV = _advance_group(with_boundaries, state, group)
        if o is not None and o_TV is not None:
            o = place.write(o, o_TV)
        if boundaries is not None and boundaries_NKV is not None:
            boundaries = place.write(boundaries, boundaries_NKV)
        return state, place.of_row().write(final, state[None]), o, starts, boundaries

    def empty(number: int, *rest: int) -> Array:
        return _zeros((batch, number, heads, *rest), inputs[1])

    carry = (
        _zeros((key_dim, value_dim), inputs[1]),
        empty(1, key_dim, value_dim),
        None if inputs[0] is None else empty(groups * size, value_dim),
        empty(groups, key_dim, value_dim) if with_starts else None,
        empty(groups * size // CHUNK_SIZE, key_dim, value_dim) if with_boundaries else None,
    )
    _, final, o, starts, boundaries = jax.lax.fori_loop(0, batch * heads * groups, body, carry)
    return (
        None if o is None else o[:, :tokens],
        final[:, 0],
        None if boundaries is None else boundaries[:, : -(-tokens // CHUNK_SIZE)],
    ), starts


def _backward(
    inputs: Inputs, starts_BGHKV: Array, with_boundaries: bool, cotangents: Results
) -> tuple[Inputs, Array]:
    """Cotangents of the inputs and of the first state."""
    batch, tokens, heads = inputs[1].shape[:3]
    groups, size = _cut(tokens)
    padded: Inputs = jax.tree.map(lambda x: _padded(x, groups * size), inputs)
    ct_o, ct_final, ct_boundaries = cotangents
    ct_outputs = (
        None if ct_o is None else _padded(ct_o, groups * size),
        None if ct_boundaries is None else _padded(ct_boundaries, groups * size // CHUNK_SIZE),
    )
    ct_final_B1HKV = ct_final[:, None]
    advance_group = functools.partial(_advance_group, with_boundaries)

    def body(n: Array, carry: Any) -> Any:
        ct_state, ct_first, ct_inputs = carry
        place = _place(n, groups, heads)
        is_last = place.group == 0
        place = place._replace(group=groups - 1 - place.group)
        ct_state = jnp.where(is_last, place.of_row().read(ct_final_B1HKV, 1)[0], ct_state)
        start = place.read(starts_BGHKV, 1)[0]
        group = jax.tree.map(lambda x: place.read(x, size), padded)
        _, pull_back = jax.vjp(advance_group, start, group)
        ct_results = jax.tree.map(lambda x: place.read(x, x.shape[1] // groups), ct_outputs)
        ct_state, ct_group = pull_back((ct_state, *ct_results))
        ct_inputs = jax.tree.map(place.write, ct_inputs, ct_group)
        return ct_state, place.of_row().write(ct_first, ct_state[None]), ct_inputs

    carry = (
        _zeros(starts_BGHKV.shape[3:], starts_BGHKV),
        _zeros(ct_final_B1HKV.shape, starts_BGHKV),
        jax.tree.map(lambda x: _zeros(x.shape, x), padded),
    )
    _, ct_first, ct_inputs = jax.lax.fori_loop(0, batch * heads * groups, body, carry)
    return jax.tree.map(lambda x: x[:, :tokens], ct_inputs), ct_first[:, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def walk(with_boundaries: bool, inputs: Inputs, state_BHKV: Array) -> Results:
    """Outputs (if q is given), final state, and (if asked for) the state at every boundary.

    All arrays in the compute dtype; any number of tokens.
    """
    return _forward(inputs, state_BHKV, with_boundaries, with_starts=False)[0]


def _walk_forward(
    with_boundaries: bool, inputs: Inputs, state_BHKV: Array
) -> tuple[Results, tuple[Inputs, Array]]:
    results, starts = _forward(inputs, state_BHKV, with_boundaries, with_starts=True)
    assert starts is not None
    return results, (inputs, starts)


def _walk_backward(
    with_boundaries: bool, residuals: tuple[Inputs, Array], cotangents: Results
) -> tuple[Inputs, Array]:
    return _backward(*residuals, with_boundaries, cotangents)


walk.defvjp(_walk_forward, _walk_backward)
