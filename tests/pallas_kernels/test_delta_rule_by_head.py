"""The chunked delta rule head by head, which a few cores take for long sequences of large heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import delta_rule
from pallas_kernels.delta_rule import _xla_by_head, xla
from tests.pallas_kernels.test_delta_rule import ARGUMENTS, DECAYS, assert_close, make_inputs

LARGE = (1, 130, 2, 64, 64)
"""The smallest kind of sequence that goes head by head."""


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has; and groups of 64 tokens, so that short sequences have several."""
    monkeypatch.setattr(_xla_by_head, "few_cores", lambda: True)
    monkeypatch.setattr(_xla_by_head, "_GROUP_CHUNKS", 2)


def by_head(x: dict[str, jax.Array], with_output: bool = True) -> Any:
    inputs = (x["q"] if with_output else None, *(x[name] for name in ARGUMENTS[1:-1]))
    return _xla_by_head.walk(True, inputs, x["initial_state"])


def token_by_token(x: dict[str, jax.Array]) -> Any:
    return delta_rule.delta_rule(**x, return_boundary_states=True, implementation="reference")


@functools.partial(jax.jit, static_argnums=0)
def results_and_gradient(function: Any, x: dict[str, jax.Array], cotangents: Any) -> Any:
    results, pull_back = jax.vjp(function, x)
    return results, pull_back(cotangents)[0]


@pytest.mark.parametrize("decay", DECAYS)
def test_equals_recurrence_in_float64(decay: str) -> None:
    """Results and gradients of three groups, the last of them short."""
    with jax.enable_x64(True):
        x = make_inputs(1, (2, 130, 3, 8, 16), decay, "float64")
        x["log_decay"] = x["log_decay"].at[0, 100, 1, 3].set(-jnp.inf)
        rng = np.random.default_rng(2)
        shapes = ((2, 130, 3, 16), (2, 3, 8, 16), (2, 3, 3, 8, 16))
        cotangents = tuple(jnp.asarray(rng.standard_normal(shape)) for shape in shapes)
        actual, gradient = results_and_gradient(by_head, x, cotangents)
        expected, wanted = results_and_gradient(token_by_token, x, cotangents)
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == e.dtype == jnp.float64
            assert_close(a, e, 1e-12)
        for name in ARGUMENTS:
            assert_close(gradient[name], wanted[name], 1e-11)


def states_by_head(x: dict[str, jax.Array]) -> Any:
    o, *states = by_head(x, with_output=False)
    assert o is None
    return states


def states_token_by_token(x: dict[str, jax.Array]) -> Any:
    return token_by_token(x)[1:]


@pytest.mark.parametrize("tokens", [1, pytest.param(192, marks=pytest.mark.slow)])
def test_states_without_outputs(tokens: int) -> None:
    """As maps of segments need them, whose first tokens are whole groups or a single one."""
    with jax.enable_x64(True):
        x = make_inputs(tokens, (2, tokens, 1, 8, 8), "mixed", "float64")
        shapes = ((2, 1, 8, 8), (2, -(-tokens // 64), 1, 8, 8))
        cotangents = [jnp.asarray(np.random.default_rng(3).standard_normal(shape)) for shape in shapes]
        actual, gradient = results_and_gradient(states_by_head, x, cotangents)
        expected, wanted = results_and_gradient(states_token_by_token, x, tuple(cotangents))
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, 1e-12)
        for name in ARGUMENTS[1:]:
            assert_close(gradient[name], wanted[name], 1e-11)


def test_long_sequences_of_large_heads_go_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs with few cores, for results, maps and gradients in float32; other platforms and more cores do not."""
    x = make_inputs(3, LARGE, "mixed")

    def loss(x: dict[str, jax.Array], implementation: str) -> Any:
        o, state = delta_rule.delta_rule(**x, implementation=implementation)
        return jnp.sum(o * x["v"]) + jnp.sum(state), (o, state)

    gradient = jax.grad(loss, has_aux=True)
    (actual, results), (expected, wanted) = (gradient(x, name) for name in ("xla", "reference"))
    for a, e in zip(results, wanted, strict=True):
        assert_close(a, e, 2e-6)
    for name in ARGUMENTS:
        assert_close(actual[name], expected[name], 1e-5)
    tokens = [x[name] for name in ("k", "v", "log_decay", "beta")]
    for a, e in zip(
        xla.segment_map(*tokens), delta_rule.segment_map(*tokens, implementation="reference"), strict=True
    ):
        assert_close(a, e, 2e-6)

    # A product of one head's 32 queries and keys with its state, or of both heads'.
    alone, together = (f"({shape}, {shape}) ->" for shape in ("tensor<64x64xf32>", "tensor<1x2x64x64xf32>"))

    def products(platform: str) -> tuple[int, int]:
        # Not the cached trace: which form is taken is decided while tracing.
        traced = jax.jit(lambda *x: xla.delta_rule.__wrapped__(*x)).trace(*(x[name] for name in ARGUMENTS))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        lines = [line for line in text.splitlines() if "dot_general" in line]
        return sum(alone in line for line in lines), sum(together in line for line in lines)

    assert products("cpu") == (1, 0)
    assert products("tpu") == (0, 1)
    monkeypatch.setattr(_xla_by_head, "few_cores", lambda: False)
    assert products("cpu") == (0, 1)


def test_rows_on_several_devices() -> None:
    """Under shard_map with its checks on; what the devices share receives the sum of their gradients."""
    x = make_inputs(4, LARGE)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    others = {name: a for name, a in x.items() if name != "k"}

    def rows(k: jax.Array, others: dict[str, jax.Array]) -> Any:
        names = {"q": "q_BTHK", "v": "v_BTHV", "log_decay": "log_decay_BTHK", "beta": "beta_BTH"}
        renamed = {names[name]: a for name, a in others.items() if name in names}

        def loss(k: jax.Array, renamed: dict[str, jax.Array]) -> jax.Array:
            return jnp.sum(xla.delta_rule(k_BTHK=k, **renamed)[0])

        return jax.grad(loss, (0, 1))(k, renamed)

    sharded = jax.shard_map(rows, mesh=mesh, in_specs=(P("rows"), P()), out_specs=(P("rows"), P()))
    of_k, of_others = jax.eval_shape(sharded, x["k"], others)
    assert of_k.shape == x["k"].shape and of_others["beta_BTH"].shape == x["beta"].shape


@pytest.mark.slow
def test_temporary_memory_is_that_of_one_group() -> None:
    def temporary_bytes(tokens: int) -> int:
        x = jax.eval_shape(lambda: make_inputs(0, (1, tokens, 2, 64, 64)))
        run = jax.jit(lambda x: xla.delta_rule.__wrapped__(*(x[name] for name in ARGUMENTS)))
        analysis = run.lower(x).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(1024) < temporary_bytes(256) + 4096
