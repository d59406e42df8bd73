"""Pallas TPU kernel of attention over selected keys, each query fetching its own rows of the cache.

Grid (batch, query). The indices of a query lie in scalar memory; its rows come from HBM by one copy each, a block
of them while the block before is multiplied, and meet an online softmax. Nothing is as long as the cache.

What a copy moves is 32 bits wide, so bfloat16 rows come in pairs (2, C) of which one half is kept: 2.6 KB per key
at 640 channels, 5 MB per query of 2,048 keys, where whole 8-row tiles would be 21 MB.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._memory import in_hbm
from pallas_kernels._typing import Array
from pallas_kernels._varying import result_like
from pallas_kernels.sparse_attention import _tpu_softmax as online

_VMEM_LIMIT = 48 * 2**20


class Options(NamedTuple):
    """What is fixed when the kernel is traced.

    scale, value_dim: as in the public function.
    block: selected keys multiplied at a time, a power of two, at least 128 (for an interpreter, at least 16).
    interpret: as in `pallas_call`.
    """

    scale: float
    value_dim: int
    block: int
    interpret: Any


def rows_per_copy(dtype: Any) -> int:
    """Neighbouring rows of the cache that one copy moves: those that share 32-bit words."""
    return 4 // jnp.dtype(dtype).itemsize


def _selected_rows(fetched_GC: Array, code_N1: Array) -> Array:
    """The wanted row of every copy [N, C], zeros where there was none. `code` is 0 there, else 1 + row in copy."""
    if fetched_GC.dtype == jnp.float32:
        wanted_NC = jnp.broadcast_to(code_N1 > np.float32(0), fetched_GC.shape)
        return jnp.where(wanted_NC, fetched_GC, np.float32(0))
    words_NC = pltpu.bitcast(fetched_GC, jnp.int32)
    # The halves of a word are two neighbouring rows, the even one below.
    even_NC = lax.bitcast_convert_type(words_NC << 16, jnp.float32)
    odd_NC = lax.bitcast_convert_type(words_NC & np.int32(-(2**16)), jnp.float32)
    code_NC = jnp.broadcast_to(code_N1, words_NC.shape)
    row_NC = jnp.where(code_NC == np.float32(2), odd_NC, even_NC)
    return jnp.where(code_NC > np.float32(0), row_NC, np.float32(0)).astype(jnp.bfloat16)


def _kernel(
    options: Options,
    row_bits: int | None,
    row_scalars_ref: Any,
    row_lanes_ref: Any,
    q_ref: Any,
    kv_ref: Any,
    o_ref: Any,
    logsumexp_ref: Any,
    fetched_ref: Any,
    maximum_ref: Any,
    total_ref: Any,
    sums_ref: Any,
    arrived: Any,
) -> None:
    block = options.block
    selected = row_lanes_ref.shape[3]
    per_copy = rows_per_copy(kv_ref.dtype)
    batch = pl.program_id(0)
    slots_1N = lax.broadcasted_iota(jnp.int32, (1, selected), 1)
    last = jnp.max(jnp.where(row_lanes_ref[0, 0] >= 0, slots_1N, -1))

    def each_copy(index: Any, act: Callable[[Any], None]) -> None:
        slot = index & 1

        def one(i: Any, _: None) -> None:
            row = row_scalars_ref[0, 0, 0, index * block + i]

            @pl.when(row >= 0)
            def _() -> None:
                if row_bits is None:
                    lead, offset = batch, row
                else:
                    lead, offset = row >> row_bits, row & (2**row_bits - 1)
                first = pl.multiple_of(offset & -per_copy, per_copy)
                source = kv_ref.at[lead, pl.ds(first, per_copy)]
                target = fetched_ref.at[slot, pl.ds(pl.multiple_of(i * per_copy, per_copy), per_copy)]
                act(pltpu.make_async_copy(source, target, arrived.at[slot]))

        lax.fori_loop(0, block, one, None, unroll=min(block, 8))

    online.start(maximum_ref, total_ref, sums_ref)

    def attend(index: Any, rows_1N: Array) -> None:
        arrivals = jnp.sum(jnp.where(rows_1N >= 0, 1, 0))

        @pl.when(arrivals == block)
        def _() -> None:
            # Semaphores count bytes: one wait for all copies of a full block.
            target = fetched_ref.at[index & 1]
            pltpu.make_async_copy(target, target, arrived.at[index & 1]).wait()

        @pl.when(arrivals < block)
        def _() -> None:
            each_copy(index, lambda copy: copy.wait())

        code_1N = jnp.where(rows_1N >= 0, 1 + (rows_1N & (per_copy - 1)), 0).astype(jnp.float32)
        kv_NC = _selected_rows(fetched_ref[index & 1], online.to_column(code_1N))
        mask_HN = jnp.broadcast_to(code_1N > np.float32(0), (q_ref.shape[2], block))
        online.attend_block(options.scale, q_ref[0, 0], kv_NC, mask_HN, maximum_ref, total_ref, sums_ref)

    @pl.when(last >= 0)
    def _() -> None:
        each_copy(jnp.int32(0), lambda copy: copy.start())

    if selected == block:

        @pl.when(last >= 0)
        def _() -> None:
            attend(jnp.int32(0), row_lanes_ref[0, 0])

    else:
        blocks = (last + block) >> (block.bit_length() - 1)

        def one_block(index: Any, _: None) -> None:
            @pl.when(index + 1 < blocks)
            def _() -> None:
                each_copy(index + 1, lambda copy: copy.start())

            attend(index, row_lanes_ref[0, 0, :, pl.ds(pl.multiple_of(index * block, block), block)])

        lax.fori_loop(0, blocks, one_block, None)

    o_HV, logsumexp_H1 = online.finish(maximum_ref, total_ref, sums_ref)
    o_ref[0, 0] = o_HV.astype(o_ref.dtype)
    logsumexp_ref[0, 0] = online.to_row(logsumexp_H1)


def attention(
    options: Options, q_BQHC: Array, kv_latent: Array, rows_BQN: Array, exists_BQN: Array, paged: bool
) -> tuple[Array, Array]:
    """o in the dtype of q, and logsumexp in float32, from rows as `rows.physical_rows` gives them."""
    batch, queries, heads, width = q_BQHC.shape
    keys = kv_latent.shape[1]
    row_bits = None
    if paged:
        # Shifts instead of divisions in the kernel: the compiler has them on every chip.
        row_bits = (keys - 1).bit_length()
        rows_BQN = ((rows_BQN // keys) << row_bits) | (rows_BQN % keys)
    per_copy = rows_per_copy(kv_latent.dtype)
    if keys % per_copy:
        kv_latent = jnp.pad(kv_latent, ((0, 0), (0, -keys % per_copy), (0, 0)))
    rows_BQ1N = jnp.where(exists_BQN, rows_BQN, -1).astype(jnp.int32)[:, :, None]
    # Few keys are one short block: whole words of a column, no whole lanes.
    asked = rows_BQ1N.shape[3]
    block = min(options.block, max(1, -(-asked // 16)) * 16)
    selected = max(1, -(-asked // block)) * block
    rows_BQ1N = jnp.pad(rows_BQ1N, ((0, 0), (0, 0), (0, 0), (0, selected - asked)), constant_values=-1)

    def per_query(*shape: int, memory_space: Any = None) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *shape), lambda b, q: (b, q, 0, 0), memory_space=memory_space)

    o_BQHV, logsumexp_BQ1H = pl.pallas_call(
        functools.partial(_kernel, options._replace(block=block), row_bits),
        grid=(batch, queries),
        in_specs=[
            per_query(1, selected, memory_space=pltpu.SMEM),
            per_query(1, selected),
            per_query(heads, width),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[per_query(heads, options.value_dim), per_query(1, heads)],
        out_shape=[
            result_like(q_BQHC, (batch, queries, heads, options.value_dim), q_BQHC.dtype),
            result_like(q_BQHC, (batch, queries, 1, heads), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, per_copy * block, width), kv_latent.dtype),
            pltpu.VMEM((heads, 1), jnp.float32),
            pltpu.VMEM((heads, 1), jnp.float32),
            pltpu.VMEM((heads, options.value_dim), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=_VMEM_LIMIT,
            # `rows.physical_rows` has checked every row; a second check is half of the cost of a copy.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * queries * heads * selected * (width + options.value_dim),
            transcendentals=batch * queries * heads * selected,
            bytes_accessed=batch * queries * selected * per_copy * width * kv_latent.dtype.itemsize,
        ),
        interpret=options.interpret,
        name="sparse_attention_gather",
    )(rows_BQ1N, rows_BQ1N, q_BQHC, in_hbm(kv_latent, options.interpret))
    return o_BQHV, logsumexp_BQ1H[:, :, 0]
