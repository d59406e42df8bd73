"""What `forward` refuses: shapes and dtypes always, values wherever they are known (outside of `jax.jit`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.cache import Cache
from moe28t_jax.model.parameters import Parameters

if TYPE_CHECKING:
    from moe28t_jax.model.network import Inputs


def check_inputs(parameters: Parameters, inputs: Inputs, cache: Cache | None, config: ModelConfig) -> None:
    """Raise ValueError, in a sentence, for inputs that do not fit one another, the cache or the configuration."""
    shape = np.shape(inputs.token_ids)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"token_ids has shape {shape}; expected [batch, tokens] with at least one of each.")
    if inputs.lengths is not None and np.shape(inputs.lengths) != shape[:1]:
        raise ValueError(
            f"lengths has shape {np.shape(inputs.lengths)}; expected ({shape[0]},), one length per row of token_ids."
        )
    for name, value in (("token_ids", inputs.token_ids), ("lengths", inputs.lengths)):
        if value is not None and not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise ValueError(f"{name} has dtype {jnp.result_type(value)}; expected integers.")
    if cache is not None:
        _check_cache(parameters, shape, cache)
    if inputs.image_features is not None:
        _check_features(parameters, inputs, config)
    _check_values(inputs, cache, config)


def _check_cache(parameters: Parameters, shape: tuple[int, ...], cache: Cache) -> None:
    if cache.batch != shape[0]:
        raise ValueError(f"The cache has {cache.batch} rows and token_ids {shape[0]}; they must be equal.")
    if cache.capacity is not None and shape[1] > cache.capacity:
        raise ValueError(
            f"token_ids has {shape[1]} tokens per row and the cache holds {cache.capacity}; make a larger cache or "
            "pass fewer tokens at a time."
        )
    if [len(segment) for segment in cache.segments] != [len(segment) for segment in parameters.segments]:
        raise ValueError(
            "Cache and parameters are laid out differently; pass stacked=parameters.stacked(config) to init_cache."
        )


def _check_features(parameters: Parameters, inputs: Inputs, config: ModelConfig) -> None:
    if config.media_pad_id is None:
        raise ValueError("Image features were given, but this configuration has no media pad token.")
    shape, width = np.shape(inputs.image_features), parameters["embedding"].shape[-1]
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(
            f"image_features has shape {shape}; expected [patches, {width}], one row per media pad token."
        )


def _known(value: Any) -> np.ndarray | None:
    """The values of an array that is not being traced."""
    return None if value is None or isinstance(value, Tracer) else np.asarray(value)


def _check_values(inputs: Inputs, cache: Cache | None, config: ModelConfig) -> None:
    ids = _known(inputs.token_ids)
    lengths = None if ids is None else np.full(ids.shape[:1], ids.shape[1])
    if inputs.lengths is not None:
        lengths = _known(inputs.lengths)
        if lengths is not None:
            lengths = np.clip(lengths, 0, np.shape(inputs.token_ids)[1])
    if lengths is None:
        return
    if cache is not None and cache.capacity is not None and (held := _known(cache.lengths_B)) is not None:
        row = int(np.argmax(held + lengths))
        if held[row] + lengths[row] > cache.capacity:
            raise ValueError(
                f"Row {row} of the cache holds {held[row]} tokens and {lengths[row]} more are given, but it has room "
                f"for {cache.capacity}; make a larger cache."
            )
    if ids is None:
        return
    real = np.arange(ids.shape[1])[None, :] < lengths[:, None]
    wrong = real & ((ids < 0) | (ids >= config.vocab_size))
    if wrong.any():
        raise ValueError(
            f"Token id {ids[wrong][0]} is outside the vocabulary of {config.vocab_size} ids; pass ids of this "
            "model's tokenizer."
        )
    if inputs.image_features is not None:
        pads, rows = int((real & (ids == config.media_pad_id)).sum()), np.shape(inputs.image_features)[0]
        if pads != rows:
            raise ValueError(
                f"token_ids has {pads} media pad tokens and image_features {rows} rows; expected one row per token."
            )
