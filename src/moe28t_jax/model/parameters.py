"""The parameter tree: Flax NNX modules that hold arrays and nothing else.

A `Parameters` object is itself a pytree: `jax.jit`, `lax.scan`, sharding, donation and `jax.eval_shape` take it
as it is. Its structure follows from the declaration (`moe28t_jax.config.declaration`); functions of one layer
read the attributes that the declaration names, e.g. `layer.attention.q_proj`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter, declare_globals, declare_layer, declare_vision
from moe28t_jax.config.segments import segments
from moe28t_jax.model.numerics import compute_dtype
from pallas_kernels.mxfp4_matmul import MXFP4Tensor


class Weight(nnx.Param):
    """An ordinary array. Gradients and optimisers act on these."""


class PackedWeight(nnx.Variable):
    """An `MXFP4Tensor`: excluded from every gradient by its type."""


class Group(nnx.Module):
    """A named collection of weights and sub-groups."""

    if TYPE_CHECKING:
        # Attributes follow from the declaration.
        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, name: str) -> Any:
        """The value of a weight: an array or an `MXFP4Tensor`."""
        return getattr(self, name).get_value()


class Parameters(Group):
    """All parameters: `embedding`, `head`, `final_norm`, `output_mix` and `segments`, and with an image tower
    `vision` (its blocks under `vision.blocks`, named by number) and `projector`.

    `segments[i][j]` is place j of the period of segment i (`moe28t_jax.config.segments`); its arrays carry a
    leading axis of `repeats` where a segment repeats. Blocks of the image tower are never stacked.
    """

    segments: nnx.List[nnx.List[Group]]

    @property
    def has_vision(self) -> bool:
        """Whether an image tower is there; a text-only checkpoint has none, whatever its configuration says."""
        return hasattr(self, "vision")

    def text_only(self) -> Parameters:
        """A view of the same arrays without image tower and projector."""
        if not self.has_vision:
            return self
        text = Parameters()
        for name, value in vars(self).items():
            if name not in ("vision", "projector") and not name.startswith("_"):
                setattr(text, name, value)
        return text

    def stacked(self, config: ModelConfig) -> bool:
        """Whether layers are stacked for scanning (one segment per layer means that they are not)."""
        return len(self.segments) != config.num_layers

    def layers(self, config: ModelConfig) -> Iterable[tuple[int, Group]]:
        """(layer number, parameters) of every layer, in order; stacked layers are sliced (for reading only)."""
        for segment, stored in zip(segments(config, self.stacked(config)), self.segments, strict=True):
            for repeat in range(segment.repeats):
                for position in range(segment.period):
                    group = stored[position]
                    if segment.repeats > 1:
                        group = jax.tree.map(lambda x, repeat=repeat: x[repeat], group)
                    yield segment.layer(repeat, position), group


def attach(owner: Group, name: str, value: Any) -> None:
    """Store a value under a dotted name, in sub-groups made as needed."""
    head, _, rest = name.partition(".")
    if rest:
        if not hasattr(owner, head):
            setattr(owner, head, Group())
        attach(getattr(owner, head), rest, value)
    else:
        setattr(owner, head, PackedWeight(value) if isinstance(value, MXFP4Tensor) else Weight(value))


def build(
    config: ModelConfig,
    stacked: bool,
    make: Callable[[Parameter, tuple[int, ...] | None], Any],
    vision: bool = True,
) -> Parameters:
    """Assemble the tree. `make(parameter, layers)` returns the value of one leaf: `layers` is None for a global
    parameter, otherwise the layers it holds; with more than one, the value has a leading axis for them. The image
    tower of a configuration that has one is left out with `vision` False."""
    parameters = Parameters()
    for parameter in declare_globals(config):
        attach(parameters, parameter.name, make(parameter, None))
    stored = []
    for segment in segments(config, stacked):
        places = []
        for position in range(segment.period):
            group = Group()
            layers = tuple(segment.layer(repeat, position) for repeat in range(segment.repeats))
            for parameter in declare_layer(config, layers[0]):
                attach(group, parameter.name, make(parameter, layers))
            places.append(group)
        stored.append(nnx.List(places))
    parameters.segments = nnx.List(stored)
    if vision and config.vision is not None:
        for parameter in declare_vision(config.vision, config.hidden_size):
            attach(parameters, parameter.name, make(parameter, None))
    return parameters


def _value_dtype(parameter: Parameter, dtype: Any) -> jnp.dtype:
    """Parameters kept in float32 by the public layout stay so; in a float64 model they widen with it."""
    return compute_dtype(dtype) if parameter.dtype == "float32" else jnp.dtype(dtype)


def _shape(parameter: Parameter, layers: tuple[int, ...] | None) -> tuple[int, ...]:
    return (len(layers), *parameter.shape) if layers is not None and len(layers) > 1 else parameter.shape


def abstract(
    config: ModelConfig,
    dtype: Any = jnp.bfloat16,
    stacked: bool = True,
    layout: str = "packed_kn",
    vision: bool = True,
) -> Parameters:
    """The tree of `jax.ShapeDtypeStruct`s: for lowering and planning without any memory.

    Routed experts are `MXFP4Tensor`s in the given layout when the configuration stores them so.
    """

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        shape = _shape(parameter, layers)
        if parameter.quantizable and config.expert_quantization == "mxfp4":
            *leading, size_in, size_out = shape
            tensor = MXFP4Tensor(
                jax.ShapeDtypeStruct((*leading, size_in // 2, size_out), jnp.uint8),
                jax.ShapeDtypeStruct((*leading, size_in // 32, size_out), jnp.uint8),
                "packed_kn",
            )
            return jax.eval_shape(lambda tensor: tensor.to_layout(layout), tensor)
        return jax.ShapeDtypeStruct(shape, _value_dtype(parameter, dtype))

    return build(config, stacked, make, vision)


def initialize(
    config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32, stacked: bool = False
) -> Parameters:
    """Random parameters; routed experts are ordinary arrays (quantise them with `moe28t_jax.weights`).

    Matrices are normal with `config.initializer_range`; the forget gate starts with time constants spread
    log-uniformly over 1e-3..0.1 (Kimi Linear, Mamba-2), A_log at 0; pseudo queries start at zero, so that
    attention residuals begin as a plain average. Empty places for experts hold zeros.
    """
    count = 0

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> jax.Array:
        nonlocal count
        count += 1
        shape, leaf_dtype = _shape(parameter, layers), _value_dtype(parameter, dtype)
        leaf_key = jax.random.fold_in(key, count)
        match parameter.initializer:
            case "ones":
                return jnp.ones(shape, leaf_dtype)
            case "zeros":
                return jnp.zeros(shape, leaf_dtype)
            case "decay_bias":
                time = jnp.exp(jax.random.uniform(leaf_key, shape, minval=jnp.log(1e-3), maxval=jnp.log(0.1)))
                if config.kda is not None and config.kda.gate_lower_bound is not None:
                    # bound * sigmoid(bias) = -|bound| * (1 - exp(-time)) when bias = log(exp(time) - 1)
                    return jnp.log(jnp.expm1(time)).astype(leaf_dtype)
                return (time + jnp.log(-jnp.expm1(-time))).astype(leaf_dtype)
            case "convolution":
                return jax.random.uniform(leaf_key, shape, leaf_dtype, -0.5, 0.5)
            case _:
                axis = len(shape) - len(parameter.shape)
                empty = shape[axis] - parameter.num_stored if parameter.num_experts is not None else 0
                drawn = (*shape[:axis], shape[axis] - empty, *shape[axis + 1 :])
                values = config.initializer_range * jax.random.normal(leaf_key, drawn, leaf_dtype)
                if not empty:
                    return values
                return jnp.pad(values, [(0, empty if i == axis else 0) for i in range(len(shape))])

    return build(config, stacked, make)
