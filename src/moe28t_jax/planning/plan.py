"""The planner: does a model fit on a deployment, how fast can it be at best, and what does a token cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel.expert_places import config_on, unpadded
from moe28t_jax.parallel.mesh_file import AXES, MAX_TENSOR, MeshFile
from moe28t_jax.planning.chips import Chip, chip
from moe28t_jax.planning.inventory import check_divides, divides, held, stages, total
from moe28t_jax.planning.memory import (
    GRADIENT_BYTES,
    PHASES,
    DeviceBytes,
    Phase,
    Rows,
    StateBytes,
    Work,
    decode_spread,
    device_bytes,
    divide_work,
    state_bytes,
    trained_parameters,
    weight_bytes,
)
from moe28t_jax.planning.prices import Prices, load_prices
from moe28t_jax.planning.roofline import Roofline, roofline

MAX_CHIPS = 65_536
"""Of a search, whose meshes are divisions of all devices over five axes; no pod has as many."""

NAIVE_BYTES_PER_PARAMETER = 0.5
NAIVE_HEADROOM = (1.2, 1.3)
CHUNK = 8192
"""New tokens of a prefill step, unless told otherwise."""


@dataclass(frozen=True)
class Plan:
    """The planner's answer for one model on one mesh; sizes in bytes, times in seconds.

    weights_bytes: all tensors as stored, vision included. naive_weights_bytes: the rough figure, 0.5 byte a parameter.
    per_device: of the device that holds most. work: its rows and tokens. step: the roofline of this phase. decode_step:
    of a decode step at the same batch and context (None in training). average_seconds: of a step, averaged over the
    prompt in prefill.
    """

    model: str
    config: ModelConfig
    mesh: MeshFile
    chip: Chip
    phase: Phase
    batch: int
    context: int
    chunk: int
    weights_bytes: int
    parameters: int
    state_per_sequence: StateBytes
    per_device: DeviceBytes
    work: Work
    step: Roofline
    decode_step: Roofline | None
    average_seconds: float
    prices: Prices

    @property
    def fits(self) -> bool:
        return self.per_device.fits

    @property
    def naive_weights_bytes(self) -> int:
        return round(NAIVE_BYTES_PER_PARAMETER * self.parameters)

    @property
    def bound(self) -> str:
        """The resource that takes the step's time: `hbm`, `flop` or `interconnect`."""
        return self.step.bound

    @property
    def tokens_per_second(self) -> float:
        """Of the whole mesh: generated in decode, read in prefill (averaged over the prompt), trained on."""
        return self.work.step_tokens / self.average_seconds

    @property
    def serial_tokens_per_second(self) -> float:
        """Of the whole mesh if nothing overlapped: what the search goes by, since no program overlaps everything."""
        return self.work.step_tokens / self.step.serial_seconds

    @property
    def price_per_hour(self) -> float | None:
        price = self.prices.per_chip_hour.get(self.mesh.kind)
        return None if price is None else price * self.mesh.chips

    @property
    def cost_per_million_tokens(self) -> float | None:
        """None where the price table does not know the chip, or the model does not fit."""
        price = self.price_per_hour
        return None if price is None or not self.fits else price / 3600 / self.tokens_per_second * 1e6

    @property
    def replication(self) -> float:
        """How often the mesh holds each byte of the weights, on average."""
        return self.per_device.weights * self.mesh.devices / self.weights_bytes

    @property
    def verdict(self) -> str:
        """One sentence: whether it fits, and by how much."""
        device = self.per_device
        room = device.limit - device.total
        where = f"{self.mesh.chips} x {self.chip.name}"
        if self.fits:
            return f"{self.model} fits on {where}: {gigabytes(room)} of {gigabytes(device.limit)} per device stay free."
        return (
            f"{self.model} does not fit on {where}: a device would hold {gigabytes(device.total)} and has "
            f"{gigabytes(device.limit)}, {gigabytes(-room)} less."
        )

    def arithmetic(self) -> list[str]:
        """How the verdict comes about, line by line."""
        axes, lines = self.mesh.axes, []
        parts = total(unpadded(self.config))
        experts, dense = parts["experts"].stored_bytes, parts["tensor"].stored_bytes
        rest = parts["replicated"].stored_bytes
        lines.append(
            f"weights: {self.weights_bytes:,} bytes = experts {experts:,} + divided by tensor {dense:,} + "
            f"repeated {rest:,}"
        )
        moe = self.config.moe
        if moe is not None and moe.slots > moe.num_experts:
            lines.append(
                f"places for experts: {moe.slots:,}, which the mesh divides, {moe.slots - moe.num_experts:,} of them "
                f"empty: {gigabytes(total(self.config)['experts'].stored_bytes - experts)} more than the weights"
            )
        low, high = (gigabytes(self.naive_weights_bytes * factor) for factor in NAIVE_HEADROOM)
        lines.append(
            f"rough figure: {self.parameters:,} parameters x 0.5 = {gigabytes(self.naive_weights_bytes)}; "
            f"with 20 to 30% headroom {low} to {high}"
        )
        fleet = self.per_device.limit * self.mesh.devices
        relation = "<" if fleet < self.weights_bytes else ">="
        lines.append(
            f"memory in all: {self.mesh.devices} devices x {gigabytes(self.per_device.limit)} = {gigabytes(fleet)} "
            f"{relation} weights {gigabytes(self.weights_bytes)}"
        )
        stage = held(self.config, axes["stage"])
        parts = weight_bytes(stage, axes)
        ranks = axes["expert"] * axes["tensor"]
        of = ""
        if axes["stage"] > 1:
            of = f" ({stage.num_layers} of {self.config.num_layers} layers, embedding and head)"
        if self.phase == "train":
            own = trained_parameters(self.config, stage, axes)
            lines.append(
                f"a device trains{of}: {own:,} parameters, float32 masters {gigabytes(self.per_device.weights)}, "
                f"moments in bfloat16 and float32 {gigabytes(self.per_device.state)}, among the activations gradients "
                f"{gigabytes(own * GRADIENT_BYTES)}"
            )
        else:
            lines.append(
                f"weights of a device{of}: experts / {ranks} = {gigabytes(parts['experts'])}, + / {axes['tensor']} = "
                f"{gigabytes(parts['tensor'])}, + repeated {gigabytes(parts['replicated'])} = "
                f"{gigabytes(self.per_device.weights)}"
            )
            one = self.state_per_sequence
            lines.append(
                f"state of a sequence: recurrent {gigabytes(one.recurrent)} + windows {gigabytes(one.window)} + "
                f"latents {gigabytes(one.latents)} + index keys {gigabytes(one.index_keys)} = {gigabytes(one.total)}"
            )
            lines.append(
                f"state of a device: {self.work.rows} rows, {self.work.cached:,} tokens of each = "
                f"{gigabytes(self.per_device.state)}"
            )
        lines.append(
            f"total of a device: {gigabytes(self.per_device.weights)} + {gigabytes(self.per_device.state)} + "
            f"activations {gigabytes(self.per_device.activations)} = {gigabytes(self.per_device.total)} "
            f"{'<=' if self.fits else '>'} {gigabytes(self.per_device.limit)}"
        )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        device = self.per_device
        return {
            "model": self.model,
            "phase": self.phase,
            "batch": self.batch,
            "context": self.context,
            "mesh": {
                "name": self.mesh.name,
                "kind": self.mesh.kind,
                "topology": self.mesh.topology,
                "chips": self.mesh.chips,
                "devices": self.mesh.devices,
                "spare_devices": self.mesh.spare_devices,
                "pad_experts": self.mesh.pad_experts,
                "axes": dict(self.mesh.axes),
            },
            "fits": self.fits,
            "verdict": self.verdict,
            "parameters": self.parameters,
            "weights_bytes": self.weights_bytes,
            "naive_weights_bytes": self.naive_weights_bytes,
            "naive_weights_bytes_with_headroom": [
                round(self.naive_weights_bytes * f) for f in NAIVE_HEADROOM
            ],
            "weights_replication": self.replication,
            "state_bytes_per_sequence": {
                **asdict(self.state_per_sequence),
                "total": self.state_per_sequence.total,
            },
            "per_device": {
                "weights": device.weights,
                "state": device.state,
                "activations": device.activations,
                "total": device.total,
                "limit": device.limit,
            },
            "expert_axis_divides": "rows" if self.work.spread == "batch" else "tokens",
            "decode_step_seconds": None if self.decode_step is None else self.decode_step.seconds,
            "step_seconds": self.step.seconds,
            "step_tokens": self.work.step_tokens,
            "seconds": asdict(self.step.cost),
            "bound": self.bound,
            "tokens_per_second": self.tokens_per_second,
            "currency": self.prices.currency,
            "price_per_hour": self.price_per_hour,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "prices_note": self.prices.note,
            "arithmetic": self.arithmetic(),
        }


def gigabytes(value: float | int) -> str:
    """Bytes in words: GB below a thousand of them, TB above, MB for little."""
    if value >= 1e12:
        return f"{value / 1e12:.3f} TB"
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def default_batch(mesh: MeshFile, phase: str) -> int:
    """Sequences of a step where nobody says how many: the mesh file's; in prefill one for each copy of the model, which
    is how the engine reads prompts."""
    return mesh.axes["data"] if phase == "prefill" else mesh.batch


def make_plan(
    config: ModelConfig,
    mesh: MeshFile,
    phase: Phase = "decode",
    batch: int | None = None,
    context: int | None = None,
    chunk: int = CHUNK,
    model: str = "the model",
    prices: Prices | None = None,
) -> Plan:
    """Plan one model on one mesh. context (tokens of each sequence) is the mesh file's unless given, batch (sequences)
    that of `default_batch`.

    Raises ValueError for an unknown chip, a mesh that the model's shapes do not divide over, or a context beyond the
    model's own.
    """
    config = config_on(mesh, config)
    batch = default_batch(mesh, phase) if batch is None else batch
    context = mesh.context if context is None else context
    device = _check(config, mesh, phase, batch, context, chunk)
    work, per_device = _divide(config, mesh, device, phase, batch, context, chunk)
    step = roofline(config, mesh, device, work)
    decode = None
    if phase == "decode":
        decode = step
    elif phase == "prefill":
        decode_work, _ = _divide(config, mesh, device, "decode", batch, context, chunk)
        decode = roofline(config, mesh, device, decode_work)
    average = step.seconds
    if phase == "prefill" and context > chunk:
        # The last chunk sees the whole prompt, the middle one half of it; time grows linearly between.
        middle = max(chunk, context // 2)
        half = divide_work(config, mesh.axes, phase, batch, middle, chunk, work.spread, device.cache_lanes)
        average = roofline(config, mesh, device, half).seconds
    parts = total(unpadded(config)).values()
    return Plan(
        model, config, mesh, device, phase, batch, context, chunk,
        sum(part.stored_bytes for part in parts), sum(part.parameters for part in parts),
        state_bytes(config, context, device.cache_lanes), per_device, work, step, decode, average,
        load_prices() if prices is None else prices,
    )  # fmt: skip


def _divide(
    config: ModelConfig, mesh: MeshFile, device: Chip, phase: Phase, batch: int, context: int, chunk: int
) -> tuple[Work, DeviceBytes]:
    """The work of a device and what it holds."""
    spreads: dict[Phase, Rows] = {
        "decode": decode_spread(batch, mesh.axes),
        "prefill": "context",
        "train": decode_spread(batch, mesh.axes),
    }
    work = divide_work(config, mesh.axes, phase, batch, context, chunk, spreads[phase], device.cache_lanes)
    return work, device_bytes(config, mesh.axes, work, device.memory_bytes)


def check_chip(mesh: MeshFile) -> Chip:
    """The chip of a mesh. Raises ValueError for one that is not known, or that is another number of devices."""
    device = chip(mesh.kind)
    if mesh.devices_per_chip != device.devices_per_chip:
        raise ValueError(
            f"Mesh {mesh.name!r} counts {mesh.devices_per_chip} devices per chip; a {device.name} is "
            f"{device.devices_per_chip}."
        )
    return device


def _check(config: ModelConfig, mesh: MeshFile, phase: Phase, batch: int, context: int, chunk: int) -> Chip:
    device = check_chip(mesh)
    if phase not in PHASES:
        raise ValueError(f"The phase is {phase!r}; it is one of {', '.join(PHASES)}.")
    for name, value in (("batch", batch), ("context", context), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it is a positive whole number.")
    if context > config.max_context:
        raise ValueError(f"context is {context}; this configuration allows 1 to {config.max_context} tokens.")
    if not divides(config, mesh.axes):
        check_divides(config, mesh.axes)
        stages(config, mesh.axes["stage"])
    return device


def search(
    config: ModelConfig,
    kind: str,
    chips: int,
    phase: Phase = "decode",
    batch: int = 8,
    context: int = 131_072,
    chunk: int = CHUNK,
    model: str = "the model",
    prices: Prices | None = None,
) -> Plan:
    """The plan of the mesh with most tokens per second, nothing overlapped, among those that fit on so many chips of a
    kind; where none fits, of the one that comes nearest. Chips beyond the largest power of two may stand by.

    Raises ValueError where the model divides over no mesh of that many chips.
    """
    device = chip(kind)
    if chips < 1:
        raise ValueError(f"The number of chips is {chips}; it is a positive whole number.")
    if chips > MAX_CHIPS:
        raise ValueError(f"The number of chips is {chips}; the search goes up to {MAX_CHIPS:,}: take fewer.")
    _check_independent(config, device, phase, batch, context, chunk)
    best: tuple[tuple[bool, float, int], MeshFile] | None = None
    for mesh in _meshes(config, device, chips, batch, context):
        work, per_device = _divide(config, mesh, device, phase, batch, context, chunk)
        # The time of a mesh that does not fit says nothing.
        rate = (
            work.step_tokens / roofline(config, mesh, device, work).serial_seconds if per_device.fits else 0.0
        )
        score = (per_device.fits, rate, -per_device.total)
        if best is None or score > best[0]:
            best = score, mesh
    if best is None:
        raise ValueError(
            f"{model} divides over no mesh of {chips} {device.name}; take a power of two of them, or a smaller number."
        )
    return make_plan(config, best[1], phase, batch, context, chunk, model, prices)


def _check_independent(
    config: ModelConfig, device: Chip, phase: Phase, batch: int, context: int, chunk: int
) -> None:
    """Raise what would be wrong on every mesh, so that a search does not hide it."""
    one = dict.fromkeys(AXES, 1)
    per_chip = device.devices_per_chip
    mesh = MeshFile("one", device.kind, "1", 1, per_chip, one | {"data": per_chip})
    _check(config, mesh, phase, batch, context, chunk)


def _meshes(config: ModelConfig, device: Chip, chips: int, batch: int, context: int) -> Iterator[MeshFile]:
    """Every division of all devices, and of the largest power of two of them, that the model's shapes allow."""
    devices = chips * device.devices_per_chip
    topology = "x".join(map(str, _wiring(device, chips)))
    for used in dict.fromkeys((devices, 1 << (devices.bit_length() - 1))):
        for sizes in _factors(used, len(AXES)):
            axes: dict[str, int] = dict(zip(AXES, sizes, strict=True))
            if axes["tensor"] <= MAX_TENSOR and divides(config, axes):
                yield MeshFile(
                    f"{device.kind}-{chips}", device.kind, topology, chips, used, axes, batch, context,
                    "found by the search", devices - used,
                )  # fmt: skip


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)


def _wiring(device: Chip, chips: int) -> tuple[int, ...]:
    """Hosts and chips, or the torus nearest to a cube (v6e: a square)."""
    if device.wiring == "switch":
        per_host = min(device.domain, chips)
        return (chips // per_host, per_host) if chips % per_host == 0 else (chips,)
    dimensions = 2 if device.kind == "v6e" else 3
    shapes = (tuple(sorted(sizes)) for sizes in _factors(chips, dimensions))
    best = min(set(shapes), key=lambda sizes: (sum(sizes), sizes))
    assert prod(best) == chips
    return best
