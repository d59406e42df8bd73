"""What a compiled program moves per run: main memory and collectives, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once and knows nothing of kernels; this one reads the program's text.
Bytes of main memory are those that the schedule asks for: every operation outside of a fusion reads its operands and
writes its results, slices and in-place updates count what they touch, and what lies in a scratchpad costs nothing. A
kernel counts what `kernels.kernel_bytes` says, else its operands and results. Of the branches of a conditional the
most expensive one counts, but where experts are repeated: typically none are.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from moe28t_jax.planning.compile.collectives import (
    ALL_TO_ALL,
    REPEATED,
    SELECTION,
    Assumptions,
    Collective,
    collective_kind,
    exchanged_bytes,
    sent_bytes,
)  # fmt: skip
from moe28t_jax.planning.compile.hlo import Computation, Instruction, Module, Shape
from moe28t_jax.planning.compile.kernels import kernel_bytes

RUNS = ("call", "call-start", "async-start")
"""Operations that run a computation once, now or meanwhile."""

REPEATS = "moe_repeated_experts/cond"
"""The end of a conditional's name of which one branch fetches experts that some device repeats and multiplies with
them."""
NOTHING = Assumptions()

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain", "add-dependency", "async-update", "call-update", "while", "conditional", *RUNS,
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "get-tuple-element", "copy", "transpose", "convert"}


@dataclass(frozen=True)
class Share:
    """Bytes of main memory that one operation of the program moves per run, with loops."""

    bytes: int
    times: int
    name: str
    opcode: str
    shape: str
    op_name: str
    line: int


@dataclass
class Traffic:
    """Per device and run of the program. unknown_loops: names of loops counted once because the number of their runs
    depends on values. repeated_expert_bytes: the most that experts which a device repeats can weigh; they travel only
    where loads are uneven, and are neither among the bytes of the collectives nor of memory. selection_bytes: sent by
    all-to-alls that merge the candidates of index selection, which are among the bytes of the collectives and are no
    expert's."""

    memory_bytes: int = 0
    collectives: dict[str, Collective] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    unknown_loops: list[str] = field(default_factory=list)
    repeated_expert_bytes: int = 0
    selection_bytes: int = 0

    @property
    def all_to_all_bytes(self) -> int:
        """Of all all-to-alls but those of index selection."""
        sent = sum(self.collectives[kind].bytes for kind in ALL_TO_ALL if kind in self.collectives)
        return sent - self.selection_bytes

    def largest(self, count: int) -> list[Share]:
        """The operations that move most."""
        return sorted(self.shares, key=lambda share: share.bytes, reverse=True)[:count]


def traffic(module: Module, assumed: Assumptions = NOTHING) -> Traffic:
    """Count a whole program. assumed: what its text does not tell; by default all happens that it has room for."""
    counter = _Counter(module, assumed)
    result = Traffic()
    times, aside = counter.times(result.unknown_loops)
    for name, runs in times.items():
        computation = module.computations[name]
        for instruction in computation:
            kind = collective_kind(instruction)
            if kind is not None:
                sent = sent_bytes(computation, instruction, kind, module.partitions, assumed)
                if REPEATED in instruction.op_name:
                    result.repeated_expert_bytes += runs * sent
                    sent = 0
                if kind in ALL_TO_ALL and SELECTION in instruction.op_name:
                    result.selection_bytes += runs * sent
                found = result.collectives.get(kind, Collective())
                result.collectives[kind] = found + Collective(1, runs, runs * sent)
            if name in counter.fused:
                continue
            moved = counter.bytes(computation, instruction) * runs
            if moved:
                result.memory_bytes += moved
                shape = ", ".join(map(str, instruction.shapes[:3]))
                result.shares.append(
                    Share(
                        moved,
                        runs,
                        instruction.name,
                        instruction.opcode,
                        shape,
                        instruction.op_name,
                        instruction.line,
                    )
                )
    for name, runs in aside.items():
        computation = module.computations[name]
        for instruction in computation:
            kind = collective_kind(instruction)
            # Nothing else is exchanged there; compilers for GPUs lose the scope's name.
            if kind is not None:
                sent = sent_bytes(computation, instruction, kind, module.partitions, NOTHING)
                result.repeated_expert_bytes += runs * sent
    return result


def _operand(computation: Computation, name: str) -> Instruction:
    return computation.instructions[name]


class _Counter:
    def __init__(self, module: Module, assumed: Assumptions = NOTHING) -> None:
        self._module = module
        self._assumed = assumed
        self._costs: dict[str, int] = {}
        self.fused = _fused(module)

    def times(self, unknown: list[str]) -> tuple[dict[str, int], dict[str, int]]:
        """How often every computation runs, bodies of fusions included; and what only runs where experts are
        repeated."""
        result: Counter[str] = Counter()
        aside: Counter[str] = Counter()

        def visit(name: str, runs: int, found: Counter[str], unknown: list[str]) -> None:
            found[name] += runs
            for instruction in self._module.computations[name]:
                calls = instruction.calls
                if not calls:
                    continue
                if instruction.opcode == "while":
                    trips = self._module.trips(instruction)
                    if trips is None:
                        unknown.append(instruction.name)
                        trips = 1
                    for body in calls["body"]:
                        visit(body, runs * trips, found, unknown)
                elif instruction.opcode == "conditional":
                    cheapest, dearest = self._extremes(instruction)
                    if instruction.op_name.endswith(REPEATS):
                        visit(cheapest, runs, found, unknown)
                        visit(dearest, runs, aside, [])
                    else:
                        visit(dearest, runs, found, unknown)
                elif "to_apply" in calls and instruction.opcode not in RUNS:
                    continue  # the function of one element
                else:
                    for called in _flat(calls.values()):
                        visit(called, runs, found, unknown)

        visit(self._module.entry, 1, result, unknown)
        unknown[:] = list(dict.fromkeys(unknown))
        return dict(result), dict(aside)

    def _extremes(self, conditional: Instruction) -> tuple[str, str]:
        """The branch that moves least and the one that moves most."""
        names = sorted(branches(conditional), key=self._cost)
        return names[0], names[-1]

    def _cost(self, name: str) -> int:
        """Bytes of one run of a computation, with what it calls."""
        if name in self._costs:
            return self._costs[name]
        total = 0
        computation = self._module.computations[name]
        for instruction in computation:
            calls = instruction.calls
            if instruction.opcode == "while":
                total += (self._module.trips(instruction) or 1) * self._cost(calls["body"][0])
            elif instruction.opcode == "conditional":
                cheapest, dearest = self._extremes(instruction)
                total += self._cost(cheapest if instruction.op_name.endswith(REPEATS) else dearest)
            elif instruction.opcode in RUNS:
                total += sum(self._cost(called) for called in _flat(calls.values()))
            else:
                total += self.bytes(computation, instruction)
        self._costs[name] = total
        return total

    def bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes of main memory that one operation reads and writes, without computations that it calls."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return 0
        operands = [_operand(computation, name) for name in dict.fromkeys(instruction.operands)]
        if opcode == "custom-call":
            moved = kernel_bytes(instruction, operands, self._assumed.experts_share)
            if moved is not None:
                return moved
        if opcode in ("fusion", "fusion-start"):
            return self._fusion(computation, instruction)
        if opcode in _SLICES:
            return _sliced(instruction, operands[0])
        if opcode == "dynamic-update-slice":
            update = operands[1] if len(operands) > 1 else operands[0]
            return update.memory_bytes + _touched(instruction.shapes[0], update.bytes)
        if opcode == "scatter":
            moved = sum(x.memory_bytes for x in operands[1:])
            return moved + _touched(instruction.shapes[0], operands[-1].bytes)
        if opcode == "slice-start":
            destination = instruction.shapes[1]
            return (destination.bytes if operands[0].memory_bytes else 0) + destination.memory_bytes
        if opcode in ("copy-start", "collective-permute-start", "all-gather-start"):
            # The result is a tuple of the destination and of bookkeeping.
            destination = instruction.shapes[0 if opcode == "copy-start" else 1]
            return operands[0].memory_bytes + destination.memory_bytes
        if opcode.removesuffix("-start") == "ragged-all-to-all":
            return exchanged_bytes(computation, instruction, self._assumed)
        return sum(x.memory_bytes for x in operands) + instruction.memory_bytes

    def _fusion(self, computation: Computation, instruction: Instruction) -> int:
        [name] = instruction.calls["calls"]
        inner = self._module.computations[name]
        total = 0
        for number, operand in enumerate(instruction.operands):
            source = _operand(computation, operand)
            if source.memory_bytes and number in inner.parameters:
                total += min(source.memory_bytes, self._read(inner, inner.parameters[number]))
        roots = _results(inner)
        for shape, root in zip(instruction.made_shapes, roots, strict=False):
            total += _touched(shape, _updated(inner, root))
        return total

    def _read(self, inner: Computation, value: Instruction) -> int:
        """Bytes of a fusion's operand that its body reads."""
        total = 0
        for user in inner.users[value.name]:
            if user.opcode in _SLICES and user.operands[0] == value.name:
                total += user.bytes
            elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == value.name:
                continue
            elif user.opcode in _VIEWS:
                total += self._read(inner, user) if inner.users[user.name] else value.bytes
            elif user.opcode == "fusion":
                [name] = user.calls["calls"]
                nested = self._module.computations[name]
                if _is_view(nested):
                    total += self._read(inner, user)
                    continue
                total += sum(
                    self._read(nested, nested.parameters[number])
                    for number, operand in enumerate(user.operands)
                    if operand == value.name
                )
            elif user.opcode == "tuple":
                continue
            else:
                return value.bytes
        return min(total, value.bytes)


def branches(conditional: Instruction) -> tuple[str, ...]:
    """Computations of which a conditional runs one."""
    return tuple(_flat(conditional.calls.values()))


def _flat(groups: Iterable[tuple[str, ...]]) -> list[str]:
    return [name for group in groups for name in group]


def _fused(module: Module) -> set[str]:
    """Computations inside fusions, where values are not in memory."""
    found: set[str] = set()
    waiting = [
        called
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode in ("fusion", "fusion-start")
        for called in _flat(instruction.calls.values())
    ]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [c for x in module.computations[name] for c in _flat(x.calls.values())]
    return found


def _results(computation: Computation) -> list[Instruction]:
    root = computation.root
    if root.opcode == "tuple":
        return [computation.instructions[name] for name in root.operands]
    return [root]


def _updated(computation: Computation, root: Instruction) -> int:
    """Bytes that a fusion writes for one result: of an update in place those of the update."""
    while root.opcode in ("bitcast", "reshape", "copy"):
        root = computation.instructions[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return computation.instructions[root.operands[1]].bytes
    if root.opcode == "scatter":
        return computation.instructions[root.operands[-1]].bytes
    return root.bytes


def _is_view(computation: Computation) -> bool:
    """Whether a computation gives its only argument in another form."""
    root = computation.root
    while root.opcode in _VIEWS:
        root = computation.instructions[root.operands[0]]
    return root.opcode == "parameter" and len(computation.parameters) == 1


def _touched(shape: Shape, updated: int) -> int:
    return min(shape.bytes, updated) if shape.in_memory else 0


def _sliced(instruction: Instruction, source: Instruction) -> int:
    return (instruction.bytes if source.memory_bytes else 0) + instruction.memory_bytes


def by_operation(shares: Iterable[Share]) -> dict[str, int]:
    """Bytes by the scope of the model that an operation belongs to, largest first."""
    totals: defaultdict[str, int] = defaultdict(int)
    for share in shares:
        totals[scope(share.op_name)] += share.bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def scope(op_name: str) -> str:
    """The innermost named phase of the model in an operation's path."""
    parts = [part for part in op_name.split("/") if re.fullmatch(r"[a-z]+(_[a-z]+)+", part)]
    return parts[-1] if parts else "other"


__all__ = [
    "Share", "Traffic", "branches", "by_operation", "scope", "traffic",
]  # fmt: skip
