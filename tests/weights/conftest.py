"""Small checkpoints to load and to damage."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe28t_jax.weights.safetensors import SafetensorsFile, SafetensorsWriter

DATA = Path(__file__).parents[1] / "golden" / "data"
TINY = ["k3_tiny_bf16", "k3_tiny_mxfp4", "k31_tiny", "k31_tiny_mxfp4", "kimi_linear_tiny"]


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> Path:
    """Each of the recorded tiny checkpoints."""
    return DATA / request.param


@pytest.fixture
def data() -> Path:
    return DATA


class Folder:
    """A copy of a tiny checkpoint that a test may change: tensors as (dtype, shape, bytes) by name."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = path
        path.mkdir()
        shutil.copy(source / "config.json", path / "config.json")
        file = SafetensorsFile(source / "model.safetensors")
        self.tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = {}
        for name, entry in file.entries.items():
            value = np.array(file.view(name))
            self.tensors[name] = (entry.dtype, entry.shape, value.reshape(-1).view(np.uint8))

    def rename(self, change: Callable[[str], str]) -> None:
        self.tensors = {change(name): tensor for name, tensor in self.tensors.items()}

    def edit_config(self, change: Callable[[dict[str, Any]], None]) -> None:
        file = self.path / "config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    def write(self) -> Path:
        """Write everything to one file."""
        write_file(self.path / "model.safetensors", self.tensors)
        return self.path

    def write_shards(self, count: int) -> Path:
        """Write tensors to `count` shards in turn, and their index."""
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        tensors = list(self.tensors.items())
        for i, shard in enumerate(names):
            write_file(self.path / shard, dict(tensors[i::count]))
        weight_map = {name: names[i % count] for i, (name, _) in enumerate(tensors)}
        self.write_index(weight_map)
        return self.path

    def write_index(self, weight_map: object) -> None:
        content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(content))


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray]]) -> None:
    with SafetensorsWriter(
        path, {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    ) as writer:
        for name, (_, _, content) in tensors.items():
            writer.write(name, content)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Callable[[str], Folder]]:
    """Makes a changeable copy of a tiny checkpoint by name."""
    count = 0

    def make(name: str = "k3_tiny_mxfp4") -> Folder:
        nonlocal count
        count += 1
        return Folder(DATA / name, tmp_path / f"checkpoint{count}")

    yield make


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, bytes]]:
    """Content of every file below a folder."""

    def take(path: Path) -> dict[str, bytes]:
        return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}

    return take
