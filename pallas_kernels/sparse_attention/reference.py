"""Sparse attention as its definition: dense attention in which every unselected key is masked.

    logits = scale * q . kv;   o = softmax(logits over the selected keys) . kv[..., :value_dim]

(multi-head latent attention in absorbed form, DeepSeek-V2, arXiv 2405.04434; selection: DeepSeek-V3.2).
"""

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels.sparse_attention.rows import compute_dtype, finite_rows

_HIGHEST = jax.lax.Precision.HIGHEST


def sparse_attention(
    q_BQHC: Float[Array, "B Q H C"],
    kv_latent: Float[Array, "rows keys C"],
    indices_BQN: Int[Array, "B Q N"],
    scale: float,
    value_dim: int,
    page_table_BP: Int[Array, "B pages"] | None = None,
) -> tuple[Float[Array, "B Q H V"], Float[Array, "B Q H"]]:
    """`pallas_kernels.sparse_attention.sparse_attention` with a [B, Q, H, S] tensor of logits."""
    dtype = compute_dtype(q_BQHC, kv_latent)
    kv_BSC = kv_latent
    page_exists = None
    if page_table_BP is not None:
        pages, page, width = kv_latent.shape
        page_exists = jnp.repeat((page_table_BP >= 0) & (page_table_BP < pages), page, axis=1)
        kv_BSC = kv_latent[jnp.clip(page_table_BP, 0, pages - 1)].reshape(page_table_BP.shape[0], -1, width)
    keys = kv_BSC.shape[1]
    selected_BQS = jnp.any(indices_BQN[..., None] == jnp.arange(keys, dtype=indices_BQN.dtype), axis=2)
    if page_exists is not None:
        selected_BQS &= page_exists[:, None]
    used_BS = jnp.any(selected_BQS, axis=1)
    kv_BSC = jnp.where(used_BS[..., None], kv_BSC, jnp.zeros((), kv_BSC.dtype)).astype(dtype)
    kv_BSC, poison_BS = finite_rows(kv_BSC)
    finite_q_BQHC, poison_BQH = finite_rows(q_BQHC.astype(dtype))
    logits_BQHS = scale * jnp.einsum("bqhc,bsc->bqhs", finite_q_BQHC, kv_BSC, precision=_HIGHEST)
    logits_BQHS = logits_BQHS + poison_BS[:, None, None] + poison_BQH[..., None]
    mask = selected_BQS[:, :, None, :]
    any_selected = jnp.any(mask, axis=-1)
    logits_BQHS = jnp.where(mask, logits_BQHS, -jnp.inf)
    # An empty row would be softmax of -inf alone, NaN in value and gradient.
    safe_BQHS = jnp.where(any_selected[..., None], logits_BQHS, 0)
    weights_BQHS = jnp.where(mask, jax.nn.softmax(safe_BQHS, axis=-1), 0)
    o = jnp.einsum("bqhs,bsv->bqhv", weights_BQHS, kv_BSC[..., :value_dim], precision=_HIGHEST)
    # Whatever comes back for a row without a key stops here.
    o = jnp.where(any_selected[..., None], o, 0)
    logsumexp = jnp.where(any_selected, jax.nn.logsumexp(safe_BQHS, axis=-1), -jnp.inf)
    return o.astype(q_BQHC.dtype), logsumexp
