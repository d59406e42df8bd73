"""One layer of a checkpoint without the rest: for notebooks, and for checkpoints larger than the machine."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Declared, declare_layer
from moe28t_jax.model.parameters import Group, attach
from moe28t_jax.weights.checkpoint import Checkpoint
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.load import TensorLoader, checked_dtype
from moe28t_jax.weights.matching import Match, StoredParameter, check_stored, detect_prefix, find_stored


def load_layer(
    source: str | Path,
    layer: int,
    config: ModelConfig | None = None,
    dtype: Any = jnp.bfloat16,
    layout: str = "packed_kn",
    progress: Progress | None = None,
    verify: bool = True,
) -> Group:
    """Load one layer (counted from 0) of a checkpoint in the public layout, as `Parameters.layers` gives it.

    Only the shards that the index names for this layer are opened, and of them only this layer's tensors are
    read. All other shards may be absent: a folder with config.json, the index and the layer's one or two files
    is enough. `source`, `config`, `dtype`, `layout`, `progress` and `verify` are those of `load_parameters`, and so
    are the values, bit for bit.

    Raises ValueError for a layer that the configuration does not have, an unknown layout or a dtype that is no
    float, and CheckpointError, a sentence that names file and tensor, for anything that does not fit.
    """
    dtype = checked_dtype(dtype, layout)
    # The text prefix is not known before names are seen; no other part of a checkpoint has such names.
    of_layer = re.compile(rf"(?:.*\.)?model\.layers\.{layer}\.")
    checkpoint = Checkpoint(source, wanted=lambda name: of_layer.match(name) is not None)
    config = config if config is not None else checkpoint.config()
    if not 0 <= layer < config.num_layers:
        raise ValueError(
            f"The layer is {layer}, but this configuration has the layers 0 to {config.num_layers - 1}."
        )
    found = _match_layer(checkpoint, config, layer)
    group = Group()
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        loader = TensorLoader(checkpoint, found, dtype, layout, pool, progress, verify=verify)
        for parameter in declare_layer(config, layer):
            attach(group, parameter.name, loader.make(parameter, (layer,)))
    return group


def _match_layer(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> Match:
    """`match` for the parameters of one layer; raises CheckpointError as it does."""
    prefix = f"{detect_prefix(checkpoint, config.checkpoint_prefix)}model.layers.{layer}."
    text: dict[tuple[int | None, str], StoredParameter] = {}
    missing: list[str] = []
    for parameter in declare_layer(config, layer):
        aliases = tuple(prefix + alias for alias in parameter.stored_aliases)
        declared = Declared(parameter, layer, prefix + parameter.stored_name, aliases)
        stored = find_stored(checkpoint, declared, config.expert_quantization == "mxfp4", missing)
        text[layer, parameter.name] = stored
    if missing:
        raise CheckpointError(
            f"The checkpoint {str(checkpoint.source)!r} lacks the tensor {and_more(missing)} of layer {layer}: "
            "either it is damaged or incomplete, or its config.json belongs to another one."
        )
    known = {name for stored in text.values() for name in stored.tensors()}
    extra = [name for name in checkpoint if name.startswith(prefix) and name not in known]
    if extra:
        raise CheckpointError(
            f"The checkpoint {str(checkpoint.source)!r} holds the tensor {and_more(extra)}, which its configuration "
            f"does not know in layer {layer}: either it is damaged or its config.json belongs to another one."
        )
    for stored in text.values():
        check_stored(checkpoint, stored)
    return Match(config, text, ())
