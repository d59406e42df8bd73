"""Quantile balancing of the router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.training.router_balance import max_violation, quantile_balance

balance = jax.jit(quantile_balance, static_argnames="top_k")


def loads(scores, bias, top_k):
    chosen = np.argpartition(-(scores + bias), top_k - 1, axis=1)[:, :top_k]
    return np.bincount(chosen.ravel(), minlength=scores.shape[1])


def reference(scores, bias, top_k):
    """Rank by rank in numpy: minus the margin halfway between the last expert place and the next."""
    count, experts = scores.shape
    share = count * top_k // experts
    alpha = -np.sort(-(scores + bias), axis=1)[:, top_k]
    margins = -np.sort(-(scores - alpha[:, None]), axis=0)
    new = -(margins[share - 1] + margins[share]) / 2
    return new - new.mean()


@pytest.fixture
def skewed():
    """Draws batches of tokens of one fixed, strongly skewed router: (tokens) -> scores."""
    rng = np.random.default_rng(0)
    experts, width = 224, 32
    offset, weight = rng.standard_normal(experts), rng.standard_normal((width, experts))

    def draw(count):
        x = rng.standard_normal((count, width))
        return (1 / (1 + np.exp(-(x @ weight / np.sqrt(width) + offset)))).astype(np.float32)

    return draw


def test_a_skewed_router_is_balanced_in_two_steps_of_fresh_tokens(skewed) -> None:
    # A fourth of 896 experts, 16 per token: the published procedure goes 31 -> 1.8 -> 0.4 there.
    top_k, bias, violations = 4, np.zeros(224, np.float32), []
    for _ in range(6):
        scores = skewed(16_384)
        violations.append(float(max_violation(jnp.asarray(loads(scores, bias, top_k), jnp.float32))))
        bias = np.asarray(balance(jnp.asarray(scores), jnp.asarray(bias), top_k=top_k))
    assert violations[0] > 10
    assert violations[1] < violations[0] / 5
    # A few steps later what remains is the noise of sampling 293 tokens per expert.
    assert violations[2] < 0.6 and violations[5] < 0.3


def test_the_opposite_sign_would_not_balance(skewed) -> None:
    """The counting argument decides the sign: with the other one the violation of the same router stays."""
    scores, zero = skewed(4096), np.zeros(224, np.float32)
    bias = np.asarray(balance(jnp.asarray(scores), jnp.asarray(zero), top_k=4))
    fresh = skewed(4096)
    right, wrong = loads(fresh, bias, 4), loads(fresh, -bias, 4)
    assert wrong.max() / wrong.mean() > 5 * right.max() / right.mean()


@pytest.mark.parametrize(("count", "experts", "top_k"), [(64, 8, 2), (96, 12, 1), (40, 20, 16)])
def test_equals_the_ranks_counted_in_numpy(dtype_x64, count, experts, top_k) -> None:
    rng = np.random.default_rng(count)
    scores, bias = rng.uniform(0, 1, (count, experts)), 0.1 * rng.standard_normal(experts)
    found = np.asarray(balance(jnp.asarray(scores, dtype_x64), jnp.asarray(bias, dtype_x64), top_k=top_k))
    np.testing.assert_allclose(found, reference(scores, bias, top_k), rtol=0, atol=1e-6)
    assert abs(found.mean()) < 1e-6


@pytest.mark.parametrize(("count", "experts", "top_k"), [(64, 8, 2), (40, 20, 16), (50, 16, 3)])
def test_every_expert_keeps_its_even_share_of_margins(x64, count, experts, top_k) -> None:
    """Each expert's bias puts N k / E tokens above its cut. A token whose cut is set by that very expert has the
    margin -bias whatever its score, so such margins tie; the share lies between counting them out and in."""
    rng = np.random.default_rng(top_k)
    scores, bias = rng.uniform(0, 1, (count, experts)), 0.2 * rng.standard_normal(experts)
    new = np.asarray(balance(jnp.asarray(scores), jnp.asarray(bias), top_k=top_k))
    margins = scores - (-np.sort(-(scores + bias), axis=1)[:, top_k])[:, None]
    # Centring moved all cuts by one constant; the first expert's own margins give it back.
    ordered = np.sort(margins[:, 0])[::-1]
    share = count * top_k / experts
    place = share - 0.5
    low = int(np.floor(place))
    cut = ordered[low] * (1 - (place - low)) + ordered[low + 1] * (place - low)
    cuts = -new + (cut + new[0])
    above, upto = (margins > cuts + 1e-9).sum(axis=0), (margins >= cuts - 1e-9).sum(axis=0)
    assert (above <= np.ceil(share)).all() and (upto >= np.floor(share)).all()


def test_the_result_does_not_depend_on_a_constant_in_the_bias(x64) -> None:
    rng = np.random.default_rng(3)
    scores, bias = jnp.asarray(rng.uniform(0, 1, (64, 8))), jnp.asarray(0.1 * rng.standard_normal(8))
    np.testing.assert_allclose(
        balance(scores, bias, top_k=2), balance(scores, bias + 5.0, top_k=2), rtol=0, atol=1e-12
    )


def test_violation_of_an_even_and_a_one_sided_load() -> None:
    assert float(max_violation(jnp.full((8,), 3.0))) == 0
    assert float(max_violation(jnp.zeros((8,)))) == 0
    assert float(max_violation(jnp.asarray([8.0, 0, 0, 0, 0, 0, 0, 0]))) == 7


@pytest.fixture(params=["float32", "float64"])
def dtype_x64(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param
