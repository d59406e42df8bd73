"""Feed-forward layers: dense gated MLP and the latent mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe28t_jax.config import ModelConfig, MoEConfig
from moe28t_jax.model.numerics import compute_dtype, head_product, linear, pick, rms_norm
from moe28t_jax.model.parameters import Group
from moe28t_jax.parallel.experts import expert_parallel
from moe28t_jax.parallel.mesh import current_mesh
from pallas_kernels import mxfp4_matmul


def gated_mlp(
    parameters: Group, x: Float[Array, "*batch n"], config: ModelConfig
) -> Float[Array, "*batch n"]:
    """down( act(gate(x), up(x)) )."""
    return linear(_gated(parameters, x, config), parameters["down_proj"])


def _gated(parameters: Group, x: Float[Array, "*batch n"], config: ModelConfig) -> Float[Array, "*batch m"]:
    gate, up = linear(x, parameters["gate_proj"]), linear(x, parameters["up_proj"])
    if config.activation == "situ":
        return mxfp4_matmul.situ_glu(gate, up, config.situ_beta, config.situ_linear_beta)
    return mxfp4_matmul.swiglu(gate, up)


def route(
    parameters: Group, x_ND: Float[Array, "*N D"], moe: MoEConfig
) -> tuple[Int[Array, "*N K"], Float[Array, "*N K"], Float[Array, "*N E"]]:
    """Experts of each token, their combination weights and all unbiased scores, in float32.

    The correction bias takes part in the choice only; weights are the unbiased scores of the chosen experts,
    normalised over them. Equal choices go to the lowest expert number.
    """
    dtype = compute_dtype(x_ND.dtype)
    router = parameters["router"]
    if router.dtype == x_ND.dtype:
        # Products of narrow numbers are exact in the accumulator's type, and the weight is read as it lies.
        logits_NE = head_product("...d,de->...e", x_ND, router)
    else:
        logits_NE = linear(x_ND.astype(dtype), router.astype(dtype))
    scores_NE = jax.nn.sigmoid(logits_NE)
    choice_NE = scores_NE + parameters["router_bias"].astype(dtype)
    _, experts_NK = jax.lax.top_k(jax.lax.stop_gradient(choice_NE), moe.num_experts_per_token)
    weights_NK = pick(scores_NE, experts_NK)
    if moe.renormalize:
        weights_NK = weights_NK / (jnp.sum(weights_NK, axis=-1, keepdims=True) + 1e-20)
    return experts_NK, weights_NK * moe.routed_scaling_factor, scores_NE


def routed_experts(
    experts: Group,
    x_NL: Float[Array, "N L"],
    chosen_NK: Int[Array, "N K"],
    weights_NK: Float[Array, "N K"],
    valid_N: Bool[Array, " N"],
    config: ModelConfig,
    repeat: Int[Array, ""] | None = None,
) -> Float[Array, "N L"]:
    """sum_k weight_k Expert_k(x): rows sorted by expert, grouped matmuls, combined in float32 in fixed order.

    Rows that are not valid go to no expert and give 0.
    """
    moe = config.moe
    assert isinstance(moe, MoEConfig)
    count, top_k = chosen_NK.shape
    with jax.named_scope("moe_dispatch"):
        # Padding sorts behind every expert and belongs to no group.
        keys_M = jnp.where(valid_N[:, None], chosen_NK, moe.slots).reshape(-1)
        order_M = jnp.argsort(keys_M, stable=True)
        sizes_E = jnp.sum(jax.nn.one_hot(keys_M, moe.slots, dtype=jnp.int32), axis=0, dtype=jnp.int32)
        rows_ML = x_NL[order_M // top_k]
    with jax.named_scope("moe_experts"):
        hidden_MF = mxfp4_matmul.grouped_glu(
            rows_ML, experts["gate"], experts["up"], sizes_E, activation=config.glu, layer=repeat
        )
        rows_ML = mxfp4_matmul.grouped_matmul(hidden_MF, experts["down"], sizes_E, layer=repeat)
    with jax.named_scope("moe_combine"):
        back_M = jnp.argsort(order_M)
        rows_NKL = rows_ML[back_M].reshape(count, top_k, -1).astype(weights_NK.dtype)
        return jnp.sum(rows_NKL * weights_NK[:, :, None], axis=1).astype(x_NL.dtype)


def expert_load(
    chosen_NK: Int[Array, "*N K"], valid_BT: Bool[Array, "B T"], num_experts: int
) -> Int[Array, " E"]:
    """How many valid tokens chose each expert, over the whole batch."""
    chosen_NK = chosen_NK.reshape(valid_BT.size, -1)
    keys_NK = jnp.where(valid_BT.reshape(-1, 1), chosen_NK, num_experts)
    return jnp.zeros((num_experts,), jnp.int32).at[keys_NK].add(1, mode="drop")


def mixture_of_experts(
    parameters: Group,
    x_BTD: Float[Array, "B T D"],
    valid_BT: Bool[Array, "B T"],
    config: ModelConfig,
    repeat: Int[Array, ""] | None = None,
    collect: frozenset[str] = frozenset(),
) -> tuple[Float[Array, "B T D"], dict[str, jax.Array]]:
    """Routed experts in the latent, norm after their full weighted sum, projection back, plus shared experts.

    On a mesh tokens travel to the devices of their experts and back, and the first part of the shared experts is
    computed while they do.
    `collect` may name `router` (chosen experts and all scores) and `expert_load` (valid tokens of each expert).
    """
    moe = config.moe
    assert isinstance(moe, MoEConfig)
    mesh = current_mesh()
    # One device multiplies a list of tokens; on a mesh rows and tokens are divided, and merging them would move both.
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1]) if mesh is None else x_BTD
    with jax.named_scope("moe_router"):
        chosen_NK, weights_NK, scores_NE = route(parameters, x_ND, moe)
    latent_NL = linear(x_ND, parameters["latent_down"]) if moe.latent_size is not None else x_ND
    hidden_NF = None
    if mesh is None:
        y_NL = routed_experts(
            parameters.experts, latent_NL, chosen_NK, weights_NK, valid_BT.reshape(-1), config, repeat
        )
    else:
        experts = {name: parameters.experts[name] for name in ("gate", "up", "down")}
        if moe.num_shared_experts:
            with jax.named_scope("moe_shared"):
                hidden_NF = _gated(parameters.shared, x_ND, config)
        y_NL, hidden_NF = expert_parallel(
            latent_NL, chosen_NK, weights_NK, valid_BT, experts, config, repeat, meanwhile_BTF=hidden_NF
        )
    with jax.named_scope("moe_output"):
        if moe.latent_size is not None:
            if moe.latent_norm:
                y_NL = rms_norm(y_NL, parameters["latent_norm"], config.rms_norm_eps)
            y_NL = linear(y_NL, parameters["latent_up"])
    if moe.num_shared_experts:
        with jax.named_scope("moe_shared"):
            if hidden_NF is None:
                hidden_NF = _gated(parameters.shared, x_ND, config)
            y_NL = y_NL + linear(hidden_NF, parameters.shared["down_proj"])
    auxiliary = {}
    if "router" in collect:
        auxiliary["router_experts"] = chosen_NK.reshape(*x_BTD.shape[:2], -1)
        auxiliary["router_scores"] = scores_NE.reshape(*x_BTD.shape[:2], -1)
    if "expert_load" in collect:
        auxiliary["expert_load"] = expert_load(chosen_NK, valid_BT, moe.num_experts)
    return y_NL.reshape(x_BTD.shape), auxiliary
