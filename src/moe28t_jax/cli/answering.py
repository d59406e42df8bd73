"""One answer of a conversation, shown while it is written; and the loop that runs the demonstration tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from moe28t_jax.cli.common import Clock, harmless, json_text

# Messages to the chunks of an answer to them.
Ask = Callable[[list[dict[str, Any]]], Iterable[Any]]
TOOL_ROUNDS = 8
_LABELS = {"reasoning": "[reasoning]", "content": "[answer]"}


def call_text(call: dict[str, Any]) -> str:
    """A call {"name", "arguments"} in one line."""
    return f"{call['name']}({json_text(call['arguments'])})"


class Printer:
    """Writes an answer as it comes: reasoning dim on a terminal and labelled elsewhere, calls on a line each."""

    def __init__(self, file: Any = None) -> None:
        self.file = sys.stdout if file is None else file
        self.styled = self.file.isatty()
        self._channel: str | None = None
        self._at_line_start = True

    def text(self, channel: str, text: str) -> None:
        """More text of `reasoning` or `content`."""
        if not text:
            return
        if channel != self._channel:
            self.end()
            if not self.styled:
                self._write(_LABELS[channel] + "\n")
            elif channel == "reasoning":
                self._write("\x1b[2m")
            self._channel = channel
        self._write(harmless(text, self.file))

    def call(self, call: dict[str, Any]) -> None:
        """A finished call."""
        self.line("tool call", call_text(call))

    def line(self, label: str, text: str) -> None:
        """A labelled line of its own."""
        self.end()
        mark = f"\x1b[36m[{label}]\x1b[0m" if self.styled else f"[{label}]"
        self._write(f"{mark} {harmless(text, self.file)}\n")

    def end(self) -> None:
        """End a channel, and its line."""
        if self.styled and self._channel == "reasoning":
            self._write("\x1b[0m")
        if not self._at_line_start:
            self._write("\n")
        self._channel = None

    def _write(self, text: str) -> None:
        print(text, end="", flush=True, file=self.file)
        if not text.startswith("\x1b") or text.endswith("\n"):
            self._at_line_start = text.endswith("\n")


@dataclass
class Answer:
    """What came of one turn. `result` is None where it was interrupted; `message` holds what came until then."""

    clock: Clock = field(default_factory=Clock)
    result: Any = None
    reasoning: str = ""
    text: str = ""

    @property
    def message(self) -> dict[str, Any]:
        if self.result is not None:
            return self.result.message
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        return {**message, "reasoning_content": self.reasoning} if self.reasoning else message


def answer(ask: Ask, messages: list[dict[str, Any]], printer: Printer | None) -> Answer:
    """Generate one turn. KeyboardInterrupt stops it and keeps what came; errors as in `Model.stream`."""
    turn = Answer()
    try:
        for chunk in ask(messages):
            if chunk.token_id is not None:
                turn.clock.tick()
            if chunk.channel == "reasoning":
                turn.reasoning += chunk.text
            elif chunk.channel == "content":
                turn.text += chunk.text
            if printer is not None and chunk.tool_call is not None:
                printer.call(chunk.tool_call)
            elif printer is not None and chunk.text:
                printer.text(chunk.channel, chunk.text)
            turn.result = chunk.result
        if printer is not None and turn.result is not None and turn.result.unparsed.strip():
            printer.line("unparsed", turn.result.unparsed.strip())
    except KeyboardInterrupt:
        turn.result = None
    finally:
        if printer is not None:
            printer.end()
    return turn


def converse(
    ask: Ask,
    messages: list[dict[str, Any]],
    printer: Printer | None,
    execute: Callable[[str, dict[str, Any]], str] | None = None,
    on_turn: Callable[[Answer], None] | None = None,
) -> Answer:
    """Answer, appending to `messages`; with `execute`, run the tools asked for and go on, at most 8 rounds."""
    for rounds in range(TOOL_ROUNDS + 1):
        turn = answer(ask, messages, printer)
        messages.append(turn.message)
        if on_turn is not None:
            on_turn(turn)
        if execute is None or turn.result is None or turn.result.finish_reason != "tool_calls":
            break
        if rounds == TOOL_ROUNDS:
            if printer is not None:
                printer.line("note", f"The model asked for tools {TOOL_ROUNDS} times; stopped here.")
            break
        for call, described in zip(turn.result.tool_calls, turn.message["tool_calls"], strict=True):
            result = execute(call["name"], call["arguments"])
            messages.append({"role": "tool", "tool_call_id": described["id"], "content": result})
            if printer is not None:
                printer.line("tool result", result)
    return turn
