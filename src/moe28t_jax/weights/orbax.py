"""Checkpoints of arrays as the program holds them, sharded, through Orbax: one Orbax item per layer.

A folder has config.json, orbax.json (format, layout of packed experts, image tower or not, places for experts where
there are more than experts) and the items `globals`,
`layers/00000` and so on, and `vision`. Items hold layers one by one whether the tree was stacked or not, so that one
layer can be restored alone, and any mesh or stacking can read what another wrote.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import Progress

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import Parameter, declare_globals, declare_layer, declare_vision
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.weights.errors import CheckpointError, and_more
from moe28t_jax.weights.publish import (
    ORBAX_FILE,
    beside,
    check_target,
    publish,
    work_folder,
    write_file,
)
from moe28t_jax.weights.save import leaf_table, write_config
from moe28t_jax.weights.together import Together
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

FORMAT = "moe28t-orbax-1"
_log = logging.getLogger(__name__)


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
            # Nobody may ever wait.
            _log.error("A save in the background failed, the previous checkpoint stays: %s", error)

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
    (tokenizer, licence) are copied along; of several processes the first one copies them. Everything is written beside
    the target and renamed at the end: a save that is killed at any point leaves the previous checkpoint whole. With
    `asynchronous` it returns at once; the arrays must not be donated before `wait` has returned (the save would fail,
    and the previous checkpoint stay).

    Raises CheckpointError when the target exists and is no checkpoint, when another save is writing to it, when two
    layouts of experts are mixed, and in every process when one of them failed.
    """
    folder = Path(folder).resolve()
    together = Together(f"{str(folder)!r} was not saved, the previous checkpoint stays")
    extras = [Path(file) for file in extra_files]
    items: dict[str, dict[str, tuple[Any, int | None]]] = {}
    layout: str | None = None
    refused: Exception | None = None
    try:
        layout = _layout(parameters)
        table = leaf_table(parameters, config)
        items = {
            item: {one.name: table[item_layer(item), one.name] for one in item_parameters(config, item)}
            for item in item_names(config, parameters.has_vision)
        }
        if together.is_first:
            check_target(folder)
            if not together.alone and (found := [each for each in "[]*?" if each in str(folder.absolute())]):
                # Orbax looks for the parts of the processes by a pattern that it makes of the path.
                raise CheckpointError(
                    f"{str(folder)!r} has {' and '.join(found)} in its path, in which Orbax cannot put together what "
                    "several processes write; save to a path without."
                )
            _check_extras(extras)
    except Exception as error:
        if together.alone:
            raise
        # The others wait for this process in the first step.
        refused = error

    def finish(work: Path) -> None:
        write_description(work, config, layout, parameters.has_vision)
        for file in extras:
            shutil.copy2(file, work / file.name)
        publish(work, folder, same_model=True)

    def action() -> None:
        with ExitStack() as stack:

            def begin() -> None:
                if refused is not None:
                    raise refused
                if together.is_first:
                    stack.enter_context(work_folder(folder, "saving", keep=False))

            together.step(begin)
            work = beside(folder, "saving")
            if not together.alone:
                _check_shared(together, work)
            task = progress.add_task("Saving", total=len(items)) if progress is not None else None
            for item, leaves in items.items():
                together.step(partial(_write_leaves, work, item, leaves, together))
                if progress is not None and task is not None:
                    progress.advance(task)
            together.step(partial(finish, work) if together.is_first else _nothing)

    return OrbaxSave(action, asynchronous)


def _check_extras(extras: list[Path]) -> None:
    absent = [str(file) for file in extras if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"There is no file {and_more(absent)} to copy along; leave it out or correct its path."
        )


def _check_shared(together: Together, work: Path) -> None:
    """See that all processes write into the same folder; else each would save a part somewhere."""

    def mark(process: int) -> Path:
        return work / f".process.{process}"

    def show() -> None:
        if not together.is_first:
            mark(together.process).touch()

    def look() -> None:
        if together.is_first:
            # By name: the listing of a network folder may be an old one.
            unseen = [str(process) for process in range(1, together.processes) if not mark(process).is_file()]
            if unseen:
                raise CheckpointError(
                    f"What process {and_more(unseen)} writes to {str(work)!r} is not seen by process 0; save to a "
                    "folder that all processes share."
                )
            for process in range(1, together.processes):
                mark(process).unlink()

    together.step(show)
    together.step(look)


def _write_leaves(
    work: Path, item: str, leaves: Mapping[str, tuple[Any, int | None]], together: Together
) -> None:
    write_item(work, item, {name: _element(*leaf) for name, leaf in leaves.items()}, together)


def _nothing() -> None:
    pass


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


def write_item(folder: Path, item: str, values: Mapping[str, Any], together: Together | None = None) -> None:
    """Save one item, with all processes of `together`. Orbax renames it into place when it is whole."""
    import orbax.checkpoint as ocp

    path = folder / item
    path.parent.mkdir(exist_ok=True)
    options = ocp.options.MultiprocessingOptions()
    if together is not None and not together.alone:
        # Orbax then waits at barriers of the coordination service, and for a limited time: its others are collectives
        # on the devices, where one process that failed would leave the rest for good. A barrier has one use.
        options = ocp.options.MultiprocessingOptions(
            active_processes=set(range(together.processes)), barrier_sync_key_prefix=f"{together.name}-{item}"
        )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        # A layer's item that takes the place of another one would not be noticed otherwise.
        checkpointer.save(path, args=ocp.args.PyTreeSave(nested(values), custom_metadata={"item": item}))


def write_description(folder: Path, config: ModelConfig, layout: str | None, vision: bool) -> None:
    """Write config.json and orbax.json."""
    quantized = config.override({"expert_quantization": None if layout is None else "mxfp4"})
    write_config(folder, quantized.to_hf())
    content = {"format": FORMAT, "layout": layout, "vision": vision}
    if config.moe is not None and config.moe.expert_slots is not None:
        content["expert_slots"] = config.moe.expert_slots
    write_file(folder / ORBAX_FILE, (json.dumps(content) + "\n").encode())


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
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
