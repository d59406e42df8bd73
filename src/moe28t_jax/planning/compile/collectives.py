"""Collectives of a compiled program: their kind, who takes part, and what a device sends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from moe28t_jax.planning.compile.hlo import Computation, Instruction, Shape

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")
REPEATED = "fetch_experts"
"""The scope of collectives that move experts which a device repeats."""
DISPATCH, COMBINE = "/moe_dispatch/", "/moe_combine/"
"""The scopes of collectives that send tokens to experts, and return what these made."""
SELECTION = "/merge_shards/"
"""The scope of collectives that move candidates of index selection to whom they are merged by."""


@dataclass(frozen=True)
class Assumptions:
    """What a program's text does not tell: how much of what it has room for happens.

    copies_share: of the copies of tokens that devices have room to send to experts, the part that there can be: where
    devices share a few tokens, each has room for one and most have none.
    copies: how many of them a device sends to others per exchange, and receives from them, where that is known.
    experts_share: of the routed experts that a device holds, those that some token chooses. A kernel reads no others.
    """

    copies_share: float = 1.0
    copies: float | None = None
    experts_share: float = 1.0


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind. count: operations in the program. executed: with loops. bytes: what one device sends
    in all of them with the least traffic (a ring); of ragged ones the most they may send."""

    count: int = 0
    executed: int = 0
    bytes: int = 0

    def __add__(self, other: Collective) -> Collective:
        return Collective(self.count + other.count, self.executed + other.executed, self.bytes + other.bytes)


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


def sent_bytes(
    computation: Computation, instruction: Instruction, kind: str, partitions: int, assumed: Assumptions
) -> int:
    """What one device sends with the least traffic (a ring); of a ragged exchange the most that it may, or the copies
    that are assumed."""
    named = computation.instructions
    operands = sum(named[name].bytes for name in dict.fromkeys(instruction.operands))
    size = group_size(instruction, partitions)
    others = (size - 1) / size
    if kind == "all-gather":
        return round(operands * (size - 1))
    if kind == "all-reduce":
        return round(2 * operands * others)
    if kind == "ragged-all-to-all":
        # Over all devices as much is sent as is received, and neither is more than its buffer has room for. The other
        # operands say what goes where.
        sent = named[instruction.operands[0]].bytes
        if assumed.copies is not None and REPEATED not in instruction.op_name:
            return round(min(sent, assumed.copies * _row_bytes(named[instruction.operands[0]].shapes[0])))
        # What begins it results in a tuple of operands, destination and bookkeeping.
        begins = instruction.opcode.endswith("-start")
        room = named[instruction.operands[1]] if begins else instruction
        there = min(sent * assumed.copies_share, room.bytes)
        # There are as many copies on the way back, where they are received.
        back = min(sent, room.bytes * assumed.copies_share)
        if DISPATCH in instruction.op_name:
            return round(there * others)
        # Compilers for GPUs lose the names of most: the more of both.
        return round((back if COMBINE in instruction.op_name else max(there, back)) * others)
    if kind in ("reduce-scatter", "all-to-all"):
        return round(operands * others)
    return operands


def exchanged_bytes(computation: Computation, instruction: Instruction, assumed: Assumptions) -> int:
    """What a ragged exchange reads and writes in main memory: rows out of the first operand into the second, which is
    the result. Experts that are repeated move where loads are uneven, and count nothing."""
    if REPEATED in instruction.op_name:
        return 0
    named = dict.fromkeys(instruction.operands[:2])
    ends = [computation.instructions[name].shapes[0] for name in named]
    if assumed.copies is None:
        return sum(end.memory_bytes for end in ends)
    return round(sum(min(end.memory_bytes, assumed.copies * _row_bytes(end)) for end in ends))


def _row_bytes(rows: Shape) -> float:
    return rows.bytes / max(rows.sizes[0], 1)
