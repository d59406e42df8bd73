"""Reading and writing public configurations, presets, overrides and validation."""

import copy
import hashlib
import json
from pathlib import Path

import pytest

from moe28t_jax.config import (
    PRESETS,
    DSAConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    VisionConfig,
)
from moe28t_jax.config.presets import public_config
from moe28t_jax.config.validation import validate

DATA = Path(__file__).parent.parent / "golden" / "data"
TINY = ("k3_tiny_bf16", "k3_tiny_mxfp4", "k31_tiny", "k31_tiny_mxfp4", "kimi_linear_tiny")
KIMI_K3_SHA256 = "9710e121a58d03ac92c8d6da287a19541994319afbbe6d6202af001ffd379213"


def document(name: str) -> dict:
    return json.loads((DATA / name / "config.json").read_text("utf-8"))


def edited(name: str, path: str, value: object) -> dict:
    """A tiny configuration with the value at a dotted path replaced; an Ellipsis removes it."""
    result = document(name)
    *blocks, key = path.split(".")
    target = result
    for block in blocks:
        target = target.setdefault(block, {})
    if value is ...:
        del target[key]
    else:
        target[key] = value
    return result


# -- presets ---------------------------------------------------------------------------------------
def test_kimi_k3_reproduces_the_public_file_byte_for_byte():
    text = json.dumps(ModelConfig.preset("kimi-k3").to_hf(), indent=2)
    assert hashlib.sha256(text.encode()).hexdigest() == KIMI_K3_SHA256


def test_kimi_k3_has_the_public_sizes():
    config = ModelConfig.preset("kimi-k3")
    full = {*range(3, 92, 4), 92}
    assert config.attention_kinds == tuple("mla" if i in full else "kda" for i in range(93))
    assert config.attention_kinds[91:] == ("mla", "mla")
    assert config.mlp_kinds == ("dense", *["moe"] * 92)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (163840, 7168, 33792)
    assert config.kda == KDAConfig(96, 128, 4, -5.0, True)
    assert config.mla == MLAConfig(96, 512, 128, 64, 128, 1536, True, 1e-6)
    assert config.mla.scale == 192**-0.5
    assert config.moe == MoEConfig(896, 16, 3072, 2, 3584, True, True, 1.0)
    assert config.vision == VisionConfig()
    assert config.dsa is None
    assert (config.residual_block_size, config.num_snapshots, config.rms_norm_eps) == (12, 8, 1e-5)
    assert config.glu == ("situ", 4.0, 25.0)
    assert (config.bos_id, config.eos_id, config.pad_id, config.media_pad_id) == (
        163584,
        163586,
        163839,
        163605,
    )
    assert (config.expert_quantization, config.checkpoint_prefix) == ("mxfp4", "language_model.")
    assert config.max_context == 1_048_576


def test_moe28t_is_kimi_k3_with_sparse_attention():
    base, config = ModelConfig.preset("kimi-k3"), ModelConfig.preset("moe28t")
    assert config.dsa == DSAConfig(32, 128, 2048, True, "layernorm", 1e-5)
    assert config.attention_kinds == tuple("dsa" if k == "mla" else k for k in base.attention_kinds)
    dense = config.override({"attention_kinds": base.attention_kinds, "dsa": None, "model_type": "kimi_k3"})
    assert dense == base
    assert ModelConfig.preset("kimi-k3.1-pro") is config


def test_kimi_linear_preset():
    config = ModelConfig.preset("kimi-linear-48b-a3b")
    assert config.attention_kinds.count("kda") == 20
    assert [i + 1 for i, k in enumerate(config.attention_kinds) if k == "mla"] == [4, 8, 12, 16, 20, 24, 27]
    assert config.kda == KDAConfig(32, 128, 4, None, False)
    assert config.mla == MLAConfig(32, 512, 128, 64, 128, None, False, 1e-6)
    assert config.moe == MoEConfig(256, 8, 1024, 1, None, False, True, 2.446)
    assert (config.residual_block_size, config.glu, config.checkpoint_prefix) == (None, ("silu",), "")
    assert (config.num_snapshots, config.starts_block(0)) == (0, False)


def test_nano_preset():
    assert ModelConfig.preset("nano") == ModelConfig(
        vocab_size=4096,
        hidden_size=128,
        attention_kinds=("kda", "kda", "kda", "dsa") * 2,
        mlp_kinds=("dense", *["moe"] * 7),
        intermediate_size=384,
        kda=KDAConfig(4, 32, 4, -5.0, True),
        mla=MLAConfig(4, 64, 32, 16, 32, 64, True),
        moe=MoEConfig(16, 4, 96, 2, 64, True),
        dsa=DSAConfig(4, 32, 64),
        residual_block_size=4,
        max_context=32768,
        bos_id=3840,
        eos_id=3842,
        pad_id=4095,
        media_pad_id=3861,
        vision=VisionConfig(14, 4, 96, 256, 3, 96, 8, 8),
        expert_quantization="mxfp4",
        checkpoint_prefix="language_model.",
        model_type="kimi_k31",
    )


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match=r"no preset 'kimi'; the presets are moe28t, .*nano"):
        ModelConfig.preset("kimi")


# -- round trips -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TINY)
def test_tiny_configurations_round_trip(name):
    config = ModelConfig.from_hf(DATA / name)
    assert config.to_hf() == document(name)
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert ModelConfig.from_hf(str(DATA / name / "config.json")) == config
    assert hash(ModelConfig.from_hf(document(name))) == hash(config)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_with_and_without_their_file(name):
    config = ModelConfig.preset(name)
    again = ModelConfig.from_hf(config.to_hf())
    assert again == config
    assert again.extra == config.extra
    made = config.override({"extra": "{}"})
    assert ModelConfig.from_hf(made.to_hf()) == config


def test_to_hf_returns_a_copy():
    config = ModelConfig.preset("nano")
    config.to_hf()["text_config"]["hidden_size"] = 1
    assert config.to_hf()["text_config"]["hidden_size"] == 128


CHANGES = {
    "rms_norm_eps": 1e-6,  # moves the default of the index key norm, which must stay
    "hidden_size": 96,
    "vocab_size": 512,
    "residual_block_size": None,
    "activation": "silu",
    "situ_beta": None,
    "situ_linear_beta": 7.0,
    "max_context": 77,
    "bos_id": 9,
    "eos_id": None,
    "pad_id": 11,
    "media_pad_id": 12,
    "expert_quantization": None,
    "checkpoint_prefix": "",
    "kda.gate_lower_bound": None,
    "kda.full_rank_gate": False,
    "kda.num_heads": 2,
    "mla.num_heads": 2,
    "mla.latent_eps": 1e-5,
    "mla.output_gate": False,
    "moe.num_experts_per_token": 1,
    "moe.routed_scaling_factor": 2.5,
    "moe.renormalize": False,
    "moe.num_shared_experts": 0,
    "dsa.top_k": 5,
    "dsa.use_relu": False,
    "dsa.key_norm": "rmsnorm",
    "dsa.key_norm_eps": 1e-6,
    "mlp_kinds": ("dense", "dense", "dense", "moe", "dense", "dense", "moe", "dense"),
    "attention_kinds": ("kda", "kda", "mla", "dsa", "kda", "kda", "dsa", "mla"),
    "vision": VisionConfig(num_layers=2, merge_width=1, norm_eps=1e-5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_to_hf_reflects_changes(name):
    base = ModelConfig.from_hf(DATA / "k31_tiny_mxfp4")
    config = base.override({name: CHANGES[name]})
    assert config != base
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_all_changes_together_and_back():
    base = ModelConfig.from_hf(DATA / "k31_tiny_mxfp4")
    config = base.override(CHANGES)
    read = ModelConfig.from_hf(config.to_hf())
    assert read == config
    assert ModelConfig.from_hf(read.override({"extra": base.extra}).to_hf()) == config


def test_vision_changes_keep_what_is_not_read():
    config = ModelConfig.preset("kimi-k3").override({"vision.num_layers": 3})
    written = config.to_hf()["vision_config"]
    assert written == public_config("kimi-k3")["vision_config"] | {"vt_num_hidden_layers": 3}
    assert json.loads(config.vision.extra)["_attn_implementation"] == "flash_attention_2"


def test_sections_can_be_removed():
    config = ModelConfig.from_hf(DATA / "k3_tiny_bf16")
    delta = config.override({"attention_kinds": ["kda"] * 7, "mla": None})
    dense = config.override({"mlp_kinds": ["dense"] * 7, "moe": None})
    full = config.override({"attention_kinds": ["mla"] * 7, "kda": None})
    blind = ModelConfig.preset("kimi-k3").override({"vision": None})
    for changed in (delta, dense, full, blind):
        assert ModelConfig.from_hf(changed.to_hf()) == changed


def test_change_of_model_type_changes_the_form():
    config = ModelConfig.from_hf(DATA / "kimi_linear_tiny")
    nested = config.override({"model_type": "kimi_k3", "checkpoint_prefix": "language_model."})
    written = nested.to_hf()
    assert (written["model_type"], written["architectures"]) == (
        "kimi_k3",
        ["KimiK3ForConditionalGeneration"],
    )
    assert ModelConfig.from_hf(written) == nested
    flat = ModelConfig.from_hf(written).override({"model_type": "kimi_linear", "checkpoint_prefix": ""})
    assert ModelConfig.from_hf(flat.to_hf()) == flat == config


def test_what_the_public_file_cannot_express_is_an_error():
    config = ModelConfig.from_hf(DATA / "k3_tiny_bf16")
    kinds = ["moe", "moe", "dense", "moe", "moe", "dense", "dense"]
    with pytest.raises(ValueError, match="cannot express mlp_kinds"):
        config.override({"mlp_kinds": kinds}).to_hf()
    with pytest.raises(ValueError, match="'kimi_k9'"):
        config.override({"model_type": "kimi_k9", "extra": "{}"}).to_hf()
    with pytest.raises(ValueError, match=r"does not name dsa\.num_heads"):
        config.override({"model_type": "kimi_k31"}).to_hf()


# -- reading ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TINY)
def test_layer_lists_count_from_one(name):
    raw = document(name)
    text = raw.get("text_config", raw)
    config = ModelConfig.from_hf(raw)
    sparse = text.get("dsa_config", {}).get("layers", [])
    for layer, kind in enumerate(config.attention_kinds):
        delta = layer + 1 in text["linear_attn_config"]["kda_layers"]
        assert kind == ("kda" if delta else "dsa" if layer + 1 in sparse else "mla")
    assert config.num_layers == text["num_hidden_layers"]


def test_defaults_of_absent_fields():
    raw = document("kimi_linear_tiny")
    for key in (
        *("rms_norm_eps", "model_max_length", "num_key_value_heads", "num_shared_experts"),
        *(
            "routed_scaling_factor",
            "first_k_dense_replace",
            "moe_layer_freq",
            "moe_renormalize",
            "hidden_act",
        ),
        *("pad_token_id", "bos_token_id", "eos_token_id", "q_lora_rank"),
    ):
        del raw[key]
    config = ModelConfig.from_hf(raw)
    assert (config.rms_norm_eps, config.max_context, config.activation) == (1e-6, 1_048_576, "silu")
    assert config.mlp_kinds == ("moe",) * 5
    assert (config.bos_id, config.eos_id, config.pad_id) == (None, None, None)
    assert config.mla is not None and config.moe is not None and config.kda is not None
    assert (config.mla.q_lora_rank, config.mla.output_gate, config.mla.latent_eps) == (None, False, 1e-6)
    assert (config.moe.num_shared_experts, config.moe.routed_scaling_factor) == (0, 1.0)
    assert (config.moe.renormalize, config.moe.latent_size, config.moe.latent_norm) == (True, None, False)
    assert (config.kda.gate_lower_bound, config.kda.full_rank_gate) == (None, False)
    assert config.residual_block_size is None


def test_betas_of_zero_or_null_switch_the_bound_off():
    for value in (0, 0.0, None):
        config = ModelConfig.from_hf(edited("k3_tiny_bf16", "text_config.activation_situ_beta", value))
        assert config.glu == ("situ", None, 25.0)
    assert (
        ModelConfig.from_hf(edited("k3_tiny_bf16", "text_config.activation_situ_beta", ...)).situ_beta == 4.0
    )


def test_latent_eps_does_not_follow_rms_norm_eps():
    config = ModelConfig.from_hf(edited("k31_tiny", "text_config.rms_norm_eps", 1e-3))
    assert config.mla is not None and config.mla.latent_eps == 1e-6
    assert config.dsa is not None and config.dsa.key_norm_eps == 1e-3


def test_outer_token_ids_come_first():
    config = ModelConfig.from_hf(edited("k3_tiny_bf16", "text_config.pad_token_id", 7))
    assert config.pad_id == 0
    raw = edited("k3_tiny_bf16", "text_config.pad_token_id", 7)
    del raw["pad_token_id"]
    assert ModelConfig.from_hf(raw).pad_id == 7


def test_expert_layers_by_frequency():
    config = ModelConfig.from_hf(edited("k3_tiny_bf16", "text_config.moe_layer_freq", 3))
    assert config.mlp_kinds == ("dense", "dense", "dense", "moe", "dense", "dense", "moe")


def test_quantisation_may_sit_in_the_outer_block():
    raw = document("k3_tiny_mxfp4")
    raw["quantization_config"] = raw["text_config"].pop("quantization_config")
    config = ModelConfig.from_hf(raw)
    assert config.expert_quantization == "mxfp4"
    assert config.to_hf() == raw
    plain = config.override({"expert_quantization": None})
    assert "quantization_config" not in plain.to_hf()


def test_harmless_unknown_fields_are_kept():
    raw = edited("k31_tiny", "text_config.some_training_note", {"a": [1, None]})
    config = ModelConfig.from_hf(raw)
    assert config.to_hf() == raw
    changed = config.override({"dsa.top_k": 3}).to_hf()
    raw["text_config"]["dsa_config"]["index_topk"] = 3
    assert changed == raw


UNSUPPORTED = [
    ("k3_tiny_bf16", "text_config.mla_use_nope", False, "mla_use_nope is False"),
    ("k3_tiny_bf16", "text_config.mla_use_nope", ..., "mla_use_nope is False"),
    ("kimi_linear_tiny", "rope_scaling", {"type": "yarn", "factor": 4}, "rope_scaling is .*yarn"),
    ("kimi_linear_tiny", "rope_parameters", {"rope_type": "linear", "factor": 4}, "rope_parameters is"),
    ("k3_tiny_bf16", "text_config.num_expert_group", 2, "num_expert_group is 2"),
    ("k3_tiny_bf16", "text_config.topk_group", 4, "topk_group is 4"),
    ("k3_tiny_bf16", "text_config.topk_method", "greedy", "topk_method is 'greedy'"),
    (
        "k3_tiny_bf16",
        "text_config.moe_router_activation_func",
        "softmax",
        "moe_router_activation_func is 'softmax'",
    ),
    ("k3_tiny_bf16", "text_config.num_key_value_heads", 2, "num_key_value_heads is 2"),
    ("k3_tiny_bf16", "text_config.tie_word_embeddings", True, "tie_word_embeddings is True"),
    ("k3_tiny_bf16", "tie_word_embeddings", True, "tie_word_embeddings is True"),
    ("k3_tiny_bf16", "text_config.hidden_act", "gelu", "hidden_act is 'gelu'"),
    ("k3_tiny_bf16", "text_config.num_nextn_predict_layers", 1, "num_nextn_predict_layers is 1"),
    ("k3_tiny_bf16", "text_config.attention_bias", True, "attention_bias is True"),
    ("k3_tiny_bf16", "text_config.sliding_window", 128, "sliding_window is 128"),
    ("k3_tiny_bf16", "text_config.linear_attn_config.allow_neg_eigval", True, "allow_neg_eigval is True"),
    ("k31_tiny", "text_config.dsa_config.index_kpool", 4, "index_kpool is 4"),
    ("k31_tiny", "text_config.index_kpool", 4, "index_kpool is 4"),
    ("k31_tiny", "text_config.dsa_config.rope_head_dim", 64, "rope_head_dim is 64"),
    ("k31_tiny", "text_config.dsa_config.use_hadamard", True, "use_hadamard is True"),
    ("k31_tiny", "text_config.dsa_config.local_window", 16, "local_window is 16"),
    ("k31_tiny", "text_config.dsa_config.types", ["full", "shared", "full"], "'shared'"),
    ("k31_tiny", "text_config.dsa_config.layers", [3, 4], r"layers \[3\], which are not in full_attn_layers"),
    ("k31_tiny", "text_config.dsa_config.topk", 9, "index_topk is 8 but topk"),
    ("k31_tiny", "text_config.dsa_config.k_norm_type", "l2", "norm of index keys is 'l2'"),
    ("k3_tiny_bf16", "vision_config.norm_type", "layernorm", "norm_type is 'layernorm'"),
    ("k3_tiny_bf16", "vision_config.mlp_type", "glu", "mlp_type is 'glu'"),
    ("k3_tiny_bf16", "vision_config.merge_type", "avg", "merge_type is 'avg'"),
    ("k3_tiny_bf16", "vision_config.text_hidden_size", 65, "text_hidden_size is 65"),
    (
        "k3_tiny_mxfp4",
        "text_config.quantization_config.format",
        "nvfp4-pack-quantized",
        "nvfp4-pack-quantized",
    ),
    ("k3_tiny_mxfp4", "text_config.quantization_config.quant_method", "fp8", "quant_method 'fp8'"),
    ("k3_tiny_mxfp4", "text_config.quantization_config.kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
    (
        "k3_tiny_mxfp4",
        "text_config.quantization_config.config_groups.group_0.weights.group_size",
        16,
        "group_size 16",
    ),
    (
        "k3_tiny_mxfp4",
        "text_config.quantization_config.config_groups.group_0.weights.num_bits",
        8,
        "num_bits 8",
    ),
    (
        "k3_tiny_mxfp4",
        "text_config.quantization_config.config_groups.group_0.input_activations",
        {},
        "input_activ",
    ),
    ("k3_tiny_bf16", "model_type", "llama", "model_type is 'llama'"),
    ("k3_tiny_bf16", "text_config", None, "text_config is None"),
    ("k3_tiny_bf16", "text_config.vocab_size", ..., "does not name vocab_size"),
    ("k3_tiny_bf16", "text_config.linear_attn_config.head_dim", ..., "head_dim in linear_attn_config"),
    ("k3_tiny_bf16", "text_config.hidden_size", "64", "hidden_size is '64'; it must be an integer"),
    ("k3_tiny_bf16", "text_config.num_hidden_layers", 0, "num_hidden_layers is 0"),
    ("k3_tiny_bf16", "text_config.first_k_dense_replace", -1, "first_k_dense_replace is -1"),
    ("k3_tiny_bf16", "text_config.moe_layer_freq", 0, "moe_layer_freq is 0"),
    ("k3_tiny_bf16", "text_config.linear_attn_config.kda_layers", [1, 2, 3, 5], r"in neither: \[6\]"),
    ("k3_tiny_bf16", "text_config.linear_attn_config.kda_layers", [1, 2, 3, 4, 5, 6], r"in both: \[4\]"),
    ("k3_tiny_bf16", "text_config.linear_attn_config.kda_layers", [0, 1, 2, 4, 5], "kda_layers is"),
    ("k3_tiny_bf16", "text_config.linear_attn_config.full_attn_layers", ..., "full_attn_layers is None"),
    ("k3_tiny_bf16", "eos_token_id", [1, 2], "eos_token_id is"),
    ("k3_tiny_bf16", "eos_token_id", 256, "eos_id is 256"),
    ("k3_tiny_bf16", "text_config.linear_attn_config", "kda", "linear_attn_config is 'kda'"),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), UNSUPPORTED)
def test_unsupported_values_are_errors_that_name_them(name, path, value, message):
    ModelConfig.from_hf(document(name))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(edited(name, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.rope_scaling", None),
        ("text_config.rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("text_config.rope_theta", 5e5),
        ("text_config.dsa_config.index_kpool", 1),
        ("text_config.dsa_config.use_rope", False),
        ("text_config.attention_bias", False),
        ("text_config.num_key_value_heads", None),
    ],
)
def test_neutral_values_change_nothing(path, value):
    assert ModelConfig.from_hf(edited("k31_tiny", path, value)) == ModelConfig.from_hf(document("k31_tiny"))


def test_sources_that_are_no_configuration(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        ModelConfig.from_hf(tmp_path)


# -- dsa_config ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "block",
    [
        {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16},
        {"top_k": 8, "head_count": 4, "key_length": 16, "types": ["full", "full", "full"]},
        {"topk": 8, "n_heads": 4, "head_dim": 16, "full_attn_layers": [4, 7, 8], "relu": True, "eps": 1e-5},
        {
            **{"topk": 8, "num_heads": 4, "head_dim": 16, "k_norm": "layernorm"},
            "layer_types": ["kda", "kda", "kda", "dsa", "kda", None, "dsa", "dsa"],
        },
    ],
)
def test_spellings_of_the_indexer_block(block):
    expected = ModelConfig.from_hf(DATA / "k31_tiny")
    config = ModelConfig.from_hf(edited("k31_tiny", "text_config.dsa_config", block))
    assert config == expected
    assert config.to_hf()["text_config"]["dsa_config"] == block
    changed = config.override({"dsa.top_k": 3, "dsa.num_heads": 2, "dsa.use_relu": False})
    assert ModelConfig.from_hf(changed.to_hf()) == changed


def test_indexer_block_may_sit_outside_or_loose():
    expected = ModelConfig.from_hf(DATA / "k31_tiny")
    outer = document("k31_tiny")
    outer["dsa_config"] = outer["text_config"].pop("dsa_config")
    loose = document("k31_tiny")
    del loose["text_config"]["dsa_config"]
    loose["text_config"] |= {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}
    for raw in (outer, loose):
        config = ModelConfig.from_hf(copy.deepcopy(raw))
        assert config == expected
        assert config.to_hf() == raw
        changed = config.override({"dsa.top_k": 3})
        assert ModelConfig.from_hf(changed.to_hf()) == changed


def test_some_full_attention_layers_may_stay_dense():
    config = ModelConfig.from_hf(edited("k31_tiny", "text_config.dsa_config.layers", [4, 8]))
    assert config.attention_kinds[3:] == ("dsa", "kda", "kda", "mla", "dsa")


def test_unrecognised_indexer_keys_are_listed_and_settled_by_overrides():
    raw = edited("k31_tiny", "text_config.dsa_config", {"zeta": 8, "alpha": 4, "head_dim": 16})
    with pytest.raises(
        ValueError, match=r"recognised: alpha, zeta\..*dsa\.num_heads, dsa\.top_k.*overrides="
    ):
        ModelConfig.from_hf(raw)
    with pytest.raises(ValueError, match="not recognised: alpha, zeta"):
        ModelConfig.from_hf(raw, {"dsa.num_heads": 4, "dsa.top_k": 8})
    by_hand = {"dsa.num_heads": 4, "dsa.top_k": 8, "dsa.head_dim": 16}
    config = ModelConfig.from_hf(raw, by_hand)
    assert config == ModelConfig.from_hf(DATA / "k31_tiny")
    written = config.to_hf()
    assert ModelConfig.from_hf(written) == config
    assert written["text_config"]["unread_dsa_config"] == {"alpha": 4, "zeta": 8}
    unknown = edited("k31_tiny", "text_config.dsa_config.zeta", 1)
    with pytest.raises(ValueError, match="not recognised: zeta"):
        ModelConfig.from_hf(unknown)


def test_missing_indexer_block_names_the_overrides():
    raw = edited("k31_tiny", "text_config.dsa_config", ...)
    with pytest.raises(ValueError, match=r'"dsa\.num_heads": \.\.\., "dsa\.head_dim": \.\.\., "dsa\.top_k"'):
        ModelConfig.from_hf(raw)
    config = ModelConfig.from_hf(raw, {"dsa.num_heads": 4, "dsa.top_k": 8, "dsa.head_dim": 16})
    assert config == ModelConfig.from_hf(DATA / "k31_tiny")
    assert ModelConfig.from_hf(config.to_hf()) == config


# -- overrides and validation ----------------------------------------------------------------------
def test_overrides_by_dotted_name():
    config = ModelConfig.from_hf(
        DATA / "k31_tiny", {"dsa.top_k": 5, "mla.latent_eps": 1e-5, "max_context": 10}
    )
    assert config.dsa is not None and config.mla is not None
    assert (config.dsa.top_k, config.mla.latent_eps, config.max_context) == (5, 1e-5, 10)
    short = config.override({"attention_kinds": ["kda", "dsa"], "mlp_kinds": ["dense", "moe"]})
    assert short.attention_kinds == ("kda", "dsa")
    hash(short)


@pytest.mark.parametrize("name", ["hiden_size", "dsa.topk", "vision.num_layers", "hidden_size.x", "moe.x"])
def test_unknown_override_names_are_errors(name):
    with pytest.raises(ValueError, match="has no field"):
        ModelConfig.from_hf(DATA / "k31_tiny", {name: 1})


INVALID = [
    ({"attention_kinds": (), "mlp_kinds": ()}, "at least one layer"),
    ({"attention_kinds": ("kda",)}, "one entry per layer"),
    ({"kda": None}, "Layer 0 is 'kda' but the section 'kda' is None"),
    ({"mla": None}, "Layer 3 is 'dsa' but the section 'mla' is None"),
    ({"dsa": None}, "Layer 3 is 'dsa' but the section 'dsa' is None"),
    ({"moe": None}, "Layer 1 is 'moe' but the section 'moe' is None"),
    ({"mla.q_lora_rank": None}, "mla.q_lora_rank is None"),
    ({"moe.latent_size": 40}, "moe.latent_size is 40; .*divisible by 32"),
    ({"moe.intermediate_size": 48}, "moe.intermediate_size is 48; .*divisible by 32"),
    (
        {"moe.latent_size": None, "moe.latent_norm": False, "hidden_size": 72},
        "hidden_size is 72; .*divisible",
    ),
    ({"moe.latent_size": None}, "moe.latent_norm is True"),
    ({"moe.num_experts_per_token": 9}, "moe.num_experts_per_token is 9; it must not exceed"),
    ({"moe.num_experts_per_token": 0}, "moe.num_experts_per_token is 0"),
    ({"dsa.top_k": 0}, "dsa.top_k is 0"),
    ({"hidden_size": -1}, "hidden_size is -1"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"kda.gate_lower_bound": 5.0}, "kda.gate_lower_bound is 5.0"),
    ({"residual_block_size": 0}, "residual_block_size is 0"),
    ({"situ_beta": -4.0}, "situ_beta is -4.0"),
    ({"pad_id": -1}, "pad_id is -1"),
    ({"vision": VisionConfig(num_heads=7)}, "vision.qkv_size is 1536"),
    ({"extra": "[]"}, "extra must be"),
    ({"extra": "{"}, "extra must be"),
]


@pytest.mark.parametrize(("values", "message"), INVALID)
def test_inconsistent_configurations_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(DATA / "k31_tiny_mxfp4").override(values)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("attention_kinds", ("gqa",) * 8, ValueError, r"attention_kinds\[0\] is 'gqa'"),
        ("mlp_kinds", ("glu",) * 8, ValueError, r"mlp_kinds\[0\] is 'glu'"),
        ("mlp_kinds", ["moe"] * 8, TypeError, "must be a tuple"),
        ("activation", "gelu", ValueError, "activation is 'gelu'"),
        ("hidden_size", 64.0, ValueError, "hidden_size is 64.0"),
        ("hidden_size", True, ValueError, "hidden_size is True"),
        ("expert_quantization", "int4", ValueError, "expert_quantization is 'int4'"),
        ("model_type", None, ValueError, "model_type is None"),
    ],
)
def test_values_of_a_wrong_type_are_refused_without_a_type_checker(name, value, error, message):
    config = copy.copy(ModelConfig.from_hf(DATA / "k31_tiny"))
    validate(config)
    # The type checker of the tests would refuse these values in the constructor, before `validate` sees them.
    object.__setattr__(config, name, value)
    with pytest.raises(error, match=message):
        validate(config)


def test_quantised_experts_need_experts():
    config = ModelConfig.from_hf(DATA / "k3_tiny_mxfp4")
    with pytest.raises(ValueError, match="expert_quantization"):
        config.override({"mlp_kinds": ["dense"] * 7, "moe": None})
