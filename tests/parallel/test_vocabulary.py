"""The loss of a vocabulary on one device; divided vocabularies are compared with it in `test_network.py`."""

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.parallel.vocabulary import embed, log_probabilities


def test_log_probabilities_and_ids_that_are_no_targets() -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 4, 7)) * 30, jnp.float32)
    ids = jnp.asarray([[0, 6, -100, 3], [7, 2, 2, -1]], jnp.int32)
    ignored = np.array([[0, 0, 1, 0], [1, 0, 0, 1]], bool)
    wide = np.asarray(logits, np.float64)
    every = wide - wide.max(-1, keepdims=True)
    every -= np.log(np.exp(every).sum(-1, keepdims=True))
    expected = np.take_along_axis(every, np.clip(ids, 0, 6)[..., None], -1)[..., 0]
    found = log_probabilities(logits, ids)
    np.testing.assert_allclose(found, np.where(ignored, 0, expected), rtol=0, atol=2e-5)
    slope = jax.grad(lambda x: jnp.sum(log_probabilities(x, ids)))(logits)
    one_hot = np.eye(7)[np.clip(ids, 0, 6)]
    np.testing.assert_allclose(slope, np.where(ignored[..., None], 0, one_hot - np.exp(every)), atol=2e-6)


def test_the_row_of_a_frequent_token_gets_all_of_its_gradient() -> None:
    """In bfloat16, which training computes in: 4,000 terms of one sign."""
    table = jnp.zeros((8, 4), jnp.float32)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 2000)) * 5, jnp.int32)
    slope = jnp.asarray(1 + np.random.default_rng(1).uniform(size=(4, 2000, 4)), jnp.bfloat16)

    def loss(table: jax.Array) -> jax.Array:
        rows = embed(table.astype(jnp.bfloat16), ids)
        return jnp.sum(rows.astype(jnp.float32) * slope.astype(jnp.float32))

    expected = np.zeros((8, 4))
    np.add.at(expected, np.asarray(ids), np.asarray(slope, np.float64))
    np.testing.assert_allclose(jax.grad(loss)(table), expected, rtol=2.0**-8)
