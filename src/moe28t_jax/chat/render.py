"""Conversations to XTML, the message format of the Kimi K3 family, piece by piece.

An element is ``<|open|>tag key="value"<|sep|> ... <|close|>tag<|sep|>``; a message element is followed by
``<|end_of_msg|>``; nothing stands between elements. The result is a list of ``(text, is_special)`` pieces, to
be encoded one by one: only the four markers and image prompts are special, so whatever a user, a tool or a
model wrote stays text, even what looks like a marker or an image placeholder.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from moe28t_jax.chat.effort import check_effort
from moe28t_jax.chat.messages import (
    check_response_format,
    check_tool_choice,
    check_tool_names,
    image_parts,
    normalize_messages,
    normalize_tools,
)
from moe28t_jax.chat.strict_json import fail, write, write_canonical
from moe28t_jax.chat.tokenizer import Tokenizer

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEPARATOR = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
MARKERS = (OPEN, CLOSE, SEPARATOR, END_OF_MESSAGE)

_CODE_BLOCK_END = "\n```"
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
_MORE_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
    "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_JSON_OBJECT = f"The system is invoked with `response_format=json_object`.\n{_RAW_JSON}"
_JSON_SCHEMA = (
    f"The system is invoked with `response_format=json_schema`.\n{_RAW_JSON}\n"
    "The JSON data must match the following schema:\n```json\n"
)


def render(
    messages: Any,
    tools: Any = None,
    thinking: bool = True,
    thinking_effort: Any = None,
    tool_choice: Any = None,
    response_format: Any = None,
    image_prompts: Any = None,
    add_generation_prompt: bool = True,
) -> list[tuple[str, bool]]:
    """Render a conversation to ``(text, is_special)`` pieces, none of them empty.

    The prompt is: declared tools; the effort (``low``, ``high`` or ``max``; None says nothing); the messages;
    the tool choice (``required`` and ``none`` only); the response format (``text`` says nothing); the start
    of the model's turn, unless ``add_generation_prompt`` is false. Messages are read in both shapes of
    :mod:`moe28t_jax.chat.messages`.

    With ``thinking`` every assistant turn has its think channel, with ``reasoning_content`` (or
    ``reasoning``) replayed verbatim and empty where there is none; without, there is neither a think channel
    nor an effort. A run of tool results is put into the order of the calls by ``tool_call_id`` (the id of the
    call, or ``NAME:i`` with the position i of the call from 0), and each takes the name of its call; a run with
    a result that fits no call keeps its order, and that result its own ``name``. ``image_prompts`` holds one
    text per image part, in order, inserted as one special piece each.

    Raises ValueError, in one sentence, for whatever cannot be rendered.
    """
    conversation = normalize_messages(messages)
    declared = normalize_tools(tools)
    check_tool_names(declared, conversation)
    choice = check_tool_choice(tool_choice, declared, conversation)
    answer_format = check_response_format(response_format)
    prompts = _image_prompts(image_prompts, conversation)

    writer = _Writer(thinking, prompts)
    if declared:
        writer.system("tool-declare", _TOOLS + write_canonical(declared) + _CODE_BLOCK_END)
    if thinking_effort is not None:
        effort = check_effort(thinking_effort)
        if thinking:
            writer.system("thinking-effort", _EFFORT.format(effort))
    for message in _with_results_in_order(conversation):
        writer.message(message)
    if choice in _TOOL_CHOICES:
        writer.system("tool-choice", _TOOL_CHOICES[choice])
    if answer_format and answer_format["type"] == "json_object":
        writer.system("response-format", _JSON_OBJECT)
    elif answer_format and answer_format["type"] == "json_schema":
        schema = write_canonical(answer_format["json_schema"]["schema"])
        writer.system("response-format", _JSON_SCHEMA + schema + _CODE_BLOCK_END)
    if add_generation_prompt:
        writer.open("message", role="assistant")
        writer.open("think" if thinking else "response")
    return writer.pieces


def encode(tokenizer: Tokenizer, pieces: Iterable[tuple[str, bool]]) -> list[int]:
    """Token ids of rendered pieces: each by itself, special names only in special pieces."""
    return tokenizer.encode_pieces(pieces)


class _Writer:
    def __init__(self, thinking: bool, image_prompts: Iterator[str]) -> None:
        self.pieces: list[tuple[str, bool]] = []
        self._thinking = thinking
        self._image_prompts = image_prompts

    def text(self, text: str) -> None:
        if text:
            self.pieces.append((text, False))

    def open(self, tag: str, **attributes: str) -> None:
        self.pieces.append((OPEN, True))
        self.text(tag)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.pieces.append((SEPARATOR, True))

    def close(self, tag: str) -> None:
        self.pieces.append((CLOSE, True))
        self.text(tag)
        self.pieces.append((SEPARATOR, True))

    def element(self, tag: str, text: str, **attributes: str) -> None:
        self.open(tag, **attributes)
        self.text(text)
        self.close(tag)

    def end(self) -> None:
        self.close("message")
        self.pieces.append((END_OF_MESSAGE, True))

    def system(self, kind: str, text: str) -> None:
        self.element("message", text, role="system", type=kind)
        self.pieces.append((END_OF_MESSAGE, True))

    def content(self, content: str | list[dict[str, Any]] | None) -> None:
        if isinstance(content, list):
            for part in content:
                if part["type"] == "text":
                    self.text(part["text"])
                else:
                    self.pieces.append((next(self._image_prompts), True))
        elif content is not None:
            self.text(content)

    def message(self, message: dict[str, Any]) -> None:
        role = message["role"]
        if message.get("tools"):
            self.system("tool-declare", _MORE_TOOLS + write_canonical(message["tools"]) + _CODE_BLOCK_END)
            return
        if role == "tool":
            self.open("message", role=role, tool=message["name"], index=str(message["index"]))
        elif message.get("name"):
            self.open("message", role=role, name=message["name"])
        else:
            self.open("message", role=role)
        if role == "assistant":
            self.assistant(message)
        else:
            self.content(message["content"])
        self.end()

    def assistant(self, message: dict[str, Any]) -> None:
        if self._thinking:
            self.element("think", message.get("reasoning_content", ""))
        self.open("response")
        self.content(message["content"])
        self.close("response")
        if message.get("tool_calls"):
            self.open("tools")
            for index, call in enumerate(message["tool_calls"], start=1):
                self.call(call["function"], index)
            self.close("tools")

    def call(self, function: dict[str, Any], index: int) -> None:
        self.open("call", tool=function["name"], index=str(index))
        if isinstance(function["arguments"], str):
            self.element("json", function["arguments"], type="object")
        else:
            for key, value in function["arguments"].items():
                text = value if isinstance(value, str) else write(value)
                self.element("argument", text, key=key, type=type_name(value))
        self.close("call")


def type_name(value: object) -> str:
    """Type of a JSON value as XTML names it: boolean, null, number, string, array or object."""
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list | tuple) else "object"


def _image_prompts(image_prompts: Any, conversation: list[dict[str, Any]]) -> Iterator[str]:
    prompts = () if image_prompts is None else image_prompts
    if not isinstance(prompts, list | tuple):
        fail("image_prompts", image_prompts, "a list of texts, one per image", "pass a list")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            fail(f"image_prompts[{index}]", prompt, "non-empty text", "pass the prompt of the image")
    images = len(image_parts(conversation))
    if images != len(prompts):
        raise ValueError(
            f"image_prompts holds {len(prompts)} prompt(s) for the {images} image(s) of the messages; "
            "expected as many as images: pass one prompt per image part, in order."
        )
    return iter(prompts)


# -- tool results ----------------------------------------------------------------------------------------------
def _with_results_in_order(conversation: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages, with each run of tool results in the order of the calls; results get name and index."""
    calls: list[dict[str, Any]] = []
    count = 0
    position = 0
    while position < len(conversation):
        message = conversation[position]
        if message["role"] != "tool":
            if message["role"] == "assistant":
                calls, count = message.get("tool_calls", []), 0
            yield message
            position += 1
            continue
        start = position
        while position < len(conversation) and conversation[position]["role"] == "tool":
            position += 1
        for result in _resolve_run(conversation[start:position], calls, start, count):
            count += 1
            yield {**result, "index": count}


def _resolve_run(
    run: list[dict[str, Any]], calls: list[dict[str, Any]], start: int, earlier: int
) -> list[dict[str, Any]]:
    """Name the results of a run, in the order of their calls if every id fits one."""
    seen: dict[str, int] = {}
    matches: list[int | None] = []
    for result in run:
        call_id = result.get("tool_call_id")
        candidates = [] if call_id is None else _calls_with_id(call_id, calls)
        # Ids may be repeated within a turn: the n-th result of an id belongs to the n-th call of it.
        nth = seen.get(call_id or "", 0)
        seen[call_id or ""] = nth + 1
        if candidates and nth >= len(candidates):
            where = f"messages[{start + len(matches)}].tool_call_id"
            fail(where, call_id, "one result for each call", "join the results of a call into one message")
        matches.append(candidates[nth] if candidates else None)
    named = []
    for offset, (result, match) in enumerate(zip(run, matches, strict=True)):
        name = result.get("name") if match is None else calls[match]["function"]["name"]
        if name is None and "tool_call_id" not in result and earlier + offset < len(calls):
            name = calls[earlier + offset]["function"]["name"]
        if name is None:
            fail(
                f"messages[{start + offset}].tool_call_id",
                result.get("tool_call_id"),
                "the id of a call of the assistant message before it",
                "send that id, or the tool's name as name",
            )
        named.append({**result, "name": name})
    if any(match is None for match in matches):
        return named
    order = sorted(range(len(run)), key=lambda index: matches[index] or 0)
    return [named[index] for index in order]


def _calls_with_id(call_id: str, calls: list[dict[str, Any]]) -> list[int]:
    exact = [index for index, call in enumerate(calls) if call.get("id") == call_id]
    if exact:
        return exact
    return [index for index, call in enumerate(calls) if call_id == f"{call['function']['name']}:{index}"]
