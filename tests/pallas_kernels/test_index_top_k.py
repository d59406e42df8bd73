"""The two-pass top_k of long rows is `jax.lax.top_k`: values, places and order, whatever the ties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.index_select._top_k import top_k

# Rows, entries, count: one pass, two passes, entries that fill no whole number of groups.
SHAPES = [(3, 40, 9), (3, 64, 1), (2, 130, 3), (2, 1000, 4), (1, 4096, 16)]
VALUES = [-np.inf, -3.0, -0.0, 0.0, 1e-30, 2.0, 2.5, np.inf, np.nan]


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.integers(1, len(VALUES)))
def test_it_is_lax_top_k(shape, seed, distinct):
    rows, entries, count = shape
    rng = np.random.default_rng(seed)
    pool = np.asarray(rng.choice(VALUES, distinct, replace=False), np.float32)
    scores = jnp.asarray(pool[rng.integers(0, distinct, (rows, entries))])
    values, places = jax.jit(top_k, static_argnums=1)(scores, count)
    expected_values, expected_places = jax.lax.top_k(scores, count)
    np.testing.assert_array_equal(places, expected_places)
    np.testing.assert_array_equal(values, expected_values)


@pytest.mark.parametrize(("entries", "passes"), [(7 * 16, 1), (8 * 16, 2), (4160, 2)])
def test_long_rows_are_not_ranked_whole(entries, passes):
    scores = jax.ShapeDtypeStruct((2, entries), jnp.float32)
    text = jax.jit(top_k, static_argnums=1).lower(scores, 16).as_text()
    assert text.count("chlo.top_k") == passes
    assert (f"tensor<2x{entries}xf32> -> (tensor<2x16xf32>" in text) is (passes == 1)
