"""Sparse attention for GPU compiles for Hopper and Blackwell: nothing is spilled, no row is gathered in memory. Index
selection, whose portable form GPUs run, compiles without a buffer of all scores or a sort of all keys."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import index_select, sparse_attention
from pallas_kernels.index_select import IndexSelectShape
from pallas_kernels.index_select.shapes import KEY_TILE, QUERY_BLOCK
from pallas_kernels.sparse_attention import SparseAttentionShape
from tests.compile.gpu_topologies import (
    ARCHITECTURES,
    SHARED_MEMORY_LIMIT,
    Program,
    compile_for_gpu,
    needs_gpu_compiler,
)

pytestmark = needs_gpu_compiler

CHIPS = ("h200", "b200")
SHAPES = sparse_attention.SHAPES
DECODE = SHAPES["decode_2p8t_1m"]
NAMES = tuple(name for name in SHAPES if name != "tiny")
SELECTIONS = tuple(name for name in index_select.SHAPES if name != "tiny")
SMALL = 2**20
LIKE = jax.ShapeDtypeStruct
PAGE = 64


def attend(q: Any, kv: Any, indices: Any, table: Any = None, *, value_dim: int) -> tuple[Any, Any]:
    return sparse_attention.sparse_attention(
        q, kv, indices, 192**-0.5, value_dim, table, implementation="gpu"
    )


def check(chip: str, shape: SparseAttentionShape, dtype: Any = jnp.bfloat16, paged: bool = False) -> Program:
    batch, queries, heads, width, value_dim, keys, selected = shape
    lead = (batch * (keys // PAGE), PAGE) if paged else (batch, keys)
    arguments = [
        LIKE((batch, queries, heads, width), dtype),
        LIKE((*lead, width), dtype),
        LIKE((batch, queries, selected), jnp.int32),
        *([LIKE((batch, keys // PAGE), jnp.int32)] if paged else []),
    ]
    program = compile_for_gpu(chip, functools.partial(attend, value_dim=value_dim), *arguments)
    print(f"{chip}, {shape}, {jnp.dtype(dtype)}: {program.temporary_bytes} bytes, {program.kernels}")
    (kernel,) = program.kernels
    assert kernel.architecture == ARCHITECTURES[chip]
    assert kernel.spilled_bytes == kernel.stack_bytes == 0, kernel
    assert kernel.shared_memory_bytes <= SHARED_MEMORY_LIMIT
    tensor = dtype == jnp.bfloat16 and chip != "b200"
    assert kernel.name.startswith("sparse_attention_tensor" if tensor else "sparse_attention_rows")
    # The rows of the selected keys; where few queries are split, the parts of their results, and what merges them.
    parts = re.findall(rf"f32\[(\d+),{batch * queries},{heads},{value_dim}\]", program.text)
    splits = max(map(int, parts), default=1)
    results = 3 * 4 * splits * batch * queries * heads * (value_dim + 1) if splits > 1 else 0
    lines = 4 * batch * queries * (2 * selected + 4 * heads)
    assert program.temporary_bytes <= lines + results + SMALL
    # The heads are not padded, and neither the cache nor its selected rows are made again.
    made = set(
        re.findall(
            rf"\[(?:\d+,)*(?:{keys}|{PAGE}|{selected}),{width}\]\S* (?!parameter\()([\w-]+)\(", program.text
        )
    )
    assert not made - {"bitcast", "get-tuple-element"}, made
    return program


def test_decode_at_a_million_keys_on_tensor_cores() -> None:
    check("h200", DECODE)


def test_decode_of_pages_in_float32() -> None:
    check("h200", SHAPES["decode_2p8t"], jnp.float32, paged=True)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", NAMES)
def test_every_shape(name: str, dtype: Any, chip: str) -> None:
    check(chip, SHAPES[name], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("heads", [3, 12, 24, 48, 96])
def test_decode_of_every_share_of_the_heads(heads: int, chip: str) -> None:
    check(chip, DECODE._replace(heads=heads), paged=True)


@pytest.mark.slow
def test_a_padded_cache_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check("h200", DECODE._replace(width=570))


def select(q: Any, k: Any, weights: Any, positions: Any, *, top_k: int, implementation: str) -> Any:
    return index_select.select(q, k, weights, positions, top_k, implementation=implementation)


def check_selection(chip: str, shape: IndexSelectShape, implementation: str) -> None:
    batch, queries, heads, channels, keys, top_k = shape
    program = compile_for_gpu(
        chip,
        functools.partial(select, top_k=top_k, implementation=implementation),
        LIKE((batch, queries, heads, channels), jnp.bfloat16),
        LIKE((batch, keys, channels), jnp.bfloat16),
        LIKE((batch, queries, heads), jnp.float32),
        LIKE((batch, queries), jnp.int32),
    )
    print(f"{chip}, {shape}, {implementation}: {program.temporary_bytes} bytes, {program.kernels}")
    for kernel in program.kernels:
        assert kernel.architecture == ARCHITECTURES[chip]
        assert kernel.spilled_bytes == kernel.stack_bytes == 0, kernel
        assert kernel.shared_memory_bytes <= SHARED_MEMORY_LIMIT
    assert bool(program.kernels) == (implementation == "gpu")
    # Neither scores of all keys nor a sort of them.
    assert not re.findall(rf"\[{batch},\d+,{keys}\]", program.text)
    together = batch * min(queries, max(1, QUERY_BLOCK // batch))
    if implementation == "gpu":
        # Not where this module begins: the compiler's process imports it before it knows where the compiler is, which
        # Mosaic looks for once.
        from pallas_kernels.index_select import gpu

        # A tile of keys and its scores.
        keys_at_once = gpu.key_tile(batch, together, channels)
        tile = 2 * batch * keys_at_once * channels + 2 * 4 * together * keys_at_once
    else:
        # The products of all heads.
        tile = 2 * 4 * together * heads * KEY_TILE
    ranked = 8 * 2**20 + 4 * together * top_k
    lists = 2 * 4 * batch * queries * top_k + 2 * batch * queries * heads * channels
    assert program.temporary_bytes <= tile + 6 * ranked + 2 * lists + SMALL


def test_selection_at_a_million_keys() -> None:
    check_selection("h200", index_select.SHAPES["decode_2p8t_1m"], "gpu")


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "implementation"), [("h200", "gpu"), ("h200", "xla"), ("b200", "xla")])
@pytest.mark.parametrize("name", SELECTIONS)
def test_selection_at_every_shape(name: str, implementation: str, chip: str) -> None:
    check_selection(chip, index_select.SHAPES[name], implementation)


@pytest.mark.slow
def test_selection_has_no_kernel_for_blackwell() -> None:
    with pytest.raises(NotImplementedError, match="Hopper has and Blackwell has not"):
        check_selection("b200", index_select.SHAPES["decode_2p8t_1m"], "gpu")
