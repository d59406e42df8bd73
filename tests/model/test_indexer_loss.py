"""The indexer's training loss: value, and which of its inputs it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.model import indexer_loss as module

BATCH, QUERIES, KEYS, HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, TOP_K = 2, 7, 40, 3, 12, 4, 8, 6
SCALE = 0.3


def arguments(dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [
        (BATCH, QUERIES, HEADS, WIDTH), (BATCH, KEYS, WIDTH), (BATCH, QUERIES, INDEX_HEADS, INDEX_WIDTH),
        (BATCH, KEYS, INDEX_WIDTH), (BATCH, QUERIES, INDEX_HEADS),
    ]  # fmt: skip
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def selected(seed=0):
    """Ascending keys per query with -1 after them: full rows, short rows, one key, and no key at all."""
    rng = np.random.default_rng(seed)
    rows = np.full((BATCH, QUERIES, TOP_K), -1, np.int32)
    for index, count in enumerate([6, 0, 1, 6, 3, 2, 6] * BATCH):
        rows[divmod(index, QUERIES)][:count] = np.sort(rng.choice(KEYS, count, replace=False))
    return rows


def naive(q, latent, q_index, keys, weights, indices, use_relu):
    """One query at a time in numpy, float64."""
    q, latent, q_index, keys, weights = (
        np.asarray(x, np.float64) for x in (q, latent, q_index, keys, weights)
    )
    loss = np.zeros((BATCH, QUERIES))
    for b, t in np.ndindex(BATCH, QUERIES):
        chosen = indices[b, t][indices[b, t] >= 0]
        if not len(chosen):
            continue
        logits = SCALE * q[b, t] @ latent[b, chosen].T
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p = (p / p.sum(axis=-1, keepdims=True)).mean(axis=0)
        dots = q_index[b, t] @ keys[b, chosen].T
        dots = np.maximum(dots, 0) if use_relu else dots
        scores = (INDEX_HEADS * INDEX_WIDTH) ** -0.5 * weights[b, t] @ dots
        log_q = scores - scores.max()
        log_q -= np.log(np.exp(log_q).sum())
        loss[b, t] = np.sum(p * (np.log(p) - log_q))
    return loss


def loss(form, monkeypatch, use_relu=True):
    # The limit is read when the function is traced: a new function is traced anew.
    monkeypatch.setattr(module, "_DENSE_KEYS_PER_SELECTED", {"dense": 10**6, "gathered": 0}[form])
    indices = jnp.asarray(selected())
    return jax.jit(lambda *xs: module.indexer_loss(*xs, indices, SCALE, use_relu))


FORMS = pytest.mark.parametrize("form", ["dense", "gathered"])


@FORMS
@pytest.mark.parametrize("use_relu", [True, False], ids=["relu", "linear"])
def test_equals_the_divergence_written_out(dtype, form, use_relu, monkeypatch) -> None:
    xs = arguments(dtype)
    found = loss(form, monkeypatch, use_relu)(*xs)
    expected = naive(*xs, selected(), use_relu)
    assert found.dtype == jnp.dtype(dtype) and expected.max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol={"float32": 5e-6, "float64": 1e-12}[dtype])
    # No keys: nothing to learn. One key: both distributions are certain of it.
    np.testing.assert_array_equal(np.asarray(found)[:, 1], 0.0)
    np.testing.assert_allclose(np.asarray(found)[:, 2], 0.0, atol=1e-6)


def test_the_two_forms_are_taken_by_size(monkeypatch) -> None:
    xs, indices = arguments("float32"), jnp.asarray(selected())

    def program(limit):
        monkeypatch.setattr(module, "_DENSE_KEYS_PER_SELECTED", limit)
        return str(jax.make_jaxpr(lambda *xs: module.indexer_loss(*xs, indices, SCALE, True))(*xs))

    # Only the dense form holds the product of every key with every index head, of one batch row at a time.
    product = f"f32[1,{QUERIES},{INDEX_HEADS},{KEYS}]"
    assert product in program(7)  # 40 keys <= 7 * 6
    assert product not in program(6)


@FORMS
def test_the_gradient_reaches_the_indexer_alone(form, monkeypatch) -> None:
    with jax.enable_x64(True):
        xs = arguments("float64")
        function = loss(form, monkeypatch)
        gradients = jax.jit(jax.grad(lambda *xs: jnp.sum(function(*xs)), (0, 1, 2, 3, 4)))(*xs)
        q, latent, q_index, keys, weights = (np.asarray(g) for g in gradients)
        assert not q.any() and not latent.any()
        for gradient in (q_index, keys, weights):
            assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-3
        # A query without keys, and a key that no query names, learn nothing.
        assert not q_index[:, 1].any() and not weights[:, 1].any()
        for b in range(BATCH):
            unnamed = np.setdiff1d(np.arange(KEYS), selected()[b])
            assert len(unnamed) and not keys[b, unnamed].any()

        # Central differences in a random direction of all three.
        rng = np.random.default_rng(9)
        directions = [jnp.asarray(rng.standard_normal(x.shape)) for x in xs[2:]]
        step = 1e-6

        def at(sign):
            moved = [x + sign * step * d for x, d in zip(xs[2:], directions, strict=True)]
            return float(jnp.sum(function(*xs[:2], *moved)))

        slope = sum(float(jnp.sum(g * d)) for g, d in zip(gradients[2:], directions, strict=True))
        assert abs(slope) > 1e-2
        np.testing.assert_allclose((at(1) - at(-1)) / (2 * step), slope, rtol=1e-6)


@pytest.mark.parametrize(("form", "junk"), [("dense", 1e4), ("gathered", 1e4), ("gathered", np.nan)])
def test_keys_that_are_not_named_have_no_influence(form, junk, monkeypatch) -> None:
    """The dense form multiplies every row, so only the gathered one may meet NaN."""
    xs = list(arguments("float32"))
    function = loss(form, monkeypatch)
    expected = function(*xs)
    indices = selected()
    # Row 0 stands in for a missing index: it stays finite.
    for b in range(BATCH):
        unnamed = jnp.asarray(np.setdiff1d(np.arange(1, KEYS), indices[b]))
        xs[1] = xs[1].at[b, unnamed].set(junk)
        xs[3] = xs[3].at[b, unnamed].set(junk)
    np.testing.assert_allclose(function(*xs), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("keys", [1, 127, 128, 129, 300])
def test_named_keys(keys) -> None:
    rng = np.random.default_rng(keys)
    wanted = rng.uniform(size=(5, keys)) < 0.3
    wanted[0], wanted[1], wanted[2] = True, False, np.arange(keys) == keys - 1
    indices = np.full((5, keys), -1, np.int32)
    for row, named in enumerate(wanted):
        indices[row, rng.permutation(keys)[: named.sum()]] = rng.permutation(np.flatnonzero(named))
    np.testing.assert_array_equal(module.named_keys(jnp.asarray(indices), keys), wanted)
