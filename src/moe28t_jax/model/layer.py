"""One layer of the network: mix of blocks, attention, mix of blocks, feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.cache import KDACache, LatentCache
from moe28t_jax.model.kda import gates, kda_attention
from moe28t_jax.model.mla import mla_attention
from moe28t_jax.model.moe import gated_mlp, mixture_of_experts
from moe28t_jax.model.numerics import compute_dtype, rms_norm
from moe28t_jax.model.parameters import Group
from moe28t_jax.model.residual import mix, mixing_weights
from moe28t_jax.parallel.rules import constrain, redistribute


class Stream(NamedTuple):
    """What flows through depth: the running sum and the snapshots of earlier blocks.

    Inline layers hold snapshots as a tuple and `count` None; a scan holds a fixed buffer [J, B, T, D] and a
    traced count.
    """

    partial_BTD: jax.Array
    snapshots: Any
    count: jax.Array | None


Prepare = Callable[[Group, int], Group]
"""Makes of what training holds of a layer's parameters, and the layer's number, what the layer computes with."""


class Step(NamedTuple):
    """What all layers of one call share. prepare: for training, see `network.run`."""

    starts_B: jax.Array
    lengths_B: jax.Array
    valid_BT: jax.Array
    config: ModelConfig
    collect: frozenset[str]
    prepare: Prepare | None = None

    def between(self, x_BTD: jax.Array) -> jax.Array:
        """What lies between sub-layers: in training, where it is kept for the gradient, its tokens are divided over the
        devices that divide heads and channels too (Korthikanti et al. 2022, sequence parallelism)."""
        whole = ("batch", "token", None)
        return constrain(x_BTD, *whole) if self.prepare is None else redistribute(x_BTD, _DIVIDED, whole)

    def inside(self, x_BTD: jax.Array) -> jax.Array:
        """What a sub-layer multiplies: all its tokens on each of these devices, of which each has a part of the
        weights."""
        return x_BTD if self.prepare is None else redistribute(x_BTD, ("batch", "token", None), _DIVIDED)


_DIVIDED = ("batch", "stream_token", None)


def mixed(stream: Stream, parameters: Group | None, config: ModelConfig) -> Float[Array, "B T D"]:
    if parameters is None:
        return stream.partial_BTD
    snapshots = stream.snapshots
    candidates = [*(snapshots[j] for j in range(len(snapshots))), stream.partial_BTD]
    return mix(candidates, parameters["norm"], parameters["query"], config.rms_norm_eps, stream.count)


def _mixing_weights(stream: Stream, parameters: Group, config: ModelConfig) -> Float[Array, "B T J"]:
    """Weights of `mixed`, on a fixed axis: one per snapshot the network can hold, the running sum last."""
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


def attention(
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


def run_layer(
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

    h_BTD = mixed(stream, parameters.attention_mix if residual else None, config)
    x_BTD = step.inside(rms_norm(h_BTD, parameters["attention_norm"], config.rms_norm_eps))
    out_BTD, cache, auxiliary = attention(parameters, x_BTD, cache, layer, repeat, step)
    if step.prepare is not None:
        out_BTD = step.between(out_BTD)
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

    h_BTD = mixed(stream, parameters.mlp_mix if residual else None, config)
    if weights:
        weights.append(_mixing_weights(stream, parameters.mlp_mix, config))
    x_BTD = step.inside(rms_norm(h_BTD, parameters["mlp_norm"], config.rms_norm_eps))
    if config.mlp_kinds[layer] == "dense":
        with jax.named_scope("dense_mlp"):
            out_BTD = gated_mlp(parameters.mlp, x_BTD, config)
    else:
        out_BTD, more = mixture_of_experts(parameters.mlp, x_BTD, step.valid_BT, config, repeat, step.collect)
        auxiliary |= more
    out_BTD = step.between(out_BTD)
    stream = stream._replace(partial_BTD=stream.partial_BTD + out_BTD)
    if weights:
        auxiliary["residual_weights"] = jnp.stack(weights, axis=2)
    if "partial_sums" in step.collect:
        auxiliary["partial_sums"] = stream.partial_BTD
    return stream, cache, auxiliary


def run_prepared_layer(
    parameters: Group, stream: Stream, layer: int, starts_block: bool | jax.Array, step: Step
) -> tuple[Stream, dict[str, jax.Array]]:
    """One layer without a cache, in training: only its inputs are kept for the gradient. The layer is computed again
    there, and its parameters are prepared again, so that a prepared copy lives no longer than its layer."""

    def body(parameters: Group, stream: Stream) -> tuple[Stream, dict[str, jax.Array]]:
        assert step.prepare is not None
        prepared = step.prepare(parameters, layer)
        stream, _, auxiliary = run_layer(prepared, stream, None, layer, None, starts_block, step)
        return stream, auxiliary

    return jax.checkpoint(body)(parameters, stream)
