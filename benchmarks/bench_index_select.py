"""Exact selection of the best keys, side by side with `jax.lax.top_k` of scores that are all in memory.

The other side scores all keys tile by tile, so that it never holds a score per head either, keeps the scores
[queries, keys] and takes `jax.lax.top_k` of them and sorts the indices: the same set. Temporary memory is the
compiler's figure for each program. The calls of one run take turns, round by round.

    python benchmarks/bench_index_select.py
    python benchmarks/bench_index_select.py --shapes 1x131072,128x131072 --keys fp8,fp4 --json

Shapes are queries x keys, of one sequence and one sparse layer of the 2.8T configuration (32 heads of 128 channels,
2,048 selected). Runs on the CPU unless JAX_PLATFORMS names another platform.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import Any

import side_by_side

SHAPES = "1x131072,1x1048576,128x131072"
"""Decoding at 128K and 1M, and a block of queries at 128K; 128x1048576 takes half a minute a round."""
HEADS, CHANNELS, TOP_K = 32, 128, 2048
KEYS = ("float32", "bfloat16", "fp8", "fp4")


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


def measure_shape(queries: int, keys: int, kinds: list[str], rounds: int) -> dict[str, Any]:
    """Figures by side, with the temporary memory of each program."""
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

    def compiled(function: Any, keys_in_form: Any) -> tuple[Any, int]:
        program = function.lower(q, keys_in_form, weights, query_positions=positions).compile()
        return program, program.memory_analysis().temp_size_in_bytes

    forms: dict[str, Any] = {"float32": k, "bfloat16": k.astype(jnp.bfloat16)}
    forms |= {kind: index_select.quantize_keys(k, kind) for kind in ("fp8", "fp4") if kind in kinds}
    calls, temporary = {}, {}
    for kind in kinds:
        name = f"ours, {kind} keys"
        program, temporary[name] = compiled(select, forms[kind])
        calls[name] = functools.partial(program, q, forms[kind], weights, query_positions=positions)
    other = "lax.top_k of all scores, float32 keys"
    everything = jax.jit(lambda q, k, weights, query_positions: all_in_memory(q, k, weights, query_positions))
    program, temporary[other] = compiled(everything, k)
    calls[other] = functools.partial(program, q, k, weights, query_positions=positions)
    outputs, sides = side_by_side.measure_in_turn(calls, rounds)
    figures: dict[str, Any] = dict(sides)
    expected = [set(row.tolist()) for row in np.asarray(outputs[other])[0]]
    for name, row in figures.items():
        row["temporary_bytes"] = temporary[name]
        row["temporary_share"] = round(temporary[name] / temporary[other], 4)
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
    parser.add_argument("--rounds", type=int, default=3, help="rounds measured after one that warms up")
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
        figures = measure_shape(queries, keys, arguments.keys, arguments.rounds)
        result["shapes"][f"{queries}x{keys}"] = figures
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"{result['platform']}, {result['cores']} cores, {result['rounds']} rounds, "
        f"load average {result['load_average']}; jax {result['jax']}"
    )
    for shape, figures in result["shapes"].items():
        rows = [
            (
                side,
                f"{x['median_ms']:.1f}",
                f"{x['cpu_ms']:.1f}",
                x.get("times_ours", ""),
                f"{x['temporary_bytes'] / 1e6:.2f}",
                f"{100 * x['temporary_share']:.2f}%",
                x["recall"],
            )
            for side, x in figures.items()
        ]
        columns = ["", "median ms", "CPU ms", "times ours", "temporary MB", "of all scores", "same keys"]
        side_by_side.print_table(f"queries x keys = {shape}", columns, rows)


if __name__ == "__main__":
    main()
