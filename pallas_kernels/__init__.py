"""Accelerator kernels for hybrid linear/sparse attention models, in JAX alone.

Every operation is one subpackage, imported explicitly:

    from pallas_kernels import delta_rule, index_select, mxfp4_matmul, sparse_attention

Importing `pallas_kernels` itself loads nothing. `prefer(*names)` is a context in which operations try these
implementations before their defaults.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels._dispatch import prefer

__all__ = ["prefer"]


def __getattr__(name: str) -> Any:
    if name == "prefer":
        from pallas_kernels._dispatch import prefer

        return prefer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
