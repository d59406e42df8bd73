"""Index scores and selection as their definition (DeepSeek-V3.2 sparse attention, the "lightning indexer").

score[t, s] = H^-1/2 D^-1/2 sum_h weights[t, h] relu(q[t, h] . k[s])    for s <= query_position[t]
"""

import jax
import jax.numpy as jnp

from pallas_kernels._typing import AnyArray, Array, Float, Int
from pallas_kernels.index_select.keys import Keys, QuantizedKeys, check_keys, dequantize_keys
from pallas_kernels.sparse_attention.rows import compute_dtype

_HIGHEST = jax.lax.Precision.HIGHEST

_LARGEST = 2**31 - 2

MASKED_SCORE = -1e30
"""Score of the index -1 in `scores_at`: finite, so that no gradient is NaN; softmax makes it exactly 0."""


def last_visible(query_positions: Int[AnyArray, "B Q"]) -> Int[Array, "B Q"]:
    """int32, of which -1 stands for all that see no key; with room for a number more, where ends are counted."""
    positions = jnp.asarray(query_positions)
    if jnp.iinfo(positions.dtype).max > _LARGEST:
        positions = jnp.minimum(positions, jnp.asarray(_LARGEST, positions.dtype))
    if jnp.iinfo(positions.dtype).min < -(2**31):
        positions = jnp.maximum(positions, jnp.asarray(-1, positions.dtype))
    return jnp.clip(positions.astype(jnp.int32), -1, _LARGEST)


def full_keys(k_index: Keys) -> Array:
    """The keys as an array, whatever they are kept in."""
    if isinstance(k_index, QuantizedKeys):
        check_keys(k_index)
        return dequantize_keys(k_index)
    return jnp.asarray(k_index)


def _head_scores(q_BQHD: Array, weights_BQH: Array, dots_BQHS: Array, use_relu: bool) -> Array:
    scale = (q_BQHD.shape[2] * q_BQHD.shape[3]) ** -0.5
    activated = jax.nn.relu(dots_BQHS) if use_relu else dots_BQHS
    return scale * jnp.sum(weights_BQH.astype(dots_BQHS.dtype)[..., None] * activated, axis=2)


def scores(
    q_index: Float[AnyArray, "B Q H D"],
    k_index: Keys,
    weights: Float[AnyArray, "B Q H"],
    query_positions: Int[AnyArray, "B Q"],
    use_relu: bool = True,
) -> Float[Array, "B Q S"]:
    """All index scores, -inf where the key is not visible: for tests and for looking at a model.

    Keeps a [B, Q, H, S] tensor; `select` never does. The sum over heads is the framework's, so a score may
    differ in its last bits from the one that `select` ranks.

    Args:
      q_index: index queries [B, Q, H, D].
      k_index: index keys [B, S, D], one per position, shared by the heads, in full or `QuantizedKeys`.
      weights: head weights [B, Q, H], raw (of any sign, not scaled).
      query_positions: last visible key of each query [B, Q]; -1 sees none.
      use_relu: whether the products pass a ReLU.

    Returns:
      Scores [B, Q, S] in float32, or float64 if an input is float64.
    """
    q_index, weights, k = jnp.asarray(q_index), jnp.asarray(weights), full_keys(k_index)
    dtype = compute_dtype(q_index, k, weights)
    visible_BQS = jnp.arange(k.shape[1], dtype=jnp.int32) <= last_visible(query_positions)[..., None]
    dots = jnp.einsum("bqhd,bsd->bqhs", q_index.astype(dtype), k.astype(dtype), precision=_HIGHEST)
    return jnp.where(visible_BQS, _head_scores(q_index, weights, dots, use_relu), -jnp.inf)


def scores_at(
    q_index: Float[Array, "B Q H D"],
    k_index: Float[Array, "B S D"],
    weights: Float[Array, "B Q H"],
    indices: Int[Array, "B Q N"],
    use_relu: bool = True,
) -> Float[Array, "B Q N"]:
    """`pallas_kernels.index_select.scores_at` by computing every score."""
    exists_BQN = (indices >= 0) & (indices < k_index.shape[1])
    used_BS = jnp.any(
        exists_BQN[..., None] & (indices[..., None] == jnp.arange(k_index.shape[1], dtype=indices.dtype)),
        axis=(1, 2),
    )
    k_index = jnp.where(used_BS[..., None], k_index, jnp.zeros((), k_index.dtype))
    last = jnp.full(indices.shape[:2], k_index.shape[1] - 1, jnp.int32)
    everything = scores(q_index, k_index, weights, last, use_relu)
    chosen = jnp.take_along_axis(everything, jnp.where(exists_BQN, indices, 0), axis=2)
    return jnp.where(exists_BQN, chosen, MASKED_SCORE)


def select(
    q_index: Float[Array, "B Q H D"],
    k_index: Keys,
    weights: Float[Array, "B Q H"],
    query_positions: Int[Array, "B Q"],
    top_k: int,
    page_table: Int[Array, "B pages"] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    use_relu: bool = True,
) -> Int[Array, "B Q top_k"]:
    """`pallas_kernels.index_select.select` by a stable sort of every score."""
    k = full_keys(k_index)
    if page_table is not None:
        pages = jnp.clip(page_table, 0, k.shape[0] - 1)
        k = k[pages].reshape(page_table.shape[0], -1, k.shape[-1])
    if axis_name is not None:
        k = jax.lax.all_gather(k, axis_name, axis=1, tiled=True)
    all_scores = scores(q_index, k, weights, query_positions, use_relu)
    visible = jnp.arange(k.shape[1], dtype=jnp.int32) <= last_visible(query_positions)[..., None]
    # The sort is stable, so equal scores stay in the order of their index; -0.0 sorts as 0.0.
    order = jnp.lexsort((-all_scores, ~jnp.isnan(all_scores), ~visible), axis=-1)
    order = order[..., :top_k].astype(jnp.int32)
    keys = k.shape[1]
    chosen = jnp.where(jnp.take_along_axis(visible, order, axis=-1), order, keys)
    chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, max(0, top_k - keys))), constant_values=keys)
    ascending = jnp.sort(chosen, axis=-1)
    return jnp.where(ascending == keys, -1, ascending)
