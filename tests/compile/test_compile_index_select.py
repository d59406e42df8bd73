"""Index selection for TPU compiles for every chip to a program of the same size at any length, without scores in memory
or a sort."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.index_select import SHAPES, IndexSelectShape, QuantizedKeys, tpu, xla
from tests.compile.topologies import CHIPS, compile_for_tpu, temporary_bytes

PAGE = 64
LANES = 128
SMALL = 2**20
"""Bytes for what surrounds a kernel: lengths, page tables."""

MOST_INSTRUCTIONS = 200
"""Of a program around the kernel, in fusions and computations too: 37 to 77 in the quick tests for v5p and v6e, 131,072
keys or a million."""

PREFILL = IndexSelectShape(1, 64, 32, 128, 131072, 2048)
LONG_PREFILL = PREFILL._replace(keys=1048576)
SPECULATIVE = IndexSelectShape(3, 4, 32, 128, 131072, 2048)
NARROW_HEADS = IndexSelectShape(2, 40, 12, 64, 9008, 100)
LARGEST_TOP_K = IndexSelectShape(1, 32, 32, 128, 131072, 8192)

KEY_TYPES = {
    "float32": jnp.float32,
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
    "fp8": "fp8",
    "fp4": "fp4",
}
"""Beside bfloat16."""


def arguments(shape: IndexSelectShape, key_dtype: Any, paged: bool) -> tuple[Any, ...]:
    """`key_dtype` is a dtype, or "fp8" or "fp4"."""
    like = jax.ShapeDtypeStruct
    query_dtype = jnp.float32 if key_dtype == jnp.float32 else jnp.bfloat16
    page = LANES if key_dtype == "fp4" else PAGE
    pages = shape.keys // page
    keys = (shape.batch * pages, page) if paged else (shape.batch, shape.keys)
    if key_dtype == "fp8":
        k: Any = QuantizedKeys(like((*keys, shape.channels), jnp.float8_e4m3fn), like(keys, jnp.uint8))
    elif key_dtype == "fp4":
        codes, scales = (like((*keys, shape.channels // part), jnp.uint8) for part in (2, 32))
        k = QuantizedKeys(codes, scales)
    else:
        k = like((*keys, shape.channels), key_dtype)
    return (
        like((shape.batch, shape.queries, shape.heads, shape.channels), query_dtype),
        k,
        like((shape.batch, shape.queries, shape.heads), jnp.float32),
        like((shape.batch, shape.queries), jnp.int32),
        *([like((shape.batch, pages), jnp.int32)] if paged else []),
    )


def ranking_operations(compiled: jax.stages.Compiled) -> set[str]:
    """Sorts and top-k operations outside of the kernel."""
    text = compiled.as_text()
    assert text is not None
    return set(re.findall(r"(?i)\b(sort|top-?k|partial-?reduce)\b[\w.-]*\(", text)) | set(
        re.findall(r'(?i)custom_call_target="([^"]*(?:topk|sort|partialreduce)[^"]*)"', text)
    )


def check(chip: str, shape: IndexSelectShape, key_dtype: Any = jnp.bfloat16, paged: bool = False) -> None:
    def function(q: Any, k: Any, weights: Any, positions: Any, table: Any = None) -> Any:
        return tpu.select(q, k, weights, positions, shape.top_k, table)

    inputs = arguments(shape, key_dtype, paged)
    compiled = compile_for_tpu(chip, function, *inputs)
    text = compiled.as_text()
    assert text is not None
    instructions = text.count(" = ")
    keys = (
        f"{key_dtype if isinstance(key_dtype, str) else jnp.dtype(key_dtype)}{' in pages' if paged else ''}"
    )
    print(f"{chip}, {shape}, {keys}: {instructions} instructions, {temporary_bytes(compiled)} bytes")
    # What the compiler has to do, whatever the length.
    assert instructions < MOST_INSTRUCTIONS
    # The queries in whole blocks, heads first, and their weights and positions in 128 lanes each.
    block = min(tpu.QUERY_BLOCK, -(-shape.queries // 8) * 8)
    queries = shape.batch * -(-shape.queries // block) * block
    allowed = queries * (shape.heads * 128 * inputs[0].dtype.itemsize + 2 * 512) + SMALL
    if shape.queries % block or shape.top_k % 128:
        # The result before the padding is cut off, once more on the way.
        allowed += 2 * 4 * queries * -(-shape.top_k // 128) * 128
    scores = 4 * shape.batch * shape.queries * shape.keys
    # An array of all scores would be noticed.
    assert allowed < scores or shape.keys < 131072
    if key_dtype == "fp8":
        # The scales: a byte per key in a word of its own, as given and by rounds. A ninth of the cache or less.
        allowed += 3 * 4 * shape.batch * shape.keys
    if shape.channels % 128:
        # The compiler keeps narrow keys in another layout than the kernel reads.
        allowed += shape.batch * shape.keys * 128 * inputs[1].dtype.itemsize
    assert temporary_bytes(compiled) <= allowed
    assert "tpu_custom_call" in text
    assert not ranking_operations(compiled)


@pytest.mark.parametrize(
    ("chip", "shape", "key_dtype", "paged"),
    [
        ("v5p", PREFILL, jnp.bfloat16, False),
        ("v5p", LONG_PREFILL, jnp.bfloat16, True),
        ("v5p", SHAPES["decode_2p8t_1m"], "fp8", True),
        ("v6e", PREFILL, jnp.bfloat16, True),
        ("v6e", SHAPES["decode_2p8t_1m"], "fp4", True),
        ("v6e", LONG_PREFILL, "fp8", False),
        ("tpu7x", PREFILL, "fp4", False),
        ("tpu7x", LONG_PREFILL, jnp.bfloat16, False),
        ("tpu7x", SHAPES["decode_2p8t_1m"], jnp.bfloat16, True),
    ],
)
def test_keys_of_128k_and_1m(chip: str, shape: IndexSelectShape, key_dtype: Any, paged: bool) -> None:
    check(chip, shape, key_dtype, paged=paged)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("name", "paged"),
    [("prefill_2p8t", False), ("prefill_2p8t_1m", True), ("decode_2p8t", True), ("decode_2p8t_1m", False)],
)
def test_every_shape(name: str, paged: bool, chip: str) -> None:
    """The quick tests have pages where these have none, and the other way round."""
    check(chip, SHAPES[name], paged=paged)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("shape", "paged"),
    [(PREFILL, False), (SPECULATIVE, True), (SHAPES["decode_2p8t"], False)],
    ids=["prefill", "speculative", "decode"],
)
@pytest.mark.parametrize("name", KEY_TYPES)
def test_every_key_type(name: str, shape: IndexSelectShape, paged: bool, chip: str) -> None:
    check(chip, shape, KEY_TYPES[name], paged=paged)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", [NARROW_HEADS, LARGEST_TOP_K], ids=["narrow_heads", "largest_top_k"])
def test_unusual_sizes(shape: IndexSelectShape, chip: str) -> None:
    check(chip, shape)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_keys_of_1m_sharded_over_four_devices(chip: str) -> None:
    """Candidates are exchanged, not keys: nothing as large as the scores, and still no sort."""
    topology = topologies.get_topology_desc(CHIPS[chip], "tpu")
    mesh = Mesh(np.array(topology.devices[:4]), ("context",), axis_types=(AxisType.Auto,))
    shape = PREFILL._replace(keys=1048576)

    def function(q: Any, k: Any, weights: Any, positions: Any) -> Any:
        return tpu.select(q, k, weights, positions, shape.top_k, axis_name="context")

    specs = (PartitionSpec(), PartitionSpec(None, "context"), PartitionSpec(), PartitionSpec())
    placed = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(arguments(shape, jnp.bfloat16, False), specs, strict=True)
    ]
    sharded = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    compiled = sharded.lower(*placed).compile()
    # Ranks and indices of the candidates, before and after the exchange, and the queries rearranged.
    candidates = 4 * shape.batch * shape.queries * shape.top_k
    queries = 2 * shape.batch * shape.queries * shape.heads * shape.channels
    assert temporary_bytes(compiled) <= 6 * candidates + queries + SMALL
    assert not ranking_operations(compiled)


@pytest.mark.slow
def test_a_sort_is_noticed() -> None:
    shape = IndexSelectShape(1, 8, 4, 128, 512, 16)
    compiled = compile_for_tpu(
        "v6e", lambda *a: xla.select(*a, shape.top_k), *arguments(shape, jnp.bfloat16, False)
    )
    assert ranking_operations(compiled)
