"""Expert parallelism: the routed experts of one layer over the devices that hold them.

Experts are divided over the mesh axes `expert` and `tensor`, folded; the devices along them, for one place on the other
axes, are a group that exchanges tokens. A token that several devices of the group hold belongs to one of them. It is
sent in the latent, once to every device that holds at least one of its experts; that device returns one weighted sum
of those experts' outputs; the token's owner adds the sums in float32 in the order of the devices, before the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from moe28t_jax.config import ModelConfig, MoEConfig
from moe28t_jax.parallel.expert_places import EXPERT_AXES, places
from moe28t_jax.parallel.experts_dispatch import SLACK, PlacementKind, Settings, choose_placement, run_rank
from moe28t_jax.parallel.experts_exchange import Group, Kind, exchange_kind
from moe28t_jax.parallel.rules import Layout, batch_layout

GROUP = EXPERT_AXES
"""Mesh axes of a group; its ranks are numbered along them, the last fastest, as the experts are."""


def tokens_of_ranks(batch: int, count: int, layout: Layout) -> tuple[int, int]:
    """How many of a call's tokens a rank of a group has room for at least, and how many all its ranks have together."""
    tokens = layout.token_axes(count)
    pieces = prod(layout.mesh.shape[axis] for axis in GROUP if axis not in (*layout.rows, *tokens))
    held = (batch // layout.size(layout.rows)) * (count // layout.size(tokens))
    return -(-held // pieces), held * (prod(layout.mesh.shape[axis] for axis in GROUP) // pieces)


def expert_parallel(
    x_BTL: Float[Array, "B T L"],
    chosen_BTK: Int[Array, "B T K"],
    weights_BTK: Float[Array, "B T K"],
    valid_BT: Bool[Array, "B T"],
    experts: Mapping[str, Any],
    config: ModelConfig,
    repeat: Int[Array, ""] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    meanwhile_BTF: Float[Array, "B T F"] | None = None,
    *,
    placement: PlacementKind | None = None,
    slack: float = SLACK,
    exchange: Kind | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T L"], Float[Array, "B T F"] | None]:
    """sum_k weight_k Expert_k(x) for every valid token, 0 for the others: `routed_experts` on many devices.

    Args:
      x_BTL: what the experts read, divided as `batch_layout` says; the last axis over `tensor` where there is a latent.
      chosen_BTK, weights_BTK: distinct experts of each token and their weights (float32, or float64).
      experts: `gate`, `up` and `down`, float arrays [(layers,) E, in, out] or `MXFP4Tensor`s, divided over `GROUP`.
      repeat: the layer, where the experts are stacked.
      mesh: what is sharded over; the current mesh if None.
      meanwhile_BTF: something else of these tokens, its last axis over `tensor`: the compiler computes it before the
        experts begin, hence while tokens are on their way.
      placement: "home" or "balanced" (experts repeated so that all ranks multiply equally many rows); None chooses by
        the number of tokens. slack: the part by which a rank may exceed its share of the rows in balance; 0 for none.
      exchange: "ragged" or "dense"; None chooses by the platform.
      implementation: of the grouped matmul, as there.

    Returns the sum in the dtype of `x_BTL`, divided as it is, and `meanwhile_BTF`. Differentiable in x, weights, float
    experts and `meanwhile_BTF`.

    Raises ValueError for experts that do not divide over the group.
    """
    moe = config.moe
    assert isinstance(moe, MoEConfig)
    layout = batch_layout(x_BTL.shape[0], mesh)
    if layout is None:
        raise ValueError(
            "There is no mesh to divide the experts over; pass one, or enter jax.set_mesh(mesh)."
        )
    shape = layout.mesh.shape
    ranks = prod(shape[axis] for axis in GROUP)
    if moe.slots % ranks:
        shown = " x ".join(f"{axis} {shape[axis]}" for axis in GROUP)
        raise ValueError(
            f"The {moe.slots} experts do not divide over the {ranks} devices of the mesh axes {shown}; take "
            f"sizes whose product divides {moe.slots}, or leave places empty with moe.expert_slots "
            f"{places(moe.num_experts, ranks)}."
        )
    rows, tokens = layout.rows, layout.token_axes(x_BTL.shape[1])
    # Axes of the group along which devices hold the same tokens, and divide them.
    shared = tuple(axis for axis in GROUP if axis not in (*rows, *tokens))
    pieces = prod(shape[axis] for axis in shared)
    width_axis = "tensor" if moe.latent_size is not None else None
    held = (x_BTL.shape[0] // layout.size(rows)) * (x_BTL.shape[1] // layout.size(tokens))
    owned, total = tokens_of_ranks(x_BTL.shape[0], x_BTL.shape[1], layout)
    settings = Settings(
        moe.slots,
        total,
        config.glu,
        placement or choose_placement(total, moe.num_experts_per_token, ranks, moe.slots),
        slack,
        implementation,
    )
    others = tuple(axis for axis in shape if axis not in GROUP and shape[axis] > 1)
    group = Group(GROUP, ranks, owned, exchange or exchange_kind(layout.mesh), others)

    def own_part(values: Array) -> Array:
        """This rank's tokens of those that its device holds, [n, ...], filled up with zeros."""
        values = jnp.pad(values, [(0, owned * pieces - held)] + [(0, 0)] * (values.ndim - 1))
        return lax.dynamic_slice_in_dim(values, lax.axis_index(shared) * owned, owned)

    def own_rows(x: Array) -> Array:
        """As `own_part`, gathering the width of the rank's tokens where it is divided."""
        if width_axis is None:
            return own_part(x)
        x = jnp.pad(x, ((0, owned * pieces - held), (0, 0)))
        outer = tuple(axis for axis in shared if axis != width_axis)
        part = owned * shape[width_axis]
        if outer:
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(outer) * part, part)
        return lax.all_to_all(x, width_axis, 0, 1, tiled=True)

    def all_rows(y: Array) -> Array:
        """The inverse of `own_rows`: what the device holds of all its tokens."""
        outer = shared
        if width_axis is not None:
            y = lax.all_to_all(y, width_axis, 1, 0, tiled=True)
            outer = tuple(axis for axis in shared if axis != width_axis)
        return (lax.all_gather(y, outer, tiled=True) if outer else y)[:held]

    def run(
        x: Array, chosen: Array, weights: Array, valid: Array, experts: Any, layer: Any, meanwhile: Any
    ) -> Any:
        flat = lambda a: a.reshape(held, *a.shape[2:])  # noqa: E731
        y, meanwhile = run_rank(
            own_rows(flat(x)),
            own_part(flat(chosen)),
            own_part(flat(weights)),
            own_part(flat(valid)),
            experts,
            layer,
            group,
            settings,
            meanwhile,
        )
        return all_rows(y).reshape(x.shape), meanwhile

    names = {name: experts[name] for name in ("gate", "up", "down")}
    stacks = jax.tree.map(lambda leaf: PartitionSpec(*[None] * (leaf.ndim - 3), GROUP), names)
    tokens_spec = PartitionSpec(rows, tokens)
    x_spec = PartitionSpec(rows, tokens, width_axis)
    meanwhile_spec = PartitionSpec(rows, tokens, "tensor")
    # Without a mesh it is the ambient one, of which a surrounding `shard_map` may have taken axes.
    where: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    with jax.named_scope("experts"):
        return jax.shard_map(
            run,
            **where,
            in_specs=(
                x_spec, tokens_spec, tokens_spec, tokens_spec, stacks, PartitionSpec(), meanwhile_spec,
            ),
            out_specs=(x_spec, meanwhile_spec),
            # The marks would have to be put on every loop of every kernel; the specifications above are checked by
            # equality with one device, gradients included.
            check_vma=False,
        )(x_BTL, chosen_BTK, weights_BTK, valid_BT, names, repeat, meanwhile_BTF)  # fmt: skip
