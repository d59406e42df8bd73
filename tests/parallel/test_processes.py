"""The network over several processes (gloo) is the network on one device, and equal on every one of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def free_port() -> int:
    """A port that is free, and the next one too: the processes watch each other through it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def run_processes(count: int, axes: dict[str, int], batch: int) -> list[dict[str, Any]]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), str(HERE)]),
        "MOE28T_PROCESSES": str(count),
        "MOE28T_COORDINATOR": f"127.0.0.1:{free_port()}",
        "MOE28T_TIMEOUT": "600",
    }
    command = [sys.executable, str(HERE / "process_worker.py"), json.dumps(axes), str(batch)]
    running = [
        subprocess.Popen(
            command,
            env=environment | {"MOE28T_PROCESS": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    reports = []
    for process in running:
        output, errors = process.communicate()
        assert process.returncode == 0, errors[-4000:]
        [line] = [line for line in output.splitlines() if line.startswith("REPORT ")]
        reports.append(json.loads(line.removeprefix("REPORT ")))
    return reports


@pytest.mark.slow
@pytest.mark.parametrize(("count", "axes", "batch"), [
    (2, {"expert": 2}, 2),
    (2, {"context": 2}, 2),
    (4, {"expert": 2, "context": 2}, 2),
    (4, {"expert": 4}, 1),
])  # fmt: skip
def test_processes_are_one_device(count, axes, batch) -> None:
    reports = run_processes(count, axes, batch)
    for report in reports:
        assert report["processes"] == count and report["devices"] == [1, count]
        assert report["same choices"]
        assert report["logits"] <= 2e-4 and report["cache"] <= 2e-4
    assert len({report["sum"] for report in reports}) == 1
