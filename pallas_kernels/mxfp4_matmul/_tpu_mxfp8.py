"""Pallas TPU kernel that rounds rows to MXFP8 values: what `quantize.fake_quantize_mxfp8` computes, tile by tile.

XLA holds rows by blocks of 32, which fill a quarter of a register's lanes: temporaries of several times the rows. Here
a register holds four blocks side by side, the largest magnitude of each is found by exchanging lanes, and the result
is written over the rows where they are not used again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array
from pallas_kernels._varying import result_like
from pallas_kernels.mxfp4_matmul._codec import BLOCK
from pallas_kernels.mxfp4_matmul.quantize import E4M3_LARGEST_EXPONENT, E4M3_MAX, fake_quantize_mxfp8

_LANES = 128
_ROWS = 128
# Float32 rows of one block; their second buffers and the results take as much again each.
_BLOCK_BYTES = 2 * 2**20
_E4M3_SMALLEST_EXPONENT = 127 - 6
"""Biased as float32's: below it, E4M3's numbers are evenly spaced."""


def round_rows(x_MK: Array, interpret: Any = False) -> Array:
    """Rows rounded to MXFP8 values by blocks of 32, with a straight-through gradient. Shape and dtype are kept.

    Rows whose length fills no whole registers, or that are neither bfloat16 nor float32, are rounded by XLA.
    """
    rows, inputs = x_MK.shape
    if rows == 0 or inputs % _LANES or x_MK.dtype not in (jnp.bfloat16, jnp.float32):
        return fake_quantize_mxfp8(x_MK)
    return _straight_through(interpret, x_MK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(interpret: Any, x_MK: Array) -> Array:
    return _round_rows(interpret, x_MK)


def _forward(interpret: Any, x_MK: Array) -> tuple[Array, None]:
    return _round_rows(interpret, x_MK), None


def _backward(interpret: Any, residuals: None, cotangent_MK: Array) -> tuple[Array]:
    return (cotangent_MK,)


_straight_through.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(0,))
def _round_rows(interpret: Any, x_MK: Array) -> Array:
    rows, inputs = x_MK.shape
    tile = min(rows, _ROWS)
    columns = next(
        width
        for width in range(inputs, 0, -_LANES)
        if inputs % width == 0 and (width == _LANES or 4 * tile * width <= _BLOCK_BYTES)
    )
    block = pl.BlockSpec((tile, columns), lambda row, column: (row, column))
    with jax.named_scope("mxfp8_round_rows_tpu"):
        return pl.pallas_call(
            _kernel,
            grid=(pl.cdiv(rows, tile), inputs // columns),
            in_specs=[block],
            out_specs=block,
            out_shape=result_like(x_MK, x_MK.shape, x_MK.dtype),
            # The interpreter cannot alias rows that fill no whole number of blocks.
            input_output_aliases={} if interpret else {0: 0},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
            cost_estimate=pl.CostEstimate(
                flops=30 * rows * inputs,
                transcendentals=0,
                bytes_accessed=2 * rows * inputs * x_MK.dtype.itemsize,
            ),
            interpret=interpret,
            name="mxfp8_round_rows",
        )(x_MK)


def _kernel(x_ref: Any, out_ref: Any) -> None:
    def round_lanes(turn: Any, _: None) -> None:
        here = pl.ds(pl.multiple_of(turn * _LANES, _LANES), _LANES)
        out_ref[:, here] = _rounded(x_ref[:, here].astype(jnp.float32)).astype(out_ref.dtype)

    lax.fori_loop(0, x_ref.shape[1] // _LANES, round_lanes, None)


def _rounded(x: Array) -> Array:
    """Of float32 [rows, 128], four blocks side by side."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & np.int32(0x7FFFFFFF)
    scale = jnp.maximum((_largest_of_block(magnitude) >> 23) - E4M3_LARGEST_EXPONENT, 1)
    inverse = lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    scaled = jnp.minimum(lax.bitcast_convert_type(magnitude, jnp.float32) * inverse, np.float32(E4M3_MAX))
    # Adding 1.5 * 2^23 of an element's spacing, which is 2^-3 of its power of two, leaves float32 no finer bits: the
    # sum is rounded to nearest even as E4M3 rounds.
    exponent = jnp.maximum(lax.bitcast_convert_type(scaled, jnp.int32) >> 23, _E4M3_SMALLEST_EXPONENT)
    shift = lax.bitcast_convert_type(((exponent + (23 - 3)) << 23) | np.int32(1 << 22), jnp.float32)
    elements = (scaled + shift) - shift
    rounded = lax.bitcast_convert_type(
        elements * lax.bitcast_convert_type(scale << 23, jnp.float32), jnp.int32
    )
    signed = lax.bitcast_convert_type(rounded | (bits & np.int32(-(2**31))), jnp.float32)
    return jnp.where(magnitude < np.int32(0x7F800000), signed, x)


def _largest_of_block(magnitude: Array) -> Array:
    """In every lane the largest int32 of its block of 32 lanes, by exchanges at distances 1, 2, 4, 8, 16."""
    lane = lax.broadcasted_iota(jnp.int32, magnitude.shape, 1)
    distance = 1
    while distance < BLOCK:
        from_above = pltpu.roll(magnitude, _LANES - distance, 1)
        from_below = pltpu.roll(magnitude, distance, 1)
        partner = jnp.where((lane & distance) == 0, from_above, from_below)
        magnitude = jnp.maximum(magnitude, partner)
        distance *= 2
    return magnitude
