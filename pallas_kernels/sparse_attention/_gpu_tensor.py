"""Mosaic GPU kernel of sparse attention on Hopper's tensor cores: bfloat16 rows, gathered into shared memory.

A thread block works on one query: up to two warpgroups multiply, each for up to 24 heads of its own, and one gathers
64 selected rows at a time into one of two buffers. The selected rows are the tensor core's first operand, which has
64 rows, and the heads its second, which has as few as 8: no head count is padded to 64. So the logits come out
transposed, and so does the output, 64 channels at a time. Only the weights of the softmax go through shared memory.

A bfloat16 weight would keep 8 bits; the weights are split into two bfloat16 parts, and both are multiplied. All sums
are those of the tensor core in float32, and between tiles the output is kept in registers in float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu import store
from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying, result_like
from pallas_kernels.sparse_attention._gpu_rows import (
    CHANNELS,
    HEADS,
    PER_CHANNEL,
    PER_HEAD,
    WARPS,
    Options,
    filled,
    load,
    over_channels,
    over_heads,
    reachable_slots,
    where,
)

TILE = 64
"""Selected rows that are multiplied at once: the rows of the tensor core's first operand."""

_STAGES = 2
_MOST_HEADS = 24
"""Per warpgroup: the output of so many heads and 512 channels takes 96 registers of a thread."""
MOST_VALUES = 512
MOST_WIDTH = 576
"""Channels, likewise bounded by shared memory."""
_TILES_IN_FLIGHT = 4
"""Tiles of 64 output channels that are multiplied before any is added up."""
_ROWS_IN_FLIGHT = 16
"""Rows that are on their way to the registers of the gathering warpgroup at once."""
_GATHERING_REGISTERS, _MULTIPLYING_REGISTERS = 88, 208
"""Of a thread, where two warpgroups multiply: three have 504 together."""
_BLOCKS = 132
_ROWS_AT_ONCE = 8
"""A tile of the tensor core's layout of shared memory has so many rows."""

_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class _Shape(NamedTuple):
    """heads: of a query; together: of a warpgroup; computing: warpgroups that multiply; slots: of a split."""

    heads: int
    together: int
    computing: int
    width: int
    values: int
    splits: int
    slots: int
    interpreted: bool


def heads_together(heads: int) -> tuple[int, int]:
    """Heads of a warpgroup, a multiple of 8, and warpgroups of a thread block."""
    groups = -(-heads // _MOST_HEADS)
    together = -(-heads // (8 * groups)) * 8
    return together, 1 if groups % 2 else 2


def _warp() -> Any:
    """The number of the warp within its warpgroup."""
    integer: Any = jnp.int32
    scalar: Any = plgpu.ShapeDtypeStruct((), integer, layout=plgpu.Layout.WG_SPLAT(()))
    inline: Any = plgpu.inline_mgpu(return_type=scalar)

    @inline
    def number(_: Any) -> Any:
        index = mgpu.utils.warp_idx()
        return mgpu.FragmentedArray.splat(index, shape=(), is_signed=True)

    return number() & (WARPS - 1)


def _one_row_per_warp(ref: Any, row_of: Callable[[Any], Any], warp: Any) -> Array:
    """[4, C]: row `row_of(i)` of `ref` for i below 4, zeros where that is negative.

    Compiled, each warp has a number of its own, so that what is typed as a row in every warp alike is another row in
    each: spread over heads, it is the array whose rows those are. The interpreter has no warps, and puts the rows
    together.
    """

    def one(row: Any) -> Array:
        row_C = load(ref.at[jnp.maximum(row, 0)], PER_CHANNEL)
        return where(row >= 0, row_C, jnp.zeros_like(row_C))

    if warp is None:
        return jnp.stack([one(row_of(jnp.int32(i))) for i in range(WARPS)])
    return over_heads(one(row_of(warp)), WARPS)


def _kernel(shape: _Shape, scale: float, *refs: Any) -> None:
    q_ref, kv_ref, rows_ref, counts_ref, o_ref, logsumexp_ref = refs[:6]
    kv_smem, q_smem, weights_smem, logits_smem, factors_smem, full, empty = refs[6:]
    heads, computing = shape.together, shape.computing
    groups = -(-shape.heads // heads)
    blocks = groups // computing
    block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
    head_block, rest = jax.lax.rem(block, jnp.int32(blocks)), jax.lax.div(block, jnp.int32(blocks))
    split, query = jax.lax.rem(rest, jnp.int32(shape.splits)), jax.lax.div(rest, jnp.int32(shape.splits))
    first_slot = split * shape.slots
    tiles = jax.lax.div(counts_ref[query, split] + jnp.int32(TILE - 1), jnp.int32(TILE))

    def gathering() -> None:
        warp = None if shape.interpreted else _warp()
        if computing > 1:
            plgpu.set_max_registers(_GATHERING_REGISTERS, action="decrease")

        def eight_rows(tile: Any, eighth: int) -> Array:
            def row_of(half: int, i: Any) -> Any:
                return rows_ref[query, first_slot + tile * TILE + (eighth * _ROWS_AT_ONCE + half * WARPS) + i]

            halves = [_one_row_per_warp(kv_ref, functools.partial(row_of, half), warp) for half in range(2)]
            return jax.lax.concatenate(halves, 0)

        def one_tile(tile: Any, _: None) -> None:
            slot = tile & (_STAGES - 1)

            @pl.when(tile >= _STAGES)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            together = _ROWS_IN_FLIGHT // _ROWS_AT_ONCE
            for first in range(0, TILE // _ROWS_AT_ONCE, together):
                found = [eight_rows(tile, first + i) for i in range(together)]
                for i, rows in enumerate(found):
                    store(kv_smem.at[slot, pl.ds((first + i) * _ROWS_AT_ONCE, _ROWS_AT_ONCE)], rows)
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])

        jax.lax.fori_loop(jnp.int32(0), tiles, one_tile, None)

    def multiplying() -> None:
        if computing > 1:
            plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")
        first_head = (head_block * computing + warpgroup) * heads
        load_queries(first_head)
        start = (
            filled((heads,), -jnp.inf, PER_HEAD),
            filled((heads,), 0.0, PER_HEAD),
            tuple(
                filled((CHANNELS, heads), 0.0, plgpu.Layout.WGMMA) for _ in range(shape.values // CHANNELS)
            ),
        )
        maximum_N, total_N, o = jax.lax.fori_loop(jnp.int32(0), tiles, one_tile, start)
        empty_N = maximum_N == -jnp.inf
        safe_N = jnp.where(empty_N, jnp.ones_like(total_N), total_N)
        logsumexp_N = maximum_N + jnp.log(safe_N)
        store(logsumexp_ref.at[split, query, pl.ds(first_head, heads)], logsumexp_N)
        write(first_head, o, per_column(1.0 / safe_N))

    def load_queries(first_head: Any) -> None:
        warp = None if shape.interpreted else _warp()

        def row_of(first: int, i: Any) -> Any:
            # The last head again in place of those that do not exist, whose results are not written.
            return query * shape.heads + jnp.minimum(first_head + first + i, shape.heads - 1)

        for first in range(0, heads, _ROWS_AT_ONCE):
            halves = [
                _one_row_per_warp(q_ref, functools.partial(row_of, first + half * WARPS), warp)
                for half in range(2)
            ]
            place = q_smem.at[warpgroup, pl.ds(first, _ROWS_AT_ONCE)]
            store(place, jax.lax.concatenate(halves, 0))
        plgpu.commit_smem()

    def per_column(x_N: Array) -> Array:
        """[N] as [64, N] in the layout of the tensor core's results."""
        store(factors_smem.at[warpgroup], x_N)
        columns_N = load(factors_smem.at[warpgroup], _COLUMNS)
        spread = jax.lax.broadcast_in_dim(columns_N, (CHANNELS, heads), (1,))
        return plgpu.layout_cast(spread, plgpu.Layout.WGMMA)

    def accumulator() -> Any:
        return plgpu.WGMMAAccumulatorRef((CHANNELS, heads), jnp.float32)

    def one_tile(tile: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        maximum_N, total_N, o = carry
        slot = tile & (_STAGES - 1)
        # Zero, which the compiler cannot know: what is the same in every turn, addresses for the tensor core above all,
        # it would compute before the loop and hold in registers.
        mine = warpgroup + jax.lax.div(tile, jnp.int32(2**30))
        plgpu.barrier_wait(full.at[slot])

        def logits(products: Any) -> Array:
            plgpu.wgmma(products, kv_smem.at[slot], q_smem.at[mine].T)
            return products[...]

        products_KN = pl.run_scoped(logits, accumulator())
        store(logits_smem.at[warpgroup].T, plgpu.layout_cast(products_KN, _TRANSPOSED))
        logits_NK = load(logits_smem.at[warpgroup], HEADS) * scale
        rows_K = load(rows_ref.at[query, pl.ds(first_slot + tile * TILE, TILE)], PER_CHANNEL)
        nothing_NK = filled((heads, TILE), -jnp.inf, HEADS)
        logits_NK = jnp.where(over_heads(rows_K, heads) >= 0, logits_NK, nothing_NK)
        tile_maximum_N = plgpu.layout_cast(jnp.max(logits_NK, axis=1), PER_HEAD)
        largest_N = jnp.maximum(maximum_N, tile_maximum_N)
        # -inf - (-inf) is NaN: without a row so far the shift is 0.
        shift_N = jnp.where(largest_N == -jnp.inf, jnp.zeros_like(largest_N), largest_N)
        decay_N = jnp.exp(maximum_N - shift_N)
        weights_NK = jnp.exp(logits_NK - over_channels(shift_N, TILE))
        total_N = total_N * decay_N + plgpu.layout_cast(jnp.sum(weights_NK, axis=1), PER_HEAD)
        high_NK = weights_NK.astype(jnp.bfloat16)
        low_NK = (weights_NK - high_NK.astype(jnp.float32)).astype(jnp.bfloat16)
        for part, weights in enumerate((high_NK, low_NK)):
            store(weights_smem.at[warpgroup, part], weights)
        decay = per_column(decay_N)
        plgpu.commit_smem()
        together = min(_TILES_IN_FLIGHT, len(o))
        sums: list[Array] = []
        for first in range(0, len(o), together):
            of = range(first, min(first + together, len(o)))

            def values(*sums: Any, of: Any = of) -> tuple[Array, ...]:
                for place, channels in zip(sums, of, strict=True):
                    columns = kv_smem.at[slot, :, pl.ds(channels * CHANNELS, CHANNELS)]
                    for part in (1, 0):
                        plgpu.wgmma(place, columns.T, weights_smem.at[mine, part].T)
                return tuple(place[...] for place in sums)

            found = pl.run_scoped(values, *[accumulator()] * len(of))
            added = tuple(o[i] * decay + more for i, more in zip(of, found, strict=True))
            # Or the compiler adds at the end of the loop, and holds every product in registers until then.
            sums += jax.lax.optimization_barrier(added)
        plgpu.barrier_arrive(empty.at[slot])
        return largest_N, total_N, tuple(sums)

    def write(first_head: Any, o: tuple[Array, ...], factors: Array) -> None:
        whole = shape.heads % heads == 0
        for channels, sums in enumerate(o):
            here = pl.ds(channels * CHANNELS, CHANNELS)
            store(logits_smem.at[warpgroup].T, plgpu.layout_cast(sums * factors, _TRANSPOSED))
            if whole:
                found_NV = load(logits_smem.at[warpgroup], HEADS).astype(o_ref.dtype)
                store(o_ref.at[split, query, pl.ds(first_head, heads), here], found_NV)
                continue
            for head in range(heads):

                @pl.when(first_head + head < shape.heads)
                def _(head: int = head, here: Any = here) -> None:
                    row_V = load(logits_smem.at[warpgroup, head], PER_CHANNEL).astype(o_ref.dtype)
                    store(o_ref.at[split, query, first_head + head, here], row_V)

    jax.lax.cond(warpgroup < computing, multiplying, gathering)


def _tiled(shape: tuple[int, ...]) -> Any:
    """Shared memory in the layout that tensor cores read."""
    # Typed as abstract, though JAX makes instances of them itself.
    tile: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tile((8, CHANNELS)), swizzle(2 * CHANNELS)))


def attention(options: Options, q_RHC: Array, kv_SC: Array, rows_RN: Array) -> tuple[Array, Array]:
    """As `_gpu_rows.attention`, for bfloat16 queries and caches of at most MOST_WIDTH and MOST_VALUES channels."""
    queries, heads, width = q_RHC.shape
    together, computing = heads_together(heads)
    groups = -(-heads // together)
    blocks = groups // computing
    selected = rows_RN.shape[1]
    most = -(-selected // TILE)
    wanted = max(1, min(_BLOCKS // (queries * blocks), most))
    slots = -(-most // wanted) * TILE
    splits = -(-selected // slots)
    shape = _Shape(
        heads,
        together,
        computing,
        width,
        options.value_dim,
        splits,
        slots,
        options.interpret is not None,
    )
    counts_RP = reachable_slots(rows_RN, splits, slots)
    rows_RN = jnp.pad(rows_RN, ((0, 0), (0, splits * slots - selected)), constant_values=-1)
    arrays = match_varying(q_RHC.reshape(queries * heads, width), kv_SC, rows_RN, counts_RP)
    like = functools.partial(result_like, arrays[0])
    o, logsumexp = plgpu.kernel(
        functools.partial(_kernel, shape, options.scale),
        out_type=[
            like((splits, queries, heads, options.value_dim), q_RHC.dtype if splits == 1 else jnp.float32),
            like((splits, queries, groups * together), jnp.float32),
        ],
        scratch_types=[
            _tiled((_STAGES, TILE, width)),
            _tiled((computing, together, width)),
            _tiled((computing, 2, together, TILE)),
            plgpu.SMEM((computing, together, TILE), jnp.float32),
            plgpu.SMEM((computing, together), jnp.float32),
            plgpu.Barrier(num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=computing, num_barriers=_STAGES),
        ],
        grid=(queries * splits * blocks,),
        grid_names=("block",),
        num_threads=computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="sparse_attention_tensor",
        interpret=options.interpret,
    )(*arrays)
    return o, logsumexp[..., :heads]
