"""Selection and sparse attention, side by side with dense latent attention, over the length of the context.

One sparse layer of the 2.8T configuration without its projections: an indexer of 32 heads of 128 channels, 96 heads
(or a tensor-parallel share) over latents of 512 + 64 channels, 2,048 keys selected. The dense side attends to every
cached key in the absorbed form, in tiles with an online softmax. Beside the times stand the operations of the closed
forms: per query and L keys, selection L (2 H D + 2 H), sparse attention 2,048 * 2 n (576 + 512), dense L * 2 n
(576 + 512).

    python benchmarks/bench_sparse_attention.py
    python benchmarks/bench_sparse_attention.py --contexts 4096,16384,65536 --queries 16 --heads 12 --json
    python benchmarks/bench_sparse_attention.py --page      # in docs/kernels/sparse_attention.md, with a picture

Runs on the CPU unless JAX_PLATFORMS names another platform.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import side_by_side

CONTEXTS = "2048,4096,8192,16384,32768,65536,131072"
INDEX_HEADS, INDEX_CHANNELS, TOP_K = 32, 128, 2048
WIDTH, VALUES, SCALE = 576, 512, 192**-0.5
PARTS = {"selection": "^--", "sparse attention": "v--", "both": "o-", "dense attention": "s-"}
"""What is measured, and how a plot marks it."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "kernels" / "sparse_attention.md"
TILE = 2048


def dense_attention(q: Any, kv: Any) -> Any:
    """Attention [1, Q, H, V] over all keys, tile by tile."""
    import jax
    import jax.numpy as jnp

    highest = jax.lax.Precision.HIGHEST
    tiles = jnp.moveaxis(kv.reshape(1, -1, TILE, WIDTH), 1, 0)

    def step(carry: Any, tile: Any) -> Any:
        maximum, total, sums = carry
        logits = SCALE * jnp.einsum("bqhc,bsc->bqhs", q, tile, precision=highest)
        new = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - new[..., None])
        kept = jnp.exp(maximum - new)
        sums = kept[..., None] * sums
        sums += jnp.einsum("bqhs,bsv->bqhv", weights, tile[..., :VALUES], precision=highest)
        return (new, kept * total + jnp.sum(weights, axis=-1), sums), None

    rows = q.shape[:3]
    start = (jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((*rows, VALUES)))
    (_, total, sums), _ = jax.lax.scan(step, start, tiles)
    return sums / total[..., None]


def operations(context: int, heads: int) -> dict[str, float]:
    """Of the closed forms, per query."""
    row = 2 * heads * (WIDTH + VALUES)
    selection = context * (2 * INDEX_HEADS * INDEX_CHANNELS + 2 * INDEX_HEADS) if context > TOP_K else 0
    return {
        "selection": selection,
        "sparse attention": min(TOP_K, context) * row,
        "both": selection + min(TOP_K, context) * row,
        "dense attention": context * row,
    }


def measure_context(context: int, queries: int, heads: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Figures by part; selection is not measured where every key is selected, as the network then skips it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import index_select, sparse_attention

    random = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape, np.float32))

    q, kv = array(1, queries, heads, WIDTH), array(1, context, WIDTH)
    q_index = array(1, queries, INDEX_HEADS, INDEX_CHANNELS)
    k_index, weights = array(1, context, INDEX_CHANNELS), array(1, queries, INDEX_HEADS)
    positions = jnp.full((1, queries), context - 1, jnp.int32)
    select = jax.jit(functools.partial(index_select.select, top_k=TOP_K))
    attend = jax.jit(functools.partial(sparse_attention.sparse_attention, scale=SCALE, value_dim=VALUES))
    everything = jnp.broadcast_to(jnp.arange(TOP_K, dtype=jnp.int32), (1, queries, TOP_K))
    chosen = everything if context <= TOP_K else select(q_index, k_index, weights, positions)
    calls = {
        "sparse attention": functools.partial(attend, q, kv, chosen),
        "dense attention": functools.partial(jax.jit(dense_attention), q, kv),
    }
    if context > TOP_K:
        calls["selection"] = functools.partial(select, q_index, k_index, weights, positions)
    _, sides = side_by_side.measure_in_turn(calls, rounds, seconds)
    figures: dict[str, Any] = dict(sides)
    parts = [figures[name] for name in ("selection", "sparse attention") if name in figures]
    figures["both"] = {key: round(sum(part[key] for part in parts), 3) for key in ("median_ms", "cpu_ms")}
    counted = operations(context, heads)
    for name, row in figures.items():
        row["operations"] = counted[name]
    dense = figures["dense attention"]
    figures["gain"] = {
        "measured": round(dense["median_ms"] / figures["both"]["median_ms"], 2),
        "operations": round(dense["operations"] / figures["both"]["operations"], 2),
    }
    return figures


def crossover_of_operations(heads: int) -> int | None:
    """The context from which the closed forms of selection and sparse attention together are the smaller ones."""
    row, key = operations(1, heads)["dense attention"], 2 * INDEX_HEADS * INDEX_CHANNELS + 2 * INDEX_HEADS
    return math.ceil(TOP_K * row / (row - key)) if row > key else None


def crossover(gains: dict[int, float]) -> float | None:
    """The context at which the gain passes 1, on a line between the logarithms of the contexts around it."""
    points = sorted(gains.items())
    for (low, before), (high, after) in itertools.pairwise(points):
        if before < 1 <= after:
            part = (1 - before) / (after - before)
            return round(2 ** (math.log2(low) + part * (math.log2(high) - math.log2(low))))
    return None


def plot(contexts: dict[int, dict[str, Any]], title: str, path: Path) -> None:
    """Milliseconds beside operations over the length of the context, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for name, style in PARTS.items():
        points = [
            (context, row[name]["median_ms"], row[name]["operations"])
            for context, row in contexts.items()
            if name in row
        ]
        lengths, milliseconds, operations = zip(*points, strict=True)
        axes[0].plot(lengths, milliseconds, style, label=name)
        axes[1].plot(lengths, operations, style, label=name)
    for axis, label in zip(axes, ("milliseconds", "operations of the closed form, per query"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="keys", ylabel=label)
        axis.set_xticks(list(contexts), [f"{context // 1024}K" for context in contexts])
        axis.minorticks_off()
        axis.legend()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)


def parse_contexts(text: str) -> list[int]:
    contexts = []
    for part in text.split(","):
        if not part.isdecimal() or int(part) < TILE or int(part) % TILE:
            raise argparse.ArgumentTypeError(f"{part!r} is not a multiple of {TILE}")
        contexts.append(int(part))
    return contexts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=parse_contexts, default=CONTEXTS, help=f"default: {CONTEXTS}")
    parser.add_argument("--queries", type=int, default=1, help="of one sequence; default: 1, decoding")
    parser.add_argument("--heads", type=int, default=96, help="default: 96")
    parser.add_argument("--rounds", type=int, default=5, help="at most, after one that compiles; default: 5")
    parser.add_argument("--seconds", type=float, default=8, help="per context; default: 8")
    parser.add_argument(
        "--page", action="store_true", help="also write table and picture into the kernel's page"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    for name in ("queries", "heads", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; pass at least 1.")
    side_by_side.prepare_process()
    import jax

    load = round(os.getloadavg()[0], 1)
    measured = {
        context: measure_context(
            context, arguments.queries, arguments.heads, arguments.rounds, arguments.seconds
        )
        for context in arguments.contexts
    }
    result: dict[str, Any] = {
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "cores": side_by_side.CORES,
        "rounds": arguments.rounds,
        "load_average": load,
        "queries": arguments.queries,
        "heads": arguments.heads,
        "contexts": measured,
        "crossover": {
            "measured": crossover({context: row["gain"]["measured"] for context, row in measured.items()}),
            "operations": crossover_of_operations(arguments.heads),
        },
    }
    what = f"{arguments.queries} queries, {arguments.heads} heads"
    title = (
        f"{result['platform']}, {result['cores']} cores, at most {arguments.rounds} rounds, load average {load}; "
        f"{what}; milliseconds"
    )
    columns = ["context", *PARTS, "gain", "gain by operations"]
    rows = [
        [
            context,
            *(f"{row[name]['median_ms']:.1f}" if name in row else "" for name in PARTS),
            row["gain"]["measured"],
            row["gain"]["operations"],
        ]
        for context, row in measured.items()
    ]
    crossings = "; ".join(f"{kind}: {context or 'none'}" for kind, context in result["crossover"].items())
    if arguments.page:
        plot(measured, f"{what}, {result['platform']}, {result['cores']} cores", PAGE.with_suffix(".png"))
        table = side_by_side.markdown_table(columns, rows)
        picture = f"![Times and operations over the number of keys]({PAGE.with_suffix('.png').name})"
        lines = [
            f"{title}, jax {result['jax']}.",
            "",
            *table,
            "",
            f"Crossover, keys: {crossings}.",
            "",
            picture,
        ]
        side_by_side.write_section(PAGE, "benchmark", lines)
    if arguments.json:
        print(json.dumps(result))
        return
    side_by_side.print_table(title, columns, rows)
    print(f"crossover, {crossings}")


if __name__ == "__main__":
    main()
