"""The vocabulary divided over `tensor`: looking tokens up, and how likely given ones are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moe28t_jax.parallel.rules import batch_layout


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rows(table_VD: Array, ids_BT: Array, vocabulary: int, dtype: str) -> Array:
    """`table_VD[ids_BT]`, of whose gradient the terms are added in float32: a frequent token has thousands of them, and
    a sum of bfloat16 stops growing after a few hundred."""
    return table_VD[ids_BT]


def _rows_forward(
    table_VD: Array, ids_BT: Array, vocabulary: int, dtype: str
) -> tuple[Array, tuple[Array, ...]]:
    return table_VD[ids_BT], (ids_BT,)


def _rows_backward(
    vocabulary: int, dtype: str, kept: tuple[Array, ...], slope_BTD: Array
) -> tuple[Array, None]:
    (ids_BT,) = kept
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    sums_VD = jnp.zeros((vocabulary, slope_BTD.shape[-1]), wide)
    return sums_VD.at[ids_BT].add(slope_BTD.astype(wide)).astype(dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def _look_up(table_VD: Array, ids_BT: Array) -> Array:
    return _rows(table_VD, ids_BT, table_VD.shape[0], table_VD.dtype.name)


def embed(table_VD: Float[Array, "V D"], token_ids_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the table by token id. On a mesh each device looks up the ids that it holds and the rows are added, which
    is exact because all but one are zero; the table is never gathered."""
    where = batch_layout(token_ids_BT.shape[0])
    if where is None:
        return _look_up(table_VD, token_ids_BT)
    tokens = where.token_axes(token_ids_BT.shape[1])

    def local(table_VD: Array, ids_BT: Array) -> Array:
        held = table_VD.shape[0]
        ids_BT = ids_BT - (jax.lax.axis_index("tensor") * held).astype(ids_BT.dtype)
        mine_BT = (ids_BT >= 0) & (ids_BT < held)
        rows_BTD = _look_up(table_VD, jnp.clip(ids_BT, 0, held - 1))
        return jax.lax.psum(jnp.where(mine_BT[..., None], rows_BTD, jnp.zeros((), rows_BTD.dtype)), "tensor")

    return jax.shard_map(
        local,
        in_specs=(P("tensor", None), P(where.rows, tokens)),
        out_specs=P(where.rows, tokens, None),
        check_vma=False,
    )(table_VD, token_ids_BT)


def log_probabilities(
    logits_BTV: Float[Array, "B T V"], token_ids_BT: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Natural logarithm of softmax(logits) at the given ids, in the dtype of the logits: minus the cross entropy.

    An id outside of the vocabulary, such as the customary -100 of what is no target, gives 0 and no gradient. On a mesh
    each device reads its part of the vocabulary; four numbers per token are exchanged. Differentiable.
    """
    where = batch_layout(token_ids_BT.shape[0])
    tokens = () if where is None else where.token_axes(token_ids_BT.shape[1])

    def local(logits_BTV: Array, ids_BT: Array) -> Array:
        held = logits_BTV.shape[-1]
        highest_BT = jax.lax.stop_gradient(jnp.max(logits_BTV, axis=-1))
        if where is not None:
            highest_BT = jax.lax.pmax(highest_BT, "tensor")
            ids_BT = ids_BT - (jax.lax.axis_index("tensor") * held).astype(ids_BT.dtype)
        shifted_BTV = logits_BTV - highest_BT[..., None]
        mine_BT = (ids_BT >= 0) & (ids_BT < held)
        chosen_BT1 = jnp.take_along_axis(shifted_BTV, jnp.clip(ids_BT, 0, held - 1)[..., None], axis=-1)
        chosen_BT = jnp.where(mine_BT, chosen_BT1[..., 0], jnp.zeros((), shifted_BTV.dtype))
        total_BT = jnp.sum(jnp.exp(shifted_BTV), axis=-1)
        found_BT = mine_BT.astype(jnp.int32)
        if where is not None:
            chosen_BT, total_BT, found_BT = jax.lax.psum((chosen_BT, total_BT, found_BT), "tensor")
        return jnp.where(found_BT > 0, chosen_BT - jnp.log(total_BT), jnp.zeros((), shifted_BTV.dtype))

    if where is None:
        return local(logits_BTV, token_ids_BT)
    return jax.shard_map(
        local,
        in_specs=(P(where.rows, tokens, "tensor"), P(where.rows, tokens)),
        out_specs=P(where.rows, tokens),
        check_vma=False,
    )(logits_BTV, token_ids_BT)
