"""A smaller model of the same kind."""

from __future__ import annotations

from moe28t_jax.config.model_config import ModelConfig


def slice_config(config: ModelConfig, layers: int | None = None, experts: int | None = None) -> ModelConfig:
    """The first `layers` layers of a configuration, with `experts` routed experts in each.

    Raises ValueError for more than there are, or fewer experts than a token uses.
    """
    changes: dict[str, object] = {}
    if layers is not None:
        if not 1 <= layers <= config.num_layers:
            raise ValueError(f"layers is {layers}; this configuration has 1 to {config.num_layers}.")
        changes["attention_kinds"] = config.attention_kinds[:layers]
        changes["mlp_kinds"] = config.mlp_kinds[:layers]
    if experts is not None:
        if config.moe is None:
            raise ValueError(
                f"experts is {experts}, but this configuration has no routed experts; leave it out."
            )
        fewest, most = config.moe.num_experts_per_token, config.moe.num_experts
        if not fewest <= experts <= most:
            raise ValueError(
                f"experts is {experts}; a token uses {fewest} and this configuration has {most}: give a number between."
            )
        changes |= {"moe.num_experts": experts, "moe.expert_slots": None}
    return config.override(changes)
