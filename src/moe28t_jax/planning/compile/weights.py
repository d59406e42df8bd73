"""What a compiled program does to weights besides reading them: copies, gathers, unpacking.

Every argument of the program is followed through tuples, loops, calls and operations that only move bytes. Where
such an operation writes a weight, or a slice of one, back to main memory, the weight is read, written and read once
more: a matter of layouts that no source line shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moe28t_jax.planning.compile.hlo import Computation, Instruction, Module, Shape
from moe28t_jax.planning.compile.traffic import branches

MovementKind = Literal["copy", "all-gather", "unpack"]

_MOVES = {
    "bitcast", "reshape", "copy", "transpose", "convert", "dynamic-slice", "slice", "opt-barrier", "pad", "reverse",
    "bitcast-convert", "all-gather", "concatenate", "collective-permute",
}  # fmt: skip
_FLOATS = ("f16", "bf16", "f32", "f64")
_PRODUCTS = {"dot", "convolution", "custom-call"}


@dataclass(frozen=True)
class Weight:
    """An argument of the program that is a parameter of the model. expert: a stack of routed experts. packed: 4-bit
    codes or their scales."""

    name: str
    expert: bool = False
    packed: bool = False


@dataclass(frozen=True)
class Movement:
    """One operation that moves a weight. bytes: written to main memory per run of the program, with loops."""

    kind: MovementKind
    weight: Weight
    bytes: int
    times: int
    in_loop: bool
    instruction: str
    shape: str
    line: int


# Where a value comes from: the number of the program's argument it is a copy of, a tuple of such, or None.
_Origin = Any


def movements(module: Module, weights: Mapping[int, Weight], minimum_bytes: int = 1 << 20) -> list[Movement]:
    """Every operation that writes at least `minimum_bytes` of a weight to main memory in another place or form.

    weights: by number of the program's argument.
    """
    follower = _Follower(module, weights, minimum_bytes)
    main = module.main
    arguments = [number if number in weights else None for number in range(len(main.parameters))]
    follower.run(main, arguments, 1, False, report=True)
    return sorted(follower.found.values(), key=lambda found: -found.bytes)


class _Follower:
    def __init__(self, module: Module, weights: Mapping[int, Weight], minimum_bytes: int) -> None:
        self._module, self._weights, self._minimum = module, weights, minimum_bytes
        self.found: dict[tuple[str, str], Movement] = {}

    def run(
        self, computation: Computation, arguments: Sequence[_Origin], times: int, in_loop: bool, report: bool
    ) -> _Origin:
        """Origin of the result; with `report`, movements are noted."""
        values: dict[str, _Origin] = {}
        for instruction in computation:
            values[instruction.name] = self._value(
                computation, instruction, values, arguments, times, in_loop, report
            )
        return values[computation.root.name]

    def _value(
        self,
        computation: Computation,
        instruction: Instruction,
        values: dict[str, _Origin],
        arguments: Sequence[_Origin],
        times: int,
        in_loop: bool,
        report: bool,
    ) -> _Origin:
        opcode = instruction.opcode
        operands = [values.get(name) for name in instruction.operands]
        match opcode:
            case "parameter":
                return arguments[instruction.number] if instruction.number < len(arguments) else None
            case "tuple":
                return tuple(operands)
            case "get-tuple-element":
                return _element(operands[0], instruction.number)
            case "while":
                return self._loop(instruction, operands[0], times, report)
            case "conditional":
                results = [
                    self.run(self._module.computations[name], [operand], times, in_loop, report)
                    for name, operand in zip(branches(instruction), operands[1:], strict=False)
                ]
                return _common(results)
            case "call":
                return self.run(self._called(instruction), operands, times, in_loop, report)
            case "async-start" | "call-start":
                if not operands:
                    return None  # they come with the update
                return (
                    tuple(operands),
                    self.run(self._called(instruction), operands, times, in_loop, report),
                )
            case "call-update" if len(operands) > 1:
                start = computation.instructions[instruction.operands[0]]
                return (
                    tuple(operands[1:]),
                    self.run(self._called(start), operands[1:], times, in_loop, report),
                )
            case "async-update" | "call-update":
                return operands[0]
            case (
                "async-done" | "call-done" | "slice-done" | "fusion-done" | "all-gather-done"
                | "collective-permute-done"
            ):  # fmt: skip
                return _element(operands[0], 1)
            case "fusion-start":
                return (
                    tuple(operands),
                    self._fusion(computation, instruction, operands, times, in_loop, report),
                )
            case "slice-start":
                if report:
                    self._note("copy", operands[0], instruction, instruction.shapes[1], times, in_loop)
                return (operands[0], operands[0])
            case "copy-done":
                return _element(operands[0], 0)
            case "copy-start":
                if report:
                    self._note("copy", operands[0], instruction, instruction.shapes[0], times, in_loop)
                return (operands[0], operands[0], None)
            case "all-gather-start" | "collective-permute-start":
                if report:
                    kind: MovementKind = "all-gather" if opcode == "all-gather-start" else "copy"
                    self._note(kind, operands[0], instruction, instruction.shapes[-1], times, in_loop)
                return (operands[0], operands[0])
            case "fusion":
                return self._fusion(computation, instruction, operands, times, in_loop, report)
        if opcode not in _MOVES:
            return None
        origin = (
            next((x for x in operands if isinstance(x, int)), None)
            if opcode == "concatenate"
            else operands[0]
        )
        if report and opcode not in ("bitcast", "opt-barrier"):
            source = computation.instructions[instruction.operands[0]]
            unpacks = self._unpacks(
                origin, source.shapes[0], source.shapes[0].elements, instruction.shapes[0]
            )
            kind = "all-gather" if opcode == "all-gather" else "unpack" if unpacks else "copy"
            self._note(kind, origin, instruction, instruction.shapes[0], times, in_loop)
        return origin

    def _called(self, instruction: Instruction) -> Computation:
        [name] = next(iter(instruction.calls.values()))
        return self._module.computations[name]

    def _loop(self, instruction: Instruction, start: _Origin, times: int, report: bool) -> _Origin:
        [name] = instruction.calls["body"]
        body = self._module.computations[name]
        carry = start
        while True:
            after = _common([carry, self.run(body, [carry], times, True, report=False)])
            if after == carry:
                break
            carry = after
        if report:
            self.run(body, [carry], times * (self._module.trips(instruction) or 1), True, report=True)
        return carry

    def _fusion(
        self,
        computation: Computation,
        instruction: Instruction,
        operands: list[_Origin],
        times: int,
        in_loop: bool,
        report: bool,
    ) -> _Origin:
        [name] = instruction.calls["calls"]
        inner = self._module.computations[name]
        result = self.run(inner, operands, times, in_loop, report=False)
        if not report or not any(isinstance(x, int) for x in operands):
            return result
        results = result if isinstance(result, tuple) else (result,)
        for origin, shape in zip(results, instruction.made_shapes, strict=False):
            self._note("copy", origin, instruction, shape, times, in_loop)
        gathered = next((x for x in inner if x.opcode.startswith("all-gather")), None)
        if gathered is not None:
            origin = next(x for x in operands if isinstance(x, int))
            self._note("all-gather", origin, instruction, gathered.shapes[-1], times, in_loop)
        if not self._multiplies(inner):
            for number, origin in enumerate(operands):
                parameter = inner.parameters.get(number)
                if parameter is None or not isinstance(origin, int):
                    continue
                read = _read_elements(self._module, inner, parameter)
                for shape in instruction.made_shapes:
                    if self._unpacks(origin, parameter.shapes[0], read, shape):
                        self._note("unpack", origin, instruction, shape, times, in_loop)
        return result

    def _multiplies(self, computation: Computation) -> bool:
        return any(
            x.opcode in _PRODUCTS
            or any(
                self._multiplies(self._module.computations[c]) for names in x.calls.values() for c in names
            )
            for x in computation
        )

    def _unpacks(self, origin: _Origin, source: Shape, read: int, shape: Shape) -> bool:
        """Whether a floating-point result holds about as many numbers as the codes that were read."""
        if not isinstance(origin, int) or not self._weights[origin].packed or shape.dtype not in _FLOATS:
            return False
        codes = 2 * read if source.dtype == "u8" else read
        return 2 * shape.elements >= codes

    def _note(
        self,
        kind: MovementKind,
        origin: _Origin,
        instruction: Instruction,
        shape: Shape,
        times: int,
        in_loop: bool,
    ) -> None:
        if not isinstance(origin, int) or shape.memory_bytes < max(1, self._minimum):
            return
        weight = self._weights[origin]
        found = Movement(
            kind,
            weight,
            shape.memory_bytes * times,
            times,
            in_loop,
            instruction.name,
            str(shape),
            instruction.line,
        )
        self.found.setdefault((instruction.name, kind), found)


def _read_elements(module: Module, computation: Computation, value: Instruction) -> int:
    """Elements of a value that a fusion's body reads: of slices, those of the slice."""
    total = 0
    for user in computation.users[value.name]:
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.shapes[0].elements
        elif user.opcode in ("bitcast", "reshape", "copy", "transpose"):
            total += _read_elements(module, computation, user)
        elif user.opcode == "fusion":
            [name] = user.calls["calls"]
            nested = module.computations[name]
            for number, operand in enumerate(user.operands):
                if operand == value.name:
                    total += _read_elements(module, nested, nested.parameters[number])
        else:
            total += value.shapes[0].elements
    return min(total, value.shapes[0].elements)


def _element(origin: Any, index: int) -> _Origin:
    return origin[index] if isinstance(origin, tuple) and index < len(origin) else None


def _common(origins: Sequence[_Origin]) -> _Origin:
    """What all of them are; None where they differ."""
    first = origins[0]
    if all(origin == first for origin in origins):
        return first
    if all(isinstance(origin, tuple) for origin in origins):
        tuples: list[tuple[_Origin, ...]] = [origin for origin in origins if isinstance(origin, tuple)]
        if all(len(origin) == len(tuples[0]) for origin in tuples):
            return tuple(_common(elements) for elements in zip(*tuples, strict=True))
    return None
