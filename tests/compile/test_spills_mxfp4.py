"""What the schedules of the MXFP4 matmul's TPU kernels spill: nothing else shows a regression."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECODE, PREFILL = "decode_2p8t_up_experts_over_64", "prefill_2p8t_up_experts_over_64"
CHIPS = ("v5p", "v6e", "tpu7x")
# Stores of vector registers for want of room, in the whole schedule: bodies of loops counted once. The page on the
# kernel says what they are. First v5p, then the others.
SPILLED_STORES = {
    (DECODE, "product", "bfloat16"): (0, 0),
    (DECODE, "gated", "bfloat16"): (20, 0),
    (DECODE, "gradient", "bfloat16"): (140, 140),
    (PREFILL, "product", "bfloat16"): (30, 20),
    (PREFILL, "gated", "bfloat16"): (960, 550),
    (PREFILL, "gradient", "bfloat16"): (160, 160),
    (DECODE, "product", "float32"): (100, 1000),
    (DECODE, "gated", "float32"): (190, 1050),
}


def compile_all(chip: str, folder: Path) -> dict[str, Any]:
    """The worker, in a process whose compiler dumps its schedules into the folder: spilled stores by case."""
    import jax.numpy as jnp
    from tpu_dumps import UNITS  # pyright: ignore[reportMissingImports]

    from pallas_kernels.mxfp4_matmul.shapes import SHAPES
    from tests.compile import mxfp4_programs as programs
    from tests.compile.topologies import compile_for_tpu

    found: dict[str, Any] = {}
    for name, kind, dtype in SPILLED_STORES:
        before = set(folder.iterdir())
        arguments = programs.arguments(SHAPES[name], "packed_kn", jnp.dtype(dtype))
        compile_for_tpu(chip, programs.program(kind, "tpu"), *arguments)
        tables = [
            path
            for path in set(folder.iterdir()) - before
            if "mxfp4_grouped" in path.name
            and path.name.endswith("final_hlo-static-per-bundle-utilization.txt")
        ]
        (table,) = tables
        header, body = table.read_text().split("== UTILIZATION:\n")
        assert tuple(unit.strip() for unit in header.splitlines()[1].split(",")) == UNITS
        rows = [tuple(map(int, line.split())) for line in body.splitlines() if line.strip()]
        found["/".join((name, kind, dtype))] = {
            "bundles": len(rows),
            "mxu": sum(row[UNITS.index("MXU")] for row in rows),
            "spilled_stores": sum(row[UNITS.index("VSTORE:SPILL")] for row in rows),
        }
        for path in set(folder.iterdir()) - before:
            path.unlink()
    return found


@pytest.fixture(scope="module", params=CHIPS)
def figures(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "src", ROOT / "benchmarks")))
        environment = os.environ | {
            "PYTHONPATH": path,
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, "-m", "tests.compile.test_spills_mxfp4", request.param, folder]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return request.param, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", SPILLED_STORES, ids="-".join)
def test_spilled_registers(figures: tuple[str, dict[str, Any]], case: tuple[str, str, str]) -> None:
    chip, cases = figures
    found = cases["/".join(case)]
    assert found["bundles"] > 500 and found["mxu"] > 20, "this is not the kernel's schedule"
    assert found["spilled_stores"] <= SPILLED_STORES[case][chip != "v5p"], found


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1], Path(sys.argv[2]))))
