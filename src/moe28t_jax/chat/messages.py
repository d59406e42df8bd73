"""Validation of conversations and requests, and their one canonical form.

Two shapes are read. The OpenAI shape has ``tool_calls`` of ``{"id", "type": "function", "function": {"name",
"arguments"}}`` and ``reasoning_effort``; the short shape has ``tool_calls`` of ``{"name", "arguments" or
"args"}`` and ``thinking_budget`` (``low``, ``high`` or ``max``). Both give the same canonical form:

* system: ``role``, ``content`` [``name``], or ``role``, ``tools`` for tools that are added on the way;
* user: ``role``, ``content`` [``name``];
* assistant: ``role``, ``content`` (text, parts or None) [``name``, ``reasoning_content``, ``tool_calls``];
* tool: ``role``, ``content`` [``tool_call_id``, ``name``].

``content`` is text or a list of parts ``{"type": "text", "text"}``, ``{"type": "image", "image"}`` and
``{"type": "image_url", "image_url"}``. Null counts as missing everywhere. Fields without a meaning here are
left out. Every refusal is a ValueError of one sentence.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moe28t_jax.chat.effort import read_thinking
from moe28t_jax.chat.strict_json import check_json, decode, expect_object, fail

ROLES = ("system", "user", "assistant", "tool")
TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a request asks the renderer for: ``render(**request.render_arguments())``.

    ``thinking_effort`` is ``max`` where the request names none; without ``thinking`` it has no effect.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thinking: bool
    thinking_effort: str
    tool_choice: str | None
    response_format: dict[str, Any] | None

    def render_arguments(self) -> dict[str, Any]:
        """The keyword arguments of :func:`moe28t_jax.chat.render`, without image prompts."""
        return {name: getattr(self, name) for name in self.__slots__}


def normalize_request(request: Any) -> ChatRequest:
    """Read the conversation part of a request body of either shape.

    Read are ``messages``, ``tools``, ``tool_choice``, ``response_format`` and the thinking controls:
    ``thinking`` (``{"type": "enabled" | "disabled", "effort"}``), ``reasoning_effort``, ``effort`` and
    ``reasoning`` (``{"effort"}``) with an effort or ``"none"``, ``thinking_budget`` and ``thinking_effort`` (an
    effort), ``enable_thinking``, and ``chat_template_kwargs`` (``thinking`` or ``enable_thinking``,
    ``thinking_effort``). ``thinking`` wins over ``reasoning_effort``; any other contradiction, an effort beside
    thinking switched off too, is an error. There is no budget of reasoning tokens: a field that asks for one is
    refused. Sampling and transport fields are the caller's.

    Raises ValueError for anything that could not be rendered.
    """
    request = expect_object(request, "The request")
    messages = normalize_messages(request.get("messages"))
    tools = normalize_tools(request.get("tools"))
    check_tool_names(tools, messages)
    tool_choice = check_tool_choice(request.get("tool_choice"), tools, messages)
    response_format = check_response_format(request.get("response_format"))
    thinking, effort = read_thinking(request)
    return ChatRequest(messages, tools, thinking, effort, tool_choice, response_format)


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Canonical form of a conversation of either shape; idempotent. Raises ValueError, see the module."""
    if not isinstance(messages, list | tuple) or not messages:
        fail(
            "messages", messages, "a list of at least one message", "pass [{'role': 'user', 'content': ...}]"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def normalize_tools(tools: Any, where: str = "tools") -> list[dict[str, Any]] | None:
    """Check a list of tools ``{"type": "function", "function": {"name", "description", "parameters"}}``.

    ``parameters`` may be any JSON schema object; further fields are kept, for the model is shown the whole
    list. None and an empty list give None. Raises ValueError, also for a name that occurs twice.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        fail(where, tools, "a list of tools", "pass [{'type': 'function', 'function': {'name': ...}}]")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _check_tool(tool, f"{where}[{index}]")
        if name in names:
            fail(f"{where}[{index}].function.name", name, "a name used once", "rename one of the tools")
        names.add(name)
    return [dict(tool) for tool in tools] or None


def check_tool_names(tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]]) -> None:
    """Raise ValueError where two different declarations, global or inside canonical messages, share a name."""
    declared = {tool["function"]["name"]: tool for tool in tools or ()}
    for index, message in enumerate(messages):
        for position, tool in enumerate(message.get("tools") or ()):
            name = tool["function"]["name"]
            if declared.setdefault(name, tool) != tool:
                where = f"messages[{index}].tools[{position}].function.name"
                fail(where, name, "a name that no other tool has", "rename it or declare the same tool again")


def check_tool_choice(
    tool_choice: Any, tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> str | None:
    """The choice itself; ValueError unless it is None, ``auto``, ``none`` or ``required``, and for
    ``required`` when no tool is declared, be it globally or in a system message."""
    if tool_choice is None:
        return None
    if not isinstance(tool_choice, str) or tool_choice not in TOOL_CHOICES:
        fail(
            "tool_choice",
            tool_choice,
            "'auto', 'none' or 'required'",
            "use one of these (to have one function called, offer only that tool and use 'required')",
        )
    if tool_choice == "required" and not tools and not any(message.get("tools") for message in messages):
        fail("tool_choice", tool_choice, "tools to choose from", "pass tools or use 'auto'")
    return tool_choice


def check_response_format(response_format: Any) -> dict[str, Any] | None:
    """The format as a dict, None where missing; ValueError unless it is ``{"type": "text" | "json_object"}``
    or ``{"type": "json_schema", "json_schema": {"name", "schema", "strict"}}`` (``strict`` optional)."""
    if response_format is None:
        return None
    response_format = expect_object(response_format, "response_format")
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        fail("response_format.type", kind, "'text', 'json_object' or 'json_schema'", "use one of these")
    if kind == "json_schema":
        description = expect_object(response_format.get("json_schema"), "response_format.json_schema")
        _text(description.get("name"), "response_format.json_schema.name", required=True)
        schema = expect_object(description.get("schema"), "response_format.json_schema.schema")
        check_json(schema, "response_format.json_schema.schema")
        strict = description.get("strict")
        if strict is not None and not isinstance(strict, bool):
            fail("response_format.json_schema.strict", strict, "true or false", "use one of these")
    return dict(response_format)


def image_parts(messages: Any) -> list[dict[str, Any]]:
    """Image parts of a conversation in the order in which their prompts are inserted."""
    return [
        part
        for message in normalize_messages(messages)
        for part in _parts_in(message)
        if part["type"] != "text"
    ]


def _parts_in(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, list):
        yield from content


# -- messages --------------------------------------------------------------------------------------------------
def _message(message: Any, where: str) -> dict[str, Any]:
    message = expect_object(message, where)
    role = message.get("role")
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or role not in ROLES:
        fail(f"{where}.role", role, "system, developer, user, assistant or tool", "use one of these")
    _check_foreign_fields(message, role, where)
    canonical: dict[str, Any] = {"role": role}
    name = _text(message.get("name"), f"{where}.name")
    if name:
        canonical["name"] = name
    if role == "assistant":
        canonical["content"] = _content(message.get("content"), f"{where}.content", images=False)
        reasoning = _reasoning(message, where)
        if reasoning:
            canonical["reasoning_content"] = reasoning
        calls = _calls(message.get("tool_calls"), f"{where}.tool_calls")
        if calls:
            canonical["tool_calls"] = calls
        return canonical
    tools = normalize_tools(message.get("tools"), f"{where}.tools")
    if tools:
        # The format has no place for content beside tools and ignores it.
        canonical["tools"] = tools
        return canonical
    content = _content(message.get("content"), f"{where}.content", images=True)
    if content is None:
        fail(f"{where}.content", content, "text or a list of parts", "pass '' where there is nothing to say")
    canonical["content"] = content
    if role == "tool":
        call_id = _text(message.get("tool_call_id"), f"{where}.tool_call_id")
        if call_id:
            canonical["tool_call_id"] = call_id
    return canonical


def _check_foreign_fields(message: Mapping[str, Any], role: str, where: str) -> None:
    """Refuse fields that change the meaning of a message but have no place in this role."""
    owners = {"tool_calls": "assistant", "reasoning_content": "assistant", "reasoning": "assistant"}
    owners |= {"tools": "system", "tool_call_id": "tool"}
    for field, owner in owners.items():
        if message.get(field) and role != owner:
            fail(
                f"{where}.{field}", message[field], f"none in a message of role {role}", f"move it to {owner}"
            )
    for field, remedy in (
        ("function_call", "use tool_calls"),
        ("reasoning_details", "send the text as reasoning_content"),
        ("thinking", "send the text as reasoning_content"),
    ):
        if message.get(field):
            fail(f"{where}.{field}", message[field], "none", remedy)
    if message.get("partial"):
        fail(f"{where}.partial", message["partial"], "false, as turns cannot be continued", "leave it out")


def _reasoning(message: Mapping[str, Any], where: str) -> str | None:
    texts = [_text(message.get(field), f"{where}.{field}") for field in ("reasoning_content", "reasoning")]
    given = [text for text in texts if text is not None]
    if len(given) == 2 and given[0] != given[1]:
        fail(f"{where}.reasoning", given[1], "the same text as reasoning_content", "send one of the two")
    return given[0] if given else None


def _content(content: Any, where: str, images: bool) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        fail(where, content, "text or a list of parts", "convert it to text, objects to JSON text")
    return [_part(part, f"{where}[{index}]", images) for index, part in enumerate(content)]


def _part(part: Any, where: str, images: bool) -> dict[str, Any]:
    part = expect_object(part, where)
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            fail(f"{where}.text", text, "text", "pass a string")
        return {"type": "text", "text": text}
    if not isinstance(kind, str) or kind not in ("image", "image_url"):
        fail(f"{where}.type", kind, "'text', 'image' or 'image_url'", "use one of these")
    if not images:
        fail(f"{where}.type", kind, "text only in an assistant message", "show images in a user message")
    if part.get(kind) is None:
        fail(f"{where}.{kind}", None, "an image", f"pass it as {kind!r}")
    return {"type": kind, kind: part[kind]}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        fail(where, calls, "a list of calls", "pass [{'name': ..., 'arguments': {...}}]")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    call = expect_object(call, where)
    kind = call.get("type")
    if kind is not None and kind != "function":
        fail(f"{where}.type", kind, "'function'", "use it or leave the type out")
    if call.get("function") is None:
        function, place = call, where
    else:
        function, place = expect_object(call["function"], f"{where}.function"), f"{where}.function"
    name = _text(function.get("name"), f"{place}.name", required=True)
    given = [field for field in ("arguments", "args") if function.get(field) is not None]
    if len(given) == 2 and function["arguments"] != function["args"]:
        fail(f"{place}.args", function["args"], "the same as arguments", "send one of the two")
    arguments = _arguments(function[given[0]], f"{place}.{given[0]}") if given else {}
    canonical: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call_id = _text(call.get("id"), f"{where}.id")
    return {"id": call_id, **canonical} if call_id else canonical


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """A dict, or the text itself where it is not JSON (a model's slip must stay in its history)."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            value = decode(arguments)
        except ValueError:
            return arguments
    else:
        value = arguments
    if not isinstance(value, Mapping):
        fail(where, arguments, "a JSON object", "pass the arguments by name")
    check_json(value, where)
    return dict(value)


# -- tools and thinking ----------------------------------------------------------------------------------------
def _check_tool(tool: Any, where: str) -> str:
    tool = expect_object(tool, where)
    kind = tool.get("type")
    if kind != "function":
        remedy = "wrap it as {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        fail(f"{where}.type", kind, "'function'", remedy)
    function = expect_object(tool.get("function"), f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        expected = "1 to 128 letters, digits, '_', '.' or '-'"
        fail(f"{where}.function.name", name, expected, "rename the tool")
    _text(function.get("description"), f"{where}.function.description")
    if function.get("parameters") is not None:
        expect_object(function["parameters"], f"{where}.function.parameters")
    check_json(tool, where)
    return name


def _text(value: Any, where: str, required: bool = False) -> str | None:
    if value is None and not required:
        return None
    if not isinstance(value, str) or (required and not value):
        fail(where, value, "text" if not required else "non-empty text", "pass a string")
    return value
