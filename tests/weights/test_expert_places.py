"""Empty places for experts: every way to load leaves them zero, and every way to save leaves them out."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.model import initialize
from moe28t_jax.model.moe import routed_experts
from moe28t_jax.weights import (
    CheckpointError,
    declared_values,
    export_orbax,
    load,
    load_layer,
    load_orbax,
    load_parameters,
    save_orbax,
    save_parameters,
    stream_parameters,
    stream_target,
)
from moe28t_jax.weights.transfer import aligned_empty

EMPTY = 3


@pytest.fixture(autouse=True)
def memory_that_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory often is, and would hide a place that nobody cleared."""

    def filled(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = aligned_empty(shape, dtype)
        array.view(np.uint8)[...] = 1
        return array

    for module in (load, stream_target):
        monkeypatch.setattr(module, "aligned_empty", filled)


def padded_config(folder: Path) -> ModelConfig:
    config = ModelConfig.from_hf(folder)
    assert config.moe is not None
    return config.override({"moe.expert_slots": config.moe.num_experts + EMPTY})


def bits(value: Any) -> np.ndarray:
    """An array's bits; of FP4 codes, which a host has not, the numbers."""
    return np.asarray(value.astype(jnp.float32) if value.dtype == jnp.float4_e2m1fn else value)


def assert_padded(found: Any, wanted: Any, padded: ModelConfig, plain: ModelConfig) -> None:
    """The same parameters, but for `EMPTY` places of zeros behind the experts."""
    seen = 0
    values = zip(declared_values(found, padded), declared_values(wanted, plain), strict=True)
    for (declared, value), (_, expected) in values:
        for leaf, right in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=True):
            leaf, right = bits(leaf), bits(right)
            if declared.parameter.num_experts is not None:
                seen += 1
                assert leaf.shape[0] == right.shape[0] + EMPTY
                assert not leaf[-EMPTY:].astype(np.float32).any()
                leaf = leaf[:-EMPTY]
            np.testing.assert_array_equal(leaf, right)
    assert seen


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["k3_tiny_bf16", "k31_tiny_mxfp4"])
def test_loads(data: Path, name: str, stacked: bool) -> None:
    padded = padded_config(data / name)
    wanted, plain = load_parameters(data / name, stacked=stacked)
    found, config = load_parameters(data / name, padded, stacked=stacked)
    assert config.moe == padded.moe
    assert_padded(found, wanted, config, plain)
    for fill in ("host", "device"):
        found, config, _ = stream_parameters(data / name, padded, stacked=stacked, fill=fill)
        assert_padded(found, wanted, config, plain)


@pytest.mark.parametrize("layout", ["packed_nk", "float4_kn"])
def test_layouts_of_the_kernels(data: Path, layout: str) -> None:
    source = data / "k31_tiny_mxfp4"
    wanted, plain = load_parameters(source, layout=layout)
    found, config = load_parameters(source, padded_config(source), layout=layout)
    assert_padded(found, wanted, config, plain)
    found, config, _ = stream_parameters(source, padded_config(source), layout=layout, stacked=False)
    assert_padded(found, wanted, config, plain)


def test_a_layer_alone(data: Path) -> None:
    source = data / "k31_tiny_mxfp4"
    padded = padded_config(source)
    whole, config = load_parameters(source, padded)
    last = padded.num_layers - 1
    [wanted] = [group for number, group in whole.layers(config) if number == last]
    found = load_layer(source, last, padded)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_random_ones_are_those_without_empty_places(data: Path) -> None:
    plain, padded = ModelConfig.from_hf(data / "k31_tiny"), padded_config(data / "k31_tiny")
    key = jax.random.key(0)
    assert_padded(initialize(padded, key), initialize(plain, key), padded, plain)


@pytest.mark.parametrize("name", ["k3_tiny_bf16", "k31_tiny_mxfp4"])
def test_saved_in_the_public_layout(data: Path, tmp_path: Path, name: str, snapshot: Any) -> None:
    padded = padded_config(data / name)
    for folder, config in (("plain", None), ("padded", padded)):
        parameters, config = load_parameters(data / name, config)
        save_parameters(tmp_path / folder, parameters, config)
    assert snapshot(tmp_path / "plain") == snapshot(tmp_path / "padded")


@pytest.mark.parametrize("name", ["k3_tiny_bf16", "k31_tiny_mxfp4"])
def test_through_orbax(data: Path, tmp_path: Path, name: str, snapshot: Any) -> None:
    """From any number of places to any other; an export has none."""
    plain_parameters, plain = load_parameters(data / name)
    parameters, padded = load_parameters(data / name, padded_config(data / name))
    save_orbax(tmp_path / "padded", parameters, padded)
    save_orbax(tmp_path / "plain", plain_parameters, plain)
    for source in ("padded", "plain"):
        found, config = load_orbax(tmp_path / source, padded, stacked=False)
        assert_padded(found, plain_parameters, config, plain)
        found, config = load_orbax(tmp_path / source, stacked=False)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain_parameters), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
        export_orbax(tmp_path / source, tmp_path / f"{source} export")
    assert snapshot(tmp_path / "padded export") == snapshot(tmp_path / "plain export")


def test_experts_of_another_number_are_not_cut_off(data: Path, tmp_path: Path) -> None:
    """Only empty places may go: an Orbax checkpoint with more experts belongs to another configuration."""
    parameters, config = load_parameters(data / "k31_tiny_mxfp4")
    save_orbax(tmp_path / "saved", parameters, config)
    assert config.moe is not None
    fewer = config.override({"moe.num_experts": config.moe.num_experts - 1})
    with pytest.raises(CheckpointError, match="has shape"):
        load_orbax(tmp_path / "saved", fewer)


def test_one_device_computes_the_same(data: Path) -> None:
    """Bit for bit: the rows of every expert are the same ones."""
    source = data / "k31_tiny_mxfp4"
    plain, padded = ModelConfig.from_hf(source), padded_config(source)
    assert plain.moe is not None and plain.moe.latent_size is not None
    assert plain.parameter_count() == padded.parameter_count()
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((9, plain.moe.latent_size)), jnp.float32)
    chosen = np.stack([rng.permutation(plain.moe.num_experts)[: plain.moe.num_experts_per_token] for _ in x])
    weights, valid = jnp.asarray(rng.uniform(size=chosen.shape), jnp.float32), jnp.asarray(np.arange(9) != 4)

    def run(config: ModelConfig) -> np.ndarray:
        experts = load_layer(source, config.num_layers - 1, config, dtype=jnp.float32).mlp.experts
        return np.asarray(routed_experts(experts, x, jnp.asarray(chosen, jnp.int32), weights, valid, config))

    np.testing.assert_array_equal(run(plain), run(padded))


def test_too_few_places_are_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"moe\.expert_slots is 3; the \d+ experts .* need at least as many"):
        ModelConfig.from_hf(data / "k31_tiny", {"moe.expert_slots": 3})
