"""Pallas TPU kernels of the gradient where blocks of queries share a contiguous cache.

Two walks over pairs of a block of queries and a block of keys, which make the logits again from logsumexp. One keeps
the queries' gradient while the keys pass, the other the keys' gradient while the queries pass: every element is one sum
in one order, by no other program, so the bits are the same in every run. Pairs without a selected key are neither
fetched nor multiplied.

    p = exp(logits - logsumexp);   dlogits = scale p (do . v - delta);   delta = sum(do o) - dlogsumexp
    dq = dlogits kv;   dkv = dlogits^T q, and p^T do in the channels of the values
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array
from pallas_kernels._varying import match_varying, result_like
from pallas_kernels.sparse_attention import _tpu_shared as shared
from pallas_kernels.sparse_attention import rows as key_rows

_VMEM_LIMIT = 64 * 2**20
_LARGEST_ROWS = 768
"""Rows (queries times heads) of a block; the gradient holds several arrays of them by keys at a time."""

_ROWS_TO_COLUMNS = (((1,), (0,)), ((), ()))
_OVER_CHANNELS = (((1,), (1,)), ((), ()))
_OVER_ROWS = (((0,), (0,)), ((), ()))


def gradient_options(options: shared.Options, heads: int) -> shared.Options:
    """Those of the forward pass with blocks that leave room for the gradient's arrays."""
    queries = min(options.queries, max(16, _LARGEST_ROWS // heads // 16 * 16))
    keys = options.keys
    while keys > shared.LANES and heads * queries * keys > _LARGEST_ROWS * 512:
        keys //= 2
    return options._replace(queries=queries, keys=keys)


def _products(q_RC: Array, kv_NC: Array) -> tuple[bool, Any, Any]:
    """Whether operands are bfloat16, a product of them, and one of float32 weights with them."""
    exact = q_RC.dtype == jnp.bfloat16 and kv_NC.dtype == jnp.bfloat16
    precision = lax.Precision.DEFAULT if exact else lax.Precision.HIGHEST
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def weighted(weights_RN: Array, other: Array, dimensions: Any) -> Array:
        if not exact:
            return product(weights_RN, other, dimensions)
        # Two bfloat16 numbers hold 16 bits of a weight.
        high_RN = weights_RN.astype(jnp.bfloat16)
        low_RN = (weights_RN - high_RN.astype(jnp.float32)).astype(jnp.bfloat16)
        return product(high_RN, other, dimensions) + product(low_RN, other, dimensions)

    return exact, product, weighted


def _pair(
    options: shared.Options, block: Any, words_ref: Any, q_ref: Any, kv_ref: Any, do_ref: Any, stats_ref: Any
) -> tuple[Any, ...]:
    """Weights p and the gradient of the logits [R, N] of a pair of blocks, and what they are multiplied with."""
    heads, queries, width = q_ref.shape[1:]
    mask_RN, kv_NC, finite_NC = shared.masked_keys(options, heads, block, words_ref, (kv_ref,))
    q_RC = q_ref[0].reshape(heads * queries, width)
    do_RV = do_ref[0].reshape(heads * queries, options.value_dim)
    stats_R2 = stats_ref[0].reshape(heads * queries, 2)
    exact, product, weighted = _products(q_RC, kv_NC)
    if not exact:
        q_RC, kv_NC, finite_NC, do_RV = (a.astype(jnp.float32) for a in (q_RC, kv_NC, finite_NC, do_RV))
    logits_RN = np.float32(options.scale) * product(q_RC, kv_NC, _OVER_CHANNELS)
    p_RN = jnp.where(mask_RN, jnp.exp(logits_RN - stats_R2[:, :1]), np.float32(0))
    dp_RN = product(do_RV, kv_NC[:, : options.value_dim], _OVER_CHANNELS)
    dlogits_RN = np.float32(options.scale) * p_RN * (dp_RN - stats_R2[:, 1:])
    # A key that this row did not select may not be finite.
    dlogits_RN = jnp.where(mask_RN, dlogits_RN, np.float32(0))
    return p_RN, dlogits_RN, q_RC, finite_NC, do_RV, weighted


def _query_kernel(options: shared.Options, held_ref: Any, *refs: Any) -> None:
    *inputs, dq_ref, sums_ref = refs
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)

    @pl.when(held_ref[pl.program_id(0), pl.program_id(1), block] == block)
    def _() -> None:
        _, dlogits_RN, _, finite_NC, _, weighted = _pair(options, block, *inputs)
        sums_ref[...] += weighted(dlogits_RN, finite_NC, _ROWS_TO_COLUMNS)

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        dq_ref[0] = sums_ref[...].reshape(dq_ref.shape[1:]).astype(dq_ref.dtype)


def _key_kernel(options: shared.Options, held_ref: Any, *refs: Any) -> None:
    *inputs, before_ref, dkv_ref = refs
    key_block, query_block = pl.program_id(1), pl.program_id(2)

    @pl.when(query_block == 0)
    def _() -> None:
        dkv_ref[...] = before_ref[...]

    @pl.when(held_ref[pl.program_id(0), key_block, query_block] == query_block)
    def _() -> None:
        p_RN, dlogits_RN, q_RC, _, do_RV, weighted = _pair(options, key_block, *inputs)
        dkv_ref[0] += weighted(dlogits_RN, q_RC, _OVER_ROWS)
        values = dkv_ref.at[0, :, : options.value_dim]
        values[...] += weighted(p_RN, do_RV, _OVER_ROWS)


def _walk(
    options: shared.Options, arrays: tuple[Array, ...], kv_BSC: Array, words_BGQL: Array, dkv_BSC: Array
) -> tuple[Array, Array]:
    """dq [B, H, Q, C] and the sum of dkv with what these queries add, from arrays with their heads first."""
    q_BHQC, do_BHQV, stats_BHQ2 = arrays
    batch, heads, queries, width = q_BHQC.shape
    key_blocks, query_blocks = -(-kv_BSC.shape[1] // options.keys), queries // options.queries
    touched = shared.touched_blocks(options, words_BGQL, key_blocks)
    shift = (shared.WORD_KEYS // options.keys).bit_length() - 1

    def call(kernel: Any, held: Array, keys_first: bool, **arguments: Any) -> Any:
        """Grid (batch, outer, inner); `held` names the inner block in memory."""

        def pair(b: Any, outer: Any, inner: Any, held: Any) -> tuple[Any, Any]:
            inner = jnp.maximum(held[b, outer, inner], 0)
            return (inner, outer) if keys_first else (outer, inner)

        def per_query(size: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, heads, options.queries, size), lambda *at: (at[0], 0, pair(*at)[0], 0))

        def words(*at: Any) -> tuple[Any, ...]:
            query, key = pair(*at)
            return at[0], key >> shift, query, 0

        def per_key(*at: Any) -> tuple[Any, ...]:
            return at[0], pair(*at)[1], 0

        specs = [
            pl.BlockSpec((1, 1, options.queries, shared.LANES), words),
            per_query(width),
            pl.BlockSpec((1, options.keys, width), per_key),
            per_query(options.value_dim),
            per_query(2),
        ]
        inputs = [words_BGQL, q_BHQC, kv_BSC, do_BHQV, stats_BHQ2]
        more, out = [], per_query(width)
        if keys_first:
            more, out = [dkv_BSC], pl.BlockSpec((1, options.keys, width), per_key)
            specs.append(out)
        return pl.pallas_call(
            functools.partial(kernel, options),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(batch, key_blocks, query_blocks) if keys_first else (batch, query_blocks, key_blocks),
                in_specs=specs,
                out_specs=out,
                scratch_shapes=arguments.pop("scratch_shapes", ()),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * batch * queries * heads * kv_BSC.shape[1] * 2 * (width + options.value_dim),
                transcendentals=batch * queries * heads * kv_BSC.shape[1],
                bytes_accessed=batch * query_blocks * kv_BSC.shape[1] * width * kv_BSC.dtype.itemsize,
            ),
            interpret=options.interpret,
            **arguments,
        )(held, *inputs, *more)

    dq_BHQC = call(
        _query_kernel,
        shared.held_blocks(touched, 2),
        False,
        out_shape=result_like(q_BHQC, q_BHQC.shape, q_BHQC.dtype),
        scratch_shapes=[pltpu.VMEM((heads * options.queries, width), jnp.float32)],
        name="sparse_attention_dq",
    )
    dkv_BSC = call(
        _key_kernel,
        shared.held_blocks(jnp.swapaxes(touched, 1, 2), 2),
        True,
        out_shape=result_like(q_BHQC, dkv_BSC.shape, dkv_BSC.dtype),
        # After the scalars and the five arrays of the pair.
        input_output_aliases={6: 0},
        name="sparse_attention_dkv",
    )
    return dq_BHQC, dkv_BSC


def gradients(
    options: shared.Options,
    q_BQHC: Array,
    kv_BSC: Array,
    indices_BQN: Array,
    results: tuple[Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array]:
    """dq and dkv in the dtypes of q and kv; `results` are o in float32 and logsumexp."""
    batch, queries, heads, _ = q_BQHC.shape
    options = gradient_options(options, heads)
    o, logsumexp = results
    do, dlogsumexp = cotangents
    # Whatever comes back for a row without a key stops here.
    empty = jnp.isneginf(logsumexp)
    do = jnp.where(empty[..., None], jnp.zeros((), do.dtype), do)
    q_BQHC = jnp.where(empty[..., None], jnp.zeros((), q_BQHC.dtype), q_BQHC)
    delta = jnp.sum(do.astype(jnp.float32) * o, axis=-1) - dlogsumexp
    stats = jnp.where(empty[..., None], np.float32(0), jnp.stack([logsumexp, delta], axis=-1))
    at_once = shared.queries_at_once(options, batch, queries, kv_BSC.shape[1])
    parts = tuple(key_rows.split_queries(a, at_once, fill) for a, fill in (
        (q_BQHC, 0), (do, 0), (stats, 0), (indices_BQN, -1)
    ))  # fmt: skip

    existing = shared.existing_bits(kv_BSC.shape[1], None, 0)

    def chunk(dkv_BSC: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        *per_query, indices = part
        words_BGQL = shared.selection_bits(indices, kv_BSC.shape[1], options.interpret)
        if existing is not None:
            words_BGQL &= existing
        arrays = tuple(jnp.swapaxes(a, 1, 2) for a in per_query)
        dq_BHQC, dkv_BSC = _walk(options, arrays, kv_BSC, words_BGQL, dkv_BSC)
        return dkv_BSC, jnp.swapaxes(dq_BHQC, 1, 2)

    # Whole blocks, for it is read and written in place.
    keys = kv_BSC.shape[1]
    start = jnp.zeros((batch, -(-keys // options.keys) * options.keys, kv_BSC.shape[2]), jnp.float32)
    dkv, dq = jax.lax.scan(chunk, match_varying(start, q_BQHC)[0], parts)
    return key_rows.join_queries(dq, queries), dkv[:, :keys].astype(kv_BSC.dtype)
