"""The TPU kernel of the grouped matmul, interpreted with race detection and memory that starts as NaN."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mxfp4_matmul import MXFP4Tensor, fake_quantize_mxfp8, quantize, reference, tpu
from pallas_kernels.mxfp4_matmul._tpu_kernel import Options, choose_tiles, plan_visits, row_tile
from pallas_kernels.mxfp4_matmul._tpu_mxfp8 import round_rows
from pallas_kernels.mxfp4_matmul.shapes import SHAPES
from tests.pallas_kernels import mxfp4_cases
from tests.pallas_kernels.mxfp4_cases import USUAL

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
LAYERS, EXPERTS, INPUTS, OUTPUTS, ROWS = 2, 3, 64, 48, 37
LAYOUTS = ("packed_kn", "float4_kn")
SITU = ("situ", 4.0, 25.0)
# Rows of one program: with 37 rows and 3 experts, tiles of 32, so that groups straddle two tiles.
SIZES = np.array([10, 0, 23], np.int32)


def normal(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def packed_weight(seed, layout="packed_kn"):
    w = quantize(normal((LAYERS, EXPERTS, OUTPUTS, INPUTS), seed)).to_layout("packed_kn")
    return jax.tree.map(jnp.asarray, w).to_layout(layout)


def by_hand(x, w, layer, sizes):
    """float64 numpy, one expert after the other."""
    w_ENK = np.asarray(w.dequantize())[layer].astype(np.float64)
    result, row = np.zeros((x.shape[0], w_ENK.shape[1])), 0
    for expert, size in enumerate(sizes):
        result[row : row + size] = np.asarray(x)[row : row + size].astype(np.float64) @ w_ENK[expert].T
        row += size
    return result


@functools.cache
def program(activation_dtype=None):
    """One compiled interpreter for all group sizes and layers."""
    return jax.jit(
        lambda x, w, sizes, layer: tpu.grouped_matmul(x, w, sizes, layer, activation_dtype, INTERPRET)
    )


@st.composite
def group_sizes(draw):
    total = draw(st.sampled_from([0, 1, 31, 32, 33, ROWS]) | st.integers(0, ROWS))
    cuts = draw(st.lists(st.integers(0, total), min_size=EXPERTS - 1, max_size=EXPERTS - 1))
    return np.diff([0, *sorted(cuts), total]).astype(np.int32)


@settings(max_examples=12)
@given(sizes=group_sizes(), layer=st.integers(0, LAYERS - 1))
def test_any_group_sizes(sizes, layer):
    w = packed_weight(0)
    x = normal((ROWS, INPUTS), 1)
    x[sizes.sum() :] = np.nan  # rows of nobody must not reach a result
    actual = np.asarray(program()(jnp.asarray(x), w, jnp.asarray(sizes), jnp.int32(layer)))
    np.testing.assert_allclose(actual, by_hand(x, w, layer, sizes), rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(actual[sizes.sum() :], 0)


def test_rows_that_stay_in_vector_memory():
    """Whole tiles of rows that fit are fetched once; groups straddle them, and rows behind the last are of nobody."""
    sizes = np.array([10, 0, 35, 7, 0], np.int32)
    w = jax.tree.map(jnp.asarray, quantize(normal((5, OUTPUTS, INPUTS), 5)).to_layout("packed_kn"))
    assert choose_tiles(64, 5, INPUTS, OUTPUTS, 4, Options(None, False, False)).whole_rows
    x = normal((64, INPUTS), 6)
    x[52:] = np.nan
    run = jax.jit(lambda x, sizes: tpu.grouped_matmul(x, w, sizes, None, None, INTERPRET))
    actual = np.asarray(run(jnp.asarray(x), jnp.asarray(sizes)))
    stacked = jax.tree.map(lambda leaf: leaf[None], w)
    np.testing.assert_allclose(actual, by_hand(x, stacked, 0, sizes), rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(actual[52:], 0)


CASE = (LAYERS, EXPERTS, INPUTS, OUTPUTS, ROWS)


@settings(max_examples=10)
@given(case=mxfp4_cases.cases(CASE, 32), rounded=st.booleans())
def test_any_groups_and_scales(case, rounded):
    found = program(jnp.float8_e4m3fn if rounded else None)(*case.arguments("packed_kn"))
    case.check_product(found, rounded)


# Each an interpreter of its own: every two of layout, dtype of the rows and their rounding meet once.
PROGRAMS = (
    ("packed_kn", jnp.float32, True),
    ("packed_kn", jnp.bfloat16, False),
    ("float4_kn", jnp.float32, False),
    ("float4_kn", jnp.bfloat16, True),
)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype", "rounded"), PROGRAMS)
@settings(max_examples=10)
@given(case=mxfp4_cases.cases(CASE, 32))
def test_any_groups_and_scales_in_both_layouts(layout, dtype, rounded, case):
    found = program(jnp.float8_e4m3fn if rounded else None)(*case.arguments(layout, dtype))
    case.check_product(found, rounded)


@functools.cache
def rounding_program():
    return jax.jit(functools.partial(round_rows, interpret=INTERPRET))


def _special_values(dtype):
    """Blocks of one magnitude each: every exponent with values between E4M3's, ties, both zeros, infinities, NaN."""
    mantissas = 1 + np.arange(32, dtype=np.float64) / 32
    signs = np.where(np.arange(32) % 3, 1.0, -1.0)
    exponents = np.arange(-126, 127, dtype=np.float64)
    rows = 2.0 ** exponents[:, None] * mantissas * signs
    small = rows * 2.0 ** -np.arange(32, dtype=np.float64)
    odd = np.array([[0.0, -0.0], [np.inf, 1.0], [np.nan, -3.0], [448.0, 464.0], [-480.0, 511.0]])
    values = np.concatenate([rows, small, np.tile(odd, (1, 16))])
    short = -len(values) % 4
    return np.concatenate([values, values[:short]]).reshape(-1, 128).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rounding_of_rows_is_that_of_the_portable_form(dtype):
    values = np.concatenate([_special_values(dtype), normal((70, 128), 4, dtype)])
    # Subnormal float32 numbers count as 0 in one unit and not in another.
    values[np.abs(values.astype(np.float32)) < 2.0**-120] = 0
    wide = np.concatenate([values, values[::-1]], axis=1)
    found, pull_back = jax.vjp(rounding_program(), jnp.asarray(wide))
    expected = np.asarray(fake_quantize_mxfp8(wide))
    unsigned = {2: np.uint16, 4: np.uint32}[found.dtype.itemsize]
    finite = ~np.isnan(wide.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(found).view(unsigned)[finite], expected.view(unsigned)[finite])
    assert np.isnan(np.asarray(found).astype(np.float32)[~finite]).all()
    [gradient] = pull_back(found)
    np.testing.assert_array_equal(np.asarray(gradient).view(unsigned), np.asarray(found).view(unsigned))


@functools.cache
def glu_program(activation_dtype):
    return jax.jit(
        lambda x, gate, up, sizes, layer: tpu.grouped_glu(
            x, gate, up, sizes, SITU, layer, activation_dtype, INTERPRET
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [False, True])
@settings(max_examples=10)
@given(case=mxfp4_cases.cases(CASE, 32, USUAL), up=mxfp4_cases.cases(CASE, 32, USUAL))
def test_gated_products_of_any_groups(rounded, case, up):
    x, gate, sizes, layer = case.arguments("packed_kn")
    up = up._replace(sizes=case.sizes, layer=case.layer)
    run = glu_program(jnp.float8_e4m3fn if rounded else None)
    case.check_glu(run(x, gate, up.weight("packed_kn"), sizes, layer), up, rounded)


_planned = jax.jit(plan_visits, static_argnums=(1, 2))
# Rows, tile, experts: rows off the tile, one tile, tiles of one row, more experts than rows.
PLANS = ((70, 16, 5), (8, 8, 3), (7, 1, 4), (5, 2, 9))


@settings(max_examples=100)
@given(data=st.data(), plan=st.sampled_from(PLANS))
def test_visits_cover_every_row_once_and_every_tile(data, plan):
    rows, tile, experts = plan
    total = data.draw(st.integers(0, rows))
    cuts = data.draw(st.lists(st.integers(0, total), min_size=experts - 1, max_size=experts - 1))
    sizes = np.diff([0, *sorted(cuts), total]).astype(np.int32)
    visits = _planned(sizes, rows, tile)
    owner, seen = np.full(rows, -1), []
    for expert, at, start, end in zip(*map(np.asarray, visits), strict=True):
        assert 0 <= expert < experts and 0 <= at * tile < rows
        seen.append(at)
        for row in range(max(start, at * tile), min(end, (at + 1) * tile, rows)):
            assert owner[row] == -1
            owner[row] = expert
    expected = np.full(rows, -1)
    expected[:total] = np.repeat(np.arange(experts), sizes)
    np.testing.assert_array_equal(owner, expected)
    # Tiles in order, so that each stays in vector memory until it is done, and none is left unwritten.
    assert seen == sorted(seen) and set(seen) == set(range(-(-rows // tile)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_and_scale_is_exact(layout):
    """Rows of the identity read the weights back: normal values bit by bit, NaN and infinity where they belong."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (1, INPUTS // 2, 256), dtype=np.uint8)
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8), (1, INPUTS // 32, 256)).copy()
    w = MXFP4Tensor(jnp.asarray(codes), jnp.asarray(scales), "packed_kn")
    dense = np.asarray(w.dequantize())[0].T.copy()
    dense[:, 0] = 0  # scale byte 0 counts as 0 in matmuls, as in the portable form
    identity = jnp.eye(INPUTS, dtype=jnp.bfloat16)
    finite = np.isfinite(dense).all(axis=0)
    assert finite.sum() > 250
    actual = np.asarray(
        tpu.grouped_matmul(
            identity, w.to_layout(layout), jnp.array([INPUTS], jnp.int32), None, None, INTERPRET
        )
    ).astype(np.float32)
    # Subnormal weights may be flushed, as matrix units do; a column with a NaN or infinity is not finite at all.
    normal_values = np.where(np.abs(dense) < 2.0**-126, 0, dense)[:, finite]
    kept = np.where(np.abs(actual) < 2.0**-126, 0, actual)[:, finite]
    np.testing.assert_array_equal(kept, normal_values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.isnan(actual[:, 255]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gated_with_rounded_activations_and_both_layouts(layout):
    gate, up = packed_weight(4), packed_weight(5)
    x = jnp.asarray(normal((ROWS, INPUTS), 6))
    sizes = jnp.asarray(SIZES)
    actual = tpu.grouped_glu(
        x,
        gate.to_layout(layout),
        up.to_layout(layout),
        sizes,
        SITU,
        jnp.int32(1),
        jnp.float8_e4m3fn,
        INTERPRET,
    )
    rounded = np.asarray(fake_quantize_mxfp8(x))
    product, linear = by_hand(rounded, gate, 1, SIZES), by_hand(rounded, up, 1, SIZES)
    expected = 4 * np.tanh(product / 4) / (1 + np.exp(-product)) * 25 * np.tanh(linear / 25)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_bfloat16_rows_accumulate_in_float32():
    w = packed_weight(7)
    x = jnp.asarray(normal((ROWS, INPUTS), 8)).astype(jnp.bfloat16)
    actual = program()(x, w, jnp.asarray(SIZES), jnp.int32(0))
    assert actual.dtype == jnp.bfloat16
    expected = by_hand(x, w, 0, SIZES)
    error = np.abs(np.asarray(actual).astype(np.float64) - expected)
    assert (error <= np.abs(expected) * 2.0**-8 + 1e-5).all()


def test_gradient_to_rows():
    gate, up = packed_weight(9), packed_weight(10)
    x, sizes, layer = jnp.asarray(normal((ROWS, INPUTS), 11)), jnp.asarray(SIZES), jnp.int32(1)

    def loss(implementation, x, *interpret):
        glu = implementation.grouped_glu(x, gate, up, sizes, SITU, layer, None, *interpret)
        return (glu**2).sum()

    actual = jax.grad(lambda x: loss(tpu, x, INTERPRET))(x)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x, np.float64))
        expected = np.asarray(jax.grad(lambda x: loss(reference, x))(wide))
    assert actual.dtype == jnp.float32 and expected.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(actual[SIZES.sum() :], 0)


def test_packed_weights_have_no_gradient():
    w = packed_weight(12, "float4_kn")
    x, sizes = jnp.asarray(normal((ROWS, INPUTS), 13)), jnp.asarray(SIZES)

    def loss(codes):
        moved = MXFP4Tensor(codes, w.scale_bytes, "float4_kn")
        return tpu.grouped_matmul(x, moved, sizes, jnp.int32(0), None, INTERPRET).sum()

    with pytest.raises(TypeError, match="packed MXFP4 weight"):
        jax.grad(loss)(w.packed)


def test_no_rows():
    w, sizes = packed_weight(14), jnp.zeros((EXPERTS,), jnp.int32)
    result = tpu.grouped_matmul(jnp.zeros((0, INPUTS)), w, sizes, jnp.int32(0), None, INTERPRET)
    assert result.shape == (0, OUTPUTS)


def test_what_the_kernel_does_not_do_is_refused_in_words():
    w, x, sizes = packed_weight(15), jnp.zeros((ROWS, INPUTS)), jnp.asarray(SIZES)
    with pytest.raises(NotImplementedError, match="packed_nk"):
        tpu.grouped_matmul(x, w.to_layout("packed_nk"), sizes, jnp.int32(0), None)
    with pytest.raises(NotImplementedError, match="float32 array"):
        tpu.grouped_matmul(x, jnp.zeros((EXPERTS, INPUTS, OUTPUTS)), sizes, None, None)
    with pytest.raises(NotImplementedError, match="one layout"):
        tpu.grouped_glu(x, w, w.to_layout("float4_kn"), sizes, SITU, jnp.int32(0), None)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        tpu.grouped_matmul(jnp.zeros((ROWS, INPUTS), np.float64), w, sizes, jnp.int32(0), None)
    with pytest.raises(NotImplementedError, match="multiple of 256"):
        choose_tiles(64, 4, 2080, 128, 2, Options(None, False, False))
    with pytest.raises(NotImplementedError, match="shard that axis"):
        choose_tiles(64, 4, 2**20, 128, 2, Options(None, False, False))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("transposed", "activation"), [(False, None), (True, None), (False, SITU)])
def test_tiles_divide_the_weights_of_every_shape(name, transposed, activation):
    rows, experts, inputs, outputs = SHAPES[name]
    tile = choose_tiles(rows, experts, inputs, outputs, 2, Options(activation, transposed, False))
    assert inputs % tile.inputs == 0 and outputs % tile.outputs == 0
    assert tile.rows <= row_tile(rows, experts)
    assert tile.outputs == outputs if transposed else tile.inputs == inputs
    if name.startswith("decode_bound"):
        assert tile.whole_rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [150, 192])
def test_several_tiles_of_every_axis(layout, dtype, rows):
    """Two unpacking steps, several tiles of columns and rows (of the latter whole ones, or not), and a weight kept from
    one tile of rows to the next."""
    experts, inputs, outputs = 3, 512, 2048
    w = jax.tree.map(jnp.asarray, quantize(normal((experts, outputs, inputs), 16)).to_layout("packed_kn"))
    sizes = np.array([5, 0, 140], np.int32)
    x = jnp.asarray(normal((rows, inputs), 17)).astype(dtype)
    cotangent = jnp.asarray(normal((rows, outputs), 18)).astype(dtype)
    result, pull_back = jax.vjp(
        lambda x: tpu.grouped_matmul(x, w.to_layout(layout), jnp.asarray(sizes), None, None, INTERPRET), x
    )
    stacked = jax.tree.map(lambda leaf: leaf[None], w)
    expected = by_hand(x, stacked, 0, sizes)
    dense = np.asarray(w.dequantize()).astype(np.float64)
    gradient = np.zeros((rows, inputs))
    gradient[:5] = np.asarray(cotangent)[:5].astype(np.float64) @ dense[0]
    gradient[5:145] = np.asarray(cotangent)[5:145].astype(np.float64) @ dense[2]
    relative = 1e-5 if dtype == jnp.float32 else 2.0**-8
    for got, want in ((result, expected), (pull_back(cotangent)[0], gradient)):
        error = np.abs(np.asarray(got).astype(np.float64) - want)
        assert (error <= relative * np.abs(want) + 1e-6 * np.abs(want).max()).all()
