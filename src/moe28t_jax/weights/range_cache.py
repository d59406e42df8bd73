"""Ranges of remote files that were already fetched, kept in a folder so that an interrupted load goes on."""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import os
import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.store import FileState, Store

T = TypeVar("T")
_log = logging.getLogger(__name__)


class CachedStore(Store):
    """Another store whose ranges are kept in a local folder.

    A file's ranges lie in one sparse file, at their own places; a journal beside it has a line with start, stop and
    CRC-32 for each, written after its bytes. A range is used only if its bytes still give that checksum, so what a
    kill or a full disk left unfinished is fetched again. Names contain the file's version: a changed object begins
    anew. Several processes of one machine may share a folder.

    Where the folder fails (its disk is full), that is logged once and the rest is fetched without being kept.

    Raises CheckpointError for a store that does not tell versions: a changed object could not be told from a kept one.
    """

    def __init__(self, store: Store, folder: str | Path) -> None:
        super().__init__(store.retry)
        self.store = store
        self.traffic = store.traffic
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"The cache folder {str(folder)!r} cannot be made: {error.strerror}."
            ) from error
        self.bytes_from_cache = 0
        self._failed = False
        self._files: dict[str, _CachedFile] = {}
        self._states: dict[str, FileState] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self.store.address

    def location(self, file: str) -> str:
        return self.store.location(file)

    def names(self) -> list[str]:
        return self.store.names()

    def state(self, file: str) -> FileState:
        state = self.store.state(file)
        with self._lock:
            self._states[file] = state
        return state

    def _file(self, file: str) -> _CachedFile:
        state = self._states.get(file) or self.state(file)
        if not state.version:
            raise CheckpointError(
                f"{self.location(file)!r} has neither ETag nor time of modification, so that a change would not be "
                "seen; load it without a cache."
            )
        with self._lock:
            if file not in self._files:
                self._files[file] = _CachedFile(self.folder, self.store.location(file), state)
            return self._files[file]

    def read_into(self, file: str, start: int, target: memoryview) -> None:
        position, stop = start, start + len(target)
        while position < stop:
            part = target[position - start :]
            cached = None if self._failed else self._guarded(lambda: self._file(file))
            if cached is None:
                self.store.read_into(file, position, part)
                return
            used = self._guarded(partial(cached.read, position, part))
            if used:
                with self._lock:
                    self.bytes_from_cache += used
                position += used
                continue
            until = min(stop, cached.next_after(position))
            part = target[position - start : until - start]
            self.store.read_into(file, position, part)
            self._guarded(partial(cached.keep, position, part))
            position = until

    def _guarded(self, action: Callable[[], T]) -> T | None:
        """The result of something done in the folder; None, and no more of it, where that fails."""
        try:
            return action()
        except OSError as error:
            with self._lock:
                if not self._failed:
                    _log.warning(
                        "The cache folder %r fails (%s); what is fetched from now on is not kept.",
                        str(self.folder),
                        error.strerror,
                    )
                self._failed = True
            return None


class _CachedFile:
    def __init__(self, folder: Path, location: str, state: FileState) -> None:
        identity = json.dumps([location, state.size, state.version])
        name = f"{location.rpartition('/')[2]}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        self._lock = threading.Lock()
        self._data = os.open(folder / f"{name}.ranges", os.O_RDWR | os.O_CREAT, 0o644)
        journal = folder / f"{name}.journal"
        self._ranges: dict[int, tuple[int, int]] = {}
        self._verified: set[int] = set()
        if journal.exists():
            for line in journal.read_text("ascii", errors="replace").splitlines():
                fields = line.split()
                # A line may have been cut short by a kill.
                if len(fields) == 4 and fields[3] == "." and all(field.isdecimal() for field in fields[:3]):
                    start, stop, checksum = map(int, fields[:3])
                    if start < stop <= state.size:
                        self._ranges[start] = (stop, checksum)
        self._starts = sorted(self._ranges)
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def read(self, position: int, target: memoryview) -> int:
        """Copy what a kept range has from `position` on; the number of bytes, 0 where none has any."""
        with self._lock:
            place = bisect.bisect_right(self._starts, position) - 1
            if place < 0:
                return 0
            start = self._starts[place]
            stop, checksum = self._ranges[start]
        if stop <= position:
            return 0
        count = min(len(target), stop - position)
        if start in self._verified:
            content = os.pread(self._data, count, position)
            target[: len(content)] = content
            return len(content)
        content = os.pread(self._data, stop - start, start)
        whole = len(content) == stop - start and zlib.crc32(content) == checksum
        with self._lock:
            if whole:
                self._verified.add(start)
            elif self._ranges.get(start) == (stop, checksum):
                # Another thread may have found the same, or fetched it again.
                self._starts.remove(start)
                del self._ranges[start]
        if not whole:
            return 0
        target[:count] = content[position - start : position - start + count]
        return count

    def next_after(self, position: int) -> int:
        """Where the next kept range begins."""
        with self._lock:
            place = bisect.bisect_right(self._starts, position)
            return self._starts[place] if place < len(self._starts) else 1 << 62

    def keep(self, start: int, content: memoryview) -> None:
        """Write a range, then its line."""
        checksum = zlib.crc32(content)
        written = 0
        while written < len(content):
            written += os.pwrite(self._data, content[written:], start + written)
        stop = start + len(content)
        os.write(self._journal, f"{start} {stop} {checksum} .\n".encode())
        with self._lock:
            if start not in self._ranges:
                bisect.insort(self._starts, start)
            self._ranges[start] = (stop, checksum)

    def __del__(self) -> None:
        for name in ("_data", "_journal"):
            if hasattr(self, name):
                os.close(getattr(self, name))
