"""How parameters and caches are stored must not change the result; routing at its extremes; bfloat16."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import segments
from moe28t_jax.engine import Steps
from moe28t_jax.engine import steps as steps_module
from moe28t_jax.model import Inputs, Weight, forward, init_cache, moe, run
from moe28t_jax.weights import load_parameters

DATA = Path(__file__).parents[1] / "golden" / "data"


# Both types prove the same; the wider one, where no mistake hides behind rounding, in every run.
FLOAT32_SLOWLY = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"], indirect=True
)


def prompt_ids(batch, count, seed=0):
    return np.random.default_rng(seed).integers(3, 256, (batch, count))


# -- layouts --------------------------------------------------------------------------------------------------
def layered(config, attention, mlp, block):
    return config.override(
        {
            "attention_kinds": tuple({"k": "kda", "d": "dsa"}[kind] for kind in attention),
            "mlp_kinds": tuple({"-": "dense", "*": "moe"}[kind] for kind in mlp),
            "residual_block_size": block,
        }
    )


# Segment (first, period, repeats), and how the blocks of the residuals lie in it.
LAYOUTS = {
    # Blocks of 2 in a period of 3: they begin at another place in every repeat.
    "blocks_vary": (("kkdkkdkkd", "*********", 2), (0, 3, 3)),
    # The same behind a dense layer, so that snapshots exist before the scan, and one layer after it.
    "inline_around": (("kkdkkdkkdd", "-*********", 4), (3, 3, 2)),
    # Blocks that begin at one place of the period, as in the large configuration.
    "blocks_fixed": (("kkkdkkkdkkkdd", "-************", 4), (4, 4, 2)),
    "plain_residuals": (("kkdkkdkkd", "-********", None), (3, 3, 2)),
}


@FLOAT32_SLOWLY
@pytest.mark.parametrize("name", ["blocks_vary", "inline_around"])
def test_stacked_layers_equal_separate_ones(random_tiny, stack, same_choices, k31_config, name) -> None:
    (attention, mlp, block), (first, period, repeats) = LAYOUTS[name]
    config = layered(k31_config, attention, mlp, block)
    found = [s for s in segments(config, True) if s.repeats > 1]
    assert [(s.first, s.period, s.repeats) for s in found] == [(first, period, repeats)]
    starts = {tuple(config.starts_block(found[0].layer(r, p)) for p in range(period)) for r in range(repeats)}
    assert len(starts) > 1
    check_layouts(random_tiny(config, scale=0.15), stack, same_choices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocks_fixed", "plain_residuals"])
def test_other_stacked_layouts_equal_separate_ones(
    random_tiny, stack, same_choices, k31_config, name
) -> None:
    (attention, mlp, block), (first, period, repeats) = LAYOUTS[name]
    config = layered(k31_config, attention, mlp, block)
    found = [s for s in segments(config, True) if s.repeats > 1]
    assert [(s.first, s.period, s.repeats) for s in found] == [(first, period, repeats)]
    check_layouts(random_tiny(config, scale=0.15), stack, same_choices)


def check_layouts(separate, stack, same_choices) -> None:
    """Ragged prefill, then three decoded tokens, in both layouts."""
    stacked = stack(separate)
    assert stacked.stacked and not separate.stacked
    ids, lengths = prompt_ids(2, 20), [20, 13]
    caches = [model.cache(2, 24) for model in (separate, stacked)]
    results = [
        model.step(ids, lengths, cache) for model, cache in zip((separate, stacked), caches, strict=True)
    ]
    for index in range(4):
        (expected, cache, expected_choices), (found, stacked_cache, chosen) = results
        rows = [np.s_[0, :20], np.s_[1, :13]] if index == 0 else [np.s_[:]]
        for keep in rows:
            assert np.abs(expected[keep]).max() > 0.1
            np.testing.assert_allclose(found[keep], expected[keep], rtol=0, atol=separate.tolerance)
            same_choices(chosen, expected_choices, keep)
        if index < 3:
            more = prompt_ids(2, 1, 10 + index)
            results = [
                separate.step(more, [1, 1], cache),
                stacked.step(more, [1, 1], stacked_cache),
            ]


def test_a_cache_of_the_other_layout_is_refused(tiny, k31_config, random_tiny, stack) -> None:
    model = stack(random_tiny(layered(k31_config, "kkdkkd", "******", 2)))
    wrong = init_cache(model.config, 1, 8, jnp.dtype(model.dtype), stacked=False)
    inputs = Inputs(jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ValueError, match=r"laid out differently; pass stacked=parameters\.stacked\(config\)"):
        run(model.parameters, inputs, wrong, model.config)
    small = model.cache(2, 8)
    with pytest.raises(ValueError, match="The cache has 2 rows and token_ids 1; they must be equal"):
        run(model.parameters, inputs, small, model.config)


@pytest.mark.parametrize(("batch", "context", "match"), [
    (1, 0, "max_context is 0; this configuration allows 1 to 4096"),
    (1, 4097, "max_context is 4097; this configuration allows 1 to 4096"),
    (0, 8, "batch is 0; a cache needs at least one row"),
])  # fmt: skip
def test_impossible_caches_are_refused(k31_config, batch, context, match) -> None:
    with pytest.raises(ValueError, match=match):
        init_cache(k31_config, batch, context)


@FLOAT32_SLOWLY
def test_logits_of_the_last_token_are_those_of_all(tiny) -> None:
    model = tiny("k31_tiny")
    inputs = {
        "token_ids": jnp.asarray(prompt_ids(3, 12), jnp.int32),
        "lengths": jnp.asarray([12, 5, 1], jnp.int32),
    }
    function = jax.jit(forward, static_argnames=("config", "logits"))
    every, _ = function(model.parameters, inputs, None, config=model.config)
    last, _ = function(model.parameters, inputs, None, config=model.config, logits="last")
    assert every.dtype == last.dtype == jnp.dtype(model.dtype)
    np.testing.assert_allclose(
        last, np.asarray(every)[[0, 1, 2], [11, 4, 0]], rtol=0, atol=model.tolerance / 20
    )


# -- the cache is updated in place -------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_decode_updates_the_donated_cache_in_place(layout, stack, k31_config) -> None:
    parameters, config = load_parameters(DATA / "k31_tiny_mxfp4", dtype=np.dtype("float32"))
    if layout == "stacked":
        parameters, config = load_parameters(DATA / "k31_tiny_mxfp4", dtype=np.dtype("float32"), stacked=True)
    model = Steps(parameters, config)
    assert model.stacked == (layout == "stacked")
    cache = model.new_cache(2, 4096)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    latent = max(leaf.nbytes for leaf in jax.tree.leaves(cache))
    one, key = jnp.float32(0), jax.random.key(0)
    compiled = steps_module.DECODE.on("cpu").lower(
        model._leaves, model._structure, jnp.zeros((2,), jnp.int32), jnp.ones((2,), bool), cache, key, one, one,
        config=config,
    ).compile()  # fmt: skip
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    # No layer's latents are copied: a copy would come on top of this. What there is, is one tile of index keys, turned
    # so that keys lie along the lanes of a vector (0.4 of a layer's latents), and the scores of the tile.
    assert memory.temp_size_in_bytes < 1.25 * latent
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(cache.segments) if leaf.nbytes == latent}
    for shape in shapes:
        text = ",".join(map(str, shape))
        copies = [
            line for line in compiled.as_text().splitlines() if " copy(" in line and f"[{text}]" in line
        ]
        assert not copies, copies[0]
    # The call consumes its cache.
    _, _, new = model.decode(jnp.zeros((2,), jnp.int32), jnp.ones((2,), bool), cache, key, 0.0, 1.0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    np.testing.assert_array_equal(new.lengths_B, [1, 1])


# -- routing -----------------------------------------------------------------------------------------------------
def moe_layer(model, layer=1):
    [place] = model.parameters.segments[layer]
    return place.mlp


def naive_experts(group, x, chosen, weights, config):
    """Every token through each of its experts, one matrix product at a time, in float64."""
    gate, up, down = (np.asarray(group.experts[name], np.float64) for name in ("gate", "up", "down"))
    beta, linear_beta = config.situ_beta, config.situ_linear_beta
    out = np.zeros_like(x)
    for n, k in np.ndindex(chosen.shape):
        a, b = x[n] @ gate[chosen[n, k]], x[n] @ up[chosen[n, k]]
        hidden = beta * np.tanh(a / beta) / (1 + np.exp(-a)) * linear_beta * np.tanh(b / linear_beta)
        out[n] += weights[n, k] * (hidden @ down[chosen[n, k]])
    return out


@pytest.mark.parametrize("case", ["spread", "one_pair", "one_expert_only", "padded", "nobody"])
def test_experts_equal_each_token_by_itself(tiny, case) -> None:
    model = tiny("k31_tiny")
    group, config = moe_layer(model), model.config
    rng = np.random.default_rng(0)
    x = rng.standard_normal((37, config.moe.latent_size))
    chosen = np.argsort(rng.uniform(size=(37, config.moe.num_experts)), axis=1)[:, :2]
    valid = np.ones(37, bool)
    match case:
        case "one_pair":
            chosen[:] = [7, 0]
        case "one_expert_only":
            chosen = np.full((37, 1), 3)
        case "padded":
            valid = rng.uniform(size=37) < 0.5
        case "nobody":
            valid[:] = False
    weights = rng.uniform(size=chosen.shape)
    found = jax.jit(moe.routed_experts, static_argnames="config")(
        group.experts, jnp.asarray(x, model.dtype), jnp.asarray(chosen, jnp.int32),
        jnp.asarray(weights, model.dtype), jnp.asarray(valid), config=config,
    )  # fmt: skip
    expected = naive_experts(group, x, chosen, weights, config) * valid[:, None]
    np.testing.assert_allclose(found, expected, rtol=0, atol={"float32": 1e-5, "float64": 1e-11}[model.dtype])
    np.testing.assert_array_equal(np.asarray(found)[~valid], 0.0)


def test_routing_of_ties_bias_and_weights(tiny) -> None:
    model = tiny("k31_tiny")
    group, settings = moe_layer(model), model.config.moe
    experts = settings.num_experts
    x = jnp.asarray(np.random.default_rng(1).standard_normal((29, model.config.hidden_size)), model.dtype)

    def route(router, bias):
        copy = jax.tree.map(lambda leaf: leaf, group)
        copy.router, copy.router_bias = Weight(jnp.asarray(router)), Weight(jnp.asarray(bias))
        return [np.asarray(a) for a in jax.jit(moe.route, static_argnames="moe")(copy, x, moe=settings)]

    router, bias = np.asarray(group["router"]), np.zeros(experts, model.dtype)
    # Equal scores: the lowest expert numbers, with equal weights.
    chosen, weights, scores = route(np.zeros_like(router), bias)
    np.testing.assert_array_equal(chosen, np.tile([0, 1], (29, 1)))
    np.testing.assert_allclose(weights, 0.5, atol=1e-6)
    np.testing.assert_array_equal(scores, 0.5)
    # A bias far above every score sends all tokens to one pair, and leaves their weights alone.
    bias[[6, 2]] = 100.0
    chosen, weights, scores = route(router, bias)
    np.testing.assert_array_equal(np.sort(chosen), np.tile([2, 6], (29, 1)))
    taken = np.take_along_axis(scores, chosen, axis=1)
    np.testing.assert_allclose(weights, taken / taken.sum(axis=1, keepdims=True), rtol=1e-5)
    assert np.ptp(weights) > 0.01


@FLOAT32_SLOWLY
def test_all_tokens_to_one_pair_of_experts_through_the_network(tiny) -> None:
    """A one-sided batch is still exact: chunks, decode and the whole agree when every layer routes one way."""
    model = tiny("k31_tiny")

    def one_sided(path, leaf):
        if any(getattr(key, "name", getattr(key, "key", None)) == "router_bias" for key in path):
            return leaf.at[jnp.asarray([1, 5])].set(jnp.asarray(100.0, leaf.dtype))
        return leaf

    parameters = jax.tree_util.tree_map_with_path(one_sided, model.parameters)
    model = dataclasses.replace(model, parameters=parameters)
    ids = prompt_ids(2, 90)
    expected, _, chosen = model.step(ids, [90, 90], model.cache(2, 100))
    routed = [layer["router_experts"] for layer in chosen if "router_experts" in layer]
    assert len(routed) == 7 and all((experts == [1, 5]).all() for experts in routed)
    head, cache, _ = model.step(ids[:, :71], [71, 71], model.cache(2, 100))
    tail, _, _ = model.step(ids[:, 71:], [19, 19], cache)
    np.testing.assert_allclose(np.concatenate([head, tail], axis=1), expected, rtol=0, atol=model.tolerance)


# -- bfloat16 ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["kimi_linear_tiny"])
def test_bfloat16_follows_float32(name) -> None:
    """Dense attention only: index scores in bfloat16 select other keys near ties, which is no rounding error."""
    ids = jnp.asarray(prompt_ids(1, 64), jnp.int32)
    function = jax.jit(run, static_argnames="config")
    hidden = {}
    for dtype in ("float32", "bfloat16"):
        parameters, config = load_parameters(DATA / name, dtype=np.dtype(jnp.dtype(dtype)))
        result = function(parameters, Inputs(ids), None, config=config)
        assert result.hidden_BTD.dtype == jnp.dtype(dtype)
        hidden[dtype] = np.asarray(result.hidden_BTD.astype(jnp.float32))[0]
    a, b = hidden["float32"], hidden["bfloat16"]
    assert np.isfinite(b).all()
    cosine = (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    assert np.median(cosine) > 0.99
    assert not np.array_equal(a, b)
