"""What the processes of a program must have in common although each could come to its own: what was typed or piped into
the first one, and a seed that was drawn. Programs over all of them would otherwise be given different values."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def text_of_first_process(read: Callable[[], str]) -> str:
    """What `read` gives in the first process of the program; in the others it is not called.

    Call it in every process, after `startup.initialize_distributed`. An error of `read` leaves the others waiting until
    they are told (`startup.fail_together`).
    """
    first = jax.process_index() == 0
    data = np.frombuffer(read().encode("utf-8", "surrogatepass") if first else b"", np.uint8)
    # All must pass one shape, which so far only the first knows.
    count = int(broadcast_one_to_all(np.array(data.size, np.int32)))
    sent = broadcast_one_to_all(data if first else np.zeros(count, np.uint8))
    return np.asarray(sent).tobytes().decode("utf-8", "surrogatepass")


def seed_of_first_device(seed: int, mesh: Mesh | None) -> int:
    """The seed (0 to 2^31 - 1) of the process that has the mesh's first device, in all processes of the mesh; `seed`
    itself where they are one."""
    if mesh is None or len({device.process_index for device in mesh.devices.flat}) == 1:
        return seed
    seeds_N = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, P(mesh.axis_names)), lambda _: np.array([seed], np.int32)
    )
    return int(jax.jit(lambda x: x[0], out_shardings=NamedSharding(mesh, P()))(seeds_N))
