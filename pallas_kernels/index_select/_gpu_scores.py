"""Mosaic GPU kernel of index scores on Hopper's tensor cores: products, ReLU, and the weighted sum over heads at once.

A thread block has two warpgroups of 64 keys each, which stay in shared memory, and one that fetches queries, a few at
a time. The keys are the first operand of a product and the heads of those queries the second; what comes out of it
stays in registers until it is one number per query and key. A score is one sum in one order whatever it is computed
with: channels within the tensor core, then heads by a fixed tree.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._mosaic_gpu import store
from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying, result_like

KEYS = 64
"""Keys of a warpgroup: the rows of the tensor core's first operand."""
COMPUTE = 2
CHANNELS = 64
"""Channels come in multiples of it, heads in multiples of 8."""

_COLUMNS = 128
"""Heads of all queries that are multiplied at once, at most: 64 registers of a thread."""
_STAGES = 2
_TURNS = 8
"""Products of a thread block for each of its keys: what fetching the keys is shared by."""


class _Shape(NamedTuple):
    """together: queries of one product; turns: products of a thread block."""

    heads: int
    together: int
    turns: int
    use_relu: bool
    scale: float


def _kernel(shape: _Shape, *refs: Any) -> None:
    q_ref, k_ref, weights_ref, scores_ref, q_smem, k_smem, full, empty, fetched = refs
    heads, together = shape.heads, shape.together
    columns = heads * together
    keys, rows, b = (jax.lax.axis_index(name) for name in ("keys", "queries", "row"))
    warpgroup = jax.lax.axis_index("warpgroup")

    def fetching() -> None:
        for part in range(COMPUTE):
            here = pl.ds((keys * COMPUTE + part) * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(k_ref.at[b, here], k_smem.at[part], fetched)

        def one_turn(turn: Any, _: None) -> None:
            slot = turn & (_STAGES - 1)

            @pl.when(turn >= _STAGES)
            def _() -> None:
                plgpu.barrier_wait(empty.at[slot])

            here = pl.ds((rows * shape.turns + turn) * columns, columns)
            plgpu.copy_gmem_to_smem(q_ref.at[b, here], q_smem.at[slot], full.at[slot])

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(shape.turns), one_turn, None)

    def multiplying() -> None:
        plgpu.barrier_wait(fetched)

        def one_turn(turn: Any, _: None) -> None:
            slot, first = turn & (_STAGES - 1), (rows * shape.turns + turn) * together
            plgpu.barrier_wait(full.at[slot])

            def products(place: Any) -> Array:
                plgpu.wgmma(place, k_smem.at[warpgroup], q_smem.at[slot].T)
                return place[...]

            accumulator = plgpu.WGMMAAccumulatorRef((KEYS, columns), jnp.float32)
            products_SR = pl.run_scoped(products, accumulator)
            plgpu.barrier_arrive(empty.at[slot])
            if shape.use_relu:
                products_SR = jnp.maximum(products_SR, jnp.zeros_like(products_SR))
            of_heads = weights_ref.at[b, pl.ds(first * heads, columns)]
            weights_R = plgpu.load(of_heads, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            spread = jax.lax.broadcast_in_dim(weights_R, (KEYS, columns), (1,))
            weighed_SR = products_SR * plgpu.layout_cast(spread, plgpu.Layout.WGMMA)
            here = pl.ds((keys * COMPUTE + warpgroup) * KEYS, KEYS)
            for i in range(together):
                scores_S = jnp.sum(weighed_SR[:, i * heads : (i + 1) * heads], axis=1) * shape.scale
                store(scores_ref.at[b, first + i, here], scores_S)

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(shape.turns), one_turn, None)

    jax.lax.cond(warpgroup < COMPUTE, multiplying, fetching)


def _tiled(shape: tuple[int, ...]) -> Any:
    """Shared memory in the layout that tensor cores read."""
    # Typed as abstract, though JAX makes instances of them itself.
    tile: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tile((8, CHANNELS)), swizzle(2 * CHANNELS)))


def _padded(x: Array, **multiples: int) -> Array:
    """Zeros at the ends of the axes `axis_n`, up to a multiple."""
    widths = [(0, 0)] * x.ndim
    for name, multiple in multiples.items():
        axis = int(name.removeprefix("axis_"))
        widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def tile_scores(q_BQHD: Array, k_BSD: Array, weights_BQH: Array, use_relu: bool, interpret: Any) -> Array:
    """Scores [B, Q, S] in float32 of bfloat16 queries and a tile of bfloat16 keys.

    Copies what does not fit the kernel's tiles: keys in numbers other than multiples of 128, channels other than
    multiples of 64.
    """
    batch, queries, heads, channels = q_BQHD.shape
    keys = k_BSD.shape[1]
    scale = (heads * channels) ** -0.5
    q_BQHD = _padded(q_BQHD, axis_2=8, axis_3=CHANNELS)
    weights_BQH = _padded(weights_BQH, axis_2=8)
    k_BSD = _padded(k_BSD, axis_1=COMPUTE * KEYS, axis_2=CHANNELS)
    heads, channels = q_BQHD.shape[2:]
    together = max(1, min(queries, _COLUMNS // heads))
    turns = min(_TURNS, -(-queries // together))
    q_BQHD, weights_BQH = (_padded(x, axis_1=together * turns) for x in (q_BQHD, weights_BQH))
    padded = q_BQHD.shape[1]
    arrays = match_varying(
        q_BQHD.reshape(batch, padded * heads, channels),
        k_BSD,
        weights_BQH.astype(jnp.float32).reshape(batch, padded * heads),
    )
    scores = plgpu.kernel(
        functools.partial(_kernel, _Shape(heads, together, turns, use_relu, scale)),
        out_type=result_like(arrays[0], (batch, padded, k_BSD.shape[1]), jnp.float32),
        scratch_types=[
            _tiled((_STAGES, together * heads, channels)),
            _tiled((COMPUTE, KEYS, channels)),
            plgpu.Barrier(num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=COMPUTE),
        ],
        grid=(k_BSD.shape[1] // (COMPUTE * KEYS), padded // (together * turns), batch),
        grid_names=("keys", "queries", "row"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="index_scores",
        interpret=interpret,
    )(*arrays)
    return scores[:, :queries, :keys]
