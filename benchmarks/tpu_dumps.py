"""Reads what the TPU compiler dumps about the programs it schedules, for `tpu_kernels.py`.

The dumps have no documented form: whatever does not look as expected here raises, with the name of what to adapt.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ITEM_BYTES = {
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s8": 1,
    "u8": 1,
    "pred": 1,
}
NOT_MOVING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"}

ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = (.+?) ([\w-]+)\((.*)$")
BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:([A-Z]{2})|)\s*:((?:\s*>)*)\s+\{")
BRANCH = re.compile(r"sbr\.rel \((!?)(%\w+)\) target = \$region(\d+)")
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
LOOP_END = re.compile(r"scmp\.\w+\.s32\.totalorder [^;]*?, (\d+) /\* loop exit test")
DELAY_SLOTS = 4
"""Bundles after a branch that are issued whether it is taken or not."""
UNITS: tuple[str, ...] = (
    "MXU",
    "XLU",
    "VALU",
    "VPOP",
    "EUP",
    "VLOAD",
    "VLOAD:FILL",
    "VSTORE",
    "VSTORE:SPILL",
    "SALU",
)


class Kernel(NamedTuple):
    """Bundles times trips of one operation's schedule, and the slots filled in them by unit."""

    bundles: int
    slots: dict[str, int]
    capacity: dict[str, int]


class Schedule(NamedTuple):
    """The bundles of one operation in order: loops around each, and where loops, regions and branches are."""

    depths: list[int]
    loops: list[int]
    """First bundles of loops."""
    ends: dict[int, list[int]]
    """Trips that a bundle's tests for the end of a loop name."""
    regions: dict[str, int]
    """First bundle of each region."""
    branches: list[tuple[int, str, bool, str]]
    """Bundle, predicate, whether it is negated, region branched to."""


def read_bundles(path: Path) -> Schedule:
    """The bundles of a file."""
    schedule = Schedule([], [], {}, {}, [])
    for line in path.read_text().splitlines():
        match = BUNDLE.match(line)
        if match is None:
            continue
        index = len(schedule.depths)
        schedule.depths.append(match.group(2).count(">"))
        if match.group(1) == "LB":
            schedule.loops.append(index)
        ends = [int(end) for end in LOOP_END.findall(line)]
        if ends:
            schedule.ends[index] = ends
        for region in REGION.findall(line):
            schedule.regions.setdefault(region, index)
        schedule.branches.extend(
            (index, predicate, negated == "!", region) for negated, predicate, region in BRANCH.findall(line)
        )
    return schedule


def trips(schedule: Schedule, name: str) -> list[int]:
    """How often each bundle is issued if no branch is taken.

    Raises:
      ValueError: if a loop's trips cannot be told.
    """
    depths = schedule.depths
    counts = [1] * len(depths)
    for start in schedule.loops:
        # Empty bundles and the branch back are printed without the marks of their depth.
        depth = depths[start]
        following = (i for i in schedule.loops if i > start and depths[i] <= depth)
        limit = next(following, len(depths))
        stop = 1 + max(i for i in range(start, limit) if depths[i] >= depth)
        found = [end for i in range(start, stop) if depths[i] == depth for end in schedule.ends.get(i, [])]
        if len(found) != 1:
            raise ValueError(f"the loop at bundle {start} of {name} ends at {found}; adapt LOOP_END.")
        for i in range(start, stop):
            counts[i] *= found[0]
    if any(depths) and not schedule.loops:
        raise ValueError(f"{name} has loops without a body; adapt BUNDLE.")
    return counts


def alternatives(schedule: Schedule) -> list[tuple[range, range]]:
    """Bodies of which one is run: a branch over one on a predicate, then over the other on its negation."""
    bodies: dict[str, tuple[bool, range]] = {}
    pairs = []
    for index, predicate, negated, region in schedule.branches:
        target = schedule.regions.get(region, -1)
        if target <= index:
            continue
        body = range(index + 1 + DELAY_SLOTS, target)
        before = bodies.get(predicate)
        if before is not None and before[0] != negated and before[1].stop <= index + 1:
            pairs.append((before[1], body))
        bodies[predicate] = (negated, body)
    return pairs


def read_schedule(prefix: Path) -> tuple[Kernel, Kernel]:
    """Weigh every bundle of one scheduled operation by the trips of the loops around it.

    Returns the sums with the shorter of each two alternatives, and with the longer; a body without an alternative
    counts as run.

    Raises:
      ValueError: if the dump is not in the expected form.
    """
    (text,) = prefix.parent.glob(f"{glob_escape(prefix.name)}-*[0-9]-final_bundles.txt")
    (table,) = prefix.parent.glob(
        f"{glob_escape(prefix.name)}-*[0-9]-final_hlo-static-per-bundle-utilization.txt"
    )
    schedule = read_bundles(text)
    header, body = table.read_text().split("== UTILIZATION:\n")
    names, capacity = header.splitlines()[1:3]
    if tuple(name.strip() for name in names.split(",")) != UNITS:
        raise ValueError(f"{table.name} has the columns {names!r}, expected {', '.join(UNITS)}; adapt UNITS.")
    slots = [tuple(map(int, line.split())) for line in body.splitlines() if line.strip()]
    if len(slots) != len(schedule.depths):
        raise ValueError(
            f"{text.name} holds {len(schedule.depths)} bundles and its table of units {len(slots)}; adapt BUNDLE."
        )
    counts = trips(schedule, text.name)
    shorter, longer = list(counts), list(counts)
    for pair in alternatives(schedule):
        short, long = sorted(pair, key=lambda indices: sum(counts[i] for i in indices))
        for kept, dropped in ((shorter, long), (longer, short)):
            for i in dropped:
                kept[i] = 0
    per_bundle = dict(zip(UNITS, map(int, capacity.replace(",", " ").split()), strict=True))

    def kernel(weights: list[int]) -> Kernel:
        filled = [sum(w * row[i] for w, row in zip(weights, slots, strict=True)) for i in range(len(UNITS))]
        return Kernel(sum(weights), dict(zip(UNITS, filled, strict=True)), per_bundle)

    return kernel(shorter), kernel(longer)


def glob_escape(name: str) -> str:
    """A name with nothing left that a pattern of files would interpret."""
    return re.sub(r"([*?[])", r"[\1]", name)


def array_bytes(shape: str) -> int:
    """Bytes in HBM of an array or a tuple of arrays as the compiler prints it; S(n) is another memory."""
    total = 0
    for dtype, sizes, layout in ARRAY.findall(shape):
        if re.search(r"S\([1-9]", layout):
            continue
        size = ITEM_BYTES.get(dtype, 0)
        for length in filter(None, sizes.split(",")):
            size *= int(length)
        total += size
    return total


def copied_bytes(shape: str) -> int:
    """HBM bytes of an asynchronous copy: its piece once for each end that lies in HBM."""
    arrays = [
        "".join((dtype, "[", sizes, "]")) + layout for dtype, sizes, layout in ARRAY.findall(shape) if sizes
    ]
    piece = min(array_bytes(re.sub(r"\{.*", "", array)) for array in arrays)
    return piece * sum(array_bytes(array) > 0 for array in arrays)


def read_program(text: str) -> tuple[int, list[str]]:
    """HBM bytes of the entry computation, and the names of the operations in it."""
    entry = text[text.index("\nENTRY ") :].split("\n}", 1)[0]
    shapes: dict[str, str] = {}
    total, names = 0, []
    for line in entry.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        name, shape, operation, rest = match.groups()
        shapes[name] = shape
        if operation in NOT_MOVING or operation.endswith("-done"):
            continue
        names.append(name)
        if operation.endswith("-start"):
            total += copied_bytes(shape)
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ", 1)[0])
        total += array_bytes(shape) + sum(array_bytes(shapes.get(operand, "")) for operand in operands)
    return total, names


def read_dumps(folder: Path, heads: int, tokens: int) -> dict[str, Any]:
    """All figures of one compiled side."""
    memory = json.loads((folder / "memory.json").read_text())
    text = (folder / "program.txt").read_text()
    hbm_bytes, names = read_program(text)
    vmem = [
        int(size)
        for uses in re.findall(r'"used_scoped_memory_configs":\[([^]]*)\]', text)
        for size in re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', uses)
    ]
    kernels = {}
    for path in sorted((folder / "llo").glob("*-schedule-analysis_final_bundles.txt")):
        match = re.match(r"(\d+-(.+))-\d+-schedule-analysis_final_bundles\.txt$", path.name)
        if match is not None and match.group(2) in names:
            kernels[match.group(2)] = read_schedule(path.parent / match.group(1))
    if not kernels:
        raise ValueError(
            f"there is no schedule of {names} under {folder}; the compiler's dumps have changed."
        )
    result = {
        "temporary_bytes": memory["temp"],
        "argument_bytes": memory["argument"],
        "output_bytes": memory["output"],
        "hbm_bytes": hbm_bytes,
        "largest_vmem_bytes": max(vmem, default=0),
    }
    shorter, longer = (
        summarize({name: both[i] for name, both in kernels.items()}, heads * tokens) for i in range(2)
    )
    result |= shorter
    if shorter != longer:
        result["longer_branches"] = longer
    return result


def summarize(kernels: dict[str, Kernel], work: int) -> dict[str, Any]:
    """What the schedules of a program come to, per unit of work and by kernel."""
    bundles = sum(kernel.bundles for kernel in kernels.values())
    capacity = sum(kernel.bundles * kernel.capacity["MXU"] for kernel in kernels.values())

    def filled(unit: str) -> int:
        return sum(kernel.slots[unit] for kernel in kernels.values())

    return {
        "bundles_per_token_and_head": round(bundles / work, 2),
        "mxu_slots_per_token_and_head": round(filled("MXU") / work, 2),
        "mxu_slot_use": round(filled("MXU") / capacity, 4),
        "spill_stores_per_token_and_head": round(filled("VSTORE:SPILL") / work, 3),
        "spill_loads_per_token_and_head": round(filled("VLOAD:FILL") / work, 3),
        "kernels": {
            name: {
                "bundles": kernel.bundles,
                "mxu_slot_use": round(kernel.slots["MXU"] / (kernel.bundles * kernel.capacity["MXU"]), 4),
                "spill_stores": kernel.slots["VSTORE:SPILL"],
                "spill_loads": kernel.slots["VLOAD:FILL"],
            }
            for name, kernel in kernels.items()
        },
    }
