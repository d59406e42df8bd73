"""The network: one `forward` for prefill, chunked prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe28t_jax.config import ModelConfig, segments
from moe28t_jax.model.cache import Cache, init_cache
from moe28t_jax.model.checks import check_inputs
from moe28t_jax.model.depth import scan_segment
from moe28t_jax.model.layer import Prepare, Step, Stream, mixed, run_layer, run_prepared_layer
from moe28t_jax.model.numerics import compute_dtype, rms_norm
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.model.pipeline import pipeline_segment
from moe28t_jax.parallel.mesh import current_mesh
from moe28t_jax.parallel.rules import constrain
from moe28t_jax.parallel.sharding import cache_shardings
from moe28t_jax.parallel.vocabulary import embed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """New tokens of a batch, right padded.

    token_ids: int32 [B, T]. lengths: int32 [B], how many of them are real (None: all). image_features: [N, D]
    rows that replace the embeddings at the media pad tokens of this call, in reading order of the batch; more rows
    than tokens are padding and a token without a row becomes NaN inside a compiled program; elsewhere both are refused.
    """

    token_ids: Any
    lengths: Any = None
    image_features: Any = None


class Result(NamedTuple):
    """Final normalised hidden states [B, T, D], the cache behind them, and what was collected per layer."""

    hidden_BTD: jax.Array
    cache: Cache | None
    auxiliary: list[dict[str, jax.Array]]


def _embed(
    parameters: Parameters, inputs: Inputs, valid_BT: Bool[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T D"]:
    x_BTD = embed(parameters["embedding"], jnp.asarray(inputs.token_ids))
    if inputs.image_features is None:
        return x_BTD
    features_ND = jnp.asarray(inputs.image_features)
    # Padding may hold any id, the media pad's too.
    media_BT = (inputs.token_ids == config.media_pad_id) & valid_BT
    order_BT = jnp.cumsum(media_BT.reshape(-1), dtype=jnp.int32).reshape(media_BT.shape) - 1
    # A missing row cannot raise inside a compiled program; NaN is seen, the last row again would not be.
    features_BTD = features_ND.at[order_BT].get(mode="fill", fill_value=jnp.nan).astype(x_BTD.dtype)
    return jnp.where(media_BT[:, :, None], features_BTD, x_BTD)


def _lengths(inputs: Inputs, count: int) -> Int[Array, " B"]:
    if inputs.lengths is None:
        return jnp.full((len(inputs.token_ids),), count, jnp.int32)
    # Clipped before the cast, which would wrap what int32 cannot hold.
    lengths = inputs.lengths if isinstance(inputs.lengths, jax.Array) else np.asarray(inputs.lengths)
    return jnp.asarray(lengths.clip(0, count)).astype(jnp.int32)


def run(
    parameters: Parameters,
    inputs: Inputs,
    cache: Cache | None,
    config: ModelConfig,
    collect: frozenset[str] = frozenset(),
    prepare: Prepare | None = None,
) -> Result:
    """All layers and the final norm.

    cache: tokens before these; None when there are none and none will follow (scoring, training).
    collect: names of what to return per layer: `partial_sums`, `router`, `index_sets`, `index_scores`,
    `index_keys`, `indexer_loss`, `delta_gates` (`log_decay` [B, T, H, K] and `beta` [B, T, H] of delta layers),
    `residual_weights` ([B, T, 2, J + 1]: what attention and MLP read of the J snapshots, 0 where there is none
    yet, and of the running sum, last). What is not named costs nothing.
    prepare: for training, without a cache: called with what is held of a layer's parameters (float arrays) and its
    number, gives what the layer computes with. Layers are then computed again for gradients (only their inputs are
    kept) and prepared again.

    Raises ValueError for `prepare` with a cache, and with pipeline stages.
    """
    if not hasattr(inputs.token_ids, "shape"):
        inputs = replace(inputs, token_ids=jnp.asarray(inputs.token_ids))
    check_inputs(parameters, inputs, cache, config)
    batch, count = inputs.token_ids.shape
    lengths_B = _lengths(inputs, count)
    valid_BT: Bool[Array, "B T"] = jnp.arange(count, dtype=jnp.int32)[None, :] < lengths_B[:, None]
    starts_B: Int[Array, " B"] = jnp.zeros((batch,), jnp.int32) if cache is None else cache.lengths_B
    step = Step(starts_B, lengths_B, valid_BT, config, collect, prepare)

    with jax.named_scope("embedding"):
        x_BTD = _embed(parameters, inputs, valid_BT, config)
        stream = Stream(x_BTD if prepare is None else step.between(x_BTD), (), None)
    mesh = current_mesh()
    stages = 1 if mesh is None else mesh.shape["stage"]
    if prepare is not None and (cache is not None or stages > 1):
        raise ValueError(
            "Parameters are prepared layer by layer in training, without a cache and without pipeline stages; there is "
            f"{'a cache' if cache is not None else f'a mesh with {stages} stages'}; leave it out, or take stage 1."
        )
    new_segments: list[list[Any]] = []
    auxiliary: list[dict[str, jax.Array]] = []
    for index, segment in enumerate(segments(config, parameters.stacked(config))):
        places = parameters.segments[index]
        caches = None if cache is None else cache.segments[index]
        if segment.repeats > 1:
            with jax.named_scope(f"layers_{segment.first}_to_{segment.first + segment.num_layers - 1}"):
                run_segment = pipeline_segment if stages > 1 else scan_segment
                stream, caches, collected = run_segment(segment, places, stream, caches, step)
            auxiliary += collected
        else:
            caches = None if caches is None else list(caches)
            for position in range(segment.period):
                layer = segment.first + position
                with jax.named_scope(f"layer_{layer}"):
                    if prepare is not None:
                        stream, collected = run_prepared_layer(
                            places[position], stream, layer, config.starts_block(layer), step
                        )
                        auxiliary.append(collected)
                        continue
                    stream, layer_cache, collected = run_layer(
                        places[position],
                        stream,
                        None if caches is None else caches[position],
                        layer,
                        None,
                        config.starts_block(layer),
                        step,
                    )
                if caches is not None:
                    caches[position] = layer_cache
                auxiliary.append(collected)
        if caches is not None:
            new_segments.append(caches)
    with jax.named_scope("final_norm"):
        output_mix = parameters.output_mix if config.residual_block_size is not None else None
        hidden_BTD = step.inside(
            rms_norm(mixed(stream, output_mix, config), parameters["final_norm"], config.rms_norm_eps)
        )
    new_cache = None if cache is None else Cache(cache.lengths_B + step.lengths_B, new_segments)
    if new_cache is not None and mesh is not None:
        new_cache = jax.lax.with_sharding_constraint(new_cache, cache_shardings(new_cache, mesh))
    return Result(hidden_BTD, new_cache, auxiliary)


def project_logits(parameters: Parameters, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Output head: float32 (float64) logits, not rounded to the activation dtype."""
    with jax.named_scope("head"):
        logits = jax.lax.dot_general(
            hidden,
            parameters["head"].astype(hidden.dtype),
            (((hidden.ndim - 1,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=compute_dtype(hidden.dtype),
        )
        if hidden.ndim in (2, 3):
            logits = constrain(logits, "batch", *("token",) * (hidden.ndim - 2), "vocab")
        return logits


def last_hidden(hidden_BTD: Float[Array, "B T D"], lengths_B: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Each row's state at its last real token (at token 0 for a row without any)."""
    index_B11 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
    if current_mesh() is None:
        return jnp.take_along_axis(hidden_BTD, index_B11, axis=1)[:, 0]
    # A sum of which one term is not zero: tokens that lie on other devices stay there.
    is_last_BT1 = jnp.arange(hidden_BTD.shape[1], dtype=jnp.int32)[None, :, None] == index_B11
    last_BD = jnp.sum(jnp.where(is_last_BT1, hidden_BTD, jnp.zeros((), hidden_BTD.dtype)), axis=1)
    return constrain(last_BD, "batch", None)


def forward(
    parameters: Parameters,
    inputs: Inputs | Mapping[str, Any],
    cache: Cache | None,
    config: ModelConfig,
    logits: Literal["all", "last"] = "all",
) -> tuple[Float[Array, "B *T V"], Cache | None]:
    """Logits of the next token after every new token, and the cache that holds them.

    parameters: see `moe28t_jax.model.parameters`; their embedding's dtype is the activations' dtype.
    inputs: `Inputs`, or a mapping with its fields: `token_ids` [B, T] int32, right padded; `lengths` [B];
        `image_features`.
    cache: from `init_cache` or an earlier call; it continues at each row's own length, so prefill, chunked
        prefill and decode are this one function with other shapes. A call with more tokens than the cache holds
        is refused, and so is a row that would overflow where values are known; inside a compiled program they are
        not, so the caller keeps count (the engine does): tokens that no longer fit are not kept.
    logits: `all` gives [B, T, V], `last` only each row's last real token, [B, V]. float32 (float64).
    """
    if isinstance(inputs, Mapping):
        unknown = sorted(set(inputs) - {"token_ids", "lengths", "image_features"})
        if unknown or "token_ids" not in inputs:
            raise ValueError(
                f"inputs has the keys {sorted(inputs)}; expected token_ids and, if needed, lengths and image_features."
            )
        inputs = Inputs(**inputs)
    if logits not in ("all", "last"):
        raise ValueError(f"logits is {logits!r}; it must be 'all' or 'last'.")
    result = run(parameters, inputs, cache, config)
    hidden = result.hidden_BTD
    if logits == "last":
        hidden = last_hidden(hidden, _lengths(inputs, hidden.shape[1]))
    return project_logits(parameters, hidden), result.cache


__all__ = [
    "Inputs", "Result", "forward", "init_cache", "last_hidden", "project_logits", "run",
]  # fmt: skip
