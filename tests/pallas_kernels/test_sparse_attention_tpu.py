"""The TPU kernels of sparse attention, interpreted: races are errors and untouched memory is NaN."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from pallas_kernels import sparse_attention
from pallas_kernels.sparse_attention import _tpu_shared, reference, tpu

DATA = Path(__file__).parents[1] / "golden" / "data"
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
BATCH, QUERIES, HEADS, WIDTH, VALUES, KEYS, SELECTED = 2, 3, 3, 10, 7, 23, 20
SCALE = 0.4
# Two blocks of 16 for 20 selected keys.
BLOCK = 16
# For queries that share keys: blocks of 1,024 keys and words of 4,096, the last of both hardly begun.
LONG, LONG_BLOCK = 4200, 1024


def inputs(
    seed: int, dtype: Any = jnp.float32, heads: int = HEADS, keys: int = KEYS
) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    q, kv = (rng.standard_normal(s) for s in ((BATCH, QUERIES, heads, WIDTH), (BATCH, keys, WIDTH)))
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype)


def only_selected(kv: jax.Array, indices: np.ndarray) -> jax.Array:
    """The cache with NaN in every row that no query of its sequence selects."""
    used = (indices[:, :, :, None] == np.arange(kv.shape[1])).any(axis=(1, 2))
    return jnp.where(jnp.asarray(used)[..., None], kv, jnp.nan)


def random_indices(seed: int, keys: int = KEYS) -> np.ndarray:
    """Distinct keys in any order with -1 in between; one query without a key, one with a single late one."""
    rng = np.random.default_rng(seed)
    pool = np.r_[np.arange(keys), [-1] * 6]
    rows = [[rng.permutation(pool)[:SELECTED] for _ in range(QUERIES)] for _ in range(BATCH)]
    indices = np.array(rows, np.int32)
    indices[0, 1] = -1
    indices[1, 0] = -1
    indices[1, 0, SELECTED - 2] = 4
    return indices


def run(q: Any, kv: Any, indices: Any, page_table: Any = None) -> tuple[jax.Array, jax.Array]:
    """Every query fetches its own rows."""
    return tpu.sparse_attention(
        q, kv, jnp.asarray(indices), SCALE, VALUES, page_table, shared=False, block=BLOCK, interpret=INTERPRET
    )


def run_shared(q: Any, kv: Any, indices: Any, page_table: Any = None) -> tuple[jax.Array, jax.Array]:
    """Queries walk the cache together."""
    return tpu.sparse_attention(
        q, kv, jnp.asarray(indices), SCALE, VALUES, page_table, True, LONG_BLOCK, interpret=INTERPRET
    )


def oracle(q: Any, kv: Any, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One query, one head, one key at a time, in float64."""
    q, kv = (np.asarray(a).astype(np.float64) for a in (q, kv))
    o = np.zeros((*q.shape[:3], VALUES))
    logsumexp = np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(*q.shape[:3]):
        chosen = [int(s) for s in indices[b, t] if 0 <= s < kv.shape[1]]
        if chosen:
            logits = SCALE * kv[b, chosen] @ q[b, t, h]
            weights = np.exp(logits - logits.max())
            o[b, t, h] = weights @ kv[b, chosen, :VALUES] / weights.sum()
            logsumexp[b, t, h] = logits.max() + np.log(weights.sum())
    return o, logsumexp


def assert_equal(found: tuple[Any, Any], expected: tuple[Any, Any], dtype: Any = jnp.float32) -> None:
    assert found[0].dtype == dtype and found[1].dtype == jnp.float32
    relative = 2.0**-8 if dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(np.asarray(found[0], np.float64), expected[0], rtol=relative, atol=3e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-6, atol=3e-6)


@st.composite
def selections(draw: st.DrawFn) -> np.ndarray:
    """Per query: how many keys (none, one, all the room), how many keys the sequence has, where the gaps are."""
    rows = []
    for _ in range(BATCH * QUERIES):
        length = draw(st.sampled_from([1, 2, KEYS]) | st.integers(1, KEYS))
        count = min(length, draw(st.sampled_from([0, 1, 15, 16, 17, SELECTED]) | st.integers(0, SELECTED)))
        order = draw(st.permutations(range(length)))[:count]
        # Whatever lies outside the cache is skipped, like -1.
        gap = draw(st.sampled_from([-1, -7, KEYS, 2**31 - 1]))
        filled = [*order, *[gap] * (SELECTED - count)]
        rows.append(draw(st.permutations(filled)) if draw(st.booleans()) else filled)
    return np.array(rows, np.int32).reshape(BATCH, QUERIES, SELECTED)


@st.composite
def long_selections(draw: st.DrawFn) -> np.ndarray:
    """Per query of a long cache: keys in any order from a window that may end on, or begin after, any block."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    indices = np.full((BATCH, QUERIES, SELECTED), -1, np.int32)
    for b, t in np.ndindex(BATCH, QUERIES):
        first = draw(st.sampled_from([0, 0, 127, 1024, 4095, LONG - 1]))
        length = draw(st.sampled_from([1, 2, 128, 129, 1024, LONG]))
        window = np.arange(first, min(first + length, LONG))
        count = min(len(window), draw(st.integers(0, SELECTED)))
        slots = rng.permutation(SELECTED)[:count]
        indices[b, t, slots] = rng.permutation(window)[:count]
    return indices


@settings(max_examples=8)
@given(indices=selections(), seed=st.integers(0, 2**16))
def test_any_selection(indices: np.ndarray, seed: int) -> None:
    q, kv = inputs(seed)
    assert_equal(run(q, only_selected(kv, indices), indices), oracle(q, kv, indices))


def test_bfloat16_rows_come_in_pairs() -> None:
    """Neighbours of selected rows are NaN, the last row has no neighbour, and the softmax is in float32."""
    q, kv = inputs(1, jnp.bfloat16)
    indices = random_indices(2)
    indices[0, 0] = [0, 3, 22, 5, *[-1] * 16]
    indices[0, 2] = [22, *[-1] * 18, 9]
    expected = oracle(q, kv, indices)
    assert_equal(run(q, only_selected(kv, indices), indices), expected, jnp.bfloat16)


def test_wider_queries_than_keys_are_computed_in_float32() -> None:
    q, kv = inputs(3)[0], inputs(3, jnp.bfloat16)[1]
    indices = random_indices(4)
    assert_equal(run(q, only_selected(kv, indices), indices), oracle(q, kv, indices))


@pytest.mark.parametrize(
    ("page", "dtype"), [(6, jnp.bfloat16), pytest.param(5, jnp.float32, marks=pytest.mark.slow)]
)
def test_pages(page: int, dtype: Any) -> None:
    """Pages in any order, others than ours and the unwritten end full of NaN, and a page without a number."""
    q, kv = inputs(5, dtype)
    count = -(-KEYS // page)
    indices = random_indices(6, keys=(count - 1) * page)
    kv = only_selected(kv, indices)
    order = np.random.default_rng(7).permutation(BATCH * count + 2)[: BATCH * count]
    padded = jnp.pad(kv, ((0, 0), (0, count * page - KEYS), (0, 0)), constant_values=jnp.nan)
    pages = jnp.full((BATCH * count + 2, page, WIDTH), jnp.nan, dtype)
    pages = pages.at[order].set(padded.reshape(-1, page, WIDTH))
    table = order.reshape(BATCH, count).astype(np.int32)
    table[:, -1] = -1
    indices[1, 2, 0] = (count - 1) * page
    expected = oracle(q, kv, np.where(indices >= (count - 1) * page, -1, indices))
    assert_equal(run(q, pages, indices, jnp.asarray(table)), expected, dtype)


def test_shards_of_keys_merge_into_the_whole() -> None:
    q, kv = inputs(8)
    indices = random_indices(9)
    kv = only_selected(kv, indices)
    parts = [run(q, kv, np.where(indices % 3 == part, indices, -1)) for part in range(3)]
    merged = sparse_attention.merge(*(jnp.stack(p) for p in zip(*parts, strict=True)))
    assert_equal(merged, oracle(q, kv, indices))


def test_a_selected_nan_is_not_hidden() -> None:
    q, kv = inputs(10)
    indices = random_indices(11)
    o, logsumexp = run(q, kv.at[1, 4, 0].set(jnp.nan), indices)
    assert np.isnan(np.asarray(o)[1, 0]).all() and np.isnan(np.asarray(logsumexp)[1, 0]).all()
    assert not np.isnan(np.asarray(o)[0]).any()


def test_a_nan_reaches_the_queries_that_select_it_alone() -> None:
    """Among queries that share keys: output, logsumexp and dq of the others are what they are without it."""
    q, kv = inputs(38, keys=LONG)
    indices = random_indices(39, keys=LONG)
    # Of the sequence's queries only the last selects the key.
    indices[0, 2, 0] = 77
    indices[0, :2] = np.where(indices[0, :2] == 77, 78, indices[0, :2])

    def results(kv: jax.Array) -> tuple[jax.Array, ...]:
        value, pull_back = jax.vjp(lambda q: run_shared(q, kv, indices), q)
        return (*value, *pull_back(jax.tree.map(jnp.ones_like, value)))

    poisoned = results(kv.at[0, 77, 1].set(jnp.nan))
    for found, expected in zip(poisoned, results(kv), strict=True):
        assert np.isnan(np.asarray(found)[0, 2]).all()
        np.testing.assert_array_equal(np.asarray(found)[0, :2], np.asarray(expected)[0, :2])
        np.testing.assert_array_equal(np.asarray(found)[1], np.asarray(expected)[1])


def test_large_logits_neither_overflow_nor_vanish() -> None:
    q, kv = inputs(12)
    indices = random_indices(13)
    found = run(q * 1e4, kv, indices)
    expected = oracle(q * 1e4, kv, indices)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=2e-2)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=2e-2)


def cotangents(q: jax.Array, indices: np.ndarray, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Of o and logsumexp; NaN where a row has no key, where whatever comes back must stop."""
    rng = np.random.default_rng(16)
    do = jnp.asarray(rng.standard_normal((*q.shape[:3], VALUES)), dtype)
    dlogsumexp = jnp.asarray(rng.standard_normal(q.shape[:3]), jnp.float32)
    empty = jnp.asarray((indices < 0).all(axis=-1))[..., None]
    return jnp.where(empty[..., None], jnp.nan, do), jnp.where(empty, jnp.nan, dlogsumexp)


def check_gradients(
    attend: Any, q: Any, kv: Any, indices: np.ndarray, ct: Any = None, relative: float = 2e-6
) -> tuple[jax.Array, jax.Array]:
    """Against those of the definition in float64, which has no NaN in it; the output itself comes back."""
    ct = cotangents(q, indices, q.dtype) if ct is None else ct
    value, pull_back = jax.vjp(lambda q, kv: attend(q, kv, indices), q, only_selected(kv, indices))
    found = pull_back(ct)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (q, kv, *ct)]

        def definition(q: Any, kv: Any) -> Any:
            return reference.sparse_attention(q, kv, jnp.asarray(indices), SCALE, VALUES)

        expected = jax.vjp(definition, *wide[:2])[1](tuple(jnp.nan_to_num(a, nan=0.0) for a in wide[2:]))
    # In numpy: JAX would narrow float64 here.
    for a, b, like in zip(found, map(np.asarray, expected), (q, kv), strict=True):
        assert a.dtype == like.dtype
        # The parts of a bfloat16 weight hold 16 bits, of sums that may cancel.
        absolute = 1e-5 if like.dtype == jnp.float32 else 2.0**-12 * np.abs(b).max()
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=relative, atol=absolute)
    return value


def test_gradients() -> None:
    check_gradients(run, *inputs(14), random_indices(15))


@pytest.mark.slow
@settings(max_examples=3)
@given(indices=long_selections(), seed=st.integers(0, 2**16))
def test_gradients_of_shared_keys(indices: np.ndarray, seed: int) -> None:
    check_gradients(run_shared, *inputs(seed, keys=LONG), indices)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [96, 48, 24, 12, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_of_shared_keys(heads: int, dtype: Any) -> None:
    """What the heads change: how many queries share, and rows that fill no tile. Blocks of keys and words of bits have
    tests of their own, so that three blocks do here. In bfloat16 as good as its rounding: sums and weights are wider.
    """
    q, kv = inputs(29, dtype, heads, 300)
    indices = random_indices(30, keys=300)

    def attend(q: Any, kv: Any, indices: Any) -> Any:
        return tpu.sparse_attention(
            q, kv, jnp.asarray(indices), SCALE, VALUES, None, True, 128, interpret=INTERPRET
        )

    relative = 2.0**-8 if dtype == jnp.bfloat16 else 2e-6
    value = check_gradients(attend, q, kv, indices, relative=relative)
    assert_equal(value, oracle(q, kv, indices), dtype)


@pytest.mark.slow
def test_shared_keys_in_chunks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """More queries than one block, bits for one block at a time: several chunks add to one gradient of the cache, and
    the same bits come out twice."""
    monkeypatch.setattr(_tpu_shared, "_MASK_BYTES", 1)
    rng = np.random.default_rng(31)
    q = jnp.asarray(rng.standard_normal((1, 70, HEADS, WIDTH)), jnp.float32)
    kv = jnp.asarray(rng.standard_normal((1, 300, WIDTH)), jnp.float32)
    indices = np.stack([rng.permutation(300)[:SELECTED] for _ in range(70)])[None].astype(np.int32)
    indices[0, :, 5] = -1
    tpu.sparse_attention.clear_cache()
    value = check_gradients(run_shared, q, kv, indices)
    assert_equal(value, oracle(q, kv, indices))
    ct = cotangents(q, indices)
    once, again = (jax.vjp(lambda q, kv: run_shared(q, kv, indices), q, kv)[1](ct) for _ in range(2))
    tpu.sparse_attention.clear_cache()
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.golden
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["padded", pytest.param("prefill", marks=pytest.mark.slow)])
def test_recorded_outputs(name: str, shared: bool) -> None:
    f = load_file(DATA / f"sparse_mla_{name}.safetensors")
    arrays = (jnp.asarray(f[key]) for key in ("q", "kv", "indices"))
    scale, value_dim = float(f["scale"][0]), f["output"].shape[-1]
    how = {"shared": shared, "block": 128 if shared else BLOCK, "interpret": INTERPRET}
    o, logsumexp = tpu.sparse_attention(*arrays, scale, value_dim, **how)
    np.testing.assert_allclose(o, f["output"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logsumexp, f["logsumexp"], rtol=0, atol=1e-5)


@settings(max_examples=5)
@given(indices=long_selections(), seed=st.integers(0, 2**16))
def test_shared_keys_of_any_selection(indices: np.ndarray, seed: int) -> None:
    q, kv = inputs(seed, keys=LONG)
    assert_equal(run_shared(q, only_selected(kv, indices), indices), oracle(q, kv, indices))


@pytest.mark.parametrize(
    ("page", "dtype"),
    [
        (64, jnp.float32),
        pytest.param(16, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(2048, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_shared_keys_in_pages(page: int, dtype: Any) -> None:
    """Pages of a block, and a page of blocks: in any order, others and the unwritten end full of NaN."""
    q, kv = inputs(32, dtype, keys=LONG)
    count = -(-LONG // page)
    written = (count - 1) * page
    indices = random_indices(33, keys=written)
    kv = only_selected(kv, indices)
    order = np.random.default_rng(34).permutation(BATCH * count + 2)[: BATCH * count]
    padded = jnp.pad(kv, ((0, 0), (0, count * page - LONG), (0, 0)), constant_values=jnp.nan)
    pages = jnp.full((BATCH * count + 2, page, WIDTH), jnp.nan, dtype)
    pages = pages.at[order].set(padded.reshape(-1, page, WIDTH))
    table = order.reshape(BATCH, count).astype(np.int32)
    table[:, -1] = [-1, 2**31 - 1]
    indices[1, 2, 0] = written
    expected = oracle(q, kv, np.where(indices >= written, -1, indices))
    assert_equal(run_shared(q, pages, indices, jnp.asarray(table)), expected, dtype)


@pytest.mark.slow
def test_gradients_through_pages() -> None:
    page, count = 64, LONG // 64 + 1
    q, kv = inputs(35, keys=count * page)
    indices = random_indices(36, keys=count * page)
    table = jnp.asarray(np.random.default_rng(37).permutation(BATCH * count).reshape(BATCH, count), jnp.int32)

    def paged(q: Any, kv: Any, indices: Any) -> Any:
        pages = jnp.zeros((BATCH * count, page, WIDTH)).at[table].set(kv.reshape(BATCH, count, page, WIDTH))
        return run_shared(q, pages, indices, table)

    check_gradients(paged, q, kv, indices)


def test_shared_keys_in_bfloat16() -> None:
    q, kv = inputs(21, jnp.bfloat16, keys=LONG)
    indices = random_indices(22, keys=LONG)
    indices[0, 0, :4] = [0, LONG - 1, 1024, 4096]
    assert_equal(run_shared(q, only_selected(kv, indices), indices), oracle(q, kv, indices), jnp.bfloat16)


def test_bits_of_the_selection() -> None:
    """More words than one step makes; a negative index and one beyond the words set nothing."""
    keys = 70_000
    rng = np.random.default_rng(23)
    indices = np.stack([rng.permutation(keys)[:SELECTED] for _ in range(8)])[None].astype(np.int32)
    indices[0, :, 3:8] = -1, -128, -(2**31), 24 * 4096, 2**31 - 1
    indices[0, :2, 0] = 0, keys - 1
    words = np.asarray(_tpu_shared.selection_bits(jnp.asarray(indices), keys, INTERPRET)).view(np.uint32)
    bits = (words[0, :, :, None, :] >> np.arange(32, dtype=np.uint32)[:, None]) & 1
    dense = np.swapaxes(bits, 0, 1).reshape(8, -1)
    expected = np.zeros_like(dense)
    for row, chosen in zip(expected, indices[0], strict=True):
        row[chosen[(chosen >= 0) & (chosen < keys)]] = 1
    np.testing.assert_array_equal(dense, expected)


def test_a_query_without_keys_leaves_no_trace_in_gradients_where_keys_are_shared() -> None:
    """Whatever it holds: its gradient of zero would not stop a NaN in a product."""
    q, kv = inputs(43, keys=LONG)
    indices = random_indices(44, keys=LONG)
    indices[0, 1] = -1

    def gradients(q: Any) -> Any:
        return jax.grad(lambda q, kv: jnp.sum(jnp.sin(run_shared(q, kv, indices)[0])), (0, 1))(q, kv)

    found, wanted = (gradients(jnp.asarray(q).at[0, 1].set(value)) for value in (jnp.nan, 0.0))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("keys", [64, 4096, 5000])
def test_bits_of_keys_that_exist(keys: int) -> None:
    def unpacked(words: Any) -> np.ndarray:
        bits = (
            np.asarray(words).view(np.uint32)[:, :, 0, None] >> np.arange(32, dtype=np.uint32)[:, None]
        ) & 1
        return bits.reshape(bits.shape[0], -1)

    found = _tpu_shared.existing_bits(keys, None, 0)
    assert (found is None) == (keys == 4096)
    if found is not None:
        np.testing.assert_array_equal(
            unpacked(found), (np.arange(8192 if keys > 4096 else 4096) < keys)[None]
        )
    page = 8
    table = np.arange(2 * (keys // page), dtype=np.int32).reshape(2, -1)
    table[0, 1], table[1, 0], table[1, -1] = -1, -7, table.size
    dense = unpacked(_tpu_shared.existing_bits(keys, jnp.asarray(table), table.size))
    exists = np.repeat((table >= 0) & (table < table.size), page, axis=1)
    np.testing.assert_array_equal(dense[:, :keys], exists)
    assert not dense[:, keys:].any()


@pytest.mark.parametrize("paged", [False, True])
def test_indices_beyond_the_cache_are_skipped_where_keys_are_shared(paged: bool) -> None:
    """Also those within the last word, those of pages that are not there, and wider numbers."""
    q, kv = inputs(41, keys=LONG)
    indices = random_indices(42, keys=LONG)
    indices[:, :, :3] = LONG, 2**31 - 1, -5
    table = None
    pages = kv
    if paged:
        page = 64
        table = np.arange(BATCH * (LONG // page), dtype=np.int32).reshape(BATCH, -1)
        pages = jnp.asarray(kv)[:, : LONG // page * page].reshape(-1, page, WIDTH)
        table[:, 2], table[:, 3] = -1, table.size
        indices[:, :, 3:5] = 2 * page + 1, 3 * page + 2
    found = run_shared(q, pages, indices, None if table is None else jnp.asarray(table))
    keep = (indices >= 0) & (indices < LONG)
    if paged:
        keep &= (indices // 64 != 2) & (indices // 64 != 3) & (indices < LONG // 64 * 64)
    assert_equal(found, oracle(q, kv, np.where(keep, indices, -1)), jnp.float32)


def test_who_shares() -> None:
    """Many queries with few heads over a cache that is not too long; decoding and all heads at once do not."""

    def shares(queries: int, heads: int, keys: int, dtype: Any = jnp.bfloat16) -> bool:
        return tpu.shares_keys(queries, heads, 640, 512, keys, 2048, dtype)

    assert shares(128, 12, 131072) and shares(8192, 3, 2**18)
    assert not shares(1, 12, 131072) and not shares(128, 96, 131072) and not shares(128, 12, 2**20)
    assert shares(128, 96, 16384) and not shares(128, 12, 131072, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [96, 48, 24, 12, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads(heads: int, dtype: Any) -> None:
    q, kv = inputs(17, dtype, heads)
    indices = random_indices(18)
    relative = 2.0**-8 if dtype == jnp.bfloat16 else 2e-6
    assert_equal(check_gradients(run, q, kv, indices, relative=relative), oracle(q, kv, indices), dtype)


@pytest.mark.parametrize("shared", [False, True])
def test_results_vary_over_the_axes_of_the_arguments(shared: bool) -> None:
    """Under shard_map with its checks on: the shards' results merge into one that all devices share."""
    q, kv = inputs(27)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))

    def merged(q: Any, kv: Any, indices: Any) -> Any:
        parts = tpu.sparse_attention(q, kv, indices, SCALE, VALUES, shared=shared)
        gathered = [jax.lax.all_gather(part, "context", to="invarying") for part in parts]
        return sparse_attention.merge(*gathered)

    sharded = jax.shard_map(merged, mesh=mesh, in_specs=(P(), P(None, "context"), P()), out_specs=P())
    o, logsumexp = jax.eval_shape(sharded, q, kv, jnp.asarray(random_indices(28)))
    assert o.shape == (*q.shape[:3], VALUES) and logsumexp.shape == q.shape[:3]


def test_what_the_kernel_refuses() -> None:
    q, kv = inputs(19)
    indices = random_indices(20)
    with pytest.raises(
        NotImplementedError, match="of 16 keys that fit blocks of 512, and got 2 x 23 keys in pages"
    ):
        tpu.sparse_attention(
            q, kv, jnp.asarray(indices), SCALE, VALUES, jnp.zeros((BATCH, 1), jnp.int32), shared=True
        )
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="q_latent of float64"):
        sparse_attention.sparse_attention(
            jnp.asarray(np.asarray(q, np.float64)), kv, indices, SCALE, VALUES, implementation="tpu"
        )
    with pytest.raises(NotImplementedError, match="kv_latent of float16"):
        sparse_attention.sparse_attention(
            q, kv.astype(jnp.float16), indices, SCALE, VALUES, implementation="tpu"
        )
    pages = jax.ShapeDtypeStruct((2**25, 65, WIDTH), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((BATCH, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="33554432 pages of 65 keys"):
        jax.eval_shape(lambda p, t: tpu.sparse_attention(q, p, indices, SCALE, VALUES, t), pages, table)
