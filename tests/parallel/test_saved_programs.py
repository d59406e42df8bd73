"""A program that was compiled ahead of time and kept is what the engine runs: it compiles no step again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_the_engine_finds_kept_programs(run_on_devices: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    folder.mkdir()
    found = run_on_devices(8, "saved_program_workers.py:generate_with_kept_programs", folder=str(folder))
    steps = ["jit__forward", "jit__decode"]
    assert [name for name in found["compiled"] if name in steps] == steps
    assert [name for name in found["hits"] if name in steps] == steps
    assert not set(steps) & set(found["misses"])
    assert found["tokens"] == 4
