"""Bits per byte of texts under a model: the likelihood loop behind `moe28t score`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.api import Model
from moe28t_jax.engine.steps import round_up
from moe28t_jax.model.network import Inputs, project_logits, run
from moe28t_jax.parallel.rules import constrain
from moe28t_jax.parallel.vocabulary import log_probabilities

_CHUNK = 512


@dataclass(frozen=True)
class FileScore:
    """One text: its UTF-8 bytes, tokens, and the model's code length in bits (from a beginning-of-text token)."""

    name: str
    num_bytes: int
    num_tokens: int
    bits: float

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.num_bytes


@partial(jax.jit, static_argnames=("structure", "config"), donate_argnames=("cache",))
def _chunk_bits(leaves, structure, token_ids_BT, targets_BT, lengths_B, cache, config):
    """Summed -log2 p(target) over the real tokens of a chunk, per row; and the cache behind it."""
    parameters = jax.tree.unflatten(structure, leaves)
    result = run(parameters, Inputs(token_ids_BT, lengths_B), cache, config)
    logits_BTV = project_logits(parameters, result.hidden_BTD)
    nats_BT = -log_probabilities(logits_BTV, targets_BT)
    valid_BT = jnp.arange(nats_BT.shape[1], dtype=jnp.int32) < lengths_B[:, None]
    bits_B = jnp.sum(jnp.where(valid_BT, nats_BT, 0.0), axis=1) / math.log(2)
    # Whole on every device, so that each process can read it.
    return constrain(bits_B, None), result.cache


def score_texts(
    model: Model,
    texts: Sequence[tuple[str, str]],
    batch: int = 4,
    on_tokens: Callable[[int], None] | None = None,
) -> list[FileScore]:
    """Score (name, text) pairs; results keep their order.

    Each text is read whole, in chunks with the cache carried on, after one beginning-of-text token; its bits
    are the sum of -log2 p over all its tokens. `on_tokens` is called with the number of tokens just scored.
    Raises ValueError for an empty text, for one longer than the model's context, and without a tokenizer.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("This checkpoint folder has no tokenizer, so text cannot be scored.")
    encoded = []
    for name, text in texts:
        if not text:
            raise ValueError(f"{name!r} is empty; bits per byte need at least one byte.")
        ids = tokenizer.encode(text)
        if len(ids) > model.max_context:
            shorter = model.max_context < model.config.max_context
            more = " or load the model with a larger max_context" if shorter else ""
            raise ValueError(
                f"{name!r} has {len(ids)} tokens and the context holds {model.max_context}; split the text{more}."
            )
        encoded.append(np.asarray([tokenizer.bos_id, *ids], np.int32))

    steps = model.steps
    leaves, structure = jax.tree.flatten(model.parameters.text_only())
    bits = np.zeros(len(texts))
    # Texts of similar length share a batch; short batches are filled up with empty rows.
    order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))
    for begin in range(0, len(order), batch):
        members = order[begin : begin + batch]
        longest = max(len(encoded[index]) - 1 for index in members)
        chunk = min(_CHUNK, round_up(longest))
        # Few distinct cache sizes: each is a compiled program.
        capacity = min(max(chunk, 1 << (longest - 1).bit_length()), round_up(model.config.max_context))
        cache = steps.new_cache(batch, capacity)
        for start in range(0, longest, chunk):
            tokens = np.zeros((batch, chunk), np.int32)
            targets = np.zeros((batch, chunk), np.int32)
            lengths = np.zeros((batch,), np.int32)
            for row, index in enumerate(members):
                piece = encoded[index][start : start + chunk + 1]
                count = max(len(piece) - 1, 0)
                tokens[row, :count], targets[row, :count], lengths[row] = piece[:-1], piece[1:], count
            with steps.on_mesh():
                found_B, cache = _chunk_bits(leaves, structure, tokens, targets, lengths, cache, model.config)
            bits[members] += np.asarray(found_B, np.float64)[: len(members)]
            if on_tokens is not None:
                on_tokens(int(lengths.sum()))
    return [
        FileScore(name, len(text.encode()), len(encoded[index]) - 1, float(bits[index]))
        for index, (name, text) in enumerate(texts)
    ]
