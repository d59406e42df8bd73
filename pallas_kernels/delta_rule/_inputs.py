"""What every implementation does to its inputs before it computes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._typing import Array, Bool, Float, Int
from pallas_kernels._varying import match_varying


class Inputs(NamedTuple):
    """Inputs in the compute dtype, with invalid tokens made neutral.

    A neutral token (k = v = q = 0, log_decay = 0, beta = 0) leaves the state as it is and reads zero.
    """

    q_BTHK: Float[Array, "B T H K"]
    k_BTHK: Float[Array, "B T H K"]
    v_BTHV: Float[Array, "B T H V"]
    log_decay_BTHK: Float[Array, "B T H K"]
    beta_BTH: Float[Array, "B T H"]
    state_BHKV: Float[Array, "B H K V"]
    reset_BT: Bool[Array, "B T"] | None


def compute_dtype(*arrays: Array | None) -> Any:
    """float64 if any array is float64, else float32 (bfloat16 and float16 compute in float32)."""
    return jnp.float64 if any(a is not None and a.dtype == jnp.float64 for a in arrays) else jnp.float32


def valid_tokens(lengths_B: Int[Array, " B"], tokens: int) -> Bool[Array, "B T"]:
    """True for the first `lengths_B` of `tokens` positions of each row."""
    return jnp.arange(tokens, dtype=lengths_B.dtype)[None, :] < lengths_B[:, None]


def segment_starts(segment_ids_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where the id differs from the token before; the first token continues the initial state."""
    changed = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    return jnp.pad(changed, ((0, 0), (1, 0)))


def prepare(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    initial_state_BHKV: Float[Array, "B H K V"] | None,
    lengths_B: Int[Array, " B"] | None,
    segment_ids_BT: Int[Array, "B T"] | None,
) -> Inputs:
    """Cast to the compute dtype, neutralise tokens beyond `lengths`, find the tokens that reset the state."""
    dtype = compute_dtype(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, initial_state_BHKV)
    batch, tokens, heads, key_dim = k_BTHK.shape
    per_token = [q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH]
    if lengths_B is not None:
        valid_BT = valid_tokens(lengths_B, tokens)
        # A select, not a product: padding may hold NaN.
        per_token = [
            jnp.where(valid_BT.reshape(batch, tokens, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
            for x in per_token
        ]
    q, k, v, log_decay, beta = (x.astype(dtype) for x in per_token)
    if initial_state_BHKV is None:
        state = jnp.zeros((batch, heads, key_dim, v.shape[-1]), dtype)
    else:
        state = initial_state_BHKV.astype(dtype)
    # A state of zeros is the same on all devices, and would not stay so in a loop over tokens that are not.
    q, k, v, log_decay, beta, state = match_varying(q, k, v, log_decay, beta, state)
    reset_BT = None
    if segment_ids_BT is not None:
        reset_BT = segment_starts(segment_ids_BT)
        if lengths_B is not None:
            # Ids of padding are arbitrary; a reset there would erase the final state.
            reset_BT = reset_BT & valid_tokens(lengths_B, tokens)
    return Inputs(q, k, v, log_decay, beta, state, reset_BT)


def einsum(subscripts: str, *operands: Array) -> Array:
    """`jnp.einsum` at full precision of the operands' dtype."""
    return jnp.einsum(
        subscripts, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=operands[0].dtype
    )
