"""The TPU kernels of the gated delta rule, interpreted: races are errors and untouched memory is NaN."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import tpu
from tests.pallas_kernels.delta_rule_cases import Case, cases

DATA = Path(__file__).parents[1] / "golden" / "data"
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
ARGUMENTS = ("q", "k", "v", "log_decay", "beta", "initial_state")
TOKENS = 70
SHAPE = (2, TOKENS, 2, 16, 8)
LENGTHS = jnp.asarray([TOKENS, 33], jnp.int32)
# Resets within a chunk, at its first token, and in the padding of the second row, where they must do nothing.
SEGMENT_IDS = jnp.asarray(
    np.searchsorted([20, 40, 64], np.arange(TOKENS), "right")[None] * [[1], [1]], jnp.int32
)

FIXTURES = [
    pytest.param(name, marks=() if name in fast else pytest.mark.slow)
    for fast in [("mixed_edge_T128", "T1")]
    for name in sorted(path.stem.removeprefix("kda_op_") for path in DATA.glob("kda_op_*.safetensors"))
]


def make_inputs(seed: int, shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32) -> tuple[jax.Array, ...]:
    """q, k, v, log_decay, beta and initial state; decays from none to total, small ones after huge ones."""
    batch, tokens, heads, key_dim, value_dim = shape
    rng = np.random.default_rng(seed)

    def unit(*axes: int) -> np.ndarray:
        x = rng.standard_normal(axes)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    normal = -5.0 / (1.0 + np.exp(2.0 - 2.0 * rng.standard_normal((batch, tokens, heads, key_dim))))
    extremes = rng.choice([-np.inf, -1e4, -5.0, -0.01, 0.0], normal.shape, p=[0.05, 0.05, 0.1, 0.4, 0.4])
    arrays = (
        unit(batch, tokens, heads, key_dim) * key_dim**-0.5,
        unit(batch, tokens, heads, key_dim),
        rng.standard_normal((batch, tokens, heads, value_dim)),
        np.where(rng.random(normal.shape) < 0.5, normal, extremes),
        1.0 / (1.0 + np.exp(-2.0 * rng.standard_normal((batch, tokens, heads)))),
        rng.standard_normal((batch, heads, key_dim, value_dim)),
    )
    return tuple(jnp.asarray(x.astype(dtype)) for x in arrays)


def poison_padding(x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """NaN in every token beyond LENGTHS."""
    invalid = np.arange(TOKENS)[None, :] >= np.asarray(LENGTHS)[:, None]
    return (
        *(jnp.where(invalid.reshape(*invalid.shape, *(1,) * (a.ndim - 2)), jnp.nan, a) for a in x[:-1]),
        x[-1],
    )


def assert_close(actual: jax.Array, expected: jax.Array, relative: float) -> None:
    """Largest difference against the largest magnitude (at least 1)."""
    found, wanted = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert found.shape == wanted.shape
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=relative * scale)


def test_sequence_with_padding_segments_and_boundaries() -> None:
    x = make_inputs(0)
    found = tpu.delta_rule(
        *poison_padding(x), LENGTHS, SEGMENT_IDS, return_boundary_states=True, interpret=INTERPRET
    )
    expected = delta_rule.delta_rule(
        *x, LENGTHS, SEGMENT_IDS, return_boundary_states=True, implementation="reference"
    )
    assert found[2].shape == (2, 2, 2, 16, 8)
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == e.dtype == jnp.float32
        assert_close(a, e, 1e-6)


@settings(max_examples=6)
@given(case=cases(SHAPE))
def test_any_lengths_documents_and_gates(case: Case) -> None:
    found = tpu.delta_rule(*case.arguments(), return_boundary_states=True, interpret=INTERPRET)
    case.check(found, 2e-6)


# Tokens, heads, dtype of q, k and v; each has an interpreter of its own, slower than its examples. One token,
# a whole chunk, one token into the second row of 128, and off every boundary; one, two and a half pairs of heads.
PROGRAMS = ((1, 1, jnp.float32), (64, 3, jnp.bfloat16), (129, 3, jnp.float32), (150, 1, jnp.bfloat16))


# XLA for CPUs leaves out a rounding to bfloat16 that is undone at once. The halves of the kernel's products are made of
# such roundings, and the chips' compiler keeps them.
faithful = jax.jit(
    lambda *x: tpu.delta_rule(*x, return_boundary_states=True, interpret=INTERPRET),
    compiler_options={"xla_allow_excess_precision": False},
)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "heads", "low"), PROGRAMS)
@settings(max_examples=8)
@given(data=st.data())
def test_any_tokens_lengths_documents_and_gates(
    data: st.DataObject, tokens: int, heads: int, low: Any
) -> None:
    case = data.draw(cases((2, tokens, heads, 8, 16)))
    found = faithful(*case.arguments(low))
    # Products of bfloat16 are exact to 16 bits, and errors of one token are written again by those that follow.
    case.check(found, 2e-6 if low == jnp.float32 else 1e-4, low)


def test_gradient_equals_recurrence_in_float64() -> None:
    x, weights = make_inputs(1), make_inputs(2)

    def loss(implementation: Any, options: dict[str, Any], *x: jax.Array) -> jax.Array:
        o, state, boundaries = implementation(
            *x, LENGTHS, SEGMENT_IDS, return_boundary_states=True, **options
        )
        w_o, w_state = weights[2].astype(o.dtype), weights[5].astype(o.dtype)
        # Different weights everywhere, so that no gradient cancels.
        return jnp.sum(o * w_o) + jnp.sum(state * w_state) + jnp.sum(boundaries[:, 0] * w_state * w_state)

    names = tuple(range(2, 8))
    found = jax.grad(loss, argnums=names)(tpu.delta_rule, {"interpret": INTERPRET}, *poison_padding(x))
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in x]
        expected = jax.grad(loss, argnums=names)(
            delta_rule.delta_rule, {"implementation": "reference"}, *wide
        )
        expected = [np.asarray(e) for e in expected]
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == jnp.float32
        assert_close(a, jnp.asarray(e, jnp.float32), 2e-6)


def make_bfloat16(seed: int, shape: tuple[int, ...], bounded: bool) -> tuple[jax.Array, ...]:
    """q, k and v in bfloat16. A bounded decay is at least exp(-5) per token, for which the kernel has a shorter way."""
    x = make_inputs(seed, shape)
    log_decay = jnp.maximum(x[3], -5.0) if bounded else x[3]
    return (*(a.astype(jnp.bfloat16) for a in x[:3]), log_decay, *x[4:])


@pytest.mark.parametrize("bounded", [True, False])
def test_products_of_bfloat16_lose_little(bounded: bool) -> None:
    # Five heads: two pairs at a time, and the last one alone.
    x = make_bfloat16(4, (1, 66, 5, 16, 16), bounded)
    o, state, _ = faithful(*x)
    wide = [a.astype(jnp.float32) for a in x]
    expected_o, expected_state = delta_rule.delta_rule(*wide, implementation="reference")
    # The state is float32, from products of 16 bits; o is rounded to bfloat16, by at most half of its last bit.
    assert_close(state, expected_state, 3e-5)
    assert_close(o, expected_o, 2**-8)


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [True, False])
def test_gradient_of_the_output_alone_in_bfloat16(bounded: bool) -> None:
    x = make_bfloat16(3, (1, 130, 3, 16, 16), bounded)
    # A cotangent that does not depend on o, whose rounding to bfloat16 would be part of it.
    weights = make_inputs(6, (1, 130, 3, 16, 16))[2].astype(jnp.bfloat16)

    def loss(x: list[jax.Array], operation: Any, **options: Any) -> jax.Array:
        o = operation(*x, **options)[0]
        return jnp.sum(o.astype(x[-1].dtype) * weights.astype(x[-1].dtype))

    found = jax.grad(loss)(list(x), tpu.delta_rule, interpret=INTERPRET)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in x]
        expected = jax.grad(loss)(wide, delta_rule.delta_rule, implementation="reference")
        expected = [np.asarray(e) for e in expected]
    for a, e, of in zip(found, expected, x, strict=True):
        assert a.dtype == of.dtype
        # bfloat16 keeps 8 bits; the gradients are sums in float32, rounded once.
        assert_close(a, jnp.asarray(e, jnp.float32), 8e-3 if a.dtype == jnp.bfloat16 else 1e-4)


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(name: str) -> None:
    data = {key: jnp.asarray(value) for key, value in load_file(DATA / f"kda_op_{name}.safetensors").items()}
    lengths, scale = data["lengths"], data["q"].shape[-1] ** -0.5
    arrays = (data["q"] * scale, data["k"], data["v"], data["g"], data["beta"])
    o, state = tpu.delta_rule(*arrays, data.get("initial_state"), lengths, interpret=INTERPRET)
    valid = np.arange(o.shape[1])[None, :, None, None] < np.asarray(lengths)[:, None, None, None]
    np.testing.assert_allclose(o, np.where(valid, data["o"], 0.0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, data["final_state"], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_more_heads_than_a_block_holds() -> None:
    # 17 heads are three blocks of 8, the last mostly beyond the array.
    x = make_inputs(4, (1, 65, 17, 8, 8))
    found = tpu.delta_rule(*x, interpret=INTERPRET)
    expected = delta_rule.delta_rule(*x, implementation="reference")
    for a, e in zip(found, expected, strict=True):
        assert_close(a, e, 1e-6)


@pytest.mark.slow
def test_repeated_keys_without_decay() -> None:
    # The triangular system is as far from the identity as it gets: every key equal, full writing strength.
    q, k, v, log_decay, beta, state = make_inputs(5, (1, 128, 1, 16, 16))
    k, beta = jnp.broadcast_to(k[:, :1], k.shape), jnp.ones_like(beta)
    x = (q, k, v, jnp.zeros_like(log_decay), beta, state)
    found = tpu.delta_rule(*x, interpret=INTERPRET)
    for a, e in zip(found, delta_rule.delta_rule(*x, implementation="reference"), strict=True):
        assert_close(a, e, 2e-6)


def test_segment_map() -> None:
    _, k, v, log_decay, beta, _ = make_inputs(6)
    found = tpu.segment_map(k, v, log_decay, beta, LENGTHS, interpret=INTERPRET)
    expected = delta_rule.segment_map(k, v, log_decay, beta, LENGTHS, implementation="reference")
    for a, e in zip(found, expected, strict=True):
        assert_close(a, e, 1e-6)


def check_gradient_of_segment_map(
    segment_map: Any, interpret: Any, value_dim: int, low: Any, with_lengths: bool
) -> None:
    """That of a kernel's map is the portable form's, whatever lies in the padding."""
    _, k, v, log_decay, beta, _ = make_inputs(10, (2, 6, 1, 8, value_dim))
    x, lengths = [k.astype(low), v.astype(low), log_decay, beta], None
    if with_lengths:
        lengths = jnp.asarray([6, 3], jnp.int32)
        invalid = np.arange(6)[None, :] >= np.asarray(lengths)[:, None]
        x = [jnp.where(invalid.reshape(*invalid.shape, *(1,) * (a.ndim - 2)), jnp.nan, a) for a in x]
    rng = np.random.default_rng(11)
    w_map, w_added = (
        jnp.asarray(rng.standard_normal((2, 1, 8, size)), jnp.float32) for size in (8, value_dim)
    )

    def loss(x: list[jax.Array], of: Any, **options: Any) -> jax.Array:
        moved, added = of(*x, lengths, **options)
        return jnp.sum(w_map * moved) + jnp.sum(w_added * added)

    # In one program: what is the same in both is compiled once.
    @jax.jit
    def both(x: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        found = jax.grad(loss)(x, segment_map, interpret=interpret)
        return found, jax.grad(loss)(x, delta_rule.segment_map, implementation="xla")

    for a, e, of in zip(*both(x), x, strict=True):
        assert a.dtype == of.dtype
        assert float(jnp.abs(e).max()) > 0
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("with_lengths", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradient_of_segment_map(with_lengths: bool) -> None:
    check_gradient_of_segment_map(tpu.segment_map, True, 16, jnp.bfloat16, with_lengths)


def test_step() -> None:
    *token, state = make_inputs(7, (3, 1, 2, 16, 8))
    token = [a[:, 0] for a in token]
    found = tpu.step(*token, state, interpret=INTERPRET)
    for a, e in zip(found, delta_rule.step(*token, state, implementation="reference"), strict=True):
        assert_close(a, e, 1e-6)


def fused_inputs(batch: int, heads: int, size: int, low: Any) -> dict[str, jax.Array]:
    rng = np.random.default_rng(8)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return {
        "x": normal(batch, 3, heads, size).astype(low),
        "window": normal(batch, 3, 3, heads, size).astype(low),
        "taps": normal(4, 3, heads, size),
        "log_decay": -jnp.abs(normal(batch, heads, size)),
        "beta": jax.nn.sigmoid(normal(batch, heads)),
        "gate": normal(batch, heads, size).astype(low),
        "norm_weight": normal(size),
        "state": normal(batch, heads, size, size),
    }


def test_fused_step_leaves_inactive_rows_alone() -> None:
    x = fused_inputs(3, 2, 128, jnp.bfloat16)
    active = jnp.asarray([True, False, True])
    expected = delta_rule.fused_step(**x, active=active, implementation="reference")
    poisoned = x | {name: x[name].at[1].set(jnp.nan) for name in ("x", "log_decay", "beta", "gate")}
    found = tpu.fused_step(*poisoned.values(), active, interpret=INTERPRET)
    np.testing.assert_array_equal(found[1][1], x["state"][1])
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_array_equal(found[0][1], 0.0)
    # One rounding to bfloat16 of the same numbers, give or take their last float32 bit.
    assert_close(found[0], expected[0], 4e-3)
    assert_close(found[1], expected[1], 1e-6)


@pytest.mark.parametrize("active", [None, [True, False]])
def test_fused_step_of_xla_equals_reference(active: list[bool] | None) -> None:
    x = fused_inputs(2, 2, 16, jnp.float32)
    rows = None if active is None else jnp.asarray(active)
    found = delta_rule.fused_step(**x, active=rows)
    for a, e in zip(found, delta_rule.fused_step(**x, active=rows, implementation="reference"), strict=True):
        assert_close(a, e, 2e-6)


def test_fused_step_is_the_definition() -> None:
    x = fused_inputs(1, 1, 8, jnp.float32)
    y, state, window = delta_rule.fused_step(**x, norm_epsilon=0.25, implementation="reference")
    a = {
        name: np.asarray(value, np.float64)[0]
        for name, value in x.items()
        if name not in ("taps", "norm_weight")
    }
    inputs = np.concatenate([a["window"], a["x"][None]])
    sums = (inputs * np.asarray(x["taps"], np.float64)).sum(axis=0)
    q, k, v = (sums / (1 + np.exp(-sums)))[:, 0]
    q, k = (u / np.sqrt((u * u).sum() + 1e-6) for u in (q, k))
    decayed = np.exp(a["log_decay"][0])[:, None] * a["state"][0]
    expected = decayed + np.outer(k, a["beta"][0] * (v - decayed.T @ k))
    o = expected.T @ (q * 8**-0.5)
    o = o / np.sqrt((o * o).mean() + 0.25) * np.asarray(x["norm_weight"]) / (1 + np.exp(-a["gate"][0]))
    np.testing.assert_allclose(state[0, 0], expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(y[0, 0], o, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(window[0], inputs[1:].astype(np.float32))


def test_results_vary_over_the_axes_of_the_arguments() -> None:
    """Under shard_map with its checks on, each device with tokens or rows of its own, and the gradient's sum."""
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))
    x = make_inputs(5)
    token = [a[:, 0] for a in x[:5]]

    def functions(k: jax.Array, others: list[jax.Array]) -> tuple[Any, ...]:
        q, v, log_decay, beta, state = others

        def loss(state: jax.Array) -> jax.Array:
            o, last = tpu.delta_rule(q, k, v, log_decay, beta, state)
            return jax.lax.psum(jnp.sum(o) + jnp.sum(last), "context")

        def map_loss(beta: jax.Array) -> jax.Array:
            moved, added = tpu.segment_map(k, v, log_decay, beta)
            return jax.lax.psum(jnp.sum(moved) + jnp.sum(added), "context")

        maps = tpu.segment_map(k, v, log_decay, beta)
        gradients = jax.grad(loss)(state), jax.grad(map_loss)(beta)
        return jax.lax.pcast(gradients, "context", to="varying"), maps

    sharded = jax.shard_map(functions, mesh=mesh, in_specs=(P(None, "context"), P()), out_specs=P("context"))
    others = [x[0], *x[2:]]
    (of_state, of_beta), _ = jax.eval_shape(sharded, x[1], others)
    assert of_state.shape == x[5].shape and of_beta.shape == x[4].shape

    def step(k: jax.Array, others: list[jax.Array]) -> Any:
        return tpu.step(others[0], k, *others[1:])

    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P("context"), P()), out_specs=P("context"))
    o, _ = jax.eval_shape(sharded, token[1], [token[0], *token[2:], x[5]])
    assert o.shape == token[2].shape


def test_what_the_kernels_refuse() -> None:
    x = fused_inputs(1, 1, 16, jnp.float32)
    with pytest.raises(NotImplementedError, match="multiples of 128 and got 16"):
        delta_rule.fused_step(**x, implementation="tpu")
    with jax.enable_x64(True):
        wide = make_inputs(9, (1, 2, 1, 4, 4), np.float64)
        with pytest.raises(NotImplementedError, match="float64"):
            delta_rule.delta_rule(*wide, implementation="tpu")


def test_fused_step_names_the_argument_that_does_not_fit() -> None:
    x = fused_inputs(1, 1, 16, jnp.float32)
    with pytest.raises(ValueError, match=r"window of shape \(1, 2, 3, 1, 16\), expected \[1, 3, 3, 1, 16\]"):
        delta_rule.fused_step(**x | {"window": x["window"][:, 1:]})
    with pytest.raises(ValueError, match=r"x of shape \(1, 2, 1, 16\)"):
        delta_rule.fused_step(**x | {"x": x["x"][:, :2]})
