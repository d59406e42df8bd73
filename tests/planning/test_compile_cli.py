"""`moe28t compile`, for virtual devices of this computer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe28t_jax.cli import main

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the number of devices is fixed when JAX starts."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    everything = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=everything,
    )


def compiled(*arguments: str) -> dict[str, Any]:
    done = command(
        "-m", "moe28t_jax.cli", "compile", "--json", "--preset", "nano", "--mesh", "cpu-8", *arguments
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


# The engine's own step on real arrays of the same shapes: does it find the program in the folder?
USE = """
import sys
import jax, jax.numpy as jnp
from moe28t_jax.config import ModelConfig
from moe28t_jax.engine.steps import Steps
from moe28t_jax.model.parameters import abstract
from moe28t_jax.parallel import make_mesh, parameter_shardings
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
config = ModelConfig.preset("nano").override({"attention_kinds": ("kda",), "mlp_kinds": ("moe",)})
mesh = make_mesh("cpu-8")
shapes = abstract(config, jnp.bfloat16, stacked=True, vision=False)
zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
parameters = jax.device_put(zeros, parameter_shardings(shapes, config, mesh))
steps = Steps(parameters, config, mesh=mesh)
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
cache = steps.new_cache(4, 128)
tokens, active, key = jax.device_put((jnp.zeros((4,), jnp.int32), jnp.ones((4,), bool), jax.random.key(0)), whole)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
steps.decode(tokens, active, cache, key, 0.0, 1.0)
print(len(hits))
"""
LAYER = ("--set", 'attention_kinds=["kda"]', "--set", 'mlp_kinds=["moe"]', "--context", "128")


@pytest.mark.slow
def test_a_decode_step_for_eight_devices(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    report = compiled(*LAYER, "--save", str(folder), "--text", str(tmp_path / "program.txt"))
    assert (report["model"], report["phase"], report["batch"], report["layers"]) == ("nano", "decode", 4, 1)
    assert report["fits"] and 0 < report["peak_bytes_per_device"] <= report["limit_bytes_per_device"]
    # Experts are divided over all eight devices, heads over two.
    held = report["held_bytes_per_device"]
    assert held["experts"] > 0 and held["state"] > 0
    assert report["argument_bytes_per_device"] == pytest.approx(sum(held.values()), rel=0.01)
    assert report["hbm_bytes_per_step"] > report["minimum_hbm_bytes_per_step"] > 0
    # Virtual devices have no ragged exchange; the dense one moves more than it must.
    assert report["collectives"]["all-to-all"]["executed"] >= 2
    assert report["all_to_all_bytes_per_step"] >= report["minimum_all_to_all_bytes_per_step"] > 0
    assert report["expert_gathers"] == []
    assert (tmp_path / "program.txt").read_text("utf-8").startswith("HloModule")
    assert any(folder.iterdir())


@pytest.mark.slow
def test_a_saved_program_is_used_by_the_engine(tmp_path: Path) -> None:
    compiled(*LAYER, "--save", str(tmp_path))
    done = command(
        "-c",
        USE,
        str(tmp_path),
        XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) >= 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "tpu9-2x2"], "There is no mesh file 'tpu9-2x2'"),
        (["--mesh", "cpu-8", "--preset", "huge"], "There is no preset 'huge'"),
        (
            ["--mesh", "cpu-8", "--preset", "nano", "--layers", "99"],
            "--layers 99 is more than the 8 layers of nano",
        ),
    ],
)
def test_mistakes_end_in_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == 2
    assert words in capsys.readouterr().err
