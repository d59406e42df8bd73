"""Repeated layers: one scanned body over the repeats of a segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moe28t_jax.config import ModelConfig, Segment
from moe28t_jax.model.layer import Step, Stream, run_layer, run_prepared_layer
from moe28t_jax.parallel.rules import constrain

_STACKED_ONLY = {"experts", "kv_b_proj"}


def _is_stacked_only(path: tuple[Any, ...]) -> bool:
    """What a layer reads out of the stack itself, and is never sliced out of it: experts, by their kernel, and what is
    read in parts. In training all are sliced, since a layer's copy is made anyway."""
    return any(getattr(key, "name", getattr(key, "key", None)) in _STACKED_ONLY for key in path)


def block_starts(segment: Segment, config: ModelConfig) -> list[list[bool]]:
    """Whether a block of attention residuals begins, by position in the period and repeat."""
    return [
        [config.starts_block(segment.layer(repeat, position)) for repeat in range(segment.repeats)]
        for position in range(segment.period)
    ]


def with_buffer(stream: Stream, step: Step) -> Stream:
    """The stream with its snapshots in a fixed buffer, as a scan carries it."""
    config = step.config
    if config.residual_block_size is None:
        return stream
    shape = stream.partial_BTD.shape
    buffer = jnp.zeros((config.num_snapshots, *shape), stream.partial_BTD.dtype)
    tokens = "token" if step.prepare is None else "stream_token"
    buffer = constrain(buffer, None, "batch", tokens, None)
    for index, snapshot in enumerate(stream.snapshots):
        buffer = buffer.at[index].set(snapshot)
    return Stream(stream.partial_BTD, buffer, jnp.int32(len(stream.snapshots)))


def scan_layers(
    segment: Segment,
    places: Any,
    stream: Stream,
    caches: list[Any] | None,
    step: Step,
    starts: Sequence[jax.Array | None],
) -> tuple[Stream, list[Any] | None, list[dict[str, jax.Array]]]:
    """Run stacked layers as one scanned body. `starts[position]`: whether a block begins there, per repeat; None where
    none ever does. `stream` is that of `with_buffer`. What is collected has the repeats in front."""
    paths, structure = jax.tree_util.tree_flatten_with_path([list(places)])
    slices_all = step.prepare is not None
    whole = {
        index: leaf for index, (path, leaf) in enumerate(paths) if _is_stacked_only(path) and not slices_all
    }
    sliced = [leaf for index, (_, leaf) in enumerate(paths) if index not in whole]
    repeats = paths[0][1].shape[0]

    def body(carry, xs):
        stream, caches = carry
        repeat, leaves, starts = xs
        leaves = iter(leaves)
        merged = [whole[index] if index in whole else next(leaves) for index in range(len(paths))]
        [groups] = jax.tree_util.tree_unflatten(structure, merged)
        caches = None if caches is None else list(caches)
        collected = []
        for position, group in enumerate(groups):
            begins = starts[position]
            if slices_all:
                stream, auxiliary = run_prepared_layer(
                    group, stream, segment.first + position, False if begins is None else begins, step
                )
                collected.append(auxiliary)
                continue
            cache = None if caches is None else caches[position]
            stream, cache, auxiliary = run_layer(
                group,
                stream,
                cache,
                segment.first + position,
                repeat,
                False if begins is None else begins,
                step,
            )
            if caches is not None:
                caches[position] = cache
            collected.append(auxiliary)
        return (stream, caches), collected

    xs = (jnp.arange(repeats, dtype=jnp.int32), sliced, list(starts))
    (stream, caches), collected = jax.lax.scan(body, (stream, caches), xs)
    return stream, caches, collected


def scan_segment(
    segment: Segment, places: Any, stream: Stream, caches: list[Any] | None, step: Step
) -> tuple[Stream, list[Any] | None, list[dict[str, jax.Array]]]:
    """Run a repeated segment; what is collected is in the order of the layers."""
    config = step.config
    pushed = len(stream.snapshots)
    flags = block_starts(segment, config)
    starts = [jnp.asarray(flag, dtype=bool) if any(flag) else None for flag in flags]
    stream, caches, collected = scan_layers(segment, places, with_buffer(stream, step), caches, step, starts)
    if config.residual_block_size is not None:
        pushed += sum(map(sum, flags))
        stream = Stream(stream.partial_BTD, tuple(stream.snapshots[index] for index in range(pushed)), None)
    return stream, caches, by_layer(collected, segment)


def by_layer(collected: list[dict[str, jax.Array]], segment: Segment) -> list[dict[str, jax.Array]]:
    """What was collected with the repeats in front, one entry per layer."""
    return [
        jax.tree.map(lambda x, repeat=repeat: x[repeat], collected[position])
        for repeat in range(segment.repeats)
        for position in range(segment.period)
    ]
