"""Pipeline stages: the repeats of a segment divided over the mesh axis `stage`, one microbatch after the other.

Rows of the batch are dealt to microbatches so that each device keeps its own. At every tick each stage runs its layers
on the microbatch that the stage before it had a tick ago; the first and last ticks leave stages without one, which then
compute on rows of length 0: they send no tokens, read no experts and leave their caches as they are. They do not skip
their layers, although most of these are collectives among the stage's own devices: a collective permute is over all
devices, and devices that wait for those in another branch wait forever. Of the snapshots of attention residuals, those
from before the segment are everywhere already; each new one travels from the stage where its block ends to the later
ones. Layers outside of the segment, embedding and head are run by all stages alike.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moe28t_jax.config import Segment
from moe28t_jax.model.depth import block_starts, by_layer, scan_layers
from moe28t_jax.model.layer import Step, Stream
from moe28t_jax.parallel.rules import batch_layout, constrain

STAGE = "stage"


def num_microbatches(rows: int, stages: int, tokens: int) -> int:
    """One in decoding, where a second one would read all weights again and copy the caches of its rows out and back;
    otherwise as many as stages, or the most below that divide the rows of a device."""
    if tokens == 1:
        return 1
    return max(count for count in range(1, stages + 1) if rows % count == 0)


def _deal(x: Array, axis: int, count: int) -> Array:
    """Rows along `axis` as [rows of a microbatch, microbatches]: a device's rows stay with it."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])


def _pick(x: Array, axis: int, count: int, number: Array) -> Array:
    if count == 1:
        return x
    return jax.lax.dynamic_index_in_dim(_deal(x, axis, count), number, axis + 1, keepdims=False)


def _put(x: Array, axis: int, count: int, number: Array, value: Array) -> Array:
    if count == 1:
        return value
    dealt = jax.lax.dynamic_update_index_in_dim(_deal(x, axis, count), value, number, axis + 1)
    return dealt.reshape(x.shape)


def _gather(ticks: Array, axis: int, count: int, first: Array | int) -> Array:
    """Results by tick, of which those from tick `first` on are microbatches, with the rows in their order again."""
    found = jax.lax.dynamic_slice_in_dim(ticks, first, count, 0)
    found = jnp.moveaxis(found, 0, axis + 1)
    return found.reshape(*found.shape[:axis], -1, *found.shape[axis + 2 :])


def pipeline_segment(
    segment: Segment, places: Any, stream: Stream, caches: list[Any] | None, step: Step
) -> tuple[Stream, list[Any] | None, list[dict[str, jax.Array]]]:
    """`scan_segment` over pipeline stages: the same result.

    Raises ValueError where the repeats of the segment do not divide over the stages.
    """
    config, batch = step.config, stream.partial_BTD.shape[0]
    where = batch_layout(batch)
    assert where is not None
    stages = where.size(STAGE)
    if segment.repeats % stages:
        raise ValueError(
            f"The {segment.repeats} repeats of the layers from {segment.first} on do not divide over {stages} pipeline "
            "stages; take a mesh with another `stage`."
        )
    flags = block_starts(segment, config)
    local = segment.repeats // stages
    count = num_microbatches(batch // where.size(where.rows), stages, stream.partial_BTD.shape[1])
    residual = config.residual_block_size is not None
    before = len(stream.snapshots)
    # The stage that completes each new snapshot, in their order.
    makers = [
        repeat // local
        for repeat in range(segment.repeats)
        for position in range(segment.period)
        if flags[position][repeat]
    ]
    held = [before + sum(maker < number for maker in makers) for number in range(stages)]

    def body(places, partial_BTD, snapshots, caches, starts_B, lengths_B, flags):
        stage = jax.lax.axis_index(STAGE)

        def tick(carry, time):
            received_BTD, new, caches = carry
            active = (time >= stage) & (time < stage + count)
            number = jnp.clip(time - stage, 0, count - 1)
            x_BTD = jnp.where(stage == 0, _pick(partial_BTD, 0, count, number), received_BTD)
            x_BTD = constrain(x_BTD, "batch", "token", None)
            here = Stream(x_BTD, (), None)
            if residual:
                old = [_pick(snapshot, 0, count, number)[None] for snapshot in snapshots]
                buffer = constrain(jnp.concatenate([*old, new]), None, "batch", "token", None)
                here = Stream(x_BTD, buffer, jnp.asarray(held, jnp.int32)[stage])
            lengths = jnp.where(active, _pick(lengths_B, 0, count, number), 0)
            valid_BT = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
            part = step._replace(
                starts_B=_pick(starts_B, 0, count, number), lengths_B=lengths, valid_BT=valid_BT
            )
            own = jax.tree.map(lambda x: _pick(x, 1, count, number), caches)
            here, own, collected = scan_layers(segment, places, here, own, part, flags)
            caches = jax.tree.map(lambda x, value: _put(x, 1, count, number, value), caches, own)
            made = here.snapshots[before:] if residual else new
            onward = [(sender, sender + 1) for sender in range(stages - 1)]
            received_BTD = jax.lax.ppermute(here.partial_BTD, STAGE, onward)
            sent = [
                jax.lax.ppermute(made[index], STAGE, onward[maker:])[None]
                for index, maker in enumerate(makers)
            ]
            new = jnp.concatenate(sent) if sent else made
            return (received_BTD, new, caches), (here.partial_BTD, made, collected)

        size = (batch // count, *partial_BTD.shape[1:])
        empty_BTD = constrain(jnp.zeros(size, partial_BTD.dtype), "batch", "token", None)
        new = jnp.zeros((len(makers), *size), partial_BTD.dtype)
        times = jnp.arange(count + stages - 1, dtype=jnp.int32)
        (_, _, caches), (partials, made, collected) = jax.lax.scan(tick, (empty_BTD, new, caches), times)

        def from_last(x: Array) -> Array:
            return jax.lax.psum(jnp.where(stage == stages - 1, x, jnp.zeros((), x.dtype)), STAGE)

        def whole(name: str, ticks: Array) -> Array:
            if name == "expert_load":
                return jnp.sum(
                    jax.lax.dynamic_slice_in_dim(ticks, stage, count, 0), axis=0, dtype=ticks.dtype
                )
            return _gather(ticks, 1, count, stage)

        return (
            from_last(_gather(partials, 0, count, stages - 1)),
            from_last(_gather(made, 1, count, stages - 1)) if makers else made[0],
            caches,
            [{name: whole(name, ticks) for name, ticks in layer.items()} for layer in collected],
        )

    partial_BTD, made, caches, collected = jax.shard_map(
        body,
        in_specs=(P(STAGE), P(), P(), P(STAGE), P(), P(), P(STAGE)),
        out_specs=(P(), P(), P(STAGE), P(STAGE)),
        axis_names={STAGE},
        check_vma=False,
    )(
        list(places),
        stream.partial_BTD,
        list(stream.snapshots),
        caches,
        step.starts_B,
        step.lengths_B,
        [jnp.asarray(flag, dtype=bool) if any(flag) else None for flag in flags],
    )
    snapshots = (*stream.snapshots, *(made[index] for index in range(len(makers))))
    return Stream(partial_BTD, snapshots, None), caches, by_layer(collected, segment)
