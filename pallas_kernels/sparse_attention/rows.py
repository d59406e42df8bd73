"""Reading and writing rows of a key cache by index, in blocks of queries of bounded size."""

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array

GATHER_BYTES = 32 * 2**20
"""About the size of a block of gathered rows: large beside a loop step, small beside the cache."""


def compute_dtype(*arrays: Array) -> jnp.dtype:
    """float32, or float64 when one of the arrays is float64."""
    # Promotion by JAX's own functions is an error where strict promotion is switched on.
    return jnp.dtype(jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32)


def physical_rows(indices_BQN: Array, cache: Array, page_table_BP: Array | None) -> tuple[Array, Array]:
    """Rows of the cache that hold the given positions, and which of them exist.

    Returns `(rows, exists)`, both [B, Q, N]: rows of one sequence's keys, or of the flattened pages when
    there is a page table. Where a position does not exist (negative, beyond the cache, or on a page with a
    negative number) the row is 0, so that reading it is in bounds.
    """
    page = cache.shape[1]
    positions = page if page_table_BP is None else page_table_BP.shape[1] * page
    exists_BQN = (indices_BQN >= 0) & (indices_BQN < positions)
    rows_BQN = jnp.where(exists_BQN, indices_BQN, 0)
    if page_table_BP is not None:
        batch = jnp.arange(indices_BQN.shape[0], dtype=jnp.int32)[:, None, None]
        page_BQN = page_table_BP[batch, rows_BQN // page]
        exists_BQN &= (page_BQN >= 0) & (page_BQN < cache.shape[0])
        rows_BQN = jnp.where(exists_BQN, page_BQN * page + rows_BQN % page, 0)
    return rows_BQN, exists_BQN


def gather(cache: Array, rows_BQN: Array, exists_BQN: Array, paged: bool) -> Array:
    """Rows [B, Q, N, C] of a cache [B, S, C] or of pages [P, page, C]; zeros where the row does not exist."""
    if paged:
        gathered_BQNC = cache.reshape(-1, cache.shape[-1])[rows_BQN]
    else:
        # vmap keeps the batch an independent axis of the gather, so that it stays sharded when the batch is.
        gathered_BQNC = jax.vmap(lambda keys_SC, rows_QN: keys_SC[rows_QN])(cache, rows_BQN)
    # Multiplying by a mask would let a NaN of an unselected row through.
    return jnp.where(exists_BQN[..., None], gathered_BQNC, jnp.zeros((), cache.dtype))


def scatter_add(sums: Array, rows_BQN: Array, exists_BQN: Array, updates_BQNC: Array, paged: bool) -> Array:
    """`sums` (of the cache's shape) with every update added to its row: the transpose of `gather`."""
    updates_BQNC = jnp.where(exists_BQN[..., None], updates_BQNC, jnp.zeros((), updates_BQNC.dtype))
    if paged:
        return sums.reshape(-1, sums.shape[-1]).at[rows_BQN].add(updates_BQNC).reshape(sums.shape)
    return jax.vmap(lambda sums_SC, rows_QN, updates_QNC: sums_SC.at[rows_QN].add(updates_QNC))(
        sums, rows_BQN, updates_BQNC
    )


def finite_rows(cache: Array) -> tuple[Array, Array]:
    """The cache [..., S, C] with zeros for what is not finite, and NaN or 0 to add to the logits of each row [..., S].

    Where queries share a product over rows that only some of them selected, a weight of zero would not stop a NaN.
    """
    finite = jnp.isfinite(cache)
    zero, nan = jnp.zeros((), cache.dtype), jnp.full((), jnp.nan, cache.dtype)
    return jnp.where(finite, cache, zero), jnp.where(jnp.all(finite, axis=-1), zero, nan)


def query_block(batch: int, queries: int, bytes_per_query: int) -> int:
    """Queries per block, so that one block of the whole batch holds about `GATHER_BYTES`."""
    return max(1, min(queries, GATHER_BYTES // max(1, batch * bytes_per_query)))


def split_queries(array_BQ: Array, block: int, fill: int) -> Array:
    """[B, Q, ...] as [blocks, B, block, ...], the last block filled up."""
    batch, queries, *rest = array_BQ.shape
    blocks = -(-queries // block)
    padding = [(0, 0), (0, blocks * block - queries)] + [(0, 0)] * len(rest)
    padded = jnp.pad(array_BQ, padding, constant_values=fill)
    return jnp.moveaxis(padded.reshape(batch, blocks, block, *rest), 1, 0)


def join_queries(blocks: Array, queries: int) -> Array:
    """Undo `split_queries`: [blocks, B, block, ...] as [B, Q, ...]."""
    joined = jnp.moveaxis(blocks, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :queries]
