"""The engine's steps as programs for a deployment: lowered from shapes alone, with the shardings of the rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from moe28t_jax.config import ModelConfig
from moe28t_jax.engine.steps import Steps
from moe28t_jax.model.cache import init_cache
from moe28t_jax.model.parameters import abstract
from moe28t_jax.parallel.expert_places import config_on
from moe28t_jax.parallel.formats import expert_layout, mesh_layout
from moe28t_jax.parallel.mesh import make_mesh
from moe28t_jax.parallel.mesh_file import MeshFile
from moe28t_jax.parallel.sharding import (
    cache_shardings,
    parameter_shardings,
    replicated,
    shard_abstract,
)
from moe28t_jax.planning.compile.topology import TPU_KINDS, describe_devices, implementations
from moe28t_jax.planning.compile.weights import Weight
from moe28t_jax.planning.memory import PHASES
from moe28t_jax.planning.plan import CHUNK
from moe28t_jax.training.step import Batch, TrainStep, adamw
from pallas_kernels import prefer

LANES = 128
"""Channels of a cache come in multiples of it on TPUs."""


@dataclass(frozen=True)
class Program:
    """A lowered step. weights: by the names that its arguments have in the compiled text; none in training, which makes
    copies of all. argument_bytes: of one device, by what they are: `experts`, `dense`, `embedding`, `state`, `latents`,
    `index_keys`, and in training `moments`."""

    lowered: jax.stages.Lowered
    weights: dict[str, Weight]
    argument_bytes: dict[str, int]


def lower_step(
    config: ModelConfig,
    mesh_file: MeshFile,
    phase: str,
    batch: int,
    context: int,
    chunk: int = CHUNK,
    explicit: bool = True,
    devices: Any = None,
) -> Program:
    """Lower one step of `moe28t_jax.engine`, or of training, for a deployment.

    phase: `decode`, one token for each of `batch` rows with caches of `context` tokens; `prefill`, `chunk` tokens of
    each; `train`, `moe28t_jax.training.step.TrainStep` with AdamW and float32 masters on `batch` rows of `context`
    tokens. explicit: with the kernels of the chip and the explicit exchanges of experts and context; otherwise
    everything is left to the compiler's own partitioning, which can divide no kernel.
    devices: to compile for; those of the mesh file's topology unless given.

    Raises ValueError where the mesh does not divide the model, and for another phase.
    """
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}; a step to compile is one of {', '.join(PHASES)}.")
    if not 1 <= context <= config.max_context:
        raise ValueError(f"context is {context}; this model reads 1 to {config.max_context} tokens per row.")
    config = config_on(mesh_file, config)
    mesh = make_mesh(mesh_file, describe_devices(mesh_file) if devices is None else devices)
    if phase == "train":
        with prefer(*(implementations(mesh_file) if explicit else ())):
            return _lower_training(config, mesh, batch, context)
    # As `moe28t_jax.load` lays them over such devices.
    _, stacked = mesh_layout(mesh)
    parameters = abstract(
        config, jnp.bfloat16, stacked=stacked, layout=expert_layout(mesh_file.kind), vision=False
    )
    parameters = shard_abstract(parameters, parameter_shardings(parameters, config, mesh))
    # What the engine takes on the deployment's own devices.
    channels = LANES if mesh_file.kind in TPU_KINDS else 1
    cache = jax.eval_shape(lambda: init_cache(config, batch, context, jnp.bfloat16, stacked, channels))
    cache = shard_abstract(cache, cache_shardings(cache, mesh))
    steps = Steps(parameters, config, mesh=mesh if explicit else None)

    with prefer(*(implementations(mesh_file) if explicit else ())):
        if phase == "decode":
            # Tokens come from the step before; the engine passes the others from the host, and a program for placed
            # ones is another one.
            key = jax.eval_shape(lambda: jax.random.key(0))
            active = jax.ShapeDtypeStruct((batch,), jnp.bool_)
            scalar = jax.ShapeDtypeStruct((), jnp.float32)
            tokens = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=replicated(mesh))
            lowered = steps.lower_decode(tokens, active, cache, key, scalar, scalar)
        else:
            count = min(chunk, context)
            ids = jax.ShapeDtypeStruct((batch, count), jnp.int32)
            lowered = steps.lower_forward(ids, jax.ShapeDtypeStruct((batch,), jnp.int32), cache)
    return Program(
        lowered,
        _weights(parameters),
        _argument_bytes(parameters) | _argument_bytes(cache),
    )


def _lower_training(config: ModelConfig, mesh: jax.sharding.Mesh, batch: int, length: int) -> Program:
    masters = abstract(replace(config, expert_quantization=None), jnp.float32, stacked=True, vision=False)
    step = TrainStep(masters, config, adamw(1e-4), mesh=mesh)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    weights = jax.ShapeDtypeStruct((batch, length), jnp.float32)
    lowered = step.lower(Batch(ids, ids, weights, jax.ShapeDtypeStruct((batch,), jnp.int32)))
    state = step.abstract_state()
    held = _argument_bytes(step.parameters(state))
    held["moments"] = sum(_argument_bytes(state.optimizer).values())
    return Program(lowered, {}, held)


def _keys(path: tuple[Any, ...]) -> list[str]:
    return [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]


def _weights(parameters: Any) -> dict[str, Weight]:
    found = {}
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(parameters)):
        keys = [key for key in _keys(path) if key != "value"]
        # Scales are a sixteenth of the codes and are no unpacked weights when they become floats.
        packed = keys[-1] == "packed" and jnp.dtype(leaf.dtype).name in ("uint8", "float4_e2m1fn")
        found[f"leaves[{index}]"] = Weight(".".join(keys), "experts" in keys, packed)
    return found


_PARTS = {
    "embedding": "embedding", "state_BHKV": "state", "window_BWC": "state", "latent_BSC": "latents",
    "index_key_BSD": "index_keys", "lengths_B": "state",
}  # fmt: skip


def _argument_bytes(tree: Any) -> dict[str, int]:
    """Bytes that one device holds of a tree of parameters or a cache."""
    found: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = _keys(path)
        part = (
            "experts" if "experts" in keys else next((_PARTS[key] for key in keys if key in _PARTS), "dense")
        )
        elements = prod(leaf.sharding.shard_shape(leaf.shape))
        # A 4-bit element says that it takes a byte.
        four_bits = jnp.dtype(leaf.dtype).name == "float4_e2m1fn"
        found[part] = found.get(part, 0) + (elements // 2 if four_bits else elements * leaf.dtype.itemsize)
    return found
