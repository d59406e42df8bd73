"""Mosaic GPU kernels for the gradient of the gated delta rule over a sequence.

With S' the decayed state, S the state after the token, e = v - S'^T k, u = beta e, and G the gradient of S, per
token and backwards in time:

    G <- G + q ct_o^T;   ct_u = G^T k;   ct_e = beta ct_u;   G <- diag(exp(log_decay)) (G - k ct_e^T)
    ct_q = S ct_o;   ct_k = G u - S' ct_e;   ct_v = ct_e;   ct_beta = ct_u . e

ct_u mixes the rows of G, but once it is known neither recurrence mixes rows. So there are three kernels: one
holds columns of G and goes backwards for ct_u, one holds rows of S and goes forwards, one holds rows of G and
goes backwards; all sums stay within a warp and there is no partial result.

The gradient of log_decay is A_t, the sum over columns of S' times its gradient. S and G meet only at the ends of
chunks, where the states were kept; within a chunk A_t = A_t+1 + q ct_q - k (G u) - k (S' ct_e).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._typing import Array
from pallas_kernels.delta_rule import _gpu_walk, _inputs
from pallas_kernels.delta_rule._gpu_sequence import PARAMETERS
from pallas_kernels.delta_rule._gpu_step import (
    COLUMNS,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    STATE,
    load,
    over_columns,
    over_rows,
    store,
    total,
)
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE

# Rows of the state with all their columns: a thread holds four neighbouring columns of two rows in every 32.
_ROWS_OF_STATE = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 32), (ROWS // 4, 32), (2, 4))), warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1
)
_EACH_ROW = _ROWS_OF_STATE.reduce(1)
_EACH_COLUMN = _ROWS_OF_STATE.reduce(0)


def _across(x_R: Array, columns: int) -> Array:
    """[R] -> [R, V]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_R, (ROWS, columns), (0,)), _ROWS_OF_STATE)


def _down(x_V: Array) -> Array:
    """[V] -> [R, V]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x_V, (ROWS, *x_V.shape), (1,)), _ROWS_OF_STATE)


def _row_sums(x_RV: Array) -> Array:
    """[R, V] -> [R]."""
    return plgpu.layout_cast(jnp.sum(x_RV, axis=1), _EACH_ROW)


def _call(
    body: Callable[[dict[str, Any], dict[str, Any], Any, dict[str, Any]], None],
    near: dict[str, Array],
    widths: dict[str, int],
    wide: dict[str, int],
    others: dict[str, Array],
    results: dict[str, tuple[int, ...]],
    grid: tuple[int, int, int],
    interpret: Any,
) -> dict[str, Array]:
    """A kernel on operands and float32 results by name."""
    names = (*near, *others, *results)

    def kernel(*refs: Any) -> None:
        body(dict(zip(names, refs, strict=False)), *refs[len(names) :])

    kernel.__name__ = body.__name__
    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results.values()],
        scratch_types=[
            *_gpu_walk.buffers(near, widths),
            {name: plgpu.SMEM((_gpu_walk.GROUP, width), jnp.float32) for name, width in wide.items()},
        ],
        compiler_params=PARAMETERS,
        grid=grid,
        grid_names=("part", "head", "row"),
        interpret=interpret,
    )
    return dict(zip(results, run(*near.values(), *others.values()), strict=True))


def _sources(refs: dict[str, Any], names: Any, parts: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Where `walk` finds the tokens of this thread block's row and head, and of its part where there is one."""
    b, h = jax.lax.axis_index("row"), jax.lax.axis_index("head")

    def source(name: str) -> Callable[[Any], Any]:
        if name == "beta":
            return lambda t: refs[name].at[b, h, t]
        if name == "keep":
            return lambda t: refs[name].at[b, t]
        if name in parts:
            return lambda t: refs[name].at[b, t, h, parts[name]]
        return lambda t: refs[name].at[b, t, h]

    return {name: source(name) for name in names}


def _ct_updates(tokens: dict[str, Array], others: dict[str, Array], interpret: Any) -> tuple[Array, Array]:
    """ct_u [B, T, H, V] of the valid tokens, and the gradient of the initial state."""
    near = {name: x for name, x in tokens.items() if name != "errors"}
    batch, count, heads, key_dim = near["q"].shape
    value_dim = near["ct_o"].shape[-1]

    def delta_rule_backward_updates(refs: Any, buffers: Any, barriers: Any, wide: Any) -> None:
        b, h = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        values = pl.ds(jax.lax.axis_index("part") * COLUMNS, COLUMNS)

        def one_token(t: Any, slot: Any, i: Any, ct_KV: Array) -> Array:
            q_K, k_K, decay_K = (load(wide[name].at[i], PER_ROW) for name in ("q", "k", "decay"))
            k_KV = over_columns(k_K, COLUMNS)
            ct_o_V = load(buffers["ct_o"].at[slot, i], PER_COLUMN)
            ct_KV = ct_KV + over_columns(q_K, COLUMNS) * over_rows(ct_o_V, key_dim)
            ct_update_V = total(ct_KV * k_KV)
            store(refs["ct_u"].at[b, t, h, values], ct_update_V)
            ct_error_V = buffers["beta"][slot, i] * ct_update_V
            return over_columns(decay_K, COLUMNS) * (ct_KV - k_KV * over_rows(ct_error_V, key_dim))

        def at_chunk(n: Any, ct_KV: Array) -> Array:
            return ct_KV + load(refs["ct_boundaries"].at[b, n, h, :, values], STATE)

        ct_KV = _gpu_walk.walk(
            _sources(refs, near, {"ct_o": values}),
            buffers,
            barriers,
            wide,
            refs["lengths"][b],
            count,
            one_token,
            load(refs["ct_final"].at[b, h, :, values], STATE),
            at_chunk if "ct_boundaries" in refs else None,
            backward=True,
        )
        store(refs["ct_initial"].at[b, h, :, values], ct_KV)

    kept = ("lengths", "ct_final", "ct_boundaries")
    found = _call(
        delta_rule_backward_updates,
        near,
        {"q": key_dim, "k": key_dim, "g": key_dim, "ct_o": COLUMNS},
        {"q": key_dim, "k": key_dim, "decay": key_dim},
        {name: x for name, x in others.items() if name in kept},
        {"ct_u": (batch, count, heads, value_dim), "ct_initial": (batch, heads, key_dim, value_dim)},
        (value_dim // COLUMNS, heads, batch),
        interpret,
    )
    return found["ct_u"], found["ct_initial"]


def _reads(tokens: dict[str, Array], others: dict[str, Array], interpret: Any) -> tuple[Array, Array]:
    """ct_q and S' ct_e of the valid tokens, [B, T, H, K]."""
    near = {name: x for name, x in tokens.items() if name != "q"}
    batch, count, heads, key_dim = near["k"].shape
    value_dim = near["ct_o"].shape[-1]

    def delta_rule_backward_reads(refs: Any, buffers: Any, barriers: Any, wide: Any) -> None:
        b, h = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        rows = pl.ds(jax.lax.axis_index("part") * ROWS, ROWS)

        def one_token(t: Any, slot: Any, i: Any, state_RV: Array) -> Array:
            k_R, decay_R = (load(wide[name].at[i], _EACH_ROW) for name in ("k", "decay"))
            ct_o_V, error_V, ct_u_V = (
                load(buffers[name].at[slot, i], _EACH_COLUMN) for name in ("ct_o", "errors", "ct_u")
            )
            beta = buffers["beta"][slot, i]
            state_RV = _across(decay_R, value_dim) * state_RV
            store(refs["read"].at[b, t, h, rows], _row_sums(state_RV * _down(beta * ct_u_V)))
            state_RV = state_RV + _across(k_R, value_dim) * _down(beta * error_V)
            store(refs["ct_q"].at[b, t, h, rows], _row_sums(state_RV * _down(ct_o_V)))
            return state_RV

        _gpu_walk.walk(
            _sources(refs, near, {"k": rows, "g": rows}),
            buffers,
            barriers,
            wide,
            refs["lengths"][b],
            count,
            one_token,
            load(refs["initial"].at[b, h, rows], _ROWS_OF_STATE),
        )

    found = _call(
        delta_rule_backward_reads,
        near,
        {"k": ROWS, "g": ROWS, "ct_o": value_dim, "errors": value_dim, "ct_u": value_dim},
        {"k": ROWS, "decay": ROWS},
        {name: others[name] for name in ("lengths", "initial")},
        {"ct_q": (batch, count, heads, key_dim), "read": (batch, count, heads, key_dim)},
        (key_dim // ROWS, heads, batch),
        interpret,
    )
    return found["ct_q"], found["read"]


def _writes(tokens: dict[str, Array], others: dict[str, Array], interpret: Any) -> tuple[Array, Array]:
    """G u of the valid tokens, [B, T, H, K], and A after the last token of every chunk, [B, chunks, H, K]."""
    near = tokens
    batch, count, heads, key_dim = near["k"].shape
    value_dim = near["ct_o"].shape[-1]

    def delta_rule_backward_writes(refs: Any, buffers: Any, barriers: Any, wide: Any) -> None:
        b, h = jax.lax.axis_index("row"), jax.lax.axis_index("head")
        rows = pl.ds(jax.lax.axis_index("part") * ROWS, ROWS)

        def one_token(t: Any, slot: Any, i: Any, ct_RV: Array) -> Array:
            q_R, k_R, decay_R = (load(wide[name].at[i], _EACH_ROW) for name in ("q", "k", "decay"))
            ct_o_V, error_V, ct_u_V = (
                load(buffers[name].at[slot, i], _EACH_COLUMN) for name in ("ct_o", "errors", "ct_u")
            )
            beta = buffers["beta"][slot, i]
            ct_RV = ct_RV + _across(q_R, value_dim) * _down(ct_o_V)
            store(refs["written"].at[b, t, h, rows], _row_sums(ct_RV * _down(beta * error_V)))
            ct_RV = ct_RV - _across(k_R, value_dim) * _down(beta * ct_u_V)
            return _across(decay_R, value_dim) * ct_RV

        def at_chunk(n: Any, ct_RV: Array) -> Array:
            if "ct_boundaries" in refs:
                ct_RV = ct_RV + load(refs["ct_boundaries"].at[b, n, h, rows], _ROWS_OF_STATE)
            state_RV = load(refs["boundaries"].at[b, n, h, rows], _ROWS_OF_STATE)
            store(refs["at_end"].at[b, n, h, rows], _row_sums(ct_RV * state_RV))
            return ct_RV

        _gpu_walk.walk(
            _sources(refs, near, {"q": rows, "k": rows, "g": rows}),
            buffers,
            barriers,
            wide,
            refs["lengths"][b],
            count,
            one_token,
            load(refs["ct_final"].at[b, h, rows], _ROWS_OF_STATE),
            at_chunk,
            backward=True,
        )

    chunks = pl.cdiv(count, CHUNK_SIZE)
    found = _call(
        delta_rule_backward_writes,
        near,
        {"q": ROWS, "k": ROWS, "g": ROWS, "ct_o": value_dim, "errors": value_dim, "ct_u": value_dim},
        {"q": ROWS, "k": ROWS, "decay": ROWS},
        {name: x for name, x in others.items() if name != "initial"},
        {"written": (batch, count, heads, key_dim), "at_end": (batch, chunks, heads, key_dim)},
        (key_dim // ROWS, heads, batch),
        interpret,
    )
    return found["written"], found["at_end"]


def backward(
    tokens: dict[str, Array], others: dict[str, Array], interpret: Any
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Gradients of q, k, v, log_decay, beta [B, T, H] and the initial state, all float32.

    Args:
      tokens: "q", "k", "g" and "beta" as `_gpu_sequence.forward` takes them, "keep" if there are resets, the
        cotangent "ct_o" of its output, and its "errors".
      others: "lengths", the "initial" state, the "boundaries" after every chunk, the cotangents "ct_final" and,
        if any, "ct_boundaries".
      interpret: passed to the kernels.
    """
    q_BTHK, k_BTHK, log_decay_BTHK, errors_BTHV = (tokens[name] for name in ("q", "k", "g", "errors"))
    ct_u_BTHV, ct_initial = _ct_updates(tokens, others, interpret)
    tokens = {**tokens, "ct_u": ct_u_BTHV}
    ct_q, read = _reads(tokens, others, interpret)
    written, at_end_BNHK = _writes(tokens, others, interpret)

    batch, count, heads, key_dim = k_BTHK.shape
    valid_BT11 = _inputs.valid_tokens(others["lengths"], count)[:, :, None, None]

    def only_valid(x: Array) -> Array:
        # A select, not a product: what no kernel wrote may be NaN.
        return jnp.where(valid_BT11, x.astype(jnp.float32), jnp.float32(0))

    ct_q, read, written, ct_u, errors, q, k, log_decay = (
        only_valid(x) for x in (ct_q, read, written, ct_u_BTHV, errors_BTHV, q_BTHK, k_BTHK, log_decay_BTHK)
    )
    beta_BTH1 = jnp.swapaxes(tokens["beta"], 1, 2)[:, :count, :, None]
    change_BTHK = q * ct_q - k * (written + read)
    chunks = at_end_BNHK.shape[1]
    padded = jnp.pad(change_BTHK, ((0, 0), (0, chunks * CHUNK_SIZE - count), (0, 0), (0, 0)))
    padded = padded.reshape(batch, chunks, CHUNK_SIZE, heads, key_dim)
    ct_log_decay = jax.lax.cumsum(padded, axis=2, reverse=True) + at_end_BNHK[:, :, None]
    ct_log_decay = ct_log_decay.reshape(batch, -1, heads, key_dim)[:, :count]
    # Where nothing is left of the state the gradient is zero, not a sum that cancels.
    some = jnp.exp(log_decay) > 0
    if "keep" in tokens:
        some = some & (tokens["keep"][:, :count, None, None] > 0)
    ct_log_decay = jnp.where(some & valid_BT11, ct_log_decay, jnp.zeros_like(ct_log_decay))
    ct_v = only_valid(beta_BTH1 * ct_u)
    return ct_q, written - read, ct_v, ct_log_decay, jnp.sum(ct_u * errors, axis=-1), ct_initial
