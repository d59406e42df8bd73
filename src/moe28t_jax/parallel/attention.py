"""Latent attention over caches whose positions lie on several devices.

Queries go to the keys: every device attends with all queries of a row to the keys that it holds, and the parts are
merged by their sums of exponentials. Selection ranks the candidates of all devices by one rule, so that the selected
set is that of a single device.

Without a mesh every function is the kernel that it names. With `repeat`, caches are whole stacks [R, B, S, C] of which
layer `repeat` is read.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe28t_jax.parallel.rules import Layout, batch_layout
from pallas_kernels import index_select
from pallas_kernels import sparse_attention as sparse_kernel

_PAGE = 1024
_LEAST_PAGE = 64


def key_axes(where: Layout, keys: int) -> tuple[str, ...]:
    """Mesh axes that divide the positions of a cache, or of the new tokens where there is none."""
    return where.token_axes(keys)


def has_pages(stack_RBSC: Array) -> bool:
    """Whether the positions that a device holds of a stack of caches are whole pages of a useful size."""
    where = batch_layout(stack_RBSC.shape[1])
    keys = stack_RBSC.shape[2]
    if where is not None:
        keys //= where.size(key_axes(where, keys))
    return gcd(keys, _PAGE) >= min(keys, _LEAST_PAGE)


def _pages(stack_RBSC: Array, repeat: Array) -> tuple[Array, Array]:
    """The stack as pages, and the table of those of one layer: a view, where slicing the layer out would copy it."""
    _, batch, keys, channels = stack_RBSC.shape
    page = gcd(keys, _PAGE)
    per_row = keys // page
    first_B = (repeat * batch + jnp.arange(batch, dtype=jnp.int32)) * per_row
    return (
        stack_RBSC.reshape(-1, page, channels),
        first_B[:, None] + jnp.arange(per_row, dtype=jnp.int32)[None, :],
    )


def _first_key(axes: tuple[str, ...], keys: int) -> Array:
    return (jax.lax.axis_index(axes) * keys).astype(jnp.int32)


def _merge(o_BTHV: Array, logsumexp_BTH: Array, axes: tuple[str, ...], divide_queries: bool) -> Array:
    """Attention to the keys of all devices from that to each device's own, for this device's queries or for all."""
    highest_BTH = jax.lax.pmax(jax.lax.stop_gradient(logsumexp_BTH), axes)
    # A query without any key has -inf everywhere.
    highest_BTH = jnp.where(jnp.isneginf(highest_BTH), 0, highest_BTH)
    weight_BTH1 = jnp.exp(logsumexp_BTH - highest_BTH)[..., None]
    parts = (o_BTHV.astype(weight_BTH1.dtype) * weight_BTH1, weight_BTH1)
    if divide_queries:
        total_BTHV, weight_BTH1 = jax.lax.psum_scatter(parts, axes, scatter_dimension=1, tiled=True)
    else:
        total_BTHV, weight_BTH1 = jax.lax.psum(parts, axes)
    return (total_BTHV / jnp.where(weight_BTH1 > 0, weight_BTH1, 1)).astype(o_BTHV.dtype)


def select(
    q_index_BTHD: Float[Array, "B T H D"],
    k_index: Any,
    weights_BTH: Float[Array, "B T H"],
    positions_BT: Int[Array, "B T"],
    top_k: int,
    use_relu: bool,
    repeat: Int[Array, ""] | None = None,
) -> Int[Array, "B T top_k"]:
    """`pallas_kernels.index_select.select`: on a mesh each device scores its own keys [B, S, D], for the queries of its
    share of `tensor`, and all agree on the best."""
    where = batch_layout(q_index_BTHD.shape[0])
    keys = () if where is None else key_axes(where, jax.tree.leaves(k_index)[0].shape[-2])

    def local(q: Array, k: Any, weights: Array, positions: Array, repeat: Array | None) -> Array:
        k, table = (k, None) if repeat is None else _pages(k, repeat)
        return index_select.select(
            q, k, weights, positions, top_k, table, axis_name=keys or None, use_relu=use_relu
        )

    arguments = (q_index_BTHD, k_index, weights_BTH, positions_BT, repeat)
    if where is None:
        return local(*arguments)
    rows = where.rows
    queries = ("tensor",) if q_index_BTHD.shape[1] % where.size("tensor") == 0 else ()
    return jax.shard_map(
        local,
        in_specs=(
            P(rows, queries, None, None),
            P(rows, keys) if repeat is None else P(None, rows, keys),
            P(rows, queries, None),
            P(rows, queries),
            P(),
        ),
        out_specs=P(rows, queries, None),
        check_vma=False,
    )(*arguments)


def sparse_attention(
    q_latent_BTHC: Float[Array, "B T H C"],
    kv_latent: Float[Array, "... S channels"],
    indices_BTN: Int[Array, "B T N"],
    scale: float,
    value_dim: int,
    repeat: Int[Array, ""] | None = None,
) -> Float[Array, "B T H V"]:
    """`pallas_kernels.sparse_attention.sparse_attention` over latents [B, S, C], the outputs alone: on a mesh by heads
    and by keys. Channels that the latents have beyond those of the queries are zero."""
    count, (size, channels) = q_latent_BTHC.shape[1], kv_latent.shape[-2:]
    padding = channels - q_latent_BTHC.shape[-1]
    if padding:
        q_latent_BTHC = jnp.pad(q_latent_BTHC, ((0, 0), (0, 0), (0, 0), (0, padding)))
    where = batch_layout(q_latent_BTHC.shape[0])
    keys, tokens = ((), ()) if where is None else (key_axes(where, size), where.token_axes(count))
    queries = () if keys else tokens

    def local(q: Array, kv: Array, indices: Array, repeat: Array | None) -> Array:
        if keys:
            # What other devices hold falls outside of the cache here and is skipped.
            indices = jnp.where(indices >= 0, indices - _first_key(keys, kv.shape[-2]), -1)
        kv, table = (kv, None) if repeat is None else _pages(kv, repeat)
        o, logsumexp = sparse_kernel.sparse_attention(q, kv, indices, scale, value_dim, table)
        return _merge(o, logsumexp, keys, bool(tokens)) if keys else o

    arguments = (q_latent_BTHC, kv_latent, indices_BTN, repeat)
    if where is None:
        return local(*arguments)
    rows = where.rows
    return jax.shard_map(
        local,
        in_specs=(
            P(rows, queries, "tensor", None),
            P(rows, keys, None) if repeat is None else P(None, rows, keys, None),
            P(rows, queries, None),
            P(),
        ),
        out_specs=P(rows, tokens, "tensor", None),
        check_vma=False,
    )(*arguments)


def dense_attention(
    attend: Callable[[Array, Array, Array, Array, Array, Array], tuple[Array, Array]],
    q_nope_BTHN: Float[Array, "B T H N"],
    q_rope_BTHR: Float[Array, "B T H R"],
    latent_BSC: Float[Array, "B S C"],
    up_k_HNL: Float[Array, "H N L"],
    up_v_HVL: Float[Array, "H V L"],
    positions_BT: Int[Array, "B T"],
) -> Float[Array, "B T H V"]:
    """Causal attention over all cached latents by `attend`, which takes the other arguments and gives outputs and the
    natural-log sum of exponentials: on a mesh by heads and by keys."""
    arguments = (q_nope_BTHN, q_rope_BTHR, latent_BSC, up_k_HNL, up_v_HVL, positions_BT)
    where = batch_layout(q_nope_BTHN.shape[0])
    if where is None:
        return attend(*arguments)[0]
    count, size = q_nope_BTHN.shape[1], latent_BSC.shape[1]
    keys, tokens = key_axes(where, size), where.token_axes(count)
    queries = () if keys else tokens

    def local(
        q_nope: Array, q_rope: Array, latent: Array, up_k: Array, up_v: Array, positions: Array
    ) -> Array:
        if keys:
            positions = jnp.where(positions >= 0, positions - _first_key(keys, latent.shape[1]), -1)
        o, logsumexp = attend(q_nope, q_rope, latent, up_k, up_v, positions)
        return _merge(o, logsumexp, keys, bool(tokens)) if keys else o

    rows = where.rows
    by_head = P(rows, queries, "tensor", None)
    return jax.shard_map(
        local,
        in_specs=(
            by_head,
            by_head,
            P(rows, keys, None),
            P("tensor", None, None),
            P("tensor", None, None),
            P(rows, queries),
        ),
        out_specs=P(rows, tokens, "tensor", None),
        check_vma=False,
    )(*arguments)


def by_query(
    loss: Callable[[Array, Array, Array, Array, Array, Array], Array],
    q_latent_BTHC: Float[Array, "B T H C"],
    latent_BSC: Float[Array, "B S C"],
    q_index_BTID: Float[Array, "B T I D"],
    key_BSD: Float[Array, "B S D"],
    weights_BTI: Float[Array, "B T I"],
    indices_BTN: Int[Array, "B T N"],
) -> Float[Array, "B T"]:
    """`loss` of the other arguments, one number per query that depends on no other query: on a mesh every device takes
    its share of the queries with all their heads, and all keys of the row."""
    arguments = (q_latent_BTHC, latent_BSC, q_index_BTID, key_BSD, weights_BTI, indices_BTN)
    where = batch_layout(q_latent_BTHC.shape[0])
    if where is None:
        return loss(*arguments)
    count = q_latent_BTHC.shape[1]
    divided = (*where.tokens, "tensor")
    queries = divided if count % where.size(divided) == 0 else ()
    rows = where.rows
    by_row = P(rows, None, None)
    by_token = P(rows, queries, None)
    return jax.shard_map(
        loss,
        in_specs=(
            P(rows, queries, None, None), by_row, P(rows, queries, None, None), by_row, by_token, by_token,
        ),
        out_specs=P(rows, queries),
        check_vma=False,
    )(*arguments)  # fmt: skip
