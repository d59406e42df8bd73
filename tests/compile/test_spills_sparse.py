"""What the schedules of the TPU kernels of sparse layers spill: nothing else shows a regression."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = "final_hlo-static-per-bundle-utilization.txt"
ROOM = 1.1

# Vector registers stored for want of room, and loaded back, in the whole schedule, bodies of loops counted once: what
# the compiler made of it when this was written. By their sizes (where in the schedule they fall was not looked up)
# these are arrays larger than the 64 registers: merging moves ranks, indices and distances of 8 rows and 8,192 columns,
# 64 registers each, through 13 rotations; queries that share keys have logits of 768 rows and 512 columns, 384
# registers; fetching holds sums of 96 rows and 512 columns, 48 registers, and logits of 256 keys.
SPILLED = {
    ("prefill", "index_select"): {"v5p": (3852, 4352), "v6e": (3756, 4266), "tpu7x": (3757, 4269)},
    ("prefill_fp8", "index_select"): {"v5p": (3861, 4363), "v6e": (3767, 4279), "tpu7x": (3773, 4287)},
    ("prefill_fp4", "index_select"): {"v5p": (3882, 4382), "v6e": (3787, 4297), "tpu7x": (3793, 4305)},
    ("decode", "index_select"): {"v5p": (3852, 4352), "v6e": (3805, 4211), "tpu7x": (3810, 4210)},
    ("merge", "index_select_merge"): {"v5p": (1466, 1586), "v6e": (1216, 1319), "tpu7x": (1177, 1277)},
    ("fetch_96_heads", "sparse_attention_gather"): {
        "v5p": (122, 152),
        "v6e": (285, 321),
        "tpu7x": (396, 432),
    },
    ("share_12_heads", "sparse_attention_bits"): {"v5p": (249, 249), "v6e": (251, 251), "tpu7x": (220, 220)},
    ("share_12_heads", "sparse_attention_shared"): {
        "v5p": (3378, 4931),
        "v6e": (3653, 4505),
        "tpu7x": (2351, 3080),
    },
    ("share_12_heads", "sparse_attention_dkv"): {
        "v5p": (4627, 8957),
        "v6e": (4435, 5589),
        "tpu7x": (3306, 3811),
    },
    ("share_12_heads", "sparse_attention_dq"): {
        "v5p": (3404, 5829),
        "v6e": (3150, 4520),
        "tpu7x": (3356, 4269),
    },
}


def programs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Function and arguments by name: every kernel at sizes of the 2.8T configuration."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.index_select import _tpu_select
    from pallas_kernels.index_select import tpu as selection
    from pallas_kernels.sparse_attention import tpu as attention
    from tests.compile import test_compile_index_select as index
    from tests.compile import test_compile_sparse_attention as sparse

    def select(q: Any, k: Any, weights: Any, positions: Any, table: Any = None) -> Any:
        return selection.select(q, k, weights, positions, 2048, table)

    def attend(q: Any, kv: Any, indices: Any) -> Any:
        return attention.sparse_attention(q, kv, indices, 192**-0.5, 512)

    def loss(q: Any, kv: Any, indices: Any) -> Any:
        o, logsumexp = attend(q, kv, indices)
        return o.astype(jnp.float32).sum() + logsumexp.sum()

    def merge(ranks: Any, indices: Any) -> Any:
        return _tpu_select.merge_shards(ranks, indices, 2048, False)

    decode = index.SHAPES["decode_2p8t_1m"]
    candidates = (jax.ShapeDtypeStruct((4, 16, 2048), jnp.int32),) * 2
    return {
        "prefill": (select, index.arguments(index.PREFILL, jnp.bfloat16, False)),
        "prefill_fp8": (select, index.arguments(index.PREFILL, "fp8", False)),
        "prefill_fp4": (select, index.arguments(index.PREFILL, "fp4", False)),
        "decode": (select, index.arguments(decode, jnp.bfloat16, True)),
        "merge": (merge, candidates),
        "fetch_96_heads": (attend, sparse.arguments(sparse.DECODE)),
        "share_12_heads": (jax.grad(loss, argnums=(0, 1)), sparse.arguments(sparse.PREFILL)),
    }


def compile_all(chip: str, folder: Path) -> dict[str, Any]:
    """The worker, in a process whose compiler dumps its schedules into the folder: figures by program and kernel."""
    from tpu_dumps import UNITS  # pyright: ignore[reportMissingImports]

    from tests.compile.topologies import compile_for_tpu

    found: dict[str, Any] = {}
    for name, (function, arguments) in programs().items():
        before = set(folder.iterdir())
        compile_for_tpu(chip, function, *arguments)
        for path in sorted(set(folder.iterdir()) - before):
            kernel = next(
                (part for part in path.name.split("-") if part.startswith(("index_", "sparse_"))), ""
            )
            if path.name.endswith(TABLE) and kernel:
                header, body = path.read_text().split("== UTILIZATION:\n")
                assert tuple(unit.strip() for unit in header.splitlines()[1].split(",")) == UNITS
                rows = [tuple(map(int, line.split())) for line in body.splitlines() if line.strip()]
                # The compiler numbers the operations of one name.
                kernel = kernel.split(".")[0]
                assert f"{name}/{kernel}" not in found, f"two schedules of {kernel}"
                found[f"{name}/{kernel}"] = {
                    "bundles": len(rows),
                    **{unit: sum(row[UNITS.index(unit)] for row in rows) for unit in ("MXU", "VALU")},
                    "spilled_stores": sum(row[UNITS.index("VSTORE:SPILL")] for row in rows),
                    "spilled_loads": sum(row[UNITS.index("VLOAD:FILL")] for row in rows),
                }
        for path in set(folder.iterdir()) - before:
            path.unlink()
    return found


@pytest.fixture(scope="module", params=["v5p", "v6e", "tpu7x"])
def figures(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "src", ROOT / "benchmarks")))
        environment = os.environ | {
            "PYTHONPATH": path,
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, "-m", "tests.compile.test_spills_sparse", request.param, folder]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return request.param, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_kernel_is_measured(figures: tuple[str, dict[str, Any]]) -> None:
    assert set(figures[1]) == {"/".join(case) for case in SPILLED}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPILLED, ids="-".join)
def test_spilled_registers(figures: tuple[str, dict[str, Any]], case: tuple[str, str]) -> None:
    chip, sides = figures
    found = sides["/".join(case)]
    assert found["bundles"] > 500 and found["MXU"] > 100, "this is not the kernel's schedule"
    for name, recorded in zip(("spilled_stores", "spilled_loads"), SPILLED[case][chip], strict=True):
        # A reader of the wrong column would find nothing spilled.
        assert recorded / 2 < found[name] <= ROOM * recorded, (name, recorded, found)


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1], Path(sys.argv[2]))))
