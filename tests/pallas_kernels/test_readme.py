"""The examples of the package's README run, and print what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[2] / "pallas_kernels" / "README.md"


def test_examples_print_what_stands_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        (expected,) = re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
        exec(compile(block, str(README), "exec"), names)
        assert capsys.readouterr().out.strip() == expected
