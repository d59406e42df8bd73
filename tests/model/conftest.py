"""Small models and one compiled step that the tests of the network share."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter
from moe28t_jax.model import Cache, Inputs, Parameters, init_cache, initialize, project_logits, run
from moe28t_jax.model.parameters import build
from moe28t_jax.weights import declared_values, load_parameters

DATA = Path(__file__).parents[1] / "golden" / "data"
TOLERANCE = {"float32": 2e-4, "float64": 1e-9}
CHOICES = frozenset({"index_sets", "router"})


@functools.partial(jax.jit, static_argnames=("config",))
def _step(parameters: Parameters, inputs: Inputs, cache: Cache | None, config: ModelConfig) -> Any:
    result = run(parameters, inputs, cache, config, CHOICES)
    return project_logits(parameters, result.hidden_BTD), result.cache, result.auxiliary


@dataclass(frozen=True)
class Tiny:
    """A small model and its compiled step; `choices` are the experts and index sets of every layer."""

    parameters: Parameters
    config: ModelConfig
    dtype: str

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def stacked(self) -> bool:
        return self.parameters.stacked(self.config)

    def cache(self, batch: int, capacity: int) -> Cache:
        return init_cache(self.config, batch, capacity, jnp.dtype(self.dtype), self.stacked)

    def step(self, token_ids: Any, lengths: Any, cache: Cache | None) -> tuple[np.ndarray, Any, list[Any]]:
        inputs = Inputs(jnp.asarray(token_ids, jnp.int32), jnp.asarray(lengths, jnp.int32))
        logits, cache, auxiliary = _step(self.parameters, inputs, cache, self.config)
        return np.asarray(logits), cache, [_choices(layer) for layer in auxiliary]


def _choices(auxiliary: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a layer chose, in one canonical order: experts ascending, index sets as `select` gives them."""
    found = {}
    if "router_experts" in auxiliary:
        found["router_experts"] = np.sort(np.asarray(auxiliary["router_experts"]), axis=-1)
    if "index_sets" in auxiliary:
        found["index_sets"] = np.asarray(auxiliary["index_sets"])
    return found


@functools.cache
def _load(name: str, dtype: str) -> Tiny:
    with jax.enable_x64(dtype == "float64"):
        parameters, config = load_parameters(DATA / name, dtype=np.dtype(dtype))
        return Tiny(parameters, config, dtype)


def _same_choices(
    found: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]], rows: Any = ...
) -> None:
    """Experts and index sets are equal at the given rows [B, T] of every layer."""
    assert len(found) == len(expected) and any(expected)
    for layer, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name][rows], b[name][rows], err_msg=f"{name} of layer {layer}")


def _random_parameters(config: ModelConfig, dtype: str, seed: int, scale: float) -> Parameters:
    """Parameters of which none is at a neutral value: every gain, bias and pseudo query matters."""
    parameters = initialize(config, jax.random.key(seed), jnp.dtype(dtype))
    leaves, structure = jax.tree.flatten(parameters)
    rng = np.random.default_rng(seed)
    noise = [jnp.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, [leaf + extra for leaf, extra in zip(leaves, noise, strict=True)])


def _stack(parameters: Parameters, config: ModelConfig) -> Parameters:
    """The same parameters with repeated layers stacked."""
    values = {(item.layer, item.parameter.name): value for item, value in declared_values(parameters, config)}

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        if layers is None or len(layers) == 1:
            return values[None if layers is None else layers[0], parameter.name]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(values[i, parameter.name] for i in layers))

    return build(config, True, make)


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    with jax.enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture
def tiny(dtype: str) -> Callable[[str], Tiny]:
    """Opens a recorded tiny checkpoint by name."""
    return lambda name: _load(name, dtype)


@pytest.fixture
def random_tiny(dtype: str) -> Callable[..., Tiny]:
    """Makes a model of a configuration: (config, seed=0, scale=0.3); deep ones need a smaller scale in float32."""
    return lambda config, seed=0, scale=0.3: Tiny(
        _random_parameters(config, dtype, seed, scale), config, dtype
    )


@pytest.fixture
def stack() -> Callable[[Tiny], Tiny]:
    return lambda model: replace(model, parameters=_stack(model.parameters, model.config))


@pytest.fixture
def same_choices() -> Callable[..., None]:
    return _same_choices


@pytest.fixture
def k31_config() -> ModelConfig:
    """Eight layers with every feature: delta and sparse attention, latent experts, residual blocks of 3."""
    return ModelConfig.from_hf(DATA / "k31_tiny")
