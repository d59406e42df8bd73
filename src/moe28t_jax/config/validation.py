"""What a `ModelConfig` must satisfy. Each violation is one sentence: value, expectation, way out."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe28t_jax.config.model_config import ModelConfig

_BLOCK = 32
"""Values that share one scale in MXFP4."""


def validate(config: ModelConfig) -> None:
    """Raise ValueError at the first inconsistency, TypeError for layer kinds that are not a tuple."""
    _require_sizes("", config, ("vocab_size", "hidden_size", "intermediate_size", "max_context"))
    _require_positive("", config, ("rms_norm_eps", "initializer_range"))
    _check_layers(config)
    _check_attention(config)
    _check_moe(config)
    _check_vision(config)
    _check_rest(config)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require_sizes(section: str, owner: Any, names: tuple[str, ...], least: int = 1) -> None:
    for name in names:
        value = getattr(owner, name)
        if not _integer(value) or value < least:
            raise ValueError(f"{section}{name} is {value!r}; it must be an integer of at least {least}.")


def _require_positive(section: str, owner: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(owner, name)
        if not _number(value) or value <= 0:
            raise ValueError(f"{section}{name} is {value!r}; it must be a finite number greater than 0.")


def _require_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def _check_layers(config: ModelConfig) -> None:
    for name in ("attention_kinds", "mlp_kinds"):
        if not isinstance(getattr(config, name), tuple):
            raise TypeError(
                f"{name} is {getattr(config, name)!r}; it must be a tuple, so that the configuration hashes."
            )
    if not config.attention_kinds:
        raise ValueError(
            "attention_kinds is empty; the network needs at least one layer, one kind per layer."
        )
    if len(config.attention_kinds) != len(config.mlp_kinds):
        raise ValueError(
            f"attention_kinds has {len(config.attention_kinds)} entries and mlp_kinds has "
            f"{len(config.mlp_kinds)}; "
            "both need one entry per layer (override both at once to change the number of layers)."
        )
    for layer, (attention, mlp) in enumerate(zip(config.attention_kinds, config.mlp_kinds, strict=True)):
        _require_one_of(f"attention_kinds[{layer}]", attention, ("kda", "mla", "dsa"))
        _require_one_of(f"mlp_kinds[{layer}]", mlp, ("dense", "moe"))
    needs = {"kda": ("kda",), "mla": ("mla",), "dsa": ("mla", "dsa")}
    for layer, kind in enumerate(config.attention_kinds):
        for section in needs[kind]:
            if getattr(config, section) is None:
                raise ValueError(
                    f"Layer {layer} is {kind!r} but the section {section!r} is None; give its sizes."
                )
    if "moe" in config.mlp_kinds and config.moe is None:
        layer = config.mlp_kinds.index("moe")
        raise ValueError(f"Layer {layer} is 'moe' but the section 'moe' is None; give its sizes.")
    if config.residual_block_size is not None:
        _require_sizes("", config, ("residual_block_size",))


def _check_attention(config: ModelConfig) -> None:
    kda, mla, dsa = config.kda, config.mla, config.dsa
    if kda is not None:
        _require_sizes("kda.", kda, ("num_heads", "head_dim", "conv_size"))
        bound = kda.gate_lower_bound
        if bound is not None and (not _number(bound) or bound >= 0):
            raise ValueError(
                f"kda.gate_lower_bound is {bound!r}; it bounds a log decay, so it must be below 0, "
                "or None for the softplus form of the gate."
            )
    if mla is not None:
        _require_sizes(
            "mla.", mla, ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        _require_positive("mla.", mla, ("latent_eps",))
        if mla.q_lora_rank is not None:
            _require_sizes("mla.", mla, ("q_lora_rank",))
    if dsa is not None:
        _require_sizes("dsa.", dsa, ("num_heads", "head_dim", "top_k"))
        _require_positive("dsa.", dsa, ("key_norm_eps",))
        _require_one_of("dsa.key_norm", dsa.key_norm, ("layernorm", "rmsnorm"))
        if mla is None or mla.q_lora_rank is None:
            raise ValueError(
                "mla.q_lora_rank is None and the configuration has sparse attention; index queries are "
                "computed from the query latent, so give mla.q_lora_rank or remove the section 'dsa'."
            )


def _check_moe(config: ModelConfig) -> None:
    _require_one_of("expert_quantization", config.expert_quantization, (None, "mxfp4"))
    moe = config.moe
    if moe is None:
        if config.expert_quantization is not None:
            raise ValueError("expert_quantization is 'mxfp4' but the section 'moe' is None; set it to None.")
        return
    _require_sizes("moe.", moe, ("num_experts", "num_experts_per_token", "intermediate_size"))
    _require_sizes("moe.", moe, ("num_shared_experts",), least=0)
    _require_positive("moe.", moe, ("routed_scaling_factor",))
    if moe.num_experts_per_token > moe.num_experts:
        raise ValueError(
            f"moe.num_experts_per_token is {moe.num_experts_per_token}; it must not exceed "
            f"moe.num_experts, {moe.num_experts}."
        )
    if moe.expert_slots is not None:
        _require_sizes("moe.", moe, ("expert_slots",))
        if moe.expert_slots < moe.num_experts:
            raise ValueError(
                f"moe.expert_slots is {moe.expert_slots}; the {moe.num_experts} experts (moe.num_experts) need "
                "at least as many places."
            )
    if moe.latent_size is not None:
        _require_sizes("moe.", moe, ("latent_size",))
    elif moe.latent_norm:
        raise ValueError(
            "moe.latent_norm is True but moe.latent_size is None; give the latent size or drop its norm."
        )
    if config.expert_quantization == "mxfp4":
        width = (
            ("moe.latent_size", moe.latent_size) if moe.latent_size else ("hidden_size", config.hidden_size)
        )
        for name, size in (width, ("moe.intermediate_size", moe.intermediate_size)):
            if size % _BLOCK:
                raise ValueError(
                    f"{name} is {size}; experts stored as MXFP4 need inputs divisible by {_BLOCK} "
                    "(set expert_quantization to None to store them unquantised)."
                )


def _check_vision(config: ModelConfig) -> None:
    vision = config.vision
    if vision is None:
        return
    _require_sizes(
        "vision.",
        vision,
        (
            "patch_size",
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "qkv_size",
            "position_height",
            "position_width",
            "position_time",
            "merge_height",
            "merge_width",
        ),
    )
    _require_positive("vision.", vision, ("projector_eps", "norm_eps"))
    if vision.qkv_size % vision.num_heads:
        raise ValueError(
            f"vision.qkv_size is {vision.qkv_size}; it must be divisible by vision.num_heads, "
            f"{vision.num_heads}."
        )


def _check_rest(config: ModelConfig) -> None:
    _require_one_of("activation", config.activation, ("situ", "silu"))
    for name in ("situ_beta", "situ_linear_beta"):
        if getattr(config, name) is not None:
            _require_positive("", config, (name,))
    for name in ("bos_id", "eos_id", "pad_id", "media_pad_id"):
        value = getattr(config, name)
        if value is not None and (not _integer(value) or not 0 <= value < config.vocab_size):
            raise ValueError(
                f"{name} is {value!r}; it must be a token id from 0 to {config.vocab_size - 1} "
                f"(vocab_size is {config.vocab_size}), or None."
            )
    for name in ("model_type", "checkpoint_prefix"):
        if not isinstance(getattr(config, name), str):
            raise ValueError(f"{name} is {getattr(config, name)!r}; it must be text.")
    try:
        extra = json.loads(config.extra)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra must be the JSON text of an object; it does not parse: {error}.") from None
    if not isinstance(extra, dict):
        raise ValueError(f"extra must be the JSON text of an object; it holds {extra!r}.")
