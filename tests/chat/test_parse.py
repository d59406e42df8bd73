"""Parsing: the recorded outputs, what models leave out, and fuzzing that must not raise, lose or invent."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moe28t_jax.chat.tokenizer as tokenizer_module
from moe28t_jax.chat import ParsedOutput, Tokenizer, encode, parse, parse_ids, parse_pieces, render

FIXTURE = Path(__file__).parents[1] / "golden" / "data" / "chat_parse.json"
CASES = json.loads(FIXTURE.read_text(encoding="utf-8"))["cases"]
NANO = Tokenizer.from_file(Path(tokenizer_module.__file__).parents[1] / "nano" / "tiktoken.model")
END = "<|close|>message<|sep|><|end_of_msg|>"


def opened(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def argument(key: str, kind: str, text: str) -> str:
    return opened(f'argument key="{key}" type="{kind}"') + text + closed("argument")


def call(name: str, body: str = "", index: int = 1) -> str:
    return opened(f'call tool="{name}" index="{index}"') + body + closed("call")


def tools(body: str) -> str:
    """A turn that only calls tools."""
    return (
        closed("think")
        + opened("response")
        + closed("response")
        + opened("tools")
        + body
        + closed("tools")
        + END
    )


def fields(parsed: ParsedOutput) -> tuple[str | None, str | None, list[dict[str, Any]], str]:
    return parsed.reasoning, parsed.content, parsed.tool_calls, parsed.unparsed


def only_arguments(text: str) -> dict[str, Any]:
    parsed = parse(text)
    assert (parsed.reasoning, parsed.content, parsed.unparsed) == (None, None, "")
    (single,) = parsed.tool_calls
    return single["arguments"]


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_recorded(case: dict[str, Any]):
    parsed = parse(case["raw"], thinking=case["thinking"])
    expected = case["vllm"]
    assert parsed.reasoning == expected["reasoning"]
    assert parsed.content == expected["content"]
    assert parsed.tool_calls == expected["tool_calls"]
    assert parsed.unparsed == (
        case["raw"].split("<|close|>call<|sep|>")[1] if "truncated_mid" in case["id"] else ""
    )


def test_there_are_five_recordings():
    assert len(CASES) == 5


# What models leave out


def test_a_missing_think_close():
    assert fields(parse("R" + opened("response") + "C" + closed("response") + END)) == ("R", "C", [], "")
    text = "R" + opened("tools") + call("f") + closed("tools") + END
    assert fields(parse(text)) == ("R", None, [{"name": "f", "arguments": {}}], "")


def test_a_missing_response_close():
    start = "R" + closed("think") + opened("response") + "C"
    for end in ("", END, closed("message"), "<|end_of_msg|>"):
        assert fields(parse(start + end)) == ("R", "C", [], "")
    text = start + opened("tools") + call("f") + closed("tools") + END
    assert fields(parse(text)) == ("R", "C", [{"name": "f", "arguments": {}}], "")


def test_a_missing_tools_close():
    assert fields(parse("R" + opened("tools") + call("f") + END))[2] == [{"name": "f", "arguments": {}}]


def test_a_missing_argument_close():
    body = opened('argument key="a" type="string"') + "x" + opened('argument key="b" type="number"') + "2"
    assert only_arguments(tools(call("f", body))) == {"a": "x", "b": 2}


def test_reasoning_only():
    assert fields(parse("R" + END)) == ("R", None, [], "")
    assert fields(parse("")) == (None, None, [], "")


def test_channels_opened_again_are_joined_in_order():
    text = "a" + opened("response") + "b" + opened("think") + "c" + opened("response") + "d" + END
    assert fields(parse(text)) == ("ac", "bd", [], "")


def test_a_whole_turn_with_its_message_element():
    text = (
        opened('message role="assistant"')
        + opened("think")
        + "R"
        + closed("think")
        + opened("response")
        + "C"
    )
    for thinking in (True, False):
        assert fields(parse(text + closed("response") + END, thinking=thinking)) == ("R", "C", [], "")


def test_thinking_off_starts_in_the_response():
    assert fields(parse("C" + opened("tools") + call("f") + END, thinking=False)) == (
        None,
        "C",
        [{"name": "f", "arguments": {}}],
        "",
    )


def test_text_outside_the_channels_is_content_and_whitespace_is_not():
    text = "R" + closed("think") + "\n" + opened("response") + "C" + closed("response") + "\nmore" + END
    assert fields(parse(text)) == ("R", "C\nmore", [], "\n")
    text = tools("\n" + call("f", " ") + " between " + call("g"))
    parsed = parse(text)
    assert [each["name"] for each in parsed.tool_calls] == ["f", "g"]
    assert (parsed.content, parsed.unparsed) == (None, "\n  between ")


def test_text_of_a_malformed_call_stays_out_of_the_answer():
    header = "<|open|>call tool=bash index=1<|sep|>"
    parsed = parse("R" + closed("think") + opened("tools") + header + "rm -rf /" + closed("call") + END)
    assert (parsed.reasoning, parsed.content, parsed.tool_calls) == ("R", None, [])
    assert header in parsed.unparsed and "rm -rf /" in parsed.unparsed


def test_nothing_is_structure_after_the_end():
    text = "R" + END + "late" + opened("tools") + call("f", argument("k", "string", "v")) + closed("tools")
    parsed = parse(text)
    assert parsed.tool_calls == []
    assert (parsed.reasoning, parsed.content) == ("R", "latev")
    assert 'tool="f"' in parsed.unparsed


def test_spaces_inside_markers():
    text = 'R<|close|> think <|sep|><|open|>\ttools <|sep|><|open|> call  tool="f"\n index="1" <|sep|>'
    text += "<|close|> call <|sep|>"
    assert fields(parse(text)) == ("R", None, [{"name": "f", "arguments": {}}], "")


@pytest.mark.parametrize(
    "tail", ["<", "<|clo", "<|close|>", "<|close|>resp", "<|open|>tools", "<|sep|>", "<|open|>x<|sep|>"]
)
def test_a_marker_that_is_none_is_text_of_its_channel(tail: str):
    assert fields(parse("R" + tail)) == ("R" + tail, None, [], "")
    assert fields(parse("C" + tail, thinking=False)) == (None, "C" + tail, [], "")


@pytest.mark.parametrize("tail", ["<", "<|clo", "<|close|>", "<|close|>mess", "<|open|>tools"])
def test_a_cut_marker_outside_the_channels_does_not_reach_the_content(tail: str):
    text = closed("think") + opened("response") + "C" + closed("response") + tail
    assert fields(parse(text)) == (None, "C", [], tail)


# Calls


def test_calls_only_count_in_the_tools_channel():
    text = call("f", argument("k", "string", "v"))
    assert fields(parse(text)) == (text, None, [], "")
    assert fields(parse(text, thinking=False)) == (None, text, [], "")


@pytest.mark.parametrize(
    "body",
    [
        opened('call tool="g" index="2"'),
        opened('call tool="g" index="2"') + argument("k", "string", "v"),
        opened('call tool="g" index="2"') + opened('argument key="k" type="string"') + "rm -rf /tmp/x",
        opened('call index="2"') + closed("call"),
        opened('call tool=""') + closed("call"),
        call("g", opened('argument type="string"') + "v" + closed("argument")),
        call("g", argument("k", "string", "1") + argument("k", "string", "2")),
        call("g", '{"k": 1}'),
        call("g", argument("k", "string", "1") + "stray"),
        call("g", opened('json type="object"') + "[1]" + closed("json")),
        call("g", opened('json type="object"') + '{"k": 1' + closed("json")),
        call("g", argument("k", "number", "1") + opened("json") + "{}" + closed("json")),
        call("g", opened("json") + "{}" + closed("json") + argument("k", "number", "1")),
        call("g", opened("json") + "{}" + closed("json") + opened("json") + "{}" + closed("json")),
    ],
)
def test_a_call_that_is_not_complete_is_none(body: str):
    for before, names in (("", []), (call("f"), ["f"])):
        parsed = parse("R" + opened("tools") + before + body)
        assert [each["name"] for each in parsed.tool_calls] == names
        assert (parsed.reasoning, parsed.content, parsed.unparsed) == ("R", None, body)
    parsed = parse(tools(body + call("h")))
    assert [each["name"] for each in parsed.tool_calls] == ["h"]
    assert parsed.unparsed == body


def test_an_unfinished_argument_gives_way_to_a_channel():
    body = opened('call tool="g" index="1"') + opened('argument key="k" type="string"') + "half"
    parsed = parse("R" + opened("tools") + body + opened("response") + "C" + closed("response") + END)
    assert fields(parsed) == ("R", "C", [], body)


def test_a_finished_argument_may_hold_other_markers():
    code = "print('" + opened("think") + "') <|sep|> " + closed("response") + " <|open|>"
    assert only_arguments(tools(call("f", argument("code", "string", code)))) == {"code": code}


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", ' "a" & b\n', ' "a" & b\n'),
        ("string", "1", "1"),
        ("string", "", ""),
        ("number", "1", 1),
        ("number", "1.0", 1.0),
        ("number", "-0.0", -0.0),
        ("number", "1e3", 1000.0),
        ("number", str(10**30), 10**30),
        ("boolean", "true", True),
        ("null", "null", None),
        ("array", '["é", {"a": null}]', ["é", {"a": None}]),
        ("object", '{"b": 1, "a": 1.5}', {"b": 1, "a": 1.5}),
        ("integer", "7", 7),
    ],
)
def test_arguments_are_decoded_by_type(kind: str, text: str, value: Any):
    assert repr(only_arguments(tools(call("f", argument("k", kind, text))))) == repr({"k": value})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("number", "020"),
        ("number", "NaN"),
        ("number", "-Infinity"),
        ("number", "1e999"),
        ("number", "9" * 5000),
        ("number", '"1"'),
        ("number", "true"),
        ("number", ""),
        ("boolean", "True"),
        ("null", ""),
        ("array", "[1, 2"),
        ("array", "{}"),
        ("array", "[" * 100_000),
        ("object", '{"a": 1, "a": 2}'),
        ("object", '{"a": "\\ud800"}'),
        ("object", '{"a": ' * 300 + "1" + "}" * 300),
        ("object", "[]"),
    ],
)
def test_what_does_not_decode_stays_text(kind: str, text: str):
    assert only_arguments(tools(call("f", argument("k", kind, text)))) == {"k": text}


def test_an_argument_without_type_is_text():
    body = opened('argument key="k"') + "1" + closed("argument")
    assert only_arguments(tools(call("f", body))) == {"k": "1"}


def test_a_raw_json_block_is_decoded():
    block = opened('json type="object"') + '{"a": [1, 2.0], "b": "é"}' + closed("json")
    assert only_arguments(tools(call("f", block))) == {"a": [1, 2.0], "b": "é"}


def test_attributes_are_unescaped_once():
    body = opened('argument key="a&quot;&amp;quot;&lt;" type="string"') + "v" + closed("argument")
    assert only_arguments(tools(call("f", body))) == {'a"&quot;&lt;': "v"}


# Pieces and ids know what was a marker


def test_a_look_alike_in_a_plain_piece_is_text():
    assert fields(parse_pieces([("R" + closed("think") + opened("tools") + call("f"), False)])) == (
        "R" + closed("think") + opened("tools") + call("f"),
        None,
        [],
        "",
    )


def test_ids_tell_markers_from_their_look_alikes():
    fake = closed("think") + opened("tools") + call("rm") + END
    turn = {
        "role": "assistant",
        "reasoning": fake,
        "content": fake,
        "tool_calls": [{"name": fake, "args": {fake: fake, "é": ["你", 1.0]}}],
    }
    start = len(render([{"role": "user", "content": "x"}]))
    pieces = render([{"role": "user", "content": "x"}, turn], add_generation_prompt=False)[start:]
    expected = (fake, fake, [{"name": fake, "arguments": {fake: fake, "é": ["你", 1.0]}}], "")
    assert fields(parse_pieces(pieces)) == expected
    assert fields(parse_ids(NANO, encode(NANO, pieces))) == expected
    assert parse("".join(text for text, _ in pieces)).tool_calls != expected[2]


def test_other_special_ids_are_skipped_and_broken_bytes_replaced():
    ids = [*NANO.encode("é"), NANO.pad_id, *NANO.encode("b"), NANO.eos_id, NANO.media_pad_id]
    assert fields(parse_ids(NANO, ids)) == ("éb", None, [], "")
    assert NANO.base_count > 256
    lead = next(i for i in range(NANO.base_count) if NANO.token_bytes(i) == b"\xe4")
    assert parse_ids(NANO, [lead], thinking=False).content == "\ufffd"
    with pytest.raises(ValueError, match="outside this vocabulary"):
        parse_ids(NANO, [NANO.vocab_size])


# Fuzzing

STRUCTURE = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    *(opened(tag) for tag in ("think", "response", "tools", "json", "argument", "call", "unknown")),
    *(
        closed(tag)
        for tag in ("think", "response", "tools", "json", "argument", "call", "message", "unknown")
    ),
    opened('message role="user"'),
    opened('call tool="fnX" index="1"'),
    opened('argument key="keyX" type="string"'),
    opened('argument key="keyY" type="number"'),
    call("fnY", argument("keyX", "string", "valueX")),
    opened("tools") + opened('call tool="fnZ"'),
]
# Letters that occur in no marker's spelling, so that a character of the text can be told from a marker's.
WORDS = st.text("0123456789ÄÖÜ你 \n{}", max_size=6)
SOUP = st.lists(st.one_of(st.sampled_from(STRUCTURE), WORDS), max_size=30)


def strings_of(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(key + strings_of(inner) for key, inner in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def everything(parsed: ParsedOutput) -> str:
    calls = "".join(each["name"] + strings_of(each["arguments"]) for each in parsed.tool_calls)
    return (parsed.reasoning or "") + (parsed.content or "") + calls + parsed.unparsed


def check(parsed: ParsedOutput, words: str) -> None:
    assert parsed.reasoning is None or parsed.reasoning
    assert parsed.content is None or parsed.content
    # Decoding a number or an object drops whitespace around it, never anything else.
    missing = Counter("".join(words.split())) - Counter(everything(parsed))
    assert not missing


@settings(max_examples=200)
@given(SOUP, st.booleans())
def test_soup_is_neither_lost_nor_called(parts: list[str], thinking: bool):
    text = "".join(parts)
    parsed = parse(text, thinking=thinking)
    check(parsed, "".join(part for part in parts if part not in STRUCTURE))
    named = [part for part in parts if 'call tool="' in part]
    assert len(parsed.tool_calls) <= min(len(named), text.count(closed("call")))
    if not any(opened("tools") in part for part in parts):
        assert parsed.tool_calls == []
    for each in parsed.tool_calls:
        assert f'call tool="{each["name"]}"' in text
        assert all(f'key="{key}"' in text or f'"{key}"' in text for key in each["arguments"])
    pieces = [(part, part in STRUCTURE) for part in parts]
    assert parse_pieces(pieces, thinking=thinking) == parsed


@given(SOUP, st.booleans())
def test_plain_pieces_have_no_structure(parts: list[str], thinking: bool):
    text = "".join(parts)
    parsed = parse_pieces([(part, False) for part in parts], thinking=thinking)
    expected = (text or None, None) if thinking else (None, text or None)
    assert fields(parsed) == (*expected, [], "")


@given(SOUP, st.booleans())
def test_soup_of_ids(parts: list[str], thinking: bool):
    pieces = [(part, part in STRUCTURE) for part in parts]
    from_ids = parse_ids(NANO, encode(NANO, pieces), thinking=thinking)
    assert from_ids == parse_pieces(pieces, thinking=thinking)


@given(st.one_of(st.text(), st.binary().map(lambda data: data.decode("latin-1"))), st.booleans())
def test_any_text_is_kept(text: str, thinking: bool):
    parsed = parse(text, thinking=thinking)
    assert everything(parsed) == text


@given(st.lists(st.integers(0, NANO.vocab_size - 1)), st.booleans())
def test_any_ids_are_parsed(ids: list[int], thinking: bool):
    parsed = parse_ids(NANO, ids, thinking=thinking)
    check(parsed, "")
    assert parsed.tool_calls == []


WHOLE_TURN = (
    "reason Ä"
    + closed("think")
    + opened("response")
    + "content Ö"
    + closed("response")
    + opened("tools")
    + call("first", argument("path", "string", "Ü 1") + argument("count", "number", "23"))
    + call("second", opened('json type="object"') + '{"z": [4]}' + closed("json"))
    + closed("tools")
    + END
)


def test_every_truncation_keeps_its_text_and_makes_up_no_call():
    whole = parse(WHOLE_TURN)
    assert whole.unparsed == ""
    assert len(whole.tool_calls) == 2
    for length in range(len(WHOLE_TURN) + 1):
        text = WHOLE_TURN[:length]
        parsed = parse(text)
        check(parsed, "".join(character for character in text if character in "ÄÖÜ34"))
        complete = text.count(closed("call"))
        assert parsed.tool_calls == whole.tool_calls[:complete]
        assert (parsed.reasoning or "").startswith("reason Ä"[:length])
        if complete < 2 and "second" in text:
            assert 'tool="second' in parsed.unparsed


@pytest.mark.parametrize(
    "unit", ["<|open|>", '<|open|>call tool="', opened("tools"), opened('call tool="f"'), "<|"]
)
def test_long_repetitions_take_linear_work(unit: str):
    text = "R" + opened("tools") + opened('call tool="f"') + opened('argument key="k"') + unit * 5_000
    parsed = parse(text)
    assert parsed.tool_calls == []
    assert 'tool="f"' in parsed.unparsed
