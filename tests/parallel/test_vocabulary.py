"""The loss of a vocabulary on one device; divided vocabularies are compared with it in `test_network.py`."""

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.parallel.vocabulary import log_probabilities


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
