"""The hybrid cache: an explicit pytree that `forward` takes and returns.

A delta layer keeps a recurrent state and the convolution's last inputs (fixed size); a latent-attention layer
keeps one latent row per token, and its index key where the layer is sparse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.segments import segments
from moe28t_jax.model.numerics import compute_dtype
from moe28t_jax.parallel.rules import batch_layout
from moe28t_jax.parallel.sharding import cache_shardings

_TPU_LANES = 128
# Prefill runs on this grid, so that a chunk's arithmetic does not depend on how a prompt arrived.
GRID = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDACache:
    """`state_BHKV` float32 (float64); `window_BWC`: the last conv_size - 1 inputs of the q|k|v convolution, whose
    channels C are [3, H, K] in `init_cache` (so that heads can lie on several devices) and may be given flat."""

    state_BHKV: Any
    window_BWC: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """`latent_BSC`: normalised latent and shared key part per token, and zeros up to the channels of the buffer;
    `index_key_BSD` None in dense layers."""

    latent_BSC: Any
    index_key_BSD: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """`lengths_B` tokens are in the cache of each row; `segments[i][j]` mirrors `Parameters.segments`."""

    lengths_B: Any
    segments: list[list[KDACache | LatentCache]]

    @property
    def batch(self) -> int:
        return self.lengths_B.shape[0]

    @property
    def capacity(self) -> int | None:
        """Tokens a row can hold; None when no layer keeps tokens (delta layers only)."""
        layers = (layer for segment in self.segments for layer in segment)
        return next((x.latent_BSC.shape[-2] for x in layers if isinstance(x, LatentCache)), None)


def init_cache(
    config: ModelConfig,
    batch: int,
    max_context: int,
    dtype: Any = jnp.float32,
    stacked: bool = False,
    channel_multiple: int | None = None,
) -> Cache:
    """An empty cache for `batch` rows of up to `max_context` tokens, every entry explicitly zero.

    max_context: at most the configuration's, rounded up to the 64 tokens of the grid that prompts are read on.
    dtype: of latents, index keys and convolution windows; recurrent states are float32 (float64 for float64).
        The default is exact for every activation dtype up to float32; a model in bfloat16 loses nothing by
        bfloat16 and needs half the memory (the engine takes the model's dtype).
    stacked: must equal the layout of the parameters it is used with (`Parameters.stacked(config)`).
    channel_multiple: the channels of latents are rounded up to it. None: 128 on TPU, whose memory holds rows of whole
        lanes anyway and would otherwise keep a row's channels apart; 1 elsewhere.

    Where a mesh is set, each device makes its part, and a capacity that its devices do not divide is rounded up.
    """
    # Prompts are read on a grid: the last chunk of one that ends at the limit reaches beyond it, with padding.
    if max_context < 1 or max_context > -(-config.max_context // GRID) * GRID:
        raise ValueError(
            f"max_context is {max_context}; this configuration allows 1 to {config.max_context} tokens per row."
        )
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating) or jnp.dtype(dtype).itemsize < 2:
        raise ValueError(f"A cache cannot be of dtype {jnp.dtype(dtype)}; take bfloat16, float32 or float64.")
    if batch < 1:
        raise ValueError(f"batch is {batch}; a cache needs at least one row.")

    multiple = channel_multiple or (_TPU_LANES if jax.default_backend() == "tpu" else 1)

    def layer_cache(layer: int, leading: tuple[int, ...]) -> KDACache | LatentCache:
        if config.attention_kinds[layer] == "kda":
            kda = config.kda
            assert kda is not None
            return KDACache(
                jnp.zeros((*leading, batch, kda.num_heads, kda.head_dim, kda.head_dim), compute_dtype(dtype)),
                jnp.zeros((*leading, batch, kda.conv_size - 1, 3, kda.num_heads, kda.head_dim), dtype),
            )
        mla = config.mla
        assert mla is not None
        keys = None
        if config.attention_kinds[layer] == "dsa":
            assert config.dsa is not None
            keys = jnp.zeros((*leading, batch, max_context, config.dsa.head_dim), dtype)
        channels = -(-mla.latent_dim // multiple) * multiple
        return LatentCache(jnp.zeros((*leading, batch, max_context, channels), dtype), keys)

    def make() -> Cache:
        return Cache(
            jnp.zeros((batch,), jnp.int32),
            [
                [
                    layer_cache(segment.first + position, (segment.repeats,) if segment.repeats > 1 else ())
                    for position in range(segment.period)
                ]
                for segment in segments(config, stacked)
            ],
        )

    where = batch_layout(batch)
    if where is None:
        return make()
    pieces = where.size(where.tokens)
    max_context = -(-max_context // pieces) * pieces
    return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), where.mesh))()


# Buffers of repeated layers are stacked; `repeat` is then the (traced) index into the leading axis. Reading and
# writing through it keeps the stack in the loop's carry, where XLA updates it in place.


def read(buffer: Float[Array, "..."], repeat: Int[Array, ""] | None) -> Float[Array, "..."]:
    """One layer's buffer."""
    return buffer if repeat is None else jax.lax.dynamic_index_in_dim(buffer, repeat, keepdims=False)


def replace(
    buffer: Float[Array, "..."], repeat: Int[Array, ""] | None, value: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The buffer with one layer's content replaced."""
    value = value.astype(buffer.dtype)
    return value if repeat is None else jax.lax.dynamic_update_index_in_dim(buffer, value, repeat, 0)


def append(
    buffer: Float[Array, "..."],
    repeat: Int[Array, ""] | None,
    rows_BTC: Float[Array, "B T C"],
    starts_B: Int[Array, " B"],
    lengths_B: Int[Array, " B"],
) -> Float[Array, "..."]:
    """The buffer with the first `lengths_B` of the new rows written behind `starts_B`; others are dropped.

    On a mesh each device writes what falls among the positions that it holds."""
    where = batch_layout(rows_BTC.shape[0])
    if where is None:
        return _append(buffer, repeat, rows_BTC, starts_B, lengths_B)
    tokens = where.token_axes(buffer.shape[-2])

    def local(buffer, repeat, rows_BTC, starts_B, lengths_B):
        if tokens:
            starts_B = starts_B - (jax.lax.axis_index(tokens) * buffer.shape[-2]).astype(starts_B.dtype)
        return _append(buffer, repeat, rows_BTC, starts_B, lengths_B)

    leading = () if repeat is None else (None,)
    held = P(*leading, where.rows, tokens, None)
    return jax.shard_map(
        local,
        in_specs=(held, P(), P(where.rows, None, None), P(where.rows), P(where.rows)),
        out_specs=held,
        check_vma=False,
    )(buffer, repeat, rows_BTC, starts_B, lengths_B)


def _append(buffer, repeat, rows_BTC, starts_B, lengths_B):
    batch, count = rows_BTC.shape[:2]
    capacity = buffer.shape[-2]
    offsets_BT = jnp.arange(count, dtype=jnp.int32)[None, :]
    # A place before the first is another device's; counted from the end it would be one of ours.
    valid_BT = (offsets_BT < lengths_B[:, None]) & (starts_B[:, None] + offsets_BT >= 0)
    positions_BT = jnp.where(valid_BT, starts_B[:, None] + offsets_BT, capacity)
    rows_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
    places = (rows_B1, positions_BT) if repeat is None else (repeat, rows_B1, positions_BT)
    return buffer.at[places].set(rows_BTC.astype(buffer.dtype), mode="drop")
