"""How layers repeat: the static list of segments that the compiled program scans over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moe28t_jax.config.model_config import ModelConfig


@dataclass(frozen=True)
class Segment:
    """`repeats` runs of `period` consecutive layers, beginning at layer `first` (counted from 0).

    Layers at the same place of every run have the same kind, so that their parameters can be stacked.
    """

    first: int
    period: int
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """Layer number of one place of one run."""
        return self.first + repeat * self.period + position

    @property
    def num_layers(self) -> int:
        return self.period * self.repeats


@lru_cache
def segments(config: ModelConfig, stacked: bool) -> tuple[Segment, ...]:
    """Segments in layer order. Not stacked: one segment per layer.

    Stacked: the longest repeating pattern becomes one segment with `repeats` > 1 and is scanned; what is
    before and after it stays inline. Of equally short programs the one that begins latest is taken, so
    that the pattern ends with its attention layer and blocks of attention residuals begin at one place of the
    period.
    """
    kinds = list(zip(config.attention_kinds, config.mlp_kinds, strict=True))
    count = len(kinds)
    inline = tuple(Segment(layer, 1, 1) for layer in range(count))
    if not stacked:
        return inline
    best: Segment | None = None
    best_cost = count
    for period in range(1, min(16, count // 2) + 1):
        for first in range(count - 2 * period + 1):
            repeats = 1
            while (
                first + (repeats + 1) * period <= count
                and kinds[first + repeats * period : first + (repeats + 1) * period]
                == kinds[first : first + period]
            ):
                repeats += 1
            # Layers that the compiled program contains: the pattern once and everything outside it.
            cost = count - period * (repeats - 1)
            if repeats > 1 and (cost < best_cost or (cost == best_cost and best and period == best.period)):
                best, best_cost = Segment(first, period, repeats), cost
    if best is None:
        return inline
    return (*inline[: best.first], best, *inline[best.first + best.num_layers :])
