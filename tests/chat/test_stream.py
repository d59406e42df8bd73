"""The streaming parser gives what the complete parser gives, whatever the ids and however they are split."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moe28t_jax.chat.stream as stream_module
import moe28t_jax.chat.tokenizer as tokenizer_module
from moe28t_jax.chat import (
    ParsedOutput,
    StreamEvent,
    StreamParser,
    Tokenizer,
    encode,
    normalize_messages,
    parse_ids,
    parse_pieces,
    render,
)

NANO = Tokenizer.from_file(Path(tokenizer_module.__file__).parents[1] / "nano" / "tiktoken.model")
BYTES = {NANO.token_bytes(i): i for i in range(NANO.base_count)}
MARKERS = [NANO.special_ids[name] for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")]


def byte_ids(text: str) -> list[int]:
    """One token per byte, so that every split of the text can occur."""
    return [BYTES[bytes([value])] for value in text.encode()]


def ids_of(pieces: list[tuple[str, bool]]) -> list[int]:
    return [i for text, special in pieces for i in (NANO.encode(text, True) if special else byte_ids(text))]


def opened(tag: str) -> list[tuple[str, bool]]:
    return [("<|open|>", True), (tag, False), ("<|sep|>", True)]


def closed(tag: str) -> list[tuple[str, bool]]:
    return [("<|close|>", True), (tag, False), ("<|sep|>", True)]


def stream(ids: list[int], thinking: bool, sizes: Any = None) -> tuple[ParsedOutput, list[StreamEvent]]:
    """Push the ids in groups of the given sizes (default one by one) and end."""
    parser = StreamParser(NANO, thinking)
    events: list[StreamEvent] = []
    start = 0
    while start < len(ids):
        count = 1 if sizes is None else next(sizes)
        events += parser.push(ids[start : start + count])
        start += count
    events += parser.flush()
    assert parser.flush() == []
    return parser.output, events


def check_same(ids: list[int], thinking: bool, sizes: Any = None) -> ParsedOutput:
    """The output and the joined events equal the complete parser's."""
    expected = parse_ids(NANO, ids, thinking)
    output, events = stream(ids, thinking, sizes)
    assert output == expected
    for channel, text in (("reasoning", expected.reasoning), ("content", expected.content)):
        assert "".join(e.text for e in events if e.channel == channel) == (text or "")
    assert [e.tool_call for e in events if e.channel == "tool_call"] == expected.tool_calls
    for event in events:
        assert (event.tool_call is None) == (event.channel != "tool_call") == bool(event.text)
    return output


# -- a well-formed turn ------------------------------------------------------------------------------------------
TURN = {
    "role": "assistant",
    "reasoning": "Überlege 漢字 🙂 <|close|>think<|sep|>",
    "content": "C & <|open|>tools<|sep|>",
    "tool_calls": [
        {"name": "f", "args": {"a": "x <|close|>argument<|sep|>", "n": 1.0}},
        {"name": "g", "args": {}},
    ],
}


def turn_pieces(turn: dict[str, Any], thinking: bool = True) -> list[tuple[str, bool]]:
    """A rendered turn as a model writes it, after the generation prompt."""
    before = [{"role": "user", "content": "x"}]
    start = len(render(before, thinking=thinking))
    return render([*before, turn], thinking=thinking, add_generation_prompt=False)[start:]


def test_a_turn_comes_out_as_it_is_written() -> None:
    ids = encode(NANO, turn_pieces(TURN))
    output = check_same(ids, True)
    assert output == ParsedOutput(
        TURN["reasoning"], TURN["content"],
        [{"name": c["name"], "arguments": c["args"]} for c in TURN["tool_calls"]], "",
    )  # fmt: skip
    _, events = stream(ids, True)
    assert events[0] == StreamEvent("reasoning", "Ü") and len(events) > 10
    assert [event.channel for event in events][-2:] == ["tool_call", "tool_call"]
    whole, joined = StreamParser(NANO), []
    joined += whole.push(ids) + whole.flush()
    assert [event.channel for event in joined] == ["reasoning", "content", "tool_call", "tool_call"]


def test_text_is_not_held_back_and_characters_come_whole() -> None:
    parser = StreamParser(NANO, thinking=False)
    assert parser.channel == "content"
    seen = [[event.text for event in parser.push(i)] for i in byte_ids("a é\n<|")]
    assert seen == [["a"], [" "], [], ["é"], ["\n"], ["<"], ["|"]]
    # A marker that can no longer become an element is text at once.
    for i in ids_of([("<|open|>", True), ("too", False)]):
        assert parser.push(i) == []
    assert parser.push(byte_ids("l")) == []
    assert parser.push(byte_ids(" ")) == [StreamEvent("content", "<|open|>tool ")]


def test_the_channel_is_known_while_streaming() -> None:
    parser = StreamParser(NANO)
    seen = []
    for i in ids_of([("R", False), *closed("think"), *opened("response"), ("C", False), *opened("tools")]):
        parser.push(i)
        seen.append(parser.channel)
    assert list(dict.fromkeys(seen)) == ["reasoning", None, "content", "tool_call"]
    parser.push(MARKERS[3])
    assert parser.channel is None


def test_a_finished_call_comes_at_once_and_an_unfinished_one_never() -> None:
    start = [*closed("think"), *opened("tools"), *opened('call tool="f"'), *opened('argument key="k"')]
    parser = StreamParser(NANO)
    assert parser.push(ids_of([*start, ("v", False), *closed("argument")])) == []
    assert parser.push(ids_of(closed("call"))) == [
        StreamEvent("tool_call", tool_call={"name": "f", "arguments": {"k": "v"}})
    ]
    parser = StreamParser(NANO)
    assert parser.push(ids_of([*start, ("v", False)])) == parser.flush() == []
    assert parser.output.tool_calls == [] and parser.output.unparsed.endswith('key="k"<|sep|>v')


def test_pushing_after_the_end_or_an_unknown_id_is_refused() -> None:
    parser = StreamParser(NANO)
    with pytest.raises(ValueError, match="outside this vocabulary"):
        parser.push(NANO.vocab_size)
    parser.flush()
    with pytest.raises(ValueError, match=r"was ended by flush\(\); make a new StreamParser"):
        parser.push(5)


# -- anything ----------------------------------------------------------------------------------------------------
TAGS = ("think", "response", "tools", "message", "call", "argument", "json", "unknown", "thi nk", "")
HEADERS = (
    'call tool="f" index="1"', 'call tool=""', 'argument key="k" type="string"', 'argument key="n" type="number"',
    'argument type="string"', 'message role="assistant"', ' think ', 'json type="object"', 'call tool="f" tool="g"',
)  # fmt: skip
SOUP = st.lists(
    st.one_of(
        st.sampled_from([opened(tag) for tag in (*TAGS, *HEADERS)]),
        st.sampled_from([closed(tag) for tag in (*TAGS, *HEADERS[:2])]),
        st.sampled_from([[(name, True)] for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[PAD]")]),
        st.sampled_from([[(text, False)] for text in ("<", "<|", "<|close|>", " ", "\n", "x", "é漢", '{"a": 1}', "1")]),
        st.text(max_size=5).map(lambda text: [(text, False)]),
    ),
    max_size=25,
)  # fmt: skip
TOOLS_SOUP = SOUP.map(lambda parts: [closed("think"), opened("tools"), opened(HEADERS[0]), *parts])


@settings(max_examples=120)
@given(st.one_of(SOUP, TOOLS_SOUP), st.booleans(), st.integers(0, 2**32))
def test_marker_soup_is_read_as_the_complete_parser_reads_it(parts: list, thinking: bool, seed: int) -> None:
    ids = ids_of([piece for part in parts for piece in part])
    generator = random.Random(seed)
    check_same(ids, thinking)
    check_same(ids, thinking, iter(lambda: generator.randint(1, 9), 0))


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(0, NANO.vocab_size - 1), st.sampled_from(MARKERS)), max_size=60),
    st.booleans(),
)
def test_any_ids_are_read_as_the_complete_parser_reads_them(ids: list[int], thinking: bool) -> None:
    check_same(ids, thinking)


@settings(max_examples=50)
@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_kept(data: bytes, thinking: bool) -> None:
    output = check_same([BYTES[bytes([value])] for value in data], thinking)
    assert (output.reasoning if thinking else output.content) == (data.decode("utf-8", "replace") or None)


def test_every_truncation_is_read_as_the_complete_parser_reads_it() -> None:
    ids = encode(NANO, turn_pieces(TURN))
    whole = parse_ids(NANO, ids)
    for length in range(len(ids) + 1):
        output = check_same(ids[:length], True)
        assert output.tool_calls == whole.tool_calls[: len(output.tool_calls)]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=5,
)  # fmt: skip
TEXT = st.one_of(st.text(max_size=20), st.sampled_from(["<|close|>think<|sep|>", "<|open|>", " \n", "<|"]))
NAME = st.text(min_size=1, max_size=8)
CALL = st.fixed_dictionaries({"name": NAME, "arguments": st.dictionaries(NAME, JSON, max_size=3)})
CALLS = st.lists(CALL, max_size=3)


@settings(max_examples=50)
@given(TEXT, TEXT, CALLS, st.booleans())
def test_parsing_undoes_rendering(reasoning: str, content: str, calls: list, thinking: bool) -> None:
    turn = {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": calls}
    pieces = turn_pieces(turn, thinking)
    output = parse_pieces(pieces, thinking)
    assert output.reasoning == ((reasoning or None) if thinking else None)
    assert output.content == (content or None)
    expected = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    assert repr(output.tool_calls) == repr(expected) and output.unparsed == ""
    assert check_same(encode(NANO, pieces), thinking) == output
    # What was parsed can be appended to the messages and renders to the same turn again.
    again = {
        "role": "assistant",
        "reasoning": output.reasoning,
        "content": output.content,
        "tool_calls": calls,
    }
    assert encode(NANO, turn_pieces(normalize_messages([again])[0], thinking)) == encode(NANO, pieces)


# -- work --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "unit",
    [
        [("<|open|>", True)],
        opened("tools"),
        opened('call tool="f"'),
        opened('argument key="k"'),
        [*opened("tools"), *opened('call tool="f"'), *opened('argument key="k"')],
        [*opened('argument key="k"'), *opened("tools")],
        [(" ", False)],
        [("<|", False)],
    ],
)
def test_work_per_token_is_bounded(unit: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the output takes at most a little more than twice the steps, counted in events handled."""
    count = 0
    original = StreamParser._event

    def counting(self: StreamParser, event: Any) -> None:
        nonlocal count
        count += 1
        original(self, event)

    monkeypatch.setattr(StreamParser, "_event", counting)
    steps = []
    for repeats in (60, 120):
        count = 0
        prefix = [*closed("think"), *opened("tools"), *opened('call tool="f"'), *opened('argument key="k"')]
        ids = ids_of([*prefix, *unit * repeats])
        check_same(ids, True)
        steps.append(count / len(ids))
    assert steps[1] <= steps[0] * 1.1 + 0.1 and steps[1] <= 3


def test_a_long_inside_of_a_marker_is_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = stream_module._element

    def counting(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*arguments)

    monkeypatch.setattr(stream_module, "_element", counting)
    check_same(
        ids_of([("<|open|>", True), ('call tool="' + "x" * 3000 + '"', False), ("<|sep|>", True)]), True
    )
    assert calls == 1
