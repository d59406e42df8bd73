"""Where loaded bytes go: host buffers that JAX adopts, or device buffers filled by donated updates."""

from __future__ import annotations

import threading
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.weights.transfer import aligned_empty, copy_rows, to_device


class Target:
    """One part of an array, on one or several devices that hold the same."""

    def clear(self) -> None:
        """Fill it with zeros, before anything is put: not every place of it will be filled."""
        raise NotImplementedError

    def put(self, corner: tuple[int, ...], part: np.ndarray, transposed: bool) -> None:
        """Bring a part of a stored tensor, transposed (two axes) or not, to the place `corner`; leading axes that it
        lacks have size 1. Nothing of it is used after the return. Different threads may fill different places at
        once."""
        raise NotImplementedError

    def arrays(self) -> list[jax.Array]:
        """One array per device. Nothing may be written afterwards."""
        raise NotImplementedError


class HostTarget(Target):
    """A host buffer that becomes the array itself: for CPU devices, whose memory is the host's."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: list[Any]) -> None:
        self._buffer = aligned_empty(shape, dtype)
        self._devices = devices

    def clear(self) -> None:
        self._buffer[...] = 0

    def put(self, corner: tuple[int, ...], part: np.ndarray, transposed: bool) -> None:
        shape = part.shape[::-1] if transposed else part.shape
        leading = len(corner) - len(shape)
        inner = (slice(at, at + size) for at, size in zip(corner[leading:], shape, strict=True))
        copy_rows(part, self._buffer[(*corner[:leading], *inner)], transposed)

    def arrays(self) -> list[jax.Array]:
        first = to_device(self._buffer, self._devices[0])
        # One buffer for two devices would be shared memory that either may be told to overwrite.
        return [first, *(jax.device_put(first, device, may_alias=False) for device in self._devices[1:])]


class DeviceTarget(Target):
    """A device buffer into which slices are put one by one, each in place of the donated one before.

    A slice goes to the device as it lies in the file, and is transposed there while the host reads the next. With
    `codes_axis` the buffer has FP4 codes, and what is put are bytes with two of them along that axis.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, devices: list[Any], codes_axis: int | None = None
    ) -> None:
        self._codes_axis = codes_axis
        self._dtype = dtype
        size = list(shape)
        if codes_axis is not None:
            size[codes_axis] *= 2
        self._devices = devices
        self._array = jnp.zeros(tuple(size), dtype, device=devices[0])
        self._lock = threading.Lock()

    def clear(self) -> None:
        pass  # it is made of zeros

    def put(self, corner: tuple[int, ...], part: np.ndarray, transposed: bool) -> None:
        codes = self._codes_axis is not None
        dtype = np.dtype(np.uint8) if codes else self._dtype
        if part.dtype != dtype or not part.flags.c_contiguous:
            staged = _staging(part.shape, dtype)
            copy_rows(part, staged, False)
            part = staged
        start = np.asarray(corner, np.int32)
        if self._codes_axis is not None:
            start[self._codes_axis] *= 2
        piece = jax.device_put(part.view(f"u{dtype.itemsize}"), self._devices[0])
        with self._lock:
            self._array = _update(self._array, piece, start, transposed, codes)
            # The memory that the piece came from, and may still lie in, is written again after this.
            self._array.block_until_ready()

    def arrays(self) -> list[jax.Array]:
        return [
            self._array,
            *(jax.device_put(self._array, device, may_alias=False) for device in self._devices[1:]),
        ]


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.staging = np.empty(0, np.uint8)


_buffers = _Buffers()


def _staging(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array in this thread's own buffer."""
    size = prod(shape) * dtype.itemsize
    if _buffers.staging.nbytes < size:
        _buffers.staging = aligned_empty((size,), np.uint8)
    return _buffers.staging[:size].view(dtype).reshape(shape)


@partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _update(array: jax.Array, piece: jax.Array, start: jax.Array, transposed: bool, codes: bool) -> jax.Array:
    """The array with a piece, given as the bits of its elements, in its place."""
    if transposed:
        piece = piece.T
    if codes:
        pairs = jax.lax.bitcast_convert_type(piece, jnp.float4_e2m1fn)
        piece = jnp.moveaxis(pairs, -1, -2).reshape(2 * piece.shape[0], piece.shape[1])
    else:
        piece = jax.lax.bitcast_convert_type(piece, array.dtype)
    piece = piece.reshape((1,) * (array.ndim - piece.ndim) + piece.shape)
    return jax.lax.dynamic_update_slice(array, piece, [start[axis] for axis in range(array.ndim)])
