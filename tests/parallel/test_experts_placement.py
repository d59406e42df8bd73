"""The balanced placement, against its promises and against a plain construction of it in numpy."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe28t_jax.parallel.experts_dispatch import bounds, choose_placement
from moe28t_jax.parallel.experts_placement import balanced_placement, destinations, repeated_experts

RANKS, PER_RANK = 8, 3
EXPERTS = RANKS * PER_RANK
MOST = 40
"""Rows of the fullest expert in the examples."""


@functools.partial(jax.jit, static_argnames="ranks")
def _plan(load_E: Any, ranks: int, expert_M: Any, index_M: Any, slack: Any = 0) -> Any:
    placement = balanced_placement(load_E, ranks, slack)
    rank_M1 = destinations(placement, expert_M[:, None], index_M[:, None])
    return placement, repeated_experts(placement, load_E), rank_M1[:, 0]


def plan(
    load: np.ndarray, ranks: int = RANKS, most: int = MOST, slack: int = 0
) -> tuple[Any, np.ndarray, np.ndarray]:
    """The placement, the repeated experts [R, J], and [E, R]: how many rows of each expert each rank multiplies."""
    expert = np.repeat(np.arange(load.size, dtype=np.int32), most)
    index = np.tile(np.arange(most, dtype=np.int32), load.size)
    placement, repeated, rank = _plan(jnp.asarray(load, jnp.int32), ranks, expert, index, jnp.int32(slack))
    real = index < load[expert]
    rows = np.zeros((load.size, ranks), int)
    np.add.at(rows, (expert[real], np.asarray(rank)[real]), 1)
    return placement, np.asarray(repeated), rows


def check(load: np.ndarray, ranks: int = RANKS, most: int = MOST, slack: int = 0) -> np.ndarray:
    per_rank = load.size // ranks
    placement, repeated, rows = plan(load, ranks, most, slack)
    total = int(load.sum())
    share = total // ranks + (np.arange(ranks) < total % ranks)
    np.testing.assert_array_equal(rows.sum(1), load)
    if slack:
        assert (rows.sum(0) - share).max() <= slack
    else:
        np.testing.assert_array_equal(rows.sum(0), share)
    homes = np.arange(load.size) // per_rank
    for rank in range(ranks):
        away = np.flatnonzero((rows[:, rank] > 0) & (homes != rank))
        assert set(homes[away]) <= {int(placement.donor_R[rank])}, "rows away from home come from one home"
        np.testing.assert_array_equal(np.flatnonzero(repeated[rank]), away % per_rank)
    return repeated


@given(st.lists(st.integers(0, MOST), min_size=EXPERTS, max_size=EXPERTS))
@example([MOST] + [0] * (EXPERTS - 1))
@example([0] * (EXPERTS - 1) + [1])
@example([0] * EXPERTS)
@example([MOST] * PER_RANK + [0] * (EXPERTS - PER_RANK))
@example([7] * EXPERTS)
def test_every_rank_multiplies_its_share(load: list[int]) -> None:
    check(np.array(load))


@given(st.lists(st.integers(0, MOST), min_size=EXPERTS, max_size=EXPERTS), st.integers(1, 30))
def test_no_rank_exceeds_its_share_by_more_than_the_slack(load: list[int], slack: int) -> None:
    loads = np.array(load)
    repeated = check(loads, slack=slack)
    if (loads.reshape(RANKS, -1).sum(1) - loads.sum() / RANKS).max() <= slack - 1:
        assert not repeated.any()


def test_nothing_moves_when_loads_are_even() -> None:
    assert not check(np.full(EXPERTS, 11)).any()


def test_few_experts_are_repeated() -> None:
    """As many as the public description reports of its greedy plan for 64 experts on 8 ranks."""
    random = np.random.default_rng(0)
    rows = 8 * 128
    even = random.multinomial(rows, np.full(64, 1 / 64))
    zipf = random.multinomial(rows, (p := np.arange(1, 65) ** -1.2) / p.sum())
    assert check(even, 8, rows).sum(1).max() <= 2
    assert check(zipf, 8, rows).sum(1).max() <= 3
    # One rank's experts have no rows at all, the others all the same: nothing does with less than this.
    emptied = np.repeat([0] + [56] * 7, 8)
    assert check(emptied, 8, rows).sum(1).max() <= 7


@pytest.mark.parametrize("placement", ["home", "balanced"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "ranks", "experts"), [(3, 4, 8, 16), (5, 2, 4, 32), (1, 16, 64, 896)]
)
def test_bounds_hold_whatever_is_chosen(
    tokens: int, top_k: int, ranks: int, experts: int, placement: Any
) -> None:
    limits = bounds(tokens, top_k, ranks, experts, placement)
    per_rank = experts // ranks
    random = np.random.default_rng(tokens)
    for skew in (0.0, 0.3, 30.0):
        scores = random.gumbel(size=(ranks * tokens, experts)) - skew * np.arange(experts)
        chosen = np.argsort(-scores, axis=1)[:, :top_k]
        if placement == "balanced":
            load = np.bincount(chosen.reshape(-1), minlength=experts)
            order = np.argsort(np.argsort(chosen.reshape(-1), kind="stable"), kind="stable")
            index = (order - (np.cumsum(load) - load)[chosen.reshape(-1)]).astype(np.int32)
            _, _, rank = _plan(
                jnp.asarray(load, jnp.int32), ranks, chosen.reshape(-1).astype(np.int32), index
            )
            rank = np.asarray(rank).reshape(chosen.shape)
        else:
            rank = chosen // per_rank
        goes = np.stack([(rank == r).any(1) for r in range(ranks)], axis=1)
        assert goes.reshape(ranks, tokens, ranks).sum(1).max() <= tokens
        assert goes.reshape(ranks, tokens * ranks).sum(1).max() <= limits.copies
        assert goes.sum(0).max() <= limits.received
        assert np.bincount(rank.reshape(-1), minlength=ranks).max() <= limits.rows
        if placement == "balanced":
            assert np.bincount(rank.reshape(-1), minlength=ranks).max() == limits.rows == tokens * top_k
        elif skew == 30.0 and per_rank <= top_k:
            assert np.bincount(rank.reshape(-1), minlength=ranks).max() == limits.rows, "the bound is reached"


def test_decoding_keeps_rows_at_home_and_prefill_balances_them() -> None:
    assert choose_placement(64, 16, 64, 896) == "home"
    assert choose_placement(8192, 16, 64, 896) == "balanced"
    assert choose_placement(8192, 16, 1, 896) == "home"


def test_few_tokens_that_all_ranks_hold_take_little_room() -> None:
    """One row's next token on 64 devices: each receives it at most once, with at most its 14 experts."""
    limits = bounds(1, 16, 64, 896, "home", total=1)
    assert (limits.copies, limits.received, limits.rows) == (16, 1, 14)


@pytest.mark.slow
def test_empty_places_on_devices_that_hold_no_expert(
    run_on_devices: Callable[..., Any], tmp_path: Path
) -> None:
    """A stream and Orbax fill only what there is; what is saved from them has no empty places."""
    found = run_on_devices(8, "places_worker.py:through_every_store", folder=str(tmp_path))
    assert len(found) == 5 and all(found.values()), found
