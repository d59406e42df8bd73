"""`prefer`: which implementation is tried first where none is asked for."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels._dispatch import dispatch, prefer


def refuse(x: jax.Array) -> jax.Array:
    raise NotImplementedError("not for this")


KNOWN = {"xla": lambda x: x + 1, "tpu": lambda x: x + 2, "reference": lambda x: x + 3, "gpu": refuse}


def add(x: jax.Array, implementation: str | None = None) -> jax.Array:
    return dispatch("add", KNOWN, ("xla",), implementation, x)


def test_preferred_implementations_come_first() -> None:
    x = jnp.zeros(())
    assert add(x) == 1
    with prefer("tpu"):
        assert add(x) == 2
        # One asked for by name is called alone.
        assert add(x, "reference") == 3
        with prefer():
            assert add(x) == 1
        assert add(x) == 2
    with prefer("gpu"):
        assert add(x) == 1
        with pytest.raises(NotImplementedError, match="not for this"):
            add(x, "gpu")
    with prefer("gpu", "reference"):
        assert add(x) == 3
    assert add(x) == 1


def test_an_operation_without_it_goes_on_as_before() -> None:
    with prefer("tpu"):
        assert dispatch("add", {"xla": KNOWN["xla"]}, ("xla",), None, jnp.zeros(())) == 1


def test_an_error_ends_the_preference() -> None:
    with pytest.raises(ZeroDivisionError), prefer("tpu"):
        raise ZeroDivisionError
    assert add(jnp.zeros(())) == 1


def test_what_was_compiled_under_another_preference_is_not_used() -> None:
    inner = jax.jit(add)
    outer = jax.jit(lambda x: inner(x))
    x = jnp.zeros(())
    assert outer(x) == 1
    with prefer("tpu"):
        assert outer(x) == 2
    assert outer(x) == 1


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no implementation 'cuda' to prefer"), prefer("cuda"):
        pass
