"""Checkpoints in the public layout: reading, writing, converting."""

from moe28t_jax.weights.checkpoint import Checkpoint, TensorInfo, describe
from moe28t_jax.weights.checksums import write_checksums
from moe28t_jax.weights.convert import convert
from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.fake import fake_checkpoint, slice_config
from moe28t_jax.weights.layer import load_layer
from moe28t_jax.weights.load import load_parameters
from moe28t_jax.weights.orbax import is_orbax, save_orbax
from moe28t_jax.weights.orbax_convert import convert_to_orbax, export_orbax
from moe28t_jax.weights.orbax_restore import load_orbax, load_orbax_layer
from moe28t_jax.weights.quantize import quantize_experts
from moe28t_jax.weights.save import declared_values, save_parameters
from moe28t_jax.weights.stream import LoadReport, stream_parameters

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LoadReport",
    "TensorInfo",
    "convert",
    "convert_to_orbax",
    "declared_values",
    "describe",
    "export_orbax",
    "fake_checkpoint",
    "is_orbax",
    "load_layer",
    "load_orbax",
    "load_orbax_layer",
    "load_parameters",
    "quantize_experts",
    "save_orbax",
    "save_parameters",
    "slice_config",
    "stream_parameters",
    "write_checksums",
]
