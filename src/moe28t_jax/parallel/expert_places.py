"""Where experts lie: the mesh axes over which they are divided, and empty places where a mesh does not divide them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from moe28t_jax.config import ModelConfig, MoEConfig
from moe28t_jax.parallel.mesh_file import MeshFile

EXPERT_AXES: tuple[str, ...] = ("expert", "tensor")
"""Mesh axes of a group of devices that holds all experts, the slowest first."""


def places(num_experts: int, ranks: int) -> int:
    """The least number of places for experts that `ranks` devices divide."""
    return -(-num_experts // ranks) * ranks


def pad_experts(config: ModelConfig, axes: Mapping[str, int]) -> ModelConfig:
    """The configuration with as many places for experts (`moe.expert_slots`) as a mesh of these axis sizes divides.

    The 896 experts of `moe28t` over 256 devices take 1,024 places, four on a device, of which the last 32 devices hold
    none that is filled. It is the same model: empty places hold zeros, no token goes there, and checkpoints in the
    public layout do not have them. A configuration whose experts the mesh divides is returned as it is.
    """
    if config.moe is None:
        return config
    needed = places(config.moe.num_experts, prod(axes[axis] for axis in EXPERT_AXES))
    return config.override({"moe.expert_slots": None if needed == config.moe.num_experts else needed})


def destinations(ranks: int, moe: MoEConfig) -> float:
    """To how many other devices a token goes on average, when it chooses its experts evenly; devices of which all
    places are empty get none."""
    holders = -(-moe.num_experts // -(-moe.slots // ranks))
    return (holders - holders / ranks) * (1.0 - (1.0 - 1.0 / holders) ** moe.num_experts_per_token)


def config_on(mesh: MeshFile, config: ModelConfig) -> ModelConfig:
    """The configuration as a deployment holds it: padded (`pad_experts`) where the mesh file says so."""
    return pad_experts(config, mesh.axes) if mesh.pad_experts else config


def unpadded(config: ModelConfig) -> ModelConfig:
    """The configuration without empty places for experts."""
    return config if config.moe is None else config.override({"moe.expert_slots": None})
