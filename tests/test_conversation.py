"""Conversations through the Python interface: what the model is shown, and what becomes of what it writes."""

import base64
import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from PIL import Image

import moe28t_jax as m
from moe28t_jax import api
from moe28t_jax.chat import encode, image_prompt, render
from moe28t_jax.config.model_config import VisionConfig
from moe28t_jax.conversation import image_source, prepare_conversation, read_conversation, with_images
from moe28t_jax.model import initialize

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
FORCED = {"tools": TOOLS, "tool_choice": "required"}
AS_JSON = {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def model(small_checkpoint):
    return m.load(small_checkpoint, dtype="float32", overrides={"max_context": 4096})


@pytest.fixture
def script(model, monkeypatch):
    """Make the model write given pieces: script(pieces, reason) returns the list of prompts it was shown."""

    def prepare(pieces, reason="stop"):
        shown = []

        def write(steps, prompt_ids, max_new_tokens, *rest, **named):
            shown.append((list(prompt_ids), max_new_tokens, rest, named))
            yield from ((token, None) for token in encode(model.tokenizer, pieces))
            yield None, reason

        monkeypatch.setattr(api, "generate_ids", write)
        return shown

    return prepare


def turn(message, thinking=True, cut=0):
    """A turn as a model writes it, without the end of the message, which is never yielded."""
    start = len(render(HELLO, thinking=thinking))
    pieces = render([*HELLO, message], thinking=thinking, add_generation_prompt=False)[start:-1]
    return pieces[: len(pieces) - cut]


CALLS = {
    "role": "assistant", "reasoning": "Überlege", "content": "Calling.",
    "tool_calls": [{"name": "add", "args": {"a": 1, "b": 2.0}}, {"name": "add", "args": {}}],
}  # fmt: skip


# -- what goes in --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("options", "rendered"), [
    ({}, {"thinking_effort": "max"}),
    ({"effort": "low"}, {"thinking_effort": "low"}),
    ({"effort": "none"}, {"thinking": False}),
    ({"thinking": False}, {"thinking": False}),
    ({"effort": "none", "thinking": False}, {"thinking": False}),
    (FORCED, {"thinking_effort": "max", **FORCED}),
    (AS_JSON, {"thinking_effort": "max", **AS_JSON}),
])  # fmt: skip
def test_the_prompt_is_the_rendered_conversation(model, script, options, rendered) -> None:
    shown = script([("x", False)])
    expected = encode(model.tokenizer, render(HELLO, **rendered))
    result = model.generate(HELLO, **options)
    assert shown[0][0] == expected and shown[0][1] == api.CONVERSATION_TOKENS and shown[0][3] == {}
    # The three tokens that open the answer are not counted.
    assert model.count_tokens(HELLO, **options) == len(expected) - 3 == result.usage.prompt_tokens


def test_a_whole_request_is_read_and_options_beside_it_add_to_it(model, script) -> None:
    shown = script([("x", False)])
    body = {
        "messages": HELLO,
        "tools": TOOLS,
        "reasoning_effort": "low",
        "model": "any",
        "n": 1,
        "stop": None,
    }
    model.generate(body)
    assert shown[0][0] == encode(model.tokenizer, render(HELLO, tools=TOOLS, thinking_effort="low"))
    model.generate({"messages": HELLO}, tools=TOOLS, effort="low")
    assert shown[1][0] == shown[0][0]
    assert body == {
        "messages": HELLO, "tools": TOOLS, "reasoning_effort": "low", "model": "any", "n": 1, "stop": None
    }  # fmt: skip
    for ask in (model.generate, lambda body: list(model.stream(body))):
        with pytest.warns(UserWarning, match=r"no effect there: n, stop, temperature\. \(max_new"):
            ask({**body, "temperature": 0.3, "n": 2, "stop": ["x"]})
    assert shown[-1][0] == shown[0][0]


@pytest.mark.parametrize(("prompt", "options", "message"), [
    (HELLO, {"effort": "medium"}, r"effort is 'medium'; expected 'low', 'high', 'max' or 'none': use one of these"),
    (HELLO, {"effort": "low", "thinking": False}, r"effort is 'low' with thinking=False; leave out one of the two"),
    (HELLO, {"tool_choice": "required"}, r"tool_choice is 'required'; expected tools to choose from"),
    ({"messages": HELLO, "tools": TOOLS}, {"tools": TOOLS}, r"tools is given in the request and beside it"),
    ({"messages": HELLO, "thinking_budget": "low"}, {"effort": "low"}, r"beside a request that holds thinking_budget"),
    ({"messages": HELLO, "reasoning_effort": "low"}, {"thinking": False}, r"request that holds reasoning_effort"),
    ({"nothing": 1}, {}, r"messages is None; expected a list of at least one message"),
    ([{"role": "robot", "content": "x"}], {}, r"messages\[0\]\.role is 'robot'; expected system"),
    (HELLO, {"images": "a.png"}, r"images is a str; expected a list of images: put the image into one"),
    ([{"role": "system", "content": "x"}], {"images": [b"x"]}, r"last user message and there is none; add a user"),
    (HELLO, {"images": [b"x"]}, r"This model has no image tower, so it cannot read images; leave them out or load"),
    ("x", {"tool_choice": "auto"}, r"tool_choice, .* belong to conversations and the prompt is a text; pass messages"),
])  # fmt: skip
def test_what_cannot_be_asked_is_said(model, prompt, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, **options)
    with pytest.raises(ValueError, match=message):
        model.count_tokens(prompt, **options)


def test_a_folder_without_a_tokenizer_has_no_conversations(model) -> None:
    bare = api.Model(model.config, model.parameters)
    with pytest.raises(
        ValueError, match=r"has no tiktoken\.model, so conversations cannot be read; add the file"
    ):
        bare.generate(HELLO)


def test_a_text_and_ids_can_be_counted(model) -> None:
    assert model.count_tokens("abc") == model.count_tokens([1, 2, 3]) == 3


def test_images_go_before_the_text_of_the_last_user_message() -> None:
    messages = [
        *HELLO,
        {"role": "assistant", "content": "Hi"},
        *HELLO,
        {"role": "assistant", "content": "Yes"},
    ]
    found = with_images(messages, ["a", "b"])
    parts = [
        {"type": "image", "image": "a"},
        {"type": "image", "image": "b"},
        {"type": "text", "text": "Hello"},
    ]
    assert found[2]["content"] == parts and messages[2]["content"] == "Hello"
    assert [found[i] for i in (0, 1, 3)] == [messages[i] for i in (0, 1, 3)]
    assert image_source({"type": "image_url", "image_url": {"url": "u"}}) == "u"
    assert (
        image_source({"type": "image_url", "image_url": "u"})
        == image_source({"type": "image", "image": "u"})
        == "u"
    )
    with pytest.raises(ValueError, match="An image part has no url"):
        image_source({"type": "image_url", "image_url": {"detail": "low"}})


# -- what comes out ------------------------------------------------------------------------------------------------
def test_an_answer_is_taken_apart(model, script) -> None:
    script(turn(CALLS))
    result = model.generate(HELLO, tools=TOOLS)
    assert (result.reasoning, result.text, result.finish_reason) == ("Überlege", "Calling.", "tool_calls")
    assert result.tool_calls == [
        {"name": "add", "arguments": {"a": 1, "b": 2.0}},
        {"name": "add", "arguments": {}},
    ]
    assert result.unparsed == ""
    # Ü is two tokens of this vocabulary; <|close|>, think and <|sep|> end the channel.
    assert result.usage.reasoning_tokens == len("Überlege".encode()) + 1 + len("think") + 1
    assert result.usage.completion_tokens == len(result.token_ids)


def test_a_loop_over_tools_is_two_lines(model, script) -> None:
    messages = list(HELLO)
    for _ in range(2):
        shown = script(turn(CALLS))
        result = model.generate(messages, tools=TOOLS)
        messages.append(result.message)
        messages += [{"role": "tool", "content": str(call["arguments"])} for call in result.tool_calls]
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(ids) == 4 and len(set(ids)) == 4
    # What was written is what is shown again: ids of the replayed turn are those that were generated.
    model.generate(messages, tools=TOOLS)
    prompt = shown[-1][0]
    generated = encode(model.tokenizer, turn(CALLS))
    assert any(prompt[i : i + len(generated)] == generated for i in range(len(prompt)))
    json.dumps(messages)


def test_a_turn_that_is_cut_is_no_call_and_loses_nothing(model, script) -> None:
    script(turn(CALLS, cut=8), "length")
    result = model.generate(HELLO, tools=TOOLS)
    assert result.finish_reason == "length" and len(result.tool_calls) == 1
    assert 'call tool="add" index="2"' in result.unparsed
    script([("half a thou", False)], "length")
    result = model.generate(HELLO)
    assert (result.reasoning, result.text, result.finish_reason) == ("half a thou", "", "length")
    assert result.message == {"role": "assistant", "content": None, "reasoning_content": "half a thou"}


def test_without_thinking_everything_is_the_answer(model, script) -> None:
    script(turn({"role": "assistant", "content": "Hi"}, thinking=False))
    result = model.generate(HELLO, effort="none")
    assert (result.text, result.reasoning, result.usage.reasoning_tokens) == ("Hi", "", 0)


def test_chunks_are_the_answer_piece_by_piece(model, script) -> None:
    script(turn(CALLS))
    chunks = list(model.stream(HELLO, tools=TOOLS))
    result = chunks[-1].result
    assert result == model.generate(HELLO, tools=TOOLS)
    assert [c.token_id for c in chunks if c.token_id is not None] == result.token_ids
    for channel, text in (("reasoning", result.reasoning), ("content", result.text)):
        pieces = [c.text for c in chunks if c.channel == channel and c.text]
        assert "".join(pieces) == text and pieces == list(text)
    assert [c.tool_call for c in chunks if c.tool_call] == result.tool_calls
    assert all(c.channel == "tool_call" for c in chunks if c.tool_call)
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]
    assert all(c.result is None for c in chunks[:-1])


def test_a_model_says_what_it_is(model) -> None:
    total = model.config.parameter_count().total
    assert repr(model) == f"Model('small', {total:,} parameters, context 4,096, float32)"


# -- images --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def seeing(model):
    vision = VisionConfig(
        num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, qkv_size=16, position_height=4
    )  # fmt: skip
    config = dataclasses.replace(model.config, vision=vision)
    return api.Model(config, initialize(config, jax.random.key(1)), model.tokenizer)


def picture(seed, size=(28, 56)):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def test_images_in_parts_and_beside_the_messages_are_the_same(seeing, tmp_path) -> None:
    data = png(picture(0))
    (tmp_path / "a.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    text = {"type": "text", "text": "What?"}
    sources = [
        {"type": "image", "image": data},
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": picture(0)},
    ]
    expected = seeing.generate([{"role": "user", "content": "What?"}], images=[data], max_new_tokens=4)
    assert expected.finish_reason == "length" and len(expected.token_ids) == 4
    assert expected.usage.completion_tokens == expected.usage.reasoning_tokens == 4
    for part in sources:
        message = {"role": "user", "content": [part, text]}
        assert seeing.generate([message], max_new_tokens=4) == expected
    pieces = render([message], thinking_effort="max", image_prompts=[image_prompt((56, 28), 2)])
    assert seeing.count_tokens([message]) == expected.usage.prompt_tokens
    assert (
        encode(seeing.tokenizer, pieces) == seeing._prompt([message], *[None] * 3, True, None, None).token_ids
    )


def test_what_is_generated_follows_the_logits_and_the_picture(seeing) -> None:
    messages = [{"role": "user", "content": "What?"}]
    images = [picture(0), picture(1, (56, 56))]
    ids = seeing._prompt(messages, None, None, images, True, None, None).token_ids
    assert ids.count(seeing.config.media_pad_id) == 2 + 4
    found = seeing.generate(messages, images=images, max_new_tokens=4).token_ids
    logits = np.asarray(seeing.logits([ids + found], images=images)[0])
    np.testing.assert_array_equal(logits[len(ids) - 1 : -1].argmax(axis=-1), found)
    swapped = np.asarray(seeing.logits([ids + found], images=[picture(2), images[1]])[0])
    pad = ids.index(seeing.config.media_pad_id)
    np.testing.assert_array_equal(swapped[:pad], logits[:pad])
    assert np.abs(swapped[pad:] - logits[pad:]).max() > 1e-3


def test_logits_with_images_do_not_depend_on_how_much_is_prefilled(seeing) -> None:
    pad = seeing.config.media_pad_id
    # The pads of both rows are read row by row; those beyond a length are padding and no image.
    ids = np.array([[5, pad, pad, 6, 7], [pad, 8, pad, pad, pad]])
    images = [picture(0), picture(1)]
    expected = np.asarray(seeing.logits(ids, lengths=[5, 3], images=images))
    found = np.asarray(seeing.logits(ids, lengths=[5, 3], prefill=2, images=images))
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=2e-4)
    np.testing.assert_allclose(found[1, :3], expected[1, :3], rtol=0, atol=2e-4)
    with pytest.raises(
        ValueError, match="token_ids holds 6 media pads and the images have 4 tokens; write one pad"
    ):
        seeing.logits(ids, images=images)


def test_a_tower_that_was_not_loaded_is_named(seeing) -> None:
    blind = api.Model(seeing.config, seeing.parameters.text_only(), seeing.tokenizer)
    with pytest.raises(
        ValueError, match=r"hold no image tower \(.* loaded with vision=False\), so they cannot"
    ):
        blind.generate(HELLO, images=[picture(0)])


@pytest.mark.parametrize(("messages", "message"), [
    ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5; expected text or a list of parts"),
    ([{"role": "user", "content": {"type": "text"}}], r"messages\[0\]\.content is .*; expected text or a list"),
    ([{"role": "user"}], r"messages\[0\]\.content is None; expected text or a list of parts"),
    ([5, *HELLO], r"messages\[0\] is 5; expected an object"),
    ("Hello", r"messages is 'Hello'; expected a list of at least one message"),
])  # fmt: skip
def test_messages_are_checked_before_images_are_put_into_them(messages, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        with_images(messages, [b"x"])
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_paths_of_somebody_elses_conversation_can_be_refused(seeing, tmp_path) -> None:
    data = png(picture(0))
    (tmp_path / "a.png").write_bytes(data)
    paths, urls = (
        read_conversation(HELLO, images=[source])
        for source in (
            str(tmp_path / "a.png"),
            f"data:image/png;base64,{base64.b64encode(data).decode()}",
        )
    )
    prepared = [
        prepare_conversation(request, seeing.tokenizer, seeing.config, allow_paths=allowed).token_ids
        for request, allowed in ((paths, True), (urls, False))
    ]
    assert prepared[0] == prepared[1]
    assert prepare_conversation(paths, seeing.tokenizer, seeing.config).token_ids == prepared[0]
    with pytest.raises(ValueError, match="paths are not read here; pass a data URL"):
        prepare_conversation(paths, seeing.tokenizer, seeing.config, allow_paths=False)
