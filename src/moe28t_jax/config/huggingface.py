"""Public `config.json` to `ModelConfig` and back.

Three forms are read: `kimi_k3` and `kimi_k31` (text and vision blocks inside an outer one) and the flat
`kimi_linear`. The whole file is kept in `ModelConfig.extra`, so that `to_hf` returns it with
only those values replaced that were changed since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from moe28t_jax.config.model_config import (
    DSAConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    VisionConfig,
)
from moe28t_jax.config.public_blocks import (
    Document,
    default_prefix,
    dsa_block,
    dsa_owner,
    inner_block,
    read_value,
    require_neutral,
    text_block,
)
from moe28t_jax.config.public_fields import (
    DSA_KNOWN,
    DSA_LAYERS,
    DSA_TYPE_KINDS,
    DSA_TYPES,
    REQUIRED,
    TOKEN_IDS,
    fields_of,
)

_DSA_SIZES = ("dsa.num_heads", "dsa.head_dim", "dsa.top_k")


# Far above any real depth; a larger number is a mistake that would exhaust memory.
_MAX_LAYERS = 10_000


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; readers differ on which of two equal keys counts, so there may be one only."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return result


def from_hf(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any]) -> ModelConfig:
    """Read a public configuration: a path to `config.json` or its folder, or its parsed content.

    Raises FileNotFoundError without a file, and ValueError for content that is not a supported configuration.
    """
    if isinstance(source, Mapping):
        document, name = json.loads(json.dumps(dict(source))), "the configuration"
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no file {str(path)!r}; give a config.json or the folder that holds it."
            )
        try:
            document = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}.") from None
        except RecursionError:
            raise ValueError(f"{path} is nested too deeply for a configuration.") from None
        name = str(path)
    if not isinstance(document, dict):
        raise ValueError(f"{name} holds {type(document).__name__}; a configuration is a JSON object.")
    _settle_dsa(document, overrides)
    return parse(document).override(overrides)


def _settle_dsa(document: Document, overrides: Mapping[str, Any]) -> None:
    """Let overrides stand in for sizes of the indexer that the file does not name in a known way.

    Edits the document so that it reads the same without the overrides.
    """
    block = dsa_block(document)
    if block is None and document.get("model_type") != "kimi_k31":
        return
    block = block or {}
    found = {f.name: read_value(f, block, None) for f in fields_of("dsa") if f.name in _DSA_SIZES}
    missing = [name for name in _DSA_SIZES if found[name] is None and name not in overrides]
    unknown = sorted(set(block) - DSA_KNOWN)
    by_hand = all(name in overrides for name in _DSA_SIZES)
    if missing or (unknown and not by_hand):
        keys = f"dsa_config has keys that are not recognised: {', '.join(unknown)}. " if unknown else ""
        lack = f"It does not name {', '.join(missing)}. " if missing else ""
        example = ", ".join(f'"{name}": ...' for name in _DSA_SIZES)
        raise ValueError(
            f"{keys}{lack}Pass overrides={{{example}}} to set the indexer by hand"
            f"{'; unrecognised keys are then kept but not used' if unknown else ''}."
        )
    if unknown or None in found.values():
        text = text_block(document)
        dsa_owner(document).pop("dsa_config", None)
        for key in [key for key in text if key.startswith("index_")]:
            del text[key]
        settled = {k: v for k, v in block.items() if k not in unknown}
        for field in fields_of("dsa"):
            if field.name in _DSA_SIZES and found[field.name] is None:
                settled[field.keys[0]] = overrides[field.name]
        text["dsa_config"] = settled
        if unknown:
            text["unread_dsa_config"] = {k: block[k] for k in unknown}


def _section(section: str, block: Document) -> dict[str, Any]:
    """Keyword arguments of one section of `ModelConfig`."""
    values: dict[str, Any] = {}
    for field in fields_of(section):
        value = read_value(field, block, field.default)
        if value is REQUIRED:
            where = "" if field.block == "text" else f" in {field.block}"
            raise ValueError(f"The configuration does not name {field.keys[0]}{where}; it has no default.")
        values[field.name.rpartition(".")[2]] = value
    return values


def parse(document: Document) -> ModelConfig:
    """A configuration from the content of a public file, which is kept whole in `extra`."""
    text = text_block(document)
    require_neutral(document, text)
    values = _section("", text)
    for name in ("situ_beta", "situ_linear_beta"):
        values[name] = values[name] or None
    if values["activation"] not in ("situ", "silu"):
        raise ValueError(
            f"hidden_act is {values['activation']!r}; the supported activations are situ and silu."
        )
    linear = inner_block(text, "linear_attn_config")
    sparse = dsa_block(document)
    attention_kinds = _attention_kinds(text, linear, sparse)
    has_experts = bool(text.get("num_experts") or text.get("n_routed_experts"))
    mla = None
    if text.get("kv_lora_rank") is not None:
        mla = MLAConfig(**_section("mla", text))
    dsa = None
    if sparse is not None:
        indexer = _section("dsa", sparse)
        if indexer["key_norm"] not in ("layernorm", "rmsnorm"):
            raise ValueError(
                f"The norm of index keys is {indexer['key_norm']!r} in dsa_config; "
                "the supported norms are layernorm and rmsnorm."
            )
        if indexer["key_norm_eps"] is None:
            indexer["key_norm_eps"] = values["rms_norm_eps"]
        dsa = DSAConfig(**indexer)
    ids: dict[str, Any] = _token_ids(document, text)
    return ModelConfig(
        **values,
        attention_kinds=attention_kinds,
        mlp_kinds=_mlp_kinds(text, len(attention_kinds), has_experts),
        kda=KDAConfig(**_section("kda", linear)) if linear is not None else None,
        mla=mla,
        moe=MoEConfig(**_section("moe", text)) if has_experts else None,
        dsa=dsa,
        vision=_vision(document, values["hidden_size"]),
        **ids,
        expert_quantization=_quantization(document, text),
        checkpoint_prefix=document.get("checkpoint_prefix", default_prefix(document["model_type"])),
        model_type=document["model_type"],
        extra=json.dumps(document),
    )


def _layer_list(name: str, value: Any, count: int) -> list[int]:
    valid = isinstance(value, list) and all(type(n) is int and 1 <= n <= count for n in value)
    if not valid or len(set(value)) != len(value):
        raise ValueError(
            f"{name} is {value!r}; it must list distinct layers from 1 to num_hidden_layers, {count}."
        )
    return value


def _attention_kinds(text: Document, linear: Document | None, dsa: Document | None) -> tuple[Any, ...]:
    count = text.get("num_hidden_layers")
    if type(count) is not int or not 1 <= count <= _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {count!r}; it must be an integer from 1 to {_MAX_LAYERS}.")
    everything = list(range(1, count + 1))
    if linear is None:
        delta, full = [], everything
    else:
        delta = _layer_list("kda_layers", linear.get("kda_layers"), count)
        full = _layer_list("full_attn_layers", linear.get("full_attn_layers"), count)
        if sorted(delta + full) != everything:
            both, neither = sorted(set(delta) & set(full)), sorted(set(everything) - set(delta) - set(full))
            raise ValueError(
                f"kda_layers and full_attn_layers must share out the layers from 1 to {count}; "
                f"in both: {both}, in neither: {neither}."
            )
    sparse = _sparse_layers(dsa, sorted(full), count) if dsa is not None else []
    stray = sorted(set(sparse) - set(full))
    if stray:
        raise ValueError(f"dsa_config lists layers {stray}, which are not in full_attn_layers.")
    return tuple("kda" if n in delta else "dsa" if n in sparse else "mla" for n in everything)


def _sparse_layers(dsa: Document, full: list[int], count: int) -> list[int]:
    """Sparse layers, counted from 1: as listed, as typed, or every full-attention layer."""
    found: dict[str, list[int]] = {}
    for key in DSA_LAYERS:
        if dsa.get(key) is not None:
            found[key] = sorted(_layer_list(f"dsa_config.{key}", dsa[key], count))
    for key in DSA_TYPES:
        types = dsa.get(key)
        if types is None:
            continue
        if not isinstance(types, list) or len(types) not in (len(full), count):
            raise ValueError(
                f"dsa_config.{key} is {types!r}; "
                "it must have one entry per layer or per full-attention layer."
            )
        unknown = [t for t in types if not isinstance(t, str | None) or t not in DSA_TYPE_KINDS]
        if unknown:
            known = ", ".join(repr(t) for t in DSA_TYPE_KINDS)
            raise ValueError(
                f"dsa_config.{key} holds {unknown[0]!r}, which is not supported; known are {known}."
            )
        numbers = range(1, count + 1) if len(types) == count else full
        found[key] = [n for n, t in zip(numbers, types, strict=True) if DSA_TYPE_KINDS[t] == "dsa"]
    if not found:
        return full
    first, *others = found.items()
    for key, layers in others:
        if layers != first[1]:
            raise ValueError(
                f"dsa_config.{first[0]} gives layers {first[1]} but dsa_config.{key} gives {layers}."
            )
    return first[1]


def _mlp_kinds(text: Document, count: int, has_experts: bool) -> tuple[Any, ...]:
    if not has_experts:
        return ("dense",) * count
    first, period = text.get("first_k_dense_replace"), text.get("moe_layer_freq")
    first, period = (0 if first is None else first), (1 if period is None else period)
    if type(first) is not int or first < 0:
        raise ValueError(f"first_k_dense_replace is {first!r}; it must be an integer of at least 0.")
    if type(period) is not int or period < 1:
        raise ValueError(f"moe_layer_freq is {period!r}; it must be an integer of at least 1.")
    return mlp_pattern(count, first, period)


def mlp_pattern(count: int, first: int, period: int) -> tuple[Any, ...]:
    """Layers from `first` on whose number, counted from 0, is a multiple of `period` have experts."""
    return tuple("moe" if layer >= first and layer % period == 0 else "dense" for layer in range(count))


def _token_ids(document: Document, text: Document) -> dict[str, int | None]:
    """Special ids; the outer block comes first. The classes' default padding id 0 is not assumed."""
    ids = {}
    for name, key in TOKEN_IDS:
        value = document.get(key)
        value = text.get(key) if value is None else value
        if value is not None and type(value) is not int:
            raise ValueError(f"{key} is {value!r}; it must be one token id or null.")
        ids[name] = value
    return ids


def _vision(document: Document, hidden_size: int) -> VisionConfig | None:
    block = inner_block(document, "vision_config")
    if block is None:
        return None
    values = _section("vision", block)
    merge = block.get("merge_kernel_size", [2, 2])
    if not isinstance(merge, list) or len(merge) != 2 or any(type(n) is not int for n in merge):
        raise ValueError(f"merge_kernel_size is {merge!r}; it must be a list of two integers.")
    for key, size in (("text_hidden_size", hidden_size), ("mm_hidden_size", values["hidden_size"])):
        if block.get(key) is not None and block[key] != size:
            raise ValueError(
                f"{key} is {block[key]!r} in vision_config; the sizes it has to agree with give {size}."
            )
    read = {key for field in fields_of("vision") for key in field.keys} | {"merge_kernel_size"}
    extra = {key: value for key, value in block.items() if key not in read}
    return VisionConfig(**values, merge_height=merge[0], merge_width=merge[1], extra=json.dumps(extra))


def _quantization(document: Document, text: Document) -> Any:
    """ "mxfp4" for routed experts packed in blocks of 32, None without a quantization block."""
    block = inner_block(text, "quantization_config")
    if block is None:
        block = inner_block(document, "quantization_config")
    if block is None:
        return None
    groups = inner_block(block, "config_groups") or {}
    if not groups:
        raise ValueError("quantization_config has no config_groups; they say how the weights are packed.")
    expected: list[tuple[str, Any, Any]] = [
        ("quant_method", block.get("quant_method"), "compressed-tensors"),
        ("format", block.get("format"), "mxfp4-pack-quantized"),
        ("kv_cache_scheme", block.get("kv_cache_scheme"), None),
    ]
    for name in groups:
        group = inner_block(groups, name) or {}
        weights = inner_block(group, "weights") or {}
        expected += [
            ("format", group.get("format", "mxfp4-pack-quantized"), "mxfp4-pack-quantized"),
            ("num_bits", weights.get("num_bits"), 4),
            ("type", weights.get("type", "float"), "float"),
            ("group_size", weights.get("group_size"), 32),
            ("strategy", weights.get("strategy", "group"), "group"),
            ("dynamic", weights.get("dynamic", False), False),
            ("scale_dtype", weights.get("scale_dtype", "torch.uint8"), "torch.uint8"),
            ("symmetric", weights.get("symmetric", True), True),
            ("input_activations", group.get("input_activations"), None),
            ("output_activations", group.get("output_activations"), None),
        ]
    for key, value, wanted in expected:
        if value != wanted:
            raise ValueError(
                f"quantization_config has {key} {value!r}; "
                f"the supported weights are MXFP4, which has {wanted!r} there."
            )
    return "mxfp4"


def to_hf(config: ModelConfig) -> Document:
    """The public file's content in its own order; `from_hf` reads an equal configuration from it, but for empty places
    for experts, which are a matter of the mesh.

    Raises ValueError for a configuration that the public file has no words for.
    """
    from moe28t_jax.config.public_writer import write

    if config.moe is not None:
        config = config.override({"moe.expert_slots": None})
    document = write(config)
    read = from_hf(document, {})
    if read != config:
        names = [
            f.name for f in fields(config) if f.compare and getattr(read, f.name) != getattr(config, f.name)
        ]
        values = "; ".join(f"{name} {getattr(config, name)!r}" for name in names)
        raise ValueError(
            f"The public config.json of model_type {config.model_type!r} cannot express {values}."
        )
    return document
