"""A mixture-of-experts family with delta attention and sparse attention, in JAX and Flax.

`load` opens a checkpoint, `ModelConfig` describes one, `forward` is the network. Names are imported on first use,
so that tools which need no accelerator library do not load one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe28t_jax.api import Model, load
    from moe28t_jax.config import ModelConfig
    from moe28t_jax.conversation import Generation, GenerationChunk, Usage
    from moe28t_jax.model import Cache, Inputs, Parameters, forward, init_cache
    from moe28t_jax.weights import CheckpointError, load_layer

_HOMES = {
    "Cache": "moe28t_jax.model",
    "CheckpointError": "moe28t_jax.weights",
    "Generation": "moe28t_jax.conversation",
    "GenerationChunk": "moe28t_jax.conversation",
    "Inputs": "moe28t_jax.model",
    "Model": "moe28t_jax.api",
    "ModelConfig": "moe28t_jax.config",
    "Parameters": "moe28t_jax.model",
    "Usage": "moe28t_jax.conversation",
    "forward": "moe28t_jax.model",
    "init_cache": "moe28t_jax.model",
    "load": "moe28t_jax.api",
    "load_layer": "moe28t_jax.weights",
}

__version__ = "0.1.0"
__all__ = [
    "Cache", "CheckpointError", "Generation", "GenerationChunk", "Inputs", "Model", "ModelConfig", "Parameters",
    "Usage", "forward", "init_cache", "load", "load_layer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in {"chat", "config", "model"}:
        return importlib.import_module(f"moe28t_jax.{name}")
    raise AttributeError(f"module 'moe28t_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
