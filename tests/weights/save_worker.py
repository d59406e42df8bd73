"""Saves with another process, in all the ways that succeed and fail.

    python save_worker.py PROCESS PORT SOURCE TARGET

Prints a JSON object with the error for each. Two processes of two CPU devices; beside TARGET is a folder `home`.
"""

import fcntl
import json
import os
import sys
from pathlib import Path

process, port = int(sys.argv[1]), sys.argv[2]
source, target = Path(sys.argv[3]), Path(sys.argv[4])

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)

import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from orbax.checkpoint._src.multihost import multihost  # noqa: E402

from moe28t_jax.weights import load_orbax, load_parameters, orbax, save_orbax, stream_parameters  # noqa: E402

# Else the other process of one that fails waits five minutes.
multihost._DEFAULT_BARRIER_TIMEOUT = 10
mesh = jax.make_mesh((4,), ("all",), axis_types=(AxisType.Auto,))


def rule_of(axis):
    def rule(parameter, layers):
        spec = [None] * len(parameter.shape)
        if parameter.shape[axis] % 4 == 0:
            spec[axis] = "all"
        if layers is not None and len(layers) > 1:
            spec.insert(0, None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return rule


expected, config = load_parameters(source, stacked=True)
wanted = dict(jax.tree_util.tree_leaves_with_path(expected))
parameters, _, _ = stream_parameters(source, sharding=rule_of(0))
write_item = orbax.write_item


def check():
    """The checkpoint holds what was saved, divided along another axis."""
    found, _ = load_orbax(target, sharding=rule_of(-1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        for shard in leaf.addressable_shards:
            part = np.asarray(wanted[path])[shard.index].copy()
            np.testing.assert_array_equal(
                np.asarray(shard.data).view(np.uint8), part.view(np.uint8), str(path)
            )


def attempt(name, folder=target, **options):
    multihost_utils.sync_global_devices(name)
    error = None
    try:
        save_orbax(folder, parameters, config, **options).wait()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    multihost_utils.sync_global_devices(f"{name} done")
    check()
    print(json.dumps({"name": name, "error": error}), flush=True)


# Only the first process has the file that is copied along.
extra = target.parent / "notes.txt"
if process == 0:
    extra.write_text("of process 0")
save_orbax(target, parameters, config, extra_files=[extra] if process == 0 else ["/absent/notes.txt"])
if process == 0:
    extra.unlink()
attempt("saved", asynchronous=True)
attempt("pattern", target.with_name("run[1]*"))


def full(folder, item, values, *others):
    if process == 1 and item == "layers/00001":
        raise OSError(28, "No space left on device")
    write_item(folder, item, values, *others)


orbax.write_item = full
attempt("full")
orbax.write_item = write_item
attempt("home", target.parent / "home")
if process == 1:
    handle = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
attempt("locked")
if process == 1:
    target.with_name(f".{target.name}.lock").unlink()
    os.close(handle)
apart = target.parent / "apart" / str(process)
apart.mkdir(parents=True)
(apart / ".x.saving").mkdir()
attempt("apart", apart / "x")
attempt("again")
