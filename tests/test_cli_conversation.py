"""Conversations at the command line: generate, chat and demo, with a model that writes what the test says."""

import base64
import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import pytest
from PIL import Image

import moe28t_jax as m
from moe28t_jax import api
from moe28t_jax.chat import encode, image_prompt, render
from moe28t_jax.cli import chat, main
from moe28t_jax.cli.answering import TOOL_ROUNDS, Printer
from moe28t_jax.config.model_config import VisionConfig
from moe28t_jax.demo_tools import specifications
from moe28t_jax.weights import CheckpointError

SIMPLE = {"role": "assistant", "reasoning": "Hm.", "content": "Hi!"}
CALLING = {
    "role": "assistant",
    "reasoning": "",
    "content": "",
    "tool_calls": [{"name": "calc", "args": {"expr": "2*3"}}],
}


@pytest.fixture(scope="module")
def loaded(small_checkpoint):
    return m.load(small_checkpoint, dtype="float32", overrides={"max_context": 4096})


@pytest.fixture
def shown(loaded, monkeypatch):
    """The prompts the model was shown, as text; it answers with `shown.answers` in turn, then with the last."""

    class Shown(list):
        def __init__(self):
            self.answers, self.options, self.interrupt_after = [SIMPLE], [], None
            self.errors, self.cut = [], 0

    record = Shown()
    user = [{"role": "user", "content": "x"}]

    def write(steps, prompt_ids, *options, **named):
        text = loaded.tokenizer.decode(prompt_ids)
        record.append(text)
        record.options.append(options)
        thinking = text.endswith("<|open|>think<|sep|>")
        if record.errors:
            raise record.errors.pop(0)
        message = record.answers[min(len(record), len(record.answers)) - 1]
        start = len(render(user, thinking=thinking))
        pieces = render([*user, message], thinking=thinking, add_generation_prompt=False)[start:-1]
        pieces = pieces[: len(pieces) - record.cut]
        for index, token in enumerate(encode(loaded.tokenizer, pieces)):
            if index == record.interrupt_after:
                raise KeyboardInterrupt
            yield token, None
        yield None, "stop"

    monkeypatch.setattr(api, "generate_ids", write)
    monkeypatch.setattr(api, "load", lambda *_, **__: loaded)
    return record


def prompt_of(messages, **options):
    return "".join(text for text, _ in render(messages, **options))


def says(text):
    return {"role": "user", "content": text}


# -- generate ----------------------------------------------------------------------------------------------------
def test_an_answer_is_printed_with_its_reasoning_apart(capsys, shown) -> None:
    assert main(["generate", "--chat", "Hello", "--system", "Be brief.", "--effort", "low"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "[reasoning]\nHm.\n[answer]\nHi!\n"
    assert "new (10 reasoning)" in captured.err and captured.err.rstrip().endswith("stop]")
    assert shown == [
        prompt_of([{"role": "system", "content": "Be brief."}, says("Hello")], thinking_effort="low")
    ]


def test_an_answer_as_json(capsys, shown) -> None:
    shown.answers = [CALLING]
    assert main(["generate", "--chat", "Hello", "--effort", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tool_calls"] == [{"name": "calc", "arguments": {"expr": "2*3"}}]
    assert (found["text"], found["reasoning"], found["finish_reason"]) == ("", "", "tool_calls")
    assert set(found["usage"]) == {"prompt_tokens", "completion_tokens", "reasoning_tokens"}
    assert found["tokens_per_second"] > 0
    assert shown == [prompt_of([says("Hello")], thinking=False)]


def test_a_file_of_messages_or_a_request(capsys, shown, monkeypatch, tmp_path) -> None:
    file, tools = tmp_path / "messages.json", tmp_path / "tools.json"
    tools.write_text(json.dumps(specifications(["calc"])))
    file.write_text(json.dumps([says("one"), {"role": "assistant", "content": "1"}]))
    assert main(["generate", "--messages", str(file), "--chat", "two", "--tools", str(tools), "--json"]) == 0
    messages = [says("one"), {"role": "assistant", "content": "1"}, says("two")]
    assert shown[0] == prompt_of(messages, tools=specifications(["calc"]), thinking_effort="max")
    request = {
        "messages": messages,
        "tools": specifications(["get"]),
        "reasoning_effort": "high",
        "max_tokens": 7,
        "seed": 3,
        "model": "any",
        "stop": ["x"],
        "n": 2,
        "presence_penalty": 0,
    }
    file.write_text(json.dumps(request), encoding="utf-8-sig")
    capsys.readouterr()
    assert main(["generate", "--messages", str(file), "--seed", "5", "--json"]) == 0
    assert shown[1] == prompt_of(messages, tools=specifications(["get"]), thinking_effort="high")
    limit, _, temperature, top_p, seed, *_ = shown.options[1]
    assert (limit, temperature, top_p, seed) == (7, 0.0, 1.0, 5)
    assert "left out of the request, since it has no effect here: n, stop." in capsys.readouterr().err
    talk(monkeypatch, f"/load {file}")
    assert "effort high. Left out: max_tokens, n, seed, stop." in capsys.readouterr().err


def test_demonstration_tools_are_run_and_the_result_is_shown_to_the_model(capsys, shown) -> None:
    shown.answers = [CALLING, {"role": "assistant", "reasoning": "", "content": "It is 6."}]
    assert main(["generate", "--chat", "2*3?", "--demo-tools"]) == 0
    captured = capsys.readouterr()
    assert captured.out == '[tool call] calc({"expr": "2*3"})\n[tool result] 6\n[answer]\nIt is 6.\n'
    tools = specifications()
    messages = [says("2*3?"), CALLING, {"role": "tool", "content": "6"}]
    assert shown == [prompt_of(messages[:count], tools=tools, thinking_effort="max") for count in (1, 3)]
    assert len(captured.err.splitlines()) == 2


def test_a_model_that_never_stops_calling_is_stopped(capsys, shown) -> None:
    shown.answers = [CALLING]
    assert main(["generate", "--chat", "2*3?", "--demo-tools", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(shown) == TOOL_ROUNDS + 1
    assert [message["role"] for message in found["messages"]] == ["assistant", "tool"] * TOOL_ROUNDS + [
        "assistant"
    ]
    identifiers = [call["id"] for message in found["messages"] for call in message.get("tool_calls", ())]
    assert len(set(identifiers)) == len(identifiers)


def test_an_interrupted_answer_ends_with_status_130(capsys, shown) -> None:
    shown.interrupt_after = 2
    assert main(["generate", "--chat", "Hello"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "[reasoning]\nHm\n" and "interrupted" in captured.err


@pytest.mark.parametrize(("options", "parts"), [
    (["--prompt", "x", "--chat", "y"], ("--prompt continues a text", "give one of them")),
    (["--prompt", "x", "--effort", "low"], ("--effort belongs to a conversation", "--chat TEXT")),
    (["--prompt", "x", "--image", "a.png"], ("--image belongs to a conversation",)),
    (["--prompt", "x", "--demo-tools"], ("--demo-tools belongs to a conversation",)),
    (["--messages", "{folder}/absent.json"], ("absent.json' cannot be read (No such file or directory); name a",)),
    (["--prompt-file", "{folder}"], ("cannot be read (Is a directory); name a file",)),
    (["--messages", "{folder}/bad.json"], ("is not JSON (line 1, column 2",)),
    (["--messages", "{folder}/deep.json"], ("is nested too deeply",)),
    (["--messages", "{folder}/text.json"], ("holds a str; expected a list of messages",)),
    (["--messages", "{folder}/empty.json"], ("messages is []; expected a list of at least one message",)),
    (["--messages", "{folder}/request.json", "--tools", "{folder}/empty.json"], ("give them in one place",)),
    (["--messages", "{folder}/request.json", "--effort", "low"], ("holds thinking_budget; decide it in one place",)),
    (["--messages", "{folder}/request.json", "--demo-tools"], ("--demo-tools brings its own tools",)),
    (["--messages", "{folder}/sampling.json"], ("max_new_tokens of the request is 'many'; expected a whole number",)),
    (["--chat", "x", "--tools", "{folder}/text.json"], ("holds no list of tools",)),
    (["--chat", "x", "--tools", "{folder}/bad_tools.json"], ("tools[0] is 1; expected an object",)),
    (["--chat", "x", "--image", "{folder}/absent.png"], ("absent.png' cannot be read (No such file or directory)",)),
    (["--messages", "{folder}/parts.json"], ("absent.png' cannot be read (No such file or directory)",)),
    (["--prompt", "x", "--temperature", "-1"], ("temperature is -1.0; it must be 0 (greedy) to",)),
    (["--chat", "x", "--top-p", "0"], ("top_p is 0.0; it must be above 0",)),
    (["--messages", "{folder}/seed.json"], ("seed is -1; it must be a whole number from 0",)),
    (["--messages", "{folder}/robot.json"], ("messages[0].role is 'robot'; expected system",)),
    (["--messages", "{folder}/robot.json", "--image", "a.png"], ("'a.png' cannot be read",)),
    (["--prompt", "1 2 3 4 5 6", "--max-context", "4"], ("tokens and the context holds 4; shorten it or load",)),
    (["--chat", "x", "--max-context", "4"], ("tokens and the context holds 4; shorten it or load",)),
])  # fmt: skip
def test_what_cannot_be_asked_is_said_before_loading(
    capsys, shown, monkeypatch, tmp_path, options, parts
) -> None:
    def load(*_, **__):
        raise CheckpointError("It was loaded.")

    monkeypatch.setattr(api, "load", load)
    files = {
        "seed": json.dumps({"messages": [says("x")], "seed": -1}),
        "robot": json.dumps([{"role": "robot", "content": "x"}]),
        "parts": json.dumps([{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "absent.png")}]}]),
        "bad": "{", "deep": "[" * 100_000, "text": '"x"', "empty": "[]", "bad_tools": "[1]",
        "request": json.dumps({"messages": [says("x")], "tools": specifications(), "thinking_budget": "low"}),
        "sampling": json.dumps({"messages": [says("x")], "max_tokens": "many"}),
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content)
    assert main(["generate", *(option.format(folder=tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("moe28t generate: ") and "\n" not in error and error.endswith("."), error
    assert all(part in error for part in parts), error
    assert shown == []


def test_a_picture_needs_an_image_tower(capsys, shown, tmp_path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert main(["generate", "--chat", "What?", "--image", str(tmp_path / "a.png")]) == 2
    assert "This model has no image tower" in capsys.readouterr().err and shown == []


def test_a_call_that_was_cut_off_is_shown(capsys, shown, monkeypatch) -> None:
    shown.answers, shown.cut = [CALLING], 12
    assert main(["generate", "--chat", "2*3?"]) == 0
    talk(monkeypatch, "2*3?")
    shown_lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[unparsed] ")]
    assert len(shown_lines) == 2 and all('call tool="calc"' in line for line in shown_lines)


def test_a_failing_device_is_said(capsys, shown) -> None:
    shown.errors = [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nmany\nlines"),
        RuntimeError("bug"),
    ]
    assert main(["generate", "--chat", "Hello"]) == 1
    error = capsys.readouterr().err.strip()
    assert "(RESOURCE_EXHAUSTED: Out of memory)" in error and error.endswith(".") and "\n" not in error
    with pytest.raises(RuntimeError, match="bug"):
        main(["generate", "--chat", "Hello"])


# -- chat ----------------------------------------------------------------------------------------------------------
def talk(monkeypatch, *lines, options=()):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", *options]) == 0


def test_a_conversation_grows_and_can_be_taken_back(capsys, shown, monkeypatch) -> None:
    talk(
        monkeypatch,
        "one",
        "two",
        "/undo",
        "three\\",
        "lines",
        "/reset",
        '"""',
        "a",
        '/b"""',
        "/quit",
        "never",
    )
    answer = {"role": "assistant", "reasoning": "Hm.", "content": "Hi!"}
    expected = [
        [says("one")],
        [says("one"), answer, says("two")],
        [says("one"), answer, says("three\nlines")],
        [says("a\n/b")],
    ]
    assert shown == [prompt_of(messages, thinking_effort="max") for messages in expected]
    captured = capsys.readouterr()
    assert captured.out == "[reasoning]\nHm.\n[answer]\nHi!\n" * 4
    assert (
        "Taken back; 1 of your messages are left." in captured.err
        and captured.err.count("prompt tokens") == 4
    )


def test_commands_of_a_chat(capsys, shown, loaded, monkeypatch, tmp_path) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.json"
    tools.write_text(json.dumps(specifications(["calc"])))
    talk(
        monkeypatch, "/help", "/effort low", "/system Be brief.", f"/tools {tools}", "one", f"/save {saved}", "/tokens",
        "/tools off", "/effort none", "/reset", "two", f"/load {saved}", "three",
    )  # fmt: skip
    system = {"role": "system", "content": "Be brief."}
    first = {"tools": specifications(["calc"]), "thinking_effort": "low"}
    assert shown == [
        prompt_of([system, says("one")], **first),
        prompt_of([system, says("two")], thinking=False),
        prompt_of([system, says("one"), SIMPLE, says("three")], **first),
    ]
    error = capsys.readouterr().err
    assert "/undo" in error and "Tools: calc." in error and "Tools: none." in error
    counted = render([system, says("one"), SIMPLE], **first)
    # The three tokens that open the answer are not counted.
    assert f"{len(encode(loaded.tokenizer, counted)) - 3:,} of 4,096 tokens." in error
    assert json.loads(saved.read_text())["messages"][1:] == [
        says("one"), {"role": "assistant", "content": "Hi!", "reasoning_content": "Hm."},
    ]  # fmt: skip


def test_a_block_is_a_message_whatever_it_says(capsys, shown, monkeypatch) -> None:
    sent = []
    monkeypatch.setattr(chat.Client, "send", lambda _, text: sent.append(text))
    talk(
        monkeypatch,
        '"""',
        "/reset",
        "now",
        '"""',
        '"""/quit"""',
        '"""/nope"""',
        "/effort low",
        '"""',
        "/undo",
    )
    assert sent == ["/reset\nnow", "/quit", "/nope", "/undo"]
    error = capsys.readouterr().err
    assert "Forgotten." not in error and "There is no" not in error and "Effort: low." in error


TWO_CALLS = {**CALLING, "tool_calls": [{"name": "calc", "args": {"expr": e}} for e in ("2*3", "4*5")]}


def test_calls_are_answered_by_hand(capsys, shown, monkeypatch, tmp_path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(specifications(["calc"])))
    shown.answers = [TWO_CALLS, SIMPLE]
    talk(monkeypatch, "/result 1", "2*3, 4*5?", "/result", "/result 6", "/result about 20", "/result 1",
         options=["--tools", str(tools)])  # fmt: skip
    results = [{"role": "tool", "content": "6"}, {"role": "tool", "content": "about 20"}]
    options = {"tools": specifications(["calc"]), "thinking_effort": "max"}
    assert shown == [
        prompt_of([says("2*3, 4*5?")], **options),
        prompt_of([says("2*3, 4*5?"), TWO_CALLS, *results], **options),
    ]
    error = capsys.readouterr().err
    first, second = (f'What does calc({{"expr": "{e}"}}) give? Write /result TEXT.' for e in ("2*3", "4*5"))
    assert error.count(first) == error.count(second) == 1 and error.index(first) < error.index(second)
    assert (
        error.count("There is no open tool call") == 2
        and "Something is missing; write /result TEXT." in error
    )


def test_a_result_that_the_device_refuses_can_be_given_again(capsys, shown, monkeypatch, tmp_path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(specifications(["calc"])))
    shown.answers = [CALLING, SIMPLE]
    client = []
    take = chat.Client._take

    def failing(self, typed):
        client[:] = [self]
        if typed.text == "/result 5":
            shown.errors = [jax.errors.JaxRuntimeError("INTERNAL: no")]
        return take(self, typed)

    monkeypatch.setattr(chat.Client, "_take", failing)
    talk(monkeypatch, "2*3?", "/result 5", "/result 6", options=["--tools", str(tools)])
    assert [message["content"] for message in client[0].messages if message["role"] == "tool"] == ["6"]
    assert "The device could not compute it (INTERNAL: no)" in capsys.readouterr().err


def test_a_failing_device_does_not_end_a_chat(capsys, shown, monkeypatch) -> None:
    shown.errors = [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory"), MemoryError()]
    talk(monkeypatch, "one", "two", "three")
    assert shown[-1] == prompt_of([says("three")], thinking_effort="max")
    error = capsys.readouterr().err
    assert "(RESOURCE_EXHAUSTED: no memory)" in error and "(out of memory)" in error


def interrupting(monkeypatch, *lines):
    """Typed lines, of which KeyboardInterrupt stands for Ctrl-C; what was sent as a message."""
    typed, sent = iter(lines), []

    def read(_):
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat.Client, "send", lambda _, text: sent.append(text))
    assert main(["chat"]) == 0
    return sent


def test_an_interrupt_drops_the_message_being_written_and_never_the_chat(capsys, shown, monkeypatch) -> None:
    sent = interrupting(
        monkeypatch,
        KeyboardInterrupt,
        '"""',
        "dropped",
        KeyboardInterrupt,
        "one",
        "dropped\\",
        KeyboardInterrupt,
        "two",
    )
    assert sent == ["one", "two"]
    assert capsys.readouterr().err.count("[interrupted; Ctrl-D or /quit ends]") == 3


def test_an_interrupted_command_does_not_end_the_chat(capsys, shown, monkeypatch) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.Client, "_count", interrupted)
    assert interrupting(monkeypatch, "one", "/tokens", "two") == ["one", "two"]
    assert "[interrupted;" in capsys.readouterr().err


def test_an_interrupt_before_an_answer_takes_the_message_back(shown, monkeypatch) -> None:
    before = chat.converse
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return before(*arguments)

    monkeypatch.setattr(chat, "converse", interrupted)
    talk(monkeypatch, "one", "two")
    assert shown == [prompt_of([says("two")], thinking_effort="max")]


def test_a_loaded_request_is_saved_as_it_was(capsys, shown, monkeypatch, tmp_path) -> None:
    source, saved, other = (tmp_path / f"{name}.json" for name in ("source", "saved", "other"))
    request = {
        "messages": [{"role": "system", "name": "policy", "content": "Be brief."}, says("one")],
        "reasoning_effort": "low",
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "tools": specifications(["calc"]),
    }
    source.write_text(json.dumps(request))
    talk(monkeypatch, f"/load {source}", f"/save {saved}", "/tools off", "/system", f"/save {other}", "/reset",
         "two")  # fmt: skip
    assert json.loads(saved.read_text()) == request
    assert json.loads(other.read_text()) == {
        "messages": [says("one")], "reasoning_effort": "low", "response_format": {"type": "json_object"}
    }  # fmt: skip
    assert shown == [prompt_of([says("two")], thinking_effort="low")]
    assert "System message: none" in capsys.readouterr().err


def test_a_failing_save_leaves_nothing_behind(capsys, shown, monkeypatch, tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    talk(monkeypatch, "one", f"/save {tmp_path / 'folder'}", f"/save {tmp_path / 'absent' / 'a.json'}")
    error = capsys.readouterr().err
    assert "folder' cannot be written (Is a directory); choose another file." in error
    assert "a.json' cannot be written (No such file or directory)" in error
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_character_without_a_form_is_saved_escaped(shown, monkeypatch, tmp_path) -> None:
    call = {"name": "calc", "arguments": {"expr": "ü\ud800"}}
    messages = [says("one"), {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}]
    monkeypatch.setattr(chat.Client, "send", lambda self, _: self.messages.extend(messages))
    talk(monkeypatch, "one", f"/save {tmp_path / 'a.json'}")
    assert json.loads((tmp_path / "a.json").read_text())["messages"] == messages
    assert "ü\\ud800" in (tmp_path / "a.json").read_text()


@pytest.mark.parametrize(("line", "part"), [
    ("/nope", "There is no command '/nope'; see /help."),
    ("/effort medium", "The effort is 'medium'; it is one of low, high, max, none."),
    ("/undo", "There is no message to take back."),
    ("/save", "Something is missing; write /save FILE."),
    ("/load /no/such/file", "'/no/such/file' cannot be read (No such file or directory); name a file"),
    ("/image a.png", "This model has no image tower"),
    ("/tokens", "There is nothing to count yet."),
])  # fmt: skip
def test_a_slip_in_a_chat_is_named_and_the_chat_goes_on(capsys, shown, monkeypatch, line, part) -> None:
    talk(monkeypatch, line, "one")
    assert part in capsys.readouterr().err
    assert shown == [prompt_of([says("one")], thinking_effort="max")]


def test_an_interrupted_answer_is_kept(capsys, shown, monkeypatch) -> None:
    shown.interrupt_after = 2
    talk(monkeypatch, "one", "two")
    assert "[stopped after 2 tokens]" in capsys.readouterr().err
    assert shown[1] == prompt_of(
        [says("one"), {**SIMPLE, "reasoning": "Hm", "content": ""}, says("two")], thinking_effort="max"
    )


def test_a_refused_message_is_taken_back(capsys, shown, monkeypatch) -> None:
    talk(monkeypatch, "a\ud800b", "one")
    captured = capsys.readouterr()
    assert captured.out == "[reasoning]\nHm.\n[answer]\nHi!\n" * len(shown)
    assert shown[-1].endswith(prompt_of([says("one")])[-60:])


def test_a_chat_runs_the_demonstration_tools(capsys, shown, monkeypatch) -> None:
    shown.answers = [CALLING, SIMPLE]
    talk(monkeypatch, "2*3?", options=["--demo-tools"])
    assert "[tool result] 6\n" in capsys.readouterr().out and len(shown) == 2


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("options", "part"), [
    (["--seed", "-1"], "seed is -1"), (["--tools", "/no/such/file"], "No such file or directory"),
])  # fmt: skip
def test_a_chat_that_cannot_begin_is_said_before_loading(capsys, shown, monkeypatch, options, part) -> None:
    monkeypatch.setattr(api, "load", lambda *_, **__: pytest.fail("loaded"))
    assert main(["chat", *options]) == 2
    assert part in capsys.readouterr().err


def test_no_control_character_reaches_a_terminal(capsys, shown, monkeypatch) -> None:
    controls = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["generate", "--prompt", f"a{controls}b"]) == 0
    echoed = terminal.getvalue()
    assert echoed.startswith("a␀") and "b" in echoed and len(echoed) > len(controls)
    assert {c for c in echoed if c in controls} == {"\t", "\n"}
    printer = Printer(Terminal())
    printer.line("note", controls)
    assert {c for c in printer.file.getvalue() if c in controls} == {"\t", "\n", "\x1b"}
    assert printer.file.getvalue().count("\x1b") == 2
    monkeypatch.undo()
    piped = io.StringIO()
    Printer(piped).line("note", controls)
    assert piped.getvalue() == f"[note] {controls}\n"


def test_a_terminal_gets_dim_reasoning_and_no_commands_from_the_model() -> None:
    terminal = Terminal()
    printer = Printer(terminal)
    printer.text("reasoning", "a\x1b[31mb")
    printer.text("content", "c")
    printer.line("tool result", "d\x1b[31m")
    assert terminal.getvalue() == "\x1b[2ma␛[31mb\x1b[0m\nc\n\x1b[36m[tool result]\x1b[0m d␛[31m\n"


# -- demo ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def seeing(loaded, shown, monkeypatch):
    """The same model with an image tower of which the result is never looked at."""
    vision = VisionConfig(num_layers=1, hidden_size=16, num_heads=2, qkv_size=16)
    model = api.Model(dataclasses.replace(loaded.config, vision=vision), loaded.parameters, loaded.tokenizer)
    rows = []

    def encode_none(parameters, images, config):
        rows.extend(grid for _, grid in images)
        return jnp.zeros((1, config.hidden_size), jnp.float32)

    monkeypatch.setattr(api, "encode_prepared", encode_none)
    monkeypatch.setattr(api, "load", lambda *_, **__: model)
    return rows


def test_the_demonstration_has_three_parts(capsys, seeing, shown) -> None:
    shown.answers = [SIMPLE, SIMPLE, CALLING, {"role": "assistant", "reasoning": "", "content": "It is 6."}]
    assert main(["demo", "--prompt", "def f(", "--tool-question", "2*3?"]) == 0
    assert shown[0] == "def f(" and shown[1].count("<|media_pad|>") == 16 and seeing == [(1, 8, 8)]
    tools = {"tools": specifications(["read"]), "thinking_effort": "max"}
    assert shown[3] == prompt_of([says("2*3?"), CALLING, {"role": "tool", "content": "6"}], **tools)
    out = capsys.readouterr().out
    for part in (
        "\n== 1. ",
        "def f(",
        "\n== 2. ",
        "drawn: ",
        "\n== 3. ",
        "[tool result] 6",
        "[answer]\nIt is 6.",
    ):
        assert part in out
        out = out[out.index(part) :]
    assert main(["demo", "--prompt", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tool"]["text"] == "It is 6."


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_demonstration_without_an_image_tower_shows_the_rest(capsys, shown, options) -> None:
    shown.answers = [SIMPLE, CALLING, {"role": "assistant", "reasoning": "", "content": "It is 6."}]
    assert main(["demo", "--prompt", "def f(", *options]) == 2
    captured = capsys.readouterr()
    assert "def f(" in captured.out and "It is 6." in captured.out and len(shown) == 3
    assert captured.err == (
        "moe28t demo: The picture was left out, since this model has no image tower; load a model that has one.\n"
    )
    if options:
        assert json.loads(captured.out)["image"] is None
    else:
        assert "Left out: this model has no image tower." in captured.out


def test_pictures_of_a_chat_are_read_once(capsys, seeing, shown, monkeypatch, tmp_path) -> None:
    path, saved = tmp_path / "a.png", tmp_path / "saved.json"
    Image.new("RGB", (56, 28)).save(path)
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    monkeypatch.chdir(tmp_path)
    add = chat.Client._add_image

    def add_and_remove(self, name):
        add(self, name)
        path.unlink(missing_ok=True)

    monkeypatch.setattr(chat.Client, "_add_image", add_and_remove)
    talk(monkeypatch, "/image a.png", "/image", "What?", "More?", f"/save {saved}", "/image", "/image a.png")
    assert json.loads(saved.read_text())["messages"][0]["content"] == [
        {"type": "image", "image": url}, {"type": "text", "text": "What?"}
    ]  # fmt: skip
    assert len(shown) == 2 and shown[1].count("<|media_pad|>") == 2
    error = capsys.readouterr().err
    assert "Shown with the next message: a.png (2 tokens)." in error
    assert "Pictures for the next message: a.png." in error and "for the next message: none." in error
    assert "'a.png' cannot be read" in error


def test_pictures_of_a_loaded_request_are_read_once_and_pending_ones_can_be_removed(
    capsys, seeing, shown, monkeypatch, tmp_path
) -> None:
    path, source, saved = (tmp_path / name for name in ("a.png", "source.json", "saved.json"))
    Image.new("RGB", (56, 28)).save(path)
    url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    parts = [{"type": "image", "image": str(path)}, {"type": "image_url", "image_url": {"url": str(path)}},
             {"type": "image_url", "image_url": url}, {"type": "text", "text": "?"}]  # fmt: skip
    source.write_text(json.dumps([{"role": "user", "content": parts}]))
    talk(monkeypatch, f"/load {source}", f"/save {saved}", "/reset", f"/image {path}", "/image off", "one")
    content = [*[{"type": "image", "image": url}] * 3, {"type": "text", "text": "?"}]
    assert json.loads(saved.read_text())["messages"] == [{"role": "user", "content": content}]
    assert shown == [prompt_of([says("one")], thinking_effort="max")]
    assert "Pictures for the next message: none." in capsys.readouterr().err


def test_pictures_of_generate_and_chat_go_before_the_text(
    capsys, seeing, shown, monkeypatch, tmp_path
) -> None:
    Image.new("RGB", (56, 28)).save(tmp_path / "a.png")
    path = str(tmp_path / "a.png")
    assert main(["generate", "--chat", "What?", "--image", path, "--image", path]) == 0
    talk(monkeypatch, f"/image {path}", "What?", "More?")
    part = {"type": "image", "image": path}
    first, more = (
        [{"role": "user", "content": [*[part] * count, {"type": "text", "text": "What?"}]}]
        for count in (2, 1)
    )
    prompts = [image_prompt((56, 28), 2)]
    assert shown == [
        prompt_of(first, image_prompts=prompts * 2, thinking_effort="max"),
        prompt_of(more, image_prompts=prompts, thinking_effort="max"),
        prompt_of([*more, SIMPLE, says("More?")], image_prompts=prompts, thinking_effort="max"),
    ]
    assert f"Shown with the next message: {path} (2 tokens)." in capsys.readouterr().err
    assert main(["generate", "--chat", "What?", "--image", str(tmp_path / "absent.png")]) == 2
    assert "absent.png' cannot be read (No such file or directory)" in capsys.readouterr().err


def test_help_of_every_command_has_examples(capsys) -> None:
    for command in ("generate", "chat", "demo", "inspect", "convert", "score"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert f"examples:\n  moe28t {command}" in text
