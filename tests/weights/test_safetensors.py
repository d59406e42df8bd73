"""The own safetensors reader and writer, against the public library and against damage."""

import errno
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moe28t_jax.weights import CheckpointError
from moe28t_jax.weights.safetensors import (
    DTYPES,
    SafetensorsFile,
    SafetensorsWriter,
    dtype_name,
    parse_header,
)

LIBRARY_DTYPES = ["F64", "F32", "F16", "BF16", "U8", "I8", "I16", "I32", "I64", "U16", "U32", "U64", "BOOL"]


def draw(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = DTYPES[dtype][0]
    if dtype == "BOOL":
        return random.integers(0, 2, shape).astype(kind)
    return random.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind)[..., 0]


def raw(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def header(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (2, 0, 3)])
def test_reads_what_the_library_writes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    tensors = {dtype: np.asarray(draw(random, dtype, shape)) for dtype in LIBRARY_DTYPES}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"a": "b"})
    file = SafetensorsFile(path)
    assert file.metadata == {"a": "b"}
    assert set(file.entries) == set(tensors)
    for name, expected in tensors.items():
        view = file.view(name)
        assert view.dtype == expected.dtype and view.shape == expected.shape
        assert not view.flags.writeable
        np.testing.assert_array_equal(bits(view), bits(expected))
        file.release(name)
        np.testing.assert_array_equal(bits(view), bits(expected))


def test_library_reads_what_is_written(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    tensors = {dtype: draw(random, dtype, (3, 5)) for dtype in LIBRARY_DTYPES}
    path = tmp_path / "x.safetensors"
    entries = {name: (dtype_name(value.dtype), value.shape) for name, value in tensors.items()}
    with SafetensorsWriter(path, entries) as writer:
        for name in reversed(list(tensors)):  # any order
            writer.write(name, tensors[name])
    loaded = load_file(path)
    for name, expected in tensors.items():
        assert loaded[name].dtype == expected.dtype
        np.testing.assert_array_equal(bits(loaded[name]), bits(expected))
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_same_bytes_as_the_library(tmp_path: Path) -> None:
    tensors = {
        "b": np.arange(6, dtype=np.float32),
        "a": np.arange(4, dtype=np.uint8),
        "c": np.zeros(2, np.float32),
    }
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    with SafetensorsWriter(
        tmp_path / "own.safetensors", {k: (dtype_name(v.dtype), v.shape) for k, v in tensors.items()}
    ) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    assert (tmp_path / "own.safetensors").read_bytes() == (tmp_path / "library.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu])
def test_narrow_floats_written_by_the_library(tmp_path: Path, dtype: type) -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16).view(dtype)
    save_file({"x": values}, tmp_path / "x.safetensors")
    view = SafetensorsFile(tmp_path / "x.safetensors").view("x")
    assert view.dtype == dtype
    np.testing.assert_array_equal(view.view(np.uint8), values.view(np.uint8))


@pytest.mark.parametrize("spelling", ["F4", "F4_E2M1", "F4_E2M1FN_X2"])
def test_fp4_is_viewed_as_bytes_of_two_codes(tmp_path: Path, spelling: str) -> None:
    data = bytes(range(12))
    entry = {"dtype": spelling, "shape": [3, 8], "data_offsets": [0, 12]}
    (tmp_path / "x.safetensors").write_bytes(raw(header(x=entry), data))
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.entries["x"].dtype == "F4" and file.entries["x"].shape == (3, 8)
    np.testing.assert_array_equal(file.view("x"), np.frombuffer(data, np.uint8).reshape(3, 4))


def test_fp4_with_an_odd_last_axis_has_no_view(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}
    (tmp_path / "x.safetensors").write_bytes(raw(header(x=entry), b"abc"))
    with pytest.raises(CheckpointError, match="odd last axis"):
        SafetensorsFile(tmp_path / "x.safetensors").view("x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "less than a header"),
        (b"\x01\x02", "less than a header"),
        (b"\xff" * 8 + b"{}", "claims"),
        (raw(b"[]"), "begin with"),
        (raw(b"{"), "not a valid"),
        (raw(b"\xff{}"), "begin with"),
        (raw(b'{"\xff": 1}'), "not a valid"),
        (raw(b'{"x":' + b"[" * 100_000), "nested too deeply|not a valid"),
        (raw(b'{"x": 1}'), "'x' is not described"),
        (raw(header(__metadata__=[])), "__metadata__"),
        (raw(header(__metadata__={"a": 1})), "__metadata__"),
        (raw(header(x={"dtype": "F7", "shape": [], "data_offsets": [0, 1]})), "unknown dtype 'F7'"),
        (raw(header(x={"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]})), "unknown dtype"),
        (raw(header(x={"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]})), "no valid shape"),
        (raw(header(x={"dtype": "U8", "shape": [True], "data_offsets": [0, 1]})), "no valid shape"),
        (raw(header(x={"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]})), "no valid shape"),
        (
            raw(header(x={"dtype": "U8", "shape": [0, 2**61, 2**61], "data_offsets": [0, 0]})),
            "impossibly large",
        ),
        (raw(header(x={"dtype": "U8", "shape": [1] * 40, "data_offsets": [0, 1]})), "no valid shape"),
        (raw(header(x={"dtype": "U8", "shape": [1], "data_offsets": [0]})), "no valid data_offsets"),
        (raw(header(x={"dtype": "U8", "shape": [1], "data_offsets": [1, 0]})), "span -1"),
        (raw(header(x={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]})), "needs 8 bytes"),
        (raw(header(x={"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}), b"ab"), "gap after the header"),
        (
            raw(
                header(
                    x={"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                    y={"dtype": "U8", "shape": [1], "data_offsets": [1, 2]},
                ),
                b"ab",
            ),
            "'y' overlaps tensor 'x'",
        ),
        (raw(header(x={"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}), b"ab"), "1 bytes follow"),
        (raw(b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":1}', b"a"), "'x' appears twice"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert "broken.safetensors" in str(caught.value)


def test_truncation_names_the_first_tensor_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({name: np.zeros(10, np.uint8) for name in "abc"}, path)
    content = path.read_bytes()
    path.write_bytes(content[:-15])
    with pytest.raises(CheckpointError, match="truncated: tensor 'b'"):
        SafetensorsFile(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        SafetensorsFile(tmp_path / "absent.safetensors")


@given(st.data())
def test_any_header_text_parses_or_gives_a_value_error(data: st.DataObject) -> None:
    good = header(
        __metadata__={"format": "pt"},
        x={"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        y={"dtype": "U8", "shape": [5], "data_offsets": [24, 29]},
    )
    text = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        entries, _ = parse_header(bytes(text))
    except ValueError:
        return
    assert sum(entry.nbytes for entry in entries.values()) == max(entry.stop for entry in entries.values())


def test_an_interrupted_writer_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with (
        pytest.raises(RuntimeError, match="stop"),
        SafetensorsWriter(path, {"a": ("U8", (4,)), "b": ("U8", (4,))}) as writer,
    ):
        writer.write("a", np.zeros(4, np.uint8))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where closing, too, fails to write what was held back."""
    path = tmp_path / "x.safetensors"

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self._file.close()
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(OSError, match="No space left"),
        SafetensorsWriter(path, {"a": ("U8", (4,))}) as writer,
    ):
        monkeypatch.setattr(writer, "_file", Full(writer._file))
        writer.write("a", np.zeros(4, np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_the_writer_refuses_wrong_and_missing_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with (
        pytest.raises(ValueError, match=r"still lacks 1 tensors, e\.g\. 'b'"),
        SafetensorsWriter(path, {"a": ("U8", (4,)), "b": ("U8", (4,))}) as writer,
    ):
        with pytest.raises(ValueError, match="has 3 bytes"):
            writer.write("a", np.zeros(3, np.uint8))
        writer.write("a", np.zeros(4, np.uint8))
        with pytest.raises(ValueError, match="not awaited"):
            writer.write("a", np.zeros(4, np.uint8))
        with pytest.raises(ValueError, match="not awaited"):
            writer.write("c", np.zeros(4, np.uint8))
    assert not path.exists()
