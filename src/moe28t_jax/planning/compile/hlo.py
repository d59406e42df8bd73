"""Compiled programs as text, read back: instructions, shapes, who calls whom and how often."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "s1": 1, "u1": 1}
_NUMBER = re.compile(r"(?:[suf]|bf|f)(\d+)")
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<= ]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|called_computations|branch_computations)="
    r"(\{[^{}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Shape:
    """One array: dtype, sizes, and whether it lies in the device's main memory (not in a scratchpad or on the host)."""

    dtype: str
    sizes: tuple[int, ...]
    in_memory: bool = True

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Without the padding of a tiled layout."""
        return (self.elements * _bits(self.dtype) + 7) // 8

    @property
    def memory_bytes(self) -> int:
        """`bytes` in main memory."""
        return self.bytes if self.in_memory else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = _NUMBER.match(dtype)
    return int(match[1]) if match else 32


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. shapes: of the result, several where it is a tuple, flattened. attributes: the rest
    of the line. calls: computations it runs, in the order of the text."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    line: int
    is_root: bool = False
    is_tuple: bool = False

    @cached_property
    def calls(self) -> dict[str, tuple[str, ...]]:
        """Called computations by the attribute that names them."""
        found: dict[str, tuple[str, ...]] = {}
        for match in _CALLED.finditer(self.attributes):
            found[match[0].split("=", 1)[0]] = tuple(_NAME.findall(match[1]))
        return found

    @property
    def made_shapes(self) -> tuple[Shape, ...]:
        """Of the result. A fusion that is only begun has those of its operands first."""
        return self.shapes[len(self.operands) if self.opcode == "fusion-start" else 0 :]

    @property
    def op_name(self) -> str:
        """The path of the operation in the program that was traced; empty where the compiler made it up."""
        match = _OP_NAME.search(self.attributes)
        return match[1].replace("\\'", "'").replace('\\"', '"') if match else ""

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def memory_bytes(self) -> int:
        return sum(shape.memory_bytes for shape in self.shapes)

    @property
    def number(self) -> int:
        """Of a parameter, or the element that a get-tuple-element takes."""
        if self.opcode == "parameter":
            return int(self.arguments)
        match = re.search(r"\bindex=(\d+)", self.attributes)
        assert match is not None, self
        return int(match[1])


@dataclass
class Computation:
    """Instructions in program order; operands come before their users."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(reversed([x for x in self.instructions.values() if x.is_root]))

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {x.number: x for x in self.instructions.values() if x.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                if operand in found:
                    found[operand].append(instruction)
        return found

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())


@dataclass
class Module:
    """A compiled program: its computations by name, and the one that is entered."""

    computations: dict[str, Computation]
    entry: str
    partitions: int
    characters: int

    @property
    def main(self) -> Computation:
        return self.computations[self.entry]

    def trips(self, loop: Instruction) -> int | None:
        """How often a while loop runs: what the compiler found out, else a constant that its condition compares with;
        None where it depends on values."""
        match = _TRIPS.search(loop.attributes)
        if match:
            return int(match[1])
        [condition] = loop.calls["condition"]
        return self._bound(self.computations[condition])

    def _bound(self, computation: Computation) -> int | None:
        """The constant of a condition `counter < constant`, which may be inside a fusion."""
        root = computation.root
        if root.opcode == "fusion":
            [inner] = root.calls["calls"]
            constants = [computation.instructions[name] for name in root.operands]
            values = {number: _constant(x) for number, x in enumerate(constants)}
            return self._compared(self.computations[inner], values)
        return self._compared(computation, {})

    def _compared(self, computation: Computation, values: dict[int, int | None]) -> int | None:
        root = computation.root
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        found = []
        for name in root.operands:
            operand = computation.instructions[name]
            value = values.get(operand.number) if operand.opcode == "parameter" else _constant(operand)
            if value is not None:
                found.append(value)
        return found[0] if len(found) == 1 else None


def _constant(instruction: Instruction) -> int | None:
    text = instruction.arguments.strip()
    return int(text) if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", text) else None


def parse(text: str) -> Module:
    """Read `compiled.as_text()`. Raises ValueError where it is no such text."""
    header = text[: text.find("\n")]
    partitions = re.search(r"num_partitions=(\d+)", header)
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if current is None:
            match = _COMPUTATION.match(line.rstrip())
            if match and not line.startswith("HloModule"):
                current = Computation(match[2])
                computations[match[2]] = current
                if match[1]:
                    entry = match[2]
        elif line.startswith("}"):
            current = None
        else:
            instruction = _parse_instruction(line, number)
            if instruction is not None:
                current.instructions[instruction.name] = instruction
    if not entry:
        raise ValueError(
            "The text is no compiled program: it has no ENTRY computation; pass compiled.as_text()."
        )
    return Module(computations, entry, int(partitions[1]) if partitions else 1, len(text))


def _parse_instruction(line: str, number: int) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    start = match.end()
    is_tuple = line[start] == "("
    # A tuple's types may hold comments between them, and layouts hold parentheses.
    end = _closing(line, start) + 1 if is_tuple else _type_end(line, start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    last = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : last]
    operands = (
        () if opcode[1] in ("constant", "parameter") else tuple(_NAME.findall(_COMMENT.sub("", arguments)))
    )
    return Instruction(
        match[2], opcode[1], _shapes(line[start:end]), operands, arguments, line[last + 1 :], number,
        match[1] is not None, is_tuple,
    )  # fmt: skip


def _shapes(text: str) -> tuple[Shape, ...]:
    found = []
    for match in _SHAPE.finditer(_COMMENT.sub("", text)):
        sizes = tuple(int(size.strip().removeprefix("<=")) for size in match[2].split(",") if size.strip())
        space = _SPACE.search(match[3] or "")
        found.append(Shape(match[1], sizes, space is None or space[1] == "0"))
    return tuple(found)


def _type_end(line: str, start: int) -> int:
    depth = 0
    for index in range(start, len(line)):
        character = line[index]
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == " " and depth == 0:
            return index
    return len(line)


def _closing(line: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes; text in quotation marks does not count."""
    depth, quoted = 0, False
    for index in range(start, len(line)):
        character = line[index]
        if character == '"' and line[index - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                return index
    return len(line) - 1
