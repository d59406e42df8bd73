"""The policy of the test run is in force: a slip here would quietly weaken every other test."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest


def test_mixed_dtypes_do_not_promote() -> None:
    with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", stacklevel=1)


def test_one_cpu_device_and_32_bits_by_default() -> None:
    assert [device.platform for device in jax.devices()] == ["cpu"]
    assert jnp.zeros(1).dtype == jnp.float32
    assert not jax.config.read("jax_enable_x64")


@pytest.mark.usefixtures("x64")
def test_the_x64_fixture_gives_float64() -> None:
    assert jnp.zeros(1).dtype == jnp.float64


def test_annotations_of_both_packages_are_checked(pytestconfig: pytest.Config) -> None:
    packages = pytestconfig.getoption("--jaxtyping-packages")
    assert packages.split(",") == ["moe28t_jax", "pallas_kernels", "beartype.beartype"]
    hooked = [finder for finder in sys.meta_path if type(finder).__module__.startswith("jaxtyping")]
    assert hooked, "jaxtyping's import hook is not installed"


def test_configuration_and_chat_import_without_jax() -> None:
    # The package's own __init__ may load JAX, so the rooms' parent is replaced by an empty one.
    program = """
import importlib.util, sys, types
parent = types.ModuleType("moe28t_jax")
parent.__path__ = list(importlib.util.find_spec("moe28t_jax").submodule_search_locations)
sys.modules["moe28t_jax"] = parent
import moe28t_jax.chat, moe28t_jax.config
print(sorted({"jax", "jaxlib", "flax"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
