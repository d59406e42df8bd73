"""Rounding trained experts for a checkpoint."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import ModelConfig, slice_config
from moe28t_jax.model.parameters import initialize
from moe28t_jax.weights import CheckpointError, quantize_experts

DATA = Path(__file__).parents[1] / "golden" / "data"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_experts_that_are_not_finite_are_refused(value: float) -> None:
    """Before they are saved, where every loader would refuse them."""
    config = slice_config(ModelConfig.from_hf(DATA / "k3_tiny_bf16"), 2)
    parameters = initialize(config, jax.random.key(0), jnp.float32)
    experts = parameters.segments[1][0].mlp.experts
    experts.up.set_value(experts.up.get_value().at[1, 2, 3].set(value))
    with pytest.raises(CheckpointError, match=r"'mlp\.experts\.up' of layer 1 are not finite"):
        quantize_experts(parameters, config)
