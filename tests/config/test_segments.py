"""How layers group into segments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe28t_jax.config import PRESETS, ModelConfig, Segment, segments

PATTERN = {
    "moe28t": (Segment(4, 4, 22), 93),
    "kimi-k3": (Segment(4, 4, 22), 93),
    "kimi-linear-48b-a3b": (Segment(2, 4, 6), 27),
}


@pytest.mark.parametrize("name", PATTERN)
def test_one_scanned_segment(name):
    scanned, layers = PATTERN[name]
    found = segments(ModelConfig.preset(name), True)
    assert [s for s in found if s.repeats > 1] == [scanned]
    assert len(found) == layers - scanned.num_layers + 1


def test_residual_blocks_begin_at_one_place_of_the_period():
    config = ModelConfig.preset("moe28t")
    (scanned,) = [s for s in segments(config, True) if s.repeats > 1]
    places = {
        place
        for repeat in range(scanned.repeats)
        for place in range(scanned.period)
        if config.starts_block(scanned.layer(repeat, place))
    }
    assert places == {0}


def check(config: ModelConfig, stacked: bool) -> None:
    found = segments(config, stacked)
    order = [s.layer(r, p) for s in found for r in range(s.repeats) for p in range(s.period)]
    assert order == list(range(config.num_layers))
    for s in found:
        assert s.num_layers == s.period * s.repeats
        for place in range(s.period):
            kinds = {
                (config.attention_kinds[s.layer(r, place)], config.mlp_kinds[s.layer(r, place)])
                for r in range(s.repeats)
            }
            assert len(kinds) == 1
    if not stacked:
        assert found == tuple(Segment(layer, 1, 1) for layer in range(config.num_layers))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_covered_in_order(name, stacked):
    check(ModelConfig.preset(name), stacked)


@given(
    st.lists(
        st.tuples(st.sampled_from(["kda", "mla", "dsa"]), st.sampled_from(["dense", "moe"])),
        min_size=1,
        max_size=24,
    )
)
def test_any_kinds_are_covered_in_order(kinds):
    attention, mlp = zip(*kinds, strict=True)
    config = ModelConfig.preset("nano").override({"attention_kinds": attention, "mlp_kinds": mlp})
    check(config, True)
    check(config, False)


def test_stacking_never_enlarges_the_program():
    for count in range(1, 30):
        config = ModelConfig.preset("nano").override(
            {"attention_kinds": (("kda",) * 3 + ("dsa",)) * count, "mlp_kinds": ("moe",) * (4 * count)}
        )
        found = segments(config, True)
        size = sum(s.period for s in found)
        # Two groups or more are one scanned group; a single group still shares its run of delta layers.
        assert size == (2 if count == 1 else 4)
