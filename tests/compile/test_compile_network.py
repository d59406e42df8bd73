"""The engine's steps compiled for real deployments by the real compilers, whole."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MILLION = 1_048_576


@cache
def compiled(*arguments: str) -> dict[str, Any]:
    """The report of `moe28t compile` in a process of its own: it sets what the compilers read when JAX starts."""
    command = [sys.executable, "-m", "moe28t_jax.cli", "compile", "--json", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_program(report: dict[str, Any]) -> None:
    """What holds for every program with the kernels of the chip and explicit exchanges."""
    assert report["fits"], (report["peak_bytes_per_device"], report["limit_bytes_per_device"])
    assert report["expert_gathers"] == []
    assert report["unpacked_experts"] == []
    assert [one for one in report["weight_copies_in_loop"] if one["weight"]["expert"]] == []
