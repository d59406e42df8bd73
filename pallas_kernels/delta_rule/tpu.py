"""The gated delta rule as Pallas kernels for TPU (Mosaic): v5p, v6e and tpu7x."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._typing import Array, Bool, Float, Int
from pallas_kernels._varying import match_varying
from pallas_kernels.delta_rule import _inputs, _tpu_sequence, _tpu_step
from pallas_kernels.delta_rule._map_gradient import Tokens, with_portable_gradient
from pallas_kernels.delta_rule._tpu_sequence import LANES, Options


def _refuse_float64(*arrays: Array | None) -> None:
    if _inputs.compute_dtype(*arrays) == jnp.float64:
        raise NotImplementedError(
            "the TPU kernels compute in float32 and got float64; pass float32, or another implementation"
        )


def _heads_first(*arrays: Array) -> list[Array]:
    """[B, T, H, K] -> [B, H, T, K], K padded with zeros to whole lanes: such channels leave no trace."""
    return [
        jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, 0), (0, -x.shape[-1] % LANES))) for x in arrays
    ]


def _pad_state(state_BHKV: Array) -> Array:
    """In float32, with the channels that `_heads_first` adds."""
    added = ((0, -size % LANES) for size in state_BHKV.shape[2:])
    return jnp.pad(state_BHKV.astype(jnp.float32), ((0, 0), (0, 0), *added))


def _tokens_in_lanes(x: Array) -> Array:
    """[B, T, H] -> [B, H, T] in float32, T padded with zeros to whole lanes."""
    x = jnp.swapaxes(x.astype(jnp.float32), 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % LANES)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sequence(
    options: Options,
    inputs: tuple[Array, Array, Array, Array, Array, Array],
    lengths_B: Array,
    reset_B1T: Array | None,
) -> tuple[Array, Array, Array | None]:
    if inputs[0].shape[2] == 1:
        # The chunk kernel would spend 64 tokens on one. The first token of a call never resets the state.
        *tokens, state = inputs
        valid_B = lengths_B > 0
        q, k, v, log_decay, beta = (
            jnp.where(valid_B.reshape(-1, *(1,) * (x.ndim - 2)), x[:, :, 0], jnp.zeros((), x.dtype))
            for x in tokens
        )
        o, final = _tpu_step.step(q, k, v, log_decay, beta, state, options.interpret)
        return o[:, :, None], final, final[:, None] if options.boundaries else None
    o, final, boundaries = _tpu_sequence.forward(options, *inputs, lengths_B, reset_B1T)
    assert o is not None
    return o, final, boundaries


def _sequence_forward(
    options: Options,
    inputs: tuple[Array, Array, Array, Array, Array, Array],
    lengths_B: Array,
    reset_B1T: Array | None,
) -> tuple[tuple[Array, Array, Array | None], tuple[Any, ...]]:
    o, final, boundaries = _sequence(options._replace(boundaries=True), inputs, lengths_B, reset_B1T)
    return (o, final, boundaries if options.boundaries else None), (inputs, lengths_B, reset_B1T, boundaries)


def _sequence_backward(
    options: Options, residuals: tuple[Any, ...], ct: tuple[Array, Array, Array | None]
) -> tuple[Any, ...]:
    inputs, lengths_B, reset_B1T, boundaries = residuals
    gradients = _tpu_sequence.backward(options, inputs, lengths_B, reset_B1T, boundaries, *ct)
    no_reset = None if reset_B1T is None else np.zeros(reset_B1T.shape, jax.dtypes.float0)
    return gradients, np.zeros(lengths_B.shape, jax.dtypes.float0), no_reset


_sequence.defvjp(_sequence_forward, _sequence_backward)


def _lengths(lengths_B: Array | None, batch: int, tokens: int) -> Array:
    if lengths_B is None:
        return jnp.full((batch,), tokens, jnp.int32)
    return jnp.minimum(lengths_B.astype(jnp.int32), jnp.int32(tokens))


def _resets(segment_ids_BT: Array, lengths_B: Array) -> Array:
    """[B, 1, T] float32, 1 where the state is reset, T padded to whole lanes."""
    # Ids of padding are arbitrary; a reset there would erase the final state.
    valid_BT = _inputs.valid_tokens(lengths_B, segment_ids_BT.shape[1])
    return _tokens_in_lanes((_inputs.segment_starts(segment_ids_BT) & valid_BT)[:, :, None])


@functools.partial(jax.jit, static_argnames=("return_boundary_states", "interpret"))
def delta_rule(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    initial_state_BHKV: Float[Array, "B H K V"] | None = None,
    lengths_B: Int[Array, " B"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    return_boundary_states: bool = False,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """`pallas_kernels.delta_rule.delta_rule`, the state in vector memory from the first chunk to the last.

    One token takes the path of `step`. K and V are whole numbers of 128 lanes, or are padded to them.
    `interpret` as in `pallas_call`.

    Raises:
      NotImplementedError: for float64.
    """
    _refuse_float64(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, initial_state_BHKV)
    batch, tokens, heads, key_dim = k_BTHK.shape
    value_dim = v_BTHV.shape[-1]
    q, k, v, log_decay = _heads_first(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK)
    if initial_state_BHKV is None:
        state = jnp.zeros((batch, heads, k.shape[-1], v.shape[-1]), jnp.float32)
    else:
        state = _pad_state(initial_state_BHKV)
    lengths = _lengths(lengths_B, batch, tokens)
    reset = None if segment_ids_BT is None else _resets(segment_ids_BT, lengths)
    options = Options(return_boundary_states, interpret)
    # Outside of the custom gradient: what all devices share receives the sum of their gradients.
    *inputs, lengths = match_varying(q, k, v, log_decay, _tokens_in_lanes(beta_BTH), state, lengths)
    o, final, boundaries = _sequence(options, tuple(inputs), lengths, reset)
    o = jnp.swapaxes(o, 1, 2)
    o, final = o[..., :value_dim], final[:, :, :key_dim, :value_dim]
    if return_boundary_states:
        assert boundaries is not None
        return o, final, boundaries[..., :key_dim, :value_dim]
    return o, final


@with_portable_gradient
def _segment_map(interpret: Any, tokens: Tokens, lengths_B: Array | None) -> tuple[Array, Array]:
    k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH = tokens
    batch, count, _, key_dim = k_BTHK.shape
    k, v, log_decay = _heads_first(k_BTHK, v_BTHV, log_decay_BTHK)
    lengths = _lengths(lengths_B, batch, count)
    beta = _tokens_in_lanes(beta_BTH)
    options = Options(False, interpret)
    _, maps, _ = _tpu_sequence.forward(options, None, k, v, log_decay, beta, None, lengths, None)
    padded = k.shape[-1]
    return maps[..., :key_dim, :key_dim], maps[..., :key_dim, padded : padded + v_BTHV.shape[-1]]


@functools.partial(jax.jit, static_argnames=("interpret",))
def segment_map(
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    lengths_B: Int[Array, " B"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """`pallas_kernels.delta_rule.segment_map`: the forward kernel on the columns [M | S] at once.

    Its gradient is computed by the portable form. `interpret` as in `pallas_call`.

    Raises:
      NotImplementedError: for float64.
    """
    _refuse_float64(k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH)
    # Outside of the custom gradient: what all devices share receives the sum of their gradients.
    given = (k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH)
    k, v, log_decay, beta, *lengths = match_varying(*given, *(() if lengths_B is None else (lengths_B,)))
    return _segment_map(interpret, (k, v, log_decay, beta), lengths[0] if lengths else None)


@functools.partial(jax.jit, static_argnames=("interpret",))
def step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    log_decay_BHK: Float[Array, "B H K"],
    beta_BH: Float[Array, "B H"],
    state_BHKV: Float[Array, "B H K V"],
    interpret: Any = False,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """`pallas_kernels.delta_rule.step`; the state in place where it is donated. Not differentiable.

    K and V are whole numbers of 128 lanes, or are padded to them, which copies the state.

    Raises:
      NotImplementedError: for float64.
    """
    _refuse_float64(q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_BHKV)
    key_dim, value_dim = state_BHKV.shape[2:]
    q, k, v, log_decay = (
        jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[-1] % LANES))) for x in (q_BHK, k_BHK, v_BHV, log_decay_BHK)
    )
    state = _pad_state(state_BHKV)
    o, state = _tpu_step.step(q, k, v, log_decay, beta_BH, state, interpret)
    return o[..., :value_dim], state[:, :, :key_dim, :value_dim]


@functools.partial(jax.jit, static_argnames=("norm_epsilon", "interpret"))
def fused_step(
    x_B3HK: Float[Array, "B 3 H K"],
    window_BW3HK: Float[Array, "B W 3 H K"],
    taps_J3HK: Float[Array, "J 3 H K"],
    log_decay_BHK: Float[Array, "B H K"],
    beta_BH: Float[Array, "B H"],
    gate_BHK: Float[Array, "B H K"],
    gain_K: Float[Array, " K"],
    state_BHKV: Float[Array, "B H K K"],
    active_B: Bool[Array, " B"] | None = None,
    norm_epsilon: float = 1e-5,
    interpret: Any = False,
) -> tuple[Float[Array, "B H K"], Float[Array, "B H K K"], Float[Array, "B W 3 H K"]]:
    """`pallas_kernels.delta_rule.fused_step` in one kernel; state and window in place where donated.

    Raises:
      NotImplementedError: for float64, and for K that is not a whole number of 128 lanes.
    """
    _refuse_float64(x_B3HK, window_BW3HK, state_BHKV, log_decay_BHK, beta_BH)
    key_dim = x_B3HK.shape[-1]
    if key_dim % LANES:
        raise NotImplementedError(
            f"the TPU kernel of fused_step takes K in multiples of {LANES} and got {key_dim}; "
            "padding would copy the state at every token: use another implementation"
        )
    if taps_J3HK.shape[0] < 2:
        raise NotImplementedError(
            f"the TPU kernel of fused_step takes convolutions of at least 2 taps and got {taps_J3HK.shape[0]}; use "
            "another implementation"
        )
    batch = x_B3HK.shape[0]
    active = jnp.ones((batch,), jnp.int32) if active_B is None else active_B.astype(jnp.int32)
    return _tpu_step.fused_step(
        x_B3HK,
        window_BW3HK,
        taps_J3HK,
        log_decay_BHK,
        beta_BH,
        gate_BHK,
        gain_K,
        state_BHKV.astype(jnp.float32),
        active,
        key_dim**-0.5,
        norm_epsilon,
        interpret,
    )
