"""The second training on a model and conversations of a few seconds."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.evals.nano_tasks import evaluate, plot
from moe28t_jax.model.parameters import initialize
from moe28t_jax.training.nano import converse
from moe28t_jax.training.nano.optimization import flatten
from moe28t_jax.training.nano.train import VOCABULARY
from moe28t_jax.weights import quantize_experts, save_parameters

TEXT_CONFIG = replace(
    ModelConfig.preset("nano").override(
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "attention_kinds": ("kda", "dsa"),
            "mlp_kinds": ("dense", "moe"),
            "kda.num_heads": 1,
            "mla.num_heads": 2,
            "moe.latent_size": 32,
            "moe.intermediate_size": 32,
            "dsa.top_k": 8,
            "residual_block_size": 1,
        }
    ),
    vision=None,
)
CONFIG = replace(
    TEXT_CONFIG,
    vision=replace(
        ModelConfig.preset("nano").vision,
        num_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=1,
        qkv_size=16,
    ),
)
SETTINGS = converse.Settings(
    steps=4, length=256, rows=("questions", "pictures", "text"), warmup=1, tower_steps=2
)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("library")
    for index in range(12):
        lines = [f"def function_{index}_{line}(value):\n    return value + {line}\n" for line in range(60)]
        (root / f"module_{index}.py").write_text("\n\n".join(lines))
    return root


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    record, log = folder / "training.json", folder / "training_log.jsonl"
    record.write_text('{"command": "the first"}\n')
    log.write_text('{"step": 0, "entropy": 1.0}\n')
    parameters = quantize_experts(initialize(TEXT_CONFIG, jax.random.key(5), jnp.float32), TEXT_CONFIG)
    save_parameters(folder / "checkpoint", parameters, TEXT_CONFIG, tokenizer_files=[VOCABULARY, record, log])
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def finished(library, start, tmp_path_factory) -> tuple[Path, Path]:
    output = tmp_path_factory.mktemp("run")
    return output, converse.train(SETTINGS, output, CONFIG, start, save_every=2, root=library)


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint, experts unpacked, fresh ones in place of a missing tower."""
    template = initialize(CONFIG, jax.random.key(SETTINGS.seed), jnp.float32)
    return {
        name: np.asarray(value) for name, value in converse.load_start(folder, template, CONFIG)[0].items()
    }


def test_start_fills_what_the_checkpoint_has(start):
    template = initialize(CONFIG, jax.random.key(0), jnp.float32)
    found, has_tower = converse.load_start(start, template, CONFIG)
    fresh = flatten(template)
    expected = initialize(TEXT_CONFIG, jax.random.key(5), jnp.float32)
    assert not has_tower and found.keys() == fresh.keys()
    for name, value in flatten(expected).items():
        # Matrices are stored in bfloat16, experts in MXFP4 (half a step of at most a third of the value).
        bound = (0.35 if ".experts." in name else 0.005) * np.abs(np.asarray(value)) + 1e-2 * (
            ".experts." in name
        )
        assert (np.abs(np.asarray(found[name]) - np.asarray(value)) <= bound + 1e-6).all(), name
    for name, value in fresh.items():
        if name.startswith((".vision", ".projector")):
            assert np.array_equal(found[name], value), name
    with pytest.raises(ValueError, match="which this configuration has not; start from a checkpoint"):
        other = CONFIG.override({"hidden_size": 64})
        converse.load_start(start, initialize(other, jax.random.key(0), jnp.float32), other)


@pytest.mark.slow
def test_run_ships_both_records_and_logs(finished, start):
    _, folder = finished
    record = json.loads((folder / "training.json").read_text())
    assert record["command"] == "the first"
    assert record["conversations"]["settings"]["steps"] == 4
    assert len(record["conversations"]["data_hash"]) == 64
    assert (folder / "training_log.jsonl").read_text() == (start / "training_log.jsonl").read_text()
    log = [json.loads(line) for line in (folder / converse.LOG).read_text().splitlines()]
    assert [line["step"] for line in log if "heldout" in line] == [2, 4]
    assert set(log[-1]["heldout"]) == {"questions", "pictures"}
    assert any("tower_step" in line for line in log)


@pytest.mark.slow
def test_everything_was_trained(finished, start):
    before, after = arrays(start), arrays(finished[1])
    for name, value in after.items():
        earlier = before[name].astype(jnp.bfloat16).astype(np.float32)
        # The first layer has one candidate to mix, so its pseudo query is stored and never used.
        if "norm" not in name and name != ".segments[0][0].attention_mix.query.value":
            assert not np.array_equal(value.astype(jnp.bfloat16).astype(np.float32), earlier), name


@pytest.mark.slow
def test_stopped_run_continues_to_the_same_weights(finished, library, start, tmp_path, monkeypatch):
    real = converse.train_step
    calls = []

    def stops(*arguments):
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(converse, "train_step", stops)
    with pytest.raises(KeyboardInterrupt):
        converse.train(SETTINGS, tmp_path, CONFIG, start, save_every=2, root=library)
    monkeypatch.setattr(converse, "train_step", real)
    continued = converse.train(SETTINGS, tmp_path, CONFIG, start, save_every=2, root=library)
    expected, found = arrays(finished[1]), arrays(continued)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_other_settings_do_not_continue_a_run(finished, library, start):
    output, _ = finished
    with pytest.raises(ValueError, match="run with other conversations"):
        converse.train(replace(SETTINGS, seed=1), output, CONFIG, start, root=library)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_and_plotted(finished, tmp_path):
    _, folder = finished
    results, items = evaluate(folder, 12, ["low", "max"])
    families = results["families"]
    assert families["all questions"]["low"]["questions"] == 12
    assert families["all tools"]["max"]["questions"] == 5
    assert families["picture caption"]["low"]["questions"] >= 25
    for item in items:
        assert item.reasoning_tokens > 0 or item.content is not None or item.finished
    plot(families, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_miniature_and_preset_differ_in_size_only():
    whole, small = converse.chat_config(), converse.chat_config(miniature=True)
    assert whole.vision == small.vision is not None
    assert set(whole.attention_kinds) == set(small.attention_kinds)
    assert small.parameter_count().total < 0.6 * whole.parameter_count().total
