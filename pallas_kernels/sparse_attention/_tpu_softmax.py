"""Online softmax inside a Pallas TPU kernel: attention of some rows over one block of keys after the other."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._typing import Array


def to_column(row_1N: Array) -> Array:
    """[1, N] -> [N, 1]."""
    return jnp.sum(
        jnp.where(_diagonal(row_1N.shape[1]), row_1N, jnp.zeros_like(row_1N)), axis=1, keepdims=True
    )


def to_row(column_N1: Array) -> Array:
    """[N, 1] -> [1, N]; infinities stay where they are."""
    return jnp.sum(
        jnp.where(_diagonal(column_N1.shape[0]), column_N1, jnp.zeros_like(column_N1)), axis=0, keepdims=True
    )


def _diagonal(size: int) -> Array:
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in range(2))
    return row == column


def attend_block(
    scale: float,
    q_RC: Array,
    kv_NC: Array,
    mask_RN: Array,
    maximum_ref: Any,
    total_ref: Any,
    sums_ref: Any,
    values_NV: Array | None = None,
) -> None:
    """One step of the online softmax over a block of keys.

    Where only some rows of the mask hold a key, `values_NV` are its finite values: what is not finite reaches the rows
    that hold it by their logits. The references hold the maximum and the sum of the exponentials so far [R, 1] and
    the weighted sum of the values [R, V].
    """
    exact = q_RC.dtype == jnp.bfloat16 and kv_NC.dtype == jnp.bfloat16
    if not exact:
        q_RC, kv_NC = q_RC.astype(jnp.float32), kv_NC.astype(jnp.float32)
    precision = lax.Precision.DEFAULT if exact else lax.Precision.HIGHEST
    logits_RN = np.float32(scale) * lax.dot_general(
        q_RC, kv_NC, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    logits_RN = jnp.where(mask_RN, logits_RN, np.float32(-np.inf))
    before_R1 = maximum_ref[...]
    maximum_R1 = jnp.maximum(before_R1, jnp.max(logits_RN, axis=1, keepdims=True))
    # -inf - (-inf) is NaN: a row without keys so far is shifted by 0.
    shift_R1 = jnp.where(maximum_R1 == np.float32(-np.inf), np.float32(0), maximum_R1)
    weights_RN = jnp.where(mask_RN, jnp.exp(logits_RN - shift_R1), np.float32(0))
    kept_R1 = jnp.exp(before_R1 - shift_R1)
    maximum_ref[...] = maximum_R1
    total_ref[...] = kept_R1 * total_ref[...] + jnp.sum(weights_RN, axis=1, keepdims=True)
    values_NV = (kv_NC if values_NV is None else values_NV.astype(kv_NC.dtype))[:, : sums_ref.shape[1]]

    def product(weights: Array) -> Array:
        return lax.dot_general(
            weights,
            values_NV,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    if exact:
        # Two bfloat16 numbers hold 16 bits of a weight: the error stays far below that of a bfloat16 result.
        high_RN = weights_RN.astype(jnp.bfloat16)
        low_RN = (weights_RN - high_RN.astype(jnp.float32)).astype(jnp.bfloat16)
        update_RV = product(high_RN) + product(low_RN)
    else:
        update_RV = product(weights_RN)
    sums_ref[...] = kept_R1 * sums_ref[...] + update_RV


def start(maximum_ref: Any, total_ref: Any, sums_ref: Any) -> None:
    maximum_ref[...] = jnp.full(maximum_ref.shape, -np.inf, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)


def finish(maximum_ref: Any, total_ref: Any, sums_ref: Any) -> tuple[Array, Array]:
    """o [R, V] and logsumexp [R, 1]; 0 and -inf for a row without a key."""
    total_R1 = total_ref[...]
    safe_R1 = jnp.where(total_R1 == np.float32(0), np.float32(1), total_R1)
    # The maximum of a row without a key is still -inf.
    return sums_ref[...] / safe_R1, maximum_ref[...] + jnp.log(safe_R1)
