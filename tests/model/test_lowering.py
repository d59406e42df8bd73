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
ELEMENT_TYPES = {"bfloat16": "bf16", "float32": "f32", "int32": "i32", "uint8": "ui8"}
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
def lowered(layers: int, tokens: int) -> tuple[str, set[tuple[tuple[int, ...], str]]]:
    """The program's text, and the shapes and element types of its arguments."""
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
    leaves = jax.tree.leaves((parameters, inputs, cache))
    return text, {(leaf.shape, ELEMENT_TYPES[leaf.dtype.name]) for leaf in leaves}


def computed_tensors(
    text: str, arguments: set[tuple[tuple[int, ...], str]]
) -> dict[tuple[tuple[int, ...], str], int]:
    """Shape and element type to number of elements of what is neither an argument, nor one layer of a stack, nor all
    rows of one in another grouping (which is no copy)."""
    given, rows = set(), set()
    for shape, kind in arguments:
        rows.add((math.prod(shape), shape[-1], kind))
        given |= {(shape, kind), (shape[1:], kind), ((1, *shape[1:]), kind)}
    found = {}
    for dimensions, kind in re.findall(r"tensor<((?:\d+x)+)([a-z]\w*)>", text):
        shape = tuple(map(int, dimensions[:-1].split("x")))
        if (shape, kind) not in given and (math.prod(shape), shape[-1], kind) not in rows:
            found[shape, kind] = math.prod(shape)
    return found


@STEPS
def test_the_program_does_not_grow_with_the_layers(tokens) -> None:
    full, _ = lowered(93, tokens)
    half, _ = lowered(45, tokens)
    assert abs(len(full) / len(half) - 1) < 0.2


# Prefill: the rows of all chosen experts in the latent (16 per token, and padding) and the residual snapshots are
# the largest, 2,048 x 16 x 3,584 elements; one score per query and key would be 268 million elements, and a float32
# copy of a layer's latents 75 million. Decode: less than an unpacked pair of experts.
@pytest.mark.parametrize(
    ("tokens", "limit"), [(PREFILL, 112 * 2**20 + 2**20), (1, 24 * 2**20)], ids=["prefill", "decode"]
)
def test_nothing_large_is_computed(tokens, limit) -> None:
    text, arguments = lowered(93, tokens)
    found = computed_tensors(text, arguments)
    largest = max(found, key=lambda tensor: found[tensor])
    assert tokens == 1 or found[largest] >= tokens * 16 * 3584
    assert limit < PREFILL * CONTEXT
    assert found[largest] < limit, f"{largest} has {found[largest]:,} elements"
    # Along the whole context nothing is held per attention head, and no layer's latents in another type.
    along = {tensor: size for tensor, size in found.items() if CONTEXT in tensor[0]}
    assert max(along.values(), default=0) < 96 * CONTEXT, along
