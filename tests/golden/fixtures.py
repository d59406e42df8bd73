"""Reading the recorded outputs, and single layers of the network on recorded weights."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from moe28t_jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moe28t_jax.config.declaration import Parameter, declare_layer
from moe28t_jax.model import Group, network
from moe28t_jax.model.parameters import Weight

DATA = Path(__file__).parent / "data"
MODELS = ("k3_tiny_bf16", "k3_tiny_mxfp4", "k31_tiny", "k31_tiny_mxfp4", "kimi_linear_tiny")
LOGITS_TOLERANCE = {name: 5e-4 if name.startswith("k31") else 3e-4 for name in MODELS}


@functools.cache
def read(name: str) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
    """Tensors and metadata of a recorded file, by its path below the data folder without the suffix."""
    path = DATA / f"{name}.safetensors"
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return load_file(path), json.loads(header["__metadata__"]["meta"])


def difference(actual: Any, expected: Any) -> float:
    """Largest absolute difference, in float64; NaN where either holds one."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(np.max(np.abs(actual - expected)))


def assert_close(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    error = difference(actual, expected)
    assert error <= tolerance, f"{what}: largest difference {error:.3g}, tolerance {tolerance:.3g}"


def assert_noticed(effect: float, tolerance: float, mistake: str) -> None:
    """A planted mistake must move the result well past what a right implementation is allowed."""
    assert effect > 3 * tolerance, f"{mistake}: moves the result by {effect:.3g}, tolerance {tolerance:.3g}"


def sorted_sets(indices: Any) -> np.ndarray:
    """Index sets in the order of the recordings: ascending, then -1 for every empty place."""
    indices = np.asarray(indices)
    last = np.iinfo(np.int32).max
    ordered = np.sort(np.where(indices < 0, last, indices), axis=-1)
    return np.where(ordered == last, -1, ordered)


# -- one layer from recorded weights ---------------------------------------------------------------------------
def _stored_value(parameter: Parameter, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    parts = []
    for expert in range(parameter.num_stored):
        stored = weights[name.replace("{expert}", str(expert))]
        assert stored.shape in parameter.stored_shapes, (name, stored.shape)
        parts.append(stored.reshape(stored.shape[0], -1).T if parameter.transform == "transpose" else stored)
    return np.stack(parts).reshape(parameter.shape)


def layer_group(config: ModelConfig, weights: Mapping[str, np.ndarray], stored: str, name: str) -> Group:
    """The sub-group `name` of layer 0 (`attention` or `mlp`), from tensors named below `stored`.

    Uses every recorded weight, so that none can be forgotten.
    """
    group = Group()
    used = set()
    for parameter in declare_layer(config, 0):
        if not parameter.name.startswith(f"{name}."):
            continue
        tensor = parameter.stored_name.removeprefix(f"{stored}.")
        owner = group
        *path, leaf = parameter.name.split(".")[1:]
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, Group())
            owner = getattr(owner, part)
        value = _stored_value(parameter, weights, tensor)
        setattr(owner, leaf, Weight(jnp.asarray(value, jnp.float32)))
        used |= {tensor.replace("{expert}", str(expert)) for expert in range(parameter.num_stored)}
    assert used == set(weights)
    return group


def altered(group: Group, **changes: Callable[[jax.Array], jax.Array]) -> Group:
    """A copy of a group with some of its own weights replaced by a function of them."""
    leaves, structure = jax.tree.flatten(group)
    copy = jax.tree.unflatten(structure, leaves)
    for name, change in changes.items():
        setattr(copy, name, Weight(change(group[name])))
    return copy


def recorded_weights(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix("w."): value for name, value in tensors.items() if name.startswith("w.")}


def _config(**fields: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "vocab_size": 8, "attention_kinds": ("kda",), "mlp_kinds": ("dense",), "intermediate_size": 8,
        "kda": None, "mla": None, "moe": None,
    }  # fmt: skip
    return ModelConfig(**(base | fields))


def kda_layer(name: str) -> tuple[ModelConfig, Group]:
    tensors, meta = read(name)
    recorded = meta["config"]
    kda = KDAConfig(
        recorded["num_heads"],
        recorded["head_dim"],
        recorded["short_conv_kernel_size"],
        recorded.get("gate_lower_bound"),
        recorded.get("use_full_rank_gate", False),
    )
    config = _config(hidden_size=recorded["hidden_size"], kda=kda, rms_norm_eps=recorded["rms_norm_eps"])
    return config, layer_group(config, recorded_weights(tensors), "self_attn", "attention")


def mla_layer(name: str) -> tuple[ModelConfig, Group]:
    tensors, meta = read(name)
    recorded = meta["config"]
    mla = MLAConfig(
        recorded["num_attention_heads"],
        recorded["kv_lora_rank"],
        recorded["qk_nope_head_dim"],
        recorded["qk_rope_head_dim"],
        recorded["v_head_dim"],
        recorded["q_lora_rank"],
        recorded["mla_use_output_gate"],
    )
    config = _config(
        hidden_size=recorded["hidden_size"], attention_kinds=("mla",), mla=mla,
        rms_norm_eps=recorded["rms_norm_eps"],
    )  # fmt: skip
    return config, layer_group(config, recorded_weights(tensors), "self_attn", "attention")


def moe_layer(name: str) -> tuple[ModelConfig, Group]:
    tensors, meta = read(name)
    recorded = meta["config"]
    moe = MoEConfig(
        recorded["num_experts"],
        recorded["num_experts_per_token"],
        recorded["moe_intermediate_size"],
        recorded["num_shared_experts"],
        recorded["routed_expert_hidden_size"],
        recorded["latent_moe_use_norm"],
        recorded["moe_renormalize"],
        recorded["routed_scaling_factor"],
    )
    config = _config(
        hidden_size=recorded["hidden_size"], attention_kinds=("mla",), mla=MLAConfig(1, 8, 8, 8, 8),
        mlp_kinds=("moe",), moe=moe, rms_norm_eps=recorded["rms_norm_eps"],
        situ_beta=recorded["activation_situ_beta"], situ_linear_beta=recorded["activation_situ_linear_beta"],
    )  # fmt: skip
    return config, layer_group(config, recorded_weights(tensors), "block_sparse_moe", "mlp")


# -- one layer of a whole model, from the recorded residual stream ----------------------------------------------
def recorded_stream(parameters: Any, config: ModelConfig, golden: Mapping[str, Any], layer: int) -> Any:
    """What enters a layer (counted from 0) according to the recorded partial sums: a `network.Stream`."""
    embedding = parameters["embedding"][jnp.asarray(golden["input_ids"])]
    partial_sums = [jnp.asarray(row)[None] for row in golden["partial_sums_f64ref"]]
    before = [embedding, *partial_sums]
    snapshots = tuple(before[i] for i in range(layer) if config.starts_block(i))
    return network.Stream(before[layer], snapshots, None)


def layer_program(
    config: ModelConfig, layer: int, collect: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """One layer without a cache as a new compiled function of (group, stream), so that what is patched at its
    first call takes effect. Returns the partial sum [B, T, D] and what was collected."""

    @jax.jit
    def compute(group, partial_BTD, snapshots):
        batch, count = partial_BTD.shape[:2]
        step = network.Step(
            jnp.zeros((batch,), jnp.int32),
            jnp.full((batch,), count, jnp.int32),
            jnp.ones((batch, count), bool),
            config,
            collect,
        )
        stream = network.Stream(partial_BTD, snapshots, None)
        starts_block = config.starts_block(layer)
        out, _, auxiliary = network.run_layer(group, stream, None, layer, None, starts_block, step)
        return out.partial_BTD, auxiliary

    return lambda group, stream: compute(group, stream.partial_BTD, stream.snapshots)
