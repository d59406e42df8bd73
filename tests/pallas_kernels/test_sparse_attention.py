"""Sparse attention against recorded outputs, a numpy oracle, and dense attention's gradients."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from safetensors.numpy import load_file

from pallas_kernels import sparse_attention
from pallas_kernels.sparse_attention import reference, xla
from pallas_kernels.sparse_attention import rows as key_rows

DATA = Path(__file__).parents[1] / "golden" / "data"
attend = sparse_attention.sparse_attention


@functools.cache
def fixture(name):
    return load_file(DATA / f"sparse_mla_{name}.safetensors")


def oracle(q, kv, indices, scale, value_dim):
    """One query, one head, one key at a time, in float64."""
    batch, queries, heads, _ = q.shape
    o = np.zeros((batch, queries, heads, value_dim))
    logsumexp = np.full((batch, queries, heads), -np.inf)
    for b, t, h in np.ndindex(batch, queries, heads):
        chosen = [int(s) for s in indices[b, t] if 0 <= s < kv.shape[1]]
        if not chosen:
            continue
        rows = kv[b, chosen].astype(np.float64)
        logits = scale * rows @ q[b, t, h].astype(np.float64)
        weights = np.exp(logits - logits.max())
        o[b, t, h] = weights @ rows[:, :value_dim] / weights.sum()
        logsumexp[b, t, h] = logits.max() + np.log(weights.sum())
    return o, logsumexp


def random_problem(batch=2, queries=5, heads=3, width=10, keys=23, selected=6, seed=0, dtype=np.float32):
    """Distinct keys in any order, skipped entries anywhere, one row without a key; some keys of nobody."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, queries, heads, width)).astype(dtype)
    kv = rng.standard_normal((batch, keys, width)).astype(dtype)
    free = 3
    indices = np.stack(
        [
            [rng.permutation(np.r_[np.arange(keys - free), [-1] * 6])[:selected] for _ in range(queries)]
            for _ in range(batch)
        ]
    ).astype(np.int32)
    indices[0, queries // 2] = -1
    return jnp.asarray(q), jnp.asarray(kv), jnp.asarray(indices), keys - free


@pytest.fixture(params=[1, 32 * 2**20], ids=["query_by_query", "one_block"])
def block_size(request, monkeypatch):
    monkeypatch.setattr(key_rows, "GATHER_BYTES", request.param)
    xla.sparse_attention.clear_cache()
    yield
    xla.sparse_attention.clear_cache()


@pytest.mark.golden
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("name", ["prefill", "padded"])
def test_recorded_outputs(name, implementation, block_size):
    f = fixture(name)
    value_dim = f["output"].shape[-1]
    o, logsumexp = attend(
        jnp.asarray(f["q"]),
        jnp.asarray(f["kv"]),
        jnp.asarray(f["indices"]),
        float(f["scale"][0]),
        value_dim,
        implementation=implementation,
    )
    assert o.dtype == logsumexp.dtype == jnp.float32
    np.testing.assert_allclose(o, f["output"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logsumexp, f["logsumexp"], rtol=0, atol=1e-5)
    empty = f["row_valid"] == 0
    assert empty.sum() == (1 if name == "padded" else 0)
    assert (np.asarray(o)[empty] == 0).all() and np.isneginf(np.asarray(logsumexp)[empty]).all()


@settings(max_examples=30)
@given(
    st.sampled_from([(1, 1, 1, 1, 1), (2, 5, 3, 23, 6), (3, 1, 2, 23, 26)]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.01, 1.0, 30.0]),
)
def test_equals_the_oracle(shape, seed, scale):
    batch, queries, heads, keys, selected = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, queries, heads, 10)).astype(np.float32)
    kv = rng.standard_normal((batch, keys, 10)).astype(np.float32)
    # Also entries beyond the cache, which are skipped like -1.
    pool = np.r_[np.arange(keys), [-1, -1, -7, keys, 2**31 - 1]]
    indices = rng.permuted(np.broadcast_to(pool, (batch, queries, pool.size)), axis=2)[..., :selected]
    expected = oracle(q, kv, indices, scale, 7)
    for implementation in ("xla", "reference"):
        got = attend(
            jnp.asarray(q),
            jnp.asarray(kv),
            jnp.asarray(indices, jnp.int32),
            scale,
            7,
            implementation=implementation,
        )
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=3e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("value_dim", [1, 7, 10])
def test_value_and_gradients_in_float64(value_dim, block_size):
    q, kv, indices, used = random_problem(dtype=np.float64)
    poisoned = kv.at[:, used:].set(jnp.nan)
    rng = np.random.default_rng(1)
    do = jnp.asarray(rng.standard_normal((*q.shape[:3], value_dim)))
    dlogsumexp = jnp.asarray(rng.standard_normal(q.shape[:3]))
    # Whatever comes back for a row without a key must stop there.
    empty = jnp.all(indices < 0, axis=-1)
    assert int(empty.sum()) == 1
    dlogsumexp_poisoned = jnp.where(empty[..., None], jnp.nan, dlogsumexp)
    do_poisoned = jnp.where(empty[..., None, None], jnp.nan, do)
    value, pullback = jax.vjp(lambda q, kv: attend(q, kv, indices, 0.4, value_dim), q, poisoned)
    expected, expected_pullback = jax.vjp(
        lambda q, kv: attend(q, kv, indices, 0.4, value_dim, implementation="reference"), q, kv
    )
    for got, want, right in zip(
        value, expected, oracle(*(np.asarray(a) for a in (q, kv, indices)), 0.4, value_dim), strict=True
    ):
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-12)
    gradients = pullback((do_poisoned, dlogsumexp_poisoned))
    for got, want in zip(gradients, expected_pullback((do, dlogsumexp)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)
    assert (np.asarray(gradients[1])[:, used:] == 0).all()
    assert (np.asarray(gradients[0])[np.asarray(empty)] == 0).all()


@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_the_function():
    q, kv, indices, _ = random_problem(dtype=np.float64)
    indices = jnp.where(jnp.all(indices < 0, axis=-1, keepdims=True), 3, indices)
    indices = indices.at[0, 2, 1:].set(-1)
    check_grads(
        lambda q, kv: attend(jnp.asarray(q), jnp.asarray(kv), indices, 0.4, 7),
        (q, kv),
        order=1,
        modes=["rev"],
        atol=1e-6,
        rtol=1e-6,
    )


def test_poison_outside_the_selection_never_shows():
    q, kv, indices, used = random_problem()
    poisons = (jnp.nan, jnp.inf, -jnp.inf)

    def run(kv):
        return jax.vjp(lambda q, kv: attend(q, kv, indices, 0.4, 7), q, kv)

    value, pullback = run(kv)
    expected = (*value, *pullback(jax.tree.map(jnp.ones_like, value)))
    for poison in poisons:
        value, pullback = run(kv.at[:, used:].set(poison))
        got = (*value, *pullback(jax.tree.map(jnp.ones_like, value)))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", ["reference", "gathered", "masked"])
def test_a_nan_reaches_the_queries_that_select_it_alone(form):
    """Also where a product over the keys is shared with the queries that did not."""
    q, kv, indices, _ = random_problem(queries=20)
    selects = np.asarray(indices == 3).any(axis=-1)
    selects[1] = False
    assert 0 < selects[0].sum() < 20
    run = {
        "reference": functools.partial(reference.sparse_attention),
        "gathered": functools.partial(xla.sparse_attention, masked=False),
        "masked": functools.partial(xla.sparse_attention, masked=True),
    }[form]

    def results(kv):
        value, pullback = jax.vjp(lambda q: run(q, kv, indices, 0.4, 7), q)
        return (*value, *pullback(jax.tree.map(jnp.ones_like, value)))

    for poison in (jnp.nan, jnp.inf):
        for got, want in zip(results(kv.at[0, 3, 2].set(poison)), results(kv), strict=True):
            np.testing.assert_allclose(
                np.asarray(got)[~selects], np.asarray(want)[~selects], rtol=1e-6, atol=1e-6
            )
    o, logsumexp, _ = results(kv.at[0, 3, 2].set(jnp.nan))
    assert np.isnan(np.asarray(o)[selects]).all() and np.isnan(np.asarray(logsumexp)[selects]).all()


@pytest.mark.parametrize("form", ["reference", "gathered", "masked"])
@pytest.mark.parametrize("place", ["query", "cotangent", "row", "query that is not looked at"])
def test_gradients_of_rows_that_a_poisoned_query_did_not_select(form, place):
    """A query without keys gives none whatever it holds; one with keys reaches those that it selected."""
    run = {
        "reference": functools.partial(reference.sparse_attention),
        "gathered": functools.partial(xla.sparse_attention, masked=False),
        "masked": functools.partial(xla.sparse_attention, masked=True),
    }[form]
    rng = np.random.default_rng(0)
    q, kv = rng.standard_normal((1, 20, 2, 8)), rng.standard_normal((1, 40, 8))
    cotangent = rng.standard_normal((1, 20, 2, 6))
    indices = np.stack([rng.permutation(39)[:5] for _ in range(20)])[None].astype(np.int32)
    poisoned = set()
    if place == "row":
        kv[0, 39], indices[0, 3, 0], cotangent[0, 3] = np.nan, 39, 0
        poisoned = set(indices[0, 3].tolist())
    elif place == "query that is not looked at":
        q[0, 3], cotangent[0, 3] = np.nan, 0
        poisoned = set(indices[0, 3].tolist())
    else:
        indices[0, 3] = -1
        (q if place == "query" else cotangent)[0, 3] = np.nan
    arrays = (jnp.asarray(a, jnp.float32) for a in (q, kv))
    _, pullback = jax.vjp(lambda q, kv: run(q, kv, jnp.asarray(indices), 0.5, 6)[0], *arrays)
    _, dkv = pullback(jnp.asarray(cotangent, jnp.float32))
    found = set(np.flatnonzero(np.isnan(np.asarray(dkv)[0]).any(axis=-1)).tolist())
    assert found <= poisoned


def test_extreme_logits_neither_overflow_nor_vanish():
    q, kv, indices, _ = random_problem()
    for scale in (1e4, -1e4):
        o, logsumexp = attend(q, kv, indices, scale, 7)
        expected = oracle(*(np.asarray(a) for a in (q, kv, indices)), scale, 7)
        np.testing.assert_allclose(o, expected[0], rtol=0, atol=2e-2)
        np.testing.assert_allclose(logsumexp, expected[1], rtol=1e-6, atol=2e-2)


def test_bfloat16_inputs_are_computed_in_float32():
    q, kv, indices, _ = random_problem()
    q, kv = q.astype(jnp.bfloat16), kv.astype(jnp.bfloat16)
    (o, logsumexp), pullback = jax.vjp(lambda q, kv: attend(q, kv, indices, 0.4, 7), q, kv)
    assert (o.dtype, logsumexp.dtype) == (jnp.bfloat16, jnp.float32)
    wide = attend(q.astype(jnp.float32), kv.astype(jnp.float32), indices, 0.4, 7)
    np.testing.assert_allclose(logsumexp, wide[1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(o.astype(jnp.float32), wide[0], rtol=2**-8, atol=1e-6)
    assert [g.dtype for g in pullback((o, logsumexp))] == [jnp.bfloat16, jnp.bfloat16]
    # The cache may be narrower than the queries.
    mixed = attend(q.astype(jnp.float32), kv, indices, 0.4, 7)
    np.testing.assert_allclose(mixed[0], wide[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_many_queries_are_added_up_in_float32(masked, monkeypatch):
    """A sum of bfloat16 stops growing at 256 times its terms: here one block of one query after the other."""
    queries, selected = 700, 8
    monkeypatch.setattr(xla, "_SCORE_BYTES", 1)
    monkeypatch.setattr(key_rows, "GATHER_BYTES", 1)
    rng = np.random.default_rng(5)
    q = jnp.asarray(0.1 * rng.standard_normal((1, queries, 1, 4)), jnp.bfloat16)
    kv = jnp.asarray(1 + 0.1 * rng.standard_normal((1, selected, 4)), jnp.bfloat16)
    indices = jnp.broadcast_to(jnp.arange(selected, dtype=jnp.int32), (1, queries, selected))

    def gradient(kv):
        def loss(kv):
            o, _ = xla.sparse_attention(q.astype(kv.dtype), kv, indices, 0.5, 4, None, masked)
            return jnp.sum(o, dtype=jnp.float32)

        return jax.grad(loss)(kv)

    expected = gradient(kv.astype(jnp.float32))
    assert float(jnp.min(jnp.sum(expected, axis=-1))) > 256
    found = gradient(kv)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_pages(implementation):
    q, kv, indices, used = random_problem()
    batch, keys, width = kv.shape
    page, count = 4, -(-keys // 4)
    rng = np.random.default_rng(3)
    order = rng.permutation(batch * count + 2)[: batch * count]
    padded = jnp.pad(kv, ((0, 0), (0, count * page - keys), (0, 0)), constant_values=jnp.nan)
    pages = jnp.full((batch * count + 2, page, width), jnp.nan, jnp.float32)
    pages = pages.at[order].set(padded.reshape(-1, page, width))
    table = order.reshape(batch, count).astype(np.int32)
    assert used <= (count - 1) * page
    table[:, -1] = -1
    table = jnp.asarray(table)
    expected, expected_pullback = jax.vjp(
        lambda q, kv: attend(q, kv, indices, 0.4, 7, implementation=implementation), q, kv
    )
    value, pullback = jax.vjp(
        lambda q, pages: attend(q, pages, indices, 0.4, 7, page_table=table, implementation=implementation),
        q,
        pages,
    )
    for got, want in zip(value, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    cotangent = jax.tree.map(jnp.ones_like, value)
    dq, dpages = pullback(cotangent)
    want_dq, want_dkv = expected_pullback(cotangent)
    np.testing.assert_allclose(dq, want_dq, rtol=0, atol=2e-6)
    dkv = np.asarray(dpages)[order].reshape(batch, count * page, width)
    np.testing.assert_allclose(dkv[:, :keys], want_dkv, rtol=0, atol=2e-6)
    # An index on a page without a number is skipped.
    outside = attend(
        q,
        pages,
        jnp.full_like(indices, keys - 1),
        0.4,
        7,
        page_table=table,
        implementation=implementation,
    )
    assert (np.asarray(outside[0]) == 0).all() and np.isneginf(np.asarray(outside[1])).all()


def test_nothing_grows_with_queries_times_cache():
    queries, keys, width, selected = 64, 8192, 32, 16
    q = jax.ShapeDtypeStruct((1, queries, 2, width), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, keys, width), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, queries, selected), jnp.int32)

    def loss(q, kv, indices):
        return jnp.sum(attend(q, kv, indices, 0.4, 16)[0])

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(q, kv, indices).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * keys * width * 4


# Merging partial results


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merge_of_disjoint_keys(parts):
    q, kv, indices, _ = random_problem(selected=12)
    whole = attend(q, kv, indices, 0.4, 7)
    owner = jnp.asarray(np.random.default_rng(2).integers(0, parts, kv.shape[1]))
    pieces = [attend(q, kv, jnp.where(owner[indices] == part, indices, -1), 0.4, 7) for part in range(parts)]
    merged = sparse_attention.merge(*(jnp.stack(p) for p in zip(*pieces, strict=True)))
    for got, want in zip(merged, whole, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_merge_ignores_what_an_empty_part_holds():
    outputs = jnp.asarray([[[1.0, 2.0], [3.0, 4.0]], [[jnp.nan, jnp.nan], [jnp.nan, 0.0]]], jnp.float32)
    logsumexps = jnp.asarray([[1000.0, -jnp.inf], [-jnp.inf, -jnp.inf]], jnp.float32)
    o, logsumexp = sparse_attention.merge(outputs, logsumexps)
    np.testing.assert_array_equal(o, [[1.0, 2.0], [0.0, 0.0]])
    np.testing.assert_array_equal(logsumexp, [1000.0, -np.inf])


@pytest.mark.parametrize("highest", [0.0, -88.0, -89.0, -200.0, 300.0])
def test_gradients_beside_an_empty_part(highest):
    """The exponential of what is not there, beside a low maximum, would be infinite and its gradient NaN."""
    outputs = jnp.array([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]])
    logsumexps = jnp.array([highest, -jnp.inf, highest - 1])

    def loss(outputs, logsumexps):
        o, logsumexp = sparse_attention.merge(outputs, logsumexps)
        return o @ jnp.array([1.0, -0.5]) + 0.3 * logsumexp

    share = 1 / (1 + np.exp(-1))
    do, dlogsumexp = jax.grad(loss, (0, 1))(outputs, logsumexps)
    weights = np.array([share, 0, 1 - share])
    np.testing.assert_allclose(do, weights[:, None] * [1, -0.5], rtol=1e-5)
    values = np.array([0.0, 0.0, 2.5])
    np.testing.assert_allclose(dlogsumexp, weights * (values - weights @ values) + 0.3 * weights, atol=1e-5)


def test_no_pages():
    q, kv, indices, _ = random_problem()
    o, logsumexp = sparse_attention.sparse_attention(
        q, kv, indices, 0.4, 7, page_table=jnp.zeros((q.shape[0], 0), jnp.int32)
    )
    assert not np.asarray(o).any() and np.isneginf(np.asarray(logsumexp)).all()


@pytest.mark.usefixtures("x64")
def test_gradients_through_merge():
    q, kv, indices, _ = random_problem(selected=12, dtype=np.float64)
    rng = np.random.default_rng(2)
    do, dlogsumexp = (
        jnp.asarray(rng.standard_normal((2, 5, 3, 7))),
        jnp.asarray(rng.standard_normal((2, 5, 3))),
    )

    def in_parts(q, kv):
        pieces = [attend(q, kv, jnp.where(indices % 3 == part, indices, -1), 0.4, 7) for part in range(3)]
        return sparse_attention.merge(*(jnp.stack(p) for p in zip(*pieces, strict=True)))

    got = jax.vjp(in_parts, q, kv)[1]((do, dlogsumexp))
    want = jax.vjp(lambda q, kv: attend(q, kv, indices, 0.4, 7), q, kv)[1]((do, dlogsumexp))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from pallas_kernels import index_select, sparse_attention

mesh = jax.make_mesh((2, 4), ("tensor", "context"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
B, Q, H, C, S, N = 2, 5, 4, 10, 32, 7
array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
q, kv, do = array(B, Q, H, C), array(B, S, C), array(B, Q, H, 6)
indices = jnp.asarray(rng.permuted(np.tile(np.arange(-8, S), (B, Q, 1)), axis=2)[..., :N], jnp.int32)
indices = indices.at[1, 2].set(-1)
attend = functools.partial(sparse_attention.sparse_attention, scale=0.4, value_dim=6)

@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, None, "tensor"), P(None, "context"), P()),
                   out_specs=P(None, None, "tensor"))
def sharded(q, kv, indices):
    # Heads are split over one axis, positions over the other; every device holds 8 positions.
    first = jax.lax.axis_index("context") * 8
    local = jnp.where((indices >= first) & (indices < first + 8), indices - first, -1)
    parts = attend(q, kv, local)
    gathered = [jax.lax.all_gather(p, "context", to="invarying") for p in parts]
    return sparse_attention.merge(*gathered)[0]

value, pullback = jax.vjp(lambda q, kv: jax.jit(sharded)(q, kv, indices), q, kv)
want, want_pullback = jax.vjp(lambda q, kv: attend(q, kv, indices)[0], q, kv)
np.testing.assert_allclose(value, want, rtol=0, atol=1e-6)
for a, b in zip(pullback(do), want_pullback(do)):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)

# The indexer's training scores, with queries split and keys on every device.
w = array(B, 8, H)
qi, at = array(B, 8, H, C), jnp.asarray(rng.integers(-1, S, (B, 8, 3)), jnp.int32)
split = jax.shard_map(lambda q, k, w, i: index_select.scores_at(q, k, w, i), mesh=mesh,
    in_specs=(P(None, "context"), P(), P(None, "context"), P(None, "context")), out_specs=P(None, "context"))
value, pullback = jax.vjp(lambda q, k, w: jax.jit(split)(q, k, w, at), qi, kv, w)
want, want_pullback = jax.vjp(lambda q, k, w: index_select.scores_at(q, k, w, at), qi, kv, w)
np.testing.assert_allclose(value, want, rtol=0, atol=1e-6)
for a, b in zip(pullback(jnp.ones_like(value)), want_pullback(jnp.ones_like(value))):
    np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)
print("equal")
"""


def test_shards_of_heads_and_keys_give_the_same_values_and_gradients():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]


@pytest.mark.parametrize("shape", [(0, 20, 3, 8, 4), (2, 0, 3, 8, 4), (2, 20, 3, 0, 4), (2, 20, 3, 8, 0)])
def test_nothing_to_attend_to_is_no_key(shape):
    """Batch, queries, heads, keys, selected: with none of something every row is one without a key."""
    batch, queries, heads, keys, selected = shape
    o, logsumexp = sparse_attention.sparse_attention(
        jnp.ones((batch, queries, heads, 6)),
        jnp.ones((batch, keys, 6)),
        jnp.zeros((batch, queries, selected), jnp.int32) - 1,
        0.5,
        4,
    )
    assert o.shape == (batch, queries, heads, 4) and logsumexp.shape == (batch, queries, heads)
    assert not np.asarray(o).any() and np.isneginf(np.asarray(logsumexp)).all()


def test_errors_name_the_value_and_the_way_out():
    q, kv, indices, _ = random_problem()
    with pytest.raises(ValueError, match="kv_latent has 9 channels but q_latent has 10"):
        attend(q, kv[..., :9], indices, 0.4, 7)
    with pytest.raises(ValueError, match=r"value_dim is 11, expected 1\.\.10"):
        attend(q, kv, indices, 0.4, 11)
    with pytest.raises(ValueError, match="indices cover"):
        attend(q, kv, indices[:, :2], 0.4, 7)
    with pytest.raises(ValueError, match="kv_latent has 1 sequences but q_latent has 2"):
        attend(q, kv[:1], indices, 0.4, 7)
    with pytest.raises(ValueError, match="page_table has 1 rows but q_latent has 2"):
        attend(q, kv, indices, 0.4, 7, page_table=jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="sparse_attention has no implementation 'fast'"):
        attend(q, kv, indices, 0.4, 7, implementation="fast")
