"""What kernels of a compiled program move in main memory: their own estimate, or what their operands tell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moe28t_jax.planning.compile.hlo import Instruction, Shape

_ESTIMATE = re.compile(r'"bytes_accessed":"?(\d+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FETCHING = re.compile(r"/sparse_attention_(tensor|rows)/")
_GROUPED = "mxfp4_grouped_"
"""How the kernels are called that multiply rows with the experts of their group."""


def kernel_bytes(kernel: Instruction, operands: Sequence[Instruction], experts_share: float) -> int | None:
    """Bytes that a custom call reads and writes; None for one that reads its operands, writes its results, and of
    which nothing else is known.

    Kernels for TPUs carry an estimate; those for GPUs do not. Of a stack of experts either reads one layer, and of its
    experts those that have rows, the share `experts_share`: it goes through tiles of rows and fetches the expert of
    each. Of a cache, sparse attention on GPUs fetches the rows that are selected. A library's matrix product has a
    workspace besides its result, which counts nothing.
    """
    unread = round((1.0 - experts_share) * _layer_bytes(kernel, operands))
    estimate = _ESTIMATE.search(kernel.attributes)
    if estimate is not None:
        return int(estimate[1]) - unread
    target = _TARGET.search(kernel.attributes)
    if target is None:
        return None
    if target[1].startswith("__cublas"):
        return sum(operand.memory_bytes for operand in operands) + kernel.shapes[0].memory_bytes
    if not target[1].startswith("mosaic_gpu"):
        return None
    moved = kernel.memory_bytes
    if _GROUPED in kernel.op_name:
        rows = [shape for operand in operands for shape in operand.shapes if not _is_weight(shape)]
        return moved + sum(shape.memory_bytes for shape in rows) + _layer_bytes(kernel, operands) - unread
    if _FETCHING.search(kernel.op_name):
        queries, cache, indices, *others = operands
        fetched = indices.shapes[0].elements * cache.bytes // cache.shapes[0].sizes[0]
        moved += queries.memory_bytes + indices.memory_bytes + sum(other.memory_bytes for other in others)
        return moved + min(cache.memory_bytes, fetched)
    return None


def _layer_bytes(kernel: Instruction, operands: Sequence[Instruction]) -> int:
    """Of a grouped matmul the codes and scales [(layers,) experts, in, out] of all experts of a layer."""
    if _GROUPED not in kernel.op_name:
        return 0
    weights = [shape for operand in operands for shape in operand.shapes if _is_weight(shape)]
    return sum(shape.bytes // (shape.sizes[0] if len(shape.sizes) == 4 else 1) for shape in weights)


def _is_weight(shape: Shape) -> bool:
    return len(shape.sizes) in (3, 4) and shape.dtype.startswith(("u8", "f4", "f8"))
