"""Configuration files that are no configuration end in a sentence, never in another exception."""

import copy
import json

import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.presets import public_config

BASE = public_config("kimi-k3")


def changed(path, value):
    document = copy.deepcopy(BASE)
    *owners, name = path.split(".")
    node = document
    for owner in owners:
        node = node[owner]
    node[name] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("model_type", [], "model_type is []"),
        ("model_type", {}, "model_type is {}"),
        ("text_config.num_hidden_layers", 10**30, "num_hidden_layers is 1000"),
        ("text_config.quantization_config.config_groups", {}, "no config_groups"),
        ("text_config.quantization_config.config_groups", 5, "config_groups is 5"),
        ("text_config.quantization_config.config_groups.group_0", "x", "group_0 is 'x'"),
        ("text_config.quantization_config.config_groups.group_0.weights", 3, "weights is 3"),
        ("text_config.quantization_config.config_groups.group_0.weights.strategy", "channel", "strategy"),
        ("text_config.quantization_config.config_groups.group_0.weights.scale_dtype", "f16", "scale_dtype"),
        ("text_config.quantization_config.config_groups.group_0.weights.dynamic", True, "dynamic"),
    ],
)
def test_an_impossible_value_is_named(path, value, part):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(changed(path, value))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"model_type": "kimi_k3", "model_type": "kimi_linear"}', "'model_type' stands twice"),
        ("[" * 100_000, "config.json"),
        ('{"a":' * 100_000, "config.json"),
        (json.dumps([1]), "holds list"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, text, part):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert part in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "value"), [("kda", 5), ("dsa.top_k", "x"), ("hidden_size", "wide"), ("hidden_size", True)]
)
def test_an_override_of_another_type_is_named(name, value):
    with pytest.raises(ValueError, match=f"override '{name}' is"):
        ModelConfig.preset("moe28t").override({name: value})


def test_whole_numbers_stand_for_fractions():
    assert ModelConfig.preset("moe28t").override({"mla.latent_eps": 1}).mla.latent_eps == 1
