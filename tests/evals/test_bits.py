"""Bits per byte against likelihoods added up from logits."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax.api import Model
from moe28t_jax.evals import FileScore, bits, score_texts
from moe28t_jax.parallel import make_mesh


@pytest.fixture(scope="module")
def model(small_checkpoint):
    return m.load(small_checkpoint, dtype="float32", max_context=600)


def expected_bits(model, text):
    """-log2 p of every token after the ones before it and a beginning-of-text token, from whole-row logits."""
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode(text)]
    logits = np.asarray(model.logits([ids])[0], np.float64)
    peak = logits.max(axis=-1)
    log_sum = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=-1))
    return sum(log_sum[t] - logits[t, ids[t + 1]] for t in range(len(ids) - 1)) / math.log(2)


TEXTS = [
    ("code", "def f(x):\n    return x + 1\n"),
    ("one", "a"),
    ("wide", "漢字 🙂 naïve"),
    ("long", "ab cd " * 24),
]


def test_scores_are_the_likelihoods_of_the_tokens(model) -> None:
    reports = []
    scores = score_texts(model, TEXTS, batch=3, on_tokens=reports.append)
    assert [score.name for score in scores] == [name for name, _ in TEXTS]
    for score, (_, text) in zip(scores, TEXTS, strict=True):
        assert isinstance(score, FileScore)
        # This vocabulary has one token per byte.
        assert score.num_bytes == score.num_tokens == len(text.encode())
        np.testing.assert_allclose(score.bits, expected_bits(model, text), rtol=1e-4)
        assert score.bits_per_byte == score.bits / len(text.encode())
    assert sum(reports) == sum(score.num_tokens for score in scores)


@pytest.mark.slow
def test_chunks_and_batches_do_not_change_the_score(model, monkeypatch) -> None:
    expected = score_texts(model, TEXTS, batch=4)
    monkeypatch.setattr(bits, "_CHUNK", 64)
    for batch, order in ((4, 1), (2, -1)):
        found = score_texts(model, TEXTS[::order], batch=batch)[::order]
        for a, b in zip(found, expected, strict=True):
            assert (a.name, a.num_bytes, a.num_tokens) == (b.name, b.num_bytes, b.num_tokens)
            np.testing.assert_allclose(a.bits, b.bits, rtol=1e-4)


def test_a_text_may_fill_the_context_and_not_exceed_it(model) -> None:
    small = Model(model.config, model.parameters, model.tokenizer, 64)
    [score] = score_texts(small, [("full", "x" * 64)], batch=1)
    np.testing.assert_allclose(score.bits, expected_bits(model, "x" * 64), rtol=1e-4)
    with pytest.raises(
        ValueError, match="'over' has 65 tokens and the context holds 64; split the text or load"
    ):
        score_texts(small, [("full", "x" * 64), ("over", "x" * 65)])


def test_texts_that_cannot_be_scored_are_refused(model) -> None:
    with pytest.raises(ValueError, match="'empty' is empty; bits per byte need at least one byte"):
        score_texts(model, [("full", "x"), ("empty", "")])
    bare = Model(model.config, model.parameters)
    with pytest.raises(ValueError, match="This checkpoint folder has no tokenizer, so text cannot be scored"):
        score_texts(bare, [("full", "x")])


def test_a_model_on_a_mesh_is_scored_on_it(model, monkeypatch) -> None:
    mesh = make_mesh({})
    placed = Model(model.config, model.parameters, model.tokenizer, 64, mesh)
    called = []

    def chunk(leaves, structure, token_ids, targets, lengths, cache, config):
        called.append(jax.sharding.get_abstract_mesh())
        assert structure == jax.tree.structure(model.parameters.text_only())
        return lengths / 2, cache

    monkeypatch.setattr(bits, "_chunk_bits", chunk)
    assert [score.bits for score in score_texts(placed, TEXTS[:2], batch=3)] == [13.5, 0.5]
    assert called == [mesh.abstract_mesh]


def test_nothing_to_score_is_an_empty_list(model) -> None:
    assert score_texts(model, []) == []


def test_a_score_is_a_value() -> None:
    score = FileScore("a", 4, 2, 10.0)
    assert score.bits_per_byte == 2.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        score.bits = 1.0  # pyright: ignore[reportAttributeAccessIssue]
