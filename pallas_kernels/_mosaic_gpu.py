"""What Mosaic GPU does differently in the versions of JAX that the kernels run on."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._typing import Array


def store(ref: Any, value: Array) -> None:
    """Stores into a reference, whatever order of threads and banks that takes."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        # JAX before 0.12.
        ref[...] = value
