"""Pallas TPU kernels of the gated delta rule over a sequence: forward, segment map and backward.

Grid (batch, block of heads, chunk), the chunks in order: the state of a block of heads stays in vector memory
from the first chunk to the last. The arrays have their heads before their tokens, [B, H, T, K], which is how
XLA lays [B, T, H, K] out on TPU when it may choose: the transpose around the kernels moves nothing. They write
nothing but their results; tokens beyond T are read as whatever the block holds and made neutral.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying, result_like
from pallas_kernels.delta_rule import _chunk
from pallas_kernels.delta_rule.shapes import CHUNK_SIZE

LANES = 128
"""Width of a vector register: the last dimension of every operand is a multiple of it."""

_PARTS = LANES // CHUNK_SIZE
"""Chunks whose scalars share one row of lanes. Shifts and masks pick among them: the compiler has them on every
chip, where it asks for the chip before it divides integers."""

_PARTS_SHIFT = _PARTS.bit_length() - 1

_VMEM_LIMIT = 48 * 2**20
"""Bytes of vector memory a kernel may use; the smallest of the chips compiled for has 64 MiB."""


class Options(NamedTuple):
    """What is fixed when the kernel is traced."""

    boundaries: bool
    """Also write the state after every chunk."""
    interpret: Any
    """Passed to `pallas_call`: False on a TPU, an `InterpretParams` elsewhere."""


def heads_per_block(heads: int) -> int:
    """All heads up to 16, else 8: the second-last dimension of a block is whole or a multiple of 8."""
    return heads if heads <= 16 else 8


class _Operand(NamedTuple):
    array: Any
    block: tuple[int, ...]
    index: Callable[..., tuple[Any, ...]]


class _Grid(NamedTuple):
    """Sizes of one call, and the blocks that its operands are cut into."""

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    backward: bool = False

    @property
    def block_heads(self) -> int:
        return heads_per_block(self.heads)

    def heads_here(self) -> Any:
        """Heads of this program's block that exist: one that does not holds anything, and must not meet another."""
        if self.heads % self.block_heads == 0:
            return self.block_heads
        return jnp.minimum(self.block_heads, self.heads - pl.program_id(1) * self.block_heads)

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.tokens, CHUNK_SIZE)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, pl.cdiv(self.heads, self.block_heads), self.chunks

    def chunk(self, n: Any) -> Any:
        """The chunk at step n of the grid's last axis."""
        return self.chunks - 1 - n if self.backward else n

    def per_token(self, array: Any) -> _Operand:
        """[B, H, T, K or V]."""
        block = (1, self.block_heads, CHUNK_SIZE, array.shape[-1])
        return _Operand(array, block, lambda b, h, n, *_: (b, h, self.chunk(n), 0))

    def scalars(self, array: Any) -> _Operand:
        """[B, H, T] with T padded to whole lanes; a block holds the tokens of LANES / CHUNK_SIZE chunks."""
        block = (1, self.block_heads, LANES)
        return _Operand(array, block, lambda b, h, n, *_: (b, h, self.chunk(n) >> _PARTS_SHIFT))

    def reset(self, array: Any) -> _Operand:
        """[B, 1, T] with T padded to whole lanes."""
        return _Operand(array, (1, 1, LANES), lambda b, h, n, *_: (b, 0, self.chunk(n) >> _PARTS_SHIFT))

    def state(self, array: Any) -> _Operand:
        """[B, H, K, V], the same block at every chunk."""
        return _Operand(array, (1, self.block_heads, *array.shape[2:]), lambda b, h, n, *_: (b, h, 0, 0))

    def boundary(self, array: Any, before: bool = False) -> _Operand:
        """[B, chunks, H, K, V]: the state after the chunk, or before it (the first chunk reads its own)."""

        def index(b: Any, h: Any, n: Any, *_: Any) -> tuple[Any, ...]:
            chunk = self.chunk(n)
            return b, jnp.maximum(chunk - 1, 0) if before else chunk, h, 0, 0

        return _Operand(array, (1, 1, self.block_heads, *array.shape[3:]), index)


def _call(
    name: str,
    kernel: Callable[..., None],
    grid: _Grid,
    lengths_B: Array,
    inputs: Mapping[str, _Operand],
    outputs: Mapping[str, _Operand],
    interpret: Any,
) -> dict[str, Array]:
    """`pallas_call` with operands by name; the kernel gets the lengths and one dictionary of references."""

    def body(lengths_ref: Any, *refs: Any) -> None:
        kernel(lengths_ref, dict(zip((*inputs, *outputs), refs, strict=True)))

    def specs(operands: Mapping[str, _Operand]) -> list[pl.BlockSpec]:
        return [pl.BlockSpec(x.block, x.index) for x in operands.values()]

    marked = match_varying(lengths_B, *(x.array for x in inputs.values()))
    results = pl.pallas_call(
        body,
        out_shape=[result_like(marked[0], x.array.shape, x.array.dtype) for x in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid.grid,
            in_specs=specs(inputs),
            out_specs=specs(outputs),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        interpret=interpret,
        name=name,
    )(*marked)
    return dict(zip(outputs, results, strict=True))


def _neutral_from(x: Array, left: Any) -> Array:
    """Zero from row `left` on. A select, not a product: what lies there may be NaN."""
    token = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(token < left, x, jnp.zeros_like(x))


def _column_of(ref: Any, head: Any, chunk: Any) -> Array:
    """The chunk's values [C, 1] of one row of [1, H, LANES]."""
    row = ref[0, pl.ds(head, 1)].astype(jnp.float32)
    part = row[:, :CHUNK_SIZE]
    for i in range(1, _PARTS):
        here = (chunk & (_PARTS - 1)) == i
        part = jnp.where(here, row[:, i * CHUNK_SIZE : (i + 1) * CHUNK_SIZE], part)
    return _chunk.to_column(part)


def _for_heads(heads: Any, pairs: int, body: Callable[[list[tuple[Any, Any]]], None]) -> None:
    """`body` of some pairs of heads at a time; where there are not enough the last head stands in for those missing,
    and all write the same results, computed from what was read before."""

    def of_pairs(i: Any, carry: None) -> None:
        first = 2 * pairs * i
        body(
            [
                (jnp.minimum(first + j, heads - 1), jnp.minimum(first + j + 1, heads - 1))
                for j in range(0, 2 * pairs, 2)
            ]
        )
        return carry

    # A shift: `heads` may be traced, and the compiler asks for the chip before it divides integers.
    trips = (heads + (2 * pairs - 1)) >> ((2 * pairs).bit_length() - 1)
    jax.lax.fori_loop(0, trips, of_pairs, None)


def _below_each_other(read: Callable[[Any], Array], pair: tuple[Any, ...]) -> Array:
    return jnp.concatenate([read(head) for head in pair], axis=0)


def _chunk_inputs(
    refs: Mapping[str, Any], pair: tuple[Any, ...], chunk: Any, left: Any
) -> tuple[Array | None, Array, Array, Array, Array]:
    """A pair's q, k, v, log_decay and beta in float32, the heads below each other, neutral from token `left` on."""

    def tokens(name: str) -> Array:
        return _below_each_other(
            lambda head: _neutral_from(refs[name][0, head].astype(jnp.float32), left), pair
        )

    # -inf is a valid decay, but not a valid addend: a select's product with it is NaN.
    log_decay = jnp.maximum(tokens("g"), jnp.float32(_chunk.SMALLEST_LOG_DECAY))
    if "reset" in refs:
        reset = _below_each_other(lambda _: _column_of(refs["reset"], 0, chunk), pair) > 0.0
        log_decay = jnp.where(reset, jnp.float32(_chunk.SMALLEST_LOG_DECAY), log_decay)
    beta = _below_each_other(lambda head: _neutral_from(_column_of(refs["beta"], head, chunk), left), pair)
    return tokens("q") if "q" in refs else None, tokens("k"), tokens("v"), log_decay, beta


def _is_split(refs: Mapping[str, Any]) -> bool:
    """Whether products may be rounded to 16 bits: where inputs of 8 went in."""
    return all(refs[name].dtype == jnp.bfloat16 for name in "qkv" if name in refs)


def _forward_kernel(grid: _Grid, as_map: bool, lengths_ref: Any, refs: dict[str, Any]) -> None:
    b, n = pl.program_id(0), pl.program_id(2)
    left = lengths_ref[b] - n * CHUNK_SIZE
    # The final state's block stays in place over the chunks: it is the running state.
    state_ref = refs["final"]

    @pl.when(n == 0)
    def _start() -> None:
        if as_map:
            shape = (grid.key_dim, grid.key_dim + grid.value_dim)
            row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
            identity = jnp.where(row == column, jnp.float32(1), jnp.float32(0))
            for head in range(grid.block_heads):
                state_ref[0, head] = identity
        else:
            state_ref[...] = refs["initial"][...]

    def advance(heads: list[tuple[Any, Any]]) -> None:
        pairs = []
        for pair in heads:
            q, k, v, log_decay, beta = _chunk_inputs(refs, pair, n, left)
            if as_map:
                v = jnp.concatenate([jnp.zeros((k.shape[0], grid.key_dim), jnp.float32), v], axis=1)
            states = state_ref[0, pair[0]], state_ref[0, pair[1]]
            pairs.append(_chunk.Pair(states, q, k, v, log_decay, beta))
        for pair, (states, o) in zip(heads, _chunk.advance(pairs, _is_split(refs)), strict=True):
            for i, head in enumerate(pair):
                state_ref[0, head] = states[i]
                if o is not None:
                    refs["o"][0, head] = o[i * CHUNK_SIZE : (i + 1) * CHUNK_SIZE].astype(refs["o"].dtype)

    _for_heads(grid.heads_here(), 2 if grid.block_heads > 2 else 1, advance)
    if "boundaries" in refs:
        refs["boundaries"][0] = state_ref[...]


def forward(
    options: Options,
    q_BHTK: Array | None,
    k_BHTK: Array,
    v_BHTV: Array,
    log_decay_BHTK: Array,
    beta_BHT: Array,
    state_BHKV: Array | None,
    lengths_B: Array,
    reset_B1T: Array | None,
) -> tuple[Array | None, Array, Array | None]:
    """Outputs if q is given, final state, and the states after every chunk if asked for.

    Without an initial state the kernel carries the affine map [M | S] in place of the state, [B, H, K, K + V].
    """
    batch, heads, tokens, key_dim = k_BHTK.shape
    grid = _Grid(batch, tokens, heads, key_dim, v_BHTV.shape[-1])
    as_map = state_BHKV is None
    columns = grid.value_dim + (key_dim if as_map else 0)
    state_like = jax.ShapeDtypeStruct((batch, heads, key_dim, columns), jnp.float32)
    inputs = {
        "k": grid.per_token(k_BHTK),
        "v": grid.per_token(v_BHTV),
        "g": grid.per_token(log_decay_BHTK),
        "beta": grid.scalars(beta_BHT),
    }
    outputs = {"final": grid.state(state_like)}
    if q_BHTK is not None:
        inputs["q"] = grid.per_token(q_BHTK)
        outputs["o"] = grid.per_token(jax.ShapeDtypeStruct(v_BHTV.shape, v_BHTV.dtype))
    if state_BHKV is not None:
        inputs["initial"] = grid.state(state_BHKV)
    if reset_B1T is not None:
        inputs["reset"] = grid.reset(reset_B1T)
    if options.boundaries:
        boundaries = jax.ShapeDtypeStruct((batch, grid.chunks, *state_like.shape[1:]), jnp.float32)
        outputs["boundaries"] = grid.boundary(boundaries)
    results = _call(
        "delta_rule_segment_map" if as_map else "delta_rule_forward",
        functools.partial(_forward_kernel, grid, as_map),
        grid,
        lengths_B,
        inputs,
        outputs,
        options.interpret,
    )
    return results.get("o"), results["final"], results.get("boundaries")


def _backward_kernel(grid: _Grid, lengths_ref: Any, refs: dict[str, Any]) -> None:
    b, n = pl.program_id(0), pl.program_id(2)
    chunk = grid.chunk(n)
    left = lengths_ref[b] - chunk * CHUNK_SIZE
    is_first_chunk = chunk == 0
    # The block of the initial state's gradient is the running gradient of the state.
    ct_state_ref = refs["ct_initial"]

    @pl.when(n == 0)
    def _start() -> None:
        ct_state_ref[...] = refs["ct_final"][...]

    if "ct_boundaries" in refs:
        ct_state_ref[...] += refs["ct_boundaries"][0]

    def pull_back(heads: list[tuple[Any, Any]]) -> None:
        (pair,) = heads
        states = tuple(
            jnp.where(is_first_chunk, refs["initial"][0, head], refs["before"][0, 0, head]) for head in pair
        )
        inputs = _chunk.Pair(states, *_chunk_inputs(refs, pair, chunk, left))
        _, pullback = jax.vjp(lambda x: _chunk.advance([x], _is_split(refs))[0], inputs)
        ct_o = _below_each_other(
            lambda head: _neutral_from(refs["ct_o"][0, head].astype(jnp.float32), left), pair
        )
        ((ct_states, *ct_tokens, ct_beta),) = pullback((tuple(ct_state_ref[0, head] for head in pair), ct_o))
        rows = [slice(i * CHUNK_SIZE, (i + 1) * CHUNK_SIZE) for i in range(len(pair))]
        # Where both are one head, its row of beta's gradient is read before it is written, too.
        others = [refs["ct_beta"][0, pl.ds(head, 1)] for head in pair]
        for i, head in enumerate(pair):
            ct_state_ref[0, head] = ct_states[i]
            for name, ct in zip("qkvg", ct_tokens, strict=True):
                # A neutral token still has a gradient towards what it is not.
                ref = refs[f"ct_{name}"]
                ref[0, head] = _neutral_from(ct[rows[i]], left).astype(ref.dtype)
            row = _chunk.to_row(_neutral_from(ct_beta[rows[i]], left))
            lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
            here = (lane & -CHUNK_SIZE) == (chunk & (_PARTS - 1)) * CHUNK_SIZE
            merged = jnp.where(here, jnp.concatenate([row] * _PARTS, axis=1), others[i])
            refs["ct_beta"][0, pl.ds(head, 1)] = merged

    _for_heads(grid.heads_here(), 1, pull_back)


def backward(
    options: Options,
    inputs: tuple[Array, Array, Array, Array, Array, Array],
    lengths_B: Array,
    reset_B1T: Array | None,
    boundaries_BNHKV: Array,
    ct_o_BHTV: Array,
    ct_final_BHKV: Array,
    ct_boundaries_BNHKV: Array | None,
) -> tuple[Array, ...]:
    """Gradients to q, k, v, log_decay, beta and the initial state, from the states at the chunk boundaries."""
    q_BHTK, k_BHTK, v_BHTV, log_decay_BHTK, beta_BHT, state_BHKV = inputs
    batch, heads, tokens, key_dim = k_BHTK.shape
    grid = _Grid(batch, tokens, heads, key_dim, v_BHTV.shape[-1], backward=True)
    operands = {
        "q": grid.per_token(q_BHTK),
        "k": grid.per_token(k_BHTK),
        "v": grid.per_token(v_BHTV),
        "g": grid.per_token(log_decay_BHTK),
        "beta": grid.scalars(beta_BHT),
        "initial": grid.state(state_BHKV),
        "before": grid.boundary(boundaries_BNHKV, before=True),
        "ct_o": grid.per_token(ct_o_BHTV),
        "ct_final": grid.state(ct_final_BHKV),
    }
    if reset_B1T is not None:
        operands["reset"] = grid.reset(reset_B1T)
    if ct_boundaries_BNHKV is not None:
        operands["ct_boundaries"] = grid.boundary(ct_boundaries_BNHKV)
    outputs = {
        **{
            f"ct_{name}": x._replace(array=jax.typeof(x.array))
            for name, x in operands.items()
            if name in "qkvg"
        },
        "ct_beta": grid.scalars(jax.typeof(beta_BHT)),
        "ct_initial": grid.state(jax.typeof(state_BHKV)),
    }
    kernel = functools.partial(_backward_kernel, grid)
    results = _call("delta_rule_backward", kernel, grid, lengths_B, operands, outputs, options.interpret)
    return tuple(results[f"ct_{name}"] for name in ("q", "k", "v", "g", "beta", "initial"))
