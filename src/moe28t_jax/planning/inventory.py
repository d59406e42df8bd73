"""What a configuration consists of, sorted by how a mesh divides it. Derived from the parameter declaration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Literal

from moe28t_jax.config import ModelConfig, Parameter, declare_globals, declare_layer, declare_vision, segments
from moe28t_jax.parallel.expert_places import EXPERT_AXES, places

Division = Literal["experts", "tensor", "replicated"]
LayerKind = tuple[str, str]
"""Kind of attention and kind of MLP."""

DIVISIONS: Mapping[Division, tuple[str, ...]] = {
    "experts": EXPERT_AXES,
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
    """Parameters and stored bytes of one division of one part."""

    parameters: int = 0
    stored_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.parameters + other.parameters, self.stored_bytes + other.stored_bytes)

    def used_bytes(self, phase: str) -> int:
        """As they compute: as stored (experts packed), in training as copies of masters in bfloat16."""
        return 2 * self.parameters if phase == "train" else self.stored_bytes

    def __mul__(self, count: int) -> Amount:
        return Amount(self.parameters * count, self.stored_bytes * count)


Part = dict[Division, Amount]


@dataclass(frozen=True)
class Inventory:
    """Layers by kind, the parts outside the layers (tables: those of which a token reads a row or nothing), what is
    declared of a layer by kind and of text outside of layers (None), and what must divide: (what, size, mesh axes)."""

    layers: Mapping[LayerKind, Part]
    tables: Part
    head: Part
    declared: Mapping[LayerKind | None, tuple[Parameter, ...]]
    constraints: tuple[tuple[str, int, tuple[str, ...]], ...]


@lru_cache(maxsize=8)
def inventory(config: ModelConfig) -> Inventory:
    """Sort every declared parameter."""
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
    outside = tuple(declare_globals(config))
    vision = declare_vision(config.vision, config.hidden_size) if config.vision is not None else ()
    tables = part([*(p for p in outside if p.group == "embedding"), *vision])
    head = part(p for p in outside if p.group != "embedding")
    declared: dict[LayerKind | None, tuple[Parameter, ...]] = {None: tuple(outside)}
    declared |= {kind: tuple(declare_layer(config, layer)) for kind, layer in kinds.items()}
    return Inventory(layers, tables, head, declared, tuple(constraints))


def _division(parameter: Parameter, constraints: dict[tuple[str, int, tuple[str, ...]], None]) -> Division:
    for logical, division in _RULES:
        if logical in parameter.axes:
            size = parameter.shape[parameter.axes.index(logical)]
            constraints[f"{parameter.name} ({logical})", size, DIVISIONS[division]] = None
            return division
    return "replicated"


_LEAST_PIECE = 8
"""As `parallel.sharding` divides masters further."""


def master_pieces(parameter: Parameter, axes: Mapping[str, int]) -> int:
    """Into how many pieces training cuts the master of a parameter: a matrix, where it has an axis that is long enough,
    over all devices of a stage."""
    found: dict[tuple[str, int, tuple[str, ...]], None] = {}
    division = _division(parameter, found)
    pieces = prod(axes[axis] for axis in DIVISIONS[division])
    free = prod(axes[axis] for axis in ("data", "expert", "context") if axis not in DIVISIONS[division])
    divided = next(
        (
            parameter.axes.index(logical)
            for logical, one in _RULES
            if one == division and logical in parameter.axes
        ),
        None,
    )
    long = any(
        size % free == 0 and size // free >= _LEAST_PIECE
        for place, size in enumerate(parameter.shape)
        if place != divided
    )
    return pieces * free if len(parameter.shape) >= 2 and long else pieces


def _amount(parameter: Parameter, config: ModelConfig) -> Amount:
    if parameter.quantizable and config.expert_quantization == "mxfp4":
        # 32 codes of half a byte and one scale byte: 4.25 bits per parameter.
        stored = parameter.size // 32 * 17
    else:
        stored = parameter.size * (4 if parameter.dtype == "float32" else 2)
    return Amount(parameter.size, stored)


@lru_cache(maxsize=8)
def total(config: ModelConfig) -> Part:
    """The whole model by division; its stored bytes sum to `parameter_count().stored_bytes`."""
    return held(config, 1).part


@dataclass(frozen=True)
class Stage:
    """Layers that one device runs: how many of each kind, and their parameters. ends: with embedding, head and image
    tower."""

    layers: Mapping[LayerKind, int]
    part: Part
    ends: bool

    @property
    def num_layers(self) -> int:
        return sum(self.layers.values())


@lru_cache(maxsize=256)
def stages(config: ModelConfig, count: int) -> tuple[Stage, Stage | None]:
    """What `count` pipeline stages are made of: the share of each, and what all of them run alike (None with one stage,
    which has everything).

    Only the layers that repeat (`config.segments`) are divided; those before and after them, embedding, head and image
    tower are on every stage. Raises ValueError where the stages do not divide the repeats.
    """
    everything = range(config.num_layers)
    if count == 1:
        return _stage(config, everything, True), None
    repeated = [segment for segment in segments(config, True) if segment.repeats > 1]
    if not repeated or any(segment.repeats % count for segment in repeated):
        repeats = " and ".join(str(segment.repeats) for segment in repeated) or "no"
        raise ValueError(
            f"The mesh has {count} pipeline stages, which do not divide the {repeats} repeats of the model's "
            f"{config.num_layers} layers; take another size for the axis stage."
        )
    # Every stage has the same kinds: each repeat is one whole period.
    own = [
        segment.layer(repeat, position)
        for segment in repeated
        for repeat in range(segment.repeats // count)
        for position in range(segment.period)
    ]
    divided = {
        layer for segment in repeated for layer in range(segment.first, segment.first + segment.num_layers)
    }
    alike = [layer for layer in everything if layer not in divided]
    return _stage(config, own, False), _stage(config, alike, True)


@lru_cache(maxsize=256)
def held(config: ModelConfig, count: int) -> Stage:
    """What a device of any of `count` pipeline stages holds."""
    own, alike = stages(config, count)
    if alike is None:
        return own
    layers = Counter(own.layers) + Counter(alike.layers)
    return Stage(
        dict(layers), {division: own.part[division] + alike.part[division] for division in DIVISIONS}, True
    )


def _stage(config: ModelConfig, numbers: Iterable[int], ends: bool) -> Stage:
    layers: Counter[LayerKind] = Counter((config.attention_kinds[i], config.mlp_kinds[i]) for i in numbers)
    parts = inventory(config)
    part: Part = {division: Amount() for division in DIVISIONS}
    for division in DIVISIONS:
        for kind, number in layers.items():
            part[division] += parts.layers[kind][division] * number
        if ends:
            part[division] += parts.tables[division] + parts.head[division]
    return Stage(dict(layers), part, ends)


def check_divides(config: ModelConfig, axes: Mapping[str, int]) -> None:
    """Raise ValueError, naming parameter and axes, where the mesh would tear a head, an expert or a matrix row."""
    for what, size, mesh_axes in inventory(config).constraints:
        ranks = prod(axes[axis] for axis in mesh_axes)
        if size % ranks:
            shown = " x ".join(f"{axis} {axes[axis]}" for axis in mesh_axes)
            padded = f" Or leave places empty: moe.expert_slots {places(size, ranks)}."
            raise ValueError(
                f"{what} has size {size}, which the mesh axes {shown} do not divide; take another size for them."
                f"{padded if mesh_axes == EXPERT_AXES else ''}"
            )


def divides(config: ModelConfig, axes: Mapping[str, int]) -> bool:
    """Whether `check_divides` and `stages` accept the mesh axes."""
    divisors, repeats = _divisors(config)
    return (axes["stage"] == 1 or (repeats > 0 and repeats % axes["stage"] == 0)) and all(
        divisor % prod(axes[axis] for axis in mesh_axes) == 0 for mesh_axes, divisor in divisors
    )


@lru_cache(maxsize=8)
def _divisors(config: ModelConfig) -> tuple[tuple[tuple[tuple[str, ...], int], ...], int]:
    """What the sizes along each set of mesh axes have in common, and the repeats of layers (0 for none)."""
    found: dict[tuple[str, ...], int] = {}
    for _, size, mesh_axes in inventory(config).constraints:
        found[mesh_axes] = gcd(found.get(mesh_axes, 0), size)
    repeats = gcd(*(segment.repeats for segment in segments(config, True) if segment.repeats > 1))
    return tuple(found.items()), repeats
