"""Values in buckets of one width on a logarithmic scale: quantiles of any number of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

STEP = 0.005
"""Relative width of a bucket: a quantile is right to half of it."""
_WIDTH = math.log1p(STEP)


class Distribution:
    """Counts of positive values; zeros are counted apart. Memory grows with their spread alone."""

    __slots__ = ("_buckets", "count", "largest", "smallest", "sum", "zeros")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = self.zeros = 0
        self.sum = 0.0
        self.smallest: float | None = None
        self.largest: float | None = None

    def add(self, value: float) -> None:
        """Count one value; ValueError for a negative one."""
        if value < 0:
            raise ValueError(f"{value} is negative")
        self.count += 1
        self.sum += value
        if self.smallest is None or value < self.smallest:
            self.smallest = value
        if self.largest is None or value > self.largest:
            self.largest = value
        if value > 0:
            self._buckets[math.floor(math.log(value) / _WIDTH)] += 1
        else:
            self.zeros += 1

    @property
    def mean(self) -> float | None:
        """The mean, exact; None when there is no value."""
        return self.sum / self.count if self.count else None

    @property
    def median(self) -> float | None:
        """The value below which half of them lie; None when there is none."""
        return self.quantile(0.5)

    def quantile(self, share: float) -> float | None:
        """The nearest-rank quantile, right to half a bucket; None when there is no value."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count))
        if rank <= self.zeros:
            return 0.0
        for upper, below in self._upward():
            if below >= rank:
                return upper
        raise AssertionError("the buckets hold every value")

    def steps(self) -> list[tuple[float, float]]:
        """Value and share of the values up to it, rising: the points of an ECDF."""
        start = [(0.0, self.zeros / self.count)] if self.zeros else []
        return start + [(value, below / self.count) for value, below in self._upward()]

    def _upward(self) -> Iterator[tuple[float, int]]:
        """The middle of each bucket, held to what was seen, and the values up to its end."""
        below = self.zeros
        assert self.smallest is not None
        assert self.largest is not None
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            middle = math.exp((bucket + 0.5) * _WIDTH)
            yield min(max(middle, self.smallest), self.largest), below
