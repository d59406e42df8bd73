"""The public `config.json` of a `ModelConfig`: the file it was read from, with changes written in."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from moe28t_jax.config.huggingface import mlp_pattern, parse
from moe28t_jax.config.model_config import ModelConfig
from moe28t_jax.config.public_blocks import (
    ARCHITECTURES,
    NESTED_PREFIX,
    Document,
    default_prefix,
    dsa_owner,
    text_block,
)
from moe28t_jax.config.public_fields import DSA_LAYERS, DSA_TYPES, TOKEN_IDS, PublicField, fields_of

_ABSENT: Any = object()


def write(config: ModelConfig) -> Document:
    """The document; whether it reads back as the same configuration is for the caller to check."""
    document = json.loads(config.extra)
    if document:
        _set_form(document, config)
        # A default may follow another field, so what one pass changed can need a second.
        for _ in range(2):
            base = parse(document)
            if base == config:
                break
            _write_changes(document, config, base)
        return document
    text: Document = {"model_type": "kimi_linear"}
    document = text
    if config.model_type in NESTED_PREFIX:
        document = {"architectures": [ARCHITECTURES[config.model_type]], "model_type": config.model_type}
        document["text_config"] = text
    elif config.model_type in ARCHITECTURES:
        text["architectures"] = [ARCHITECTURES[config.model_type]]
    else:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"model_type is {config.model_type!r}; the public forms are {known}.")
    text["tie_word_embeddings"] = False
    _write_changes(document, config, None)
    return document


def _set_form(document: Document, config: ModelConfig) -> None:
    """Bring a document into the form of the configuration's model type, in place."""
    old, new = document.get("model_type"), config.model_type
    if new == old or new not in ARCHITECTURES:
        return
    if old in NESTED_PREFIX and new not in NESTED_PREFIX:
        text = text_block(document)
        document.clear()
        document.update(text)
    elif old not in NESTED_PREFIX and new in NESTED_PREFIX:
        text = dict(document)
        document.clear()
        document["text_config"] = text
    document["architectures"] = [ARCHITECTURES[new]]
    document["model_type"] = new
    # It names classes of the other model type.
    document.pop("auto_map", None)
    if new == "kimi_k31" and config.dsa is not None:
        _write_dsa(document, config)


def _value(config: ModelConfig | None, name: str) -> Any:
    section, _, leaf = name.rpartition(".")
    owner = getattr(config, section) if section and config is not None else config
    return _ABSENT if owner is None else getattr(owner, leaf)


def _put(block: Document, field: PublicField, value: Any) -> None:
    present = [key for key in field.keys if key in block]
    for key in present[1:]:
        del block[key]
    block[present[0] if present else field.keys[0]] = value


def _write_section(block: Document, section: str, config: ModelConfig, base: ModelConfig | None) -> None:
    for field in fields_of(section):
        value = _value(config, field.name)
        if value is _ABSENT or value == _value(base, field.name):
            continue
        if base is None and field.own and value == field.default:
            continue
        _put(block, field, value)


def _write_changes(document: Document, config: ModelConfig, base: ModelConfig | None) -> None:
    """Write every field that `base` has otherwise; every field where there is no base."""
    text = text_block(document)
    _write_section(text, "", config, base)
    _write_layers(text, config, base)
    if config.mla is not None:
        _write_section(text, "mla", config, base)
        text["mla_use_nope"] = True
        if base is None or "num_key_value_heads" in text:
            text["num_key_value_heads"] = config.mla.num_heads
    else:
        _remove(text, "mla")
        text.pop("num_key_value_heads", None)
    if config.moe is not None:
        _write_section(text, "moe", config, base)
    else:
        _remove(text, "moe")
    if base is None or config.dsa != base.dsa or config.attention_kinds != base.attention_kinds:
        _write_dsa(document, config)
    _write_vision(document, config, base)
    for name, key in TOKEN_IDS:
        value = getattr(config, name)
        if (base is None and value is not None) or (base is not None and value != getattr(base, name)):
            for block in (document, text):
                if block is document or key in block:
                    block[key] = value
    _write_rest(document, text, config, base)


def _remove(text: Document, section: str) -> None:
    for field in fields_of(section):
        for key in field.keys:
            text.pop(key, None)


def _write_layers(text: Document, config: ModelConfig, base: ModelConfig | None) -> None:
    if (
        base is None
        or config.attention_kinds != base.attention_kinds
        or (config.kda is None) != (base.kda is None)
    ):
        text["num_hidden_layers"] = config.num_layers
        if config.kda is None:
            text.pop("linear_attn_config", None)
        else:
            linear = text.get("linear_attn_config") or {}
            delta = [n for n, kind in enumerate(config.attention_kinds, 1) if kind == "kda"]
            full = [n for n, kind in enumerate(config.attention_kinds, 1) if kind != "kda"]
            text["linear_attn_config"] = linear | {"kda_layers": delta, "full_attn_layers": full}
    if config.kda is not None:
        _write_section(text["linear_attn_config"], "kda", config, base)
    if config.moe is not None and (base is None or config.mlp_kinds != base.mlp_kinds or base.moe is None):
        count = config.num_layers
        # The simplest pattern that gives these kinds; without one, the reader's check names the field.
        for period in range(1, count + 1):
            for first in range(count + 1):
                if mlp_pattern(count, first, period) == config.mlp_kinds:
                    text["first_k_dense_replace"], text["moe_layer_freq"] = first, period
                    return


def _write_dsa(document: Document, config: ModelConfig) -> None:
    text, owner = text_block(document), dsa_owner(document)
    loose = {key: text.pop(key) for key in [key for key in text if key.startswith("index_")]}
    block = loose | (owner.get("dsa_config") or {})
    if config.dsa is None:
        owner.pop("dsa_config", None)
        return
    layers = [n for n, kind in enumerate(config.attention_kinds, 1) if kind == "dsa"]
    for field in fields_of("dsa"):
        value = _value(config, field.name)
        default = config.rms_norm_eps if field.name == "dsa.key_norm_eps" else field.default
        if value != default or any(key in block for key in field.keys):
            _put(block, field, value)
    listed = [key for key in DSA_LAYERS if key in block]
    for key in [*listed[1:], *(key for key in DSA_TYPES if key in block)]:
        del block[key]
    block[listed[0] if listed else DSA_LAYERS[0]] = layers
    owner["dsa_config"] = block


def _write_vision(document: Document, config: ModelConfig, base: ModelConfig | None) -> None:
    if config.vision is None:
        document.pop("vision_config", None)
        return
    unchanged = base is not None and base.vision == config.vision and base.hidden_size == config.hidden_size
    if (
        unchanged
        and base is not None
        and base.vision is not None
        and base.vision.extra == config.vision.extra
    ):
        return
    block = document.get("vision_config") or {}
    extra = json.loads(config.vision.extra)
    read = {key for field in fields_of("vision") for key in field.keys} | {"merge_kernel_size"}
    for key in [key for key in block if key not in read and key not in extra]:
        del block[key]
    block.update(extra)
    _write_section(block, "vision", config, base)
    block["merge_kernel_size"] = [config.vision.merge_height, config.vision.merge_width]
    for key, size in (
        ("text_hidden_size", config.hidden_size),
        ("mm_hidden_size", config.vision.hidden_size),
    ):
        if key in block:
            block[key] = size
    document["vision_config"] = block


def _write_rest(document: Document, text: Document, config: ModelConfig, base: ModelConfig | None) -> None:
    if base is None or config.expert_quantization != base.expert_quantization:
        for block in (document, text):
            block.pop("quantization_config", None)
        if config.expert_quantization == "mxfp4":
            source = resources.files("moe28t_jax.config") / "public" / "kimi-k3.json"
            text["quantization_config"] = json.loads(source.read_text("utf-8"))["text_config"][
                "quantization_config"
            ]
    if config.checkpoint_prefix != default_prefix(config.model_type):
        document["checkpoint_prefix"] = config.checkpoint_prefix
    else:
        document.pop("checkpoint_prefix", None)
