"""Where a kernel's operands lie on TPUs."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._typing import Array


def in_hbm(array: Array, interpret: Any) -> Array:
    """The array, which the compiler is to leave in main memory for a kernel that reads small parts of it.

    XLA otherwise fetches an operand that fits into VMEM there as a whole: of a stack of layers every layer, each time
    that one is needed. `interpret` as in `pallas_call`: an interpreter has one memory.
    """
    return array if interpret else pltpu.with_memory_space_constraint(array, pltpu.HBM)
