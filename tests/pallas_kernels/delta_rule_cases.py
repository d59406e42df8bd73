"""Drawn inputs of the gated delta rule, for the tests of its kernels: lengths, documents and saturated gates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import delta_rule

DECAYS = (0.0, -1e-3, -5.0, -1e4, -np.inf)


class Case(NamedTuple):
    arrays: tuple[np.ndarray, ...]
    """q, k, v, log_decay, beta and the initial state."""
    lengths: np.ndarray
    segment_ids: np.ndarray
    magnitude: float
    """Of the values and of the state."""

    def arguments(self, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
        """With NaN in the padding; q, k and v in `dtype`."""
        batch, tokens = self.arrays[0].shape[:2]
        invalid = np.arange(tokens)[None, :] >= self.lengths[:, None]
        poisoned = [
            np.where(invalid.reshape(batch, tokens, *(1,) * (a.ndim - 2)), np.float32(np.nan), a)
            for a in self.arrays[:-1]
        ]
        *rest, log_decay, beta, state = (jnp.asarray(a) for a in (*poisoned, self.arrays[-1]))
        return (
            *(a.astype(dtype) for a in rest),
            log_decay,
            beta,
            state,
            jnp.asarray(self.lengths),
            jnp.asarray(self.segment_ids),
        )

    def expected(self, dtype: Any = jnp.float32) -> list[np.ndarray]:
        """Outputs, final state and states at the ends of chunks, by the recurrence in float64."""
        with jax.enable_x64(True):
            *rest, log_decay, beta, state = self.arrays
            rounded = [np.asarray(jnp.asarray(a).astype(dtype), np.float64) for a in rest]
            wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (*rounded, log_decay, beta, state)]
            results = delta_rule.delta_rule(
                *wide,
                jnp.asarray(self.lengths),
                jnp.asarray(self.segment_ids),
                return_boundary_states=True,
                implementation="reference",
            )
            return [np.asarray(a) for a in results]

    def check(self, results: tuple[jax.Array, ...], relative: float, dtype: Any = jnp.float32) -> None:
        """Errors are relative to the magnitude of values and state, which no output exceeds by much."""
        expected = self.expected(dtype)
        assert len(results) == len(expected)
        for found, wanted in zip(results, expected, strict=True):
            assert found.shape == wanted.shape
            scale = max(self.magnitude, float(np.abs(wanted).max()))
            bound = relative if found.dtype == jnp.float32 else max(relative, 2.0**-8)
            np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=bound * scale)


@st.composite
def cases(draw: Any, shape: tuple[int, int, int, int, int]) -> Case:
    """Arrays of `shape` (B, T, H, K, V): any lengths and documents, and saturated gates in any mixture."""
    batch, tokens, heads, key_dim, value_dim = shape
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    magnitude = draw(st.sampled_from([1e-4, 1.0, 1e4]))
    decays = draw(st.lists(st.sampled_from(DECAYS), min_size=1, max_size=3, unique=True))
    gates = draw(st.sampled_from(["any", "closed", "open", "either"]))
    is_saturated = draw(st.sampled_from([0.0, 0.5, 1.0]))

    def unit(*axes: int) -> np.ndarray:
        x = rng.standard_normal(axes)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    sizes = batch, tokens, heads, key_dim
    drawn = -5.0 / (1.0 + np.exp(2.0 - 2.0 * rng.standard_normal(sizes)))
    log_decay = np.where(rng.random(sizes) < is_saturated, rng.choice(decays, sizes), drawn)
    beta = {
        "any": rng.random(sizes[:-1]),
        "closed": np.zeros(sizes[:-1]),
        "open": np.ones(sizes[:-1]),
        "either": rng.choice([0.0, 1.0], sizes[:-1]),
    }[gates]
    k = unit(*sizes)
    if draw(st.booleans()):
        # Equal keys: every token overwrites what the one before it wrote.
        k = np.broadcast_to(k[:, :1], k.shape)
    arrays = (
        unit(*sizes) * key_dim**-0.5,
        k,
        magnitude * rng.standard_normal((batch, tokens, heads, value_dim)),
        log_decay,
        beta,
        magnitude * rng.standard_normal((batch, heads, key_dim, value_dim)),
    )
    lengths = draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    starts = [draw(st.lists(st.integers(0, tokens), max_size=3)) for _ in range(batch)]
    ids = [np.searchsorted(sorted(row), np.arange(tokens), "right") for row in starts]
    return Case(
        tuple(a.astype(np.float32) for a in arrays),
        np.asarray(lengths, np.int32),
        np.stack(ids).astype(np.int32),
        magnitude,
    )
