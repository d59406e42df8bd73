"""Integer arithmetic behind MXFP4: E2M1 codes and E8M0 scale bytes to and from float bits.

Everything here works on bit patterns held in int32, with numpy and with JAX alike, because a compiled XLA
program on CPU flushes subnormal floats, while scale byte 0 (2^-127) makes subnormal values and thresholds.

Source: OCP Microscaling Formats (MX) specification 1.0; the scale rule is that of compressed-tensors.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

BLOCK = 32
NAN_SCALE = 255

_INFINITY_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_MAGNITUDE_MASK = 0x7FFFFFFF

# Midpoints between neighbouring E2M1 magnitudes, as (exponent, 23-bit mantissa, tie goes up). A tie goes to
# the neighbour with an even code.
_HALF = 1 << 22
_QUARTER = 1 << 21
_MIDPOINTS = (
    (-2, 0, False),
    (-1, _HALF, True),
    (0, _QUARTER, False),
    (0, _HALF | _QUARTER, True),
    (1, _QUARTER, False),
    (1, _HALF | _QUARTER, True),
    (2, _QUARTER, False),
)
# Twice the eight E2M1 magnitudes {0, .5, 1, 1.5, 2, 3, 4, 6}, four bits each.
_DOUBLED_MAGNITUDES = sum(value << (4 * code) for code, value in enumerate((0, 1, 2, 3, 4, 6, 8, 12)))


def namespace(*arrays: Any) -> ModuleType:
    """numpy when every array is a numpy array, else jax.numpy."""
    return np if all(isinstance(array, np.ndarray | np.generic) for array in arrays) else jnp


def bitcast(array: Any, dtype: Any) -> Any:
    """The same bits as another dtype of the same width."""
    if isinstance(array, np.ndarray):
        return array.view(dtype) if array.flags.c_contiguous else np.ascontiguousarray(array).view(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)


def compute_dtype(dtype: Any) -> Any:
    """The dtype that results are computed in: float64 for float64, float32 for everything narrower."""
    return jnp.float64 if dtype == np.float64 else jnp.float32


def float32_bits(array: Any) -> Any:
    """The float32 bit pattern, int32, of a float array of any width."""
    if array.dtype == jnp.bfloat16:
        return bitcast(array, np.dtype(np.uint16)).astype(np.int32) << 16
    return bitcast(array.astype(np.float32), np.dtype(np.int32))


def scale_from_amax(amax_bits: Any) -> Any:
    """E8M0 scale byte (int32) of blocks whose largest magnitude has the float32 bits `amax_bits`.

    amax is rounded to a power of two, up from 1.75 on (where E2M1's one mantissa bit would round up), and
    divided by 4, the power of two of the largest code. A block that holds an infinity or a NaN gets byte 255.
    """
    xp = namespace(amax_bits)
    finite = amax_bits < _INFINITY_BITS
    rounded = ((xp.where(finite, amax_bits, 0) + _QUARTER) >> 23) - 2
    return xp.where(finite, xp.maximum(rounded, 0), NAN_SCALE)


def _midpoint_bits(scale: Any, exponent: int, mantissa: int) -> Any:
    """Float32 bits of (1 + mantissa / 2^23) * 2^exponent * 2^(scale - 127), subnormals included."""
    xp = namespace(scale)
    biased = scale + exponent
    normal = (xp.maximum(biased, 0) << 23) | mantissa
    subnormal = ((1 << 23) | mantissa) >> xp.clip(1 - biased, 0, 31)
    return xp.where(biased >= 1, normal, subnormal)


def encode(bits: Any, axis: int) -> tuple[Any, Any]:
    """Codes and scales of float32 bits whose axis `axis` (non-negative) is one block of 32.

    Returns codes (uint8, 0..15, the shape of `bits`) and scale bytes (int32, that axis kept with length 1).
    A zero of either sign becomes code 0; a negative value that rounds to zero keeps its sign (code 8).
    """
    xp = namespace(bits)
    magnitude = bits & _MAGNITUDE_MASK
    scale = scale_from_amax(magnitude.max(axis=axis, keepdims=True))
    usable = xp.minimum(scale, 253)
    codes = ((bits < 0) & (magnitude > 0)).astype(np.uint8) << 3
    for exponent, mantissa, tie_up in _MIDPOINTS:
        midpoint = _midpoint_bits(usable, exponent, mantissa)
        above = magnitude >= midpoint if tie_up else magnitude > midpoint
        codes = codes + above.astype(np.uint8)
    return codes, scale


def decode_bits(codes: Any, scale: Any) -> Any:
    """Exact float32 bits (int32) of code * 2^(scale - 127); `codes` and `scale` are int32 and broadcast.

    Values above the float32 range become infinities; scale byte 255 gives NaN.
    """
    xp = namespace(codes, scale)
    magnitude = codes & 7
    mantissa = xp.where(magnitude >= 2, (codes & 1) << 22, 0)
    biased = scale + (magnitude >> 1) - 1
    normal = (xp.maximum(biased, 0) << 23) | mantissa
    subnormal = (mantissa | (1 << 23)) >> xp.clip(1 - biased, 0, 31)
    bits = xp.where(biased >= 1, normal, subnormal)
    bits = xp.where(biased >= 255, _INFINITY_BITS, bits)
    bits = xp.where(magnitude == 0, 0, bits)
    bits = xp.where(scale == NAN_SCALE, _NAN_BITS, bits)
    # Shifting bit 3 into the sign must wrap, so it is built from the negative integer -2^31.
    return bits | xp.where(codes >= 8, np.int32(-(2**31)), np.int32(0))


def decode(codes: Any, scale: Any, dtype: Any) -> Any:
    """code * 2^(scale - 127) as `dtype`: exact for bfloat16, float32 and float64, rounded for others."""
    dtype = np.dtype(dtype)
    xp = namespace(codes, scale)
    if dtype == np.float64:
        if xp is jnp and not jax.config.jax_enable_x64:
            raise ValueError(
                "dtype is float64 but 64-bit types are off; enable jax_enable_x64 or ask for float32."
            )
        values = code_values(codes).astype(np.float64)
        powers = bitcast((scale.astype(np.int64) + (1023 - 127)) << 52, np.dtype(np.float64))
        return values * xp.where(scale == NAN_SCALE, np.float64(np.nan), powers)
    bits = decode_bits(codes, scale)
    if dtype == jnp.bfloat16:
        # Two significant bits and at least 2^-128: the upper half of the float32 is the exact bfloat16.
        return bitcast(((bits >> 16) & 0xFFFF).astype(np.uint16), np.dtype(ml_dtypes.bfloat16))
    return bitcast(bits, np.dtype(np.float32)).astype(dtype)


def code_values(codes: Any) -> Any:
    """E2M1 values (float32) of int32 codes 0..15; the fastest of the unpackings measured on CPU."""
    xp = namespace(codes)
    shift = ((codes & 7) << 2).astype(np.uint32)
    doubled = ((xp.full_like(shift, _DOUBLED_MAGNITUDES) >> shift) & np.uint32(15)).astype(np.int32)
    values = doubled.astype(np.float32) * np.float32(0.5)
    sign = xp.where(codes >= 8, np.int32(-(2**31)), np.int32(0))
    return bitcast(bitcast(values, np.dtype(np.int32)) | sign, np.dtype(np.float32))


def scale_values(scale_bytes: Any, dtype: Any) -> Any:
    """2^(byte - 127) as float32 or float64 for use inside a matmul: byte 0 counts as 0 in float32.

    Matrix units and CPU kernels flush the subnormal weights that byte 0 gives, so nothing is lost; 255 gives
    NaN.
    """
    scale = scale_bytes.astype(np.int32)
    if np.dtype(dtype) == np.float64:
        powers = bitcast((scale.astype(np.int64) + (1023 - 127)) << 52, np.dtype(np.float64))
    else:
        powers = bitcast(scale << 23, np.dtype(np.float32))
    return jnp.where(scale == NAN_SCALE, np.asarray(np.nan, powers.dtype), powers)
