"""Gated activations that follow the gate and up projections of an expert."""

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float
from pallas_kernels.mxfp4_matmul._codec import compute_dtype

Activation = tuple[str] | tuple[str, float | int | None, float | int | None]


def situ_glu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    beta: float | int | None = 4.0,
    linear_beta: float | int | None = 25.0,
) -> Float[Array, "*shape"]:
    """SiTU-GLU: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta).

    Computed in float32 (float64 for float64 inputs) and cast back to `gate.dtype`.

    Args:
      gate, up: arrays of one shape.
      beta: soft bound of the gate; None or 0 count as 1.
      linear_beta: soft bound of the linear part; None or 0 leave `up` unchanged.

    Source: the public configuration (`situ_beta` 4, `situ_linear_beta` 25).
    """
    compute = compute_dtype(gate.dtype)
    gate_wide, up_wide = gate.astype(compute), up.astype(compute)
    bound = float(beta) if beta else 1.0
    gated = bound * jnp.tanh(gate_wide / bound) * jax.nn.sigmoid(gate_wide)
    linear = float(linear_beta) * jnp.tanh(up_wide / float(linear_beta)) if linear_beta else up_wide
    return (gated * linear).astype(gate.dtype)


def swiglu(gate: Float[Array, "*shape"], up: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """SwiGLU: gate sigmoid(gate) * up, computed in float32 or float64 and cast back to `gate.dtype`."""
    compute = compute_dtype(gate.dtype)
    gate_wide = gate.astype(compute)
    return (gate_wide * jax.nn.sigmoid(gate_wide) * up.astype(compute)).astype(gate.dtype)


def apply_activation(activation: Activation, gate: Array, up: Array) -> Array:
    """The gated activation named by `activation`: ("situ", beta, linear_beta) or ("silu",).

    Raises:
      ValueError: for any other value.
    """
    match activation:
        case ("situ", beta, linear_beta):
            return situ_glu(gate, up, beta, linear_beta)
        case ("silu",):
            return swiglu(gate, up)
        case _:
            raise ValueError(f'activation is {activation!r}; pass ("situ", beta, linear_beta) or ("silu",).')
