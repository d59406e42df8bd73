"""Grouped matmul with packed MXFP4 weights, side by side with float weights in plain JAX.

The same rows and the same weights, which the others hold dequantised: `jax.lax.ragged_dot` on float32 and on
bfloat16 weights, and one dense product per expert with the group sizes fixed when it is compiled, which a router's
never are: the floor of what the products themselves cost. The calls of one run take turns, round by round; errors
are relative to float64.

    python benchmarks/bench_grouped_matmul.py
    python benchmarks/bench_grouped_matmul.py --shapes prefill_2p8t_up_experts_over_64

Shapes are rows x experts x inputs x outputs, or names of `pallas_kernels.mxfp4_matmul.shapes`. Runs on the CPU
unless JAX_PLATFORMS names another platform.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import Any

import side_by_side

SHAPES = "cpu_comparison,64x32x2304x1024,4096x16x2304x1024"
"""The public comparison's size, and decode and prefill with experts of the 48B configuration, a part of them."""


def draw_groups(rows: int, experts: int, seed: int = 0) -> Any:
    """Group sizes of a router: uneven, some empty, summing to the rows."""
    import numpy as np

    random = np.random.default_rng(seed)
    return random.multinomial(rows, random.dirichlet(np.full(experts, 2.0))).astype(np.int32)


def dense_products(sizes: tuple[int, ...], x: Any, w: Any) -> Any:
    """One product per expert that has rows; the sizes are constants of the program."""
    import jax.numpy as jnp

    parts, start = [], 0
    for expert, size in enumerate(sizes):
        if size:
            parts.append(
                jnp.matmul(x[start : start + size], w[expert], preferred_element_type=jnp.float32).astype(
                    x.dtype
                )
            )
        start += size
    return jnp.concatenate(parts)


def measure_shape(shape: Any, rounds: int, implementation: str | None, layout: str) -> dict[str, Any]:
    """Figures by side, and the bytes of weights that each holds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import mxfp4_matmul

    random = np.random.default_rng(0)
    x = random.standard_normal((shape.rows, shape.inputs), np.float32)
    master = random.standard_normal((shape.experts, shape.outputs, shape.inputs), np.float32)
    packed = jax.tree.map(jnp.asarray, mxfp4_matmul.quantize(master)).to_layout(layout)
    del master
    dense = jnp.swapaxes(packed.dequantize(jnp.float32), -1, -2)
    sizes = draw_groups(shape.rows, shape.experts)
    expected = dense_float64(x, np.asarray(dense), sizes)
    wide, low = (jnp.asarray(x, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    dense_low = dense.astype(jnp.bfloat16)
    groups, constant_sizes = jnp.asarray(sizes), tuple(int(size) for size in sizes)
    product = jax.jit(functools.partial(mxfp4_matmul.grouped_matmul, implementation=implementation))
    ragged = jax.jit(
        lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(
            x.dtype
        )
    )
    dense_each = jax.jit(functools.partial(dense_products, constant_sizes))
    name = f"ours ({implementation or 'default'})"
    calls = {
        f"{name}, float32 rows": functools.partial(product, wide, packed, groups),
        f"{name}, bfloat16 rows": functools.partial(product, low, packed, groups),
        "ragged_dot, float32": functools.partial(ragged, wide, dense, groups),
        "ragged_dot, bfloat16": functools.partial(ragged, low, dense_low, groups),
        "dense per expert, float32": functools.partial(dense_each, wide, dense),
        "dense per expert, bfloat16": functools.partial(dense_each, low, dense_low),
    }
    outputs, sides = side_by_side.measure_in_turn(calls, rounds)
    bits = {"ours": packed.nbytes_packed, "float32": dense.size * 4, "bfloat16": dense.size * 2}
    figures: dict[str, Any] = dict(sides)
    for side, row in figures.items():
        row["relative_error"] = side_by_side.relative_error([outputs[side]], [expected])
        row["weight_bytes"] = bits["ours" if side.startswith("ours") else side.rsplit(" ", 1)[1]]
        same_rows = f"{name}, {'bfloat16' if 'bfloat16' in side else 'float32'} rows"
        if side != same_rows:
            row["times_ours"] = round(row["median_ms"] / sides[same_rows]["median_ms"], 2)
            row["cpu_times_ours"] = round(row["cpu_ms"] / sides[same_rows]["cpu_ms"], 2)
    return {"largest_group": int(sizes.max()), "empty_groups": int((sizes == 0).sum()), "sides": figures}


def dense_float64(x: Any, dense: Any, sizes: Any) -> Any:
    """The product in float64, expert by expert."""
    import numpy as np

    parts, start = [], 0
    for expert, size in enumerate(sizes):
        parts.append(x[start : start + size].astype(np.float64) @ dense[expert].astype(np.float64))
        start += size
    return np.concatenate(parts)


def show(result: dict[str, Any]) -> None:
    """Print the figures as tables."""
    print(
        f"{result['platform']}, {result['cores']} cores, {result['rounds']} rounds, layout {result['layout']}, "
        f"load average {result['load_average']}; jax {result['jax']}"
    )
    for shape, figures in result["shapes"].items():
        rows = [
            (
                side,
                f"{x['median_ms']:.1f}",
                f"{x['best_ms']:.1f}",
                f"{x['cpu_ms']:.1f}",
                x.get("times_ours", ""),
                x.get("cpu_times_ours", ""),
                f"{x['relative_error']:.1e}",
                f"{x['weight_bytes'] / 1e6:.0f}",
            )
            for side, x in figures["sides"].items()
        ]
        title = (
            f"rows x experts x inputs x outputs = {shape}; largest group {figures['largest_group']}, "
            f"{figures['empty_groups']} empty"
        )
        columns = [
            "",
            "median ms",
            "best ms",
            "CPU ms",
            "times ours",
            "CPU times ours",
            "relative error",
            "weights MB",
        ]
        side_by_side.print_table(title, columns, rows)


def parse_shapes(text: str) -> list[Any]:
    """Names of `shapes.SHAPES`, or "2048x16x512x1024"."""
    shapes = []
    for part in text.split(","):
        numbers = part.split("x")
        if len(numbers) == 4 and all(number.isdecimal() and int(number) > 0 for number in numbers):
            shapes.append(tuple(map(int, numbers)))
        else:
            shapes.append(part)
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help=f"default: {SHAPES}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds measured after one that compiles")
    parser.add_argument("--implementation", help="of ours: xla (the default), reference, tpu, ...")
    parser.add_argument("--layout", default="packed_kn", help="of the packed weights; default: packed_kn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; pass at least 1.")
    side_by_side.prepare_process()
    import jax

    from pallas_kernels.mxfp4_matmul import LAYOUTS
    from pallas_kernels.mxfp4_matmul.shapes import SHAPES as NAMED
    from pallas_kernels.mxfp4_matmul.shapes import GroupedMatmulShape

    if arguments.layout not in LAYOUTS:
        parser.error(f"--layout is {arguments.layout!r}; pass one of {', '.join(LAYOUTS)}.")
    result: dict[str, Any] = {
        "jax": jax.__version__,
        "platform": jax.default_backend(),
        "cores": side_by_side.CORES,
        "rounds": arguments.rounds,
        "layout": arguments.layout,
        "load_average": [],
        "shapes": {},
    }
    for shape in arguments.shapes:
        if isinstance(shape, str) and shape not in NAMED:
            parser.error(
                f"the shape {shape!r} is neither a name ({', '.join(NAMED)}) nor four positive numbers "
                "rows x experts x inputs x outputs."
            )
    for shape in arguments.shapes:
        sizes = NAMED[shape] if isinstance(shape, str) else GroupedMatmulShape(*shape)
        result["load_average"].append(round(os.getloadavg()[0], 1))
        figures = measure_shape(sizes, arguments.rounds, arguments.implementation, arguments.layout)
        result["shapes"]["x".join(map(str, sizes))] = figures
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
