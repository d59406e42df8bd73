"""Running a model: compiled steps, sampling, generation."""

from moe28t_jax.engine.generate import FinishReason, check_generation, check_sampling, generate_ids
from moe28t_jax.engine.sampling import sample
from moe28t_jax.engine.steps import Steps

__all__ = ["FinishReason", "Steps", "check_generation", "check_sampling", "generate_ids", "sample"]
