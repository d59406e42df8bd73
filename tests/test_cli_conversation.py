"""Conversations at the command line: generate, chat and demo, with a model that writes what the test says."""

import dataclasses
import io
import json

import jax.numpy as jnp
import pytest
from PIL import Image

import moe28t_jax as m
from moe28t_jax import api
from moe28t_jax.chat import encode, image_prompt, render
from moe28t_jax.cli import main
from moe28t_jax.cli.answering import TOOL_ROUNDS, Printer
from moe28t_jax.config.model_config import VisionConfig
from moe28t_jax.demo_tools import specifications

SIMPLE = {"role": "assistant", "reasoning": "Hm.", "content": "Hi!"}
CALLING = {
    "role": "assistant",
    "reasoning": "",
    "content": "",
    "tool_calls": [{"name": "calc", "args": {"expr": "2*3"}}],
}


@pytest.fixture(scope="module")
def loaded(small_checkpoint):
    return m.load(small_checkpoint, dtype="float32")


@pytest.fixture
def shown(loaded, monkeypatch):
    """The prompts the model was shown, as text; it answers with `shown.answers` in turn, then with the last."""

    class Shown(list):
        def __init__(self):
            self.answers, self.options, self.interrupt_after = [SIMPLE], [], None

    record = Shown()
    user = [{"role": "user", "content": "x"}]

    def write(steps, prompt_ids, *options, **named):
        text = loaded.tokenizer.decode(prompt_ids)
        record.append(text)
        record.options.append(options)
        thinking = text.endswith("<|open|>think<|sep|>")
        message = record.answers[min(len(record), len(record.answers)) - 1]
        start = len(render(user, thinking=thinking))
        pieces = render([*user, message], thinking=thinking, add_generation_prompt=False)[start:-1]
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


def test_a_file_of_messages_or_a_request(capsys, shown, tmp_path) -> None:
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
    }
    file.write_text(json.dumps(request))
    assert main(["generate", "--messages", str(file), "--seed", "5", "--json"]) == 0
    assert shown[1] == prompt_of(messages, tools=specifications(["get"]), thinking_effort="high")
    limit, _, temperature, top_p, seed, *_ = shown.options[1]
    assert (limit, temperature, top_p, seed) == (7, 0.0, 1.0, 5)
    capsys.readouterr()


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
    (["--messages", "{folder}/absent.json"], ("No such file or directory",)),
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
    (["--chat", "x", "--image", "{folder}/absent.png"], ("This model has no image tower",)),
])  # fmt: skip
def test_what_cannot_be_asked_is_said(capsys, shown, tmp_path, options, parts) -> None:
    files = {
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
    assert f"{len(encode(loaded.tokenizer, counted)):,} of 1,024 tokens." in error
    assert json.loads(saved.read_text())["messages"][1:] == [
        says("one"), {"role": "assistant", "content": "Hi!", "reasoning_content": "Hm."},
    ]  # fmt: skip


@pytest.mark.parametrize(("line", "part"), [
    ("/nope", "There is no command '/nope'; see /help."),
    ("/effort medium", "The effort is 'medium'; it is one of low, high, max, none."),
    ("/undo", "There is no message to take back."),
    ("/save", "Something is missing; write /save FILE."),
    ("/load /no/such/file", "No such file or directory: '/no/such/file'."),
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


def test_a_terminal_gets_dim_reasoning_and_no_commands_from_the_model() -> None:
    class Terminal(io.StringIO):
        def isatty(self):
            return True

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
    tools = {"tools": specifications(["calc"]), "thinking_effort": "max"}
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
