"""(Grouped) matmul with MXFP4 weights that stay packed in memory, and the quantisation around it."""

from pallas_kernels.mxfp4_matmul._codec import BLOCK
from pallas_kernels.mxfp4_matmul.activations import situ_glu, swiglu
from pallas_kernels.mxfp4_matmul.api import grouped_glu, grouped_matmul, matmul
from pallas_kernels.mxfp4_matmul.quantize import fake_quantize, fake_quantize_mxfp8, quantize
from pallas_kernels.mxfp4_matmul.shapes import SHAPES, GroupedMatmulShape
from pallas_kernels.mxfp4_matmul.tensor import LAYOUTS, MXFP4Tensor

__all__ = [
    "BLOCK",
    "LAYOUTS",
    "SHAPES",
    "GroupedMatmulShape",
    "MXFP4Tensor",
    "fake_quantize",
    "fake_quantize_mxfp8",
    "grouped_glu",
    "grouped_matmul",
    "matmul",
    "quantize",
    "situ_glu",
    "swiglu",
]
