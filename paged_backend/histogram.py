"""How often values fell into which range; what Prometheus calls a histogram, without Prometheus."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Self


@dataclasses.dataclass(slots=True)
class Histogram:
    """Counts of values: `counts[i]` is how many were at most `bounds[i]` and more than the bound before; the last count
    is of those above all bounds."""

    bounds: tuple[float, ...]
    """Ascending."""
    counts: list[int] = dataclasses.field(default_factory=list)
    total: float = 0.0
    """The sum of all values."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Self:
        return dataclasses.replace(self, counts=list(self.counts))

    def __add__(self, other: Self) -> Self:
        """All values of both, which have the same bounds."""
        assert self.bounds == other.bounds
        counts = [ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)]
        return dataclasses.replace(self, counts=counts, total=self.total + other.total)
