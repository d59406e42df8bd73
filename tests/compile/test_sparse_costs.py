"""Operations and bytes of the TPU kernels of sparse layers, counted in the traced programs, against the closed forms of
what they compute.

Per query and L visible keys of one layer: scoring L (2 H D + 2 H) operations, and the keys once per block of queries;
attention 2 n (C + V) operations and one row per selected key.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.index_select import QuantizedKeys, _tpu_select
from pallas_kernels.index_select import tpu as select_tpu
from pallas_kernels.sparse_attention import tpu as attention_tpu
from tests.compile.kernel_costs import Costs, count_kernels

HEADS, CHANNELS, TOP_K = 32, 128, 2048
KEY_BYTES = {"bfloat16": 256, "fp8": 129, "fp4": 68}
WIDTH, VALUES = 576, 512
like = jax.ShapeDtypeStruct


def keys_like(kind: str, batch: int, keys: int) -> Any:
    lead = (batch, keys)
    if kind == "fp8":
        return QuantizedKeys(like((*lead, CHANNELS), jnp.float8_e4m3fn), like(lead, jnp.uint8))
    if kind == "fp4":
        return QuantizedKeys(*(like((*lead, CHANNELS // part), jnp.uint8) for part in (2, 32)))
    return like((*lead, CHANNELS), jnp.bfloat16)


def selection_ratios(batch: int, queries: int, keys: int, kind: str, monkeypatch: Any) -> Costs:
    """What selecting counts, over the closed forms; every round of keys is scored and merged."""
    rounds = []
    choose = _tpu_select.choose_tiles

    def remember(*sizes: Any) -> Any:
        tiles = choose(*sizes)
        rounds.append(-(-keys // tiles.round))
        return tiles

    monkeypatch.setattr(_tpu_select, "choose_tiles", remember)
    arguments = (
        like((batch, queries, HEADS, CHANNELS), jnp.bfloat16),
        keys_like(kind, batch, keys),
        like((batch, queries, HEADS), jnp.float32),
        like((batch, queries), jnp.int32),
    )

    def select(*arrays: Any) -> Any:
        return select_tpu.select(*arrays, TOP_K)

    select_tpu.select.clear_cache()
    jax.eval_shape(select, *arguments)
    select_tpu.select.clear_cache()
    (costs,) = count_kernels(select, *arguments, trips=rounds[0]).values()
    select_tpu.select.clear_cache()
    operations = batch * queries * keys * (2 * HEADS * CHANNELS + 2 * HEADS)
    moved = batch * -(-queries // select_tpu.QUERY_BLOCK) * keys * KEY_BYTES[kind]
    ratios = Costs(costs.operations / operations, costs.bytes / moved)
    print(f"{batch} x {queries} queries, {keys} {kind} keys: {ratios}")
    return ratios


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "kind"),
    [
        (1, 1024, 131072, "bfloat16"),
        (1, 128, 1048576, "fp8"),
        (64, 1, 131072, "bfloat16"),
        (8, 1, 1048576, "fp8"),
        (8, 1, 131072, "fp4"),
    ],
)
def test_selection(batch: int, queries: int, keys: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = selection_ratios(batch, queries, keys, kind, monkeypatch)
    assert 1 <= ratios.operations <= 1.2 and 1 <= ratios.bytes <= 1.2


def test_selection_for_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging fills one of eight rows, and counts as eight; the bytes, which bound it, are those of the keys."""
    ratios = selection_ratios(1, 1, 1048576, "bfloat16", monkeypatch)
    assert 1 <= ratios.operations <= 2.5 and 1 <= ratios.bytes <= 1.05


def attention_ratios(queries: int, heads: int, keys: int, shared: bool) -> dict[str, Costs]:
    arguments = (
        like((1, queries, heads, 640), jnp.bfloat16),
        like((1, keys, 640), jnp.bfloat16),
        like((1, queries, TOP_K), jnp.int32),
    )

    def attend(*arrays: Any) -> Any:
        return attention_tpu.sparse_attention(*arrays, 0.07, VALUES, shared=shared)

    found = count_kernels(attend, *arguments, trips=TOP_K // attention_tpu._FETCH_BLOCK)
    rows = queries * TOP_K
    ratios = {
        name: Costs(
            costs.operations / (rows * 2 * heads * (WIDTH + VALUES)), costs.bytes / (rows * 2 * WIDTH)
        )
        for name, costs in found.items()
    }
    print(f"{queries} queries, {heads} heads, {keys} keys: {ratios}")
    return ratios


@pytest.mark.parametrize("heads", [96, 12])
def test_attention_by_fetching(heads: int) -> None:
    """The weights' product twice, for its two bfloat16 parts; rows in pairs, for words of 32 bits, and 640 wide."""
    (ratios,) = attention_ratios(1, heads, 1048576, False).values()
    assert ratios.operations == pytest.approx((640 + 2 * VALUES) / (WIDTH + VALUES), rel=0.01)
    assert 2 * 640 / WIDTH <= ratios.bytes <= 2 * 640 / WIDTH + 0.4


def test_attention_by_sharing() -> None:
    """Every key with every query, read once for 64 of them."""
    keys = 131072
    ratios = attention_ratios(128, 12, keys, True)
    walk = ratios["sparse_attention_shared"]
    everything = keys / TOP_K * (640 + 2 * VALUES) / (WIDTH + VALUES)
    assert walk.operations == pytest.approx(everything, rel=0.01)
    assert 1 <= walk.bytes <= 1.2
