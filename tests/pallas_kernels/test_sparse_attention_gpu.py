"""The GPU kernels of sparse attention, interpreted: races are errors and untouched memory is NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from pallas_kernels import prefer, sparse_attention
from pallas_kernels.sparse_attention import SHAPES, _gpu_rows, _gpu_tensor, gpu
from tests.pallas_kernels.test_sparse_attention_tpu import (
    BATCH,
    DATA,
    KEYS,
    SCALE,
    VALUES,
    WIDTH,
    assert_equal,
    check_gradients,
    inputs,
    only_selected,
    oracle,
    random_indices,
    selections,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def run(q: Any, kv: Any, indices: Any, table: Any = None, tensor: bool = False) -> tuple[Any, Any]:
    return gpu.sparse_attention(
        q, kv, jnp.asarray(indices), SCALE, VALUES, table, tensor=tensor, interpret=INTERPRET
    )


def assert_close(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Of bfloat16 results whose weights were two bfloat16 parts: good to 16 bits, then rounded."""
    assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found[0], np.float64), expected[0], rtol=2.0**-8, atol=2.0**-14)
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-6, atol=3e-6)


@settings(max_examples=2)
@given(indices=selections())
def test_any_selection(indices: np.ndarray) -> None:
    q, kv = inputs(0)
    assert_equal(run(q, only_selected(kv, indices), indices), oracle(q, kv, indices))


@pytest.mark.slow
@settings(max_examples=2)
@given(indices=selections())
def test_any_selection_on_tensor_cores(indices: np.ndarray) -> None:
    q, kv = inputs(1, jnp.bfloat16)
    assert_close(run(q, only_selected(kv, indices), indices, tensor=True), oracle(q, kv, indices))


@pytest.mark.slow
@settings(max_examples=10)
@given(indices=selections())
def test_any_selection_at_length(indices: np.ndarray) -> None:
    q, kv = inputs(2)
    kv = only_selected(kv, indices)
    assert_equal(run(q, kv, indices), oracle(q, kv, indices))
    q, kv = (a.astype(jnp.bfloat16) for a in (q, kv))
    expected = oracle(q, jnp.nan_to_num(kv), indices)
    assert_equal(run(q, kv, indices), expected, jnp.bfloat16)
    assert_close(run(q, kv, indices, tensor=True), expected)


def large(heads: int, selected: int, dtype: Any, queries: int = 1) -> tuple[Any, Any, np.ndarray]:
    """More selected keys than one split, one tile and both buffers hold, with gaps of -1 at the start and the end."""
    rng = np.random.default_rng(heads)
    keys = selected + 50
    q, kv = (rng.standard_normal(shape) for shape in ((1, queries, heads, WIDTH), (1, keys, WIDTH)))
    indices = np.stack([rng.permutation(keys)[:selected] for _ in range(queries)])[None].astype(np.int32)
    indices[:, :, :3], indices[:, :, -70:] = -1, -1
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), indices


@pytest.mark.parametrize("tensor", [pytest.param(False, marks=pytest.mark.slow), True])
def test_splits_of_selected_keys_merge(tensor: bool) -> None:
    q, kv, indices = large(3, 330, jnp.bfloat16)
    found = run(q, only_selected(kv, indices), indices, tensor=tensor)
    (assert_close if tensor else lambda a, b: assert_equal(a, b, jnp.bfloat16))(found, oracle(q, kv, indices))


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [False, True])
def test_many_turns_in_one_split(tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both buffers are filled again, and a query of few keys beside one of many stops early."""
    monkeypatch.setattr(_gpu_tensor if tensor else _gpu_rows, "_BLOCKS", 1)
    jax.clear_caches()
    q, kv, indices = large(3, 330, jnp.bfloat16, queries=2)
    indices[0, 1, 5:] = -1
    found = run(q, only_selected(kv, indices), indices, tensor=tensor)
    jax.clear_caches()
    (assert_close if tensor else lambda a, b: assert_equal(a, b, jnp.bfloat16))(found, oracle(q, kv, indices))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [96, 48, 24, 12, 3])
@pytest.mark.parametrize(
    ("dtype", "tensor"), [(jnp.float32, False), (jnp.bfloat16, False), (jnp.bfloat16, True)]
)
def test_heads(heads: int, dtype: Any, tensor: bool) -> None:
    q, kv = inputs(17, dtype, heads)
    indices = random_indices(18)
    found = run(q, only_selected(kv, indices), indices, tensor=tensor)
    (assert_close if tensor else lambda a, b: assert_equal(a, b, dtype))(found, oracle(q, kv, indices))


def test_heads_of_warpgroups() -> None:
    """No head count of the model's shares is computed for more than 16 heads, and none is padded to 64."""
    assert {h: _gpu_tensor.heads_together(h) for h in (96, 48, 24, 12, 3)} == {
        96: (24, 2),
        48: (24, 2),
        24: (24, 1),
        12: (16, 1),
        3: (8, 1),
    }
    assert [_gpu_rows.heads_together(h, 576) for h in (96, 48, 24, 16, 12, 3)] == [12, 12, 12, 8, 12, 4]
    for heads in range(1, 130):
        together, computing = _gpu_tensor.heads_together(heads)
        groups = -(-heads // together)
        assert together % 8 == 0 and together <= 24 and groups % computing == 0


@pytest.mark.slow
def test_wider_queries_than_keys_are_computed_in_float32() -> None:
    q, kv = inputs(3)[0], inputs(3, jnp.bfloat16)[1]
    indices = random_indices(4)
    found = gpu.sparse_attention(
        q, only_selected(kv, indices), jnp.asarray(indices), SCALE, VALUES, interpret=INTERPRET
    )
    assert_equal(found, oracle(q, kv, indices))


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [True, False])
def test_pages(tensor: bool) -> None:
    """Pages in any order, others than ours and the unwritten end full of NaN, and pages without a number."""
    page, dtype = 6, jnp.bfloat16
    q, kv = inputs(5, dtype)
    count = -(-KEYS // page)
    indices = random_indices(6, keys=(count - 1) * page)
    kv = only_selected(kv, indices)
    order = np.random.default_rng(7).permutation(BATCH * count + 2)[: BATCH * count]
    padded = jnp.pad(kv, ((0, 0), (0, count * page - KEYS), (0, 0)), constant_values=jnp.nan)
    pages = jnp.full((BATCH * count + 2, page, WIDTH), jnp.nan, dtype)
    pages = pages.at[order].set(padded.reshape(-1, page, WIDTH))
    table = order.reshape(BATCH, count).astype(np.int32)
    table[:, -1] = [-1, 2**31 - 1]
    indices[1, 2, 0] = (count - 1) * page
    expected = oracle(q, kv, np.where(indices >= (count - 1) * page, -1, indices))
    found = run(q, pages, indices, jnp.asarray(table), tensor=tensor)
    (assert_close if tensor else lambda a, b: assert_equal(a, b, dtype))(found, expected)


@pytest.mark.parametrize(
    ("dtype", "tensor"), [pytest.param(jnp.bfloat16, True, marks=pytest.mark.slow), (jnp.float32, False)]
)
def test_a_selected_nan_reaches_the_queries_that_select_it_alone(dtype: Any, tensor: bool) -> None:
    q, kv = inputs(10, dtype)
    indices = random_indices(11)
    indices[1, 1:] = np.where(indices[1, 1:] == 4, -1, indices[1, 1:])
    o, logsumexp = run(q, kv.at[1, 4, 0].set(jnp.nan), indices, tensor=tensor)
    assert np.isnan(np.asarray(o, np.float32)[1, 0]).all() and np.isnan(np.asarray(logsumexp)[1, 0]).all()
    assert (
        not np.isnan(np.asarray(o, np.float32)[0]).any()
        and not np.isnan(np.asarray(o, np.float32)[1, 1:]).any()
    )


def test_large_logits_neither_overflow_nor_vanish() -> None:
    q, kv = inputs(12)
    indices = random_indices(13)
    found, expected = run(q * 1e4, kv, indices), oracle(q * 1e4, kv, indices)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=2e-2)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=2e-2)


@pytest.mark.slow
def test_gradients_are_those_of_the_portable_form() -> None:
    check_gradients(run, *inputs(14), random_indices(15))


@pytest.mark.golden
@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "prefill"])
def test_recorded_outputs(name: str) -> None:
    f = load_file(DATA / f"sparse_mla_{name}.safetensors")
    arrays = (jnp.asarray(f[key]) for key in ("q", "kv", "indices"))
    scale, value_dim = float(f["scale"][0]), f["output"].shape[-1]
    # Races do not depend on the numbers: they are looked for in the tests above.
    interpret = plgpu.InterpretGPUParams(uninitialized_memory="nan")
    o, logsumexp = gpu.sparse_attention(*arrays, scale, value_dim, interpret=interpret)
    np.testing.assert_allclose(o, f["output"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(logsumexp, f["logsumexp"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_vary_over_the_axes_of_the_arguments(dtype: Any) -> None:
    """Under shard_map with its checks on: the shards' results merge into one that all devices share."""
    q, kv = inputs(27, dtype)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))

    def merged(q: Any, kv: Any, indices: Any) -> Any:
        parts = gpu.sparse_attention(q, kv, indices, SCALE, VALUES)
        gathered = [jax.lax.all_gather(part, "context", to="invarying") for part in parts]
        return sparse_attention.merge(*gathered)

    sharded = jax.shard_map(merged, mesh=mesh, in_specs=(P(), P(None, "context"), P()), out_specs=P())
    o, logsumexp = jax.eval_shape(sharded, q, kv, jnp.asarray(random_indices(28)))
    assert o.shape == (*q.shape[:3], VALUES) and logsumexp.shape == q.shape[:3]


def test_which_kernel_runs() -> None:
    """Tensor cores for bfloat16 of the model's sizes; by name, and preferred, but no default."""

    def kernels(dtype: Any, **how: Any) -> str:
        shape = SHAPES["decode_2p8t"]._replace(batch=1, keys=4096)
        like = jax.ShapeDtypeStruct
        arrays = (
            like((1, 1, shape.heads, shape.width), dtype),
            like((1, shape.keys, shape.width), dtype),
            like((1, 1, shape.selected), jnp.int32),
        )

        def f(q: Any, kv: Any, indices: Any) -> Any:
            return sparse_attention.sparse_attention(q, kv, indices, 0.1, shape.value_dim, **how)

        return str(jax.make_jaxpr(f)(*arrays))

    assert "sparse_attention_tensor" in kernels(jnp.bfloat16, implementation="gpu")
    assert "sparse_attention_rows" in kernels(jnp.float32, implementation="gpu")
    assert "sparse_attention_tensor" not in kernels(jnp.bfloat16)
    with prefer("gpu"):
        assert "sparse_attention_tensor" in kernels(jnp.bfloat16)


def test_what_the_kernels_refuse() -> None:
    q, kv = inputs(19)
    indices = jnp.asarray(random_indices(20))
    with pytest.raises(NotImplementedError, match=r"takes bfloat16 on Hopper, .*, and got float32"):
        gpu.sparse_attention(q, kv, indices, SCALE, VALUES, tensor=True)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="q_latent of float64"):
        sparse_attention.sparse_attention(
            jnp.asarray(np.asarray(q, np.float64)), kv, indices, SCALE, VALUES, implementation="gpu"
        )
    with pytest.raises(NotImplementedError, match="kv_latent of float16"):
        sparse_attention.sparse_attention(
            q, kv.astype(jnp.float16), indices, SCALE, VALUES, implementation="gpu"
        )
    pages = jax.ShapeDtypeStruct((2**25, 65, WIDTH), jnp.float32)
    table = jax.ShapeDtypeStruct((BATCH, 4), jnp.int32)
    with pytest.raises(NotImplementedError, match="too few for 33554432 x 65"):
        jax.eval_shape(lambda p, t: gpu.sparse_attention(q, p, indices, SCALE, VALUES, t), pages, table)
