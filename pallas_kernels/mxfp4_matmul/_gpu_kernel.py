"""Pallas GPU kernel of the grouped matmul (Mosaic GPU, Hopper): packed weights are unpacked in registers.

A thread block computes the transposed result of up to `tile` rows of one group for 128 columns, because the
tensor core's first operand has at least 64 rows and its second as few as 8: few tokens per expert waste little.
One warpgroup fetches (bulk asynchronous copies into a ring of buffers), two compute: each loads packed bytes
into registers, makes exact bfloat16 weights of them, stores them for the tensor core, and multiplies while it
unpacks the next ones.

The bytes of "packed_nk" lie along the contracted axis, so a byte gives two neighbours of it, which go to two
different products: of the even inputs and of the odd ones. The rows are split likewise beforehand
(`split_rows`), so that no value ever moves between threads.

What computes is plain JAX (`plan_visits`, `split_rows`, and the functions of `_gpu_unpack`); around it are copies,
barriers and `wgmma`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._typing import Array
from pallas_kernels.mxfp4_matmul._gpu_unpack import (
    BYTES_PER_BLOCK,
    LAYOUT,
    code_values,
    register_values,
    scaled,
    spread,
)
from pallas_kernels.mxfp4_matmul.activations import Activation, apply_activation
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor

COLUMNS = 128
"""Columns of the result per thread block, and the number inputs and outputs must be a multiple of."""
_ALIGNMENT = 8
_WARPGROUP_COLUMNS = 64
_COMPUTE = COLUMNS // _WARPGROUP_COLUMNS
# Of the 232448 bytes that a thread block can have, or half of the 233472 of a multiprocessor, with some left for
# barriers and alignment.
_SHARED_MEMORY = 220 * 1024
_HALF_SHARED_MEMORY = 110 * 1024
_FEWEST_STAGES, _MOST_STAGES = 3, 4


class Options(NamedTuple):
    """What the kernel is specialised for.

    activation: the gated activation of two weights, or None for one weight.
    transposed: multiply by the transposed weight.
    exact: the rows are already exact in bfloat16, whatever their dtype.
    interpret: None, or `InterpretGPUParams`.
    """

    activation: Activation | None
    transposed: bool
    exact: bool
    interpret: Any

    def of_gradient(self) -> "Options":
        """Of a cotangent with a transposed weight. Cotangents are not exact in bfloat16, even where the rows are."""
        return self._replace(activation=None, transposed=True, exact=False)


class Visits(NamedTuple):
    """Per visit, int32: the expert (-1 for rows of nobody), the first row fetched, the first and number of its own.

    Up to seven rows of the group before are fetched with a group's first tile, multiplied and not written: bulk
    copies into the tensor core's layout of shared memory start at multiples of eight rows.
    """

    experts: Array
    fetched: Array
    starts: Array
    counts: Array


class Tiles(NamedTuple):
    """Rows per visit, packed bytes per row of weights and step, fetched steps held."""

    rows: int
    bytes: int
    stages: int


def plan_visits(group_sizes_E: Array, rows: int, tile: int) -> Visits:
    """The visits that cover every row once: each group cut from its first row on, then the rows after the last.

    Their number is the largest that any group sizes need; the visits that are left over have no rows.
    """
    experts = group_sizes_E.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes_E.astype(jnp.int32), dtype=jnp.int32), jnp.int32(rows))
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    aligned = starts - starts % _ALIGNMENT
    tiles = jnp.where(ends > starts, (ends - aligned + (tile - 1)) // tile, 0)
    after = jnp.cumsum(tiles, dtype=jnp.int32)
    groups = min(experts + 1, rows)
    visit = jnp.arange((rows + (_ALIGNMENT - 2) * groups) // tile + groups, dtype=jnp.int32)
    group = jnp.searchsorted(after, visit, side="right", method="compare_all").astype(jnp.int32)
    real = group <= experts
    group = jnp.minimum(group, experts)
    fetched = jnp.where(real, aligned[group] + (visit - (after - tiles)[group]) * tile, 0)
    start = jnp.maximum(starts[group], fetched)
    count = jnp.where(real, jnp.minimum(ends[group], fetched + tile) - start, 0)
    return Visits(jnp.where(group < experts, group, -1), fetched, jnp.where(real, start, 0), count)


def split_rows(x_MK: Array, tile: int, exact: bool, deinterleave: bool) -> Array:
    """Rows as planes of bfloat16 [plane, M', length], zeros after the last row; M' is M + tile, rounded up to 8.

    float32 becomes three parts of eight bits that sum to it exactly (their exponents permitting: parts below
    2^-133 are lost), float16 two, bfloat16 and `exact` values one. With `deinterleave` the even columns come
    first, part by part, then the odd ones.
    """
    if exact or x_MK.dtype == jnp.bfloat16:
        parts = [x_MK.astype(jnp.bfloat16)]
    else:
        parts, rest = [], x_MK.astype(jnp.float32)
        for _ in range(2 if x_MK.dtype == jnp.float16 else 3):
            # Cut off, not rounded: every remainder is exact, and the largest values do not become infinite.
            bits = lax.bitcast_convert_type(rest, jnp.int32)
            part = lax.bitcast_convert_type((bits >> 16).astype(jnp.int16), jnp.bfloat16)
            # A NaN may have no bits in its upper half.
            parts.append(jnp.where(jnp.isfinite(rest), part, rest.astype(jnp.bfloat16)))
            cut = lax.bitcast_convert_type(bits & np.int32(-(2**16)), jnp.float32)
            rest = jnp.where(jnp.isfinite(rest), rest - cut, np.float32(0))
    after = tile + -x_MK.shape[0] % _ALIGNMENT
    planes = jnp.pad(jnp.stack(parts), ((0, 0), (0, after), (0, 0)))
    if not deinterleave:
        return planes
    pairs = planes.reshape(*planes.shape[:-1], planes.shape[-1] // 2, 2)
    return jnp.moveaxis(pairs, -1, 0).reshape(2 * planes.shape[0], planes.shape[1], -1)


def row_tile(rows: int, experts: int, largest: int) -> int:
    """Rows per visit, from the mean group: a visit costs a whole tile however few rows it has."""
    mean = rows / experts
    tile = 256 if mean >= 192 else 128 if mean >= 96 else 64 if mean >= 32 else 32 if mean >= 12 else 16
    return min(tile, largest)


def choose_tiles(rows: int, experts: int, planes: int, itemsize: int, count: int, transposed: bool) -> Tiles:
    """Sizes for `planes` planes of rows, results of `itemsize` bytes, and `count` weights.

    Fetched rows and bytes, unpacked weights (two steps of them) and the result share a thread block's memory;
    accumulators share 128 registers of a thread. Where few rows are multiplied and accumulators are small, two
    thread blocks share a multiprocessor if they can, so that one fetches while the other unpacks.
    """
    parities = 1 if transposed else 2
    parts = planes // parities
    tile = row_tile(rows, experts, (256 // count) if parts == 1 else 64)
    while True:
        width = 64 if transposed or (tile <= 64 and parts * count == 1) else 32
        stage = planes * tile * width * 2 + count * (64 if transposed else COLUMNS) * width
        unpacked = 2 * _COMPUTE * count * parities * 64 * width * 2
        fixed = unpacked + tile * COLUMNS * itemsize
        halved = (_HALF_SHARED_MEMORY - fixed) // stage if tile * count <= 32 else 0
        stages = halved if halved >= _FEWEST_STAGES else (_SHARED_MEMORY - fixed) // stage
        if stages >= _FEWEST_STAGES:
            return Tiles(tile, width, min(stages, _MOST_STAGES))
        tile //= 2


def _load_scales(scale_ref: Any, first_row: Any, first_block: Any, blocks: int) -> list[Array]:
    """The scales of 64 rows, as they lie: too narrow and too oddly spaced for a bulk copy."""
    rows = pl.ds(first_row, _WARPGROUP_COLUMNS)
    return [
        plgpu.load(scale_ref.at[rows, first_block + b], layout=LAYOUT.reduce(1), optimized=False)
        for b in range(blocks)
    ]


def _write_rows(source_ref: Any, before: Any, target_ref: Any, start: Any, count: Any, columns: Any) -> None:
    """`count` rows from `before` on to `start` and on: a bulk copy's size is static, so one per bit of the count."""
    done, size = 0, source_ref.shape[0]
    while size:
        copy = functools.partial(
            plgpu.copy_smem_to_gmem,
            source_ref.at[pl.ds(before + done, size)],
            target_ref.at[pl.ds(start + done, size), columns],
        )
        pl.when((count & size) != 0)(copy)
        done = done + (count & size)
        size //= 2
    plgpu.wait_smem_to_gmem(0)


def _gated(activation: Activation, gate: Array, up: Array) -> Array:
    """The gated activation, eight columns after the other: all at once would take registers for all at once."""

    def next_columns(_: Any, rest: tuple[Array, Array]) -> tuple[Array, Array]:
        gate, up = rest
        result = apply_activation(activation, gate[:, :8], up[:, :8])
        return lax.concatenate([gate[:, 8:], result], 1), lax.concatenate([up[:, 8:], up[:, :8]], 1)

    return lax.fori_loop(0, gate.shape[1] // 8, next_columns, (gate, up))[0]


def _remainder(step: Any, length: int) -> Any:
    """Of a step that is not negative, with fewer instructions where the length is a power of two."""
    return lax.rem(step, jnp.int32(length)) if length & (length - 1) else step & jnp.int32(length - 1)


class _Shape(NamedTuple):
    options: Options
    tiles: Tiles
    weights: int
    parts: int
    steps: int
    many_registers: bool
    """Whether the computing warpgroups take registers from the fetching one."""


def _kernel(shape: _Shape, *arguments: Any) -> None:
    options, tiles, count, transposed = shape.options, shape.tiles, shape.weights, shape.options.transposed
    experts_ref, fetched_ref, starts_ref, counts_ref, layer_ref, x_ref, *refs = arguments
    packed_refs, scale_refs, out_ref = refs[:count], refs[count : 2 * count], refs[2 * count]
    x_smem, out_smem, full, empty = refs[2 * count + 1 : 2 * count + 5]
    fetched, unpacked = refs[2 * count + 5 : 3 * count + 5], refs[3 * count + 5 :]

    visit, column, warpgroup = lax.axis_index("visit"), lax.axis_index("column"), lax.axis_index("warpgroup")
    expert, first, start, rows = experts_ref[visit], fetched_ref[visit], starts_ref[visit], counts_ref[visit]
    layer, width = layer_ref[0], tiles.bytes

    def slot_of(step: Any) -> Any:
        return _remainder(step, tiles.stages)

    def fetch(step: Any, _: None) -> None:
        slot = slot_of(step)

        @pl.when(step >= tiles.stages)
        def _() -> None:
            plgpu.barrier_wait(empty.at[slot])

        along = pl.ds(step * width, width)
        plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(first, tiles.rows), along], x_smem.at[slot], full.at[slot])
        if transposed:
            outputs, inputs = pl.ds(step * 64, 64), pl.ds(column * 64, 64)
        else:
            outputs, inputs = pl.ds(column * COLUMNS, COLUMNS), along
        for packed_ref, packed_smem in zip(packed_refs, fetched, strict=True):
            plgpu.copy_gmem_to_smem(
                packed_ref.at[layer, expert, outputs, inputs], packed_smem.at[slot], full.at[slot]
            )

    def load_scales(step: Any) -> list[list[Array]]:
        blocks = width // BYTES_PER_BLOCK
        if transposed:
            first_row, first_block = step * 64, column * blocks
        else:
            first_row, first_block = column * COLUMNS + warpgroup * 64, step * blocks
        return [_load_scales(ref.at[layer, expert], first_row, first_block, blocks) for ref in scale_refs]

    def unpack_step(step: Any, scales: list[list[Array]]) -> None:
        slot, buffer = slot_of(step), _remainder(step, 2)
        mine = pl.ds(0 if transposed else warpgroup * 64, 64)
        for packed_smem, weight_smem, scale in zip(fetched, unpacked, scales, strict=True):
            packed = plgpu.load(packed_smem.at[slot, mine], layout=LAYOUT, optimized=False)
            low, high = (code_values if options.interpret else register_values)(packed)
            if transposed:
                # The even inputs are one warpgroup's columns of the result, the odd ones the other's.
                weight = scaled(lax.select(warpgroup == 0, low, high), scale, spread)
            else:
                weight = lax.concatenate([scaled(values, scale, spread) for values in (low, high)], 1)
            plgpu.store(weight_smem.at[warpgroup, buffer], weight, optimized=False)
        plgpu.commit_smem()

    def multiply_step(step: Any, totals: Any) -> None:
        slot, buffer = slot_of(step), _remainder(step, 2)
        planes = 1 if transposed else 2
        for total, weight_smem in zip(totals, unpacked, strict=True):
            for plane in range(planes):
                w = weight_smem.at[warpgroup, buffer, :, pl.ds(plane * width, width)]
                for part in range(shape.parts):
                    x = x_smem.at[slot, plane * shape.parts + part]
                    plgpu.wgmma(total, w.T if transposed else w, x.T)
        # The products before these are done then, and with them the fetched rows and bytes they read.
        plgpu.wgmma_wait(count * planes * shape.parts)

        @pl.when(step > 0)
        def _() -> None:
            plgpu.barrier_arrive(empty.at[slot_of(step - 1)])

    def products(*totals: Any) -> tuple[Array, ...]:
        def step(step: Any, scales: list[list[Array]]) -> list[list[Array]]:
            plgpu.barrier_wait(full.at[slot_of(step)])
            unpack_step(step, scales)
            ahead = load_scales(jnp.minimum(step + 1, shape.steps - 1))
            multiply_step(step, totals)
            return ahead

        lax.fori_loop(0, shape.steps, step, load_scales(jnp.int32(0)))
        return tuple(total[...] for total in totals)

    def write() -> None:
        plgpu.commit_smem()
        if transposed:
            target, columns = out_ref.at[warpgroup], pl.ds(column * 64, 64)
        else:
            target, columns = out_ref, pl.ds(column * COLUMNS + warpgroup * 64, 64)
        _write_rows(out_smem.at[warpgroup], start - first, target, start, rows, columns)

    multiplied, nobodys = (rows > 0) & (expert >= 0), (rows > 0) & (expert < 0)

    def fetching() -> None:
        if shape.many_registers:
            plgpu.set_max_registers(40, action="decrease")

        @pl.when(multiplied)
        def _() -> None:
            lax.fori_loop(0, shape.steps, fetch, None)

    def computing() -> None:
        if shape.many_registers:
            plgpu.set_max_registers(232, action="increase")

        @pl.when(multiplied)
        def _() -> None:
            accumulator = plgpu.WGMMAAccumulatorRef((_WARPGROUP_COLUMNS, tiles.rows), jnp.float32)
            totals = pl.run_scoped(products, *[accumulator] * count)
            total = totals[0] if options.activation is None else _gated(options.activation, *totals)
            result = plgpu.layout_cast(total.astype(out_ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.store(out_smem.at[warpgroup].T, result, optimized=False)
            write()

        @pl.when(nobodys)
        def _() -> None:
            out_smem[warpgroup] = jnp.zeros(out_smem.shape[1:], out_smem.dtype)
            write()

    lax.cond(warpgroup < _COMPUTE, computing, fetching)


def _tiled(shape: tuple[int, ...], dtype: Any, columns: int) -> Any:
    """Shared memory in the tiles that bulk copies write and tensor cores read without bank conflicts."""
    row_bytes = columns * jnp.dtype(dtype).itemsize
    # Typed as abstract, though JAX makes instances of them itself.
    tile: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    transforms = (tile((8, columns)), swizzle(row_bytes))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def grouped_products(
    options: Options,
    x_MK: Array,
    weights: tuple[MXFP4Tensor, ...],
    group_sizes_E: Array,
    layer: Array | None,
) -> Array:
    """Rows times their expert's weight, or the gated activation of two such products, in `x_MK.dtype`.

    The weights stay where they are: the kernel fetches the bytes of the layer's visited experts only.
    """
    experts, outputs, inputs = weights[0].shape[-3:]
    rows, count, transposed = x_MK.shape[0], len(weights), options.transposed
    width = inputs if transposed else outputs
    if rows == 0 or experts == 0 or width == 0 or x_MK.shape[1] == 0:
        return jnp.zeros((rows, width), x_MK.dtype)
    one_part = options.exact or x_MK.dtype == jnp.bfloat16
    parts = 1 if one_part else 2 if x_MK.dtype == jnp.float16 else 3
    planes = parts if transposed else 2 * parts
    tiles = choose_tiles(rows, experts, planes, x_MK.dtype.itemsize, count, transposed)
    with jax.named_scope("grouped_matmul_gpu_schedule"):
        visits = plan_visits(group_sizes_E, rows, tiles.rows)
        x = split_rows(x_MK, tiles.rows, options.exact, deinterleave=not transposed)
    stacked = [jax.tree.map(lambda leaf: leaf if layer is not None else leaf[None], w) for w in weights]
    # Scales are read without the bounds that bulk copies have.
    last = stacked[0].packed.shape[0] - 1
    index = jnp.zeros((1,), jnp.int32)
    if layer is not None:
        index = jnp.clip(layer.astype(jnp.int32), 0, last).reshape(1)
    depth, parities = (64, 1) if transposed else (COLUMNS, 2)
    steps = outputs // 64 if transposed else inputs // (2 * tiles.bytes)
    result = (2, rows, inputs // 2) if transposed else (rows, outputs)
    scratch = [
        _tiled((tiles.stages, planes, tiles.rows, tiles.bytes), jnp.bfloat16, tiles.bytes),
        plgpu.SMEM((_COMPUTE, tiles.rows, _WARPGROUP_COLUMNS), x_MK.dtype),
        plgpu.Barrier(num_arrivals=1 + count, num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=_COMPUTE, num_barriers=tiles.stages),
        *[_tiled((tiles.stages, depth, tiles.bytes), jnp.uint8, tiles.bytes)] * count,
        *[_tiled((_COMPUTE, 2, 64, parities * tiles.bytes), jnp.bfloat16, tiles.bytes)] * count,
    ]
    with jax.named_scope("grouped_matmul_gpu"):
        products = plgpu.kernel(
            functools.partial(
                _kernel, _Shape(options, tiles, count, parts, steps, tiles.rows * count >= 256)
            ),
            out_type=jax.ShapeDtypeStruct(result, x_MK.dtype),
            scratch_types=scratch,
            grid=(visits.experts.shape[0], width // COLUMNS),
            grid_names=("visit", "column"),
            num_threads=_COMPUTE + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            kernel_name="mxfp4_grouped_glu" if options.activation is not None else "mxfp4_grouped_matmul",
            interpret=options.interpret,
        )(*visits, index, x, *[w.packed for w in stacked], *[w.scale_bytes for w in stacked])
    if transposed:
        return jnp.moveaxis(products, 0, -1).reshape(rows, inputs)
    return products
