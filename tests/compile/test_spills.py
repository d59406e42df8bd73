"""How long the schedules of the delta rule's TPU kernel are, and what they spill: nothing else shows a regression."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Per token and head, about 5 % above what the compiler made of the kernel when it was written: bundles, slots of the
# matrix units filled, vector registers stored to memory for want of room, and loaded back.
BOUNDED_DECAYS = (13.7, 8.9, 4.5, 5.6)
ANY_DECAYS = (17.7, 14.0, 8.9, 12.6)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Of the forward kernel on v6e; the compiler is told in a fresh process to dump its schedules."""
    script = ROOT / "benchmarks" / "tpu_kernels.py"
    command = [sys.executable, str(script), "--chips", "v6e", "--dtypes", "bfloat16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    side = json.loads(done.stdout.splitlines()[-1])["dtypes"]["bfloat16"]["v6e"]["ours"]
    assert "error" not in side, side["error"]
    return side


def per_token_and_head(figures: dict[str, Any]) -> list[float]:
    names = ("bundles", "mxu_slots", "spill_stores", "spill_loads")
    return [figures[f"{name}_per_token_and_head"] for name in names]


@pytest.mark.slow
def test_schedule_for_bounded_decays(figures: dict[str, Any]) -> None:
    measured = per_token_and_head(figures)
    assert all(value > 0 for value in measured)
    assert all(value <= bound for value, bound in zip(measured, BOUNDED_DECAYS, strict=True)), measured


@pytest.mark.slow
def test_schedule_for_any_decays(figures: dict[str, Any]) -> None:
    measured = per_token_and_head(figures["longer_branches"])
    assert all(value <= bound for value, bound in zip(measured, ANY_DECAYS, strict=True)), measured
    # A branch that costs nothing is no branch: then the tool reads the schedule wrongly.
    assert measured[0] > figures["bundles_per_token_and_head"]


@pytest.mark.slow
def test_memory_traffic_is_arguments_and_results(figures: dict[str, Any]) -> None:
    assert figures["temporary_bytes"] <= 2**20
    assert figures["hbm_bytes"] <= 1.02 * (figures["argument_bytes"] + figures["output_bytes"])
