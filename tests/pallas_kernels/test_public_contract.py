"""What holds for every operation: NumPy and JAX arrays alike, and no dependency but JAX."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import delta_rule, index_select, mxfp4_matmul, sparse_attention

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


SEQUENCE = (normal(2, 5, 2, 8), normal(2, 5, 2, 8) / 4, normal(2, 5, 2, 6), -abs(normal(2, 5, 2, 8)))
BETA = abs(normal(2, 5, 2)).clip(0, 1)
LENGTHS, SEGMENTS = np.array([5, 3], np.int32), np.array([[0, 0, 1, 1, 1]] * 2, np.int32)
QUERIES, KEYS, WEIGHTS = normal(2, 3, 2, 4), normal(2, 7, 4), normal(2, 3, 2)
POSITIONS = np.array([[1, 4, 6], [0, 2, 6]], np.int32)
INDICES = np.array([[[0, 1, -1]] * 3] * 2, np.int32)
CALLS = {
    "delta_rule": (delta_rule.delta_rule, (*SEQUENCE, BETA, normal(2, 2, 8, 6), LENGTHS, SEGMENTS)),
    "step": (delta_rule.step, (*(a[:, 0] for a in SEQUENCE), BETA[:, 0], normal(2, 2, 8, 6))),
    "segment_map": (delta_rule.segment_map, (*SEQUENCE[1:], BETA, LENGTHS)),
    "select": (index_select.select, (QUERIES, KEYS, WEIGHTS, POSITIONS, 3)),
    "select_paged": (
        index_select.select,
        (QUERIES, normal(4, 2, 4), WEIGHTS, POSITIONS.clip(max=3), 3, np.array([[0, 1], [3, 2]], np.int32)),
    ),
    "scores": (index_select.scores, (QUERIES, KEYS, WEIGHTS, POSITIONS)),
    "scores_at": (index_select.scores_at, (QUERIES, KEYS, WEIGHTS, INDICES)),
    "sparse_attention": (sparse_attention.sparse_attention, (normal(2, 3, 2, 4), KEYS, INDICES, 0.5, 3)),
    "merge": (sparse_attention.merge, (normal(2, 3, 4), normal(2, 3))),
    "grouped_matmul": (
        mxfp4_matmul.grouped_matmul,
        (normal(5, 32), normal(3, 32, 4), np.array([2, 0, 3], np.int32)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_numpy_and_jax_arrays_give_the_same(name):
    function, arguments = CALLS[name]
    in_jax = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in arguments]
    found, expected = function(*arguments), function(*in_jax)
    assert jax.tree.leaves(found)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_package_needs_jax_alone():
    code = """
import sys
for name in ("jaxtyping", "beartype", "flax", "optax", "safetensors", "rich", "moe28t_jax"):
    sys.modules[name] = None
import jax.numpy as jnp
from pallas_kernels import delta_rule, index_select, mxfp4_matmul, sparse_attention
w = mxfp4_matmul.quantize(jnp.ones((4, 32)))
assert (mxfp4_matmul.matmul(jnp.ones((2, 32)), w) == 32).all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
