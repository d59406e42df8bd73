"""One table from logical axes to mesh axes, and what follows from it for any array."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from moe28t_jax.parallel.expert_places import EXPERT_AXES, places
from moe28t_jax.parallel.mesh import current_mesh

RULES: Mapping[str, tuple[str, ...]] = {
    # Weights. The first axes of the image tower and the hidden size are in every product whole.
    "expert": EXPERT_AXES,
    "kda_heads": ("tensor",),
    "mla_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "latent": ("tensor",),
    "embed": (),
    "expert_in": (),
    "expert_mlp": (),
    "vision": (),
    "vision_heads": (),
    "vision_mlp": (),
    # Layers that are stacked, of weights and of caches.
    "layer": ("stage",),
    # Activations and caches; `Layout` decides what `expert` carries.
    "batch": ("data", "expert"),
    "token": ("context",),
    # In training, what is kept between layers: whole tokens, fewer on each device.
    "stream_token": ("context", "tensor"),
}
"""Mesh axes over which a logical axis is divided, the slowest first; over every other mesh axis an array is repeated.

The planner's table of divisions says the same of the weights.
"""


@dataclass(frozen=True)
class Layout:
    """How the rows of a batch and their tokens lie on a mesh.

    rows: mesh axes that divide the batch. tokens: mesh axes that divide the positions of a cache, and the tokens of a
    call where they are enough; `expert` is in one of the two.
    """

    mesh: Any
    rows: tuple[str, ...]
    tokens: tuple[str, ...]

    def size(self, axes: str | Sequence[str]) -> int:
        """Number of devices along one or several mesh axes."""
        return prod(self.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def token_axes(self, count: int, least: int = 1) -> tuple[str, ...]:
        """Mesh axes that divide `count` new tokens: all of `tokens`, or none where a device would hold a part of a
        token or fewer than `least`."""
        pieces = self.size(self.tokens)
        return self.tokens if pieces > 1 and count % pieces == 0 and count // pieces >= least else ()


def batch_layout(batch: int, mesh: Any = None) -> Layout | None:
    """The layout of a batch on a mesh (the current one unless given); None without a mesh.

    `expert` carries rows where `data` x `expert` divides them, otherwise tokens of long rows; rows that `data` does not
    divide are repeated over it.
    """
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        return None
    shape = mesh.shape
    if batch % (shape["data"] * shape["expert"]) == 0:
        return Layout(mesh, RULES["batch"], RULES["token"])
    rows = ("data",) if batch % shape["data"] == 0 else ()
    return Layout(mesh, rows, ("expert", *RULES["token"]))


def partition(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Any,
    name: str = "array",
    layout: Layout | None = None,
) -> PartitionSpec:
    """The partition of an array with these logical axes.

    Raises ValueError for a logical axis without a rule, for two that claim one mesh axis, and for a size that the mesh
    axes do not divide (a head, an expert or a matrix row would be torn).
    """
    if len(axes) != len(shape):
        raise ValueError(f"{name} has shape {tuple(shape)} and the {len(axes)} logical axes {tuple(axes)}.")
    owner: dict[str, str] = {}
    entries: list[Any] = []
    for logical, size in zip(axes, shape, strict=True):
        if logical is None:
            entries.append(None)
            continue
        if logical not in RULES:
            raise ValueError(
                f"{name} has the logical axis {logical!r}, for which there is no rule; known are {', '.join(RULES)}."
            )
        mesh_axes = RULES[logical]
        if layout is not None:
            by_layout = {
                "batch": layout.rows,
                "token": layout.tokens,
                "stream_token": (*layout.tokens, "tensor"),
            }
            mesh_axes = by_layout.get(logical, mesh_axes)
        mesh_axes = tuple(axis for axis in mesh_axes if mesh.shape[axis] > 1)
        for axis in mesh_axes:
            if axis in owner:
                raise ValueError(
                    f"{name}: the logical axes {owner[axis]!r} and {logical!r} both claim the mesh axis {axis!r}; give "
                    "one of them another rule."
                )
            owner[axis] = logical
        pieces = prod(mesh.shape[axis] for axis in mesh_axes)
        if size % pieces:
            shown = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in mesh_axes)
            padded = f" Or leave places empty: moe.expert_slots {places(size, pieces)}."
            raise ValueError(
                f"{name} has {size} along {logical!r}, which the mesh axes {shown} do not divide; take another size "
                f"for them.{padded if logical == 'expert' else ''}"
            )
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, laid out by the rules where a program is sharded; `x` itself otherwise.

    axes: one logical axis (or None: whole) per dimension. The dimension called `batch` decides what `expert` carries;
    where a call's `token`s are too few to be divided they are whole, and its `stream_token`s divided as `token`s are.
    """
    mesh = current_mesh()
    if mesh is None:
        return x
    where = None
    if "batch" in axes:
        where = batch_layout(x.shape[axes.index("batch")], mesh)
        assert where is not None
        axes = tuple(_divided(axis, size, where) for axis, size in zip(axes, x.shape, strict=True))
    spec = partition(axes, x.shape, mesh, layout=where)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _divided(axis: str | None, count: int, where: Layout) -> str | None:
    """The logical axis of `count` tokens that a mesh can divide."""
    if axis == "stream_token" and count % where.size((*where.tokens, "tensor")):
        axis = "token"
    return None if axis == "token" and not where.token_axes(count) else axis


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def redistribute(x: jax.Array, axes: tuple[str | None, ...], before: tuple[str | None, ...]) -> jax.Array:
    """`constrain` to `axes` of what was made as `before`; its gradient goes back so. With one constraint for both, the
    compiler may divide the products before it in the backward pass as what lies behind it, and gather weights."""
    return constrain(x, *axes)


def _redistribute_forward(
    x: jax.Array, axes: tuple[str | None, ...], before: tuple[str | None, ...]
) -> tuple[jax.Array, None]:
    return constrain(x, *axes), None


def _redistribute_backward(
    axes: tuple[str | None, ...], before: tuple[str | None, ...], _: None, slope: jax.Array
) -> tuple[jax.Array]:
    return (constrain(slope, *before),)


redistribute.defvjp(_redistribute_forward, _redistribute_backward)
