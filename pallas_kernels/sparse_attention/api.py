"""Public functions of sparse attention."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._dispatch import dispatch
from pallas_kernels._typing import AnyArray, Array, Float, Int
from pallas_kernels.sparse_attention import reference, xla
from pallas_kernels.sparse_attention.rows import compute_dtype


def _tpu(*args: Any) -> Any:
    """The TPU kernel, imported when it is first called: Pallas takes its time, and most programs run without."""
    from pallas_kernels.sparse_attention import tpu

    return tpu.sparse_attention(*args)


def _gpu(*args: Any) -> Any:
    """The GPU kernel, imported when it is first called, like the TPU's."""
    from pallas_kernels.sparse_attention import gpu

    return gpu.sparse_attention(*args)


IMPLEMENTATIONS = {
    "reference": reference.sparse_attention,
    "xla": xla.sparse_attention,
    "tpu": _tpu,
    "gpu": _gpu,
}
# The TPU and GPU kernels compile for every chip but have not run on one: by name only.
DEFAULT = ("xla",)


def sparse_attention(
    q_latent: Float[AnyArray, "B Q H C"],
    kv_latent: Float[AnyArray, "rows keys channels"],
    indices: Int[AnyArray, "batch queries N"],
    scale: float,
    value_dim: int,
    page_table: Int[AnyArray, "table pages"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q H V"], Float[Array, "B Q H"]]:
    """Multi-head latent attention of every query over its own selected keys.

    One latent row serves all heads, as key (all C channels) and as value (the first `value_dim`):

        logits = scale * q . kv[indices];   o = softmax(logits) . kv[indices, :value_dim]

    Rows that a query does not select influence neither its outputs nor its gradient, whatever they hold (NaN
    included), and rows that no query selects get a zero gradient. Differentiable in `q_latent` and `kv_latent`,
    with a sum in a fixed order on CPU and TPU; on GPU the order of XLA's scatter is fixed by
    `--xla_gpu_deterministic_ops=true`.

    Args:
      q_latent: absorbed queries [B, Q, H, C].
      kv_latent: latent rows [B, S, C], or pages [P, page, C] when `page_table` is given. Any float dtype;
        products are summed, and the softmax is taken, in float32 (float64 if one of the inputs is float64).
      indices: key positions [B, Q, N] int32 in any order, each at most once; every entry outside 0..S-1 is
        skipped (-1 by convention, anywhere in the row).
      scale: factor of the logits, a Python number.
      value_dim: number of leading channels that are values, 1..C.
      page_table: page of every `page` consecutive positions [B, pages] int32; a negative page holds no keys.
      implementation: "xla", "reference", "tpu" (Pallas, compiled for v5p, v6e and tpu7x), "gpu" (Pallas, compiled
        for Hopper and Blackwell; both bfloat16 and float32, and not yet run on their devices), or None for the
        best that supports the case.

    Returns:
      o [B, Q, H, value_dim] in the dtype of `q_latent`, and the natural-log sum of exponentials of the scaled
      logits [B, Q, H] in float32 (or float64). A row without a key gives o = 0 and logsumexp = -inf.

    Raises:
      ValueError: if the shapes or `value_dim` do not fit one another.
    """
    batch, _, _, width = q_latent.shape
    if kv_latent.shape[-1] != width:
        raise ValueError(
            f"kv_latent has {kv_latent.shape[-1]} channels but q_latent has {width}; "
            f"pass queries absorbed into the latent space of the cache."
        )
    if not 1 <= value_dim <= width:
        raise ValueError(f"value_dim is {value_dim}, expected 1..{width}, the channels of a latent row.")
    if indices.shape[:2] != q_latent.shape[:2]:
        raise ValueError(
            f"indices cover {indices.shape[:2]} (batch, queries) but q_latent has {q_latent.shape[:2]}; "
            f"pass one row of indices per query."
        )
    if page_table is None and kv_latent.shape[0] != batch:
        raise ValueError(
            f"kv_latent has {kv_latent.shape[0]} sequences but q_latent has {batch}; "
            f"pass [B, S, C], or pages [P, page, C] with a page_table."
        )
    if page_table is not None and page_table.shape[0] != batch:
        raise ValueError(
            f"page_table has {page_table.shape[0]} rows but q_latent has {batch} sequences; "
            f"pass one row per sequence."
        )
    pages = (1,) if page_table is None else page_table.shape
    if 0 in (*q_latent.shape, *kv_latent.shape, *indices.shape, *pages):
        dtype = compute_dtype(jnp.asarray(q_latent), jnp.asarray(kv_latent))
        rows = q_latent.shape[:3]
        return jnp.zeros((*rows, value_dim), q_latent.dtype), jnp.full(rows, -jnp.inf, dtype)
    return dispatch(
        "sparse_attention",
        IMPLEMENTATIONS,
        DEFAULT,
        implementation,
        q_latent,
        kv_latent,
        indices,
        scale,
        value_dim,
        page_table,
    )


def merge(
    outputs: Float[AnyArray, "parts *rows V"], logsumexps: Float[AnyArray, "parts *rows"]
) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Attention over the union of disjoint sets of keys, from the attention over each of them.

    Exact up to rounding, in any number of parts; parts without a key (logsumexp = -inf) count for nothing,
    and a row without a key in every part gives o = 0 and logsumexp = -inf. Differentiable.

    Args:
      outputs: o of each part, stacked [parts, ..., V] (what an all-gather over shards returns).
      logsumexps: logsumexp of each part, [parts, ...].

    Returns:
      o [..., V] in the dtype of `outputs` and logsumexp [...] in the dtype of `logsumexps`.
    """
    outputs, logsumexps = jnp.asarray(outputs), jnp.asarray(logsumexps)
    dtype = compute_dtype(outputs, logsumexps)
    exists = ~jnp.isneginf(logsumexps)
    empty = ~jnp.any(exists, axis=0)
    wide = logsumexps.astype(dtype)
    # Its gradients cancel; and beside a low maximum the exponential of an empty part must not be one of a large number.
    maximum = jax.lax.stop_gradient(jnp.where(empty, 0, jnp.max(wide, axis=0)))
    weights = jnp.where(exists, jnp.exp(jnp.where(exists, wide - maximum, 0)), 0)
    total = jnp.where(empty, 1, jnp.sum(weights, axis=0))
    parts = jnp.where(exists[..., None], outputs.astype(dtype), 0)
    o = jnp.sum(weights[..., None] * parts, axis=0) / total[..., None]
    logsumexp = jnp.where(empty, -jnp.inf, maximum + jnp.log(total))
    return o.astype(outputs.dtype), logsumexp.astype(logsumexps.dtype)
