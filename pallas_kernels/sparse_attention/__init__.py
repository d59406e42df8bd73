"""Latent attention over selected keys: prefill, decode and backward."""

from pallas_kernels.sparse_attention.api import merge, sparse_attention
from pallas_kernels.sparse_attention.shapes import SHAPES, SparseAttentionShape

__all__ = ["SHAPES", "SparseAttentionShape", "merge", "sparse_attention"]
