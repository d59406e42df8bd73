"""Exact selection of the best keys, side by side with `jax.lax.top_k` of scores that are all in memory.

The other side scores all keys tile by tile, so that it never holds a score per head either, keeps the scores
[queries, keys] and takes `jax.lax.top_k` of them and sorts the indices: the same set. Temporary memory is the
compiler's figure for each program, and compiling is timed apart. The calls of one run take turns, round by round, as
many as the seconds per shape allow; where one round takes longer, it is the only one.

    python benchmarks/bench_index_select.py
    python benchmarks/bench_index_select.py --shapes 1x131072,128x131072 --keys fp8,fp4 --json
    python benchmarks/bench_index_select.py --page          # in docs/kernels/index_select.md

Shapes are queries x keys, of one sequence and one sparse layer of the 2.8T configuration (32 heads of 128 channels,
2,048 selected). Runs on the CPU unless JAX_PLATFORMS names another platform.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from pathlib import Path
from typing import Any

import side_by_side

SHAPES = "1x131072,1x1048576,128x131072,128x1048576"
"""Decoding, and a block of queries, at 128K and 1M."""
SECONDS = 20.0
HEADS, CHANNELS, TOP_K = 32, 128, 2048
KEYS = ("float32", "bfloat16", "fp8", "fp4")
OTHER = "lax.top_k of all scores, float32 keys"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "kernels" / "index_select.md"


def all_in_memory(q: Any, k: Any, weights: Any, positions: Any) -> Any:
    """Scores of every key, then top-k, then the indices in ascending order."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.index_select import xla

    keys, tile = k.shape[1], 4096
    tiles = jnp.moveaxis(k.reshape(1, keys // tile, tile, CHANNELS), 1, 0)
    scores = jax.lax.map(lambda k: xla.tile_scores_blocked(q, k, weights, True), tiles)
    scores = jnp.moveaxis(scores, 0, 2).reshape(1, q.shape[1], keys)
    visible = jnp.arange(keys, dtype=jnp.int32) <= positions[..., None]
    _, indices = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), TOP_K)
    return jnp.sort(indices, axis=-1)


def measure_shape(queries: int, keys: int, kinds: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Figures by side, with the temporary memory of each program and the seconds that compiling it took."""
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import index_select

    random = np.random.default_rng(0)
    q = jnp.asarray(random.standard_normal((1, queries, HEADS, CHANNELS), np.float32))
    k = jnp.asarray(random.standard_normal((1, keys, CHANNELS), np.float32))
    weights = jnp.asarray(random.standard_normal((1, queries, HEADS), np.float32))
    positions = jnp.asarray(np.arange(keys - queries, keys, dtype=np.int32)[None])
    select = jax.jit(functools.partial(index_select.select, top_k=TOP_K))

    programs, calls = {}, {}

    def prepare(name: str, function: Any, keys_in_form: Any) -> None:
        start = time.perf_counter()
        program = function.lower(q, keys_in_form, weights, query_positions=positions).compile()
        compile_s = round(time.perf_counter() - start, 2)
        programs[name] = {
            "compile_s": compile_s,
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        }
        calls[name] = functools.partial(program, q, keys_in_form, weights, query_positions=positions)

    forms: dict[str, Any] = {"float32": k, "bfloat16": k.astype(jnp.bfloat16)}
    forms |= {kind: index_select.quantize_keys(k, kind) for kind in ("fp8", "fp4") if kind in kinds}
    for kind in kinds:
        prepare(f"ours, {kind} keys", select, forms[kind])
    everything = jax.jit(lambda q, k, weights, query_positions: all_in_memory(q, k, weights, query_positions))
    prepare(OTHER, everything, k)
    outputs, sides = side_by_side.measure_in_turn(calls, rounds, seconds)
    figures: dict[str, Any] = dict(sides)
    expected = [set(row.tolist()) for row in np.asarray(outputs[OTHER])[0]]
    for name, row in figures.items():
        row |= programs[name]
        row["temporary_share"] = round(row["temporary_bytes"] / programs[OTHER]["temporary_bytes"], 4)
        found = [set(r.tolist()) for r in np.asarray(outputs[name])[0]]
        row["recall"] = round(
            sum(len(a & b) for a, b in zip(found, expected, strict=True)) / (len(expected) * TOP_K), 5
        )
    side_by_side.add_ratios(figures, f"ours, {kinds[0]} keys")
    return figures


def parse_shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        numbers = part.split("x")
        if len(numbers) != 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            raise argparse.ArgumentTypeError(f"{part!r} is not queries x keys, like 128x131072")
        queries, keys = map(int, numbers)
        if keys % 4096 or keys <= TOP_K or queries > keys:
            raise argparse.ArgumentTypeError(f"{keys} keys: pass a multiple of 4096, at least the queries")
        shapes.append((queries, keys))
    return shapes


def parse_kinds(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in KEYS:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(KEYS)}")
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help=f"default: {SHAPES}")
    parser.add_argument("--keys", type=parse_kinds, default="float32,fp8", help=f"of {', '.join(KEYS)}")
    parser.add_argument("--rounds", type=int, default=5, help="at most, after one that warms up; default: 5")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"per shape; default: {SECONDS:.0f}")
    parser.add_argument("--page", action="store_true", help="also write the table into the kernel's page")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; pass at least 1.")
    side_by_side.prepare_process()
    import jax

    result: dict[str, Any] = {
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "cores": side_by_side.CORES,
        "rounds": arguments.rounds,
        "load_average": [],
        "shapes": {},
    }
    for queries, keys in arguments.shapes:
        result["load_average"].append(round(os.getloadavg()[0], 1))
        figures = measure_shape(queries, keys, arguments.keys, arguments.rounds, arguments.seconds)
        result["shapes"][f"{queries}x{keys}"] = figures
    if arguments.page:
        side_by_side.write_section(PAGE, "benchmark", page_lines(result))
    if arguments.json:
        print(json.dumps(result))
        return
    print(heading(result))
    for shape, figures in result["shapes"].items():
        side_by_side.print_table(f"queries x keys = {shape}", ["", *COLUMNS], rows_of(figures))


COLUMNS = ["median ms", "CPU ms", "times ours", "compiling, s", "temporary MB", "of all scores", "same keys"]


def heading(result: dict[str, Any]) -> str:
    """What the figures were taken with."""
    return (
        f"{result['platform']}, {result['cores']} cores, at most {result['rounds']} rounds, load average "
        f"{result['load_average']}; jax {result['jax']}"
    )


def rows_of(figures: dict[str, Any]) -> list[list[Any]]:
    """A row of `COLUMNS` for each side, after its name."""
    return [
        [
            side,
            f"{x['median_ms']:.1f}",
            f"{x['cpu_ms']:.1f}",
            x.get("times_ours", ""),
            f"{x['compile_s']:.1f}",
            f"{x['temporary_bytes'] / 1e6:.2f}",
            f"{100 * x['temporary_share']:.2f}%",
            x["recall"],
        ]
        for side, x in figures.items()
    ]


def page_lines(result: dict[str, Any]) -> list[str]:
    """The figures as a table, and where the aim, no slower and less than 1% of the memory, is met."""
    rows, met = [], {"no slower": [], "slower": [], "less than 1% of the memory": [], "more than that": []}
    for shape, figures in result["shapes"].items():
        name = shape.replace("x", " x ")
        rows += [[name, *row] for row in rows_of(figures)]
        ours, other = next(iter(figures.values())), figures[OTHER]
        met["no slower" if ours["median_ms"] <= other["median_ms"] else "slower"].append(name)
        small = ours["temporary_share"] < 0.01
        met["less than 1% of the memory" if small else "more than that"].append(name)
    verdict = "; ".join(f"{what}: {', '.join(shapes) or 'none'}" for what, shapes in met.items())
    table = side_by_side.markdown_table(["queries x keys", "", *COLUMNS], rows)
    return [f"{heading(result)}.", "", *table, "", f"The first of our forms beside `lax.top_k`: {verdict}."]


if __name__ == "__main__":
    main()
