"""Drawn inputs of the grouped MXFP4 matmul, for the tests of its kernels: group sizes and scales at their limits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.mxfp4_matmul import MXFP4Tensor, fake_quantize_mxfp8

SITU = ("situ", 4.0, 25.0)
LIMITS = (0, 1, 127, 254)
"""Scale bytes: weights that count as zero, the smallest others, ones, and the largest."""
USUAL = tuple(range(122, 130))


class Case(NamedTuple):
    x: np.ndarray
    """[M, K]; rows of nobody are NaN."""
    codes: np.ndarray
    """uint8 [layers, experts, K / 2, N]."""
    scales: np.ndarray
    """uint8 [layers, experts, K / 32, N]."""
    sizes: np.ndarray
    layer: int

    def weight(self, layout: str) -> MXFP4Tensor:
        w = MXFP4Tensor(jnp.asarray(self.codes), jnp.asarray(self.scales), "packed_kn")
        return jax.tree.map(jnp.asarray, w.to_layout(layout))

    def arguments(self, layout: str, dtype: Any = jnp.float32) -> tuple[Any, ...]:
        x = jnp.asarray(self.x).astype(dtype)
        return x, self.weight(layout), jnp.asarray(self.sizes), jnp.int32(self.layer)

    def rows(self, dtype: Any, rounded: bool) -> np.ndarray:
        """float64, what is multiplied: zeros where nobody's."""
        x = jnp.asarray(self.x).astype(dtype)
        used = np.asarray(fake_quantize_mxfp8(x) if rounded else x).astype(np.float64)
        used[self.sizes.sum() :] = 0
        return used

    def dense(self) -> np.ndarray:
        """[experts, K, N], float64."""
        codes, scales = self.codes[self.layer], self.scales[self.layer].astype(np.float64)
        nibbles = np.stack([codes & 15, codes >> 4], axis=2).reshape(codes.shape[0], -1, codes.shape[2])
        values = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        return values * np.repeat(np.where(scales == 0, 0.0, 2.0 ** (scales - 127)), 32, axis=1)

    def product(self, rows: np.ndarray, dense: np.ndarray) -> np.ndarray:
        expert = np.repeat(np.arange(self.sizes.size), self.sizes)
        result = np.zeros((rows.shape[0], dense.shape[-1]))
        for e in np.unique(expert):
            here = np.flatnonzero(expert == e)
            result[here] = rows[here] @ dense[e]
        return result

    def check_product(self, found: Any, rounded: bool = False) -> None:
        """Against float64, within what rounding each product and each sum of float32 may lose."""
        assert found.dtype in (jnp.float32, jnp.bfloat16)
        rows, dense = self.rows(found.dtype, rounded), self.dense()
        expected = self.product(rows, dense)
        bound = 4e-6 * self.product(np.abs(rows), np.abs(dense))
        # Subnormal weights may be flushed, as matrix units do.
        bound += 2.0**-126 * np.abs(rows).sum(axis=1, keepdims=True)
        if found.dtype == jnp.bfloat16:
            bound += 2.0**-8 * np.abs(expected)
        error = np.abs(np.asarray(found).astype(np.float64) - expected)
        assert (error <= bound).all(), (error - bound).max()
        np.testing.assert_array_equal(np.asarray(found)[self.sizes.sum() :].astype(np.float32), 0)

    def check_glu(self, found: Any, up: "Case", rounded: bool) -> None:
        """`found` is of this weight's gate and of `up`'s weight; scales are usual ones."""
        rows = self.rows(found.dtype, rounded)
        products = [self.product(rows, w.dense()) for w in (self, up)]
        gate_error, linear_error = (4e-6 * self.product(np.abs(rows), np.abs(w.dense())) for w in (self, up))
        _, beta, linear_beta = SITU
        # Below -700 exp overflows in float64, and the gate is 0 either way.
        gate = beta * np.tanh(products[0] / beta) / (1 + np.exp(-np.maximum(products[0], -700.0)))
        linear = linear_beta * np.tanh(products[1] / linear_beta)
        # The activation of the gate has slopes of at most 1.2, the other of at most 1.
        bound = 1.2 * gate_error * (np.abs(linear) + linear_error) + linear_error * np.abs(gate)
        error = np.abs(np.asarray(found).astype(np.float64) - gate * linear)
        assert (error <= bound + 1e-5 * (1 + np.abs(gate * linear))).all(), (error - bound).max()


@st.composite
def group_sizes(draw: Any, experts: int, rows: int, tile: int) -> np.ndarray:
    """Any; no rows at all; all rows in one group; whole tiles and one row more or less."""
    kind = draw(st.sampled_from(["any", "empty", "one", "tiles"]))
    sizes = np.zeros(experts, np.int32)
    if kind == "any":
        total = draw(st.integers(0, rows))
        cuts = draw(st.lists(st.integers(0, total), min_size=experts - 1, max_size=experts - 1))
        sizes[:] = np.diff([0, *sorted(cuts), total])
    elif kind == "one":
        sizes[draw(st.integers(0, experts - 1))] = rows
    elif kind == "tiles":
        for expert in draw(st.permutations(range(experts))):
            wanted = draw(st.sampled_from([0, 1, tile - 1, tile, tile + 1]))
            sizes[expert] = min(wanted, rows - int(sizes.sum()))
    return sizes


@st.composite
def cases(
    draw: Any, shape: tuple[int, int, int, int, int], tile: int, scales: tuple[int, ...] = LIMITS
) -> Case:
    """Of `shape` (layers, experts, inputs, outputs, rows); `tile` is how many rows the kernel multiplies at once."""
    layers, experts, inputs, outputs, rows = shape
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    pool = draw(st.lists(st.sampled_from(scales), min_size=1, max_size=3, unique=True))
    # Twice the largest power of two is no float32: codes stay below 2 there, and rows small.
    is_large = max(pool) > 250
    nibbles = rng.integers(0, 16, (2, layers, experts, inputs // 2, outputs), dtype=np.uint8)
    if is_large:
        nibbles &= 0b1011
    x = rng.standard_normal((rows, inputs)).astype(np.float32) * np.float32(2.0**-20 if is_large else 1)
    sizes = draw(group_sizes(experts, rows, tile))
    x[sizes.sum() :] = np.nan
    drawn = rng.choice(np.asarray(pool, np.uint8), (layers, experts, inputs // 32, outputs))
    return Case(x, nibbles[0] | (nibbles[1] << 4), drawn, sizes, draw(st.integers(0, layers - 1)))
