"""`--mesh` of the commands that load a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe28t_jax.cli import main


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tpu9-2x2", "There is no mesh file 'tpu9-2x2'"),
        ("tpu7x-4x4x2", "needs 64 devices and there are 1"),
    ],
)
def test_a_mesh_that_is_not_there(mesh: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "import", "--mesh", mesh]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_scores_on_eight_devices(run_on_devices: Callable[..., Any], small_checkpoint: Path) -> None:
    report = run_on_devices(8, "cli_workers.py:score_on_mesh", folder=str(small_checkpoint))
    assert report["found"] == pytest.approx(report["expected"], rel=1e-5)
    # Experts stay where they are: tokens are sent to them.
    assert len(report["exchanges"]) == 1 and report["exchanges"][0] > 0
