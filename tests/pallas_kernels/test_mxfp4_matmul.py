"""Grouped matmul: the portable implementation against the naive one, gradients, limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.mxfp4_matmul import (
    LAYOUTS,
    MXFP4Tensor,
    fake_quantize,
    fake_quantize_mxfp8,
    grouped_glu,
    grouped_matmul,
    matmul,
    quantize,
)
from pallas_kernels.mxfp4_matmul.shapes import SHAPES
from pallas_kernels.mxfp4_matmul.xla import row_tile

LAYERS, EXPERTS, INPUTS, OUTPUTS = 3, 5, 64, 48
SIZES = np.array([0, 10, 1, 20, 0], np.int32)


def normal(shape, seed, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


@pytest.fixture(scope="module")
def packed():
    return quantize(normal((LAYERS, EXPERTS, OUTPUTS, INPUTS), 0))


@pytest.fixture(scope="module")
def masters():
    return normal((LAYERS, EXPERTS, INPUTS, OUTPUTS), 1)


@pytest.fixture(scope="module")
def x():
    return normal((37, INPUTS), 2)


def by_hand(x, w_EKN, sizes):
    """float64 numpy, one expert after the other."""
    result, row = np.zeros((x.shape[0], w_EKN.shape[-1])), 0
    for expert, size in enumerate(sizes):
        result[row : row + size] = np.asarray(x[row : row + size], np.float64) @ np.asarray(
            w_EKN[expert], np.float64
        )
        row += size
    return result


@st.composite
def row_counts(draw):
    rows = draw(st.integers(0, 40))
    cuts = draw(st.lists(st.integers(0, rows), min_size=EXPERTS, max_size=EXPERTS))
    ends = sorted(cuts)
    return rows, np.diff([0, *ends]).astype(np.int32)


_jitted = {
    name: jax.jit(grouped_matmul, static_argnames=("implementation",)) for name in ("xla", "reference")
}


@settings(max_examples=40, deadline=None)
@given(case=row_counts(), layer=st.integers(0, LAYERS - 1), float_weight=st.booleans())
def test_any_group_sizes(packed, masters, case, layer, float_weight):
    rows, sizes = case
    # Few distinct row counts, so that few programs are compiled; sum < M is common.
    x = normal((next(m for m in (0, 1, 9, 40) if m >= rows), INPUTS), rows)
    w = masters if float_weight else packed
    index = jnp.int32(layer)
    actual = _jitted["xla"](x, w, sizes, layer=index, implementation="xla")
    dense = masters[layer] if float_weight else np.asarray(packed.dequantize())[layer].swapaxes(-1, -2)
    expected = by_hand(x, dense, sizes)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(np.asarray(actual)[sizes.sum() :], 0)
    naive = _jitted["reference"](x, w, sizes, layer=index, implementation="reference")
    np.testing.assert_allclose(naive, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 80, 300, 1100])
def test_every_row_tile(rows):
    w = normal((EXPERTS, 32, 32), 3)
    sizes = np.random.default_rng(rows).multinomial(rows, [0.4, 0, 0.3, 0.2, 0.1]).astype(np.int32)
    x = normal((rows, 32), 4)
    np.testing.assert_allclose(grouped_matmul(x, w, sizes), by_hand(x, w, sizes), rtol=1e-5, atol=2e-5)
    everything = np.array([0, 0, rows, 0, 0], np.int32)
    np.testing.assert_allclose(
        grouped_matmul(x, w, everything), by_hand(x, w, everything), rtol=1e-5, atol=2e-5
    )


def test_row_tiles_cover_all_sizes():
    tiles = {row_tile(shape.rows, shape.experts) for shape in SHAPES.values()}
    assert tiles == {8, 16, 64, 128}
    assert row_tile(3, 896) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation_dtype", [None, jnp.float8_e4m3fn])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_layouts_and_activation_dtypes(packed, x, layout, activation_dtype, implementation):
    w = packed.to_layout(layout)
    actual = grouped_matmul(
        x, w, SIZES, layer=2, activation_dtype=activation_dtype, implementation=implementation
    )
    rows = x if activation_dtype is None else fake_quantize_mxfp8(x)
    expected = by_hand(rows, np.asarray(packed.dequantize())[2].swapaxes(-1, -2), SIZES)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)
    if activation_dtype is not None:
        assert (
            np.abs(expected - by_hand(x, np.asarray(packed.dequantize())[2].swapaxes(-1, -2), SIZES)).max()
            > 1e-3
        )


def test_bfloat16_rows_accumulate_in_float32(packed, x):
    narrow = x.astype(jnp.bfloat16)
    actual = grouped_matmul(narrow, packed, SIZES, layer=1)
    assert actual.dtype == jnp.bfloat16
    expected = grouped_matmul(narrow.astype(jnp.float32), packed, SIZES, layer=1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_rows_compute_in_float64(packed, layout):
    with jax.enable_x64(True):
        x = normal((37, INPUTS), 2, np.float64)
        # Scale byte 0 makes weights that float32 would flush.
        w = MXFP4Tensor(packed.packed, jnp.zeros_like(packed.scale_bytes), "packed_kn").to_layout(layout)
        dense = np.asarray(w.dequantize(np.float64))[0].swapaxes(-1, -2)
        actual = np.asarray(grouped_matmul(x, w, SIZES, layer=0)) * 2.0**127
        assert np.abs(actual).max() > 1
        np.testing.assert_allclose(actual, by_hand(x, dense, SIZES) * 2.0**127, rtol=1e-12, atol=1e-12)
        for implementation in ("xla", "reference"):
            glu = grouped_glu(x, packed, packed, SIZES, layer=1, implementation=implementation)
            product = by_hand(x, np.asarray(packed.dequantize())[1].swapaxes(-1, -2), SIZES)
            expected = 4 * np.tanh(product / 4) / (1 + np.exp(-product)) * 25 * np.tanh(product / 25)
            np.testing.assert_allclose(glu, expected, rtol=1e-11, atol=1e-11)


def test_rows_after_the_sum_are_zero_even_if_they_are_nan(packed, x):
    poisoned = x.at[31:].set(jnp.nan)
    actual = np.asarray(grouped_matmul(poisoned, packed, SIZES, layer=0))
    np.testing.assert_array_equal(actual[31:], 0)
    np.testing.assert_array_equal(actual[:31], np.asarray(grouped_matmul(x, packed, SIZES, layer=0))[:31])


def test_nan_scale_reaches_the_result(packed, x):
    for layout in LAYOUTS:
        w = MXFP4Tensor(packed.packed, packed.scale_bytes.at[0, 1, 0, 7].set(255), "packed_kn").to_layout(
            layout
        )
        actual = np.asarray(grouped_matmul(x, w, SIZES, layer=0))
        assert np.isnan(actual[:10, 7]).all() and np.isnan(actual).sum() == 10


@pytest.mark.parametrize("activation", [("situ", 4.0, 25.0), ("situ", 4.0, None), ("silu",)])
def test_glu_is_two_products_and_the_activation(packed, masters, x, activation):
    up_packed = quantize(normal((LAYERS, EXPERTS, OUTPUTS, INPUTS), 8))
    for gate, up in ((packed, up_packed), (masters, masters[::-1])):
        one_pass = jax.jit(lambda x, gate, up: grouped_glu(x, gate, up, SIZES, activation, layer=1))(
            x, gate, up
        )
        naive = grouped_glu(x, gate, up, SIZES, activation, layer=1, implementation="reference")
        np.testing.assert_allclose(one_pass, naive, rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(np.asarray(one_pass)[31:], 0)


def test_under_vmap_and_scan(packed, masters, x):
    batch = jnp.stack([x, x[::-1]])
    sizes = jnp.stack([jnp.asarray(SIZES), jnp.array([37, 0, 0, 0, 0], jnp.int32)])
    for w in (packed, masters):
        mapped = jax.vmap(lambda x, sizes, w=w: grouped_matmul(x, w, sizes, layer=1))(batch, sizes)
        for row in range(2):
            expected = grouped_matmul(batch[row], w, sizes[row], layer=1)
            np.testing.assert_allclose(mapped[row], expected, rtol=1e-5, atol=1e-5)
        _, scanned = jax.lax.scan(
            lambda carry, layer, w=w: (carry, grouped_matmul(x, w, SIZES, layer=layer)),
            None,
            jnp.arange(LAYERS),
        )
        _, sliced = jax.lax.scan(lambda carry, w: (carry, grouped_matmul(x, w, SIZES)), None, w)
        for layer in range(LAYERS):
            expected = grouped_matmul(x, w, SIZES, layer=layer, implementation="reference")
            np.testing.assert_allclose(scanned[layer], expected, rtol=1e-5, atol=2e-5)
            np.testing.assert_allclose(sliced[layer], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_against_dense_float64(layer, gated):
    with jax.enable_x64(True):
        x = normal((37, 32), 5, np.float64)
        shape = (EXPERTS, 32, 24) if layer is None else (2, EXPERTS, 32, 24)
        w, up = normal(shape, 6, np.float64), normal(shape, 7, np.float64)
        cotangent = normal((37, 24), 8, np.float64)
        expert = np.repeat(np.arange(EXPERTS + 1), [*SIZES, 37 - SIZES.sum()])
        one_hot = jnp.asarray(np.eye(EXPERTS + 1)[expert][:, :EXPERTS])

        def dense(x, w, up):
            pick = (lambda w: w) if layer is None else (lambda w: w[layer])
            gate_product = jnp.einsum("mk,me,ekn->mn", x, one_hot, pick(w))
            if not gated:
                return (gate_product * cotangent).sum()
            up_product = jnp.einsum("mk,me,ekn->mn", x, one_hot, pick(up))
            gate = 4 * jnp.tanh(gate_product / 4) * jax.nn.sigmoid(gate_product)
            return (gate * 25 * jnp.tanh(up_product / 25) * cotangent).sum()

        def grouped(x, w, up):
            product = (
                grouped_glu(x, w, up, SIZES, layer=layer)
                if gated
                else grouped_matmul(x, w, SIZES, layer=layer)
            )
            return (product * cotangent).sum()

        expected = jax.grad(dense, (0, 1, 2))(x, w, up)
        for actual in (
            jax.grad(grouped, (0, 1, 2))(x, w, up),
            jax.jit(jax.grad(grouped, (0, 1, 2)))(x, w, up),
        ):
            for got, want in zip(actual, expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_to_rows_through_packed_weights(packed, x, layout):
    w = packed.to_layout(layout)

    def loss(x, implementation):
        return (grouped_glu(x, w, w, SIZES, layer=1, implementation=implementation) ** 2).sum()

    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x, np.float64))
        expected = np.asarray(jax.grad(loss)(wide, "reference"))
    actual = jax.jit(jax.grad(loss), static_argnums=1)(x, "xla")
    assert actual.dtype == jnp.float32 and expected.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(actual[31:], 0)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_packed_weights_have_no_gradient(packed, x, wrap):
    def loss(w):
        return grouped_matmul(x, w, SIZES, layer=1).sum()

    with pytest.raises(TypeError, match="uint8"):
        jax.grad(wrap(loss))(packed)
    zeros = jax.grad(wrap(loss), allow_int=True)(packed)
    assert all(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(zeros))
    float4 = packed.to_layout("float4_kn")
    with pytest.raises(TypeError, match="packed MXFP4 weight"):
        jax.grad(wrap(loss), allow_int=True)(float4)
    with pytest.raises(TypeError, match="packed MXFP4 weight"):
        jax.grad(wrap(lambda codes: loss(MXFP4Tensor(codes, float4.scale_bytes, "float4_kn"))))(float4.packed)


def test_training_masters_equal_packed_rollout_weights(x):
    masters = normal((EXPERTS, INPUTS, OUTPUTS), 9)
    trained = grouped_matmul(x, fake_quantize(masters, axis=-2), SIZES)
    rolled_out = grouped_matmul(x, quantize(masters.swapaxes(-1, -2)), SIZES)
    np.testing.assert_array_equal(trained, rolled_out)
    gradient = jax.grad(lambda w: grouped_matmul(x, fake_quantize(w, axis=-2), SIZES).sum())(masters)
    direct = jax.grad(lambda w: grouped_matmul(x, w, SIZES).sum())(masters)
    np.testing.assert_array_equal(gradient, direct)


def test_matmul(packed, x):
    single = jax.tree.map(lambda leaf: leaf[0], packed)
    batch = x[:36].reshape(4, 9, INPUTS)
    dense = np.asarray(packed.dequantize(), np.float64)
    for implementation in ("xla", "reference"):
        stacked = matmul(batch, single, layer=3, implementation=implementation)
        np.testing.assert_allclose(
            stacked, np.asarray(batch, np.float64) @ dense[0, 3].T, rtol=1e-5, atol=2e-5
        )
    one = jax.tree.map(lambda leaf: leaf[2], single)
    np.testing.assert_allclose(
        matmul(x[0], one), np.asarray(x[0], np.float64) @ dense[0, 2].T, rtol=1e-5, atol=2e-5
    )
    gradient = jax.grad(lambda x: matmul(x, one).sum())(batch)
    np.testing.assert_allclose(gradient[0, 0], dense[0, 2].sum(0), rtol=1e-5, atol=2e-5)
    rounded = matmul(batch, one, activation_dtype=jnp.float8_e4m3fn)
    np.testing.assert_array_equal(rounded, matmul(fake_quantize_mxfp8(batch), one))


def test_the_unpacked_stack_never_exists():
    layers, experts, inputs, outputs, rows = 4, 16, 256, 256, 64
    w = MXFP4Tensor(
        jax.ShapeDtypeStruct((layers, experts, inputs // 2, outputs), jnp.uint8),
        jax.ShapeDtypeStruct((layers, experts, inputs // 32, outputs), jnp.uint8),
        "packed_kn",
    )
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.float32)
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    one_expert = inputs * outputs * 4

    def temporary(function):
        return jax.jit(function).lower(x, w, sizes, layer).compile().memory_analysis().temp_size_in_bytes

    assert temporary(lambda x, w, sizes, layer: grouped_matmul(x, w, sizes, layer=layer)) < 3 * one_expert
    assert temporary(lambda x, w, sizes, layer: grouped_glu(x, w, w, sizes, layer=layer)) < 5 * one_expert
    gradient = jax.grad(lambda x, w, sizes, layer: grouped_matmul(x, w, sizes, layer=layer).sum())
    assert temporary(gradient) < 3 * one_expert
    naive = temporary(
        lambda x, w, sizes, layer: grouped_matmul(x, w, sizes, layer=layer, implementation="reference")
    )
    assert naive > experts * one_expert


def test_wrong_arguments_are_refused_in_words(packed, masters, x):
    with pytest.raises(ValueError, match=r"x must be \[rows, 64\]"):
        grouped_matmul(x[:, :32], packed, SIZES, layer=0)
    with pytest.raises(ValueError, match="holds 5 experts"):
        grouped_matmul(x, packed, SIZES[:4], layer=0)
    with pytest.raises(ValueError, match="pass layer="):
        grouped_matmul(x, packed, SIZES)
    with pytest.raises(ValueError, match="leave layer None"):
        grouped_matmul(x, masters[0], SIZES, layer=0)
    with pytest.raises(ValueError, match="layer is 3 but w stacks 3 layers"):
        grouped_matmul(x, packed, SIZES, layer=3)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        grouped_matmul(x, packed, SIZES, layer=0, activation_dtype=jnp.float8_e5m2)
    with pytest.raises(ValueError, match="both projections"):
        grouped_glu(x, packed, masters, SIZES, layer=0)
    with pytest.raises(ValueError, match="has no implementation 'cuda'"):
        grouped_matmul(x, packed, SIZES, layer=0, implementation="cuda")
    with pytest.raises(ValueError, match="64 columns"):
        matmul(x[:, :32], jax.tree.map(lambda leaf: leaf[0, 0], packed))
