"""Every notebook runs from top to bottom, and is stored without what it printed."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


class OwnInterpreter(AsyncKernelManager):
    """Starts the interpreter that runs the tests, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python", name="python3")


def execute(notebook: Any, folder: Path) -> None:
    """Run all cells in place. Raises CellExecutionError at the first error."""
    # Local sockets cannot meet a port that is taken; their path has to be short and absolute.
    with tempfile.TemporaryDirectory(prefix="kernel") as sockets:
        config = Config({"OwnInterpreter": {"transport": "ipc", "ip": f"{sockets}/k"}})
        resources = {"metadata": {"path": str(folder)}}
        client = NotebookClient(
            notebook, kernel_manager_class=OwnInterpreter, config=config, timeout=600, resources=resources
        )
        client.execute()


def written_to_standard_error(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]


@pytest.fixture(autouse=True)
def private_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the settings of whoever runs the tests nor a history file."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONWARNINGS", "default")


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    execute(notebook, tmp_path)
    assert not written_to_standard_error(notebook)
    figures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    shown = sum("plt.show()" in cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert len(figures) == shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_clean(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, f"cell {index} holds outputs"
        lines = cell.source.splitlines()
        assert all(line == line.rstrip() for line in lines), f"cell {index} has trailing blanks"
    for part in ("/home/", "/root/", "/tmp/", "/Users/", "/work/", "C:\\\\", "file://"):
        assert part not in text, f"{path.name} holds the path {part}"
    assert notebook.metadata.kernelspec.name == "python3"
    # As nbformat writes it, so that saving it unchanged gives the same bytes.
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def test_the_runner_notices_errors_and_warnings(tmp_path: Path) -> None:
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(bad, tmp_path)
    code = "import sys, warnings\nprint(sys.executable)\nwarnings.warn('careful', stacklevel=1)"
    noisy = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    execute(noisy, tmp_path)
    assert any("careful" in text for text in written_to_standard_error(noisy))
    [first, *_] = noisy.cells[0].outputs
    assert first.text.strip() == sys.executable
