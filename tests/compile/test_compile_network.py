"""The engine's steps compiled for a real deployment by the real compiler, with its kernels and explicit exchanges."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiled(*arguments: str) -> dict[str, Any]:
    """The report of `moe28t compile` in a process of its own: it sets what the compilers read when JAX starts."""
    command = [sys.executable, "-m", "moe28t_jax.cli", "compile", "--json", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 1) and done.stdout, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# Sampling sorts the vocabulary of 8 rows over 8 devices: three exchanges of 8 x 20,480 numbers of 4 bytes, of which a
# device keeps an eighth, and some thousand bytes of candidates. It is done once, whatever the number of layers.
SAMPLING = 3 * 7 * 20_480 * 4 + 16_384


def check_decode(report: dict[str, Any], memory: float) -> None:
    """`memory`: how often the least bytes may move in main memory."""
    assert report["fits"], (report["peak_bytes_per_device"], report["limit_bytes_per_device"])
    # Nothing is held twice: temporaries are small beside what stays.
    assert report["peak_bytes_per_device"] <= 1.05 * report["argument_bytes_per_device"]
    assert report["expert_gathers"] == []
    assert report["unpacked_experts"] == []
    # What is copied of weights at all are projections of the latent into heads, a percent of the traffic.
    copies = report["weight_copies_in_loop"] + report["weight_copies"]
    assert all(not one["weight"]["expert"] for one in copies), copies
    assert sum(one["bytes"] for one in copies) <= 0.02 * report["hbm_bytes_per_step"]
    assert report["loops_of_unknown_length"] == []
    assert report["hbm_bytes_per_step"] <= memory * report["minimum_hbm_bytes_per_step"]
    experts = report["all_to_all_bytes_per_step"] - SAMPLING
    assert 0 < experts <= 1.2 * report["minimum_all_to_all_bytes_per_step"]


def test_decode_of_four_layers() -> None:
    layers = ('attention_kinds=["kda","dsa","kda","dsa"]', 'mlp_kinds=["moe","moe","moe","moe"]')
    report = compiled("--mesh", "tpu7x-4x4x2", "--set", layers[0], "--set", layers[1])
    assert (report["devices"], report["batch"], report["context"], report["layers"]) == (64, 64, 131_072, 4)
    # Head and sampling weigh more beside four layers than beside 93.
    check_decode(report, 1.3)


@pytest.mark.slow
def test_decode_of_the_whole_model() -> None:
    """All 93 layers, 64 rows of 131,072 tokens on 32 chips."""
    report = compiled("--mesh", "tpu7x-4x4x2")
    assert (report["model"], report["layers"]) == ("moe28t", 93)
    check_decode(report, 1.2)
