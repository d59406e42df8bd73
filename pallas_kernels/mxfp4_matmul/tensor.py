"""MXFP4Tensor: 4-bit E2M1 codes with one E8M0 scale per 32 inputs, in the layout a kernel reads."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.mxfp4_matmul import _codec
from pallas_kernels.mxfp4_matmul._codec import BLOCK

LAYOUTS = ("packed_kn", "packed_nk", "float4_kn")


@dataclasses.dataclass(frozen=True, eq=False)
class MXFP4Tensor:
    """A weight of logical shape [..., out=N, in=K] stored as MXFP4, K a multiple of 32.

    Element value: E2M1 code * 2^(scale byte - 127), one scale byte per 32 consecutive inputs of an output.
    A JAX pytree whose leaves are `packed` and `scale_bytes` and whose static part is `layout`, so it passes
    through jit, scan, vmap, sharding and checkpointing; leading axes (layers, experts) are arbitrary. The
    leaves may be numpy arrays, JAX arrays or `jax.ShapeDtypeStruct`.

    Layouts:
      "packed_kn": packed uint8 [..., K/2, N], scale_bytes uint8 [..., K/32, N]; byte row j holds input 2j
        in its low and input 2j+1 in its high nibble.
      "packed_nk": packed uint8 [..., N, K/2], scale_bytes uint8 [..., N, K/32]: the bytes of a checkpoint.
      "float4_kn": packed float4_e2m1fn [..., K, N], scale_bytes uint8 [..., K/32, N].

    Raises:
      ValueError: if the layout is unknown or shapes or dtypes do not fit it.

    Source: OCP Microscaling Formats specification 1.0; the "mxfp4-pack-quantized" checkpoint format.
    """

    packed: Any
    scale_bytes: Any
    layout: str = "packed_kn"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"MXFP4 layout is {self.layout!r}; pass one of {', '.join(map(repr, LAYOUTS))}.")
        if not all(
            hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in (self.packed, self.scale_bytes)
        ):
            return  # a pytree of shardings, paths or flags in the shape of the tensor
        _check_leaves(self.packed, self.scale_bytes, self.layout)

    @classmethod
    def from_checkpoint(cls, packed: Any, scale: Any, layout: str = "packed_nk") -> "MXFP4Tensor":
        """The tensor of a checkpoint's `weight_packed` [..., N, K/2] and `weight_scale` [..., N, K/32].

        Both uint8 (scales also float8_e8m0fnu), numpy or JAX. With the default layout the bytes are used as
        they are, without a copy; host arrays stay packed bytes in every layout.

        Raises:
          ValueError: if shapes or dtypes do not fit, or a numpy tensor is asked for in "float4_kn".
        """
        if scale.dtype == ml_dtypes.float8_e8m0fnu:
            scale = _codec.bitcast(scale, np.dtype(np.uint8))
        return cls(packed, scale, "packed_nk").to_layout(layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        *leading, first, second = self.packed.shape
        if self.layout == "packed_nk":
            return (*leading, first, 2 * second)
        return (*leading, second, first if self.layout == "float4_kn" else 2 * first)

    @property
    def ndim(self) -> int:
        """Number of logical axes."""
        return len(self.packed.shape)

    @property
    def nbytes_packed(self) -> int:
        """Bytes of the codes, two to a byte, and scales (`.nbytes` of a float4 array counts a byte each)."""
        elements = math.prod(self.shape)
        return elements // 2 + elements // BLOCK

    @property
    def codes(self) -> Any:
        """The codes as float4_e2m1fn [..., out, in]: for reading (a byte each in numpy), not in a step."""
        if self.layout == "float4_kn":
            return self.packed.swapaxes(-1, -2)
        codes = self._integer_codes()
        if isinstance(codes, np.ndarray):
            return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
        packed = self.packed if self.layout == "packed_nk" else self.packed.swapaxes(-1, -2)
        return jax.lax.bitcast_convert_type(packed, jnp.float4_e2m1fn).reshape(self.shape)

    @property
    def scales(self) -> Any:
        """The scales as float8_e8m0fnu [..., out, in/32]: for reading."""
        scales = self.scale_bytes if self.layout == "packed_nk" else self.scale_bytes.swapaxes(-1, -2)
        if isinstance(scales, np.ndarray):
            return np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu)
        return jax.lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)

    def dequantize(self, dtype: Any = jnp.float32) -> Any:
        """The weight [..., out, in] as `dtype`, exact for bfloat16, float32 and float64.

        Subnormal results (scale byte 0 and 1) are kept; scale byte 255 gives NaN; values above the float32
        range give infinities.

        Raises:
          ValueError: if `dtype` is float64, the leaves are JAX arrays and 64-bit types are off.
        """
        with jax.named_scope("mxfp4_dequantize"):
            scales = self.scale_bytes if self.layout == "packed_nk" else self.scale_bytes.swapaxes(-1, -2)
            codes = self._integer_codes()
            blocks = codes.reshape(*codes.shape[:-1], codes.shape[-1] // BLOCK, BLOCK)
            values = _codec.decode(blocks, scales[..., None].astype(np.int32), dtype)
            return values.reshape(self.shape)

    def to_layout(self, layout: str) -> "MXFP4Tensor":
        """The same weight in another layout; numpy stays numpy, abstract shapes stay abstract.

        Raises:
          ValueError: if the layout is unknown, or is "float4_kn" for numpy leaves (a byte per code on the
            host).
        """
        if layout not in LAYOUTS:
            raise ValueError(f"MXFP4 layout is {layout!r}; pass one of {', '.join(map(repr, LAYOUTS))}.")
        if layout == self.layout:
            return self
        if isinstance(self.packed, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda tensor: tensor.to_layout(layout), self)
        turned = "packed_nk" in (layout, self.layout)
        scales = _transpose(self.scale_bytes) if turned else self.scale_bytes
        if layout == "float4_kn":
            if isinstance(self.packed, np.ndarray):
                raise ValueError(
                    "A numpy MXFP4Tensor cannot take layout 'float4_kn', which costs a byte per code "
                    "on the host; put it on a device first (jax.device_put), then change its layout."
                )
            packed_kn = self.packed if self.layout == "packed_kn" else _transpose(self.packed)
            pairs = jax.lax.bitcast_convert_type(packed_kn, jnp.float4_e2m1fn)
            packed = jnp.moveaxis(pairs, -1, -2).reshape(*pairs.shape[:-3], -1, pairs.shape[-2])
        elif self.layout == "float4_kn":
            codes = self._integer_codes()
            packed = (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
            packed = packed if layout == "packed_nk" else _transpose(packed)
        else:
            packed = _transpose(self.packed)
        return MXFP4Tensor(packed, scales, layout)

    def require_finite(self, name: str) -> "MXFP4Tensor":
        """This tensor, after checking that no scale byte is 255 (NaN); `name` is used in the error.

        Raises:
          ValueError: if one is. Leaves must hold values (numpy or concrete JAX arrays).
        """
        count = int((np.asarray(self.scale_bytes) == _codec.NAN_SCALE).sum())
        if count:
            raise ValueError(
                f"Tensor {name!r} has {count} scale bytes of 255 (NaN) where 0 to 254 was expected; "
                "the file is damaged or was quantised from non-finite weights: fetch or quantise it again."
            )
        return self

    def _integer_codes(self) -> Any:
        """int32 codes 0..15, [..., out, in]."""
        packed = self.packed
        if self.layout == "float4_kn":
            if isinstance(packed, np.ndarray):
                return packed.swapaxes(-1, -2).view(np.uint8).astype(np.int32) & 15
            # Through float32, because XLA on CPU fails to compile some fusions around a bitcast from float4.
            bits = _codec.float32_bits(packed.swapaxes(-1, -2))
            at_least_one = ((bits >> 22) & 0x1FF) - 2 * 126
            magnitude = jnp.where(at_least_one >= 2, at_least_one, (bits & 0x7FFFFFFF != 0).astype(jnp.int32))
            return magnitude | jnp.where(bits < 0, 8, 0)
        if self.layout == "packed_kn":
            packed = packed.swapaxes(-1, -2)
        packed = packed.astype(np.int32)
        xp = _codec.namespace(packed)
        return xp.stack([packed & 15, packed >> 4], axis=-1).reshape(self.shape)


def _transpose(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return array.swapaxes(-1, -2)
    *leading, rows, columns = array.shape
    result = np.empty((*leading, columns, rows), array.dtype)
    # A strip of 32 rows at a time stays in cache: several times faster than one strided copy.
    for row in range(0, rows, 32):
        result[..., row : row + 32] = array[..., row : row + 32, :].swapaxes(-1, -2)
    return result


def _check_leaves(packed: Any, scale_bytes: Any, layout: str) -> None:
    expected = jnp.float4_e2m1fn if layout == "float4_kn" else jnp.uint8
    if packed.dtype != expected or scale_bytes.dtype != jnp.uint8:
        raise ValueError(
            f"MXFP4 layout {layout!r} holds {np.dtype(expected).name} codes and uint8 scales; got "
            f"{packed.dtype} and {scale_bytes.dtype}. Pass the checkpoint's bytes, "
            "or quantise a float weight with quantize()."
        )
    if len(packed.shape) < 2:
        raise ValueError(
            f"MXFP4 codes have shape {packed.shape}; at least the two axes out and in are expected."
        )
    axis = -1 if layout == "packed_nk" else -2
    inputs = packed.shape[axis] * (1 if layout == "float4_kn" else 2)
    wanted = list(packed.shape)
    wanted[axis] = inputs // BLOCK
    if inputs % BLOCK or tuple(scale_bytes.shape) != tuple(wanted):
        raise ValueError(
            f"MXFP4 codes of shape {tuple(packed.shape)} in layout {layout!r} hold {inputs} inputs, which "
            f"must be a multiple of {BLOCK}, with scales of shape {tuple(wanted)}; got scales of shape "
            f"{tuple(scale_bytes.shape)}. Check the layout name and the pairing of the two arrays."
        )


def _flatten_with_keys(tensor: MXFP4Tensor) -> tuple[tuple[tuple[Any, Any], ...], str]:
    key = jax.tree_util.GetAttrKey
    return ((key("packed"), tensor.packed), (key("scale_bytes"), tensor.scale_bytes)), tensor.layout


def _flatten(tensor: MXFP4Tensor) -> tuple[tuple[Any, Any], str]:
    return (tensor.packed, tensor.scale_bytes), tensor.layout


def _unflatten(layout: str, leaves: Any) -> MXFP4Tensor:
    # JAX rebuilds trees around tracers, specs and placeholders, so nothing is checked here.
    tensor = object.__new__(MXFP4Tensor)
    packed, scale_bytes = leaves
    for name, value in (("packed", packed), ("scale_bytes", scale_bytes), ("layout", layout)):
        object.__setattr__(tensor, name, value)
    return tensor


jax.tree_util.register_pytree_with_keys(MXFP4Tensor, _flatten_with_keys, _unflatten, _flatten)
