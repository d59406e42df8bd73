"""Streaming load: the same arrays, only the bytes that are needed, interrupted and damaged stores."""

import json
import os
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress

import moe28t_jax
from moe28t_jax.config import ModelConfig
from moe28t_jax.weights import (
    Checkpoint,
    CheckpointError,
    describe,
    fake_checkpoint,
    load_layer,
    load_parameters,
    stream_parameters,
)
from moe28t_jax.weights.checksums import CHECKSUM_FILE, PartialChecksum, combine_crc32, write_checksums
from moe28t_jax.weights.range_cache import CachedStore
from moe28t_jax.weights.store import FileState, LocalStore, RemoteStore, Retry, open_store
from moe28t_jax.weights.stream_source import StreamedCheckpoint
from pallas_kernels.mxfp4_matmul import MXFP4Tensor


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by path; FP4 widened, since NumPy compares it badly."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = np.asarray(leaf)
        found[jax.tree_util.keystr(path)] = value.view(np.uint8)
    return found


def assert_equal(first: Any, second: Any) -> None:
    a, b = leaves(first), leaves(second)
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], err_msg=name)


@pytest.mark.parametrize("stacked", [False, True])
def test_same_arrays_as_a_load(tiny: Path, stacked: bool) -> None:
    expected, config = load_parameters(tiny, stacked=stacked)
    progress = Progress(disable=True)
    found, found_config, report = stream_parameters(tiny, stacked=stacked, progress=progress)
    assert_equal(found, expected)
    assert found_config == config
    stored = sum(info.nbytes for info in describe(tiny))
    assert report.needed_bytes == report.data_bytes == report.checkpoint_bytes == stored
    assert report.store_bytes == report.data_bytes + report.header_bytes
    assert (report.cache_bytes, report.retries, report.verified_bytes) == (0, 0, 0)
    assert progress.tasks[0].completed == progress.tasks[0].total == stored


@pytest.mark.parametrize("layout", ["packed_kn", "packed_nk", "float4_kn"])
@pytest.mark.parametrize("fill", ["host", "device"])
def test_layouts_of_the_kernels(data: Path, layout: str, fill: Any) -> None:
    """The layouts of v5p (packed) and tpu7x (FP4) come out as loading and then converting gives them."""
    source = data / "k31_tiny_mxfp4"
    packed, config = load_parameters(source, stacked=True, dtype=jnp.float32)
    expected = jax.tree.map(
        lambda one: one.to_layout(layout) if isinstance(one, MXFP4Tensor) else one,
        packed,
        is_leaf=lambda one: isinstance(one, MXFP4Tensor),
    )
    # So small a budget cuts matrices into several requests.
    found, _, report = stream_parameters(
        source, config, jnp.float32, True, layout, fill=fill, host_bytes=5 << 16, workers=3
    )
    assert_equal(found, expected)
    assert report.staging_bytes <= 5 << 16


def test_text_only_and_other_types(x64: None) -> None:
    source = Path(moe28t_jax.__file__).parent / "nano"
    expected, _ = load_parameters(source, dtype=jnp.float64, vision=False)
    found, _, report = stream_parameters(source, dtype=jnp.float64, stacked=False, vision=False)
    assert_equal(found, expected)
    assert report.data_bytes < report.checkpoint_bytes


@given(st.lists(st.binary(max_size=40), max_size=8), st.randoms())
def test_checksums_of_parts_in_any_order(parts: list[bytes], random: Any) -> None:
    places = []
    start = 0
    for part in parts:
        places.append((start, part))
        start += len(part)
    random.shuffle(places)
    checksum = PartialChecksum()
    for place, part in places:
        if part:
            checksum.add(place, memoryview(part))
    assert checksum.value() == zlib.crc32(b"".join(parts))
    first, second = b"".join(parts[:3]), b"".join(parts[3:])
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


class Failing(LocalStore):
    """A folder whose reads fail when told to; waits are noted, not spent."""

    def __init__(
        self, folder: Path, fails: Callable[[int], Exception | int | None], attempts: int = 4
    ) -> None:
        self.waits: list[float] = []
        super().__init__(folder, Retry(attempts, 1.0, 5.0, self.waits.append))
        self.fails, self.count = fails, 0

    def _read_into(self, file: str, start: int, target: memoryview) -> int:
        self.count += 1
        failure = self.fails(self.count)
        if isinstance(failure, Exception):
            raise failure
        if isinstance(failure, int):
            return failure
        return super()._read_into(file, start, target)


def test_failing_requests_are_repeated(data: Path) -> None:
    source = data / "kimi_linear_tiny"
    expected, _ = load_parameters(source)

    def fails(count: int) -> Exception | int | None:
        # Every third request fails, one of them by sending less than was asked for.
        return None if count % 3 else 1 if count == 9 else ConnectionResetError("connection reset")

    store = Failing(source, fails)
    found, _, report = stream_parameters(store, stacked=False, workers=1, host_bytes=4 << 16)
    assert_equal(found, expected)
    assert report.retries == store.count - report.requests > 3
    assert report.data_bytes == report.checkpoint_bytes
    assert len(store.waits) == report.retries and all(0.5 <= wait <= 1 for wait in store.waits)


def test_waits_grow_and_end(data: Path) -> None:
    store = Failing(
        data / "k31_tiny", lambda count: TimeoutError("no answer") if count > 20 else None, attempts=6
    )
    with pytest.raises(
        CheckpointError, match=r"Bytes \d+ to \d+ of '.*k31_tiny/model.safetensors' .* 6 attempts"
    ):
        stream_parameters(store, workers=1, host_bytes=4 << 16)
    for wait, longest in zip(store.waits, (1, 2, 4, 5, 5), strict=True):
        assert longest / 2 <= wait <= longest
    forbidden = Failing(data / "k31_tiny", lambda count: PermissionError(13, "Permission denied"))
    with pytest.raises(CheckpointError, match="Permission denied"):
        stream_parameters(forbidden)
    assert forbidden.waits == []


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint in several shards, with checksums."""
    folder = tmp_path_factory.mktemp("fake") / "checkpoint"
    tiny = Path(__file__).parents[1] / "golden" / "data" / "k31_tiny_mxfp4"
    fake_checkpoint(folder, ModelConfig.from_hf(tiny), max_shard_bytes=200_000)
    return folder


def copy_to_memory(folder: Path, name: str) -> str:
    files = fsspec.filesystem("memory")
    for file in folder.iterdir():
        files.pipe_file(f"/{name}/{file.name}", file.read_bytes())
    return f"memory://{name}"


def test_object_store(synthetic: Path) -> None:
    expected, _ = load_parameters(synthetic, stacked=True)
    address = copy_to_memory(synthetic, "bucket/model")
    found, _, report = stream_parameters(address)
    assert_equal(found, expected)
    assert report.source == address
    assert report.verified_bytes == report.checkpoint_bytes == report.data_bytes


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://bucket/absent", "'memory://bucket/absent' cannot be read"),
        ("unknown://bucket/x", "no installed package can read"),
    ],
)
def test_absent_stores(address: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        stream_parameters(address)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointError, match=r"'gs://bucket/x' needs gcsfs, .* in the extra `cloud`"):
        stream_parameters("gs://bucket/x")


class Remote(Failing):
    """Stands for a store over a network: what CachedStore wraps."""


def test_an_interrupted_load_goes_on_from_its_cache(synthetic: Path, tmp_path: Path) -> None:
    expected, _ = load_parameters(synthetic, stacked=True)
    options: dict[str, Any] = {"cache": tmp_path / "cache", "host_bytes": 4 << 16, "workers": 1}
    first = Remote(synthetic, lambda count: PermissionError(13, "cut off") if count > 30 else None)
    with pytest.raises(CheckpointError, match="cut off"):
        stream_parameters(first, **options)
    kept = first.traffic.bytes_read
    found, _, report = stream_parameters(Remote(synthetic, lambda count: None), **options)
    assert_equal(found, expected)
    assert 0 < kept == report.cache_bytes
    assert report.cache_bytes + report.store_bytes == report.data_bytes + report.header_bytes
    _, _, third = stream_parameters(Remote(synthetic, lambda count: None), **options)
    assert third.store_bytes == 0
    # Kept bytes that are no longer what was fetched, and a line cut short, are fetched again.
    ranges = max((tmp_path / "cache").glob("*.ranges"), key=lambda path: path.stat().st_size)
    content = bytearray(ranges.read_bytes())
    content[len(content) // 2] ^= 1
    ranges.write_bytes(content)
    for journal in (tmp_path / "cache").glob("*.journal"):
        journal.write_bytes(journal.read_bytes()[:-3])
    found, _, fourth = stream_parameters(Remote(synthetic, lambda count: None), **options)
    assert_equal(found, expected)
    assert 0 < fourth.store_bytes < fourth.cache_bytes


def test_the_cache_serves_any_range(tmp_path: Path) -> None:
    content = bytes(range(200))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "x").write_bytes(content)
    random = np.random.default_rng(0)
    store = CachedStore(LocalStore(tmp_path / "store"), tmp_path / "cache")
    for step in range(200):
        start, stop = sorted(int(i) for i in random.integers(0, 201, 2))
        assert store.read("x", start, stop) == content[start:stop]
        if step % 50 == 49:
            store = CachedStore(LocalStore(tmp_path / "store"), tmp_path / "cache")
            assert store.read("x", 0, 200) == content
    assert store.traffic.bytes_read < 200
    # A changed object is another one, also of the same size.
    (tmp_path / "store" / "x").write_bytes(content[::-1])
    os.utime(tmp_path / "store" / "x", (1, 1))
    changed = CachedStore(LocalStore(tmp_path / "store"), tmp_path / "cache")
    assert changed.read("x", 0, 200) == content[::-1]

    class Unversioned(LocalStore):
        def state(self, file: str) -> FileState:
            return FileState(super().state(file).size, "")

    with pytest.raises(CheckpointError, match="neither ETag nor time of modification"):
        CachedStore(Unversioned(tmp_path / "store"), tmp_path / "cache").read("x", 0, 200)


def test_threads_that_find_a_damaged_range_fetch_it_again(tmp_path: Path) -> None:
    content = bytes(range(256)) * 256
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "x").write_bytes(content)
    for attempt in range(5):
        cache = tmp_path / f"cache{attempt}"
        CachedStore(LocalStore(tmp_path / "store"), cache).read("x", 0, len(content))
        next(cache.glob("*.ranges")).write_bytes(bytes(len(content)))
        store = CachedStore(LocalStore(tmp_path / "store"), cache)
        places = range(0, len(content), 4096)
        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(store.read, "x" * len(places), places, (place + 4096 for place in places)))
        assert b"".join(parts) == content


def test_an_object_of_the_same_size_that_changes_meanwhile(synthetic: Path) -> None:
    """Listings that a file system keeps must not hide it."""
    store = RemoteStore(copy_to_memory(synthetic, "bucket/changing"))
    checkpoint = StreamedCheckpoint(store)
    shard = checkpoint.shard_of(next(iter(checkpoint)))
    checkpoint.check_unchanged(shard)
    files = store._files
    listed = {item["name"]: item for item in files.ls("/bucket/changing", detail=True)}
    content = files.cat_file(f"/bucket/changing/{shard}")

    def kept(path: str, **_: object) -> dict[str, object]:
        # As file systems with a listing cache answer until it is told to forget.
        return listed[path] if path in listed else type(files).info(files, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "info", kept)
        patch.setattr(files, "invalidate_cache", lambda path=None: listed.pop(path, None))
        files.pipe_file(f"/bucket/changing/{shard}", content)
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            checkpoint.check_unchanged(shard)


# -- damage ----------------------------------------------------------------------------------------------------
def damaged(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_damaged_byte_is_named(synthetic: Path, tmp_path: Path) -> None:
    folder = damaged(synthetic, tmp_path / "x")
    info = next(info for info in describe(folder) if info.name.endswith("experts.3.w2.weight_packed"))
    shard = folder / info.shard
    content = bytearray(shard.read_bytes())
    start = bytes(content).index(bytes(Checkpoint(folder).raw(info.name)))
    content[start + 5] ^= 16
    shard.write_bytes(content)
    layer = int(info.name.partition("layers.")[2].partition(".")[0])
    damage = rf"'{info.name}' of '.*{info.shard}' has the CRC-32 .* damaged"
    for load in (stream_parameters, load_parameters, partial(load_layer, layer=layer)):
        with pytest.raises(CheckpointError, match=damage):
            load(folder)
        load(folder, verify=False)
    load_layer(folder, layer - 1)


def test_truncated_absent_and_doubled_shards_are_named(synthetic: Path, tmp_path: Path) -> None:
    folder = damaged(synthetic, tmp_path / "x")
    shard = sorted(folder.glob("*.safetensors"))[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=rf"'.*{shard.name}' is truncated: tensor '.*' ends at byte"):
        stream_parameters(folder)
    shard.write_bytes(whole[:5])
    with pytest.raises(
        CheckpointError, match=rf"{shard.name}' is not a valid safetensors file: it is 5 bytes"
    ):
        stream_parameters(copy_to_memory(folder, "truncated"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"names shards that are not there: '{shard.name}'"):
        stream_parameters(folder)
    shard.write_bytes(whole)
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(CheckpointError, match="holds both"):
        stream_parameters(folder)


def test_scales_that_are_nan_are_named(folder: Any) -> None:
    tiny = folder("k31_tiny_mxfp4")
    name = next(name for name in tiny.tensors if name.endswith("experts.2.w1.weight_scale"))
    dtype, shape, content = tiny.tensors[name]
    content[-1] = 255
    tiny.tensors[name] = (dtype, shape, content)
    with pytest.raises(
        CheckpointError, match=rf"'{name}' .* \(NaN\) at output {shape[0] - 1}, block {shape[1] - 1}"
    ):
        stream_parameters(tiny.write(), host_bytes=4 << 16)


def test_a_shard_that_changes_meanwhile(synthetic: Path, tmp_path: Path) -> None:
    folder = damaged(synthetic, tmp_path / "x")
    last = sorted(folder.glob("*.safetensors"))[-1]

    def change(count: int) -> None:
        if count == 40:
            last.write_bytes(last.read_bytes())

    with pytest.raises(CheckpointError, match=rf"{last.name}' was changed while it was read"):
        stream_parameters(Failing(folder, change), workers=1, host_bytes=4 << 16)


@pytest.mark.parametrize("content", ["{", '{"tensors": {"x": "12"}}', '{"tensors": []}', "[" * 100_000])
def test_checksum_files_that_are_none(synthetic: Path, tmp_path: Path, content: str) -> None:
    folder = damaged(synthetic, tmp_path / "x")
    (folder / CHECKSUM_FILE).write_text(content)
    for load in (stream_parameters, load_parameters):
        with pytest.raises(CheckpointError, match=r"crc32\.json"):
            load(folder)


def test_checksums_of_a_folder(synthetic: Path, tmp_path: Path) -> None:
    folder = damaged(synthetic, tmp_path / "x")
    written = json.loads((folder / CHECKSUM_FILE).read_text())
    (folder / CHECKSUM_FILE).unlink()
    assert write_checksums(folder) == len(describe(folder)) == len(written["tensors"])
    assert json.loads((folder / CHECKSUM_FILE).read_text()) == written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_bytes": 1000}, "host_bytes is 1000"),
        ({"workers": 0}, "workers is 0"),
        ({"fill": "disk"}, "fill is 'disk'"),
        ({"layout": "nk"}, "layout is 'nk'"),
    ],
)
def test_arguments(data: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream_parameters(data / "k31_tiny", **options)


def test_a_checksum_file_of_another_checkpoint(synthetic: Path, tmp_path: Path) -> None:
    folder = damaged(synthetic, tmp_path / "x")
    content = json.loads((folder / CHECKSUM_FILE).read_text())
    name, _ = content["tensors"].popitem()
    (folder / CHECKSUM_FILE).write_text(json.dumps(content))
    for load in (stream_parameters, load_parameters):
        with pytest.raises(CheckpointError, match=rf"only one of them has the tensor '{name}'"):
            load(folder)
    # A part of the checkpoint, of which the file lists everything.
    content["tensors"] |= {name: "00000000"}
    (folder / CHECKSUM_FILE).write_text(json.dumps(content))
    load_layer(folder, 0)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        open_store(tmp_path / "absent")


def test_mistakes_are_not_repeated() -> None:
    waits: list[float] = []

    def action() -> None:
        raise TypeError("unexpected argument")

    with pytest.raises(CheckpointError, match="It cannot be read: TypeError, unexpected argument"):
        Retry(sleep=waits.append).call(action, "It", lambda: None)
    assert not waits
