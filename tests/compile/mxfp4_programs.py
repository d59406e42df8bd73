"""Programs of the grouped MXFP4 matmul compiled for chips that are not there, and what all of them must not do."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.mxfp4_matmul import SHAPES, GroupedMatmulShape, MXFP4Tensor, grouped_glu, grouped_matmul

SHAPE = SHAPES["decode_2p8t_up_experts_over_64"]
SITU = ("situ", 4.0, 25.0)
LAYERS = 4
KINDS = ("product", "gated", "gated_rounded", "gradient")
"""One weight; gate and up with their activation; the same of rows rounded to 8 bits; the gradient of one weight's
product to its rows."""


def arguments(shape: GroupedMatmulShape, layout: str, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    """Rows, a stack of layers of weights (gate and up), sizes of the groups, and the layer."""
    like = jax.ShapeDtypeStruct
    lead, inputs, outputs = (LAYERS, shape.experts), shape.inputs, shape.outputs
    codes, scales = {
        "packed_kn": (like((*lead, inputs // 2, outputs), jnp.uint8), (inputs // 32, outputs)),
        "float4_kn": (like((*lead, inputs, outputs), jnp.float4_e2m1fn), (inputs // 32, outputs)),
        "packed_nk": (like((*lead, outputs, inputs // 2), jnp.uint8), (outputs, inputs // 32)),
    }[layout]
    w = MXFP4Tensor(codes, like((*lead, *scales), jnp.uint8), layout)
    return like((shape.rows, inputs), dtype), w, w, like((shape.experts,), jnp.int32), like((), jnp.int32)


def _run(kind: str, implementation: str, x: Any, w: Any, up: Any, sizes: Any, layer: Any) -> Any:
    match kind:
        case "product":
            return grouped_matmul(x, w, sizes, layer=layer, implementation=implementation)
        case "gated" | "gated_rounded":
            rounded = jnp.float8_e4m3fn if kind == "gated_rounded" else None
            return grouped_glu(
                x, w, up, sizes, SITU, layer=layer, activation_dtype=rounded, implementation=implementation
            )
        case "gradient":

            def loss(x: Any) -> Any:
                return _run("product", implementation, x, w, up, sizes, layer).astype(jnp.float32).sum()

            return jax.grad(loss)(x)
        case "looped":
            dense = jnp.tile(x.T, (1, pl.cdiv(x.shape[1], x.shape[0])))[:, : x.shape[1]]

            def one_more(layer: Any, total: Any) -> Any:
                # Work during which something could be fetched.
                for _ in range(4):
                    total = jnp.tanh(total @ dense)
                fed = _run("gated", implementation, total, w, up, sizes, layer)
                return total.at[:, : fed.shape[1]].add(fed)

            return jax.lax.fori_loop(0, LAYERS, one_more, x)
        case "sliced":
            one_layer = jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), w
            )
            return grouped_matmul(x, one_layer, sizes, implementation=implementation)
    raise ValueError(kind)


def program(kind: str, implementation: str) -> Callable[..., Any]:
    """Of `arguments`: one of KINDS, "looped" for every layer one after the other, or "sliced", which copies a layer out
    of the stack. May go to another process."""
    return functools.partial(_run, kind, implementation)


def remade_weights(text: str, shape: GroupedMatmulShape, layout: str) -> set[str]:
    """Operations that make an array of every expert's codes, scales or weights, in one layer or all, in device memory
    or in a TPU's on-chip memory, into which the compiler fetches a stack in pieces of flat bytes."""
    last = rf"{shape.outputs},\d+" if layout == "packed_nk" else rf"\d+,{shape.outputs}"
    per_expert = rf"\[(?:\d+,)*{shape.experts},{last}\]\S* (?!parameter\()([\w-]+)\("
    matrix = LAYERS * shape.experts * shape.inputs * shape.outputs
    pieces = rf"s8\[(?:{matrix // 2}|{matrix // 32})\]\S*, [^=]*? (slice-start)\("
    found = {*re.findall(per_expert, text), *re.findall(pieces, text)}
    return found - {"bitcast", "get-tuple-element"}
