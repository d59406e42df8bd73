"""Index selection as a Pallas kernel for TPU (Mosaic): v5p, v6e and tpu7x."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.index_select import _tpu_select, xla
from pallas_kernels.index_select._tpu_compact import LANES, SUBLANES
from pallas_kernels.index_select.keys import Keys, QuantizedKeys
from pallas_kernels.sparse_attention.rows import compute_dtype

QUERY_BLOCK = 32
"""Queries of one sequence that share a reading of its keys."""

_LARGEST_COPY = 2048
"""Unpaged keys that are copied at once."""

_LARGEST_TOP_K = 8192
_EXACT_IN_BFLOAT16 = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _sublanes(dtype: Any) -> int:
    """Rows of one tile of memory."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def _as_pages(k_BSD: Array, largest: int) -> tuple[Array, int]:
    """[B, S, D] as pages [B * pages, page, D] and the pages of a sequence: a view, unless S has to be padded.

    A page has at most `largest` keys if such pages are whole tiles of memory.
    """
    batch, keys, channels = k_BSD.shape
    unit = _sublanes(k_BSD.dtype)
    if keys % unit:
        padded = -keys % (unit if keys <= _LARGEST_COPY else LANES)
        k_BSD = jnp.pad(k_BSD, ((0, 0), (0, padded), (0, 0)))
        keys += padded
    unit = LANES if keys % LANES == 0 else unit
    page = max(size for size in range(unit, max(unit, min(keys, largest)) + 1, unit) if keys % size == 0)
    return k_BSD.reshape(batch * (keys // page), page, channels), keys // page


def _merge_over(
    axis_name: str | tuple[str, ...], ranks_BQK: Array, indices_BQK: Array, top_k: int, interpret: Any
) -> Array:
    """The best of all shards' candidates: each device merges a part of the rows and all gather the parts."""
    shards = jax.lax.axis_size(axis_name)
    *lead, columns = indices_BQK.shape
    rows = math.prod(lead)

    def exchange(array: Array) -> Array:
        array = jnp.pad(array.reshape(rows, columns), ((0, -rows % (shards * SUBLANES)), (0, 0)))
        array = array.reshape(shards, -1, columns)
        return jax.lax.all_to_all(array, axis_name, split_axis=0, concat_axis=0, tiled=True)

    merged_RK = _tpu_select.merge_shards(exchange(ranks_BQK), exchange(indices_BQK), top_k, interpret)
    merged_RK = jax.lax.all_gather(merged_RK, axis_name, axis=0, tiled=True, to="invarying")
    return merged_RK[:rows].reshape(*lead, columns)


def _transposed(keys: QuantizedKeys, paged: bool) -> QuantizedKeys:
    """fp4 codes and scales with their channels before their keys, unpaged ones padded to whole lanes.

    That is how the compiler lays out rows narrower than the lanes, so that nothing moves.
    """

    def one(array: Array) -> Array:
        padding = 0 if paged else -array.shape[1] % LANES
        return jnp.swapaxes(jnp.pad(array, ((0, 0), (0, padding), (0, 0))), 1, 2)

    return QuantizedKeys(*map(one, keys))


def _fp8_scales(scales: Array, page_table: Array | None, keys: int) -> Array:
    """Scale bytes [B, keys] of the keys of each sequence, in the order of their positions."""
    if page_table is not None:
        pages = jnp.clip(page_table, 0, scales.shape[0] - 1)
        scales = scales[pages].reshape(page_table.shape[0], -1)
    return jnp.pad(scales, ((0, 0), (0, keys - scales.shape[1])))


def _check(q_index: Array, k_index: Keys, weights: Array, top_k: int, page_table: Array | None) -> None:
    is_fp4 = isinstance(k_index, QuantizedKeys) and k_index.is_fp4
    codes = jnp.asarray(k_index.codes if isinstance(k_index, QuantizedKeys) else k_index)
    if compute_dtype(q_index, codes, weights) == jnp.float64:
        raise NotImplementedError(
            "the TPU kernel computes in float32 and got float64; pass float32, or another implementation"
        )
    if not is_fp4 and codes.dtype.name not in (*_EXACT_IN_BFLOAT16, "float32"):
        raise NotImplementedError(
            f"the TPU kernel reads keys in float32, {', '.join(_EXACT_IN_BFLOAT16)} and got {codes.dtype}; "
            "convert them, or pass another implementation"
        )
    if top_k > _LARGEST_TOP_K:
        raise NotImplementedError(
            f"the TPU kernel selects at most {_LARGEST_TOP_K} keys and top_k is {top_k}; "
            "pass another implementation"
        )
    if page_table is not None and is_fp4 and codes.shape[1] % LANES:
        raise NotImplementedError(
            f"the TPU kernel copies pages of a multiple of {LANES} keys of fp4 and got pages of "
            f"{codes.shape[1]}; use such pages, or another implementation"
        )
    if page_table is not None and codes.shape[1] % _sublanes(codes.dtype):
        raise NotImplementedError(
            f"the TPU kernel copies pages of a multiple of {_sublanes(codes.dtype)} keys of {codes.dtype} "
            f"and got pages of {codes.shape[1]}; use such pages, or another implementation"
        )


@functools.partial(
    jax.jit, static_argnames=("top_k", "axis_name", "use_relu", "query_block", "key_round", "interpret")
)
def select(
    q_index: Float[Array, "B Q H D"],
    k_index: Keys,
    weights: Float[Array, "B Q H"],
    query_positions: Int[Array, "B Q"],
    top_k: int,
    page_table: Int[Array, "B pages"] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    use_relu: bool = True,
    query_block: int = QUERY_BLOCK,
    key_round: int | None = None,
    interpret: Any = False,
) -> Int[Array, "B Q top_k"]:
    """`pallas_kernels.index_select.select`, the visible keys read once per block of queries.

    Scores stay in vector memory. Keys of float32, bfloat16 and float8, and fp8 and fp4 `QuantizedKeys`, whose codes
    are unpacked in vector memory; unpaged keys are padded, that is copied, where their number is not a multiple of a
    tile of memory (8 keys of float32, 16 of bfloat16, 32 of float8, 128 of fp4);
    the compiler may copy keys of other than a multiple of 128 channels into the layout that the kernel reads.
    The block sizes (`query_block` a multiple of 8; `key_round` None for the best) do not change the result.
    `interpret` as in `pallas_call`.

    Raises:
      NotImplementedError: for float64 and other key types, for very large `top_k`, pages or page tables, and
        for pages that are not whole tiles of memory (128 keys of fp4).
    """
    with jax.named_scope("index_select_tpu"):
        _check(q_index, k_index, weights, top_k, page_table)
        # A selection has no gradient.
        q_index, k_index, weights = jax.lax.stop_gradient((q_index, k_index, weights))
        positions_BQ = query_positions.astype(jnp.int32)
        batch, queries, heads, channels = q_index.shape
        codes = jnp.asarray(k_index.codes if isinstance(k_index, QuantizedKeys) else k_index)
        local_keys = codes.shape[1] * (1 if page_table is None else page_table.shape[1])
        shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        if local_keys * shards <= top_k or batch * queries == 0:
            return xla.first_keys(positions_BQ, local_keys * shards, top_k)

        single_pass = q_index.dtype.name in _EXACT_IN_BFLOAT16 and codes.dtype != jnp.float32
        q_BQHD = q_index.astype(jnp.bfloat16 if single_pass else jnp.float32)
        paged = page_table is not None
        largest = min(key_round or _LARGEST_COPY, _LARGEST_COPY)
        row_bytes = -(-channels // LANES) * LANES * codes.dtype.itemsize
        kind, scales = "full", ()
        if isinstance(k_index, QuantizedKeys) and k_index.is_fp4:
            kind = "fp4"
            pages_PSD, fp4_scales = _transposed(k_index, paged)
            scales = (fp4_scales,)
            # In tiles of 32 rows.
            row_bytes = -(-channels // 64) * 32 + 32
            keys = pages_PSD.shape[2]
            page = keys
            if not paged:
                page = max(
                    size
                    for size in range(LANES, max(LANES, min(keys, largest)) + 1, LANES)
                    if keys % size == 0
                )
            pages = page_table.shape[1] if page_table is not None else keys // page
        else:
            if page_table is None:
                pages_PSD, pages = _as_pages(codes, largest)
            else:
                pages_PSD, pages = codes, page_table.shape[1]
            page = pages_PSD.shape[1]
            if isinstance(k_index, QuantizedKeys):
                kind, scales = "fp8", (_fp8_scales(k_index.scales, page_table, pages * page),)
        tiles = _tpu_select.choose_tiles(
            batch, queries, pages * page, page, row_bytes, top_k, paged, query_block, key_round
        )
        static = _tpu_select.Static(tiles, heads, top_k, pages, pages_PSD.shape[0], paged, use_relu, kind)
        offset = jnp.zeros((), jnp.int32)
        if axis_name is not None:
            offset = (jax.lax.axis_index(axis_name) * local_keys).astype(jnp.int32)
        # Keys that padding added are no keys.
        local_positions_BQ = jnp.minimum(positions_BQ - offset, jnp.int32(local_keys - 1))
        arrays = (q_BQHD, pages_PSD, weights.astype(jnp.float32), local_positions_BQ, *scales)
        if page_table is not None:
            arrays = (*arrays, page_table)
        indices, *ranks = _tpu_select.local_best(
            static, match_varying(*arrays), with_ranks=axis_name is not None, interpret=interpret
        )
        if axis_name is not None:
            indices = jnp.where(indices < 0, -1, indices + offset)
            with jax.named_scope("merge_shards"):
                indices = _merge_over(axis_name, ranks[0], indices, top_k, interpret)
        return indices[..., :top_k]
