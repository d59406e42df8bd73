"""The GPU kernel of the grouped matmul: its parts in plain JAX, and the whole in the GPU interpreter.

The interpreter takes every primitive of the kernel, `wgmma` and `tcgen05` included, with race detection and memory
that starts as NaN; it does not take `inline_mgpu`, in whose place the kernel then runs `code_values`.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax._src.mesh import AbstractDevice
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType

from pallas_kernels.mxfp4_matmul import (
    MXFP4Tensor,
    _gpu_plan,
    fake_quantize_mxfp8,
    gpu,
    grouped_matmul,
    quantize,
    reference,
)
from pallas_kernels.mxfp4_matmul._gpu_plan import choose_tiles, plan_visits, row_tile, split_rows
from pallas_kernels.mxfp4_matmul._gpu_unpack import code_values, scale_powers, scaled, word_values
from pallas_kernels.mxfp4_matmul.shapes import SHAPES
from tests.pallas_kernels import mxfp4_cases
from tests.pallas_kernels.mxfp4_cases import USUAL

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
LAYERS, EXPERTS, INPUTS, OUTPUTS, ROWS = 2, 3, 256, 128, 37
SITU = ("situ", 4.0, 25.0)
# With 37 rows and 3 experts, 32 rows at a time.
SIZES = np.array([33, 0, 2], np.int32)


@pytest.fixture(autouse=True)
def shortest_ring(monkeypatch):
    """Two fetched steps held at a time, so that small products reuse their buffers too."""
    monkeypatch.setattr(_gpu_plan, "_MOST_STAGES", 2)


@pytest.fixture(params=[False, True], ids=["hopper", "blackwell"])
def tensor_memory(request, monkeypatch):
    """Whether the kernel multiplies as it does on Blackwell: the device or the mesh would tell."""
    monkeypatch.setattr(gpu, "_has_tensor_memory", lambda: request.param)
    return request.param


slowly_on_blackwell = pytest.mark.parametrize(
    "tensor_memory",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["hopper", "blackwell"],
    indirect=True,
)


def normal(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def packed_weight(seed, layers=LAYERS, outputs=OUTPUTS, inputs=INPUTS):
    w = quantize(normal((layers, EXPERTS, outputs, inputs), seed)).to_layout("packed_nk")
    return jax.tree.map(jnp.asarray, w)


def by_hand(x, w, layer, sizes):
    """float64 numpy, one expert after the other."""
    w_ENK = np.asarray(w.dequantize())[layer].astype(np.float64)
    result, row = np.zeros((x.shape[0], w_ENK.shape[1])), 0
    for expert, size in enumerate(sizes):
        result[row : row + size] = np.asarray(x)[row : row + size].astype(np.float64) @ w_ENK[expert].T
        row += size
    return result


_planned = jax.jit(plan_visits, static_argnums=(1, 2))
# Rows, tile, experts: rows off the tile, one tile, fewer rows than a tile, more experts than rows, one row.
PLANS = ((70, 16, 5), (8, 8, 3), (7, 16, 4), (23, 8, 9), (1, 16, 3), (64, 16, 2), (40, 8, 40))


@settings(max_examples=100)
@given(data=st.data(), plan=st.sampled_from(PLANS))
def test_visits_cover_every_row_once(data, plan):
    rows, tile, experts = plan
    total = data.draw(st.integers(0, rows))
    cuts = data.draw(st.lists(st.integers(0, total), min_size=experts - 1, max_size=experts - 1))
    sizes = np.diff([0, *sorted(cuts), total]).astype(np.int32)
    owner = np.full(rows, -2)
    for expert, fetched, start, count in zip(*map(np.asarray, _planned(sizes, rows, tile)), strict=True):
        assert -1 <= expert < experts and count >= 0 and 0 <= start <= start + count <= rows
        # The compiled copies need whole groups of eight rows.
        assert count == 0 or (fetched % 8 == 0 and fetched <= start and start + count <= fetched + tile)
        assert (owner[start : start + count] == -2).all()
        owner[start : start + count] = expert
    expected = np.full(rows, -1)
    expected[:total] = np.repeat(np.arange(experts), sizes)
    np.testing.assert_array_equal(owner, expected)


def test_parts_of_float32_rows_sum_to_them_exactly():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((5, 8)) * 2.0 ** rng.integers(-80, 120, (5, 8))).astype(np.float32)
    x[0, :3] = np.float32(3.4028235e38), np.float32(-1.1754944e-38), 0
    planes = np.asarray(split_rows(jnp.asarray(x), 16, exact=False, deinterleave=False))
    assert planes.shape == (3, 24, 8) and planes.dtype == ml_dtypes.bfloat16
    wide = planes.astype(np.float64)
    kept = np.abs(x) > 2.0**-100  # the smallest parts of smaller values are below the range
    np.testing.assert_array_equal(np.where(kept, wide.sum(axis=0)[:5], 0), np.where(kept, x, 0))
    np.testing.assert_array_equal(wide[:, 5:], 0)


def test_what_is_not_finite_stays_so_in_parts():
    x = np.array([[np.inf, -np.inf, np.nan, 1]], np.float32)
    x.view(np.int32)[0, 3] = 0x7F800001  # a NaN whose upper half is that of an infinity
    total = np.asarray(split_rows(jnp.asarray(x), 16, False, False)).astype(np.float32).sum(axis=0)[0]
    np.testing.assert_array_equal(total, [np.inf, -np.inf, np.nan, np.nan])


@pytest.mark.parametrize(
    ("dtype", "exact", "parts"), [("float16", False, 2), ("bfloat16", False, 1), ("float32", True, 1)]
)
def test_even_columns_before_odd_ones(dtype, exact, parts):
    x = normal((3, 10), 1).astype(ml_dtypes.bfloat16 if exact else dtype)
    planes = np.asarray(split_rows(jnp.asarray(x.astype(dtype)), 16, exact, deinterleave=True)).astype(
        np.float64
    )
    assert planes.shape == (2 * parts, 24, 5)
    np.testing.assert_array_equal(planes[:parts, :3].sum(axis=0), x[:, 0::2].astype(np.float64))
    np.testing.assert_array_equal(planes[parts:, :3].sum(axis=0), x[:, 1::2].astype(np.float64))


def test_every_pair_of_bytes_in_a_word():
    """The register arithmetic of the compiled kernel, with an instruction that picks bytes played by numpy."""
    first, second = np.meshgrid(np.arange(256, dtype=np.uint32), np.arange(256, dtype=np.uint32))
    word = first | (second << 8) | (second << 16) | ((first ^ 255) << 24)

    def permute(word, selector):
        sources = [(word >> (8 * i)) & 255 for i in range(4)] + [np.zeros_like(word)] * 4
        return sum(sources[(selector >> (4 * i)) & 7] << (8 * i) for i in range(4))

    packed = word[..., None].view(np.uint8)
    expected = [
        codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        for codes in (packed & 15, packed >> 4)
    ]
    for plane, values in zip(word_values(word, permute), expected, strict=True):
        bits = np.stack(plane, axis=-1).astype(np.uint32).view(np.uint16)
        np.testing.assert_array_equal(bits.view(ml_dtypes.bfloat16).astype(np.float64) * 2.0**126, values)
    for plane, values in zip(code_values(jnp.asarray(packed)), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(plane).astype(np.float64), values)


def test_every_code_and_scale_is_exact():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(256, axis=0).reshape(256, 16, 16)
    scales = np.arange(256, dtype=np.uint8)
    scales_N16 = np.repeat(scales[:, None], 16, axis=1)
    dense = np.asarray(MXFP4Tensor(codes.reshape(256, 256), scales_N16, "packed_nk").dequantize(np.float32))
    spread = lambda powers: jnp.broadcast_to(powers[:, None], (256, 16))  # noqa: E731
    for parity, values in enumerate(code_values(jnp.asarray(codes.reshape(256, 256)))):
        weights = np.asarray(scaled(values, [jnp.asarray(scales)] * 16, spread)).astype(np.float32)
        expected = dense[:, parity::2].copy()
        expected[0] = 0  # scale byte 0 counts as 0 in matmuls, as in the portable form
        # Subnormal weights may be flushed, as processors and matrix units do.
        for array in (weights, expected):
            array[np.abs(array) < 2.0**-126] = 0
        np.testing.assert_array_equal(weights, expected)
    assert np.asarray(scale_powers(jnp.asarray(scales))).astype(np.float32)[1] == 2.0**-126


@functools.cache
def program(tensor_memory, activation_dtype=None):
    """One compiled interpreter for all group sizes and layers."""
    del tensor_memory
    return jax.jit(
        lambda x, w, sizes, layer: gpu.grouped_matmul(x, w, sizes, layer, activation_dtype, INTERPRET)
    )


CASE = (LAYERS, EXPERTS, INPUTS, OUTPUTS, ROWS)
# The rings are shortened once for all examples.
shared_ring = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@slowly_on_blackwell
@settings(shared_ring, max_examples=4)
@given(case=mxfp4_cases.cases(CASE, 32))
def test_any_groups_and_scales(tensor_memory, case):
    case.check_product(program(tensor_memory)(*case.arguments("packed_nk")))


# Each an interpreter of its own.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rounded"), [(jnp.float32, True), (jnp.bfloat16, False)])
@settings(shared_ring, max_examples=10)
@given(case=mxfp4_cases.cases(CASE, 32))
def test_any_groups_and_scales_of_any_rows(tensor_memory, dtype, rounded, case):
    found = program(tensor_memory, jnp.float8_e4m3fn if rounded else None)(
        *case.arguments("packed_nk", dtype)
    )
    case.check_product(found, rounded)


@functools.cache
def glu_program(tensor_memory, activation_dtype):
    del tensor_memory
    return jax.jit(
        lambda x, gate, up, sizes, layer: gpu.grouped_glu(
            x, gate, up, sizes, SITU, layer, activation_dtype, INTERPRET
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounded", [False, True])
@settings(shared_ring, max_examples=6)
@given(case=mxfp4_cases.cases(CASE, 32, USUAL), up=mxfp4_cases.cases(CASE, 32, USUAL))
def test_gated_products_of_any_groups(tensor_memory, rounded, case, up):
    x, gate, sizes, layer = case.arguments("packed_nk")
    up = up._replace(sizes=case.sizes, layer=case.layer)
    run = glu_program(tensor_memory, jnp.float8_e4m3fn if rounded else None)
    case.check_glu(run(x, gate, up.weight("packed_nk"), sizes, layer), up, rounded)


@pytest.mark.parametrize(
    ("sizes", "layer"), [((33, 0, 2), 1), ((0, 0, 0), 0), ((0, 37, 0), 0), ((1, 32, 4), 1)]
)
def test_group_sizes(sizes, layer):
    """Off the tile, without rows, an empty group, one with everything, and rows of nobody."""
    w, sizes = packed_weight(0), np.array(sizes, np.int32)
    x = normal((ROWS, INPUTS), 1)
    x[sizes.sum() :] = np.nan  # rows of nobody must not reach a result
    actual = np.asarray(program(False)(jnp.asarray(x), w, jnp.asarray(sizes), jnp.int32(layer)))
    np.testing.assert_allclose(actual, by_hand(x, w, layer, sizes), rtol=1e-5, atol=5e-5)
    np.testing.assert_array_equal(actual[sizes.sum() :], 0)


@slowly_on_blackwell
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_gated_with_rounded_activations(dtype, tensor_memory):
    gate, up = packed_weight(4), packed_weight(5)
    x = jnp.asarray(normal((ROWS, INPUTS), 6)).astype(dtype)
    actual = gpu.grouped_glu(
        x, gate, up, jnp.asarray(SIZES), SITU, jnp.int32(1), jnp.float8_e4m3fn, INTERPRET
    )
    assert actual.dtype == dtype
    rounded = np.asarray(fake_quantize_mxfp8(x)).astype(np.float32)
    product, linear = by_hand(rounded, gate, 1, SIZES), by_hand(rounded, up, 1, SIZES)
    expected = 4 * np.tanh(product / 4) / (1 + np.exp(-product)) * 25 * np.tanh(linear / 25)
    relative = 5e-5 if dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), expected, rtol=relative, atol=1e-4)


def test_bfloat16_rows_accumulate_in_float32():
    w = packed_weight(7)
    x = jnp.asarray(normal((ROWS, INPUTS), 8)).astype(jnp.bfloat16)
    actual = program(False)(x, w, jnp.asarray(SIZES), jnp.int32(0))
    assert actual.dtype == jnp.bfloat16
    expected = by_hand(x, w, 0, SIZES)
    error = np.abs(np.asarray(actual).astype(np.float64) - expected)
    assert (error <= np.abs(expected) * 2.0**-8 + 1e-5).all()


def test_gradient_to_rows(tensor_memory):
    w = packed_weight(9)
    x, cotangent = normal((ROWS, INPUTS), 10), normal((ROWS, OUTPUTS), 11)
    _, pull_back = jax.vjp(
        lambda x: gpu.grouped_matmul(x, w, jnp.asarray(SIZES), jnp.int32(1), None, INTERPRET), jnp.asarray(x)
    )
    dense = np.asarray(w.dequantize())[1].astype(np.float64)
    expected = np.zeros((ROWS, INPUTS))
    expected[:33], expected[33:35] = cotangent[:33] @ dense[0], cotangent[33:35] @ dense[2]
    np.testing.assert_allclose(pull_back(jnp.asarray(cotangent))[0], expected, rtol=1e-5, atol=5e-5)


@pytest.mark.slow
def test_gradient_of_the_gated_product():
    gate, up = packed_weight(9), packed_weight(10)
    x, sizes, layer = jnp.asarray(normal((ROWS, INPUTS), 11)), jnp.asarray(SIZES), jnp.int32(1)

    def loss(implementation, x, *interpret):
        glu = implementation.grouped_glu(x, gate, up, sizes, SITU, layer, jnp.float8_e4m3fn, *interpret)
        return (glu**2).sum()

    actual = jax.grad(lambda x: loss(gpu, x, INTERPRET))(x)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x, np.float64))
        expected = np.asarray(jax.grad(lambda x: loss(reference, x))(wide))
    assert actual.dtype == jnp.float32 and expected.dtype == np.float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_array_equal(actual[SIZES.sum() :], 0)


def test_one_weight():
    w = jax.tree.map(lambda leaf: leaf[0, 0], packed_weight(12))
    x = normal((2, 3, INPUTS), 13)
    actual = gpu.matmul(jnp.asarray(x), w, None, None, INTERPRET)
    expected = x.astype(np.float64) @ np.asarray(w.dequantize()).astype(np.float64).T
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=5e-5)


def test_no_rows():
    w, sizes = packed_weight(16), jnp.zeros((EXPERTS,), jnp.int32)
    result = gpu.grouped_matmul(jnp.zeros((0, INPUTS)), w, sizes, jnp.int32(0), None, INTERPRET)
    assert result.shape == (0, OUTPUTS)


def test_what_the_kernel_does_not_do_is_refused_in_words():
    w, x, sizes = packed_weight(17), jnp.zeros((ROWS, INPUTS)), jnp.asarray(SIZES)
    with pytest.raises(NotImplementedError, match=r'w\.to_layout\("packed_nk"\)'):
        grouped_matmul(x, w.to_layout("packed_kn"), sizes, layer=0, implementation="gpu")
    with pytest.raises(NotImplementedError, match="'float4_kn'"):
        gpu.grouped_glu(x, w, w.to_layout("float4_kn"), sizes, SITU, jnp.int32(0), None)
    with pytest.raises(NotImplementedError, match="float32 array"):
        gpu.grouped_matmul(x, jnp.zeros((EXPERTS, INPUTS, OUTPUTS)), sizes, None, None)
    with pytest.raises(NotImplementedError, match="160 inputs"):
        gpu.grouped_matmul(x[:, :160], packed_weight(18, inputs=160), sizes, jnp.int32(0), None)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        gpu.grouped_matmul(jnp.zeros((ROWS, INPUTS), np.float64), w, sizes, jnp.int32(0), None)


@pytest.mark.parametrize(
    ("kind", "capability", "on_blackwell"),
    [
        ("NVIDIA H200", "9.0", False),
        ("NVIDIA GH200 480GB", "9.0", False),
        ("NVIDIA B200", "10.0", True),
        ("NVIDIA GB300", "10.3", True),
        ("NVIDIA A100-SXM4-80GB", "8.0", None),
        ("NVIDIA GeForce RTX 5090", "12.0", None),
    ],
)
def test_how_the_gpu_multiplies_or_that_it_cannot(monkeypatch, kind, capability, on_blackwell):
    """Of the GPU that is there or, ahead of time, of those of a mesh that is not."""

    def check():
        if on_blackwell is not None:
            assert gpu._has_tensor_memory() == on_blackwell
            return
        with pytest.raises(NotImplementedError, match=f"got a {kind} .*pass another"):
            gpu.grouped_matmul(
                jnp.zeros((ROWS, INPUTS)), packed_weight(17), jnp.asarray(SIZES), jnp.int32(0), None
            )

    assert not gpu._has_tensor_memory()
    described = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh):
        check()
    device = types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: [device])
        check()


@pytest.mark.parametrize("on_blackwell", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_tiles_fit_for_every_shape(monkeypatch, name, on_blackwell):
    monkeypatch.undo()
    rows, experts, _, _ = SHAPES[name]
    for parts, itemsize, (count, transposed) in itertools.product(
        (1, 2, 3), (2, 4), ((1, False), (2, False), (1, True))
    ):
        planes = parts * (1 if transposed else 2)
        tile = choose_tiles(rows, experts, planes, itemsize, count, transposed, on_blackwell)
        least = 64 if on_blackwell else 16
        assert least <= tile.rows <= max(least, row_tile(rows, experts, 256)) and tile.rows * count <= 256
        # A step is released when the next one is multiplied, so one buffer would wait for itself.
        assert tile.stages >= 3


@pytest.mark.slow
@pytest.mark.parametrize("is_blackwell", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_several_tiles_of_every_axis(monkeypatch, dtype, is_blackwell):
    """Rings of their real length used more than once, several tiles of rows and columns, both directions."""
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "_has_tensor_memory", lambda: is_blackwell)
    inputs, outputs, rows = 640, 384, 150
    w = packed_weight(19, 1, outputs, inputs)
    sizes = np.array([5, 0, 140], np.int32)
    x = jnp.asarray(normal((rows, inputs), 20)).astype(dtype)
    cotangent = jnp.asarray(normal((rows, outputs), 21)).astype(dtype)
    result, pull_back = jax.vjp(
        lambda x: gpu.grouped_matmul(x, w, jnp.asarray(sizes), jnp.int32(0), None, INTERPRET), x
    )
    expected = by_hand(x, w, 0, sizes)
    dense = np.asarray(w.dequantize())[0].astype(np.float64)
    gradient = np.zeros((rows, inputs))
    gradient[:5] = np.asarray(cotangent)[:5].astype(np.float64) @ dense[0]
    gradient[5:145] = np.asarray(cotangent)[5:145].astype(np.float64) @ dense[2]
    relative = {jnp.float32: 1e-5, jnp.float16: 2.0**-11, jnp.bfloat16: 2.0**-8}[dtype]
    for got, want in ((result, expected), (pull_back(cotangent)[0], gradient)):
        error = np.abs(np.asarray(got).astype(np.float64) - want)
        assert (error <= relative * np.abs(want) + 1e-6 * np.abs(want).max()).all()
