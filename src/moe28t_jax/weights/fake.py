"""Synthetic checkpoints in the public layout: drawn, not trained, written in bounded memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
from rich.progress import Progress

from moe28t_jax.config import ModelConfig, slice_config
from moe28t_jax.config.declaration import Parameter, declare
from moe28t_jax.weights.checksums import write_checksum_file
from moe28t_jax.weights.matching import BLOCK, stored_names
from moe28t_jax.weights.publish import check_target, publish, work_folder
from moe28t_jax.weights.safetensors import SafetensorsWriter, tensor_bytes
from moe28t_jax.weights.save import MAX_SHARD_BYTES, shard_groups, write_config, write_index
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

# Elements drawn at once, which fixes both memory and the numbers.
_PIECE = 1 << 20
# Root mean square of the sixteen E2M1 values, each as likely as the others.
_CODE_RMS = 2.926
_NAMES = {"bfloat16": "BF16", "float32": "F32"}

Pieces = Callable[[], Iterator[np.ndarray]]


def fake_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    layers: int | None = None,
    experts: int | None = None,
    seed: int = 0,
    vision: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> ModelConfig:
    """Write a checkpoint folder with drawn weights of `config`, or of a slice of it (`slice_config`).

    Routed experts lie on the MXFP4 grid, packed where the configuration stores them so: all codes equally likely, the
    scales around what gives `initializer_range`. Other weights are drawn as `initialize` draws them, in the stored
    types. A tensor's bytes depend on `seed`, its name and its shape alone. Checksums are written beside the shards; no
    tokenizer and no licence are, nor do those of a checkpoint that is replaced stay. Memory holds one piece of a
    tensor. The folder appears, or is replaced, at the end.

    Returns the configuration written. Raises ValueError as `slice_config`, CheckpointError for a target that is no
    checkpoint.
    """
    config = slice_config(config, layers, experts)
    folder = Path(folder).resolve()
    check_target(folder)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    content: dict[str, Pieces] = {}
    for declared in declare(config, vision):
        for names in stored_names(declared):
            for name, dtype, shape, pieces in _draw(names[0], declared.parameter, config, seed):
                tensors[name], content[name] = (dtype, shape), pieces
    sizes = {name: tensor_bytes(*tensor) for name, tensor in tensors.items()}
    checksums: dict[str, int] = {}
    with work_folder(folder, "saving", keep=False) as work:
        task = (
            progress.add_task("Writing weights", total=sum(sizes.values())) if progress is not None else None
        )
        shards = shard_groups(sizes, max_shard_bytes)
        for shard, names in shards.items():
            with SafetensorsWriter(work / shard, {name: tensors[name] for name in names}) as writer:
                for name in writer.entries:
                    checksums[name] = writer.write_pieces(name, content[name]())
                    if progress is not None and task is not None:
                        progress.advance(task, sizes[name])
        if len(shards) > 1:
            write_index(
                work, {name: shard for shard, names in shards.items() for name in names}, sum(sizes.values())
            )
        write_config(work, config.to_hf())
        write_checksum_file(work, checksums)
        publish(work, folder, same_model=False)
    return config


def _draw(
    name: str, parameter: Parameter, config: ModelConfig, seed: int
) -> Iterator[tuple[str, str, tuple[int, ...], Pieces]]:
    """Name, dtype and shape of each stored tensor, and how to draw its content."""
    shape = parameter.stored_shapes[0]
    if parameter.quantizable:
        size_out, size_in = shape
        base = round(math.log2(config.initializer_range / _CODE_RMS)) + 127
        codes, scales = (size_out, size_in // 2), (size_out, size_in // BLOCK)

        def draw_codes(random: np.random.Generator, size: int) -> np.ndarray:
            return np.frombuffer(random.bytes(size), np.uint8)

        def draw_scales(random: np.random.Generator, size: int) -> np.ndarray:
            return random.integers(max(0, base - 1), base + 2, size, np.uint8)

        code_pieces = _pieces(f"{name}_packed", seed, prod(codes), draw_codes)
        scale_pieces = _pieces(f"{name}_scale", seed, prod(scales), draw_scales)
        if config.expert_quantization == "mxfp4":
            yield f"{name}_packed", "U8", codes, code_pieces
            yield f"{name}_scale", "U8", scales, scale_pieces
            return

        def decoded() -> Iterator[np.ndarray]:
            packed = np.concatenate(list(code_pieces())).reshape(codes)
            scale = np.concatenate(list(scale_pieces())).reshape(scales)
            rows = max(1, _PIECE // size_in)
            for row in range(0, size_out, rows):
                part = MXFP4Tensor.from_checkpoint(packed[row : row + rows], scale[row : row + rows])
                yield np.asarray(part.dequantize(ml_dtypes.bfloat16))

        yield name, "BF16", shape, decoded
        return
    dtype = np.dtype(ml_dtypes.bfloat16 if parameter.dtype == "bfloat16" else np.float32)

    def draw(random: np.random.Generator, size: int) -> np.ndarray:
        return _initial(parameter, config, random, size).astype(dtype)

    yield name, _NAMES[parameter.dtype], shape, _pieces(name, seed, prod(shape), draw)


def _pieces(
    name: str, seed: int, count: int, draw: Callable[[np.random.Generator, int], np.ndarray]
) -> Pieces:
    """Draws `count` elements piece by piece, each piece from a generator of its own."""

    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, count, _PIECE):
            identity = hashlib.sha256(f"{seed}:{start}:{name}".encode()).digest()
            random = np.random.Generator(np.random.SFC64(int.from_bytes(identity, "little")))
            yield draw(random, min(_PIECE, count - start))

    return pieces


def _initial(parameter: Parameter, config: ModelConfig, random: np.random.Generator, size: int) -> np.ndarray:
    match parameter.initializer:
        case "ones":
            return np.ones(size, np.float32)
        case "zeros":
            return np.zeros(size, np.float32)
        case "convolution":
            return random.random(size, np.float32) - np.float32(0.5)
        case "decay_bias":
            time = np.exp(random.uniform(math.log(1e-3), math.log(1e-1), size))
            if config.kda is not None and config.kda.gate_lower_bound is not None:
                return np.log(np.expm1(time))
            return time + np.log(-np.expm1(-time))
        case _:
            return random.standard_normal(size, np.float32) * np.float32(config.initializer_range)
