"""The network: one `forward` for prefill, chunked prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from moe28t_jax.config import ModelConfig, Segment, segments
from moe28t_jax.model.cache import Cache, KDACache, LatentCache, init_cache
from moe28t_jax.model.checks import check_inputs
from moe28t_jax.model.kda import gates, kda_attention
from moe28t_jax.model.mla import mla_attention
from moe28t_jax.model.moe import gated_mlp, mixture_of_experts
from moe28t_jax.model.numerics import compute_dtype, rms_norm
from moe28t_jax.model.parameters import Group, Parameters
from moe28t_jax.model.residual import mix, mixing_weights


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


class Stream(NamedTuple):
    """What flows through depth: the running sum and the snapshots of earlier blocks.

    Inline layers hold snapshots as a tuple and `count` None; a scan holds a fixed buffer [J, B, T, D] and a
    traced count.
    """

    partial_BTD: jax.Array
    snapshots: Any
    count: jax.Array | None


class Step(NamedTuple):
    """What all layers of one call share."""

    starts_B: jax.Array
    lengths_B: jax.Array
    valid_BT: jax.Array
    config: ModelConfig
    collect: frozenset[str]


def _mixed(stream: Stream, parameters: Group | None, config: ModelConfig) -> Float[Array, "B T D"]:
    if parameters is None:
        return stream.partial_BTD
    snapshots = stream.snapshots
    candidates = [*(snapshots[j] for j in range(len(snapshots))), stream.partial_BTD]
    return mix(candidates, parameters["norm"], parameters["query"], config.rms_norm_eps, stream.count)


def _mixing_weights(stream: Stream, parameters: Group, config: ModelConfig) -> Float[Array, "B T J"]:
    """Weights of `_mixed`, on a fixed axis: one per snapshot the network can hold, the running sum last."""
    snapshots = [stream.snapshots[j] for j in range(len(stream.snapshots))]
    weights_BTJ = mixing_weights(
        [*snapshots, stream.partial_BTD],
        parameters["norm"],
        parameters["query"],
        config.rms_norm_eps,
        stream.count,
    )
    absent = jnp.zeros((*weights_BTJ.shape[:2], config.num_snapshots - len(snapshots)), weights_BTJ.dtype)
    return jnp.concatenate([weights_BTJ[..., :-1], absent, weights_BTJ[..., -1:]], axis=-1)


def _attention(
    parameters: Group, x_BTD: jax.Array, cache: Any, layer: int, repeat: jax.Array | None, step: Step
) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    config = step.config
    if config.attention_kinds[layer] != "kda":
        indexer = parameters.indexer if config.attention_kinds[layer] == "dsa" else None
        return mla_attention(
            parameters.attention,
            indexer,
            x_BTD,
            cache,
            step.starts_B,
            step.lengths_B,
            config,
            repeat,
            step.collect,
        )
    fresh = cache is None
    if fresh:
        kda = config.kda
        assert kda is not None
        batch, dtype = x_BTD.shape[0], x_BTD.dtype
        cache = KDACache(
            jnp.zeros((batch, kda.num_heads, kda.head_dim, kda.head_dim), compute_dtype(dtype)),
            jnp.zeros((batch, kda.conv_size - 1, 3 * kda.size), dtype),
        )
    cache_repeat = None if fresh else repeat
    out_BTD, cache = kda_attention(parameters.attention, x_BTD, cache, step.lengths_B, config, cache_repeat)
    auxiliary = {}
    if "delta_gates" in step.collect:
        auxiliary["log_decay"], auxiliary["beta"] = gates(parameters.attention, x_BTD, config)
    return out_BTD, None if fresh else cache, auxiliary


def _layer(
    parameters: Group,
    stream: Stream,
    cache: KDACache | LatentCache | None,
    layer: int,
    repeat: jax.Array | None,
    starts_block: bool | jax.Array,
    step: Step,
) -> tuple[Stream, Any, dict[str, jax.Array]]:
    """One layer. `layer` is its number, or that of its first repeat; `starts_block` may be traced in a scan."""
    config = step.config
    residual = config.residual_block_size is not None

    h_BTD = _mixed(stream, parameters.attention_mix if residual else None, config)
    x_BTD = rms_norm(h_BTD, parameters["attention_norm"], config.rms_norm_eps)
    out_BTD, cache, auxiliary = _attention(parameters, x_BTD, cache, layer, repeat, step)
    weights = []
    if residual and "residual_weights" in step.collect:
        weights.append(_mixing_weights(stream, parameters.attention_mix, config))

    partial_BTD, snapshots, count = stream
    if isinstance(starts_block, bool):
        if starts_block:
            if count is None:
                snapshots = (*snapshots, partial_BTD)
            else:
                snapshots = jax.lax.dynamic_update_index_in_dim(snapshots, partial_BTD, count, 0)
                count = count + 1
            partial_BTD = out_BTD
        else:
            partial_BTD = partial_BTD + out_BTD
    else:
        assert count is not None
        slot_BTD = jax.lax.dynamic_index_in_dim(snapshots, count, keepdims=False)
        slot_BTD = jnp.where(starts_block, partial_BTD, slot_BTD)
        snapshots = jax.lax.dynamic_update_index_in_dim(snapshots, slot_BTD, count, 0)
        count = count + starts_block.astype(count.dtype)
        partial_BTD = jnp.where(starts_block, out_BTD, partial_BTD + out_BTD)
    stream = Stream(partial_BTD, snapshots, count)

    h_BTD = _mixed(stream, parameters.mlp_mix if residual else None, config)
    if weights:
        weights.append(_mixing_weights(stream, parameters.mlp_mix, config))
    x_BTD = rms_norm(h_BTD, parameters["mlp_norm"], config.rms_norm_eps)
    if config.mlp_kinds[layer] == "dense":
        with jax.named_scope("dense_mlp"):
            out_BTD = gated_mlp(parameters.mlp, x_BTD, config)
    else:
        out_BTD, more = mixture_of_experts(parameters.mlp, x_BTD, step.valid_BT, config, repeat, step.collect)
        auxiliary |= more
    stream = stream._replace(partial_BTD=stream.partial_BTD + out_BTD)
    if weights:
        auxiliary["residual_weights"] = jnp.stack(weights, axis=2)
    if "partial_sums" in step.collect:
        auxiliary["partial_sums"] = stream.partial_BTD
    return stream, cache, auxiliary


def _is_stacked_only(path: tuple[Any, ...]) -> bool:
    """Expert stacks are indexed by the kernel, never sliced."""
    return any(getattr(key, "name", getattr(key, "key", None)) == "experts" for key in path)


def _scan_segment(
    segment: Segment, places: Any, stream: Stream, caches: list[Any] | None, step: Step
) -> tuple[Stream, list[Any] | None, list[dict[str, jax.Array]]]:
    """Run a repeated segment as one scanned body over its repeats."""
    config = step.config
    pushed = sum(config.starts_block(layer) for layer in range(segment.first))
    if config.residual_block_size is not None:
        shape = stream.partial_BTD.shape
        buffer = jnp.zeros((config.num_snapshots, *shape), stream.partial_BTD.dtype)
        for index, snapshot in enumerate(stream.snapshots):
            buffer = buffer.at[index].set(snapshot)
        stream = Stream(stream.partial_BTD, buffer, jnp.int32(pushed))

    paths, structure = jax.tree_util.tree_flatten_with_path([list(places)])
    whole = {index: leaf for index, (path, leaf) in enumerate(paths) if _is_stacked_only(path)}
    sliced = [leaf for index, (_, leaf) in enumerate(paths) if index not in whole]
    flags = [
        [config.starts_block(segment.layer(repeat, position)) for repeat in range(segment.repeats)]
        for position in range(segment.period)
    ]

    def body(carry, xs):
        stream, caches = carry
        repeat, leaves, starts = xs
        leaves = iter(leaves)
        merged = [whole[index] if index in whole else next(leaves) for index in range(len(paths))]
        [groups] = jax.tree_util.tree_unflatten(structure, merged)
        caches = None if caches is None else list(caches)
        collected = []
        for position, group in enumerate(groups):
            starts_block = starts[position] if any(flags[position]) else False
            cache = None if caches is None else caches[position]
            stream, cache, auxiliary = _layer(
                group, stream, cache, segment.first + position, repeat, starts_block, step
            )
            if caches is not None:
                caches[position] = cache
            collected.append(auxiliary)
        return (stream, caches), collected

    xs = (
        jnp.arange(segment.repeats, dtype=jnp.int32),
        sliced,
        [jnp.asarray(flag, dtype=bool) for flag in flags],
    )
    (stream, caches), collected = jax.lax.scan(body, (stream, caches), xs)
    if config.residual_block_size is not None:
        pushed += sum(map(sum, flags))
        stream = Stream(stream.partial_BTD, tuple(stream.snapshots[index] for index in range(pushed)), None)
    auxiliary = [
        jax.tree.map(lambda x, repeat=repeat: x[repeat], collected[position])
        for repeat in range(segment.repeats)
        for position in range(segment.period)
    ]
    return stream, caches, auxiliary


def _embed(
    parameters: Parameters, inputs: Inputs, valid_BT: Bool[Array, "B T"], config: ModelConfig
) -> Float[Array, "B T D"]:
    x_BTD = parameters["embedding"][inputs.token_ids]
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
) -> Result:
    """All layers and the final norm.

    cache: tokens before these; None when there are none and none will follow (scoring, training).
    collect: names of what to return per layer: `partial_sums`, `router`, `index_sets`, `index_scores`,
    `index_keys`, `indexer_loss`, `delta_gates` (`log_decay` [B, T, H, K] and `beta` [B, T, H] of delta layers),
    `residual_weights` ([B, T, 2, J + 1]: what attention and MLP read of the J snapshots, 0 where there is none
    yet, and of the running sum, last). What is not named costs nothing.
    """
    if not hasattr(inputs.token_ids, "shape"):
        inputs = replace(inputs, token_ids=jnp.asarray(inputs.token_ids))
    check_inputs(parameters, inputs, cache, config)
    batch, count = inputs.token_ids.shape
    lengths_B = _lengths(inputs, count)
    valid_BT: Bool[Array, "B T"] = jnp.arange(count, dtype=jnp.int32)[None, :] < lengths_B[:, None]
    starts_B: Int[Array, " B"] = jnp.zeros((batch,), jnp.int32) if cache is None else cache.lengths_B
    step = Step(starts_B, lengths_B, valid_BT, config, collect)

    with jax.named_scope("embedding"):
        stream = Stream(_embed(parameters, inputs, valid_BT, config), (), None)
    new_segments: list[list[Any]] = []
    auxiliary: list[dict[str, jax.Array]] = []
    for index, segment in enumerate(segments(config, parameters.stacked(config))):
        places = parameters.segments[index]
        caches = None if cache is None else cache.segments[index]
        if segment.repeats > 1:
            with jax.named_scope(f"layers_{segment.first}_to_{segment.first + segment.num_layers - 1}"):
                stream, caches, collected = _scan_segment(segment, places, stream, caches, step)
            auxiliary += collected
        else:
            caches = None if caches is None else list(caches)
            for position in range(segment.period):
                layer = segment.first + position
                with jax.named_scope(f"layer_{layer}"):
                    stream, layer_cache, collected = _layer(
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
        hidden_BTD = rms_norm(
            _mixed(stream, output_mix, config), parameters["final_norm"], config.rms_norm_eps
        )
    new_cache = None if cache is None else Cache(cache.lengths_B + step.lengths_B, new_segments)
    return Result(hidden_BTD, new_cache, auxiliary)


def project_logits(parameters: Parameters, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Output head: float32 (float64) logits, not rounded to the activation dtype."""
    with jax.named_scope("head"):
        return jax.lax.dot_general(
            hidden,
            parameters["head"].astype(hidden.dtype),
            (((hidden.ndim - 1,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=compute_dtype(hidden.dtype),
        )


def last_hidden(hidden_BTD: Float[Array, "B T D"], lengths_B: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Each row's state at its last real token (at token 0 for a row without any)."""
    index_B11 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden_BTD, index_B11, axis=1)[:, 0]


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
