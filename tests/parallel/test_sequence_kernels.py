"""The delta rule over a divided row with the TPU's kernels: as with the portable form, gradient included.

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

BATCH, TOKENS, HEADS, SIZE, LAYERS = 1, 6, 1, 8, 2


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Of layers that are computed again for the gradient."""
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))
    state, lengths = normal(1, BATCH, HEADS, SIZE, SIZE), jnp.asarray([TOKENS - 1], jnp.int32)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return delta_rule_over(
            x, weights["k"], x, weights["log_decay"], weights["beta"], state, lengths, ("context",)
        )

    @jax.checkpoint
    def body(carry: tuple[jax.Array, jax.Array], weights: dict[str, jax.Array]) -> tuple[Any, None]:
        x, total = carry
        x, final = layer(x, weights)
        return (x, total + jnp.sum(final * final)), None

    (x, total), _ = jax.lax.scan(body, (x, jnp.float32(0)), weights)
    return total + jnp.sum(x * x)


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    k = normal(2, LAYERS, BATCH, TOKENS, HEADS, SIZE)
    weights = {
        "k": k / jnp.linalg.norm(k, axis=-1, keepdims=True),
        "log_decay": -jnp.abs(normal(3, *k.shape)),
        "beta": jax.nn.sigmoid(normal(4, *k.shape[:-1])),
    }
    return weights, normal(5, *k.shape[1:])


KERNELS = {"tpu": ("delta_rule_segment_map", "delta_rule_forward"), "gpu": ("columns",)}
"""What their programs name: kernels, axes of a grid."""


@pytest.mark.parametrize("chip", ["tpu", "gpu"])
def test_the_gradient_of_kernels_is_traced_as_in_a_training_step(chip: str) -> None:
    weights, x = arguments()
    with prefer(chip):
        program = str(jax.make_jaxpr(jax.value_and_grad(loss))(weights, x))
    assert [name for name in KERNELS[chip] if name not in program] == []


@pytest.mark.slow
def test_a_training_step_with_kernels_equals_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    # The plain interpreter: that of the TPU has effects, which nothing that is computed again may have.
    monkeypatch.setitem(api._SEGMENT_MAP, "tpu", functools.partial(tpu.segment_map, interpret=True))
    monkeypatch.setitem(api._DELTA_RULE, "tpu", functools.partial(tpu.delta_rule, interpret=True))
    weights, x = arguments()
    expected = jax.jit(jax.value_and_grad(loss))(weights, x)
    with prefer("tpu"):
        found = jax.jit(jax.value_and_grad(loss))(weights, x)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
