"""Loads a checkpoint in one of several processes and checks the parts that its devices hold.

    python sharded_worker.py PROCESS PROCESSES PORT FOLDER CACHE FILLS SOURCE...

Prints one JSON object per source and fill. FOLDER is the same checkpoint on this machine, read whole to compare with;
FILLS are values of `fill` with commas between. Each process has two CPU devices.
"""

import json
import os
import sys

process, processes, port = (int(text) for text in sys.argv[1:4])
folder, cache, fills = sys.argv[4:7]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax  # noqa: E402

if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from moe28t_jax.weights import load_parameters, stream_parameters  # noqa: E402

count = len(jax.devices())
mesh = jax.make_mesh((count // 4, 4), ("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
BY_INPUTS = ("o_proj", "down_proj")


def rule(parameter, layers):
    """Experts over all devices; matrices by columns of the program (rows of the file), some by rows; the rest whole."""
    spec: list = [None] * len(parameter.shape)
    if parameter.quantizable:
        spec[0] = ("expert", "tensor")
    elif parameter.name == "embedding" or parameter.name.endswith(BY_INPUTS):
        spec[0] = "tensor"
    elif parameter.transform == "transpose" and parameter.shape[-1] % 4 == 0:
        spec[-1] = "tensor"
    if layers is not None and len(layers) > 1:
        spec.insert(0, None)
    return NamedSharding(mesh, PartitionSpec(*spec))


expected, _ = load_parameters(folder, stacked=True)
wanted = dict(jax.tree_util.tree_leaves_with_path(expected))
for source in sys.argv[7:]:
    for fill in fills.split(","):
        found, _, report = stream_parameters(
            source,
            sharding=rule,
            fill=fill,
            cache=f"{cache}/{process}" if "://" in source else None,
            workers=4,
        )
        checked = 0
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            assert leaf.shape == wanted[path].shape and leaf.dtype == wanted[path].dtype, path
            whole = np.asarray(wanted[path])
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(
                    np.asarray(shard.data).view(np.uint8),
                    whole[shard.index].copy().view(np.uint8),
                    err_msg=str(path),
                )
                checked += 1
        print(json.dumps(report.to_json() | {"fill": fill, "checked": checked, "devices": count}), flush=True)
