"""From trained (unquantised) parameters to the packed tree that checkpoints and inference use."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter
from moe28t_jax.model.parameters import Parameters, build
from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.matching import NAN_SCALE
from moe28t_jax.weights.save import declared_values
from pallas_kernels import mxfp4_matmul


def quantize_experts(parameters: Parameters, config: ModelConfig) -> Parameters:
    """The same parameters, one array per layer, with every routed expert rounded to MXFP4.

    The rounding is that of `moe28t convert`, so a checkpoint saved from the result equals a converted one. The values
    are looked at: it is not for use inside of `jax.jit`.

    Raises CheckpointError for an expert weight that is not finite.
    """
    values = {(item.layer, item.parameter.name): value for item, value in declared_values(parameters, config)}

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        value = values[None if layers is None else layers[0], parameter.name]
        if parameter.quantizable and not isinstance(value, mxfp4_matmul.MXFP4Tensor):
            packed = mxfp4_matmul.quantize(jnp.swapaxes(value, -1, -2))
            if bool((packed.scale_bytes == NAN_SCALE).any()):
                where = "" if layers is None else f" of layer {layers[0]}"
                raise CheckpointError(
                    f"The experts {parameter.name!r}{where} are not finite, so they cannot be quantised: the training "
                    "that made them diverged; go back to parameters from before."
                )
            return packed
        return value

    return build(config, False, make, parameters.has_vision)
