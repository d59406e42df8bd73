"""Mosaic GPU kernel of the gated delta rule over a sequence: outputs and states, or the affine map of a segment.

The recurrence itself, token by token, in float32: one thread block holds 32 columns of one head's state in
registers from the first token to the last. No product of the chunked form is needed, so there is no triangular
system to solve, no exponent that is a difference, and no precision to lose in a matrix unit; a decay of zero and
a reset are plain factors.

What that costs: 8 K V float32 operations per token and head in the vector units, which bounds a call with many
heads, and the latency of one token's sum over rows (within a warp), which bounds a call with few.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._typing import Array
from pallas_kernels.delta_rule import _gpu_walk
from pallas_kernels.delta_rule._gpu_step import (
    COLUMNS,
    PER_COLUMN,
    PER_ROW,
    STATE,
    load,
    over_columns,
    over_rows,
    store,
    total,
)
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE


class Options(NamedTuple):
    """What is fixed when the kernel is traced."""

    boundaries: bool
    """Also write the state after every chunk."""
    errors: bool
    """Also write the error of every token."""
    interpret: Any
    """Passed to the kernel: None on a GPU, an interpreter's parameters elsewhere."""


class Results(NamedTuple):
    """What `forward` writes; None for what was not asked for."""

    o_BTHV: Array | None
    final_BHKV: Array
    boundaries_BNHKV: Array | None
    errors_BTHV: Array | None
    """v - S^T k of the decayed state, float32."""


# Barriers around every store would hold the warps together at every token; `walk` has the two that a group needs.
PARAMETERS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def forward(options: Options, tokens: dict[str, Array], others: dict[str, Array]) -> Results:
    """Outputs if q is given, final state, and the states after every chunk and all errors if asked for.

    Without an initial state the kernel carries the affine map [M | S] in place of the state, [B, H, K, K + V].

    Args:
      options: what to write.
      tokens: "k", "v", "g" (log decays) and, if there are outputs, "q", all [B, T, H, ...] with K a multiple of
        ROWS, V of COLUMNS and T at least GROUP; "beta" [B, H, T] and, if there are resets, "keep" [B, T] (0 where
        the state is reset), float32 and padded to a multiple of 4 tokens.
      others: "lengths" [B], at most T, and the "initial" state in float32. Errors beyond them are not written.
    """
    batch, count, heads, key_dim = tokens["k"].shape
    v_BTHV = tokens["v"]
    value_dim = v_BTHV.shape[-1]
    with_output, as_map = "q" in tokens, "initial" not in others
    map_blocks = key_dim // COLUMNS if as_map else 0
    columns = map_blocks * COLUMNS + value_dim
    like = jax.ShapeDtypeStruct
    results = {"final": like((batch, heads, key_dim, columns), jnp.float32)}
    if with_output:
        results["o"] = like(v_BTHV.shape, v_BTHV.dtype)
    if options.boundaries:
        chunks = pl.cdiv(count, CHUNK_SIZE)
        results["boundaries"] = like((batch, chunks, heads, key_dim, columns), jnp.float32)
    if options.errors:
        results["errors"] = like(v_BTHV.shape, jnp.float32)

    wide_names = ("k", "decay", "q") if with_output else ("k", "decay")
    wide = {name: plgpu.SMEM((_gpu_walk.GROUP, key_dim), jnp.float32) for name in wide_names}
    if with_output:
        wide["own"] = plgpu.SMEM((_gpu_walk.GROUP,), jnp.float32)

    def body(*refs: Any) -> None:
        names = (*tokens, *others, *results)
        near, barriers, wide_refs = refs[len(names) :]
        _kernel(dict(zip(names, refs, strict=False)), near, barriers, wide_refs, count, key_dim, map_blocks)

    body.__name__ = "delta_rule_segment_map" if as_map else "delta_rule_forward"
    widths = {"q": key_dim, "k": key_dim, "g": key_dim, "v": COLUMNS}
    run = plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=[*_gpu_walk.buffers(tokens, widths), wide],
        compiler_params=PARAMETERS,
        grid=(columns // COLUMNS, heads, batch),
        grid_names=("columns", "head", "row"),
        interpret=options.interpret,
    )
    found = dict(zip(results, run(*tokens.values(), *others.values()), strict=True))
    return Results(found.get("o"), found["final"], found.get("boundaries"), found.get("errors"))


def _kernel(
    refs: dict[str, Any],
    near: dict[str, Any],
    barriers: Any,
    wide: dict[str, Any],
    tokens: int,
    key_dim: int,
    map_blocks: int,
) -> None:
    b, h, block = (jax.lax.axis_index(name) for name in ("row", "head", "columns"))
    # The columns of M have no values to write, the others begin after them.
    is_state = block >= map_blocks
    values = pl.ds(jnp.maximum(block - map_blocks, 0) * COLUMNS, COLUMNS)
    here = pl.ds(block * COLUMNS, COLUMNS)
    length = refs["lengths"][b]
    sources = {name: lambda t, name=name: refs[name].at[b, t, h] for name in near}
    sources |= {
        "v": lambda t: refs["v"].at[b, t, h, values],
        "beta": lambda t: refs["beta"].at[b, h, t],
    }
    if "keep" in near:
        sources["keep"] = lambda t: refs["keep"].at[b, t]

    def one_token(t: Any, slot: Any, i: Any, state_KV: Array) -> Array:
        k_KV = over_columns(load(wide["k"].at[i], PER_ROW), COLUMNS)
        decayed_KV = over_columns(load(wide["decay"].at[i], PER_ROW), COLUMNS) * state_KV
        v_V = load(near["v"].at[slot, i], PER_COLUMN)
        if map_blocks:
            v_V = jnp.where(jnp.broadcast_to(is_state, v_V.shape), v_V, jnp.zeros_like(v_V))
        error_V = v_V - total(decayed_KV * k_KV)
        update_V = near["beta"][slot, i] * error_V
        if "errors" in refs:
            store(refs["errors"].at[b, t, h, values], error_V)
        if "o" in refs:
            # o = S^T q of the state after the token, without waiting for it.
            read_V = total(decayed_KV * over_columns(load(wide["q"].at[i], PER_ROW), COLUMNS))
            store(refs["o"].at[b, t, h, values], read_V + wide["own"][i] * update_V)
        return decayed_KV + k_KV * over_rows(update_V, key_dim)

    def at_chunk(n: Any, state_KV: Array) -> Array:
        store(refs["boundaries"].at[b, n, h, :, here], state_KV)
        return state_KV

    if map_blocks:
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (key_dim, COLUMNS), axis, layout=STATE) for axis in range(2)
        )
        ones = plgpu.layout_cast(jnp.ones((key_dim, COLUMNS), jnp.float32), STATE)
        state_KV = jnp.where(row == column + block * COLUMNS, ones, jnp.zeros_like(ones))
    else:
        state_KV = load(refs["initial"].at[b, h, :, values], STATE)
    state_KV = _gpu_walk.walk(
        sources,
        near,
        barriers,
        wide,
        length,
        tokens,
        one_token,
        state_KV,
        at_chunk if "boundaries" in refs else None,
    )
    store(refs["final"].at[b, h, :, here], state_KV)
    if "o" in refs:

        def nothing(t: Any, carry: None) -> None:
            zeros = plgpu.layout_cast(jnp.zeros((COLUMNS,), jnp.float32), PER_COLUMN)
            store(refs["o"].at[b, t, h, values], zeros)
            return carry

        _gpu_walk.loop(length, tokens, nothing, None)
