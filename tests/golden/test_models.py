"""Whole models against recorded logits, residual sums, experts, index sets and greedy continuations."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax.engine import generate_ids
from moe28t_jax.model import Inputs, project_logits, run
from moe28t_jax.weights import load_parameters
from tests.golden import fixtures
from tests.golden.fixtures import DATA, LOGITS_TOLERANCE, MODELS, assert_close, difference, read

pytestmark = pytest.mark.golden

INVISIBLE = np.float32(-1e30)
EVERYTHING = frozenset({"partial_sums", "router", "index_sets", "index_scores", "index_keys"})


@pytest.fixture(scope="module")
def load():
    return functools.cache(lambda name: m.load(DATA / name, dtype="float32"))


def recorded_rows(name: str) -> SimpleNamespace:
    """All sequences of a recording as one right-padded batch: the long one first, then the ragged batch.

    `logits` has one array per row, cut to the row's length.
    """
    golden, meta = read(f"{name}/golden")
    ids, logits = golden["input_ids"], [golden["logits_prefill"][0]]
    lengths = [ids.shape[1]]
    if "batch_input_ids" in golden:
        more = golden["batch_input_ids"]
        assert more.shape[1] <= ids.shape[1]
        ids = np.concatenate([ids, np.pad(more, ((0, 0), (0, ids.shape[1] - more.shape[1])))])
        for row, length in enumerate(golden["batch_lengths"].tolist()):
            lengths.append(length)
            logits.append(golden["batch_logits"][row, :length])
    return SimpleNamespace(
        golden=golden, ids=ids, lengths=lengths, logits=logits, prefill=meta["prefill_len"]
    )


def assert_logits(actual: Any, expected: Any, tolerance: float, what: str) -> None:
    """Within the tolerance, and the same argmax wherever the two best tokens are further apart than that."""
    assert_close(actual, expected, tolerance, what)
    best = np.sort(expected, axis=-1)
    clear = best[..., -1] - best[..., -2] > tolerance
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(np.argmax(actual, axis=-1)[clear], np.argmax(expected, axis=-1)[clear])


@pytest.mark.parametrize("name", MODELS)
def test_prefill_then_one_by_one(load, name):
    rows, tolerance = recorded_rows(name), LOGITS_TOLERANCE[name]
    logits = np.asarray(load(name).logits(rows.ids, rows.lengths, prefill=rows.prefill))
    assert logits.dtype == np.float32
    for row, (length, expected) in enumerate(zip(rows.lengths, rows.logits, strict=True)):
        assert_logits(logits[row, :length], expected, tolerance, f"row {row} of {length} tokens")
    # The recording's first decode row is the last token of the prefill.
    decoded = rows.golden["logits_decode"][0]
    assert len(decoded) == rows.lengths[0] - rows.prefill + 1
    assert_logits(logits[0, rows.prefill - 1 :], decoded, tolerance, "decoded rows")


@pytest.mark.parametrize("name", ["k31_tiny", "kimi_linear_tiny"])
def test_one_prefill(load, name):
    rows, tolerance = recorded_rows(name), LOGITS_TOLERANCE[name]
    logits = np.asarray(load(name).logits(rows.ids[0]))
    assert_logits(logits[0], rows.logits[0], tolerance, "prefill")
    if "logits_prefill_f64ref" in rows.golden:
        assert_logits(logits, rows.golden["logits_prefill_f64ref"], tolerance, "against float64")


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("k31_tiny", False),
        ("k31_tiny", True),
        pytest.param("k31_tiny_mxfp4", True, marks=pytest.mark.slow),
        ("k3_tiny_bf16", False),
        pytest.param("k3_tiny_mxfp4", True, marks=pytest.mark.slow),
        ("kimi_linear_tiny", True),
    ],
)
def test_everything_on_the_way(load, name, stacked):
    rows, tolerance = recorded_rows(name), LOGITS_TOLERANCE[name]
    golden = rows.golden
    if stacked:
        parameters, config = load_parameters(DATA / name, dtype=jnp.float32, stacked=True)
        assert parameters.stacked(config)
    else:
        parameters, config = load(name).parameters, load(name).config

    @jax.jit
    def compute(parameters, token_ids, lengths):
        result = run(parameters, Inputs(token_ids, lengths), None, config, EVERYTHING)
        return project_logits(parameters, result.hidden_BTD), result.auxiliary

    logits, layers = compute(parameters, jnp.asarray(rows.ids), jnp.asarray(rows.lengths, jnp.int32))
    for row, (length, expected) in enumerate(zip(rows.lengths, rows.logits, strict=True)):
        assert_logits(np.asarray(logits)[row, :length], expected, tolerance, f"row {row} of {length} tokens")

    if "partial_sums_f64ref" in golden:
        sums = np.stack([layer["partial_sums"][0] for layer in layers])
        assert_close(sums, golden["partial_sums_f64ref"], tolerance, "partial sums")
        experts = [layer["router_experts"][0] for layer in layers if "router_experts" in layer]
        np.testing.assert_array_equal(np.sort(np.stack(experts), axis=-1), golden["router_topk_sorted"])
    sparse = [layer for layer, kind in enumerate(config.attention_kinds) if kind == "dsa"]
    assert len(sparse) == (3 if name.startswith("k31") else 0)
    for layer in sparse:
        found, number = layers[layer], layer + 1
        sets = fixtures.sorted_sets(found["index_sets"])
        np.testing.assert_array_equal(sets[0], golden[f"index_sets_layer{number}"])
        for row, length in enumerate(golden["batch_lengths"].tolist(), start=1):
            expected = golden[f"batch_index_sets_layer{number}"][row - 1, :length]
            np.testing.assert_array_equal(sets[row, :length], expected)
        expected = golden[f"index_scores_layer{number}"]
        visible = expected != INVISIBLE
        np.testing.assert_array_equal(visible, np.tri(len(expected), dtype=bool))
        scores = np.asarray(found["index_scores"][0])
        assert_close(scores[visible], expected[visible], 5e-4, f"index scores of layer {number}")
        assert scores[~visible].max() <= INVISIBLE
        assert_close(
            found["index_keys"][0], golden[f"index_key_layer{number}"], 5e-4, f"keys of layer {number}"
        )


@pytest.mark.parametrize(
    "name",
    [
        "k31_tiny",
        "k3_tiny_bf16",
        pytest.param("k31_tiny_mxfp4", marks=pytest.mark.slow),
        pytest.param("k3_tiny_mxfp4", marks=pytest.mark.slow),
    ],
)
def test_greedy_continuation(load, name):
    model = load(name)
    golden, _ = read(f"{name}/golden")
    expected = golden["greedy_tokens"].tolist()
    # The recording reads on past the end-of-text id.
    written = generate_ids(model.steps, golden["input_ids"][0].tolist(), len(expected), temperature=0.0)
    assert list(written) == [*((token, None) for token in expected), (None, "length")]


def test_the_recordings_tell_the_folders_apart():
    """Equal recordings would let one folder's loader stand in for another's."""
    for first, second in [("k31_tiny", "k31_tiny_mxfp4"), ("k3_tiny_bf16", "k3_tiny_mxfp4")]:
        one, other = (read(f"{name}/golden")[0]["logits_prefill"] for name in (first, second))
        assert difference(one, other) > 1.0
