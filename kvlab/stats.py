"""The statistics of every report: medians, ranges, speedups and their intervals. Pure.

A round's TTFTs are kept by repeat and by context: ``{repeat: {context: value}}``. The statistic of
an arm is the median over its repeats of the median over the contexts of one repeat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Arm = Mapping[int, Mapping[int, float]]
"""Values by repeat, then by the place of the context in the round."""

RESAMPLES = 2000
CONFIDENCE = 0.95

METHOD = (
    "ratio of medians (median over repeats of the median over contexts); 95 % percentile "
    "bootstrap of {resamples} resamples, paired by context and resampled over {repeats} repeats, "
    "then contexts; widened by {widening:.2f} for the small number of {unit}; seed {seed}"
)


def median(values: Iterable[float]) -> float | None:
    """The middle value, or the mean of the middle two; None when there is none."""
    known = list(values)
    return float(statistics.median(known)) if known else None


def percentile(values: Iterable[float], share: float) -> float | None:
    """The nearest-rank percentile, ``ceil(share x n)``: a value that was measured."""
    known = sorted(values)
    if not known:
        return None
    return known[max(1, math.ceil(share * len(known))) - 1]


def repeat_medians(arm: Arm) -> list[float]:
    """The median over the contexts of each repeat that has any, in the order of the repeats."""
    return [statistics.median(arm[repeat].values()) for repeat in sorted(arm) if arm[repeat]]


def arm_median(arm: Arm) -> float | None:
    """The median over repeats of the median over contexts."""
    return median(repeat_medians(arm))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two arms with its 95 % interval, and how they were computed."""

    value: float
    low: float
    high: float
    method: str


def ratio(numerator: Arm, denominator: Arm, *, seed: int) -> Ratio | None:
    """How many times larger the first arm's statistic is, with a 95 % interval; None: no pairs.

    Hierarchical bootstrap: repeats are drawn with replacement, then contexts within each, the same
    ones for both arms. Three repeats are few: bootstrap intervals over so few units are too short
    (with three, the plain percentile interval misses a true ratio of 1 about one time in four).
    They are therefore stretched around the value, on the log scale, by
    ``sqrt(n / (n - 1)) x t(n - 1) / z``, n = number of repeats, or of contexts when there is only
    one repeat. A single pair has no interval.
    The random stream is MT19937 as numpy froze it, so a seed gives the same interval everywhere.
    """
    pairs = _pairs(numerator, denominator)
    top, bottom = arm_median(numerator), arm_median(denominator)
    units = len(pairs) if len(pairs) > 1 else sum(len(pair[0]) for pair in pairs)
    if units < 2 or top is None or bottom is None:
        return None
    value = top / bottom
    low, high = np.quantile(_resample(pairs, seed), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    widening = _widening(units)
    method = METHOD.format(
        resamples=RESAMPLES,
        repeats=len(pairs),
        widening=widening,
        unit="repeats" if len(pairs) > 1 else "contexts, there is one repeat",
        seed=seed,
    )
    return Ratio(
        value=value,
        low=value * min(1.0, float(low) / value) ** widening,
        high=value * max(1.0, float(high) / value) ** widening,
        method=method,
    )


def _pairs(a: Arm, b: Arm) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Both arms' values of the contexts that both have, by repeat."""
    pairs = []
    for repeat in sorted(a.keys() & b.keys()):
        contexts = sorted(a[repeat].keys() & b[repeat].keys())
        if contexts:
            pairs.append(
                (
                    np.array([a[repeat][c] for c in contexts], dtype=np.float64),
                    np.array([b[repeat][c] for c in contexts], dtype=np.float64),
                )
            )
    return pairs


def _resample(
    pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], seed: int
) -> NDArray[np.float64]:
    """The ratio of ``RESAMPLES`` resamples: repeats first, then contexts within each."""
    stream = np.random.RandomState(seed % 2**32)
    drawn = stream.randint(0, len(pairs), size=(RESAMPLES, len(pairs)))
    medians = np.empty((2, *drawn.shape))
    for number, (top, bottom) in enumerate(pairs):
        rows = np.nonzero(drawn == number)
        contexts = stream.randint(0, len(top), size=(len(rows[0]), len(top)))
        medians[0][rows] = np.median(top[contexts], axis=1)
        medians[1][rows] = np.median(bottom[contexts], axis=1)
    ratios: NDArray[np.float64] = np.median(medians[0], axis=1) / np.median(medians[1], axis=1)
    return ratios


def _widening(units: int) -> float:
    """How much a bootstrap interval over so few units is too short: 2.69 for 3, 1.09 for 16."""
    from scipy.special import ndtri, stdtrit

    level = (1 + CONFIDENCE) / 2
    spread = math.sqrt(units / (units - 1))
    return float(spread * stdtrit(units - 1, level) / ndtri(level))
