"""Quantisation: bit-exact to the fixture, host and device equal, straight through; activations."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.mxfp4_matmul import fake_quantize, fake_quantize_mxfp8, quantize, situ_glu, swiglu

DATA = pathlib.Path(__file__).parents[1] / "golden" / "data"


def bits(array):
    return np.asarray(array).view(np.int32)


@pytest.fixture(scope="module")
def golden():
    return load_file(DATA / "mxfp4_quant.safetensors")


def edge_blocks():
    """Blocks at the ends of the float32 range, on every tie and on every scale boundary."""
    rng = np.random.default_rng(3)
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32)
    near = np.concatenate([midpoints, np.nextafter(midpoints, 0), np.nextafter(midpoints, 9), -midpoints])
    blocks = [
        np.zeros(32),
        np.full(32, -0.0),
        np.full(32, 1e-30),
        np.full(32, 1e30),
        np.full(32, 3.4028235e38),
    ]
    with np.errstate(under="ignore", over="ignore"):
        for exponent in (-149, -140, -130, -129, -128, -127, -126, -125, -124, -123, -60, 0, 60, 120, 124):
            block = (near.astype(np.float64) * 2.0**exponent).astype(np.float32)
            blocks.append(block)
            for factor in (1.0, 1.7499999, 1.75, 1.9999999):
                top = rng.uniform(-1, 1, 32) * 2.0**exponent
                top[5] = factor * 2.0**exponent
                blocks.append(top.astype(np.float32))
    return np.stack([np.where(np.isfinite(block), block, 1).astype(np.float32) for block in blocks])


def naive_quantize(w_BK):
    """float64 arithmetic straight from the rule; one block a row."""
    amax = np.abs(w_BK).max(-1).astype(np.float64)
    scale = np.zeros(len(w_BK), np.int64)
    for row, value in enumerate(amax):
        if value > 0:
            exponent = int(np.floor(np.log2(value)))
            exponent += value / 2.0**exponent >= 1.75
            scale[row] = np.clip(exponent - 2 + 127, 0, 254)
    values = np.abs(w_BK).astype(np.float64) / (2.0 ** (scale - 127.0))[:, None]
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.minimum(values, 6)[..., None] - levels)
    # Among the two nearest at a tie, the even code.
    order = distance * 4 + np.where(distance == distance.min(-1, keepdims=True), np.arange(8) % 2, 4) * 1e-12
    codes = order.argmin(-1) + 8 * (w_BK < 0)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), scale.astype(np.uint8)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("layout", ["packed_nk", "packed_kn"])
def test_golden_is_bit_exact(golden, convert, layout):
    tensor = quantize(convert(golden["w"]), layout)
    checkpoint = tensor.to_layout("packed_nk")
    np.testing.assert_array_equal(checkpoint.packed, golden["weight_packed"])
    np.testing.assert_array_equal(checkpoint.scale_bytes, golden["weight_scale"])
    np.testing.assert_array_equal(bits(tensor.dequantize()), bits(golden["dequant"]))
    np.testing.assert_array_equal(bits(fake_quantize(golden["w"])), bits(golden["dequant"]))


def test_edges_follow_the_rule_on_host_and_device():
    w = edge_blocks()
    packed, scale = naive_quantize(w)
    for tensor in (quantize(w, "packed_nk"), jax.jit(lambda w: quantize(w, "packed_nk"))(jnp.asarray(w))):
        np.testing.assert_array_equal(tensor.scale_bytes[:, 0], scale)
        np.testing.assert_array_equal(tensor.packed, packed)


def test_host_and_device_agree_on_a_million_values():
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((512, 2048)) * np.exp2(rng.integers(-130, 120, (512, 1)))).astype(np.float32)
    host, device = quantize(w), quantize(jnp.asarray(w))
    np.testing.assert_array_equal(host.packed, device.packed)
    np.testing.assert_array_equal(host.scale_bytes, device.scale_bytes)
    np.testing.assert_array_equal(bits(host.dequantize()), bits(device.dequantize()))
    np.testing.assert_array_equal(bits(host.dequantize()), bits(fake_quantize(jnp.asarray(w))))
    again = quantize(host.dequantize())
    # By value: a negative zero comes out of the second rounding as a positive one.
    np.testing.assert_array_equal(again.dequantize(), host.dequantize())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_dtypes_quantise_as_their_float32_value(dtype):
    w = np.random.default_rng(1).standard_normal((4, 64)).astype(dtype)
    expected = quantize(w.astype(np.float32))
    np.testing.assert_array_equal(quantize(w).packed, expected.packed)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(quantize(jnp.asarray(w)).packed, expected.packed)
        rounded = fake_quantize(jnp.asarray(w))
        assert rounded.dtype == dtype
        np.testing.assert_array_equal(np.asarray(rounded).astype(np.float32), expected.dequantize())


def test_strided_and_stacked_host_arrays():
    w = np.random.default_rng(2).standard_normal((64, 3, 40)).astype(np.float32).transpose(1, 2, 0)
    tensor = quantize(w)
    assert tensor.shape == (3, 40, 64)
    for expert in range(3):
        np.testing.assert_array_equal(tensor.packed[expert], quantize(np.ascontiguousarray(w[expert])).packed)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_non_finite_blocks_read_as_nan(bad, convert):
    w = np.ones((2, 64), np.float32)
    w[1, 40] = bad
    values = np.asarray(quantize(convert(w)).dequantize())
    assert (
        np.isnan(values[1, 32:]).all() and np.isfinite(values[0]).all() and np.isfinite(values[1, :32]).all()
    )
    with pytest.raises(ValueError, match="255"):
        quantize(convert(w)).require_finite("w")


def test_lengths_off_the_block_are_refused():
    with pytest.raises(ValueError, match="length 48, which is not a multiple of 32"):
        quantize(np.ones((4, 48), np.float32))
    with pytest.raises(ValueError, match="Axis -2 of w has length 4"):
        fake_quantize(jnp.ones((4, 64)), axis=-2)


def test_fake_quantize_axis_and_straight_through_gradient():
    w = jnp.asarray(np.random.default_rng(4).standard_normal((3, 64, 96)), jnp.float32)
    along_inputs = jax.jit(lambda w: fake_quantize(w, axis=-2))(w)
    np.testing.assert_array_equal(bits(along_inputs), bits(fake_quantize(w.swapaxes(1, 2)).swapaxes(1, 2)))
    cotangent = jnp.asarray(np.random.default_rng(5).standard_normal(w.shape), jnp.float32)
    for form in (lambda w: fake_quantize(w, axis=1), fake_quantize_mxfp8):
        gradient = jax.jit(jax.grad(lambda w, form=form: (form(w) * cotangent).sum()))(w)
        np.testing.assert_array_equal(gradient, cotangent)
    np.testing.assert_array_equal(jax.vmap(fake_quantize)(w), fake_quantize(w))


def test_mxfp8_matches_the_rule_in_float64():
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((256, 64)) * np.exp2(rng.integers(-100, 100, (256, 1)))).astype(np.float32)
    x[0] = 0
    x[1, :32] = 479.0  # above 448 at scale 1: saturates
    blocks = x.reshape(-1, 32).astype(np.float64)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = np.exp2(np.floor(np.log2(np.where(amax == 0, 1, amax))) - 8)
    elements = np.clip(blocks / scale, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    expected = (elements.astype(np.float64) * scale).reshape(x.shape)
    actual = np.asarray(jax.jit(fake_quantize_mxfp8)(x))
    np.testing.assert_array_equal(actual, expected)
    assert actual[1, 0] == 448.0
    np.testing.assert_array_equal(fake_quantize_mxfp8(actual), actual)
    wide = fake_quantize_mxfp8(jnp.asarray(x, jnp.bfloat16))
    assert wide.dtype == jnp.bfloat16
    assert np.isnan(np.asarray(fake_quantize_mxfp8(np.array([np.nan, np.inf] * 16, np.float32)))[0])


@pytest.mark.parametrize(("case", "beta", "linear_beta"), [(0, 4.0, 25.0), (1, 4.0, None), (2, 1.0, 25.0)])
def test_situ_golden(case, beta, linear_beta):
    golden = load_file(DATA / "situ.safetensors")
    gate, up = jnp.asarray(golden[f"gate_{case}"]), jnp.asarray(golden[f"up_{case}"])
    np.testing.assert_allclose(
        situ_glu(gate, up, beta, linear_beta), golden[f"y_{case}"], rtol=1e-6, atol=1e-6
    )


def test_situ_absent_bounds_and_dtypes():
    gate, up = jnp.linspace(-9, 9, 64), jnp.linspace(40, -40, 64)
    for absent in (None, 0, 0.0):
        np.testing.assert_array_equal(situ_glu(gate, up, absent, 25.0), situ_glu(gate, up, 1.0, 25.0))
        np.testing.assert_array_equal(situ_glu(gate, up, 4, absent), situ_glu(gate, up, 4.0, None))
    narrow_gate, narrow_up = gate.astype(jnp.bfloat16), up.astype(jnp.bfloat16)
    narrow = situ_glu(narrow_gate, narrow_up)
    wide = situ_glu(narrow_gate.astype(jnp.float32), narrow_up.astype(jnp.float32))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))
    with jax.enable_x64(True):
        g, u = np.linspace(-9, 9, 64), np.linspace(40, -40, 64)
        expected = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
        np.testing.assert_allclose(situ_glu(jnp.asarray(g), jnp.asarray(u)), expected, rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(
            swiglu(jnp.asarray(g), jnp.asarray(u)), g / (1 + np.exp(-g)) * u, rtol=1e-13
        )
