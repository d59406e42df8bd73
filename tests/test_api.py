"""The public Python interface: loading, logits, generation, streaming, and what each mistake is told."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax import api


@pytest.fixture(scope="module")
def model(small_checkpoint):
    return m.load(small_checkpoint, dtype="float32", max_context=300)


PROMPT = "def f(x):"


# -- loading -----------------------------------------------------------------------------------------------------
def test_a_loaded_model_has_what_is_documented(model, small_checkpoint) -> None:
    assert model.config == m.ModelConfig.from_hf(small_checkpoint)
    assert model.tokenizer.vocab_size == model.config.vocab_size == 512
    assert (model.mesh, model.max_context) == (None, 300)
    assert isinstance(model.parameters, m.Parameters)
    assert model.parameters["embedding"].dtype == jnp.float32


def test_names_of_the_package_are_importable() -> None:
    assert dir(m) == sorted(m.__all__)
    for name in m.__all__:
        assert getattr(m, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'moe28t_jax' has no attribute 'laod'"):
        m.laod  # noqa: B018


def test_bfloat16_is_the_default_and_overrides_reach_the_configuration(small_checkpoint) -> None:
    model = m.load(str(small_checkpoint), overrides={"dsa.top_k": 3})
    assert model.parameters["embedding"].dtype == jnp.bfloat16
    assert model.config.dsa.top_k == 3
    assert model.max_context == model.config.max_context == 1024
    assert np.isfinite(model.logits([[5, 6, 7]])).all()


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"mesh": "fake"}, ValueError, r"axes data and lacks stage, .*; make one with moe28t_jax\.parallel\.make_mesh"),
    ({"dtype": "int8"}, ValueError, r"dtype is .int8.; it must be bfloat16, float32 or float64"),
    ({"dtype": "float64"}, ValueError, r"cannot be loaded as float64 while jax_enable_x64 is off; switch it on"),
    ({"max_context": 0}, ValueError, r"max_context is 0; this model allows 1 to 1024 tokens per sequence"),
    ({"max_context": 1025}, ValueError, r"max_context is 1025; this model allows 1 to 1024 tokens per sequence"),
    ({"dtype": "float16"}, ValueError, r"dtype is 'float16'; it must be bfloat16, float32 or float64"),
    ({"overrides": {"dsa.topk": 3}}, ValueError, r"The configuration has no field 'dsa\.topk'"),
])  # fmt: skip
def test_options_that_cannot_be_are_refused(small_checkpoint, options, kind, message) -> None:
    if "mesh" in options:
        options = {"mesh": jax.sharding.Mesh(np.array(jax.devices()), ("data",))}
    with pytest.raises(kind, match=message):
        m.load(small_checkpoint, **options)


def test_sources_that_cannot_be_loaded_are_refused(small_checkpoint, tmp_path) -> None:
    with pytest.raises(m.CheckpointError, match=r"'memory://bucket/absent' cannot be read"):
        m.load("memory://bucket/absent")
    with pytest.raises((ValueError, FileNotFoundError), match="absent"):
        m.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, FileNotFoundError), match=r"config\.json"):
        m.load(tmp_path / "empty")
    broken = shutil.copytree(small_checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(m.CheckpointError, match=r"model\.safetensors"):
        m.load(broken)


def test_a_vocabulary_beyond_the_models_is_refused(small_checkpoint, tmp_path) -> None:
    folder = shutil.copytree(small_checkpoint, tmp_path / "other")
    with (folder / "tiktoken.model").open("ab") as file:
        file.write(b"YWI= 256\n")
    with pytest.raises(
        ValueError, match=r"tiktoken\.model has 513 ids and the model 512; they belong to different"
    ):
        m.load(folder)


def test_a_folder_without_a_tokenizer_takes_and_gives_ids(small_checkpoint, tmp_path, model) -> None:
    folder = shutil.copytree(small_checkpoint, tmp_path / "ids")
    (folder / "tiktoken.model").unlink()
    bare = m.load(folder, dtype="float32", max_context=300)
    assert bare.tokenizer is None
    found = bare.generate(model.tokenizer.encode(PROMPT), max_new_tokens=5)
    expected = model.generate(PROMPT, max_new_tokens=5)
    assert found.text == "" and found.token_ids == expected.token_ids
    with pytest.raises(
        ValueError, match=r"has no tiktoken\.model, so text cannot be read; pass token ids or add"
    ):
        bare.generate(PROMPT)


# -- logits ------------------------------------------------------------------------------------------------------
def test_logits_take_lists_numpy_and_jax(model) -> None:
    ids = np.arange(20).reshape(2, 10)
    expected = model.logits(ids)
    assert expected.shape == (2, 10, 512) and expected.dtype == jnp.float32
    for same in (ids.tolist(), ids.astype(np.uint8), jnp.asarray(ids, jnp.int32)):
        np.testing.assert_array_equal(model.logits(same), expected)
    # One row may come without the batch axis.
    np.testing.assert_allclose(model.logits(ids[1])[0], expected[1], rtol=0, atol=2e-4)


def test_logits_of_right_padded_rows_ignore_the_padding(model) -> None:
    ids = np.random.default_rng(0).integers(0, 256, (2, 10))
    expected, found = model.logits(ids), None
    for padding in (0, 9):
        padded = np.where(np.arange(10) < [[10], [6]], ids, padding)
        found = model.logits(padded, lengths=[10, 6])
        np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=2e-4)
        np.testing.assert_allclose(found[1, :6], expected[1, :6], rtol=0, atol=2e-4)


@pytest.mark.parametrize("prefill", [1, 7, 10])
def test_logits_do_not_depend_on_how_much_is_prefilled(model, prefill) -> None:
    ids = np.random.default_rng(1).integers(0, 256, (2, 10))
    expected = model.logits(ids, lengths=[10, 6])
    found = model.logits(ids, lengths=np.array([10, 6]), prefill=prefill)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=2e-4)
    np.testing.assert_allclose(found[1, :6], expected[1, :6], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("arguments", "message"), [
    (([[1.0, 2.0]],), r"token_ids has shape \(1, 2\) and dtype float64; expected integers \[batch, tokens\]"),
    (([[]],), r"token_ids has shape \(1, 0\)"),
    ((np.zeros((0, 3), int),), r"token_ids has shape \(0, 3\)"),
    ((np.zeros((1, 1, 1), int),), r"token_ids has shape \(1, 1, 1\)"),
    (([[5, 512]],), r"token_ids holds ids outside 0\.\.511"),
    (([[-1]],), r"token_ids holds ids outside 0\.\.511"),
    ((np.zeros((1, 301), int),), r"token_ids has 301 tokens per row; the context holds 300"),
    (([[1, 2], [3]],), r"token_ids has rows of different lengths; pad them on the right"),
    (([[1, 2]], [3]), r"lengths is \[3\]; expected 1 integers between 0 and 2"),
    (([[1, 2]], [-1]), r"lengths is \[-1\]; expected 1 integers between 0 and 2"),
    (([[1, 2]], [1, 1]), r"lengths is \[1, 1\]; expected 1 integers"),
    (([[1, 2]], [1.5]), r"lengths is \[1\.5\]; expected 1 integers"),
    (([[1, 2]], None, 0), r"prefill is 0; it must be between 1 and the 2 tokens given"),
    (([[1, 2]], None, 3), r"prefill is 3; it must be between 1 and the 2 tokens given"),
])  # fmt: skip
def test_bad_logits_requests_are_refused(model, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        model.logits(*arguments)


def test_images_are_refused_in_words(model) -> None:
    with pytest.raises(
        ValueError, match="This model has no image tower, so it cannot read images; leave them"
    ):
        model.logits([[1]], images=[object()])


# -- generation --------------------------------------------------------------------------------------------------
def test_generation_reports_what_it_did(model) -> None:
    result = model.generate(PROMPT, max_new_tokens=8)
    assert isinstance(result, m.Generation)
    assert result.finish_reason == "length" and len(result.token_ids) == 8
    assert result.text == model.tokenizer.decode(result.token_ids)
    assert result.usage == m.Usage(len(PROMPT), 8) and result.usage.total_tokens == len(PROMPT) + 8
    assert (result.reasoning, result.tool_calls) == ("", [])
    assert model.generate(PROMPT, max_new_tokens=8) == result
    assert model.generate(model.tokenizer.encode(PROMPT), max_new_tokens=8) == result
    assert model.generate(np.array(model.tokenizer.encode(PROMPT)), max_new_tokens=8) == result
    assert model.generate(jnp.asarray(model.tokenizer.encode(PROMPT)), max_new_tokens=8) == result


def test_greedy_tokens_are_the_argmax_of_the_logits(model) -> None:
    ids = model.tokenizer.encode(PROMPT)
    found = model.generate(PROMPT, max_new_tokens=6).token_ids
    logits = np.asarray(model.logits([ids + found])[0])
    np.testing.assert_array_equal(logits[len(ids) - 1 : -1].argmax(axis=-1), found)


def test_seeds_repeat(model) -> None:
    texts = [model.generate(PROMPT, max_new_tokens=12, temperature=1.5, seed=s).token_ids for s in (4, 4, 5)]
    assert texts[0] == texts[1] != texts[2]


def test_generation_stops_at_the_limit_of_the_context(small_checkpoint) -> None:
    model = m.load(small_checkpoint, dtype="float32", max_context=12)
    result = model.generate(PROMPT, max_new_tokens=50)
    assert (len(result.token_ids), result.finish_reason) == (12 - len(PROMPT), "length")
    with pytest.raises(
        ValueError, match="The prompt has 12 tokens and the context holds 12; shorten it or load"
    ):
        model.generate("x" * 12)


@pytest.mark.parametrize("stop", ["[BOS]", "[EOS]", "<|end_of_msg|>"])
def test_every_end_token_of_the_vocabulary_stops(model, stop, monkeypatch) -> None:
    seen = {}

    def record(steps, prompt_ids, max_new_tokens, stop_ids, *rest):
        seen.update(stops=set(stop_ids))
        yield None, "stop"

    monkeypatch.setattr(api, "generate_ids", record)
    assert model.generate(PROMPT).finish_reason == "stop"
    assert model.tokenizer.special_ids[stop] in seen["stops"]
    assert seen["stops"] == {256, 257, 258}


def test_streamed_pieces_are_the_text_and_characters_come_whole(model, monkeypatch) -> None:
    text = "naïve 漢字 🙂!"

    def write(*_):
        yield from ((byte, None) for byte in text.encode())
        yield None, "stop"

    monkeypatch.setattr(api, "generate_ids", write)
    chunks = list(model.stream(PROMPT))
    assert [chunk.token_id for chunk in chunks] == [*text.encode(), None]
    assert [chunk.text for chunk in chunks if chunk.text] == list(text)
    assert [chunk.finish_reason for chunk in chunks] == [None] * len(text.encode()) + ["stop"]
    assert model.generate(PROMPT).text == text


def test_a_character_cut_by_the_limit_becomes_a_replacement(model, monkeypatch) -> None:
    def write(*_):
        yield from ((byte, None) for byte in b"ok \xe6\xbc")
        yield None, "length"

    monkeypatch.setattr(api, "generate_ids", write)
    chunks = list(model.stream(PROMPT))
    assert "".join(chunk.text for chunk in chunks[:-1]) == "ok "
    last = chunks[-1]
    assert (last.text, last.token_id, last.finish_reason, last.channel) == (
        "\ufffd",
        None,
        "length",
        "content",
    )
    assert last.result.text == "ok \ufffd" and chunks[0].result is None


def test_streaming_equals_generating(model) -> None:
    options = {"max_new_tokens": 40, "temperature": 2.0, "seed": 1}
    chunks, whole = list(model.stream(PROMPT, **options)), model.generate(PROMPT, **options)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.token_id for chunk in chunks[:-1]] == whole.token_ids
    # Random bytes are often no UTF-8: the case is not empty.
    assert "\ufffd" in whole.text


def test_a_prompt_of_several_chunks_gives_what_one_chunk_gives(model) -> None:
    prompt = ("for i in range(10): print(i)\n" * 6)[:150]
    expected = model.generate(prompt, max_new_tokens=4)
    chunked = api.Model(model.config, model.parameters, model.tokenizer, 300)
    chunked.steps.chunk = 64
    assert chunked.generate(prompt, max_new_tokens=4) == expected


@pytest.mark.parametrize(("prompt", "options", "kind", "message"), [
    ("", {}, ValueError, r"The prompt has no tokens; give at least one character or token id"),
    ([], {}, ValueError, r"The prompt has no tokens and no messages; give at least one token id, or a message"),
    ("x", {"max_new_tokens": True}, ValueError, r"max_new_tokens is True; it must be a whole number: pass one such"),
    ([512], {}, ValueError, r"Token id 512 is outside the vocabulary of 512 ids"),
    ("x" * 300, {}, ValueError, r"The prompt has 300 tokens and the context holds 300; shorten it or load the model"),
    ("x", {"max_new_tokens": 0}, ValueError, r"max_new_tokens is 0; it must be at least 1"),
    ("x", {"temperature": -1.0}, ValueError, r"temperature is -1\.0; it must be 0 \(greedy\) to 1e\+06"),
    ("x", {"top_p": 0.0}, ValueError, r"top_p is 0\.0; it must be above 0 and at most 1"),
    ("x", {"effort": "high"}, ValueError, r"effort, .* and images belong to conversations .* pass messages such as"),
    ("x", {"tools": []}, ValueError, r"tools, .* belong to conversations"),
    ("x", {"images": []}, ValueError, r"images belong to conversations"),
    ("x", {"thinking": False}, ValueError, r"thinking, .* belong to conversations"),
])  # fmt: skip
def test_bad_generation_requests_are_refused(model, prompt, options, kind, message) -> None:
    with pytest.raises(kind, match=message):
        model.generate(prompt, **options)


@pytest.mark.parametrize("prompt", [np.array([1.5, 2.0]), b"ab", np.array([[1, 2]])])
def test_prompts_are_text_or_whole_numbers(model, prompt) -> None:
    with pytest.raises(
        ValueError, match=r"The prompt is .* of shape .*; give a text or one row of whole-number"
    ):
        model._prompt_ids(prompt)


def test_load_names_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="dtype is 'foo'; it must be bfloat16, float32 or float64"):
        api.load("nano", dtype="foo")
