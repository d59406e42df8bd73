"""Exact parameter, tensor and byte counts, from the parameter declaration."""

from __future__ import annotations

from dataclasses import dataclass

from moe28t_jax.config.declaration import Parameter, declare
from moe28t_jax.config.model_config import ModelConfig


@dataclass(frozen=True)
class LayerCount:
    """Counts of one layer (counted from 0): parameters, those one token touches, and bytes as stored."""

    layer: int
    attention: str
    mlp: str
    total: int
    active: int
    stored_bytes: int


@dataclass(frozen=True)
class ParameterCount:
    """Counts of a whole configuration.

    total: every parameter as stored (a padded A_log counts with its padding), vision included.
    active: text parameters that one token touches: its routed experts, everything else, and the output head,
        without the embedding table and without vision.
    by_group: parameters by kind; the values sum to `total`.
    stored_tensors, stored_bytes: of the public checkpoint layout; an MXFP4 matrix is two tensors (codes and
        scales) and 17 bytes per 32 parameters.
    layers: the same by layer.
    """

    total: int
    active: int
    by_group: dict[str, int]
    stored_tensors: int
    stored_bytes: int
    layers: tuple[LayerCount, ...]


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count a configuration without building anything; empty places for experts count nothing."""
    if config.moe is not None:
        config = config.override({"moe.expert_slots": None})
    by_group: dict[str, int] = {}
    total = active = tensors = stored = 0
    layer_total = [0] * config.num_layers
    layer_active = [0] * config.num_layers
    layer_stored = [0] * config.num_layers
    for declared in declare(config):
        parameter, layer = declared.parameter, declared.layer
        packed = parameter.quantizable and config.expert_quantization == "mxfp4"
        touched, size_bytes = _active(parameter, config), _stored_bytes(parameter, packed)
        by_group[parameter.group] = by_group.get(parameter.group, 0) + parameter.size
        total += parameter.size
        active += touched
        tensors += parameter.num_stored * (2 if packed else 1)
        stored += size_bytes
        if layer is not None:
            layer_total[layer] += parameter.size
            layer_active[layer] += touched
            layer_stored[layer] += size_bytes
    layers = tuple(
        LayerCount(
            layer,
            config.attention_kinds[layer],
            config.mlp_kinds[layer],
            layer_total[layer],
            layer_active[layer],
            layer_stored[layer],
        )
        for layer in range(config.num_layers)
    )
    return ParameterCount(total, active, by_group, tensors, stored, layers)


def _active(parameter: Parameter, config: ModelConfig) -> int:
    if parameter.group in ("embedding", "vision", "projector"):
        return 0
    if parameter.group == "routed_experts":
        assert config.moe is not None
        return parameter.size // config.moe.num_experts * config.moe.num_experts_per_token
    return parameter.size


def _stored_bytes(parameter: Parameter, packed: bool) -> int:
    if packed:
        # 32 codes of half a byte and one scale byte; sizes divisible by 32 are validated.
        return parameter.size // 32 * 17
    return parameter.size * (4 if parameter.dtype == "float32" else 2)
