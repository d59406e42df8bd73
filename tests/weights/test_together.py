"""Processes that save together: every one learns of a failure anywhere, and none waits for good."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moe28t_jax.weights import CheckpointError, load_orbax, load_parameters, together
from moe28t_jax.weights.together import Together

COUNT = 4


class Service:
    """Stands for the coordination service: keys that can be waited for."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.silent: set[int] = set()
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        assert timeout_in_ms == 60_000
        if int(key.rpartition("/")[2].replace("all", "0")) in self.silent:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 60), key
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            del self.values[key]


def run(
    steps: list[Callable[[int], None]], service: Service | None = None, processes: int = COUNT
) -> list[BaseException | None]:
    """What each process raises that takes these steps."""
    service = service or Service()

    def process(number: int) -> BaseException | None:
        one = Together("'x' was not saved", client=service, process=number, processes=COUNT, name="save")
        try:
            for step in steps:
                one.step(lambda step=step: step(number))
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(COUNT) as pool:
        return list(pool.map(process, range(processes)))


def failing(**errors: BaseException) -> Callable[[int], None]:
    def step(number: int) -> None:
        if f"p{number}" in errors:
            raise errors[f"p{number}"]

    return step


def test_steps_that_succeed_leave_one_key() -> None:
    service, done = Service(), []
    assert run([done.append, done.append, done.append], service) == [None] * COUNT
    assert sorted(done[-COUNT:]) == [0, 1, 2, 3]
    assert list(service.values) == ["save/3/all"]


@pytest.mark.parametrize("culprit", range(COUNT))
def test_a_failure_anywhere_is_known_everywhere(culprit: int) -> None:
    full = OSError(28, "No space left on device")
    after: list[int] = []
    found = run([failing(), failing(**{f"p{culprit}": full}), after.append])
    assert found[culprit] is full and not after
    for number, error in enumerate(found):
        if number != culprit:
            assert isinstance(error, CheckpointError)
            message = (
                f"'x' was not saved: process {culprit} failed: OSError: [Errno 28] No space left on device"
            )
            assert str(error) == message


def test_several_failures_are_counted() -> None:
    found = run([failing(p1=ValueError("one"), p3=ValueError("three"))])
    assert str(found[0]) == "'x' was not saved: process 1 (and 1 more) failed: ValueError: one"
    assert str(found[3]) == "three"


def test_who_waited_in_vain_tells_of_the_cause() -> None:
    late = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")
    found = run([failing(p0=late, p1=late, p2=OSError("the disk is full"), p3=late)])
    assert str(found[2]) == "the disk is full"
    for number in (0, 1, 3):
        assert str(found[number]) == "'x' was not saved: process 2 failed: OSError: the disk is full"
    alone = run([failing(p0=late, p1=late)])
    assert alone[0] is late and alone[1] is late
    assert "process 0 (and 1 more) failed: JaxRuntimeError: DEADLINE_EXCEEDED" in str(alone[2])


@pytest.mark.parametrize("culprit", [0, 2])
def test_an_interrupt_is_told_to_the_others(culprit: int) -> None:
    found = run([failing(**{f"p{culprit}": KeyboardInterrupt()})])
    assert isinstance(found.pop(culprit), KeyboardInterrupt)
    assert {str(error) for error in found} == {
        f"'x' was not saved: process {culprit} failed: KeyboardInterrupt"
    }


def test_an_interrupt_waits_for_nobody() -> None:
    service = Service()
    (found,) = run([failing(p0=KeyboardInterrupt())], service, processes=1)
    assert isinstance(found, KeyboardInterrupt)
    assert json.loads(service.values["save/1/all"]) == {"0": ["KeyboardInterrupt", True]}


def test_a_process_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 180)
    service = Service()
    service.silent = {2}
    found = run([failing()], service)
    assert str(found[0]) == "'x' was not saved: process 2 has not answered for 180 seconds."
    assert "Waiting for process 2 since 120 seconds." in caplog.text
    # The first one tells the others before it leaves.
    assert "process 0 failed: CheckpointError: 'x' was not saved: process 2 has not answered" in str(found[3])


def test_one_process_needs_no_service() -> None:
    alone = Together("'x' was not saved")
    assert alone.alone and alone.is_first
    with pytest.raises(KeyError):
        alone.step(lambda: {}["absent"])


def test_several_processes_need_the_service() -> None:
    with pytest.raises(CheckpointError, match=r"only after jax\.distributed\.initialize"):
        Together("'x' was not saved", processes=2)


@pytest.mark.slow
def test_processes_save_together(data: Path, tmp_path: Path) -> None:
    """Two processes of two devices: saved, read back along another axis, and each way in which one of them fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    source = data / "k31_tiny_mxfp4"
    target = tmp_path / "run1"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    workers = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("save_worker.py")), str(process), port, str(source),
             str(target)],
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    outputs = []
    try:
        for worker in workers:
            output, errors = worker.communicate(timeout=400)
            assert worker.returncode == 0, errors[-6000:]
            outputs.append([json.loads(line) for line in output.splitlines() if line.startswith("{")])
    finally:
        for worker in workers:
            worker.kill()
    names = ["saved", "pattern", "full", "home", "locked", "apart", "again"]
    assert [[one["name"] for one in output] for output in outputs] == [names, names]
    first, second = ({one["name"]: one["error"] for one in output} for output in outputs)
    assert (
        first["saved"] is None
        and second["saved"] is None
        and first["again"] is None
        and second["again"] is None
    )
    assert "has [ and ] and * in its path" in first["pattern"]
    assert "process 0 failed: CheckpointError" in second["pattern"]
    assert "process 1 failed: OSError: [Errno 28] No space left on device" in first["full"]
    assert second["full"] == "OSError: [Errno 28] No space left on device"
    assert "no checkpoint to replace" in first["home"] and "process 0 failed: Check" in second["home"]
    assert (
        "Another process is writing" in first["locked"] and "Another process is writing" in second["locked"]
    )
    assert "save to a folder that all processes share" in first["apart"]
    assert "is not seen by process 0" in second["apart"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["apart", "home", "run1"]
    assert (target / "notes.txt").read_text() == "of process 0"
    expected, _ = load_parameters(source, stacked=True)
    wanted = dict(jax.tree_util.tree_leaves_with_path(expected))
    found: dict[Any, Any] = dict(jax.tree_util.tree_leaves_with_path(load_orbax(target)[0]))
    assert found.keys() == wanted.keys()
    for path, leaf in found.items():
        np.testing.assert_array_equal(
            np.asarray(leaf).view(np.uint8), np.asarray(wanted[path]).view(np.uint8)
        )
