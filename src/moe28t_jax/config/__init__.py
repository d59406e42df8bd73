"""Configuration: `ModelConfig`, presets, the public `config.json`, the parameter declaration and counts."""

from moe28t_jax.config.counts import LayerCount, ParameterCount, count_parameters
from moe28t_jax.config.declaration import (
    Declared,
    Parameter,
    declare,
    declare_globals,
    declare_layer,
    declare_vision,
)
from moe28t_jax.config.model_config import (
    AttentionKind,
    DSAConfig,
    KDAConfig,
    MLAConfig,
    MlpKind,
    ModelConfig,
    MoEConfig,
    VisionConfig,
)
from moe28t_jax.config.presets import PRESETS
from moe28t_jax.config.segments import Segment, segments
from moe28t_jax.config.shipped import shipped_folder
from moe28t_jax.config.slices import slice_config

__all__ = [
    "PRESETS",
    "AttentionKind",
    "DSAConfig",
    "Declared",
    "KDAConfig",
    "LayerCount",
    "MLAConfig",
    "MlpKind",
    "MoEConfig",
    "ModelConfig",
    "Parameter",
    "ParameterCount",
    "Segment",
    "VisionConfig",
    "count_parameters",
    "declare",
    "declare_globals",
    "declare_layer",
    "declare_vision",
    "segments",
    "shipped_folder",
    "slice_config",
]
