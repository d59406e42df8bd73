"""Pallas TPU kernel of the grouped matmul: packed weights come in, are unpacked in vector memory, multiplied.

Grid (tiles of columns, visits). A visit is one group in one tile of rows; the list of visits is made beforehand,
has a static length, and is sorted, so that the rows of a group follow each other and its weights are fetched and
unpacked once per tile of columns. An unpacked weight is exact in bfloat16: a code times a power of two.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._memory import in_hbm
from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying, result_like
from pallas_kernels.mxfp4_matmul._codec import BLOCK, NAN_SCALE
from pallas_kernels.mxfp4_matmul.activations import Activation, apply_activation
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor

_VMEM_LIMIT = 48 * 2**20
# What the blocks, their second buffers and the unpacked weights may take; the rest is for intermediate values.
_VMEM_FOR_BLOCKS = 30 * 2**20
# Inputs unpacked at a time: eight rows of scales, one register's worth of sublanes.
_UNPACK = 8 * BLOCK
_LANES = 128
_LARGEST_ODD_INPUTS = 2048
# Rows of a decode step, at most.
_FEW_ROWS = 2048


class Options(NamedTuple):
    """What the kernel is specialised for.

    activation: the gated activation of two weights, or None for one weight.
    transposed: multiply by the transposed weight.
    interpret: as in `pallas_call`.
    """

    activation: Activation | None
    transposed: bool
    interpret: Any

    def of_gradient(self) -> "Options":
        """Of a cotangent with a transposed weight."""
        return self._replace(activation=None, transposed=True)


class Visits(NamedTuple):
    """Per visit, int32: expert whose weights are held, tile of rows, first row and end of the rows multiplied.

    A visit without rows only zeroes its tile if it is the first there; padding of the list repeats the last tile.
    """

    experts: Array
    tiles: Array
    starts: Array
    ends: Array


def plan_visits(group_sizes_E: Array, rows: int, tile: int) -> Visits:
    """The visits that cover every tile: each group in each tile it touches, then the rows after the last group.

    Their number is that of the tiles plus that of the experts, which no group sizes exceed.
    """
    experts = group_sizes_E.shape[0]
    ends = jnp.minimum(jnp.cumsum(group_sizes_E.astype(jnp.int32), dtype=jnp.int32), jnp.int32(rows))
    ends = jnp.concatenate([ends, jnp.full((1,), rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    first_tiles = starts // tile
    counts = jnp.where(ends > starts, (ends - 1) // tile - first_tiles + 1, 0)
    after = jnp.cumsum(counts, dtype=jnp.int32)
    length = pl.cdiv(rows, tile) + experts
    # Padding repeats the last visit without its rows: no block moves, nothing is computed.
    visit = jnp.minimum(jnp.arange(length, dtype=jnp.int32), after[-1] - 1)
    group = jnp.searchsorted(after, visit, side="right", method="compare_all").astype(jnp.int32)
    tiles = first_tiles[group] + visit - (after - counts)[group]
    last = jnp.max(jnp.where(counts[:-1] > 0, jnp.arange(experts, dtype=jnp.int32), 0), initial=0)
    real = (jnp.arange(length, dtype=jnp.int32) < after[-1]) & (group < experts)
    return Visits(
        jnp.minimum(group, last),
        tiles,
        jnp.where(real, starts[group], 0),
        jnp.where(real, ends[group], 0),
    )


def row_tile(rows: int, experts: int) -> int:
    """Rows multiplied at a time, from the mean group: a visit costs a whole tile however few rows it has."""
    mean = rows / experts
    tile = 256 if mean >= 256 else 128 if mean >= 64 else 64 if mean >= 16 else 32
    return min(tile, rows)


def _column_tile(columns: int, largest: int) -> int:
    """The largest multiple of the lanes, at most `largest`, that divides the columns; else all or a part."""
    for tile in range(largest, 0, -_LANES):
        if columns % tile == 0:
            return tile
    return columns if columns <= largest else largest


def _input_tile(inputs: int) -> int:
    """Of the transposed product: inputs (its result's columns) at a time, whole registers of scale rows."""
    return next((tile for tile in (2 * _UNPACK, _UNPACK) if inputs % tile == 0), inputs)


def _unpack(packed_ref: Any, scale_ref: Any, scale_values_ref: Any, weight_ref: Any, layout: str) -> None:
    """One expert's block into `weight_ref`, bfloat16; `scale_values_ref` holds its scales as floats meanwhile."""
    scale = scale_ref[0, 0].astype(jnp.int32)
    # Scale byte 0 counts as 0, as in the portable form: its weights are below 2^-124, most of them subnormal.
    scale_bits = jnp.where(scale == NAN_SCALE, np.int32(0x7FC00000), scale << 23)
    scale_values_ref[...] = lax.bitcast_convert_type(scale_bits, jnp.float32)
    inputs = weight_ref.shape[0]
    step = _UNPACK if inputs % _UNPACK == 0 else inputs
    per_byte = 1 if layout == "float4_kn" else 2

    def unpack_rows(turn: Any, _: None) -> None:
        first = pl.multiple_of(turn * step, step)
        rows = pl.multiple_of(turn * (step // per_byte), step // per_byte)
        blocks = scale_values_ref[pl.ds(pl.multiple_of(turn * (step // BLOCK), step // BLOCK), step // BLOCK)]
        scales = jnp.repeat(blocks, BLOCK // per_byte, axis=0)
        packed = packed_ref[0, 0, pl.ds(rows, step // per_byte)]
        if layout == "float4_kn":
            values = (packed.astype(jnp.float32) * scales).astype(jnp.bfloat16)
        else:
            wide = packed.astype(jnp.int32)
            low, high = (_float_bits(_code_values(codes) * scales) for codes in (wide & 15, wide >> 4))
            # Two neighbouring rows of bfloat16 are the halves of one row of words, the even one below.
            words = lax.shift_right_logical(low, np.int32(16)) | (high & np.int32(-(2**16)))
            values = pltpu.bitcast(words, jnp.bfloat16)
        weight_ref[pl.ds(first, step)] = values

    lax.fori_loop(0, inputs // step, unpack_rows, None)


def _float_bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def _code_values(codes: Array) -> Array:
    """E2M1 values, float32, of int32 codes 0..15: one half (code 1) has no mantissa bit, the others one."""
    magnitude = codes & 7
    half = np.int32(126 << 23)
    bits = jnp.where(magnitude >= 2, (magnitude << 22) + half, magnitude * half)
    return lax.bitcast_convert_type(bits | ((codes & 8) << 28), jnp.float32)


def _multiply(x_ref: Any, weight_ref: Any, total_ref: Any, transposed: bool) -> None:
    """total = x times the weight (or its transpose), summed in float32 over tiles of the contracted axis."""
    length = x_ref.shape[1]
    step = next((size for size in (512, 256, 128) if length % size == 0), length)
    # Weights are exact in bfloat16, so bfloat16 rows need one pass of the matrix unit.
    operand = jnp.bfloat16 if x_ref.dtype == jnp.bfloat16 else jnp.float32
    precision = lax.Precision.DEFAULT if operand == jnp.bfloat16 else lax.Precision.HIGHEST
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)

    def add(turn: Any, _: None) -> None:
        here = pl.ds(pl.multiple_of(turn * step, step), step)
        w = weight_ref[:, here] if transposed else weight_ref[here]
        total_ref[...] += lax.dot_general(
            x_ref[:, here].astype(operand),
            w.astype(operand),
            (((1,), (1 if transposed else 0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    lax.fori_loop(0, length // step, add, None)


def _kernel(
    options: Options,
    layout: str,
    experts_ref: Any,
    tiles_ref: Any,
    starts_ref: Any,
    ends_ref: Any,
    layer_ref: Any,
    x_ref: Any,
    *refs: Any,
) -> None:
    del layer_ref  # read by the index maps only
    count = 1 if options.activation is None else 2
    weights, out_ref, scratch = refs[: 2 * count], refs[2 * count], refs[2 * count + 1 :]
    scale_values_ref, unpacked, totals = scratch[0], scratch[1 : 1 + count], scratch[1 + count :]
    visit = pl.program_id(1)
    before = jnp.maximum(visit - 1, 0)
    tile = tiles_ref[visit]
    tile_rows = out_ref.shape[0]
    if x_ref.shape[0] != tile_rows:
        x_ref = x_ref.at[pl.ds(pl.multiple_of(tile * tile_rows, tile_rows), tile_rows)]
    first_in_tile = (visit == 0) | (tiles_ref[before] != tile)
    start, end = starts_ref[visit], ends_ref[visit]

    @pl.when(first_in_tile & (end <= start))
    def _() -> None:
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    @pl.when(end > start)
    def _() -> None:
        @pl.when((visit == 0) | (experts_ref[before] != experts_ref[visit]))
        def _() -> None:
            for index, weight_ref in enumerate(unpacked):
                _unpack(weights[2 * index], weights[2 * index + 1], scale_values_ref, weight_ref, layout)

        for weight_ref, total_ref in zip(unpacked, totals, strict=True):
            _multiply(x_ref, weight_ref, total_ref, options.transposed)
        product = totals[0][...]
        if options.activation is not None:
            product = apply_activation(options.activation, product, totals[1][...])
        row = tile * tile_rows + lax.broadcasted_iota(jnp.int32, product.shape, 0)
        mine = (row >= start) & (row < end)

        @pl.when(first_in_tile)
        def _() -> None:
            out_ref[...] = jnp.where(mine, product, np.float32(0)).astype(out_ref.dtype)

        @pl.when(jnp.logical_not(first_in_tile))
        def _() -> None:
            kept = out_ref[...].astype(jnp.float32)
            out_ref[...] = jnp.where(mine, product, kept).astype(out_ref.dtype)


class _Tiles(NamedTuple):
    """rows, inputs, outputs: held at a time. whole_rows: all rows stay in vector memory, so that they are fetched once
    and not once for every tile of columns."""

    rows: int
    inputs: int
    outputs: int
    whole_rows: bool = False


def choose_tiles(
    rows: int, experts: int, inputs: int, outputs: int, itemsize: int, options: Options
) -> _Tiles:
    """Rows, inputs and outputs held at a time: the contracted axis whole, the others as vector memory allows.

    Raises:
      NotImplementedError: if there is no choice that fits.
    """
    count = 1 if options.activation is None else 2
    if inputs % _UNPACK and inputs > _LARGEST_ODD_INPUTS:
        raise NotImplementedError(
            f"the TPU kernel unpacks {_UNPACK} inputs at a time and got {inputs}; pad the inputs to a multiple "
            f"of {_UNPACK} with zeros, or pass another implementation"
        )
    contracted = outputs if options.transposed else inputs

    def needed(tile: _Tiles) -> int:
        result = tile.inputs if options.transposed else tile.outputs
        weight = tile.inputs * tile.outputs
        # Codes and scales twice (one being fetched), scales as floats, the weight in bfloat16.
        weights = count * (weight + weight // 16 + 2 * weight) + weight // 8
        return weights + 2 * tile.rows * (contracted + result) * itemsize + 4 * count * tile.rows * result

    row = row_tile(rows, experts)
    if rows <= _FEW_ROWS:
        # Tiles that divide the rows let them stay in vector memory, which is worth more than large ones.
        row = next((size for size in (row, row // 2, row // 4) if size >= 32 and rows % size == 0), row)
    if options.transposed:
        choices = [_Tiles(row, _input_tile(inputs), outputs)]
        if inputs % _UNPACK == 0:
            choices.append(_Tiles(row, _UNPACK, outputs))
    else:
        choices = [
            _Tiles(row, inputs, _column_tile(outputs, largest)) for largest in (1024 // count, 512, 256, 128)
        ]
    smaller = [choice._replace(rows=min(row, 64)) for choice in choices]
    for choice in choices + smaller:
        if needed(choice) <= _VMEM_FOR_BLOCKS:
            # One buffer of all rows in place of two of a tile.
            held = needed(choice) + (rows - 2 * choice.rows) * contracted * itemsize
            even = rows > choice.rows and rows % choice.rows == 0
            return choice._replace(whole_rows=even and held <= _VMEM_FOR_BLOCKS)
    raise NotImplementedError(
        f"the TPU kernel holds the contracted axis whole, and {contracted} values of it do not fit into vector "
        "memory; shard that axis, or pass another implementation"
    )


def grouped_products(
    options: Options,
    x_MK: Array,
    weights: tuple[MXFP4Tensor, ...],
    group_sizes_E: Array,
    layer: Array | None,
) -> Array:
    """Rows times their expert's weight, or the gated activation of two such products, in `x_MK.dtype`.

    The weights stay where they are: the kernel fetches the blocks of the layer's visited experts only.
    """
    experts, outputs, inputs = weights[0].shape[-3:]
    rows = x_MK.shape[0]
    width = inputs if options.transposed else outputs
    if rows == 0 or experts == 0 or width == 0:
        return jnp.zeros((rows, width), x_MK.dtype)
    tile = choose_tiles(rows, experts, inputs, outputs, x_MK.dtype.itemsize, options)
    visits = plan_visits(group_sizes_E, rows, tile.rows)
    index = jnp.zeros((1,), jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)
    columns = tile.inputs if options.transposed else tile.outputs
    layout = weights[0].layout
    per_byte = 1 if layout == "float4_kn" else 2

    def weight_block(c: Any, v: Any, experts: Any, tiles: Any, starts: Any, ends: Any, layer: Any) -> Any:
        return (layer[0], experts[v], c, 0) if options.transposed else (layer[0], experts[v], 0, c)

    specs, arrays = [], []
    for w in weights:
        for leaf, group in ((w.packed, per_byte), (w.scale_bytes, BLOCK)):
            specs.append(pl.BlockSpec((1, 1, tile.inputs // group, tile.outputs), weight_block))
            arrays.append(in_hbm(leaf if layer is not None else leaf[None], options.interpret))
    count = len(weights)
    if tile.whole_rows:
        rows_block = pl.BlockSpec(x_MK.shape, lambda *_: (0, 0), pipeline_mode=pl.Buffered(1))
    else:
        rows_block = pl.BlockSpec((tile.rows, x_MK.shape[1]), lambda c, v, experts, tiles, *_: (tiles[v], 0))
    multiplied = 2 * count * rows * inputs * outputs
    moved = sum(experts * (inputs // 2 + inputs // BLOCK) * outputs for _ in weights)
    # A tile of rows is fetched again for every tile of columns, unless there is no other between.
    fetched = 1 if tile.whole_rows or rows <= tile.rows else pl.cdiv(width, columns)
    *leading, x_MK = match_varying(*visits, index, x_MK, *arrays)[: len(visits) + 2]
    arrays = match_varying(*arrays, x_MK)[:-1]
    with jax.named_scope("grouped_matmul_tpu"):
        return pl.pallas_call(
            functools.partial(_kernel, options, layout),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=5,
                grid=(pl.cdiv(width, columns), visits.tiles.shape[0]),
                in_specs=[
                    rows_block,
                    *specs,
                ],
                out_specs=pl.BlockSpec((tile.rows, columns), lambda c, v, experts, tiles, *_: (tiles[v], c)),
                scratch_shapes=[
                    pltpu.VMEM((tile.inputs // BLOCK, tile.outputs), jnp.float32),
                    *[pltpu.VMEM((tile.inputs, tile.outputs), jnp.bfloat16)] * count,
                    *[pltpu.VMEM((tile.rows, columns), jnp.float32)] * count,
                ],
            ),
            out_shape=result_like(x_MK, (rows, width), x_MK.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
            ),
            cost_estimate=pl.CostEstimate(
                flops=multiplied,
                transcendentals=0 if options.activation is None else 3 * rows * width,
                bytes_accessed=moved + rows * (fetched * x_MK.shape[1] + width) * x_MK.dtype.itemsize,
            ),
            interpret=options.interpret,
            name="mxfp4_grouped_glu" if options.activation is not None else "mxfp4_grouped_matmul",
        )(*leading, x_MK, *arrays)
