"""Sparse attention in portable JAX: blocks of queries, each over its own gathered keys, or masked.

With many queries over few keys per selected one (training, short prefill), matrix products over all keys with
the others masked cost less than gathering a row per query and selected key; elsewhere keys are gathered.

The keys of a block of queries are gathered once ([block, N, C], about `rows.GATHER_BYTES`) and the whole
softmax of a query is done at once, so nothing is ever as wide as the cache. The backward pass walks the same
blocks, recomputes them and adds the gradients of the gathered rows into one accumulator: differentiating
through the gather would make one array of the cache's size per block.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.sparse_attention import rows as key_rows

_HIGHEST = jax.lax.Precision.HIGHEST

_MASKED_KEYS_PER_SELECTED = 16
"""Up to this many keys per selected one the masked form is used; gathered rows are that much less efficient."""

_MASKED_QUERIES = 16
"""Fewer queries than this always gather: they would read the whole cache for a few rows of it."""

_SCORE_BYTES = 64 * 2**20
"""About the size of one block's logits in the masked form."""


def _attend(
    q_BQHC: Array, kv_BQNC: Array, exists_BQN: Array, scale: float, value_dim: int, dtype: jnp.dtype
) -> tuple[Array, Array]:
    if q_BQHC.dtype != kv_BQNC.dtype:
        q_BQHC, kv_BQNC = q_BQHC.astype(dtype), kv_BQNC.astype(dtype)
    with jax.named_scope("logits"):
        logits_BQHN = scale * jnp.einsum(
            "bqhc,bqnc->bqhn", q_BQHC, kv_BQNC, precision=_HIGHEST, preferred_element_type=dtype
        )
    with jax.named_scope("softmax"):
        exists_BQ1N = exists_BQN[:, :, None, :]
        logits_BQHN = jnp.where(exists_BQ1N, logits_BQHN, -jnp.inf)
        maximum_BQH1 = jax.lax.stop_gradient(jnp.max(logits_BQHN, axis=-1, keepdims=True, initial=-jnp.inf))
        # -inf - (-inf) is NaN: a row without keys is shifted by 0.
        maximum_BQH1 = jnp.where(jnp.isneginf(maximum_BQH1), 0, maximum_BQH1)
        weights_BQHN = jnp.where(exists_BQ1N, jnp.exp(logits_BQHN - maximum_BQH1), 0)
        total_BQH = jnp.sum(weights_BQHN, axis=-1)
        empty_BQH = jnp.broadcast_to(~jnp.any(exists_BQ1N, axis=-1), total_BQH.shape)
        safe_BQH = jnp.where(empty_BQH, 1, total_BQH)
    with jax.named_scope("values"):
        values_BQNV = kv_BQNC[..., :value_dim].astype(dtype)
        o_BQHV = jnp.einsum("bqhn,bqnv->bqhv", weights_BQHN, values_BQNV, precision=_HIGHEST)
    logsumexp_BQH = jnp.where(empty_BQH, -jnp.inf, maximum_BQH1[..., 0] + jnp.log(safe_BQH))
    return o_BQHV / safe_BQH[..., None], logsumexp_BQH


def _blocks(
    q_BQHC: Array, kv_latent: Array, rows_BQN: Array, exists_BQN: Array
) -> tuple[Array, Array, Array]:
    batch, queries, selected = rows_BQN.shape
    row_bytes = kv_latent.shape[-1] * kv_latent.dtype.itemsize
    block = key_rows.query_block(batch, queries, selected * row_bytes)
    return (
        key_rows.split_queries(q_BQHC, block, 0),
        key_rows.split_queries(rows_BQN, block, 0),
        key_rows.split_queries(exists_BQN, block, False),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _attention(
    q_BQHC: Array,
    kv_latent: Array,
    rows_BQN: Array,
    exists_BQN: Array,
    scale: float,
    value_dim: int,
    paged: bool,
) -> tuple[Array, Array]:
    dtype = key_rows.compute_dtype(q_BQHC, kv_latent)

    def attend(block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q, rows, exists = block
        with jax.named_scope("gather"):
            kv_BQNC = key_rows.gather(kv_latent, rows, exists, paged)
        o, logsumexp = _attend(q, kv_BQNC, exists, scale, value_dim, dtype)
        return o.astype(q_BQHC.dtype), logsumexp

    o, logsumexp = jax.lax.map(attend, _blocks(q_BQHC, kv_latent, rows_BQN, exists_BQN))
    queries = q_BQHC.shape[1]
    return key_rows.join_queries(o, queries), key_rows.join_queries(logsumexp, queries)


def _forward(q, kv_latent, rows_BQN, exists_BQN, scale, value_dim, paged):
    outputs = _attention(q, kv_latent, rows_BQN, exists_BQN, scale, value_dim, paged)
    return outputs, (q, kv_latent, rows_BQN, exists_BQN)


def backward(
    scale: float, value_dim: int, paged: bool, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    """Gradients to q and the cache from those of o and logsumexp; `residuals` are the arguments of the forward."""
    q_BQHC, kv_latent, rows_BQN, exists_BQN = residuals
    dtype = key_rows.compute_dtype(q_BQHC, kv_latent)
    blocks = _blocks(q_BQHC, kv_latent, rows_BQN, exists_BQN)
    block = blocks[1].shape[2]
    do, dlogsumexp = (key_rows.split_queries(c.astype(dtype), block, 0) for c in cotangents)

    def accumulate(dkv: Array, step: tuple[Array, ...]) -> tuple[Array, Array]:
        q, rows, exists, do_BQHV, dlogsumexp_BQH = step
        with jax.named_scope("gather"):
            kv_BQNC = key_rows.gather(kv_latent, rows, exists, paged).astype(dtype)
        _, pullback = jax.vjp(
            lambda q, kv: _attend(q, kv, exists, scale, value_dim, dtype), q.astype(dtype), kv_BQNC
        )
        dq, dkv_BQNC = pullback((do_BQHV, dlogsumexp_BQH))
        with jax.named_scope("scatter"):
            return key_rows.scatter_add(dkv, rows, exists, dkv_BQNC, paged), dq

    start = match_varying(jnp.zeros(kv_latent.shape, dtype), kv_latent)[0]
    dkv, dq = jax.lax.scan(accumulate, start, (*blocks, do, dlogsumexp))
    dq = key_rows.join_queries(dq, q_BQHC.shape[1])
    return dq.astype(q_BQHC.dtype), dkv.astype(kv_latent.dtype), None, None


_attention.defvjp(_forward, backward)


def _masked_attention(
    q_BQHC: Array, kv_BSC: Array, rows_BQN: Array, exists_BQN: Array, scale: float, value_dim: int
) -> tuple[Array, Array]:
    """All keys, with those that a query did not select masked: plain matrix products, plain gradients."""
    dtype = key_rows.compute_dtype(q_BQHC, kv_BSC)
    batch, keys, _ = kv_BSC.shape
    queries, heads = q_BQHC.shape[1:3]
    block = max(1, min(queries, _SCORE_BYTES // (batch * heads * keys * dtype.itemsize)))
    # Here and not in the loop, whose gradients of what it shares are added up block by block in that array's dtype: a
    # sum of bfloat16 stops growing after a few hundred terms.
    kv_BSC = kv_BSC.astype(dtype)

    @jax.checkpoint
    def attend(part: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q, rows, exists = part
        with jax.named_scope("mask"):
            one = jnp.where(exists, rows, keys)
            b = jnp.arange(batch, dtype=rows.dtype)[:, None, None]
            t = jnp.arange(rows.shape[1], dtype=rows.dtype)[None, :, None]
            selected_BQS = jnp.zeros((batch, rows.shape[1], keys), bool).at[b, t, one].set(True, mode="drop")
            used_BS1 = jnp.any(selected_BQS, axis=1)[..., None]
        kv = jnp.where(used_BS1, kv_BSC, jnp.zeros((), dtype))
        # Another query's row, or another query, may not be finite.
        kv, poison_BS = key_rows.finite_rows(kv)
        q, poison_BQH = key_rows.finite_rows(q.astype(dtype))
        with jax.named_scope("logits"):
            logits = scale * jnp.einsum("bqhc,bsc->bhqs", q, kv, precision=_HIGHEST)
            logits = logits + poison_BS[:, None, None] + jnp.swapaxes(poison_BQH, 1, 2)[..., None]
        with jax.named_scope("softmax"):
            logits = jnp.where(selected_BQS[:, None], logits, -jnp.inf)
            maximum = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
            maximum = jnp.where(jnp.isneginf(maximum), 0, maximum)
            weights = jnp.where(selected_BQS[:, None], jnp.exp(logits - maximum), 0)
            total = jnp.sum(weights, axis=-1)
            empty = total == 0
            safe = jnp.where(empty, 1, total)
            # A sum that is NaN must not reach the keys that were not selected, by their gradients.
            weights = jnp.where(selected_BQS[:, None], weights / safe[..., None], 0)
        with jax.named_scope("values"):
            o = jnp.einsum("bhqs,bsv->bqhv", weights, kv[..., :value_dim], precision=_HIGHEST)
            # Whatever comes back for a row without a key stops here.
            o = jnp.where(jnp.swapaxes(empty, 1, 2)[..., None], 0, o)
        logsumexp = jnp.where(empty, -jnp.inf, maximum[..., 0] + jnp.log(safe))
        return o.astype(q_BQHC.dtype), jnp.swapaxes(logsumexp, 1, 2)

    parts = (
        key_rows.split_queries(q_BQHC, block, 0),
        key_rows.split_queries(rows_BQN, block, 0),
        key_rows.split_queries(exists_BQN, block, False),
    )
    o, logsumexp = jax.lax.map(attend, parts)
    return key_rows.join_queries(o, queries), key_rows.join_queries(logsumexp, queries)


@functools.partial(jax.jit, static_argnames=("scale", "value_dim", "masked"))
def sparse_attention(
    q_BQHC: Float[Array, "B Q H C"],
    kv_latent: Float[Array, "rows keys C"],
    indices_BQN: Int[Array, "B Q N"],
    scale: float,
    value_dim: int,
    page_table_BP: Int[Array, "B pages"] | None = None,
    masked: bool | None = None,
) -> tuple[Float[Array, "B Q H V"], Float[Array, "B Q H"]]:
    """`pallas_kernels.sparse_attention.sparse_attention` by gathering the selected keys, or by masking the
    others; `masked` None decides by the shapes (pages are always gathered)."""
    if masked is None:
        queries, selected = indices_BQN.shape[1:]
        few = kv_latent.shape[1] <= _MASKED_KEYS_PER_SELECTED * selected
        masked = few and queries >= _MASKED_QUERIES and page_table_BP is None
    with jax.named_scope("sparse_attention"):
        rows_BQN, exists_BQN = key_rows.physical_rows(indices_BQN, kv_latent, page_table_BP)
        q, kv, rows, exists = match_varying(q_BQHC, kv_latent, rows_BQN, exists_BQN)
        if masked:
            return _masked_attention(q, kv, rows, exists, scale, value_dim)
        return _attention(q, kv, rows, exists, scale, value_dim, page_table_BP is not None)
