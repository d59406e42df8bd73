"""Where loaded bytes go: host buffers that JAX adopts, or device buffers filled by donated updates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.weights.transfer import aligned_empty, to_device

Fill = Callable[[np.ndarray], None]


class Target:
    """One part of an array, on one or several devices that hold the same."""

    def write(self, corner: tuple[int, ...], shape: tuple[int, ...], fill: Fill) -> None:
        """Let `fill` write an array of `shape`, which goes to the place `corner`; leading axes that `shape` lacks have
        size 1. Different threads may write to different places at once."""
        raise NotImplementedError

    def arrays(self) -> list[jax.Array]:
        """One array per device. Nothing may be written afterwards."""
        raise NotImplementedError


class HostTarget(Target):
    """A host buffer that becomes the array itself: for CPU devices, whose memory is the host's."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, devices: list[Any]) -> None:
        self._buffer = aligned_empty(shape, dtype)
        self._devices = devices

    def write(self, corner: tuple[int, ...], shape: tuple[int, ...], fill: Fill) -> None:
        leading = len(corner) - len(shape)
        inner = (slice(at, at + size) for at, size in zip(corner[leading:], shape, strict=True))
        fill(self._buffer[(*corner[:leading], *inner)])

    def arrays(self) -> list[jax.Array]:
        first = to_device(self._buffer, self._devices[0])
        # One buffer for two devices would be shared memory that either may be told to overwrite.
        return [first, *(jax.device_put(first, device, may_alias=False) for device in self._devices[1:])]


class DeviceTarget(Target):
    """A device buffer into which slices are put one by one, each in place of the donated one before.

    With `codes_axis` the buffer has FP4 codes, and what is written are bytes with two of them along that axis.
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

    def write(self, corner: tuple[int, ...], shape: tuple[int, ...], fill: Fill) -> None:
        staged = _staging(shape, np.dtype(np.uint8) if self._codes_axis is not None else self._dtype)
        fill(staged)
        start = np.asarray(corner, np.int32)
        if self._codes_axis is not None:
            start[self._codes_axis] *= 2
        piece = jax.device_put(staged, self._devices[0])
        with self._lock:
            self._array = _update(self._array, piece, start, self._codes_axis is not None)
            # The staging buffer is written again after this.
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


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _update(array: jax.Array, piece: jax.Array, start: jax.Array, codes: bool) -> jax.Array:
    if codes:
        pairs = jax.lax.bitcast_convert_type(piece, jnp.float4_e2m1fn)
        piece = jnp.moveaxis(pairs, -1, -2).reshape(2 * piece.shape[0], piece.shape[1])
    piece = piece.reshape((1,) * (array.ndim - piece.ndim) + piece.shape)
    return jax.lax.dynamic_update_slice(array, piece, [start[axis] for axis in range(array.ndim)])
