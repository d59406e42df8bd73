"""Meshes: which devices a deployment has, how the axes of a mesh divide them, and where arrays lie on them.

Mesh files are read, and configurations padded, without JAX; the other names are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe28t_jax.parallel.expert_places import config_on, pad_experts
from moe28t_jax.parallel.mesh_file import AXES, MeshFile, load_mesh_file, mesh_file_names

if TYPE_CHECKING:
    from moe28t_jax.parallel.mesh import check_mesh, current_mesh, make_mesh
    from moe28t_jax.parallel.rules import RULES, Layout, batch_layout, constrain, partition
    from moe28t_jax.parallel.sharding import (
        cache_shardings,
        input_shardings,
        parameter_shardings,
        place_parameters,
        shard_abstract,
    )

__all__ = [
    "AXES", "RULES", "Layout", "MeshFile", "batch_layout", "cache_shardings", "check_mesh", "config_on", "constrain",
    "current_mesh", "input_shardings", "load_mesh_file", "make_mesh", "mesh_file_names", "pad_experts",
    "parameter_shardings", "partition", "place_parameters", "shard_abstract",
]  # fmt: skip

_MODULES = {
    "mesh": ("check_mesh", "current_mesh", "make_mesh"),
    "rules": ("RULES", "Layout", "batch_layout", "constrain", "partition"),
    "sharding": (
        "cache_shardings", "input_shardings", "parameter_shardings", "place_parameters", "shard_abstract",
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
