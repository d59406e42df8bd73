"""Forward and gradient of the gated delta rule, side by side with tokamax and with fla-core.

All do the same work, from raw arrays in the layout each takes: q and k normalised, the decay from its gate
(-5 sigmoid(exp(a) (gate + bias)), the only form that tokamax's chunked implementation takes), then the recurrence;
float32. The gradient is that of sum(o * c), c random, in q, k, v, gate and beta. The calls of one run take turns,
round by round. Errors are relative to float64: outputs to the recurrence token by token, gradients to the
derivative of the chunked form (keeping every state of the recurrence would take gigabytes).

    python benchmarks/bench_delta_rule.py                       # ours; beside tokamax where it is installed
    python benchmarks/bench_delta_rule.py --oracle-python PATH  # and beside torch: fla-core's naive form, one step

PATH is the interpreter of an environment with torch, and fla-core 0.6.0 for its row. Runs on the CPU unless
JAX_PLATFORMS names another platform.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import side_by_side
from torch_delta_rule import TorchPeer, step_inputs

LOWER_BOUND = -5.0
SHAPES = "1x2048x4x128,1x8192x16x128,4x512x8x128"
STEP_SHAPES = ((1, 32, 128), (8, 32, 128), (1, 96, 128))
"""Batch, heads, channels of one decode step: a layer of the 48B configuration, and one of the 2.8T one."""
STEP_CALLS = 20
LARGEST_KEPT_STATES = 1e9
"""Bytes: the recurrence keeps the state of every token for its gradient; beyond this it is left out."""
NEEDED_TOKAMAX = "0.0.17"

Inputs = dict[str, Any]


def draw(shape: tuple[int, int, int, int], seed: int = 0) -> Inputs:
    """Raw inputs [B, T, H, ...] in float64 that are float32 numbers, and the cotangent of the output."""
    import numpy as np

    batch, tokens, heads, width = shape
    random = np.random.default_rng(seed)

    def normal(*size: int) -> Any:
        return random.standard_normal(size, np.float32).astype(np.float64)

    per_token = (batch, tokens, heads, width)
    return {
        "q": normal(*per_token),
        "k": normal(*per_token),
        "v": normal(*per_token),
        "gate": (0.5 * normal(*per_token) - 2).astype(np.float32).astype(np.float64),
        "beta": (1 / (1 + np.exp(-normal(*per_token[:3])))).astype(np.float32).astype(np.float64),
        "a": np.log(random.uniform(0.5, 1.5, heads)).astype(np.float32).astype(np.float64),
        "bias": random.uniform(-0.5, 0.5, (heads, width)).astype(np.float32).astype(np.float64),
        "ct": normal(*per_token),
    }


def prepared(x: Inputs, xp: Any) -> tuple[Any, Any, Any]:
    """Normalised q (scaled) and k, and the log decay."""

    def unit(array: Any) -> Any:
        return array / xp.sqrt((array * array).sum(-1, keepdims=True) + 1e-6)

    opened = 1 / (1 + xp.exp(-xp.exp(x["a"])[:, None] * (x["gate"] + x["bias"])))
    return unit(x["q"]) * x["q"].shape[-1] ** -0.5, unit(x["k"]), LOWER_BOUND * opened


def ours(implementation: str | None, x: Inputs) -> Any:
    """Output of this project from raw inputs, [B, T, H, V]."""
    import jax.numpy as jnp

    from pallas_kernels import delta_rule

    q, k, log_decay = prepared(x, jnp)
    return delta_rule.delta_rule(q, k, x["v"], log_decay, x["beta"], implementation=implementation)[0]


def peer(implementation: str, x: Inputs) -> Any:
    """Output of tokamax from raw inputs with heads first, [H, B, T, V]."""
    from tokamax._src.ops.kda.api import (  # pyright: ignore[reportMissingImports]
        kimi_delta_attention,
    )

    return kimi_delta_attention(
        x["q"],
        x["k"],
        x["v"],
        x["gate"],
        x["beta"],
        a_log=x["a"],
        delta_time_bias=x["bias"].reshape(-1),
        scale=x["q"].shape[-1] ** -0.5,
        use_qk_l2norm=True,
        use_gate_in_kernel=True,
        lower_bound=LOWER_BOUND,
        implementation=implementation,
    )[0]


def heads_first(x: Inputs) -> Inputs:
    """[B, T, H, ...] -> [H, B, T, ...] for what has tokens."""
    import numpy as np

    return {
        name: np.ascontiguousarray(np.moveaxis(a, 2, 0)) if name not in ("a", "bias") else a
        for name, a in x.items()
    }


def heads_third(array: Any) -> Any:
    """[H, B, T, ...] -> [B, T, H, ...]."""
    import numpy as np

    return np.moveaxis(np.asarray(array), 0, 2)


def gradient(function: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
    """The gradients of sum(o * ct) in the inputs that have tokens, in the order q, k, v, gate, beta."""
    import jax

    names = ("q", "k", "v", "gate", "beta")

    def loss(parts: tuple[Any, ...], x: Inputs) -> Any:
        return (function(x | dict(zip(names, parts, strict=True))) * x["ct"]).sum()

    return lambda x: jax.grad(loss)(tuple(x[name] for name in names), x)


def tokamax_version() -> str | None:
    """Its version, or None where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version("tokamax")
    except metadata.PackageNotFoundError:
        return None


def measure_shape(
    shape: tuple[int, int, int, int], rounds: int, implementation: str | None, with_tokamax: bool
) -> dict[str, dict[str, Any]]:
    """Figures of the forward pass and of the gradient, by side."""
    import jax
    import jax.numpy as jnp

    batch, tokens, heads, width = shape
    exact = draw(shape)

    def on_device(x: Inputs) -> Inputs:
        return {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}

    with jax.enable_x64(True):
        expected = {
            "forward": (jax.jit(functools.partial(ours, "reference"))(exact),),
            "gradient": jax.jit(gradient(functools.partial(ours, "xla")))(exact),
        }
    kept = 4 * batch * tokens * heads * width * width
    name = f"ours ({implementation or 'default'})"
    sides: dict[str, tuple[Callable[[Inputs], Any], Inputs]] = {
        name: (functools.partial(ours, implementation), on_device(exact))
    }
    if with_tokamax:
        x = on_device(heads_first(exact))
        for peers in ("xla_chunked", "xla"):
            sides[f"tokamax {peers}"] = (functools.partial(peer, peers), x)
    result: dict[str, dict[str, Any]] = {}
    for phase, transform in (("forward", lambda f: f), ("gradient", gradient)):
        calls = {
            side: functools.partial(jax.jit(transform(function)), x)
            for side, (function, x) in sides.items()
            if not (phase == "gradient" and side == "tokamax xla" and kept > LARGEST_KEPT_STATES)
        }
        outputs, row = side_by_side.measure_in_turn(calls, rounds)
        for side, output in outputs.items():
            arrays = output if phase == "gradient" else (output,)
            if side != name:
                arrays = tuple(heads_third(array) for array in arrays)
            row[side]["relative_error"] = side_by_side.relative_error(arrays, expected[phase])
        side_by_side.add_ratios(row, name)
        result[phase] = row
    return result


def measure_steps(torch: TorchPeer | None, rounds: int, implementation: str | None) -> dict[str, Any]:
    """Microseconds of one fused decode step, state and window donated, beside the same in torch."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import delta_rule

    def advance(caches: tuple[Any, Any], token: Inputs) -> tuple[Any, tuple[Any, Any]]:
        window, state = caches
        y, state, window = delta_rule.fused_step(
            window=window, state=state, **token, implementation=implementation
        )
        return y, (window, state)

    step = jax.jit(advance, donate_argnums=0)
    result = {}
    for shape in STEP_SHAPES:
        arrays = step_inputs(*shape)
        token = {name: jnp.asarray(a) for name, a in arrays.items() if name not in ("window", "state")}

        def fresh(arrays: Inputs = arrays) -> tuple[Any, Any]:
            return jnp.array(arrays["window"]), jnp.array(arrays["state"])

        y, caches = jax.block_until_ready(step(fresh(), token))
        first_y = np.asarray(y)
        ours, busy, theirs, their_busy = [], [], [], []
        for _ in range(rounds):
            start, start_busy = time.perf_counter(), time.process_time()
            for _ in range(STEP_CALLS):
                y, caches = step(caches, token)
            jax.block_until_ready((y, caches))
            busy.append((time.process_time() - start_busy) / STEP_CALLS)
            ours.append((time.perf_counter() - start) / STEP_CALLS)
            if torch is not None:
                answer = torch.ask({"step": list(shape), "calls": STEP_CALLS})
                theirs.append(answer["seconds"])
                their_busy.append(answer["busy"])

        def microseconds(values: list[float]) -> float:
            return round(1e6 * float(np.median(values)), 1)

        row: dict[str, Any] = {"ours_us": microseconds(ours), "ours_cpu_us": microseconds(busy)}
        if torch is not None:
            row |= {"torch_us": microseconds(theirs), "torch_cpu_us": microseconds(their_busy)}
            row["times_ours"] = round(row["torch_us"] / row["ours_us"], 2)
            difference = side_by_side.relative_error([first_y], [np.load(torch.output)])
            row["relative_difference"] = float(f"{difference:.1e}")
        result["x".join(map(str, shape))] = row
    return result


def fla_inputs(shape: tuple[int, int, int, int]) -> tuple[Inputs, Any]:
    """What fla-core's naive form takes, float32, and the expected output in float64."""
    import jax
    import numpy as np

    exact = draw(shape)
    q, k, log_decay = prepared(exact, np)
    with jax.enable_x64(True):
        expected = np.asarray(jax.jit(functools.partial(ours, "reference"))(exact))
    x = {"q": q, "k": k, "v": exact["v"], "g": log_decay, "beta": exact["beta"]}
    return {name: a.astype(np.float32) for name, a in x.items()}, expected


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures of one run."""
    import jax
    import numpy as np

    result: dict[str, Any] = {"cores": side_by_side.CORES, "rounds": arguments.rounds, "absent": []}
    versions: dict[str, Any] = {"jax": jax.__version__, "tokamax": tokamax_version()}
    if versions["tokamax"] is None:
        result["absent"].append(
            f"tokamax is not installed here and is left out; to compare, run this in an environment that has "
            f"tokamax=={NEEDED_TOKAMAX} beside jax, rich and this project."
        )
    torch = None
    if arguments.oracle_python is None:
        result["absent"].append("torch and fla-core are left out: --oracle-python was not given.")
    else:
        torch = TorchPeer(arguments.oracle_python, work)
        versions |= torch.versions
        if versions["fla-core"] is None:
            result["absent"].append(
                "fla-core is not installed in the environment of --oracle-python and is left out; "
                "install fla-core==0.6.0 there."
            )
    result |= {"versions": versions, "platform": jax.default_backend(), "load_average": [], "shapes": {}}
    for shape in arguments.shapes:
        result["load_average"].append(round(os.getloadavg()[0], 1))
        figures = measure_shape(
            shape, arguments.rounds, arguments.implementation, versions["tokamax"] is not None
        )
        if torch is not None and versions["fla-core"] is not None:
            x, expected = fla_inputs(shape)
            np.savez(torch.input, **x)
            for form in ("chunk", "recurrent"):
                # Seconds each: once, after the rounds of the others.
                answer = torch.ask({"fla": form})
                seconds = answer["seconds"]
                row: dict[str, Any] = side_by_side.figures([seconds], [answer["busy"]], seconds)
                row["relative_error"] = side_by_side.relative_error([np.load(torch.output)], [expected])
                figures["forward"][f"fla-core naive {form}"] = row
            side_by_side.add_ratios(figures["forward"], next(iter(figures["forward"])))
        result["shapes"]["x".join(map(str, shape))] = figures
    if arguments.steps:
        result["step"] = measure_steps(torch, arguments.rounds, arguments.implementation)
    if torch is not None:
        torch.close()
    return result


def show(result: dict[str, Any]) -> None:
    """Print the figures as tables."""
    present = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    print(
        f"{result['platform']}, {result['cores']} cores, {result['rounds']} rounds, float32, load average "
        f"{result['load_average']}; {present}"
    )
    for shape, phases in result["shapes"].items():
        rows = [
            (
                f"{phase}, {side}",
                f"{x['median_ms']:.1f}",
                f"{x['best_ms']:.1f}",
                f"{x['cpu_ms']:.1f}",
                x.get("times_ours", ""),
                x.get("cpu_times_ours", ""),
                f"{x['relative_error']:.1e}",
            )
            for phase, sides in phases.items()
            for side, x in sides.items()
        ]
        columns = ["", "median ms", "best ms", "CPU ms", "times ours", "CPU times ours", "relative error"]
        side_by_side.print_table(f"B x T x H x K = {shape}", columns, rows)
    if "step" in result:
        names = (
            "ours_us",
            "ours_cpu_us",
            "torch_us",
            "torch_cpu_us",
            "times_ours",
            "relative_difference",
        )
        rows = [(shape, *(row.get(name, "") for name in names)) for shape, row in result["step"].items()]
        columns = [
            "B x H x K",
            "ours us",
            "CPU us",
            "torch us",
            "CPU us",
            "times ours",
            "relative difference",
        ]
        side_by_side.print_table("a decode step of a layer between its projections", columns, rows)
    for sentence in result["absent"]:
        print(sentence)


def parse_shapes(text: str) -> list[tuple[int, int, int, int]]:
    """ "1x2048x4x128,..." as tuples."""
    shapes = []
    for part in text.split(","):
        try:
            batch, tokens, heads, width = map(int, part.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"the shape {part!r} is not four numbers; write batch x tokens x heads x channels, "
                "for example 1x2048x4x128."
            ) from None
        if min(batch, tokens, heads, width) < 1:
            raise argparse.ArgumentTypeError(f"the shape {part!r} has a size below 1; pass positive sizes.")
        shapes.append((batch, tokens, heads, width))
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help=f"default: {SHAPES}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds measured after one that compiles")
    parser.add_argument("--implementation", help="of ours: xla (the default), reference, tpu, ...")
    parser.add_argument("--no-steps", dest="steps", action="store_false", help="leave out the decode step")
    parser.add_argument("--oracle-python", help="interpreter of an environment with torch, and fla-core")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; pass at least 1.")
    side_by_side.prepare_process()
    with tempfile.TemporaryDirectory() as name:
        result = measure(arguments, Path(name))
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
