"""Pallas TPU kernels of attention over selected keys, blocks of neighbouring queries sharing what they read.

A first kernel turns the indices of every query into one bit per key. The second walks the cache in blocks of keys,
multiplies each with all queries of a block and masks what a query did not select; key blocks that no query of the
block selected from are neither fetched nor multiplied. Within a block of queries, as where the portable form masks,
a NaN in a row that one of them selects is a NaN for all.

Bit b of lane l of word row g belongs to key 4096 g + 128 b + l, so that the mask of 128 neighbouring keys is one
shift of a register of words.
"""

import functools
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
_WORD_KEYS = LANES * _BITS
"""Keys whose bits share one row of words."""

_VMEM_LIMIT = 48 * 2**20
_LARGEST_LIST = 2**17
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


def fits(batch: int, heads: int, keys: int, block: int) -> bool:
    """Whether the numbers of the key blocks fit into scalar memory, and 16 queries of all heads into vector memory."""
    return batch * -(-keys // block) <= _LARGEST_LIST and heads <= _LARGEST_HEADS


def _mask_kernel(indices_ref: Any, words_ref: Any) -> None:
    """Bits [G, 8, LANES] of the indices [8, N]: per query a product of one-hot matrices, row of bits by lane."""
    selected = indices_ref.shape[2]
    word_rows = words_ref.shape[1]
    step = min(8, word_rows)

    def one_hot(values_1N: Array, size: int) -> Array:
        place = lax.broadcasted_iota(jnp.int32, (size, selected), 0)
        return jnp.where(place == values_1N, np.float32(1), np.float32(0)).astype(jnp.bfloat16)

    def one_query(query: Any, _: None) -> None:
        indices_1N = indices_ref[0, pl.ds(query, 1)]
        row_1N, lanes_LN = indices_1N >> 7, one_hot(indices_1N & (LANES - 1), LANES)

        def some_words(turn: Any, _: None) -> None:
            first = pl.multiple_of(turn * step, step)
            # An index of -1 lies in row -1, which is in no step.
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


def selection_bits(indices_BQN: Array, keys: int, interpret: Any) -> Array:
    """Words [B, G, Q, LANES] of the indices (Q a multiple of 8, -1 for none), G a multiple of 8 beyond 8."""
    batch, queries, selected = indices_BQN.shape
    word_rows = -(-keys // _WORD_KEYS)
    word_rows = word_rows if word_rows <= 8 else -(-word_rows // 8) * 8
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


def _held_blocks(options: Options, words_BGQL: Array, blocks: int) -> Array:
    """[B, query blocks, key blocks] int32: the key block itself where a query selects from it, else the last such
    block before it, -1 for none."""
    batch, word_rows, queries, _ = words_BGQL.shape
    parts = _WORD_KEYS // options.keys
    shared = words_BGQL.reshape(batch, word_rows, queries // options.queries, options.queries, LANES)
    shared = lax.reduce(shared, np.int32(0), lax.bitwise_or, (3, 4))
    bits = options.keys // LANES
    # Shifted out of an unsigned word, so that no sign fills in.
    part = lax.bitcast_convert_type(shared, jnp.uint32)[..., None] >> (
        jnp.arange(parts, dtype=jnp.uint32) * np.uint32(bits)
    )
    touched = (part & np.uint32(2**bits - 1)) != 0
    touched = jnp.swapaxes(touched, 1, 2).reshape(batch, queries // options.queries, word_rows * parts)
    own = jnp.arange(blocks, dtype=jnp.int32)
    return lax.cummax(jnp.where(touched[..., :blocks], own, -1), axis=2)


def _kernel(
    options: Options,
    held_ref: Any,
    words_ref: Any,
    q_ref: Any,
    kv_ref: Any,
    o_ref: Any,
    logsumexp_ref: Any,
    maximum_ref: Any,
    total_ref: Any,
    sums_ref: Any,
) -> None:
    here, block = (pl.program_id(0), pl.program_id(1)), pl.program_id(2)
    heads, queries, width = q_ref.shape[1:]

    @pl.when(block == 0)
    def _() -> None:
        online.start(maximum_ref, total_ref, sums_ref)

    @pl.when(held_ref[*here, block] == block)
    def _() -> None:
        bits = options.keys // LANES
        first_bit = (block & (_WORD_KEYS // options.keys - 1)) * bits
        words_QL = words_ref[0, 0]
        chunks = [(words_QL >> (first_bit + bit)) & 1 for bit in range(bits)]
        mask_QN = jnp.concatenate(chunks, axis=1)
        used = [
            online.to_column(jnp.max(chunk, axis=0, keepdims=True).astype(jnp.float32)) for chunk in chunks
        ]
        kv_NC = kv_ref[0]
        used_NC = jnp.broadcast_to(jnp.concatenate(used, axis=0), kv_NC.shape)
        # What nobody selected may be NaN, which a weight of zero would not stop.
        kv_NC = jnp.where(used_NC > np.float32(0), kv_NC.astype(jnp.float32), np.float32(0)).astype(
            kv_NC.dtype
        )
        mask_HQN = jnp.broadcast_to(mask_QN[None], (heads, queries, options.keys))
        mask_RN = mask_HQN.reshape(heads * queries, options.keys) != 0
        q_RC = q_ref[0].reshape(heads * queries, width)
        online.attend_block(options.scale, q_RC, kv_NC, mask_RN, maximum_ref, total_ref, sums_ref)

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        o_RV, logsumexp_R1 = online.finish(maximum_ref, total_ref, sums_ref)
        o_ref[0] = o_RV.reshape(heads, queries, options.value_dim).astype(o_ref.dtype)
        rows = heads * queries
        parts = [logsumexp_R1[at : min(at + LANES, rows)] for at in range(0, rows, LANES)]
        logsumexp_ref[0, 0] = jnp.concatenate([online.to_row(part) for part in parts], axis=1)


def _attend(options: Options, q_BQHC: Array, kv_BSC: Array, indices_BQN: Array) -> tuple[Array, Array]:
    batch, queries, heads, width = q_BQHC.shape
    keys = kv_BSC.shape[1]
    blocks = -(-keys // options.keys)
    words_BGQL = selection_bits(indices_BQN, keys, options.interpret)
    held = _held_blocks(options, words_BGQL, blocks)
    rows = heads * options.queries
    shift = (_WORD_KEYS // options.keys).bit_length() - 1

    def per_head(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, options.queries, size), lambda b, q, k, held: (b, 0, q, 0))

    def key_block(b: Any, q: Any, k: Any, held: Any) -> Any:
        return jnp.maximum(held[b, q, k], 0)

    o_BHQV, logsumexp = pl.pallas_call(
        functools.partial(_kernel, options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, queries // options.queries, blocks),
            in_specs=[
                pl.BlockSpec(
                    (1, 1, options.queries, LANES),
                    lambda b, q, k, held: (b, key_block(b, q, k, held) >> shift, q, 0),
                ),
                per_head(width),
                pl.BlockSpec(
                    (1, options.keys, width), lambda b, q, k, held: (b, key_block(b, q, k, held), 0)
                ),
            ],
            out_specs=[
                per_head(options.value_dim),
                pl.BlockSpec((1, 1, 1, rows), lambda b, q, k, held: (b, q, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, options.value_dim), jnp.float32),
            ],
        ),
        out_shape=[
            result_like(q_BQHC, (batch, heads, queries, options.value_dim), q_BQHC.dtype),
            result_like(q_BQHC, (batch, queries // options.queries, 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * queries * heads * keys * (width + options.value_dim),
            transcendentals=batch * queries * heads * keys,
            bytes_accessed=batch * queries // options.queries * keys * width * kv_BSC.dtype.itemsize,
        ),
        interpret=options.interpret,
        name="sparse_attention_shared",
    )(held, words_BGQL, jnp.swapaxes(q_BQHC, 1, 2), kv_BSC)
    logsumexp = logsumexp.reshape(batch, queries // options.queries, heads, options.queries)
    logsumexp_BQH = jnp.swapaxes(logsumexp, 2, 3).reshape(batch, queries, heads)
    return jnp.swapaxes(o_BHQV, 1, 2), logsumexp_BQH


def attention(
    options: Options, q_BQHC: Array, kv_BSC: Array, rows_BQN: Array, exists_BQN: Array
) -> tuple[Array, Array]:
    """o in the dtype of q, and logsumexp in float32, from rows as `rows.physical_rows` gives them."""
    batch, queries, _, _ = q_BQHC.shape
    keys = kv_BSC.shape[1]
    indices_BQN = jnp.where(exists_BQN, rows_BQN, -1).astype(jnp.int32)
    at_once = max(1, _MASK_BYTES // (batch * options.queries * -(-keys // 8))) * options.queries
    at_once = min(at_once, -(-queries // options.queries) * options.queries)
    parts = key_rows.split_queries(q_BQHC, at_once, 0), key_rows.split_queries(indices_BQN, at_once, -1)
    o, logsumexp = lax.map(lambda part: _attend(options, part[0], kv_BSC, part[1]), parts)
    return key_rows.join_queries(o, queries), key_rows.join_queries(logsumexp, queries)
