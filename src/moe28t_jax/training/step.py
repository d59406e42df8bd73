"""One training step: loss, gradients through all layers, update; of any size, on one device or many.

What training holds are float copies of all parameters (masters), divided over all devices of a mesh. A layer's
parameters are made from them where the layer is computed: experts rounded to the MXFP4 grid where the configuration
stores them so (straight-through gradients), cast to the activations' dtype, and brought together over the axes that
divide rows. Nothing of a layer but its inputs is kept for the gradient. The routers' correction biases are held still,
as in fine-tuning: no gradient reaches them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.network import Inputs, project_logits, run
from moe28t_jax.model.numerics import compute_dtype
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.parallel.mesh import current_mesh
from moe28t_jax.parallel.rules import batch_layout, partition
from moe28t_jax.parallel.sharding import declared_at, parameter_sharding, parameter_shardings, replicated
from moe28t_jax.parallel.vocabulary import log_probabilities
from moe28t_jax.training.router_balance import max_violation
from pallas_kernels import mxfp4_matmul

Flat = dict[str, Any]
"""Arrays by their path in the tree of `Parameters`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens to learn from. token_ids, targets: int32 [B, T], what is read and what should follow each token.
    weights: float32 [B, T], how much each prediction counts; 0 for padding and for what is not learned. lengths: int32
    [B], how many tokens of each row are real (None: all)."""

    token_ids: Any
    targets: Any
    weights: Any
    lengths: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step takes and gives back. trainable: masters. frozen: the routers' biases. optimizer: optax's state of
    `trainable`. step: int32, how many were made."""

    trainable: Flat
    frozen: Flat
    optimizer: Any
    step: Any


@dataclass(frozen=True)
class TrainSettings:
    """dtype: of activations and of weights where they multiply. indexer_loss: the weight of the indexers' own loss,
    which reaches nothing else; 0 leaves it out."""

    dtype: str = "bfloat16"
    indexer_loss: float = 1.0


def is_frozen(name: str) -> bool:
    """Whether an array is a router's correction bias, which balancing moves and no gradient does."""
    return "router_bias" in name


def adamw(
    learning_rate: float | optax.Schedule, weight_decay: float = 0.1, clip: float = 1.0
) -> optax.GradientTransformation:
    """AdamW for `TrainState.trainable`: gradients clipped to a global norm, first moments in bfloat16, second moments
    as the masters; matrices alone decay."""

    def matrices(arrays: Mapping[str, Any]) -> dict[str, bool]:
        return {name: _is_matrix(name) for name in arrays}

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(
            learning_rate, 0.9, 0.95, weight_decay=weight_decay, mask=matrices, mu_dtype=jnp.bfloat16
        ),
    )


_NO_MATRICES = ("norm", "query", "A_log", "dt_bias", "_bias", "_conv")


def _is_matrix(name: str) -> bool:
    """By name: arrays of stacked layers have an axis more."""
    parts = [part for part in name.replace("]", "").replace("[", ".").split(".") if part != "value"]
    return not any(parts[-1].endswith(ending) for ending in _NO_MATRICES)


def loss_function(
    parameters: Parameters, batch: Batch, config: ModelConfig, settings: TrainSettings
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted mean of the cross entropy of the targets, in nats, plus the indexers' loss; and what it consists of.

    parameters: masters, float arrays. Differentiable in them.
    """
    dtype = jnp.dtype(settings.dtype)
    parameters = _prepare_globals(parameters, config, dtype)
    collect = {"expert_load"} if config.moe is not None else set()
    if settings.indexer_loss and config.dsa is not None:
        collect.add("indexer_loss")
    result = run(
        parameters,
        Inputs(batch.token_ids, batch.lengths),
        None,
        config,
        frozenset(collect),
        lambda group, layer: _prepared(group, layer, config, dtype),
    )

    @jax.checkpoint
    def entropy_of(parameters: Parameters, hidden_BTD: Array) -> Array:
        return -log_probabilities(project_logits(parameters, hidden_BTD), batch.targets)

    entropy_BT = entropy_of(parameters, result.hidden_BTD)
    weights_BT = batch.weights.astype(entropy_BT.dtype)
    total = jnp.maximum(jnp.sum(weights_BT), jnp.finfo(entropy_BT.dtype).tiny)

    def mean(values_BT: Array) -> Array:
        # A row's padding may be anything.
        counted_BT = jnp.where(weights_BT > 0, values_BT.astype(weights_BT.dtype), 0)
        return jnp.sum(counted_BT * weights_BT) / total

    loss = mean(entropy_BT)
    metrics = {"entropy": loss}
    indexer = [mean(layer["indexer_loss"]) for layer in result.auxiliary if "indexer_loss" in layer]
    if indexer:
        metrics["indexer"] = jnp.mean(jnp.stack(indexer))
        loss = loss + settings.indexer_loss * metrics["indexer"]
    loads = [layer["expert_load"] for layer in result.auxiliary if "expert_load" in layer]
    if loads:
        wide = [load_E.astype(loss.dtype) for load_E in loads]
        metrics["violation"] = jnp.max(jnp.stack([max_violation(load_E) for load_E in wide]))
    return loss, metrics


def _prepare_globals(parameters: Parameters, config: ModelConfig, dtype: jnp.dtype) -> Parameters:
    """Embedding, head and norms as the network computes with them; layers as they are held."""
    plain = Parameters()
    for name, value in vars(parameters).items():
        if not name.startswith("_") and name != "segments":
            setattr(plain, name, value)
    prepared = _prepared(plain, None, config, dtype)
    prepared.segments = parameters.segments
    return prepared


def _prepared(tree: Any, layer: int | None, config: ModelConfig, dtype: jnp.dtype) -> Any:
    """What one layer (or, with None, what is outside of layers) computes with, from its masters."""
    mesh = current_mesh()

    def prepare(path: tuple[Any, ...], value: Array) -> Array:
        parameter = declared_at(path, layer, config)
        if parameter.quantizable and config.expert_quantization == "mxfp4":
            value = mxfp4_matmul.fake_quantize(value, axis=-2)
        value = value.astype(compute_dtype(dtype) if parameter.dtype == "float32" else dtype)
        if mesh is None:
            return value
        used, held = (
            parameter_sharding(path, value, layer, config, mesh, masters) for masters in (False, True)
        )
        return _brought(value, used, held)

    with jax.named_scope("prepare_parameters"):
        return jax.tree_util.tree_map_with_path(prepare, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _brought(value: Array, used: NamedSharding, held: NamedSharding) -> Array:
    """`value`, which is divided as `held`, as `used`; its gradient goes back the other way."""
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(value, held), used)


def _brought_forward(value: Array, used: NamedSharding, held: NamedSharding) -> tuple[Array, None]:
    return _brought(value, used, held), None


def _brought_backward(used: NamedSharding, held: NamedSharding, _: None, slope: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(slope, held),)


_brought.defvjp(_brought_forward, _brought_backward)


@functools.partial(
    jax.jit, static_argnames=("structure", "config", "optimizer", "settings"), donate_argnames=("state",)
)
def _train_step(
    state: TrainState,
    batch: Batch,
    structure: Any,
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    settings: TrainSettings,
) -> tuple[TrainState, dict[str, Array]]:
    def loss(trainable: Flat) -> tuple[Array, dict[str, Array]]:
        return loss_function(_assemble(structure, trainable | state.frozen), batch, config, settings)

    (total, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.trainable)
    with (
        jax.named_scope("update"),
        jax.numpy_dtype_promotion("standard"),
    ):  # optax relies on implicit promotion
        updates, new = optimizer.update(gradients, state.optimizer, state.trainable)
        trainable: Any = optax.apply_updates(state.trainable, updates)
        metrics |= {"loss": total, "gradient": optax.tree.norm(gradients)}
    return TrainState(trainable, state.frozen, new, state.step + 1), metrics


def _assemble(structure: Any, arrays: Flat) -> Parameters:
    """The tree from its arrays; `structure` is what `_names` gives."""
    tree, names = structure
    return jax.tree.unflatten(tree, [arrays[name] for name in names])


def _names(parameters: Parameters) -> tuple[Any, tuple[str, ...]]:
    paths, tree = jax.tree_util.tree_flatten_with_path(parameters)
    return tree, tuple(jax.tree_util.keystr(path) for path, _ in paths)


class TrainStep:
    """The compiled step of one model. States are passed in and given up: each call consumes its state.

    parameters: their structure counts (float arrays or `jax.ShapeDtypeStruct`s, without an image tower); their values
    begin a state (`start`). mesh: the devices that masters lie on (`shardings`); None for one device.

    Raises ValueError for packed experts, which have no gradient, and for a mesh with pipeline stages.
    """

    def __init__(
        self,
        parameters: Parameters,
        config: ModelConfig,
        optimizer: optax.GradientTransformation,
        settings: TrainSettings | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        self.config, self.optimizer, self.mesh = config, optimizer, mesh
        self.settings = settings or TrainSettings()
        if mesh is not None and mesh.shape["stage"] > 1:
            raise ValueError(
                f"The mesh has {mesh.shape['stage']} pipeline stages; a training step takes stage 1."
            )
        parameters = parameters.text_only()
        packed = [
            leaf.dtype for leaf in jax.tree.leaves(parameters) if not jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        narrow = [leaf.dtype for leaf in jax.tree.leaves(parameters) if jnp.dtype(leaf.dtype).itemsize < 2]
        if packed or narrow:
            raise ValueError(
                f"The parameters hold arrays of {jnp.dtype((packed + narrow)[0]).name}; training needs float ones: "
                "load the model without packing its experts."
            )
        self._parameters, self._structure = parameters, _names(parameters)

    def _on_mesh(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _split(self, tree: Any) -> tuple[Flat, Flat]:
        arrays = dict(zip(self._structure[1], jax.tree.leaves(tree), strict=True))
        frozen = {name: value for name, value in arrays.items() if is_frozen(name)}
        return {name: value for name, value in arrays.items() if name not in frozen}, frozen

    def abstract_state(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s, on a mesh with their shardings."""
        trainable, frozen = self._split(self._parameters)
        state = jax.eval_shape(
            lambda trainable, frozen: TrainState(
                trainable, frozen, self.optimizer.init(trainable), jnp.int32(0)
            ),
            trainable,
            frozen,
        )
        if self.mesh is None:
            return state
        own, other = self._split(parameter_shardings(self._parameters, self.config, self.mesh, masters=True))
        places = own | other

        def place(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
            # Moments lie as the master of the same name does.
            name = str(getattr(path[-1], "key", ""))
            sharding = places[name] if leaf.ndim and name in places else replicated(self.mesh)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(place, state)

    def start(self) -> TrainState:
        """The state before the first step, a copy of the parameters' values."""
        arrays, places = self._split(self._parameters), None
        if self.mesh is None:
            trainable, frozen = jax.tree.map(jnp.array, arrays)
        else:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
            places = shardings.optimizer
            # What the parameters hold is never given up with a state.
            trainable, frozen = jax.device_put(
                arrays, (shardings.trainable, shardings.frozen), may_alias=False
            )
        optimizer = jax.jit(self.optimizer.init, out_shardings=places)(trainable)
        return TrainState(trainable, frozen, optimizer, jnp.int32(0))

    def parameters(self, state: TrainState) -> Parameters:
        """The masters of a state as a tree."""
        return _assemble(self._structure, state.trainable | state.frozen)

    def batch_shardings(self, batch: Batch) -> Any:
        """A tree like `batch` of shardings: rows and tokens as everywhere. None on one device."""
        mesh = self.mesh
        if mesh is None:
            return None
        rows, count = batch.token_ids.shape
        where = batch_layout(rows, mesh)
        assert where is not None
        token = "token" if where.token_axes(count) else None

        def place(leaf: Any) -> NamedSharding:
            axes = ("batch", token)[: len(leaf.shape)]
            return NamedSharding(mesh, partition(axes, leaf.shape, mesh, "batch", where))

        return jax.tree.map(place, batch)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        """The next state, and `loss`, `entropy`, `indexer`, `violation` (the highest load of an expert over the mean,
        minus 1, of the worst layer) and `gradient` (norm), scalars."""
        if self.mesh is not None:
            batch = jax.device_put(batch, self.batch_shardings(batch))
        with self._on_mesh():
            return _train_step(state, batch, self._structure, self.config, self.optimizer, self.settings)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The step for batches like this one (arrays or `jax.ShapeDtypeStruct`s), lowered and not run."""
        if self.mesh is not None:
            batch = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                batch,
                self.batch_shardings(batch),
            )
        with self._on_mesh():
            return _train_step.lower(
                self.abstract_state(), batch, self._structure, self.config, self.optimizer, self.settings
            )


__all__ = ["Batch", "Flat", "TrainSettings", "TrainState", "TrainStep", "adamw", "is_frozen", "loss_function"]
