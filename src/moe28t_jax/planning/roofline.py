"""How long a step takes at least: bytes over bandwidth, operations over peak, messages over links; the longest counts.

A bound, not a forecast: perfect overlap, full rates, no latency of kernels and collectives, uniform routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel.expert_places import destinations
from moe28t_jax.parallel.mesh_file import MeshFile
from moe28t_jax.planning.chips import Chip
from moe28t_jax.planning.inventory import LayerKind, Stage, held, inventory, stages
from moe28t_jax.planning.memory import (
    ACTIVATION_BYTES,
    CACHE_BYTES,
    FLOAT32,
    GRADIENT_BYTES,
    MASTER_BYTES,
    MOMENTS_BYTES,
    Work,
    cache_bytes,
    ceil_div,
    layer_temporaries,
    split,
    trained_parameters,
    weight_bytes,
)

BOUNDS = ("hbm", "flop", "interconnect")
_QUERY_TILE = 512  # queries that share one reading of the index keys or latents in prefill
_CHUNK = 64  # tokens per chunk of the delta rule


@dataclass(frozen=True)
class Cost:
    """Seconds that one run of a step (or a stage of it) keeps each resource of a device busy."""

    hbm: float = 0.0
    flop: float = 0.0
    interconnect: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.hbm + other.hbm, self.flop + other.flop, self.interconnect + other.interconnect)

    def __mul__(self, factor: float | int) -> Cost:
        return Cost(self.hbm * factor, self.flop * factor, self.interconnect * factor)

    @property
    def seconds(self) -> float:
        return max(self.hbm, self.flop, self.interconnect)


@dataclass(frozen=True)
class Roofline:
    """seconds: least time of a step. cost: its parts, one after the other. bound: what takes most of it."""

    seconds: float
    cost: Cost

    @property
    def serial_seconds(self) -> float:
        """`seconds` if nothing overlapped."""
        return self.cost.hbm + self.cost.flop + self.cost.interconnect

    @property
    def bound(self) -> str:
        return max(BOUNDS, key=lambda name: getattr(self.cost, name))


def roofline(config: ModelConfig, mesh: MeshFile, chip: Chip, work: Work) -> Roofline:
    """Least seconds of one step of the whole mesh.

    Pipeline stages work at the same time on different microbatches (of decode: rows of the batch), each of which passes
    all stages; the first and the last ones leave stages without work. What all stages run alike is run once.
    """
    wires = _Wires(mesh, chip)
    own, alike = stages(config, mesh.axes["stage"])
    each = _stage_cost(config, own, mesh.axes, chip, wires, work)
    runs = work.microbatches + mesh.axes["stage"] - 1
    parts = [each * runs]
    if alike is not None:
        parts.append(_stage_cost(config, alike, mesh.axes, chip, wires, work.whole))
    if work.phase == "train":
        parts.append(_update_cost(config, held(config, mesh.axes["stage"]), mesh.axes, chip, wires))
    return Roofline(sum(part.seconds for part in parts), sum(parts, Cost()))


class _Wires:
    """Bytes per second that one device can send, by who exchanges with whom."""

    def __init__(self, mesh: MeshFile, chip: Chip) -> None:
        self._chip, self._axes = chip, mesh.axes
        self._hops = max(1.0, _mean_hops(mesh.wiring)) if chip.wiring == "torus" else 1.0
        self._dimensions = max(1, sum(size > 1 for size in mesh.wiring)) if chip.wiring == "torus" else 1

    def all_to_all(self) -> float:
        """Within the devices that share the experts. On a torus a message occupies one link per hop."""
        ranks = self._axes["expert"] * self._axes["tensor"]
        reach = ranks * self._axes["context"]
        if self._chip.wiring == "torus":
            return self._chip.link_bandwidth / self._hops
        return self._mixed(reach)

    def ring(self, *axes: str) -> float:
        """Around rings over the given axes. On a torus up to four devices lie along one dimension and use its links, up
        to sixteen lie in a plane, and more use all links."""
        if self._chip.wiring == "torus":
            size = prod(self._axes[axis] for axis in axes)
            spanned = min(self._dimensions, 1 if size <= 4 else 2 if size <= 16 else 3)
            return self._chip.link_bandwidth * spanned / self._dimensions
        # `context` varies fastest over neighbouring devices, then `tensor`, then `expert`.
        order = ("context", "tensor", "expert", "stage", "data")
        reach = 1
        for axis in order[: 1 + max(order.index(axis) for axis in axes)]:
            reach *= self._axes[axis]
        return self._chip.link_bandwidth if reach <= self._chip.domain else self._chip.network_bandwidth

    def _mixed(self, reach: int) -> float:
        inside = min(1.0, self._chip.domain / reach)
        return 1.0 / (inside / self._chip.link_bandwidth + (1.0 - inside) / self._chip.network_bandwidth)


def _mean_hops(wiring: tuple[int, ...]) -> float:
    """Mean distance between two chips of a torus, or of a grid where a slice is too small to be closed."""
    closed = all(size % 4 == 0 for size in wiring) if len(wiring) == 3 else all(size == 16 for size in wiring)
    total = 0.0
    for size in wiring:
        distances = (
            min(d, size - d) if closed else d for i in range(size) for d in (abs(i - j) for j in range(size))
        )
        total += sum(distances) / size**2
    return total


def _stage_cost(
    config: ModelConfig, stage: Stage, axes: Mapping[str, int], chip: Chip, wires: _Wires, work: Work
) -> Cost:
    """One run of one stage: a decode step, a prefill chunk, or one microbatch there and back."""
    train = work.phase == "train"
    # Copies of masters are written for the forward pass and again for the backward pass, and read three times.
    memory = _weight_traffic(config, stage, axes, work) * (5 if train else 1)
    state = 2 * _recurrent_bytes(config, stage, axes, work)
    flops = 2.0 * work.tokens * _dense_parameters(config, stage, axes)
    tensor, context = axes["tensor"], axes["context"] * (axes["expert"] if work.spread == "context" else 1)
    stream = work.tokens * config.hidden_size * ACTIVATION_BYTES
    sent = 0.0
    reading = moving = 0.0
    for kind, count in stage.layers.items():
        attention_bytes, attention_flops = _attention(config, kind, axes, work)
        reading += count * attention_bytes
        flops += count * attention_flops
        moving += count * 2.0 * sum(layer_temporaries(config, kind, axes, work))
        # Two sub-layers, each with an all-reduce over `tensor` (a reduce-scatter and an all-gather).
        sent += count * 2 * 2 * stream * (tensor - 1) / tensor / wires.ring("tensor")
        if kind[1] == "moe":
            moe = config.moe
            assert moe is not None
            width = moe.latent_size or config.hidden_size
            flops += count * 2.0 * work.routed * 3 * width * moe.intermediate_size
            sent += count * _exchange_bytes(config, axes, work) / wires.all_to_all()
        if context > 1:
            sent += (
                count * _context_bytes(config, kind, axes, work, context) / wires.ring("context", "expert")
            )
    # Attention residuals read the snapshots twice per layer, half of them on average.
    moving += stage.num_layers * 2.0 * (config.num_snapshots / 2 + 2) * stream
    if not stage.ends:
        sent += (1 + config.num_snapshots / 2) * stream / wires.ring("stage")
    if stage.ends:
        flops += 2.0 * work.head_rows * config.hidden_size * ceil_div(config.vocab_size, tensor)
    if train:
        # Forward, forward again for the backward pass, backward with twice the operations; no state is carried over.
        flops, moving, reading, sent, state = 4 * flops, 4 * moving, 3 * reading, 3 * sent, 0.0
    hbm = memory + state + reading + moving
    return Cost(hbm / chip.memory_bandwidth, flops / chip.compute_flops, sent)


def _weight_traffic(config: ModelConfig, stage: Stage, axes: Mapping[str, int], work: Work) -> float:
    """Each touched weight once, in training the copy that computes: everything but the embedding table and the image
    tower, and of the experts those that at least one token chose."""
    stored = weight_bytes(stage, axes, work.phase)
    if stage.ends:
        for division, amount in inventory(config).tables.items():
            stored[division] -= ceil_div(amount.used_bytes(work.phase), split(division, axes))
    touched = 1.0
    if config.moe is not None:
        touched = 1.0 - (1.0 - config.moe.num_experts_per_token / config.moe.num_experts) ** work.group_tokens
    return stored["experts"] * touched + stored["tensor"] + stored["replicated"]


def _dense_parameters(config: ModelConfig, stage: Stage, axes: Mapping[str, int]) -> float:
    """Parameters of one device that every token multiplies: neither experts nor head, table or image tower."""
    parts = inventory(config)
    total = 0.0
    for kind, count in stage.layers.items():
        for division in ("tensor", "replicated"):
            total += count * parts.layers[kind][division].parameters / split(division, axes)
    return total


def _recurrent_bytes(config: ModelConfig, stage: Stage, axes: Mapping[str, int], work: Work) -> float:
    """Recurrent states and convolution windows that a step reads and writes: of the rows it works on."""
    if not any(kind[0] == "kda" for kind in stage.layers):
        return 0.0
    delta = Stage({kind: n for kind, n in stage.layers.items() if kind[0] == "kda"}, {}, False)
    whole = cache_bytes(config, delta, axes, work)
    return whole / work.rows * _working_rows(work)


def _working_rows(work: Work) -> int:
    """Rows that one run works on."""
    return work.tokens if work.phase == "decode" else 1


def _attention(
    config: ModelConfig, kind: LayerKind, axes: Mapping[str, int], work: Work
) -> tuple[float, float]:
    """Bytes read from the cache (latents and index keys) and operations of one attention layer's mixing of tokens."""
    tensor, n = axes["tensor"], work.tokens
    if kind[0] == "kda":
        kda = config.kda
        assert kda is not None
        heads = ceil_div(kda.num_heads, tensor)
        per_token = 8 * kda.head_dim**2 + (0 if work.phase == "decode" else 6 * _CHUNK * kda.head_dim)
        return 0.0, float(n * heads * per_token)
    mla = config.mla
    assert mla is not None
    heads = ceil_div(mla.num_heads, tensor)
    divided = axes["context"] * (axes["expert"] if work.spread == "context" else 1)
    if work.phase == "decode":
        # Every device reads its part of the row; new tokens are on all of them.
        readings, seen, kept_share = n, work.cached, divided
    else:
        # New tokens are divided instead: each meets the whole row (in training, half of it on average).
        readings, kept_share = ceil_div(n, _QUERY_TILE), 1
        seen = work.context if work.phase == "prefill" else ceil_div(work.context, 2)
    pair = 2 * (mla.latent_dim + mla.kv_lora_rank)
    row_bytes = ceil_div(mla.latent_dim, work.lanes) * work.lanes * CACHE_BYTES
    if kind[0] == "mla":
        return float(readings * seen * row_bytes), float(n * seen * heads * pair)
    dsa = config.dsa
    assert dsa is not None
    kept = min(dsa.top_k, work.context) / kept_share
    bytes_read = readings * seen * dsa.head_dim * CACHE_BYTES + n * kept * row_bytes
    # The indexer is repeated over `tensor`, so that all of its devices select the same tokens.
    scoring = n * seen * 2 * dsa.num_heads * dsa.head_dim
    return float(bytes_read), float(scoring + n * kept * heads * pair)


def _exchange_bytes(config: ModelConfig, axes: Mapping[str, int], work: Work) -> float:
    """Dispatch and combine of one layer, sent by one device: one copy per distinct destination."""
    moe = config.moe
    assert moe is not None
    ranks = axes["expert"] * axes["tensor"]
    if ranks == 1:
        return 0.0
    own = work.group_tokens / ranks
    return 2 * own * destinations(ranks, moe) * (moe.latent_size or config.hidden_size) * ACTIVATION_BYTES


def _context_bytes(
    config: ModelConfig, kind: LayerKind, axes: Mapping[str, int], work: Work, context: int
) -> float:
    """What one device sends so that a row divided over `context` devices is one row again."""
    share = (context - 1) / context
    tensor = axes["tensor"]
    if kind[0] == "kda":
        kda = config.kda
        assert kda is not None
        if work.phase == "decode":
            return 0.0
        # The affine map of each segment, matrix and offset, to all.
        return share * context * 2 * ceil_div(kda.num_heads, tensor) * kda.head_dim**2 * FLOAT32
    mla = config.mla
    assert mla is not None
    heads = ceil_div(mla.num_heads, tensor)
    sent = 2 * share * work.tokens * heads * (mla.kv_lora_rank + 1) * FLOAT32
    if kind[0] == "dsa":
        assert config.dsa is not None
        sent += share * work.tokens * config.dsa.top_k * 2 * FLOAT32
    return sent


def _update_cost(
    config: ModelConfig, stage: Stage, axes: Mapping[str, int], chip: Chip, wires: _Wires
) -> Cost:
    """The optimiser's step, and what it takes to divide it: gradients are summed to where the masters lie, which are
    brought together once for the forward pass and once for the backward pass."""
    own = trained_parameters(config, stage, axes)
    hbm = 2.0 * own * (MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES) / chip.memory_bandwidth
    sent = 0.0
    for division, amount in stage.part.items():
        pieces = split(division, axes)
        copies = axes["data"] * axes["expert"] * axes["tensor"] * axes["context"] // pieces
        local = 3 * amount.parameters * ACTIVATION_BYTES
        sent += local / pieces * (copies - 1) / copies / wires.ring("data")
    return Cost(hbm, 0.0, sent)
