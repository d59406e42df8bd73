"""The `moe28t` command in one of several processes: the first reads and speaks for all, and none leaves silently."""

import io
import json
import os
import sys

import pytest

from moe28t_jax import api
from moe28t_jax.cli import main
from moe28t_jax.parallel import agreement, startup
from moe28t_jax.parallel.launch import detect_launch


@pytest.fixture(scope="module")
def folder(small_checkpoint):
    return str(small_checkpoint)


@pytest.fixture
def one_of_two(monkeypatch):
    """`one_of_two(number)` makes this the process of that number; what it tells the other one, and its exits."""

    class Other:
        def __init__(self):
            self.told, self.exits = [], []

        def fail(self, sentence):
            self.told.append(sentence)

    def become(number):
        other = Other()
        for name, value in {"PROCESSES": "2", "PROCESS": str(number), "COORDINATOR": "a:1"}.items():
            monkeypatch.setenv(f"MOE28T_{name}", value)
        monkeypatch.setattr(startup, "_running", (detect_launch(os.environ), other))
        monkeypatch.setattr(os, "_exit", other.exits.append)
        return other

    return become


def run_as_another(arguments):
    """The command of a process that is not the first; its standard output is closed again."""
    before = sys.stdout
    try:
        return main(arguments)
    finally:
        assert sys.stdout is not before
        sys.stdout.close()
        sys.stdout = before


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_process_speaks_for_all(capsys, folder, tmp_path, one_of_two, number) -> None:
    one_of_two(number)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.txt").write_text("hello")
    run = main if number == 0 else run_as_another
    assert run(["generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", "6"]) == 0
    generated = capsys.readouterr()
    assert run(["score", "--model", folder, str(tmp_path), "--json"]) == 0
    scored = capsys.readouterr()
    if number == 0:
        assert generated.out.startswith("hello") and "[5 prompt tokens, " in generated.err
        assert json.loads(scored.out)["total"]["files"] == 1 and "empty.txt': it is empty." in scored.err
    else:
        assert (generated.out, generated.err, scored.out, scored.err) == ("", "", "", "")


def test_an_error_of_another_process_is_said(capsys, folder, one_of_two) -> None:
    other = one_of_two(1)
    assert run_as_another(["generate", "--model", folder, "--prompt", "", "--no-echo"]) == 2
    assert "moe28t generate: The prompt has no tokens" in capsys.readouterr().err
    assert other.exits == [2] and "The prompt has no tokens" in other.told[0]


def test_the_others_are_told_of_an_interrupt(capsys, folder, one_of_two, monkeypatch) -> None:
    def interrupted(*_):
        yield ord("a"), None
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "generate_ids", interrupted)
    other = one_of_two(0)
    main(["generate", "--model", folder, "--prompt", "hello"])
    assert "interrupted." in capsys.readouterr().err
    assert (other.told, other.exits) == (["It was interrupted."], [130])


def test_the_others_are_told_that_nobody_reads(capsys, folder, one_of_two, monkeypatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        other = one_of_two(0)
        main(["generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", "6"])
    assert (other.told, other.exits) == (["Nobody reads its output any more."], [141])
    assert capsys.readouterr().err == ""


def test_one_process_reads_standard_input_for_all(capsys, folder, one_of_two, monkeypatch) -> None:
    def of_first(read):
        assert read() == "what a launcher gave the first one"
        return "hello"

    monkeypatch.setattr(agreement, "text_of_first_process", of_first)
    monkeypatch.setattr("sys.stdin", io.StringIO("what a launcher gave the first one"))
    one_of_two(0)
    assert main(["generate", "--model", folder, "--max-new-tokens", "6"]) == 0
    assert capsys.readouterr().out.startswith("hello")


def test_a_chat_takes_one_process(capsys, folder, one_of_two) -> None:
    other = one_of_two(0)
    assert main(["chat", "--model", folder]) == 2
    error = capsys.readouterr().err
    assert "chat: This program has 2 processes" in error and "--messages FILE" in error
    assert other.exits == [2]
