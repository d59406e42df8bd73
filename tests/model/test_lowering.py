"""The full configuration is lowered from abstract parameters: program size and the sizes of what it computes."""

import functools
import math
import re
import time

import jax
import jax.numpy as jnp
import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.model import Inputs, abstract, forward, init_cache

CONTEXT, PREFILL = 131_072, 2_048
STEPS = pytest.mark.parametrize("tokens", [PREFILL, 1], ids=["prefill", "decode"])


def shortened(config: ModelConfig, layers: int) -> ModelConfig:
    """The first groups and the last layer, as the full configuration ends."""
    kinds, mlps = config.attention_kinds, config.mlp_kinds
    return config.override(
        {
            "attention_kinds": kinds[: layers - 1] + kinds[-1:],
            "mlp_kinds": mlps[: layers - 1] + mlps[-1:],
        }
    )


@functools.cache
def lowered(layers: int, tokens: int) -> tuple[str, set[tuple[int, ...]]]:
    """The program's text, and the shapes of its arguments."""
    config = ModelConfig.preset("moe28t")
    config = config if layers == config.num_layers else shortened(config, layers)
    assert config.num_layers == layers
    parameters = abstract(config)
    cache = jax.eval_shape(functools.partial(init_cache, config, 1, CONTEXT, jnp.bfloat16, True))
    inputs = Inputs(jax.ShapeDtypeStruct((1, tokens), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
    step = jax.jit(forward, static_argnames=("config", "logits"), donate_argnames="cache")
    started = time.perf_counter()
    program = step.lower(parameters, inputs, cache, config=config, logits="last")
    text = program.as_text()
    print(
        f"{layers} layers, {tokens} tokens: {len(text):,} characters, {time.perf_counter() - started:.1f} s"
    )
    return text, {leaf.shape for leaf in jax.tree.leaves((parameters, inputs, cache))}


def tensors(text: str) -> dict[tuple[int, ...], set[str]]:
    """Shape to element types of every tensor that the program mentions."""
    found: dict[tuple[int, ...], set[str]] = {}
    for shape, kind in re.findall(r"tensor<((?:\d+x)+)([a-z]\w*)>", text):
        found.setdefault(tuple(map(int, shape[:-1].split("x"))), set()).add(kind)
    return found


@STEPS
def test_the_program_does_not_grow_with_the_layers(tokens) -> None:
    full, _ = lowered(93, tokens)
    half, _ = lowered(45, tokens)
    assert abs(len(full) / len(half) - 1) < 0.2
