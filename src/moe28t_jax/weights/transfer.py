"""Host side of loading: aligned buffers that JAX adopts without a copy, and cache-friendly copies into
them."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import ml_dtypes
import numpy as np

from moe28t_jax.config.declaration import Transform

_ALIGNMENT = 64
# Rows read at once while transposing: each output row then receives a whole number of cache lines.
_ROWS = 64
# Bytes that go through JAX's transposition at once: they come back while they are in the processor's caches.
_BLOCK_BYTES = 1 << 21
_WORTHWHILE = 1 << 17


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array whose first byte is 64-byte aligned, as `to_device` needs to adopt it."""
    dtype = np.dtype(dtype)
    size = prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def to_device(buffer: np.ndarray, device: Any = None) -> jax.Array:
    """The buffer as a JAX array; on CPU they share memory, so the buffer must not be written afterwards."""
    buffer.flags.writeable = False
    return jax.device_put(buffer, device, may_alias=True)


def copy_stored(source: np.ndarray, destination: np.ndarray, transform: Transform) -> None:
    """Fill one contiguous program array from one stored tensor, converting floats between widths.

    `reshape` keeps the order of elements; a destination longer than its source is filled up with zeros (A_log
    stored without its padding). `transpose` turns a stored `[first axis, rest]` into `[rest, first axis]`.
    """
    if transform == "reshape":
        flat, values = destination.reshape(-1), source.reshape(-1)
        flat[values.size :] = 0
        rows = max(1, (1 << 20) // max(1, values.itemsize))
        for start in range(0, values.size, rows):
            _assign(flat[start : min(start + rows, values.size)], values[start : start + rows])
        return
    matrix = source.reshape(source.shape[0], -1)
    _assign_transposed(destination.reshape(matrix.shape[::-1]), matrix)


def copy_rows(source: np.ndarray, destination: np.ndarray, transpose: bool) -> None:
    """Fill an array, which need not be contiguous, with one of the same shape, or of the transposed one (two axes);
    floats are converted between widths."""
    if transpose:
        _assign_transposed(destination, source)
    else:
        _assign(destination, source)


def _assign_transposed(destination: np.ndarray, source: np.ndarray) -> None:
    size = source.dtype.itemsize
    # Elements of eight bytes are nothing that JAX keeps without jax_enable_x64, and few are stored.
    alike = destination.dtype == source.dtype and size < 8
    device = _host_device() if alike and source.nbytes >= _WORTHWHILE else None
    if device is None:
        for start in range(0, source.shape[0], _ROWS):
            _assign(destination[:, start : start + _ROWS], source[start : start + _ROWS].T)
        return
    # JAX transposes a strided array when it takes it over, many elements to an instruction, where NumPy moves one.
    bits = np.dtype(f"u{size}")
    target, rows = destination.view(bits), source.view(bits)
    step = max(_ROWS, _BLOCK_BYTES // (rows.shape[1] * size) // _ROWS * _ROWS)
    for start in range(0, len(rows), step):
        target[:, start : start + step] = np.asarray(jax.device_put(rows[start : start + step].T, device))


def _host_device() -> Any:
    """A CPU device of this process, or None where JAX was told to have none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _assign(destination: np.ndarray, source: np.ndarray) -> None:
    # NumPy moves and widens integers several times faster than the bfloat16 of ml-dtypes.
    if destination.dtype == source.dtype:
        bits = np.dtype(f"u{source.itemsize}")
        destination.view(bits)[...] = source.view(bits)
    elif source.dtype == ml_dtypes.bfloat16 and destination.dtype == np.float32:
        bits = destination.view(np.uint32)
        bits[...] = source.view(np.uint16)
        bits <<= np.uint32(16)
    else:
        destination[...] = source.astype(destination.dtype)
