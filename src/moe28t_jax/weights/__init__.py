"""Checkpoints in the public layout: reading, writing, converting."""

from moe28t_jax.weights.checkpoint import Checkpoint, TensorInfo, describe
from moe28t_jax.weights.convert import convert
from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.layer import load_layer
from moe28t_jax.weights.load import load_parameters
from moe28t_jax.weights.quantize import quantize_experts
from moe28t_jax.weights.save import declared_values, save_parameters

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "TensorInfo",
    "convert",
    "declared_values",
    "describe",
    "load_layer",
    "load_parameters",
    "quantize_experts",
    "save_parameters",
]
