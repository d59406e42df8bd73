"""Requests: both shapes give one canonical form, and every mistake is one sentence with a way out."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe28t_jax.chat import image_parts, normalize_messages, normalize_request, render

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look"}}


def request(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


def one_sentence(error: BaseException) -> bool:
    """Value, expectation and way out: "... expected ...: ...", in one line with one full stop at its end."""
    text = str(error)
    _, _, rest = text.partition("expected ")
    return "\n" not in text and ": " in rest and text.endswith(".") and ". " not in rest


# Two shapes, one form


def test_the_short_shape_is_the_openai_shape():
    short = {
        "messages": [
            USER,
            {"role": "assistant", "reasoning": "R", "tool_calls": [{"name": "f", "args": {"a": 1.0}}]},
            {"role": "tool", "content": "done"},
        ],
        "thinking_budget": "high",
    }
    openai = {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "R",
                "refusal": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1.0}'}}],
            },
            {"role": "tool", "content": "done", "name": None},
        ],
        "reasoning_effort": "high",
        "temperature": 1.0,
    }
    assert normalize_request(short) == normalize_request(openai)
    arguments = normalize_request(short).render_arguments()
    assert render(**arguments) == render(openai["messages"], thinking_effort="high")


def test_arguments_and_args_and_ids():
    for field in ("arguments", "args"):
        for value in ({"a": 1}, '{"a": 1}'):
            message = {"role": "assistant", "tool_calls": [{"id": "x", "name": "f", field: value}]}
            assert normalize_messages([message])[0]["tool_calls"] == [
                {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            ]


def test_defaults():
    plain = normalize_request(request(tools=None, tool_choice=None, response_format=None, thinking=None))
    assert plain == normalize_request(request())
    assert plain.render_arguments() == {
        "messages": [USER],
        "tools": None,
        "thinking": True,
        "thinking_effort": "max",
        "tool_choice": None,
        "response_format": None,
    }


def test_a_developer_is_the_system():
    assert normalize_messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_content_beside_tools_is_ignored_and_a_tool_may_be_declared_again():
    found = normalize_request(
        {"messages": [{"role": "system", "tools": [TOOL], "content": "x"}, USER], "tools": [TOOL]}
    )
    assert found.messages[0] == {"role": "system", "tools": [TOOL]}


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, "max"),
        ({"thinking_budget": "low"}, True, "low"),
        ({"thinking": {"type": "enabled"}}, True, "max"),
        ({"thinking": {"type": "disabled"}}, False, "max"),
        (
            {"thinking": {"type": "enabled", "effort": "low", "keep": "all"}, "reasoning_effort": "high"},
            True,
            "low",
        ),
        ({"thinking": {"effort": "low"}, "reasoning_effort": "none"}, True, "low"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True, "max"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False, "high"),
        ({"chat_template_kwargs": {"thinking": False}}, False, "max"),
        ({"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, False, "max"),
        ({"chat_template_kwargs": {"thinking_effort": "low"}, "reasoning_effort": "low"}, True, "low"),
        ({"thinking_budget": "high", "reasoning_effort": "high"}, True, "high"),
        ({"thinking_effort": "low"}, True, "low"),
        ({"effort": "high"}, True, "high"),
        ({"effort": "none"}, False, "max"),
        ({"enable_thinking": False}, False, "max"),
        ({"reasoning": {"effort": "low"}}, True, "low"),
        ({"reasoning": {"effort": "none"}}, False, "max"),
    ],
    ids=str,
)
def test_thinking_controls(fields: dict[str, Any], thinking: bool, effort: str):
    parsed = normalize_request(request(**fields))
    assert (parsed.thinking, parsed.thinking_effort) == (thinking, effort)


def test_images_are_listed_in_order_of_their_prompts():
    first, second = {"type": "image", "image": b"png"}, {"type": "image_url", "image_url": {"url": "data:"}}
    messages = [
        {"role": "user", "content": [first, {"type": "text", "text": "and"}]},
        {"role": "assistant", "tool_calls": [{"name": "f", "id": "1"}, {"name": "g", "id": "2"}]},
        {"role": "tool", "tool_call_id": "1", "content": [second | {"cache_control": {}}]},
    ]
    assert image_parts(messages) == [first, second]


TEXT = st.text(max_size=5)
PARTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, TEXT),
        st.builds(lambda text: {"type": "image", "image": text}, TEXT),
    ),
    max_size=2,
)
ARGUMENTS = st.dictionaries(
    TEXT, st.one_of(st.none(), st.integers(), TEXT, st.lists(st.booleans())), max_size=2
)
CALL = st.one_of(
    st.fixed_dictionaries({"name": TEXT.filter(bool)}, optional={"args": ARGUMENTS, "id": TEXT}),
    st.fixed_dictionaries({"name": TEXT.filter(bool), "arguments": ARGUMENTS.map(json.dumps)}),
    st.builds(
        lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
        TEXT.filter(bool),
        st.one_of(ARGUMENTS, st.just("{broken")),
    ),
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "developer"]), "content": st.one_of(TEXT, PARTS)},
            optional={"name": TEXT, "unknown": st.just({})},
        ),
        st.fixed_dictionaries(
            {"role": st.just("assistant")},
            optional={
                "content": st.one_of(st.none(), TEXT),
                "reasoning": TEXT,
                "tool_calls": st.lists(CALL, max_size=2),
            },
        ),
        st.fixed_dictionaries(
            {"role": st.just("tool"), "content": TEXT, "name": TEXT.filter(bool)},
            optional={"tool_call_id": TEXT},
        ),
    ),
    min_size=1,
    max_size=5,
)


@given(MESSAGES)
def test_the_form_is_canonical_and_renders_alike(messages: list[dict[str, Any]]):
    before = json.dumps(messages)
    canonical = normalize_messages(messages)
    assert normalize_messages(canonical) == canonical
    prompts = ["image"] * len(image_parts(messages))
    assert render(canonical, image_prompts=prompts) == render(messages, image_prompts=prompts)
    assert json.dumps(messages) == before


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.binary(max_size=3)
    | st.sampled_from(["user", "assistant", "tool", "system", "function", "text", "low", "json_schema", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "tool_calls",
                    "function",
                    "name",
                    "args",
                    "tools",
                    "image",
                    "effort",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_junk_is_a_value_error(
    messages: Any, tools: Any, thinking: Any, effort: Any, choice: Any, answer: Any
):
    body = {
        "messages": messages,
        "tools": tools,
        "thinking": thinking,
        "reasoning_effort": effort,
        "tool_choice": choice,
        "response_format": answer,
    }
    for candidate in (body, {"messages": [messages]}, {"messages": [USER, messages]}, messages):
        try:
            normalize_request(candidate)
        except ValueError as error:
            assert one_sentence(error), error


# Mistakes


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def holds_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


def calling(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": [fields]}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


def tool(**fields: Any) -> dict[str, Any]:
    return request(tools=[{"type": "function", "function": {"name": "f", **fields}}])


def json_schema(**fields: Any) -> dict[str, Any]:
    return request(response_format={"type": "json_schema", "json_schema": fields})


OTHER_LOOK = {"type": "function", "function": {"name": "look", "description": "another"}}
MISTAKES = {
    "request": ([], "The request is []"),
    "no messages": ({}, "messages is None"),
    "empty messages": ({"messages": []}, "messages is []"),
    "messages as text": ({"messages": "Hi"}, "messages is 'Hi'"),
    "message as text": ({"messages": ["Hi"]}, "messages[0] is 'Hi'"),
    "role": (message(role="robot", content="x"), "messages[0].role is 'robot'"),
    "role function": (message(role="function", content="x"), "messages[0].role is 'function'"),
    "role missing": (message(content="x"), "messages[0].role is None"),
    "role type": (message(role=["user"], content="x"), "messages[0].role is ['user']"),
    "name": (message(role="user", content="x", name=1), "messages[0].name is 1"),
    "content missing": (message(role="user"), "messages[0].content is None"),
    "content type": (message(role="user", content={"a": 1}), "messages[0].content is {'a': 1}"),
    "tool content missing": (message(role="tool", name="f"), "messages[0].content is None"),
    "part as text": (message(role="user", content=["x"]), "messages[0].content[0] is 'x'"),
    "part type": (
        message(role="user", content=[{"type": "audio"}]),
        "messages[0].content[0].type is 'audio'",
    ),
    "part text": (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text is None"),
    "part image": (message(role="user", content=[{"type": "image"}]), "messages[0].content[0].image is None"),
    "assistant image": (
        message(role="assistant", content=[{"type": "image", "image": "x"}]),
        "messages[0].content[0].type is 'image'",
    ),
    "reasoning type": (message(role="assistant", reasoning=[1]), "messages[0].reasoning is [1]"),
    "two reasonings": (
        message(role="assistant", reasoning="a", reasoning_content="b"),
        "messages[0].reasoning is 'a'",
    ),
    "reasoning of a user": (message(role="user", content="x", reasoning="a"), "messages[0].reasoning is 'a'"),
    "calls of a user": (message(role="user", content="x", tool_calls=[1]), "messages[0].tool_calls is [1]"),
    "tools of a user": (message(role="user", content="x", tools=[TOOL]), "messages[0].tools is"),
    "tools of an assistant": (message(role="assistant", tools=[TOOL]), "messages[0].tools is"),
    "function_call": (message(role="assistant", function_call={"name": "f"}), "messages[0].function_call is"),
    "partial": (message(role="assistant", content="x", partial=True), "messages[0].partial is True"),
    "calls type": (message(role="assistant", tool_calls={"name": "f"}), "messages[0].tool_calls is"),
    "call type": (calling(type="custom", name="f"), "messages[1].tool_calls[0].type is 'custom'"),
    "call name": (calling(name=""), "messages[1].tool_calls[0].name is ''"),
    "call name missing": (calling(function={}), "messages[1].tool_calls[0].function.name is None"),
    "call id": (calling(name="f", id=3), "messages[1].tool_calls[0].id is 3"),
    "arguments list": (calling(name="f", arguments=[1]), "messages[1].tool_calls[0].arguments is [1]"),
    "arguments json list": (calling(name="f", args="[1]"), "messages[1].tool_calls[0].args is '[1]'"),
    "arguments NaN": (calling(name="f", args={"a": [float("nan")]}), "args['a'][0] is nan"),
    "arguments key": (calling(name="f", args={1: 2}), "A key of messages[1].tool_calls[0].args is 1"),
    "arguments type": (calling(name="f", args={"a": b"x"}), "args['a'] is b'x'"),
    "arguments depth": (calling(name="f", args={"a": nested(300)}), "args is nested deeper than 200"),
    "arguments and args": (calling(name="f", arguments={"a": 1}, args={"a": 2}), "args is {'a': 2}"),
    "tool_call_id": (message(role="tool", content="x", tool_call_id=5), "messages[0].tool_call_id is 5"),
    "tools type": (request(tools={}), "tools is {}"),
    "tool as text": (request(tools=["f"]), "tools[0] is 'f'"),
    "flat tool": (request(tools=[{"name": "f"}]), "tools[0].type is None"),
    "tool type": (request(tools=[{"type": "web_search"}]), "tools[0].type is 'web_search'"),
    "tool function": (request(tools=[{"type": "function"}]), "tools[0].function is None"),
    "tool name": (tool(name="two words"), "tools[0].function.name is 'two words'"),
    "tool name missing": (tool(name=None), "tools[0].function.name is None"),
    "tool description": (tool(description=1), "tools[0].function.description is 1"),
    "tool parameters": (tool(parameters="object"), "tools[0].function.parameters is 'object'"),
    "tool not json": (tool(parameters={"a": {1, 2}}), "tools[0]['function']['parameters']['a'] is"),
    "tool that holds itself": (tool(parameters=holds_itself()), "tools[0] is nested deeper than 200"),
    "tool twice": (request(tools=[TOOL, TOOL]), "tools[1].function.name is 'look'"),
    "tool twice in a message": (
        {"messages": [{"role": "system", "tools": [TOOL, TOOL]}, USER]},
        "messages[0].tools[1].function.name is 'look'",
    ),
    "tool twice across": (
        {"messages": [{"role": "system", "tools": [OTHER_LOOK]}, USER], "tools": [TOOL]},
        "messages[0].tools[0].function.name is 'look'",
    ),
    "effort beside off": (
        request(thinking={"type": "disabled", "effort": "high"}),
        "thinking.type switches thinking off and thinking.effort asks for the effort 'high'",
    ),
    "budget beside none": (
        request(thinking_budget="low", reasoning_effort="none"),
        "reasoning_effort switches thinking off and thinking_budget asks for the effort 'low'",
    ),
    "budget of tokens": (request(thinking={"budget_tokens": 1024}), "thinking.budget_tokens is 1024"),
    "top-level budget of tokens": (request(thinking_token_budget=9), "thinking_token_budget is 9"),
    "reasoning details": (
        {"messages": [USER, {"role": "assistant", "content": "x", "reasoning_details": [{"text": "y"}]}]},
        "messages[1].reasoning_details is ",
    ),
    "argument of thousands of digits": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 10**5000}}]},
            ]
        },
        "messages[1].tool_calls[0].arguments['x'] is int with thousands of digits",
    ),
    "thousands of digits": (
        {"messages": [{"role": "user", "content": 10**5000}]},
        "messages[0].content is int with thousands of digits",
    ),
    "effort": (request(reasoning_effort="medium"), "reasoning_effort is 'medium'"),
    "effort type": (request(reasoning_effort=["low"]), "reasoning_effort is ['low']"),
    "losing effort": (
        request(reasoning_effort="medium", thinking={"effort": "low"}),
        "reasoning_effort is 'medium'",
    ),
    "budget number": (request(thinking_budget=1024), "thinking_budget is 1024"),
    "budget against effort": (
        request(thinking_budget="low", reasoning_effort="high"),
        "reasoning_effort asks for 'high' and thinking_budget for 'low'",
    ),
    "thinking type": (request(thinking=True), "thinking is True"),
    "thinking.type": (request(thinking={"type": "adaptive"}), "thinking.type is 'adaptive'"),
    "thinking.effort": (request(thinking={"effort": "medium"}), "thinking.effort is 'medium'"),
    "template switch": (
        request(chat_template_kwargs={"thinking": "no"}),
        "chat_template_kwargs.thinking is 'no'",
    ),
    "switches disagree": (
        request(chat_template_kwargs={"thinking": True}, thinking={"type": "disabled"}),
        "thinking.type asks for False and chat_template_kwargs.thinking for True",
    ),
    "tool_choice": (request(tool_choice="always", tools=[TOOL]), "tool_choice is 'always'"),
    "tool_choice named": (
        request(tool_choice={"type": "function", "function": {"name": "look"}}, tools=[TOOL]),
        "tool_choice is {",
    ),
    "required without tools": (request(tool_choice="required"), "tool_choice is 'required'"),
    "required with no tools": (request(tool_choice="required", tools=[]), "tool_choice is 'required'"),
    "format as text": (request(response_format="json"), "response_format is 'json'"),
    "format type": (request(response_format={"type": "xml"}), "response_format.type is 'xml'"),
    "schema missing": (
        request(response_format={"type": "json_schema"}),
        "response_format.json_schema is None",
    ),
    "schema name": (json_schema(schema={}), "response_format.json_schema.name is None"),
    "schema schema": (json_schema(name="X"), "response_format.json_schema.schema is None"),
    "schema strict": (json_schema(name="X", schema={}, strict="yes"), "json_schema.strict is 'yes'"),
    "schema not json": (json_schema(name="X", schema={"a": 1j}), "json_schema.schema['a'] is 1j"),
}


@pytest.mark.parametrize(("body", "start"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(body: Any, start: str):
    with pytest.raises(ValueError) as caught:
        normalize_request(body)
    assert start in str(caught.value)
    assert one_sentence(caught.value), caught.value
    if isinstance(body, dict) and isinstance(body.get("messages"), list) and not set(body) - {"messages"}:
        with pytest.raises(ValueError) as rendered:
            render(body["messages"])
        assert str(rendered.value) == str(caught.value)


def test_long_values_are_shortened():
    with pytest.raises(ValueError, match=r"role is 'x+\.\.\.x+'; expected") as caught:
        normalize_messages([{"role": "x" * 10_000, "content": ""}])
    assert len(str(caught.value)) < 300
