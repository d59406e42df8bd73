"""Tables that relate the public `config.json` to `ModelConfig`: names, defaults, and what must stay neutral.

Sizes of the network have no default: a file without them is an error that names the field. Every other
default is the one of the public configuration classes, except where those invent what the network does not
have (a rotary base, a head size, a padding id): such defaults are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

REQUIRED: Any = object()
"""Default of a field that a file has to name."""

Block = Literal["text", "linear_attn_config", "dsa_config", "vision_config"]


@dataclass(frozen=True)
class PublicField:
    """One field of `ModelConfig` (dotted) and the keys of one block of the file it may be found under.

    A null value reads as None where `nullable`, else as if the key were absent. `own` marks a key that only
    this project writes, because the public file has no field for the value; it is written where it is not the
    default.
    """

    name: str
    block: Block
    keys: tuple[str, ...]
    kind: type
    default: Any = REQUIRED
    nullable: bool = False
    own: bool = False


# Other spellings of a key follow the public one: some ports rename these fields when they save.
FIELDS: tuple[PublicField, ...] = (
    PublicField("vocab_size", "text", ("vocab_size",), int),
    PublicField("hidden_size", "text", ("hidden_size",), int),
    PublicField("intermediate_size", "text", ("intermediate_size",), int),
    PublicField("rms_norm_eps", "text", ("rms_norm_eps",), float, 1e-6),
    PublicField("residual_block_size", "text", ("attn_res_block_size",), int, None, nullable=True),
    PublicField("activation", "text", ("hidden_act",), str, "silu"),
    # A beta of 0 or null switches that bound off (None).
    PublicField("situ_beta", "text", ("activation_situ_beta",), float, 4.0, nullable=True),
    PublicField("situ_linear_beta", "text", ("activation_situ_linear_beta",), float, 25.0, nullable=True),
    PublicField("initializer_range", "text", ("initializer_range",), float, 0.02),
    PublicField("max_context", "text", ("max_position_embeddings", "model_max_length"), int, 1_048_576),
    PublicField("mla.num_heads", "text", ("num_attention_heads",), int),
    PublicField("mla.q_lora_rank", "text", ("q_lora_rank",), int, None, nullable=True),
    PublicField("mla.kv_lora_rank", "text", ("kv_lora_rank",), int),
    PublicField("mla.qk_nope_head_dim", "text", ("qk_nope_head_dim",), int),
    PublicField("mla.qk_rope_head_dim", "text", ("qk_rope_head_dim",), int),
    PublicField("mla.v_head_dim", "text", ("v_head_dim",), int),
    PublicField("mla.output_gate", "text", ("mla_use_output_gate",), bool, False),
    # The reference builds the latent norms with the eps of the norm class, not with rms_norm_eps.
    PublicField("mla.latent_eps", "text", ("latent_norm_eps",), float, 1e-6, own=True),
    PublicField("moe.num_experts", "text", ("num_experts", "n_routed_experts"), int),
    PublicField("moe.num_experts_per_token", "text", ("num_experts_per_token", "num_experts_per_tok"), int),
    PublicField("moe.num_shared_experts", "text", ("num_shared_experts", "n_shared_experts"), int, 0),
    PublicField("moe.intermediate_size", "text", ("moe_intermediate_size",), int),
    PublicField("moe.renormalize", "text", ("moe_renormalize", "norm_topk_prob"), bool, True),
    PublicField("moe.routed_scaling_factor", "text", ("routed_scaling_factor",), float, 1.0),
    PublicField("moe.latent_size", "text", ("routed_expert_hidden_size",), int, None, nullable=True),
    PublicField("moe.latent_norm", "text", ("latent_moe_use_norm",), bool, False),
    PublicField("kda.num_heads", "linear_attn_config", ("num_heads",), int),
    PublicField("kda.head_dim", "linear_attn_config", ("head_dim",), int),
    PublicField("kda.conv_size", "linear_attn_config", ("short_conv_kernel_size",), int),
    # Without a lower bound the forget gate has its softplus form.
    PublicField(
        "kda.gate_lower_bound", "linear_attn_config", ("gate_lower_bound",), float, None, nullable=True
    ),
    PublicField("kda.full_rank_gate", "linear_attn_config", ("use_full_rank_gate",), bool, False),
    # The inner names of `dsa_config` are not public: these are the spellings of its relatives.
    PublicField(
        "dsa.top_k", "dsa_config", ("index_topk", "index_top_k", "top_k", "topk", "num_selected_tokens"), int
    ),
    PublicField(
        "dsa.num_heads",
        "dsa_config",
        ("index_n_heads", "index_num_heads", "index_head_count", "n_heads", "num_heads", "head_count"),
        int,
    ),
    PublicField(
        "dsa.head_dim", "dsa_config", ("index_head_dim", "index_key_length", "head_dim", "key_length"), int
    ),
    PublicField("dsa.use_relu", "dsa_config", ("use_relu", "relu", "index_use_relu"), bool, True),
    PublicField(
        "dsa.key_norm",
        "dsa_config",
        ("k_norm_type", "key_norm_type", "key_norm", "k_norm", "norm_type"),
        str,
        "layernorm",
    ),
    # The default, rms_norm_eps, is filled in by the reader.
    PublicField(
        "dsa.key_norm_eps",
        "dsa_config",
        ("k_norm_eps", "key_norm_eps", "index_k_norm_eps", "layer_norm_eps", "norm_eps", "eps"),
        float,
        None,
        nullable=True,
    ),
    PublicField("vision.patch_size", "vision_config", ("patch_size",), int, 14),
    PublicField("vision.num_layers", "vision_config", ("vt_num_hidden_layers",), int, 27),
    PublicField("vision.hidden_size", "vision_config", ("vt_hidden_size",), int, 1024),
    PublicField("vision.intermediate_size", "vision_config", ("vt_intermediate_size",), int, 4096),
    PublicField("vision.num_heads", "vision_config", ("vt_num_attention_heads",), int, 12),
    PublicField("vision.qkv_size", "vision_config", ("qkv_hidden_size",), int, 1536),
    PublicField("vision.position_height", "vision_config", ("init_pos_emb_height",), int, 64),
    PublicField("vision.position_width", "vision_config", ("init_pos_emb_width",), int, 64),
    PublicField("vision.position_time", "vision_config", ("init_pos_emb_time",), int, 4),
    PublicField("vision.projector_eps", "vision_config", ("projector_ln_eps",), float, 1e-5),
    PublicField("vision.norm_eps", "vision_config", ("norm_eps",), float, 1.1920928955078125e-07, own=True),
)

TOKEN_IDS: tuple[tuple[str, str], ...] = (
    ("bos_id", "bos_token_id"),
    ("eos_id", "eos_token_id"),
    ("pad_id", "pad_token_id"),
    ("media_pad_id", "media_placeholder_token_id"),
)

DSA_LAYERS: tuple[str, ...] = (
    "layers",
    "dsa_layers",
    "full_attn_layers",
    "sparse_layers",
    "index_layers",
    "indexer_layers",
)
"""Keys of a list of sparse layers, counted from 1."""

DSA_TYPES: tuple[str, ...] = ("types", "layer_types", "index_types", "indexer_types", "index_layer_types")
"""Keys of a list of one word per layer, or per full-attention layer."""

DSA_TYPE_KINDS: dict[str | None, str] = {
    "full": "dsa",
    "dsa": "dsa",
    "sparse": "dsa",
    "indexer": "dsa",
    "dense": "mla",
    "mla": "mla",
    "kda": "kda",
    "linear": "kda",
    "linear_attention": "kda",
    "none": "kda",
    None: "kda",
}


@dataclass(frozen=True)
class Neutral:
    """Keys whose only supported values are `allowed`, or absent, and what other values would mean."""

    keys: tuple[str, ...]
    allowed: tuple[Any, ...]
    meaning: str


_OFF = (None, False, 0)

NEUTRAL: dict[Block, tuple[Neutral, ...]] = {
    "text": (
        Neutral(
            ("num_expert_group", "n_group", "topk_group"),
            (None, 1),
            "routing restricted to groups of experts",
        ),
        Neutral(
            ("moe_router_activation_func", "scoring_func"), (None, "sigmoid"), "another router activation"
        ),
        Neutral(("topk_method",), (None, "noaux_tc"), "another selection of experts"),
        Neutral(("num_nextn_predict_layers",), _OFF, "layers for multi-token prediction"),
        Neutral(("tie_word_embeddings",), _OFF, "an output head that shares the embedding table"),
        Neutral(
            ("attention_bias", "qkv_bias", "mlp_bias", "use_bias", "use_qkv_bias", "add_bias_linear"),
            _OFF,
            "biases of linear layers",
        ),
        Neutral(("sliding_window", "attention_chunk_size"), _OFF, "attention limited to a window"),
        Neutral(
            ("attn_logit_softcapping", "final_logit_softcapping", "logit_softcap"),
            _OFF,
            "soft caps of logits",
        ),
        Neutral(("use_qk_norm", "qk_layernorm"), _OFF, "norms of queries and keys"),
        Neutral(
            ("embedding_multiplier", "logits_scaling", "residual_multiplier"), (None, 1), "scaled activations"
        ),
        Neutral(("add_cross_attention", "is_encoder_decoder"), _OFF, "cross attention"),
    ),
    "linear_attn_config": (
        Neutral(("allow_neg_eigval", "use_bias", "conv_bias", "no_kk_l2norm"), _OFF, "another delta rule"),
        Neutral(("expand_v",), (None, 1), "values wider than keys"),
    ),
    "dsa_config": (
        Neutral(
            ("index_kpool", "index_k_pool", "kpool", "k_pool", "kpool_size", "pool_size", "compress_ratio"),
            (None, 0, 1, False),
            "pooled index keys",
        ),
        Neutral(
            (
                "index_rope_head_dim",
                "rope_head_dim",
                "qk_rope_head_dim",
                "rope_dim",
                "use_rope",
                "rope",
                "rope_interleave",
            ),
            _OFF,
            "rotated index queries and keys",
        ),
        Neutral(
            ("use_hadamard", "hadamard", "index_hadamard", "rotate_activation"),
            _OFF,
            "a Hadamard transform of the index",
        ),
        Neutral(
            ("local_window", "window_size", "sliding_window", "index_local_window"),
            _OFF,
            "positions that are always read",
        ),
        Neutral(
            ("key_dtype", "index_key_dtype", "index_dtype"),
            (None, "bfloat16", "bf16", "auto"),
            "quantised index keys",
        ),
        Neutral(
            ("index_share", "share_index", "index_share_for_mtp_iteration"),
            _OFF,
            "layers that share a selection",
        ),
    ),
    "vision_config": (
        Neutral(("pos_emb_type",), (None, "divided_fixed"), "another position embedding"),
        Neutral(("pos_emb_interpolation_mode",), (None, "bilinear"), "another interpolation of positions"),
        Neutral(("norm_type",), (None, "rmsnorm"), "another norm in the image tower"),
        Neutral(("mlp_type",), (None, "mlp2"), "another MLP in the image tower"),
        Neutral(("activation_func",), (None, "gelu_pytorch_tanh"), "another activation in the image tower"),
        Neutral(("attn_bias", "linear_bias", "patch_embed_proj_bias"), _OFF, "biases in the image tower"),
        Neutral(("merge_type",), (None, "sd2_tpool"), "another merge of patches"),
        Neutral(("mm_projector_type",), (None, "patchmergerv2"), "another projector"),
        Neutral(("projector_hidden_act",), (None, "gelu"), "another activation in the projector"),
    ),
}


def fields_of(section: str) -> tuple[PublicField, ...]:
    """Fields of one section of `ModelConfig`; of the configuration itself for the empty name."""
    return tuple(f for f in FIELDS if f.name.rpartition(".")[0] == section)


DSA_KNOWN: frozenset[str] = frozenset(
    [key for f in fields_of("dsa") for key in f.keys]
    + [key for n in NEUTRAL["dsa_config"] for key in n.keys]
    + [*DSA_LAYERS, *DSA_TYPES]
)
"""Every key of `dsa_config` that is understood."""
