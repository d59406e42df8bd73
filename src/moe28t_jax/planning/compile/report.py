"""Compile a step for a deployment and say what the compiler made of it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel.expert_places import config_on
from moe28t_jax.parallel.mesh_file import MeshFile
from moe28t_jax.planning.chips import chip
from moe28t_jax.planning.compile.collectives import Assumptions, Collective
from moe28t_jax.planning.compile.hlo import Module, parse
from moe28t_jax.planning.compile.minimum import destinations, least_all_to_all_bytes, least_memory_bytes
from moe28t_jax.planning.compile.topology import GPU_KINDS
from moe28t_jax.planning.compile.traffic import NOTHING, Share, traffic
from moe28t_jax.planning.compile.weights import Movement, Weight, movements
from moe28t_jax.planning.plan import CHUNK, check_chip, default_batch


@dataclass(frozen=True)
class Analysis:
    """What the text of a compiled program tells, per device and run.

    memory_bytes: main memory read and written. all_to_all_bytes, repeated_expert_bytes, selection_bytes: sent, as in
    `Traffic`. uniform_memory_bytes, uniform_all_to_all_bytes: the same where tokens choose experts evenly.
    weight_copies_in_loop: weights written to memory again inside a loop over layers; weight_copies: outside of loops,
    whole stacks mostly. expert_gathers: routed experts sent to devices that do not hold them. unpacked_experts: 4-bit
    weights that become floats in memory.
    """

    memory_bytes: int
    uniform_memory_bytes: int
    collectives: dict[str, Collective]
    all_to_all_bytes: int
    uniform_all_to_all_bytes: int
    repeated_expert_bytes: int
    selection_bytes: int
    weight_copies_in_loop: tuple[Movement, ...]
    weight_copies: tuple[Movement, ...]
    expert_gathers: tuple[Movement, ...]
    unpacked_experts: tuple[Movement, ...]
    largest: tuple[Share, ...]
    unknown_loops: tuple[str, ...]
    instructions: int


def analyze(
    text: str,
    weights: Mapping[str, Weight],
    minimum_bytes: int = 1 << 20,
    assumed: Assumptions = NOTHING,
    uniform: Assumptions = NOTHING,
) -> Analysis:
    """Read `compiled.as_text()`.

    weights: which arguments are weights, by the names that they have in the function (`leaves[3]`), or by number as
    text where the text names none. minimum_bytes: smaller movements of weights do not count. assumed, uniform: for
    `traffic`, of any routing and of uniform routing.
    """
    module = parse(text)
    moved, evenly = traffic(module, assumed), traffic(module, uniform)
    found = movements(module, _numbered(module, weights), minimum_bytes)
    return Analysis(
        moved.memory_bytes,
        evenly.memory_bytes,
        moved.collectives,
        moved.all_to_all_bytes,
        evenly.all_to_all_bytes,
        moved.repeated_expert_bytes,
        moved.selection_bytes,
        tuple(x for x in found if x.kind == "copy" and x.in_loop),
        tuple(x for x in found if x.kind == "copy" and not x.in_loop),
        tuple(x for x in found if x.kind == "all-gather" and x.weight.expert),
        tuple(x for x in found if x.kind == "unpack"),
        tuple(moved.largest(20)),
        tuple(moved.unknown_loops),
        sum(len(computation.instructions) for computation in module.computations.values()),
    )


def _numbered(module: Module, weights: Mapping[str, Weight]) -> dict[int, Weight]:
    return {
        number: weights[name]
        for number, parameter in module.main.parameters.items()
        for name in (parameter.op_name, str(number))
        if name in weights
    }


@dataclass(frozen=True)
class CompileReport:
    """One step of one model on one deployment; bytes per device, and per step where they are moved.

    peak: of the whole program, arguments included; where the compiler refuses a program that is too large, what it says
    that the program needs. analysis: None then. minimum_*: see `planning.compile.minimum`; uniform_memory_bytes: the
    least with uniform routing.
    """

    model: str
    mesh: MeshFile
    phase: str
    batch: int
    context: int
    chunk: int
    layers: int
    explicit: bool
    limit_bytes: int
    peak_bytes: int
    argument_bytes: int
    temporary_bytes: int
    held_bytes: dict[str, int]
    lower_seconds: float
    compile_seconds: float
    minimum_memory_bytes: int
    uniform_memory_bytes: int
    minimum_all_to_all_bytes: int
    analysis: Analysis | None
    refusal: str = ""
    text: str = field(default="", repr=False)

    @property
    def fits(self) -> bool:
        return self.analysis is not None and self.peak_bytes <= self.limit_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        found = self.analysis
        result = {
            "model": self.model, "mesh": self.mesh.name, "devices": self.mesh.devices, "phase": self.phase,
            "batch": self.batch, "context": self.context, "chunk": self.chunk if self.phase == "prefill" else None,
            "layers": self.layers, "explicit": self.explicit, "fits": self.fits,
            "peak_bytes_per_device": self.peak_bytes, "limit_bytes_per_device": self.limit_bytes,
            "argument_bytes_per_device": self.argument_bytes, "temporary_bytes_per_device": self.temporary_bytes,
            "held_bytes_per_device": self.held_bytes,
            "lower_seconds": round(self.lower_seconds, 2), "compile_seconds": round(self.compile_seconds, 2),
            "minimum_hbm_bytes_per_step": self.minimum_memory_bytes,
            "minimum_hbm_bytes_per_step_uniform_routing": self.uniform_memory_bytes,
            "minimum_all_to_all_bytes_per_step": self.minimum_all_to_all_bytes,
        }  # fmt: skip
        if found is None:
            return result | {"refusal": self.refusal}
        return result | {
            "hbm_bytes_per_step": found.memory_bytes,
            "hbm_bytes_per_step_uniform_routing": found.uniform_memory_bytes,
            "all_to_all_bytes_per_step": found.all_to_all_bytes,
            "all_to_all_bytes_per_step_uniform_routing": found.uniform_all_to_all_bytes,
            "repeated_expert_bytes_at_most": found.repeated_expert_bytes,
            "selection_all_to_all_bytes_per_step": found.selection_bytes,
            "collectives": {kind: asdict(value) for kind, value in sorted(found.collectives.items())},
            "weight_copies_in_loop": [asdict(x) for x in found.weight_copies_in_loop],
            "weight_copies": [asdict(x) for x in found.weight_copies],
            "expert_gathers": [asdict(x) for x in found.expert_gathers],
            "unpacked_experts": [asdict(x) for x in found.unpacked_experts],
            "largest": [asdict(x) for x in found.largest],
            "loops_of_unknown_length": list(found.unknown_loops),
            "instructions": found.instructions,
        }


def compile_step(
    config: ModelConfig,
    mesh: MeshFile,
    phase: str = "decode",
    batch: int | None = None,
    context: int | None = None,
    chunk: int | None = None,
    explicit: bool = True,
    model: str = "model",
    devices: Any = None,
) -> CompileReport:
    """Compile a step of the engine, or of training, ahead of time for a deployment and read what came out.

    context: the mesh file's unless given; batch: `default_batch` unless given, as the planner takes it; chunk: `CHUNK`
    unless given.
    Other arguments as `program.lower_step`. Raises ValueError for what cannot be divided or lowered, and whatever the
    compiler raises; a program that is too large is no error but a report that says so.
    """
    import jax

    from moe28t_jax.planning.compile.program import lower_step

    config = config_on(mesh, config)
    chunk = CHUNK if chunk is None else chunk
    if batch is None:
        batch = default_batch(mesh, phase)
    if context is None:
        context = min(mesh.context, config.max_context)
    check_chip(mesh)
    chunk = min(chunk, context)
    count = {"prefill": chunk, "train": context}.get(phase, 1)
    began = time.perf_counter()
    program = lower_step(config, mesh, phase, batch, context, chunk, explicit, devices)
    lowered = time.perf_counter()
    refusal, analysis, text = "", None, ""
    peak = arguments = temporary = 0
    try:
        compiled = program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = str(error)
        peak = _needed_bytes(refusal)
        if not peak:
            raise
    else:
        memory = compiled.memory_analysis()
        assert memory is not None
        arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        peak = memory.peak_memory_in_bytes
        if mesh.kind in GPU_KINDS or mesh.kind == "cpu":
            # There, temporaries are one allocation, gaps between them included; a CPU's peak leaves them out.
            peak = max(peak, arguments + temporary)
        text = compiled.as_text() or ""
    done = time.perf_counter()
    if text:
        possible, uniform = assumptions(config, mesh.axes, batch, count)
        analysis = analyze(text, program.weights, assumed=possible, uniform=uniform)
    tokens = batch * count
    passes = 2 if phase == "train" else 1
    bounds = (config, mesh.axes, phase, batch, context, chunk, program.argument_bytes)
    return CompileReport(
        model, mesh, phase, batch, context, chunk, config.num_layers, explicit, chip(mesh.kind).memory_bytes, peak,
        arguments, temporary, program.argument_bytes, lowered - began, done - lowered,
        least_memory_bytes(*bounds), least_memory_bytes(*bounds, "uniform"),
        least_all_to_all_bytes(config, mesh.axes, tokens, passes), analysis,
        refusal.splitlines()[0] if refusal else "", text,
    )  # fmt: skip


def assumptions(
    config: ModelConfig, axes: Mapping[str, int], batch: int, count: int
) -> tuple[Assumptions, Assumptions]:
    """What a step of `count` tokens per row does whichever experts they choose, all that it has room for included, and
    what it does on average where they choose evenly."""
    from moe28t_jax.model.pipeline import num_microbatches
    from moe28t_jax.parallel.experts import tokens_of_ranks
    from moe28t_jax.parallel.rules import batch_layout

    layout = batch_layout(batch, SimpleNamespace(shape=axes))
    assert layout is not None
    stages, ranks = axes["stage"], axes["expert"] * axes["tensor"]
    turns = num_microbatches(batch // layout.size(layout.rows), stages, count) if stages > 1 else 1
    # Of the tokens that ranks have room for, not all may be there. Exchanges are those of one microbatch.
    owned, total = tokens_of_ranks(batch // turns, count, layout)
    possible = Assumptions(copies_share=total / (owned * ranks))
    if config.moe is None:
        return possible, possible
    top_k = config.moe.num_experts_per_token
    # A stage without a microbatch has no tokens: the mean over its turns.
    busy = turns / (turns + stages - 1)
    return possible, replace(
        possible,
        copies=busy * total / ranks * destinations(ranks, config.moe),
        experts_share=busy * (1.0 - (1.0 - top_k / config.moe.num_experts) ** total),
    )


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _needed_bytes(refusal: str) -> int:
    """What a compiler says that a program needs which is too large; 0 where it says something else."""
    match = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", refusal)
    if match:
        return round(float(match[1]) * _UNITS[match[2]])
    return 0
