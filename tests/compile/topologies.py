"""Compiles for TPUs that are not there: the real compiler, given the description of a chip."""

import os
from collections.abc import Callable
from typing import Any

# Read when the compiler is first loaded: no metadata server to ask, and no lock on a device that is not there.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

CHIPS = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def compile_for_tpu(
    chip: str, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """`function` of arrays like `arguments` (trees of `jax.ShapeDtypeStruct`), compiled for one device of `chip`.

    Raises whatever the compiler raises, and if there is no compiler: a test that needs it fails without it.
    """
    topology = topologies.get_topology_desc(CHIPS[chip], "tpu")
    mesh = Mesh(np.array(topology.devices[:1]), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return jax.jit(function, donate_argnums=donate).lower(*placed).compile()


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory beyond arguments and results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
