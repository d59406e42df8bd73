"""The planner: exact sizes, the verdicts people need, and what must hold whatever the figures are."""

import json
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel import AXES, MeshFile, load_mesh_file, mesh_file_names
from moe28t_jax.planning import CHIPS, PHASES, Plan, Prices, chip, load_prices, make_plan, search, state_bytes
from moe28t_jax.planning.inventory import held, stages, total
from moe28t_jax.planning.memory import weight_bytes

MOE28T = ModelConfig.preset("moe28t")
K3 = ModelConfig.preset("kimi-k3")
NANO = ModelConfig.preset("nano")
MESHES = tuple(name for name in mesh_file_names() if name != "cpu-8")


@lru_cache
def found(kind: str, chips: int) -> Plan:
    return search(MOE28T, kind, chips, model="moe28t")


@lru_cache
def active_parameters() -> int:
    return MOE28T.parameter_count().active


# -- exact sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "expected"), [(K3, 1_560_860_324_864), (MOE28T, 1_561_217_389_568)])
def test_weights_are_exact(config: ModelConfig, expected: int) -> None:
    plan = make_plan(config, load_mesh_file("tpu7x-4x4x2"))
    assert plan.weights_bytes == expected == config.parameter_count().stored_bytes
    assert sum(part.stored_bytes for part in total(config).values()) == expected
    assert plan.parameters == config.parameter_count().total
    assert plan.naive_weights_bytes == round(plan.parameters / 2)


def test_the_rough_figure_is_the_one_people_quote() -> None:
    result = make_plan(MOE28T, load_mesh_file("h200-16")).to_json()
    assert result["naive_weights_bytes"] == pytest.approx(1.40e12, rel=0.01)
    low, high = result["naive_weights_bytes_with_headroom"]
    assert (low, high) == (pytest.approx(1.68e12, rel=0.01), pytest.approx(1.82e12, rel=0.01))
    assert result["naive_weights_bytes"] < result["weights_bytes"] < low


def test_experts_take_four_and_a_quarter_bits() -> None:
    experts = total(MOE28T)["experts"]
    assert experts.parameters == MOE28T.parameter_count().by_group["routed_experts"] == 2_722_740_830_208
    assert experts.stored_bytes * 8 == experts.parameters * 4.25
    bfloat16 = total(ModelConfig.preset("kimi-linear-48b-a3b"))["experts"]
    assert bfloat16.stored_bytes == bfloat16.parameters * 2


def test_state_of_a_sequence() -> None:
    # 69 delta layers of 96 heads with 128 x 128 float32; windows of 3 inputs; 24 layers with 576 + 128 values a token.
    state = state_bytes(MOE28T, 1_048_576)
    assert state.recurrent == 69 * 96 * 128 * 128 * 4
    assert state.window == 69 * 3 * 3 * 96 * 128 * 2
    assert state.latents == 24 * 1_048_576 * 576 * 2 == 27 * 2**30
    assert state.index_keys == 24 * 1_048_576 * 128 * 2 == 6 * 2**30
    assert state.total == state.recurrent + state.window + state.latents + state.index_keys
    assert state_bytes(K3, 1_048_576).index_keys == 0
    short = state_bytes(MOE28T, 1)
    assert (short.recurrent, short.window) == (state.recurrent, state.window)


def test_state_equals_the_cache_that_the_engine_allocates() -> None:
    import jax
    import jax.numpy as jnp

    from moe28t_jax.model import init_cache

    cache = jax.eval_shape(lambda: init_cache(NANO, 3, 512, jnp.bfloat16))
    allocated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.segments))
    assert allocated == 3 * state_bytes(NANO, 512).total
    one = MeshFile("one", "cpu", "1", 1, 1, dict.fromkeys(AXES, 1), 3, 512)
    assert make_plan(NANO, one).per_device.state == allocated


# -- verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "chips"), [("h200", 8), ("b200", 8)])
def test_eight_are_refused(kind: str, chips: int) -> None:
    plan = found(kind, chips)
    assert not plan.fits and plan.cost_per_million_tokens is None
    # The weights alone are more than all memory together.
    assert plan.per_device.limit * plan.mesh.devices < plan.weights_bytes
    assert "does not fit" in plan.verdict
    assert any("<" in line and "memory in all" in line for line in plan.arithmetic())


@pytest.mark.parametrize(("kind", "chips"), [("h200", 16), ("h100", 32), ("b200", 16), ("tpu7x", 32)])
def test_twice_as_many_are_accepted(kind: str, chips: int) -> None:
    plan = found(kind, chips)
    assert plan.fits and "fits on" in plan.verdict
    assert plan.mesh.chips == chips and plan.mesh.devices == chips * chip(kind).devices_per_chip
    assert plan.per_device.weights >= plan.weights_bytes / plan.mesh.devices


@pytest.mark.parametrize("name", ["h200-16", "h100-32", "b200-16"])
def test_the_arithmetic_adds_up(name: str) -> None:
    plan = make_plan(MOE28T, load_mesh_file(name))
    device = plan.per_device
    assert device.total == device.weights + device.state + device.activations <= device.limit
    text = "\n".join(plan.arithmetic())
    for figure in ("1,561,217,389,568", "1,446,456,066,048", "0.5", "experts / "):
        assert figure in text


def test_a_million_tokens_of_one_sequence_divide_over_the_expert_axis() -> None:
    plan = make_plan(MOE28T, load_mesh_file("tpu7x-4x4x2"), batch=1, context=1_048_576)
    assert plan.fits and plan.work.spread == "context" and plan.work.cached == 131_072
    assert plan.per_device.state < state_bytes(MOE28T, 1_048_576).total / 7
    many = make_plan(MOE28T, load_mesh_file("tpu7x-4x4x2"), batch=64)
    assert many.work.spread == "batch" and many.work.rows == 8


def test_training_fits_on_a_large_pod_and_not_on_a_small_one() -> None:
    axes = {"data": 8, "stage": 1, "expert": 32, "tensor": 4, "context": 1}
    pod = MeshFile("v5p-8x8x16", "v5p", "8x8x16", 1024, 1024, axes, 256, 4096)
    plan = make_plan(MOE28T, pod, "train")
    assert plan.fits and plan.decode_step is None and plan.to_json()["decode_step_seconds"] is None
    # Masters in float32 and moments in bfloat16 and float32 of nearly all parameters (no image tower), hardly repeated.
    assert 4 * plan.parameters <= 1.001 * plan.per_device.weights * 1024 <= 4.5 * plan.parameters
    assert plan.per_device.state * 2 == plan.per_device.weights * 3
    assert not make_plan(MOE28T, load_mesh_file("v5p-4x4x4"), "train", batch=8, context=4096).fits


# -- properties ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "config"), [("v6e-16x16", MOE28T), ("h100-32", K3)])
def test_more_rows_or_tokens_never_need_less(name: str, config: ModelConfig, phase: Any) -> None:
    mesh = load_mesh_file(name)
    # Rows that the mesh does not divide are repeated, so that fewer of them may need more.
    unit = mesh.axes["data"] * mesh.axes["expert"]
    batches = [unit * n for n in (1, 2, 3, 8, 9, 31)]
    totals = [make_plan(config, mesh, phase, n, 8192).per_device.total for n in batches]
    # Training takes a row at a time.
    assert totals == sorted(totals) and (totals[0] < totals[-1] or phase == "train")
    # Training repeats tokens of a row that the mesh does not divide, too.
    lengths = (32, 64, 2048, 8192, 131_072, 1_048_576)
    lengths = lengths if phase == "train" else (1, 63, 2048, 8193, *lengths[-2:])
    totals = [make_plan(config, mesh, phase, 8, context).per_device.total for context in lengths]
    assert totals == sorted(totals) and totals[0] < totals[-1]


@given(
    batch=st.integers(1, 60),
    more=st.integers(0, 60),
    context=st.integers(1, 200_000),
    name=st.sampled_from(MESHES),
)
def test_decode_memory_is_monotone(batch: int, more: int, context: int, name: str) -> None:
    mesh = load_mesh_file(name)
    unit = mesh.axes["data"] * mesh.axes["expert"]
    small = make_plan(MOE28T, mesh, "decode", unit * batch, context)
    large = make_plan(MOE28T, mesh, "decode", unit * (batch + more), context + more)
    assert small.per_device.weights == large.per_device.weights
    assert small.per_device.total <= large.per_device.total


@pytest.mark.parametrize("name", mesh_file_names())
@pytest.mark.parametrize("phase", PHASES)
def test_devices_together_hold_everything(name: str, phase: Any) -> None:
    """Weights of all devices are the model's, each part as often as the axes that do not divide it; up to rounding."""
    config = NANO if name == "cpu-8" else MOE28T
    mesh = load_mesh_file(name)
    plan = make_plan(config, mesh, phase, context=min(mesh.context, config.max_context))
    axes, count = mesh.axes, mesh.axes["stage"]
    copies = {
        "experts": axes["data"] * axes["context"],
        "tensor": axes["data"] * axes["context"] * axes["expert"],
        "replicated": mesh.devices // count,
    }
    _, alike = stages(config, count)
    for division, repeated in copies.items():
        everywhere = weight_bytes(held(config, count), axes)[division] * mesh.devices
        expected = total(config)[division].stored_bytes
        if alike is not None:
            # Layers that do not repeat, embedding and head are on every stage.
            expected += alike.part[division].stored_bytes * (count - 1)
        assert expected * repeated <= everywhere <= expected * repeated + mesh.devices
    everywhere = plan.per_device.weights * mesh.devices
    assert everywhere == pytest.approx(plan.replication * plan.weights_bytes)
    assert plan.replication >= 1


@pytest.mark.parametrize("name", MESHES)
def test_caches_together_hold_every_sequence(name: str) -> None:
    mesh = load_mesh_file(name)
    plan = make_plan(MOE28T, mesh)
    everywhere = plan.per_device.state * mesh.devices
    needed = plan.state_per_sequence.total * mesh.batch
    # Latents and index keys are repeated over the heads' axis, and nothing more often than that; with pipeline stages
    # also the layers that do not repeat.
    assert needed <= everywhere <= needed * mesh.axes["tensor"] * (1.1 if mesh.axes["stage"] > 1 else 1)


def test_a_tpu_keeps_latents_in_whole_rows_of_lanes() -> None:
    gpu, tpu = (
        make_plan(MOE28T, load_mesh_file(name)).state_per_sequence for name in ("h200-16", "v5p-4x4x4")
    )
    assert gpu.latents == 24 * 131_072 * 576 * 2 and tpu.latents == 24 * 131_072 * 640 * 2
    assert (gpu.recurrent, gpu.window, gpu.index_keys) == (tpu.recurrent, tpu.window, tpu.index_keys)


def test_pipeline_stages_divide_the_layers_that_repeat() -> None:
    """93 layers: four, then 22 repeats of four, then one. The five are on every stage, with embedding and head."""
    own, alike = stages(MOE28T, 2)
    assert alike is not None and alike.ends and not own.ends
    assert (own.num_layers, alike.num_layers) == (44, 5)
    assert held(MOE28T, 2).num_layers == 49
    both = {division: own.part[division] * 2 + alike.part[division] for division in own.part}
    assert both == total(MOE28T)
    axes = dict.fromkeys(AXES, 1) | {"stage": 4, "tensor": 4}
    with pytest.raises(
        ValueError, match=r"4 pipeline stages, which do not divide the 22 repeats of the model's 93 layers"
    ):
        make_plan(MOE28T, MeshFile("x", "h200", "2x8", 16, 16, axes), batch=8, context=1024)


def test_a_pipeline_pays_for_stages_that_wait() -> None:
    axes = {"data": 1, "stage": 2, "expert": 16, "tensor": 8, "context": 1}
    mesh = MeshFile("x", "v6e", "16x16", 256, 256, axes, 64, 8192)
    one, four, many = (make_plan(MOE28T, mesh, batch=batch).step.seconds for batch in (16, 32, 64))
    assert one < four < many
    # Decoding takes all rows at once, through one stage after the other.
    whole = make_plan(MOE28T, mesh, batch=64)
    assert (whole.work.microbatches, whole.work.tokens) == (1, 4)
    alone = make_plan(MOE28T, replace(mesh, axes=axes | {"stage": 1, "data": 2}), batch=64)
    assert alone.step.seconds < whole.step.seconds < 2 * alone.step.seconds


@pytest.mark.parametrize("name", MESHES)
def test_a_decode_step_reads_what_it_must(name: str) -> None:
    mesh = load_mesh_file(name)
    plan = make_plan(MOE28T, mesh)
    device = chip(mesh.kind)
    # Active experts of one token and all other text weights, divided over all devices, is the least there is to read.
    least = active_parameters() / 2 / mesh.devices / device.memory_bandwidth
    most = (plan.per_device.weights + 2 * plan.per_device.state + 2 * plan.per_device.activations * 93) / (
        device.memory_bandwidth
    )
    assert least < plan.step.seconds < most * mesh.axes["stage"]
    assert (
        plan.step.seconds >= max(plan.step.cost.hbm, plan.step.cost.flop, plan.step.cost.interconnect) * 0.999
    )
    assert plan.bound == "hbm"
    assert plan.tokens_per_second == pytest.approx(plan.batch / plan.step.seconds)


def test_times_scale_as_they_should() -> None:
    mesh = load_mesh_file("tpu7x-4x4x2")
    few, many = (make_plan(MOE28T, mesh, batch=batch, context=4096) for batch in (8, 512))
    assert few.step.seconds < many.step.seconds < 64 * few.step.seconds
    assert many.tokens_per_second > few.tokens_per_second
    short, long = (make_plan(MOE28T, mesh, batch=64, context=context) for context in (4096, 131_072))
    sparse = long.step.seconds - short.step.seconds
    dense = (
        make_plan(K3, mesh, batch=64, context=131_072).step.seconds
        - make_plan(K3, mesh, batch=64, context=4096).step.seconds
    )
    # Dense attention reads 1,280 bytes a token (of whole lanes) where the selection reads index keys of 256.
    assert 4.5 < dense / sparse < 5.5
    prefill = make_plan(MOE28T, mesh, "prefill", batch=1)
    assert prefill.tokens_per_second > many.tokens_per_second
    assert prefill.decode_step is not None and prefill.decode_step.seconds < prefill.step.seconds


def test_a_slower_link_shows_where_it_crosses_hosts() -> None:
    axes = dict.fromkeys(AXES, 1) | {"tensor": 16}
    across = MeshFile("across", "h200", "2x8", 16, 16, axes, 8, 8192)
    inside = load_mesh_file("h200-16")
    slow = make_plan(MOE28T, across, batch=8, context=8192).step.cost.interconnect
    assert slow > 3 * make_plan(MOE28T, inside, batch=8, context=8192).step.cost.interconnect


def test_a_small_torus_is_not_closed() -> None:
    from moe28t_jax.planning.roofline import _mean_hops

    assert _mean_hops((4, 4, 4)) == 3.0
    assert _mean_hops((16, 16)) == 8.0
    assert _mean_hops((4, 4, 2)) == 1.25 + 1.25 + 0.5
    assert _mean_hops((8,)) > _mean_hops((4,))


# -- search ----------------------------------------------------------------------------------------------------


def test_the_search_is_at_least_as_fast_as_the_mesh_files() -> None:
    for name in ("h200-16", "tpu7x-4x4x2"):
        mesh = load_mesh_file(name)
        best = search(MOE28T, mesh.kind, mesh.chips, batch=mesh.batch, context=mesh.context)
        mine = make_plan(MOE28T, mesh)
        assert best.fits and best.serial_tokens_per_second >= mine.serial_tokens_per_second * 0.999


def test_the_search_leaves_spares_where_experts_do_not_divide() -> None:
    plan = found("gb200", 72)
    assert plan.fits and plan.mesh.chips == 72
    assert plan.mesh.devices + plan.mesh.spare_devices == 72
    assert plan.price_per_hour == load_prices().per_chip_hour["gb200"] * 72


def test_the_search_says_why_there_is_nothing() -> None:
    with pytest.raises(ValueError, match=r"There is no chip 'tpu9'; the known ones are v5p"):
        search(MOE28T, "tpu9", 8)
    with pytest.raises(ValueError, match="number of chips is 0"):
        search(MOE28T, "h200", 0)
    with pytest.raises(ValueError, match=r"context is 2097152; this configuration allows 1 to 1048576"):
        search(MOE28T, "h200", 16, context=2_097_152)


def test_a_mesh_that_tears_something_names_it_and_the_axes() -> None:
    axes = dict.fromkeys(AXES, 1) | {"expert": 32, "tensor": 8}
    mesh = MeshFile("x", "v6e", "16x16", 256, 256, axes)
    with pytest.raises(ValueError, match=r"gate \(expert\) has size 896.*expert 32 x tensor 8 do not divide"):
        make_plan(MOE28T, mesh)
    mesh = MeshFile("x", "cpu", "8", 8, 8, dict.fromkeys(AXES, 1) | {"tensor": 8})
    with pytest.raises(ValueError, match=r"heads has size 4, which the mesh axes tensor 8 do not divide"):
        make_plan(NANO, mesh, context=64)
    mesh = MeshFile("x", "cpu", "16", 16, 16, dict.fromkeys(AXES, 1) | {"stage": 16})
    with pytest.raises(
        ValueError, match=r"16 pipeline stages, which do not divide the 3 repeats of the model's 8"
    ):
        make_plan(NANO, mesh, context=64)


def test_a_mesh_must_count_devices_as_its_chip_does() -> None:
    mesh = MeshFile("x", "tpu7x", "4x4x4", 64, 64, dict.fromkeys(AXES, 1) | {"expert": 8, "tensor": 8})
    with pytest.raises(ValueError, match="counts 1 devices per chip; a TPU7x"):
        make_plan(MOE28T, mesh)


@pytest.mark.parametrize(("batch", "context", "chunk"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_counts_are_positive(batch: int, context: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="is 0; it is a positive whole number"):
        make_plan(NANO, load_mesh_file("cpu-8"), "prefill", batch, context, chunk)


# -- chips and prices ------------------------------------------------------------------------------------------


def test_chips_are_per_device() -> None:
    assert chip("tpu7x").devices_per_chip == 2
    assert chip("tpu7x").memory_bytes == int(94.74 * 2**30)
    assert chip("v5p").memory_bytes == int(95.73 * 2**30) and chip("v6e").memory_bytes == int(31.24 * 2**30)
    assert chip("tpu7x").compute_flops * 2 == pytest.approx(2307e12)
    assert chip("h200").memory_bytes < 141e9 * 1.03
    for kind in CHIPS:
        device = chip(kind)
        assert (
            device.link_bandwidth <= device.memory_bandwidth
            and device.network_bandwidth <= device.link_bandwidth
        )


def test_prices_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('currency = "EUR"\n[per_chip_hour]\nh200 = 2\n', encoding="utf-8")
    prices = load_prices(path)
    assert prices == Prices("EUR", "", {"h200": 2.0})
    plan = make_plan(MOE28T, load_mesh_file("h200-16"), prices=prices)
    assert plan.price_per_hour == 32
    assert plan.cost_per_million_tokens == pytest.approx(32 / 3600 / plan.tokens_per_second * 1e6)
    other = make_plan(MOE28T, load_mesh_file("h100-32"), prices=prices)
    assert other.price_per_hour is None and other.cost_per_million_tokens is None


def test_the_shipped_prices_cover_every_rented_chip() -> None:
    prices = load_prices()
    assert set(prices.per_chip_hour) == set(CHIPS) - {"cpu"} and "illustrative" in prices.note


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("per_chip_hour = 3", "per_chip_hour = 3, where a table of prices is expected"),
        ("", "per_chip_hour = None, where a table of prices is expected"),
        ("[per_chip_hour]\nh200 = -1", r"per_chip_hour.h200 = -1; a price is a number from 0 on"),
        ("[per_chip_hour]\nh200 = nan", r"per_chip_hour.h200 = nan"),
        ("[per_chip_hour]\nh200 = true", r"per_chip_hour.h200 = True"),
        ("[prices]\nh200 = 1", "unknown key prices"),
        ("currency = 1\n[per_chip_hour]", "currency = 1, where a text is expected"),
        ("currency", "is not TOML"),
    ],
)
def test_a_damaged_price_table_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        load_prices(path)


def test_json_holds_plain_values() -> None:
    plan = make_plan(MOE28T, load_mesh_file("v6e-16x16"))
    result = json.loads(json.dumps(plan.to_json()))
    assert set(result["per_device"]) == {"weights", "state", "activations", "total", "limit"}
    assert prod(result["mesh"]["axes"].values()) == result["mesh"]["devices"]
    assert result["decode_step_seconds"] == plan.step.seconds
