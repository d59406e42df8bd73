"""The compiled steps of one model: prefill a chunk, decode a token, read all logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Key

from moe28t_jax.config import ModelConfig
from moe28t_jax.engine.sampling import sample
from moe28t_jax.model.cache import GRID, Cache, init_cache
from moe28t_jax.model.network import Inputs, forward
from moe28t_jax.model.parameters import Parameters


def round_up(count: int, grid: int = GRID) -> int:
    """The next multiple of the grid that holds `count`."""
    return -(-count // grid) * grid


GPU_OPTIONS: dict[str, bool | str] = {
    "xla_gpu_enable_dynamic_slice_fusion": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": "0",
}
"""How XLA compiles steps for GPUs. By itself it copies the weights of every layer out of their stacks before it
multiplies with them, so that decoding moves them three times: its Triton products take no slice, and it joins small
weights to multiply once. The library's products read a slice where it lies."""


class _Program:
    """A function of leaves and a cache that is given up, compiled for the platform that it is to run on."""

    def __init__(self, function: Callable[..., Any], static: tuple[str, ...]) -> None:
        compiled = partial(jax.jit, function, static_argnames=static, donate_argnames=("cache",))
        self._usual, self._gpu = compiled(), compiled(compiler_options=GPU_OPTIONS)

    def on(self, platform: str) -> Any:
        """The jitted function."""
        return self._gpu if platform in ("gpu", "cuda") else self._usual


def _forward(leaves, structure, inputs, cache, config, logits):
    return forward(jax.tree.unflatten(structure, leaves), inputs, cache, config, logits)


def _decode(leaves, structure, tokens_B, active_B, cache, key, temperature, top_p, config):
    inputs = Inputs(tokens_B[:, None], active_B.astype(jnp.int32))
    logits_BV, cache = forward(jax.tree.unflatten(structure, leaves), inputs, cache, config, "last")
    return sample(logits_BV, key, temperature, top_p), logits_BV, cache


FORWARD = _Program(_forward, ("structure", "config", "logits"))
DECODE = _Program(_decode, ("structure", "config"))


def check_feature_count(pads: int, rows: int) -> None:
    """Raises ValueError when media pad tokens and image features are not equally many."""
    if pads != rows:
        raise ValueError(
            f"The prompt has {pads} media pad tokens and there are {rows} rows of image features; there must be one "
            "row per token: render the prompt with the number of tokens of each image."
        )


class _FeatureRows:
    """The image features of a batch of prompts, chunk by chunk."""

    def __init__(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        image_features: Any,
        config: ModelConfig,
        dtype: jnp.dtype,
    ) -> None:
        self.features_ND = None
        if image_features is None:
            if config.vision is not None and config.media_pad_id is not None:
                real_BT = np.arange(token_ids.shape[1])[None, :] < lengths[:, None]
                check_feature_count(int(((token_ids == config.media_pad_id) & real_BT).sum()), 0)
            return
        if config.media_pad_id is None:
            raise ValueError(
                "Image features were given, but this configuration has no media pad token; leave them out."
            )
        if image_features.shape[1] != config.hidden_size:
            raise ValueError(
                f"Image features have {image_features.shape[1]} values per row; this model's embeddings have "
                f"{config.hidden_size}: encode the images with the parameters of the same model."
            )
        real_BT = np.arange(token_ids.shape[1])[None, :] < lengths[:, None]
        self.media_BT = (token_ids == config.media_pad_id) & real_BT
        check_feature_count(int(self.media_BT.sum()), len(image_features))
        self.order_BT = np.cumsum(self.media_BT.reshape(-1)).reshape(self.media_BT.shape) - 1
        self.features_ND = np.asarray(image_features).astype(dtype)

    def chunk(self, start: int, count: int) -> Array | None:
        """Features of the tokens from `start`, padded to as many rows as tokens, so that chunks of one shape share a
        program; None without any, so that text runs the text program."""
        if self.features_ND is None:
            return None
        media_BT = self.media_BT[:, start : start + count]
        if not media_BT.any():
            return None
        order_N = self.order_BT[:, start : start + count][media_BT]
        rows_ND = np.zeros((media_BT.shape[0] * count, self.features_ND.shape[1]), self.features_ND.dtype)
        rows_ND[: len(order_N)] = self.features_ND[order_N]
        return jnp.asarray(rows_ND)


class Steps:
    """Compiled steps over fixed parameters. Caches are passed in and given up: each call consumes its cache.

    chunk: tokens of one prefill call; longer prompts run chunk by chunk. mesh: the devices that the parameters lie on;
    None for one device.
    """

    def __init__(
        self,
        parameters: Parameters,
        config: ModelConfig,
        chunk: int = 1024,
        mesh: jax.sharding.Mesh | None = None,
    ):
        if chunk % GRID:
            raise ValueError(f"The prefill chunk is {chunk}; it must be a multiple of {GRID} tokens.")
        self.config, self.chunk, self.mesh = config, chunk, mesh
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        self._forward, self._decode = FORWARD.on(device.platform), DECODE.on(device.platform)
        self.dtype = parameters["embedding"].dtype
        self.stacked = parameters.stacked(config)
        # Flattened once: a module's traversal on every call costs more than a small model's step.
        self._leaves, self._structure = jax.tree.flatten(parameters.text_only())

    def on_mesh(self) -> AbstractContextManager[Any]:
        """What programs over the parameters are called in, so that they are sharded over the mesh."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for at least `capacity` tokens per row."""
        with self.on_mesh():
            return init_cache(self.config, batch, capacity, self.dtype, self.stacked)

    def forward(
        self,
        token_ids: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: Cache | None,
        logits: str = "all",
        image_features: Float[Array, "N D"] | None = None,
    ) -> tuple[Float[Array, "B *T V"], Cache | None]:
        """`moe28t_jax.forward`, compiled for these shapes; with image features it is another program."""
        inputs = Inputs(token_ids, lengths, image_features)
        with self.on_mesh():
            return self._forward(self._leaves, self._structure, inputs, cache, self.config, logits)

    def prefill(
        self,
        token_ids: Integer[np.ndarray, "B T"],
        lengths: Integer[np.ndarray, " B"],
        cache: Cache,
        image_features: Float[Array | np.ndarray, "N D"] | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Read right-padded prompts in chunks on the grid; logits after each row's last real token.

        image_features: one row per media pad token of all prompts, in reading order of the batch: row after row.
        Raises ValueError when their numbers differ, and where no row has a token.
        """
        lengths = np.asarray(lengths, np.int32)
        if not lengths.size or lengths.max() < 1:
            raise ValueError(
                f"The lengths of the prompts are {lengths.tolist()}; at least one row must have a token."
            )
        images = _FeatureRows(token_ids, lengths, image_features, self.config, self.dtype)
        longest = int(lengths.max())
        last_logits = None
        for start in range(0, longest, self.chunk):
            count = min(self.chunk, round_up(longest - start))
            piece = np.zeros((token_ids.shape[0], count), np.int32)
            taken = token_ids[:, start : start + count]
            piece[:, : taken.shape[1]] = taken
            here = np.clip(lengths - start, 0, count).astype(np.int32)
            logits_BV, new_cache = self.forward(
                jnp.asarray(piece), jnp.asarray(here), cache, "last", images.chunk(start, count)
            )
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
        with self.on_mesh():
            return self._decode(
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

    # For compiling ahead of time: parameters, caches and arguments may be `jax.ShapeDtypeStruct`s.

    def lower_forward(
        self, token_ids: Any, lengths: Any, cache: Any, logits: str = "last"
    ) -> jax.stages.Lowered:
        """The program of `forward` without images, and of a `prefill` chunk, lowered and not run."""
        inputs = Inputs(token_ids, lengths, None)
        with self.on_mesh():
            return self._forward.lower(self._leaves, self._structure, inputs, cache, self.config, logits)

    def lower_decode(
        self, tokens_B: Any, active_B: Any, cache: Any, key: Any, temperature: Any, top_p: Any
    ) -> jax.stages.Lowered:
        """The program of `decode`, lowered and not run."""
        arguments = (tokens_B, active_B, cache, key, temperature, top_p)
        with self.on_mesh():
            return self._decode.lower(self._leaves, self._structure, *arguments, config=self.config)
