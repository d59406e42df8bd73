"""What a configuration consists of, sorted by how a mesh divides it. Derived from the parameter declaration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Literal

from moe28t_jax.config import ModelConfig, Parameter, declare_globals, declare_layer, declare_vision

Division = Literal["experts", "tensor", "replicated"]
LayerKind = tuple[str, str]
"""Kind of attention and kind of MLP."""

DIVISIONS: Mapping[Division, tuple[str, ...]] = {
    "experts": ("expert", "tensor"),
    "tensor": ("tensor",),
    "replicated": (),
}
"""Mesh axes over which each division is split; over every other axis it is repeated."""

# In this order; the first rule that names an axis of the parameter decides. The image tower has 12 heads, which few
# meshes divide, and 0.03% of the bytes: it is repeated.
_RULES: tuple[tuple[str, Division], ...] = (
    ("expert", "experts"),
    ("kda_heads", "tensor"),
    ("mla_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("latent", "tensor"),
)


@dataclass(frozen=True)
class Amount:
    """Parameters and stored bytes of one division of one part; `adam` of the parameters keep two moments."""

    parameters: int = 0
    stored_bytes: int = 0
    adam: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.parameters + other.parameters,
            self.stored_bytes + other.stored_bytes,
            self.adam + other.adam,
        )

    def __mul__(self, count: int) -> Amount:
        return Amount(self.parameters * count, self.stored_bytes * count, self.adam * count)


Part = dict[Division, Amount]


@dataclass(frozen=True)
class Inventory:
    """Layers by kind, the parts outside the layers, and what must divide: (what, size, mesh axes)."""

    layers: Mapping[LayerKind, Part]
    first: Part
    last: Part
    constraints: tuple[tuple[str, int, tuple[str, ...]], ...]


@lru_cache(maxsize=8)
def inventory(config: ModelConfig) -> Inventory:
    """Sort every declared parameter. Image tower and embedding go to the first pipeline stage, the head to the last."""
    constraints: dict[tuple[str, int, tuple[str, ...]], None] = {}
    for name, section in (("KDA heads", config.kda), ("attention heads", config.mla)):
        if section is not None:
            constraints[name, section.num_heads, DIVISIONS["tensor"]] = None

    def part(parameters: Iterable[Parameter]) -> Part:
        result: Part = {division: Amount() for division in DIVISIONS}
        for parameter in parameters:
            division = _division(parameter, constraints)
            result[division] += _amount(parameter, config)
        return result

    kinds: dict[LayerKind, int] = {}
    for layer in range(config.num_layers):
        kinds.setdefault((config.attention_kinds[layer], config.mlp_kinds[layer]), layer)
    layers = {kind: part(declare_layer(config, layer)) for kind, layer in kinds.items()}
    outside = declare_globals(config)
    vision = declare_vision(config.vision, config.hidden_size) if config.vision is not None else ()
    first = part([*(p for p in outside if p.group == "embedding"), *vision])
    last = part(p for p in outside if p.group != "embedding")
    return Inventory(layers, first, last, tuple(constraints))


def _division(parameter: Parameter, constraints: dict[tuple[str, int, tuple[str, ...]], None]) -> Division:
    for logical, division in _RULES:
        if logical in parameter.axes:
            size = parameter.shape[parameter.axes.index(logical)]
            constraints[f"{parameter.name} ({logical})", size, DIVISIONS[division]] = None
            return division
    return "replicated"


def _amount(parameter: Parameter, config: ModelConfig) -> Amount:
    if parameter.quantizable and config.expert_quantization == "mxfp4":
        # 32 codes of half a byte and one scale byte: 4.25 bits per parameter.
        stored = parameter.size // 32 * 17
    else:
        stored = parameter.size * (4 if parameter.dtype == "float32" else 2)
    # Matrices are optimised by Muon, which keeps one moment; tables, the head, convolutions and vectors by AdamW.
    matrix = len(parameter.shape) >= 2 and not {"embedding", "head"} & {parameter.group}
    muon = matrix and not parameter.name.endswith(("_conv", "dt_bias", "position"))
    return Amount(parameter.size, stored, 0 if muon else parameter.size)


@lru_cache(maxsize=8)
def total(config: ModelConfig) -> Part:
    """The whole model by division; its stored bytes sum to `parameter_count().stored_bytes`."""
    result: Part = {division: Amount() for division in DIVISIONS}
    for stage in stages(config, 1):
        for division, amount in stage.part.items():
            result[division] += amount
    return result


@dataclass(frozen=True)
class Stage:
    """A run of consecutive layers: how many of each kind, and their parameters with those of its ends."""

    layers: Mapping[LayerKind, int]
    part: Part
    is_first: bool
    is_last: bool

    @property
    def num_layers(self) -> int:
        return sum(self.layers.values())


@lru_cache(maxsize=256)
def stages(config: ModelConfig, count: int) -> tuple[Stage, ...]:
    """Cut the layers into `count` runs of nearly equal length. Raises ValueError where there are fewer layers."""
    if count > config.num_layers:
        raise ValueError(
            f"The mesh has {count} pipeline stages and the model {config.num_layers} layers; take at most that many."
        )
    parts = inventory(config)
    result = []
    for index in range(count):
        begin, end = (config.num_layers * i // count for i in (index, index + 1))
        kinds = zip(config.attention_kinds[begin:end], config.mlp_kinds[begin:end], strict=True)
        layers: Counter[LayerKind] = Counter(kinds)
        part: Part = {division: Amount() for division in DIVISIONS}
        for division in DIVISIONS:
            for kind, number in layers.items():
                part[division] += parts.layers[kind][division] * number
            if index == 0:
                part[division] += parts.first[division]
            if index == count - 1:
                part[division] += parts.last[division]
        result.append(Stage(dict(layers), part, index == 0, index == count - 1))
    return tuple(result)


def check_divides(config: ModelConfig, axes: Mapping[str, int]) -> None:
    """Raise ValueError, naming parameter and axes, where the mesh would tear a head, an expert or a matrix row."""
    for what, size, mesh_axes in inventory(config).constraints:
        if size % prod(axes[axis] for axis in mesh_axes):
            shown = " x ".join(f"{axis} {axes[axis]}" for axis in mesh_axes)
            raise ValueError(
                f"{what} has size {size}, which the mesh axes {shown} do not divide; take another size for them."
            )


def divides(config: ModelConfig, axes: Mapping[str, int]) -> bool:
    """Whether `check_divides` and `stages` accept the mesh axes."""
    divisors, layers = _divisors(config)
    return axes["stage"] <= layers and all(
        divisor % prod(axes[axis] for axis in mesh_axes) == 0 for mesh_axes, divisor in divisors
    )


@lru_cache(maxsize=8)
def _divisors(config: ModelConfig) -> tuple[tuple[tuple[tuple[str, ...], int], ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for _, size, mesh_axes in inventory(config).constraints:
        found[mesh_axes] = gcd(found.get(mesh_axes, 0), size)
    return tuple(found.items()), config.num_layers
