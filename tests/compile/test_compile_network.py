"""The engine's steps compiled for real deployments by the real compilers, with their kernels and explicit exchanges.

The programs are those of `benchmarks/compile_pods.py`; all are held to the same.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("compile_pods", ROOT / "benchmarks" / "compile_pods.py")
assert _spec is not None and _spec.loader is not None
pods = importlib.util.module_from_spec(_spec)
# Its data classes look their module up.
sys.modules["compile_pods"] = pods
_spec.loader.exec_module(pods)

PROMISED = {program.name: program for program in pods.PROMISED}
BY_NAME = {program.name: program for program in pods.PROGRAMS}


def compiled(name: str) -> dict[str, Any]:
    """The report of a program of the table, compiled in a process of its own."""
    report = pods.compile_one(BY_NAME[name])
    assert "error" not in report, report["error"]
    return report


def check(report: dict[str, Any], memory: float | None, exchange: float | None, copied: int = 0) -> None:
    """`memory`, `exchange`: how often the least bytes may move in main memory and between the experts' devices under
    uniform routing, where that is promised."""
    assert report["fits"], (report["peak_bytes_per_device"], report["limit_bytes_per_device"])
    assert report["peak_bytes_per_device"] <= report["limit_bytes_per_device"]
    assert report["expert_gathers"] == []
    assert report["unpacked_experts"] == []
    copies = report["weight_copies_in_loop"] + report["weight_copies"]
    assert all(not one["weight"]["expert"] for one in copies), copies
    in_loop = report["weight_copies_in_loop"]
    assert sum(one["bytes"] for one in in_loop) <= copied, in_loop
    if memory is not None:
        assert report["loops_of_unknown_length"] == []
        moved, least = (report[f"{start}hbm_bytes_per_step_uniform_routing"] for start in ("", "minimum_"))
        assert moved <= memory * least
        # What there is room for is more.
        assert moved <= report["hbm_bytes_per_step"]
    if report["phase"] == "decode":
        # Nothing is held twice: temporaries are small beside what stays.
        assert report["peak_bytes_per_device"] <= 1.05 * report["argument_bytes_per_device"]
    assert report["all_to_all_bytes_per_step"] > 0
    if exchange is not None:
        sent = report["all_to_all_bytes_per_step_uniform_routing"]
        assert sent <= exchange * report["minimum_all_to_all_bytes_per_step"]


def test_the_page_shows_the_results_that_are_kept() -> None:
    page, results = pods.PAGE.read_text("utf-8"), pods.load()
    assert set(results) <= set(BY_NAME)
    for lines in (pods.rows(results), pods.collectives(results), pods.scaling(results)):
        assert "\n".join(lines) in page


@pytest.mark.parametrize("name", PROMISED)
def test_the_results_that_are_kept_keep_the_promises(name: str) -> None:
    report, program = pods.load()[name], PROMISED[name]
    assert report["fits"] and report["peak_bytes_per_device"] <= report["limit_bytes_per_device"]
    assert report["expert_gathers"]["count"] == report["unpacked_experts"]["count"] == 0
    assert report["weight_copies_in_loop"]["bytes"] <= program.copied
    for promised, key, least in (
        (program.memory, "hbm_bytes_per_step_uniform_routing", "minimum_hbm_bytes_per_step_uniform_routing"),
        (program.exchange, "all_to_all_bytes_per_step_uniform_routing", "minimum_all_to_all_bytes_per_step"),
    ):
        assert promised is None or report[least] <= report[key] <= promised * report[least], (
            key,
            report[key],
        )


def test_decode_of_four_layers() -> None:
    report = compiled("tpu7x-4x4x2 decode, four layers")
    assert (report["devices"], report["batch"], report["context"], report["layers"]) == (64, 64, 131_072, 4)
    # Head and sampling weigh more beside four layers than beside 93.
    check(report, 1.3, 1.2)


@pytest.mark.slow
def test_a_training_step_of_four_layers() -> None:
    """About ten minutes on one core."""
    report = compiled("v5p-8x8x16 train, four layers")
    assert (report["phase"], report["devices"], report["layers"], report["explicit"]) == (
        "train",
        1024,
        4,
        True,
    )
    assert (report["batch"], report["context"]) == (128, 8192)
    # Measured 12.4 GB, of which the planner says 11.6 GB.
    assert report["fits"] and report["peak_bytes_per_device"] < 13.5e9
    # Tokens, latents and gradients of both are sent for the experts; forwards twice, since a layer is computed again,
    # which the minimum does not count. Measured 1.85.
    assert report["all_to_all_bytes_per_step"] <= 2 * report["minimum_all_to_all_bytes_per_step"]


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_steps_of_the_whole_model(name: str) -> None:
    """All 93 layers; minutes each."""
    report = compiled(name)
    assert (report["model"], report["layers"], report["explicit"]) == ("moe28t", 93, True)
    check(report, PROMISED[name].memory, PROMISED[name].exchange, PROMISED[name].copied)
