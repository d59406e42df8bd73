"""The device mesh of a program: made from a mesh file, and found again while a program is traced.

A program runs sharded when it is called, lowered or traced inside `with jax.set_mesh(mesh):`. Functions of the network
ask `current_mesh` and take the mesh as it is there, so that their signatures are those of a single device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from moe28t_jax.parallel.mesh_file import AXES, MeshFile, load_mesh_file


def make_mesh(
    mesh_file: MeshFile | str | Path | Mapping[str, int], devices: Sequence[Any] | None = None
) -> Mesh:
    """The mesh of a deployment, with the axes `AXES` of type Auto.

    mesh_file: a mesh file, its name or path, or the sizes of some axes by name (the others have size 1).
    devices: what it is made of, `jax.devices()` unless given (those of a topology description for compiling ahead of
    time); more than the mesh needs may be there and stay idle. Neighbours on an axis are neighbours in the wiring where
    the devices tell it.

    Raises ValueError for an unknown axis, a size that is no positive whole number, and where there are fewer devices
    than the mesh needs.
    """
    if isinstance(mesh_file, Mapping):
        unknown = [axis for axis in mesh_file if axis not in AXES]
        if unknown:
            raise ValueError(f"A mesh has the axes {', '.join(AXES)}; {', '.join(unknown)} is none of them.")
        for axis, size in mesh_file.items():
            if type(size) is not int or size < 1:
                raise ValueError(
                    f"The mesh axis {axis} is {size!r}; it is a positive whole number of devices."
                )
        sizes = tuple(mesh_file.get(axis, 1) for axis in AXES)
    else:
        mesh_file = mesh_file if isinstance(mesh_file, MeshFile) else load_mesh_file(mesh_file)
        sizes = mesh_file.sizes
    found = list(jax.devices() if devices is None else devices)
    needed = prod(sizes)
    if needed > len(found):
        shown = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1)
        if isinstance(mesh_file, MeshFile) and mesh_file.kind != "cpu" and found[0].platform == "cpu":
            raise ValueError(
                f"The mesh {mesh_file.name} of {mesh_file.kind} chips needs {needed} devices and there are "
                f"{len(found)}, of a CPU; run it on such chips, or take the mesh cpu-8 to try a mesh here."
            )
        raise ValueError(
            f"The mesh {shown} needs {needed} devices and there are {len(found)}; take a smaller mesh, or on a host "
            f"without accelerators set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX starts."
        )
    used = found[:needed]
    if used[0].platform == "tpu":
        array = mesh_utils.create_device_mesh(sizes, used, allow_split_physical_axes=True)
    else:
        array = np.array(used).reshape(sizes)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def current_mesh() -> AbstractMesh | None:
    """The mesh that the program being traced is sharded over.

    None when there is no ambient mesh, when it lacks one of our axes, when all of them have size 1, and inside of
    `jax.shard_map` over them, where arrays are one device's own: then everything is as on a single device. Inside of a
    pipeline stage (`jax.shard_map` over `stage` alone) it is the mesh of the other axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(AXES) <= set(mesh.axis_names):
        return None
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    sizes = dict(mesh.shape)
    free = [axis for axis in AXES if axis != "stage" or types[axis] != AxisType.Manual]
    if all(sizes[axis] == 1 for axis in free) or any(types[axis] == AxisType.Manual for axis in free):
        return None
    return mesh


def same_on_all_stages(flag: jax.Array) -> jax.Array:
    """True where it is true in any pipeline stage: what decides about work that devices do together must be the same on
    all, and stages hold different rows. `flag` itself outside of a stage."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or "stage" not in mesh.axis_names:
        return flag
    if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))["stage"] != AxisType.Manual:
        return flag
    return jax.lax.pmax(flag.astype(jnp.int32), "stage") > 0


def check_mesh(mesh: Any) -> None:
    """Raise ValueError for what is no mesh, and for a mesh that the rules of this package do not apply to."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"The mesh is {mesh!r}; expected a jax.sharding.Mesh: moe28t_jax.parallel.make_mesh makes one from a mesh "
            "file or its name."
        )
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"The mesh has the axes {', '.join(map(str, mesh.axis_names)) or 'none'} and lacks {', '.join(missing)}; "
            "make one with moe28t_jax.parallel.make_mesh."
        )
    wrong = [
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if axis in AXES and kind != AxisType.Auto
    ]
    if wrong:
        raise ValueError(
            f"The mesh axes {', '.join(wrong)} are not of type Auto; make the mesh with moe28t_jax.parallel.make_mesh."
        )
