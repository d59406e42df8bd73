"""The blocks of a public `config.json`: where each is, how a value is read, what must be neutral."""

from __future__ import annotations

from typing import Any

from moe28t_jax.config.public_fields import NEUTRAL, Block, PublicField

Document = dict[str, Any]

NESTED_PREFIX = {"kimi_k3": "language_model.", "kimi_k31": "language_model."}
"""Model types with nested blocks, and the prefix of their text tensors."""

ARCHITECTURES = {
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_k31": "KimiK31ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
}


def text_block(document: Document) -> Document:
    """The block with the text network's sizes: the inner one of a nested form, else the document itself."""
    model_type = document.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(f"model_type is {model_type!r}; the supported ones are {', '.join(ARCHITECTURES)}.")
    if model_type not in NESTED_PREFIX:
        return document
    text = document.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config is {text!r}; a {model_type} configuration needs its sizes there.")
    return text


def inner_block(owner: Document, name: str) -> Document | None:
    """A named inner object, or None where it is absent or null."""
    block = owner.get(name)
    if block is not None and not isinstance(block, dict):
        raise ValueError(f"{name} is {block!r}; it must be an object or null.")
    return block


def dsa_owner(document: Document) -> Document:
    """The block that holds `dsa_config`: the text block, or the outer one where only that has it."""
    text = text_block(document)
    return document if "dsa_config" not in text and "dsa_config" in document else text


def dsa_block(document: Document) -> Document | None:
    """`dsa_config` together with the `index_...` keys that relatives of this model keep in the text block."""
    block = inner_block(dsa_owner(document), "dsa_config")
    loose = {k: v for k, v in text_block(document).items() if k.startswith("index_")}
    return block if not loose else {**loose, **(block or {})}


def read_value(field: PublicField, block: Document, default: Any) -> Any:
    """Value of one field in its block, or `default`. Raises ValueError for a wrong type or contradictions."""
    present = [key for key in field.keys if key in block]
    if not present:
        return default
    key, value = present[0], block[present[0]]
    for other in present[1:]:
        if block[other] != value:
            raise ValueError(
                f"{key} is {value!r} but {other}, another name of it, is {block[other]!r}; "
                "remove one of them."
            )
    if value is None:
        return None if field.nullable else default
    if field.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, field.kind) or (field.kind is int and isinstance(value, bool)):
        words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
        raise ValueError(f"{key} is {value!r}; it must be {words[field.kind]}.")
    return value


def default_prefix(model_type: str) -> str:
    """Prefix of text tensors in the published files of a model type."""
    return NESTED_PREFIX.get(model_type, "")


def require_neutral(document: Document, text: Document) -> None:
    """Raise ValueError, naming field and value, for what changes the mathematics and is not supported."""
    blocks: dict[Block, Document | None] = {
        "text": text,
        "linear_attn_config": inner_block(text, "linear_attn_config"),
        "dsa_config": dsa_block(document),
        "vision_config": inner_block(document, "vision_config"),
    }
    for name, block in blocks.items():
        for neutral in NEUTRAL[name]:
            for key in neutral.keys:
                if block is not None and key in block and block[key] not in neutral.allowed:
                    raise ValueError(
                        f"{key} is {block[key]!r} in {name}: {neutral.meaning} is not supported."
                    )
    if document.get("tie_word_embeddings"):
        raise ValueError(
            "tie_word_embeddings is True: an output head that shares the embedding table is not supported."
        )
    # The public class defaults this to false, which means rotary positions.
    if text.get("kv_lora_rank") is not None and text.get("mla_use_nope", False) is not True:
        raise ValueError(
            f"mla_use_nope is {text.get('mla_use_nope', False)!r} (absent means false): "
            "attention with rotary positions is not supported; only true is."
        )
    for key in ("rope_scaling", "rope_parameters"):
        scaling = text.get(key)
        kind = (
            (scaling.get("rope_type") or scaling.get("type") or "default")
            if isinstance(scaling, dict)
            else scaling
        )
        if kind not in (None, "default"):
            raise ValueError(
                f"{key} is {scaling!r}: scaled rotary positions are not supported; only null is."
            )
    heads, key_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if key_heads is not None and key_heads != heads:
        raise ValueError(
            f"num_key_value_heads is {key_heads!r} and num_attention_heads is {heads!r}: "
            "grouped-query attention is not supported; they must be equal."
        )
