"""The delta rule over a divided row with the TPU's kernels, interpreted: forward and gradient as with the portable form.

On one device: what is tested is that kernels can be differentiated where a training step calls them, inside of
`shard_map`, of a scan over layers, and of what `jax.checkpoint` computes again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe28t_jax.parallel.sequence import delta_rule_over
from pallas_kernels import prefer
from pallas_kernels.delta_rule import api, tpu


def test_a_training_step_differentiates_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    # The plain interpreter: that of the TPU has effects, which nothing that is computed again may have.
    monkeypatch.setitem(api._SEGMENT_MAP, "tpu", functools.partial(tpu.segment_map, interpret=True))
    monkeypatch.setitem(api._DELTA_RULE, "tpu", functools.partial(tpu.delta_rule, interpret=True))
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    batch, tokens, heads, size, layers = 1, 6, 1, 8, 2
    k = normal(layers, batch, tokens, heads, size)
    weights = {
        "k": k / jnp.linalg.norm(k, axis=-1, keepdims=True),
        "log_decay": -jnp.abs(normal(layers, batch, tokens, heads, size)),
        "beta": jax.nn.sigmoid(normal(layers, batch, tokens, heads)),
    }
    state, lengths = normal(batch, heads, size, size), jnp.asarray([5], jnp.int32)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return delta_rule_over(
            x, weights["k"], x, weights["log_decay"], weights["beta"], state, lengths, ("context",)
        )

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def body(carry: tuple[jax.Array, jax.Array], weights: dict[str, jax.Array]) -> tuple[Any, None]:
            x, total = carry
            x, final = layer(x, weights)
            return (x, total + jnp.sum(final * final)), None

        (x, total), _ = jax.lax.scan(body, (x, jnp.float32(0)), weights)
        return total + jnp.sum(x * x)

    x = normal(batch, tokens, heads, size)
    expected = jax.jit(jax.value_and_grad(loss))(weights, x)
    with prefer("tpu"):
        program = jax.jit(jax.value_and_grad(loss)).trace(weights, x)
        found = program.lower().compile()(weights, x)
    assert "delta_rule_segment_map" in str(program.jaxpr)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
