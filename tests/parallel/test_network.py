"""The network on eight virtual devices is the network on one: the same experts and keys, the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest

TOLERANCE = {"float32": 2e-4, "float64": 1e-9}
WORKER = "network_workers.py:compare"

SINGLE = [{"data": 4}, {"expert": 8}, {"tensor": 4}, {"context": 4}]
COMBINED = [
    {"expert": 4, "tensor": 2},
    {"expert": 4, "context": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"expert": 2, "tensor": 2, "context": 2},
]
# Float experts, which have gradients, in layers of their own, each a block of attention residuals.
INLINE = {"packed": False, "stacked": False, "kinds": ["kda", "dsa"], "block": 1}
# Packed ones in a scanned stack, in which blocks begin.
STACKED = {"packed": True, "stacked": True, "kinds": ["kda", "dsa", "kda", "dsa", "kda"], "block": 2}


def assert_equal_to_one_device(report: dict[str, Any], dtype: str) -> None:
    for name, value in report.items():
        if name == "axes":
            continue
        if name.endswith("same choices"):
            assert value, f"{report['axes']}: other experts or keys"
        else:
            assert value <= TOLERANCE[dtype], f"{report['axes']}: {name} differ by {value:.3g}"


def test_eight_devices_are_one(run_on_devices: Callable[..., Any]) -> None:
    mesh = {"expert": 2, "tensor": 2, "context": 2}
    [report] = run_on_devices(8, WORKER, meshes=[mesh], kinds=["kda", "dsa"], parts=["briefly"])
    assert {"briefly logits", "briefly cache", "briefly same choices"} < set(report)
    assert_equal_to_one_device(report, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("meshes", [SINGLE, COMBINED], ids=["single", "combined"])
def test_every_axis_and_combination(run_on_devices, meshes, dtype) -> None:
    """Chunked prefill, decode and gradients; all meshes of a list against one reference."""
    reports = run_on_devices(8, WORKER, meshes=meshes, dtype=dtype, batch=8, **INLINE)
    assert [report["axes"] for report in reports] == meshes
    for report in reports:
        assert {"serve logits", "serve cache", "serve same choices", "train gradients"} < set(report)
        assert_equal_to_one_device(report, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stack_of_packed_experts(run_on_devices, dtype) -> None:
    meshes = [{"expert": 4, "tensor": 2}, {"expert": 2, "tensor": 2, "context": 2}]
    for report in run_on_devices(8, WORKER, meshes=meshes, dtype=dtype, parts=["serve"], **STACKED):
        assert_equal_to_one_device(report, dtype)


@pytest.mark.slow
def test_one_long_row(run_on_devices) -> None:
    """Fewer rows than `expert` has devices, which then carries tokens."""
    meshes = [{"expert": 4, "tensor": 2}, {"expert": 4, "context": 2}, {"context": 8}]
    for report in run_on_devices(8, WORKER, meshes=meshes, batch=1, dtype="float64", **INLINE):
        assert_equal_to_one_device(report, "float64")


STAGES = [
    {"stage": 2},
    {"stage": 2, "expert": 4},
    {"stage": 2, "expert": 2, "tensor": 2},
    {"stage": 4, "context": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mesh", STAGES, ids=lambda mesh: "-".join(f"{k}{v}" for k, v in mesh.items()))
def test_pipeline_stages(run_on_devices, mesh, dtype) -> None:
    """A dense layer before the stages, a last one behind them, and blocks that end in different stages."""
    repeats = mesh["stage"]
    [report] = run_on_devices(
        8,
        WORKER,
        meshes=[mesh],
        kinds=["kda", *["kda", "dsa"] * repeats, "dsa"],
        stacked=True,
        block=2,
        dtype=dtype,
        batch=8,
    )
    assert_equal_to_one_device(report, dtype)


@pytest.mark.slow
def test_dense_attention_over_context(run_on_devices) -> None:
    [report] = run_on_devices(
        8, WORKER, meshes=[{"expert": 2, "tensor": 2, "context": 2}], kinds=["kda", "mla"], dtype="float64"
    )
    assert_equal_to_one_device(report, "float64")


@pytest.mark.slow
def test_mistakes_are_noticed(run_on_devices) -> None:
    reports = run_on_devices(8, "network_workers.py:compare_mistakes")
    right = reports.pop("none")
    assert right["logits"] <= TOLERANCE["float32"] and right["same choices"]
    assert len(reports) == 5
    for mistake, report in reports.items():
        # NaN counts as noticed.
        assert not report["logits"] <= 10 * TOLERANCE["float32"], mistake


def test_equal_scores_go_to_the_lowest_position_wherever_it_lies(run_on_devices) -> None:
    """Many keys with one score on every device: whichever device is asked first must not matter."""
    report = run_on_devices(8, "network_workers.py:select_among_equals")
    assert report["same"] == [True, True, True]
    assert not report["same by a local rule"]


@pytest.mark.slow
def test_a_loaded_model_on_a_mesh(run_on_devices, small_checkpoint) -> None:
    report = run_on_devices(8, "network_workers.py:load_on_mesh", folder=str(small_checkpoint))
    assert report["logits"] <= TOLERANCE["float32"]
    assert report["same ids"] and report["mesh"]
    assert report["experts"] == 8 * report["experts of a device"]


@pytest.mark.slow
def test_a_loaded_model_with_empty_places(run_on_devices, small_checkpoint) -> None:
    report = run_on_devices(
        8, "network_workers.py:load_on_mesh", folder=str(small_checkpoint), overrides={"moe.expert_slots": 24}
    )
    assert report["logits"] <= TOLERANCE["float32"]
    assert report["same ids"] and (report["experts"], report["experts of a device"]) == (24, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "chunk"), [(131_072, 64), (1_048_576, 16)])
def test_a_row_of_a_million_tokens(run_on_devices, capacity, chunk) -> None:
    report = run_on_devices(
        8, "network_workers.py:long_cache", axes={"expert": 2, "context": 4}, capacity=capacity, chunk=chunk
    )
    assert report["same choices"] and report["logits"] <= TOLERANCE["float32"]
    assert report["keys of all devices"] == 8
    assert report["positions of a device"] == capacity // 8


def test_log_probabilities_over_a_divided_vocabulary(run_on_devices) -> None:
    report = run_on_devices(8, "network_workers.py:compare_log_probabilities")
    assert report["one device"] <= 1e-12 and report["mesh"] <= 1e-12 and report["gradient"] <= 1e-12
    # Rounded to bfloat16 on each device and behind the sum over them.
    assert report["embedding"] <= 2.0**-7
