"""The network over several processes (gloo) is the network on one device, and equal on every one of them."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe28t_jax.cli import main

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


def run_processes(commands: list[list[str]], text: str = "") -> list[str]:
    """What one program prints, process by process; the first one has the text on its standard input."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), str(HERE)]),
        "MOE28T_PROCESSES": str(len(commands)),
        "MOE28T_COORDINATOR": f"127.0.0.1:{free_port()}",
        "MOE28T_TIMEOUT": "600",
    }
    running = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment | {"MOE28T_PROCESS": str(number)},
            stdin=subprocess.DEVNULL if number else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, command in enumerate(commands)
    ]
    outputs = []
    for number, process in enumerate(running):
        output, errors = process.communicate(None if number else text)
        assert process.returncode == 0, errors[-4000:]
        outputs.append(output)
    return outputs


def report_of(output: str) -> dict[str, Any]:
    [line] = [line for line in output.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "axes", "batch"), [
    (2, {"expert": 2}, 2),
    (2, {"context": 2}, 2),
    (4, {"expert": 2, "context": 2}, 2),
    (4, {"expert": 4}, 1),
])  # fmt: skip
def test_processes_are_one_device(count, axes, batch) -> None:
    command = [str(HERE / "process_worker.py"), json.dumps(axes), str(batch), "0"]
    reports = [report_of(output) for output in run_processes([command] * count)]
    for report in reports:
        assert report["processes"] == count and report["devices"] == [1, count]
        assert report["same choices"]
        assert report["logits"] <= 2e-4 and report["cache"] <= 2e-4
    assert len({report["sum"] for report in reports}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("count", "axes"), [(2, {"context": 2}), (4, {"expert": 2, "context": 2})])
def test_a_long_row_over_processes(count, axes) -> None:
    """A row of 131,072 tokens, of whose positions each process holds its share."""
    command = [str(HERE / "process_worker.py"), json.dumps(axes), "1", "131072"]
    for report in [report_of(output) for output in run_processes([command] * count)]:
        assert report["processes"] == report["keys of all devices"] == count
        assert report["positions of a device"] == 131_072 // count
        assert report["same choices"] and report["logits"] <= 2e-4


TWO = """
kind = "cpu"
topology = "2"
chips = 2
devices = 2
reason = "Two processes."
axes = { data = 1, stage = 1, expert = 2, tensor = 1, context = 1 }
defaults = { batch = 2, context = 256 }
"""


@pytest.mark.slow
def test_commands_on_a_mesh_of_two_processes(small_checkpoint, tmp_path, capsys, monkeypatch) -> None:
    """`generate` and `score` with --mesh give what one device gives, and the first process alone says it."""
    mesh = tmp_path / "two.toml"
    mesh.write_text(TWO)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("def f(x):\n    return x\n")
    (texts / "b.txt").write_text("ab cd " * 12)
    (texts / "empty.txt").touch()
    model = ["--model", str(small_checkpoint), "--json"]
    sampled = ["--temperature", "1", "--seed", "3", "--max-new-tokens", "6"]
    commands = [["generate", *model, *sampled], ["score", *model, str(texts), "--batch", "2"]]

    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    expected = []
    for command in commands:
        assert main(command) == 0
        expected.append(json.loads(capsys.readouterr().out))

    on_mesh = [[*command, "--mesh", str(mesh)] for command in commands]
    worker = [str(HERE / "cli_workers.py"), json.dumps(on_mesh), str(small_checkpoint), str(mesh)]
    files = [tmp_path / f"report{number}.json" for number in range(2)]
    run_processes([[*worker, str(file)] for file in files], "hello")
    first, second = (json.loads(file.read_text()) for file in files)
    assert first["processes"] == 2
    assert first["drawn"] == second["drawn"] and len(first["drawn"]) > 0
    assert second["commands"] == [[0, "", ""]] * 2
    assert [status for status, _, _ in first["commands"]] == [0, 0]
    generated, scored = (json.loads(output) for _, output, _ in first["commands"])
    for answer in (generated, expected[0]):
        assert answer.pop("tokens_per_second") > 0
    assert generated == expected[0]
    assert scored["skipped"] == expected[1]["skipped"] and len(scored["skipped"]) == 1
    for found, score in zip(scored["files"], expected[1]["files"], strict=True):
        assert found.pop("bits_per_byte") == pytest.approx(score.pop("bits_per_byte"), abs=2e-4)
        assert found == score
