"""Lightning indexer: index scores and their exact streaming top-k."""

from pallas_kernels.index_select.api import scores_at, select
from pallas_kernels.index_select.keys import QuantizedKeys, dequantize_keys, quantize_keys
from pallas_kernels.index_select.reference import MASKED_SCORE, scores
from pallas_kernels.index_select.shapes import SHAPES, IndexSelectShape

__all__ = [
    "MASKED_SCORE",
    "SHAPES",
    "IndexSelectShape",
    "QuantizedKeys",
    "dequantize_keys",
    "quantize_keys",
    "scores",
    "scores_at",
    "select",
]
