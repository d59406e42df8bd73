"""Pallas TPU kernels of attention over selected keys, blocks of neighbouring queries sharing what they read.

A first kernel turns the indices of every query into one bit per key. The second walks the cache in blocks of keys,
contiguous or gathered from the pages that hold them, multiplies each with all queries of a block and masks what a
query did not select; key blocks that no query of the block selected from are neither fetched nor multiplied. What is
not finite in a row counts for the queries that selected it, by their logits, and is 0 among the values of the others.

Bit b of lane l of word row g belongs to key 4096 g + 128 b + l, so that the mask of 128 neighbouring keys is one
shift of a register of words.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array
from pallas_kernels._varying import result_like
from pallas_kernels.sparse_attention import _tpu_softmax as online
from pallas_kernels.sparse_attention import rows as key_rows

LANES = 128
_BITS = 32
WORD_KEYS = LANES * _BITS
"""Keys whose bits share one row of words."""

_VMEM_LIMIT = 48 * 2**20
_LARGEST_LIST = 2**17
_SMALLEST_PAGE = 16
"""Rows of a tile of bfloat16: a block of keys is put together from whole tiles."""
_LARGEST_HEADS = 128
_MASK_QUERIES = 8
_MASK_BYTES = 16 * 2**20
"""About the size of the bits of the queries at work: one bit per query and key."""


class Options(NamedTuple):
    """What is fixed when the kernels are traced.

    scale, value_dim: as in the public function.
    queries: neighbouring queries that share keys, a multiple of 16.
    keys: keys multiplied at a time, 128 to 4096, a power of two.
    interpret: as in `pallas_call`.
    """

    scale: float
    value_dim: int
    queries: int
    keys: int
    interpret: Any


def queries_per_block(queries: int, heads: int) -> int:
    """As many as keep the matrix unit's rows busy while the sums of all heads fit into vector memory."""
    largest = 64 if heads <= 12 else 32 if heads <= 32 else 16
    return min(largest, -(-queries // 16) * 16)


def fits(batch: int, heads: int, keys: int, block: int, page: int | None) -> bool:
    """Whether the numbers of the key blocks, and of the pages, fit into scalar memory, and 16 queries of all heads into
    vector memory; and whether a block is a number of pages, or a page of blocks."""
    if page is not None and (page % _SMALLEST_PAGE or (block % page and page % block)):
        return False
    return batch * -(-keys // min(block, page or block)) <= _LARGEST_LIST and heads <= _LARGEST_HEADS


def _mask_kernel(indices_ref: Any, words_ref: Any) -> None:
    """Bits [G, 8, LANES] of the indices [8, N]: per query a product of one-hot matrices, row of bits by lane."""
    selected = indices_ref.shape[2]
    word_rows = words_ref.shape[1]
    step = min(8, word_rows)

    def one_hot(values_1N: Array, size: int) -> Array:
        place = lax.broadcasted_iota(jnp.int32, (size, selected), 0)
        return jnp.where(place == values_1N, np.float32(1), np.float32(0)).astype(jnp.bfloat16)

    def one_query(query: Any, _: None) -> None:
        # Row numbers of what lies outside are those of no word.
        indices_1N = indices_ref[0, pl.ds(query, 1)]
        row_1N, lanes_LN = indices_1N >> 7, one_hot(indices_1N & (LANES - 1), LANES)

        def some_words(turn: Any, _: None) -> None:
            first = pl.multiple_of(turn * step, step)
            rows_RN = one_hot(row_1N - first * _BITS, step * _BITS)
            counts_RL = lax.dot_general(
                rows_RN, lanes_LN, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            bit_RL = lax.broadcasted_iota(jnp.int32, counts_RL.shape, 0) & (_BITS - 1)
            set_RL = jnp.where(counts_RL > np.float32(0), jnp.left_shift(jnp.ones_like(bit_RL), bit_RL), 0)
            words = jnp.sum(set_RL.reshape(step, _BITS, LANES), axis=1)
            words_ref[0, pl.ds(first, step), pl.ds(query, 1)] = words[:, None]

        lax.fori_loop(0, word_rows // step, some_words, None)

    lax.fori_loop(0, _MASK_QUERIES, one_query, None)


def _number_of_word_rows(keys: int) -> int:
    """A multiple of 8 beyond 8."""
    word_rows = -(-keys // WORD_KEYS)
    return word_rows if word_rows <= 8 else -(-word_rows // 8) * 8


def existing_bits(keys: int, page_table_BP: Array | None, pages: int) -> Array | None:
    """Words [B or 1, G, 1, LANES] of the keys that exist, those of pages with a number that there is not excepted; None
    where all bits of the words are keys that do."""
    word_keys = _number_of_word_rows(keys) * WORD_KEYS
    if page_table_BP is None:
        if word_keys == keys:
            return None
        exists_BS = jnp.arange(word_keys, dtype=jnp.int32)[None] < keys
    else:
        exists_BP = (page_table_BP >= 0) & (page_table_BP < pages)
        exists_BS = jnp.repeat(exists_BP, keys // page_table_BP.shape[1], axis=1)
        exists_BS = jnp.pad(exists_BS, ((0, 0), (0, word_keys - keys)))
    exists_BGbL = exists_BS.reshape(exists_BS.shape[0], -1, _BITS, LANES)
    bit_b1 = jnp.left_shift(jnp.ones((_BITS, 1), jnp.int32), jnp.arange(_BITS, dtype=jnp.int32)[:, None])
    return jnp.sum(jnp.where(exists_BGbL, bit_b1, 0), axis=2, dtype=jnp.int32)[:, :, None]


def selection_bits(indices_BQN: Array, keys: int, interpret: Any) -> Array:
    """Words [B, G, Q, LANES] of the indices (Q a multiple of 8), int32. A negative index sets no bit, nor does one
    beyond the words; one of a key in them that does not exist (`existing_bits`) does."""
    batch, queries, selected = indices_BQN.shape
    word_rows = _number_of_word_rows(keys)
    return pl.pallas_call(
        _mask_kernel,
        grid=(batch, queries // _MASK_QUERIES),
        in_specs=[pl.BlockSpec((1, _MASK_QUERIES, selected), lambda b, q: (b, q, 0))],
        out_specs=pl.BlockSpec((1, word_rows, _MASK_QUERIES, LANES), lambda b, q: (b, 0, q, 0)),
        out_shape=result_like(indices_BQN, (batch, word_rows, queries, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        interpret=interpret,
        name="sparse_attention_bits",
    )(indices_BQN)


def touched_blocks(options: Options, words_BGQL: Array, blocks: int) -> Array:
    """[B, query blocks, key blocks]: whether a query of the one selects from the other."""
    batch, word_rows, queries, _ = words_BGQL.shape
    parts = WORD_KEYS // options.keys
    shared = words_BGQL.reshape(batch, word_rows, queries // options.queries, options.queries, LANES)
    shared = lax.reduce(shared, np.int32(0), lax.bitwise_or, (3, 4))
    bits = options.keys // LANES
    # Shifted out of an unsigned word, so that no sign fills in.
    part = lax.bitcast_convert_type(shared, jnp.uint32)[..., None] >> (
        jnp.arange(parts, dtype=jnp.uint32) * np.uint32(bits)
    )
    touched = (part & np.uint32(2**bits - 1)) != 0
    touched = jnp.swapaxes(touched, 1, 2).reshape(batch, queries // options.queries, word_rows * parts)
    return touched[..., :blocks]


def held_blocks(touched: Array, axis: int) -> Array:
    """int32 like `touched`: along the axis the block itself where it is touched, else the last one before it that is,
    -1 for none. What is held is not fetched again."""
    own = lax.broadcasted_iota(jnp.int32, touched.shape, axis)
    return lax.cummax(jnp.where(touched, own, -1), axis=axis)


class KeyBlocks(NamedTuple):
    """How a block of keys comes into vector memory, by one array or by one for each of its pages.

    specs: of the arrays, all of which are the cache.
    table: pages by position, for scalar memory, or nothing.
    """

    specs: list[pl.BlockSpec]
    table: tuple[Array, ...]


def key_blocks(
    options: Options, kv_latent: Array, page_table: Array | None, blocks: int, number: Callable[..., Any]
) -> KeyBlocks:
    """Blocks of keys by their number, which `number` gives from the indices of the grid and the scalars."""
    width = kv_latent.shape[-1]
    if page_table is None:
        return KeyBlocks(
            [pl.BlockSpec((1, options.keys, width), lambda b, *grid: (b, number(b, *grid), 0))], ()
        )
    pages, page, _ = kv_latent.shape
    table = jnp.clip(page_table, 0, pages - 1).astype(jnp.int32)
    if page >= options.keys:
        parts = page // options.keys
        shift = parts.bit_length() - 1

        def part_of_page(b: Any, *grid: Any) -> tuple[Any, Any, Any]:
            block = number(b, *grid)
            return grid[-1][b, block >> shift], block & (parts - 1), 0

        return KeyBlocks([pl.BlockSpec((1, options.keys, width), part_of_page)], (table,))
    per_block = options.keys // page
    table = jnp.pad(table, ((0, 0), (0, blocks * per_block - table.shape[1])))

    def nth_page(nth: int) -> Callable[..., Any]:
        return lambda b, *grid: (grid[-1][b, number(b, *grid) * per_block + nth], 0, 0)

    return KeyBlocks([pl.BlockSpec((1, page, width), nth_page(nth)) for nth in range(per_block)], (table,))


def masked_keys(
    options: Options, heads: int, block: Any, words_ref: Any, kv_refs: Sequence[Any]
) -> tuple[Array, Array, Array]:
    """The mask [heads * queries, keys] of a block of keys, its rows with zeros where nobody selected them, and the same
    with zeros for what is not finite."""
    queries = options.queries
    bits = options.keys // LANES
    first_bit = (block & (WORD_KEYS // options.keys - 1)) * bits
    words_QL = words_ref[0, 0]
    chunks = [(words_QL >> (first_bit + bit)) & 1 for bit in range(bits)]
    mask_QN = jnp.concatenate(chunks, axis=1)
    used = [online.to_column(jnp.max(chunk, axis=0, keepdims=True).astype(jnp.float32)) for chunk in chunks]
    kv_NC = jnp.concatenate([ref[0] for ref in kv_refs], axis=0) if len(kv_refs) > 1 else kv_refs[0][0]
    used_NC = jnp.broadcast_to(jnp.concatenate(used, axis=0), kv_NC.shape)
    # What nobody selected may be NaN, which a weight of zero would not stop.
    wide_NC = jnp.where(used_NC > np.float32(0), kv_NC.astype(jnp.float32), np.float32(0))
    finite_NC = jnp.where(jnp.abs(wide_NC) < np.float32(np.inf), wide_NC, np.float32(0)).astype(kv_NC.dtype)
    mask_HQN = jnp.broadcast_to(mask_QN[None], (heads, queries, options.keys))
    return mask_HQN.reshape(heads * queries, options.keys) != 0, wide_NC.astype(kv_NC.dtype), finite_NC


def _kernel(options: Options, scalars: int, *refs: Any) -> None:
    held_ref, words_ref, q_ref = refs[0], *refs[scalars : scalars + 2]
    kv_refs, (o_ref, logsumexp_ref, maximum_ref, total_ref, sums_ref) = refs[scalars + 2 : -5], refs[-5:]
    here, block = (pl.program_id(0), pl.program_id(1)), pl.program_id(2)
    heads, queries, width = q_ref.shape[1:]

    @pl.when(block == 0)
    def _() -> None:
        online.start(maximum_ref, total_ref, sums_ref)

    @pl.when(held_ref[*here, block] == block)
    def _() -> None:
        mask_RN, kv_NC, finite_NC = masked_keys(options, heads, block, words_ref, kv_refs)
        q_RC = q_ref[0].reshape(heads * queries, width)
        online.attend_block(options.scale, q_RC, kv_NC, mask_RN, maximum_ref, total_ref, sums_ref, finite_NC)

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        o_RV, logsumexp_R1 = online.finish(maximum_ref, total_ref, sums_ref)
        o_ref[0] = o_RV.reshape(heads, queries, options.value_dim).astype(o_ref.dtype)
        rows = heads * queries
        parts = [logsumexp_R1[at : min(at + LANES, rows)] for at in range(0, rows, LANES)]
        logsumexp_ref[0, 0] = jnp.concatenate([online.to_row(part) for part in parts], axis=1)


def _attend(
    options: Options,
    q_BQHC: Array,
    kv_latent: Array,
    page_table: Array | None,
    existing: Array | None,
    indices_BQN: Array,
    dtype: Any,
) -> tuple[Array, Array]:
    batch, queries, heads, width = q_BQHC.shape
    keys = kv_latent.shape[1] * (1 if page_table is None else page_table.shape[1])
    blocks = -(-keys // options.keys)
    words_BGQL = selection_bits(indices_BQN, keys, options.interpret)
    if existing is not None:
        words_BGQL &= existing
    held = held_blocks(touched_blocks(options, words_BGQL, blocks), 2)
    rows = heads * options.queries
    shift = (WORD_KEYS // options.keys).bit_length() - 1

    def per_head(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, options.queries, size), lambda b, q, k, *_: (b, 0, q, 0))

    def key_block(b: Any, q: Any, k: Any, held: Any, *_: Any) -> Any:
        return jnp.maximum(held[b, q, k], 0)

    specs, table = key_blocks(options, kv_latent, page_table, blocks, key_block)
    o_BHQV, logsumexp = pl.pallas_call(
        functools.partial(_kernel, options, 1 + len(table)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(table),
            grid=(batch, queries // options.queries, blocks),
            in_specs=[
                pl.BlockSpec(
                    (1, 1, options.queries, LANES),
                    lambda b, q, k, *scalars: (b, key_block(b, q, k, *scalars) >> shift, q, 0),
                ),
                per_head(width),
                *specs,
            ],
            out_specs=[
                per_head(options.value_dim),
                pl.BlockSpec((1, 1, 1, rows), lambda b, q, k, *_: (b, q, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, options.value_dim), jnp.float32),
            ],
        ),
        out_shape=[
            result_like(q_BQHC, (batch, heads, queries, options.value_dim), dtype),
            result_like(q_BQHC, (batch, queries // options.queries, 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * queries * heads * keys * (width + options.value_dim),
            transcendentals=batch * queries * heads * keys,
            bytes_accessed=batch * queries // options.queries * keys * width * kv_latent.dtype.itemsize,
        ),
        interpret=options.interpret,
        name="sparse_attention_shared",
    )(held, *table, words_BGQL, jnp.swapaxes(q_BQHC, 1, 2), *[kv_latent] * len(specs))
    logsumexp = logsumexp.reshape(batch, queries // options.queries, heads, options.queries)
    logsumexp_BQH = jnp.swapaxes(logsumexp, 2, 3).reshape(batch, queries, heads)
    return jnp.swapaxes(o_BHQV, 1, 2), logsumexp_BQH


def queries_at_once(options: Options, batch: int, queries: int, keys: int) -> int:
    """Whole blocks of queries whose bits are in memory together."""
    at_once = max(1, _MASK_BYTES // (batch * options.queries * -(-keys // 8))) * options.queries
    return min(at_once, -(-queries // options.queries) * options.queries)


def attention(
    options: Options,
    q_BQHC: Array,
    kv_latent: Array,
    page_table: Array | None,
    indices_BQN: Array,
    dtype: Any,
) -> tuple[Array, Array]:
    """o in the given dtype, and logsumexp in float32, over the positions [B, Q, N] int32 that exist."""
    batch, queries, _, _ = q_BQHC.shape
    keys = kv_latent.shape[1] * (1 if page_table is None else page_table.shape[1])
    at_once = queries_at_once(options, batch, queries, keys)
    existing = existing_bits(keys, page_table, kv_latent.shape[0])
    parts = key_rows.split_queries(q_BQHC, at_once, 0), key_rows.split_queries(indices_BQN, at_once, -1)
    o, logsumexp = lax.map(
        lambda part: _attend(options, part[0], kv_latent, page_table, existing, part[1], dtype), parts
    )
    return key_rows.join_queries(o, queries), key_rows.join_queries(logsumexp, queries)
