"""What the kernel benchmarks share: a fixed number of cores, rounds in turn, and their figures."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

CORES = 2


def prepare_process() -> None:
    """Hold this process and its children to a few cores, on the CPU unless JAX_PLATFORMS says otherwise.

    Call it before jax is imported.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:CORES]))


def measure_in_turn(
    calls: Mapping[str, Callable[[], Any]], rounds: int, limit_s: float = float("inf")
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Run every call once in each round, every other round backwards: a drift of the load meets all alike.

    A first round compiles and is reported apart. No round begins later than `limit_s` seconds after the first one; of
    calls that are compiled already and for which that is too soon, the first round is the measurement. Returns what
    each call gave, and its `figures`.
    """
    import jax

    results: dict[str, Any] = {}
    first: dict[str, float] = {}
    first_busy: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    busy: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for name, call in calls.items():
        start, start_busy = time.perf_counter(), time.process_time()
        results[name] = jax.block_until_ready(call())
        first_busy[name] = time.process_time() - start_busy
        first[name] = time.perf_counter() - start
    for turn in range(rounds):
        if time.perf_counter() - begin > limit_s:
            break
        names = list(calls)
        for name in names if turn % 2 == 0 else reversed(names):
            start, start_busy = time.perf_counter(), time.process_time()
            jax.block_until_ready(calls[name]())
            busy[name].append(time.process_time() - start_busy)
            seconds[name].append(time.perf_counter() - start)
    for name in calls:
        if not seconds[name]:
            seconds[name], busy[name] = [first[name]], [first_busy[name]]
    return results, {name: figures(seconds[name], busy[name], first[name]) for name in calls}


def figures(seconds: list[float], busy: list[float], first: float) -> dict[str, float]:
    """Median and best in milliseconds, the median of the CPU time of all threads, seconds of the first call.

    The CPU time says what a call costs also on a machine that is busy with other things.
    """
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 3),
        "best_ms": round(1e3 * min(seconds), 3),
        "cpu_ms": round(1e3 * statistics.median(busy), 3),
        "first_call_s": round(first, 2),
    }


def relative_error(values: Iterable[Any], expected: Iterable[Any]) -> float:
    """Largest difference over the largest magnitude, of each pair of arrays; the worst of the pairs."""
    import numpy as np

    errors = []
    for value, wanted in zip(values, expected, strict=True):
        wanted = np.asarray(wanted, np.float64)
        errors.append(np.max(np.abs(np.asarray(value, np.float64) - wanted)) / np.max(np.abs(wanted)))
    return float(max(errors))


def add_ratios(row: dict[str, dict[str, Any]], ours: str) -> None:
    """To every other side, how many times our median its own is, in time and in CPU time."""
    for name, side in row.items():
        if name != ours:
            side["times_ours"] = round(side["median_ms"] / row[ours]["median_ms"], 2)
            side["cpu_times_ours"] = round(side["cpu_ms"] / row[ours]["cpu_ms"], 2)


def write_section(page: Path, name: str, lines: Iterable[str]) -> None:
    """Put lines between `<!-- NAME: begin -->` and `<!-- NAME: end -->` of a page, in place of what is there.

    Raises:
      ValueError: if the page does not hold the two marks once each.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page} does not hold {begin.strip()} and then {end.strip()}, once each; add them.")
    before, rest = text.split(begin)
    page.write_text(before + begin + "".join(f"{line}\n" for line in lines) + end + rest.split(end)[1])


def markdown_table(columns: list[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """The lines of a table, its first column at the left and the others at the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def print_table(title: str, columns: list[str], rows: Iterable[Iterable[Any]]) -> None:
    """A table on the terminal, its first column at the left and the others at the right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if os.isatty(1) else 120).print(table)
