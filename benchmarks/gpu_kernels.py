"""The GPU kernels on a GPU: numbers first, then times beside the bytes and operations they cannot do without.

    python benchmarks/gpu_kernels.py                                   # on a GPU, a few minutes
    python benchmarks/gpu_kernels.py --implementation xla --quick      # the script itself, on any machine

Every operation is compared with its reference on a small case before anything is timed, and an error above its bound
ends the run: a kernel that is wrong needs no time. A limit is the larger of bytes (arguments and results, once) over
bandwidth and operations over peak; both rates are those of the H200's data sheet unless given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory."""
FLOAT32 = 67e12
BFLOAT16 = 989e12
"""Operations per second of an H200: float32 in the vector units, bfloat16 in the tensor cores."""


class Case(NamedTuple):
    """One timed call: its arguments, what it cannot do without, and the arguments that it may overwrite."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    operations: float
    peak: float
    donate: tuple[int, ...] = ()


def sequence(batch: int, tokens: int, heads: int, seed: int = 0) -> Any:
    """q, k, v in bfloat16, log decay, beta and state in float32, K = V = 128."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(seed), 6)
    per_token = (batch, tokens, heads, 128)

    def unit(key: Any) -> Any:
        x = jax.random.normal(key, per_token)
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    q, k, v = unit(keys[0]), unit(keys[1]), jax.random.normal(keys[2], per_token).astype(jnp.bfloat16)
    log_decay = -5 * jax.nn.sigmoid(jax.random.normal(keys[3], per_token))
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], per_token[:3]))
    return (
        q * jnp.bfloat16(128**-0.5),
        k,
        v,
        log_decay,
        beta,
        jax.random.normal(keys[5], (batch, heads, 128, 128)),
    )


def experts(rows: int, count: int, inputs: int, outputs: int, layout: str, seed: int = 0) -> tuple[Any, ...]:
    """Rows in bfloat16, packed weights of a layout, and uneven group sizes with empty groups among them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import mxfp4_matmul

    random = np.random.default_rng(seed)
    sizes = random.multinomial(rows, random.dirichlet(np.full(count, 0.5))).astype(np.int32)
    w = mxfp4_matmul.quantize(jax.random.normal(jax.random.key(seed), (count, outputs, inputs)))
    x = jax.random.normal(jax.random.key(seed + 1), (rows, inputs)).astype(jnp.bfloat16)
    return x, w.to_layout(layout), jnp.asarray(sizes)


def errors(implementation: str, layout: str) -> dict[str, tuple[float, float]]:
    """By check, the largest error over the largest magnitude, and its bound."""
    import jax
    import jax.numpy as jnp
    from side_by_side import relative_error

    from pallas_kernels import delta_rule, mxfp4_matmul

    found: dict[str, tuple[float, float]] = {}
    x: Any = tuple(a.astype(jnp.float32) for a in sequence(2, 150, 3))
    lengths = jnp.asarray([150, 77], jnp.int32)

    def run(name: str) -> Any:
        arguments: Any = (*x, lengths)
        return delta_rule.delta_rule(*arguments, implementation=name)

    def gradients(name: str) -> Any:
        def loss(*x: Any) -> Any:
            arguments: Any = (*x, lengths)
            o, state, *_ = delta_rule.delta_rule(*arguments, implementation=name)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state))

        return jax.grad(loss, argnums=range(6))(*x)

    def one(name: str) -> Any:
        arguments: Any = (*(a[:, 0] for a in x[:5]), x[5])
        return delta_rule.step(*arguments, implementation=name)

    for name, function, bound in (
        ("delta_rule", run, 1e-5), ("its gradients", gradients, 2e-5), ("step", one, 1e-5),
    ):  # fmt: skip
        found[name] = relative_error(function(implementation), function("reference")), bound
    rows, packed, sizes = experts(200, 6, 256, 384, layout)
    wide = rows.astype(jnp.float32)
    expected = mxfp4_matmul.grouped_matmul(
        wide, packed.to_layout("packed_kn"), sizes, implementation="reference"
    )
    for name, given, bound in (
        ("grouped_matmul, float32", wide, 1e-5),
        ("grouped_matmul, bfloat16", rows, 6e-3),
    ):
        y = mxfp4_matmul.grouped_matmul(given, packed, sizes, implementation=implementation)
        found[name] = relative_error([y.astype(jnp.float32)], [expected]), bound
    return found


def cases(implementation: str, layout: str, quick: bool) -> dict[str, Case]:
    """What is timed."""
    from pallas_kernels import delta_rule, mxfp4_matmul

    def forward(*x: Any) -> Any:
        return delta_rule.delta_rule(*x, implementation=implementation)

    def step(state: Any, *x: Any) -> Any:
        arguments: Any = (*x, state)
        return delta_rule.step(*arguments, implementation=implementation)

    def grouped(x: Any, w: Any, sizes: Any) -> Any:
        return mxfp4_matmul.grouped_matmul(x, w, sizes, implementation=implementation)

    found: dict[str, Case] = {}
    for heads, tokens in ((2, 128),) if quick else ((12, 8192), (96, 8192)):
        # By the recurrence: 4 multiplications and additions of each entry of the state at every token.
        operations = 8.0 * tokens * heads * 128 * 128
        found[f"delta_rule, {tokens} tokens x {heads} heads"] = Case(
            forward, sequence(1, tokens, heads), operations, FLOAT32
        )
    for batch in (2,) if quick else (1, 64):
        *token, state = sequence(batch, 1, 2 if quick else 96)
        arguments = (state, *(a[:, 0] for a in token))
        found[f"step, batch {batch}"] = Case(step, arguments, 8.0 * state.size, FLOAT32, (0,))
    for rows in (16,) if quick else (64, 8192):
        shape = (4, 256, 256) if quick else (14, 3584, 3072)
        arguments = experts(rows, *shape, layout)
        operations = 2.0 * rows * shape[1] * shape[2]
        found[f"grouped_matmul, {rows} rows"] = Case(grouped, arguments, operations, BFLOAT16)
    return found


def measure(case: Case, bandwidth: float, rounds: int) -> dict[str, float]:
    """Median seconds of a call among back-to-back ones, and the limit."""
    import jax

    function = jax.jit(case.function, donate_argnums=case.donate)
    results = jax.eval_shape(case.function, *case.arguments)
    moved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((case.arguments, results)))
    donated = [case.arguments[i] for i in case.donate]
    others = [a for i, a in enumerate(case.arguments) if i not in case.donate]

    def calls(count: int) -> float:
        nonlocal donated
        start = time.perf_counter()
        for _ in range(count):
            result = function(*donated, *others)
            if donated:
                donated = [result[1]]
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    calls(2)
    seconds = statistics.median(calls(10) for _ in range(rounds))
    limit = max(moved / bandwidth, case.operations / case.peak)
    return {"seconds": seconds, "limit_seconds": limit, "times_limit": seconds / limit, "bytes": moved}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementation", default="gpu", help="of the operations; default: gpu")
    parser.add_argument("--layout", help="of packed weights; default: packed_nk for gpu, else packed_kn")
    parser.add_argument(
        "--bandwidth", type=float, default=BANDWIDTH, help="bytes per second; default: an H200's"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    layout = arguments.layout or ("packed_nk" if arguments.implementation == "gpu" else "packed_kn")
    found = errors(arguments.implementation, layout)
    wrong = {name: error for name, (error, bound) in found.items() if not error <= bound}
    for name, (error, bound) in found.items():
        print(f"{name}: error {error:.1e} (at most {bound:.0e})", file=sys.stderr, flush=True)
    if wrong:
        sys.exit(f"Wrong beyond their bounds: {', '.join(wrong)}; nothing was timed.")
    times = {}
    for name, case in cases(arguments.implementation, layout, arguments.quick).items():
        times[name] = measure(case, arguments.bandwidth, arguments.rounds)
        line = "{seconds:.3e} s, limit {limit_seconds:.3e} s, {times_limit:.1f} times it".format(
            **times[name]
        )
        print(f"{name}: {line}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({"errors": {name: error for name, (error, _) in found.items()}, "times": times}))


if __name__ == "__main__":
    main()
