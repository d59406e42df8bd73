"""Streamed dense latent attention against softmax written out in numpy and in JAX's own differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.model import latent_attention as module

BATCH, QUERIES, KEYS, HEADS, RANK, NOPE, ROPE, VALUE = 3, 5, 300, 4, 16, 8, 6, 10
SCALE = (NOPE + ROPE) ** -0.5
# One query of every batch row sees nothing; the last row is all padding; no query sees beyond key 290.
POSITIONS = np.array([[290, 0, -1, 128, 127], [-1, 255, 256, 1, 289], [-1] * 5], np.int32)


def arguments(dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (BATCH, QUERIES, HEADS, NOPE), (BATCH, QUERIES, HEADS, ROPE), (BATCH, KEYS, RANK + ROPE),
        (HEADS, NOPE, RANK), (HEADS, VALUE, RANK),
    ]  # fmt: skip
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def naive(q_nope, q_rope, latent, up_k, up_v, positions=POSITIONS):
    """Every key and value expanded, every score held."""
    c, k_rope = latent[..., :RANK], latent[..., RANK:]
    k, v = jnp.einsum("bsl,hnl->bshn", c, up_k), jnp.einsum("bsl,hvl->bshv", c, up_v)
    scores = jnp.einsum("bthn,bshn->bhts", q_nope, k) + jnp.einsum("bthr,bsr->bhts", q_rope, k_rope)
    visible = jnp.asarray(np.arange(latent.shape[1]) <= positions[:, :, None])[:, None]
    weights = jax.nn.softmax(jnp.where(visible, SCALE * scores, -1e30), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", jnp.where(visible, weights, 0.0), v)


def attend(expand, budget, monkeypatch):
    # The budget is read when the function is traced: a new function is traced anew.
    monkeypatch.setattr(module, "_SCORE_BUDGET", budget)
    return jax.jit(
        lambda *xs: module.latent_attention(
            *xs, positions_BT=jnp.asarray(POSITIONS), scale=SCALE, expand=expand
        )
    )


ONE_TILE, TILES_OF_128 = module._SCORE_BUDGET, 1
FORMS = pytest.mark.parametrize("expand", [False, True], ids=["absorbed", "expanded"])
TILES = pytest.mark.parametrize("budget", [ONE_TILE, TILES_OF_128], ids=["one tile", "tiles"])
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


@FORMS
@TILES
def test_equals_the_softmax_written_out(dtype, expand, budget, monkeypatch) -> None:
    xs = arguments(dtype)
    with jax.enable_x64(True):
        expected = np.asarray(naive(*(jnp.asarray(np.asarray(x), jnp.float64) for x in xs)))
    found = attend(expand, budget, monkeypatch)(*xs)
    assert found.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(np.asarray(found)[POSITIONS < 0], 0.0)


@FORMS
def test_bfloat16(expand, monkeypatch) -> None:
    xs = arguments("bfloat16")
    expected = naive(*(jnp.asarray(x, jnp.float32) for x in xs))
    found = attend(expand, ONE_TILE, monkeypatch)(*xs)
    assert found.dtype == jnp.bfloat16
    # Keys, values, weights and results are rounded to 8 bits, each by at most 2^-9 of it.
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected, rtol=0, atol=4 * 2**-9 * float(jnp.max(jnp.abs(expected)))
    )


@FORMS
@TILES
def test_rows_that_no_query_sees_may_hold_nan(expand, budget, monkeypatch) -> None:
    xs = list(arguments("float32"))
    function = attend(expand, budget, monkeypatch)
    expected = function(*xs)
    unseen = np.arange(KEYS) > POSITIONS.max(axis=1)[:, None]
    assert unseen.any(axis=1).all()
    for value in (np.nan, np.inf):
        xs[2] = jnp.where(jnp.asarray(unseen)[:, :, None], jnp.float32(value), xs[2])
        np.testing.assert_array_equal(function(*xs), expected)


@FORMS
@TILES
def test_gradients_equal_those_of_the_naive_form(expand, budget, monkeypatch) -> None:
    with jax.enable_x64(True):
        xs = arguments("float64")
        weight = jnp.asarray(np.random.default_rng(1).standard_normal((BATCH, QUERIES, HEADS, VALUE)))
        function = attend(expand, budget, monkeypatch)
        every = tuple(range(len(xs)))
        found = jax.jit(jax.grad(lambda *xs: jnp.sum(weight * function(*xs)), every))(*xs)
        expected = jax.jit(jax.grad(lambda *xs: jnp.sum(weight * naive(*xs)), every))(*xs)
        for a, b in zip(found, expected, strict=True):
            assert np.abs(b).max() > 1e-3
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)


def test_scores_of_any_size_stay_finite(monkeypatch) -> None:
    xs = list(arguments("float32"))
    xs[0] *= 1e4
    with jax.enable_x64(True):
        expected = np.asarray(naive(*(jnp.asarray(np.asarray(x), jnp.float64) for x in xs)))
    for expand in (False, True):
        found = attend(expand, TILES_OF_128, monkeypatch)(*xs)
        # Logits near 1e5 carry float32 errors near 1e-2.
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.2)


def test_the_form_follows_the_number_of_queries(monkeypatch) -> None:
    def program(queries):
        q, rope, latent, up_k, up_v = arguments("float32")
        q, rope = (jnp.resize(x, (BATCH, queries, *x.shape[2:])) for x in (q, rope))
        positions = jnp.zeros((BATCH, queries), jnp.int32)
        return str(
            jax.make_jaxpr(lambda *xs: module.latent_attention(*xs, positions_BT=positions, scale=SCALE))(
                q, rope, latent, up_k, up_v
            )
        )

    # Only the expanded form holds a key [B, S, H, N] per head.
    expanded = f"f32[{BATCH},{KEYS},{HEADS},{NOPE}]"
    assert expanded not in program(module.EXPAND_FROM_QUERIES - 1)
    assert expanded in program(module.EXPAND_FROM_QUERIES)


def test_gradients_over_many_tiles_are_added_up_in_float32(monkeypatch) -> None:
    """A sum of bfloat16 stops growing at 256 times its terms: here 600 tiles of equal weight."""
    monkeypatch.setattr(module, "_SCORE_BUDGET", 1)
    keys = 600 * 128
    rng = np.random.default_rng(6)
    shapes = [(1, 1, 1, 2), (1, 1, 1, 2), (1, keys, 4), (1, 2, 2), (1, 2, 2)]
    near_one = [1 + 0.05 * rng.standard_normal(shape) for shape in shapes]
    arrays = tuple(jnp.asarray(x, jnp.bfloat16) for x in near_one)

    def gradient(arrays):
        def loss(arrays):
            position = jnp.full((1, 1), keys - 1, jnp.int32)
            o, logsumexp = module.attend_to_latents(*arrays, positions_BT=position, scale=1.0, expand=True)
            return jnp.sum(o, dtype=jnp.float32) + jnp.sum(logsumexp)

        return jax.jit(jax.grad(loss))(arrays)

    expected, found = (gradient(each) for each in (tuple(x.astype(jnp.float32) for x in arrays), arrays))
    for name, a, b in zip(("q_nope", "q_rope", "latent", "up_k", "up_v"), found, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        if name != "latent":
            np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.03, atol=0.03, err_msg=name)
