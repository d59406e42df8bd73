"""Single layers against recorded outputs of independent implementations; delta attention has a file of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.model import Group
from moe28t_jax.model.cache import LatentCache
from moe28t_jax.model.mla import mla_attention
from moe28t_jax.model.moe import gated_mlp, mixture_of_experts, route
from moe28t_jax.model.parameters import Weight
from moe28t_jax.model.residual import mix
from moe28t_jax.weights import load_parameters
from tests.golden import fixtures
from tests.golden.fixtures import DATA, assert_close, difference, read

pytestmark = pytest.mark.golden

TOLERANCE = 2e-5
mla_step = jax.jit(mla_attention, static_argnames=("config", "collect"))


def all_of(x: Any) -> jax.Array:
    return jnp.full((x.shape[0],), x.shape[1], jnp.int32)


# -- latent attention ----------------------------------------------------------------------------------------------
MLA = ["mla_layer_k3", "mla_layer_k3_small_input"]


def run_mla(config: Any, group: Group, x: jax.Array, cache: LatentCache | None = None, start: int = 0) -> Any:
    starts = jnp.full((x.shape[0],), start, jnp.int32)
    y, cache, _ = mla_step(group, None, x, cache, starts, all_of(x), config)
    return y, cache


@pytest.mark.parametrize(
    ("key", "latent_eps"), [("y", None), ("y_latent_eps_rms_norm_eps", "rms_norm_eps")], ids=["1e-6", "1e-5"]
)
@pytest.mark.parametrize("name", MLA)
def test_mla_with_both_readings_of_the_latent_eps(name, key, latent_eps):
    config, group = fixtures.mla_layer(name)
    assert config.mla.latent_eps == 1e-6
    if latent_eps is not None:
        config = config.override({"mla.latent_eps": config.rms_norm_eps})
    tensors, _ = read(name)
    y, _ = run_mla(config, group, jnp.asarray(tensors["x"]))
    assert_close(y, tensors[key], TOLERANCE, key)


@pytest.mark.parametrize("name", MLA)
def test_mla_prefill_then_decode(name):
    config, group = fixtures.mla_layer(name)
    tensors, meta = read(name)
    x, first = jnp.asarray(tensors["x"]), meta["prefill_len"]
    batch, count, _ = x.shape
    # Room behind the last token holds NaN: nothing may read it.
    latent = jnp.full((batch, count + 9, config.mla.latent_dim), jnp.nan, jnp.float32)
    y, cache = run_mla(config, group, x[:, :first], LatentCache(latent, None))
    rows = [y]
    for token in range(first, count):
        y, cache = run_mla(config, group, x[:, token : token + 1], cache, token)
        rows.append(y)
    assert_close(
        jnp.concatenate(rows, axis=1), tensors["y_prefill_then_decode"], TOLERANCE, "prefill then decode"
    )


# -- feed-forward --------------------------------------------------------------------------------------------------
def test_moe_router_and_output():
    config, group = fixtures.moe_layer("moe_k3")
    tensors, _ = read("moe_k3")
    x = jnp.asarray(tensors["x"])
    valid = jnp.ones(x.shape[:2], bool)
    compute = jax.jit(
        lambda group, x: mixture_of_experts(group, x, valid, config, collect=frozenset({"router"}))
    )
    y, auxiliary = compute(group, x)
    # The README's tolerance grows with the magnitude of the output, here above 11.
    assert_close(y, tensors["y"], 5e-5, "y")
    np.testing.assert_array_equal(
        np.sort(np.asarray(auxiliary["router_experts"]), axis=-1), tensors["topk_indices_sorted"]
    )
    scores = np.asarray(auxiliary["router_scores"], np.float64)
    assert_close(np.log(scores / (1 - scores)), tensors["router_logits"], TOLERANCE, "router logits")

    experts, weights, _ = jax.jit(lambda group, x: route(group, x, config.moe))(
        group, x.reshape(-1, x.shape[-1])
    )
    order = np.argsort(np.asarray(experts), axis=-1)
    weights = np.take_along_axis(np.asarray(weights), order, axis=-1).reshape(tensors["topk_weights"].shape)
    assert_close(weights, tensors["topk_weights"], TOLERANCE, "combination weights, by expert number")


def test_moe_ignores_padding():
    config, group = fixtures.moe_layer("moe_k3")
    tensors, _ = read("moe_k3")
    x = jnp.asarray(tensors["x"])
    valid = np.ones(x.shape[:2], bool)
    valid[0, 20:] = valid[1, 5:] = False
    poisoned = jnp.where(jnp.asarray(valid)[..., None], x, jnp.float32(1e30))
    y, _ = jax.jit(lambda group, x, valid: mixture_of_experts(group, x, valid, config))(
        group, poisoned, jnp.asarray(valid)
    )
    assert_close(np.asarray(y)[valid], tensors["y"][valid], 5e-5, "y of real tokens")


@pytest.mark.parametrize("case", range(3))
def test_situ_through_a_dense_mlp(case):
    tensors, meta = read("situ")
    betas = meta["cases"][case]
    config, _ = fixtures.moe_layer("moe_k3")
    config = config.override({"situ_beta": betas["beta"], "situ_linear_beta": betas["linear_beta"]})
    gate, up, expected = (jnp.asarray(tensors[f"{name}_{case}"]) for name in ("gate", "up", "y"))
    # Projections that pick gate and up out of the input unchanged leave the activation alone.
    group = Group()
    group.gate_proj = Weight(jnp.asarray([[1.0], [0.0]], jnp.float32))
    group.up_proj = Weight(jnp.asarray([[0.0], [1.0]], jnp.float32))
    group.down_proj = Weight(jnp.ones((1, 2), jnp.float32))
    y = jax.jit(lambda group, x: gated_mlp(group, x, config))(group, jnp.stack([gate, up], axis=-1))[:, 0]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


# -- attention residuals -------------------------------------------------------------------------------------------
def residual_inputs():
    tensors, meta = read("attn_res_k3")
    blocks = [jnp.asarray(block) for block in tensors["blocks"]]
    gain, query = jnp.asarray(tensors["norm_weight"]), jnp.asarray(tensors["proj_weight"][0])
    return blocks, jnp.asarray(tensors["partial_sum"]), gain, query, meta["eps"]


def test_residual_mix():
    tensors, _ = read("attn_res_k3")
    blocks, partial, gain, query, eps = residual_inputs()
    mixed = jax.jit(lambda candidates: mix(candidates, gain, query, eps))
    assert_close(mixed([*blocks, partial]), tensors["y"], TOLERANCE, "three blocks")
    assert_close(mixed([blocks[0], partial]), tensors["y_first_block_only"], TOLERANCE, "first block")
    np.testing.assert_array_equal(mixed([partial]), partial)


@pytest.mark.parametrize(("count", "key"), [(3, "y"), (1, "y_first_block_only")])
def test_residual_mix_in_a_fixed_buffer(count, key):
    tensors, _ = read("attn_res_k3")
    blocks, partial, gain, query, eps = residual_inputs()
    buffer = [block if index < count else block * 0 for index, block in enumerate([*blocks, blocks[0]])]
    mixed = jax.jit(lambda candidates, count: mix(candidates, gain, query, eps, count))
    assert_close(mixed([*buffer, partial], jnp.int32(count)), tensors[key], TOLERANCE, key)


# -- whole layers, between recorded partial sums -------------------------------------------------------------------
@pytest.fixture(scope="module")
def k31():
    parameters, config = load_parameters(DATA / "k31_tiny", dtype=jnp.float32)
    return parameters, config, dict(parameters.layers(config)), read("k31_tiny/golden")[0], {}


@pytest.mark.parametrize("layer", range(8))
def test_each_layer_between_recorded_partial_sums(k31, layer):
    parameters, config, layers, golden, programs = k31
    stream = fixtures.recorded_stream(parameters, config, golden, layer)
    # Layers of one kind that see equally many snapshots share one program.
    kind = (
        config.attention_kinds[layer], config.mlp_kinds[layer], config.starts_block(layer), len(stream.snapshots)
    )  # fmt: skip
    if kind not in programs:
        programs[kind] = fixtures.layer_program(config, layer, frozenset({"index_sets", "router"}))
    partial, auxiliary = programs[kind](layers[layer], stream)
    assert_close(partial[0], golden["partial_sums_f64ref"][layer], 5e-4, f"partial sum after layer {layer}")
    if config.mlp_kinds[layer] == "moe":
        experts = np.sort(np.asarray(auxiliary["router_experts"][0]), axis=-1)
        np.testing.assert_array_equal(experts, golden["router_topk_sorted"][layer - 1])
    if config.attention_kinds[layer] == "dsa":
        sets = fixtures.sorted_sets(auxiliary["index_sets"][0])
        np.testing.assert_array_equal(sets, golden[f"index_sets_layer{layer + 1}"])
    # A layer that returned its input would not pass unnoticed.
    assert difference(stream.partial_BTD[0], golden["partial_sums_f64ref"][layer]) > 0.1
