"""From trained (unquantised) parameters to the packed tree that checkpoints and inference use."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter
from moe28t_jax.model.parameters import Parameters, build
from moe28t_jax.weights.save import declared_values
from pallas_kernels import mxfp4_matmul


def quantize_experts(parameters: Parameters, config: ModelConfig) -> Parameters:
    """The same parameters, one array per layer, with every routed expert rounded to MXFP4.

    The rounding is that of `moe28t convert`, so a checkpoint saved from the result equals a converted one.
    """
    values = {(item.layer, item.parameter.name): value for item, value in declared_values(parameters, config)}

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        value = values[None if layers is None else layers[0], parameter.name]
        if parameter.quantizable and not isinstance(value, mxfp4_matmul.MXFP4Tensor):
            return mxfp4_matmul.quantize(jnp.swapaxes(value, -1, -2))
        return value

    return build(config, False, make, parameters.has_vision)
