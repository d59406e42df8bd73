"""The shipped checkpoint: what it is, and that it still scores what its record says."""

import hashlib
import json

import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax.config import shipped_folder
from moe28t_jax.evals import score_texts
from moe28t_jax.training.nano.corpus import load_corpus
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

RECORD = json.loads((shipped_folder("nano") / "heldout_scores.json").read_text())
TRAINING = json.loads((shipped_folder("nano") / "training.json").read_text())


@pytest.fixture(scope="module")
def nano():
    return m.load("nano", dtype="float32")


def test_is_the_preset_with_packed_experts_and_its_own_vocabulary(nano):
    assert nano.config == m.ModelConfig.preset("nano")
    experts = nano.parameters.segments[1][0].mlp.experts
    assert all(isinstance(experts[name], MXFP4Tensor) for name in ("gate", "up", "down"))
    assert nano.tokenizer.vocab_size == nano.config.vocab_size
    assert nano.tokenizer.stop_id == nano.config.eos_id


def test_fits_in_the_package():
    assert sum(file.stat().st_size for file in shipped_folder("nano").iterdir()) < 10_000_000


def test_record_beats_gzip_in_total_and_on_most_files():
    total, files = RECORD["total"], RECORD["files"]
    assert len(files) >= 100 and total["bits_per_byte"] < total["gzip_bits_per_byte"]
    below = sum(file["bits_per_byte"] < file["gzip_bits_per_byte"] for file in files)
    assert below == total["files_below_gzip"] and below > len(files) / 2


def test_records_belong_to_these_weights_this_vocabulary_and_this_split(nano):
    content = (shipped_folder("nano") / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == RECORD["model_sha256"]
    assert nano.tokenizer.fingerprint == TRAINING["vocabulary_sha256"]
    assert len(RECORD["files"]) == TRAINING["heldout_documents"]
    corpus = load_corpus()
    if corpus.data_hash == TRAINING["data_hash"]:  # another release of Python carries other texts
        assert {d.name for d in corpus.heldout} == {file["name"] for file in RECORD["files"]}
        assert len(corpus.train) == TRAINING["train_documents"]


def test_log_ends_where_the_settings_say():
    lines = (shipped_folder("nano") / "training_log.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == TRAINING["settings"]["steps"]


def test_heldout_files_score_as_recorded(nano):
    recorded = {file["name"]: file for file in RECORD["files"]}
    documents = [d for d in load_corpus().heldout if d.name in recorded and 1000 < len(d.text) < 6000][:6]
    # Another patch release of Python carries other texts; the same bytes must give the same bits.
    documents = [d for d in documents if len(d.text.encode()) == recorded[d.name]["bytes"]]
    if not documents:
        pytest.skip("this Python's library is not the one that nano was scored on")
    scores = score_texts(nano, [(d.name, d.text) for d in documents])
    for score in scores:
        assert abs(score.bits_per_byte - recorded[score.name]["bits_per_byte"]) < 2e-3, score
    total = sum(score.bits for score in scores) / sum(score.num_bytes for score in scores)
    gzip_total = np.average(
        [recorded[score.name]["gzip_bits_per_byte"] for score in scores],
        weights=[score.num_bytes for score in scores],
    )
    assert total < gzip_total


def test_continues_python(nano):
    text = nano.generate("class Counter:\n    def __init__(self", max_new_tokens=12).text
    assert ":" in text and "\n" in text
