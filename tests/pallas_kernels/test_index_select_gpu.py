"""Index selection with the GPU's scoring kernel, interpreted: races are errors and untouched memory is NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from pallas_kernels import index_select
from pallas_kernels.index_select import _gpu_scores, gpu
from pallas_kernels.index_select.keys import dequantize_keys, quantize_keys
from pallas_kernels.index_select.xla import tile_scores_blocked
from tests.pallas_kernels.test_index_select_tpu import (
    BATCH,
    DATA,
    KEYS,
    PAGE,
    TOP_K,
    definition,
    poisoned,
    problem,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
TILE = 128


def low(x: Any) -> jax.Array:
    """In bfloat16, which holds these numbers exactly."""
    return jnp.asarray(x, jnp.bfloat16)


def select(q: Any, k: Any, weights: Any, positions: Any, top_k: int, table: Any = None, **how: Any) -> Any:
    options = {"tile": TILE, "interpret": INTERPRET} | how
    return gpu.select(low(q), k, jnp.asarray(weights), jnp.asarray(positions), top_k, table, **options)


@settings(max_examples=2)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0, TOP_K - 1, TILE - 1, TILE]))
def test_sets_equal_the_definition(seed: int, last: int | None) -> None:
    """Keys in three tiles, of which the last is not full; few keys are distinct, and unseen ones are NaN."""
    rng = np.random.default_rng(seed)
    q, k, weights, positions = problem(rng, int(rng.integers(1, KEYS)), (-1.0, -0.0, 0.0, 0.5, 1.0))
    if last is not None:
        positions[0] = last
    found = select(q, low(poisoned(k, positions)), weights, positions, TOP_K)
    np.testing.assert_array_equal(found, definition(q, k, weights, positions, TOP_K))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(1, 1, 32, 24), (1, 70, 8, 8), (2, 9, 3, 16)]), st.booleans()
)
def test_sets_equal_the_definition_in_any_shape(seed: int, shape: tuple[int, ...], use_relu: bool) -> None:
    """One query of many heads, more queries than one thread block has products, heads that are padded."""
    rng = np.random.default_rng(seed)
    q, k, weights, positions = problem(rng, 50, (-1.0, 0.5, 1.0), (*shape, 200))
    found = select(q, low(poisoned(k, positions)), weights, positions, TOP_K, use_relu=use_relu)
    np.testing.assert_array_equal(found, definition(q, k, weights, positions, TOP_K, use_relu))


@pytest.mark.parametrize("shape", [(1, 1, 32, 128), pytest.param((2, 70, 8, 128), marks=pytest.mark.slow)])
def test_scores(shape: tuple[int, ...]) -> None:
    """The model's channels and heads, numbers that are rounded, and a NaN key that reaches no other."""
    batch, queries, heads, channels = shape
    rng = np.random.default_rng(0)
    q, k = low(rng.standard_normal(shape)), low(rng.standard_normal((batch, 130, channels)))
    weights = jnp.asarray(rng.standard_normal((batch, queries, heads)), jnp.float32)
    k = k.at[:, 3].set(jnp.nan)
    found = _gpu_scores.tile_scores(q, k, weights, True, INTERPRET)
    expected = tile_scores_blocked(q, k, weights, True)
    assert found.shape == expected.shape and found.dtype == expected.dtype == jnp.float32
    assert np.isnan(np.asarray(found)[:, :, 3]).all()
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.golden
@pytest.mark.parametrize(
    "name",
    [
        "decode",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("generic_T130", "ties_dup", "relu_plateau")
        ),
    ],
)
def test_recorded_sets(name: str) -> None:
    f = load_file(DATA / f"index_select_{name}.safetensors")
    arrays = f["q_index"], low(f["k_index"]), f["weights"], f["query_positions"]
    # Races do not depend on the numbers: they are looked for in the tests above.
    found = select(
        *arrays, int(f["top_k"][0]), interpret=plgpu.InterpretGPUParams(uninitialized_memory="nan")
    )
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, f["indices"])


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode", "ties_dup", "relu_plateau"])
def test_recorded_scores_bit_for_bit(name: str) -> None:
    """The files whose scores are exact in any order of additions."""
    f = load_file(DATA / f"index_select_{name}.safetensors")
    interpret = plgpu.InterpretGPUParams(uninitialized_memory="nan")
    arrays = low(f["q_index"]), low(f["k_index"]), jnp.asarray(f["weights"])
    found = np.asarray(_gpu_scores.tile_scores(*arrays, True, interpret))
    visible = f["scores_f32"] != np.float32(-1e30)
    np.testing.assert_array_equal(found[visible], f["scores_f32"][visible])


@pytest.mark.slow
def test_pages_and_quantized_keys() -> None:
    rng = np.random.default_rng(1)
    q, k, weights, positions = problem(rng, 40, (-1.0, 0.5, 1.0), (BATCH, 3, 2, 32, KEYS))
    count = KEYS // PAGE
    order = rng.permutation(BATCH * count).reshape(BATCH, count).astype(np.int32)
    pages = np.zeros((BATCH * count, PAGE, 32), np.float32)
    pages[order] = k.reshape(BATCH, count, PAGE, 32)
    found = select(q, low(pages), weights, positions, TOP_K, jnp.asarray(order))
    np.testing.assert_array_equal(found, definition(q, k, weights, positions, TOP_K))
    for kind in ("fp8", "fp4"):
        quantized = quantize_keys(jnp.asarray(k), kind)
        expected = definition(q, dequantize_keys(quantized), weights, positions, TOP_K)
        np.testing.assert_array_equal(select(q, quantized, weights, positions, TOP_K), expected)


def test_shards_of_keys() -> None:
    """Under shard_map with its checks on: the devices' candidates become one selection that all of them share."""
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))
    q, k, weights, positions = problem(np.random.default_rng(3), 9, (1.0,))

    def sharded(q: Any, k: Any, weights: Any, positions: Any) -> Any:
        return gpu.select(q, k, weights, positions, TOP_K, axis_name="context")

    specs = (P(), P(None, "context"), P(), P())
    run = jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=P())
    assert jax.eval_shape(run, low(q), low(k), weights, positions).shape == (BATCH, 3, TOP_K)


def test_tiles_are_small_beside_the_keys() -> None:
    assert gpu.key_tile(1, 128, 128) == gpu.key_tile(1, 1, 128) == 8192
    assert gpu.key_tile(64, 64, 128) == 1024 and gpu.key_tile(10**6, 10**6, 128) == 512


def test_what_the_kernel_refuses() -> None:
    q, k, weights, positions = problem(np.random.default_rng(2), 9, (1.0,))
    arrays = low(q), low(k), jnp.asarray(weights), jnp.asarray(positions)
    with pytest.raises(NotImplementedError, match="and got bfloat16 and float32 with weights of float32"):
        index_select.select(arrays[0], k, *arrays[2:], TOP_K, implementation="gpu")
    many = jnp.zeros((BATCH, 1, 136, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="at most 128 heads and 256 channels and got 136 and 8"):
        index_select.select(
            many, arrays[1], jnp.zeros((BATCH, 1, 136)), arrays[3][:, :1], TOP_K, implementation="gpu"
        )
