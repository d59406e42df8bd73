"""The TPU kernel of index selection, interpreted: races are errors and untouched memory is NaN."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from safetensors.numpy import load_file

from pallas_kernels import index_select
from pallas_kernels.index_select import _tpu_compact, _tpu_select, tpu

DATA = Path(__file__).parents[1] / "golden" / "data"
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
select = functools.partial(tpu.select, interpret=INTERPRET)

# One shape for all examples: three rounds of keys, the last of which is not full.
BATCH, QUERIES, HEADS, CHANNELS, KEYS, TOP_K, ROUND = 2, 3, 2, 8, 296, 20, 128
PAGE = 8

FIXTURES = [
    pytest.param(name, marks=() if name in ("ties_dup", "decode") else pytest.mark.slow)
    for name in ("generic_T130", "ties_dup", "relu_plateau", "decode")
]


def definition(q: Any, k: Any, weights: Any, positions: Any, top_k: int, use_relu: bool = True) -> np.ndarray:
    """The selection of float64 scores, with a sort of Python's own."""
    dots = np.einsum("bqhd,bsd->bqhs", np.asarray(q, np.float64), np.asarray(k, np.float64))
    activated = np.maximum(dots, 0) if use_relu else dots
    scores = np.einsum("bqh,bqhs->bqs", np.asarray(weights, np.float64), activated)
    chosen = np.full((*scores.shape[:2], top_k), -1, np.int32)
    for place in np.ndindex(*scores.shape[:2]):
        visible = range(min(int(positions[place]) + 1, scores.shape[2]))
        kept = sorted(sorted(visible, key=lambda s: (-scores[place][s], s))[:top_k])
        chosen[place][: len(kept)] = kept
    return chosen


def problem(
    rng: np.random.Generator,
    distinct: int,
    signs: tuple[float, ...],
    shape: tuple[int, ...] = (BATCH, QUERIES, HEADS, CHANNELS, KEYS),
) -> tuple[np.ndarray, ...]:
    """Small integers and powers of two, so that every score is exact in any order; few keys are distinct."""
    batch, queries, heads, channels, keys = shape
    pool = rng.integers(-2, 3, (batch, distinct, channels))
    k = pool[:, rng.integers(0, distinct, keys)].astype(np.float32)
    q = rng.integers(-2, 3, (batch, queries, heads, channels)).astype(np.float32)
    weights = rng.choice(np.asarray(signs, np.float32), (batch, queries, heads))
    positions = rng.integers(-1, keys + 3, (batch, queries)).astype(np.int32)
    return q, k, weights, positions


def poisoned(k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """NaN at the keys that no query of the sequence sees."""
    return np.where(np.arange(k.shape[1])[None, :, None] > positions.max(axis=1)[:, None, None], np.nan, k)


PROBLEMS = st.builds(
    lambda seed, distinct, signs: problem(np.random.default_rng(seed), distinct, signs),
    st.integers(0, 2**32 - 1),
    st.integers(1, KEYS),
    st.sampled_from([(-2.0, -1.0), (-0.0, 0.0), (-1.0, -0.0, 0.0, 0.5, 1.0), (1.0, 2.0)]),
)


@pytest.mark.golden
@pytest.mark.parametrize("name", FIXTURES)
def test_recorded_sets(name: str) -> None:
    f = load_file(DATA / f"index_select_{name}.safetensors")
    q, k, weights, positions = (
        jnp.asarray(f[key]) for key in ("q_index", "k_index", "weights", "query_positions")
    )
    found = select(q, k, weights, positions, int(f["top_k"][0]), key_round=ROUND)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, f["indices"])


@pytest.mark.golden
@pytest.mark.parametrize("name", ["ties_dup", "relu_plateau", "decode"])
def test_recorded_scores_bit_for_bit(name: str) -> None:
    """The files whose scores are exact: the ranks of the kernel's scores are those of the recorded ones."""
    f = load_file(DATA / f"index_select_{name}.safetensors")
    batch, queries, heads, channels = f["q_index"].shape
    tiles = _tpu_select.Tiles(1, queries, queries, 0, 0, 0, 0)
    static = _tpu_select.Static(tiles, heads, 0, 0, 0, False, True, "full")
    for b in range(batch):
        q = jnp.asarray(f["q_index"][b].swapaxes(0, 1).reshape(heads * queries, channels))
        arrays = jnp.asarray(f["k_index"][b]), None, jnp.asarray(f["weights"][b])
        ranks = np.asarray(_tpu_select._tile_ranks(static, q, *arrays))
        expected = np.asarray(_tpu_compact.rank_of(jnp.asarray(f["scores_f32"][b])))
        visible = f["scores_f32"][b] != np.float32(-1e30)
        np.testing.assert_array_equal(ranks[visible], expected[visible])


@settings(max_examples=25)
@given(PROBLEMS, st.sampled_from([None, 0, TOP_K - 1, TOP_K, ROUND - 1, ROUND]))
def test_sets_equal_the_definition(arrays: tuple[np.ndarray, ...], last: int | None) -> None:
    q, k, weights, positions = arrays
    if last is not None:
        # Ends of rounds, fewer visible keys than are selected, and one.
        positions = positions.copy()
        positions[0] = last
    expected = definition(q, k, weights, positions, TOP_K)
    given_arrays = (jnp.asarray(a) for a in (q, poisoned(k, positions), weights, positions))
    np.testing.assert_array_equal(select(*given_arrays, TOP_K, key_round=ROUND), expected)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1))
def test_special_scores_rank_as_in_the_portable_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, k, weights, positions = problem(rng, 30, (-1.0, 0.0, 1.0))
    rare = rng.choice([0.0, np.nan, np.inf, 3e38], k.shape, p=[0.97, 0.01, 0.01, 0.01])
    arrays = [
        jnp.asarray(a) for a in (q, np.where(rare != 0, rare, k).astype(np.float32), weights, positions)
    ]
    expected = index_select.select(*arrays, TOP_K, implementation="reference")
    np.testing.assert_array_equal(select(*arrays, TOP_K, key_round=ROUND), expected)


def test_ranks_are_in_the_order_of_scores() -> None:
    lowest = np.finfo(np.float32).min
    ascending = [lowest, -1.5, -1.0, -1e-30, 0.0, 1e-30, 1.0, np.finfo(np.float32).max, np.inf, np.nan]
    ranks = np.asarray(_tpu_compact.rank_of(jnp.asarray(ascending, jnp.float32))).astype(np.int64)
    assert (np.diff(ranks) > 0).all() and ranks[0] > _tpu_compact.ABSENT
    twins = jnp.asarray([[-0.0, 0.0], [-np.inf, lowest], [np.nan, -np.nan]], jnp.float32)
    left, right = np.asarray(_tpu_compact.rank_of(twins)).T
    np.testing.assert_array_equal(left, right)


@settings(max_examples=8)
@given(PROBLEMS, st.integers(0, 2**32 - 1))
def test_sets_do_not_depend_on_paging(arrays: tuple[np.ndarray, ...], seed: int) -> None:
    q, k, weights, positions = arrays
    rng = np.random.default_rng(seed)
    count = KEYS // PAGE
    physical = BATCH * count + 2
    order = rng.permutation(physical)[: BATCH * count]
    pages = np.full((physical, PAGE, CHANNELS), np.nan, np.float32)
    pages[order] = poisoned(k, positions).reshape(-1, PAGE, CHANNELS)
    # Pages that no query of the sequence sees have no number yet, or one that is out of bounds.
    seen = np.arange(count) * PAGE <= positions.max(axis=1)[:, None]
    table = np.where(seen, order.reshape(BATCH, count), rng.choice([-1, physical, 2**31 - 1], (BATCH, count)))
    inputs = (jnp.asarray(a) for a in (q, pages, weights, positions))
    found = select(*inputs, TOP_K, jnp.asarray(table.astype(np.int32)), key_round=ROUND)
    np.testing.assert_array_equal(found, definition(q, k, weights, positions, TOP_K))


def test_sets_do_not_depend_on_blocks_or_neighbours() -> None:
    """Two blocks of queries, `top_k` of more than one register, and generic scores."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, 13, HEADS, CHANNELS)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((1, 320, CHANNELS)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((1, 13, HEADS)), jnp.float32)
    positions = jnp.asarray(rng.integers(100, 320, (1, 13)), jnp.int32)
    expected = definition(q, k, weights, np.asarray(positions), 130)
    for query_block, key_round in [(8, ROUND), (32, None)]:
        found = select(q, k, weights, positions, 130, query_block=query_block, key_round=key_round)
        np.testing.assert_array_equal(found, expected)
    one = slice(9, 10)
    alone = select(q[:, one], k, weights[:, one], positions[:, one], 130)
    np.testing.assert_array_equal(alone[0, 0], expected[0, 9])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float8_e5m2, marks=pytest.mark.slow)])
def test_narrow_keys_without_relu(dtype: Any) -> None:
    """Nine sequences of one query: more than share a block, the last one alone."""
    rng = np.random.default_rng(1)
    shape = (9, 1, 9, CHANNELS, 256)
    q, k, weights, positions = problem(rng, 40, (-1.0, 0.0, 1.0), shape)
    expected = definition(q, k, weights, positions, 7, use_relu=False)
    assert (expected != definition(q, k, weights, positions, 7)).any()
    arrays = jnp.asarray(q, jnp.bfloat16), jnp.asarray(k).astype(dtype), jnp.asarray(weights)
    found = select(*arrays, jnp.asarray(positions), 7, use_relu=False, key_round=ROUND)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 128, 290])
def test_numbers_of_selected_keys(top_k: int) -> None:
    q, k, weights, positions = problem(np.random.default_rng(2), 60, (-1.0, 0.0, 1.0))
    arrays = (jnp.asarray(a) for a in (q, k, weights, positions))
    expected = definition(q, k, weights, positions, top_k)
    np.testing.assert_array_equal(select(*arrays, top_k, key_round=ROUND), expected)


def test_no_more_keys_than_are_selected_and_no_queries() -> None:
    q, k, weights, positions = (
        jnp.asarray(a) for a in problem(np.random.default_rng(3), 9, (1.0,), (2, 3, 2, 8, 12))
    )
    found = select(q, k, weights, positions, 14)
    np.testing.assert_array_equal(found, definition(q, k, weights, np.asarray(positions), 14))
    assert select(q[:, :0], k, weights[:, :0], positions[:, :0], 4).shape == (2, 0, 4)


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec as P
from pallas_kernels import index_select
from pallas_kernels.index_select import tpu

B, Q, H, D, S, TOP_K, SHARDS, PAGE = 2, 3, 2, 8, 96, 20, 3, 8
mesh = jax.make_mesh((SHARDS,), ("context",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
interpret = pltpu.InterpretParams(uninitialized_memory="nan")
run = functools.partial(tpu.select, top_k=TOP_K, axis_name="context", interpret=interpret)
def paged(q, k, w, p, table):
    return run(q, k, w, p, page_table=table)

sharded = jax.jit(jax.shard_map(
    paged, mesh=mesh, in_specs=(P(), P("context"), P(), P(), P()), out_specs=P(), check_vma=False))
positions = jnp.asarray([[-1, 15, 32], [40, 95, 120]], jnp.int32)
cases = 0
for distinct in (1, 9, 96):
    q = jnp.asarray(rng.integers(-2, 3, (B, Q, H, D)), jnp.float32)
    weights = jnp.asarray(rng.choice([-1.0, -0.0, 0.0, 1.0], (B, Q, H)), jnp.float32)
    pool = rng.integers(-2, 3, (B, distinct, D))
    k = jnp.asarray(pool[:, rng.integers(0, distinct, S)], jnp.float32)
    expected = index_select.select(q, k, weights, positions, TOP_K)
    # Page p of every shard holds its positions from 8 p on; the pages are in reverse.
    local = S // SHARDS // PAGE
    pages = k.reshape(B, SHARDS, local, PAGE, D).swapaxes(0, 1).reshape(SHARDS, B * local, PAGE, D)[:, ::-1]
    table = jnp.asarray(np.arange(B * local)[::-1].reshape(B, local), jnp.int32)
    assert (sharded(q, pages.reshape(-1, PAGE, D), weights, positions, table) == expected).all(), distinct
    cases += 1
print(cases)
"""


@pytest.mark.slow
def test_keys_sharded_over_three_devices() -> None:
    """Rows that do not divide by the devices, and a merge in the order of the shards."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=3"
    }
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]


def test_a_loss_of_selected_scores_can_be_differentiated() -> None:
    q, k, weights, positions = (jnp.asarray(a) for a in problem(np.random.default_rng(4), 20, (1.0,)))

    def loss(q: jax.Array, k: jax.Array, weights: jax.Array) -> jax.Array:
        chosen = select(q, k, weights, positions, TOP_K)
        return jnp.sum(index_select.scores_at(q, k, weights, chosen))

    gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2)), q, k, weights)
    assert [g.shape for g in gradients] == [q.shape, k.shape, weights.shape]


def test_refusals_name_the_value_and_the_way_out() -> None:
    q, k, weights, positions = (jnp.asarray(a) for a in problem(np.random.default_rng(5), 9, (1.0,)))
    by_name = functools.partial(index_select.select, implementation="tpu")
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="got float64; pass float32"):
        by_name(q.astype(jnp.float64), k, weights, positions, 4)
    with pytest.raises(NotImplementedError, match="got float16"):
        by_name(q, k.astype(jnp.float16), weights, positions, 4)
    with pytest.raises(NotImplementedError, match="at most 8192 keys and top_k is 8193"):
        by_name(q, k, weights, positions, 8193)
    table = jnp.zeros((2, 9), jnp.int32)
    with pytest.raises(NotImplementedError, match="multiple of 8 keys of float32 and got pages of 4"):
        by_name(q, jnp.zeros((5, 4, CHANNELS)), weights, positions, 4, table)
    with pytest.raises(NotImplementedError, match="at most 32768 pages of a sequence, and got 40000"):
        by_name(q, jnp.zeros((5, 8, CHANNELS)), weights, positions, 4, jnp.zeros((2, 40000), jnp.int32))
    with pytest.raises(NotImplementedError, match="two of 65536 keys do not fit"):
        by_name(q, jnp.zeros((1, 65536, CHANNELS)), weights, positions, 4, table)
