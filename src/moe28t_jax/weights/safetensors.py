"""Reader and writer of the safetensors format: a JSON header, then the tensors' bytes without gaps.

The reader maps the file and reads nothing until a view is sliced. It knows the narrow types (FP8, E8M0,
FP4) that NumPy has no names for, and checks the header against the file's size before any tensor is trusted.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moe28t_jax.weights.errors import CheckpointError

# Name in the header -> (NumPy type of the view, bits per element). FP4 is viewed as bytes of two codes.
DTYPES: dict[str, tuple[np.dtype, int]] = {
    "F64": (np.dtype(np.float64), 64),
    "F32": (np.dtype(np.float32), 32),
    "F16": (np.dtype(np.float16), 16),
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "U8": (np.dtype(np.uint8), 8),
    "I8": (np.dtype(np.int8), 8),
    "I16": (np.dtype(np.int16), 16),
    "I32": (np.dtype(np.int32), 32),
    "I64": (np.dtype(np.int64), 64),
    "U16": (np.dtype(np.uint16), 16),
    "U32": (np.dtype(np.uint32), 32),
    "U64": (np.dtype(np.uint64), 64),
    "BOOL": (np.dtype(np.bool_), 8),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E5M2": (np.dtype(ml_dtypes.float8_e5m2), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "F4": (np.dtype(np.uint8), 4),
}
ALIASES = {
    "F4_E2M1": "F4",
    "F4_E2M1FN": "F4",
    "F4_E2M1FN_X2": "F4",
    "F8_E4M3FN": "F8_E4M3",
    "F8_E8M0FNU": "F8_E8M0",
}
_NAMES = {dtype: name for name, (dtype, bits) in DTYPES.items() if bits == 8 * dtype.itemsize}
_MAX_HEADER = 100_000_000
_MAX_SIZE = 2**62
_MARGIN = 1 << 16


class Entry(NamedTuple):
    """One tensor of a file: `dtype` in the header's spelling, `start` and `stop` in bytes after the
    header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def dtype_name(dtype: Any) -> str:
    """The header's name of a NumPy or ml-dtypes type. Raises KeyError for a type without one."""
    return _NAMES[np.dtype(dtype)]


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; an odd number of FP4 codes takes half a byte more."""
    return -(-prod(shape) * DTYPES[dtype][1] // 8)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} appears twice")
        result[name] = value
    return result


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def _parse_entry(name: str, value: Any) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or ALIASES.get(dtype, dtype) not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    dtype = ALIASES.get(dtype, dtype)
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(_is_natural, shape)):
        raise ValueError(f"tensor {name!r} has no valid shape: {shape!r:.80}")
    if prod(size for size in shape if size) > _MAX_SIZE:
        raise ValueError(f"tensor {name!r} has an impossibly large shape: {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_natural, offsets)):
        raise ValueError(f"tensor {name!r} has no valid data_offsets: {offsets!r:.80}")
    start, stop = offsets
    expected = tensor_bytes(dtype, shape)
    if stop - start != expected:
        raise ValueError(
            f"tensor {name!r} of shape {shape} and dtype {dtype} needs {expected} bytes, "
            f"but its data_offsets {offsets} span {stop - start}"
        )
    return Entry(dtype, tuple(shape), start, stop)


def parse_header(text: bytes) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries in the order of their bytes, and the metadata. Raises ValueError with the reason."""
    if not text.startswith(b"{"):
        raise ValueError("the header does not begin with '{'")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ does not map strings to strings")
    entries = {name: _parse_entry(name, value) for name, value in header.items()}
    # Half a million experts have three shapes.
    shared: dict[Any, Any] = {}
    entries = {
        name: Entry(shared.setdefault(dtype, dtype), shared.setdefault(shape, shape), start, stop)
        for name, (dtype, shape, start, stop) in entries.items()
    }
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end, before = 0, None
    for name, entry in entries.items():
        if entry.start != end:
            what = "overlaps" if entry.start < end else "leaves a gap after"
            raise ValueError(f"tensor {name!r} {what} {f'tensor {before!r}' if before else 'the header'}")
        end, before = entry.stop, name
    return entries, metadata


class Header(NamedTuple):
    """A checked header: `entries` by tensor name, and `start`, the byte of the file at which tensors begin."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    start: int


def read_header(where: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """The header of a file of `size` bytes, of which `read(start, stop)` gives a range.

    `where` names the file in errors. Raises CheckpointError when the file is truncated, or its header
    contradicts itself or the file's size.
    """
    length = read(0, min(8, size))
    if len(length) < 8:
        raise CheckpointError(_broken(where, f"it is {size} bytes long, less than a header"))
    header_size = int.from_bytes(length, "little")
    if header_size > min(_MAX_HEADER, size - 8):
        raise CheckpointError(
            _broken(
                where,
                f"its header claims {header_size} bytes, but the file has {size - 8} after the length",
            )
        )
    try:
        entries, metadata = parse_header(read(8, 8 + header_size))
    except ValueError as error:
        raise CheckpointError(_broken(where, str(error))) from error
    start = 8 + header_size
    available = size - start
    needed = max((entry.stop for entry in entries.values()), default=0)
    if needed > available:
        name, entry = next((n, e) for n, e in entries.items() if e.stop > available)
        raise CheckpointError(
            f"The shard {where!r} is truncated: tensor {name!r} ends at byte {start + entry.stop}, the file at "
            f"{size}; fetch it again."
        )
    if needed < available:
        raise CheckpointError(_broken(where, f"{available - needed} bytes follow its last tensor"))
    return Header(entries, metadata, start)


def _broken(where: str, reason: str) -> str:
    return f"The shard {where!r} is not a valid safetensors file: {reason}; fetch it again."


class SafetensorsFile:
    """A mapped file: `entries` by tensor name, `metadata`, and read-only views.

    Raises CheckpointError when the file is absent, truncated, or its header contradicts itself or the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_file():
            # A named pipe would be waited for.
            raise CheckpointError(_broken(str(self.path), "it is not a regular file"))
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size

                def read(start: int, stop: int) -> bytes:
                    file.seek(start)
                    return file.read(stop - start)

                header = read_header(str(self.path), size, read)
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                f"The shard {str(self.path)!r} cannot be read: {error.strerror}."
            ) from error
        self.entries, self.metadata, self._data = header
        self.size = size

    def view(self, name: str) -> np.ndarray:
        """A read-only view of one tensor, of its shape; FP4 as uint8 with half the last axis (low code
        first).

        Nothing is read until the view is. Raises KeyError for an unknown name and CheckpointError for FP4
        codes whose last axis is odd.
        """
        entry = self.entries[name]
        dtype, bits = DTYPES[entry.dtype]
        shape = entry.shape
        if bits == 4:
            if not shape or shape[-1] % 2:
                raise CheckpointError(
                    f"Tensor {name!r} of {str(self.path)!r} holds FP4 codes with an odd last axis: "
                    f"{list(shape)}."
                )
            shape = (*shape[:-1], shape[-1] // 2)
        return self.raw(name).view(dtype).reshape(shape)

    def raw(self, name: str) -> np.ndarray:
        """The bytes of one tensor, read-only."""
        entry = self.entries[name]
        return np.frombuffer(self._map, np.uint8, entry.nbytes, self._data + entry.start)

    def release(self, name: str) -> None:
        """Drop the resident pages of one tensor and around it; views stay valid and read the file again."""
        entry = self.entries[name]
        if entry.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            # Reading one page also maps those around it: over many small tensors they would add up.
            start = max(0, self._data + entry.start - _MARGIN) // mmap.PAGESIZE * mmap.PAGESIZE
            stop = min(self.size, self._data + entry.stop + _MARGIN)
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def plan(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Offsets for tensors given as name -> (dtype, shape): widest type first, then by name, so that every
    tensor is aligned to its own type."""
    entries: dict[str, Entry] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]][1], name)):
        dtype, shape = tensors[name]
        size = tensor_bytes(dtype, shape)
        entries[name] = Entry(dtype, tuple(shape), position, position + size)
        position += size
    return entries


def header_bytes(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Length and header, padded with spaces to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, entry in entries.items():
        header[name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class SafetensorsWriter:
    """Writes one file tensor by tensor, in any order, beside its final name; `close` renames it.

    Used as a context manager: an exception inside leaves no file under the final name.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.entries = plan(tensors)
        self._missing = set(self.entries)
        header = header_bytes(self.entries, {"format": "pt"} if metadata is None else metadata)
        self._data = len(header)
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._file = open(self._partial, "wb")  # noqa: SIM115
        self._file.write(header)

    def write(self, name: str, value: np.ndarray) -> None:
        """Write one tensor. Raises ValueError when it is unknown, already written, or has another size."""
        if name not in self._missing:
            raise ValueError(
                f"Tensor {name!r} is not awaited by {str(self.path)!r}: unknown or written before."
            )
        entry = self.entries[name]
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if data.nbytes != entry.nbytes:
            raise ValueError(
                f"Tensor {name!r} has {data.nbytes} bytes; {entry.dtype} of shape {list(entry.shape)} "
                f"needs {entry.nbytes}."
            )
        self._file.seek(self._data + entry.start)
        self._file.write(data)
        self._missing.discard(name)

    def write_pieces(self, name: str, pieces: Iterable[np.ndarray]) -> int:
        """Write one tensor as arrays that follow one another, so that it never lies in memory as a whole; returns
        the CRC-32 of its bytes. Raises ValueError as `write` does."""
        if name not in self._missing:
            raise ValueError(
                f"Tensor {name!r} is not awaited by {str(self.path)!r}: unknown or written before."
            )
        entry = self.entries[name]
        self._file.seek(self._data + entry.start)
        written = checksum = 0
        for piece in pieces:
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
            written += data.nbytes
            if written <= entry.nbytes:
                self._file.write(data)
                checksum = zlib.crc32(data, checksum)
        if written != entry.nbytes:
            raise ValueError(
                f"Tensor {name!r} has {written} bytes; {entry.dtype} of shape {list(entry.shape)} "
                f"needs {entry.nbytes}."
            )
        self._missing.discard(name)
        return checksum

    def close(self) -> None:
        """Flush to the disk and rename. Raises ValueError when tensors are still missing."""
        if self._missing:
            raise ValueError(
                f"{str(self.path)!r} still lacks {len(self._missing)} tensors, e.g. {min(self._missing)!r}."
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            # Closing writes what is still held back, which fails again on a full disk.
            try:
                self._file.close()
            finally:
                self._partial.unlink(missing_ok=True)
