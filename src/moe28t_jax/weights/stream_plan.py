"""Which bytes of which stored tensors the shards of this process need, and where they go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from moe28t_jax.config.declaration import Parameter
from moe28t_jax.weights.checksums import PartialChecksum
from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.matching import BLOCK, StoredParameter
from moe28t_jax.weights.safetensors import DTYPES
from moe28t_jax.weights.stream_source import StreamedCheckpoint
from moe28t_jax.weights.stream_target import DeviceTarget, HostTarget, Target

Bounds = tuple[tuple[int, int], ...]
ShardingRule = Callable[[Parameter, tuple[int, ...] | None], Sharding | None]
_STRIP = 64


@dataclass
class Use:
    """A part of one stored tensor, read as a matrix of rows, and its place in a target.

    `rows` of the stored tensor are wanted, of each the `rest` (one range per further axis). `corner` are the target's
    indices on its leading axes.
    """

    target: Target
    corner: tuple[int, ...]
    rows: tuple[int, int]
    rest: Bounds
    inner: tuple[int, ...]
    transposed: bool

    @property
    def size(self) -> int:
        """Elements wanted."""
        return (self.rows[1] - self.rows[0]) * prod(stop - start for start, stop in self.rest)

    def copy(self, first_row: int, matrix: np.ndarray) -> None:
        """Put the wanted part of stored rows, `first_row` and following, into the target."""
        start, stop = max(self.rows[0], first_row), min(self.rows[1], first_row + len(matrix))
        if start >= stop:
            return
        part = matrix[start - first_row : stop - first_row]
        if self.transposed:
            part = part[:, slice(*self.rest[0])]
            corner = (*self.corner, 0, start - self.rows[0])
        else:
            part = part.reshape(len(part), *self.inner)[(slice(None), *(slice(*one) for one in self.rest))]
            corner = (*self.corner, start - self.rows[0], *(0 for _ in self.rest))
        self.target.put(corner, part, self.transposed)


@dataclass
class TensorJob:
    """One stored tensor of which something is wanted: `rows` by `columns` elements of `dtype`, at byte `start` of its
    shard."""

    name: str
    shard: str
    start: int
    rows: int
    columns: int
    dtype: np.dtype
    uses: list[Use] = field(default_factory=list)
    checksum: PartialChecksum | None = None
    remaining: int = 0
    """Bytes that are still to be read, where `checksum` is kept."""

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def needed_bytes(self) -> int:
        """Bytes that this process uses; targets of several devices that hold the same part count once."""
        parts = {(use.rows, use.rest): use.size for use in self.uses}
        return sum(parts.values()) * self.dtype.itemsize

    def intervals(self) -> list[tuple[int, int]]:
        """Ranges of rows to read, merged."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted({use.rows for use in self.uses}):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged


@dataclass(frozen=True)
class Read:
    """One request: bytes `start` to `stop` of a shard, which hold rows of tensors one after another."""

    shard: str
    start: int
    stop: int
    parts: tuple[tuple[TensorJob, int, int], ...]


def plan_reads(jobs: Iterable[TensorJob], chunk_bytes: int) -> list[Read]:
    """Requests of at most `chunk_bytes`, in file order; neighbours in a file share one."""
    parts: list[tuple[str, int, int, TensorJob, int, int]] = []
    for job in jobs:
        if job.row_bytes > chunk_bytes:
            raise ValueError(
                f"One row of tensor {job.name!r} has {job.row_bytes} bytes, more than the {chunk_bytes} that "
                "host_bytes leaves to a request; allow more."
            )
        rows = max(1, chunk_bytes // max(1, job.row_bytes))
        rows = rows // _STRIP * _STRIP if rows >= _STRIP else rows
        for first, last in job.intervals():
            for row in range(first, last, rows):
                until = min(last, row + rows)
                place = job.start + row * job.row_bytes
                parts.append((job.shard, place, place + (until - row) * job.row_bytes, job, row, until))
    parts.sort(key=lambda part: part[:2])
    reads: list[Read] = []
    pending: list[tuple[TensorJob, int, int]] = []
    shard, start, stop = "", 0, 0
    for name, first, last, job, row, until in parts:
        if pending and (name != shard or first != stop or last - start > chunk_bytes):
            reads.append(Read(shard, start, stop, tuple(pending)))
            pending = []
        if not pending:
            shard, start = name, first
        stop = last
        pending.append((job, row, until))
    if pending:
        reads.append(Read(shard, start, stop, tuple(pending)))
    return reads


@dataclass
class Leaf:
    """One array of the program: its shape there, and the targets that hold the parts of this process's devices."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None
    targets: list[Target]

    def array(self) -> jax.Array:
        """The finished array. Nothing may be written into its targets afterwards."""
        if self.sharding is None:
            return self.targets[0].arrays()[0]
        arrays = [array for target in self.targets for array in target.arrays()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays, dtype=self.dtype)


@dataclass(frozen=True)
class Form:
    """How the stored tensors of a parameter become one array: names end with `suffix`; `inner` is the program shape of
    one tensor; `double` of its rows are made from one byte row (two codes to a byte)."""

    suffix: str
    inner: tuple[int, ...]
    dtype: np.dtype
    transposed: bool
    double: bool = False


def forms(parameter: Parameter, packed: bool, layout: str, dtype: np.dtype) -> dict[str, Form]:
    """The arrays that a parameter becomes, by their place in it: "" or those of an `MXFP4Tensor`."""
    inner = parameter.shape[1:] if "{expert}" in parameter.stored_name else parameter.shape
    if not packed:
        if parameter.dtype == "float32":
            dtype = np.promote_types(dtype, np.float32)
        return {"": Form("", inner, dtype, parameter.transform == "transpose")}
    size_in, size_out = inner
    transposed = layout != "packed_nk"

    def shape(rows: int) -> tuple[int, int]:
        return (rows, size_out) if transposed else (size_out, rows)

    codes, scales = np.dtype(np.uint8), np.dtype(np.uint8)
    if layout == "float4_kn":
        codes = np.dtype(jnp.float4_e2m1fn)
    return {
        "packed": Form("_packed", shape(size_in // 2), codes, transposed, layout == "float4_kn"),
        "scale_bytes": Form("_scale", shape(size_in // BLOCK), scales, transposed),
    }


def plan_leaf(
    checkpoint: StreamedCheckpoint,
    parameter: Parameter,
    stored: list[StoredParameter],
    form: Form,
    sharding: Sharding | None,
    update: bool,
    jobs: dict[str, TensorJob],
) -> Leaf:
    """Make the targets of one array and add what they need to `jobs`."""
    leading = ((len(stored),) if len(stored) > 1 else ()) + (
        (parameter.shape[0],) if "{expert}" in parameter.stored_name else ()
    )
    inner = form.inner if not form.double else (2 * form.inner[0], *form.inner[1:])
    shape = (*leading, *inner)
    leaf = Leaf(shape, form.dtype, sharding, [])
    for bounds, devices in _parts(parameter, shape, sharding).items():
        if form.double:
            axis = len(leading)
            if bounds[axis][0] % 2 or bounds[axis][1] % 2:
                raise ValueError(
                    f"The sharding of {parameter.name!r} divides its {shape[axis]} inputs between the two codes of a "
                    "byte; shard another axis, or fewer ways."
                )
            halved = (bounds[axis][0] // 2, bounds[axis][1] // 2)
            bounds = (*bounds[:axis], halved, *bounds[axis + 1 :])
        size = tuple(stop - start for start, stop in bounds)
        target = (
            DeviceTarget(size, form.dtype, devices, len(leading) if form.double else None)
            if (update or form.double)
            else HostTarget(size, form.dtype, devices)
        )
        if "{expert}" in parameter.stored_name and bounds[len(leading) - 1][1] > parameter.num_stored:
            target.clear()
        leaf.targets.append(target)
        for corner, name in _tensors(stored, len(leading), bounds):
            _use(checkpoint, f"{name}{form.suffix}", form, target, corner, bounds[len(leading) :], jobs)
    return leaf


def _parts(
    parameter: Parameter, shape: tuple[int, ...], sharding: Sharding | None
) -> dict[Bounds, list[Any]]:
    """Distinct parts of an array on this process's devices, and the devices of each."""
    if sharding is None:
        return {tuple((0, size) for size in shape): [None]}
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise ValueError(
            f"The sharding of {parameter.name!r} does not fit its shape {list(shape)}: {error}"
        ) from error
    parts: dict[Bounds, list[Any]] = {}
    for device, index in indices.items():
        slices = (*(index or ()), *(slice(None),) * (len(shape) - len(index or ())))
        bounds = tuple(one.indices(size)[:2] for one, size in zip(slices, shape, strict=True))
        parts.setdefault(bounds, []).append(device)
    return parts


def _tensors(
    stored: list[StoredParameter], leading: int, bounds: Bounds
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Indices on the target's leading axes, and the tensor that belongs there."""
    ranges = list(bounds[:leading])
    layers = ranges.pop(0) if len(stored) > 1 else (0, 1)
    for layer in range(*layers):
        place = (layer - layers[0],) if len(stored) > 1 else ()
        names = stored[layer].names
        if not ranges:
            yield place, names[0]
        for start, stop in ranges:
            # Places behind the last expert have no tensor.
            for expert in range(start, min(stop, len(names))):
                yield (*place, expert - start), names[expert]


def _use(
    checkpoint: StreamedCheckpoint,
    name: str,
    form: Form,
    target: Target,
    corner: tuple[int, ...],
    bounds: Bounds,
    jobs: dict[str, TensorJob],
) -> None:
    entry = checkpoint.entry(name)
    dtype = np.dtype(np.uint8) if form.suffix else DTYPES[entry.dtype][0]
    count = entry.nbytes // dtype.itemsize
    rest = prod(form.inner[1:]) if not form.transposed else form.inner[0]
    rows = count // rest
    if rows * rest != count or rows > (form.inner[-1] if form.transposed else form.inner[0]):
        raise CheckpointError(
            f"The {checkpoint.where(name)} has {count} elements, which do not fit the program's {list(form.inner)}."
        )
    if name not in jobs:
        jobs[name] = TensorJob(name, checkpoint.shard_of(name), checkpoint.start_of(name), rows, rest, dtype)
    wanted, columns = (bounds[1], (bounds[0],)) if form.transposed else (bounds[0], bounds[1:])
    if wanted[1] > rows:
        # A tensor stored without the padding that the program has (A_log).
        start = max(wanted[0], rows)
        padding = np.zeros((wanted[1] - start, *(stop - start for start, stop in columns)), form.dtype)
        target.put((*corner, start - wanted[0], *(0 for _ in columns)), padding, False)
        wanted = (wanted[0], start)
    use = Use(target, corner, wanted, columns, form.inner[1:], form.transposed)
    if use.size:
        jobs[name].uses.append(use)
