"""Restoring Orbax checkpoints: whole onto any mesh, or one layer alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter
from moe28t_jax.model.parameters import Group, Parameters, attach, build
from moe28t_jax.weights.checkpoint import CONFIG_FILE, config_of, read_json
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.load import checked_dtype
from moe28t_jax.weights.matching import NAN_SCALE
from moe28t_jax.weights.orbax import FORMAT, item_layer, item_name, item_names, item_parameters, nested
from moe28t_jax.weights.publish import ORBAX_FILE
from moe28t_jax.weights.stream_plan import ShardingRule
from pallas_kernels.mxfp4_matmul import MXFP4Tensor


class OrbaxCheckpoint:
    """A folder that `save_orbax` wrote: `config`, `layout` of packed experts (None: unpacked), `has_vision`.

    `config` takes the place of the one in the folder. Raises CheckpointError when the folder is none, or has more
    layers than the configuration.
    """

    def __init__(self, folder: str | Path, config: ModelConfig | None = None) -> None:
        self.folder = Path(folder).resolve()
        path = self.folder / ORBAX_FILE
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(
                f"{str(path)!r} is not the description of a {FORMAT} checkpoint; save it again."
            )
        self.layout: str | None = content.get("layout")
        self.has_vision = bool(content.get("vision"))
        self._slots: int | None = content.get("expert_slots")
        if config is None:
            path = self.folder / CONFIG_FILE
            config = config_of(read_json(path), str(path))
        self.config = config.override({"expert_quantization": None if self.layout is None else "mxfp4"})
        if (self.folder / item_name(config.num_layers)).is_dir():
            raise CheckpointError(
                f"{str(self.folder)!r} has more layers than the {config.num_layers} of its configuration, which "
                "belongs to another checkpoint or was overridden."
            )

    def require(self, items: Iterable[str]) -> None:
        """Raise CheckpointError when one of the items is not there."""
        absent = [item for item in items if not (self.folder / item).is_dir()]
        if absent:
            raise CheckpointError(
                f"{str(self.folder)!r} lacks the item {and_more(absent)}; fetch it, or save the checkpoint again."
            )

    def restore(
        self, item: str, sharding: ShardingRule | None = None, layout: str | None = None
    ) -> Iterator[tuple[Parameter, Any]]:
        """The parameters of one item with their values, on the shardings that the rule gives for one layer."""
        import orbax.checkpoint as ocp

        self.require([item])
        parameters = item_parameters(self.config, item)
        layer = item_layer(item)
        path = self.folder / item
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        # Reading needs no barrier, at which the others would wait for one that found damage.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=alone) as checkpointer:
            try:
                metadata: Any = checkpointer.metadata(path).item_metadata
                stored = _flat(metadata.tree)
                self._check_item(item, (metadata.custom_metadata or {}).get("item"), stored)
                wanted: dict[str, Any] = {}
                for parameter in parameters:
                    rule = (
                        sharding(parameter, None if layer is None else (layer,))
                        if sharding is not None
                        else None
                    )
                    wanted[parameter.name] = self._abstract(parameter, item, stored, rule or default)
                target = nested(wanted)
                # Shapes were compared; only places for experts are filled up with empty ones, or are left out.
                arguments = ocp.checkpoint_utils.construct_restore_args(target, strict=False)
                restored = checkpointer.restore(
                    path, args=ocp.args.PyTreeRestore(item=target, restore_args=arguments)
                )
            except CheckpointError:
                raise
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
                raise CheckpointError(f"The item {str(path)!r} cannot be restored: {reason}.") from error
        for parameter in parameters:
            node = restored
            for part in parameter.name.split("."):
                node = node[part]
            if isinstance(node, dict):
                tensor = MXFP4Tensor(node["packed"], node["scale_bytes"], self.layout or "packed_kn")
                self._check_scales(item, parameter.name, tensor.scale_bytes)
                # On the devices, sharded as it is.
                node = tensor if layout in (None, self.layout) else _to_layout(tensor, layout)
            yield parameter, node

    def _check_scales(self, item: str, name: str, scale_bytes: jax.Array) -> None:
        """Raise CheckpointError when a scale byte that this process holds is NaN, as the public layout's loaders do."""
        parts = {str(shard.index): shard for shard in scale_bytes.addressable_shards}
        for part in parts.values():
            if int(_largest(part.data)) == NAN_SCALE:
                found = np.argwhere(np.asarray(part.data) == NAN_SCALE)[0]
                starts = [places.start or 0 for places in part.index]
                place = [start + int(i) for start, i in zip(starts, found, strict=True)]
                raise CheckpointError(
                    f"The parameter {name!r} in item {item!r} of {str(self.folder)!r} has the scale byte {NAN_SCALE} "
                    f"(NaN) at {place} of its scales; the weights are damaged, fetch or save them again."
                )

    def _check_item(self, item: str, found: Any, stored: Mapping[str, Any]) -> None:
        where = f"The item {item!r} of {str(self.folder)!r}"
        if found != item:
            raise CheckpointError(
                f"{where} was saved as {found!r}: the folders were exchanged; put them back."
            )
        known = {one.name for one in item_parameters(self.config, item)}
        extra = sorted({name.removesuffix(".packed").removesuffix(".scale_bytes") for name in stored} - known)
        if extra:
            raise CheckpointError(
                f"{where} holds the parameter {and_more(extra)}, which the configuration does not know: it "
                "belongs to another checkpoint, or was overridden in what shapes it."
            )

    def _abstract(
        self, parameter: Parameter, item: str, stored: Mapping[str, Any], sharding: jax.sharding.Sharding
    ) -> Any:
        shape, places = parameter.shape, None
        if parameter.num_experts is not None:
            shape, places = (self._slots or parameter.num_experts, *shape[1:]), shape[0]
        if f"{parameter.name}.packed" in stored:
            parts = {part: stored[f"{parameter.name}.{part}"] for part in ("packed", "scale_bytes")}
            leaves = {
                part: jax.ShapeDtypeStruct(tuple(one.shape), one.dtype, sharding=sharding)
                for part, one in parts.items()
            }
            tensor = MXFP4Tensor(leaves["packed"], leaves["scale_bytes"], self.layout or "packed_kn")
            found = (*tensor.shape[:-2], tensor.shape[-1], tensor.shape[-2])
        elif parameter.name in stored:
            one = stored[parameter.name]
            found, tensor = tuple(one.shape), None
            leaves = {"": jax.ShapeDtypeStruct(found, one.dtype, sharding=sharding)}
        else:
            raise CheckpointError(
                f"The item {item!r} of {str(self.folder)!r} lacks the parameter {parameter.name!r}: it is damaged or "
                "its config.json belongs to another one."
            )
        if found != shape:
            raise CheckpointError(
                f"The parameter {parameter.name!r} in item {item!r} of {str(self.folder)!r} has shape {list(found)}, "
                f"but the configuration makes it {list(shape)}: its config.json belongs to another checkpoint."
            )
        if places is not None:
            wanted = tensor if tensor is not None else leaves[""]
            return jax.tree.map(
                lambda one: jax.ShapeDtypeStruct((places, *one.shape[1:]), one.dtype, sharding=sharding),
                wanted,
            )
        return tensor if tensor is not None else leaves[""]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    found: dict[str, Any] = {}
    for name, child in tree.items():
        found |= _flat(child, f"{prefix}{name}.")
    return found


@jax.jit
def _largest(values: jax.Array) -> jax.Array:
    return values.max()


@partial(jax.jit, static_argnums=1)
def _to_layout(tensor: MXFP4Tensor, layout: str) -> MXFP4Tensor:
    return tensor.to_layout(layout)


@lru_cache(maxsize=64)
def _inserter(sharding: jax.sharding.Sharding | None) -> Callable[[Any, Any, jax.Array], Any]:
    """A program that puts one layer into a stack, in place; the stack keeps its sharding whatever the layer's is."""

    def insert(stack: Any, value: Any, index: jax.Array) -> Any:
        return jax.tree.map(lambda stack, value: stack.at[index].set(value), stack, value)

    if sharding is None:
        return jax.jit(insert, donate_argnums=0)
    return jax.jit(insert, donate_argnums=0, out_shardings=sharding)


def load_orbax(
    folder: str | Path,
    config: ModelConfig | None = None,
    stacked: bool = True,
    sharding: ShardingRule | None = None,
    layout: str | None = None,
    dtype: Any = None,
    vision: bool = True,
    progress: Progress | None = None,
) -> tuple[Parameters, ModelConfig]:
    """Restore a checkpoint of `save_orbax` onto any mesh: each process reads what its devices hold.

    `config` takes the place of the folder's. `sharding` is the rule of `stream_parameters`; it is asked for stacks and
    for the single layers that go into them. `layout` brings packed experts into another layout than they were saved in,
    `dtype` casts the rest as `load_parameters` does (None: as saved). Stacks are filled layer by layer, in place.
    Raises CheckpointError for a damaged checkpoint, or one that does not fit the configuration.
    """
    if dtype is not None:
        dtype = checked_dtype(dtype, layout or "packed_kn")
    checkpoint = OrbaxCheckpoint(folder, config)
    config = checkpoint.config
    vision = vision and checkpoint.has_vision
    items = item_names(config, vision)
    checkpoint.require(items)
    task = progress.add_task("Restoring", total=len(items)) if progress is not None else None
    places = _places(config, stacked, vision)
    values: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for item in items:
        layer = item_layer(item)
        for parameter, value in checkpoint.restore(item, sharding, layout):
            layers = places[parameter.name, layer]
            if dtype is not None and not isinstance(value, MXFP4Tensor):
                wide = np.promote_types(dtype, np.float32)
                value = value.astype(wide if parameter.dtype == "float32" else dtype)
            if layers is None or len(layers) == 1:
                values[parameter.name, layers] = value
                continue
            rule = sharding(parameter, layers) if sharding is not None else None
            if (parameter.name, layers) not in values:
                values[parameter.name, layers] = jax.tree.map(partial(_zeros, len(layers), rule), value)
            index = jnp.int32(layers.index(layer if layer is not None else -1))
            values[parameter.name, layers] = _inserter(rule)(values[parameter.name, layers], value, index)
        if progress is not None and task is not None:
            progress.advance(task)
    return build(config, stacked, lambda parameter, layers: values[parameter.name, layers], vision), config


def _zeros(count: int, sharding: jax.sharding.Sharding | None, value: jax.Array) -> jax.Array:
    return jnp.zeros((count, *value.shape), value.dtype, device=sharding or value.sharding)


def _places(
    config: ModelConfig, stacked: bool, vision: bool
) -> dict[tuple[str, int | None], tuple[int, ...] | None]:
    """For every parameter of every layer, the layers of the leaf that it is part of."""
    places: dict[tuple[str, int | None], tuple[int, ...] | None] = {}

    def make(parameter: Parameter, layers: tuple[int, ...] | None) -> np.ndarray:
        for layer in layers or (None,):
            places[parameter.name, layer] = layers
        return np.empty(0)

    build(config, stacked, make, vision)
    return places


def load_orbax_layer(
    folder: str | Path, layer: int, sharding: ShardingRule | None = None, layout: str | None = None
) -> Group:
    """Restore one layer (counted from 0) and nothing else, as `Parameters.layers` gives it."""
    checkpoint = OrbaxCheckpoint(folder)
    if not 0 <= layer < checkpoint.config.num_layers:
        raise ValueError(
            f"The layer is {layer}, but this checkpoint has the layers 0 to {checkpoint.config.num_layers - 1}."
        )
    group = Group()
    for parameter, value in checkpoint.restore(item_name(layer), sharding, layout):
        attach(group, parameter.name, value)
    return group
