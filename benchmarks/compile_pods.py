"""Compiles the steps of `moe28t` for real deployments and writes the tables of docs/compiling.md.

    python benchmarks/compile_pods.py                 # every program that has no result yet, then the tables
    python benchmarks/compile_pods.py --only v6e      # those whose mesh begins so
    python benchmarks/compile_pods.py --tables        # the tables alone, from the results that are there

Each program is compiled in a process of its own (a GPU compiler keeps the first chip that it met) and its result goes
to docs/compile_reports.json, so that an interrupted run goes on where it was.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "compile_reports.json"
PAGE = ROOT / "docs" / "compiling.md"

MILLION = 1_048_576
FOUR = ("--set", 'attention_kinds=["kda","dsa","kda","dsa"]', "--set", 'mlp_kinds=["moe","moe","moe","moe"]')


@dataclass(frozen=True)
class Program:
    """One program to compile. name: key of its result. mesh: a mesh file's name, or with `topology` the chip and a mesh
    of this size (`data`, `stage`, `expert`, `tensor`), which is made. memory, exchange: how often the least bytes may
    move in main memory and between devices under uniform routing, checked by tests/compile; None for programs that are
    compared and not promised.
    copied: bytes of dense weights that may be copied in the layer loop, in all layers together."""

    name: str
    mesh: str
    arguments: tuple[str, ...] = ()
    memory: float | None = None
    exchange: float | None = None
    copied: int = 0
    topology: str = ""
    sizes: tuple[int, int, int, int] = (1, 1, 1, 1)

    def mesh_file(self, folder: Path) -> str:
        """What `--mesh` takes."""
        if not self.topology:
            return self.mesh
        data, stage, expert, tensor = self.sizes
        chips = prod(int(size) for size in self.topology.split("x"))
        path = folder / f"{self.mesh}-{self.topology}-{data}-{stage}-{expert}-{tensor}.toml"
        path.write_text(
            f'kind = "{self.mesh}"\ntopology = "{self.topology}"\nchips = {chips}\ndevices = {prod(self.sizes)}\n'
            f'reason = "to compare with"\n[axes]\ndata = {data}\nstage = {stage}\nexpert = {expert}\n'
            f"tensor = {tensor}\ncontext = 1\n[defaults]\nbatch = {8 * data * expert}\ncontext = 131072\n",
            "utf-8",
        )
        return str(path)


def _promised() -> Iterator[Program]:
    """Whole programs that are held to what tests/compile checks.

    Main memory is held to the minimum in decode on TPUs; prefill moves mostly activations, which the minimum does not
    count. The exchange of a single row's token, a few kilobytes per layer, is not held to it.
    """
    for mesh in ("tpu7x-4x4x2", "v5p-4x4x8", "v6e-16x16", "h200-16"):
        rows = "8" if mesh == "h200-16" else "64"  # as many as these few GPUs hold
        # The keys' part of kv_b_proj and the indexers' queries, which XLA for GPUs multiplies by copies (measured 6 MB
        # of two sparse layers).
        copied = 160_000_000 if mesh == "h200-16" else 0
        decode = ("--batch", rows, "--context", "131072")
        # On GPUs index keys are walked in a loop whose end is computed: its traffic is not known from the text.
        memory = None if mesh == "h200-16" else 1.2
        yield Program(f"{mesh} decode", mesh, decode, memory, 1.2, copied)
        alone = ("--batch", "1", "--context", str(MILLION))
        yield Program(f"{mesh} decode 1M", mesh, alone, memory, None, copied)
        prefill = ("--phase", "prefill", "--batch", "1", "--context", "131072")
        if mesh == "v5p-4x4x8":
            # The compiler turns four projections of a delta layer, 22 MB each, where it would turn results of
            # 25 MB (measured 5.97 GB of 249 that move).
            copied = 6_000_000_000
        yield Program(f"{mesh} prefill", mesh, prefill, None, 1.2, copied)


def _compared() -> Iterator[Program]:
    for mesh in ("v5p-4x4x4", "tpu7x-4x4x4", "tpu7x-4x4x8", "h100-32", "b200-16", "gb200-nvl72"):
        yield Program(f"{mesh} decode", mesh)
    rows = ("--batch", "64", "--context", "131072")
    yield Program("v6e-16x16 decode, two stages", "v6e", rows, topology="16x16", sizes=(1, 2, 16, 8))
    train = ("--phase", "train")
    yield Program("v5p-8x8x16 train, four layers", "v5p-8x8x16", (*train, *FOUR))
    yield Program("v5p-8x8x16 train", "v5p-8x8x16", train)
    yield Program("tpu7x-4x4x2 decode, four layers", "tpu7x-4x4x2", FOUR)
    yield Program("tpu7x-4x4x2 decode, four layers, automatic", "tpu7x-4x4x2", (*FOUR, "--automatic"))


def _scaled() -> Iterator[Program]:
    for layers in (13, 45):
        yield Program(f"tpu7x-4x4x2 decode, {layers} layers", "tpu7x-4x4x2", ("--layers", str(layers)))
    for topology, sizes in (
        ("4x4x4", (1, 1, 8, 8)), ("4x8x8", (2, 1, 16, 8)), ("8x8x16", (8, 1, 16, 8)), ("16x16x16", (32, 1, 16, 8)),
    ):  # fmt: skip
        yield Program(f"v5p-{topology} decode, four layers", "v5p", FOUR, topology=topology, sizes=sizes)
    for expert in (1, 2, 4):
        name = f"v5p, experts over {8 * expert}, four layers"
        yield Program(name, "v5p", FOUR, topology="4x4x4", sizes=(8 // expert, 1, expert, 8))
    yield Program("v5p, experts over 128, four layers", "v5p", FOUR, topology="4x4x8", sizes=(1, 1, 16, 8))


PROMISED = tuple(_promised())
PROGRAMS = (*PROMISED, *_compared(), *_scaled())
BASE = PROGRAMS[0]
"""What the scaling table compares with."""


def compile_one(program: Program, keep: Path | None = None) -> dict[str, Any]:
    """The JSON report of one program. keep: beginning of the names of files for the program's text and for what the
    compiler said."""
    with tempfile.TemporaryDirectory() as folder:
        mesh = program.mesh_file(Path(folder))
        command = [
            sys.executable, "-m", "moe28t_jax.cli", "compile", "--json", "--mesh", mesh, *program.arguments,
        ]  # fmt: skip
        if keep is not None:
            command += ["--text", f"{keep}.hlo"]
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if keep is not None:
        Path(f"{keep}.log").write_text(done.stderr, "utf-8")
    lines = done.stdout.strip().splitlines()
    if not lines:
        return {"error": done.stderr.strip().splitlines()[-1][:400] if done.stderr.strip() else "no output"}
    return json.loads(lines[-1])


def shortened(result: dict[str, Any]) -> dict[str, Any]:
    """A report without its long lists: how many there are, and their bytes."""
    if "error" in result:
        return result
    for name in ("weight_copies_in_loop", "weight_copies", "expert_gathers", "unpacked_experts"):
        found = result.get(name, [])
        result[name] = {"count": len(found), "bytes": sum(each["bytes"] for each in found)}
    result["largest"] = result.get("largest", [])[:5]
    return result


def revision() -> str:
    """The state of the sources that a result is of."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def store(results: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=RESULTS.parent, delete=False, encoding="utf-8") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, RESULTS)


def gb(value: float) -> str:
    return f"{value / 1e9:.1f}"


def ratio(value: float, least: float) -> str:
    return f"{value / least:.2f}" if least else "-"


ROUTINGS = ("", "_uniform_routing")
"""Endings of a report's keys."""


def against(one: dict[str, Any], key: str, routing: str, unit: float) -> str:
    """A figure of a report and how often it is the least; a report of before the figure has none."""
    if key + routing not in one:
        return "-"
    least = one.get(f"minimum_{key}{routing}", one[f"minimum_{key}"])
    return f"{one[key + routing] / unit:.1f} ({ratio(one[key + routing], least)})"


def rows(results: dict[str, Any]) -> list[str]:
    lines = [
        "| program | rows x tokens | peak / limit, GB | fits | compiled in, s | "
        "HBM per step, GB (x minimum), of any routing | of uniform routing | "
        "all-to-all per step, MB, of any routing | of uniform routing (x minimum) | "
        "weight copies in the loop, GB | experts gathered / unpacked |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for program in (*_promised(), *_compared()):
        name = program.name
        one = results.get(name)
        if one is None:
            continue
        if "error" in one:
            lines.append(f"| {name} | | {one['error']} | | | | | | | | |")
            continue
        work = f"{one['batch']:,} x {one['context']:,}"
        memory = f"{gb(one['peak_bytes_per_device'])} / {gb(one['limit_bytes_per_device'])}"
        fits = "yes" if one["fits"] else "no"
        if "hbm_bytes_per_step" not in one:
            lines.append(
                f"| {name} | {work} | {memory} | {fits} | {one['compile_seconds']:.0f} | | | | | | |"
            )
            continue
        moved = [against(one, "hbm_bytes_per_step", routing, 1e9) for routing in ROUTINGS]
        sent = one["all_to_all_bytes_per_step"] / 1e6
        lines.append(
            f"| {name} | {work} | {memory} | {fits} | {one['compile_seconds']:.0f} | {moved[0]} | {moved[1]} | "
            f"{sent:.1f} | "
            f"{against(one, 'all_to_all_bytes_per_step', ROUTINGS[1], 1e6)} | "
            f"{gb(one['weight_copies_in_loop']['bytes'])} | "
            f"{one['expert_gathers']['count']} / {one['unpacked_experts']['count']} |"
        )
    return lines


def collectives(results: dict[str, Any]) -> list[str]:
    lines = ["| program | collective | per step | bytes sent by a device, MB |", "|---|---|---|---|"]
    for program in (*_promised(), *_compared()):
        for kind, one in results.get(program.name, {}).get("collectives", {}).items():
            lines.append(f"| {program.name} | {kind} | {one['executed']:,} | {one['bytes'] / 1e6:,.1f} |")
    return lines


def scaling(results: dict[str, Any]) -> list[str]:
    """Size and cost of programs over layers, devices, and devices that share the experts."""
    lines = [
        "| program | devices | layers | traced in, s | compiled in, s | instructions | all-to-all per token and layer, kB |",  # noqa: E501
        "|---|---|---|---|---|---|---|",
    ]
    for program in (BASE, *_scaled()):
        one = results.get(program.name)
        if one is None or "instructions" not in one:
            continue
        # Of the whole model the first layer has no experts.
        layers = one["layers"] - (FOUR[0] not in program.arguments)
        token = one["all_to_all_bytes_per_step"] * one["devices"] / one["batch"] / layers
        lines.append(
            f"| {program.name} | {one['devices']:,} | {one['layers']} | {one['lower_seconds']:.0f} | "
            f"{one['compile_seconds']:.0f} | {one['instructions']:,} | {token / 1e3:.1f} |"
        )
    return lines


def write_tables(results: dict[str, Any]) -> None:
    text = PAGE.read_text("utf-8")
    tables = {"programs": rows(results), "collectives": collectives(results), "scaling": scaling(results)}
    for marker, lines in tables.items():
        begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = before + begin + "\n" + "\n".join(lines) + "\n" + end + after
    PAGE.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="programs whose name begins so")
    parser.add_argument("--exact", action="store_true", help="with --only: the program of this name alone")
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for the programs' texts and what the compiler said (TPU_VMODULE and others)",
    )
    parser.add_argument("--again", action="store_true", help="also programs that have a result")
    parser.add_argument("--tables", action="store_true", help="compile nothing")
    options = parser.parse_args()
    results = load()
    for program in () if options.tables else PROGRAMS:
        name = program.name
        if not name.startswith(options.only) or (options.exact and name != options.only):
            continue
        if name in results and not options.again:
            continue
        keep = None if options.keep is None else options.keep / name.replace(" ", "_").replace(",", "")
        one: dict[str, Any] = shortened(compile_one(program, keep)) | {"revision": revision()}
        results = load() | {name: one}
        store(results)
        print(
            name,
            one.get("error") or f"{gb(one['peak_bytes_per_device'])} GB, {one['compile_seconds']} s",
            flush=True,
        )
    write_tables(results)


if __name__ == "__main__":
    main()
