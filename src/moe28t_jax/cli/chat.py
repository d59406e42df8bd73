"""`moe28t chat`: a conversation in the terminal, or over a pipe one message a line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe28t_jax.cli.answering import Answer, Printer, call_text, converse
from moe28t_jax.cli.common import device_failure, fail, harmless, json_text, load_model, read_json, read_tools
from moe28t_jax.cli.generate import check_sampling, sampling, summary
from moe28t_jax.cli.lines import BLOCK, Typed, prepare_terminal, read_line, read_message
from moe28t_jax.parallel.launch import detect_launch

EFFORTS = ("low", "high", "max", "none")
HELP = f"""\
Write a message and press Enter. A line that ends in \\ goes on in the next one; {BLOCK} starts and ends a
message of several lines, in which nothing is a command. Ctrl-C stops an answer and keeps what was said, or drops
the message being written; Ctrl-D or /quit ends.
  /effort low|high|max|none   how much to think from now on (none: not at all)
  /image PATH|off             show a picture with the next message, or none; without PATH list them
  /tools FILE|off             offer the tools of a JSON file, or none
  /result TEXT                answer the tool call that is shown; after the last one the model goes on
  /system TEXT                set the system message; without TEXT remove it
  /undo                       take back the last message and its answer
  /reset                      forget the conversation, keep effort, tools and system message
  /save FILE, /load FILE      write or read the conversation as a request in JSON
  /tokens                     tokens of the conversation as the model reads it
  /help, /quit"""


class Client:
    """The state of a chat: messages, options, and pictures for the next message."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        self.model = model
        self.sampling = sampling(options)
        self.messages: list[dict[str, Any]] = []
        self.system: dict[str, Any] | None = None
        if options.system is not None:
            self.system = {"role": "system", "content": options.system}
        self.effort: str = options.effort or "max"
        self.tools: list[dict[str, Any]] | None = None
        self.execute: Callable[[str, dict[str, Any]], str] | None = None
        # Further fields of a request that was loaded.
        self.fields: dict[str, Any] = {}
        # What was typed, and the picture as a data URL: the file may change and the conversation must not.
        self.images: list[tuple[str, str]] = []
        self.printer = Printer()
        if options.demo_tools:
            from moe28t_jax.demo_tools import DEMO_FILES, Toolbox, specifications

            if options.tools is not None:
                fail("--demo-tools brings its own tools; leave out --tools.")
            self.tools, self.execute = specifications(), Toolbox(files=DEMO_FILES).execute
        elif options.tools is not None:
            self.tools = read_tools(options.tools)
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self.say(HELP),
            "/effort": self._set_effort,
            "/image": self._add_image,
            "/tools": self._set_tools,
            "/result": self._add_result,
            "/system": self._set_system,
            "/undo": self._undo,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
            "/tokens": self._count,
        }

    @property
    def command_names(self) -> list[str]:
        return [*self._commands, "/quit"]

    def say(self, text: str) -> None:
        """A remark of the client, on standard error, apart from what the model says."""
        print(harmless(text, sys.stderr), file=sys.stderr, flush=True)

    def run(self, read_line: Callable[[], str]) -> None:
        """Take what is typed until it ends (EOFError) or /quit. Ctrl-C ends what is being done and never the chat."""
        while True:
            try:
                typed = read_message(read_line)
                if not self._take(typed):
                    return
            except EOFError:
                return
            except KeyboardInterrupt:
                self.say("\n[interrupted; Ctrl-D or /quit ends]")

    def _take(self, typed: Typed) -> bool:
        """Do what was typed; False for /quit. A user's mistake and a failing device are said."""
        word, _, rest = typed.text.strip().partition(" ")
        is_command = not typed.is_block and word.startswith("/")
        try:
            if is_command and word == "/quit":
                return False
            if is_command and word in self._commands:
                self._commands[word](rest.strip())
            elif is_command and "\n" not in typed.text and word[1:].isalpha():
                fail(f"There is no command {word!r}; see /help.")
            elif typed.text.strip():
                self.send(typed.text)
        except (ValueError, NotImplementedError) as error:
            self.say(str(error))
        except OSError as error:
            self.say(f"{error.strerror or error}: {error.filename!r}.")
        except (RuntimeError, MemoryError) as error:
            sentence = device_failure(error)
            if sentence is None:
                raise
            self.say(sentence)
        return True

    # -- talking -----------------------------------------------------------------------------------------------
    def send(self, text: str) -> None:
        """Say something and show the answer; a refused message is taken back."""
        content: Any = text
        if self.images:
            pictures = [{"type": "image", "image": url} for _, url in self.images]
            content = [*pictures, {"type": "text", "text": text}]
        if self._say_and_answer({"role": "user", "content": content}):
            self.images = []

    def _say_and_answer(self, message: dict[str, Any]) -> bool:
        """Whether the message was answered; one that fails, or is interrupted before an answer, is taken back."""
        before = len(self.messages)
        self.messages.append(message)
        try:
            converse(self.ask, self.messages, self.printer, self.execute, self._after)
        except Exception:
            del self.messages[before:]
            raise
        except KeyboardInterrupt:
            if len(self.messages) == before + 1:
                del self.messages[before:]
            self.say("[stopped]")
        self._ask_for_result()
        return len(self.messages) > before

    def ask(self, messages: list[dict[str, Any]]) -> Iterator[Any]:
        """The chunks of an answer, with this chat's options."""
        return self.model.stream(self.request(messages), **self.sampling)

    def request(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The conversation as a request body."""
        system = [] if self.system is None else [self.system]
        request: dict[str, Any] = {
            "messages": [*system, *messages],
            "reasoning_effort": self.effort,
            **self.fields,
        }
        return {**request, "tools": self.tools} if self.tools else request

    def _after(self, turn: Answer) -> None:
        if turn.result is None:
            self.say(f"[stopped after {turn.clock.tokens} tokens]")
        else:
            self.say(summary(turn.result, turn.clock))

    def _open_calls(self) -> list[dict[str, Any]]:
        """The calls of the last turn that have no result yet."""
        start = len(self.messages)
        while start and self.messages[start - 1]["role"] == "tool":
            start -= 1
        if start == 0:
            return []
        calls: list[dict[str, Any]] = list(self.messages[start - 1].get("tool_calls") or ())
        for message in self.messages[start:]:
            identifier = message.get("tool_call_id")
            # A result that names no call belongs to the first one.
            found = (i for i, call in enumerate(calls) if identifier and call.get("id") == identifier)
            position = next(found, 0)
            del calls[position : position + 1]
        return calls

    def _ask_for_result(self) -> None:
        calls = self._open_calls()
        if not calls:
            return
        called = calls[0]["function"]["name"]
        declared = [tool["function"]["name"] for tool in self.tools or ()]
        if called not in declared:
            self.say(
                f"The model called {called}, which is not among its tools ({', '.join(declared) or 'none'})."
            )
        self.say(f"What does {call_text(calls[0]['function'])} give? Write /result TEXT.")

    # -- commands ----------------------------------------------------------------------------------------------
    def _set_effort(self, value: str) -> None:
        if value and value not in EFFORTS:
            fail(f"The effort is {value!r}; it is one of {', '.join(EFFORTS)}.")
        self.effort = value or self.effort
        self.say(f"Effort: {self.effort}.")

    def _add_image(self, path: str) -> None:
        from moe28t_jax.conversation import prepare_images

        if path == "off":
            self.images = []
        if path in ("", "off"):
            names = ", ".join(name for name, _ in self.images)
            self.say(f"Pictures for the next message: {names or 'none'}.")
            return
        path = os.path.expanduser(path)
        url = self._as_data_url(path)
        (image,) = prepare_images([url], self.model.config)
        self.images.append((path, url))
        self.say(f"Shown with the next message: {path} ({image.num_tokens} tokens).")

    def _as_data_url(self, image: Any) -> Any:
        """A path as a data URL. A model that cannot see refuses every picture, so there no file is read."""
        from moe28t_jax.chat.images import image_data_url

        is_path = isinstance(image, str) and image[:5].lower() != "data:" and "://" not in image
        return image_data_url(image) if is_path and self.model.config.vision is not None else image

    def _set_tools(self, path: str) -> None:
        path = _needed(path, "/tools FILE, or /tools off")
        if path == "off":
            self.tools = None
        else:
            self.tools = read_tools(Path(path).expanduser())
        self.execute = None
        # A choice among the tools of a loaded request says nothing about others.
        self.fields.pop("tool_choice", None)
        names = [tool["function"]["name"] for tool in self.tools or ()]
        self.say(f"Tools: {', '.join(names) or 'none'}.")

    def _add_result(self, text: str) -> None:
        calls = self._open_calls()
        if not calls:
            fail("There is no open tool call; the model asks for one where tools are offered (/tools FILE).")
        message = {"role": "tool", "content": _needed(text, "/result TEXT")}
        if calls[0].get("id"):
            message["tool_call_id"] = calls[0]["id"]
        if len(calls) > 1:
            self.messages.append(message)
            self._ask_for_result()
        else:
            self._say_and_answer(message)

    def _set_system(self, text: str) -> None:
        self.system = {"role": "system", "content": text} if text else None
        self.say(f"System message: {text or 'none'}")

    def _undo(self, _: str) -> None:
        users = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            fail("There is no message to take back.")
        del self.messages[users[-1] :]
        self.say(f"Taken back; {len(users) - 1} of your messages are left.")

    def _reset(self, _: str) -> None:
        self.messages, self.images, self.fields = [], [], {}
        self.say("Forgotten.")

    def _save(self, path: str) -> None:
        target = Path(_needed(path, "/save FILE")).expanduser()
        beside = target.with_name(f".{target.name}.partial")
        text = json_text(self.request(self.messages), indent=1)
        try:
            beside.write_text(text + "\n", encoding="utf-8")
            beside.replace(target)
        except OSError as error:
            fail(f"{str(target)!r} cannot be written ({error.strerror or error}); choose another file.")
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        self.say(f"Wrote {target}: {len(self.messages)} messages.")

    def _load(self, path: str) -> None:
        from moe28t_jax.chat import normalize_request
        from moe28t_jax.conversation import left_out

        source = Path(_needed(path, "/load FILE")).expanduser()
        value = read_json(source)
        request = normalize_request({"messages": value} if isinstance(value, list) else value)
        messages = [self._with_data_urls(message) for message in request.messages]
        has_system = messages[0]["role"] == "system" and "content" in messages[0]
        self.system = messages[0] if has_system else None
        self.messages = messages[has_system:]
        given = {"tool_choice": request.tool_choice, "response_format": request.response_format}
        self.fields = {name: field for name, field in given.items() if field is not None}
        if not (self.execute is not None and request.tools == self.tools):
            self.tools, self.execute = request.tools, None
        self.effort = request.thinking_effort if request.thinking else "none"
        self.images = []
        unread = left_out(value)
        without = f" Left out: {', '.join(unread)}." if unread else ""
        self.say(f"Read {source}: {len(self.messages)} messages, effort {self.effort}.{without}")
        self._ask_for_result()

    def _with_data_urls(self, message: dict[str, Any]) -> dict[str, Any]:
        from moe28t_jax.conversation import image_source

        content = message.get("content")
        if not isinstance(content, list):
            return message
        pictures = [
            part
            if part["type"] == "text"
            else {"type": "image", "image": self._as_data_url(image_source(part))}
            for part in content
        ]
        return {**message, "content": pictures}

    def _count(self, _: str) -> None:
        if not self.messages and self.system is None:
            fail("There is nothing to count yet.")
        count = self.model.count_tokens(self.request(self.messages))
        self.say(f"{count:,} of {self.model.max_context:,} tokens.")


def _needed(value: str, usage: str) -> str:
    return value or fail(f"Something is missing; write {usage}.")


# -- the command -----------------------------------------------------------------------------------------------------
def run_chat(options: argparse.Namespace) -> int:
    """Run the command."""
    if sys.stdin is None:
        fail("There is no standard input to read messages from; run it in a terminal or pipe text into it.")
    processes = detect_launch(os.environ).processes
    if processes > 1:
        fail(
            f"This program has {processes} processes, and a conversation is typed into one; chat in a single process, "
            "or answer with moe28t generate --messages FILE, which runs on all of them."
        )
    # A mistake is known before the long loading begins.
    check_sampling(sampling(options))
    if options.tools is not None:
        read_tools(options.tools)
    model = load_model(options)
    client = Client(model, options)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        prepare_terminal(client.command_names)
        client.say(f"{model!r}. /help lists the commands.")
    client.run(lambda: read_line("> " if is_terminal else ""))
    return 0
