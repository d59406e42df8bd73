"""Checkpoints of arrays as the program holds them, sharded, through Orbax: one Orbax item per layer.

A folder has config.json, orbax.json (format, layout of packed experts, image tower or not) and the items `globals`,
`layers/00000` and so on, and `vision`. Items hold layers one by one whether the tree was stacked or not, so that one
layer can be restored alone, and any mesh or stacking can read what another wrote.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter, declare_globals, declare_layer, declare_vision
from moe28t_jax.model.parameters import Group, Parameters, attach, build
from moe28t_jax.weights.checkpoint import CONFIG_FILE, config_of, read_json
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.load import checked_dtype
from moe28t_jax.weights.publish import (
    ORBAX_FILE,
    beside,
    check_target,
    clear,
    publish,
    work_folder,
    write_file,
)
from moe28t_jax.weights.save import leaf_table, write_config
from moe28t_jax.weights.stream_plan import ShardingRule
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

_FORMAT = "moe28t-orbax-1"
Values = dict[str, Any]


def is_orbax(folder: str | Path) -> bool:
    """Whether a folder is a checkpoint that `save_orbax` wrote."""
    return (Path(folder) / ORBAX_FILE).is_file()


def item_name(layer: int | None, vision: bool = False) -> str:
    """Sub-folder of a layer's item; that of the global parameters for None, or of the image tower."""
    if layer is not None:
        return f"layers/{layer:05d}"
    return "vision" if vision else "globals"


def item_parameters(config: ModelConfig, item: str) -> tuple[Parameter, ...]:
    """The declared parameters of an item."""
    if item == "globals":
        return declare_globals(config)
    if item == "vision":
        assert config.vision is not None
        return declare_vision(config.vision, config.hidden_size)
    return declare_layer(config, int(item.rpartition("/")[2]))


def item_names(config: ModelConfig, vision: bool) -> list[str]:
    """All items, layers first."""
    layers = [item_name(layer) for layer in range(config.num_layers)]
    return [*layers, item_name(None), *([item_name(None, True)] if vision else [])]


# -- saving ----------------------------------------------------------------------------------------------------
class OrbaxSave:
    """A save that may still be running; `wait` returns when the folder is in place and raises what went wrong."""

    def __init__(self, action: Callable[[], None], asynchronous: bool) -> None:
        self._error: BaseException | None = None
        self._action = action
        self._thread = threading.Thread(target=self._run, name="save-orbax", daemon=False)
        if asynchronous:
            self._thread.start()
        else:
            action()

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until the save has ended. Raises its error."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def save_orbax(
    folder: str | Path,
    parameters: Parameters,
    config: ModelConfig,
    *,
    extra_files: Iterable[str | Path] = (),
    asynchronous: bool = False,
    progress: Progress | None = None,
) -> OrbaxSave:
    """Save parameters as they are: sharded, in their dtypes, experts packed in the layout they have.

    Every process of a mesh calls it, with a folder that all of them see; each writes its own shards. `extra_files`
    (tokenizer, licence) are copied along. Everything is written beside the target and renamed at the end: a save that
    is killed at any point leaves the previous checkpoint whole. With `asynchronous` it returns at once; the arrays must
    not be donated before `wait` has returned (the save would fail, and the previous checkpoint stay).

    Raises CheckpointError when the target exists and is no checkpoint, or when two layouts of experts are mixed.
    """
    folder = Path(folder).resolve()
    check_target(folder)
    layout = _layout(parameters)
    table = leaf_table(parameters, config)
    items = {
        item: {one.name: table[item_layer(item), one.name] for one in item_parameters(config, item)}
        for item in item_names(config, parameters.has_vision)
    }
    extras = [Path(file) for file in extra_files]

    def action() -> None:
        def write(work: Path) -> None:
            task = progress.add_task("Saving", total=len(items)) if progress is not None else None
            for item, leaves in items.items():
                write_item(work, item, {name: _element(*leaf) for name, leaf in leaves.items()})
                if progress is not None and task is not None:
                    progress.advance(task)

        def finish(work: Path) -> None:
            write_description(work, config, layout, parameters.has_vision)
            for file in extras:
                shutil.copy2(file, work / file.name)
            publish(work, folder)

        if jax.process_count() == 1:
            with work_folder(beside(folder, "saving"), keep=False) as work:
                write(work)
                finish(work)
            return
        _together(folder, write, finish)

    return OrbaxSave(action, asynchronous)


def _together(folder: Path, write: Callable[[Path], None], finish: Callable[[Path], None]) -> None:
    from orbax.checkpoint import multihost

    work = beside(folder, "saving")
    first = jax.process_index() == 0
    if first:
        work.mkdir(exist_ok=True)
        clear(work)
    multihost.sync_global_processes(f"save_orbax:begin:{folder}")
    write(work)
    multihost.sync_global_processes(f"save_orbax:written:{folder}")
    if first:
        finish(work)
    multihost.sync_global_processes(f"save_orbax:end:{folder}")


def item_layer(item: str) -> int | None:
    """The layer of an item; None for the others."""
    return int(item.rpartition("/")[2]) if item.startswith("layers/") else None


def _layout(parameters: Parameters) -> str | None:
    found = {
        leaf.layout
        for leaf in jax.tree.leaves(parameters, is_leaf=lambda leaf: isinstance(leaf, MXFP4Tensor))
        if isinstance(leaf, MXFP4Tensor)
    }
    if len(found) > 1:
        raise CheckpointError(
            f"The experts have the layouts {' and '.join(sorted(found))}; bring them to one before saving."
        )
    return found.pop() if found else None


@jax.jit
def _slice(stack: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack)


def _element(leaf: Any, index: int | None) -> Any:
    return leaf if index is None else _slice(leaf, jnp.int32(index))


def write_item(folder: Path, item: str, values: Mapping[str, Any]) -> None:
    """Save one item. Orbax renames it into place when it is whole."""
    import orbax.checkpoint as ocp

    path = folder / item
    path.parent.mkdir(exist_ok=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(_nested(values)))


def write_description(folder: Path, config: ModelConfig, layout: str | None, vision: bool) -> None:
    """Write config.json and orbax.json."""
    quantized = config.override({"expert_quantization": None if layout is None else "mxfp4"})
    write_config(folder, quantized.to_hf())
    content = {"format": _FORMAT, "layout": layout, "vision": vision}
    write_file(folder / ORBAX_FILE, (json.dumps(content) + "\n").encode())


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values under nested names; an `MXFP4Tensor` as a dictionary of its two arrays."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        if isinstance(value, MXFP4Tensor):
            value = {"packed": value.packed, "scale_bytes": value.scale_bytes}
        node[last] = value
    return tree


# -- restoring -------------------------------------------------------------------------------------------------
class OrbaxCheckpoint:
    """A folder that `save_orbax` wrote: `config`, `layout` of packed experts (None: unpacked), `has_vision`.

    Raises CheckpointError when it is none.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        path = self.folder / ORBAX_FILE
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise CheckpointError(
                f"{str(path)!r} is not the description of a {_FORMAT} checkpoint; save it again."
            )
        self.layout: str | None = content.get("layout")
        self.has_vision = bool(content.get("vision"))
        config = self.folder / CONFIG_FILE
        self.config = config_of(read_json(config), str(config))

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
        default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                stored = _flat(checkpointer.metadata(path).item_metadata.tree)
                wanted: Values = {}
                for parameter in parameters:
                    rule = (
                        sharding(parameter, None if layer is None else (layer,))
                        if sharding is not None
                        else None
                    )
                    wanted[parameter.name] = self._abstract(parameter, item, stored, rule or default)
                target = _nested(wanted)
                restored = checkpointer.restore(
                    path,
                    args=ocp.args.PyTreeRestore(
                        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
                    ),
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
                # On the devices, sharded as it is.
                node = tensor if layout in (None, self.layout) else _to_layout(tensor, layout)
            yield parameter, node

    def _abstract(
        self, parameter: Parameter, item: str, stored: Mapping[str, Any], sharding: jax.sharding.Sharding
    ) -> Any:
        shape = parameter.shape
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
        return tensor if tensor is not None else leaves[""]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix[:-1]: tree}
    found: dict[str, Any] = {}
    for name, child in tree.items():
        found |= _flat(child, f"{prefix}{name}.")
    return found


@partial(jax.jit, static_argnums=1)
def _to_layout(tensor: MXFP4Tensor, layout: str) -> MXFP4Tensor:
    return tensor.to_layout(layout)


@partial(jax.jit, donate_argnums=0)
def _insert(stack: Any, value: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda stack, value: stack.at[index].set(value), stack, value)


def load_orbax(
    folder: str | Path,
    stacked: bool = True,
    sharding: ShardingRule | None = None,
    layout: str | None = None,
    dtype: Any = None,
    vision: bool = True,
    progress: Progress | None = None,
) -> tuple[Parameters, ModelConfig]:
    """Restore a checkpoint of `save_orbax` onto any mesh: each process reads what its devices hold.

    `sharding` is the rule of `stream_parameters`; `layout` brings packed experts into another layout than they were
    saved in, `dtype` casts the rest as `load_parameters` does (None: as saved). Stacks are filled layer by layer, in
    place. Raises CheckpointError for a damaged checkpoint.
    """
    if dtype is not None:
        dtype = checked_dtype(dtype, layout or "packed_kn")
    checkpoint = OrbaxCheckpoint(folder)
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
            values[parameter.name, layers] = _insert(values[parameter.name, layers], value, index)
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


__all__: Sequence[str] = (
    "OrbaxCheckpoint",
    "OrbaxSave",
    "is_orbax",
    "load_orbax",
    "load_orbax_layer",
    "save_orbax",
)
