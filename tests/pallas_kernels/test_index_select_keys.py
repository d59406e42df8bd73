"""Index keys in fp8 and fp4: their format, and selections that are those of the values they stand for."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import index_select, mxfp4_matmul
from pallas_kernels.index_select import QuantizedKeys, dequantize_keys, quantize_keys, tpu, xla

KINDS = ["fp8", "fp4"]
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
BATCH, QUERIES, HEADS, CHANNELS, KEYS, TOP_K = 2, 3, 4, 64, 300, 20
PAGE = 128


def random_keys(seed: int, *lead: int, channels: int = CHANNELS) -> np.ndarray:
    """Rows of very different magnitude, and a row of zeros."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((*lead, channels)) * np.exp2(rng.integers(-20, 20, (*lead, 1)))
    keys.reshape(-1, channels)[0] = 0
    return keys.astype(np.float32)


def expected_values(keys: np.ndarray, kind: str) -> np.ndarray:
    """By the definition, in float64: fp8 with the smallest scale that nothing overflows."""
    if kind == "fp4":
        return np.asarray(mxfp4_matmul.quantize(keys).dequantize(jnp.float32))
    wide = keys.astype(np.float64)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    power = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1) / 448)))
    return (wide / power).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * power


@pytest.mark.parametrize("kind", KINDS)
def test_format(kind: str) -> None:
    keys = random_keys(0, 40)
    # On the boundary of two scales, and the largest code.
    keys[1, :] = 0
    keys[1, 3] = 448 * 2.0**5
    keys[2, :] = 0
    keys[2, 3] = np.nextafter(np.float32(448 * 2.0**5), np.float32(np.inf))
    quantized = quantize_keys(keys, kind)
    values = np.asarray(dequantize_keys(quantized))
    np.testing.assert_array_equal(values, expected_values(keys, kind))
    np.testing.assert_array_equal(np.asarray(dequantize_keys(quantized, jnp.bfloat16), np.float32), values)
    again = quantize_keys(values, kind)
    np.testing.assert_array_equal(dequantize_keys(again), values)
    bytes_per_key = sum(a.size * a.dtype.itemsize for a in quantized) / 40
    assert bytes_per_key == {"fp8": CHANNELS + 1, "fp4": CHANNELS / 2 + CHANNELS / 32}[kind]


def test_channels_of_an_fp4_byte() -> None:
    """Byte j holds the channels j (low) and j + D/2 (high)."""
    keys = np.zeros((1, 64), np.float32)
    keys[0, 5], keys[0, 5 + 32] = 1.0, -6.0
    quantized = quantize_keys(keys, "fp4")
    low, high = int(quantized.codes[0, 5]) & 15, int(quantized.codes[0, 5]) >> 4
    # 1 with a scale of 1/4 is the code of 4, and -6 with a scale of 1 the negative code of 6.
    assert (low, high) == (6, 15) and np.asarray(quantized.scales).tolist() == [[125, 127]]
    assert np.count_nonzero(np.asarray(quantized.codes)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_nan(kind: str) -> None:
    keys = random_keys(1, 4)
    keys[1, 2], keys[2, 40] = np.nan, np.inf
    values = np.asarray(dequantize_keys(quantize_keys(keys, kind)))
    assert np.isnan(values[1, 2]) and np.isnan(values[2, 40]) and np.isfinite(values[[0, 3]]).all()
    # In fp8 by itself, in fp4 with its block.
    assert np.isfinite(values[1, 40])


def problem(seed: int, kind: str, dtype: Any, exact: bool = True) -> tuple[Any, ...]:
    """Scores that are exact in any order, many of them ties; keys that nobody sees are NaN."""
    rng = np.random.default_rng(seed)
    if exact:
        pool = rng.integers(-2, 3, (BATCH, 40, CHANNELS)) * np.exp2(rng.integers(-1, 2, (BATCH, 40, 1)))
        keys = pool[:, rng.integers(0, 40, KEYS)].astype(np.float32)
        q = rng.integers(-2, 3, (BATCH, QUERIES, HEADS, CHANNELS))
        weights = rng.choice([-1.0, -0.0, 0.0, 0.5, 1.0], (BATCH, QUERIES, HEADS))
    else:
        keys = random_keys(seed, BATCH, KEYS)
        q = rng.standard_normal((BATCH, QUERIES, HEADS, CHANNELS))
        weights = rng.standard_normal((BATCH, QUERIES, HEADS))
    positions = rng.integers(-1, KEYS, (BATCH, QUERIES)).astype(np.int32)
    unseen = np.arange(KEYS)[None, :, None] > positions.max(axis=1)[:, None, None]
    values = dequantize_keys(quantize_keys(keys, kind))
    poisoned = quantize_keys(np.where(unseen, np.nan, keys), kind)
    return jnp.asarray(q, dtype), values, poisoned, jnp.asarray(weights, jnp.float32), jnp.asarray(positions)


def in_pages(keys: QuantizedKeys, seed: int) -> tuple[QuantizedKeys, jax.Array]:
    """The keys in pages of `PAGE` in any order, others than theirs and the end of the last full of NaN."""
    rng = np.random.default_rng(seed)
    count = -(-KEYS // PAGE)
    order = rng.permutation(BATCH * count + 1)[: BATCH * count]

    def one(array: jax.Array) -> jax.Array:
        nan = 255 if array.dtype == jnp.uint8 else jnp.nan
        rest = array.shape[2:]
        padded = jnp.pad(
            array, ((0, 0), (0, count * PAGE - KEYS), *((0, 0),) * len(rest)), constant_values=nan
        )
        pages = jnp.full((BATCH * count + 1, PAGE, *rest), nan, array.dtype)
        return pages.at[order].set(padded.reshape(-1, PAGE, *rest))

    return jax.tree.map(one, keys), jnp.asarray(order.reshape(BATCH, count), jnp.int32)


IMPLEMENTATIONS = {
    "reference": functools.partial(index_select.select, implementation="reference"),
    "xla": functools.partial(xla.select, key_tile=128),
    "tpu": functools.partial(tpu.select, key_round=128, interpret=INTERPRET),
}


QUICK = {
    ("reference", "fp8", False),
    ("xla", "fp8", True),
    ("xla", "fp4", False),
    ("tpu", "fp8", True),
    ("tpu", "fp4", False),
}


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "paged"),
    [
        pytest.param(
            name,
            kind,
            dtype,
            paged,
            marks=() if dtype == jnp.bfloat16 and (name, kind, paged) in QUICK else pytest.mark.slow,
        )
        for name in IMPLEMENTATIONS
        for kind in KINDS
        for dtype in (jnp.bfloat16, jnp.float32)
        for paged in (False, True)
    ],
)
def test_sets_are_those_of_the_values(name: str, kind: str, dtype: Any, paged: bool) -> None:
    for seed in range(3):
        q, values, keys, weights, positions = problem(seed, kind, dtype)
        expected = index_select.select(q, values, weights, positions, TOP_K, implementation="reference")
        table = None
        if paged:
            keys, table = in_pages(keys, seed)
        found = IMPLEMENTATIONS[name](q, keys, weights, positions, TOP_K, table)
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.sampled_from([128, 4096]))
def test_bits_of_scores_are_those_of_the_values(seed: int, kind: str, key_tile: int) -> None:
    """Generic numbers: the set from codes is the one from values even where rounding decides."""
    q, values, keys, weights, positions = problem(seed, kind, jnp.bfloat16, exact=False)
    found = xla.select(q, keys, weights, positions, TOP_K, key_tile=key_tile)
    np.testing.assert_array_equal(found, xla.select(q, values, weights, positions, TOP_K))


@pytest.mark.slow
def test_the_same_set_as_full_keys_where_nothing_is_rounded() -> None:
    q, values, _, weights, positions = problem(7, "fp8", jnp.float32)
    for kind in KINDS:
        keys = quantize_keys(values, kind)
        assert (np.asarray(dequantize_keys(keys)) == np.asarray(values)).all()
        np.testing.assert_array_equal(
            index_select.select(q, keys, weights, positions, TOP_K),
            index_select.select(q, values, weights, positions, TOP_K),
        )


def test_scores_of_quantized_keys() -> None:
    q, values, _, weights, positions = problem(8, "fp8", jnp.float32, exact=False)
    scores = index_select.scores(q, quantize_keys(values, "fp8"), weights, positions)
    np.testing.assert_array_equal(scores, index_select.scores(q, values, weights, positions))


def test_errors_name_the_value_and_the_way_out() -> None:
    q, values, keys, weights, positions = problem(9, "fp4", jnp.float32)
    with pytest.raises(ValueError, match="cannot be quantized to 'int4'; pass 'fp8' or 'fp4'"):
        quantize_keys(values, "int4")
    with pytest.raises(ValueError, match="keys have 40 channels, expected a multiple of 32"):
        quantize_keys(values[..., :40], "fp4")
    with pytest.raises(ValueError, match=r"have scales of shape \(2, 300, 1\), expected \(2, 300, 2\)"):
        index_select.select(q, keys._replace(scales=keys.scales[..., :1]), weights, positions, 4)
    with pytest.raises(ValueError, match="codes of bfloat16"):
        index_select.select(q, keys._replace(codes=values.astype(jnp.bfloat16)), weights, positions, 4)
    with pytest.raises(ValueError, match="k_index has 64 channels but q_index has 32"):
        index_select.select(q[..., :32], keys, weights, positions, 4)
    pages = jax.tree.map(lambda a: a.reshape(-1, 100, *a.shape[2:]), keys)
    table = jnp.asarray([[0, 1, 2], [3, 4, 5]], jnp.int32)
    with pytest.raises(NotImplementedError, match="multiple of 128 keys of fp4 and got pages of 100"):
        index_select.select(q, pages, weights, positions, 4, table, implementation="tpu")
