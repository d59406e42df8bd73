"""The training script of the small shipped model, on a model and a corpus of a few seconds."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.training.nano import train as nano
from moe28t_jax.training.nano.plot import plot_log
from moe28t_jax.weights import load_parameters
from pallas_kernels import mxfp4_matmul

CONFIG = ModelConfig.preset("nano").override(
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
)
SETTINGS = nano.Settings(
    steps=6, warmup=2, stages=(nano.Stage(0.5, 16, 2, True), nano.Stage(0.5, 32, 2, False))
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    for index in range(30):
        lines = [f"def function_{index}_{line}(value):\n    return value + {line}\n" for line in range(40)]
        (root / f"module_{index}.py").write_text("\n\n".join(lines))
    return root


@pytest.fixture(scope="module")
def finished(library, tmp_path_factory):
    output = tmp_path_factory.mktemp("run")
    return output, nano.train(SETTINGS, output, CONFIG, save_every=3, root=library)


def arrays(folder):
    parameters, _ = load_parameters(folder, dtype=np.dtype(np.float32))
    return {
        name: np.asarray(leaf.dequantize() if hasattr(leaf, "dequantize") else leaf)
        for name, leaf in nano.flatten(parameters).items()
    }


@pytest.mark.slow
def test_run_is_recorded_and_ships_its_log(finished):
    output, folder = finished
    record = json.loads((folder / "training.json").read_text())
    assert record["settings"]["steps"] == 6 and len(record["data_hash"]) == 64
    log = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "heldout" in line] == [3, 6]
    losses = [line["entropy"] for line in log if "entropy" in line]
    assert losses[-1] < losses[0]
    assert (folder / "tiktoken.model").read_bytes() == nano.VOCABULARY.read_bytes()
    assert output != folder


@pytest.mark.slow
def test_experts_are_packed_and_everything_was_trained(finished):
    _, folder = finished
    trained = arrays(folder)
    initial = nano.flatten(nano.initialize(CONFIG, jax.random.key(SETTINGS.seed), jnp.float32))
    packed, _ = load_parameters(folder, dtype=np.dtype(np.float32))
    assert any(
        isinstance(v, np.ndarray | jax.Array) and v.dtype == jnp.uint8 for v in jax.tree.leaves(packed)
    )
    # The first layer has one candidate to mix, so its pseudo query is stored and never used.
    unused = ".segments[0][0].attention_mix.query.value"
    assert np.array_equal(trained[unused], initial[unused])
    for name, before in initial.items():
        if name in trained and "norm" not in name and name != unused:
            assert not np.array_equal(trained[name], np.asarray(before.astype(jnp.bfloat16), np.float32)), (
                name
            )


@pytest.mark.slow
def test_stopped_run_continues_to_the_same_weights(finished, library, tmp_path, monkeypatch):
    _, whole = finished
    real = nano.train_step
    calls = []

    def stops(*arguments):
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(nano, "train_step", stops)
    with pytest.raises(KeyboardInterrupt):
        nano.train(SETTINGS, tmp_path, CONFIG, save_every=3, root=library)
    monkeypatch.setattr(nano, "train_step", real)
    continued = nano.train(SETTINGS, tmp_path, CONFIG, save_every=3, root=library)
    expected, found = arrays(whole), arrays(continued)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_other_settings_do_not_continue_a_run(finished, library):
    output, _ = finished
    with pytest.raises(ValueError, match="run with other command, settings"):
        nano.train(replace(SETTINGS, seed=1), output, CONFIG, root=library)


def test_stack_and_unstack_are_inverse():
    flat = nano.flatten(nano.initialize(CONFIG, jax.random.key(0), jnp.float32))
    back = nano.unstack(nano.stack(flat), flat)
    assert all(np.array_equal(back[name], value) for name, value in flat.items())
    assert len(nano.stack(flat)) < len(flat)


def test_loss_uses_the_rounded_experts():
    parameters = nano.initialize(CONFIG, jax.random.key(1), jnp.float32)
    flat = nano.flatten(parameters)
    rounded = nano.flatten(nano.assemble(parameters, flat, quantized=True))
    for name, value in flat.items():
        expected = mxfp4_matmul.fake_quantize(value, axis=-2) if ".experts." in name else value
        assert np.array_equal(rounded[name], expected), name


def test_batches_depend_on_seed_and_step_only():
    tokens = np.arange(1000, dtype=np.uint16)
    stage = nano.Stage(1.0, 10, 3, False)
    first, second = nano.Batches(tokens, 0), nano.Batches(tokens, 0)
    assert np.array_equal(first.at(40, stage), second.at(40, stage))
    assert not np.array_equal(first.at(40, stage), first.at(41, stage))
    assert not np.array_equal(first.at(40, stage), nano.Batches(tokens, 1).at(40, stage))
    rows = np.concatenate([first.at(step, stage)[:, 0] for step in range(33)])
    assert len(set(rows.tolist())) == len(rows)  # one pass reads no piece twice
    assert (np.diff(first.at(7, stage), axis=1) == 1).all()


def test_log_can_be_plotted(tmp_path):
    log = nano.VOCABULARY.parent / "training_log.jsonl"
    plot_log(log, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
