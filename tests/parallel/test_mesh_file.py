"""Mesh files: the shipped ones are valid and what they claim; anything else is refused in a sentence."""

import re
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path

import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.parallel import AXES, MeshFile, load_mesh_file, mesh_file_names
from moe28t_jax.planning import chip, make_plan

DEPLOYMENTS = (
    "b200-16", "cpu-8", "gb200-nvl72", "h100-32", "h200-16", "tpu7x-4x4x2", "tpu7x-4x4x4", "tpu7x-4x4x8",
    "v5p-4x4x4", "v5p-4x4x8", "v5p-8x8x16", "v6e-16x16",
)  # fmt: skip
GOOD = """
kind = "h200"
topology = "2x8"
chips = 16
devices = 16
reason = "a test"
[axes]
data = 1
stage = 1
expert = 2
tensor = 8
context = 1
[defaults]
batch = 8
context = 131072
"""


def read(tmp_path: Path, text: str) -> MeshFile:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_mesh_file(path)


def test_all_deployments_ship() -> None:
    assert mesh_file_names() == DEPLOYMENTS


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_shipped_file_is_what_its_name_says(name: str) -> None:
    mesh = load_mesh_file(name)
    assert mesh.name == name and name.startswith(mesh.kind)
    assert prod(mesh.sizes) == mesh.devices
    assert prod(mesh.wiring) == mesh.chips
    assert mesh.devices + mesh.spare_devices == mesh.chips * chip(mesh.kind).devices_per_chip
    if mesh.kind in ("v5p", "v6e", "tpu7x"):
        assert name == f"{mesh.kind}-{mesh.topology}"
    else:
        assert str(mesh.chips) in name
    assert len(mesh.reason.split()) > 10 and "\n" not in mesh.reason


@pytest.mark.parametrize("name", [name for name in DEPLOYMENTS if name != "cpu-8"])
def test_a_shipped_file_holds_moe28t_at_its_defaults(name: str) -> None:
    plan = make_plan(ModelConfig.preset("moe28t"), load_mesh_file(name))
    assert plan.fits, plan.arithmetic()


def test_the_test_mesh_holds_nano() -> None:
    assert make_plan(ModelConfig.preset("nano"), load_mesh_file("cpu-8")).fits


def test_a_file_is_found_by_path_too(tmp_path: Path) -> None:
    mesh = read(tmp_path, GOOD)
    assert (mesh.name, mesh.sizes, mesh.batch, mesh.context) == ("mine", (1, 1, 2, 8, 1), 8, 131072)
    assert mesh.describe_axes() == "expert 2 x tensor 8"
    assert hash(mesh) == hash(load_mesh_file(tmp_path / "mine.toml"))
    with pytest.raises(AttributeError):
        mesh.chips = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("tensor = 8", "tensor = 4", r"stage 1 x expert 2 x tensor 4 x context 1 make 8 devices, but devices is 16"),
        ("expert = 2\ntensor = 8", "expert = 1\ntensor = 16", None),
        ("expert = 2\ntensor = 8", "expert = 16\ntensor = 1", None),
        ("chips = 16", "chips = 8", r"topology 2x8 has 16 chips, but chips is 8"),
        ("devices = 16", "devices = 16\nspare_devices = 7", r"16 devices and 7 spare ones do not divide over 16 chips"),
        ("devices = 16", "devices = 16\nspare_devices = -1", r"spare_devices is -1"),
        ('topology = "2x8"', 'topology = "2 by 8"', r"topology is '2 by 8'; write sizes joined by x"),
        ("data = 1", "data = 0", r"axes\.data is 0; it is a positive whole number"),
        ("data = 1", "data = true", r"axes\.data = True, where a whole number is expected"),
        ("batch = 8", "batch = 1.5", r"defaults\.batch = 1\.5, where a whole number is expected"),
        ("chips = 16", "chips = true", r"chips = True, where a whole number is expected"),
        ("chips = 16", 'chips = "16"', r"chips = '16', where a whole number is expected"),
        ("data = 1\n", "", r"lacks axes\.data"),
        ("batch = 8\n", "", r"lacks defaults\.batch"),
        ('kind = "h200"\n', "", r"lacks kind"),
        ("batch = 8", "batch = 8\nbach = 2", r"unknown key defaults\.bach; it may have defaults\.batch"),
        ("data = 1", "data = 1\nmodel = 2\nfsdp = 3", r"unknown keys axes\.model, axes\.fsdp; it may have axes\.data"),
        ('kind = "h200"', 'kind = "h200"\nprice = 3', r"unknown key price"),
        ('kind = "h200"', "kind = h200", r"is not TOML"),
        ('kind = "h200"', "kind = " + "[" * 20_000, r"is not TOML that can be read"),
        ("data = 1", "data = " + "9" * 5_000, r"is not TOML that can be read"),
        ("data = 1", 'pad_experts = 1\ndata = 1', r"unknown key axes\.pad_experts"),
        ('kind = "h200"', 'kind = "h200"\npad_experts = 1', r"pad_experts = 1, where true or false is expected"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, sentence: str | None) -> None:
    text = GOOD.replace(old, new)
    assert text != GOOD
    if sentence is None:
        assert read(tmp_path, text).devices == 16
        return
    with pytest.raises(ValueError, match=sentence) as caught:
        read(tmp_path, text)
    assert "mine.toml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("tensor", [5, 7, 9, 48, 64, 96])
def test_heads_are_never_torn(tensor: int) -> None:
    axes = dict.fromkeys(AXES, 1) | {"tensor": tensor}
    with pytest.raises(ValueError, match=f"axes.tensor is {tensor}; attention heads are never torn"):
        MeshFile("x", "h200", str(tensor), tensor, tensor, axes)


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
def test_divisors_of_96_up_to_32_are_fine(tensor: int) -> None:
    axes = dict.fromkeys(AXES, 1) | {"tensor": tensor}
    assert MeshFile("x", "h200", str(tensor), tensor, tensor, axes).sizes == (1, 1, 1, tensor, 1)


def test_axes_must_be_these_five() -> None:
    with pytest.raises(ValueError, match="a mesh has exactly data, stage, expert, tensor, context"):
        MeshFile("x", "h200", "1", 1, 1, {"data": 1})


def test_an_absent_name_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no mesh file 'tpu9'; name one of b200-16, .*v6e-16x16, or give the"
    ):
        load_mesh_file("tpu9")
    with pytest.raises(FileNotFoundError):
        load_mesh_file(tmp_path / "absent.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_mesh_file(tmp_path / "bytes.toml")


def test_no_jax_is_needed() -> None:
    program = (
        "import sys; from moe28t_jax.parallel import load_mesh_file; from moe28t_jax.planning import make_plan; "
        "from moe28t_jax.config import ModelConfig; "
        "make_plan(ModelConfig.preset('nano'), load_mesh_file('cpu-8')); "
        "print(sorted({'jax', 'jaxlib', 'flax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_wheel_carries_the_mesh_files() -> None:
    root = Path(__file__).parents[2]
    built = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert "mesh_configs" in built["packages"]
    assert {path.stem for path in (root / "mesh_configs").glob("*.toml")} == set(DEPLOYMENTS)


def test_the_readme_lists_every_mesh_file() -> None:
    text = (Path(__file__).parents[2] / "mesh_configs" / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([\w-]+)`", text, re.MULTILINE)) == set(DEPLOYMENTS)
