"""Which rank multiplies which row of which expert: all at the expert's home, or evenly, with experts repeated.

A row is one (token, expert) pair; ranks are the devices of one group that holds all experts, `E / R` each, in order.
Everything here is a pure function of how many rows each expert has.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


class Placement(NamedTuple):
    """Rows that are multiplied away from home.

    The rows of a home form a line: its experts from the most rows to the fewest, and within an expert the rows in the
    order of their source ranks and tokens. Rank r repeats experts of rank `donor_R[r]`, of whose line it takes the
    `count_R[r]` rows from `start_R[r]` on. first_E: where an expert's rows begin in its home's line.
    """

    donor_R: Int[Array, " R"]
    start_R: Int[Array, " R"]
    count_R: Int[Array, " R"]
    first_E: Int[Array, " E"]


def balanced_placement(load_E: Int[Array, " E"], ranks: int, slack: int | Int[Array, ""] = 0) -> Placement:
    """Give every rank its even share of the rows: floor(total / R), one more for the first total mod R ranks.

    With `slack` a rank may hold that many rows more than its share, and nothing moves where none holds more.

    Repeatedly the rank furthest below its share takes what it lacks from the rank furthest above. That rank has it:
    it lacks at most floor(total / R) + 1 rows, and the other holds at least one more than its own share. Each rank is
    filled once, from one other, so there are at most R - 1 turns; one that was filled holds exactly its share and
    gives nothing away; hence rows away from home come from one home, and at most E / R experts are repeated per rank.

    Source: the public description of MoonEP (theorem 1).
    """
    per_rank = load_E.shape[0] // ranks
    load_RJ = load_E.reshape(ranks, per_rank)
    order_RJ = jnp.argsort(-load_RJ, axis=1, stable=True)
    sorted_RJ = jnp.take_along_axis(load_RJ, order_RJ, axis=1)
    starts_RJ = jnp.cumsum(sorted_RJ, axis=1, dtype=jnp.int32) - sorted_RJ
    first_RJ = jnp.take_along_axis(starts_RJ, jnp.argsort(order_RJ, axis=1), axis=1)
    total = jnp.sum(load_E, dtype=jnp.int32)
    rank_R = jnp.arange(ranks, dtype=jnp.int32)
    share_R = total // ranks + (rank_R < total % ranks).astype(jnp.int32)
    excess_R = jnp.sum(load_RJ, axis=1, dtype=jnp.int32) - share_R

    def fill(state: tuple[Array, ...]) -> tuple[Array, ...]:
        excess_R, given_R, donor_R, start_R, count_R = state
        low, high = (pick(excess_R).astype(jnp.int32) for pick in (jnp.argmin, jnp.argmax))
        lacking = -excess_R[low]
        return (
            excess_R.at[low].set(0).at[high].add(-lacking),
            given_R.at[high].add(lacking),
            donor_R.at[low].set(high),
            start_R.at[low].set(given_R[high]),
            count_R.at[low].set(lacking),
        )

    none_R = jnp.zeros_like(rank_R)
    with jax.named_scope("balanced_placement"):
        _, _, donor_R, start_R, count_R = lax.while_loop(
            lambda state: jnp.any(state[0] > slack), fill, (excess_R, none_R, rank_R, none_R, none_R)
        )
    return Placement(donor_R, start_R, count_R, first_RJ.reshape(-1))


def destinations(
    placement: Placement, expert_NK: Int[Array, "N K"], index_NK: Int[Array, "N K"]
) -> Int[Array, "N K"]:
    """The rank that multiplies row number `index` (over all source ranks) of an expert."""
    ranks = placement.donor_R.shape[0]
    per_rank = placement.first_E.shape[0] // ranks
    home_NK = expert_NK // per_rank
    place_NK1 = (placement.first_E[expert_NK] + index_NK)[..., None]
    takes_NKR = (
        (placement.donor_R == home_NK[..., None])
        & (placement.start_R <= place_NK1)
        & (place_NK1 < placement.start_R + placement.count_R)
    )
    taker_NK = jnp.argmax(takes_NKR, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.any(takes_NKR, axis=-1), taker_NK, home_NK)


def repeated_experts(placement: Placement, load_E: Int[Array, " E"]) -> Bool[Array, "R J"]:
    """Which of its donor's J = E / R experts each rank repeats: those that have rows in what it takes."""
    ranks = placement.donor_R.shape[0]
    first_RJ = placement.first_E.reshape(ranks, -1)[placement.donor_R]
    end_RJ = first_RJ + load_E.reshape(ranks, -1)[placement.donor_R]
    start_R1, count_R1 = placement.start_R[:, None], placement.count_R[:, None]
    return (first_RJ < start_R1 + count_R1) & (end_RJ > start_R1) & (first_RJ < end_RJ) & (count_R1 > 0)
