"""Puts the result of `benchmarks/long_context.py` into docs/long_context.md and docs/long_context.png.

python benchmarks/long_context_page.py                 # from the default folder; or name another one
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PAGE = Path(__file__).resolve().parents[1] / "docs" / "long_context.md"
BEGIN, END = "<!-- run: begin -->", "<!-- run: end -->"


def plot(result: dict[str, Any], path: Path) -> None:
    """Seconds of a chunk with the line through them, and peak memory, over the tokens read."""
    chunk, found, short = result["chunk"], result["fit"], result["short"]
    seconds, peaks = (np.asarray(result["chunks"][name]) for name in ("seconds", "peak_bytes"))
    read = chunk * (np.arange(len(seconds)) + 1)
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2)
    times.plot(read, seconds, ".", markersize=3, label=f"one chunk of {chunk:,} tokens")
    slope = found["nanoseconds_per_query_and_key"] * chunk * 1e-9
    line = found["seconds_of_a_chunk_without_keys"] + slope * (read - chunk / 2)
    times.plot(read, line, color="black", label="straight line")
    alone = found["indexer_alone"]
    times.plot(alone["keys"], alone["seconds"], "^", label="selection alone")
    times.set(xlabel="tokens read", ylabel="seconds of CPU time", ylim=(0, None))
    times.legend()
    memory.plot(read, peaks / 1e6, label="this run")
    memory.plot(short["tokens"], short["peak_bytes"] / 1e6, "o", label=f"a run of {short['tokens']:,} tokens")
    state = result["state_bytes_per_token"] * (read - short["tokens"])
    label = "that, with room for so many tokens"
    memory.plot(read, (short["peak_bytes"] + state) / 1e6, "--", color="black", label=label)
    memory.set(xlabel="tokens", ylabel="peak of resident memory, MB", ylim=(0, 1.15e-6 * peaks.max()))
    memory.legend()
    figure.savefig(path, dpi=110)


def table(result: dict[str, Any]) -> list[str]:
    """The figures of a run as lines of a table."""
    chunks, found, memory, needle = (result[name] for name in ("chunks", "fit", "memory", "needle"))
    seconds, short = chunks["seconds"], result["short"]
    last = max(1, len(seconds) // 16)
    rows = [
        ("tokens, in chunks of", f"{result['tokens']:,}, {result['chunk']:,}"),
        (
            "seconds of CPU time in all, of the first chunk, of the last ones",
            f"{result['seconds']:,.0f}, {seconds[0]:.2f}, {np.mean(seconds[-last:]):.2f}",
        ),
        (
            "a straight line through the chunks' seconds: without keys, per query and visible key",
            f"{found['seconds_of_a_chunk_without_keys']:.2f} s, {found['nanoseconds_per_query_and_key']:.2f} ns "
            f"({found['explained_by_the_line']:.1%} of the variance)",
        ),
        (
            "the selection alone, per query and visible key",
            f"{found['indexer_alone']['nanoseconds_per_query_and_key']:.2f} ns",
        ),
        (
            f"peak memory, and of the run with {short['tokens']:,} tokens",
            f"{result['peak_bytes'] / 1e6:,.0f} MB, {short['peak_bytes'] / 1e6:,.0f} MB",
        ),
        (
            "growth between the two: peak, latents and index keys, temporaries of the program",
            f"{memory['peak_grew'] / 1e6:,.0f} MB, {memory['state_grew'] / 1e6:,.0f} MB, "
            f"{memory['temporaries_grew'] / 1e6:,.1f} MB",
        ),
        (
            f"the needle is among the {needle['selected_per_query']} tokens that the question selects at the end",
            "yes" if needle["needle_selected"] else "no",
        ),
        (
            "other queries of the last chunk that select it",
            f"{needle['other_queries_of_the_last_chunk_with_the_needle']} of {result['chunk'] - 1:,}",
        ),
        (
            "largest change of a logit when the needle's latent is wiped",
            f"{needle['change_of_the_logits_without_the_needle']:.1e}",
        ),
        (
            "selected in the last chunks: mean place (0 the start, 1 the query), distinct tokens of a chunk",
            f"{np.mean(chunks['mean_place'][-last:]):.2f}, {np.mean(chunks['distinct'][-last:]):,.0f}",
        ),
    ]
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("benchmarks/results/long_context")
    if not (folder / "result.json").is_file():
        raise SystemExit(
            f"There is no finished run in {str(folder)!r}; run benchmarks/long_context.py first (it takes hours, and "
            "goes on where it was interrupted), or name its folder."
        )
    result = json.loads((folder / "result.json").read_text("utf-8"))
    if "short" not in result:
        raise SystemExit(
            f"The result in {str(folder)!r} was not compared with a shorter run, which one of {result['tokens']:,} "
            "tokens has only where --short is less and not 0; run it longer."
        )
    plot(result, PAGE.with_suffix(".png"))
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(before + "\n".join([BEGIN, *table(result), END]) + rest.split(END)[1], "utf-8")


if __name__ == "__main__":
    main()
