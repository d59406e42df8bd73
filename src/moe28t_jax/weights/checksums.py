"""Checksums of tensors: a file beside the shards, and CRC-32 of parts that arrive in any order."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path

from rich.progress import Progress

from moe28t_jax.weights.checkpoint import Checkpoint, TensorTable, read_json
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.publish import write_file

CHECKSUM_FILE = "model.safetensors.crc32.json"
_POLYNOMIAL = 0xEDB88320


def combine_crc32(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of two byte strings after one another, from those of each and the length of the second."""
    # In GF(2)[x] modulo the polynomial, bits reversed: appending n bytes multiplies by x**(8 n).
    return _multiply(first, _power(8 * second_length)) ^ second if first else second


# The parts of a checkpoint's tensors have few lengths.
@lru_cache(maxsize=1024)
def _power(exponent: int) -> int:
    """x**exponent."""
    power, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


class PartialChecksum:
    """CRC-32 of one tensor whose parts are read in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, int]] = {}

    def add(self, start: int, content: memoryview) -> None:
        """Note a part that begins at byte `start` of the tensor."""
        self._parts[start] = (len(content), zlib.crc32(content))

    def value(self) -> int:
        """The checksum of all parts in order."""
        result = 0
        for _, (length, checksum) in sorted(self._parts.items()):
            result = combine_crc32(result, checksum, length)
        return result


def parse_checksums(content: object, where: str) -> dict[str, int]:
    """CRC-32 by tensor name, from the parsed file. Raises CheckpointError when it is not one."""
    tensors = content.get("tensors") if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not all(
        isinstance(value, str) and re.fullmatch("[0-9a-f]{8}", value) for value in tensors.values()
    ):
        raise CheckpointError(
            f"{where!r} does not map tensor names to 8 hexadecimal digits each; make it again or remove it."
        )
    return {name: int(value, 16) for name, value in tensors.items()}


def read_checksums(checkpoint: Checkpoint) -> dict[str, int]:
    """CRC-32 by tensor name, from the file beside a checkpoint's shards; empty where there is none.

    Raises CheckpointError when that file is none, or is of another checkpoint.
    """
    file = checkpoint.folder / CHECKSUM_FILE
    if not file.exists():
        return {}
    checksums = parse_checksums(read_json(file), str(file))
    names = set(checkpoint)
    # Of a part of a checkpoint, the file lists the rest as well.
    check_listed(checksums, names, names if checkpoint.partial else names | checksums.keys(), str(file))
    return checksums


def check_listed(
    checksums: Mapping[str, int], names: Collection[str], considered: Collection[str], where: str
) -> None:
    """Raise CheckpointError where only one of checksums and tensors has one of the names `considered`."""
    other = sorted(name for name in considered if (name in checksums) != (name in names))
    if other:
        raise CheckpointError(
            f"{where!r} is of another checkpoint: only one of them has the tensor {and_more(other)}; make it again "
            "(moe28t checksums) or remove it."
        )


def check_value(checkpoint: TensorTable, name: str, value: int, expected: int) -> None:
    """Raise CheckpointError, with tensor and file, when a tensor's CRC-32 is not the one recorded."""
    if value != expected:
        raise CheckpointError(
            f"The {checkpoint.where(name)} has the CRC-32 {value:08x}, but {expected:08x} was recorded when it was "
            "written: the shard is damaged, fetch it again."
        )


def write_checksum_file(folder: Path, checksums: Mapping[str, int]) -> None:
    """Write the file beside the shards of a folder."""
    tensors = {name: f"{value:08x}" for name, value in sorted(checksums.items())}
    content = (json.dumps({"algorithm": "crc32", "tensors": tensors}) + "\n").encode()
    partial = folder / f"{CHECKSUM_FILE}.partial"
    write_file(partial, content)
    os.replace(partial, folder / CHECKSUM_FILE)


def write_checksums(folder: str | Path, progress: Progress | None = None) -> int:
    """Read every tensor of a checkpoint folder once and write their checksums beside them; returns their number.

    Loads compare with it. Raises CheckpointError for a folder that is no checkpoint.
    """
    checkpoint = Checkpoint(folder)
    task = progress.add_task("Computing checksums", total=checkpoint.nbytes) if progress is not None else None
    checksums: dict[str, int] = {}
    for name in checkpoint:
        checksums[name] = zlib.crc32(checkpoint.raw(name))
        checkpoint.release(name)
        if progress is not None and task is not None:
            progress.advance(task, checkpoint.entry(name).nbytes)
    write_checksum_file(checkpoint.folder, checksums)
    return len(checksums)
