"""Where a checkpoint's files lie: a folder, or an object store behind fsspec. Byte ranges, retries, counts."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe28t_jax.weights.errors import CheckpointError

T = TypeVar("T")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
# What file systems call the value that changes with a file's content.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "generation", "sha256", "blob_id", "sha", "checksum", "mtime", "modified",
    "last_modified", "LastModified", "Last-Modified", "created",
)  # fmt: skip
# These will be the same at the next try.
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, CheckpointError)
_PERMANENT_STATUS = (401, 403, 404, 405, 410)
# Of clients' own kinds of error, by name: they need not be installed.
_PERMANENT_NAMES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "SSOTokenLoadError",
    "DefaultCredentialsError",
    "RefreshError",
)
# Packages of clients, whose errors are no OSError in part.
_CLIENTS = (
    "aiohttp",
    "aiobotocore",
    "botocore",
    "gcsfs",
    "google",
    "requests",
    "urllib3",
    "httpx",
    "fsspec",
    "http",
)


@dataclass(frozen=True)
class Retry:
    """How often a failed request is repeated: `attempts` in all, the n-th wait drawn from 0.5..1 times
    `first_wait * 2**n` seconds, at most `longest_wait`."""

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 30.0
    sleep: Callable[[float], None] = time.sleep

    def call(self, action: Callable[[], T], what: str, count: Callable[[], None]) -> T:
        """The action's result. Raises CheckpointError naming `what` when every attempt failed, and at once for an
        error that would repeat: absent, not allowed, or none of a connection."""
        for attempt in range(self.attempts):
            try:
                return action()
            except _PERMANENT as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{what} cannot be read: {_reason(error)}.") from error
            except Exception as error:
                client = type(error).__module__.partition(".")[0] in _CLIENTS
                if client and _will_repeat(error):
                    raise CheckpointError(f"{what} cannot be read: {_reason(error)}.") from error
                if not client and not isinstance(error, (OSError, TimeoutError, EOFError)):
                    raise CheckpointError(
                        f"{what} cannot be read: {type(error).__name__}, {_reason(error)}."
                    ) from error
                if attempt + 1 == self.attempts:
                    raise CheckpointError(
                        f"{what} could not be read in {self.attempts} attempts ({_reason(error)}); check the "
                        "connection and load again."
                    ) from error
                count()
                wait = min(self.longest_wait, self.first_wait * 2**attempt)
                self.sleep(wait * random.uniform(0.5, 1.0))
        raise ValueError(f"attempts is {self.attempts}; at least one is needed.")


def _will_repeat(error: Exception) -> bool:
    """Whether a client's error is about what is asked for or who asks, and not about the connection."""
    if any(kind.__name__ in _PERMANENT_NAMES for kind in type(error).__mro__):
        return True
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    found = (metadata.get("HTTPStatusCode"), *(getattr(error, name, None) for name in ("code", "status")))
    return any(str(status) in map(str, _PERMANENT_STATUS) for status in found)


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[0][:200].rstrip(".")


@dataclass
class Traffic:
    """What was asked of a store: `requests` that succeeded, `bytes_read` by them, `retries`."""

    requests: int = 0
    bytes_read: int = 0
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, count: int) -> None:
        with self._lock:
            self.requests += 1
            self.bytes_read += count

    def retried(self) -> None:
        with self._lock:
            self.retries += 1


@dataclass(frozen=True)
class FileState:
    """Size in bytes, and what changes whenever the content does (a time of modification, an ETag); "" where a store
    tells no such thing."""

    size: int
    version: str


class Store:
    """Files of one folder, read by byte ranges. Methods raise CheckpointError, which names file and reason."""

    def __init__(self, retry: Retry | None = None) -> None:
        self.retry = retry or Retry()
        self.traffic = Traffic()

    @property
    def address(self) -> str:
        """The folder as the user named it."""
        raise NotImplementedError

    def location(self, file: str) -> str:
        """Path or address of a file, for messages and as identity."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Names of the folder's files, sorted."""
        raise NotImplementedError

    def state(self, file: str) -> FileState:
        """Size and version of a file."""
        raise NotImplementedError

    def _read_into(self, file: str, start: int, target: memoryview) -> int:
        raise NotImplementedError

    def read_into(self, file: str, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on, again and again until they all came."""

        def action() -> None:
            count = self._read_into(file, start, target)
            if count != len(target):
                raise OSError(f"{count} of {len(target)} bytes came")

        what = f"Bytes {start} to {start + len(target)} of {self.location(file)!r}"
        self.retry.call(action, what, self.traffic.retried)
        self.traffic.read(len(target))

    def read(self, file: str, start: int, stop: int) -> bytes:
        """The bytes of a range."""
        target = bytearray(stop - start)
        if target:
            self.read_into(file, start, memoryview(target))
        return bytes(target)

    def read_file(self, file: str, limit: int = 1 << 30) -> bytes:
        """A whole small file."""
        size = self.state(file).size
        if size > limit:
            raise CheckpointError(
                f"{self.location(file)!r} has {size} bytes, more than the {limit} that it may have; it is another file."
            )
        return self.read(file, 0, size)


class LocalStore(Store):
    """A folder of this machine."""

    def __init__(self, folder: str | Path, retry: Retry | None = None) -> None:
        super().__init__(retry)
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"There is no checkpoint at {str(folder)!r}: no such folder.")
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return str(self.folder)

    def location(self, file: str) -> str:
        return str(self.folder / file)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def state(self, file: str) -> FileState:
        path = self.folder / file
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        if not path.is_file():
            # A named pipe would be waited for.
            raise CheckpointError(f"{str(path)!r} is not a regular file.")
        return FileState(status.st_size, str(status.st_mtime_ns))

    def _read_into(self, file: str, start: int, target: memoryview) -> int:
        with self._lock:
            handle = self._files.get(file)
            if handle is None:
                handle = self._files[file] = os.open(self.folder / file, os.O_RDONLY)
        count = 0
        while count < len(target):
            got = os.preadv(handle, [target[count:]], start + count)
            if got == 0:
                raise CheckpointError(
                    f"{self.location(file)!r} ends at byte {start + count}, earlier than when loading began; it was "
                    "changed meanwhile."
                )
            count += got
        return count

    def __del__(self) -> None:
        for handle in getattr(self, "_files", {}).values():
            os.close(handle)


class RemoteStore(Store):
    """A folder of an object store: s3://, gs:// and whatever else fsspec has a file system for."""

    def __init__(
        self, address: str, retry: Retry | None = None, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(retry)
        import fsspec

        self._address = address.rstrip("/")
        scheme = address.partition("://")[0]
        try:
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(self._address, **(options or {}))
        except ImportError as error:
            package = _PACKAGES.get(scheme, "a package for it")
            raise CheckpointError(
                f"{address!r} needs {package}, which is not installed; it is in the extra `cloud`."
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{address!r} begins with {scheme}://, which no installed package can read: {_reason(error)}."
            ) from error

    @property
    def address(self) -> str:
        return self._address

    def location(self, file: str) -> str:
        return f"{self._address}/{file}" if file else self._address

    def _path(self, file: str) -> str:
        return f"{self._root.rstrip('/')}/{file}"

    def names(self) -> list[str]:
        def action() -> list[str]:
            # File systems keep listings; not all know a `refresh` argument.
            self._files.invalidate_cache(self._root)
            found = self._files.ls(self._root, detail=True)
            return sorted(
                item["name"].rstrip("/").rpartition("/")[2] for item in found if item["type"] == "file"
            )

        return self.retry.call(action, f"The list of files of {self._address!r}", self.traffic.retried)

    def state(self, file: str) -> FileState:
        def action() -> FileState:
            # Else the answer may be that of an earlier listing, and a change would not be seen.
            self._files.invalidate_cache(self._path(file))
            info = self._files.info(self._path(file))
            version = next((info[key] for key in _VERSIONS if info.get(key)), "")
            return FileState(int(info["size"]), str(version))

        return self.retry.call(action, repr(self.location(file)), self.traffic.retried)

    def _read_into(self, file: str, start: int, target: memoryview) -> int:
        content = self._files.cat_file(self._path(file), start=start, end=start + len(target))
        if len(content) == len(target):
            target[:] = content
        return len(content)


def is_remote(source: str | Path) -> bool:
    """Whether a source is an address such as s3://bucket/folder."""
    return "://" in str(source)


def open_store(
    source: str | Path, retry: Retry | None = None, options: dict[str, Any] | None = None
) -> Store:
    """The store behind a folder or an address. `options` go to fsspec's file system (endpoint, credentials)."""
    if is_remote(source):
        return RemoteStore(str(source), retry, options)
    return LocalStore(Path(source).expanduser(), retry)
