"""How long the schedules of the delta rule's TPU kernels are, and what they spill: nothing else shows a regression."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ("bundles", "mxu_slots", "spill_stores", "spill_loads")
ROOM = 1.05


class Schedules(NamedTuple):
    """Of one program, per token and head: bundles, filled slots of the matrix units, vector registers stored to
    memory for want of room, and loaded back. What the compiler made of it when this was written."""

    bounded: tuple[float, ...]
    """Where the decays are bounded, or nothing depends on them."""
    any_decays: tuple[float, ...] | None


FORWARD = {
    ("v5p", "bfloat16"): Schedules((15.4, 33.4, 4.4, 5.5), (20.7, 52.0, 8.0, 10.8)),
    ("v6e", "bfloat16"): Schedules((13.0, 8.4, 4.2, 5.3), (16.8, 13.3, 8.4, 11.9)),
    ("tpu7x", "bfloat16"): Schedules((12.1, 8.0, 4.3, 5.6), (15.8, 12.7, 7.5, 9.7)),
    ("v5p", "float32"): Schedules((30.3, 103.8, 9.5, 12.7), None),
    ("v6e", "float32"): Schedules((23.9, 27.3, 14.3, 18.9), None),
    ("tpu7x", "float32"): Schedules((21.8, 26.7, 13.0, 19.0), None),
}
# The forward kernel, which keeps the states at the ends of chunks, and the backward kernel together.
GRADIENT = {
    ("v5p", "bfloat16"): Schedules((52.1, 103.7, 14.6, 18.7), (73.9, 177.8, 27.5, 40.2)),
    ("v6e", "bfloat16"): Schedules((43.2, 26.7, 14.4, 19.2), (59.6, 46.4, 31.6, 47.6)),
    ("tpu7x", "bfloat16"): Schedules((40.9, 24.7, 13.9, 19.0), (56.8, 44.3, 28.7, 41.6)),
    ("v5p", "float32"): Schedules((109.1, 359.8, 42.9, 59.1), None),
    ("v6e", "float32"): Schedules((90.2, 95.6, 50.5, 75.3), None),
    ("tpu7x", "float32"): Schedules((78.9, 93.2, 46.0, 72.7), None),
}


@pytest.fixture(scope="module", params=FORWARD, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[tuple[str, str], dict[str, Any]]:
    """Chip and dtype, and the figures of both programs; the compiler is told in fresh processes to dump its
    schedules."""
    chip, dtype = request.param
    script = ROOT / "benchmarks" / "tpu_kernels.py"
    command = [sys.executable, str(script), "--chips", chip, "--dtypes", dtype, "--gradient", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    sides = json.loads(done.stdout.splitlines()[-1])["dtypes"][dtype][chip]
    for side in sides.values():
        assert "error" not in side, side["error"]
    return request.param, sides


def check(figures: dict[str, Any], recorded: Schedules) -> None:
    def within(sums: dict[str, Any], bounds: tuple[float, ...]) -> None:
        measured = [sums[f"{name}_per_token_and_head"] for name in FIGURES]
        assert all(value > 0 for value in measured)
        assert all(value <= ROOM * bound for value, bound in zip(measured, bounds, strict=True)), measured

    within(figures, recorded.bounded)
    if recorded.any_decays is None:
        assert "longer_branches" not in figures
        return
    within(figures["longer_branches"], recorded.any_decays)
    # A branch that costs nothing is no branch: then the tool reads the schedule wrongly.
    name = "bundles_per_token_and_head"
    assert figures["longer_branches"][name] > figures[name]


@pytest.mark.slow
def test_schedules_of_the_forward_pass(case: Any) -> None:
    key, sides = case
    check(sides["ours"], FORWARD[key])


@pytest.mark.slow
def test_schedules_of_the_gradient(case: Any) -> None:
    key, sides = case
    check(sides["gradient"], GRADIENT[key])
    assert any("delta_rule_backward" in name for name in sides["gradient"]["kernels"])


@pytest.mark.slow
def test_memory_traffic_is_arguments_and_results(case: Any) -> None:
    _, sides = case
    figures = sides["ours"]
    # v5p's layout of a batch of one has beta copied on the way.
    assert figures["temporary_bytes"] <= 2 * 2**20
    assert figures["hbm_bytes"] <= 1.02 * (figures["argument_bytes"] + figures["output_bytes"])
