"""The delta rule's TPU kernel and tokamax's, compared by what the TPU compiler makes of them: no TPU needed.

Both compute the forward pass with the final state from normalised q and k and from v (bfloat16, then float32), the
log decay and beta (float32), heads before tokens in memory, K = V = 128. Ours computes in float32 either way. Each is
compiled for a chip in a process of its own, with the compiler's dumps of the programs it schedules; what is read from
them:

- temporaries: device memory beyond arguments and results;
- HBM bytes: operands and results of every operation of the program that lie in HBM, each counted once;
- VMEM: the largest that one kernel uses;
- bundles x trips: instruction bundles (a core issues one per cycle when it does not wait) times the trips of the loops
  around them, per token and head. Where one of two branches is run there are two figures: ours has a shorter one for
  chunks whose decays are bounded (as the public configurations bound them) and a longer one for any decays. A body
  that runs on a condition without an alternative counts as run;
- MXU: the slots for the matrix units that are filled in those bundles, per token and head, and their share; vector
  spills likewise: stores of registers to memory and loads back, per token and head (the scalar unit has too few
  registers for any Pallas grid: its spills are left out).

A static comparison: it says nothing about waiting for memory, and is not a run time. With --errors both kernels are
also interpreted on the CPU at a small size, and their results set against the recurrence in float64. The interpreter
multiplies float32 operands in float32 also where a TPU would round them to bfloat16 first (tokamax leaves the precision
of some products to the default), so that a TPU's errors are at least these.

    python benchmarks/tpu_kernels.py                        # ours alone
    python benchmarks/tpu_kernels.py --gradient             # and the forward and backward kernels of its gradient
    python benchmarks/tpu_kernels.py --peer-python PATH     # PATH: of an environment with jax[tpu] and tokamax
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_dumps import read_dumps

CHIPS = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
SIDES = ("ours", "gradient", "tokamax")
"""The gradient is of ours: its forward kernel, which also writes the states at the ends of chunks, and its backward."""
DTYPES = ("bfloat16", "float32")
PEER_CHIPS = ("v6e", "tpu7x")
"""tokamax's kernel refuses the generations before them."""
WIDTH = 128
INTERPRETED = (1, 256, 2, WIDTH)
"""Batch, tokens, heads, channels of --errors."""
ROOT = Path(__file__).resolve().parent.parent


def compile_one(side: str, chip: str, dtype: str, heads: int, tokens: int, folder: Path) -> None:
    """The worker: compile one side for one chip, with dumps; the program and its memory go into the folder."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    device = topologies.get_topology_desc(CHIPS[chip], "tpu").devices[0]
    mesh = Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())

    def like(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    if side in ("ours", "gradient"):
        from pallas_kernels import delta_rule

        def forward(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> tuple[Any, ...]:
            q, k, v, log_decay = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, log_decay))
            o, *state = delta_rule.delta_rule(q, k, v, log_decay, beta, implementation="tpu")
            return jnp.swapaxes(o, 1, 2), *state

        def gradient(*arrays: Any) -> tuple[Any, ...]:
            *inputs, ct_o, ct_state = arrays
            return jax.vjp(forward, *inputs)[1]((ct_o, ct_state))

        function: Any = forward if side == "ours" else gradient
        wide, scalars = (1, heads, tokens, WIDTH), (1, tokens, heads)
    else:
        from tokamax._src.ops.kda.api import (  # pyright: ignore[reportMissingImports]
            kimi_delta_attention,
        )

        def peer(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> tuple[Any, ...]:
            return kimi_delta_attention(
                q, k, v, log_decay, beta, scale=1.0, output_final_state=True, implementation="mosaic"
            )

        function = peer
        wide, scalars = (heads, 1, tokens, WIDTH), (heads, 1, tokens)
    token = like(wide, jnp.dtype(dtype))
    arguments = [token, token, token, like(wide, jnp.float32), like(scalars, jnp.float32)]
    if side == "gradient":
        arguments += [token, like((1, heads, WIDTH, WIDTH), jnp.float32)]
    with tpu_in_sight(device.device_kind, device.num_cores, side):
        compiled = jax.jit(function).lower(*arguments).compile()
    analysis = compiled.memory_analysis()
    (folder / "program.txt").write_text(compiled.as_text() or "")
    memory = {
        name: getattr(analysis, f"{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")
    }
    (folder / "memory.json").write_text(json.dumps(memory))


@contextlib.contextmanager
def tpu_in_sight(device_kind: str, num_cores: int, side: str) -> Iterator[None]:
    """What asks for the device sees this one; tokamax asks what it supports, and is told to go on."""
    import jax
    from jax._src.mesh import AbstractDevice
    from jax.sharding import AbstractMesh, AxisType

    described = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="tpu")
    mesh = AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=described)
    with contextlib.ExitStack() as stack:
        if side == "tokamax":
            from tokamax._src.config import cross_compile  # pyright: ignore[reportMissingImports]

            stack.enter_context(cross_compile(True))
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def interpret_one(side: str, dtype: str) -> None:
    """The worker of --errors: prints the relative errors of the output and of the final state."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from bench_delta_rule import draw, prepared
    from side_by_side import relative_error

    from pallas_kernels import delta_rule
    from pallas_kernels.delta_rule import tpu

    def run_reference(*x: Any) -> tuple[Any, ...]:
        q, k, v, log_decay, beta = x
        return delta_rule.delta_rule(q, k, v, log_decay, beta, implementation="reference")

    raw = draw(INTERPRETED)
    q, k, log_decay = prepared(raw, np)
    x = [jnp.asarray(a, jnp.dtype(dtype)) for a in (q, k, raw["v"])]
    x += [jnp.asarray(a, jnp.float32) for a in (log_decay, raw["beta"])]
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(a, np.float64)) for a in x]
        expected = [np.asarray(a) for a in run_reference(*exact)]
    # Else XLA for CPUs leaves out roundings to bfloat16 that are undone at once, of which halves of products are made.
    compiled = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    if side == "ours":
        q, k, v, log_decay, beta = x
        o, state = compiled(functools.partial(tpu.delta_rule, interpret=True))(q, k, v, log_decay, beta)
    else:
        from tokamax._src.ops.kda.api import (  # pyright: ignore[reportMissingImports]
            kimi_delta_attention,
        )

        def run(*x: Any) -> tuple[Any, Any]:
            return kimi_delta_attention(*x, scale=1.0, output_final_state=True, implementation="mosaic")

        with tpu_in_sight("TPU v6 lite", 1, side):
            o, states = compiled(run)(*(jnp.moveaxis(a, 2, 0) for a in x))
        o, state = jnp.moveaxis(o, 0, 2), states[:, 0]
    errors = [relative_error([a], [wanted]) for a, wanted in zip((o, state), expected, strict=True)]
    print(json.dumps(dict(zip(("output", "final_state"), errors, strict=True))))


def compile_apart(
    python: str, side: str, chip: str, dtype: str, heads: int, tokens: int, folder: Path
) -> str | None:
    """Run the worker in a fresh process, which the compiler's settings need; the last line of an error, or None."""
    shutil.rmtree(folder, ignore_errors=True)
    dumps = folder / "llo"
    dumps.mkdir(parents=True)
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true",
    }
    sizes = ["--heads", str(heads), "--tokens", str(tokens)]
    _, error = run_apart(python, ["--worker", side, chip, dtype, str(folder), *sizes], settings)
    # Hundreds of megabytes, of which a few files are read.
    for path in dumps.iterdir():
        if "final_" not in path.name:
            path.unlink()
    return error


def run_apart(python: str, options: list[str], settings: dict[str, str]) -> tuple[str, str | None]:
    """This script in another process: what it prints, and the last line of its error or None."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | settings
    done = subprocess.run(
        [python, __file__, *options], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return done.stdout, None
    lines = done.stderr.strip().splitlines()
    return done.stdout, lines[-1] if lines else f"exit status {done.returncode}"


def measure_errors(arguments: argparse.Namespace, sides: tuple[str, ...]) -> dict[str, Any]:
    """Relative errors by dtype and side."""
    result: dict[str, Any] = {}
    for dtype in arguments.dtypes:
        result[dtype] = {}
        for side in sides:
            python: Any = sys.executable if side == "ours" else arguments.peer_python
            output, error = run_apart(python, ["--interpret", side, dtype], {"PALLAS_INTERPRET": "1"})
            result[dtype][side] = {"error": error} if error else json.loads(output.splitlines()[-1])
    return result


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Every side on every chip; a side that does not compile has its error in place of figures."""
    result: dict[str, Any] = {"heads": arguments.heads, "tokens": arguments.tokens, "dtypes": {}}
    wanted = {"ours": True, "gradient": arguments.gradient, "tokamax": arguments.peer_python is not None}
    sides = tuple(side for side in SIDES if wanted[side])
    for dtype in arguments.dtypes:
        chips: dict[str, Any] = {}
        for chip in arguments.chips:
            chips[chip] = {}
            for side in sides:
                python: Any = arguments.peer_python if side == "tokamax" else sys.executable
                folder = work / f"{side}_{chip}_{dtype}"
                error = None
                if side == "tokamax" and chip not in PEER_CHIPS:
                    error = f"its kernel is for {' and '.join(PEER_CHIPS)} only"
                elif not (folder / "memory.json").exists():
                    error = compile_apart(
                        python, side, chip, dtype, arguments.heads, arguments.tokens, folder
                    )
                chips[chip][side] = (
                    read_dumps(folder, arguments.heads, arguments.tokens)
                    if error is None
                    else {"error": error}
                )
        result["dtypes"][dtype] = chips
    if arguments.errors:
        result["errors"] = measure_errors(arguments, tuple(side for side in sides if side != "gradient"))
    return result


def show(result: dict[str, Any], with_peer: bool) -> None:
    """Print the figures as a table."""
    import side_by_side

    def megabytes(value: int) -> str:
        return f"{value / 1e6:.1f}"

    rows, errors = [], []
    cases = [
        (f"{dtype}, {chip}, {side}", x)
        for dtype, chips in result["dtypes"].items()
        for chip, sides in chips.items()
        for side, x in sides.items()
    ]
    for case, x in cases:
        if "error" in x:
            errors.append(f"{case} does not compile: {x['error']}")
            continue
        branches = {"": x}
        if "longer_branches" in x:
            branches = {", bounded decays": x, ", any decays": x["longer_branches"]}
        for branch, sums in branches.items():
            rows.append(
                (
                    case + branch,
                    megabytes(x["temporary_bytes"]),
                    megabytes(x["hbm_bytes"]),
                    megabytes(x["largest_vmem_bytes"]),
                    sums["bundles_per_token_and_head"],
                    sums["mxu_slots_per_token_and_head"],
                    f"{100 * sums['mxu_slot_use']:.0f} %",
                    sums["spill_stores_per_token_and_head"],
                    sums["spill_loads_per_token_and_head"],
                )
            )
    columns = [
        "",
        "temporaries MB",
        "HBM MB",
        "VMEM MB",
        "bundles",
        "MXU slots",
        "MXU use",
        "spill stores",
        "spill loads",
    ]
    title = f"H {result['heads']}, T {result['tokens']}, K = V = {WIDTH}; bundles, slots and spills per token and head"
    side_by_side.print_table(title, columns, rows)
    for sentence in errors:
        print(sentence)
    if "errors" in result:
        rows = [
            (
                f"{dtype}, {side}",
                *([x["error"], ""] if "error" in x else (f"{value:.1e}" for value in x.values())),
            )
            for dtype, sides in result["errors"].items()
            for side, x in sides.items()
        ]
        title = f"interpreted, B x T x H x K = {'x'.join(map(str, INTERPRETED))}: relative errors"
        side_by_side.print_table(title, ["", "output", "final state"], rows)
    if not with_peer:
        print("tokamax is left out: --peer-python was not given.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", default=",".join(CHIPS), help=f"default: {','.join(CHIPS)}")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--peer-python", help="interpreter of an environment with jax[tpu] and tokamax")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"of q, k, v; default: {','.join(DTYPES)}")
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for the compiler's dumps, read again from there; default: a temporary one",
    )
    parser.add_argument("--gradient", action="store_true", help="the gradient of ours, too")
    parser.add_argument("--errors", action="store_true", help="interpret both at a small size, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--worker", nargs=4, metavar=("SIDE", "CHIP", "DTYPE", "FOLDER"), help=argparse.SUPPRESS
    )
    parser.add_argument("--interpret", nargs=2, metavar=("SIDE", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.interpret is not None:
        interpret_one(*arguments.interpret)
        return
    if arguments.worker is not None:
        side, chip, dtype, folder = arguments.worker
        compile_one(side, chip, dtype, arguments.heads, arguments.tokens, Path(folder))
        return
    arguments.chips, arguments.dtypes = arguments.chips.split(","), arguments.dtypes.split(",")
    for option, values, known in (("chips", arguments.chips, CHIPS), ("dtypes", arguments.dtypes, DTYPES)):
        for value in values:
            if value not in known:
                parser.error(f"--{option} names {value!r}; pass some of {', '.join(known)}.")
    if arguments.heads < 1 or arguments.tokens < 64 or arguments.tokens % 64:
        parser.error(
            f"--heads is {arguments.heads} and --tokens {arguments.tokens}; pass at least 1, and a multiple of 64."
        )
    with tempfile.TemporaryDirectory() as name:
        result = measure(arguments, Path(name) if arguments.keep is None else arguments.keep.resolve())
    if arguments.json:
        print(json.dumps(result))
    else:
        show(result, arguments.peer_python is not None)


if __name__ == "__main__":
    main()
