"""The GPU kernels of the gated delta rule, interpreted: races are errors and untouched memory is NaN."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from safetensors.numpy import load_file

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import gpu
from tests.pallas_kernels.delta_rule_cases import Case, cases
from tests.pallas_kernels.test_delta_rule_tpu import (
    DATA,
    FIXTURES,
    assert_close,
    check_gradient_of_segment_map,
    fused_inputs,
    make_inputs,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def poisoned(x: tuple[jax.Array, ...], lengths: jax.Array) -> tuple[jax.Array, ...]:
    """NaN in every token beyond its row's length; the state comes last and has no tokens."""
    invalid = np.arange(x[0].shape[1])[None, :] >= np.asarray(lengths)[:, None]
    return (
        *(jnp.where(invalid.reshape(*invalid.shape, *(1,) * (a.ndim - 2)), jnp.nan, a) for a in x[:-1]),
        x[-1],
    )


def test_sequence_with_padding_segments_and_boundaries() -> None:
    # Off the group of 16 and the chunk of 64 tokens; resets in both, and in the padding, where they do nothing.
    x, lengths = make_inputs(0, (2, 70, 1, 16, 8)), jnp.asarray([70, 33], jnp.int32)
    starts = np.searchsorted([20, 40, 64], np.arange(70), "right")
    segment_ids = jnp.asarray(np.stack([starts, starts]), jnp.int32)
    found = gpu.delta_rule(
        *poisoned(x, lengths), lengths, segment_ids, return_boundary_states=True, interpret=INTERPRET
    )
    expected = delta_rule.delta_rule(
        *x, lengths, segment_ids, return_boundary_states=True, implementation="reference"
    )
    assert found[2].shape == (2, 2, 1, 16, 8)
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == e.dtype == jnp.float32
        assert_close(a, e, 1e-6)


@settings(max_examples=4)
@given(case=cases((2, 70, 1, 16, 8)))
def test_any_lengths_documents_and_gates(case: Case) -> None:
    found = gpu.delta_rule(*case.arguments(), return_boundary_states=True, interpret=INTERPRET)
    case.check(found, 2e-6)


# Tokens, heads, dtype of q, k and v; each has an interpreter of its own, slower than its examples. One token,
# a whole group of 16, into a second chunk, and off every boundary after a second.
PROGRAMS = ((1, 2, jnp.bfloat16), (16, 1, jnp.float32), (81, 2, jnp.bfloat16), (130, 1, jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "heads", "low"), PROGRAMS)
@settings(max_examples=8)
@given(data=st.data())
def test_any_tokens_lengths_documents_and_gates(
    data: st.DataObject, tokens: int, heads: int, low: Any
) -> None:
    case = data.draw(cases((2, tokens, heads, 8, 40)))
    found = gpu.delta_rule(*case.arguments(low), return_boundary_states=True, interpret=INTERPRET)
    case.check(found, 2e-6, low)


def test_short_rows_in_bfloat16() -> None:
    # More columns than one thread block holds, more than one head, rows of no token and of one.
    x, lengths = make_inputs(1, (3, 17, 2, 40, 40)), jnp.asarray([0, 1, 17], jnp.int32)
    x = (*(a.astype(jnp.bfloat16) for a in x[:3]), *x[3:])
    found = gpu.delta_rule(*poisoned(x, lengths), lengths, interpret=INTERPRET)
    expected = delta_rule.delta_rule(*x, lengths, implementation="reference")
    assert found[0].dtype == jnp.bfloat16
    # One rounding to bfloat16 of the same numbers, give or take their last float32 bit.
    assert_close(found[0], expected[0], 4e-3)
    assert_close(found[1], expected[1], 1e-6)
    np.testing.assert_array_equal(found[1][0], x[-1][0])


def check_gradient(shape: tuple[int, ...], lengths: list[int], low: Any) -> None:
    """Of outputs, final state and states at the ends of chunks, against the recurrence in float64."""
    batch, tokens = shape[:2]
    x, weights = make_inputs(2, shape), make_inputs(3, shape)
    x = (*(a.astype(low) for a in x[:3]), *x[3:])
    starts = np.searchsorted([7, 20, 64], np.arange(tokens), "right")
    segment_ids = jnp.asarray(np.stack([starts] * batch), jnp.int32)
    rows = jnp.asarray(lengths, jnp.int32)

    def loss(implementation: Any, options: dict[str, Any], *x: jax.Array) -> jax.Array:
        o, state, boundaries = implementation(*x, rows, segment_ids, return_boundary_states=True, **options)
        w_o, w_state = weights[2].astype(state.dtype), weights[5].astype(state.dtype)
        # Different weights everywhere, so that no gradient cancels.
        at_ends = jnp.sum(boundaries[:, 0] * w_state * w_state)
        return jnp.sum(o.astype(state.dtype) * w_o) + jnp.sum(state * w_state) + at_ends

    names = tuple(range(2, 8))
    found = jax.grad(loss, argnums=names)(gpu.delta_rule, {"interpret": INTERPRET}, *poisoned(x, rows))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in x]
        options = {"implementation": "reference"}
        expected = [
            np.asarray(e) for e in jax.grad(loss, argnums=names)(delta_rule.delta_rule, options, *wide)
        ]
    for a, e, of in zip(found, expected, x, strict=True):
        assert a.dtype == of.dtype
        # In bfloat16 the cotangent of o is rounded too.
        assert_close(a, jnp.asarray(e, jnp.float32), 8e-3 if low == jnp.bfloat16 else 2e-6)


def test_gradient() -> None:
    check_gradient((1, 70, 1, 8, 8), [67], jnp.float32)


@pytest.mark.slow
def test_gradient_of_more_than_one_part_in_bfloat16() -> None:
    check_gradient((3, 20, 2, 40, 40), [0, 11, 20], jnp.bfloat16)


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(name: str) -> None:
    data = {key: jnp.asarray(value) for key, value in load_file(DATA / f"kda_op_{name}.safetensors").items()}
    lengths, scale = data["lengths"], data["q"].shape[-1] ** -0.5
    arrays = (data["q"] * scale, data["k"], data["v"], data["g"], data["beta"])
    o, state = gpu.delta_rule(*arrays, data.get("initial_state"), lengths, interpret=INTERPRET)
    valid = np.arange(o.shape[1])[None, :, None, None] < np.asarray(lengths)[:, None, None, None]
    np.testing.assert_allclose(o, np.where(valid, data["o"], 0.0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, data["final_state"], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_repeated_keys_without_decay() -> None:
    # The errors of one token are written again by all that follow: every key equal, full writing strength.
    q, k, v, log_decay, beta, state = make_inputs(4, (1, 128, 1, 16, 16))
    k, beta = jnp.broadcast_to(k[:, :1], k.shape), jnp.ones_like(beta)
    x = (q, k, v, jnp.zeros_like(log_decay), beta, state)
    found = gpu.delta_rule(*x, interpret=INTERPRET)
    for a, e in zip(found, delta_rule.delta_rule(*x, implementation="reference"), strict=True):
        assert_close(a, e, 2e-6)


def test_segment_map() -> None:
    # The map's columns begin at the second thread block after padding K to 32, and V takes two.
    _, k, v, log_decay, beta, _ = make_inputs(5, (2, 19, 1, 16, 40))
    lengths = jnp.asarray([19, 9], jnp.int32)
    k, v, log_decay, beta, _ = poisoned((k, v, log_decay, beta, k), lengths)
    found = gpu.segment_map(k, v, log_decay, beta, lengths, interpret=INTERPRET)
    expected = delta_rule.segment_map(k, v, log_decay, beta, lengths, implementation="reference")
    for a, e in zip(found, expected, strict=True):
        assert_close(a, e, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("with_lengths", [True, False])
def test_gradient_of_segment_map(with_lengths: bool) -> None:
    check_gradient_of_segment_map(gpu.segment_map, INTERPRET, 40, jnp.float32, with_lengths)


def test_step() -> None:
    *token, state = make_inputs(6, (3, 1, 2, 16, 40))
    token = [a[:, 0] for a in token]
    found = gpu.step(*token, state, interpret=INTERPRET)
    for a, e in zip(found, delta_rule.step(*token, state, implementation="reference"), strict=True):
        assert a.dtype == e.dtype
        assert_close(a, e, 1e-6)


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float32])
def test_fused_step_leaves_inactive_rows_alone(low: Any) -> None:
    x = fused_inputs(3, 1, 128, low)
    active = jnp.asarray([True, False, True])
    expected = delta_rule.fused_step(**x, active=active, implementation="reference")
    poisoned = x | {name: x[name].at[1].set(jnp.nan) for name in ("x", "log_decay", "beta", "gate")}
    found = gpu.fused_step(*poisoned.values(), active, interpret=INTERPRET)
    np.testing.assert_array_equal(found[1][1], x["state"][1])
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_array_equal(found[0][1], 0.0)
    assert_close(found[0], expected[0], 4e-3 if low == jnp.bfloat16 else 1e-6)
    assert_close(found[1], expected[1], 1e-6)


def test_fused_step_of_all_rows() -> None:
    x = fused_inputs(1, 2, 128, jnp.float32)
    found = gpu.fused_step(*x.values(), norm_epsilon=0.25, interpret=INTERPRET)
    for a, e in zip(
        found, delta_rule.fused_step(**x, norm_epsilon=0.25, implementation="reference"), strict=True
    ):
        assert_close(a, e, 1e-6)


def test_what_the_kernels_refuse() -> None:
    x = fused_inputs(1, 1, 16, jnp.float32)
    with pytest.raises(NotImplementedError, match="takes K = 128"):
        delta_rule.fused_step(**x, implementation="gpu")
    *token, state = make_inputs(7, (1, 1, 1, 257, 4))
    with pytest.raises(NotImplementedError, match="at most K = 256 key channels in registers and got 257"):
        delta_rule.step(*(a[:, 0] for a in token), state, implementation="gpu")
    with jax.enable_x64(True):
        wide = make_inputs(8, (1, 2, 1, 4, 4), np.float64)
        with pytest.raises(NotImplementedError, match="float64"):
            delta_rule.delta_rule(*wide, implementation="gpu")
        with pytest.raises(NotImplementedError, match="float64"):
            delta_rule.segment_map(*wide[1:5], implementation="gpu")
