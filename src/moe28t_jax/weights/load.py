"""From a checkpoint folder to the parameter tree, one tensor at a time."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter
from moe28t_jax.model.parameters import Parameters, build
from moe28t_jax.weights.checkpoint import Checkpoint
from moe28t_jax.weights.checksums import check_value, read_checksums
from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.matching import BLOCK, Match, StoredParameter, check_scale, match
from moe28t_jax.weights.transfer import aligned_empty, copy_stored, to_device
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

LAYOUTS = ("packed_kn", "packed_nk", "float4_kn")


def load_parameters(
    source: str | Path,
    config: ModelConfig | None = None,
    dtype: Any = jnp.bfloat16,
    stacked: bool = False,
    layout: str = "packed_kn",
    progress: Progress | None = None,
    vision: bool = True,
    verify: bool = True,
) -> tuple[Parameters, ModelConfig]:
    """Load a checkpoint in the public layout: a folder, or one `.safetensors` file beside its config.json.

    Matrices become `[in, out]`; the experts of a layer one array `[E, in, out]`, or an `MXFP4Tensor` in
    `layout` where the checkpoint stores them packed (each tensor says so itself, whatever the configuration
    claims). `dtype` is that of parameters the public layout keeps in bfloat16; those it keeps in float32
    (decay, gate bias, convolutions) stay float32, or float64 with a float64 `dtype`. `stacked` puts layers
    that repeat into one array each, for scanning. Image tower and projector are loaded when the checkpoint holds
    them (`parameters.has_vision`); with `vision` False they are checked and left unread. With `verify` every tensor
    read is compared with its checksum, where the folder has them (model.safetensors.crc32.json).

    Beside the result the host holds one tensor per worker thread; on CPU the arrays are the loader's own
    buffers, not copies. `progress` gets a task that counts bytes.

    Returns the parameters and the configuration, with the name prefix and the expert quantisation found in
    the files. Raises CheckpointError, a sentence that names file and tensor, for anything that does not
    fit, and ValueError for an unknown layout or a dtype that is no float.
    """
    dtype = checked_dtype(dtype, layout)
    checkpoint = Checkpoint(source)
    found = match(checkpoint, config if config is not None else checkpoint.config())
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        loader = TensorLoader(checkpoint, found, dtype, layout, pool, progress, vision, verify)
        parameters = build(found.config, stacked, loader.make, vision and bool(found.vision))
        return parameters, found.config


def checked_dtype(dtype: Any, layout: str) -> np.dtype:
    """The dtype to load as. Raises ValueError for one that is no float, and for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"The layout is {layout!r}, but it must be one of {', '.join(LAYOUTS)}.")
    dtype = np.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Parameters cannot be loaded as {dtype}; ask for a floating-point type such as bfloat16."
        )
    if dtype == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError(
            "Parameters cannot be loaded as float64 while jax_enable_x64 is off; switch it on first."
        )
    return dtype


def check_one_form(stored: Sequence[StoredParameter]) -> bool:
    """Whether the layers of a stack are packed. Raises CheckpointError where some are and some are not."""
    packed = [one.packed for one in stored]
    if len(set(packed)) > 1:
        yes, no = stored[packed.index(True)], stored[packed.index(False)]
        raise CheckpointError(
            f"{yes.names[0] + '_packed'!r} is stored as MXFP4 and {no.names[0]!r} unquantised, but "
            "the two layers "
            "share one stack; load with stacked=False or convert the checkpoint to one of them."
        )
    return packed[0]


class TensorLoader:
    """Makes the leaves of a parameter tree from a checkpoint's tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        found: Match,
        dtype: np.dtype,
        layout: str,
        pool: ThreadPoolExecutor,
        progress: Progress | None,
        vision: bool = False,
        verify: bool = True,
    ) -> None:
        self.checkpoint = checkpoint
        self.checksums = read_checksums(checkpoint) if verify else {}
        self.stored = found.stored(vision)
        self.dtype = dtype
        self.layout = layout
        self.pool = pool
        self.progress = progress
        if progress is not None:
            names = (name for one in self.stored.values() for name in one.tensors())
            total = sum(checkpoint.entry(name).nbytes for name in names)
            self.task = progress.add_task("Loading weights", total=total)

    def make(self, parameter: Parameter, layers: tuple[int, ...] | None) -> Any:
        """The value of one leaf, as `build` asks for it."""
        stored = [self.stored[layer, parameter.name] for layer in layers or (None,)]
        if check_one_form(stored):
            return self._packed(parameter, stored)
        return self._plain(parameter, stored)

    def skip(self, parameters: Iterable[Parameter], layers: tuple[int, ...] | None) -> None:
        """Count the tensors of parameters as done without reading them."""
        for parameter in parameters:
            for layer in layers or (None,):
                for name in self.stored[layer, parameter.name].tensors():
                    if self.progress is not None:
                        self.progress.advance(self.task, self.checkpoint.entry(name).nbytes)

    def _plain(self, parameter: Parameter, stored: list[StoredParameter]) -> jax.Array:
        dtype = self.dtype
        if parameter.dtype == "float32":
            dtype = np.promote_types(dtype, np.float32)
        buffer = aligned_empty((len(stored), *parameter.shape), dtype)
        targets = list(buffer)
        if "{expert}" in parameter.stored_name:
            buffer[:, parameter.num_stored :] = 0
            targets = [expert for layer in buffer for expert in layer[: parameter.num_stored]]
        names = [name for one in stored for name in one.names]

        def fill(name: str, target: np.ndarray) -> None:
            self._verify(name)
            copy_stored(self.checkpoint.view(name), target, parameter.transform)
            self._consumed(name)

        self._run(partial(fill, name, target) for name, target in zip(names, targets, strict=True))
        return to_device(buffer if len(stored) > 1 else buffer[0])

    def _packed(self, parameter: Parameter, stored: list[StoredParameter]) -> MXFP4Tensor:
        if self.layout != "float4_kn":
            return self._packed_bytes(parameter, stored, self.layout)
        # FP4 arrays exist on devices only: move packed bytes layer by layer and change the layout there.
        layers = (self._packed_bytes(parameter, [one], "packed_kn").to_layout("float4_kn") for one in stored)
        if len(stored) == 1:
            return next(layers)
        result: MXFP4Tensor | None = None
        for index, layer in enumerate(layers):
            if result is None:
                result = jax.tree.map(lambda x: jnp.zeros((len(stored), *x.shape), x.dtype), layer)
            result = _insert(result, layer, jnp.int32(index))
        assert result is not None
        return result

    def _packed_bytes(self, parameter: Parameter, stored: list[StoredParameter], layout: str) -> MXFP4Tensor:
        experts, size_in, size_out = parameter.shape
        leading = (len(stored), experts)
        transposed = layout == "packed_kn"

        def shape(rows_in: int) -> tuple[int, ...]:
            return (*leading, rows_in, size_out) if transposed else (*leading, size_out, rows_in)

        codes = aligned_empty(shape(size_in // 2), np.uint8)
        scales = aligned_empty(shape(size_in // BLOCK), np.uint8)
        for places in (codes, scales):
            places[:, parameter.num_stored :] = 0

        def fill(name: str, layer: int, expert: int) -> None:
            transform = "transpose" if transposed else "reshape"
            self._verify(f"{name}_scale")
            self._verify(f"{name}_packed")
            scale = self.checkpoint.view(f"{name}_scale").view(np.uint8)
            check_scale(self.checkpoint, f"{name}_scale", scale)
            copy_stored(scale, scales[layer, expert], transform)
            copy_stored(self.checkpoint.view(f"{name}_packed"), codes[layer, expert], transform)
            self._consumed(f"{name}_scale")
            self._consumed(f"{name}_packed")

        self._run(
            partial(fill, name, layer, expert)
            for layer, one in enumerate(stored)
            for expert, name in enumerate(one.names)
        )
        if len(stored) == 1:
            codes, scales = codes[0], scales[0]
        return MXFP4Tensor(to_device(codes), to_device(scales), layout)

    def _verify(self, name: str) -> None:
        if name in self.checksums:
            check_value(self.checkpoint, name, zlib.crc32(self.checkpoint.raw(name)), self.checksums[name])

    def _consumed(self, name: str) -> None:
        self.checkpoint.release(name)
        if self.progress is not None:
            self.progress.advance(self.task, self.checkpoint.entry(name).nbytes)

    def _run(self, tasks: Iterable[Callable[[], None]]) -> None:
        futures = [self.pool.submit(task) for task in tasks]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


@partial(jax.jit, donate_argnums=0)
def _insert(stack: Any, layer: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda stack, layer: stack.at[index].set(layer), stack, layer)
