"""The Pallas TPU kernel of index selection, and the one that merges the selections of several key shards.

Grid (block of sequences, block of queries). A program reads the visible keys of its sequences once, in rounds of
a few thousand, double-buffered; scores them, one tile of lanes after the other; and merges the scores' ranks into
the best `top_k` so far. Nothing but the result leaves vector memory.

A block reads every visible key once. A search for the threshold alone, by four histograms of 8 bits, and then for
the indices would keep no candidates but read and score every key five times.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array
from pallas_kernels._varying import result_like
from pallas_kernels.index_select import _tpu_compact as compact
from pallas_kernels.index_select._tpu_compact import ABSENT, LANES, SUBLANES
from pallas_kernels.index_select.keys import FP4_BLOCK, e2m1_values, scale_values

_VMEM_LIMIT = 48 * 2**20
_KEY_BYTES = 24 * 2**20
"""What both key buffers may take."""

_HEADS_AT_ONCE = 8
_LARGEST_ROUND = 6144
_TABLE_BYTES = 128 * 2**10
"""What the page tables of a block may take."""


class Tiles(NamedTuple):
    """Sequences and queries of a block, keys of a page, of a round, and scored at a time.

    rows: rows of the block that hold a query, at most 8 unless it is of one sequence.
    columns: keys of a round, up to whole lanes.
    """

    sequences: int
    queries: int
    rows: int
    page: int
    round: int
    columns: int
    tile: int


def _fit_round(page: int, wanted: int) -> tuple[int, int, int]:
    keys = page * max(1, wanted // page)
    columns = pl.cdiv(keys, LANES) * LANES
    tile = next(size for size in (512, 384, 256, LANES) if columns % size == 0)
    return keys, columns, tile


def choose_tiles(
    batch: int,
    queries: int,
    keys: int,
    page: int,
    row_bytes: int,
    top_k: int,
    paged: bool,
    query_block: int,
    key_round: int | None,
) -> Tiles:
    """Few queries per sequence share a block with those of other sequences, to fill the registers.

    `row_bytes` of vector memory hold a key.

    Raises:
      NotImplementedError: if there is no choice that fits.
    """
    sequences = 1 if queries >= SUBLANES else min(batch, SUBLANES // queries)
    page_bytes = 2 * row_bytes * pl.cdiv(page, LANES) * LANES
    if page_bytes > _KEY_BYTES:
        raise NotImplementedError(
            f"the TPU kernel copies whole pages, and two of {page} keys do not fit into vector memory; "
            "use smaller pages, or another implementation"
        )
    sequences = min(sequences, _KEY_BYTES // page_bytes)
    if paged:
        table_bytes = 4 * (keys // page)
        if table_bytes > _TABLE_BYTES:
            raise NotImplementedError(
                f"the TPU kernel holds a page table in scalar memory, at most {_TABLE_BYTES // 4} pages of a "
                f"sequence, and got {keys // page}; use larger pages, or another implementation"
            )
        sequences = min(sequences, _TABLE_BYTES // table_bytes)
    if key_round is None:
        largest = _KEY_BYTES // (2 * sequences * row_bytes) // LANES * LANES
        key_round = min(_LARGEST_ROUND, max(2048, 3 * top_k), largest)
    round_keys, columns, tile = _fit_round(page, min(keys, key_round))
    # A single query needs no padding: its heads are the rows of the product, one sublane each.
    padded = 1 if queries == 1 else min(query_block, pl.cdiv(queries, SUBLANES) * SUBLANES)
    rows = padded if queries >= SUBLANES else sequences * queries
    return Tiles(sequences, padded, rows, page, round_keys, columns, tile)


class Static(NamedTuple):
    """What is fixed when the kernel is traced.

    kind: "full", "fp8" (a scale per key, which comes beside the pages, round by round) or "fp4" (channels in rows
        and keys in lanes, for the codes and for their scales).
    physical_pages: pages in memory; of fp4 keys without a page table, sequences.
    """

    tiles: Tiles
    heads: int
    top_k: int
    pages: int
    physical_pages: int
    paged: bool
    use_relu: bool
    kind: str


def _unpack_fp4(codes: Array, scales: Array, dtype: Any) -> Array:
    """Keys [D, tile], exact in either type, of codes [D/2, tile] and scale bytes [D/32, tile]."""
    nibbles = codes.astype(jnp.int32)
    values = e2m1_values(jnp.concatenate([nibbles & 15, (nibbles >> 4) & 15], axis=0))
    powers = scale_values(scales.astype(jnp.int32))
    return (values * jnp.repeat(powers, FP4_BLOCK, axis=0)).astype(dtype)


def _tile_ranks(static: Static, q: Array, k: Array, scales: Array | None, weights: Array) -> Array:
    """Ranks [queries, tile] of all keys, visible or not; q [heads * queries, D] with heads outside.

    One order of additions: the channels of a product, the heads one after the other, then the scale.
    """
    queries = static.tiles.queries
    exact_in_bfloat16 = q.dtype == jnp.bfloat16
    if static.kind == "fp4":
        assert scales is not None
        k = _unpack_fp4(k, scales, q.dtype)
    else:
        k = k.astype(q.dtype)
    contracted = ((1,), (0 if static.kind == "fp4" else 1,))
    total = None
    for head in range(0, static.heads, _HEADS_AT_ONCE):
        heads = min(_HEADS_AT_ONCE, static.heads - head)
        dots = lax.dot_general(
            q[head * queries : (head + heads) * queries],
            k,
            (contracted, ((), ())),
            precision=lax.Precision.DEFAULT if exact_in_bfloat16 else lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        if static.use_relu:
            dots = jnp.maximum(dots, np.float32(0))
        for i in range(heads):
            term = weights[:, head + i : head + i + 1] * dots[i * queries : (i + 1) * queries]
            total = term if total is None else total + term
    assert total is not None
    scores = np.float32((static.heads * q.shape[1]) ** -0.5) * total
    if static.kind == "fp8":
        # A power of two: the same bits as if the keys had been multiplied.
        assert scales is not None
        scores = scores * scale_values(scales.astype(jnp.int32))
    return compact.rank_of(scores)


def _kernel(static: Static, *refs: Any) -> None:
    tiles, top_k = static.tiles, static.top_k
    visible_ref, rounds_ref, *table_refs = refs[: 3 if static.paged else 2]
    # The ranks are a second result, or scratch.
    quantized = static.kind != "full"
    rest = list(refs[3 if static.paged else 2 :])
    q_ref, weights_ref, positions_ref, pages_ref = rest[:4]
    scales_ref: Any = rest[4] if quantized else None
    indices_ref, ranks_ref, keys_ref, *round_scales, new_ref, semaphores = rest[5 if quantized else 4 :]
    round_scales_ref: Any = round_scales[0] if quantized else None
    block, query_block = pl.program_id(0), pl.program_id(1)
    program = block * pl.num_programs(1) + query_block
    kept_rows = tiles.rows // tiles.sequences
    pages_per_round = tiles.round // tiles.page
    visible = [visible_ref[program * tiles.sequences + b] for b in range(tiles.sequences)]

    def copies(slot: Any, sequence: int, number: Any, page: Any) -> list[Any]:
        """Of page `page` of the sequence, the `number`th of its round."""
        row = pl.ds(pl.multiple_of(number * tiles.page, tiles.page), tiles.page)
        if static.paged:
            # Only visible keys are read, whose pages have a number; an invalid one must not read elsewhere.
            physical = jnp.clip(table_refs[0][0, sequence, page], 0, static.physical_pages - 1)
        elif static.kind == "fp4":
            physical = jnp.minimum(block * tiles.sequences + sequence, static.physical_pages - 1)
        else:
            physical = (block * tiles.sequences + sequence) * static.pages + page
        if static.kind != "fp4":
            pairs = [(pages_ref.at[physical], keys_ref.at[slot, sequence, row])]
        else:
            pairs = [
                (source.at[physical], target.at[slot, sequence, :, row])
                for source, target in ((pages_ref, keys_ref), (scales_ref, round_scales_ref))
            ]
            if not static.paged:
                lanes = pl.ds(pl.multiple_of(page * tiles.page, tiles.page), tiles.page)
                pairs = [(source.at[:, lanes], target) for source, target in pairs]
        return [pltpu.make_async_copy(*pair, semaphores.at[slot]) for pair in pairs]

    def for_each_page(turn: Any, act: Callable[[Any], None]) -> None:
        for sequence in range(tiles.sequences):
            if static.kind == "fp8":

                @pl.when(turn * tiles.round < visible[sequence])
                def _(sequence: int = sequence) -> None:
                    source = scales_ref.at[block * tiles.sequences + sequence, turn]
                    target = round_scales_ref.at[turn & 1, sequence]
                    act(pltpu.make_async_copy(source, target, semaphores.at[turn & 1]))

            def visit(number: Any, _: None, sequence: int = sequence) -> None:
                page = turn * pages_per_round + number

                @pl.when(page * tiles.page < visible[sequence])
                def _() -> None:
                    for copy in copies(turn & 1, sequence, number, page):
                        act(copy)

            lax.fori_loop(0, pages_per_round, visit, None)

    def score(turn: Any) -> None:
        def score_tile(number: Any, _: None) -> None:
            column = pl.multiple_of(number * tiles.tile, tiles.tile)
            place = pl.ds(column, tiles.tile)
            for sequence in range(tiles.sequences):
                rows = pl.ds(sequence * kept_rows, kept_rows)
                first = turn * tiles.round + column

                @pl.when(first < visible[sequence])
                def _(sequence: int = sequence, rows: Any = rows, first: Any = first) -> None:
                    scales = None
                    if round_scales_ref is not None:
                        scales = round_scales_ref[turn & 1, sequence, :, place]
                    if static.kind == "fp4":
                        k = keys_ref[turn & 1, sequence, :, place]
                    else:
                        k = keys_ref[turn & 1, sequence, place]
                    ranks = _tile_ranks(static, q_ref[sequence, 0], k, scales, weights_ref[sequence, 0])
                    ranks = ranks[:kept_rows]
                    key = first + lax.broadcasted_iota(jnp.int32, ranks.shape, 1)
                    seen = (key <= positions_ref[0, 0, rows]) & (key < (turn + 1) * tiles.round)
                    new_ref[rows, place] = jnp.where(seen, ranks, ABSENT)

                @pl.when(first >= visible[sequence])
                def _(rows: Any = rows) -> None:
                    new_ref[rows, place] = jnp.full((kept_rows, tiles.tile), ABSENT, jnp.int32)

        lax.fori_loop(0, tiles.columns // tiles.tile, score_tile, None)

    def merge(turn: Any) -> None:
        def merge_rows(group: Any, _: None) -> None:
            rows = pl.ds(pl.multiple_of(group * SUBLANES, SUBLANES), SUBLANES)
            new = new_ref[rows, :]
            indices = turn * tiles.round + lax.broadcasted_iota(jnp.int32, new.shape, 1)
            compact.update(ranks_ref, indices_ref, (0, 0, rows), new, indices, top_k)

        lax.fori_loop(0, new_ref.shape[0] // SUBLANES, merge_rows, None)

    def step(turn: Any, _: None) -> None:
        for_each_page(turn + 1, lambda copy: copy.start())
        for_each_page(turn, lambda copy: copy.wait())
        with jax.named_scope("scores"):
            score(turn)
        with jax.named_scope("merge"):
            merge(turn)

    ranks_ref[...] = jnp.full(ranks_ref.shape, ABSENT, jnp.int32)
    indices_ref[...] = jnp.full(indices_ref.shape, -1, jnp.int32)
    # Rows that hold no query are never written again.
    new_ref[...] = jnp.full(new_ref.shape, ABSENT, jnp.int32)
    for_each_page(0, lambda copy: copy.start())
    lax.fori_loop(0, rounds_ref[program], step, None)
    indices_ref[...] = jnp.where(ranks_ref[...] == ABSENT, -1, indices_ref[...])


def _scales_by_round(tiles: Tiles, scales_BS: Array) -> Array:
    """Scales of a key each [B, S] as [B, rounds, 1, columns]: one copy to whole lanes for every round."""
    batch, keys = scales_BS.shape
    rounds = pl.cdiv(keys, tiles.round)
    padded = jnp.pad(scales_BS, ((0, 0), (0, rounds * tiles.round - keys))).reshape(
        batch, rounds, 1, tiles.round
    )
    return jnp.pad(padded, ((0, 0), (0, 0), (0, 0), (0, tiles.columns - tiles.round)))


def local_best(
    static: Static,
    arrays: tuple[Array, ...],
    with_ranks: bool,
    interpret: Any,
) -> list[Array]:
    """The best local keys of each query, ascending, -1 after them: [B, Q, columns], and their ranks if asked for.

    `arrays`: q [B, Q, H, D], pages [P, page, D], weights [B, Q, H] float32, last visible local positions [B, Q]
    int32 (also outside of the local keys), of quantized keys their scales, and, if paged, the page table. The columns
    are `top_k` up to whole lanes.

    Scales of fp8 are [B, S], in the order of the positions. Codes and scales of fp4 have their channels before their
    keys: pages [P, D/2, page] and [P, D/32, page], or, without a page table, [B, D/2, S] and [B, D/32, S].
    """
    q_BQHD, pages_PSD, weights_BQH, positions_BQ, *more = arrays
    scales, page_table = (more[:1], more[1:]) if static.kind != "full" else ([], more)
    tiles, heads = static.tiles, static.heads
    batch, queries = positions_BQ.shape
    channels = q_BQHD.shape[-1]
    blocks, query_blocks = pl.cdiv(batch, tiles.sequences), pl.cdiv(queries, tiles.queries)
    missing = blocks * tiles.sequences - batch, query_blocks * tiles.queries - queries
    local_keys = static.pages * tiles.page

    def pad(array: Array, fill: int) -> Array:
        widths = ((0, missing[0]), (0, missing[1]), *((0, 0),) * (array.ndim - 2))
        return jnp.pad(array, widths, constant_values=fill)

    positions = pad(jnp.clip(positions_BQ, -1, local_keys - 1), -1)
    positions = positions.reshape(blocks, tiles.sequences, query_blocks, tiles.queries)
    visible = jnp.swapaxes(jnp.max(positions, axis=-1) + 1, 1, 2)
    rounds = (jnp.max(visible, axis=-1) + (tiles.round - 1)) // tiles.round
    rows = tiles.rows // tiles.sequences
    padded_rows = pl.cdiv(tiles.rows, SUBLANES) * SUBLANES
    positions = jnp.swapaxes(positions[..., :rows], 1, 2).reshape(blocks, query_blocks, tiles.rows, 1)
    q = pad(q_BQHD, 0).reshape(-1, query_blocks, tiles.queries, heads, channels)
    q = jnp.swapaxes(q, 2, 3).reshape(-1, query_blocks, heads * tiles.queries, channels)
    weights = pad(weights_BQH, 0).reshape(-1, query_blocks, tiles.queries, heads)

    specs = [
        pl.BlockSpec((tiles.sequences, 1, *q.shape[2:]), lambda b, n, *_: (b, n, 0, 0)),
        pl.BlockSpec((tiles.sequences, 1, *weights.shape[2:]), lambda b, n, *_: (b, n, 0, 0)),
        pl.BlockSpec((1, 1, tiles.rows, 1), lambda b, n, *_: (b, n, 0, 0)),
        *[pl.BlockSpec(memory_space=pl.ANY)] * (1 + len(scales)),
    ]
    if static.kind == "fp8":
        scales = [_scales_by_round(tiles, jnp.pad(scales[0], ((0, missing[0]), (0, 0))))]
    operands = [q, weights, positions, pages_PSD, *scales]
    key_rows = (tiles.columns, channels)
    scale_rows = 1
    if static.kind == "fp4":
        key_rows, scale_rows = (channels // 2, tiles.columns), channels // FP4_BLOCK
    if page_table:
        table = jnp.pad(page_table[0].astype(jnp.int32), ((0, missing[0]), (0, 0)))
        table = table.reshape(blocks, tiles.sequences, -1)
        operands.insert(0, table)
        block = pl.BlockSpec((1, *table.shape[1:]), lambda b, n, *_: (b, 0, 0), memory_space=pltpu.SMEM)
        specs.insert(0, block)
    key_bytes = math.prod(key_rows) // tiles.columns * pages_PSD.dtype.itemsize
    columns = pl.cdiv(static.top_k, LANES) * LANES
    block = (1, 1, padded_rows, columns)
    result = result_like(positions_BQ, (blocks, query_blocks, *block[2:]), jnp.int32)
    results = pl.pallas_call(
        functools.partial(_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks, query_blocks),
            in_specs=specs,
            out_specs=[pl.BlockSpec(block, lambda b, n, *_: (b, n, 0, 0))] * (2 if with_ranks else 1),
            scratch_shapes=[
                *([] if with_ranks else [pltpu.VMEM(block, jnp.int32)]),
                pltpu.VMEM((2, tiles.sequences, *key_rows), pages_PSD.dtype),
                *[pltpu.VMEM((2, tiles.sequences, scale_rows, tiles.columns), a.dtype) for a in scales],
                pltpu.VMEM((padded_rows, tiles.columns), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[result] * (2 if with_ranks else 1),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=batch * queries * local_keys * heads * (2 * channels + 3),
            transcendentals=0,
            bytes_accessed=batch * query_blocks * local_keys * key_bytes,
        ),
        interpret=interpret,
        name="index_select",
    )(visible.reshape(-1), rounds.reshape(-1), *operands)

    def per_query(array: Array) -> Array:
        array = array[:, :, : tiles.rows].reshape(blocks, query_blocks, tiles.sequences, rows, columns)
        return jnp.swapaxes(array, 1, 2).reshape(-1, query_blocks * rows, columns)[:batch, :queries]

    return [per_query(array) for array in results]


def _merge_kernel(
    top_k: int, new_ranks_ref: Any, new_indices_ref: Any, indices_ref: Any, ranks_ref: Any
) -> None:
    shard = pl.program_id(1)

    @pl.when(shard == 0)
    def _() -> None:
        ranks_ref[...] = jnp.full(ranks_ref.shape, ABSENT, jnp.int32)
        indices_ref[...] = jnp.full(indices_ref.shape, -1, jnp.int32)

    compact.update(ranks_ref, indices_ref, (slice(None),), new_ranks_ref[0], new_indices_ref[0], top_k)

    @pl.when(shard == pl.num_programs(1) - 1)
    def _() -> None:
        indices_ref[...] = jnp.where(ranks_ref[...] == ABSENT, -1, indices_ref[...])


def merge_shards(ranks_NRK: Array, indices_NRK: Array, top_k: int, interpret: Any) -> Array:
    """The best of the candidates of N shards, in the order of their positions, for each of R rows: [R, K].

    R is a multiple of 8, K of 128.
    """
    shards, rows, columns = ranks_NRK.shape
    candidates = pl.BlockSpec((1, SUBLANES, columns), lambda r, n: (n, r, 0))
    return pl.pallas_call(
        functools.partial(_merge_kernel, top_k),
        grid=(rows // SUBLANES, shards),
        in_specs=[candidates, candidates],
        out_specs=pl.BlockSpec((SUBLANES, columns), lambda r, n: (r, 0)),
        scratch_shapes=[pltpu.VMEM((SUBLANES, columns), jnp.int32)],
        out_shape=result_like(indices_NRK, (rows, columns), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="index_select_merge",
    )(ranks_NRK, indices_NRK)
