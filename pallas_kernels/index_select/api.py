"""Public functions of index selection."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._dispatch import dispatch
from pallas_kernels._typing import AnyArray, Array, Float, Int
from pallas_kernels.index_select import dense, reference, xla
from pallas_kernels.index_select.keys import Keys, QuantizedKeys, check_keys
from pallas_kernels.sparse_attention.rows import compute_dtype


def _tpu(*args: Any) -> Any:
    """The TPU kernel, imported when it is first called: Pallas takes its time, and most programs run without."""
    from pallas_kernels.index_select import tpu

    return tpu.select(*args)


def _gpu(*args: Any) -> Any:
    """The GPU kernel, imported when it is first called, like the TPU's."""
    from pallas_kernels.index_select import gpu

    return gpu.select(*args)


IMPLEMENTATIONS = {"reference": reference.select, "xla": xla.select, "tpu": _tpu, "gpu": _gpu}
# The TPU and GPU kernels compile for their chips but have not run on one: by name only.
DEFAULT = ("xla",)


def _check(q_index: AnyArray, k_index: Keys, weights: AnyArray, rows: AnyArray, name: str) -> None:
    check_keys(k_index)
    if 0 in q_index.shape[2:]:
        raise ValueError(
            f"q_index has {q_index.shape[2]} heads of {q_index.shape[3]} channels; an indexer has at least one of both."
        )
    channels = k_index.channels if isinstance(k_index, QuantizedKeys) else k_index.shape[-1]
    if channels != q_index.shape[-1]:
        raise ValueError(
            f"k_index has {channels} channels but q_index has {q_index.shape[-1]}; "
            f"pass keys of the same indexer."
        )
    if weights.shape != q_index.shape[:3]:
        raise ValueError(
            f"weights have shape {weights.shape}, expected {q_index.shape[:3]}, the batch, queries "
            f"and heads of q_index; pass one weight per query and head."
        )
    if rows.shape[:2] != q_index.shape[:2]:
        raise ValueError(
            f"{name} cover {rows.shape[:2]} (batch, queries) but q_index has {q_index.shape[:2]}; "
            f"pass one entry per query."
        )


def select(
    q_index: Float[AnyArray, "B Q H D"],
    k_index: Keys,
    weights: Float[AnyArray, "B Q heads"],
    query_positions: Int[AnyArray, "batch queries"],
    top_k: int,
    page_table: Int[AnyArray, "table pages"] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    use_relu: bool = True,
    implementation: str | None = None,
) -> Int[Array, "B Q top_k"]:
    """The `top_k` visible keys with the highest index score, exactly and deterministically.

        score[t, s] = H^-1/2 D^-1/2 sum_h weights[t, h] relu(q[t, h] . k[s])    for s <= query_position[t]

    (the "lightning indexer" of DeepSeek-V3.2 sparse attention). The higher score wins, and of equal scores
    the lowest index; -0.0 equals 0.0; a NaN score ranks highest. For the same bits of q, k and weights the
    selected set does not depend on the block sizes, the batch, the other queries, or the number of devices;
    on CPU by construction, on accelerators as far as their matrix products give an element the same bits in
    any shape. Not differentiable; see `scores_at`.

    Args:
      q_index: index queries [B, Q, H, D].
      k_index: index keys [B, S, D], one per position, shared by the heads; or pages [P, page, D] when
        `page_table` is given. Any float dtype, or `QuantizedKeys` (fp8, fp4) whose scores are those of the
        values they stand for; scores are computed in float32 (float64 if an input is float64). Keys at
        positions that no query sees may hold anything, NaN included.
      weights: head weights [B, Q, H], raw (of any sign, not scaled).
      query_positions: last visible key of each query [B, Q], global if the keys are sharded; -1 sees no key
        (a padded row).
      top_k: number of keys to select; may exceed the number of keys.
      page_table: page of every `page` consecutive positions [B, pages] int32; of visible keys it must be in
        0..P-1.
      axis_name: mesh axis (or several, the slowest first), inside `jax.shard_map`, over which positions are
        sharded: every device holds the same number of consecutive positions, in the order of the axis, and all
        other arguments are the same on all.
      use_relu: whether the products pass the ReLU.
      implementation: "xla", "reference", "tpu" or "gpu" (Pallas kernels that were compiled and interpreted but
        have not run on their devices; by name only), or None for the best that supports the case.

    Returns:
      Global key positions [B, Q, top_k] int32, ascending, -1 after the last; the same on all devices of the
      axis.

    Raises:
      ValueError: if the shapes do not fit one another or `top_k` is not positive.
    """
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}, expected a positive number of keys; pass at least 1.")
    _check(q_index, k_index, weights, query_positions, "query_positions")
    batch = q_index.shape[0]
    k_index = jax.tree.map(jnp.asarray, k_index)
    rows = jax.tree.leaves(k_index)[0].shape[0]
    if page_table is None and rows != batch:
        raise ValueError(
            f"k_index has {rows} sequences but q_index has {batch}; "
            f"pass [B, S, D], or pages [P, page, D] with a page_table."
        )
    if page_table is not None and page_table.shape[0] != batch:
        raise ValueError(
            f"page_table has {page_table.shape[0]} rows but q_index has {batch} sequences; "
            f"pass one row per sequence."
        )
    return dispatch(
        "index_select",
        IMPLEMENTATIONS,
        DEFAULT,
        implementation,
        q_index,
        k_index,
        weights,
        reference.last_visible(query_positions),
        top_k,
        page_table,
        axis_name,
        use_relu,
    )


def _no_scores(q_index: Array, k_index: Array, weights: Array, count: int) -> Array:
    """Where there is nothing to multiply."""
    dtype = compute_dtype(q_index, k_index, weights)
    return jnp.full((*q_index.shape[:2], count), reference.MASKED_SCORE, dtype)


def scores_at(
    q_index: Float[AnyArray, "B Q H D"],
    k_index: Float[AnyArray, "rows keys channels"],
    weights: Float[AnyArray, "B Q heads"],
    indices: Int[AnyArray, "batch queries N"] | None = None,
    use_relu: bool = True,
    query_positions: Int[AnyArray, "batch queries"] | None = None,
) -> Float[Array, "B Q N"]:
    """Index scores of the given keys, or of all, differentiable: what the indexer's training loss needs.

    The form of the selected set (the sparse stage) gathers the keys of `indices`; the dense form (the warm-up, with
    `indices=None`) is over all keys. Both work in blocks, forward and backward, and hold no score per head.

    Args:
      q_index: index queries [B, Q, H, D].
      k_index: index keys [B, S, D]; rows that are not indexed (that no query sees) may hold anything and receive a
        zero gradient.
      weights: head weights [B, Q, H], raw.
      indices: key positions [B, Q, N] in any order; entries outside 0..S-1 are skipped (-1 by convention). None
        for the dense form, N = S.
      use_relu: whether the products pass the ReLU, whose gradient at 0 is 0.
      query_positions: of the dense form: last visible key of each query [B, Q], -1 for none; None for all keys.

    Returns:
      Scores [B, Q, N], as `select` defines them, in float32 (float64 if an input is float64). A skipped entry, or a
      key that is not visible, has the score `MASKED_SCORE` = -1e30 and no gradient: its softmax weight is exactly 0
      beside any other entry, and uniform in a row without entries, which the caller masks.

    Raises:
      ValueError: if the shapes do not fit one another, or both indices and positions are given.
    """
    if indices is not None and query_positions is not None:
        raise ValueError(
            "scores_at was given indices and query_positions; pass indices for the selected set, "
            "or query_positions alone for all keys."
        )
    if k_index.shape[0] != q_index.shape[0]:
        raise ValueError(
            f"k_index has {k_index.shape[0]} sequences but q_index has {q_index.shape[0]}; pass [B, S, D]."
        )
    q_index, k_index, weights = (jnp.asarray(a) for a in (q_index, k_index, weights))
    if indices is None:
        if query_positions is None:
            query_positions = jnp.full(q_index.shape[:2], k_index.shape[1] - 1, jnp.int32)
        _check(q_index, k_index, weights, query_positions, "query_positions")
        if 0 in (*q_index.shape, *k_index.shape):
            return _no_scores(q_index, k_index, weights, k_index.shape[1])
        return dense.scores_at(q_index, k_index, weights, reference.last_visible(query_positions), use_relu)
    _check(q_index, k_index, weights, indices, "indices")
    if 0 in (*q_index.shape, *k_index.shape, *indices.shape):
        return _no_scores(q_index, k_index, weights, indices.shape[2])
    return xla.scores_at(q_index, k_index, weights, jnp.asarray(indices), use_relu)
