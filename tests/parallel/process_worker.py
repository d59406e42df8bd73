"""One of several processes that compute the network together: prints how far it is from one device, as JSON."""

import json
import sys
from typing import Any

import jax
import network_workers
import numpy as np

from moe28t_jax.parallel import make_mesh, place_parameters
from moe28t_jax.parallel.startup import initialize_distributed


def main(axes: dict[str, int], batch: int, capacity: int) -> dict[str, Any]:
    launch = initialize_distributed()
    if capacity:
        return network_workers.long_cache(axes, capacity, 64) | {"processes": launch.processes}
    config = network_workers.config_of(("kda", "dsa"), 3)
    parameters = network_workers.make_parameters(config, "float32", packed=True, stacked=False)
    expected = network_workers.serve(parameters, config, batch)
    mesh = make_mesh(axes)
    with jax.set_mesh(mesh):
        placed = place_parameters(jax.tree.map(np.asarray, parameters), config, mesh)
        found = network_workers.serve(placed, config, batch)
    pairs = zip(found["chosen"], expected["chosen"], strict=True)
    return {
        "processes": launch.processes,
        "devices": [jax.local_device_count(), jax.device_count()],
        "logits": network_workers.difference(found["logits"], expected["logits"]),
        "cache": network_workers.difference(found["cache"], expected["cache"]),
        "same choices": all(np.array_equal(a, b) for a, b in pairs),
        "sum": float(found["logits"].astype(np.float64).sum()),
    }


if __name__ == "__main__":
    print(
        "REPORT " + json.dumps(main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))), flush=True
    )
