"""The compiled steps of one model: prefill a chunk, decode a token, read all logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Key

from moe28t_jax.config import ModelConfig
from moe28t_jax.engine.sampling import sample
from moe28t_jax.model.cache import Cache, init_cache
from moe28t_jax.model.network import Inputs, forward
from moe28t_jax.model.parameters import Parameters

# Prefill runs on this grid, so that a chunk's arithmetic does not depend on how a prompt arrived.
GRID = 64


def round_up(count: int, grid: int = GRID) -> int:
    """The next multiple of the grid that holds `count`."""
    return -(-count // grid) * grid


@partial(jax.jit, static_argnames=("structure", "config", "logits"), donate_argnames=("cache",))
def _forward(leaves, structure, inputs, cache, config, logits):
    return forward(jax.tree.unflatten(structure, leaves), inputs, cache, config, logits)


@partial(jax.jit, static_argnames=("structure", "config"), donate_argnames=("cache",))
def _decode(leaves, structure, tokens_B, active_B, cache, key, temperature, top_p, config):
    inputs = Inputs(tokens_B[:, None], active_B.astype(jnp.int32))
    logits_BV, cache = forward(jax.tree.unflatten(structure, leaves), inputs, cache, config, "last")
    return sample(logits_BV, key, temperature, top_p), logits_BV, cache


class Steps:
    """Compiled steps over fixed parameters. Caches are passed in and given up: each call consumes its cache.

    chunk: tokens of one prefill call; longer prompts run chunk by chunk.
    """

    def __init__(self, parameters: Parameters, config: ModelConfig, chunk: int = 1024):
        if chunk % GRID:
            raise ValueError(f"The prefill chunk is {chunk}; it must be a multiple of {GRID} tokens.")
        self.config, self.chunk = config, chunk
        self.dtype = parameters["embedding"].dtype
        self.stacked = parameters.stacked(config)
        # Flattened once: a module's traversal on every call costs more than a small model's step.
        self._leaves, self._structure = jax.tree.flatten(parameters)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `capacity` tokens per row."""
        return init_cache(self.config, batch, capacity, self.dtype, self.stacked)

    def forward(
        self,
        token_ids: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: Cache | None,
        logits: str = "all",
    ) -> tuple[Float[Array, "B *T V"], Cache | None]:
        """`moe28t_jax.forward`, compiled for these shapes."""
        return _forward(self._leaves, self._structure, Inputs(token_ids, lengths), cache, self.config, logits)

    def prefill(
        self, token_ids: Integer[np.ndarray, "B T"], lengths: Integer[np.ndarray, " B"], cache: Cache
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Read right-padded prompts in chunks on the grid; logits after each row's last real token."""
        lengths = np.asarray(lengths, np.int32)
        longest = int(lengths.max())
        last_logits = None
        for start in range(0, longest, self.chunk):
            count = min(self.chunk, round_up(longest - start))
            piece = np.zeros((token_ids.shape[0], count), np.int32)
            taken = token_ids[:, start : start + count]
            piece[:, : taken.shape[1]] = taken
            here = np.clip(lengths - start, 0, count).astype(np.int32)
            logits_BV, new_cache = self.forward(jnp.asarray(piece), jnp.asarray(here), cache, "last")
            assert new_cache is not None
            cache = new_cache
            # A row whose prompt ended in an earlier chunk keeps the logits of that chunk.
            ends_here = jnp.asarray((lengths > start) & (lengths <= start + count))[:, None]
            last_logits = logits_BV if last_logits is None else jnp.where(ends_here, logits_BV, last_logits)
        assert last_logits is not None
        return last_logits, cache

    def decode(
        self,
        tokens_B: Int[Array, " B"],
        active_B: Any,
        cache: Cache,
        key: Key[Array, ""],
        temperature: float,
        top_p: float,
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"], Cache]:
        """Read one token per active row and draw the next: (next tokens, logits, cache)."""
        return _decode(
            self._leaves,
            self._structure,
            tokens_B,
            jnp.asarray(active_B),
            cache,
            key,
            # numpy scalars: making two device arrays first takes longer than a small layer.
            np.float32(temperature),
            np.float32(top_p),
            config=self.config,
        )
