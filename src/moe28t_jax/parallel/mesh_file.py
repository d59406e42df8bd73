"""Mesh files: one deployment as data. Read without JAX, so that a deployment can be planned before it is rented."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

AXES: tuple[str, ...] = ("data", "stage", "expert", "tensor", "context")
"""The mesh axes in order: copies of the model, pipeline stages, experts (which otherwise carry rows), attention heads
(folded with `expert` for the experts), tokens of long rows."""

MAX_TENSOR = 32
"""Beyond this a device would hold fewer than three of the family's 96 attention heads."""

_HEADS = 96
_TOP = {
    "kind": str,
    "topology": str,
    "chips": int,
    "devices": int,
    "spare_devices": int,
    "reason": str,
    "pad_experts": bool,
    "axes": dict,
    "defaults": dict,
}
_OPTIONAL = {"spare_devices", "pad_experts"}
_DEFAULTS = ("batch", "context")


@dataclass(frozen=True)
class MeshFile:
    """One deployment.

    name: the file's name without its ending. kind: the chip (`tpu7x`, `h200`). topology: how the chips are wired,
    sizes joined by `x`: of the torus for TPUs, hosts x chips elsewhere. chips: how many are rented. devices: how
    many the mesh uses (a chip may be two devices); spare_devices more are rented and stand by. axes: size of each
    of `AXES`. batch, context: what to plan and compile for when nothing else is said. reason: why these sizes.
    pad_experts: leave places for experts empty where the mesh does not divide their number
    (`moe28t_jax.parallel.pad_experts`), which otherwise is an error.
    """

    name: str
    kind: str
    topology: str
    chips: int
    devices: int
    axes: Mapping[str, int]
    batch: int = 1
    context: int = 1
    reason: str = ""
    spare_devices: int = 0
    pad_experts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", dict(self.axes))
        _validate(self)

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.topology, self.chips, self.devices, *self.sizes))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of `AXES`: the shape of the device array."""
        return tuple(self.axes[axis] for axis in AXES)

    @property
    def wiring(self) -> tuple[int, ...]:
        """`topology` as numbers."""
        return tuple(int(size) for size in self.topology.split("x"))

    @property
    def devices_per_chip(self) -> int:
        return (self.devices + self.spare_devices) // self.chips

    def describe_axes(self) -> str:
        """The axes larger than one, for people: `expert 8 x tensor 8`."""
        used = [f"{axis} {self.axes[axis]}" for axis in AXES if self.axes[axis] > 1]
        return " x ".join(used) or "one device"


def load_mesh_file(source: str | Path) -> MeshFile:
    """Read a mesh file by path, or by name (`tpu7x-4x4x2`) from those installed with the package.

    Raises FileNotFoundError, listing the names, where there is neither; ValueError for content that is no mesh.
    """
    path = Path(source)
    if path.is_file() or (path.suffix == ".toml" and path.exists()):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"The mesh file {str(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8."
            ) from None
        return _parse(path.stem, str(path), text)
    names = mesh_file_names()
    if str(source) not in names:
        raise FileNotFoundError(
            f"There is no mesh file {str(source)!r}; name one of {', '.join(names)}, or give the path of a .toml file."
        )
    return _parse(str(source), f"{source}.toml", (_folder() / f"{source}.toml").read_text(encoding="utf-8"))


def mesh_file_names() -> tuple[str, ...]:
    """Names of the mesh files installed with the package, sorted."""
    entries = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


def _folder() -> Any:
    try:
        return resources.files("mesh_configs")
    except ModuleNotFoundError:
        raise FileNotFoundError(
            "The folder mesh_configs is not installed beside moe28t_jax; reinstall the package, or give the path of "
            "a mesh file."
        ) from None


def _parse(name: str, shown: str, text: str) -> MeshFile:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and tables beyond what Python reads
        raise ValueError(f"The mesh file {shown!r} is not TOML that can be read: {error}.") from None
    _check_keys(shown, "", document, tuple(_TOP), _OPTIONAL)
    for key, kind in _TOP.items():
        if key in document and (
            not isinstance(document[key], kind) or (kind is int and isinstance(document[key], bool))
        ):
            word = {str: "a text", int: "a whole number", dict: "a table", bool: "true or false"}[kind]
            raise ValueError(
                f"The mesh file {shown!r} has {key} = {document[key]!r}, where {word} is expected."
            )
    _check_keys(shown, "axes.", document["axes"], AXES, set())
    _check_keys(shown, "defaults.", document["defaults"], _DEFAULTS, set())
    for table in ("axes", "defaults"):
        for key, value in document[table].items():
            if type(value) is not int:
                raise ValueError(
                    f"The mesh file {shown!r} has {table}.{key} = {value!r}, where a whole number is expected."
                )
    try:
        return MeshFile(
            name=name,
            kind=document["kind"],
            topology=document["topology"],
            chips=document["chips"],
            devices=document["devices"],
            axes=document["axes"],
            batch=document["defaults"]["batch"],
            context=document["defaults"]["context"],
            reason=document["reason"],
            spare_devices=document.get("spare_devices", 0),
            pad_experts=document.get("pad_experts", False),
        )
    except ValueError as error:
        raise ValueError(f"The mesh file {shown!r} cannot be used: {error}") from None


def _check_keys(
    shown: str, prefix: str, table: Mapping[str, Any], known: tuple[str, ...], optional: set[str]
) -> None:
    unknown = [prefix + key for key in table if key not in known]
    if unknown:
        listed = ", ".join(prefix + key for key in known)
        raise ValueError(
            f"The mesh file {shown!r} has the unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}; "
            f"it may have {listed}."
        )
    missing = [prefix + key for key in known if key not in table and key not in optional]
    if missing:
        raise ValueError(f"The mesh file {shown!r} lacks {', '.join(missing)}; add what is missing.")


def _validate(mesh: MeshFile) -> None:
    if sorted(mesh.axes) != sorted(AXES):
        raise ValueError(
            f"the axes are {', '.join(mesh.axes) or 'none'}; a mesh has exactly {', '.join(AXES)}."
        )
    numbers = {f"axes.{axis}": mesh.axes[axis] for axis in AXES}
    numbers |= {"chips": mesh.chips, "devices": mesh.devices, "batch": mesh.batch, "context": mesh.context}
    for key, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{key} is {value!r}; it is a positive whole number.")
    if type(mesh.spare_devices) is not int or mesh.spare_devices < 0:
        raise ValueError(f"spare_devices is {mesh.spare_devices!r}; it is zero or a positive whole number.")
    product = prod(mesh.sizes)
    if product != mesh.devices:
        shown = " x ".join(f"{axis} {mesh.axes[axis]}" for axis in AXES)
        raise ValueError(
            f"the axes {shown} make {product} devices, but devices is {mesh.devices}; make them agree."
        )
    tensor = mesh.axes["tensor"]
    if _HEADS % tensor or tensor > MAX_TENSOR:
        allowed = ", ".join(str(size) for size in range(1, MAX_TENSOR + 1) if _HEADS % size == 0)
        raise ValueError(
            f"axes.tensor is {tensor}; attention heads are never torn, so it is a divisor of {_HEADS} up to "
            f"{MAX_TENSOR}: {allowed}."
        )
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", mesh.topology):
        raise ValueError(f"topology is {mesh.topology!r}; write sizes joined by x, such as 4x4x2.")
    if prod(mesh.wiring) != mesh.chips:
        raise ValueError(
            f"topology {mesh.topology} has {prod(mesh.wiring)} chips, but chips is {mesh.chips}; make them agree."
        )
    if (mesh.devices + mesh.spare_devices) % mesh.chips:
        raise ValueError(
            f"{mesh.devices} devices and {mesh.spare_devices} spare ones do not divide over {mesh.chips} chips; "
            "count all devices of every chip."
        )
