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


@pytest.mark.slow
def test_a_mesh_file_may_leave_places_for_experts_empty(
    run_on_devices: Callable[..., Any], tmp_path: Path
) -> None:
    """The 16 experts of nano on three devices, six places on each."""
    text = (
        'kind = "cpu"\ntopology = "3"\nchips = 3\ndevices = 3\nreason = "a test"\npad_experts = true\n'
        "[axes]\ndata = 1\nstage = 1\nexpert = 3\ntensor = 1\ncontext = 1\n[defaults]\nbatch = 1\ncontext = 64\n"
    )
    (tmp_path / "padded.toml").write_text(text)
    report = run_on_devices(
        3, "cli_workers.py:generate_with_empty_places", mesh=str(tmp_path / "padded.toml")
    )
    assert report["status"] == 0 and report["one"]
    assert report["one"] in report["printed"]
