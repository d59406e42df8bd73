"""Mosaic GPU kernel of sparse attention: every query reads its own rows of the cache, in float32 vector units.

One warpgroup holds up to twelve heads of one query in registers, a head in one warp: the query, the running maximum
and sum of its softmax, and the weighted sum of values. It goes through the query's selected rows a few at a time;
each row is read once per warpgroup, as key and as value, and the next rows are read while these are multiplied. Where
there are few queries the selected rows are split among several warpgroups, whose results are merged afterwards.

There is no shared memory in the loop, no barrier and no exchange between warps, and every product is one of
float32 numbers: what bounds it is the number of instructions of the vector units, about four per head, channel and
selected row in 32 lanes, not the bytes of the rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic_gpu
from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying, result_like

CHANNELS = 64
"""Channels come in multiples of it: two neighbouring ones for each thread of a warp."""

WARPS = 4
"""Heads of a warpgroup come in multiples of it: a head is summed within one warp."""

_MOST_HEADS = 12
_WIDTH_OF_MOST_HEADS = 640
_BLOCKS = 264
"""Thread blocks that fill the chips this is for, two for each of 132 multiprocessors."""
_FEWEST_ROWS = 64
"""Selected rows that a split of them has at least: its result is written, read and merged."""

HEADS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, CHANNELS), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
PER_HEAD = HEADS.reduce(1)
PER_CHANNEL = HEADS.reduce(0)


class Options(NamedTuple):
    """What is fixed when the kernel is traced.

    scale: of the logits.
    value_dim: channels that are values.
    interpret: None, or `InterpretGPUParams`.
    """

    scale: float
    value_dim: int
    interpret: Any


class _Shape(NamedTuple):
    """heads: of a query; together: of a warpgroup; width, values: channels; rows: in one turn; slots: per split."""

    heads: int
    together: int
    width: int
    values: int
    rows: int
    splits: int
    slots: int


def heads_together(heads: int, width: int) -> int:
    """Heads of one warpgroup: as many as registers hold, and as few beyond the heads there are."""
    most = _MOST_HEADS if width <= _WIDTH_OF_MOST_HEADS else WARPS
    sizes = range(most, 0, -WARPS)
    return min(sizes, key=lambda size: -(-heads // size) * size)


def split_rows(queries: int, blocks: int, selected: int) -> int:
    """Parts that the selected rows of each query are split into, so that the chip is full if they are many."""
    return max(1, min(_BLOCKS // (queries * blocks), -(-selected // _FEWEST_ROWS)))


def load(ref: Any, layout: Any) -> Array:
    """In the layout, from wherever the reference lies."""
    # Rows are read by several warps at once: no one pattern is optimal.
    return plgpu.load(ref, layout=layout, optimized=False)


def over_heads(x_C: Array, heads: int) -> Array:
    """[C] -> [H, C]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_C, (heads, *x_C.shape), (1,)), HEADS)


def over_channels(x_H: Array, channels: int) -> Array:
    """[H] -> [H, C]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_H, (*x_H.shape, channels), (0,)), HEADS)


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """One float32 value everywhere."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def where(condition: Any, x: Array, other: Array) -> Array:
    """`x` or `other` by one scalar."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, other)


def reachable_slots(rows_RN: Array, splits: int, slots: int) -> Array:
    """[R, parts], int32: of a query's slots in each part, how many there are up to the last that holds a row."""
    place_N = jnp.arange(1, rows_RN.shape[1] + 1, dtype=jnp.int32)
    counts_R = jnp.max(jnp.where(rows_RN >= 0, place_N, 0), axis=1, initial=0)
    first_P = jnp.arange(splits, dtype=jnp.int32) * slots
    return jnp.clip(counts_R[:, None] - first_P, 0, slots)


def _kernel(shape: _Shape, scale: float, *refs: Any) -> None:
    q_ref, kv_ref, rows_ref, counts_ref, o_ref, logsumexp_ref, *shared = refs
    heads, values = shape.together, shape.values
    head_blocks = -(-shape.heads // heads)
    block = jax.lax.axis_index("block")
    head_block, rest = jax.lax.rem(block, jnp.int32(head_blocks)), jax.lax.div(block, jnp.int32(head_blocks))
    split, query = jax.lax.rem(rest, jnp.int32(shape.splits)), jax.lax.div(rest, jnp.int32(shape.splits))
    first_head, first_slot = head_block * heads, split * shape.slots
    whole = shape.heads % heads == 0

    def load_queries() -> Array:
        if whole:
            return load(q_ref.at[query, pl.ds(first_head, heads)], HEADS)
        # The last head again in place of those that do not exist, whose results are not written.
        for head in range(heads):
            row = jnp.minimum(first_head + head, shape.heads - 1)
            _mosaic_gpu.store(shared[0].at[head], load(q_ref.at[query, row], PER_CHANNEL))
        return load(shared[0], HEADS)

    def fetch(turn: Any) -> list[Array]:
        """A turn's rows, zeros for those that do not exist."""
        found = []
        for i in range(shape.rows):
            row = rows_ref[query, first_slot + turn * shape.rows + i]
            row_C = load(kv_ref.at[jnp.maximum(row, 0)], PER_CHANNEL)
            found.append(where(row >= 0, row_C, jnp.zeros_like(row_C)))
        return found

    q_HC = load_queries().astype(jnp.float32)
    turns = jax.lax.div(counts_ref[query, split] + jnp.int32(shape.rows - 1), jnp.int32(shape.rows))

    def one_turn(turn: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        maximum_H, total_H, o_HV, rows = carry
        ahead = fetch(jnp.minimum(turn + 1, shape.slots // shape.rows - 1))
        wide = [row.astype(jnp.float32) for row in rows]
        logits = []
        for i, row_C in enumerate(wide):
            product_H = jnp.sum(q_HC * over_heads(row_C, heads), axis=1)
            logit_H = plgpu.layout_cast(product_H, PER_HEAD) * scale
            exists = rows_ref[query, first_slot + turn * shape.rows + i] >= 0
            logits.append(where(exists, logit_H, filled((heads,), -jnp.inf, PER_HEAD)))
        largest_H = functools.reduce(jnp.maximum, logits, maximum_H)
        # -inf - (-inf) is NaN: without a row so far the shift is 0.
        shift_H = jnp.where(largest_H == -jnp.inf, jnp.zeros_like(largest_H), largest_H)
        decay_H = jnp.exp(maximum_H - shift_H)
        weights = [jnp.exp(logit_H - shift_H) for logit_H in logits]
        total_H = functools.reduce(jnp.add, weights, total_H * decay_H)
        o_HV = o_HV * over_channels(decay_H, values)
        for weight_H, row_C in zip(weights, wide, strict=True):
            o_HV = o_HV + over_channels(weight_H, values) * over_heads(row_C[:values], heads)
        return largest_H, total_H, o_HV, ahead

    start = (
        filled((heads,), -jnp.inf, PER_HEAD),
        filled((heads,), 0.0, PER_HEAD),
        filled((heads, values), 0.0, HEADS),
        fetch(jnp.int32(0)),
    )
    maximum_H, total_H, o_HV, _ = jax.lax.fori_loop(jnp.int32(0), turns, one_turn, start)
    empty_H = maximum_H == -jnp.inf
    safe_H = jnp.where(empty_H, jnp.ones_like(total_H), total_H)
    o_HV = (o_HV / over_channels(safe_H, values)).astype(o_ref.dtype)
    logsumexp_H = maximum_H + jnp.log(safe_H)
    _mosaic_gpu.store(logsumexp_ref.at[split, query, pl.ds(first_head, heads)], logsumexp_H)
    if whole:
        _mosaic_gpu.store(o_ref.at[split, query, pl.ds(first_head, heads)], o_HV)
        return
    _mosaic_gpu.store(shared[1], o_HV)
    for head in range(heads):

        @pl.when(first_head + head < shape.heads)
        def _(head: int = head) -> None:
            row_V = load(shared[1].at[head], PER_CHANNEL)
            _mosaic_gpu.store(o_ref.at[split, query, first_head + head], row_V)


def attention(options: Options, q_RHC: Array, kv_SC: Array, rows_RN: Array) -> tuple[Array, Array]:
    """Attention of R queries over rows of the cache, in the parts that `split_rows` chooses.

    Args:
      options: factor of the logits and number of values, a multiple of CHANNELS.
      q_RHC: queries, bfloat16 or float32; C is a multiple of CHANNELS.
      kv_SC: the cache, bfloat16 or float32.
      rows_RN: int32 rows of the cache, each at most once; negative for none.

    Returns:
      o [parts, R, H, V], in q's dtype if there is one part and float32 if there are more, and logsumexp
      [parts, R, H] in float32.
    """
    queries, heads, width = q_RHC.shape
    together = heads_together(heads, width)
    head_blocks = -(-heads // together)
    selected = rows_RN.shape[1]
    splits = split_rows(queries, head_blocks, selected)
    turn = 4 if kv_SC.dtype == jnp.bfloat16 else 2
    slots = -(-selected // (splits * turn)) * turn
    splits = -(-selected // slots)
    shape = _Shape(heads, together, width, options.value_dim, turn, splits, slots)
    counts_RP = reachable_slots(rows_RN, splits, slots)
    rows_RN = jnp.pad(rows_RN, ((0, 0), (0, splits * slots - selected)), constant_values=-1)
    arrays = match_varying(q_RHC, kv_SC, rows_RN, counts_RP)
    dtype = q_RHC.dtype if splits == 1 else jnp.float32
    shared: list[Any] = []
    if heads % together:
        shared = [
            plgpu.SMEM((together, width), q_RHC.dtype),
            plgpu.SMEM((together, options.value_dim), dtype),
        ]
    like = functools.partial(result_like, arrays[0])
    o, logsumexp = plgpu.kernel(
        functools.partial(_kernel, shape, options.scale),
        out_type=[
            like((splits, queries, heads, options.value_dim), dtype),
            like((splits, queries, head_blocks * together), jnp.float32),
        ],
        scratch_types=shared,
        grid=(queries * splits * head_blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="sparse_attention_rows",
        interpret=options.interpret,
    )(*arrays)
    return o, logsumexp[..., :heads]
