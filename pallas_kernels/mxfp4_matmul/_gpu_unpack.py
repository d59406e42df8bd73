"""MXFP4 weights out of packed bytes, on the GPU: in registers, exactly, as bfloat16.

`code_values`, `word_values`, `scale_powers` and `scaled` are plain functions of arrays or integers. The compiled
kernel runs `register_values`: `word_values` on the registers that hold the bytes. Only its wrapper (which bytes a
register holds, and the one instruction that picks bytes) is beyond what runs without a GPU.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels._typing import Array
from pallas_kernels.mxfp4_matmul._codec import BLOCK, NAN_SCALE

BYTES_PER_BLOCK = BLOCK // 2
LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X
"""Each thread holds four neighbouring bytes of a row; what it makes of them stays where it is."""


def code_values(packed: Array) -> tuple[Array, Array]:
    """E2M1 values, bfloat16, of the low and the high codes of bytes: half (code 1) has no mantissa bit."""
    wide = packed.astype(jnp.int32)
    half = np.int32(126 << 7)
    values = []
    for codes in (wide & 15, wide >> 4):
        magnitude = codes & 7
        bits = jnp.where(magnitude >= 2, (magnitude << 6) + half, magnitude * half) | ((codes & 8) << 12)
        values.append(lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16))
    return values[0], values[1]


def word_values(word: Any, permute: Any) -> tuple[list[Any], list[Any]]:
    """The low and the high codes of a word's four bytes as two words each of two bfloat16, times 2^-126.

    The exponent field of a bfloat16 that holds a code's three lower bits counts as the code's does, with code 1
    a subnormal: a product with 2^126 makes the exact value. Three instructions a value, against twelve the plain
    way. `permute(word, selector)` picks bytes of a word (4 picks a zero byte), lowest first.
    """
    pairs = [permute(word, selector) for selector in (0x4140, 0x4342)]
    low = [((pair & 0x00070007) << 6) | ((pair & 0x00080008) << 12) for pair in pairs]
    high = [((pair & 0x00700070) << 2) | ((pair & 0x00800080) << 8) for pair in pairs]
    return low, high


def scale_powers(scale_bytes: Array) -> Array:
    """2^(byte - 127) in bfloat16; 255 gives NaN, and 0 counts as 0, as in the portable form."""
    scale = scale_bytes.astype(jnp.int32)
    bits = jnp.where(scale == NAN_SCALE, np.int32(0x7FC0), scale << 7)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def scaled(values_NJ: Array, scale_bytes: list[Array], spread: Any) -> Array:
    """Weights [N, J], bfloat16 and exact: values times the power of their scale, one [N] scale per 16 columns.

    `spread` gives a scale's [N] powers the shape [N, 16].
    """
    blocks = [
        values_NJ[:, b * BYTES_PER_BLOCK : (b + 1) * BYTES_PER_BLOCK] * spread(scale_powers(scale))
        for b, scale in enumerate(scale_bytes)
    ]
    return lax.concatenate(blocks, 1)


class _Word:
    """A 32-bit register with the operators that `word_values` uses."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __and__(self, mask: int) -> "_Word":
        return _Word(arith.andi(self.value, mgpu.c(mask, self.value.type)))

    def __or__(self, other: "_Word") -> "_Word":
        return _Word(arith.ori(self.value, other.value))

    def __lshift__(self, count: int) -> "_Word":
        return _Word(arith.shli(self.value, mgpu.c(count, self.value.type)))

    def permute(self, selector: int) -> "_Word":
        type_ = self.value.type
        return _Word(mgpu.utils.prmt(self.value, mgpu.c(0, type_), mgpu.c(selector, type_)))


def register_values(packed: Array) -> tuple[Array, Array]:
    """`code_values` by `word_values` on the registers that hold the bytes, which the interpreter does not have."""
    shape = packed.shape
    bfloat16: Any = jnp.bfloat16
    result = plgpu.ShapeDtypeStruct(shape, bfloat16, layout=LAYOUT)
    inline: Any = plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=(result, result))

    @inline
    def values(_: Any, array: Any) -> tuple[Any, Any]:
        word_type = ir.IntegerType.get_signless(32)
        halves = ir.VectorType.get((2,), ir.BF16Type.get())
        planes = np.empty_like(array.registers), np.empty_like(array.registers)
        for index, register in np.ndenumerate(array.registers):
            word = _Word(mgpu.utils.bitcast(register, word_type))
            for plane, words in zip(planes, word_values(word, _Word.permute), strict=True):
                plane[index] = mgpu.utils.vector_concat(
                    [mgpu.utils.bitcast(each.value, halves) for each in words]
                )
        low, high = (
            mgpu.FragmentedArray(_registers=plane, _layout=array.layout, _is_signed=None) for plane in planes
        )
        return low, high

    low, high = values(packed)  # pyright: ignore[reportCallIssue]
    largest = jnp.bfloat16(2.0**126)
    return low * largest, high * largest


def spread(powers_N: Array) -> Array:
    """[N] as [N, 16] in the layout of the bytes, for `scaled`."""
    wide = lax.broadcast_in_dim(powers_N, (powers_N.shape[0], BYTES_PER_BLOCK), (0,))
    return plgpu.layout_cast(wide, LAYOUT)
