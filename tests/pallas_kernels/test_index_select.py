"""Index selection against recorded outputs, a numpy oracle, and itself under other tilings and shardings."""

import functools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pallas_kernels import index_select
from pallas_kernels.index_select import dense, xla
from pallas_kernels.sparse_attention import rows as key_rows

DATA = Path(__file__).parents[1] / "golden" / "data"
FILES = ["generic_T130", "ties_dup", "relu_plateau", "decode"]
EXACT_FILES = FILES[1:]


@functools.cache
def fixture(name):
    return load_file(DATA / f"index_select_{name}.safetensors")


@functools.cache
def metadata(name):
    raw = (DATA / f"index_select_{name}.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    return json.loads(header["__metadata__"]["meta"])


def inputs(name):
    f = fixture(name)
    arrays = tuple(jnp.asarray(f[key]) for key in ("q_index", "k_index", "weights", "query_positions"))
    return (*arrays, int(f["top_k"][0]))


def oracle_scores(q, k, weights, relu=True):
    dots = np.einsum("bqhd,bsd->bqhs", q.astype(np.float64), k.astype(np.float64))
    dots = np.maximum(dots, 0) if relu else dots
    return np.einsum("bqh,bqhs->bqs", weights.astype(np.float64), dots) / np.sqrt(q.shape[2] * q.shape[3])


def oracle_select(scores, positions, top_k, lowest_first=True):
    """Indices by the definition, with a sort of Python's own."""
    batch, queries, keys = scores.shape
    chosen = np.full((batch, queries, top_k), -1, np.int32)
    for b in range(batch):
        for t in range(queries):
            visible = range(min(int(positions[b, t]) + 1, keys))
            sign = 1 if lowest_first else -1
            ranked = sorted(visible, key=lambda s: (-scores[b, t, s], sign * s))
            kept = sorted(ranked[:top_k])
            chosen[b, t, : len(kept)] = kept
    return chosen


# Recorded outputs


@pytest.mark.golden
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("name", FILES)
def test_recorded_sets(name, implementation):
    indices = index_select.select(*inputs(name), implementation=implementation)
    assert indices.dtype == jnp.int32
    np.testing.assert_array_equal(indices, fixture(name)["indices"])


@pytest.mark.golden
@pytest.mark.parametrize("name", FILES)
def test_recorded_sets_from_bfloat16_inputs(name):
    q, k, weights, positions, top_k = inputs(name)
    indices = index_select.select(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), weights, positions, top_k)
    np.testing.assert_array_equal(indices, fixture(name)["indices"])


@pytest.mark.golden
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", FILES)
def test_recorded_sets_and_scores_in_float64(name):
    q, k, weights, positions, top_k = inputs(name)
    q, k, weights = (a.astype(jnp.float64) for a in (q, k, weights))
    np.testing.assert_array_equal(
        index_select.select(q, k, weights, positions, top_k), fixture(name)["indices"]
    )
    scores = index_select.scores(q, k, weights, positions)
    assert scores.dtype == jnp.float64
    expected = fixture(name)["scores_f64"]
    np.testing.assert_allclose(np.where(expected == -1e30, -np.inf, expected), scores, rtol=0, atol=1e-12)


@pytest.mark.golden
@pytest.mark.parametrize("form", ["definition", "tile", "rowwise", "blocked", "scores_at"])
@pytest.mark.parametrize("name", FILES)
def test_recorded_scores(name, form):
    q, k, weights, positions, _ = inputs(name)
    expected = fixture(name)["scores_f32"]
    visible = expected != np.float32(-1e30)
    if form == "definition":
        scores = np.asarray(index_select.scores(q, k, weights, positions))
        assert np.isneginf(scores[~visible]).all()
    elif form == "scores_at":
        every = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), expected.shape)
        scores = np.asarray(index_select.scores_at(q, k, weights, every))
    else:
        function = {
            "tile": xla.tile_scores,
            "rowwise": xla.tile_scores_rowwise,
            "blocked": xla.tile_scores_blocked,
        }[form]
        scores = np.asarray(jax.jit(function, static_argnums=3)(q, k, weights, True))
    tolerance = 0 if metadata(name)["exact"] else 5e-6
    np.testing.assert_allclose(scores[visible], expected[visible], rtol=0, atol=tolerance)


@pytest.mark.golden
@pytest.mark.parametrize("key_tile", [7, 32, 4096])
@pytest.mark.parametrize("name", ["relu_plateau", "ties_dup"])
def test_selection_stage_ignores_the_sign_of_zero(name, key_tile):
    f = fixture(name)
    scores = f.get("scores_f32_mixed_zero_sign", f["scores_f32"])
    if name == "relu_plateau":
        zeros = scores == 0
        assert np.signbit(scores[zeros]).any() and not np.signbit(scores[zeros]).all()
    visible = np.arange(scores.shape[2]) <= f["query_positions"][..., None]
    indices = xla.select_from_scores(jnp.asarray(scores), jnp.asarray(visible), int(f["top_k"][0]), key_tile)
    np.testing.assert_array_equal(indices, f["indices"])


@pytest.mark.golden
@pytest.mark.parametrize("name", FILES)
def test_recorded_sets_notice_planted_mistakes(name):
    f = fixture(name)
    q, k, weights = f["q_index"], f["k_index"], f["weights"]
    positions, top_k = f["query_positions"], int(f["top_k"][0])
    right = oracle_scores(q, k, weights)
    rounded = np.asarray(right, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    chosen = {
        "none": oracle_select(right, positions, top_k),
        "ties_highest_index": oracle_select(right, positions, top_k, lowest_first=False),
        "no_relu": oracle_select(oracle_scores(q, k, weights, relu=False), positions, top_k),
        "abs_weights": oracle_select(oracle_scores(q, k, np.abs(weights)), positions, top_k),
        "scores_rounded_to_bf16": oracle_select(rounded, positions, top_k),
    }
    rows = {mistake: int((sets != f["indices"]).any(-1).sum()) for mistake, sets in chosen.items()}
    assert rows.pop("none") == 0
    assert rows == metadata(name)["rows_with_other_set_if"]


def test_every_planted_mistake_is_seen_by_some_recorded_set():
    tables = [metadata(name)["rows_with_other_set_if"] for name in FILES]
    for mistake in ("ties_highest_index", "no_relu", "abs_weights", "scores_rounded_to_bf16"):
        assert max(table[mistake] for table in tables) > 0


# Adversarial inputs

# Products of these are exact in float32 in any order, so ties are ties for every implementation. H * D is a
# power of 4, so the scale is a power of 2.
HEADS, CHANNELS = 2, 8
# Batch, queries, keys, top_k; few, because each is compiled.
CASES = [(1, 1, 1, 1), (2, 3, 9, 2), (2, 3, 9, 16), (1, 5, 37, 16), (3, 1, 64, 1), (3, 1, 64, 70)]


@st.composite
def problems(draw):
    batch, queries, keys, top_k = draw(st.sampled_from(CASES))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    distinct = draw(st.integers(1, keys))
    pool = rng.integers(-2, 3, (batch, distinct, CHANNELS))
    k = pool[:, rng.integers(0, distinct, keys)].astype(np.float32)
    q = rng.integers(-2, 3, (batch, queries, HEADS, CHANNELS)).astype(np.float32)
    kinds = draw(st.sampled_from([(-2.0, -1.0), (-0.0, 0.0), (-1.0, -0.0, 0.0, 0.5, 1.0), (1.0, 2.0)]))
    weights = rng.choice(np.asarray(kinds, np.float32), (batch, queries, HEADS))
    positions = rng.integers(-1, keys + 3, (batch, queries)).astype(np.int32)
    return q, k, weights, positions, top_k


@settings(max_examples=60)
@given(problems(), st.sampled_from([(128, 4096), (2, 5)]))
def test_sets_equal_the_oracle(problem, blocks):
    q, k, weights, positions, top_k = problem
    expected = oracle_select(oracle_scores(q, k, weights), positions, top_k)
    arrays = [jnp.asarray(a) for a in (q, k, weights, positions)]
    for chosen in (
        xla.select(*arrays, top_k, query_block=blocks[0], key_tile=blocks[1]),
        index_select.select(*arrays, top_k, implementation="reference"),
    ):
        np.testing.assert_array_equal(chosen, expected)


@settings(max_examples=40)
@given(problems(), st.integers(0, 2**32 - 1), st.sampled_from([4096, 9]))
def test_sets_do_not_depend_on_paging(problem, seed, key_tile):
    q, k, weights, positions, top_k = problem
    rng = np.random.default_rng(seed)
    page, batch, keys = 4, k.shape[0], k.shape[1]
    count = -(-keys // page)
    positions = np.minimum(positions, keys - 1)
    padded = np.full((batch, count * page, CHANNELS), np.nan, np.float32)
    padded[:, :keys] = k
    order = rng.permutation(batch * count + 2)[: batch * count]
    pages = np.full((batch * count + 2, page, CHANNELS), np.nan, np.float32)
    pages[order] = padded.reshape(-1, page, CHANNELS)
    table = order.reshape(batch, count).astype(np.int32)
    # Pages that no query of the sequence sees have no number yet.
    last = positions.max(axis=1)
    table = np.where(np.arange(count) * page <= last[:, None], table, -1).astype(np.int32)
    expected = oracle_select(oracle_scores(q, k, weights), positions, top_k)
    arrays = [jnp.asarray(a) for a in (q, pages, weights, positions)]
    np.testing.assert_array_equal(
        xla.select(*arrays, top_k, page_table=jnp.asarray(table), key_tile=key_tile), expected
    )
    np.testing.assert_array_equal(
        index_select.select(*arrays, top_k, page_table=jnp.asarray(table), implementation="reference"),
        expected,
    )


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from([-3.4e38, -1.0, -0.0, 0.0, 1.0, np.inf, -np.inf, np.nan]), min_size=20, max_size=20
    ),
    st.sampled_from([1, 7, 25]),
    st.sampled_from([6, 64]),
)
def test_selection_stage_ranks_special_values(values, top_k, key_tile):
    scores = np.asarray(values, np.float32)
    visible = np.arange(20) % 3 != 1
    # NaN first; -inf as the lowest finite number, for a visible key must not pass for an invisible one.
    lowest = float(np.finfo(np.float32).min)
    key = [-np.inf if np.isnan(s) else -max(float(s), lowest) for s in scores]
    ranked = sorted((s for s in range(20) if visible[s]), key=lambda s: (not np.isnan(scores[s]), key[s], s))
    expected = np.full(top_k, -1, np.int32)
    kept = sorted(ranked[:top_k])
    expected[: len(kept)] = kept
    chosen = xla.select_from_scores(
        jnp.asarray(scores)[None, None], jnp.asarray(visible)[None, None], top_k, key_tile
    )
    np.testing.assert_array_equal(chosen[0, 0], expected)


def random_problem(batch=2, queries=9, heads=4, channels=32, keys=300, seed=0):
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((batch, queries, heads, channels)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((batch, keys, channels)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((batch, queries, heads)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, keys, (batch, queries)), jnp.int32)
    return q, k, weights, positions


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_positions_of_any_size_and_type(implementation):
    """The largest number sees all keys, the smallest none, and neither changes what others see."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 4, 2, 8), (1, 300, 8)))
    weights = jnp.asarray(rng.standard_normal((1, 4, 2)), jnp.float32)

    def chosen(positions, dtype):
        return np.asarray(
            index_select.select(q, k, weights, np.array([positions], dtype), 4, implementation=implementation)
        )

    expected = chosen([10, 20, 299, -1], np.int32)
    for highest, lowest in ((2**31 - 1, -(2**31)), (2**31 - 2, -5)):
        np.testing.assert_array_equal(chosen([10, 20, highest, lowest], np.int32), expected)
    narrow = chosen([10, 20, 100, -1], np.int32)
    np.testing.assert_array_equal(chosen([10, 20, 100, -1], np.int8), narrow)
    visible = ~np.isneginf(
        np.asarray(index_select.scores(q, k, weights, np.array([[10, 20, 100, -1]], np.int8)))
    )
    np.testing.assert_array_equal(visible.sum(axis=-1), [[11, 21, 101, 0]])


def test_a_query_without_keys_leaves_no_trace_in_dense_scores():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 4, 2, 8), (1, 12, 8)))
    weights = jnp.asarray(rng.standard_normal((1, 4, 2)), jnp.float32)
    positions = jnp.array([[3, 11, 7, -1]])

    def gradients(q, weights):
        def loss(*arrays):
            scores = index_select.scores_at(*arrays, query_positions=positions)
            return jnp.sum(jnp.where(scores > -1e29, jnp.sin(scores), 0))

        return jax.grad(loss, (0, 1, 2))(q, k, weights)

    expected = gradients(q.at[:, 3].set(0), weights.at[:, 3].set(0))
    for poisoned in ((q.at[:, 3].set(jnp.nan), weights), (q, weights.at[:, 3].set(jnp.nan))):
        for found, wanted in zip(gradients(*poisoned), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_nothing_to_score():
    def shapes(batch, queries, heads, keys):
        return (
            jnp.zeros((batch, queries, heads, 8)),
            jnp.zeros((batch, keys, 8)),
            jnp.zeros((batch, queries, heads)),
        )

    for batch, queries, keys in ((0, 2, 5), (1, 0, 5), (1, 2, 0)):
        arrays = shapes(batch, queries, 2, keys)
        assert index_select.scores_at(*arrays).shape == (batch, queries, keys)
        indices = jnp.zeros((batch, queries, 3), jnp.int32)
        found = index_select.scores_at(*arrays, indices)
        assert found.shape == (batch, queries, 3) and (np.asarray(found) == index_select.MASKED_SCORE).all()
    assert index_select.scores_at(*shapes(1, 2, 2, 5), jnp.zeros((1, 2, 0), jnp.int32)).shape == (1, 2, 0)
    with pytest.raises(ValueError, match="q_index has 0 heads of 8 channels"):
        index_select.select(*shapes(1, 2, 0, 5), jnp.zeros((1, 2), jnp.int32), 3)


def test_keys_that_are_not_visible_may_be_nan():
    q, k, weights, positions = random_problem()
    positions = jnp.minimum(positions, 150).at[0, 0].set(-1)
    expected = index_select.select(q, k, weights, positions, 16)
    poisoned = k.at[:, 151:].set(jnp.nan)
    for key_tile in (64, 4096):
        chosen = xla.select(q, poisoned, weights, positions, 16, key_tile=key_tile)
        np.testing.assert_array_equal(chosen, expected)
    assert (np.asarray(expected[0, 0]) == -1).all()
    # A key that only some queries see is poison for nobody else.
    position = int(positions[1, 0])
    chosen = index_select.select(
        q, k.at[1, position + 1 :].set(jnp.nan), weights, jnp.full_like(positions, position), 16
    )
    unpoisoned = index_select.select(q, k, weights, jnp.full_like(positions, position), 16)
    np.testing.assert_array_equal(chosen[1], unpoisoned[1])


@pytest.mark.parametrize(("heads", "channels"), [(4, 32), (32, 128)])
def test_score_bits_do_not_depend_on_tile_batch_or_queries(heads, channels):
    q, k, weights, _ = random_problem(heads=heads, channels=channels, keys=600)
    scores = jax.jit(xla.tile_scores, static_argnums=3)
    whole = np.asarray(scores(q, k, weights, True))
    for b, t, start, stop in [(0, 1, 0, 1), (1, 1, 0, 600), (0, 7, 3, 40), (1, 3, 100, 228), (1, 9, 17, 530)]:
        part = scores(q[b : b + 1, :t], k[b : b + 1, start:stop], weights[b : b + 1, :t], True)
        np.testing.assert_array_equal(part[0], whole[b, :t, start:stop])


def test_both_forms_of_the_tile_agree():
    for use_relu in (True, False):
        q, k, weights, _ = random_problem(heads=8, channels=64)
        rowwise = xla.tile_scores_rowwise(q, k, weights, use_relu)
        blocked = xla.tile_scores_blocked(q, k, weights, use_relu)
        np.testing.assert_allclose(rowwise, blocked, rtol=0, atol=5e-6)
        np.testing.assert_allclose(
            rowwise, oracle_scores(*(np.asarray(a) for a in (q, k, weights)), use_relu), rtol=0, atol=5e-6
        )


def test_sets_do_not_depend_on_tiles_batch_or_queries():
    q, k, weights, positions = random_problem(queries=11)
    whole = np.asarray(index_select.select(q, k, weights, positions, 24))
    for query_block, key_tile in [(1, 13), (4, 128), (22, 299), (128, 300)]:
        tiled = xla.select(q, k, weights, positions, 24, query_block=query_block, key_tile=key_tile)
        np.testing.assert_array_equal(tiled, whole)
    for t in (0, 5, 10):
        one = slice(t, t + 1)
        alone = index_select.select(q[1:, one], k[1:], weights[1:, one], positions[1:, one], 24)
        np.testing.assert_array_equal(alone[0, 0], whole[1, t])


def test_without_relu():
    q, k, weights, positions = random_problem()
    scores = oracle_scores(*(np.asarray(a) for a in (q, k, weights)), relu=False)
    expected = oracle_select(scores, np.asarray(positions), 16)
    assert (expected != np.asarray(index_select.select(q, k, weights, positions, 16))).any()
    for implementation in ("xla", "reference"):
        chosen = index_select.select(
            q, k, weights, positions, 16, use_relu=False, implementation=implementation
        )
        np.testing.assert_array_equal(chosen, expected)


def test_no_tensor_of_all_keys_by_heads_and_no_gradient():
    q, k, weights, positions = random_problem(queries=64, keys=4096)

    def select(q, k, weights):
        return xla.select(q, k, weights, positions, 16, query_block=16, key_tile=128)

    program = jax.jit(lambda *a: xla.tile_scores_blocked(*a, True)).lower(q, k, weights).compile()
    unblocked = program.memory_analysis().temp_size_in_bytes
    blocked = jax.jit(select).lower(q, k, weights).compile().memory_analysis().temp_size_in_bytes
    assert blocked < unblocked / 8

    def loss(q):
        return jnp.sum(index_select.scores_at(q, k, weights, select(q, k, weights)))

    assert np.isfinite(jax.grad(loss)(q)).all()


# Scores at given indices


def naive_scores_at(q, k, weights, indices, use_relu=True):
    last = jnp.full(indices.shape[:2], k.shape[1] - 1, jnp.int32)
    scores = index_select.scores(q, k, weights, last, use_relu)
    chosen = jnp.take_along_axis(scores, jnp.where(indices < 0, 0, indices), axis=2)
    return jnp.where(indices < 0, index_select.MASKED_SCORE, chosen)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("gather_bytes", [1, 32 * 2**20])
@pytest.mark.parametrize("use_relu", [True, False])
def test_scores_at_and_its_gradients_in_float64(use_relu, gather_bytes, monkeypatch):
    monkeypatch.setattr(key_rows, "GATHER_BYTES", gather_bytes)
    xla.scores_at.clear_cache()
    q, k, weights, _ = (a.astype(jnp.float64) for a in random_problem(keys=20))
    rng = np.random.default_rng(1)
    indices = jnp.asarray(rng.integers(-1, 18, (*q.shape[:2], 7)), jnp.int32)
    cotangent = jnp.asarray(rng.standard_normal(indices.shape))
    poisoned = k.at[:, 18:].set(jnp.nan)
    value, pullback = jax.vjp(lambda *a: index_select.scores_at(*a, indices, use_relu), q, poisoned, weights)
    expected, expected_pullback = jax.vjp(lambda *a: naive_scores_at(*a, indices, use_relu), q, k, weights)
    xla.scores_at.clear_cache()
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
    for got, want in zip(pullback(cotangent), expected_pullback(cotangent), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("product_bytes", [1, 32 * 2**20])
@pytest.mark.parametrize("use_relu", [True, False])
def test_dense_scores_at_and_its_gradients_in_float64(use_relu, product_bytes, monkeypatch):
    """One tile of all keys, and tiles of 128 for blocks of queries, none of which divides."""
    monkeypatch.setattr(dense, "_PRODUCT_BYTES", product_bytes)
    monkeypatch.setattr(dense, "QUERY_BLOCK", 8)
    dense.scores_at.clear_cache()
    q, k, weights, positions = (
        a.astype(jnp.float64) if a.dtype == jnp.float32 else a for a in random_problem(keys=300)
    )
    positions = jnp.minimum(positions, 290).at[0, 3].set(-1)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((*positions.shape, 300)))
    seen = jnp.arange(300, dtype=jnp.int32) <= positions[..., None]

    def naive(q, k, weights):
        scores = index_select.scores(q, k, weights, positions, use_relu)
        return jnp.where(seen, scores, index_select.MASKED_SCORE)

    value, pullback = jax.vjp(
        lambda *a: index_select.scores_at(*a, use_relu=use_relu, query_positions=positions),
        q,
        k.at[:, 291:].set(jnp.nan),
        weights,
    )
    dense.scores_at.clear_cache()
    expected, expected_pullback = jax.vjp(naive, q, k, weights)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
    for got, want in zip(pullback(cotangent), expected_pullback(cotangent), strict=True):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


def test_dense_scores_at_are_those_at_every_index():
    q, k, weights, _ = random_problem(keys=40)
    every = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32), (*q.shape[:2], 40))
    np.testing.assert_allclose(
        index_select.scores_at(q, k, weights), index_select.scores_at(q, k, weights, every), rtol=0, atol=2e-6
    )
    with pytest.raises(ValueError, match="given indices and query_positions"):
        index_select.scores_at(q, k, weights, every, query_positions=every[..., 0])


def test_dense_scores_at_keep_no_products_of_heads():
    q, k, weights = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 512, 16, 32), (1, 8192, 32), (1, 512, 16))
    )
    gradient = jax.grad(lambda *a: jnp.sum(index_select.scores_at(*a) ** 2), argnums=(0, 1, 2))
    compiled = jax.jit(gradient).lower(q, k, weights).compile()
    scores = 4 * 512 * 8192
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * dense._PRODUCT_BYTES + 6 * scores < 16 * scores


def test_scores_at_skipped_entries_and_zero_products():
    q, k, weights, _ = random_problem(keys=20)
    q = q.at[0, 0].set(0)
    indices = jnp.full((2, 9, 3), -1, jnp.int32).at[0, 0, 1].set(4).at[1, 2].set(jnp.asarray([19, 20, 500]))

    def loss(q, k, weights):
        scores = index_select.scores_at(q, k, weights, indices)
        return jnp.sum(jnp.where(indices < 0, 0, jax.nn.log_softmax(scores, axis=-1))), scores

    gradients, scores = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, weights)
    assert (np.asarray(scores)[np.asarray((indices < 0) | (indices > 19))] == np.float32(-1e30)).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    # ReLU has gradient 0 at 0, as a score that is exactly 0 leaves everything as it is.
    one = jnp.full((2, 9, 1), -1, jnp.int32).at[0, 0, 0].set(4)
    for gradient in jax.grad(lambda *a: index_select.scores_at(*a, one)[0, 0, 0], argnums=(0, 1, 2))(
        q, k, weights
    ):
        assert (np.asarray(gradient) == 0).all()


def test_scores_at_bfloat16_gradients_keep_their_dtype():
    q, k, weights, _ = random_problem(keys=20)
    indices = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 9, 5))
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)
    value, pullback = jax.vjp(lambda *a: index_select.scores_at(*a, indices), q, k, weights)
    assert value.dtype == jnp.float32
    assert [g.dtype for g in pullback(jnp.ones_like(value))] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]


# Keys sharded over devices

SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from pallas_kernels import index_select

mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
B, Q, H, D, S = 2, 6, 2, 8, 128
pool = rng.integers(-2, 3, (B, 9, D))
q = jnp.asarray(rng.integers(-2, 3, (B, Q, H, D)), jnp.float32)
weights = jnp.asarray(rng.choice([-1.0, -0.0, 0.0, 1.0], (B, Q, H)), jnp.float32)
positions = jnp.asarray([[-1, 0, 15, 16, 90, 127], [127, 200, 64, 63, 3, 100]], jnp.int32)
tied = jnp.asarray(pool[:, rng.integers(0, 9, S)], jnp.float32)
dyadic = q, tied, weights
generic = [jnp.asarray(rng.standard_normal(a.shape), jnp.float32) for a in dyadic]
cases = 0
for top_k in (1, 12, 128):
    for implementation in ("xla", "reference") if top_k == 12 else ("xla",):
        run = functools.partial(
            index_select.select, top_k=top_k, axis_name="context", implementation=implementation)
        # With the check, the type system has to know that the result is the same on all devices.
        shard = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=implementation == "xla")
        sharded = jax.jit(shard(run, in_specs=(P(), P(None, "context"), P(), P())))
        paged = jax.jit(shard(
            lambda q, k, w, p, table: run(q, k, w, p, page_table=table),
            in_specs=(P(), P("context"), P(), P(), P())))
        for q, k, weights in (dyadic, generic):
            # Page p of shard n holds the positions from 16 n + 4 p on; the pages are in reverse.
            shards = k.reshape(B, 8, 4, 4, D).transpose(1, 0, 2, 3, 4).reshape(8, B * 4, 4, D)[:, ::-1]
            table = jnp.asarray(np.arange(B * 4)[::-1].reshape(B, 4), jnp.int32)
            expected = index_select.select(q, k, weights, positions, top_k)
            assert (sharded(q, k, weights, positions) == expected).all(), (top_k, implementation)
            pages = shards.reshape(8 * B * 4, 4, D)
            assert (paged(q, pages, weights, positions, table) == expected).all(), (top_k, implementation)
            cases += 2
print(cases)
"""


def run_on_eight_devices(program):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_keys_sharded_over_eight_devices():
    assert run_on_eight_devices(SHARDED) == ["16"]


# Errors


def test_errors_name_the_value_and_the_way_out():
    q, k, weights, positions = random_problem()
    with pytest.raises(ValueError, match="top_k is 0, expected a positive number"):
        index_select.select(q, k, weights, positions, 0)
    with pytest.raises(ValueError, match="k_index has 31 channels but q_index has 32"):
        index_select.select(q, k[..., :31], weights, positions, 4)
    with pytest.raises(ValueError, match=r"weights have shape \(2, 9, 3\), expected \(2, 9, 4\)"):
        index_select.select(q, k, weights[..., :3], positions, 4)
    with pytest.raises(ValueError, match="query_positions cover"):
        index_select.select(q, k, weights, positions[:, :3], 4)
    with pytest.raises(ValueError, match="k_index has 1 sequences but q_index has 2"):
        index_select.select(q, k[:1], weights, positions, 4)
    with pytest.raises(ValueError, match="page_table has 1 rows but q_index has 2"):
        index_select.select(q, k, weights, positions, 4, page_table=jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="index_select has no implementation 'fast'"):
        index_select.select(q, k, weights, positions, 4, implementation="fast")
    with pytest.raises(ValueError, match="indices cover"):
        index_select.scores_at(q, k, weights, jnp.zeros((2, 3, 1), jnp.int32))
