"""What the planner says against what the compilers said: writes the table of docs/planning.md.

    python benchmarks/plan_against_compiler.py

Reads docs/compile_reports.json, which `benchmarks/compile_pods.py` writes. Arguments of a program are the weights and
the cache, in training masters and moments; a text program takes no image tower, so it is left out of the planner's
weights here. Temporaries are the program's peak without its arguments: the TPU compiler's own figure for them has
what its heap loses between arrays twice, of which nothing is needed to fit. GPUs take theirs in one piece.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel import load_mesh_file, mesh_file_names
from moe28t_jax.planning import make_plan

ROOT = Path(__file__).resolve().parents[1]
REPORTS, PAGE = ROOT / "docs" / "compile_reports.json", ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- compiler: begin -->", "<!-- compiler: end -->"


def vision_bytes(config: ModelConfig) -> int:
    """Stored bytes of image tower and projector, bfloat16."""
    counts = config.parameter_count().by_group
    return 2 * (counts.get("vision", 0) + counts.get("projector", 0))


def compare(report: dict[str, Any]) -> dict[str, float] | None:
    """Bytes of one device by the planner and by the compiler, and their ratios; None for a report without figures (the
    compiler refused the program), of another model than the whole `moe28t` or of a mesh made for a comparison."""
    config = ModelConfig.preset("moe28t")
    if not report.get("argument_bytes_per_device") or report["layers"] != config.num_layers:
        return None
    if report["mesh"] not in mesh_file_names():
        return None
    mesh = load_mesh_file(report["mesh"])
    chunk = {} if report["chunk"] is None else {"chunk": report["chunk"]}
    plan = make_plan(config, mesh, report["phase"], report["batch"], report["context"], **chunk)
    planned = plan.per_device.weights + plan.per_device.state
    if report["phase"] != "train":
        # Training holds no image tower in the first place.
        planned -= vision_bytes(config)
    arguments = report["argument_bytes_per_device"]
    temporary = report["peak_bytes_per_device"] - arguments
    return {
        "planned_arguments": planned, "arguments": arguments, "arguments_ratio": planned / arguments,
        "planned_temporaries": plan.per_device.activations, "temporaries": temporary,
        "temporaries_ratio": plan.per_device.activations / max(temporary, 1),
    }  # fmt: skip


def table(reports: dict[str, Any]) -> list[str]:
    """Lines of the table, one per program."""
    lines = [
        "| program | batch x context | arguments planned | compiled | ratio | temporaries planned | compiled | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        found = compare(report)
        if found is not None:
            lines.append(
                f"| {name} | {report['batch']} x {report['context']:,} | {found['planned_arguments'] / 1e9:.2f} GB | "
                f"{found['arguments'] / 1e9:.2f} GB | {found['arguments_ratio']:.3f} | "
                f"{found['planned_temporaries'] / 1e9:.2f} GB | {found['temporaries'] / 1e9:.2f} GB | "
                f"{found['temporaries_ratio']:.2f} |"
            )
    return lines


def main() -> None:
    if not REPORTS.exists():
        raise SystemExit(f"{REPORTS.name} is not there; run benchmarks/compile_pods.py first.")
    lines = table(json.loads(REPORTS.read_text("utf-8")))
    page = PAGE.read_text("utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + "\n".join([BEGIN, *lines, END]) + rest.split(END)[1], "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
