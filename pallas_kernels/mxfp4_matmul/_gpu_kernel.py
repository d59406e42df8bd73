"""Pallas GPU kernel of the grouped matmul (Mosaic GPU, Hopper and Blackwell): weights are unpacked in registers.

A thread block computes the transposed result of up to `tile` rows of one group for 128 columns, because the
tensor core's first operand has at least 64 rows and its second as few as 8: few tokens per expert waste little.
One warpgroup fetches (bulk asynchronous copies into a ring of buffers), two compute: each loads packed bytes
into registers, makes exact bfloat16 weights of them, stores them for the tensor core, and multiplies while it
unpacks the next ones.

The bytes of "packed_nk" lie along the contracted axis, so a byte gives two neighbours of it, which go to two
different products: of the even inputs and of the odd ones. The rows are split likewise beforehand
(`split_rows`), so that no value ever moves between threads.

What multiplies is Hopper's `wgmma`, with accumulators in registers, or Blackwell's `tcgen05.mma`, with accumulators
in tensor memory. One for 64 columns of a warpgroup's own comes out of it in the same registers, so that all else is
the same. What computes is plain JAX (`_gpu_plan` and the functions of `_gpu_unpack`); around it are copies and
barriers.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu import store
from pallas_kernels._typing import Array
from pallas_kernels.mxfp4_matmul._gpu_plan import (
    COLUMNS,
    COMPUTE,
    SWIZZLED_COLUMNS,
    WARPGROUP_COLUMNS,
    Tiles,
    choose_tiles,
    plan_visits,
    split_rows,
)
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


class Options(NamedTuple):
    """What the kernel is specialised for.

    activation: the gated activation of two weights, or None for one weight.
    transposed: multiply by the transposed weight.
    exact: the rows are already exact in bfloat16, whatever their dtype.
    tensor_memory: multiply as Blackwell does.
    interpret: None, or `InterpretGPUParams`.
    """

    activation: Activation | None
    transposed: bool
    exact: bool
    tensor_memory: bool
    interpret: Any

    def of_gradient(self) -> "Options":
        """Of a cotangent with a transposed weight. Cotangents are not exact in bfloat16, even where the rows are."""
        return self._replace(activation=None, transposed=True, exact=False)


def _load_scales(scale_ref: Any, first_row: Any, first_block: Any, blocks: int) -> list[Array]:
    """The scales of 64 rows, as they lie: too narrow and too oddly spaced for a bulk copy."""
    rows = pl.ds(first_row, WARPGROUP_COLUMNS)
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
    fetched, unpacked = refs[2 * count + 5 : 3 * count + 5], refs[3 * count + 5 : 4 * count + 5]
    tensor_memory: tuple[Any, ...] = tuple(refs[4 * count + 5 :]) if options.tensor_memory else (None,)
    done, accumulators = tensor_memory[0], tensor_memory[1:]

    visit, column, warpgroup = lax.axis_index("visit"), lax.axis_index("column"), lax.axis_index("warpgroup")
    expert, first, start, rows = experts_ref[visit], fetched_ref[visit], starts_ref[visit], counts_ref[visit]
    layer, width, planes = layer_ref[0], tiles.bytes, 1 if transposed else 2

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
            store(weight_smem.at[warpgroup, buffer], weight)
        plgpu.commit_smem()

    def operands(step: Any, weight_smem: Any) -> Iterator[tuple[Any, Any]]:
        """Weights and transposed rows of a step's products."""
        slot, buffer = slot_of(step), _remainder(step, 2)
        for plane in range(planes):
            w = weight_smem.at[warpgroup, buffer, :, pl.ds(plane * width, width)]
            for part in range(shape.parts):
                yield w.T if transposed else w, x_smem.at[slot, plane * shape.parts + part].T

    def multiply_in_registers(step: Any, totals: Any) -> None:
        for total, weight_smem in zip(totals, unpacked, strict=True):
            for w, x in operands(step, weight_smem):
                plgpu.wgmma(total, w, x)
        # The products before these are done then.
        plgpu.wgmma_wait(count * planes * shape.parts)

    def done_of(step: Any) -> Any:
        """The barrier of this warpgroup's products of a step."""
        return done.at[2 * warpgroup + _remainder(step, 2)]

    def multiply_in_tensor_memory(step: Any, _: Any) -> None:
        # Which tensor memory is known when the kernel is compiled, so each warpgroup has instructions of its own.
        for index in range(COMPUTE):

            @pl.when(warpgroup == index)
            def _(index: int = index) -> None:
                for total, weight_smem in zip(accumulators[index::COMPUTE], unpacked, strict=True):
                    for i, (w, x) in enumerate(operands(step, weight_smem)):
                        plgpu.tcgen05_mma(total, w, x, accumulate=True if i else step > 0)
                plgpu.tcgen05_commit_arrive(done_of(step))

        @pl.when(step > 0)
        def _() -> None:
            plgpu.barrier_wait(done_of(step - 1))

    def multiply_step(step: Any, totals: Any) -> None:
        (multiply_in_tensor_memory if options.tensor_memory else multiply_in_registers)(step, totals)

        # With the products before, the fetched rows and bytes that they read are done with.
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

    def products_from_tensor_memory() -> tuple[Array, ...]:
        products()
        plgpu.barrier_wait(done_of(jnp.int32(shape.steps - 1)))

        def load(index: int) -> tuple[Array, ...]:
            return tuple(plgpu.async_load_tmem(total) for total in accumulators[index::COMPUTE])

        return lax.cond(warpgroup == 0, lambda: load(0), lambda: load(1))

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
            if options.tensor_memory:
                totals = products_from_tensor_memory()
            else:
                accumulator = plgpu.WGMMAAccumulatorRef((WARPGROUP_COLUMNS, tiles.rows), jnp.float32)
                totals = pl.run_scoped(products, *[accumulator] * count)
            total = totals[0] if options.activation is None else _gated(options.activation, *totals)
            result = plgpu.layout_cast(total.astype(out_ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store(out_smem.at[warpgroup].T, result)
            write()

        @pl.when(nobodys)
        def _() -> None:
            out_smem[warpgroup] = jnp.zeros(out_smem.shape[1:], out_smem.dtype)
            write()

    lax.cond(warpgroup < COMPUTE, computing, fetching)


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
    tiles = choose_tiles(rows, experts, planes, x_MK.dtype.itemsize, count, transposed, options.tensor_memory)
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
    swizzled = SWIZZLED_COLUMNS if options.tensor_memory else tiles.bytes
    scratch = [
        _tiled((tiles.stages, planes, tiles.rows, tiles.bytes), jnp.bfloat16, swizzled),
        plgpu.SMEM((COMPUTE, tiles.rows, WARPGROUP_COLUMNS), x_MK.dtype),
        plgpu.Barrier(num_arrivals=1 + count, num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tiles.stages),
        *[_tiled((tiles.stages, depth, tiles.bytes), jnp.uint8, tiles.bytes)] * count,
        *[_tiled((COMPUTE, 2, 64, parities * tiles.bytes), jnp.bfloat16, swizzled)] * count,
    ]
    if options.tensor_memory:
        scratch.append(plgpu.Barrier(num_barriers=2 * COMPUTE, orders_tensor_core=True))
        scratch += [plgpu.TMEM((WARPGROUP_COLUMNS, tiles.rows), jnp.float32)] * (COMPUTE * count)
    with jax.named_scope("grouped_matmul_gpu"):
        products = plgpu.kernel(
            functools.partial(
                _kernel, _Shape(options, tiles, count, parts, steps, tiles.rows * count >= 256)
            ),
            out_type=jax.ShapeDtypeStruct(result, x_MK.dtype),
            scratch_types=scratch,
            grid=(visits.experts.shape[0], width // COLUMNS),
            grid_names=("visit", "column"),
            num_threads=COMPUTE + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            kernel_name="mxfp4_grouped_glu" if options.activation is not None else "mxfp4_grouped_matmul",
            interpret=options.interpret,
        )(*visits, index, x, *[w.packed for w in stacked], *[w.scale_bytes for w in stacked])
    if transposed:
        return jnp.moveaxis(products, 0, -1).reshape(rows, inputs)
    return products
