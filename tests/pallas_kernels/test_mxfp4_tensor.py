"""MXFP4Tensor: layouts, exact decoding, and life as a pytree leaf container."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from pallas_kernels.mxfp4_matmul import LAYOUTS, MXFP4Tensor, grouped_matmul

DATA = pathlib.Path(__file__).parents[1] / "golden" / "data"
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_bytes(shape_NK, seed=0, scales=(0, 255)):
    rng = np.random.default_rng(seed)
    *leading, outputs, inputs = shape_NK
    packed = rng.integers(0, 256, (*leading, outputs, inputs // 2), dtype=np.uint8)
    return packed, rng.integers(*scales, (*leading, outputs, inputs // 32), dtype=np.uint8)


def same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    np.testing.assert_array_equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.fixture(scope="module")
def table():
    return load_file(DATA / "mxfp4_table.safetensors")


@pytest.mark.parametrize(
    ("kind", "layout"), [("numpy", "packed_nk"), ("numpy", "packed_kn"), *[("jax", name) for name in LAYOUTS]]
)
def test_decode_table_is_bit_exact(table, kind, layout):
    convert = np.asarray if kind == "numpy" else jnp.asarray
    packed, scale = convert(table["weight_packed"]), convert(table["weight_scale"])
    tensor = MXFP4Tensor.from_checkpoint(packed, scale, layout)
    assert tensor.shape == (38, 32)
    assert isinstance(tensor.packed, np.ndarray) == (kind == "numpy")
    same_bits(tensor.dequantize(), table["dequant"])
    same_bits(jax.jit(MXFP4Tensor.dequantize)(jax.tree.map(jnp.asarray, tensor)), table["dequant"])


@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_every_code_at_every_scale_in_every_dtype(kind):
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (1, 1))
    packed = np.broadcast_to(packed[None], (256, 16, 16)).reshape(-1, 16).copy()
    scale = np.repeat(np.arange(256, dtype=np.uint8), 16)[:, None]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(-1, 32)
    with np.errstate(over="ignore"):
        exact = LEVELS[codes] * np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
        as_float32 = exact.astype(np.float32)
    convert = np.asarray if kind == "numpy" else jnp.asarray
    tensor = MXFP4Tensor(convert(packed), convert(scale), "packed_nk")
    same_bits(tensor.dequantize(), as_float32)
    same_bits(tensor.dequantize(jnp.bfloat16), as_float32.astype(ml_dtypes.bfloat16))
    with jax.enable_x64(True):
        same_bits(tensor.dequantize(np.float64), exact)


def test_float64_without_x64_is_refused_for_jax_arrays():
    packed, scale = random_bytes((2, 32))
    with pytest.raises(ValueError, match="jax_enable_x64"):
        MXFP4Tensor(jnp.asarray(packed), jnp.asarray(scale), "packed_nk").dequantize(np.float64)


def test_nibble_order_and_orientation():
    packed = np.zeros((2, 16), np.uint8)
    packed[1, 3] = 0x72  # inputs 6 (code 2 = 1.0) and 7 (code 7 = 6.0) of output 1
    tensor = MXFP4Tensor.from_checkpoint(packed, np.full((2, 1), 128, np.uint8))
    expected = np.zeros((2, 32), np.float32)
    expected[1, 6], expected[1, 7] = 2.0, 12.0
    np.testing.assert_array_equal(tensor.dequantize(), expected)
    assert tensor.to_layout("packed_kn").packed[3, 1] == 0x72


@pytest.mark.parametrize("shape", [(48, 64), (3, 48, 64), (2, 3, 16, 96)])
def test_layouts_round_trip(shape):
    packed, scale = random_bytes(shape)
    start = MXFP4Tensor.from_checkpoint(jnp.asarray(packed), jnp.asarray(scale))
    expected = start.dequantize()
    for first in LAYOUTS:
        for second in LAYOUTS:
            moved = start.to_layout(first).to_layout(second)
            assert moved.layout == second and moved.shape == shape and moved.ndim == len(shape)
            same_bits(moved.dequantize(), expected)
            assert moved.nbytes_packed == packed.size + scale.size
            np.testing.assert_array_equal(moved.to_layout("packed_nk").packed, packed)
    host = MXFP4Tensor.from_checkpoint(packed, scale, "packed_kn")
    assert host.packed.flags.c_contiguous and host.packed.nbytes == packed.size
    np.testing.assert_array_equal(host.packed, np.swapaxes(packed, -1, -2))
    np.testing.assert_array_equal(host.packed, start.to_layout("packed_kn").packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_scales_read_in_logical_orientation(layout):
    packed, scale = random_bytes((3, 16, 64), scales=(100, 140))
    tensor = MXFP4Tensor.from_checkpoint(jnp.asarray(packed), jnp.asarray(scale), layout)
    assert tensor.codes.dtype == jnp.float4_e2m1fn and tensor.scales.dtype == jnp.float8_e8m0fnu
    values = np.asarray(tensor.codes).astype(np.float32) * np.repeat(
        np.asarray(tensor.scales).astype(np.float32), 32, -1
    )
    np.testing.assert_array_equal(values, tensor.dequantize())
    host = MXFP4Tensor.from_checkpoint(packed, scale.view(ml_dtypes.float8_e8m0fnu))
    assert host.codes.dtype == ml_dtypes.float4_e2m1fn
    np.testing.assert_array_equal(host.codes.view(np.uint8), np.asarray(tensor.codes).view(np.uint8))
    np.testing.assert_array_equal(host.scales.view(np.uint8), scale)


def test_wrong_arrays_are_refused_in_words():
    packed, scale = random_bytes((8, 64))
    with pytest.raises(ValueError, match="packed_xy"):
        MXFP4Tensor(packed, scale, "packed_xy")
    with pytest.raises(ValueError, match=r"scales of shape \(8, 2\); got scales of shape \(8, 3\)"):
        MXFP4Tensor(packed, np.zeros((8, 3), np.uint8), "packed_nk")
    with pytest.raises(ValueError, match="float32"):
        MXFP4Tensor(packed.astype(np.float32), scale, "packed_nk")
    with pytest.raises(ValueError, match="multiple of 32"):
        MXFP4Tensor(packed[:, :24], scale, "packed_nk")
    with pytest.raises(ValueError, match="device_put"):
        MXFP4Tensor(packed, scale, "packed_nk").to_layout("float4_kn")


def test_nan_scales_are_named():
    packed, scale = random_bytes((8, 64))
    tensor = MXFP4Tensor.from_checkpoint(packed, scale)
    assert tensor.require_finite("experts.0.w1") is tensor
    scale[3, 1] = 255
    with pytest.raises(ValueError, match=r"'experts.0.w1' has 1 scale bytes of 255"):
        MXFP4Tensor.from_checkpoint(packed, scale).require_finite("experts.0.w1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytree_jit_scan_vmap_and_abstract(layout):
    packed, scale = random_bytes((3, 16, 64), scales=(100, 140))
    stack = MXFP4Tensor.from_checkpoint(jnp.asarray(packed), jnp.asarray(scale), layout)
    expected = stack.dequantize()
    same_bits(jax.vmap(MXFP4Tensor.dequantize)(stack), expected)
    _, scanned = jax.lax.scan(lambda carry, w: (carry, w.dequantize()), None, stack)
    same_bits(scanned, expected)
    abstract = jax.eval_shape(lambda w: w, stack)
    assert isinstance(abstract, MXFP4Tensor) and abstract.shape == (3, 16, 64) and abstract.layout == layout
    assert jax.eval_shape(MXFP4Tensor.dequantize, abstract).shape == (3, 16, 64)
    assert jax.jit(MXFP4Tensor.dequantize).lower(abstract).compile()(stack).shape == (3, 16, 64)
    for other in LAYOUTS:
        moved = abstract.to_layout(other)
        assert moved.shape == (3, 16, 64) and moved.layout == other
        assert jax.tree.map(lambda a: (a.shape, a.dtype), moved) is not None
        concrete = stack.to_layout(other)
        assert (moved.packed.shape, moved.packed.dtype) == (concrete.packed.shape, concrete.packed.dtype)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(stack)]
    assert paths == [".packed", ".scale_bytes"]
    specs = MXFP4Tensor(jax.P("expert"), jax.P("expert"), layout)
    assert jax.tree.structure(specs, is_leaf=lambda node: isinstance(node, jax.P)) == jax.tree.structure(
        stack
    )


class PackedWeight(nnx.Variable):
    """A variable type of its own, so that filters can leave packed weights out."""


class Experts(nnx.Module):
    def __init__(self, w):
        self.w = PackedWeight(w)
        self.scale = nnx.Param(jnp.float32(2.0))


def test_lives_in_an_nnx_variable():
    packed, scale = random_bytes((3, 16, 64), scales=(120, 130))
    tensor = MXFP4Tensor.from_checkpoint(jnp.asarray(packed), jnp.asarray(scale), "packed_kn")
    module = Experts(tensor)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((6, 64)), jnp.float32)
    sizes = jnp.array([2, 0, 4], jnp.int32)

    @jax.jit
    def apply(module, x):
        return grouped_matmul(x, module.w.get_value(), sizes) * module.scale.get_value()

    assert isinstance(module.w.get_value(), MXFP4Tensor)
    expected = 2 * grouped_matmul(x, tensor, sizes, implementation="reference")
    np.testing.assert_allclose(apply(module, x), expected, rtol=1e-5, atol=1e-5)
    leaves = jax.tree.leaves(module)
    assert sorted(str(leaf.dtype) for leaf in leaves) == ["float32", "uint8", "uint8"]
    abstract = nnx.eval_shape(lambda: Experts(tensor))
    assert abstract.w.get_value().shape == (3, 16, 64)
    gradients = nnx.grad(lambda module: apply(module, x).sum())(module)
    expected_gradient = grouped_matmul(x, tensor, sizes, implementation="reference").sum()
    np.testing.assert_allclose(jax.tree.leaves(gradients)[0], expected_gradient, rtol=1e-4)
    assert len(jax.tree.leaves(gradients)) == 1
