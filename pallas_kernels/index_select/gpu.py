"""Index selection for NVIDIA Hopper GPUs: a Pallas (Mosaic GPU) kernel scores tiles of keys, XLA ranks them.

The ranking, with its tie rule, pages, quantized keys and memory, is that of the portable form: the best of each few
tiles of scores are merged into a list of candidates. What is replaced is the scoring of a tile, of which XLA would
write the products of all heads, 32 times as much as the scores, to memory. A selection in the kernel itself, by
counting scores above a threshold, would compute every score as many times as it counts.

Compiled ahead of time for sm_90a and interpreted on a CPU; not yet run on a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels.index_select import _gpu_scores, xla
from pallas_kernels.index_select.keys import Keys, QuantizedKeys
from pallas_kernels.index_select.shapes import QUERY_BLOCK
from pallas_kernels.mxfp4_matmul.gpu import _has_tensor_memory

_LARGEST_TILE, _SMALLEST_TILE = 8192, 512
_SCORE_BYTES = 8 * 2**20
_KEY_BYTES = 16 * 2**20
"""Of the scores and the keys of a tile, which is copied for the kernel: small beside the keys."""


def key_tile(batch: int, rows: int, channels: int) -> int:
    """Keys of every sequence that are scored at once for so many queries."""
    tile = _LARGEST_TILE
    while tile > _SMALLEST_TILE and (
        4 * rows * tile > _SCORE_BYTES or 2 * batch * channels * tile > _KEY_BYTES
    ):
        tile //= 2
    return tile


def _refuse(q_index: Array, k_index: Keys, weights: Array) -> None:
    kinds = {q_index.dtype.name, *([] if isinstance(k_index, QuantizedKeys) else [k_index.dtype.name])}
    if kinds != {"bfloat16"} or weights.dtype == jnp.float64:
        raise NotImplementedError(
            "the GPU kernel of index scores takes bfloat16 queries, and keys of bfloat16, fp8 or fp4, and got "
            f"{' and '.join(sorted(kinds))} with weights of {weights.dtype}; cast them, or pass another "
            "implementation"
        )
    if q_index.shape[2] > 128 or q_index.shape[3] > 256:
        raise NotImplementedError(
            "the GPU kernel of index scores holds at most 128 heads and 256 channels and got "
            f"{q_index.shape[2]} and {q_index.shape[3]}; pass another implementation"
        )
    if _has_tensor_memory():
        raise NotImplementedError(
            "the GPU kernel of index scores multiplies with instructions that Hopper has and Blackwell has not; "
            "pass another implementation"
        )


@functools.cache
def _scores_of(interpret: Any) -> Any:
    """One function for each way to run, since tracing is cached by function."""
    return functools.partial(_gpu_scores.tile_scores, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("top_k", "axis_name", "use_relu", "tile", "interpret"))
def select(
    q_index: Float[Array, "B Q H D"],
    k_index: Keys,
    weights: Float[Array, "B Q H"],
    query_positions: Int[Array, "B Q"],
    top_k: int,
    page_table: Int[Array, "B pages"] | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    use_relu: bool = True,
    tile: int | None = None,
    interpret: Any = None,
) -> Int[Array, "B Q top_k"]:
    """`pallas_kernels.index_select.select`, a tile of keys scored by a kernel; its size does not change the result.

    `interpret` as in `plgpu.kernel`.

    Raises:
      NotImplementedError: for other types than bfloat16, fp8 and fp4, more than 128 heads or 256 channels, and
        GPUs other than Hopper.
    """
    _refuse(q_index, k_index, weights)
    batch, queries, _, channels = q_index.shape
    rows = batch * min(queries, max(1, QUERY_BLOCK // max(1, batch)))
    return xla.select(
        q_index,
        k_index,
        weights,
        query_positions,
        top_k,
        page_table,
        axis_name,
        use_relu,
        key_tile=tile or key_tile(batch, rows, channels),
        scores_of=_scores_of(interpret),
    )
