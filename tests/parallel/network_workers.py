"""The network on a mesh against the network on one device, in one process that sees both."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from moe28t_jax.config import ModelConfig
from moe28t_jax.model import Inputs, Parameters, init_cache, initialize, network, project_logits, run
from moe28t_jax.model.parameters import build
from moe28t_jax.parallel import (
    attention,
    cache_shardings,
    current_mesh,
    make_mesh,
    place_parameters,
    sequence,
)
from moe28t_jax.parallel.vocabulary import embed, log_probabilities
from moe28t_jax.weights import declared_values, quantize_experts
from pallas_kernels import delta_rule, index_select
from pallas_kernels.index_select import xla as selection

TINY = Path(__file__).parents[1] / "golden" / "data" / "k31_tiny_mxfp4"
CHOICES = frozenset({"index_sets", "router"})
# Chunks of one length share a program.
CHUNKS = (16, 16, 1, 1)
CAPACITY = 64


def config_of(attention_kinds: tuple[str, ...], block: int) -> ModelConfig:
    """A K3.1 of a few layers: the first MLP dense, the others experts; eight keys per query."""
    return ModelConfig.from_hf(
        TINY,
        {
            "attention_kinds": attention_kinds,
            "mlp_kinds": ("dense", *("moe",) * (len(attention_kinds) - 1)),
            "initializer_range": 0.25,
            "residual_block_size": block,
        },
    )


def make_parameters(config: ModelConfig, dtype: str, packed: bool, stacked: bool) -> Parameters:
    """Random parameters, none at a neutral value."""
    # One program; by itself it would be a hundred small ones.
    parameters = jax.jit(lambda key: initialize(config, key, jnp.dtype(dtype)))(jax.random.key(1))
    leaves, structure = jax.tree.flatten(parameters)
    rng = np.random.default_rng(2)
    noise = [jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    parameters = jax.tree.unflatten(structure, [a + b for a, b in zip(leaves, noise, strict=True)])
    parameters = quantize_experts(parameters, config) if packed else parameters
    return stack(parameters, config) if stacked else parameters


def stack(parameters: Parameters, config: ModelConfig) -> Parameters:
    """The same parameters with repeated layers stacked."""
    values = {(item.layer, item.parameter.name): value for item, value in declared_values(parameters, config)}

    def make(parameter: Any, layers: tuple[int, ...] | None) -> Any:
        if layers is None or len(layers) == 1:
            return values[None if layers is None else layers[0], parameter.name]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(values[i, parameter.name] for i in layers))

    return build(config, True, make)


def split(parameters: Parameters) -> tuple[list[Any], Any]:
    """Leaves that have a gradient, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(parameters)
    chosen = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def merge(values: list[Any]) -> Parameters:
        merged = list(leaves)
        for index, value in zip(chosen, values, strict=True):
            merged[index] = value
        return jax.tree.unflatten(structure, merged)

    return [leaves[i] for i in chosen], merge


@functools.partial(jax.jit, static_argnames=("config",))
def step(parameters: Parameters, inputs: Inputs, cache: Any, config: ModelConfig) -> Any:
    result = run(parameters, inputs, cache, config, CHOICES)
    chosen = [
        {name: layer[name] for name in ("index_sets", "router_experts") if name in layer}
        for layer in result.auxiliary
    ]
    return project_logits(parameters, result.hidden_BTD), result.cache, chosen


def on_host(x: Any) -> np.ndarray:
    """The whole array, also where other processes hold parts of it."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def chosen_of(auxiliary: list[dict[str, Any]], valid_BT: np.ndarray) -> list[np.ndarray]:
    """What every layer chose for the real tokens, in one order."""
    found = []
    for layer in auxiliary:
        found += [np.sort(on_host(layer[name]), axis=-1)[valid_BT] for name in sorted(layer)]
    return found


def tokens_of(config: ModelConfig, batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    count = sum(CHUNKS)
    lengths = np.array([count, count - 9, 3, 17, count, 1, count - 1, 12], np.int32)[:batch]
    return rng.integers(0, config.vocab_size, (batch, count)).astype(np.int32), lengths


def serve(
    parameters: Parameters,
    config: ModelConfig,
    batch: int,
    chunks: tuple[int, ...] = CHUNKS,
    capacity: int = CAPACITY,
) -> dict[str, Any]:
    """Chunked prefill and decode: logits and choices of the real tokens, and the cache's real content."""
    ids, lengths = tokens_of(config, batch)
    assert config.mla is not None
    channels = config.mla.latent_dim
    # On a mesh also the latents of a TPU, whose rows are filled up with zeros.
    multiple = 1 if current_mesh() is None else channels + 8
    stacked = parameters.stacked(config)
    cache = init_cache(config, batch, capacity, parameters["embedding"].dtype, stacked, multiple)
    logits, chosen, start = [], [], 0
    for count in chunks:
        here = np.clip(lengths - start, 0, count).astype(np.int32)
        out, cache, auxiliary = step(parameters, Inputs(ids[:, start : start + count], here), cache, config)
        valid_BT = np.arange(count)[None] < here[:, None]
        logits.append(on_host(out)[valid_BT])
        chosen += chosen_of(auxiliary, valid_BT)
        start += count
    held = [on_host(leaf).astype(np.float64) for leaf in jax.tree.leaves(cache)]
    filled = [leaf[..., channels:] for leaf in held if leaf.shape[-1:] == (channels + 8,)]
    assert (len(filled) > 0) == (current_mesh() is not None) and not any(leaf.any() for leaf in filled)
    held = [leaf[..., :channels] if leaf.shape[-1:] == (channels + 8,) else leaf for leaf in held]
    return {"logits": np.concatenate(logits), "chosen": chosen, "cache": held}


def briefly(parameters: Parameters, config: ModelConfig, batch: int) -> dict[str, Any]:
    """`serve` in two programs; the tokens reach into the second half of the cache."""
    return serve(parameters, config, batch, (16, 1), 24)


def train(parameters: Parameters, config: ModelConfig, batch: int) -> dict[str, Any]:
    """Logits without a cache, and the gradient of the log-probabilities of the next tokens, each with a weight."""
    ids, lengths = tokens_of(config, batch)
    ids, lengths = ids[:, :24], np.minimum(lengths, 24)
    valid_BT = np.arange(24)[None] < lengths[:, None]
    weights = np.random.default_rng(4).standard_normal((batch, 24)) * valid_BT
    values, merge = split(parameters)

    @jax.jit
    def gradient(values: list[Any], weights: Any) -> Any:
        def loss(values: list[Any]) -> Any:
            whole = merge(values)
            result = run(whole, Inputs(jnp.asarray(ids), jnp.asarray(lengths)), None, config)
            logits = project_logits(whole, result.hidden_BTD)
            return jnp.sum(log_probabilities(logits, jnp.asarray(np.roll(ids, -1, axis=1))) * weights), logits

        return jax.value_and_grad(loss, has_aux=True)(values)

    (_, logits), gradients = gradient(values, jnp.asarray(weights, parameters["embedding"].dtype))
    return {
        "logits": np.asarray(logits)[valid_BT],
        "gradients": [np.asarray(g, np.float64) for g in gradients],
    }


def difference(a: Any, b: Any) -> float:
    """Largest absolute difference; infinite where shapes differ, NaN where either holds one."""
    pairs = [(a, b)] if isinstance(a, np.ndarray) else list(zip(a, b, strict=True))
    return max((float(np.max(np.abs(x - y))) if x.size else 0.0) for x, y in pairs)


def scaled_difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Largest difference of gradients, each leaf's beside its own largest value where that is above one: they are sums
    over all tokens, and so are their roundings."""
    return max(difference(x, y) / max(1.0, float(np.max(np.abs(y)))) for x, y in zip(a, b, strict=True))


def _summed_states(q, k, v, log_decay, beta, state, lengths, axes):
    here = sequence.local_lengths(lengths, k.shape[1], axes)
    first = jax.lax.axis_index(axes) == 0
    o, last = delta_rule.delta_rule(q, k, v, log_decay, beta, jnp.where(first, state, 0), here)
    return o, jax.lax.psum(last, axes)


def _averaged(o, logsumexp, axes, divide_queries):
    total = jax.lax.pmean(o, axes)
    if not divide_queries:
        return total
    count = total.shape[1] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index(axes) * count, count, 1)


def _local_selection(q, k, weights, positions, top_k, use_relu, repeat):
    half = k.shape[1] // 2
    return index_select.select(q, k[:, :half], weights, positions, top_k, use_relu=use_relu)


def _first_ids(table, ids):
    return table[jnp.minimum(ids, table.shape[0] // 2 - 1)]


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "none": (sequence, "inputs_before", sequence.inputs_before),
    "no convolution halo": (sequence, "inputs_before", lambda window, x, axes: window.astype(x.dtype)),
    "states added instead of composed": (sequence, "delta_rule_over", _summed_states),
    "parts averaged without their weights": (attention, "_merge", _averaged),
    "keys of one device only": (attention, "select", _local_selection),
    "ids of the first device only": (network, "embed", _first_ids),
}


def compare(
    meshes: list[dict[str, int]],
    dtype: str = "float32",
    packed: bool = True,
    stacked: bool = False,
    batch: int = 4,
    kinds: list[str] | None = None,
    block: int = 3,
    parts: list[str] | None = None,
) -> list[dict[str, Any]]:
    """For every mesh: how far it is from one device, and whether it chose the same experts and keys."""
    with jax.enable_x64(dtype == "float64"):
        config = config_of(tuple(kinds or ("kda", "dsa", "kda", "dsa")), block)
        parameters = make_parameters(config, dtype, packed, stacked)
        works = {"serve": serve, "train": train, "briefly": briefly}
        names = parts or ["serve", "train"]
        expected = {name: works[name](parameters, config, batch) for name in names}
        found = []
        for axes in meshes:
            mesh = make_mesh(axes)
            placed = place_parameters(parameters, config, mesh)
            with jax.set_mesh(mesh):
                actual = {name: works[name](placed, config, batch) for name in names}
            report: dict[str, Any] = {"axes": axes}
            for name in names:
                for key, value in actual[name].items():
                    if key == "chosen":
                        same = [np.array_equal(a, b) for a, b in zip(value, expected[name][key], strict=True)]
                        report[f"{name} same choices"] = all(same) and len(same) > 0
                    else:
                        measure = scaled_difference if key == "gradients" else difference
                        report[f"{name} {key}"] = measure(value, expected[name][key])
            found.append(report)
        return found


def compare_mistakes() -> dict[str, dict[str, Any]]:
    """What `compare` would report with one piece wrong."""
    config = config_of(("kda", "dsa"), 3)
    parameters = make_parameters(config, "float32", packed=True, stacked=False)
    expected = briefly(parameters, config, 4)
    mesh = make_mesh({"tensor": 2, "context": 2})
    placed = place_parameters(parameters, config, mesh)
    reports = {}
    for mistake, (module, name, wrong) in MISTAKES.items():
        right = getattr(module, name)
        setattr(module, name, wrong)
        jax.clear_caches()
        with jax.set_mesh(mesh):
            found = briefly(placed, config, 4)
        setattr(module, name, right)
        pairs = zip(found["chosen"], expected["chosen"], strict=True)
        reports[mistake] = {
            "logits": difference(found["logits"], expected["logits"]),
            "same choices": all(np.array_equal(a, b) for a, b in pairs),
        }
    return reports


def select_among_equals() -> dict[str, Any]:
    """Index selection where keys repeat, so that most scores are equal, on meshes that divide positions differently."""
    rng = np.random.default_rng(0)
    # Few different keys, repeated all over the row.
    keys = rng.standard_normal((2, 3, 16)).astype(np.float32)[:, rng.integers(0, 3, 64)]
    q, weights = rng.standard_normal((2, 8, 4, 16)), rng.standard_normal((2, 8, 4))
    positions = np.array([[63, 40, 31, 9, 8, 7, 0, -1], [62, 33, 32, 17, 16, 15, -1, 63]], np.int32)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, keys, weights)]
    expected = np.asarray(index_select.select(*arrays, jnp.asarray(positions), 8, implementation="reference"))

    def on(axes: dict[str, int]) -> bool:
        with jax.set_mesh(make_mesh(axes)):
            found = jax.jit(lambda *xs: attention.select(*xs, 8, True))(*arrays, jnp.asarray(positions))
        return np.array_equal(np.asarray(found), expected)

    meshes = ({"context": 8}, {"expert": 4, "context": 2}, {"data": 2, "tensor": 2, "context": 2})
    report: dict[str, Any] = {"same": [on(axes) for axes in meshes]}

    # The mistake: of equal candidates, those of the last device first.
    right = selection.merge_candidates

    def last_device_first(scores: Any, indices: Any, top_k: int) -> Any:
        if scores.shape[-1] != 8 * top_k:
            return right(scores, indices, top_k)
        devices = [jnp.concatenate(jnp.split(x, 8, axis=-1)[::-1], axis=-1) for x in (scores, indices)]
        return right(*devices, top_k)

    selection.merge_candidates = last_device_first
    jax.clear_caches()
    report["same by a local rule"] = on(meshes[0])
    return report


def load_on_mesh(folder: str, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """A loaded model on eight devices and on one: logits, with single tokens after a prefill, and greedy ids."""
    import moe28t_jax as m

    mesh = make_mesh("cpu-8")
    one, many = (
        m.load(folder, dtype="float32"),
        m.load(folder, mesh=mesh, dtype="float32", overrides=overrides),
    )
    ids = np.random.default_rng(0).integers(0, 256, (2, 13))
    a, b = (np.asarray(model.logits(ids, lengths=[13, 5], prefill=12)) for model in (one, many))
    valid_BT = np.arange(13)[None] < np.array([[13], [5]])
    texts = [model.generate(list(range(20)), max_new_tokens=4).token_ids for model in (one, many)]
    experts = many.parameters.segments[1][0].mlp.experts["gate"]
    return {
        "logits": difference(a[valid_BT], b[valid_BT]),
        "same ids": texts[0] == texts[1] and len(texts[0]) > 0,
        "mesh": many.mesh == mesh,
        "experts of a device": experts.packed.addressable_shards[0].data.shape[0],
        "experts": experts.packed.shape[0],
    }


def long_cache(axes: dict[str, int], capacity: int, chunk: int) -> dict[str, Any]:
    """The last four chunks and two decoded tokens of a row whose cache was filled directly: whether the same keys are
    selected, and how far the logits are."""
    config = config_of(("kda", "dsa"), 3).override({"max_context": capacity})
    parameters = make_parameters(config, "float32", packed=True, stacked=False)
    rng = np.random.default_rng(5)
    held = capacity - 4 * chunk - 2

    def fill(leaf: Any) -> Any:
        if leaf.dtype == jnp.int32:
            return np.full(leaf.shape, held, np.int32)
        return rng.standard_normal(leaf.shape, np.float32)

    filled = jax.tree.map(fill, jax.eval_shape(lambda: init_cache(config, 1, capacity)))

    def last_tokens(parameters: Any, cache: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        logits, chosen = [], []
        for number, count in enumerate((chunk,) * 4 + (1, 1)):
            ids = np.random.default_rng(number).integers(0, config.vocab_size, (1, count)).astype(np.int32)
            out, cache, auxiliary = step(
                parameters, Inputs(ids, np.full((1,), count, np.int32)), cache, config
            )
            logits.append(on_host(out))
            chosen += chosen_of(auxiliary, np.ones((1, count), bool))
        return logits, chosen

    logits, chosen = last_tokens(parameters, jax.tree.map(jnp.asarray, filled))
    mesh = make_mesh(axes)
    with jax.set_mesh(mesh):
        placed = place_parameters(jax.tree.map(np.asarray, parameters), config, mesh)
        cache = jax.device_put(filled, cache_shardings(filled, mesh))
        found, found_chosen = last_tokens(placed, cache)
    sets = [x for x in chosen if x.shape[-1] == 8]
    return {
        "logits": difference(found, logits),
        "same choices": all(np.array_equal(a, b) for a, b in zip(found_chosen, chosen, strict=True)),
        "keys of all devices": len({int(i) * mesh.size // capacity for x in sets for i in x.reshape(-1)}),
        "positions of a device": cache.segments[1][0].latent_BSC.addressable_shards[0].data.shape[1],
    }


def compare_log_probabilities() -> dict[str, float]:
    """Against the softmax written out in float64, also for logits far apart."""
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((4, 6, 16)) * np.array([1.0, 30.0, 300.0, 0.0])[:, None, None]
    ids = rng.integers(0, 16, (4, 6)).astype(np.int32)
    wide = logits - logits.max(axis=-1, keepdims=True)
    expected = np.take_along_axis(wide - np.log(np.exp(wide).sum(-1, keepdims=True)), ids[..., None], -1)[
        ..., 0
    ]
    with jax.enable_x64(True):
        arrays = jnp.asarray(logits), jnp.asarray(ids)

        def gradient() -> Any:
            return jax.jit(jax.grad(lambda x, ids: jnp.sum(jnp.sin(log_probabilities(x, ids)))))(*arrays)

        one, slope = log_probabilities(*arrays), gradient()
        with jax.set_mesh(make_mesh({"data": 2, "tensor": 2, "context": 2})):
            many, many_slope = jax.jit(lambda *xs: log_probabilities(*xs))(*arrays), gradient()
            # A frequent token's row, of which devices hold copies and terms, in bfloat16.
            terms = jnp.asarray(1 + rng.uniform(size=(4, 6, 2)), jnp.bfloat16)

            def row(table: Any, ids: Any) -> Any:
                rows = embed(table.astype(jnp.bfloat16), ids)
                return jnp.sum(rows.astype(jnp.float32) * terms.astype(jnp.float32))

            slopes = jax.jit(jax.grad(row))(jnp.zeros((16, 2), jnp.float32), arrays[1])
        wanted = np.zeros((16, 2))
        np.add.at(wanted, ids, np.asarray(terms, np.float64))
        return {
            "embedding": float(
                np.max(np.abs(np.asarray(slopes, np.float64) - wanted) / np.maximum(wanted, 1))
            ),
            "one device": difference(np.asarray(one), expected),
            "mesh": difference(np.asarray(many), expected),
            "gradient": difference(np.asarray(slope), np.asarray(many_slope)),
        }
