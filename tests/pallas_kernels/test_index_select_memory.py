"""Temporary memory of the portable form on a CPU, beside scores that are all in memory, from the compiled programs."""

import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import index_select

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def temporary_bytes(function: Any, queries: int, keys: int) -> int:
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    arguments = (
        like((1, queries, 32, 128)),
        like((1, keys, 128)),
        like((1, queries, 32)),
        jax.ShapeDtypeStruct((1, queries), jnp.int32),
    )
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def ours(q: Any, k: Any, weights: Any, positions: Any) -> jax.Array:
    return index_select.select(q, k, weights, positions, 2048)


@pytest.mark.parametrize("keys", [131072, pytest.param(1048576, marks=pytest.mark.slow)])
def test_a_block_of_queries_takes_less_than_1_percent(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("bench_index_select")
    everything = temporary_bytes(benchmark.all_in_memory, 128, keys)
    assert everything > 4 * 128 * keys
    assert temporary_bytes(ours, 128, keys) < everything / 100


def test_it_does_not_grow_with_the_keys() -> None:
    assert temporary_bytes(ours, 1, 1048576) == temporary_bytes(ours, 1, 131072) < 2 * 2**20
