"""The gradient of the segment maps that kernels compute: that of the portable form on the same inputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels._typing import Array
from pallas_kernels.delta_rule import xla

Tokens = tuple[Array, Array, Array, Array]
"""k, v, log_decay and beta, as `segment_map` takes them."""


def with_portable_gradient(
    kernel: Callable[[Any, Tokens, Array | None], tuple[Array, Array]],
) -> Callable[[Any, Tokens, Array | None], tuple[Array, Array]]:
    """`kernel(interpret, tokens, lengths_B)`, differentiable in the tokens.

    Nothing but the arguments is kept for the backward pass, which computes the map a second time by `xla`. A map is one
    of [K, K + V] for each segment, so the kernels have no backward pass of their own for it.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def maps(interpret: Any, tokens: Tokens, lengths_B: Array | None) -> tuple[Array, Array]:
        return kernel(interpret, tokens, lengths_B)

    def forward(
        interpret: Any, tokens: Tokens, lengths_B: Array | None
    ) -> tuple[tuple[Array, Array], tuple[Tokens, Array | None]]:
        return kernel(interpret, tokens, lengths_B), (tokens, lengths_B)

    def backward(
        interpret: Any, residuals: tuple[Tokens, Array | None], ct: tuple[Array, Array]
    ) -> tuple[Tokens, Any]:
        tokens, lengths_B = residuals
        with jax.named_scope("segment_map_backward"):
            _, pull_back = jax.vjp(lambda *x: xla.segment_map(*x, lengths_B), *tokens)
            gradients = pull_back(ct)
        return gradients, None if lengths_B is None else np.zeros(lengths_B.shape, jax.dtypes.float0)

    maps.defvjp(forward, backward)
    return maps
