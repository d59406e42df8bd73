"""The gated delta rule: both implementations against fixtures, against each other, and at the extremes."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pallas_kernels import delta_rule
from pallas_kernels._dispatch import dispatch
from pallas_kernels.delta_rule import xla

DATA = Path(__file__).parents[1] / "golden" / "data"
FIXTURES = sorted(path.name for path in DATA.glob("kda_op_*.safetensors"))
IMPLEMENTATIONS = ("reference", "xla")
ARGUMENTS = ("q", "k", "v", "log_decay", "beta", "initial_state")
DECAYS = ("normal", "zero", "lower_bound", "extreme", "mixed")


def log_decays(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = -5.0 / (1.0 + np.exp(2.0 - 2.0 * rng.standard_normal(shape)))
    if kind == "normal":
        return normal
    if kind.startswith("-"):
        return np.full(shape, float(kind))
    if kind == "zero":
        return np.zeros(shape)
    if kind == "lower_bound":
        return np.full(shape, -5.0)
    if kind == "extreme":
        return np.full(shape, -1e4)
    # Small decays after huge ones are where differences of cumulative sums lose everything.
    extremes = rng.choice([-1e4, -5.0, -0.01, 0.0], shape)
    return np.where(rng.random(shape) < 0.2, normal, extremes)


def make_inputs(
    seed: int, shape: tuple[int, int, int, int, int], decay: str = "normal", dtype: str = "float32"
) -> dict[str, jax.Array]:
    batch, tokens, heads, key_dim, value_dim = shape
    rng = np.random.default_rng(seed)

    def unit(*axes: int) -> np.ndarray:
        x = rng.standard_normal(axes)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    arrays = {
        "q": unit(batch, tokens, heads, key_dim) * key_dim**-0.5,
        "k": unit(batch, tokens, heads, key_dim),
        "v": rng.standard_normal((batch, tokens, heads, value_dim)),
        "log_decay": log_decays(rng, decay, (batch, tokens, heads, key_dim)),
        "beta": 1.0 / (1.0 + np.exp(-2.0 * rng.standard_normal((batch, tokens, heads)))),
        "initial_state": rng.standard_normal((batch, heads, key_dim, value_dim)),
    }
    return {name: jnp.asarray(x.astype(dtype)) for name, x in arrays.items()}


def assert_close(actual: jax.Array, expected: jax.Array, relative: float) -> None:
    """Largest difference against the largest magnitude (at least 1)."""
    actual_np, expected_np = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual_np.shape == expected_np.shape
    assert np.isfinite(actual_np).all()
    scale = max(1.0, float(np.abs(expected_np).max()))
    np.testing.assert_allclose(actual_np, expected_np, rtol=0, atol=relative * scale)


def slice_tokens(x: dict[str, jax.Array], start: int, stop: int) -> dict[str, jax.Array]:
    return {name: a if name == "initial_state" else a[:, start:stop] for name, a in x.items()}


def test_fixtures_are_present() -> None:
    assert len(FIXTURES) == 10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(name: str, implementation: str) -> None:
    data = {key: jnp.asarray(value) for key, value in load_file(DATA / name).items()}
    lengths = data["lengths"]
    key_dim = data["q"].shape[-1]
    o, state = delta_rule.delta_rule(
        data["q"] * key_dim**-0.5,
        data["k"],
        data["v"],
        data["g"],
        data["beta"],
        data.get("initial_state"),
        lengths=lengths,
        implementation=implementation,
    )
    assert o.dtype == state.dtype == jnp.float32
    valid = np.arange(o.shape[1])[None, :, None, None] < np.asarray(lengths)[:, None, None, None]
    np.testing.assert_allclose(o, np.where(valid, data["o"], 0.0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, data["final_state"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_chunks_equal_recurrence_in_float64(tokens: int, decay: str) -> None:
    with jax.enable_x64(True):
        x = make_inputs(tokens, (2, tokens, 2, 16, 24), decay, "float64")
        expected = delta_rule.delta_rule(**x, return_boundary_states=True, implementation="reference")
        actual = delta_rule.delta_rule(**x, return_boundary_states=True, implementation="xla")
        assert actual[2].shape == (2, -(-tokens // 64), 2, 16, 24)
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == e.dtype == jnp.float64
            assert_close(a, e, 1e-12)


def test_reference_is_the_definition() -> None:
    x = {name: np.asarray(a, np.float64) for name, a in make_inputs(3, (1, 9, 1, 5, 4)).items()}
    state = x["initial_state"][0, 0].copy()
    outputs = []
    for t in range(9):
        state = np.exp(x["log_decay"][0, t, 0])[:, None] * state
        u = x["beta"][0, t, 0] * (x["v"][0, t, 0] - state.T @ x["k"][0, t, 0])
        state = state + np.outer(x["k"][0, t, 0], u)
        outputs.append(state.T @ x["q"][0, t, 0])
    o, final = delta_rule.delta_rule(**make_inputs(3, (1, 9, 1, 5, 4)), implementation="reference")
    np.testing.assert_allclose(o[0, :, 0], np.stack(outputs), rtol=0, atol=1e-6)
    np.testing.assert_allclose(final[0, 0], state, rtol=0, atol=1e-6)


@settings(max_examples=40)
@given(data=st.data())
def test_any_decay_any_lengths(data: st.DataObject) -> None:
    # Few shapes, since each is compiled; lengths, segments, decays and values vary freely.
    shape = data.draw(st.sampled_from([(2, 5, 1, 8, 8), (2, 70, 2, 16, 8), (1, 150, 1, 8, 16)]))
    batch, tokens = shape[:2]
    decay = data.draw(st.sampled_from(DECAYS))
    x = make_inputs(data.draw(st.integers(0, 2**31)), shape, decay)
    drawn = data.draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    lengths = jnp.asarray(drawn, jnp.int32)
    starts = data.draw(st.lists(st.integers(0, tokens), max_size=4))
    segment_ids = jnp.asarray(
        np.broadcast_to(sum(np.arange(tokens) >= s for s in [0, *starts]), (batch, tokens)).astype(np.int32)
    )
    results = [
        delta_rule.delta_rule(**x, lengths=lengths, segment_ids=segment_ids, implementation=name)
        for name in IMPLEMENTATIONS
    ]
    for expected, actual in zip(*results, strict=True):
        assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_never_leaks(implementation: str) -> None:
    x = make_inputs(5, (3, 130, 2, 16, 16))
    lengths = (0, 64, 97)
    invalid = np.arange(130)[None, :] >= np.asarray(lengths)[:, None]
    poisoned = {
        name: a
        if name == "initial_state"
        else jnp.where(invalid.reshape(3, 130, *(1,) * (a.ndim - 2)), jnp.float32(np.nan), a)
        for name, a in x.items()
    }
    o, state = delta_rule.delta_rule(
        **poisoned, lengths=jnp.asarray(lengths, jnp.int32), implementation=implementation
    )
    np.testing.assert_array_equal(state[0], x["initial_state"][0])
    np.testing.assert_array_equal(np.where(invalid[..., None, None], o, 0.0), 0.0)
    for row, length in enumerate(lengths[1:], start=1):
        alone = {name: a[row : row + 1] for name, a in slice_tokens(x, 0, length).items()}
        o_alone, state_alone = delta_rule.delta_rule(**alone, implementation=implementation)
        assert_close(o[row, :length], o_alone[0], 1e-6)
        assert_close(state[row], state_alone[0], 1e-6)

    def loss(arguments: dict[str, jax.Array]) -> jax.Array:
        o, state = delta_rule.delta_rule(
            **arguments, lengths=jnp.asarray(lengths, jnp.int32), implementation=implementation
        )
        return jnp.sum(o * o) + jnp.sum(state * state)

    clean_gradient, gradient = jax.grad(loss)(x), jax.grad(loss)(poisoned)
    for name in ARGUMENTS:
        np.testing.assert_array_equal(gradient[name], clean_gradient[name])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_documents_equal_each_alone(implementation: str) -> None:
    cuts = (0, 1, 40, 64, 107, 130)
    x = make_inputs(6, (1, 130, 2, 16, 16))
    # Ids need not be distinct or ordered: only a change between neighbours counts.
    ids = np.concatenate([np.full(b - a, i % 2) for i, (a, b) in enumerate(itertools.pairwise(cuts))])
    segment_ids = jnp.asarray(ids[None], jnp.int32)
    o, state = delta_rule.delta_rule(**x, segment_ids=segment_ids, implementation=implementation)
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        alone = slice_tokens(x, a, b)
        if i > 0:
            alone["initial_state"] = jnp.zeros_like(alone["initial_state"])
        o_alone, state_alone = delta_rule.delta_rule(**alone, implementation="reference")
        assert_close(o[:, a:b], o_alone, 2e-6)
    assert_close(state, state_alone, 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_segment_ids_of_padding_do_not_reset(implementation: str) -> None:
    x = make_inputs(7, (1, 70, 1, 8, 8))
    lengths = jnp.asarray([30], jnp.int32)
    segment_ids = jnp.asarray((np.arange(70) >= 30)[None], jnp.int32)
    expected = delta_rule.delta_rule(**x, lengths=lengths, implementation=implementation)
    actual = delta_rule.delta_rule(
        **x, lengths=lengths, segment_ids=segment_ids, implementation=implementation
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_boundary_states_resume_the_sequence(implementation: str) -> None:
    x = make_inputs(8, (2, 150, 2, 16, 16))
    lengths = jnp.asarray([150, 100], jnp.int32)
    o, state, boundaries = delta_rule.delta_rule(
        **x, lengths=lengths, return_boundary_states=True, implementation=implementation
    )
    assert boundaries.shape == (2, 3, 2, 16, 16)
    np.testing.assert_array_equal(boundaries[:, -1], state)
    np.testing.assert_array_equal(boundaries[1, 1], boundaries[1, 2])
    rest = slice_tokens(x, 64, 150) | {"initial_state": boundaries[:, 0]}
    o_rest, state_rest = delta_rule.delta_rule(**rest, lengths=lengths - 64, implementation=implementation)
    assert_close(o[:, 64:], o_rest, 1e-6)
    assert_close(state, state_rest, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_equal_sequence(implementation: str) -> None:
    with jax.enable_x64(True):
        x = make_inputs(9, (2, 12, 2, 16, 8), "mixed", "float64")
        o, state = delta_rule.delta_rule(**x, implementation="reference")
        s = x["initial_state"]
        for t in range(12):
            token = [x[name][:, t] for name in ARGUMENTS[:-1]]
            o_t, s = delta_rule.step(*token, s, implementation=implementation)
            assert_close(o_t, o[:, t], 1e-12)
        assert_close(s, state, 1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("decay", ["normal", "mixed"])
def test_segment_maps_compose(decay: str, implementation: str) -> None:
    with jax.enable_x64(True):
        x = make_inputs(10, (2, 140, 2, 16, 8), decay, "float64")
        _, expected = delta_rule.delta_rule(**x, implementation="reference")
        state = x["initial_state"]
        for start, stop in ((0, 1), (1, 71), (71, 140)):
            part = slice_tokens(x, start, stop)
            m, s = delta_rule.segment_map(
                part["k"], part["v"], part["log_decay"], part["beta"], implementation=implementation
            )
            assert m.shape == (2, 2, 16, 16)
            assert m.dtype == s.dtype == jnp.float64
            state = m @ state + s
        assert_close(state, expected, 1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_segment_map_of_a_shorter_length(implementation: str) -> None:
    x = make_inputs(11, (2, 70, 1, 8, 8))
    names = ("k", "v", "log_decay", "beta")
    m, s = delta_rule.segment_map(
        *(x[name] for name in names), lengths=jnp.asarray([0, 33], jnp.int32), implementation=implementation
    )
    np.testing.assert_array_equal(m[0, 0], np.eye(8))
    np.testing.assert_array_equal(s[0], 0.0)
    alone = [x[name][1:, :33] for name in names]
    m_alone, s_alone = delta_rule.segment_map(*alone, implementation="reference")
    assert_close(m[1:], m_alone, 1e-6)
    assert_close(s[1:], s_alone, 1e-6)


def gradients(x: dict[str, jax.Array], implementation: str, segment_ids: jax.Array) -> dict[str, jax.Array]:
    weights = make_inputs(99, (*x["k"].shape, x["v"].shape[-1]), dtype=str(x["k"].dtype))

    def loss(arguments: dict[str, jax.Array]) -> jax.Array:
        o, state, boundaries = delta_rule.delta_rule(
            **arguments, segment_ids=segment_ids, return_boundary_states=True, implementation=implementation
        )
        # Different weights everywhere, so that no gradient cancels.
        return (
            jnp.sum(o * weights["v"])
            + jnp.sum(state * weights["initial_state"])
            + jnp.sum(boundaries[:, 0] * weights["initial_state"] * weights["initial_state"])
        )

    return jax.grad(loss)(x)


@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_equal_recurrence_in_float64(decay: str) -> None:
    with jax.enable_x64(True):
        x = make_inputs(12, (2, 130, 2, 8, 8), decay, "float64")
        segment_ids = jnp.asarray(np.broadcast_to(np.arange(130) >= 81, (2, 130)), jnp.int32)
        expected, actual = (gradients(x, name, segment_ids) for name in IMPLEMENTATIONS)
        for name in ARGUMENTS:
            assert_close(actual[name], expected[name], 1e-11)


# Numbers: on both sides of where the factors of a block become too large; in one document, since the first token of a
# new one is beyond it.
@pytest.mark.parametrize("decay", [*DECAYS, "-5.45", "-5.8"])
def test_gradients_in_float32(decay: str) -> None:
    starts = 130 if decay.startswith("-") else 81
    segment_ids = np.broadcast_to(np.arange(130) >= starts, (2, 130)).astype(np.int32)
    actual = gradients(make_inputs(12, (2, 130, 2, 8, 8), decay), "xla", jnp.asarray(segment_ids))
    with jax.enable_x64(True):
        # The same float32 values, differentiated in float64.
        x = {
            name: jnp.asarray(np.asarray(a, np.float64))
            for name, a in make_inputs(12, (2, 130, 2, 8, 8), decay).items()
        }
        expected = gradients(x, "reference", jnp.asarray(segment_ids))
    for name in ARGUMENTS:
        assert actual[name].dtype == jnp.float32
        assert_close(actual[name], expected[name], 1e-5)


SLOW_DECAYS = [pytest.param(decay, marks=pytest.mark.slow) for decay in ("extreme", "mixed")]


@pytest.mark.parametrize("decay", ["-5.8", *SLOW_DECAYS])
def test_gradients_under_vmap(decay: str) -> None:
    """Of a vmapped condition both branches are computed, and neither may spoil the other's gradient."""
    x = make_inputs(16, (2, 20, 1, 8, 8), decay)

    def gradient(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def loss(x: dict[str, jax.Array]) -> jax.Array:
            o, state = delta_rule.delta_rule(**x, implementation="xla")
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

        return jax.grad(loss)(x)

    rows = jax.tree.map(lambda a: a[:, None], x)
    found = jax.jit(jax.vmap(gradient))(rows)
    for row in range(2):
        expected = gradient(jax.tree.map(lambda a, row=row: a[row], rows))
        for name in ARGUMENTS:
            assert_close(found[name][row], expected[name], 1e-5)


def test_gradient_of_one_token() -> None:
    with jax.enable_x64(True):
        x = make_inputs(13, (2, 1, 2, 8, 8), "normal", "float64")
        segment_ids = jnp.zeros((2, 1), jnp.int32)
        expected, actual = (gradients(x, name, segment_ids) for name in IMPLEMENTATIONS)
        for name in ARGUMENTS:
            assert_close(actual[name], expected[name], 1e-12)


def test_repeated_keys_without_decay() -> None:
    # The triangular system is as far from the identity as it gets: every key equal, full writing strength.
    x = make_inputs(14, (1, 128, 1, 16, 16), "zero")
    x["k"] = jnp.broadcast_to(x["k"][:, :1], x["k"].shape)
    x["beta"] = jnp.ones_like(x["beta"])
    expected, actual = (delta_rule.delta_rule(**x, implementation=name) for name in IMPLEMENTATIONS)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_compute_in_float32(implementation: str) -> None:
    x = make_inputs(15, (1, 70, 2, 16, 16))
    low = {name: x[name].astype(jnp.bfloat16) for name in ("q", "k", "v")}
    high = {name: low[name].astype(jnp.float32) for name in low}
    rest = {name: x[name] for name in ("log_decay", "beta", "initial_state")}
    o, state = delta_rule.delta_rule(**low, **rest, implementation=implementation)
    o_high, state_high = delta_rule.delta_rule(**high, **rest, implementation=implementation)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    np.testing.assert_array_equal(o.astype(jnp.float32), o_high.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(state, state_high)


@pytest.mark.slow
def test_memory_of_the_gradient() -> None:
    heads, key_dim = 2, 64

    def temporary_bytes(tokens: int) -> int:
        x = jax.eval_shape(lambda: make_inputs(0, (1, tokens, heads, key_dim, key_dim)))
        gradient = jax.grad(lambda x: jnp.sum(xla.delta_rule(*(x[name] for name in ARGUMENTS))[0]))
        analysis = jax.jit(gradient).lower(x).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporary_bytes(2048), temporary_bytes(8192)
    # Per extra token: a few copies of the inputs and their gradients, far from 64 pairs times K.
    per_token = (long - short) / (8192 - 2048)
    assert per_token < 24 * heads * key_dim * 4


def test_unknown_implementation_lists_the_names() -> None:
    x = make_inputs(16, (1, 2, 1, 4, 4))
    with pytest.raises(ValueError, match=r"no implementation 'cuda'.*'reference', 'tpu', 'xla'"):
        delta_rule.delta_rule(**x, implementation="cuda")


def test_shape_errors_name_the_argument() -> None:
    x = make_inputs(17, (1, 3, 1, 4, 4))
    empty = slice_tokens(x, 0, 0)
    with pytest.raises(ValueError, match="0 tokens, expected at least 1"):
        delta_rule.delta_rule(**empty)
    with pytest.raises(ValueError, match="0 tokens, expected at least 1"):
        delta_rule.segment_map(empty["k"], empty["v"], empty["log_decay"], empty["beta"])


def test_dispatch_rule() -> None:
    calls: list[str] = []

    def fast(x: int) -> str:
        calls.append("fast")
        if x > 1:
            raise NotImplementedError("x above 1")
        return "fast"

    def slow(x: int) -> str:
        calls.append("slow")
        if x > 2:
            raise NotImplementedError("x above 2")
        return "slow"

    def opt_in(x: int) -> str:
        return "opt_in"

    implementations = {"fast": fast, "slow": slow, "opt_in": opt_in}
    default = ("fast", "slow")
    assert dispatch("op", implementations, default, None, 1) == "fast"
    assert calls == ["fast"]
    assert dispatch("op", implementations, default, None, x=2) == "slow"
    with pytest.raises(NotImplementedError, match="'fast': x above 1; 'slow': x above 2"):
        dispatch("op", implementations, default, None, 3)
    with pytest.raises(NotImplementedError, match="x above 1"):
        dispatch("op", implementations, default, "fast", 2)
    assert dispatch("op", implementations, default, "opt_in", 9) == "opt_in"
    with pytest.raises(ValueError, match=r"op has no implementation 'warp'.*'fast', 'opt_in', 'slow'"):
        dispatch("op", implementations, default, "warp", 1)
