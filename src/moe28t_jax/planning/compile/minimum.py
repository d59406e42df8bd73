"""The least that any program of a step has to move: what a compiled one is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel.expert_places import destinations

_BYTES = 2  # of an activation, a latent or an index key: bfloat16


def least_memory_bytes(
    config: ModelConfig,
    axes: Mapping[str, int],
    phase: str,
    batch: int,
    context: int,
    chunk: int,
    held: Mapping[str, int],
    routing: Literal["any", "uniform"] = "any",
) -> int:
    """Bytes of main memory per device and step: each weight, state and cache byte that is needed, once.

    held: bytes of one device by what they are, as `program.Program.argument_bytes`. Of the experts those count that
    the tokens can choose at most (a compiled program has room for any routing, and its own figures are for the
    worst), or with `uniform` routing those that they choose on average; recurrent states are read and written; index
    keys are read; of the latents those rows that are selected, all of them in layers without an indexer. The embedding
    table and activations count nothing. In training what is held is read and written once; gathered copies and
    gradients count nothing either.
    """
    if phase == "train":
        return 2 * sum(held.values())
    tokens = batch * (1 if phase == "decode" else min(chunk, context))
    touched = 1.0
    if config.moe is not None:
        per_copy = tokens / axes["data"]
        share = config.moe.num_experts_per_token / config.moe.num_experts
        touched = min(1.0, per_copy * share) if routing == "any" else 1.0 - (1.0 - share) ** per_copy
    weights = held.get("experts", 0) * touched + held.get("dense", 0)
    latents = held.get("latents", 0)
    if config.dsa is not None and latents:
        sparse = config.attention_kinds.count("dsa")
        share = sparse / (sparse + config.attention_kinds.count("mla"))
        new = 1 if phase == "decode" else min(chunk, context)
        kept = min(1.0, config.dsa.top_k * new / context)
        latents *= 1.0 - share + share * kept
    return round(weights + 2 * held.get("state", 0) + held.get("index_keys", 0) + latents)


def least_all_to_all_bytes(config: ModelConfig, axes: Mapping[str, int], tokens: int, passes: int = 1) -> int:
    """Bytes that one device sends per step to its experts' devices and back: the latent of each of its tokens once per
    distinct destination under uniform routing, `tokens` being those of the whole mesh. The latent's channels lie over
    `tensor` before and after, so that each token is first brought together on its device. passes: 2 in training, where
    gradients go the same ways."""
    moe = config.moe
    ranks = axes["expert"] * axes["tensor"]
    if moe is None or ranks == 1:
        return 0
    own = tokens / (axes["data"] * ranks * axes["context"])
    sent = destinations(ranks, moe)
    # A device runs the layers of its pipeline stage.
    layers = config.mlp_kinds.count("moe") / axes["stage"]
    gathered = 0.0 if moe.latent_size is None else (axes["tensor"] - 1) / axes["tensor"]
    return round(
        passes * layers * 2 * own * (sent + gathered) * (moe.latent_size or config.hidden_size) * _BYTES
    )
