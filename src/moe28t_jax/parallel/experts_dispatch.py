"""What one rank does with its tokens: send copies, multiply the rows that arrive, return partial sums, add them up.

Bounds, for n tokens per rank, at most N <= R n in all (fewer where ranks share a few tokens, such as one row's next
one), K experts per token, R ranks with J experts each (the experts of a token are distinct):

- Copies sent: one per token and distinct destination, at most n min(K, R), and at most n to one destination.
- Rows multiplied where all rows stay at their experts' homes: a rank receives at most one copy of each token,
  with at most min(K, J) of its experts, hence N min(K, J).
- Rows multiplied in balance: R n K in all at most, of which a rank's share is at most n K, plus the slack that is
  allowed; a copy carries at least one row, so there are no more copies received than that, and no more than N.

No row is ever dropped. Were a bound wrong, the results of that rank would be NaN, not close to right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe28t_jax.parallel.experts_exchange import Group, fetch_experts, move_rows
from moe28t_jax.parallel.experts_placement import balanced_placement, destinations, repeated_experts
from moe28t_jax.parallel.experts_rows import RowMap, sort_entries, spread, sum_rows, take_entries
from pallas_kernels import mxfp4_matmul

PlacementKind = Literal["home", "balanced"]

HOME_ROWS = 4096
"""Up to this many rows in the worst case, all rows stay at home: moving expert weights costs more than empty rows."""

SLACK = 1 / 8
"""By which part of its share a rank may exceed it before experts are repeated. Exact shares (0) would repeat an expert
on most ranks even for uniform routing: half as many bytes again as the tokens of a prefill chunk of 8,192."""


REPEATS = "moe_repeated_experts"
"""The scope of what is done only where some rank repeats an expert."""


@dataclass(frozen=True)
class Bounds:
    """Static sizes on one rank. copies: sent. received: copies received. rows: rows multiplied. experts_per_copy: most
    experts of one copy. experts: how many a rank may multiply with, its own and those that it repeats."""

    copies: int
    received: int
    rows: int
    experts_per_copy: int
    experts: int


def choose_placement(total: int, top_k: int, ranks: int, num_experts: int) -> PlacementKind:
    """ "home" where its worst case is small (decoding), "balanced" for prefill and training; `total`: tokens of all
    ranks together."""
    worst = total * min(top_k, num_experts // ranks)
    return "home" if ranks == 1 or worst <= HOME_ROWS else "balanced"


def slack_rows(tokens: int, top_k: int, slack: float) -> int:
    """Rows that a rank may hold beyond its share; `tokens` per rank."""
    return int(tokens * top_k * slack)


def bounds(
    tokens: int,
    top_k: int,
    ranks: int,
    num_experts: int,
    placement: PlacementKind,
    slack: float = 0.0,
    total: int | None = None,
) -> Bounds:
    """See the module's docstring for their derivation; `tokens` per rank, `total` of all ranks (None: as many each)."""
    per_rank = num_experts // ranks
    total = ranks * tokens if total is None else total
    copies = tokens * min(top_k, ranks)
    if placement == "home":
        each = min(top_k, per_rank)
        return Bounds(copies, total, total * each, each, per_rank)
    each = min(top_k, 2 * per_rank)
    rows = min(tokens * top_k + slack_rows(tokens, top_k, slack), total * each)
    return Bounds(copies, min(total, rows), rows, each, 2 * per_rank)


@dataclass(frozen=True)
class Settings:
    """What a rank's program is specialised for: the experts of the whole model, the tokens of all ranks together, the
    activation, where rows go (`slack` as `SLACK`), the kernel."""

    num_experts: int
    total: int
    activation: tuple[Any, ...]
    placement: PlacementKind
    slack: float
    implementation: str | None


def run_rank(
    x_nL: Float[Array, "n L"],
    chosen_nK: Int[Array, "n K"],
    weights_nK: Float[Array, "n K"],
    valid_n: Bool[Array, " n"],
    experts: Mapping[str, Any],
    layer: Int[Array, ""] | None,
    group: Group,
    settings: Settings,
    meanwhile: Any = None,
) -> tuple[Float[Array, "n L"], Any]:
    """sum_k weight_k Expert_k(x) of this rank's tokens, accumulated in float32 (float64), and `meanwhile`; inside
    `jax.shard_map`.

    experts: this rank's part of `gate`, `up` and `down`. A token that is not valid goes nowhere and gives 0.
    meanwhile: a tree that the compiler has to have computed before the experts begin, which is while tokens travel.
    """
    tokens, top_k = chosen_nK.shape
    ranks = group.ranks
    limits = bounds(
        tokens, top_k, ranks, settings.num_experts, settings.placement, settings.slack, settings.total
    )
    wide = weights_nK.dtype
    with jax.named_scope("moe_plan"):
        rank_nK, slot_nK, repeats = _place(chosen_nK, valid_n, group, settings)
        earlier_KK = jnp.tril(jnp.ones((top_k, top_k), bool), -1)
        known_nK = jnp.any((rank_nK[:, :, None] == rank_nK[:, None, :]) & earlier_KK, axis=2)
        copies = sort_entries(jnp.where(known_nK, ranks, rank_nK), ranks, limits.copies)
        sizes_RR = lax.all_gather(copies.sizes_G, group.axes)
        slots_AS, weights_AS = _experts_of_copies(rank_nK, slot_nK, weights_nK, copies.rows, ranks, limits)
        # Numbers of experts are small, hence exact as floats, and travel with the weights; 0 is no expert.
        metadata_AS = jnp.concatenate([(slots_AS + 1).astype(wide), weights_AS], axis=1)
    with jax.named_scope("moe_dispatch"):
        received_CL = move_rows(spread(x_nL, copies.rows), sizes_RR, limits.received, group)
        metadata_CS = move_rows(metadata_AS, sizes_RR, limits.received, group)
        received_CL, metadata_CS, meanwhile = lax.optimization_barrier((received_CL, metadata_CS, meanwhile))
    with jax.named_scope("moe_sort"):
        slots_CS = lax.stop_gradient(metadata_CS[:, : limits.experts_per_copy]).astype(jnp.int32) - 1
        weights_CS = metadata_CS[:, limits.experts_per_copy :]
        sorted_rows = sort_entries(
            jnp.where(slots_CS < 0, limits.experts, slots_CS), limits.experts, limits.rows
        )
        rows_ML = spread(received_CL, sorted_rows.rows)
    with jax.named_scope("moe_experts"):
        rows_ML = _multiply(rows_ML, sorted_rows.sizes_G, experts, repeats, layer, group, settings)
    with jax.named_scope("moe_combine"):
        weights_M = take_entries(weights_CS, sorted_rows.rows)
        partial_CL = sum_rows(rows_ML.astype(wide) * weights_M[:, None], sorted_rows.rows, wide)
        arrived = jnp.sum(sizes_RR[:, lax.axis_index(group.axes)], dtype=jnp.int32)
        fits = sorted_rows.fits & (arrived <= limits.received)
        partial_CL = jnp.where(fits, partial_CL, jnp.nan).astype(x_nL.dtype)
        returned_AL = move_rows(partial_CL, sizes_RR.T, limits.copies, group)
        y_nL = sum_rows(returned_AL, copies.rows, wide)
        return jnp.where(fits & copies.fits, y_nL, jnp.nan).astype(x_nL.dtype), meanwhile


def _place(
    chosen_nK: Array, valid_n: Array, group: Group, settings: Settings
) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Each row's rank (R for none) and which of that rank's experts it meets there; whose experts each rank repeats
    and which of them, None where rows are multiplied at home."""
    per_rank = settings.num_experts // group.ranks
    home_nK = jnp.where(valid_n[:, None], chosen_nK // per_rank, group.ranks).astype(jnp.int32)
    slot_nK = (chosen_nK % per_rank).astype(jnp.int32)
    if settings.placement == "home":
        return home_nK, slot_nK, None
    expert_E = jnp.arange(settings.num_experts, dtype=jnp.int32)
    chosen_nE = jnp.any(chosen_nK[:, :, None] == expert_E, axis=1) & valid_n[:, None]
    up_to_nE = jnp.cumsum(chosen_nE, axis=0, dtype=jnp.int32)
    load_RE = lax.all_gather(up_to_nE[-1], group.axes)
    load_E = jnp.sum(load_RE, axis=0, dtype=jnp.int32)
    before_RE = jnp.cumsum(load_RE, axis=0, dtype=jnp.int32) - load_RE
    before_E = before_RE[lax.axis_index(group.axes)]
    index_nK = before_E[chosen_nK] + jnp.take_along_axis(up_to_nE, chosen_nK, axis=1) - 1
    tokens, top_k = chosen_nK.shape
    slack = slack_rows(tokens, top_k, settings.slack)
    placement = balanced_placement(load_E, group.ranks, slack)
    rank_nK = destinations(placement, chosen_nK.astype(jnp.int32), index_nK)
    rank_nK = jnp.where(valid_n[:, None], rank_nK, group.ranks)
    slot_nK = jnp.where(rank_nK == home_nK, slot_nK, slot_nK + per_rank)
    return rank_nK, slot_nK, (placement.donor_R, repeated_experts(placement, load_E))


def _experts_of_copies(
    rank_nK: Array, slot_nK: Array, weights_nK: Array, copies: RowMap, ranks: int, limits: Bounds
) -> tuple[Array, Array]:
    """Which of its destination's experts each copy meets, -1 after the last, and their weights (0)."""
    top_k = rank_nK.shape[1]
    last = rank_nK.shape[0] - 1
    token_A = jnp.minimum(copies.entry_M // top_k, last)
    real_A = copies.entry_M < rank_nK.size
    rank_A = jnp.where(real_A, rank_nK.reshape(-1)[jnp.minimum(copies.entry_M, rank_nK.size - 1)], -1)
    meets_AK = rank_nK[token_A] == rank_A[:, None]
    # Packed to the front by sums of which one term is not zero, as are their gradients; those of plain gathers would
    # scatter.
    ordinal_AK = jnp.cumsum(meets_AK, axis=1, dtype=jnp.int32) - 1
    entry_S = jnp.arange(limits.experts_per_copy, dtype=jnp.int32)
    packs_AKS = meets_AK[:, :, None] & (ordinal_AK[:, :, None] == entry_S)

    def pack(values_AK: Array) -> Array:
        values_AKS = jnp.where(packs_AKS, values_AK[:, :, None], jnp.zeros((), values_AK.dtype))
        return jnp.sum(values_AKS, axis=1, dtype=values_AK.dtype)

    return pack(slot_nK[token_A] + 1) - 1, pack(spread(weights_nK, copies))


def _multiply(
    rows_ML: Array,
    sizes_G: Array,
    experts: Mapping[str, Any],
    repeats: tuple[Array, Array] | None,
    layer: Array | None,
    group: Group,
    settings: Settings,
) -> Array:
    """Rows through their experts: first those of the rank's own, then those of the experts that it repeats."""

    def run(rows_ML: Array, sizes_J: Array, weights: Mapping[str, Any], layer: Array | None) -> Array:
        hidden_MF = mxfp4_matmul.grouped_glu(
            rows_ML, weights["gate"], weights["up"], sizes_J, activation=settings.activation, layer=layer,
            implementation=settings.implementation,
        )  # fmt: skip
        return mxfp4_matmul.grouped_matmul(
            hidden_MF, weights["down"], sizes_J, layer=layer, implementation=settings.implementation
        )

    if repeats is None:
        return run(rows_ML, sizes_G, experts, layer)
    count, width = rows_ML.shape
    own = sizes_G.shape[0] // 2
    donor_R, needed_RJ = repeats
    packed = any(isinstance(weights, mxfp4_matmul.MXFP4Tensor) for weights in experts.values())
    own_ML = run(rows_ML, sizes_G[:own], experts, layer)

    def with_repeated(own_ML: Array) -> Array:
        repeated = fetch_experts(dict(experts), layer, donor_R, needed_RJ, group, not packed)
        start = jnp.sum(sizes_G[:own], dtype=jnp.int32)
        nothing_ML = jnp.zeros_like(rows_ML)
        zero = jnp.zeros((), jnp.int32)
        # Both products begin at their first row and give 0 behind their last.
        moved_ML = lax.dynamic_slice(jnp.concatenate([rows_ML, nothing_ML]), (start, zero), (count, width))
        moved_ML = run(moved_ML, sizes_G[own:], repeated, None)
        back_ML = lax.dynamic_slice(
            jnp.concatenate([nothing_ML, moved_ML]), (count - start, zero), (count, width)
        )
        return own_ML + back_ML

    if not packed:
        # The backward pass needs the repeated experts, whether there are any or not.
        return with_repeated(own_ML)
    # The same on every device, so that all of them meet in the exchange or none does.
    some = group.most(jnp.any(needed_RJ).astype(jnp.int32))
    with jax.named_scope(REPEATS):
        return lax.cond(some > 0, with_repeated, lambda own_ML: own_ML, own_ML)
