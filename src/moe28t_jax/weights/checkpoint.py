"""A checkpoint folder in the public Hugging Face layout: which tensor lies in which shard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe28t_jax.config import ModelConfig
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.safetensors import Entry, SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


class TensorInfo(NamedTuple):
    """One stored tensor as `describe` lists it; `nbytes` are bytes on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: str


def read_json(path: Path) -> object:
    """Parsed JSON. Raises CheckpointError when the file is absent or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON: {error}.") from error


class TensorTable:
    """The tensors of a checkpoint by name: dtype, shape and shard, however their bytes are reached.

    `source` is what the user named.
    """

    source: str | Path

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._shard_of: dict[str, str] = {}

    def location(self, file: str) -> str:
        """Path or address of one file of the checkpoint, as error messages name it."""
        raise NotImplementedError

    def _add(self, shard: str, entries: Mapping[str, Entry]) -> None:
        for name in entries:
            if name in self._shard_of:
                raise CheckpointError(
                    f"Tensor {name!r} is stored twice, in {self._shard_of[name]!r} and in {shard!r} of "
                    f"{self.location('')!r}; remove one of the shards."
                )
            self._shard_of[name] = shard
        self._entries |= entries

    def _check_index(self, weight_map: Mapping[str, str], shards: Collection[str]) -> None:
        """Raise CheckpointError where the index contradicts the shards that were opened."""
        index = self.location(INDEX_FILE)
        for name, shard in weight_map.items():
            if shard in shards and self._shard_of.get(name) != shard:
                raise CheckpointError(
                    f"{index!r} places tensor {name!r} in {shard!r}, which does not hold it."
                )
        unlisted = [name for name in self._shard_of if name not in weight_map]
        if unlisted:
            shard = self._shard_of[unlisted[0]]
            raise CheckpointError(f"{index!r} does not list {and_more(unlisted)}, found in {shard!r}.")

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def shard_of(self, name: str) -> str:
        """File name of the shard that holds a tensor."""
        return self._shard_of[name]

    def where(self, name: str) -> str:
        """Tensor and file as error messages name them."""
        return f"tensor {name!r} of {self.location(self._shard_of[name])!r}"

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of one tensor."""
        return self._entries[name]


def weight_map_of(content: object, where: str) -> dict[str, str]:
    """Tensor names and their shards, from the parsed index `where`. Raises CheckpointError where it has none."""
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where!r} has no weight_map from tensor names to shards.")
    for name, shard in weight_map.items():
        # The name is a file of this folder: anything else could lead out of it.
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", shard):
            raise CheckpointError(f"{where!r} maps tensor {name!r} to {shard!r}, which names no shard file.")
    return weight_map


def config_of(content: object, where: str) -> ModelConfig:
    """The configuration in the parsed config.json `where`. Raises CheckpointError when it is not supported."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where!r} is not a JSON object.")
    try:
        return ModelConfig.from_hf(content)
    except ValueError as error:
        raise CheckpointError(f"{where!r} is not a usable configuration: {error}") from error


class Checkpoint(TensorTable):
    """All shards of a folder (or one `.safetensors` file), mapped; nothing is read until a view is sliced.

    With `wanted`, only shards that the index gives a tensor of which it is true are opened: the others may be
    absent or damaged, and their tensors are not in it. `partial`: so, or one file was named. Raises CheckpointError
    for an absent source, an index that contradicts the opened shards, or a damaged shard among them.
    """

    def __init__(self, source: str | Path, wanted: Callable[[str], bool] | None = None) -> None:
        super().__init__()
        path = Path(source)
        self.source = path
        self._wanted = wanted
        self.partial = wanted is not None or path.is_file()
        self.shards: dict[str, SafetensorsFile] = {}
        if path.is_file():
            if path.suffix != ".safetensors":
                raise CheckpointError(f"{str(path)!r} is neither a folder nor a .safetensors file.")
            self.folder = path.parent
            self._open([path.name])
        elif path.is_dir():
            self.folder = path
            self._open_folder()
        else:
            raise CheckpointError(f"There is no checkpoint at {str(path)!r}: no such folder or file.")

    def location(self, file: str) -> str:
        return str(self.folder / file)

    def _open_folder(self) -> None:
        single, index = self.folder / SINGLE_FILE, self.folder / INDEX_FILE
        if single.exists() and index.exists():
            raise CheckpointError(
                f"{str(self.folder)!r} holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that "
                "is not meant."
            )
        if single.exists():
            self._open([SINGLE_FILE])
            return
        if not index.exists():
            stray = sorted(file.name for file in self.folder.glob("*.safetensors"))
            found = f"; it has {and_more(stray)}, which only an index can join" if stray else ""
            raise CheckpointError(f"{str(self.folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}.")
        weight_map = weight_map_of(read_json(index), str(index))
        wanted = self._wanted
        shards = sorted({shard for name, shard in weight_map.items() if wanted is None or wanted(name)})
        absent = [shard for shard in shards if not (self.folder / shard).is_file()]
        if absent:
            raise CheckpointError(
                f"{str(index)!r} names shards that are not there: {and_more(absent)}; fetch them."
            )
        self._open(shards)
        self._check_index(weight_map, self.shards)

    def _open(self, shards: list[str]) -> None:
        for shard in shards:
            file = SafetensorsFile(self.folder / shard)
            self._add(shard, file.entries)
            self.shards[shard] = file

    def view(self, name: str) -> np.ndarray:
        """Read-only mapped view of one tensor (FP4: bytes of two codes)."""
        return self.shards[self._shard_of[name]].view(name)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of one tensor, mapped and read-only."""
        return self.shards[self._shard_of[name]].raw(name)

    def release(self, name: str) -> None:
        """Drop the resident pages of one tensor that has been consumed."""
        self.shards[self._shard_of[name]].release(name)

    def config(self) -> ModelConfig:
        """The configuration beside the tensors. Raises CheckpointError when it is absent or not supported."""
        path = self.folder / CONFIG_FILE
        return config_of(read_json(path), str(path))


def describe(source: str | Path) -> list[TensorInfo]:
    """Every stored tensor, in the order of its bytes, without reading any tensor."""
    checkpoint = Checkpoint(source)
    return [
        TensorInfo(name, entry.dtype, entry.shape, entry.nbytes, shard)
        for shard, file in checkpoint.shards.items()
        for name, entry in file.entries.items()
    ]
