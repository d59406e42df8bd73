"""What a compiled program moves per run: main memory and collectives, loops counted as often as they run.

XLA's own cost analysis counts the body of a loop once and knows nothing of kernels; this one reads the program's text.
Bytes of main memory are those that the schedule asks for: every operation outside of a fusion reads its operands and
writes its results, slices and in-place updates count what they touch, and what lies in a scratchpad costs nothing. A
kernel counts the bytes of its own cost estimate, else its operands and results. Of the branches of a conditional the
most expensive one counts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from moe28t_jax.planning.compile.hlo import Computation, Instruction, Module, Shape

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
REPEATED = "fetch_experts"
"""The scope of collectives that move experts which a device repeats."""
COMBINE = "/moe_combine/"
"""The scope of collectives that return what experts made."""
SELECTION = "/merge_shards/"
"""The scope of collectives that move candidates of index selection to whom they are merged by."""

RUNS = ("call", "call-start", "async-start")
"""Operations that run a computation once, now or meanwhile."""

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain", "add-dependency", "async-update", "call-update", "while", "conditional", *RUNS,
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "get-tuple-element", "copy", "transpose", "convert"}
_ESTIMATE = re.compile(r'"bytes_accessed":"?(\d+)')


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind. count: operations in the program. executed: with loops. bytes: what one device sends
    in all of them with the least traffic (a ring); of ragged ones the most they may send."""

    count: int = 0
    executed: int = 0
    bytes: int = 0

    def __add__(self, other: Collective) -> Collective:
        return Collective(self.count + other.count, self.executed + other.executed, self.bytes + other.bytes)


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


def traffic(module: Module, copies_share: float = 1.0) -> Traffic:
    """Count a whole program.

    copies_share: of the copies of tokens that devices have room to send to experts, the part that there can be: where
    devices share a few tokens, each has room for one and most have none.
    """
    counter = _Counter(module)
    result = Traffic()
    times = counter.times(result.unknown_loops)
    for name, runs in times.items():
        for instruction in module.computations[name]:
            kind = collective_kind(instruction)
            if kind is not None:
                sent = _sent_bytes(
                    module.computations[name], instruction, kind, module.partitions, copies_share
                )
                if REPEATED in instruction.op_name:
                    result.repeated_expert_bytes += runs * sent
                    sent = 0
                if kind in ALL_TO_ALL and SELECTION in instruction.op_name:
                    result.selection_bytes += runs * sent
                found = result.collectives.get(kind, Collective())
                result.collectives[kind] = found + Collective(1, runs, runs * sent)
            if name in counter.fused:
                continue
            moved = counter.bytes(module.computations[name], instruction) * runs
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
    return result


def collective_kind(instruction: Instruction) -> str | None:
    """The kind of a collective, of those that run meanwhile the beginning alone; None for any other operation."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in COLLECTIVES else None


def group_size(instruction: Instruction, partitions: int) -> int:
    """How many devices take part in one group of a collective."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", instruction.attributes)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        # A part of an axis is `'axis':(size before it)its size`.
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        return prod(int(size) if size else sizes[name] for name, size in parts)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", instruction.attributes)
    if iota:
        return int(iota[2])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", instruction.attributes)
    if listed:
        return len(listed[1].split(","))
    return partitions


def _sent_bytes(
    computation: Computation, instruction: Instruction, kind: str, partitions: int, copies_share: float
) -> int:
    operands = sum(_operand(computation, name).bytes for name in dict.fromkeys(instruction.operands))
    size = group_size(instruction, partitions)
    others = (size - 1) / size
    if kind == "all-gather":
        return round(operands * (size - 1))
    if kind == "all-reduce":
        return round(2 * operands * others)
    if kind == "ragged-all-to-all":
        # Over all devices as much is sent as is received, and neither is more than its buffer has room for. The other
        # operands say what goes where.
        sent = _operand(computation, instruction.operands[0]).bytes
        # What begins it results in a tuple of operands, destination and bookkeeping.
        begins = instruction.opcode.endswith("-start")
        room = _operand(computation, instruction.operands[1]) if begins else instruction
        # There are as many copies on the way back, where they are received.
        if COMBINE in instruction.op_name:
            return round(min(sent, room.bytes * copies_share) * others)
        return round(min(sent * copies_share, room.bytes) * others)
    if kind in ("reduce-scatter", "all-to-all"):
        return round(operands * others)
    return operands


def _operand(computation: Computation, name: str) -> Instruction:
    return computation.instructions[name]


class _Counter:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._costs: dict[tuple[str, bool], int] = {}
        self.fused = _fused(module)

    def times(self, unknown: list[str]) -> dict[str, int]:
        """How often every computation runs, bodies of fusions included."""
        result: Counter[str] = Counter()

        def visit(name: str, runs: int) -> None:
            result[name] += runs
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
                        visit(body, runs * trips)
                elif instruction.opcode == "conditional":
                    visit(self._dearest(branches(instruction)), runs)
                elif "to_apply" in calls and instruction.opcode not in RUNS:
                    continue  # the function of one element
                else:
                    for called in _flat(calls.values()):
                        visit(called, runs)

        visit(self._module.entry, 1)
        unknown[:] = list(dict.fromkeys(unknown))
        return dict(result)

    def _dearest(self, names: tuple[str, ...]) -> str:
        return max(names, key=self._cost)

    def _cost(self, name: str) -> int:
        """Bytes of one run of a computation, with what it calls."""
        key = (name, True)
        if key in self._costs:
            return self._costs[key]
        total = 0
        computation = self._module.computations[name]
        for instruction in computation:
            calls = instruction.calls
            if instruction.opcode == "while":
                total += (self._module.trips(instruction) or 1) * self._cost(calls["body"][0])
            elif instruction.opcode == "conditional":
                total += max(self._cost(branch) for branch in branches(instruction))
            elif instruction.opcode in RUNS:
                total += sum(self._cost(called) for called in _flat(calls.values()))
            else:
                total += self.bytes(computation, instruction)
        self._costs[key] = total
        return total

    def bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Bytes of main memory that one operation reads and writes, without computations that it calls."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith("-done"):
            return 0
        operands = [_operand(computation, name) for name in dict.fromkeys(instruction.operands)]
        if opcode == "custom-call":
            estimate = _estimated_bytes(instruction)
            if estimate is not None:
                return estimate
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
            # Rows are read out of the first operand and written into the second, which is the result. Experts that are
            # repeated move where loads are uneven.
            return 0 if REPEATED in instruction.op_name else sum(x.memory_bytes for x in operands[:2])
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


def _estimated_bytes(instruction: Instruction) -> int | None:
    match = _ESTIMATE.search(instruction.attributes)
    return int(match[1]) if match else None


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
    "ALL_TO_ALL", "COLLECTIVES", "Collective", "Share", "Traffic", "branches", "by_operation", "collective_kind",
    "group_size", "scope", "traffic",
]  # fmt: skip
