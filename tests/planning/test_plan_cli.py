"""`moe28t plan` and its picture."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moe28t_jax.cli import main
from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel.mesh_file import load_mesh_file
from moe28t_jax.planning.compile import compile_step


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


VERDICTS = [("h200:8", False), ("b200:8", False), ("h200:16", True), ("h100:32", True), ("b200:16", True)]


@pytest.mark.parametrize(("chips", "fits"), VERDICTS)
def test_verdicts(capsys: pytest.CaptureFixture[str], chips: str, fits: bool) -> None:
    result = plan(capsys, "--preset", "moe28t", "--chips", chips)
    assert result["fits"] is fits
    assert result["weights_bytes"] == 1_561_217_389_568
    device = result["per_device"]
    assert device["total"] == device["weights"] + device["state"] + device["activations"]
    assert (device["total"] <= device["limit"]) is fits
    assert result["bound"] in ("hbm", "flop", "interconnect") and result["decode_step_seconds"] > 0
    assert (result["batch"], result["context"]) == (8, 131_072)


def test_a_mesh_file_brings_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(capsys, "--mesh", "tpu7x-4x4x2")
    assert (result["batch"], result["context"], result["phase"]) == (64, 131_072, "decode")
    assert result["mesh"]["name"] == "tpu7x-4x4x2" and result["cost_per_million_tokens"] > 0
    result = plan(
        capsys, "--mesh", "tpu7x-4x4x2", "--batch", "1", "--context", "1048576", "--phase", "prefill"
    )
    assert (result["batch"], result["context"], result["phase"]) == (1, 1_048_576, "prefill")
    small = ("--mesh", "tpu7x-4x4x2", "--phase", "prefill")
    assert plan(capsys, *small, "--chunk", "1024")["seconds"] != plan(capsys, *small)["seconds"]


def test_a_chunk_beyond_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for where in (["--mesh", "h200-16"], ["--chips", "h200:16"]):
        options = ["--phase", "prefill", "--context", "4096", "--chunk", "4097"]
        assert main(["plan", *where, *options]) == 2
        assert (
            "--chunk 4097 is more than the 4096 tokens of --context; make it no larger."
            in capsys.readouterr().err
        )


@pytest.mark.parametrize("name", ["tpu7x-4x4x2", "v6e-16x16", "v5p-8x8x16"])
@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_both_commands_answer_for_the_same_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, phase: str
) -> None:
    from moe28t_jax.planning.compile import program

    mesh = load_mesh_file(name)
    planned = plan(capsys, "--mesh", name, "--phase", phase)
    taken = []

    def lower(config: Any, mesh: Any, phase: str, batch: int, context: int, *others: Any) -> None:
        taken.append((batch, context))
        raise RuntimeError("far enough")

    monkeypatch.setattr(program, "lower_step", lower)
    with pytest.raises(RuntimeError, match="far enough"):
        compile_step(ModelConfig.preset("moe28t"), mesh, phase)
    assert taken == [(planned["batch"], planned["context"])]
    assert planned["batch"] == (mesh.axes["data"] if phase == "prefill" else mesh.batch)


def test_a_mesh_default_beyond_the_model_is_the_models(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "long.toml"
    path.write_text(
        'kind = "cpu"\ntopology = "1"\nchips = 1\ndevices = 1\nreason = "a test"\n'
        "[axes]\ndata = 1\nstage = 1\nexpert = 1\ntensor = 1\ncontext = 1\n[defaults]\nbatch = 1\ncontext = 99999\n",
        encoding="utf-8",
    )
    assert plan(capsys, "--preset", "nano", "--mesh", str(path))["context"] == 32_768


def test_other_models_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, "--preset", "kimi-k3", "--chips", "h200:16")["weights_bytes"] == 1_560_860_324_864
    small = plan(capsys, "--preset", "kimi-linear-48b-a3b", "--chips", "h200:1", "--context", "4096")
    assert small["fits"] and small["mesh"]["chips"] == 1
    fewer = plan(capsys, "--mesh", "h200-16", "--set", "dsa.top_k=1024")
    assert fewer["seconds"]["hbm"] < plan(capsys, "--mesh", "h200-16")["seconds"]["hbm"]


def test_own_prices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('currency = "EUR"\n[per_chip_hour]\nh200 = 1.5\n', encoding="utf-8")
    result = plan(capsys, "--mesh", "h200-16", "--prices", str(path))
    assert (result["currency"], result["price_per_hour"]) == ("EUR", 24)


def test_the_table_tells_the_verdict_and_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--mesh", "h200-16"]) == 0
    text = capsys.readouterr().out
    assert "moe28t fits on 16 x NVIDIA H200" in text and "1,561,217,389,568 bytes" in text
    assert "(the bound)" in text and "illustrative" in text
    assert main(["plan", "--chips", "h200:8"]) == 0
    assert "moe28t does not fit on 8 x NVIDIA H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chips", "h200"], "--chips 'h200' is not KIND:COUNT, for example --chips h200:16."),
        (["--chips", "h200:0"], "--chips 'h200:0' is not KIND:COUNT"),
        (["--chips", "h200:1000000000"], "The number of chips is 1000000000; the search goes up to 65,536"),
        (["--chips", "h201:8"], "There is no chip 'h201'; the known ones are v5p"),
        (["--mesh", "tpu9"], "There is no mesh file 'tpu9'; name one of b200-16"),
        (
            ["--mesh", "h200-16", "--context", "2000000"],
            "context is 2000000; this configuration allows 1 to 1048576",
        ),
        (["--mesh", "h200-16", "--preset", "k4"], "There is no preset 'k4'; the presets are moe28t"),
        (["--mesh", "h200-16", "--preset", "nano"], "has size 4, which the mesh axes tensor 8 do not divide"),
        (
            ["--mesh", "h200-16", "--chunk", "64"],
            "--chunk 64 is the size of a prefill step, and a step of decode",
        ),
        (
            ["--chips", "h200:16", "--phase", "train", "--chunk", "64"],
            "and a step of train has none; leave it out",
        ),
        (["--mesh", "h200-16", "--plot", "plan"], "The plot 'plan' ends in none of .pdf, .png, .svg"),
        (
            ["--mesh", "h200-16", "--plot", "absent/plan.png"],
            "is in a folder that does not exist; make 'absent'",
        ),
        (["--mesh", "h200-16", "--prices", "absent.toml"], "There is no price table 'absent.toml'; copy "),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and error.startswith("moe28t plan: ")


BOTH = ["--mesh", "h200-16", "--chips", "h200:16"]


@pytest.mark.parametrize("arguments", [[], BOTH, ["--chips", "h200:8", "--batch", "0"]])
def test_one_deployment_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code == 2


def test_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra `train`)")
    path = tmp_path / "plan.png"
    result = plan(capsys, "--mesh", "h200-16", "--batch", "4", "--plot", str(path))
    assert result["plot"] == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["plan", "--mesh", "h200-16", "--plot", str(tmp_path / "plan.png")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "plan.png").exists()
