"""Sparse attention for TPU compiles for every chip, and neither copies the cache nor gathers rows in HBM."""

import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.sparse_attention import SHAPES, SparseAttentionShape, tpu
from tests.compile.topologies import CHIPS, compile_for_tpu, temporary_bytes

DECODE = SHAPES["decode_2p8t_1m"]
PREFILL = SHAPES["prefill_2p8t_heads_over_8"]._replace(queries=128)
SMALL = 2**20
"""Bytes for what surrounds a kernel: which block of keys is held when."""


def whole_lanes(width: int) -> int:
    """Channels as a TPU stores them. XLA would lay a narrower cache out with its keys in lanes, and copy it."""
    return -(-width // 128) * 128


def padded_bytes(*shape: int, itemsize: int) -> int:
    """Of an array in tiles of 16 x 128, the largest there are."""
    *lead, rows, columns = shape
    size = itemsize * -(-rows // 16) * 16 * -(-columns // 128) * 128
    for axis in lead:
        size *= axis
    return size


def arguments(
    shape: SparseAttentionShape, dtype: Any = jnp.bfloat16, page: int | None = None
) -> tuple[Any, ...]:
    batch, queries, heads, width, _, keys, selected = shape
    like, width = jax.ShapeDtypeStruct, whole_lanes(shape.width)
    q, indices = like((batch, queries, heads, width), dtype), like((batch, queries, selected), jnp.int32)
    if page is None:
        return q, like((batch, keys, width), dtype), indices
    pages = keys // page
    return q, like((batch * pages, page, width), dtype), indices, like((batch, pages), jnp.int32)


def allowed_bytes(shape: SparseAttentionShape) -> int:
    """q and o with their heads before their queries, the indices in two kinds of memory, and the bits in chunks."""
    batch, queries, selected = shape.batch, shape.queries, shape.selected
    indices = 2 * 4 * batch * queries * (selected + 128)
    return (
        row_bytes(shape) + indices + 2 * min(17 * 2**20, batch * max(queries, 64) * shape.keys // 8) + SMALL
    )


def row_bytes(shape: SparseAttentionShape) -> int:
    """q and o, in float32."""
    lead = (shape.batch, shape.queries, shape.heads)
    return sum(padded_bytes(*lead, channels, itemsize=4) for channels in (shape.width, shape.value_dim))


def check(
    chip: str, shape: SparseAttentionShape, dtype: Any = jnp.bfloat16, page: Any = None, **how: Any
) -> str:
    def attend(q: Any, kv: Any, indices: Any, page_table: Any = None) -> Any:
        return tpu.sparse_attention(q, kv, indices, 192**-0.5, shape.value_dim, page_table, **how)

    q, kv, *rest = arguments(shape, dtype, page)
    start = time.perf_counter()
    compiled = compile_for_tpu(chip, attend, q, kv, *rest)
    print(f"{chip}, {shape}, page {page}: compiled in {time.perf_counter() - start:.1f} s, "
          f"{temporary_bytes(compiled)} bytes")  # fmt: skip
    temporaries = temporary_bytes(compiled)
    assert temporaries <= allowed_bytes(shape)
    cache = kv.size * kv.dtype.itemsize
    gathered = shape.batch * shape.queries * shape.selected * kv.shape[-1] * kv.dtype.itemsize
    text = compiled.as_text()
    assert text is not None
    dimensions = ",".join(map(str, kv.shape))
    remade = set(re.findall(rf"\[{dimensions}\]\S* (?!parameter\()([\w-]+)\(", text)) - {
        "get-tuple-element",
        "bitcast",
    }
    assert not remade, f"the cache is made again in memory by {remade}"
    # Small shapes may fit the bound without meaning to; these do not, beside q and o.
    if shape.queries > 1:
        assert temporaries < row_bytes(shape) + gathered / 16
    assert temporaries < cache
    return text


def check_gradient(chip: str, shape: SparseAttentionShape, dtype: Any = jnp.bfloat16, **how: Any) -> None:
    """The gradient of the cache in float32 and its parts, but no row per query and selected key."""

    def loss(q: Any, kv: Any, indices: Any) -> Any:
        o, logsumexp = tpu.sparse_attention(q, kv, indices, 192**-0.5, shape.value_dim, **how)
        return o.astype(jnp.float32).sum() + logsumexp.sum()

    start = time.perf_counter()
    compiled = compile_for_tpu(chip, jax.grad(loss, argnums=(0, 1)), *arguments(shape, dtype))
    print(f"{chip}, {shape}, gradient: compiled in {time.perf_counter() - start:.1f} s, "
          f"{temporary_bytes(compiled)} bytes")  # fmt: skip
    cache = shape.keys * whole_lanes(shape.width)
    text = compiled.as_text()
    assert text is not None
    if how.get("shared", True):
        assert "sparse_attention_dq" in text and "sparse_attention_dkv" in text
        assert "scatter(" not in text
        # The sum of the cache's gradient, once, and what the queries of one chunk need.
        assert temporary_bytes(compiled) < 4 * cache + 2 * allowed_bytes(shape)
    else:
        assert temporary_bytes(compiled) < 3 * 4 * cache


@pytest.mark.parametrize("chip", CHIPS)
def test_decode_at_a_million_keys(chip: str) -> None:
    assert "sparse_attention_gather" in check(chip, DECODE)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("page", [None, 64])
def test_prefill_of_one_chip_in_eight(page: int | None, chip: str) -> None:
    assert "sparse_attention_shared" in check(chip, PREFILL, page=page)


@pytest.mark.parametrize("chip", CHIPS)
def test_gradient_of_one_chip_in_eight(chip: str) -> None:
    check_gradient(chip, PREFILL)


def test_a_copied_cache_is_noticed() -> None:
    q, _, indices = arguments(DECODE)
    narrow = tuple(
        jax.ShapeDtypeStruct((*x.shape[:-1], DECODE.width), x.dtype) for x in arguments(DECODE)[:2]
    )

    def attend(q: Any, kv: Any, indices: Any) -> Any:
        return tpu.sparse_attention(q, kv, indices, 192**-0.5, DECODE.value_dim)

    del q
    compiled = compile_for_tpu("v6e", attend, *narrow, indices)
    assert temporary_bytes(compiled) >= DECODE.keys * DECODE.width * 2


# The most and the fewest heads on every chip, since they need the most vector memory and fill the least of a tile; the
# shares between them on one chip each.
HEADS = [(96, "v5p"), (96, "v6e"), (96, "tpu7x"), (48, "tpu7x"), (24, "v6e"), (12, "v5p"),
         (3, "v5p"), (3, "v6e"), (3, "tpu7x")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "chip"), HEADS)
@pytest.mark.parametrize("shared", [False, True])
def test_heads(heads: int, chip: str, shared: bool) -> None:
    check(chip, PREFILL._replace(heads=heads), shared=shared)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shared", [False, True])
def test_float32(shared: bool, chip: str) -> None:
    check(chip, PREFILL._replace(heads=96), jnp.float32, shared=shared)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_pages(dtype: Any, chip: str) -> None:
    check(chip, DECODE._replace(batch=4, keys=131072), dtype, page=64)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "tiny"])
def test_every_shape(name: str, chip: str) -> None:
    """`tiny` is for tests that run: it has fewer keys than a cache that is worth not copying."""
    check(chip, SHAPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_prefill_at_a_million_keys(chip: str) -> None:
    """The number of keys changes sizes, and no kernel: one chip fetches, the others share."""
    check(chip, PREFILL._replace(keys=2**20), shared=chip != "v6e")


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_few_selected_keys(chip: str) -> None:
    """Fewer than a register has lanes, and an even number of keys that is no whole tile."""
    check(chip, PREFILL._replace(selected=100, keys=131070))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "keys", "chip"),
    [
        (16, 131072, "v5p"),
        (16, 2**20, "tpu7x"),
        (128, 2**20, "v6e"),
        (128, 131072, "tpu7x"),
        (4096, 131072, "v6e"),
        (4096, 2**20, "v5p"),
    ],
)
def test_shared_pages(page: int, keys: int, chip: str) -> None:
    """Many to a block, few, and several blocks to one."""
    check(chip, PREFILL._replace(keys=keys), page=page, shared=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dtype", "chip"),
    [
        *((96, jnp.bfloat16, chip) for chip in CHIPS),
        (48, jnp.bfloat16, "v6e"),
        (24, jnp.bfloat16, "tpu7x"),
        (3, jnp.bfloat16, "v5p"),
        (96, jnp.float32, "tpu7x"),
        (48, jnp.float32, "v5p"),
        (12, jnp.float32, "v6e"),
        (3, jnp.float32, "v6e"),
    ],
)
def test_gradient(heads: int, dtype: Any, chip: str) -> None:
    """12 heads in bfloat16 on every chip are among the quick tests."""
    check_gradient(chip, PREFILL._replace(heads=heads), dtype, shared=True)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_gradient_of_fetched_rows(chip: str) -> None:
    check_gradient(chip, PREFILL, shared=False)
