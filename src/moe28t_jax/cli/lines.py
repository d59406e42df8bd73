"""What is typed: lines of standard input, with history and completion on a terminal, and messages of several lines."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = '"""'


class Typed(NamedTuple):
    """What was typed; a block between marks is a message whatever it says."""

    text: str
    is_block: bool = False


def prepare_terminal(commands: list[str]) -> None:
    """Editing, history of earlier chats and completion of commands, where the platform has readline."""
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        return

    def complete(text: str, state: int) -> str | None:
        return [*(name for name in commands if name.startswith(text)), None][state] if text else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moe28t"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        history = folder / "history"
        if history.exists():
            readline.read_history_file(history)
        readline.set_history_length(1000)
        import atexit

        atexit.register(lambda: _write_history(readline, history))


def _write_history(readline: Any, path: Path) -> None:
    with contextlib.suppress(OSError):
        readline.write_history_file(path)


def read_line(prompt: str) -> str:
    """A line of standard input."""
    try:
        # input() asks on standard output, which over a pipe holds the answers alone.
        return input(prompt)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The text on standard input is not UTF-8 text (byte {error.start}); convert it first."
        ) from None


def read_message(next_line: Callable[[], str]) -> Typed:
    """A message of one or several lines; EOFError where there are no more lines before it begins."""
    parts = [next_line()]
    if parts[0].lstrip().startswith(BLOCK):
        parts = [parts[0].lstrip()[len(BLOCK) :]]
        with contextlib.suppress(EOFError):
            while not parts[-1].rstrip().endswith(BLOCK):
                parts.append(next_line())
            parts[-1] = parts[-1].rstrip()[: -len(BLOCK)]
        return Typed("\n".join(parts).strip("\n"), is_block=True)
    with contextlib.suppress(EOFError):
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(next_line())
    return Typed("\n".join(parts))
