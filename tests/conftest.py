"""Test policy: one CPU device, strict dtype promotion, float64 only where a test asks for it.

The rest of the policy (warnings are errors, jaxtyping and beartype on both packages) is in pyproject.toml.
"""

import base64
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Most of the suite's time is compilation; at this level LLVM takes less than half of it for programs that run
# once or twice. The generated code differs in speed only, and every tolerance holds at both levels.
_COMPILE_QUICKLY = "--xla_backend_optimization_level=1"
# Each thread of a kernel is a program of its own in the GPU interpreter, and those that wait at a barrier hold a thread
# of XLA's pool: with no more of these than a small machine has cores, the one they wait for may find none left.
_POOL_THREADS = max(4, os.cpu_count() or 1)
POLICY = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_COMPILE_QUICKLY}".strip(),
    "NPROC": os.environ.get("NPROC", str(_POOL_THREADS)),
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


# Every compiled program holds a few mappings of memory, of which Linux allows a process 65,530; beyond, XLA's compiler
# crashes. After a module that leaves more than this, programs are given up.
_MANY_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def _few_mappings() -> Iterator[None]:
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64() -> Iterator[None]:
    """Switches 64-bit types on for one test (a `@given` test enters `jax.enable_x64(True)` itself)."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer model, packed experts, and a vocabulary of the 256 single bytes.

    Every character beyond ASCII is several tokens. For reading only; copy it to change it.
    """
    from moe28t_jax.config import ModelConfig
    from moe28t_jax.model import initialize
    from moe28t_jax.weights import quantize_experts, save_parameters

    tiny = Path(__file__).parent / "golden" / "data" / "k31_tiny_mxfp4"
    fields = {
        "attention_kinds": ("kda", "dsa"), "mlp_kinds": ("dense", "moe"), "vocab_size": 512, "max_context": 1024,
        "bos_id": 256, "eos_id": 258, "pad_id": 511, "media_pad_id": 277, "initializer_range": 0.3,
    }  # fmt: skip
    config = ModelConfig.from_hf(tiny, fields)
    parameters = quantize_experts(initialize(config, jax.random.key(0)), config)
    folder = tmp_path_factory.mktemp("checkpoints")
    vocabulary = folder / "tiktoken.model"
    vocabulary.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    save_parameters(folder / "small", parameters, config, tokenizer_files=[vocabulary])
    return folder / "small"
