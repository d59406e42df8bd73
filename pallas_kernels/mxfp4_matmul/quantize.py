"""Quantising to MXFP4 and MXFP8: bit-exact packing, and the straight-through forms used in training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._typing import Array, Float
from pallas_kernels.mxfp4_matmul import _codec
from pallas_kernels.mxfp4_matmul._codec import BLOCK
from pallas_kernels.mxfp4_matmul.tensor import LAYOUTS, MXFP4Tensor

# Elements quantised at a time on the host, so that the int32 temporaries stay in cache.
_HOST_CHUNK = 1 << 16

E4M3_MAX = 448.0
E4M3_LARGEST_EXPONENT = 8


def quantize(w: Float[Array | np.ndarray, "*leading N K"], layout: str = "packed_kn") -> MXFP4Tensor:
    """Quantise a weight [..., out=N, in=K] to MXFP4, in blocks of 32 along its last axis.

    The scale of a block is its largest magnitude, rounded to a power of two (up from 1.75 times one), over 4;
    values are divided by it, rounded to the nearest E2M1 value with ties to even codes, and saturate at 6.
    Zeros of either sign become +0. This is the rule of compressed-tensors, bit for bit. A block that holds an
    infinity or a NaN gets scale byte 255, which reads as NaN.

    Args:
      w: float array; numpy in gives numpy leaves (a chunk at a time), JAX in gives JAX leaves. Anything wider
        than float32 is rounded to float32 first.
      layout: layout of the result, see MXFP4Tensor.

    Raises:
      ValueError: if K is not a multiple of 32 or the layout does not exist for this kind of array.
    """
    _require_blocks(w.shape, -1, "w")
    if layout not in LAYOUTS:
        raise ValueError(f"MXFP4 layout is {layout!r}; pass one of {', '.join(map(repr, LAYOUTS))}.")
    if isinstance(w, np.ndarray):
        packed, scale_bytes = _quantize_host(w)
    else:
        with jax.named_scope("mxfp4_quantize"):
            packed, scale_bytes = _pack(
                _codec.float32_bits(w).reshape(*w.shape[:-1], w.shape[-1] // BLOCK, BLOCK)
            )
    return MXFP4Tensor(packed, scale_bytes, "packed_nk").to_layout(layout)


def _pack(bits: Any) -> tuple[Any, Any]:
    """Packed bytes [..., K/2] and scale bytes [..., K/32] of float32 bits [..., K/32, 32]."""
    codes, scale = _codec.encode(bits, axis=bits.ndim - 1)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    packed = packed.reshape(*packed.shape[:-2], packed.shape[-2] * packed.shape[-1])
    return packed, scale[..., 0].astype(np.uint8)


def _quantize_host(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = w.reshape(-1, BLOCK)
    packed = np.empty((blocks.shape[0], BLOCK // 2), np.uint8)
    scale_bytes = np.empty((blocks.shape[0],), np.uint8)
    step = _HOST_CHUNK // BLOCK
    for start in range(0, blocks.shape[0], step):
        # Blocks along the second axis: numpy's inner loops then run over many blocks instead of 32 elements.
        bits = np.ascontiguousarray(_codec.float32_bits(blocks[start : start + step]).T)
        codes, scale = _codec.encode(bits, axis=0)
        packed[start : start + step] = (codes[0::2] | (codes[1::2] << 4)).T
        scale_bytes[start : start + step] = scale[0]
    leading = w.shape[:-1]
    return packed.reshape(*leading, w.shape[-1] // 2), scale_bytes.reshape(*leading, w.shape[-1] // BLOCK)


def fake_quantize(w: Float[Array | np.ndarray, "*shape"], axis: int = -1) -> Float[Array, "*shape"]:
    """Round a weight to its MXFP4 values, with a straight-through gradient.

    Equals `quantize(w).dequantize()` with blocks of 32 along `axis` (`axis=-2` for weights stored [in, out]),
    bit for bit; the gradient passes unchanged. Shape and dtype are kept; a float64 input is rounded through
    float32.

    Raises:
      ValueError: if the axis is not a multiple of 32 long.

    Source: quantisation-aware training with MXFP4 weights and straight-through estimation.
    """
    _require_blocks(w.shape, axis, "w")
    return _fake_quantize(axis % w.ndim, jnp.asarray(w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fake_quantize(axis: int, w: Array) -> Array:
    with jax.named_scope("mxfp4_fake_quantize"):
        bits = _codec.float32_bits(w).reshape(_split_shape(w.shape, axis))
        codes, scale = _codec.encode(bits, axis=axis + 1)
        narrow = jnp.bfloat16 if w.dtype == jnp.bfloat16 else jnp.float32
        return _codec.decode(codes.astype(jnp.int32), scale, narrow).astype(w.dtype).reshape(w.shape)


def _straight_through_forward(axis: int, w: Array) -> tuple[Array, None]:
    return _fake_quantize(axis, w), None


def _straight_through_backward(axis: int, _: None, cotangent: Array) -> tuple[Array]:
    return (cotangent,)


_fake_quantize.defvjp(_straight_through_forward, _straight_through_backward)


def fake_quantize_mxfp8(x: Float[Array | np.ndarray, "*shape"], axis: int = -1) -> Float[Array, "*shape"]:
    """Round activations to MXFP8 values (E4M3 elements, E8M0 scales), with a straight-through gradient.

    Blocks of 32 along `axis`; the scale is 2^(floor(log2 amax) - 8), at least 2^-126, and elements saturate
    at 448. Infinities and NaNs stay what they are. Shape and dtype are kept.

    Raises:
      ValueError: if the axis is not a multiple of 32 long.

    Source: OCP Microscaling Formats specification 1.0, section 6.3.
    """
    _require_blocks(x.shape, axis, "x")
    return _fake_quantize_mxfp8(axis % x.ndim, jnp.asarray(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fake_quantize_mxfp8(axis: int, x: Array) -> Array:
    with jax.named_scope("mxfp8_fake_quantize"):
        blocks = x.astype(jnp.float32).reshape(_split_shape(x.shape, axis))
        magnitude = _codec.float32_bits(blocks) & 0x7FFFFFFF
        amax = magnitude.max(axis=axis + 1, keepdims=True)
        scale = jnp.maximum((amax >> 23) - E4M3_LARGEST_EXPONENT, 1)
        inverse = jax.lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
        scaled = jnp.clip(blocks * inverse, -E4M3_MAX, E4M3_MAX)
        elements = scaled.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        rounded = elements * jax.lax.bitcast_convert_type(scale << 23, jnp.float32)
        return jnp.where(jnp.isfinite(blocks), rounded, blocks).astype(x.dtype).reshape(x.shape)


def _mxfp8_forward(axis: int, x: Array) -> tuple[Array, None]:
    return _fake_quantize_mxfp8(axis, x), None


_fake_quantize_mxfp8.defvjp(_mxfp8_forward, _straight_through_backward)


def _split_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // BLOCK, BLOCK, *shape[axis + 1 :])


def _require_blocks(shape: tuple[int, ...], axis: int, name: str) -> None:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis is {axis} but {name} has shape {shape}; pass an axis of it.")
    if shape[axis] % BLOCK:
        raise ValueError(
            f"Axis {axis} of {name} has length {shape[axis]}, which is not a multiple of {BLOCK}; "
            "pad it with zeros, or keep this weight unquantised."
        )
