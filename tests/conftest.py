"""Test policy: one CPU device, strict dtype promotion, float64 only where a test asks for it.

The rest of the policy (warnings are errors, jaxtyping and beartype on both packages) is in pyproject.toml.
"""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Most of the suite's time is compilation; at this level LLVM takes less than half of it for programs that run
# once or twice. The generated code differs in speed only, and every tolerance holds at both levels.
_COMPILE_QUICKLY = "--xla_backend_optimization_level=1"
POLICY = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_COMPILE_QUICKLY}".strip(),
}

if "jax" in sys.modules:
    raise pytest.UsageError(
        "jax was imported before tests/conftest.py could set its options: "
        "run pytest without the plugin or option that imports it."
    )
# The environment rather than jax.config, so that processes started by a test follow the same policy.
os.environ.update(POLICY)

import jax  # noqa: E402

# Examples are the same in every run; `--hypothesis-profile=explore` searches on. Time limits are off because
# the first example of a shape pays for its compilation.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.fixture
def x64() -> Iterator[None]:
    """Switches 64-bit types on for one test (a `@given` test enters `jax.enable_x64(True)` itself)."""
    with jax.enable_x64(True):
        yield
