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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "compile_reports.json"
PAGE = ROOT / "docs" / "compiling.md"

MILLION = 1_048_576
TPU = ("tpu7x-4x4x2", "v5p-4x4x8", "v6e-16x16")
# (name, mesh, further arguments). The names are the keys of the results.
PROGRAMS: list[tuple[str, str, list[str]]] = []
for mesh in (*TPU, "h200-16"):
    PROGRAMS += [
        (f"{mesh} decode", mesh, ["--batch", "64", "--context", "131072"]),
        (f"{mesh} decode 1M", mesh, ["--batch", "1", "--context", str(MILLION)]),
        (f"{mesh} prefill", mesh, ["--phase", "prefill", "--batch", "1", "--context", "131072"]),
    ]
OTHERS = ("v5p-4x4x4", "tpu7x-4x4x4", "tpu7x-4x4x8", "h100-32", "b200-16", "gb200-nvl72")
PROGRAMS += [(f"{mesh} decode", mesh, []) for mesh in OTHERS]
FOUR = ["--set", 'attention_kinds=["kda","dsa","kda","dsa"]', "--set", 'mlp_kinds=["moe","moe","moe","moe"]']
PROGRAMS += [
    ("tpu7x-4x4x2 decode, four layers", "tpu7x-4x4x2", FOUR),
    ("tpu7x-4x4x2 decode, four layers, automatic", "tpu7x-4x4x2", [*FOUR, "--automatic"]),
    ("tpu7x-4x4x2 decode automatic", "tpu7x-4x4x2", ["--automatic"]),
    *((f"tpu7x-4x4x2 decode {n} layers", "tpu7x-4x4x2", ["--layers", str(n)]) for n in (13, 45)),
]


def compile_one(mesh: str, arguments: list[str]) -> dict[str, Any]:
    """The JSON report of one program, without its long lists."""
    command = [sys.executable, "-m", "moe28t_jax.cli", "compile", "--json", "--mesh", mesh, *arguments]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    lines = done.stdout.strip().splitlines()
    if not lines:
        return {"error": done.stderr.strip().splitlines()[-1][:400] if done.stderr.strip() else "no output"}
    result = json.loads(lines[-1])
    for name in ("weight_copies_in_loop", "weight_copies", "expert_gathers", "unpacked_experts"):
        found = result.get(name, [])
        result[name] = {"count": len(found), "bytes": sum(each["bytes"] for each in found)}
    result["largest"] = result.get("largest", [])[:5]
    return result


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


def rows(results: dict[str, Any]) -> list[str]:
    lines = [
        "| program | peak / limit, GB | fits | compiled in, s | HBM per step, GB (x minimum) | "
        "all-to-all per step, MB (x minimum) | weight copies in the loop, GB | experts gathered / unpacked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, _, _ in PROGRAMS:
        one = results.get(name)
        if one is None:
            continue
        if "error" in one:
            lines.append(f"| {name} | {one['error']} | | | | | | |")
            continue
        memory = f"{gb(one['peak_bytes_per_device'])} / {gb(one['limit_bytes_per_device'])}"
        fits = "yes" if one["fits"] else "no"
        if "hbm_bytes_per_step" not in one:
            lines.append(f"| {name} | {memory} | {fits} | {one['compile_seconds']:.0f} | | | | |")
            continue
        hbm, sent = one["hbm_bytes_per_step"], one["all_to_all_bytes_per_step"]
        lines.append(
            f"| {name} | {memory} | {fits} | {one['compile_seconds']:.0f} | "
            f"{gb(hbm)} ({ratio(hbm, one['minimum_hbm_bytes_per_step'])}) | "
            f"{sent / 1e6:.1f} ({ratio(sent, one['minimum_all_to_all_bytes_per_step'])}) | "
            f"{gb(one['weight_copies_in_loop']['bytes'])} | "
            f"{one['expert_gathers']['count']} / {one['unpacked_experts']['count']} |"
        )
    return lines


def collectives(results: dict[str, Any]) -> list[str]:
    lines = ["| program | collective | per step | bytes sent by a device, MB |", "|---|---|---|---|"]
    for name, _, _ in PROGRAMS:
        for kind, one in results.get(name, {}).get("collectives", {}).items():
            lines.append(f"| {name} | {kind} | {one['executed']:,} | {one['bytes'] / 1e6:,.1f} |")
    return lines


def write_tables(results: dict[str, Any]) -> None:
    text = PAGE.read_text("utf-8")
    for marker, lines in (("programs", rows(results)), ("collectives", collectives(results))):
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
    parser.add_argument("--again", action="store_true", help="also programs that have a result")
    parser.add_argument("--tables", action="store_true", help="compile nothing")
    options = parser.parse_args()
    results = load()
    for name, mesh, arguments in [] if options.tables else PROGRAMS:
        if not name.startswith(options.only) or (name in results and not options.again):
            continue
        results = load() | {name: compile_one(mesh, arguments)}
        store(results)
        one = results[name]
        print(
            name,
            one.get("error") or f"{gb(one['peak_bytes_per_device'])} GB, {one['compile_seconds']} s",
            flush=True,
        )
    write_tables(results)


if __name__ == "__main__":
    main()
