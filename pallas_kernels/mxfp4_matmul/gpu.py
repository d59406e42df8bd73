"""(Grouped) matmul with MXFP4 weights as a Pallas kernel for NVIDIA Hopper and Blackwell GPUs (Mosaic GPU).

Layout: "packed_nk", the bytes of a checkpoint. They lie along the contracted axis, as the tensor core's operands
do, so one byte makes two neighbouring weights in the thread that loaded it, and the smallest bulk copy (a row of
32 or 64 bytes) is one step of the product. "packed_kn" would need a transposition between threads or single-byte
loads, and "float4_kn" a chip that converts 4-bit floats, which Hopper does not.

Products: the unpacked weights are exact in bfloat16. bfloat16 rows, and rows rounded to MXFP8, are multiplied as
they are, float16 rows as two and float32 rows as three bfloat16 parts that sum to them exactly, all accumulated
in the tensor core's float32. The rows enter exactly; what remains is the accumulator's error, of about 2^-23 of
the sum of the products' magnitudes per addition, because tensor cores cut sums off where the processor rounds.

What runs where: the whole kernel runs in JAX's GPU interpreter, which takes the copies, barriers, `wgmma` and
`tcgen05` it is made of and detects races, but not what it cannot see: layouts of registers and of memories, and that
products run on while the next weights are unpacked. Compiled ahead of time for sm_90a and sm_100a; not yet run on a
GPU.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array
from pallas_kernels.mxfp4_matmul._gpu_kernel import Options, grouped_products
from pallas_kernels.mxfp4_matmul._gpu_plan import COLUMNS
from pallas_kernels.mxfp4_matmul._packed import as_one_group, differentiable
from pallas_kernels.mxfp4_matmul.activations import Activation
from pallas_kernels.mxfp4_matmul.quantize import fake_quantize_mxfp8
from pallas_kernels.mxfp4_matmul.tensor import MXFP4Tensor


def grouped_matmul(
    x: Array,
    w: Any,
    group_sizes: Array,
    layer: Array | None,
    activation_dtype: Any,
    interpret: Any = None,
) -> Array:
    """See `api.grouped_matmul`; arguments are already checked. `interpret`: None, or `InterpretGPUParams`.

    Differentiable in x by the same kernel with the weight transposed, which unpacks the same bytes.

    Raises:
      NotImplementedError: for float64 rows, float weights, layouts other than "packed_nk", inputs or outputs
        that are no multiple of 128, or a GPU that is neither Hopper nor Blackwell.
    """
    _refuse(x, w)
    options = Options(None, False, activation_dtype is not None, _has_tensor_memory(), interpret)
    return _grouped(options, _activations(x, activation_dtype), (w,), group_sizes, layer)


def grouped_glu(
    x: Array,
    w_gate: Any,
    w_up: Any,
    group_sizes: Array,
    activation: Activation,
    layer: Array | None,
    activation_dtype: Any,
    interpret: Any = None,
) -> Array:
    """See `api.grouped_glu`; arguments are already checked. `interpret`: None, or `InterpretGPUParams`.

    Differentiable in x: the backward pass multiplies by each weight, and by each transposed weight.

    Raises:
      NotImplementedError: as `grouped_matmul`.
    """
    _refuse(x, w_gate, w_up)
    options = Options(activation, False, activation_dtype is not None, _has_tensor_memory(), interpret)
    return _grouped(options, _activations(x, activation_dtype), (w_gate, w_up), group_sizes, layer)


def matmul(
    x: Array, w: MXFP4Tensor, layer: Array | None, activation_dtype: Any, interpret: Any = None
) -> Array:
    """See `api.matmul`: one group that holds every row."""
    return as_one_group(grouped_matmul, x, w, layer, activation_dtype, interpret)


def _activations(x: Array, activation_dtype: Any) -> Array:
    return x if activation_dtype is None else fake_quantize_mxfp8(x)


def _refuse(x: Array, *weights: Any) -> None:
    if x.dtype == jnp.float64:
        raise NotImplementedError(
            "the GPU kernels compute in float32 and got float64; pass float32, or another implementation"
        )
    for w in weights:
        if not isinstance(w, MXFP4Tensor):
            raise NotImplementedError(
                f"the GPU kernels read packed weights and got a {w.dtype} array; quantise it, or pass another "
                "implementation"
            )
        if w.layout != "packed_nk":
            raise NotImplementedError(
                f"the GPU kernels read weights of the layout packed_nk and got {w.layout!r}; "
                'change it once, after loading, with w.to_layout("packed_nk"), or pass another implementation'
            )
        outputs, inputs = w.shape[-2:]
        if outputs % COLUMNS or inputs % COLUMNS:
            raise NotImplementedError(
                f"the GPU kernels read {COLUMNS} inputs and outputs at a time and got {inputs} inputs and "
                f"{outputs} outputs; pad both to a multiple of {COLUMNS} with zeros, or pass another "
                "implementation"
            )


# The data sheets' names of GPUs of compute capability 9.0 (H100, H200, H20, H800, GH200) and 10 (B200, B300, GB200).
_HOPPER, _BLACKWELL = (re.compile(rf"\bG?{letter}\d{{2,3}}\b") for letter in "HB")


def _has_tensor_memory() -> bool:
    """Whether tensor cores accumulate as Blackwell's do, or as Hopper's.

    The GPU is that of the mesh in use, as in Pallas' own lowering, which is all that tells of it ahead of time; without
    a mesh the default device, and where that is no GPU, a Hopper.

    Raises:
      NotImplementedError: for other GPUs.
    """
    device: Any = jax.devices()[0]
    described: Any = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.device_kind != device.device_kind:
        device = described
    if device.platform not in ("gpu", "cuda"):
        return False
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        capability = (
            "10.0"
            if _BLACKWELL.search(device.device_kind)
            else "9.0"
            if _HOPPER.search(device.device_kind)
            else "unknown"
        )
    if not capability.startswith(("9.", "10.")):
        raise NotImplementedError(
            "the GPU kernels multiply with instructions of Hopper and of Blackwell (compute capability 9.0 and 10) and "
            f"got a {device.device_kind} ({capability}); pass another implementation"
        )
    return capability.startswith("10.")


_grouped = differentiable(grouped_products)
