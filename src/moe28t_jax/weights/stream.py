"""Streaming load: each process reads the bytes its own shards need, in bounded host memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter
from moe28t_jax.model.parameters import Parameters, build
from moe28t_jax.weights.checksums import PartialChecksum, check_value
from moe28t_jax.weights.load import check_one_form, checked_dtype
from moe28t_jax.weights.matching import Match, check_scale, match
from moe28t_jax.weights.range_cache import CachedStore
from moe28t_jax.weights.store import LocalStore, Store, open_store
from moe28t_jax.weights.stream_plan import Leaf, Read, ShardingRule, TensorJob, forms, plan_leaf, plan_reads
from moe28t_jax.weights.stream_source import StreamedCheckpoint
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

HOST_BYTES = 1 << 30
_SMALLEST = 1 << 16
_LARGEST = 1 << 24
_REMOTE_WORKERS = 16


@dataclass(frozen=True)
class LoadReport:
    """What one process read. Bytes.

    checkpoint_bytes: of all tensors. needed_bytes: of them, what the shards of this process's devices consist of.
    data_bytes: of tensors that were read, from the store or the cache; more than needed where a shard is not
    contiguous in the file (a matrix sharded over its inputs is read whole). header_bytes: headers, index,
    configuration and checksums. store_bytes: fetched from the store in all, so without what came from the cache
    (cache_bytes). verified_bytes: tensors whose checksum was compared; it can be for those that were read whole.
    staging_bytes: the largest that buffers beside the arrays may have been; at most `host_bytes`.
    requests, retries: of the store. seconds: from the first request to the finished arrays.
    """

    source: str
    process: int
    checkpoint_bytes: int
    needed_bytes: int
    data_bytes: int
    header_bytes: int
    store_bytes: int
    cache_bytes: int
    verified_bytes: int
    staging_bytes: int
    requests: int
    retries: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def stream_parameters(
    source: str | Path | Store,
    config: ModelConfig | None = None,
    dtype: Any = jnp.bfloat16,
    stacked: bool = True,
    layout: str = "packed_kn",
    sharding: ShardingRule | None = None,
    *,
    host_bytes: int = HOST_BYTES,
    workers: int | None = None,
    cache: str | Path | None = None,
    verify: bool = True,
    fill: str = "auto",
    progress: Progress | None = None,
    vision: bool = True,
) -> tuple[Parameters, ModelConfig, LoadReport]:
    """Load a checkpoint in the public layout, of which this process reads what its devices need.

    source: a folder, an address that fsspec knows (s3://, gs://, memory://), or a `Store`. sharding: called with a
    declared parameter and the layers it is stacked of (None: a global one), returns the `jax.sharding.Sharding` of the
    array (codes and scales of experts alike), or None for the default device; without it everything goes there.
    `config`, `dtype`, `stacked`, `layout` and `vision` are those of `load_parameters`, and so is the result.

    Experts that live elsewhere are not read, rows of a matrix neither; of a matrix sharded over its inputs every row
    is read and cut on the host. Requests follow the files' order, run in `workers` threads, and are repeated with
    growing waits when they fail. host_bytes bounds what the host holds beside the finished arrays and the table of
    names. fill: `host` writes into buffers that the arrays adopt (CPU devices), `device` puts slices into device
    buffers by donated updates; `auto` chooses by the devices.

    cache: a folder that keeps what a remote store sent, so that a load that was interrupted goes on; delete it
    afterwards. verify: compare checksums, where the checkpoint has them and a tensor is read whole.

    Raises CheckpointError, which names file and tensor, for a damaged, truncated, absent or changing checkpoint and
    for a store that keeps failing; ValueError for arguments that do not fit.
    """
    dtype = checked_dtype(dtype, layout)
    if fill not in ("auto", "host", "device"):
        raise ValueError(f"fill is {fill!r}; it must be auto, host or device.")
    started = time.perf_counter()
    store = source if isinstance(source, Store) else open_store(source)
    if cache is not None:
        store = CachedStore(store, cache)
    before = _counts(store)
    local = isinstance(store, LocalStore)
    count = workers if workers is not None else min(8, os.cpu_count() or 1) if local else _REMOTE_WORKERS
    if count < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1.")
    # A worker holds one request twice (a remote one comes as bytes of its own), and the slice made from it.
    copies = 3 + max(1, dtype.itemsize // 2)
    count = min(count, max(1, host_bytes // (copies * _SMALLEST)))
    chunk = min(_LARGEST, host_bytes // (copies * count))
    if chunk < _SMALLEST:
        raise ValueError(
            f"host_bytes is {host_bytes}; at least {copies * _SMALLEST} are needed to move weights of this type."
        )
    checkpoint = StreamedCheckpoint(store, count)
    found = match(checkpoint, config if config is not None else checkpoint.config())
    headers = _counts(store) - before
    jobs: dict[str, TensorJob] = {}
    leaves = _plan(checkpoint, found, dtype, stacked, layout, sharding, fill, vision, jobs)
    reads = plan_reads(jobs.values(), chunk)
    with ThreadPoolExecutor(count, thread_name_prefix="stream") as pool:
        reader = _Reader(checkpoint, reads, verify, progress)
        reader.run(pool)
        used = sorted({read.shard for read in reads})
        list(pool.map(checkpoint.check_unchanged, used))

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        parts = {place: leaf.array() for place, leaf in leaves[parameter.name, layers].items()}
        return parts[""] if "" in parts else MXFP4Tensor(parts["packed"], parts["scale_bytes"], layout)

    parameters = build(found.config, stacked, make, vision and bool(found.vision))
    jax.block_until_ready(jax.tree.leaves(parameters))
    data = sum(read.stop - read.start for read in reads)
    traffic = _counts(store) - before
    report = LoadReport(
        source=store.address,
        process=jax.process_index(),
        checkpoint_bytes=checkpoint.nbytes,
        needed_bytes=sum(job.needed_bytes() for job in jobs.values()),
        data_bytes=data,
        header_bytes=headers.bytes_read + headers.bytes_from_cache,
        store_bytes=traffic.bytes_read,
        cache_bytes=traffic.bytes_from_cache,
        verified_bytes=reader.verified_bytes,
        staging_bytes=copies * count * max((read.stop - read.start for read in reads), default=0),
        requests=traffic.requests,
        retries=traffic.retries,
        seconds=time.perf_counter() - started,
    )
    return parameters, found.config, report


@dataclass(frozen=True)
class _Counts:
    """What a store has sent so far; it may have served other loads before."""

    bytes_read: int
    bytes_from_cache: int
    requests: int
    retries: int

    def __sub__(self, before: _Counts) -> _Counts:
        return _Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def _counts(store: Store) -> _Counts:
    cached = store.bytes_from_cache if isinstance(store, CachedStore) else 0
    return _Counts(store.traffic.bytes_read, cached, store.traffic.requests, store.traffic.retries)


Key = tuple[str, tuple[int, ...] | None]


def _plan(
    checkpoint: StreamedCheckpoint,
    found: Match,
    dtype: np.dtype,
    stacked: bool,
    layout: str,
    sharding: ShardingRule | None,
    fill: str,
    vision: bool,
    jobs: dict[str, TensorJob],
) -> dict[Key, dict[str, Leaf]]:
    """The leaves of the tree by parameter and layers, and in `jobs` the tensors they need."""
    leaves: dict[Key, dict[str, Leaf]] = {}
    table = found.stored(vision)

    def plan(parameter: Parameter, layers: tuple[int, ...] | None) -> None:
        stored = [table[layer, parameter.name] for layer in layers or (None,)]
        packed = check_one_form(stored)
        rule = sharding(parameter, layers) if sharding is not None else None
        devices = jax.devices()[:1] if rule is None else rule.addressable_devices
        update = fill == "device" or (fill == "auto" and any(device.platform != "cpu" for device in devices))
        leaves[parameter.name, layers] = {
            place: plan_leaf(checkpoint, parameter, stored, form, rule, update, jobs)
            for place, form in forms(parameter, packed, layout, dtype).items()
        }

    _visit(found.config, stacked, plan, vision and bool(found.vision))
    return leaves


def _visit(
    config: ModelConfig,
    stacked: bool,
    visit: Callable[[Parameter, tuple[int, ...] | None], None],
    vision: bool,
) -> None:
    """Call `visit` for every leaf of the tree that `build` makes."""

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> np.ndarray:
        visit(parameter, layers)
        return np.empty(0)

    build(config, stacked, make, vision)


class _Buffer(threading.local):
    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)


class _Reader:
    """Carries out the reads: fetch, verify, copy into the targets."""

    def __init__(
        self, checkpoint: StreamedCheckpoint, reads: list[Read], verify: bool, progress: Progress | None
    ) -> None:
        self._checkpoint, self._reads, self._progress = checkpoint, reads, progress
        self._buffer = _Buffer()
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self.verified_bytes = 0
        rows: dict[str, tuple[TensorJob, int]] = {}
        for read in reads:
            for job, first, last in read.parts:
                rows[job.name] = (job, rows.get(job.name, (job, 0))[1] + last - first)
        for name, (job, count) in rows.items():
            if verify and name in checkpoint.checksums and count == job.rows:
                job.checksum, job.remaining = PartialChecksum(), job.nbytes
        if progress is not None:
            total = sum(read.stop - read.start for read in reads)
            self._task = progress.add_task("Loading weights", total=total)

    def run(self, pool: ThreadPoolExecutor) -> None:
        """Return when everything is in its target; raise the first error after stopping the rest."""
        futures = [pool.submit(self._guarded, read) for read in self._reads]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Also when the user interrupts.
            if any(not future.done() for future in futures):
                self._failed.set()
            for future in futures:
                future.cancel()
            wait(futures)
        for future in done:
            future.result()

    def _guarded(self, read: Read) -> None:
        # A thread takes its next request before the error of the last one is seen elsewhere.
        if self._failed.is_set():
            return
        try:
            self._carry_out(read)
        except BaseException:
            self._failed.set()
            raise

    def _carry_out(self, read: Read) -> None:
        size = read.stop - read.start
        if self._buffer.bytes.nbytes < size:
            self._buffer.bytes = np.empty(size, np.uint8)
        content = self._buffer.bytes[:size]
        self._checkpoint.store.read_into(read.shard, read.start, memoryview(content))
        for job, first, last in read.parts:
            start = job.start + first * job.row_bytes - read.start
            raw = content[start : start + (last - first) * job.row_bytes]
            if job.checksum is not None:
                self._verify(job, first, raw)
            matrix = raw.view(job.dtype).reshape(last - first, job.columns)
            if job.name.endswith("_scale"):
                check_scale(self._checkpoint, job.name, matrix, first)
            for use in job.uses:
                use.copy(first, matrix)
        if self._progress is not None:
            self._progress.advance(self._task, size)

    def _verify(self, job: TensorJob, first: int, raw: np.ndarray) -> None:
        assert job.checksum is not None
        job.checksum.add(first * job.row_bytes, memoryview(raw))
        with self._lock:
            job.remaining -= raw.nbytes
            if job.remaining:
                return
            self.verified_bytes += job.nbytes
        check_value(self._checkpoint, job.name, job.checksum.value(), self._checkpoint.checksums[job.name])
