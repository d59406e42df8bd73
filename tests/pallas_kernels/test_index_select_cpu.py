"""The portable form on a CPU: its sizes change neither sets nor bits, and what memory its compiled programs take."""

import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import index_select
from pallas_kernels.index_select import _cpu_select, xla
from pallas_kernels.index_select._cpu_select import NO_INDEX, Sizes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADS, CHANNELS, TOP_K = 32, 128, 2048


def problem(seed: int, batch: int, queries: int, heads: int, keys: int) -> tuple[jax.Array, ...]:
    """Even seeds: small integers, so that scores tie. The last keys are NaN, and no query sees them."""
    rng = np.random.default_rng(seed)
    shapes = ((batch, queries, heads, 16), (batch, keys, 16), (batch, queries, heads))
    arrays = [rng.standard_normal(s) if seed % 2 else rng.integers(-2, 3, s) for s in shapes]
    q, k, weights = (jnp.asarray(a, jnp.float32) for a in arrays)
    positions = jnp.asarray(rng.integers(-1, keys - 30, (batch, queries)), jnp.int32)
    return q, k.at[:, keys - 30 :].set(jnp.nan), weights, positions


@functools.partial(jax.jit, static_argnums=4)
def expected_candidates(q: Any, k: Any, weights: Any, positions: Any, top_k: int) -> tuple[jax.Array, ...]:
    """Scores and indices [B, Q, top_k] from the scores of all keys."""
    visible = jnp.arange(k.shape[1], dtype=jnp.int32) <= positions[..., None]
    scores, indices = jax.lax.top_k(
        xla.rankable(xla.tile_scores_rowwise(q, k, weights, True), visible), top_k
    )
    return scores, jnp.where(jnp.isneginf(scores), NO_INDEX, indices)


CASES = [
    # Steps that end with the cache, a block that is not full, and many turns of ranking.
    ((1, 13, 32, 1300, 50), Sizes(5, 2560, 32768), None),
    # Several sequences of a query, one step to a turn.
    ((3, 1, 32, 1100, 9), Sizes(4, 256, 256), None),
    # Several queries to a product, fewer keys than a piece.
    pytest.param((2, 9, 4, 200, 20), Sizes(1, 65536, 32768), None, marks=pytest.mark.slow),
    # Pages of a whole step and of less, in any order.
    ((2, 5, 32, 2048, 40), Sizes(2, 2048, 1024), 512),
    pytest.param((2, 5, 32, 1024, 40), Sizes(8, 65536, 512), 32, marks=pytest.mark.slow),
    pytest.param((2, 2, 32, 1000, 40), Sizes(8, 65536, 32768), 40, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("shape", "sizes", "page"), CASES)
def test_sizes_change_no_bit(shape: tuple[int, ...], sizes: Sizes, page: int | None) -> None:
    batch, _, _, keys, top_k = shape

    @jax.jit
    def select(q: Any, k: Any, weights: Any, positions: Any, table: Any) -> tuple[jax.Array, ...]:
        return _cpu_select.select(
            q, k, weights, positions, table, jnp.int32(0), top_k, True, lambda *found: found, sizes
        )

    for seed in range(4):
        q, k, weights, positions = problem(seed, *shape[:-1])
        held, table = k, None
        if page is not None:
            order = np.random.default_rng(seed).permutation(batch * keys // page)
            held = jnp.zeros((batch * keys // page, page, 16), k.dtype).at[order].set(k.reshape(-1, page, 16))
            # The page of keys that nobody sees has no number yet.
            unseen = np.arange(keys // page) * page > np.asarray(positions).max(axis=1, keepdims=True)
            table = jnp.asarray(np.where(unseen, -1, order.reshape(batch, -1)), jnp.int32)
        found = select(q, held, weights, positions, table)
        for got, wanted in zip(found, expected_candidates(q, k, weights, positions, top_k), strict=True):
            np.testing.assert_array_equal(got, wanted)


def temporary_bytes(function: Any, queries: int, keys: int, kind: str = "float32") -> int:
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    k = like((1, keys, CHANNELS))
    if kind == "bfloat16":
        k = like((1, keys, CHANNELS), dtype=jnp.bfloat16)
    elif kind != "float32":
        k = jax.eval_shape(functools.partial(index_select.quantize_keys, kind=kind), k)
    positions = jax.ShapeDtypeStruct((1, queries), jnp.int32)
    arguments = like((1, queries, HEADS, CHANNELS)), k, like((1, queries, HEADS)), positions
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def ours(q: Any, k: Any, weights: Any, positions: Any) -> jax.Array:
    return index_select.select(q, k, weights, positions, TOP_K)


@pytest.mark.parametrize("keys", [131072, pytest.param(1048576, marks=pytest.mark.slow)])
def test_a_block_of_queries_takes_less_than_1_percent(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the scores of all keys and `jax.lax.top_k` of them take."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("bench_index_select")
    everything = temporary_bytes(benchmark.all_in_memory, 128, keys)
    assert everything > 4 * 128 * keys
    assert temporary_bytes(ours, 128, keys) < everything / 100


@pytest.mark.parametrize(
    "kind", ["float32", "fp8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bfloat16", "fp4"))]
)
def test_it_does_not_grow_with_the_keys(kind: str) -> None:
    """Keys of fewer bits are converted a step at a time, not all of them before the loop."""
    taken = temporary_bytes(ours, 1, 131072, kind)
    assert taken == temporary_bytes(ours, 1, 1048576, kind)
    # A step of keys, before and after they are transposed, and the scores that are ranked.
    assert taken < 2 * 4 * (512 * CHANNELS + 32768 + TOP_K) + 2**20
