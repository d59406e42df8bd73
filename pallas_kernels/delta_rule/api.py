"""Public functions of the gated delta rule.

Per head, with state S [K, V] (Kimi Linear, arXiv 2510.26692):

    S <- diag(exp(log_decay_t)) S;   u = beta_t (v_t - S^T k_t);   S <- S + k_t u^T;   o_t = S^T q_t
"""

from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels._dispatch import dispatch
from pallas_kernels._typing import AnyArray, Array, Bool, Float, Int
from pallas_kernels.delta_rule import _fused_step, reference, xla


def _tpu(name: str) -> Callable[..., Any]:
    """A TPU kernel, imported when it is first called: Pallas takes its time, and most programs run without."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from pallas_kernels.delta_rule import tpu

        return getattr(tpu, name)(*args, **kwargs)

    return call


def _gpu(name: str) -> Callable[..., Any]:
    """A GPU kernel, imported when it is first called, for the same reason."""

    def call(*args: Any, **kwargs: Any) -> Any:
        from pallas_kernels.delta_rule import gpu

        return getattr(gpu, name)(*args, **kwargs)

    return call


_DELTA_RULE: Mapping[str, Callable[..., Any]] = {
    "reference": reference.delta_rule,
    "xla": xla.delta_rule,
    "tpu": _tpu("delta_rule"),
    "gpu": _gpu("delta_rule"),
}
_STEP: Mapping[str, Callable[..., Any]] = {
    "reference": reference.step,
    "xla": xla.step,
    "tpu": _tpu("step"),
    "gpu": _gpu("step"),
}
_SEGMENT_MAP: Mapping[str, Callable[..., Any]] = {
    "reference": reference.segment_map,
    "xla": xla.segment_map,
    "tpu": _tpu("segment_map"),
    "gpu": _gpu("segment_map"),
}
_FUSED_STEP: Mapping[str, Callable[..., Any]] = {
    "reference": _fused_step.reference_fused_step,
    "xla": _fused_step.xla_fused_step,
    "tpu": _tpu("fused_step"),
    "gpu": _gpu("fused_step"),
}
# The TPU and GPU kernels compile for every chip but have not run on one: by name only.
_DEFAULT = ("xla",)


def _expect(op_name: str, name: str, array: Any, shape: tuple[int, ...], axes: str) -> None:
    if array is not None and tuple(array.shape) != shape:
        raise ValueError(
            f"{op_name} got {name} of shape {tuple(array.shape)}, expected {list(shape)} = [{axes}] "
            f"to go with k and v; reshape or transpose {name}."
        )


def _expect_sequence(op_name: str, k: Any, v: Any) -> tuple[int, int, int, int, int]:
    if len(k.shape) != 4 or len(v.shape) != 4:
        raise ValueError(
            f"{op_name} got k of shape {tuple(k.shape)} and v of shape {tuple(v.shape)}, "
            "expected [B, T, H, K] and [B, T, H, V]; add the missing axes, or call step for one token."
        )
    batch, tokens, heads, key_dim = k.shape
    if tokens < 1:
        raise ValueError(
            f"{op_name} got {tokens} tokens, expected at least 1; skip the call for an empty sequence."
        )
    return batch, tokens, heads, key_dim, v.shape[-1]


def delta_rule(
    q: Float[AnyArray, "B T H K"],
    k: Float[AnyArray, "B T H K"],
    v: Float[AnyArray, "B T H V"],
    log_decay: Float[AnyArray, "B T H K"],
    beta: Float[AnyArray, "B T H"],
    initial_state: Float[AnyArray, "B H K V"] | None = None,
    lengths: Int[AnyArray, " B"] | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    return_boundary_states: bool = False,
    implementation: str | None = None,
) -> (
    tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]
    | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"], Float[Array, "B chunks H K V"]]
):
    """Gated delta rule over a sequence: outputs and the state after it.

    Computes in float32, or in float64 if any input is float64. Differentiable in q, k, v, log_decay, beta and
    initial_state; memory grows linearly with T.

    Args:
      q: queries, already normalised and scaled (no further scale is applied).
      k: keys, already normalised to length at most 1 (the recurrence may grow without bound otherwise).
      v: values.
      log_decay: natural logarithm of the decay of each key channel, at most 0; there is no lower bound, a
        decay that underflows is exactly zero.
      beta: writing strength, between 0 and 1.
      initial_state: state before the first token; zeros if None.
      lengths: valid tokens of each row, the rest is right padding: it may hold anything (NaN too), leaves the
        state untouched and gives o = 0. None: all tokens are valid.
      segment_ids: packed documents: the state is reset to zero where the id differs from the token before.
        The first token always continues `initial_state`.
      return_boundary_states: also return the states on the grid of 64 tokens counted from the first token.
      implementation: "xla" (chunk by chunk, the default), "reference" (token by token), "tpu" (Pallas,
        compiled for v5p, v6e and tpu7x, not yet run on them; not float64), or "gpu" (Pallas, token by token with
        the state in registers, compiled for Hopper and Blackwell, not yet run on them; K up to 256, not float64).

    Returns:
      o in v's dtype; the final state in the compute dtype; and, if asked for, the state after each full or
      partial chunk, [B, ceil(T / 64), H, K, V].

    Raises:
      ValueError: for shapes that do not fit together, T = 0, or an unknown implementation.
    """
    batch, tokens, heads, key_dim, value_dim = _expect_sequence("delta_rule", k, v)
    _expect("delta_rule", "q", q, (batch, tokens, heads, key_dim), "B, T, H, K")
    _expect("delta_rule", "v", v, (batch, tokens, heads, value_dim), "B, T, H, V")
    _expect("delta_rule", "log_decay", log_decay, (batch, tokens, heads, key_dim), "B, T, H, K")
    _expect("delta_rule", "beta", beta, (batch, tokens, heads), "B, T, H")
    _expect("delta_rule", "initial_state", initial_state, (batch, heads, key_dim, value_dim), "B, H, K, V")
    _expect("delta_rule", "lengths", lengths, (batch,), "B")
    _expect("delta_rule", "segment_ids", segment_ids, (batch, tokens), "B, T")
    return dispatch(
        "delta_rule",
        _DELTA_RULE,
        _DEFAULT,
        implementation,
        q,
        k,
        v,
        log_decay,
        beta,
        initial_state,
        lengths,
        segment_ids,
        return_boundary_states=return_boundary_states,
    )


def step(
    q: Float[AnyArray, "B H K"],
    k: Float[AnyArray, "B H K"],
    v: Float[AnyArray, "B H V"],
    log_decay: Float[AnyArray, "B H K"],
    beta: Float[AnyArray, "B H"],
    state: Float[AnyArray, "B H K V"],
    implementation: str | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Gated delta rule for one token: the output in v's dtype and the state after it in the compute dtype.

    Arguments as in `delta_rule`, without the T axis.

    Raises:
      ValueError: for shapes that do not fit together, or an unknown implementation.
    """
    if len(k.shape) != 3 or len(v.shape) != 3:
        raise ValueError(
            f"step got k of shape {tuple(k.shape)} and v of shape {tuple(v.shape)}, expected [B, H, K] and "
            "[B, H, V]; call delta_rule for a sequence."
        )
    batch, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    _expect("step", "q", q, (batch, heads, key_dim), "B, H, K")
    _expect("step", "v", v, (batch, heads, value_dim), "B, H, V")
    _expect("step", "log_decay", log_decay, (batch, heads, key_dim), "B, H, K")
    _expect("step", "beta", beta, (batch, heads), "B, H")
    _expect("step", "state", state, (batch, heads, key_dim, value_dim), "B, H, K, V")
    return dispatch("step", _STEP, _DEFAULT, implementation, q, k, v, log_decay, beta, state)


def segment_map(
    k: Float[AnyArray, "B T H K"],
    v: Float[AnyArray, "B T H V"],
    log_decay: Float[AnyArray, "B T H K"],
    beta: Float[AnyArray, "B T H"],
    lengths: Int[AnyArray, " B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """Affine map of the state over a segment: (M, S) with state_end = M state_start + S.

    Maps compose, so a sequence split over devices needs only their maps to find each device's initial state.
    Arguments as in `delta_rule`; (M, S) is in the compute dtype.

    Raises:
      ValueError: for shapes that do not fit together, T = 0, or an unknown implementation.
    """
    batch, tokens, heads, key_dim, value_dim = _expect_sequence("segment_map", k, v)
    _expect("segment_map", "v", v, (batch, tokens, heads, value_dim), "B, T, H, V")
    _expect("segment_map", "log_decay", log_decay, (batch, tokens, heads, key_dim), "B, T, H, K")
    _expect("segment_map", "beta", beta, (batch, tokens, heads), "B, T, H")
    _expect("segment_map", "lengths", lengths, (batch,), "B")
    return dispatch("segment_map", _SEGMENT_MAP, _DEFAULT, implementation, k, v, log_decay, beta, lengths)


def fused_step(
    x: Float[AnyArray, "B _ H K"],
    window: Float[AnyArray, "B W 3 H K"],
    taps: Float[AnyArray, "J 3 H K"],
    log_decay: Float[AnyArray, "B H K"],
    beta: Float[AnyArray, "B H"],
    gate: Float[AnyArray, "B H K"],
    norm_weight: Float[AnyArray, " K"],
    state: Float[AnyArray, "B H K K"],
    active: Bool[AnyArray, " B"] | None = None,
    norm_epsilon: float = 1e-5,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H K"], Float[Array, "B H K K"], Float[Array, "B W 3 H K"]]:
    """One token of a gated delta layer between its projections: convolution, delta rule, gated RMSNorm.

    The short convolutions of q, k and v (with SiLU), their normalisation, `step`, and the output's RMSNorm times
    sigmoid(gate). The results of the convolution, q, k and o pass through the dtype of x, all else is float32.
    The "tpu" and "gpu" implementations are one kernel that reads and writes the state once, in place where the
    caller donates state and window; "tpu" takes K in multiples of 128, "gpu" K = 128 alone.

    Args:
      x: the token's projections to q, k and v, in this order on axis 1, before the convolution.
      window: the W = J - 1 inputs of the convolution before it, oldest first.
      taps: weights of the convolution, the last on the current token.
      log_decay: natural logarithm of the decay of each key channel, at most 0.
      beta: writing strength, between 0 and 1.
      gate: logits of the output gate.
      norm_weight: gain of the output norm.
      state: state before the token.
      active: rows that hold a token; the others keep their state and window and give 0. None: all rows.
      norm_epsilon: added to the mean square under the root of the output norm.
      implementation: "xla" (the default), "reference", "tpu" or "gpu".

    Returns:
      the gated output in the gate's dtype, the state after the token in the compute dtype, and the window that
      the next token continues from.

    Raises:
      ValueError: for shapes that do not fit together, or an unknown implementation.
    """
    if len(x.shape) != 4 or x.shape[1] != 3 or len(taps.shape) != 4:
        raise ValueError(
            f"fused_step got x of shape {tuple(x.shape)} and taps of shape {tuple(taps.shape)}, expected "
            "[B, 3, H, K] and [J, 3, H, K]; stack the projections to q, k and v on axis 1."
        )
    batch, _, heads, key_dim = x.shape
    count = taps.shape[0]
    shapes: tuple[tuple[str, Any, tuple[int, ...], str], ...] = (
        ("taps", taps, (count, 3, heads, key_dim), "J, 3, H, K"),
        ("window", window, (batch, count - 1, 3, heads, key_dim), "B, J - 1, 3, H, K"),
        ("log_decay", log_decay, (batch, heads, key_dim), "B, H, K"),
        ("beta", beta, (batch, heads), "B, H"),
        ("gate", gate, (batch, heads, key_dim), "B, H, K"),
        ("norm_weight", norm_weight, (key_dim,), "K"),
        ("state", state, (batch, heads, key_dim, key_dim), "B, H, K, K"),
        ("active", active, (batch,), "B"),
    )
    for name, array, shape, axes in shapes:
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(
                f"fused_step got {name} of shape {tuple(array.shape)}, expected {list(shape)} = [{axes}] "
                f"to go with x and taps; reshape or transpose {name}."
            )
    return dispatch(
        "fused_step",
        _FUSED_STEP,
        _DEFAULT,
        implementation,
        x,
        window,
        taps,
        log_decay,
        beta,
        gate,
        norm_weight,
        state,
        active,
        norm_epsilon=norm_epsilon,
    )
