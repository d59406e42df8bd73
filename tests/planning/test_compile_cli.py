"""`moe28t compile`, for virtual devices of this computer."""

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import jax
import pytest

import moe28t_jax.planning.compile as compile_room
from moe28t_jax.cli import main
from moe28t_jax.config import ModelConfig
from moe28t_jax.planning.compile import topology
from moe28t_jax.planning.compile.minimum import least_all_to_all_bytes, least_memory_bytes
from moe28t_jax.planning.compile.report import assumptions

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


LAYER = ("--set", 'attention_kinds=["kda"]', "--set", 'mlp_kinds=["moe"]', "--context", "128")


@pytest.mark.slow
def test_a_decode_step_for_eight_devices(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    report = compiled(*LAYER, "--save", str(folder), "--text", str(tmp_path / "program.txt"))
    assert (report["model"], report["phase"], report["batch"], report["layers"]) == ("nano", "decode", 4, 1)
    assert report["fits"]
    assert (
        0
        < report["argument_bytes_per_device"]
        <= report["peak_bytes_per_device"]
        <= report["limit_bytes_per_device"]
    )
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
    assert all((folder / name).is_file() for name in report["saved"])


@pytest.mark.slow
def test_a_training_step_for_eight_devices() -> None:
    report = compiled(*LAYER[:4], "--context", "64", "--batch", "8", "--phase", "train")
    assert (report["phase"], report["batch"], report["context"], report["chunk"]) == ("train", 8, 64, None)
    assert report["fits"]
    held = report["held_bytes_per_device"]
    # First moments in bfloat16, second ones in float32, the routers' biases without any.
    masters = held["experts"] + held["dense"] + held["embedding"]
    assert held["moments"] == pytest.approx(1.5 * masters, rel=0.02)
    assert report["argument_bytes_per_device"] == pytest.approx(sum(held.values()), rel=0.02)
    assert report["minimum_hbm_bytes_per_step"] == 2 * sum(held.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh", "tpu9-2x2"], "There is no mesh file 'tpu9-2x2'"),
        (["--mesh", "cpu-8", "--preset", "huge"], "There is no preset 'huge'"),
        (
            ["--mesh", "cpu-8", "--preset", "nano", "--layers", "99"],
            "layers is 99; this configuration has 1 to 8",
        ),
        (
            [
                "--mesh",
                "cpu-8",
                "--preset",
                "nano",
                "--phase",
                "prefill",
                "--chunk",
                "512",
                "--context",
                "64",
            ],
            "--chunk 512 is more than the 64 tokens of --context",
        ),
        (
            ["--mesh", "MESH 2x2x4"],
            "The topology 2x2x4 of the mesh 'mine' has 3 numbers; that of GPUs is hosts x chips",
        ),
        (["--mesh", "MESH 4"], "Mesh 'mine' counts 4 devices per chip; a NVIDIA H200"),
    ],
)
def test_mistakes_end_in_a_sentence(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This process has its devices already.
    monkeypatch.setattr(topology, "prepare_environment", lambda mesh: None)
    if arguments[1].startswith("MESH"):
        wiring = arguments[1].removeprefix("MESH ")
        text = (ROOT / "mesh_configs" / "h200-16.toml").read_text("utf-8")
        chips = prod(int(size) for size in wiring.split("x"))
        text = text.replace('topology = "2x8"', f'topology = "{wiring}"').replace(
            "chips = 16", f"chips = {chips}"
        )
        (tmp_path / "mine.toml").write_text(text, "utf-8")
        arguments = ["--mesh", str(tmp_path / "mine.toml")]
    assert main(["compile", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--batch", "9999999999", "9999999999 is more than 2147483647"),
        ("--batch", "9" * 400, "is more than 2147483647"),
        ("--save", "", "an empty text is no path; name one"),
    ],
)
def test_values_that_no_program_could_have(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compile", "--mesh", "cpu-8", option, value])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_temporaries_of_a_cpu_need_memory_too() -> None:
    """Its compiler's peak leaves them out."""
    report = compiled(*LAYER[:4], "--phase", "prefill", "--context", "256", "--batch", "8")
    held = report["argument_bytes_per_device"] + report["temporary_bytes_per_device"]
    assert report["peak_bytes_per_device"] >= held and report["chunk"] == 256


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("There is no compiler for TPUs; install it."),
            "compile: There is no compiler for TPUs; install it.",
        ),
        (
            jax.errors.JaxRuntimeError("INTERNAL: no.\nmore"),
            "The compiler refuses decode on cpu-8 (INTERNAL: no).",
        ),
    ],
)
def test_what_a_compiler_says_ends_in_a_sentence(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    # This process has its devices already.
    monkeypatch.setattr(topology, "prepare_environment", lambda mesh: None)
    monkeypatch.setattr(compile_room, "compile_step", refuse)
    assert main(["compile", "--mesh", "cpu-8"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--text", "folder", "folder' cannot be written (Is a directory); name another file"),
        ("--text", "absent/program.txt", "is in a folder that does not exist; make"),
        ("--save", "file", "file' cannot hold compiled programs (File exists); name a folder"),
    ],
)
def test_where_nothing_can_be_written_is_known_before_compiling(
    option: str,
    name: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    compiled: list[Any] = []
    monkeypatch.setattr(topology, "prepare_environment", lambda mesh: None)
    monkeypatch.setattr(compile_room, "compile_step", lambda *_, **__: compiled.append(1))
    assert main(["compile", "--mesh", "cpu-8", option, str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err and compiled == []


AXES = {"data": 1, "stage": 1, "expert": 1, "tensor": 1, "context": 1}


def test_least_exchange_of_experts() -> None:
    config = ModelConfig.preset("moe28t")
    assert least_all_to_all_bytes(config, AXES, 64) == 0
    # Two devices, a token each: of 16 experts at least one is nearly always on the other device.
    there_and_back = 2 * 3584 * 2 * 92
    two = least_all_to_all_bytes(config, AXES | {"expert": 2}, 2)
    assert two == round(there_and_back * (1 - 0.5**16))
    # The channels of a latent lie over `tensor` before and after.
    assert least_all_to_all_bytes(config, AXES | {"tensor": 2}, 2) == round(there_and_back * (1.5 - 0.5**16))
    # Stages have half of the layers each; copies of the model half of the tokens.
    assert least_all_to_all_bytes(config, AXES | {"expert": 2, "stage": 2}, 2) == pytest.approx(
        two / 2, abs=1
    )
    assert least_all_to_all_bytes(config, AXES | {"expert": 2, "data": 2}, 4) == two


def test_few_tokens_fill_a_part_of_the_room_for_them() -> None:
    config = ModelConfig.preset("moe28t")

    def share(batch: int, count: int) -> float:
        return assumptions(config, AXES | {"expert": 8, "tensor": 8}, batch, count)[0].copies_share

    # Eight rows on each of eight groups are one per device; half of them leave half of the devices without.
    assert [share(64, 1), share(32, 1)] == [1.0, 0.5]
    # One row's next token: every device holds it and one owns it.
    assert share(1, 1) == 1 / 64
    assert share(1, 8192) == 1.0


def test_what_uniform_routing_does() -> None:
    config = ModelConfig.preset("moe28t")
    axes = AXES | {"expert": 8, "tensor": 8}
    possible, uniform = assumptions(config, axes, 64, 1)
    assert possible.copies is None and possible.experts_share == 1.0
    # A token per device, which goes to each of 63 others where any of its 16 experts is there.
    assert uniform.copies == pytest.approx(63 * (1 - (63 / 64) ** 16))
    # 64 tokens choose 16 of 896 experts each.
    assert uniform.experts_share == pytest.approx(1 - (1 - 16 / 896) ** 64)
    # Two stages are busy in one of two turns each, and half of the devices hold each row.
    _, staged = assumptions(config, axes | {"stage": 2}, 64, 1)
    assert staged.experts_share == pytest.approx(uniform.experts_share / 2)
    assert staged.copies == pytest.approx((uniform.copies or 0.0) / 2)


def test_least_memory_traffic() -> None:
    config = ModelConfig.preset("moe28t")
    held = {
        "experts": 896_000,
        "dense": 10_000,
        "embedding": 7,
        "state": 500,
        "latents": 64_000,
        "index_keys": 3_000,
    }
    # One token chooses 16 of 896 experts and reads 2,048 of 131,072 latents.
    one = least_memory_bytes(config, AXES, "decode", 1, 131_072, 8192, held)
    assert one == 16_000 + 10_000 + 2 * 500 + 3_000 + 1_000
    # Eight tokens of uniform routing choose some experts twice; a program has room for 128.
    eight = (config, AXES, "decode", 8, 131_072, 8192, held)
    rest = least_memory_bytes(*eight) - 128_000
    assert least_memory_bytes(*eight, "uniform") == round(896_000 * (1 - (1 - 16 / 896) ** 8)) + rest
    many = least_memory_bytes(config, AXES, "prefill", 1, 131_072, 8192, held)
    assert many == 896_000 + 10_000 + 2 * 500 + 3_000 + 64_000
