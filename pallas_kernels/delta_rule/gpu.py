"""The gated delta rule as Pallas kernels for GPU (Mosaic GPU): Hopper and Blackwell."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._typing import Array, Bool, Float, Int
from pallas_kernels.delta_rule import _gpu_backward, _gpu_sequence, _gpu_step, _gpu_walk, _inputs
from pallas_kernels.delta_rule._gpu_sequence import Options
from pallas_kernels.delta_rule._gpu_step import COLUMNS, MAXIMUM_ROWS, ROWS
from pallas_kernels.delta_rule._map_gradient import Tokens, with_portable_gradient


def _refuse(key_dim: int, *arrays: Array | None) -> None:
    if _inputs.compute_dtype(*arrays) == jnp.float64:
        raise NotImplementedError(
            "the GPU kernels compute in float32 and got float64; pass float32, or another implementation"
        )
    if key_dim > MAXIMUM_ROWS:
        raise NotImplementedError(
            f"the GPU kernels hold at most K = {MAXIMUM_ROWS} key channels in registers and got {key_dim}; "
            "use another implementation"
        )


def _pad(x: Array, **multiples: int) -> Array:
    """Zeros at the ends of the axes given by their distance from the last, `last=`, `second_last=`."""
    axes = {"last": -1, "second_last": -2}
    widths = [(0, 0)] * x.ndim
    for name, multiple in multiples.items():
        axis = axes[name]
        widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def _at_least(x_BT: Array, tokens: int) -> Array:
    """Zeros after the tokens of axis 1."""
    return jnp.pad(x_BT, ((0, 0), (0, max(0, tokens - x_BT.shape[1])), *((0, 0),) * (x_BT.ndim - 2)))


def _tokens_and_others(
    q_BTHK: Array | None,
    k_BTHK: Array,
    v_BTHV: Array,
    log_decay_BTHK: Array,
    beta_BTH: Array,
    initial_state_BHKV: Array | None,
    lengths_B: Array | None,
    segment_ids_BT: Array | None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """What the kernels take, in the sizes that they take."""
    batch, tokens = k_BTHK.shape[:2]
    least = max(tokens, _gpu_walk.GROUP)
    if lengths_B is None:
        lengths = jnp.full((batch,), tokens, jnp.int32)
    else:
        lengths = jnp.clip(lengths_B.astype(jnp.int32), 0, tokens)
    per_token = {
        "k": _pad(_at_least(k_BTHK, least), last=ROWS),
        "v": _pad(_at_least(v_BTHV, least), last=COLUMNS),
        "g": _pad(_at_least(log_decay_BTHK, least), last=ROWS),
        "beta": _pad(jnp.swapaxes(_at_least(beta_BTH.astype(jnp.float32), least), 1, 2), last=4),
    }
    if q_BTHK is not None:
        per_token["q"] = _pad(_at_least(q_BTHK, least), last=ROWS)
    if segment_ids_BT is not None:
        # Tokens of the padding are never reached: their ids reset nothing.
        keep_BT = 1.0 - _inputs.segment_starts(segment_ids_BT).astype(jnp.float32)
        per_token["keep"] = _pad(_at_least(keep_BT, least), last=4)
    others = {"lengths": lengths}
    if initial_state_BHKV is not None:
        others["initial"] = _pad_state(initial_state_BHKV)
    return per_token, others


def _pad_state(state: Array) -> Array:
    """[..., K, V] in float32."""
    return _pad(state.astype(jnp.float32), second_last=ROWS, last=COLUMNS)


_Inputs = tuple[Array, Array, Array, Array, Array, Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sequence(
    options: Options, inputs: _Inputs, lengths_B: Array | None, segment_ids_BT: Array | None
) -> tuple[Array, ...]:
    tokens, others = _tokens_and_others(*inputs, lengths_B, segment_ids_BT)
    return _results(options, inputs, _gpu_sequence.forward(options, tokens, others))


def _results(options: Options, inputs: _Inputs, found: _gpu_sequence.Results) -> tuple[Array, ...]:
    """The kernel's results in the caller's sizes."""
    count, (key_dim, value_dim) = inputs[0].shape[1], inputs[-1].shape[2:]
    assert found.o_BTHV is not None
    results = found.o_BTHV[:, :count, :, :value_dim], found.final_BHKV[:, :, :key_dim, :value_dim]
    if not options.boundaries:
        return results
    assert found.boundaries_BNHKV is not None
    return *results, found.boundaries_BNHKV[..., :key_dim, :value_dim]


def _sequence_forward(
    options: Options, inputs: _Inputs, lengths_B: Array | None, segment_ids_BT: Array | None
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    value_dim = inputs[2].shape[-1]
    if value_dim > MAXIMUM_ROWS:
        raise NotImplementedError(
            f"the gradient's GPU kernels hold at most V = {MAXIMUM_ROWS} value channels and got {value_dim}; use "
            "another implementation"
        )
    tokens, others = _tokens_and_others(*inputs, lengths_B, segment_ids_BT)
    found = _gpu_sequence.forward(options._replace(boundaries=True, errors=True), tokens, others)
    kept = inputs, lengths_B, segment_ids_BT, found.boundaries_BNHKV, found.errors_BTHV
    return _results(options, inputs, found), kept


def _sequence_backward(
    options: Options, residuals: tuple[Any, ...], ct: tuple[Array, ...]
) -> tuple[Any, ...]:
    inputs: _Inputs = residuals[0]
    lengths_B, segment_ids_BT, boundaries, errors = residuals[1:]
    tokens, others = _tokens_and_others(*inputs, lengths_B, segment_ids_BT)
    ct_o, ct_final, *ct_boundaries = ct
    count, (key_dim, value_dim) = inputs[0].shape[1], inputs[-1].shape[2:]
    del tokens["v"]
    tokens["ct_o"] = _pad(_at_least(ct_o, tokens["k"].shape[1]), last=COLUMNS)
    tokens["errors"] = errors
    others["boundaries"], others["ct_final"] = boundaries, _pad_state(ct_final)
    if ct_boundaries:
        others["ct_boundaries"] = _pad_state(ct_boundaries[0])
    ct_q, ct_k, ct_v, ct_log_decay, ct_beta, ct_initial = _gpu_backward.backward(
        tokens, others, options.interpret
    )
    sizes = key_dim, key_dim, value_dim, key_dim
    found = (
        *(x[:, :count, :, :size] for x, size in zip((ct_q, ct_k, ct_v, ct_log_decay), sizes, strict=True)),
        ct_beta[:, :count],
        ct_initial[:, :, :key_dim, :value_dim],
    )
    gradients = tuple(x.astype(a.dtype) for x, a in zip(found, inputs, strict=True))
    integers = (
        None if x is None else np.zeros(x.shape, jax.dtypes.float0) for x in (lengths_B, segment_ids_BT)
    )
    return gradients, *integers


_sequence.defvjp(_sequence_forward, _sequence_backward)


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
    interpret: Any = None,
) -> tuple[Array, ...]:
    """`pallas_kernels.delta_rule.delta_rule`, the state in registers from the first token to the last.

    K and V are multiples of 32, or are padded to them; sequences shorter than 16 tokens are padded too. For the
    gradient the forward kernel also keeps the states at the ends of chunks of 64 tokens, and every token's error.
    `interpret` as in `plgpu.kernel`.

    Raises:
      NotImplementedError: for float64, and for K above 256.
    """
    key_dim, value_dim = k_BTHK.shape[-1], v_BTHV.shape[-1]
    _refuse(key_dim, q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, initial_state_BHKV)
    if initial_state_BHKV is None:
        batch, _, heads, _ = k_BTHK.shape
        state = jnp.zeros((batch, heads, key_dim, value_dim), jnp.float32)
    else:
        state = initial_state_BHKV
    options = Options(return_boundary_states, False, interpret)
    return _sequence(
        options, (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, state), lengths_B, segment_ids_BT
    )


@with_portable_gradient
def _segment_map(interpret: Any, tokens: Tokens, lengths_B: Array | None) -> tuple[Array, Array]:
    key_dim, value_dim = tokens[0].shape[-1], tokens[1].shape[-1]
    per_token, others = _tokens_and_others(None, *tokens, None, lengths_B, None)
    maps = _gpu_sequence.forward(Options(False, False, interpret), per_token, others).final_BHKV
    padded = key_dim + -key_dim % ROWS
    return maps[:, :, :key_dim, :key_dim], maps[:, :, :key_dim, padded : padded + value_dim]


@functools.partial(jax.jit, static_argnames=("interpret",))
def segment_map(
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    log_decay_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    lengths_B: Int[Array, " B"] | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """`pallas_kernels.delta_rule.segment_map`: the forward kernel on the columns [M | S] at once.

    Its gradient is computed by the portable form.

    Raises:
      NotImplementedError: for float64, and for K above 256.
    """
    _refuse(k_BTHK.shape[-1], k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH)
    return _segment_map(interpret, (k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH), lengths_B)


@functools.partial(jax.jit, static_argnames=("interpret",))
def step(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    log_decay_BHK: Float[Array, "B H K"],
    beta_BH: Float[Array, "B H"],
    state_BHKV: Float[Array, "B H K V"],
    interpret: Any = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """`pallas_kernels.delta_rule.step`; the state in place where it is donated. Not differentiable.

    K and V are multiples of 32, or are padded to them, which copies the state.

    Raises:
      NotImplementedError: for float64, and for K above 256.
    """
    key_dim, value_dim = state_BHKV.shape[2:]
    _refuse(key_dim, q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH, state_BHKV)
    q, k, log_decay = (_pad(x, last=ROWS) for x in (q_BHK, k_BHK, log_decay_BHK))
    state = _pad(state_BHKV.astype(jnp.float32), second_last=ROWS, last=COLUMNS)
    o, state = _gpu_step.step(q, k, _pad(v_BHV, last=COLUMNS), log_decay, beta_BH, state, interpret)
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
    interpret: Any = None,
) -> tuple[Float[Array, "B H K"], Float[Array, "B H K K"], Float[Array, "B W 3 H K"]]:
    """`pallas_kernels.delta_rule.fused_step` in one kernel; state and window in place where donated.

    Raises:
      NotImplementedError: for float64, and for K that is not 128.
    """
    key_dim = x_B3HK.shape[-1]
    _refuse(key_dim, x_B3HK, window_BW3HK, state_BHKV, log_decay_BHK, beta_BH)
    if key_dim != _gpu_step.FUSED_SIZE:
        raise NotImplementedError(
            f"the GPU kernel of fused_step takes K = {_gpu_step.FUSED_SIZE}, one channel for each thread, and got "
            f"{key_dim}; use another implementation"
        )
    if taps_J3HK.shape[0] < 2:
        raise NotImplementedError(
            f"the GPU kernel of fused_step takes convolutions of at least 2 taps and got {taps_J3HK.shape[0]}; use "
            "another implementation"
        )
    batch = x_B3HK.shape[0]
    active = jnp.ones((batch,), jnp.int32) if active_B is None else active_B.astype(jnp.int32)
    return _gpu_step.fused_step(
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
