"""Synthetic checkpoints: sliced, on the grid, the same every time, and loadable."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from moe28t_jax.cli import main
from moe28t_jax.config import ModelConfig
from moe28t_jax.weights import (
    Checkpoint,
    CheckpointError,
    fake_checkpoint,
    load_parameters,
    slice_config,
    stream_parameters,
)
from moe28t_jax.weights.checksums import CHECKSUM_FILE
from pallas_kernels.mxfp4_matmul import MXFP4Tensor, quantize

TINY = Path(__file__).parents[1] / "golden" / "data"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(TINY / "k31_tiny_mxfp4")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        written = fake_checkpoint(
            tmp_path / name, config, layers=4, experts=4, seed=seed, max_shard_bytes=100_000
        )
        assert written == slice_config(config, 4, 4)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != contents(tmp_path / "c")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    # A tensor's bytes do not depend on what else is there.
    fake_checkpoint(tmp_path / "whole", config)
    part, whole = Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "whole")
    assert set(part) < set(whole)
    for name in part:
        if part.entry(name).shape == whole.entry(name).shape:
            np.testing.assert_array_equal(part.raw(name), whole.raw(name), err_msg=name)


@pytest.mark.parametrize("name", ["k31_tiny_mxfp4", "kimi_linear_tiny"])
def test_experts_lie_on_the_grid(tmp_path: Path, name: str) -> None:
    config = ModelConfig.from_hf(TINY / name)
    fake_checkpoint(tmp_path / "x", config)
    _, found = load_parameters(tmp_path / "x")
    assert found.expert_quantization == config.expert_quantization
    for file in (tmp_path / "x").glob("*.safetensors"):
        for tensor, value in load_file(file).items():
            assert np.isfinite(value.astype(np.float32)).all()
            if ".experts." not in tensor or tensor.endswith("_scale"):
                continue
            if tensor.endswith("_packed"):
                scale = load_file(file)[tensor.replace("_packed", "_scale")]
                value = np.asarray(MXFP4Tensor.from_checkpoint(value, scale).dequantize(jnp.float32))
            rounded = quantize(value.astype(np.float32), layout="packed_nk")
            np.testing.assert_array_equal(
                np.asarray(rounded.dequantize(jnp.float32)), value.astype(np.float32)
            )
            assert 0.3 < value.astype(np.float32).std() / config.initializer_range < 3


def test_what_is_written_loads_with_its_checksums(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(TINY / "k31_tiny_mxfp4")
    fake_checkpoint(tmp_path / "x", config, layers=2, vision=False)
    parameters, found, report = stream_parameters(tmp_path / "x")
    assert found.num_layers == 2 and not parameters.has_vision
    assert report.verified_bytes == report.checkpoint_bytes


@pytest.mark.parametrize("preset", ["moe28t", "kimi-k3", "kimi-linear-48b-a3b", "nano"])
def test_slices_of_presets(preset: str) -> None:
    """A slice is the preset with less of it, and its config.json says so."""
    config = ModelConfig.preset(preset)
    part = slice_config(config, 4, 16)
    assert part.num_layers == 4 and part.attention_kinds == config.attention_kinds[:4]
    assert part.moe is not None and part.moe.num_experts == 16
    assert (part.hidden_size, part.vocab_size, part.kda, part.mla) == (
        config.hidden_size, config.vocab_size, config.kda, config.mla,
    )  # fmt: skip
    assert ModelConfig.from_hf(json.loads(json.dumps(part.to_hf()))) == part


def test_refusals(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(TINY / "k31_tiny_mxfp4")
    for layers, experts, message in (
        (9, None, "layers is 9"),
        (None, 1, "experts is 1"),
        (None, 99, "experts is 99"),
    ):
        with pytest.raises(ValueError, match=message):
            fake_checkpoint(tmp_path / "x", config, layers, experts)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(CheckpointError, match="no checkpoint to replace"):
        fake_checkpoint(tmp_path / "home", config)
    assert not (tmp_path / "x").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "fake-checkpoint",
        "--preset",
        "nano",
        "--layers",
        "4",
        "--experts",
        "8",
        "--out",
        str(tmp_path / "x"),
    ]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == sum(file.stat().st_size for file in (tmp_path / "x").iterdir())
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--text-only", "--seed", "3"]) == 0
    (tmp_path / "x" / CHECKSUM_FILE).unlink()
    assert main(["checksums", str(tmp_path / "x")]) == 0
    assert (tmp_path / "x" / CHECKSUM_FILE).exists()
    for arguments, message in (
        (["--shard-gigabytes", "0"], "--shard-gigabytes is 0"),
        (["--preset", "gpt"], "gpt"),
        (["--experts", "3"], "experts is 3"),
    ):
        assert main([*command, "--overwrite", *arguments]) == 2
        assert message in capsys.readouterr().err


MEMORY = """
import sys
from pathlib import Path
from moe28t_jax.config import ModelConfig
from moe28t_jax.weights import fake_checkpoint
def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
config = ModelConfig.from_hf(sys.argv[1])
fake_checkpoint(sys.argv[2] + "/small", config)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
fake_checkpoint(sys.argv[2] + "/large", config.override({"vocab_size": 1_000_000}))
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    """Two tables of 128 MB each are drawn in less than 40."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(TINY / "k31_tiny_mxfp4"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Checkpoint(tmp_path / "large").nbytes > 250e6
    assert int(done.stdout) < 40e6
