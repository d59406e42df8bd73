"""Exact counts of the published configurations."""

import pytest

from moe28t_jax.config import PRESETS, ModelConfig, count_parameters

FACTS = {
    # name: total, active, stored tensors, stored bytes
    "kimi-k3": (2_779_931_837_184, 104_189_614_848, 497_220, 1_560_860_324_864),
    # Five more tensors in each of 24 layers.
    "moe28t": (2_780_110_363_392, 104_368_141_056, 497_220 + 5 * 24, 1_561_217_389_568),
}


@pytest.mark.parametrize("name", FACTS)
def test_published_counts(name):
    count = ModelConfig.preset(name).parameter_count()
    assert (count.total, count.active, count.stored_tensors, count.stored_bytes) == FACTS[name]


def test_parts_of_kimi_k3():
    config = ModelConfig.preset("kimi-k3")
    groups = count_parameters(config).by_group
    assert groups["vision"] == 401_214_464
    assert groups["projector"] == 46_144_512
    assert groups["kda"] == 69 * 443_740_416
    assert groups["mla"] == 24 * 232_196_096
    assert groups["routed_experts"] == 92 * 896 * 33_030_144
    rest = groups["router"] + groups["latent_projection"] + groups["shared_experts"]
    assert rest == 92 * 189_927_808
    text = sum(groups.values()) - groups["vision"] - groups["projector"]
    assert text == 2_779_484_478_208


def test_indexer_of_moe28t():
    groups = ModelConfig.preset("moe28t").parameter_count().by_group
    assert groups["indexer"] == 24 * (1536 * 4096 + 7168 * 128 + 7168 * 32 + 2 * 128)


def test_kimi_linear_is_a_48b_a3b():
    count = ModelConfig.preset("kimi-linear-48b-a3b").parameter_count()
    assert 48e9 < count.total < 49.5e9
    assert 2.9e9 < count.active < 3.2e9


@pytest.mark.parametrize("name", PRESETS)
def test_groups_and_layers_add_up(name):
    config = ModelConfig.preset(name)
    count = config.parameter_count()
    assert sum(count.by_group.values()) == count.total
    assert len(count.layers) == config.num_layers
    # Outside the layers: table, head, final norm, output mix and vision; head, norm and mix are active.
    mix = 2 * config.hidden_size if config.residual_block_size is not None else 0
    head = config.vocab_size * config.hidden_size
    vision = count.by_group.get("vision", 0) + count.by_group.get("projector", 0)
    outside = 2 * head + config.hidden_size + mix + vision
    assert sum(layer.total for layer in count.layers) == count.total - outside
    assert sum(layer.active for layer in count.layers) == count.active - (head + config.hidden_size + mix)
    assert sum(layer.stored_bytes for layer in count.layers) == count.stored_bytes - 2 * outside
    assert [layer.attention for layer in count.layers] == list(config.attention_kinds)
    assert [layer.mlp for layer in count.layers] == list(config.mlp_kinds)


def test_quantisation_changes_bytes_and_tensors_only():
    packed = ModelConfig.preset("nano")
    plain = packed.override({"expert_quantization": None})
    a, b = packed.parameter_count(), plain.parameter_count()
    experts = a.by_group["routed_experts"]
    assert (a.total, a.active, a.by_group) == (b.total, b.active, b.by_group)
    assert b.stored_bytes - a.stored_bytes == experts * 2 - experts * 17 // 32
    assert a.stored_tensors - b.stored_tensors == 7 * 16 * 3


def test_all_experts_active_means_every_text_parameter_but_the_table():
    config = ModelConfig.preset("nano").override({"moe.num_experts_per_token": 16})
    count = config.parameter_count()
    others = sum(count.by_group[group] for group in ("embedding", "vision", "projector"))
    assert count.active == count.total - others
