"""Moving rows and expert weights among the ranks of one group: ragged where the backend can, dense elsewhere.

A group is the ranks along some mesh axes, folded in their order. All functions run inside `jax.shard_map`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from moe28t_jax.parallel.experts_rows import take_rows

Kind = Literal["ragged", "dense"]


def exchange_kind(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Kind:
    """ "ragged" for TPUs and GPUs, whose collective sends what there is; "dense" for CPUs, which have none."""
    if isinstance(mesh, jax.sharding.Mesh):
        platform = mesh.devices.flat[0].platform
    else:
        device = mesh.abstract_device
        platform = jax.default_backend() if device is None else device.platform
    return "dense" if platform == "cpu" else "ragged"


@dataclass(frozen=True)
class Group:
    """The ranks along `axes`. bound: the most rows that one rank sends to one other, which a dense exchange pads to.
    others: the axes along which there are other groups."""

    axes: tuple[str, ...]
    ranks: int
    bound: int
    kind: Kind
    others: tuple[str, ...] = ()

    def most(self, counts: Array) -> Array:
        """The largest of these integers in any group: how often devices meet must not depend on the group, since what
        the compiler puts beside an exchange may be for all devices."""
        return lax.pmax(counts, self.others) if self.others else counts


def move_rows(rows: Array, sizes_RR: Int[Array, "R R"], capacity: int, group: Group) -> Array:
    """Send rows to other ranks.

    rows: [A, ...], sorted by destination rank. sizes_RR: how many rows each rank (first axis) sends to each other; the
    same on every rank. Returns [capacity, ...]: the rows received, by source rank, then 0. Differentiable in `rows`:
    the transpose is the exchange back.

    Every rank must receive at most `capacity` rows and send at most `group.bound` to one other; what is beyond is
    lost or undefined.
    """
    return _move(rows, sizes_RR, capacity, rows.shape[0], group)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _move(rows: Array, sizes_RR: Array, capacity: int, back: int, group: Group) -> Array:
    me = lax.axis_index(group.axes)
    sent_R, received_R = sizes_RR[me], sizes_RR[:, me]
    if group.kind == "ragged":
        ours_RR = jnp.cumsum(sizes_RR, axis=0, dtype=jnp.int32) - sizes_RR
        return lax.ragged_all_to_all(
            rows,
            jnp.zeros((capacity, *rows.shape[1:]), rows.dtype),
            _exclusive_sum(sent_R),
            sent_R,
            ours_RR[me],
            received_R,
            axis_name=group.axes,
        )
    place_B = jnp.arange(group.bound, dtype=jnp.int32)
    index_RB = _exclusive_sum(sent_R)[:, None] + place_B
    index_RB = jnp.where(place_B < sent_R[:, None], index_RB, rows.shape[0])
    padded = take_rows(rows, index_RB.reshape(-1))
    arrived = lax.all_to_all(padded, group.axes, 0, 0, tiled=True)
    row_C = jnp.arange(capacity, dtype=jnp.int32)
    ends_R = jnp.cumsum(received_R, dtype=jnp.int32)
    source_C = jnp.searchsorted(ends_R, row_C, side="right", method="compare_all").astype(jnp.int32)
    within_C = row_C - (ends_R - received_R)[jnp.minimum(source_C, group.ranks - 1)]
    index_C = jnp.where(source_C < group.ranks, source_C * group.bound + within_C, arrived.shape[0])
    return take_rows(arrived, index_C)


def _move_forward(
    rows: Array, sizes_RR: Array, capacity: int, back: int, group: Group
) -> tuple[Array, Array]:
    return _move(rows, sizes_RR, capacity, back, group), sizes_RR


def _move_backward(
    capacity: int, back: int, group: Group, sizes_RR: Array, cotangent: Array
) -> tuple[Array, None]:
    return _move(cotangent, sizes_RR.T, back, capacity, group), None


_move.defvjp(_move_forward, _move_backward)


def fetch_experts(
    weights: Any,
    layer: Int[Array, ""] | None,
    donor_R: Int[Array, " R"],
    needed_RJ: Bool[Array, "R J"],
    group: Group,
    differentiable: bool,
) -> Any:
    """Copies of the donor's experts that a rank repeats.

    weights: tree of arrays [(layers,) J, ...], the J experts of this rank, with a leading layer axis if `layer` is
    given. needed_RJ: which experts of its donor each rank needs. Returns the tree with arrays [J, ...], undefined
    where not needed. Only what is needed travels in a ragged exchange, straight out of the
    stack. The gradient of a copy is added to that of the expert at its home, unless `differentiable` is False
    (packed weights).
    """
    index = jnp.zeros((), jnp.int32) if layer is None else layer.astype(jnp.int32)
    shape_of = lambda leaf: leaf.shape if layer is not None else (1, *leaf.shape)  # noqa: E731
    with jax.named_scope("fetch_experts"):
        return jax.tree.map(
            lambda leaf: _fetch(
                leaf.reshape(shape_of(leaf)), index, donor_R, needed_RJ, group, differentiable
            ),
            weights,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _fetch(
    stack: Array, layer: Array, donor_R: Array, needed_RJ: Array, group: Group, differentiable: bool
) -> Array:
    layers, experts, *shape = stack.shape
    me = lax.axis_index(group.axes)
    rank_R = jnp.arange(group.ranks, dtype=jnp.int32)
    sent_RJ = needed_RJ & (donor_R == me)[:, None]
    if group.kind == "ragged":
        expert_RJ = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32), needed_RJ.shape)
        received_RJ = needed_RJ[me] & (rank_R == donor_R[me])[:, None]
        return lax.ragged_all_to_all(
            stack.reshape(layers * experts, *shape),
            jnp.zeros((experts, *shape), stack.dtype),
            (layer * experts + expert_RJ).reshape(-1),
            sent_RJ.astype(jnp.int32).reshape(-1),
            expert_RJ.reshape(-1),
            received_RJ.astype(jnp.int32).reshape(-1),
            axis_name=group.axes,
        )
    held = lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    mask = sent_RJ.reshape(*sent_RJ.shape, *[1] * len(shape))
    arrived = lax.all_to_all(jnp.where(mask, held, jnp.zeros((), held.dtype)), group.axes, 0, 0, tiled=True)
    return lax.dynamic_index_in_dim(arrived, donor_R[me], keepdims=False)


def _fetch_forward(
    stack: Array, layer: Array, donor_R: Array, needed_RJ: Array, group: Group, differentiable: bool
) -> tuple[Array, Any]:
    fetched = _fetch(stack, layer, donor_R, needed_RJ, group, differentiable)
    # An array without elements carries the shape of the stack.
    return fetched, (jnp.zeros((*stack.shape, 0), jnp.int8), layer, donor_R, needed_RJ)


def _fetch_backward(group: Group, differentiable: bool, residuals: Any, cotangent: Array) -> tuple[Any, ...]:
    if not differentiable:
        return None, None, None, None
    like, layer, donor_R, needed_RJ = residuals
    wide = jnp.dtype(jnp.float64 if cotangent.dtype == jnp.float64 else jnp.float32)
    turn_JR = _turns(donor_R, needed_RJ)
    turns_J = group.most(jnp.max(jnp.where(needed_RJ.T, turn_JR + 1, 0), axis=1))
    _, returned = lax.scan(
        lambda _, each: (None, _return_expert(*each, donor_R, group, wide)),
        None,
        (cotangent, needed_RJ.T, turn_JR, turns_J),
    )
    whole = jnp.zeros(like.shape[:-1], cotangent.dtype)
    start = (layer, *[np.int32(0)] * returned.ndim)
    return lax.dynamic_update_slice(whole, returned.astype(cotangent.dtype)[None], start), None, None, None


def _turns(donor_R: Array, needed_RJ: Bool[Array, "R J"]) -> Int[Array, "J R"]:
    """Which of the copies of an expert a rank's is, in the order of the ranks that repeat it."""
    rank_R = jnp.arange(donor_R.shape[0], dtype=jnp.int32)
    earlier_RR = (donor_R[:, None] == donor_R[None, :]) & (rank_R[None, :] < rank_R[:, None])
    return jnp.sum(earlier_RR & needed_RJ.T[:, None, :], axis=2, dtype=jnp.int32)


def _return_expert(
    part: Array,
    needed_R: Bool[Array, " R"],
    turn_R: Int[Array, " R"],
    turns: Int[Array, ""],
    donor_R: Array,
    group: Group,
    dtype: Any,
) -> Array:
    """The sum, at their home, of the gradients of one expert's copies, in the order of the ranks that repeat it.

    A rank receives one copy per turn and there are as many turns as the most repeated expert has copies: mostly none,
    for which nothing is sent and nothing summed. Room for all copies at once would be that of every other rank.
    """
    me = lax.axis_index(group.axes)
    rank_R = jnp.arange(group.ranks, dtype=jnp.int32)

    def receive(state: tuple[Array, Array]) -> tuple[Array, Array]:
        turn, total = state
        now_R = needed_R & (turn_R == turn)
        sent_R = now_R[me] & (rank_R == donor_R[me])
        received_R = now_R & (donor_R == me)
        if group.kind == "ragged":
            first_R = jnp.zeros_like(rank_R)
            arrived = lax.ragged_all_to_all(
                part[None],
                jnp.zeros_like(part)[None],
                first_R,
                sent_R.astype(jnp.int32),
                first_R,
                received_R.astype(jnp.int32),
                axis_name=group.axes,
            )[0]
        else:
            mask = sent_R.reshape(-1, *[1] * part.ndim)
            parts = jnp.where(mask, part, jnp.zeros((), part.dtype))
            sender = jnp.argmax(received_R)
            arrived = lax.all_to_all(parts, group.axes, 0, 0, tiled=True)[sender]
        # Of no copy: zeros, or in a dense exchange what rank 0 did not send.
        return turn + 1, total + arrived.astype(dtype)

    start = (jnp.zeros_like(turns), jnp.zeros(part.shape, dtype))
    return lax.while_loop(lambda state: state[0] < turns, receive, start)[1]


_fetch.defvjp(_fetch_forward, _fetch_backward)


def _exclusive_sum(sizes: Array) -> Array:
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes
