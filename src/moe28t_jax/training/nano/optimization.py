"""What both trainings of the small model share: its optimiser, its parameters as flat arrays, its record."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.training.router_balance import max_violation, quantile_balance
from pallas_kernels import mxfp4_matmul


@runtime_checkable
class Rates(Protocol):
    """The settings that the optimiser reads."""

    @property
    def steps(self) -> int: ...
    @property
    def muon_learning_rate(self) -> float: ...
    @property
    def adam_learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def warmup(self) -> int: ...
    @property
    def final_rate(self) -> float: ...


Flat = dict[str, jax.Array]


def flatten(parameters: Parameters) -> Flat:
    """Arrays by their path in the tree."""
    return {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
    }


def is_bias(name: str) -> bool:
    """Whether an array is a router's correction bias, which balancing moves and no gradient does."""
    return "router_bias" in name


def _uses_muon(name: str, value: jax.Array) -> bool:
    plain = not any(
        part in name for part in ("embedding", "head", "_conv", "dt_bias", "router_bias", "position")
    )
    return value.ndim >= 3 and plain


def stack(arrays: Flat) -> Flat:
    """Arrays of the same place in different layers as one: the optimiser's program is as small as one layer's."""
    grouped: dict[str, list[jax.Array]] = {}
    for name, value in arrays.items():
        place = name.split("][0]", 1)[1] if name.startswith(".segments") else name
        grouped.setdefault(f"{place} {value.shape}", []).append(value)
    return {place: jnp.stack(values) for place, values in grouped.items()}


def unstack(stacked: Flat, names: Flat) -> Flat:
    """Undo `stack` for arrays named as in `names`."""
    places = {place: iter(values) for place, values in stacked.items()}
    result = {}
    for name, value in names.items():
        place = name.split("][0]", 1)[1] if name.startswith(".segments") else name
        result[name] = next(places[f"{place} {value.shape}"])
    return result


def make_optimizer(settings: Rates, stacked: Flat) -> optax.GradientTransformation:
    """For arrays as `stack` gives them: Muon on matrices, each layer and expert by itself; AdamW on embeddings,
    head, convolutions and vectors."""

    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, settings.warmup, settings.steps, peak * settings.final_rate
        )

    numbers = optax.contrib.MuonDimensionNumbers
    specification: Any = {
        name: numbers(value.ndim - 2, value.ndim - 1) if _uses_muon(name, value) else None
        for name, value in stacked.items()
    }
    muon = optax.contrib.muon(
        schedule(settings.muon_learning_rate),
        weight_decay=settings.weight_decay,
        adam_b2=0.95,
        adam_learning_rate=schedule(settings.adam_learning_rate),
        muon_weight_dimension_numbers=specification,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def assemble(template: Parameters, arrays: Flat, quantized: bool) -> Parameters:
    """The parameter tree from its arrays, expert weights rounded to the MXFP4 grid if asked."""
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    leaves = []
    for path, _ in paths:
        name = jax.tree_util.keystr(path)
        value = arrays[name]
        if quantized and ".experts." in name:
            value = mxfp4_matmul.fake_quantize(value, axis=-2)
        leaves.append(value)
    return jax.tree_util.tree_unflatten(structure, leaves)


def balance_routers(
    biases: Flat, routers: list[dict[str, Any]], config: ModelConfig, smooth: float
) -> tuple[Flat, jax.Array]:
    """Biases one step of quantile balancing further, and the worst layer's overload before it.

    routers: scores and chosen experts of the layers with experts, in order. smooth: the share of the step taken;
    an average over steps lowers the noise once the load is even.
    """
    violations, new_biases = [], {}
    assert config.moe is not None
    for (name, bias_E), layer in zip(sorted(biases.items(), key=_layer_order), routers, strict=True):
        scores_NE = layer["router_scores"].reshape(-1, bias_E.shape[0])
        load_E = jnp.sum(jax.nn.one_hot(layer["router_experts"].reshape(-1), bias_E.shape[0]), axis=0)
        violations.append(max_violation(load_E))
        target_E = quantile_balance(scores_NE, bias_E, config.moe.num_experts_per_token)
        new_biases[name] = bias_E + (target_E - bias_E) * smooth
    return new_biases, jnp.max(jnp.stack(violations))


def _layer_order(item: tuple[str, Any]) -> int:
    """`.segments[12][0]...` -> 12."""
    return int(item[0].split("[")[1].split("]")[0])


def versions() -> dict[str, str]:
    """What a run's arithmetic depends on beside its settings."""
    return {"python": platform.python_version(), "jax": jax.__version__, "optax": optax.__version__}


def write_record(content: Mapping[str, Any], output: Path) -> Path:
    """Write what a run depends on to `output`/training.json, or check that the folder's run depends on the same.

    Raises ValueError when the folder holds a run with another record.
    """
    text = json.dumps(content, indent=1) + "\n"
    path = output / "training.json"
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, value in json.loads(text).items() if earlier.get(name) != value]
        if changed:
            raise ValueError(
                f"{str(output)!r} holds a run with other {', '.join(changed)}; continue it as it was begun, or train "
                "into another folder."
            )
    path.write_text(text, encoding="utf-8")
    return path
