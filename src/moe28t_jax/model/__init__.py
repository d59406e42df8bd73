"""The network: pure functions of (parameters, inputs, cache)."""

from moe28t_jax.model.cache import Cache, init_cache
from moe28t_jax.model.network import Inputs, Result, forward, last_hidden, project_logits, run
from moe28t_jax.model.parameters import Group, PackedWeight, Parameters, Weight, abstract, initialize

__all__ = [
    "Cache", "Group", "Inputs", "PackedWeight", "Parameters", "Result", "Weight", "abstract", "forward", "init_cache",
    "initialize", "last_hidden", "project_logits", "run",
]  # fmt: skip
