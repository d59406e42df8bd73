"""Sparse attention as Pallas kernels for NVIDIA GPUs (Mosaic GPU): Hopper and Blackwell.

Compiled ahead of time for sm_90a and sm_100a and interpreted on a CPU; not yet run on a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.mxfp4_matmul.gpu import _has_tensor_memory
from pallas_kernels.sparse_attention import _gpu_rows, _gpu_tensor, xla
from pallas_kernels.sparse_attention import rows as key_rows
from pallas_kernels.sparse_attention._gpu_rows import CHANNELS, Options
from pallas_kernels.sparse_attention.api import merge


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def _attention(
    options: Options,
    q_BQHC: Array,
    kv_latent: Array,
    rows_BQN: Array,
    exists_BQN: Array,
    paged: bool,
    tensor: bool,
) -> tuple[Array, Array]:
    batch, queries, heads, width = q_BQHC.shape
    lead = batch, queries, heads
    rows_BQN = rows_BQN.astype(jnp.int32)
    if not paged:
        first_B = jnp.arange(batch, dtype=jnp.int32) * kv_latent.shape[1]
        rows_BQN = rows_BQN + first_B[:, None, None]
    rows_RN = jnp.where(exists_BQN, rows_BQN, -1).reshape(batch * queries, -1)
    more = -width % CHANNELS
    q_RHC = jnp.pad(q_BQHC.reshape(-1, heads, width), ((0, 0), (0, 0), (0, more)))
    kv_SC = jnp.pad(kv_latent.reshape(-1, width), ((0, 0), (0, more)))
    value_dim = options.value_dim
    padded = options._replace(value_dim=value_dim + -value_dim % CHANNELS)
    attention = _gpu_tensor.attention if tensor else _gpu_rows.attention
    o, logsumexp = attention(padded, q_RHC, kv_SC, rows_RN)
    if o.shape[0] > 1:
        with jax.named_scope("merge"):
            o, logsumexp = merge(o, logsumexp)
    o_BQHV = o.reshape(*lead, -1)[..., :value_dim].astype(q_BQHC.dtype)
    return o_BQHV, logsumexp.reshape(lead)


def _forward(
    options: Options,
    q_BQHC: Array,
    kv_latent: Array,
    rows_BQN: Array,
    exists_BQN: Array,
    paged: bool,
    tensor: bool,
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    inputs = q_BQHC, kv_latent, rows_BQN, exists_BQN
    return _attention(options, *inputs, paged, tensor), inputs


def _backward(
    options: Options,
    paged: bool,
    tensor: bool,
    residuals: tuple[Array, ...],
    cotangents: tuple[Array, Array],
) -> tuple[Any, ...]:
    del tensor
    return xla.backward(options.scale, options.value_dim, paged, residuals, cotangents)


_attention.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("scale", "value_dim", "tensor", "interpret"))
def sparse_attention(
    q_BQHC: Float[Array, "B Q H C"],
    kv_latent: Float[Array, "rows keys C"],
    indices_BQN: Int[Array, "B Q N"],
    scale: float,
    value_dim: int,
    page_table_BP: Int[Array, "B pages"] | None = None,
    tensor: bool | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B Q H V"], Float[Array, "B Q H"]]:
    """`pallas_kernels.sparse_attention.sparse_attention`, every query reading its own rows of the cache.

    The cache is read in place where its channels are a multiple of 64, and padded to one, a copy, where they are
    not. The backward pass is that of the portable form. `interpret` as in `plgpu.kernel`.

    Raises:
      NotImplementedError: for dtypes other than bfloat16 and float32, and for caches of 2^31 rows or more.
    """
    for name, array in (("q_latent", q_BQHC), ("kv_latent", kv_latent)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(
                f"the GPU kernel of sparse attention takes bfloat16 and float32 and got {name} of {array.dtype}; "
                "cast it, or pass another implementation"
            )
    count, keys, width = kv_latent.shape
    if count * keys >= 2**31:
        raise NotImplementedError(
            f"the GPU kernel of sparse attention numbers rows of the cache with 31 bits, too few for {count} x "
            f"{keys}; shard the cache, or pass another implementation"
        )
    can_multiply = (
        q_BQHC.dtype == kv_latent.dtype == jnp.bfloat16
        and width <= _gpu_tensor.MOST_WIDTH
        and value_dim <= _gpu_tensor.MOST_VALUES
        and not _has_tensor_memory()
    )
    if tensor and not can_multiply:
        raise NotImplementedError(
            f"the GPU kernel of sparse attention for tensor cores takes bfloat16 on Hopper, at most "
            f"{_gpu_tensor.MOST_WIDTH} channels and {_gpu_tensor.MOST_VALUES} values, and got {q_BQHC.dtype}, "
            f"{kv_latent.dtype}, {width} channels and {value_dim} values; pass tensor=None or False"
        )
    if tensor is None:
        tensor = can_multiply
    options = Options(scale, value_dim, interpret)
    with jax.named_scope("sparse_attention"):
        rows_BQN, exists_BQN = key_rows.physical_rows(indices_BQN, kv_latent, page_table_BP)
        arrays = match_varying(q_BQHC, kv_latent, rows_BQN, exists_BQN)
        return _attention(options, *arrays, page_table_BP is not None, tensor)
