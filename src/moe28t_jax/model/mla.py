"""Gated latent attention without rotation: dense (MLA) and sparse (DSA: an indexer picks the keys)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe28t_jax.config import DSAConfig, MLAConfig, ModelConfig
from moe28t_jax.model.cache import LatentCache, append, read
from moe28t_jax.model.indexer_loss import indexer_loss
from moe28t_jax.model.latent_attention import attend_to_latents
from moe28t_jax.model.numerics import compute_dtype, head_product, layer_norm, linear, rms_norm
from moe28t_jax.model.parameters import Group
from moe28t_jax.parallel import attention
from moe28t_jax.parallel.mesh import current_mesh, same_on_all_stages
from moe28t_jax.parallel.rules import constrain
from pallas_kernels import index_select


def index_queries(
    indexer: Group, q_latent_BTL: Float[Array, "B T L"], x_BTD: Float[Array, "B T D"], dsa: DSAConfig
) -> tuple[Float[Array, "B T H D2"], Float[Array, "B T H"]]:
    """Index queries from the normalised query latent, and the raw float32 head weights."""
    batch, count, _ = x_BTD.shape
    q_BTHD = linear(q_latent_BTL, indexer["q_proj"]).reshape(batch, count, dsa.num_heads, dsa.head_dim)
    wide = compute_dtype(x_BTD.dtype)
    return q_BTHD, linear(x_BTD.astype(wide), indexer["weights_proj"].astype(wide))


def index_keys(indexer: Group, x_BTD: Float[Array, "B T D"], dsa: DSAConfig) -> Float[Array, "B T D2"]:
    """Index keys, normalised: what the cache holds."""
    raw_BTD = linear(x_BTD, indexer["k_proj"])
    if dsa.key_norm == "rmsnorm":
        return rms_norm(raw_BTD, indexer["k_norm"], dsa.key_norm_eps)
    return layer_norm(raw_BTD, indexer["k_norm"], indexer["k_norm_bias"], dsa.key_norm_eps)


def _up_projection(weight: Array, repeat: Array | None, first: int, count: int) -> Float[Array, "H C L"]:
    """Rows of every head's projection out of the latent, [H, C, L], from a stack of layers at once: to slice a layer
    out that is then read in two parts would copy it."""
    if weight.ndim == 3:
        return weight[:, first : first + count]
    assert repeat is not None
    _, heads, _, rank = weight.shape
    zero = jnp.zeros((), repeat.dtype)
    start = (repeat, zero, jnp.asarray(first, repeat.dtype), zero)
    return jax.lax.dynamic_slice(weight, start, (1, heads, count, rank))[0]


def mla_attention(
    parameters: Group,
    indexer: Group | None,
    x_BTD: Float[Array, "B T D"],
    cache: LatentCache | None,
    starts_B: Int[Array, " B"],
    lengths_B: Int[Array, " B"],
    config: ModelConfig,
    repeat: Int[Array, ""] | None = None,
    collect: frozenset[str] = frozenset(),
) -> tuple[Float[Array, "B T D"], LatentCache | None, dict[str, jax.Array]]:
    """One latent-attention layer on its normalised input; sparse when `indexer` is given.

    `starts_B` tokens are already cached; `lengths_B` of the new ones are real. Without a cache the new tokens
    are the whole context. `collect` may name `index_sets`, `index_scores`, `index_keys`, `indexer_loss`.
    """
    mla, dsa = config.mla, config.dsa
    assert isinstance(mla, MLAConfig)
    batch, count, _ = x_BTD.shape
    auxiliary: dict[str, jax.Array] = {}

    with jax.named_scope("mla_projections"):
        if mla.q_lora_rank is None:
            q_latent_BTL = None
            q_BTC = linear(x_BTD, parameters["q_proj"])
        else:
            q_latent_BTL = rms_norm(
                linear(x_BTD, parameters["q_a_proj"]), parameters["q_a_norm"], mla.latent_eps
            )
            # Whole before it is multiplied: the compiler would send parts around while it multiplies others, for which
            # it first copies the weight.
            q_latent_BTL = constrain(q_latent_BTL, "batch", "token", None)
            q_BTC = linear(q_latent_BTL, parameters["q_b_proj"])
        if count == 1 and current_mesh() is not None:
            # As in a delta layer: the division into heads stays outside of the product, and its weight as it lies.
            q_BTC = jax.lax.optimization_barrier(q_BTC)
        q_BTHC = q_BTC.reshape(batch, count, mla.num_heads, mla.qk_head_dim)
        q_nope_BTHN, q_rope_BTHR = q_BTHC[..., : mla.qk_nope_head_dim], q_BTHC[..., mla.qk_nope_head_dim :]
        kv_BTC = linear(x_BTD, parameters["kv_a_proj"])
        latent_BTL = rms_norm(kv_BTC[..., : mla.kv_lora_rank], parameters["kv_a_norm"], mla.latent_eps)
        rows_BTC = jnp.concatenate([latent_BTL, kv_BTC[..., mla.kv_lora_rank :]], axis=-1)
        up = partial(_up_projection, parameters["kv_b_proj"], repeat)
        up_k_HNL = up(0, mla.qk_nope_head_dim).astype(x_BTD.dtype)
        up_v_HVL = up(mla.qk_nope_head_dim, mla.v_head_dim).astype(x_BTD.dtype)

    key_rows_BTD = None
    if indexer is not None:
        assert dsa is not None
        with jax.named_scope("indexer_projections"):
            # The main loss never reaches the indexer's inputs: top-k has no gradient, its own loss is separate.
            key_rows_BTD = index_keys(indexer, jax.lax.stop_gradient(x_BTD), dsa)
    with jax.named_scope("latent_cache"):
        whole: LatentCache | None = None
        if cache is None:
            latent_BSC, key_BSD, new_cache = rows_BTC, key_rows_BTD, None
        else:
            padding = cache.latent_BSC.shape[-1] - mla.latent_dim
            padded_BTC = jnp.pad(rows_BTC, ((0, 0), (0, 0), (0, padding))) if padding else rows_BTC
            latent = append(cache.latent_BSC, repeat, padded_BTC, starts_B, lengths_B)
            keys = cache.index_key_BSD
            if key_rows_BTD is not None:
                keys = append(keys, repeat, key_rows_BTD, starts_B, lengths_B)
            new_cache = LatentCache(latent, keys)
            latent_BSC = read(latent, repeat)[..., : mla.latent_dim].astype(x_BTD.dtype)
            key_BSD = None if keys is None else read(keys, repeat).astype(x_BTD.dtype)
            if latent.dtype == x_BTD.dtype and (repeat is None or attention.has_pages(latent)):
                # The kernels find one layer's rows in the whole buffer; what is read above is then not computed.
                whole = new_cache

    offsets_BT = jnp.arange(count, dtype=jnp.int32)[None, :]
    positions_BT = jnp.where(offsets_BT < lengths_B[:, None], starts_B[:, None] + offsets_BT, -1)
    # With room for no more keys than a query may read, selection takes all that are visible.
    sparse = indexer is not None and dsa is not None and latent_BSC.shape[1] > dsa.top_k
    watched = indexer is not None and bool(collect & {"index_sets", "index_scores", "indexer_loss"})

    q_index_BTHD = weights_BTH = indices_BTN = None
    if sparse or watched:
        assert indexer is not None and dsa is not None and q_latent_BTL is not None and key_BSD is not None
        top_k = min(dsa.top_k, latent_BSC.shape[1])

        def queries() -> tuple[Array, Array]:
            return index_queries(
                indexer, jax.lax.stop_gradient(q_latent_BTL), jax.lax.stop_gradient(x_BTD), dsa
            )

        def best(q_BTHD: Array, weights_BTH: Array) -> Array:
            return attention.select(
                jax.lax.stop_gradient(q_BTHD),
                jax.lax.stop_gradient(key_BSD if whole is None else whole.index_key_BSD),
                jax.lax.stop_gradient(weights_BTH),
                positions_BT,
                top_k,
                dsa.use_relu,
                None if whole is None else repeat,
            )

        def every_visible() -> Array:
            places_N = jnp.arange(top_k, dtype=jnp.int32)
            return jnp.where(places_N <= positions_BT[:, :, None], places_N, jnp.int32(-1))

        with jax.named_scope("indexer_select"):
            if watched:
                q_index_BTHD, weights_BTH = queries()
                indices_BTN = best(q_index_BTHD, weights_BTH)
            else:
                # Where no query sees more keys than it may read, none is scored.
                is_long = same_on_all_stages(jnp.max(positions_BT) >= top_k)
                indices_BTN = jax.lax.cond(is_long, lambda: best(*queries()), every_visible)
        if "index_scores" in collect:
            assert q_index_BTHD is not None and weights_BTH is not None
            auxiliary["index_scores"] = index_select.scores(
                q_index_BTHD, key_BSD, weights_BTH, positions_BT, use_relu=dsa.use_relu
            )
        if "index_sets" in collect:
            auxiliary["index_sets"] = indices_BTN
    if "index_keys" in collect and key_BSD is not None:
        auxiliary["index_keys"] = key_BSD

    if sparse or "indexer_loss" in collect:
        with jax.named_scope("absorb_queries"):
            absorbed_BTHL = head_product("BTHN,HNL->BTHL", q_nope_BTHN, up_k_HNL).astype(x_BTD.dtype)
            q_latent_BTHC = jnp.concatenate([absorbed_BTHL, q_rope_BTHR], axis=-1)
    if sparse:
        assert indices_BTN is not None
        with jax.named_scope("sparse_attention"):
            read_BTHL = attention.sparse_attention(
                q_latent_BTHC,
                latent_BSC if whole is None else whole.latent_BSC,
                indices_BTN,
                mla.scale,
                mla.kv_lora_rank,
                None if whole is None else repeat,
            )
            o_BTHV = head_product("BTHL,HVL->BTHV", read_BTHL, up_v_HVL).astype(x_BTD.dtype)
    else:
        with jax.named_scope("latent_attention"):
            o_BTHV = attention.dense_attention(
                partial(attend_to_latents, scale=mla.scale),
                q_nope_BTHN,
                q_rope_BTHR,
                latent_BSC,
                up_k_HNL,
                up_v_HVL,
                positions_BT,
            )
    if "indexer_loss" in collect and indexer is not None:
        assert (
            dsa is not None and q_index_BTHD is not None and weights_BTH is not None and key_BSD is not None
        )
        assert indices_BTN is not None
        auxiliary["indexer_loss"] = attention.by_query(
            partial(indexer_loss, scale=mla.scale, use_relu=dsa.use_relu),
            q_latent_BTHC,
            latent_BSC,
            q_index_BTHD,
            key_BSD,
            weights_BTH,
            indices_BTN,
        )

    with jax.named_scope("mla_output"):
        o_BTC = o_BTHV.reshape(batch, count, mla.num_heads * mla.v_head_dim)
        if mla.output_gate:
            gate_BTC = linear(x_BTD, parameters["g_proj"]).astype(compute_dtype(x_BTD.dtype))
            o_BTC = (o_BTC.astype(gate_BTC.dtype) * jax.nn.sigmoid(gate_BTC)).astype(x_BTD.dtype)
        out_BTD = constrain(linear(o_BTC, parameters["o_proj"]), "batch", "token", None)
    return out_BTD, new_cache, auxiliary
