"""Programs compiled ahead of time and kept, and whether the engine finds them."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.config import ModelConfig
from moe28t_jax.engine.generate import generate_ids
from moe28t_jax.engine.steps import Steps
from moe28t_jax.model import initialize
from moe28t_jax.parallel import load_mesh_file, make_mesh, place_parameters
from moe28t_jax.planning.compile import compile_step
from moe28t_jax.weights import quantize_experts

CAPACITY = 256
CHUNK = 64


class _Messages(logging.Handler):
    """What JAX's compiler says about programs of its cache on disk."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def found(self, outcome: str) -> list[str]:
        """Programs of which the cache said `hit` or `miss`, in order."""
        start = f"persistent compilation cache {outcome} for '"
        return [
            text.lower().partition(start)[2].partition("'")[0] for text in self.texts if start in text.lower()
        ]


def generate_with_kept_programs(folder: str) -> dict[str, Any]:
    """Compile prefill and decode of two layers ahead of time, then generate: which programs were found."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    messages = _Messages()
    logger = logging.getLogger("jax._src.compiler")
    logger.addHandler(messages)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    config = ModelConfig.preset("nano").override(
        {"attention_kinds": ("kda", "dsa"), "mlp_kinds": ("dense", "moe"), "vision": None}
    )
    file = load_mesh_file("cpu-8")
    for phase in ("prefill", "decode"):
        report = compile_step(config, file, phase, 1, CAPACITY, CHUNK)
        assert report.fits
    compiled = messages.found("miss")
    jax.clear_caches()
    messages.texts.clear()
    mesh = make_mesh(file)
    parameters = quantize_experts(initialize(config, jax.random.key(0), jnp.bfloat16), config)
    parameters = place_parameters(parameters, config, mesh)
    steps = Steps(parameters, config, mesh=mesh)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, 60).tolist()
    tokens = [token for token, _ in generate_ids(steps, prompt, 4, seed=0) if token is not None]
    return {
        "compiled": compiled, "hits": messages.found("hit"), "misses": messages.found("miss"), "tokens": len(tokens),
    }  # fmt: skip
