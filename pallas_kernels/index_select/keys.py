"""Index keys of 8 and 4 bits with power-of-two scales: what a cache of many keys holds instead of bfloat16.

fp8: E4M3 codes and one scale per key (DeepSeek-V3.2). fp4: E2M1 codes and one scale per 32 channels of a key (the
element and scale of OCP Microscaling MXFP4). Scales are E8M0 bytes: byte b is 2^(b - 127).

A scale is a power of two, so every value is exact in bfloat16, and a score has the same bits whether the scale
multiplies the key, its products, or (fp8) their sum over the heads, as long as nothing leaves the normal range.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._typing import AnyArray, Array, Float
from pallas_kernels.mxfp4_matmul import _codec

FP4_BLOCK = _codec.BLOCK
"""Channels that share a scale in fp4."""

_LARGEST_E4M3 = 448.0
# Codes times scales, and products of those with queries, stay normal float32 numbers.
_LOWEST_SCALE, _HIGHEST_SCALE = 64, 190


class QuantizedKeys(NamedTuple):
    """Keys [..., D] as codes and scales; a pytree, so that it is cached, sharded and sliced like an array.

    codes: float8_e4m3fn [..., D]; or uint8 [..., D/2], whose byte j holds the E2M1 codes of the channels j (low
        four bits) and j + D/2 (high), so that unpacking never interleaves.
    scales: uint8 E8M0, [...] for fp8 and [..., D/32] for fp4. 255 is NaN, which is what a key with a value
        that is not finite becomes in fp4; in fp8 its codes are NaN.
    """

    codes: Array
    scales: Array

    @property
    def channels(self) -> int:
        """D."""
        return self.codes.shape[-1] * (2 if self.is_fp4 else 1)

    @property
    def is_fp4(self) -> bool:
        """Whether the codes are E2M1."""
        return self.codes.dtype == np.uint8


Keys = Float[AnyArray, "rows keys channels"] | QuantizedKeys
"""Index keys [B, S, D], or pages [P, page, D], in full or quantized."""


def check_keys(keys: Any) -> None:
    """Whether codes and scales of quantized keys fit one another.

    Raises:
      ValueError: if they do not.
    """
    if not isinstance(keys, QuantizedKeys):
        return
    codes, scales = keys
    if codes.dtype not in (np.uint8, jnp.float8_e4m3fn) or scales.dtype != np.uint8:
        raise ValueError(
            f"quantized keys have codes of {codes.dtype} and scales of {scales.dtype}, expected float8_e4m3fn (fp8) "
            "or uint8 (fp4) codes and uint8 scales; make them with quantize_keys."
        )
    expected = codes.shape[:-1]
    if keys.is_fp4:
        expected = (*expected, keys.channels // FP4_BLOCK)
    if scales.shape != expected or (keys.is_fp4 and keys.channels % FP4_BLOCK):
        raise ValueError(
            f"codes of shape {codes.shape} have scales of shape {scales.shape}, expected {expected}; "
            "make them with quantize_keys."
        )


def _e4m3_scale(amax_bits: Array) -> Array:
    """The byte of the smallest power of two that brings the magnitude with these bits to 448 = 1.75 * 2^8 or less."""
    exponent, mantissa = amax_bits >> 23, amax_bits & (2**23 - 1)
    byte = exponent - 8 + (mantissa > 3 * 2**21).astype(jnp.int32)
    return jnp.clip(byte, _LOWEST_SCALE, _HIGHEST_SCALE)


def quantize_keys(keys: Float[AnyArray, "..."], kind: str = "fp8") -> QuantizedKeys:
    """Keys [..., D] of any float dtype as `QuantizedKeys`, every key by itself.

    `kind` is "fp8" or "fp4". Rounded to the nearest code, ties to even; the scale is the smallest power of two
    that no code overflows (fp8), or that of MXFP4 quantization (fp4).

    Raises:
      ValueError: for an unknown kind, or channels that are not whole blocks of 32 in fp4.
    """
    keys = jnp.asarray(keys)
    channels = keys.shape[-1]
    bits = _codec.float32_bits(keys)
    if kind == "fp8":
        values = jax.lax.bitcast_convert_type(bits, jnp.float32)
        magnitude = jnp.where(jnp.isfinite(values), bits & jnp.int32(2**31 - 1), 0)
        byte = _e4m3_scale(jnp.max(magnitude, axis=-1))
        inverse = jax.lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)
        scaled = values * inverse[..., None]
        # The largest scale may not reach every float32; codes saturate, and what is not finite is NaN.
        codes = jnp.clip(scaled, -_LARGEST_E4M3, _LARGEST_E4M3)
        codes = jnp.where(jnp.isfinite(values), codes, jnp.nan)
        return QuantizedKeys(codes.astype(jnp.float8_e4m3fn), byte.astype(jnp.uint8))
    if kind != "fp4":
        raise ValueError(f"keys cannot be quantized to {kind!r}; pass 'fp8' or 'fp4'.")
    if channels % FP4_BLOCK:
        raise ValueError(
            f"keys have {channels} channels, expected a multiple of {FP4_BLOCK}, which share a scale; use fp8."
        )
    codes, scales = _codec.encode(bits.reshape(*bits.shape[:-1], -1, FP4_BLOCK), bits.ndim)
    codes = codes.reshape(bits.shape)
    packed = codes[..., : channels // 2] | (codes[..., channels // 2 :] << 4)
    return QuantizedKeys(packed.astype(jnp.uint8), scales[..., 0].astype(jnp.uint8))


def scale_values(scales: Array) -> Array:
    """2^(byte - 127) in float32, NaN for 255; byte 0, which is not a normal number, counts as 0."""
    bits = scales.astype(jnp.int32) << 23
    return jax.lax.bitcast_convert_type(jnp.where(scales == 255, np.int32(0x7FC00000), bits), jnp.float32)


def e2m1_values(codes: Array) -> Array:
    """float32 of E2M1 codes 0..15 (int32), by integer arithmetic that every chip has."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    bits = jnp.where(
        exponent == 0, mantissa * np.int32(126 << 23), ((exponent + 126) << 23) | (mantissa << 22)
    )
    return jax.lax.bitcast_convert_type(bits | ((codes & 8) << 28), jnp.float32)


def dequantize_keys(keys: QuantizedKeys, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """The values of quantized keys [..., D]: exact in bfloat16, float32 and float64."""
    check_keys(keys)
    codes, scales = jnp.asarray(keys.codes), jnp.asarray(keys.scales)
    if not keys.is_fp4:
        values = codes.astype(jnp.float32) * scale_values(scales)[..., None]
        return values.astype(dtype)
    nibbles = codes.astype(jnp.int32)
    values = e2m1_values(jnp.concatenate([nibbles & 15, nibbles >> 4], axis=-1))
    blocks = values.reshape(*values.shape[:-1], -1, FP4_BLOCK) * scale_values(scales)[..., None]
    return blocks.reshape(values.shape).astype(dtype)
