"""Between the public layout and Orbax, one layer at a time, resumable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from moe28t_jax.config.declaration import Declared, declare
from moe28t_jax.weights.checkpoint import CONFIG_FILE, Checkpoint
from moe28t_jax.weights.convert import shard_finished, source_stamp
from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.load import TensorLoader, checked_dtype
from moe28t_jax.weights.matching import BLOCK, Match, match, stored_names
from moe28t_jax.weights.orbax import (
    item_layer,
    item_names,
    item_parameters,
    write_description,
    write_item,
)
from moe28t_jax.weights.orbax_restore import OrbaxCheckpoint
from moe28t_jax.weights.publish import (
    ORBAX_FILE,
    ORBAX_ITEMS,
    check_target,
    copy_extras,
    publish,
    resume,
    work_folder,
)
from moe28t_jax.weights.safetensors import SafetensorsWriter, tensor_bytes
from moe28t_jax.weights.save import (
    StoredTensor,
    declared_tensors,
    host_array,
    shard_names,
    write_config,
    write_index,
)
from pallas_kernels import mxfp4_matmul
from pallas_kernels.mxfp4_matmul import MXFP4Tensor


def convert_to_orbax(
    source: str | Path,
    target: str | Path,
    dtype: Any = None,
    layout: str = "packed_kn",
    progress: Progress | None = None,
) -> None:
    """Convert a checkpoint folder in the public layout into one that `load_orbax` reads.

    `dtype` and `layout` are those of `load_parameters`; without a dtype nothing is rounded: it is bfloat16, or what
    holds every stored value (`exact_dtype`). Packed experts stay packed. Memory holds one layer. Layers are finished
    one by one in a hidden folder beside the target: an interrupted conversion goes on with the first unfinished one
    when it is run again, and the target appears, or is replaced, at the end in one step.

    Raises CheckpointError for a source that does not match its configuration, or a target that is the source or no
    checkpoint.
    """
    if dtype is not None:
        dtype = checked_dtype(dtype, layout)
    target = Path(target).resolve()
    checkpoint = Checkpoint(source)
    _check_target(checkpoint.folder, target)
    found = match(checkpoint, checkpoint.config())
    if dtype is None:
        dtype = checked_dtype(exact_dtype(checkpoint, found), layout)
    has_vision = bool(found.vision)
    with work_folder(target, "converting", keep=True) as work:
        resume(work, source_stamp(checkpoint, f"orbax {dtype} {layout}"), ORBAX_ITEMS)
        for unfinished in work.rglob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(unfinished)
        workers = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
            loader = TensorLoader(checkpoint, found, dtype, layout, pool, progress, has_vision)
            for item in item_names(found.config, has_vision):
                layer = item_layer(item)
                layers = None if layer is None else (layer,)
                parameters = item_parameters(found.config, item)
                # Orbax gives an item its name when it is whole.
                if (work / item).is_dir():
                    loader.skip(parameters, layers)
                else:
                    write_item(work, item, {one.name: loader.make(one, layers) for one in parameters})
        packed = found.config.expert_quantization == "mxfp4"
        write_description(work, found.config, layout if packed else None, has_vision)
        copy_extras(checkpoint.folder, work)
        publish(work, target, same_model=False)


def exact_dtype(checkpoint: Checkpoint, found: Match) -> np.dtype:
    """The narrowest of bfloat16, float32 and float64 that holds every value of the parameters which the public layout
    keeps in bfloat16. (The others stay at least float32 in any case.)

    Raises CheckpointError for float64 while JAX has none.
    """
    widest = np.dtype(jnp.bfloat16)
    for one in found.stored(vision=True).values():
        if one.packed:
            continue
        for name in one.names:
            stored = checkpoint.entry(name).dtype
            if stored == "F64":
                if not jax.config.jax_enable_x64:
                    raise CheckpointError(
                        f"The {checkpoint.where(name)} is float64, which would be rounded; allow it with a dtype "
                        "(--dtype float32), or switch on jax_enable_x64."
                    )
                return np.dtype(np.float64)
            if stored in ("F16", "F32") and one.declared.parameter.dtype != "float32":
                widest = np.dtype(np.float32)
    return widest


def _check_target(source: Path, target: Path) -> None:
    if target == source.resolve():
        raise CheckpointError(f"The target {str(target)!r} is the source; choose another folder.")
    check_target(target)


def export_orbax(
    source: str | Path,
    target: str | Path,
    experts: str = "same",
    progress: Progress | None = None,
) -> None:
    """Write an Orbax checkpoint in the public layout, one shard per layer.

    Tensors have the declared names, canonical shapes and dtypes, as `save_parameters` writes them. experts: `mxfp4`
    rounds unpacked experts by the public rule, `bfloat16` unpacks packed ones. Memory holds one layer; an interrupted
    export goes on with the first unfinished shard when it is run again, and the target appears, or is replaced, at the
    end in one step. Files that are no weights are copied.

    Raises CheckpointError for a damaged source, a target that is the source or no checkpoint, and experts that cannot
    be rounded.
    """
    if experts not in ("same", "mxfp4", "bfloat16"):
        raise ValueError(f"Experts can be exported as 'same', 'mxfp4' or 'bfloat16', not as {experts!r}.")
    target = Path(target).resolve()
    checkpoint = OrbaxCheckpoint(source)
    _check_target(checkpoint.folder, target)
    packed = checkpoint.layout is not None if experts == "same" else experts == "mxfp4"
    config = checkpoint.config.override({"expert_quantization": "mxfp4" if packed else None})
    items = item_names(config, checkpoint.has_vision)
    checkpoint.require(items)
    table = {(one.layer, one.parameter.name): one for one in declare(config, checkpoint.has_vision)}
    with work_folder(target, "converting", keep=True) as work:
        resume(work, _orbax_stamp(checkpoint, items, experts), shard_names(len(items)))
        task = progress.add_task("Exporting", total=len(items)) if progress is not None else None
        weight_map: dict[str, str] = {}
        total = 0
        for item, shard in zip(items, shard_names(len(items)), strict=True):
            declared = [table[item_layer(item), one.name] for one in item_parameters(config, item)]
            entries = {name: entry for one in declared for name, entry in _entries(one, packed)}
            weight_map |= dict.fromkeys(entries, shard)
            total += sum(tensor_bytes(*entry) for entry in entries.values())
            if not shard_finished(work / shard, entries):
                with SafetensorsWriter(work / shard, entries) as writer:
                    for tensor in _tensors(checkpoint, item, table, packed):
                        writer.write(tensor.name, tensor.content())
            if progress is not None and task is not None:
                progress.advance(task)
        write_index(work, weight_map, total)
        write_config(work, config.to_hf())
        copy_extras(checkpoint.folder, work)
        publish(work, target, same_model=False)


def _orbax_stamp(checkpoint: OrbaxCheckpoint, items: list[str], experts: str) -> bytes:
    files = (*items, CONFIG_FILE, ORBAX_FILE)
    times = [(checkpoint.folder / file).stat().st_mtime_ns for file in files]
    return repr((str(checkpoint.folder), times, experts)).encode()


def _entries(declared: Declared, packed: bool) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    parameter = declared.parameter
    shape = parameter.stored_shapes[0]
    for names in stored_names(declared):
        if packed and parameter.quantizable:
            size_out, size_in = shape
            yield f"{names[0]}_packed", ("U8", (size_out, size_in // 2))
            yield f"{names[0]}_scale", ("U8", (size_out, size_in // BLOCK))
        else:
            yield names[0], ("F32" if parameter.dtype == "float32" else "BF16", shape)


def _tensors(
    checkpoint: OrbaxCheckpoint, item: str, table: dict[tuple[int | None, str], Declared], packed: bool
) -> Iterator[StoredTensor]:
    layer = item_layer(item)
    for parameter, value in checkpoint.restore(item):
        declared = table[layer, parameter.name]
        if parameter.quantizable and packed != isinstance(value, MXFP4Tensor):
            yield from _other_experts(declared, value)
        else:
            yield from declared_tensors(declared, value)


def _other_experts(declared: Declared, value: Any) -> Iterator[StoredTensor]:
    """Experts of one form in the other, each of them made when the iterator reaches it: beside the layer there is never
    more than one."""
    parameter = declared.parameter
    size_out, size_in = parameter.stored_shapes[0]
    if not isinstance(value, MXFP4Tensor) and size_in % BLOCK:
        raise CheckpointError(
            f"The experts {parameter.name!r} have {size_in} inputs, which MXFP4 blocks of {BLOCK} do not divide; "
            "this model cannot be quantised."
        )
    for expert, (name, *_) in enumerate(stored_names(declared)):
        one = _expert(value, expert)
        if isinstance(one, MXFP4Tensor):
            plain = one.dequantize(jnp.bfloat16)
            yield StoredTensor(name, "BF16", (size_out, size_in), partial(np.asarray, plain))
            continue
        tensor = mxfp4_matmul.quantize(one.T, layout="packed_nk").require_finite(name)
        yield StoredTensor(f"{name}_packed", "U8", tensor.packed.shape, partial(np.asarray, tensor.packed))
        yield StoredTensor(
            f"{name}_scale", "U8", tensor.scale_bytes.shape, partial(np.asarray, tensor.scale_bytes)
        )


def _expert(value: Any, expert: int) -> Any:
    """One of a layer's experts, on the host."""
    if isinstance(value, MXFP4Tensor) and value.layout == "float4_kn":
        # Cut out and packed on the device: on the host every code of the layer would take a byte.
        return jax.tree.map(np.asarray, jax.tree.map(lambda x: x[expert], value).to_layout("packed_nk"))
    return jax.tree.map(lambda x: host_array(x, (expert,)), value)
