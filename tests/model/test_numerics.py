"""Norms, bit for bit in bfloat16: where the public network rounds is part of its definition."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe28t_jax.model.numerics import gated_rms_norm, l2_norm, layer_norm, linear, pick, rms_norm
from moe28t_jax.model.residual import mix

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(5)
X = RNG.standard_normal((64, 96)).astype(BF16)
GAIN = (1 + 0.5 * RNG.standard_normal(96)).astype(BF16)
WIDE_GAIN = (1 + 0.5 * RNG.standard_normal(96)).astype(np.float32)


def f32(x):
    return np.asarray(x).astype(np.float32)


def rms(x, eps):
    x = f32(x)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float64) + eps)


def assert_bits(found, expected, other):
    """Equal but for results within float32 rounding of a tie; the other order of casts differs in many places."""
    assert found.dtype == jnp.bfloat16
    assert np.mean(f32(found) != f32(expected)) < 1e-3
    assert np.mean(f32(found) != f32(other)) > 0.05


def test_rms_norm_rounds_before_the_gain():
    found = rms_norm(jnp.asarray(X), jnp.asarray(GAIN), 1e-5)
    before = (f32(rms(X, 1e-5).astype(BF16)) * f32(GAIN)).astype(BF16)
    after = (rms(X, 1e-5) * f32(GAIN)).astype(BF16)
    assert_bits(found, before, after)


def test_gated_rms_norm_rounds_once_at_the_end():
    gate = RNG.standard_normal((64, 96)).astype(BF16)
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    found = gated_rms_norm(jnp.asarray(X), jnp.asarray(WIDE_GAIN), jnp.asarray(gate), 1e-5)
    once = (rms(X, 1e-5) * WIDE_GAIN * sigmoid).astype(BF16)
    twice = (f32((rms(X, 1e-5) * WIDE_GAIN).astype(BF16)) * sigmoid).astype(BF16)
    assert_bits(found, once, twice)


def test_layer_norm_keeps_gain_and_bias_in_float32():
    bias = RNG.standard_normal(96).astype(np.float32)
    centred = f32(X) - f32(X).mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    found = layer_norm(jnp.asarray(X), jnp.asarray(WIDE_GAIN), jnp.asarray(bias), 1e-5)
    wide = (normed * WIDE_GAIN + bias).astype(BF16)
    narrow = (f32((normed * WIDE_GAIN).astype(BF16)) + f32(bias.astype(BF16))).astype(BF16)
    assert_bits(found, wide, narrow)


def test_residual_mix_rounds_once():
    candidates = [RNG.standard_normal((64, 96)).astype(BF16) for _ in range(3)]
    direction = f32(GAIN) * f32(X[0])
    scores = np.stack([(rms(c, 1e-5) * direction).sum(-1) for c in candidates])
    weights = np.exp(scores - scores.max(0))
    weights = (weights / weights.sum(0))[..., None]
    found = mix([jnp.asarray(c) for c in candidates], jnp.asarray(GAIN), jnp.asarray(X[0]), 1e-5)
    once = sum(w * f32(c) for w, c in zip(weights, candidates, strict=True)).astype(BF16)
    rounded = sum(f32((w * f32(c)).astype(BF16)) for w, c in zip(weights, candidates, strict=True)).astype(
        BF16
    )
    assert found.dtype == jnp.bfloat16
    assert np.mean(f32(found) != f32(once)) < 0.01
    assert np.mean(f32(found) != f32(rounded)) > 0.05


def test_l2_norm_adds_eps_to_the_sum_and_stays_wide():
    found = l2_norm(jnp.asarray(X))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(
        found, f32(X) / np.sqrt((f32(X) ** 2).sum(-1, keepdims=True) + 1e-6), rtol=2e-6
    )
    tiny = jnp.full((1, 4), 1e-3, jnp.float32)
    np.testing.assert_allclose(l2_norm(tiny), 1e-3 / np.sqrt(5e-6), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_linear_sums_in_float32(size):
    # 256 ones and one 2^-8: bfloat16 sums would lose the small one at every step.
    weight = jnp.ones((257, size), jnp.bfloat16)
    x = jnp.concatenate([jnp.full((1, 256), 1 / 256, jnp.bfloat16), jnp.full((1, 1), 2**-7, jnp.bfloat16)], 1)
    assert (linear(x, weight) == jnp.asarray(1 + 2**-7, jnp.bfloat16)).all()
    assert jax.eval_shape(linear, x, weight).dtype == jnp.bfloat16


def test_what_is_picked_gets_its_gradient_back():
    values, slopes = jnp.asarray(RNG.standard_normal((2, 3, 7))), jnp.asarray(RNG.standard_normal((2, 3, 4)))
    index = jnp.asarray(RNG.integers(0, 7, (2, 3, 4)), jnp.int32).at[0, 0].set(6)  # one of them four times
    found, back = jax.vjp(lambda values: pick(values, index), values)
    expected, transposed = jax.vjp(lambda values: jnp.take_along_axis(values, index, axis=-1), values)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(back(slopes)[0], transposed(slopes)[0], rtol=1e-6)
