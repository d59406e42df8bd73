"""Rows by key: counting them gives what a stable sort gives, and both directions of moving them are transposes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.parallel import experts_rows
from moe28t_jax.parallel.experts_rows import RowMap, sort_entries, take_entries

KEYS = 5
RANDOM = np.random.default_rng(3)


def by_stable_sort(key: np.ndarray, num_keys: int, capacity: int) -> tuple[Any, ...]:
    """What `sort_entries` gives, in numpy."""
    flat = key.reshape(-1)
    order = [entry for entry in np.argsort(flat, kind="stable") if flat[entry] < num_keys]
    place = np.full(flat.size, capacity)
    for child, entry in enumerate(order[:capacity]):
        place[entry] = child
    entries = np.full(capacity, flat.size)
    entries[: len(order)] = order[:capacity]
    sizes = [np.sum(flat == number) for number in range(num_keys)]
    return entries, place.reshape(key.shape), sizes, len(order) <= capacity


@pytest.fixture(params=["sorted", "counted"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`sort_entries` compiled, in one of its forms."""
    monkeypatch.setattr(experts_rows, "_SORTED_AT_MOST", {"sorted": 10**6, "counted": 0}[request.param])
    # The limit is read when the function is traced: a new function is traced anew.
    return jax.jit(lambda *arguments: sort_entries(*arguments), static_argnums=(1, 2))


def check(function: Callable[..., Any], key: np.ndarray, num_keys: int, capacity: int) -> None:
    found = function(jnp.asarray(key, jnp.int32), num_keys, capacity)
    entries, place, sizes, fits = by_stable_sort(key, num_keys, capacity)
    np.testing.assert_array_equal(found.rows.entry_M, entries)
    np.testing.assert_array_equal(found.rows.child_CS, place)
    np.testing.assert_array_equal(found.sizes_G, sizes)
    assert bool(found.fits) == fits


def test_the_order_is_that_of_a_stable_sort(form: Callable[..., Any]) -> None:
    keys = RANDOM.integers(0, KEYS + 1, (96, 4))
    for key in (
        keys,
        np.zeros_like(keys),  # all of the first key
        np.full_like(keys, KEYS - 1),  # all of the last
        np.full_like(keys, KEYS),  # no child at all
        np.where(keys < 3, 1, 4),  # empty keys before, between and behind
        np.sort(keys.reshape(-1))[::-1].reshape(keys.shape),  # falling, in blocks of one key
        np.where(np.arange(96)[:, None] < 95, KEYS, keys % KEYS),  # the last block alone
        np.where(np.arange(96)[:, None] == 0, 2, KEYS),  # the first block alone
    ):
        check(form, key, KEYS, 400)  # room for more than there are
        check(form, key, KEYS, 150)  # and for too few of most of them


@pytest.mark.parametrize("shape", [(1, 1), (127, 1), (43, 3)])
def test_entries_off_the_size_of_a_block(form: Callable[..., Any], shape: tuple[int, int]) -> None:
    check(form, RANDOM.integers(0, KEYS + 1, shape), KEYS, shape[0] * shape[1])


@pytest.mark.parametrize("num_keys", [1, 90])
def test_one_key_and_more_starts_than_a_block(form: Callable[..., Any], num_keys: int) -> None:
    check(form, RANDOM.integers(0, num_keys + 1, (90, 3)), num_keys, 250)


def test_large_arrays_are_counted_and_small_ones_sorted() -> None:
    def program(count: int) -> str:
        key = jax.ShapeDtypeStruct((count, 1), jnp.int32)
        return str(jax.make_jaxpr(lambda key: sort_entries(key, KEYS, count))(key))

    assert " sort[" in program(2**14)
    assert " sort[" not in program(2**14 + 1)
    assert "scatter" not in program(2**14 + 1)


def test_entries_are_taken_and_their_gradient_given_back() -> None:
    rows = sort_entries(jnp.asarray([[2, 0], [KEYS, 2], [0, 1]], jnp.int32), KEYS, 4)[0]
    assert rows.entry_M.tolist() == [1, 4, 5, 0]  # the fifth child is lost
    values = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    found, back = jax.vjp(lambda values: take_entries(values, rows), values)
    np.testing.assert_array_equal(found, [2, 5, 6, 1])
    np.testing.assert_array_equal(
        back(jnp.asarray([10.0, 20.0, 30.0, 40.0]))[0], [[40, 10], [0, 0], [20, 30]]
    )
    nothing = RowMap(jnp.full(4, 6, jnp.int32), jnp.full((3, 2), 4, jnp.int32))
    np.testing.assert_array_equal(take_entries(values, nothing), np.zeros(4))
