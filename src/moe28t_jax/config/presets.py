"""Named configurations. A preset is the content of a public `config.json`, read like any other file."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

from moe28t_jax.config.huggingface import from_hf
from moe28t_jax.config.model_config import ModelConfig

PRESETS: tuple[str, ...] = ("moe28t", "kimi-k3.1-pro", "kimi-k3", "kimi-linear-48b-a3b", "nano")
"""Every name that `preset` takes; `kimi-k3.1-pro` is an alias of `moe28t`."""

_ALIASES = {"kimi-k3.1-pro": "moe28t"}


def preset(name: str) -> ModelConfig:
    """The configuration of a named model. Raises ValueError, listing the names, for any other."""
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}; the presets are {', '.join(PRESETS)}.")
    return _preset(_ALIASES.get(name, name))


@lru_cache
def _preset(name: str) -> ModelConfig:
    builders = {"moe28t": _moe28t, "nano": _nano}
    return from_hf(builders[name]() if name in builders else public_config(name), {})


def public_config(name: str) -> dict[str, Any]:
    """Content of a shipped public file: `kimi-k3` or `kimi-linear-48b-a3b`. Keys keep the file's order."""
    return json.loads((resources.files("moe28t_jax.config") / "public" / f"{name}.json").read_text("utf-8"))


def _moe28t() -> dict[str, Any]:
    """`kimi-k3` with an indexer in each of its full-attention layers."""
    document = public_config("kimi-k3")
    document["architectures"] = ["KimiK31ForConditionalGeneration"]
    document["model_type"] = "kimi_k31"
    text = document["text_config"]
    # The modules these name belong to `kimi_k3`.
    del document["auto_map"], text["auto_map"]
    text["dsa_config"] = {
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "layers": list(text["linear_attn_config"]["full_attn_layers"]),
    }
    return document


def _nano() -> dict[str, Any]:
    """A few million parameters with every feature of `moe28t`, small enough to train on a CPU."""
    ids = {"bos_token_id": 3840, "eos_token_id": 3842, "pad_token_id": 4095}
    quantization = public_config("kimi-k3")["text_config"]["quantization_config"]
    return {
        "architectures": ["KimiK31ForConditionalGeneration"],
        "model_type": "kimi_k31",
        "dtype": "bfloat16",
        **ids,
        "media_placeholder_token_id": 3861,
        "tie_word_embeddings": False,
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "dtype": "bfloat16",
            **ids,
            "vocab_size": 4096,
            "hidden_size": 128,
            "num_hidden_layers": 8,
            "intermediate_size": 384,
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.02,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
                "kda_layers": [1, 2, 3, 5, 6, 7],
                "full_attn_layers": [4, 8],
            },
            "dsa_config": {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 32, "layers": [4, 8]},
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "num_experts": 16,
            "num_experts_per_token": 4,
            "num_shared_experts": 2,
            "moe_intermediate_size": 96,
            "routed_expert_hidden_size": 64,
            "latent_moe_use_norm": True,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "routed_scaling_factor": 1.0,
            "topk_method": "noaux_tc",
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "quantization_config": quantization,
        },
        "vision_config": {
            "patch_size": 14,
            "vt_num_hidden_layers": 4,
            "vt_hidden_size": 96,
            "vt_intermediate_size": 256,
            "vt_num_attention_heads": 3,
            "qkv_hidden_size": 96,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "init_pos_emb_time": 4,
            "merge_kernel_size": [2, 2],
        },
    }
