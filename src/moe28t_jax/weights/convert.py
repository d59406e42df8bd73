"""Converting a checkpoint between bfloat16 and MXFP4 experts, tensor by tensor and resumable."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from moe28t_jax.weights.checkpoint import CONFIG_FILE, SINGLE_FILE, Checkpoint
from moe28t_jax.weights.checksums import CHECKSUM_FILE, check_value, read_checksums, write_checksum_file
from moe28t_jax.weights.errors import CheckpointError
from moe28t_jax.weights.matching import BLOCK, NAN_SCALE, check_scale, match
from moe28t_jax.weights.publish import (
    check_target,
    copy_extras,
    publish,
    resume,
    work_folder,
)
from moe28t_jax.weights.safetensors import SafetensorsFile, SafetensorsWriter, plan
from moe28t_jax.weights.save import write_config, write_index
from pallas_kernels.mxfp4_matmul import MXFP4Tensor, quantize

Action = Literal["copy", "quantize", "dequantize"]
Entries = dict[str, tuple[str, tuple[int, ...]]]


def convert(
    source: str | Path,
    target: str | Path,
    to: str = "mxfp4",
    progress: Progress | None = None,
) -> None:
    """Rewrite a checkpoint folder with its routed experts as MXFP4, or back as bfloat16.

    Only routed experts change; every other tensor, and an expert already in the wanted form, keeps its bytes.
    Quantising follows the public compressed-tensors rule (the `quantize` of `pallas_kernels.mxfp4_matmul`);
    dequantising is exact in bfloat16. config.json is rewritten with or without its `quantization_config`;
    files that are not weights (tokenizer, licence) are copied. Where checksums lie beside the source, every tensor
    is compared with its own before it is converted, and those of the target are written beside it.

    Shards keep their names and are finished one by one in a hidden folder beside the target: an interrupted
    conversion goes on with the first unfinished shard when it is run again, and the target appears, or is
    replaced, at the end in one step. Raises CheckpointError for a source that does not match its
    configuration or its checksums, a weight that is not finite, a NaN scale byte, or a target that is the source or no
    checkpoint.
    """
    if to not in ("mxfp4", "bfloat16"):
        raise ValueError(f"Experts can be converted to 'mxfp4' or 'bfloat16', not to {to!r}.")
    target = Path(target).resolve()
    checkpoint = Checkpoint(source)
    if target == checkpoint.folder.resolve():
        raise CheckpointError(f"The target {str(target)!r} is the source; choose another folder.")
    check_target(target)
    found = match(checkpoint, checkpoint.config())
    experts = {
        name: stored.packed
        for stored in found.text.values()
        if stored.declared.parameter.quantizable
        for name in stored.names
    }
    if not experts:
        raise CheckpointError(f"The checkpoint {str(checkpoint.source)!r} has no routed experts to convert.")
    config = found.config.override({"expert_quantization": "mxfp4" if to == "mxfp4" else None})
    plans = _plans(checkpoint, experts, to)
    with work_folder(target, "converting", keep=True) as work:
        resume(work, source_stamp(checkpoint, to), plans)
        task = None
        if progress is not None:
            sizes = (checkpoint.entry(name).nbytes for actions in plans.values() for name in actions)
            task = progress.add_task(f"Converting to {to}", total=sum(sizes))
        checksums = read_checksums(checkpoint)
        written: dict[str, int] = {}
        weight_map: dict[str, str] = {}
        total = 0
        for shard, actions in plans.items():
            entries = {name: entry for _, outputs in actions.values() for name, entry in outputs.items()}
            weight_map |= dict.fromkeys(entries, shard)
            total += sum(entry.nbytes for entry in plan(entries).values())
            if not shard_finished(work / shard, entries):
                with SafetensorsWriter(work / shard, entries) as writer:
                    for name, (action, _) in actions.items():
                        _check(checkpoint, checksums, name, action)
                        for output, value in _convert(checkpoint, name, action).items():
                            writer.write(output, value)
                        checkpoint.release(name)
                        if progress is not None and task is not None:
                            progress.advance(task, checkpoint.entry(name).nbytes)
            elif progress is not None and task is not None:
                progress.advance(task, sum(checkpoint.entry(name).nbytes for name in actions))
            if checksums:
                file = SafetensorsFile(work / shard)
                for name in file.entries:
                    written[name] = zlib.crc32(file.raw(name))
                    file.release(name)
        if list(plans) != [SINGLE_FILE]:
            write_index(work, weight_map, total)
        write_config(work, config.to_hf())
        if checksums:
            write_checksum_file(work, written)
        copy_extras(checkpoint.folder, work)
        publish(work, target, same_model=False)


def _plans(
    checkpoint: Checkpoint, experts: dict[str, bool], to: str
) -> dict[str, dict[str, tuple[Action, Entries]]]:
    """For every output shard what to do with the tensors it is made of, and what comes out."""
    plans: dict[str, dict[str, tuple[Action, Entries]]] = {}
    for name, packed in experts.items():
        if not packed and to == "mxfp4" and checkpoint.entry(name).shape[-1] % BLOCK:
            raise CheckpointError(
                f"The {checkpoint.where(name)} has {checkpoint.entry(name).shape[-1]} inputs, which "
                "MXFP4 blocks of "
                f"{BLOCK} do not divide; this model cannot be quantised."
            )
    scales = {f"{name}_scale" for name, packed in experts.items() if packed}
    packed_names = {f"{name}_packed": name for name, packed in experts.items() if packed}
    for shard, file in checkpoint.shards.items():
        # A folder's index is rewritten for the target; a single file of any name becomes the usual one.
        output = shard if len(checkpoint.shards) > 1 else SINGLE_FILE
        actions = plans.setdefault(output, {})
        for name, entry in file.entries.items():
            same: Entries = {name: (entry.dtype, entry.shape)}
            if name in experts and to == "mxfp4":
                size_out, size_in = entry.shape
                packed = ("U8", (size_out, size_in // 2))
                actions[name] = (
                    "quantize",
                    {f"{name}_packed": packed, f"{name}_scale": ("U8", (size_out, size_in // BLOCK))},
                )
            elif name in packed_names and to == "bfloat16":
                original = packed_names[name]
                size_out, blocks = checkpoint.entry(f"{original}_scale").shape
                actions[name] = ("dequantize", {original: ("BF16", (size_out, blocks * BLOCK))})
            elif not (name in scales and to == "bfloat16"):
                actions[name] = ("copy", same)
    return {shard: actions for shard, actions in plans.items() if actions}


def _check(checkpoint: Checkpoint, checksums: Mapping[str, int], name: str, action: Action) -> None:
    """Compare what `_convert` is about to read with its checksums, where there are any."""
    read = [name, f"{name.removesuffix('_packed')}_scale"] if action == "dequantize" else [name]
    for each in read if checksums else ():
        check_value(checkpoint, each, zlib.crc32(checkpoint.raw(each)), checksums[each])


def _convert(checkpoint: Checkpoint, name: str, action: Action) -> dict[str, np.ndarray]:
    value = checkpoint.view(name)
    if action == "copy":
        return {name: value}
    if action == "quantize":
        tensor = quantize(value, layout="packed_nk")
        bad = np.argwhere(tensor.scale_bytes == NAN_SCALE)
        if bad.size:
            row, block = (int(i) for i in bad[0])
            raise CheckpointError(
                f"The {checkpoint.where(name)} is not finite at output {row}, inputs {block * BLOCK} to "
                f"{block * BLOCK + BLOCK - 1}, so it cannot be quantised."
            )
        return {f"{name}_packed": tensor.packed, f"{name}_scale": tensor.scale_bytes}
    original = name.removesuffix("_packed")
    scale = checkpoint.view(f"{original}_scale").view(np.uint8)
    check_scale(checkpoint, f"{original}_scale", scale)
    return {original: MXFP4Tensor.from_checkpoint(value, scale).dequantize(jnp.bfloat16)}


def source_stamp(checkpoint: Checkpoint, to: str) -> bytes:
    """What a conversion depends on: names, sizes and times of the source's files, checksums included, and the aim."""
    files = {}
    for file in (*checkpoint.shards, CONFIG_FILE, CHECKSUM_FILE):
        if (checkpoint.folder / file).exists():
            status = (checkpoint.folder / file).stat()
            files[file] = [status.st_size, status.st_mtime_ns]
    source = hashlib.sha256(str(checkpoint.folder.resolve()).encode()).hexdigest()
    return json.dumps({"source": source, "files": files, "to": to}, sort_keys=True).encode()


def shard_finished(path: Path, entries: Entries) -> bool:
    """Whether a shard is there, whole, and holds exactly these tensors."""
    if not path.exists():
        return False
    try:
        return SafetensorsFile(path).entries == plan(entries)
    except CheckpointError:
        return False
