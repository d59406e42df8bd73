"""Rows by key: counting them gives what a stable sort gives, and both directions of moving them are transposes."""

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


def any_keys(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, KEYS + 1, shape)


# Shapes of keys; around one block, around a block of blocks' starts (5 keys of 26 blocks are 130), one entry.
ADVERSARIAL = {
    "one entry": np.array([[3]]),
    "one that is no child": np.array([[KEYS]]),
    "one block less one": any_keys(127, 1),
    "one block": any_keys(64, 2),
    "one block and one": any_keys(43, 3),
    "all of the first key": np.zeros((100, 4), int),
    "all of the last key": np.full((100, 4), KEYS - 1),
    "no child at all": np.full((100, 4), KEYS),
    "empty keys": np.where(any_keys(100, 4) < 3, 1, 4),
    "falling": np.sort(any_keys(400))[::-1].reshape(100, 4),
    "by block": np.repeat(np.arange(6), 128)[::-1].reshape(-1, 4),
    "more starts than a block": any_keys(26 * 32 + 1, 4),
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("form", ["sorted", "counted"])
def test_the_order_is_that_of_a_stable_sort(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_rows, "_SORTED_AT_MOST", {"sorted": 10**6, "counted": 0}[form])
    key = ADVERSARIAL[name]
    children = int(np.sum(key < KEYS))
    # Room for all entries and more, for exactly the children, and for one child too few.
    for capacity in {key.size + 3, children, children - 1} - {0, -1}:
        found = sort_entries(jnp.asarray(key, jnp.int32), KEYS, capacity)
        entries, place, sizes, fits = by_stable_sort(key, KEYS, capacity)
        np.testing.assert_array_equal(found.rows.entry_M, entries)
        np.testing.assert_array_equal(found.rows.child_CS, place)
        np.testing.assert_array_equal(found.sizes_G, sizes)
        assert bool(found.fits) == fits


def test_a_single_key_and_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_rows, "_SORTED_AT_MOST", 0)
    for num_keys in (1, 300):
        key = RANDOM.integers(0, num_keys + 1, (90, 3))
        found = sort_entries(jnp.asarray(key, jnp.int32), num_keys, 250)
        entries, place, sizes, _ = by_stable_sort(key, num_keys, 250)
        np.testing.assert_array_equal(found.rows.entry_M, entries)
        np.testing.assert_array_equal(found.rows.child_CS, place)
        np.testing.assert_array_equal(found.sizes_G, sizes)


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
