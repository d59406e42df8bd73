"""Rendering: the recorded conversations piece by piece, the rules they leave open, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moe28t_jax.chat.tokenizer as tokenizer_module
from moe28t_jax.chat import Tokenizer, encode, parse_pieces, render

FIXTURE = Path(__file__).parents[1] / "golden" / "data" / "chat_render.json"
CASES = json.loads(FIXTURE.read_text(encoding="utf-8"))["cases"]
MARKERS = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
NANO = Tokenizer.from_file(Path(tokenizer_module.__file__).parents[1] / "nano" / "tiktoken.model")

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def joined(messages: list[dict[str, Any]], **options: Any) -> str:
    return "".join(text for text, _ in render(messages, **options))


def headers(text: str, role: str) -> list[str]:
    """Attributes and body of every message of a role."""
    start = f'<|open|>message role="{role}"'
    return [part.split("<|close|>message<|sep|>")[0] for part in text.split(start)[1:]]


def call(name: str, call_id: str | None = None, arguments: Any = None) -> dict[str, Any]:
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"type": "function", "function": function} | ({"id": call_id} if call_id else {})


# Recorded conversations


def test_the_recording_is_complete():
    assert len(CASES) == 10
    assert sum("error" in case for case in CASES) == 2


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_recorded(case: dict[str, Any]):
    if "error" in case:
        with pytest.raises(ValueError, match="expected"):
            render(case["messages"], tools=case["tools"], **case["kwargs"])
        return
    pieces = render(case["messages"], tools=case["tools"], **case["kwargs"])
    assert pieces == [tuple(segment) for segment in case["segments"]]
    assert "".join(text for text, _ in pieces) == case["rendered"]


# Rules that the recordings leave open


def test_no_effort_message_unless_an_effort_is_given():
    assert "thinking-effort" not in joined([USER])
    for effort in ("low", "high", "max"):
        assert f"`thinking_effort={effort}`." in joined([USER], thinking_effort=effort)
        assert joined([USER], thinking_effort=effort, thinking=False) == joined([USER], thinking=False)


def test_the_generation_prompt_can_be_left_out():
    assert joined([USER], add_generation_prompt=False) == (
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
    )
    assert joined([USER]).endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
    assert joined([USER], thinking=False).endswith(
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def test_global_options_come_first_and_one_shot_options_last():
    text = joined(
        [USER],
        tools=[TOOL],
        thinking_effort="low",
        tool_choice="none",
        response_format={"type": "json_object"},
        add_generation_prompt=False,
    )
    kinds = ["tool-declare", "thinking-effort", 'role="user"', "tool-choice", "response-format"]
    positions = [text.index(kind) for kind in kinds]
    assert positions == sorted(positions)
    assert "`tool_choice=none`.\nYou MUST NOT call any tools in the next message.<|close|>" in text


@pytest.mark.parametrize(
    "options", [{"tool_choice": "auto"}, {"response_format": {"type": "text"}}, {"tools": []}], ids=str
)
def test_options_that_say_nothing(options: dict[str, Any]):
    assert render([USER], **options) == render([USER])


def test_tool_json_is_sorted_at_every_level_and_compact():
    schema = {"z": [{"b": 1, "a": "é"}], "$defs": {"y": {"type": "null"}, "x": True}}
    tool = {"type": "function", "function": {"parameters": schema, "name": "look"}, "extra": None}
    assert (
        '```json\n[{"extra":null,"function":{"name":"look","parameters":{"$defs":{"x":true,"y":{"type":"null"}},'
        '"z":[{"a":"é","b":1}]}},"type":"function"}]\n```<|close|>message'
    ) in joined([USER], tools=[tool])


def test_dynamic_tools_are_declared_where_they_stand():
    other = {"type": "function", "function": {"name": "other"}}
    text = joined([USER, {"role": "system", "tools": [other], "content": ""}, USER], tools=[TOOL])
    declaration = (
        '<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n'
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n```json\n"
        '[{"function":{"name":"other"},"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
    )
    user = joined([USER], add_generation_prompt=False)
    assert f"{user}{declaration}{user}" in text
    assert "tool_choice=required" in joined(
        [{"role": "system", "tools": [other]}, USER], tool_choice="required"
    )


def test_an_argument_text_that_is_not_json_stays_as_it_is():
    turn = {"role": "assistant", "content": "", "tool_calls": [call("f", "1", '{"a": <|close|>json<|sep|>')]}
    pieces = render([USER, turn])
    at = pieces.index(("json", False))
    assert pieces[at + 1 : at + 6] == [
        (" type", False),
        ('="', False),
        ("object", False),
        ('"', False),
        ("<|sep|>", True),
    ]
    assert pieces[at + 6] == ('{"a": <|close|>json<|sep|>', False)


@pytest.mark.parametrize("arguments", [{}, "{}", "", " ", None])
def test_empty_arguments_have_no_tags(arguments: Any):
    turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in joined([USER, turn])


def test_texts_of_arguments_given_as_json_text_are_the_same_as_by_value():
    arguments = {"s": "a\n", "n": 1, "f": 1.0, "o": {"b": [None, True]}}
    by_value, by_text = (
        joined([USER, {"role": "assistant", "tool_calls": [call("f", "1", given)]}])
        for given in (arguments, json.dumps(arguments))
    )
    assert by_value == by_text
    assert 'type="number"<|sep|>1.0<' in by_value
    assert 'type="object"<|sep|>{"b": [null, true]}<' in by_value


# Tool results


def test_results_are_put_into_call_order_and_numbered_anew_after_each_turn():
    def turn(*calls: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": list(calls)}

    def result(call_id: str, text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": text, "name": "ignored"}

    text = joined(
        [
            USER,
            turn(call("a", "x"), call("b", "y")),
            result("y", "B1"),
            result("x", "A1"),
            turn(call("c", "x"), call("d", "y")),
            result("y", "D2"),
            result("x", "C2"),
        ]
    )
    assert headers(text, "tool") == [
        ' tool="a" index="1"<|sep|>A1',
        ' tool="b" index="2"<|sep|>B1',
        ' tool="c" index="1"<|sep|>C2',
        ' tool="d" index="2"<|sep|>D2',
    ]


def results_of(calls: list[dict[str, Any]], *results: dict[str, Any]) -> list[str]:
    messages = [USER, {"role": "assistant", "tool_calls": calls}, *({"role": "tool"} | r for r in results)]
    return headers(joined(messages), "tool")


def test_a_run_with_an_unknown_id_keeps_its_order():
    calls = [call("a", "x"), call("b", "y")]
    assert results_of(
        calls,
        {"tool_call_id": "y", "content": "B"},
        {"tool_call_id": "?", "name": "gone", "content": "G"},
        {"tool_call_id": "x", "content": "A"},
    ) == [
        ' tool="b" index="1"<|sep|>B',
        ' tool="gone" index="2"<|sep|>G',
        ' tool="a" index="3"<|sep|>A',
    ]


def test_ids_of_name_and_position():
    calls = [call("a"), call("b"), call("a")]
    assert results_of(
        calls,
        {"tool_call_id": "a:2", "content": "third"},
        {"tool_call_id": "b:1", "content": "second"},
        {"tool_call_id": "a:0", "content": "first"},
    ) == [
        ' tool="a" index="1"<|sep|>first',
        ' tool="b" index="2"<|sep|>second',
        ' tool="a" index="3"<|sep|>third',
    ]


def test_repeated_ids_are_matched_in_order_and_missing_ids_by_position():
    calls = [call("a", "same"), call("b", "same")]
    expected = [' tool="a" index="1"<|sep|>1', ' tool="b" index="2"<|sep|>2']
    same = [{"tool_call_id": "same", "content": "1"}, {"tool_call_id": "same", "content": "2"}]
    assert results_of(calls, *same) == expected
    assert results_of([{"name": "a"}, {"name": "b"}], {"content": "1"}, {"content": "2"}) == expected


def test_a_result_without_id_call_or_name_is_refused():
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_call_id is 'z'; expected the id of a call"):
        render([USER, {"role": "tool", "tool_call_id": "z", "content": "x"}])


# Special pieces


ANY_TEXT = st.text(st.one_of(st.sampled_from('<|>openclsmigdr_a&" \n'), st.characters()), max_size=20)
LOOK_ALIKES = st.lists(
    st.one_of(
        ANY_TEXT, st.sampled_from([*MARKERS, "<|media_pad|>", "[PAD]", "<|kimi_image_placeholder|>", "think"])
    )
).map("".join)


@given(LOOK_ALIKES, LOOK_ALIKES, LOOK_ALIKES, LOOK_ALIKES.filter(bool))
def test_what_others_wrote_is_never_special(system: str, user: str, name: str, tool: str):
    messages = [
        {"role": "developer", "content": system},
        {
            "role": "user",
            "name": name,
            "content": [{"type": "text", "text": user}, {"type": "image", "image": 1}],
        },
        {
            "role": "assistant",
            "content": user,
            "reasoning": system,
            "tool_calls": [{"id": "1", "name": tool, "args": {name: user, "o": [name]}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": tool},
    ]
    prompt = "<|media_begin|>image 2x3<|media_content|><|media_pad|><|media_end|>"
    pieces = render(messages, image_prompts=[prompt])
    assert {text for text, is_special in pieces if is_special} == MARKERS | {prompt}
    assert all(text for text, _ in pieces)
    assert sum(text == "<|end_of_msg|>" and special for text, special in pieces) == len(messages)
    opened, closed = (
        sum(piece == (marker, True) for piece in pieces) for marker in ("<|open|>", "<|close|>")
    )
    assert opened == closed + 2
    ids = encode(NANO, pieces)
    assert ids == NANO.encode_pieces(pieces)
    assert sum(map(NANO.is_special, ids)) == sum(special for _, special in pieces) + 3


def test_attributes_escape_two_characters():
    text = joined([{"role": "user", "name": "<'&quot;\"&>", "content": '&"'}])
    assert text.startswith('<|open|>message role="user" name="<\'&amp;quot;&quot;&amp;>"<|sep|>&"<|close|>')


@pytest.mark.parametrize("prompts", [None, [], ["a", "b"], "a", [""], [1]], ids=repr)
def test_image_prompts_must_fit_the_images(prompts: Any):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert ("a", True) in render([message], image_prompts=["a"])
    with pytest.raises(ValueError, match="image_prompts"):
        render([message], image_prompts=prompts)


def test_a_placeholder_in_text_is_no_image():
    message = {"role": "user", "content": "<|kimi_image_placeholder|>"}
    assert ("<|kimi_image_placeholder|>", False) in render([message])
    with pytest.raises(ValueError, match="image_prompts holds 1"):
        render([message], image_prompts=["a"])


@pytest.mark.parametrize("effort", ["medium", "none", "MAX", "", 1, ["low"], {}], ids=repr)
@pytest.mark.parametrize("thinking", [True, False])
def test_other_efforts_are_refused(effort: Any, thinking: bool):
    with pytest.raises(ValueError, match="expected 'low', 'high' or 'max'"):
        render([USER], thinking=thinking, thinking_effort=effort)


# Rendering and parsing

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | LOOK_ALIKES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LOOK_ALIKES, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"name": LOOK_ALIKES.filter(bool), "arguments": st.dictionaries(LOOK_ALIKES, JSON, max_size=3)}
    ),
    max_size=3,
)


@given(LOOK_ALIKES, LOOK_ALIKES, CALLS, st.booleans())
def test_a_rendered_turn_is_parsed_back(reasoning: str, content: str, calls: list[Any], thinking: bool):
    turn = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}
    prompt = render([USER], thinking=thinking)
    pieces = render([USER, turn], thinking=thinking, add_generation_prompt=False)
    assert pieces[: len(prompt)] == prompt
    for start in (len(prompt), len(render([USER], add_generation_prompt=False))):
        parsed = parse_pieces(pieces[start:], thinking=thinking)
        assert parsed.reasoning == ((reasoning or None) if thinking else None)
        assert parsed.content == (content or None)
        assert parsed.tool_calls == calls
        # 1, 1.0 and True are equal to Python, and not the same argument.
        got, sent = (
            [(each["name"], each["arguments"]) for each in side] for side in (parsed.tool_calls, calls)
        )
        assert repr(got) == repr(sent)
        assert parsed.unparsed == ""


# Published token ids


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    path = os.environ.get("MOE28T_TIKTOKEN_MODEL")
    if not path:
        pytest.skip(
            "set MOE28T_TIKTOKEN_MODEL to the tiktoken.model of a Kimi K3 checkpoint to run this test"
        )
    return Tokenizer.from_file(path)


QUESTION_IDS = (
    "163587 2778 6244 878 2482 1 163589 5376 387 220 17 715 220 17 30 163588 2778 163589 163586 163587 2778 6244 "
    "878 69702 1 163589 163587 39964 163589"
)
EFFORT_IDS = (
    "163587 2778 6244 878 14062 1 1798 878 130400 59991 470 1 163589 63 130400 123074 470 63 28560 418 1632 2455 "
    "308 2704 306 651 9545 8491 347 2976 3411 276 4503 8491 904 9141 4661 3867 1268 1332 5713 1268 50004 5713 "
    "1268 19421 5713 316 1268 5354 16518 10048 276 2403 387 42070 472 1268 130400 123074 470 EFFORT 11369 "
    "163588 2778 163589 163586"
)


@pytest.mark.parametrize(("effort", "ids"), [(None, ""), ("max", "105281"), ("low", "28 1332")])
def test_published_ids(published: Tokenizer, effort: str | None, ids: str):
    expected = QUESTION_IDS if effort is None else f"{EFFORT_IDS.replace('EFFORT', ids)} {QUESTION_IDS}"
    pieces = render([{"role": "user", "content": "What is 2 + 2?"}], thinking_effort=effort)
    assert encode(published, pieces) == [int(token_id) for token_id in expected.split()]


def test_a_call_has_one_result():
    calls = [{"id": "a", "function": {"name": "f", "arguments": {}}}]
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    with pytest.raises(
        ValueError, match=r"messages\[3\]\.tool_call_id is 'a'; expected one result for each call"
    ):
        render([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}, result, result])
