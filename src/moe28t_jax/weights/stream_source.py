"""A checkpoint behind a store: which tensor lies at which bytes of which file, from headers alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from moe28t_jax.config import ModelConfig
from moe28t_jax.weights.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TensorInfo,
    TensorTable,
    config_of,
    weight_map_of,
)
from moe28t_jax.weights.checksums import CHECKSUM_FILE, check_listed, parse_checksums
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.safetensors import read_header
from moe28t_jax.weights.store import FileState, Store


class StreamedCheckpoint(TensorTable):
    """The headers of all shards; `checksums` by tensor name, empty where the folder has none.

    Raises CheckpointError for an absent or truncated shard, a damaged header, and an index that contradicts the
    shards.
    """

    def __init__(self, store: Store, workers: int = 16) -> None:
        super().__init__()
        self.store = store
        self.source = store.address
        self._states: dict[str, FileState] = {}
        self._data: dict[str, int] = {}
        names = set(store.names())
        if {SINGLE_FILE, INDEX_FILE} <= names:
            raise CheckpointError(
                f"{store.address!r} holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is not meant."
            )
        weight_map: dict[str, str] = {}
        if SINGLE_FILE in names:
            shards = [SINGLE_FILE]
        elif INDEX_FILE in names:
            weight_map = weight_map_of(self._json(INDEX_FILE), store.location(INDEX_FILE))
            shards = sorted(set(weight_map.values()))
        else:
            raise CheckpointError(f"{store.address!r} has neither {SINGLE_FILE} nor {INDEX_FILE}.")
        absent = [shard for shard in shards if shard not in names]
        if absent:
            raise CheckpointError(
                f"{store.location(INDEX_FILE)!r} names shards that are not there: {and_more(absent)}; fetch them."
            )
        with ThreadPoolExecutor(workers, thread_name_prefix="headers") as pool:
            for shard, (state, header) in zip(shards, pool.map(self._open, shards), strict=True):
                self._states[shard], self._data[shard] = state, header.start
                self._add(shard, header.entries)
        if weight_map:
            self._check_index(weight_map, self._states)
        self.checksums: dict[str, int] = {}
        if CHECKSUM_FILE in names:
            where = store.location(CHECKSUM_FILE)
            self.checksums = parse_checksums(self._json(CHECKSUM_FILE), where)
            names = self._shard_of.keys()
            check_listed(self.checksums, names, names | self.checksums.keys(), where)

    def _open(self, shard: str):
        state = self.store.state(shard)
        return state, read_header(
            self.location(shard), state.size, lambda start, stop: self.store.read(shard, start, stop)
        )

    def _json(self, file: str) -> object:
        try:
            return json.loads(self.store.read_file(file))
        except (ValueError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.location(file)!r} is not valid JSON: {error}.") from error

    def location(self, file: str) -> str:
        return self.store.location(file)

    def start_of(self, name: str) -> int:
        """Byte of its shard at which a tensor begins."""
        return self._data[self.shard_of(name)] + self.entry(name).start

    def config(self) -> ModelConfig:
        """The configuration beside the tensors. Raises CheckpointError when it is absent or not supported."""
        return config_of(self._json(CONFIG_FILE), self.location(CONFIG_FILE))

    def describe(self) -> list[TensorInfo]:
        """Every stored tensor, in the order of its bytes."""
        places = sorted((self.shard_of(name), self.start_of(name), name) for name in self)
        return [
            TensorInfo(name, self.entry(name).dtype, self.entry(name).shape, self.entry(name).nbytes, shard)
            for shard, _, name in places
        ]

    def check_unchanged(self, shard: str) -> None:
        """Raise CheckpointError when a shard that was opened is another one now."""
        before, now = self._states[shard], self.store.state(shard)
        if now != before:
            raise CheckpointError(
                f"{self.location(shard)!r} was changed while it was read ({before.size} bytes before, {now.size} now); "
                "load again."
            )
