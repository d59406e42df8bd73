"""The training step: it learns, and on eight virtual devices it computes what one device does."""

from collections.abc import Callable
from typing import Any

import pytest

AXES = {"data": 2, "expert": 2, "tensor": 2}


@pytest.fixture
def steps(run_on_devices_once: Callable[..., Any]) -> dict[str, Any]:
    return run_on_devices_once(8, "training_workers.py:training", axes=AXES, steps=3)


@pytest.mark.slow
def test_the_loss_falls_and_biases_stay(steps: dict[str, Any]) -> None:
    losses = [metrics["entropy"] for metrics in steps["one"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1
    assert steps["biases"] == 0
    # The model that training began from is still there.
    assert steps["parameters_kept"]


@pytest.mark.slow
def test_every_parameter_has_a_gradient(steps: dict[str, Any]) -> None:
    # The first attention layer has nothing to mix: there is one candidate.
    first = ".segments[0][0].attention_mix"
    assert steps["without_gradient"] == [f"{first}.norm.value", f"{first}.query.value"]


@pytest.mark.slow
def test_eight_devices_compute_what_one_does(steps: dict[str, Any]) -> None:
    first, other = steps["one"][0], steps["many"][0]
    assert set(first) == {"loss", "entropy", "indexer", "violation", "gradient"}
    for name, value in first.items():
        assert other[name] == pytest.approx(value, rel=2e-5), name
    assert steps["gradients"] < 2e-5
    # Later steps part ways slowly, where a weight is rounded to another 4-bit code.
    assert steps["many"][-1]["entropy"] == pytest.approx(steps["one"][-1]["entropy"], rel=1e-3)


@pytest.mark.slow
def test_what_training_holds_is_divided_over_all_devices(steps: dict[str, Any]) -> None:
    pieces = steps["pieces"]
    experts = [count for name, count in pieces.items() if ".experts." in name]
    matrices = [
        count for name, count in pieces.items() if name.endswith((".q_proj.value", ".embedding.value"))
    ]
    assert experts and set(experts) == {8}, pieces
    assert matrices and set(matrices) == {8}, pieces
