"""Token-by-token generation."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from numbers import Integral, Real

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe28t_jax.config import ModelConfig
from moe28t_jax.engine.sampling import NOT_A_TOKEN, sample
from moe28t_jax.engine.steps import Steps, round_up
from moe28t_jax.parallel.agreement import seed_of_first_device

# Caches come in these steps, so that prompts of similar length share one compiled program.
_CACHE_GRID = 256
_SEEDS = 2**31
_MAX_TEMPERATURE = 1e6


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"


def check_sampling(
    max_new_tokens: int = 1, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None
) -> None:
    """Raise ValueError, in a sentence, for values that no model takes."""
    for name, value, kind, example in (
        ("max_new_tokens", max_new_tokens, Integral, 256),
        ("temperature", temperature, Real, 0.7),
        ("top_p", top_p, Real, 0.9),
        ("seed", seed, Integral | None, 7),
    ):
        if isinstance(value, bool) or not isinstance(value, kind):
            number = "whole number" if kind is not Real else "number"
            quoted = isinstance(value, str) and value.strip().isdecimal()
            way = "pass it without quotes" if quoted else f"pass one such as {example}"
            raise ValueError(f"{name} is {value!r}; it must be a {number}: {way}.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    if not 0 <= temperature <= _MAX_TEMPERATURE:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) to {_MAX_TEMPERATURE:g}.")
    if seed is not None and not 0 <= seed < _SEEDS:
        raise ValueError(f"seed is {seed}; it must be a whole number from 0 to {_SEEDS - 1}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1.")


def check_generation(
    config: ModelConfig,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    max_context: int | None = None,
) -> None:
    """Raise ValueError, in a sentence, for what `generate_ids` could not do; cheap, nothing is computed."""
    limit = max_context or config.max_context
    if not prompt_ids:
        raise ValueError("The prompt has no tokens; give at least one character or token id.")
    if min(prompt_ids) < 0 or max(prompt_ids) >= config.vocab_size:
        bad = next(i for i in prompt_ids if not 0 <= i < config.vocab_size)
        raise ValueError(f"Token id {bad} is outside the vocabulary of {config.vocab_size} ids.")
    if len(prompt_ids) >= limit:
        more = " or load the model with a larger max_context" if limit < config.max_context else ""
        raise ValueError(
            f"The prompt has {len(prompt_ids)} tokens and the context holds {limit}; shorten it{more}."
        )
    check_sampling(max_new_tokens, temperature, top_p, seed)


def generate_ids(
    steps: Steps,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    max_context: int | None = None,
    image_features: Float[Array | np.ndarray, "N D"] | None = None,
) -> Iterator[tuple[int | None, FinishReason | None]]:
    """Continue a prompt; yields (token, None) as tokens are drawn and (None, reason) once at the end.

    A stop token ends generation and is not yielded. `seed` None draws one from the operating system, the same for all
    processes of the mesh.
    `image_features`: one row per media pad token of the prompt, in order (`model.vision.encode_prepared`).
    Raises ValueError for an empty prompt, unknown ids, a prompt beyond the context, bad sampling values, or image
    features that are not as many as media pad tokens; FloatingPointError where logits are not finite.
    """
    config = steps.config
    check_generation(config, prompt_ids, max_new_tokens, temperature, top_p, seed, max_context)
    limit = max_context or config.max_context
    count = min(max_new_tokens, limit - len(prompt_ids))
    capacity = round_up(min(round_up(len(prompt_ids) + count, _CACHE_GRID), config.max_context))
    cache = steps.new_cache(1, capacity)
    prompt = np.asarray([prompt_ids], np.int32)
    lengths = np.asarray([len(prompt_ids)], np.int32)
    logits_BV, cache = steps.prefill(prompt, lengths, cache, image_features)
    if seed is None:
        seed = seed_of_first_device(secrets.randbits(31), steps.mesh)
    key = jax.random.key(seed)
    tokens_B = _sample(logits_BV, jax.random.fold_in(key, 0), jnp.float32(temperature), jnp.float32(top_p))
    active = jnp.ones((1,), bool)
    for index in range(count):
        token = int(tokens_B[0])
        if token == NOT_A_TOKEN:
            raise FloatingPointError(
                f"The logits after {len(prompt_ids) + index} tokens are not numbers, so no token can be drawn; the "
                "weights are damaged, or too large for the dtype: load them again, or with dtype float32."
            )
        if token in stop_ids:
            yield None, FinishReason.STOP
            return
        yield token, None
        if index + 1 < count:
            step_key = jax.random.fold_in(key, index + 1)
            tokens_B, _, cache = steps.decode(tokens_B, active, cache, step_key, temperature, top_p)
    yield None, FinishReason.LENGTH


_sample = jax.jit(sample)
