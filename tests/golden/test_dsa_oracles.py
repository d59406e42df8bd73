"""Selection and sparse attention inside two public layers that rotate positions: DeepSeek-V3.2 and GLM-5.

What surrounds the operations is written here in plain numpy. The two layers differ in how the indexer pairs
the channels it rotates.
"""

import functools
import json
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from safetensors.numpy import load_file

from pallas_kernels import index_select, sparse_attention
from pallas_kernels.index_select import tpu as select_tpu
from pallas_kernels.sparse_attention import tpu as attention_tpu

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
FORMS = {
    name: (
        functools.partial(index_select.select, implementation=name),
        functools.partial(sparse_attention.sparse_attention, implementation=name),
    )
    for name in ("xla", "reference")
} | {
    "tpu": (
        functools.partial(select_tpu.select, interpret=INTERPRET),
        functools.partial(attention_tpu.sparse_attention, shared=False, block=16, interpret=INTERPRET),
    ),
    "tpu_shared": (
        functools.partial(select_tpu.select, key_round=128, interpret=INTERPRET),
        functools.partial(attention_tpu.sparse_attention, shared=True, block=128, interpret=INTERPRET),
    ),
}
"""Selection and attention by each implementation that runs here, the TPU kernels interpreted."""

FETCHED = 8
"""Of so many queries one attends where rows are fetched one by one, which an interpreter takes a second a query for."""

DATA = Path(__file__).parent / "data"
NAMES = ["deepseek_v32", "glm_moe_dsa"]


@functools.cache
def fixture(name):
    path = DATA / f"dsa_{name}.safetensors"
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    tensors = load_file(path)
    weights = {key[2:]: a.astype(np.float64) for key, a in tensors.items() if key.startswith("w.")}
    return tensors, weights, json.loads(header["__metadata__"]["meta"])


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps) * weight + bias


def rotate(x, theta, interleaved):
    """Rotate all channels of x [B, T, H, R] by the angle of the position, axis 1."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    rotated = first * cos - second * sin, second * cos + first * sin
    return np.stack(rotated, axis=-1).reshape(x.shape) if interleaved else np.concatenate(rotated, axis=-1)


def indexer_inputs(name, interleaved):
    tensors, w, meta = fixture(name)
    c = meta["config"]
    x = tensors["x"].astype(np.float64)
    batch, tokens, _ = x.shape
    rope = c["qk_rope_head_dim"]
    q_latent = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], c["latent_eps"])
    q = (q_latent @ w["indexer.wq_b.weight"].T).reshape(batch, tokens, c["index_n_heads"], -1)
    k = layer_norm(x @ w["indexer.wk.weight"].T, w["indexer.k_norm.weight"], w["indexer.k_norm.bias"], 1e-6)[
        :, :, None
    ]

    def turn(a):
        rotated = rotate(a[..., :rope], c["rope_theta"], interleaved)
        return np.concatenate([rotated, a[..., rope:]], axis=-1)

    weights = x @ w["indexer.weights_proj.weight"].T
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), (batch, tokens))
    return turn(q), turn(k)[:, :, 0], weights, positions, q_latent


def attention(name, indices, q_latent, attend=sparse_attention.sparse_attention):
    """The layer's output for given indices, with queries absorbed into the latent space."""
    tensors, w, meta = fixture(name)
    c = meta["config"]
    x = tensors["x"].astype(np.float64)
    batch, tokens, _ = x.shape
    heads, nope, rope = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    rank, value_dim = c["kv_lora_rank"], c["v_head_dim"]
    q = (q_latent @ w["q_b_proj.weight"].T).reshape(batch, tokens, heads, nope + rope)
    joint = x @ w["kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(joint[..., :rank], w["kv_a_layernorm.weight"], c["latent_eps"])
    key_rope = rotate(joint[:, :, None, rank:], c["rope_theta"], True)[:, :, 0]
    kv_b = w["kv_b_proj.weight"].reshape(heads, nope + value_dim, rank)
    absorbed = np.einsum("bthn,hnc->bthc", q[..., :nope], kv_b[:, :nope])
    query = np.concatenate([absorbed, rotate(q[..., nope:], c["rope_theta"], True)], axis=-1)
    o, _ = attend(
        jnp.asarray(query, jnp.float32),
        jnp.asarray(np.concatenate([latent, key_rope], axis=-1), jnp.float32),
        indices,
        (nope + rope) ** -0.5,
        rank,
    )
    values = np.einsum("bthc,hvc->bthv", np.asarray(o, np.float64), kv_b[:, nope:])
    return values.reshape(batch, tokens, -1) @ w["o_proj.weight"].T


def as_sets(indices):
    return [[frozenset(row[row >= 0].tolist()) for row in rows] for rows in np.asarray(indices)]


def pairing(name):
    text = fixture(name)[2]["rope"].split("indexer ")[1]
    return text.startswith("INTERLEAVED")


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, form, marks=() if form in quick else pytest.mark.slow)
        for name, quick in (("deepseek_v32", ("xla", "reference")), ("glm_moe_dsa", ("xla", "tpu_shared")))
        for form in FORMS
    ],
)
def test_layer_output_sets_and_scores(name, implementation):
    tensors, _, meta = fixture(name)
    *arrays, q_latent = indexer_inputs(name, pairing(name))
    q, k, weights = (jnp.asarray(a, jnp.float32) for a in arrays[:3])
    positions = jnp.asarray(arrays[3])
    select, attend = FORMS[implementation]
    indices = select(q, k, weights, positions, meta["config"]["index_topk"])
    assert as_sets(indices) == as_sets(tensors["topk_indices"])
    visible = tensors["index_scores"] != np.float32(-1e30)
    scores = np.asarray(index_select.scores(q, k, weights, positions))
    np.testing.assert_allclose(scores[visible], tensors["index_scores"][visible], rtol=0, atol=1e-5)
    at = np.asarray(index_select.scores_at(q, k, weights, indices))
    picked = np.take_along_axis(tensors["index_scores"], np.maximum(indices, 0), axis=2)
    np.testing.assert_allclose(at[indices >= 0], picked[indices >= 0], rtol=0, atol=1e-5)
    step = FETCHED if implementation == "tpu" else 1

    def attend_some(q, kv, indices, scale, rank):
        o, logsumexp = attend(q[:, ::step], kv, indices[:, ::step], scale, rank)
        return jnp.repeat(o, step, axis=1)[:, : q.shape[1]], logsumexp

    y = attention(name, indices, q_latent, attend_some)
    np.testing.assert_allclose(y[:, ::step], tensors["y"][:, ::step], rtol=0, atol=2e-5)


@pytest.mark.golden
@pytest.mark.parametrize("name", NAMES)
def test_the_other_pairing_and_a_dense_layer_are_noticed(name):
    tensors, _, meta = fixture(name)
    *arrays, q_latent = indexer_inputs(name, not pairing(name))
    q, k, weights = (jnp.asarray(a, jnp.float32) for a in arrays[:3])
    positions, top_k = jnp.asarray(arrays[3]), meta["config"]["index_topk"]
    indices = index_select.select(q, k, weights, positions, top_k)
    assert as_sets(indices) != as_sets(tensors["topk_indices"])
    everything = index_select.select(q, k, weights, positions, positions.shape[1])
    y = attention(name, everything, q_latent)
    np.testing.assert_allclose(y[:, :top_k], tensors["y"][:, :top_k], rtol=0, atol=2e-5)
    effect = np.abs(y - tensors["y"]).max()
    assert effect == pytest.approx(meta["effect_of_sparsity_vs_dense"], rel=1e-3)
