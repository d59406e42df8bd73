"""From the parameter tree to a checkpoint folder in the public layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Declared, Parameter, declare
from moe28t_jax.config.segments import segments
from moe28t_jax.model.parameters import Group, Parameters
from moe28t_jax.weights.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, Checkpoint
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.matching import BLOCK, StoredParameter, match, stored_names
from moe28t_jax.weights.publish import check_target, publish, work_folder, write_file
from moe28t_jax.weights.safetensors import DTYPES, SafetensorsWriter, tensor_bytes
from moe28t_jax.weights.transfer import copy_stored
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

MAX_SHARD_BYTES = 5 * 10**9
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def declared_values(parameters: Parameters, config: ModelConfig) -> Iterator[tuple[Declared, Any]]:
    """Every parameter in checkpoint order with its value in that layer: an array or an `MXFP4Tensor`; the image
    tower's last, when the tree has one.

    A value is sliced out of its stack when the iterator reaches it. Raises CheckpointError when the tree is
    not one of this configuration.
    """
    for declared, leaf, index in _leaves(parameters, config):
        yield declared, leaf if index is None else jax.tree.map(lambda x, index=index: x[index], leaf)


def leaf_table(
    parameters: Parameters, config: ModelConfig
) -> dict[tuple[int | None, str], tuple[Any, int | None]]:
    """By layer (None: global) and name, the leaf that holds a parameter and its place in the leaf's stack (None: not
    stacked). Raises CheckpointError as `declared_values`."""
    return {
        (declared.layer, declared.parameter.name): (leaf, index)
        for declared, leaf, index in _leaves(parameters, config)
    }


def _leaves(parameters: Parameters, config: ModelConfig) -> Iterator[tuple[Declared, Any, int | None]]:
    """Declared parameter, the leaf that holds it, and its place in the leaf's stack (None: not stacked)."""
    # A tree is stacked when it has fewer segments than layers.
    layout = segments(config, len(parameters.segments) != config.num_layers)
    if [segment.period for segment in layout] != [len(places) for places in parameters.segments]:
        raise CheckpointError(
            f"The parameters have {len(parameters.segments)} segments, which are not those of a "
            "configuration with "
            f"{config.num_layers} layers; pass the configuration that they were made for."
        )
    places: dict[int | None, tuple[Group, int | None]] = {None: (parameters, None)}
    for segment, stored in zip(layout, parameters.segments, strict=True):
        for repeat in range(segment.repeats):
            for position in range(segment.period):
                index = repeat if segment.repeats > 1 else None
                places[segment.layer(repeat, position)] = (stored[position], index)
    for declared in declare(config, vision=parameters.has_vision):
        node: Any
        node, index = places[declared.layer]
        for part in declared.parameter.name.split("."):
            if not hasattr(node, part):
                raise CheckpointError(
                    f"The parameters lack {declared.parameter.name!r}, which the configuration declares for "
                    f"{declared.stored_name!r}; pass the configuration that they were made for."
                )
            node = getattr(node, part)
        yield declared, node.get_value(), index


class StoredTensor(NamedTuple):
    """One tensor to write: its header entry and how to get its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Callable[[], np.ndarray]


def save_parameters(
    folder: str | Path,
    parameters: Parameters,
    config: ModelConfig,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_files: Iterable[str | Path] = (),
    like: str | Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint folder: config.json, one `model.safetensors` or shards with an index, extra files.

    Tensors have the declared names (with the configuration's prefix), their canonical shapes and the declared
    dtypes: bfloat16, rounded to nearest from anything wider, or float32. `MXFP4Tensor`s become
    `weight_packed` and `weight_scale`. With `like`, an existing checkpoint of the same parameters, names,
    shapes and float dtypes are taken from it, so that saving what was loaded from it gives the same bytes. The
    image tower is written when the parameters hold one.

    Everything is written to a hidden folder beside the target and renamed at the end: an existing checkpoint
    stays whole until then, and its files that are not weights are kept. Raises CheckpointError when the
    target exists and is no checkpoint, or the parameters do not fit the configuration.
    """
    folder = Path(folder).resolve()
    check_target(folder)
    extras = [Path(file) for file in tokenizer_files]
    absent = [str(file) for file in extras if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"There is no tokenizer file {and_more(absent)}; leave it out or correct its path."
        )
    tensors, config = _plan(parameters, config, like)
    sizes = {tensor.name: tensor_bytes(tensor.dtype, tensor.shape) for tensor in tensors}
    by_name = {tensor.name: tensor for tensor in tensors}
    groups = shard_groups(sizes, max_shard_bytes)
    shards = {shard: [by_name[name] for name in names] for shard, names in groups.items()}
    with work_folder(folder, "saving", keep=False) as work:
        total = sum(sizes.values())
        task = progress.add_task("Saving weights", total=total) if progress is not None else None
        for name, content in shards.items():
            entries = {tensor.name: (tensor.dtype, tensor.shape) for tensor in content}
            with SafetensorsWriter(work / name, entries) as writer:
                for tensor in content:
                    writer.write(tensor.name, tensor.content())
                    if progress is not None and task is not None:
                        progress.advance(task, writer.entries[tensor.name].nbytes)
        if len(shards) > 1:
            weight_map = {tensor.name: shard for shard, content in shards.items() for tensor in content}
            write_index(work, weight_map, total)
        write_config(work, config.to_hf())
        for file in extras:
            shutil.copy2(file, work / file.name)
        publish(work, folder, same_model=True)


def write_index(folder: Path, weight_map: dict[str, str], total_size: int) -> None:
    """Write model.safetensors.index.json."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())


def write_config(folder: Path, content: dict[str, Any]) -> None:
    """Write config.json."""
    write_file(folder / CONFIG_FILE, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def shard_names(count: int) -> list[str]:
    """File names of a checkpoint with that many shards."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def shard_groups(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """File names of the shards, and the tensors of each: in order, as many as fit, at least one."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, needed in sizes.items():
        if groups[-1] and size + needed > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += needed
    return dict(zip(shard_names(len(groups)), groups, strict=True))


def _plan(
    parameters: Parameters, config: ModelConfig, like: str | Path | None
) -> tuple[list[StoredTensor], ModelConfig]:
    """All tensors in checkpoint order, and the configuration that describes them."""
    pattern = None
    stored: dict[tuple[int | None, str], StoredParameter] = {}
    if like is not None:
        pattern = Checkpoint(like)
        found = match(pattern, config)
        stored = found.stored(vision=True)
        config = config.override({"checkpoint_prefix": found.config.checkpoint_prefix})
    tensors: list[StoredTensor] = []
    quantization = None
    for declared, leaf, index in _leaves(parameters, config):
        parameter = declared.parameter
        expected = parameter.shape if index is None else (leaf.shape[0], *parameter.shape)
        packed = isinstance(leaf, MXFP4Tensor)
        shape = (*leaf.shape[:-2], leaf.shape[-1], leaf.shape[-2]) if packed else tuple(leaf.shape)
        if shape != expected:
            raise CheckpointError(
                f"The parameter {parameter.name!r} for {declared.stored_name!r} has shape "
                f"{list(shape)}, but the "
                f"configuration makes it {list(expected)}; pass the configuration that it was made for."
            )
        if packed:
            quantization = "mxfp4"
        original = stored.get((declared.layer, parameter.name))
        tensors += declared_tensors(declared, leaf, index, original, pattern)
    return tensors, config.override({"expert_quantization": quantization})


def declared_tensors(
    declared: Declared,
    leaf: Any,
    index: int | None = None,
    original: StoredParameter | None = None,
    pattern: Checkpoint | None = None,
) -> Iterator[StoredTensor]:
    """The tensors that one parameter is stored as: the element `index` of `leaf`, or all of it; with the names, shapes
    and float dtypes of `original` in `pattern` where they are given."""
    parameter = declared.parameter
    names = original.names if original is not None else [names[0] for names in stored_names(declared)]
    stack = () if index is None else (index,)
    for expert, name in enumerate(names):
        path = (*stack, expert) if "{expert}" in parameter.stored_name else stack
        if isinstance(leaf, MXFP4Tensor):
            yield from _packed_tensors(name, leaf, path, parameter)
            continue
        dtype, shape = _DTYPES[parameter.dtype], parameter.stored_shapes[0]
        if original is not None and pattern is not None and not original.packed:
            dtype, shape = pattern.entry(name)[:2]
        content = partial(_plain_content, leaf, path, parameter, dtype, shape)
        yield StoredTensor(name, dtype, shape, content)


def host_array(leaf: Any, path: tuple[int, ...]) -> np.ndarray:
    """One element of a stack on the host. On CPU the whole leaf is viewed; elsewhere only the element
    moves."""
    if isinstance(leaf, jax.Array) and all(device.platform == "cpu" for device in leaf.devices()):
        leaf = np.asarray(leaf)
    for index in path:
        leaf = leaf[index]
    return np.asarray(leaf)


def _plain_content(
    leaf: Any, path: tuple[int, ...], parameter: Parameter, dtype: str, shape: tuple[int, ...]
) -> np.ndarray:
    value = host_array(leaf, path).astype(DTYPES[dtype][0], copy=False)
    if parameter.transform == "reshape":
        return value.reshape(-1)[: prod(shape)].reshape(shape)
    stored = np.empty(shape, value.dtype)
    copy_stored(value.reshape(-1, shape[0]), stored.reshape(shape[0], -1), "transpose")
    return stored


def _packed_tensors(
    name: str, leaf: MXFP4Tensor, path: tuple[int, ...], parameter: Parameter
) -> Iterator[StoredTensor]:
    size_out, size_in = parameter.stored_shapes[0]

    def content(scales: bool) -> np.ndarray:
        if leaf.layout == "float4_kn" and not scales:
            # Packed on the device: on the host a code would take a byte.
            one = jax.tree.map(lambda x: reduce(lambda x, index: x[index], path, x), leaf)
            return np.asarray(one.to_layout("packed_nk").packed)
        value = host_array(leaf.scale_bytes if scales else leaf.packed, path)
        if leaf.layout == "packed_nk":
            return value
        stored = np.empty(value.shape[::-1], np.uint8)
        copy_stored(value, stored, "transpose")
        return stored

    yield StoredTensor(f"{name}_packed", "U8", (size_out, size_in // 2), partial(content, False))
    yield StoredTensor(f"{name}_scale", "U8", (size_out, size_in // BLOCK), partial(content, True))
