"""Planted mistakes: each known way to get this network wrong must move a recorded result past its tolerance.

Every group has a control that plants nothing, so that what is measured is the mistake and not the harness.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax.model import Inputs, kda, mla, moe, network, project_logits, run
from moe28t_jax.model import layer as layer_module
from moe28t_jax.model.cache import KDACache
from moe28t_jax.model.numerics import linear, rms_norm
from moe28t_jax.model.parameters import Weight
from moe28t_jax.model.residual import mix
from moe28t_jax.parallel import attention
from moe28t_jax.weights import load_parameters
from pallas_kernels import index_select
from tests.golden import fixtures
from tests.golden.fixtures import DATA, altered, assert_close, assert_noticed, difference, read

pytestmark = pytest.mark.golden

LAYER_TOLERANCE = 2e-5


def replaced(owner: Any, path: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    """A copy of a group with one weight, by dotted path, replaced by a function of it."""
    leaves, structure = jax.tree.flatten(owner)
    copy = jax.tree.unflatten(structure, leaves)
    *parents, leaf = path.split(".")
    group = copy
    for name in parents:
        group = getattr(group, name)
    setattr(group, leaf, Weight(change(group[leaf])))
    return copy


# -- sparse attention ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def k31():
    parameters, config = load_parameters(DATA / "k31_tiny", dtype=jnp.float32)
    golden, _ = read("k31_tiny/golden")
    return SimpleNamespace(
        parameters=parameters, config=config, layers=dict(parameters.layers(config)), golden=golden
    )


def layer_result(
    k31: Any, layer: int = 3, overrides: dict[str, Any] | None = None, group: Any = None
) -> tuple[float, int]:
    """One layer between recorded partial sums: its largest error, and how many queries select another set."""
    config = k31.config.override(overrides or {})
    stream = fixtures.recorded_stream(k31.parameters, k31.config, k31.golden, layer)
    program = fixtures.layer_program(config, layer, frozenset({"index_sets"}))
    partial, auxiliary = program(k31.layers[layer] if group is None else group, stream)
    error = difference(partial[0], k31.golden["partial_sums_f64ref"][layer])
    if "index_sets" not in auxiliary:
        return error, 0
    sets = fixtures.sorted_sets(auxiliary["index_sets"][0])
    return error, int(np.any(sets != k31.golden[f"index_sets_layer{layer + 1}"], axis=-1).sum())


def assert_layer_noticed(result: tuple[float, int], mistake: str, rows: int | None) -> None:
    effect, others = result
    assert_noticed(effect, 5e-4, mistake)
    if rows is not None:
        assert others == rows, f"{mistake}: {others} queries select another set, recorded {rows}"


def changed_queries(k31: Any, mistake: str) -> int:
    """How many queries of layer 4 the recording's own reference found with another set."""
    return read("k31_tiny/golden")[1]["effect_of_mistakes"][mistake]["query_rows_with_other_set"]["4"]


@pytest.mark.parametrize(
    ("mistake", "overrides"),
    [
        ("k_norm_eps_1e6", {"dsa.key_norm_eps": 1e-6}),
        ("no_relu", {"dsa.use_relu": False}),
    ],
)
def test_indexer_configured_wrongly(k31, mistake, overrides):
    assert_layer_noticed(layer_result(k31, overrides=overrides), mistake, changed_queries(k31, mistake))


def test_index_key_norm_as_rms_norm(k31):
    effect, others = layer_result(k31, overrides={"dsa.key_norm": "rmsnorm"})
    assert_noticed(effect, 5e-4, "index key norm as RMSNorm without bias")
    assert others > 50, f"index key norm as RMSNorm: {others} queries select another set"


def test_index_key_norm_as_rms_norm_with_the_bias(k31, monkeypatch):
    def wrong(indexer, x_BTD, dsa):
        keys_BTD = rms_norm(linear(x_BTD, indexer["k_proj"]), indexer["k_norm"], dsa.key_norm_eps)
        return keys_BTD + indexer["k_norm_bias"]

    monkeypatch.setattr(mla, "index_keys", wrong)
    mistake = "k_norm_as_rmsnorm"
    assert_layer_noticed(layer_result(k31), mistake, changed_queries(k31, mistake))


def test_index_key_norm_without_its_bias(k31):
    group = replaced(k31.layers[3], "indexer.k_norm_bias", jnp.zeros_like)
    mistake = "k_norm_no_bias"
    assert_layer_noticed(layer_result(k31, group=group), mistake, changed_queries(k31, mistake))


def test_index_queries_from_the_unnormalised_latent(k31, monkeypatch):
    right = mla.index_queries
    q_a_proj = k31.layers[3].attention["q_a_proj"]

    def wrong(indexer, q_latent_BTL, x_BTD, dsa):
        return right(indexer, linear(x_BTD, q_a_proj), x_BTD, dsa)

    monkeypatch.setattr(mla, "index_queries", wrong)
    mistake = "unnormalised_q_latent"
    assert_layer_noticed(layer_result(k31), mistake, changed_queries(k31, mistake))


def test_absolute_index_weights(k31, monkeypatch):
    right = mla.index_queries

    def wrong(indexer, q_latent_BTL, x_BTD, dsa):
        q_BTHD, weights_BTH = right(indexer, q_latent_BTL, x_BTD, dsa)
        return q_BTHD, jnp.abs(weights_BTH)

    monkeypatch.setattr(mla, "index_queries", wrong)
    assert_layer_noticed(layer_result(k31), "abs_weights", changed_queries(k31, "abs_weights"))


def test_ties_to_the_highest_index(k31, monkeypatch):
    def wrong(q, k, weights, positions, top_k, page_table, axis_name, use_relu):
        scores = index_select.scores(q, k, weights, positions, use_relu=use_relu)
        scores = jnp.where(scores == 0, jnp.float32(0), scores)
        values, backwards = jax.lax.top_k(scores[..., ::-1], top_k)
        return jnp.where(values > -1e29, scores.shape[-1] - 1 - backwards, -1)

    patched = SimpleNamespace(select=wrong)
    monkeypatch.setattr(attention, "index_select", patched)
    mistake = "ties_highest_index_first"
    assert_layer_noticed(layer_result(k31), mistake, changed_queries(k31, mistake))


@pytest.mark.parametrize("axis", ["channels", "heads"])
def test_index_scores_without_their_scale(k31, monkeypatch, axis):
    """A positive factor selects the same keys, but the indexer's loss would learn another distribution."""
    dsa = k31.config.dsa
    right, factor = index_select.scores, {"channels": dsa.head_dim, "heads": dsa.num_heads}[axis] ** 0.5
    expected = k31.golden["index_scores_layer4"]
    visible = np.tri(len(expected), dtype=bool)

    def error() -> float:
        stream = fixtures.recorded_stream(k31.parameters, k31.config, k31.golden, 3)
        _, auxiliary = fixtures.layer_program(k31.config, 3, frozenset({"index_scores"}))(
            k31.layers[3], stream
        )
        return difference(np.asarray(auxiliary["index_scores"][0])[visible], expected[visible])

    assert error() < 5e-4
    monkeypatch.setattr(index_select, "scores", lambda *a, **options: right(*a, **options) * factor)
    assert_noticed(error(), 5e-4, f"index scores without the scale of {axis}")


@pytest.mark.parametrize("layer", [3, 6, 7])
def test_one_layer_dense(k31, layer):
    kinds = list(k31.config.attention_kinds)
    kinds[layer] = "mla"
    result = layer_result(k31, layer, {"attention_kinds": tuple(kinds)})
    assert_layer_noticed(result, f"layer {layer + 1} dense", None)


def test_twice_the_top_k(k31):
    config = k31.config.override({"dsa.top_k": 16})
    stream = fixtures.recorded_stream(k31.parameters, k31.config, k31.golden, 3)
    partial, _ = fixtures.layer_program(config, 3, frozenset())(k31.layers[3], stream)
    assert_noticed(difference(partial[0], k31.golden["partial_sums_f64ref"][3]), 5e-4, "top-k 16")


def test_all_layers_dense(k31):
    kinds = tuple("mla" if kind == "dsa" else kind for kind in k31.config.attention_kinds)
    config = k31.config.override({"attention_kinds": kinds})

    @jax.jit
    def compute(parameters, token_ids):
        return project_logits(parameters, run(parameters, Inputs(token_ids), None, config).hidden_BTD)

    logits = compute(k31.parameters, jnp.asarray(k31.golden["input_ids"]))
    top_k = k31.config.dsa.top_k
    expected = k31.golden["logits_prefill"]
    # As long as there are no more tokens than a query may read, both are the same network.
    assert_close(logits[:, :top_k], expected[:, :top_k], 5e-4, "the first tokens")
    effect = difference(logits, expected)
    recorded = read("k31_tiny/golden")[1]["effect_of_mistakes"]["all_layers_dense"]["logits"]
    assert effect == pytest.approx(recorded, rel=1e-3), f"all layers dense: {effect:.3g}"


# -- block attention residuals -------------------------------------------------------------------------------------
def residual_layer(k31: Any, layer: int, mistake: str | None) -> float:
    """One layer's residual steps written out, with one of them wrong; the error of its partial sum."""
    config = k31.config
    stream = fixtures.recorded_stream(k31.parameters, config, k31.golden, layer)

    @jax.jit
    def compute(group, partial, snapshots):
        batch, count = partial.shape[:2]
        step = network.Step(
            jnp.zeros((batch,), jnp.int32),
            jnp.full((batch,), count, jnp.int32),
            jnp.ones((batch, count), bool),
            config,
            frozenset(),
        )

        def mixed(parameters, snapshots, partial):
            candidates = [*snapshots, partial]
            return mix(candidates, parameters["norm"], parameters["query"], config.rms_norm_eps)

        before = (*snapshots, partial) if mistake == "push before the mix" else snapshots
        h = mixed(group.attention_mix, before, partial)
        x = rms_norm(h, group["attention_norm"], config.rms_norm_eps)
        out, *_ = layer_module.attention(group, x, None, layer, None, step)
        if config.starts_block(layer):
            snapshots = (*snapshots, partial)
            partial = partial + out if mistake == "no reset" else out
        else:
            partial = (h if mistake == "mixed h accumulated" else partial) + out
        h = mixed(group.mlp_mix, snapshots, partial)
        x = rms_norm(h, group["mlp_norm"], config.rms_norm_eps)
        out, _ = layer_module.mixture_of_experts(group.mlp, x, step.valid_BT, config)
        return (h if mistake == "mixed h accumulated" else partial) + out

    partial = compute(k31.layers[layer], stream.partial_BTD, stream.snapshots)
    return difference(partial[0], k31.golden["partial_sums_f64ref"][layer])


@pytest.mark.parametrize(
    ("layer", "mistake"),
    [(3, None), (3, "no reset"), (3, "push before the mix"), (7, "mixed h accumulated")],
)
def test_residual_steps(k31, layer, mistake):
    error = residual_layer(k31, layer, mistake)
    if mistake is None:
        assert error <= 5e-4, f"without a mistake: {error:.3g}"
    else:
        assert_noticed(error, 5e-4, mistake)


def residual_mix(candidates, gain, query, eps, mistake):
    normalised = [v * jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps) for v in candidates]
    scored = candidates if mistake == "score without rms" else normalised
    if mistake == "score in bfloat16":
        scored = [(v.astype(jnp.bfloat16) * gain.astype(jnp.bfloat16)).astype(jnp.float32) for v in scored]
    elif mistake != "score without gain":
        scored = [v * gain for v in scored]
    scores = jnp.stack([jnp.sum(v * query, axis=-1) for v in scored], axis=-1)
    if mistake == "scores over the root of the width":
        scores = scores * query.shape[0] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1)
    values = normalised if mistake == "normalised values" else candidates
    return sum(weights[..., index, None] * v for index, v in enumerate(values))


@pytest.mark.parametrize(
    "mistake",
    [
        None,
        "score without rms",
        "score without gain",
        "score in bfloat16",
        "scores over the root of the width",
        "normalised values",
    ],
)
def test_residual_mix(mistake):
    tensors, meta = read("attn_res_k3")
    candidates = [jnp.asarray(v) for v in (*tensors["blocks"], tensors["partial_sum"])]
    gain, query = jnp.asarray(tensors["norm_weight"]), jnp.asarray(tensors["proj_weight"][0])
    y = jax.jit(lambda candidates: residual_mix(candidates, gain, query, meta["eps"], mistake))(candidates)
    error = difference(y, tensors["y"])
    if mistake is None:
        assert error <= LAYER_TOLERANCE, f"without a mistake: {error:.3g}"
    else:
        assert_noticed(error, LAYER_TOLERANCE, mistake)


# -- delta attention -----------------------------------------------------------------------------------------------
KDA_TOKENS = 65


def plain_delta_rule(q, k, v, log_decay, beta, initial_state, lengths=None, *, mistake=None):
    """The recurrence, one token after the other; compiles in a moment."""

    def step(state, inputs):
        index, q, k, v, log_decay, beta = inputs
        decayed = jnp.exp(log_decay)[..., None] * state
        against = state if mistake == "error against the state before decay" else decayed
        error = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", against, k, precision="highest"))
        new = decayed + k[..., :, None] * error[..., None, :]
        read_from = decayed if mistake == "read before update" else new
        o = jnp.einsum("bhkv,bhk->bhv", read_from, q, precision="highest")
        if lengths is not None:
            new = jnp.where((index < lengths)[:, None, None, None], new, state)
        return new, o

    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (q, k, v, log_decay, beta))
    count = jnp.arange(q.shape[1], dtype=jnp.int32)
    state, o = jax.lax.scan(step, initial_state, (count, *tokens))
    return jnp.moveaxis(o, 0, 1), state


@pytest.fixture
def delta(monkeypatch):
    """Runs the recorded delta layer with the plain recurrence; keywords plant mistakes."""
    config, group = fixtures.kda_layer("kda_layer_k3")
    tensors, _ = read("kda_layer_k3")

    def plant(mistake):
        def rule(*arguments):
            return plain_delta_rule(*arguments, mistake=mistake)

        monkeypatch.setattr(kda, "delta_rule", SimpleNamespace(delta_rule=rule))

    def result(overrides=None, lengths=None, **changes):
        used = config.override(overrides or {})
        x = jnp.asarray(tensors["x"][:, :KDA_TOKENS])
        batch, heads, dim = x.shape[0], used.kda.num_heads, used.kda.head_dim
        cache = KDACache(
            jnp.zeros((batch, heads, dim, dim), jnp.float32),
            jnp.zeros((batch, used.kda.conv_size - 1, 3 * used.kda.size), jnp.float32),
        )
        sizes = jnp.asarray([KDA_TOKENS] * batch if lengths is None else lengths, jnp.int32)
        program = jax.jit(lambda group, x: kda.kda_attention(group, x, cache, sizes, used))
        return program(altered(group, **changes), x)

    def error(overrides=None, **changes):
        y, cache = result(overrides, **changes)
        state = difference(cache.state_BHKV, tensors[f"kda_state_{KDA_TOKENS}"])
        return difference(y, tensors["y"][:, :KDA_TOKENS]), state

    plant(None)
    return SimpleNamespace(config=config, tensors=tensors, plant=plant, result=result, error=error)


def test_delta_layer_without_a_mistake(delta):
    y, state = delta.error()
    assert y <= LAYER_TOLERANCE and state <= LAYER_TOLERANCE, (y, state)


@pytest.mark.parametrize("mistake", ["error against the state before decay", "read before update"])
def test_order_of_the_delta_rule(delta, mistake):
    delta.plant(mistake)
    assert_noticed(delta.error()[0], LAYER_TOLERANCE, mistake)


def test_convolution_taps_reversed(delta):
    changes = {f"{name}_conv": lambda taps: taps[::-1] for name in "qkv"}
    assert_noticed(delta.error(**changes)[0], LAYER_TOLERANCE, "convolution taps reversed")


def test_tail_of_the_padded_A_log(delta):
    effect = delta.error(A_log=lambda a: a[::-1])[0]
    assert_noticed(effect, LAYER_TOLERANCE, "A_log read from its end")


def test_softplus_gate_in_place_of_the_bounded_one(delta):
    effect = delta.error({"kda.gate_lower_bound": None})[0]
    assert_noticed(effect, LAYER_TOLERANCE, "softplus forget gate")


def test_bounded_gate_in_place_of_the_softplus_one(monkeypatch):
    config, group = fixtures.kda_layer("kda_layer_kimi_linear")
    tensors, _ = read("kda_layer_kimi_linear")
    monkeypatch.setattr(kda, "delta_rule", SimpleNamespace(delta_rule=plain_delta_rule))
    x = jnp.asarray(tensors["x"])
    cache = KDACache(jnp.zeros((2, 4, 16, 16), jnp.float32), jnp.zeros((2, 3, 192), jnp.float32))
    lengths = jnp.full((2,), x.shape[1], jnp.int32)

    def error(used):
        program = jax.jit(lambda group, x: kda.kda_attention(group, x, cache, lengths, used)[0])
        return difference(program(group, x), tensors["y"])

    assert error(config) <= LAYER_TOLERANCE
    effect = error(config.override({"kda.gate_lower_bound": -5.0}))
    assert_noticed(effect, LAYER_TOLERANCE, "bounded forget gate")


def test_dt_bias_after_the_rate(delta, monkeypatch):
    def wrong(raw_BTHK, A_log_H, dt_bias_HK, lower_bound):
        return lower_bound * jax.nn.sigmoid(jnp.exp(A_log_H)[:, None] * raw_BTHK + dt_bias_HK)

    monkeypatch.setattr(kda, "log_decay", wrong)
    assert_noticed(delta.error()[0], LAYER_TOLERANCE, "dt_bias added after the rate")


@pytest.mark.parametrize("mistake", ["gate before the norm", "gate through silu", "no gate"])
def test_output_norm_and_gate(delta, monkeypatch, mistake):
    def wrong(x, gain, gate, eps):
        if mistake == "gate before the norm":
            return rms_norm(x * jax.nn.sigmoid(gate), gain, eps)
        return rms_norm(x, gain, eps) * (jax.nn.silu(gate) if mistake == "gate through silu" else 1.0)

    monkeypatch.setattr(kda, "gated_rms_norm", wrong)
    assert_noticed(delta.error()[0], LAYER_TOLERANCE, mistake)


@pytest.mark.parametrize("mistake", ["rms in place of l2", "no scale on the queries"])
def test_norm_of_queries_and_keys(delta, monkeypatch, mistake):
    scale = delta.config.kda.head_dim**0.5

    def wrong(x):
        if mistake == "no scale on the queries":
            return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) * scale
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    monkeypatch.setattr(kda, "l2_norm", wrong)
    assert_noticed(delta.error()[0], LAYER_TOLERANCE, mistake)


def test_eps_of_the_l2_norm_is_on_the_sum():
    """The recorded layer cannot tell (an eps on the mean moves it by 6e-6), inputs near the eps can."""
    x = np.full((1, 32), 1e-3)
    on_the_sum = x / np.sqrt(np.sum(x * x) + 1e-6)
    on_the_mean = x / np.sqrt(32 * (np.mean(x * x) + 1e-6))
    actual = kda.l2_norm(jnp.asarray(x, jnp.float32))
    assert_close(actual, on_the_sum, 1e-6, "eps on the sum")
    assert_noticed(difference(actual, on_the_mean), 1e-6, "eps on the mean")


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "o_norm", "q_conv", "k_conv", "v_conv"])
def test_float32_parameters_rounded_to_bfloat16(delta, name):
    effect = delta.error(**{name: lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)})[0]
    assert_noticed(effect, LAYER_TOLERANCE, f"{name} in bfloat16")


def test_padding_enters_the_state(delta):
    """With the lengths ignored, the state that a shorter row leaves behind is another one."""
    length = 64
    _, right = delta.result(lengths=[length] * 3)
    state, window = delta.tensors[f"kda_state_{length}"], delta.tensors[f"conv_state_{length}"]
    assert_close(right.state_BHKV, state, LAYER_TOLERANCE, "state")
    assert_close(right.window_BWC, window, LAYER_TOLERANCE, "window")
    _, wrong = delta.result()
    assert_noticed(difference(wrong.state_BHKV, state), LAYER_TOLERANCE, "one token too many in the state")
    assert_noticed(difference(wrong.window_BWC, window), LAYER_TOLERANCE, "one token too many in the window")


# -- latent attention ----------------------------------------------------------------------------------------------
def mla_error(name: str, overrides: dict[str, Any] | None = None, **changes: Any) -> float:
    config, group = fixtures.mla_layer(name)
    config = config.override(overrides or {})
    tensors, _ = read(name)
    x = jnp.asarray(tensors["x"])
    starts, lengths = jnp.zeros((x.shape[0],), jnp.int32), jnp.full((x.shape[0],), x.shape[1], jnp.int32)
    program = jax.jit(lambda group, x: mla.mla_attention(group, None, x, None, starts, lengths, config)[0])
    return difference(program(altered(group, **changes), x), tensors["y"])


def test_latent_attention_without_a_mistake():
    assert mla_error("mla_layer_k3") <= LAYER_TOLERANCE


def test_latent_eps():
    effect = mla_error("mla_layer_k3_small_input", {"mla.latent_eps": 1e-5})
    recorded = read("mla_layer_k3_small_input")[1]["max_abs_diff"]["eps_1e5_vs_1e6"]
    assert effect == pytest.approx(recorded, rel=1e-3), (
        f"latent eps 1e-5: {effect:.3g}, recorded {recorded:.3g}"
    )


def test_without_the_output_gate():
    effect = mla_error("mla_layer_k3", {"mla.output_gate": False})
    assert_noticed(effect, LAYER_TOLERANCE, "no output gate")


@pytest.mark.parametrize(("name", "parts"), [("q_b_proj", (16, 8)), ("kv_b_proj", (16, 16))])
def test_parts_before_heads(name, parts):
    """The columns of a head lie together, (nope | rope) and (key | value); not all heads of one part first."""

    def regroup(weight):
        rows = weight if weight.ndim == 2 else weight.reshape(4 * sum(parts), -1).T
        split = [a.reshape(a.shape[0], 4, -1) for a in (rows[:, : 4 * parts[0]], rows[:, 4 * parts[0] :])]
        mixed = jnp.concatenate(split, axis=-1)
        return mixed.reshape(weight.shape) if weight.ndim == 2 else mixed.transpose(1, 2, 0)

    effect = mla_error("mla_layer_k3", **{name: regroup})
    assert_noticed(effect, LAYER_TOLERANCE, f"{name} with parts before heads")


@pytest.mark.parametrize("mistake", ["latents not normalised", "shared key part normalised"])
def test_latent_norms(monkeypatch, mistake):
    right = mla.linear
    if mistake == "latents not normalised":
        monkeypatch.setattr(mla, "rms_norm", lambda x, gain, eps: x * gain)
    else:
        rank = fixtures.mla_layer("mla_layer_k3")[0].mla.kv_lora_rank

        def wrong(x, weight):
            y = right(x, weight)
            if weight.shape[1] != rank + 8:
                return y
            shared = rms_norm(y[..., rank:], jnp.ones((8,), jnp.float32), 1e-6)
            return jnp.concatenate([y[..., :rank], shared], axis=-1)

        monkeypatch.setattr(mla, "linear", wrong)
    assert_noticed(mla_error("mla_layer_k3"), LAYER_TOLERANCE, mistake)


# -- mixture of experts --------------------------------------------------------------------------------------------
MOE_TOLERANCE = 5e-5


def moe_error(overrides: dict[str, Any] | None = None, changes: dict[str, Any] | None = None) -> float:
    config, group = fixtures.moe_layer("moe_k3")
    config = config.override(overrides or {})
    for path, change in (changes or {}).items():
        group = replaced(group, path, change)
    tensors, _ = read("moe_k3")
    x = jnp.asarray(tensors["x"])
    valid = jnp.ones(x.shape[:2], bool)
    program = jax.jit(lambda group, x: moe.mixture_of_experts(group, x, valid, config)[0])
    return difference(program(group, x), tensors["y"])


def test_experts_without_a_mistake():
    assert moe_error() <= MOE_TOLERANCE


@pytest.mark.parametrize(
    ("mistake", "overrides"),
    [
        ("three experts per token", {"moe.num_experts_per_token": 3}),
        ("no latent norm", {"moe.latent_norm": False}),
        ("SwiGLU in place of SiTU", {"activation": "silu"}),
        ("up branch not bounded", {"situ_linear_beta": None}),
    ],
)
def test_experts_configured_wrongly(mistake, overrides):
    assert_noticed(moe_error(overrides), MOE_TOLERANCE, mistake)


def test_weights_not_renormalised():
    """Seen in the weights alone: the norm of the latent sum takes any factor out of the output again."""
    config, group = fixtures.moe_layer("moe_k3")
    tensors, _ = read("moe_k3")

    def error(settings):
        x = jnp.asarray(tensors["x"]).reshape(-1, config.hidden_size)
        experts, weights, _ = jax.jit(lambda group, x: moe.route(group, x, settings))(group, x)
        order = np.argsort(np.asarray(experts), axis=-1)
        weights = np.take_along_axis(np.asarray(weights), order, axis=-1)
        return difference(weights, tensors["topk_weights"].reshape(weights.shape))

    assert error(config.moe) <= LAYER_TOLERANCE
    effect = error(config.override({"moe.renormalize": False}).moe)
    assert_noticed(effect, LAYER_TOLERANCE, "weights not renormalised")


def test_selection_without_the_bias():
    effect = moe_error(changes={"router_bias": jnp.zeros_like})
    assert_noticed(effect, MOE_TOLERANCE, "selection without the bias")


def test_shared_expert_scaled():
    # As if the sum of routed and shared experts were divided over both.
    effect = moe_error(changes={"shared.down_proj": lambda a: a * 0.5})
    assert_noticed(effect, MOE_TOLERANCE, "shared expert scaled")


def test_gate_and_up_swapped():
    _, group = fixtures.moe_layer("moe_k3")
    gate, up = group.experts["gate"], group.experts["up"]
    effect = moe_error(changes={"experts.gate": lambda _: up, "experts.up": lambda _: gate})
    assert_noticed(effect, MOE_TOLERANCE, "w1 and w3 swapped")


def route_wrongly(mistake, group):
    def wrong(parameters, x_ND, settings):
        router = parameters["router"]
        if mistake == "router on the latent":
            x_ND = linear(x_ND, group["latent_down"])
            router = router[: x_ND.shape[1]]
        if mistake == "router in bfloat16":
            logits = linear(x_ND.astype(jnp.bfloat16), router).astype(jnp.float32)
        else:
            logits = linear(x_ND, router)
        scores = jax.nn.softmax(logits) if mistake == "softmax router" else jax.nn.sigmoid(logits)
        choice = scores + parameters["router_bias"]
        _, experts = jax.lax.top_k(choice, settings.num_experts_per_token)
        used = choice if mistake == "biased combination weights" else scores
        weights = jnp.take_along_axis(used, experts, axis=-1)
        return experts, weights / jnp.sum(weights, axis=-1, keepdims=True), scores

    return wrong


@pytest.mark.parametrize(
    "mistake",
    [None, "router on the latent", "router in bfloat16", "softmax router", "biased combination weights"],
)
def test_router(monkeypatch, mistake):
    _, group = fixtures.moe_layer("moe_k3")
    monkeypatch.setattr(moe, "route", route_wrongly(mistake, group))
    error = moe_error()
    if mistake is None:
        assert error <= MOE_TOLERANCE, f"without a mistake: {error:.3g}"
    else:
        assert_noticed(error, MOE_TOLERANCE, mistake)


def test_latent_norm_of_each_expert(monkeypatch):
    """Norm of every expert's (or every device's) part before the sum, in place of the norm of the sum."""
    _, group = fixtures.moe_layer("moe_k3")
    right = moe.routed_experts

    def wrong(experts, x_NL, chosen_NK, weights_NK, valid_N, config, repeat=None):
        parts = [
            right(experts, x_NL, chosen_NK[:, k : k + 1], weights_NK[:, k : k + 1], valid_N, config, repeat)
            for k in range(chosen_NK.shape[1])
        ]
        return sum(rms_norm(part, group["latent_norm"], config.rms_norm_eps) for part in parts)

    monkeypatch.setattr(moe, "routed_experts", wrong)
    # The norm of the sum is left out, so that only the place of the norm differs.
    effect = moe_error({"moe.latent_norm": False})
    assert_noticed(effect, MOE_TOLERANCE, "latent norm before the sum")


# -- whole models --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["kimi_linear_tiny", "k3_tiny_bf16", "k31_tiny"])
def test_layer_lists_counted_from_zero(name):
    """Layers would change kind, and then the files do not fit."""
    kinds = m.ModelConfig.from_hf(DATA / name).attention_kinds
    shifted = (kinds[-1], *kinds[:-1])
    assert shifted != kinds
    with pytest.raises(m.CheckpointError, match=r"layers\.\d+\.self_attn"):
        m.load(DATA / name, dtype="float32", overrides={"attention_kinds": shifted})


def test_every_fourth_layer_misses_the_last_one():
    kinds = list(m.ModelConfig.from_hf(DATA / "k31_tiny").attention_kinds)
    assert kinds[6] == kinds[7] == "dsa"
    kinds[6] = "kda"
    with pytest.raises(m.CheckpointError, match=r"layers\.6\.self_attn"):
        m.load(DATA / "k31_tiny", dtype="float32", overrides={"attention_kinds": tuple(kinds)})


@pytest.fixture(scope="module")
def kimi_linear():
    return m.load(DATA / "kimi_linear_tiny", dtype="float32")


@pytest.mark.parametrize(
    ("mistake", "paths", "change"),
    [
        ("no selection bias", ["mlp.router_bias"], jnp.zeros_like),
        ("routed factor on the shared expert", ["mlp.shared.down_proj"], lambda a: a * 2.446),
        ("routed factor left out", ["mlp.experts.down"], lambda a: a / 2.446),
        ("taps reversed", [f"attention.{name}_conv" for name in "qkv"], lambda a: a[::-1]),
        ("gain plus one", ["attention_norm"], lambda a: a + 1.0),
    ],
)
def test_altered_parameters_of_a_whole_model(kimi_linear, mistake, paths, change):
    # Same shapes and configuration as the loaded model, so that all cases share its compiled program.
    golden, _ = read("kimi_linear_tiny/golden")
    leaves, structure = jax.tree.flatten(kimi_linear.parameters)
    parameters = jax.tree.unflatten(structure, leaves)
    for _, group in parameters.layers(kimi_linear.config):
        for path in paths:
            owner: Any = group
            *parents, leaf = path.split(".")
            for name in parents:
                owner = getattr(owner, name, None)
            if owner is not None and hasattr(owner, leaf):
                setattr(owner, leaf, Weight(change(owner[leaf])))
    logits = m.Model(kimi_linear.config, parameters).logits(golden["input_ids"])
    assert_noticed(difference(logits, golden["logits_prefill"]), 3e-4, mistake)
