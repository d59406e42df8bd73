"""Sparse attention as Pallas kernels for TPU (Mosaic): v5p, v6e and tpu7x.

Two ways. Fetching every query's own rows costs 13 instruction bundles per selected key (and 4 to multiply it, with
96 heads), whatever the cache holds, and 2.6 KB of HBM traffic: for 2,048 keys 33,000 bundles, about 19 us, and 5 MB,
3 us. Sharing the cache among a block of queries costs, per query and key of the cache, 2 H (C + 2 V) operations of
the matrix unit, 250,000 per bundle, and 0.03 bundles for the mask: with 12 heads 25,000 bundles at 128K keys,
100,000 at 512K; with 96 heads 172,000 at 128K. The cache is read once per block of 64 queries, 168 MB at 128K keys,
where their own rows are 336 MB. So queries share where there are many of them, few heads and not too many keys.

The bundles are those of the compiler's schedule for v6e; nothing here has run on a TPU.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.sparse_attention import _tpu_backward, _tpu_gather, _tpu_shared, xla
from pallas_kernels.sparse_attention import rows as key_rows

Options = _tpu_gather.Options | _tpu_shared.Options

_SHARING_QUERIES = 16
"""Fewer queries than this fetch their own rows: the block would be empty for the most part."""

_WALK_BLOCK = 512
_FETCH_BLOCK = 256

# Bundles, from the schedules of 512 keys by 64 queries of 12 heads and of a block of 256 fetched rows.
_COPY_BUNDLES = 13.0
_MASK_BUNDLES = 0.03
# In float32 a product takes six passes, and weights are not split.
_OPERATIONS_PER_BUNDLE = {jnp.dtype(jnp.bfloat16): 250_000.0, jnp.dtype(jnp.float32): 40_000.0}


def shares_keys(
    queries: int, heads: int, width: int, value_dim: int, keys: int, selected: int, dtype: Any
) -> bool:
    """Whether a block of queries that walks the cache together is estimated to cost less than fetching rows."""
    operations = 2 * heads * (width + (2 if dtype == jnp.bfloat16 else 1) * value_dim)
    walk = keys * (operations / _OPERATIONS_PER_BUNDLE[jnp.dtype(dtype)] + _MASK_BUNDLES)
    return queries >= _SHARING_QUERIES and walk < selected * _COPY_BUNDLES


class Selection(NamedTuple):
    """Which keys each query reads: positions, and the pages that hold them."""

    indices_BQN: Array
    page_table_BP: Array | None


def _run(
    options: Options, q_BQHC: Array, kv_latent: Array, selection: Selection, dtype: Any
) -> tuple[Array, Array]:
    """o in the given dtype where keys are shared, else in that of q, and logsumexp."""
    indices_BQN, table = selection
    if isinstance(options, _tpu_shared.Options):
        # Which of them exist is told by bit there: it would take several passes over all numbers.
        return _tpu_shared.attention(options, q_BQHC, kv_latent, table, indices_BQN, dtype)
    rows_BQN, exists_BQN = key_rows.physical_rows(indices_BQN, kv_latent, table)
    return _tpu_gather.attention(options, q_BQHC, kv_latent, rows_BQN, exists_BQN, table is not None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    options: Options, q_BQHC: Array, kv_latent: Array, selection: Selection
) -> tuple[Array, Array]:
    return _run(options, q_BQHC, kv_latent, selection, q_BQHC.dtype)


def _forward(
    options: Options, q_BQHC: Array, kv_latent: Array, selection: Selection
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    if not isinstance(options, _tpu_shared.Options) or selection.page_table_BP is not None:
        return _attention(options, q_BQHC, kv_latent, selection), (q_BQHC, kv_latent, selection, None)
    # The gradient sums products with o, whose rounding to bfloat16 it must not see.
    o, logsumexp = _run(options, q_BQHC, kv_latent, selection, jnp.float32)
    return (o.astype(q_BQHC.dtype), logsumexp), (q_BQHC, kv_latent, selection, (o, logsumexp))


def _backward(
    options: Options, residuals: tuple[Any, ...], cotangents: tuple[Array, Array]
) -> tuple[Any, ...]:
    q_BQHC, kv_latent, selection, results = residuals
    if results is not None:
        assert isinstance(options, _tpu_shared.Options)
        indices_BQN = selection.indices_BQN
        dq, dkv = _tpu_backward.gradients(options, q_BQHC, kv_latent, indices_BQN, results, cotangents)
    else:
        rows_BQN, exists_BQN = key_rows.physical_rows(
            selection.indices_BQN, kv_latent, selection.page_table_BP
        )
        inputs = (q_BQHC, kv_latent, rows_BQN, exists_BQN)
        paged = selection.page_table_BP is not None
        dq, dkv, *_ = xla.backward(options.scale, options.value_dim, paged, inputs, cotangents)
    return dq, dkv, jax.tree.map(lambda _: None, selection)


_attention.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("scale", "value_dim", "shared", "block", "interpret"))
def sparse_attention(
    q_BQHC: Float[Array, "B Q H C"],
    kv_latent: Float[Array, "rows keys C"],
    indices_BQN: Int[Array, "B Q N"],
    scale: float,
    value_dim: int,
    page_table_BP: Int[Array, "B pages"] | None = None,
    shared: bool | None = None,
    block: int | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H V"], Float[Array, "B Q H"]]:
    """`pallas_kernels.sparse_attention.sparse_attention`, every query fetching its own rows of the cache, or blocks
    of queries walking it together; `shared` None decides by `shares_keys`. Pages are walked too where they have a
    multiple of 16 keys and divide a block or are a number of blocks.

    The cache is read in place where its channels are whole lanes of 128 (576 channels: allocate 640, zeros in
    the cache and in q); otherwise XLA prefers to lay it out with the keys in lanes, and copies it for the kernel,
    unless the program fixes the layout of its argument. An odd number of bfloat16 keys is padded, a copy too.

    Where blocks of queries share a contiguous cache the backward pass is two Pallas kernels. Elsewhere it is that of
    the portable form, which recomputes blocks of queries and adds the gradients of rows one block after the other:
    a kernel could add rows of single queries to the cache's gradient only by reading, adding and writing each in turn.

    `block` keys are multiplied at a time; `interpret` as in `pallas_call`.

    Raises:
      NotImplementedError: for dtypes other than bfloat16 and float32, for pages of more than 2^31 rows, and where
        keys cannot be shared though `shared` is set.
    """
    for name, array in (("q_latent", q_BQHC), ("kv_latent", kv_latent)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(
                f"the TPU kernels of sparse attention take bfloat16 and float32 and got {name} of "
                f"{array.dtype}; cast it, or pass another implementation"
            )
    paged = page_table_BP is not None
    pages, keys, width = kv_latent.shape
    if paged and pages << (keys - 1).bit_length() > 2**31:
        raise NotImplementedError(
            f"the TPU kernels of sparse attention number rows with 31 bits, too few for {pages} pages of {keys} "
            "keys; shard the pages, or pass another implementation"
        )
    batch, queries, heads = q_BQHC.shape[:3]
    walk_block = block or _WALK_BLOCK
    positions = keys * (1 if page_table_BP is None else page_table_BP.shape[1])
    can_share = _tpu_shared.fits(batch, heads, positions, walk_block, keys if paged else None)
    if shared and not can_share:
        raise NotImplementedError(
            f"queries of the TPU kernel share the keys of caches of moderate size, contiguous or in pages of a "
            f"multiple of 16 keys that fit blocks of {walk_block}, and got {batch} x {positions} keys"
            f"{f' in pages of {keys}' if paged else ''} and {heads} heads; pass shared=None or False"
        )
    if shared is None:
        wide = jnp.bfloat16 if q_BQHC.dtype == kv_latent.dtype == jnp.bfloat16 else jnp.float32
        selected = indices_BQN.shape[2]
        shared = can_share and shares_keys(queries, heads, width, value_dim, positions, selected, wide)
    options: Options
    if shared:
        together = _tpu_shared.queries_per_block(queries, heads)
        options = _tpu_shared.Options(scale, value_dim, together, walk_block, interpret)
    else:
        options = _tpu_gather.Options(scale, value_dim, block or _FETCH_BLOCK, interpret)
    with jax.named_scope("sparse_attention"):
        if indices_BQN.dtype != jnp.int32:
            # A wider number might become another one's.
            exists_BQN = (indices_BQN >= 0) & (indices_BQN < positions)
            indices_BQN = jnp.where(exists_BQN, indices_BQN, -1).astype(jnp.int32)
        table = () if page_table_BP is None else (page_table_BP,)
        q, kv, *which = match_varying(q_BQHC, kv_latent, indices_BQN, *table)
        selection = Selection(*which, *([] if paged else [None]))
        return _attention(options, q, kv, selection)
