"""`--mesh` of the commands that load a model."""

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
