"""Copies into program arrays: the same bits as NumPy's own, whatever the shape, width and place."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from moe28t_jax.weights.stream_target import DeviceTarget, HostTarget
from moe28t_jax.weights.transfer import aligned_empty, copy_rows, copy_stored

# Several blocks of JAX's transposition with one of the widths or more, fewer, and hardly anything.
SHAPES = [(700, 1032), (2500, 1001), (300, 7), (1, 8), (8, 1)]
DTYPES = [np.uint8, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float16, np.float32, np.float64]


def bits(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array of every bit pattern, NaN with payloads too."""
    size = np.dtype(dtype).itemsize
    random = np.random.default_rng(0)
    return random.integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8).view(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_cpu", [True, False])
def test_transposes_every_bit(
    shape: tuple[int, int], dtype: type, has_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def local_devices(backend: str) -> list[Any]:
        # As JAX answers where JAX_PLATFORMS names an accelerator alone.
        if not has_cpu:
            raise RuntimeError(f"Unknown backend {backend}")
        return devices

    devices = jax.local_devices(backend="cpu")
    monkeypatch.setattr(jax, "local_devices", local_devices)
    source = bits(shape, dtype)
    expected = source.view(np.uint8).reshape(*shape, -1).swapaxes(0, 1)
    for copy in (
        lambda destination: copy_rows(source, destination, True),
        lambda destination: copy_stored(source, destination, "transpose"),
    ):
        destination = aligned_empty(shape[::-1], dtype)
        copy(destination)
        np.testing.assert_array_equal(destination.view(np.uint8).reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_go_into_parts(dtype: type) -> None:
    """Columns of a stored tensor into columns of an array, whose surroundings stay as they are; bytes that begin at
    any address."""
    size = np.dtype(dtype).itemsize
    raw = bits((300 * 720 * size + 3,), np.uint8)
    stored = raw[3:].view(dtype).reshape(300, 720)
    for first, last in ((0, 720), (1, 502), (8, 19)):
        part = stored[:, first:last]
        array = bits((740, 400), dtype)
        expected = array.copy()
        expected.view(f"u{size}")[9 : 9 + last - first, 50:350] = part.view(f"u{size}").T
        copy_rows(part, array[9 : 9 + last - first, 50:350], True)
        np.testing.assert_array_equal(array.view(f"u{size}"), expected.view(f"u{size}"))


def test_widens_while_transposing() -> None:
    source = np.arange(70 * 48, dtype=np.float32).reshape(70, 48).astype(ml_dtypes.bfloat16)
    for wide in (np.float32, np.float64):
        destination = np.empty((48, 70), wide)
        copy_rows(source, destination, True)
        np.testing.assert_array_equal(destination, source.astype(wide).T)


@pytest.mark.parametrize("kind", [HostTarget, DeviceTarget])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_targets_hold_what_was_put(kind: type[HostTarget | DeviceTarget], dtype: type) -> None:
    """Rows as they lie in a file, and cut out of them; kept and widened; the caller's memory is free afterwards."""
    stored = bits((6, 40), ml_dtypes.bfloat16)
    wide = np.empty(stored.shape, dtype)
    copy_rows(stored, wide, False)
    target = kind((3, 50, 8), np.dtype(dtype), [None])
    for corner, rows, columns, transposed in (
        ((0, 0, 1), (0, 6), (0, 40), True),
        ((1, 3, 2), (1, 5), (7, 19), True),
        ((2, 4, 0), (2, 6), (16, 24), False),
    ):
        part = stored[slice(*rows)].copy()
        target.put(corner, part[:, slice(*columns)], transposed)
        part[...] = 0
    (array,) = target.arrays()
    found, expected = np.asarray(array).view(np.uint8), wide.view(np.uint8).reshape(6, 40, -1)
    found = found.reshape(3, 50, 8, -1)
    np.testing.assert_array_equal(found[0, :40, 1:7], expected.swapaxes(0, 1))
    np.testing.assert_array_equal(found[1, 3:15, 2:6], expected[1:5, 7:19].swapaxes(0, 1))
    np.testing.assert_array_equal(found[2, 4:8], expected[2:6, 16:24])
