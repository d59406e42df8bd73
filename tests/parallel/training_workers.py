"""Training steps on a mesh against the same on one device, in one process that sees both."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from network_workers import config_of, difference, make_parameters

from moe28t_jax.parallel import make_mesh
from moe28t_jax.training.step import Batch, TrainSettings, TrainStep, adamw

KINDS = ("kda", "kda", "dsa", "kda", "dsa")
TOKENS = 24


def batch_of(rows: int, vocabulary: int) -> Batch:
    """Rows of which two are short; the first tokens of every row are read and not learned."""
    rng = np.random.default_rng(5)
    ids = rng.integers(0, vocabulary, (rows, TOKENS + 1)).astype(np.int32)
    lengths = np.full(rows, TOKENS, np.int32)
    lengths[1], lengths[-1] = 9, 17
    place = np.arange(TOKENS)[None]
    weights = ((place >= 3) & (place < lengths[:, None])).astype(np.float32)
    return Batch(ids[:, :-1], ids[:, 1:], weights, lengths)


def run_steps(step: TrainStep, batch: Batch, count: int) -> dict[str, Any]:
    """Metrics of every step, and what the first one left of each gradient: its square, in the second moments."""
    state, metrics, squares = step.start(), [], {}
    shares = {name: leaf.sharding.shard_shape(leaf.shape) for name, leaf in state.trainable.items()}
    for number in range(count):
        state, values = step(state, batch)
        metrics.append({name: float(value) for name, value in values.items()})
        if number == 0:
            [adam] = [part for part in jax.tree.leaves(state.optimizer, is_leaf=_has_nu) if _has_nu(part)]
            squares = {name: np.asarray(leaf) for name, leaf in adam.nu.items()}
    assert int(state.step) == count
    biases = [np.asarray(leaf) for leaf in state.frozen.values()]
    sizes = {name: leaf.shape for name, leaf in state.trainable.items()}
    return {"metrics": metrics, "squares": squares, "biases": biases, "shares": shares, "sizes": sizes}


def _has_nu(part: Any) -> bool:
    return hasattr(part, "nu")


def training(axes: dict[str, int], steps: int) -> dict[str, Any]:
    """Differences of a mesh from one device, and the losses of one device."""
    config = config_of(KINDS, 2)
    assert config.expert_quantization == "mxfp4"
    parameters = make_parameters(config, "float32", packed=False, stacked=True)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(parameters)]
    batch = batch_of(8, config.vocab_size)
    found = {}
    for name, mesh in (("one", None), ("many", make_mesh(axes))):
        step = TrainStep(parameters, config, adamw(3e-3), TrainSettings("float32"), mesh)
        found[name] = run_steps(step, batch, steps)
    one, many = found["one"], found["many"]
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(parameters)]
    slopes = {name: np.sqrt(one["squares"][name]) for name in one["squares"]}
    other = {name: np.sqrt(many["squares"][name]) for name in slopes}
    largest = max(float(value.max()) for value in slopes.values())
    return {
        "one": one["metrics"],
        "many": many["metrics"],
        "gradients": max(difference(slopes[name], other[name]) for name in slopes) / largest,
        "without_gradient": sorted(name for name, value in slopes.items() if not value.any()),
        "biases": max(difference(a, b) for a, b in zip(one["biases"], many["biases"], strict=True)),
        "parameters_kept": all((a == b).all() for a, b in zip(before, after, strict=True)),
        "pieces": {
            name: int(np.prod(size)) // int(np.prod(many["shares"][name]))
            for name, size in many["sizes"].items()
        },
        "dtypes": sorted({jnp.dtype(leaf.dtype).name for leaf in jax.tree.leaves(parameters)}),
    }
