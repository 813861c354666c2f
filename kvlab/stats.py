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
TEST_LEVEL = 0.05
"""The chance of error of each one-sided test."""

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

    Values must be positive, as times are: with any other there is no ratio, so None.
    Hierarchical bootstrap: repeats are drawn with replacement, then contexts within each, the same
    ones for both arms. Three repeats are few: bootstrap intervals over so few units are too short
    (with three, the plain percentile interval misses a true ratio of 1 about one time in four).
    They are therefore stretched around the value, on the log scale, by
    ``sqrt(n / (n - 1)) x t(n - 1) / z``, n = number of repeats, or of contexts when there is only
    one repeat. A single pair has no interval.
    The random stream is MT19937 as numpy froze it, so a seed gives the same interval everywhere.
    """
    return _ratio(numerator, denominator, seed, CONFIDENCE)


def _ratio(numerator: Arm, denominator: Arm, seed: int, confidence: float) -> Ratio | None:
    pairs = _pairs(numerator, denominator)
    top, bottom = arm_median(numerator), arm_median(denominator)
    units = len(pairs) if len(pairs) > 1 else sum(len(pair[0]) for pair in pairs)
    positive = all(bool((values > 0).all()) for pair in pairs for values in pair)
    if units < 2 or not positive or top is None or bottom is None:
        return None
    value = top / bottom
    low, high = np.quantile(_resample(pairs, seed), [(1 - confidence) / 2, (1 + confidence) / 2])
    widening = _widening(units, confidence)
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


@dataclass(frozen=True, slots=True)
class Equivalence:
    """Whether two arms are as good as equal, by two one-sided tests (TOST) on their ratio."""

    answer: str
    """``equivalent``, ``different`` or ``undecided``."""
    margin: float
    ratio: Ratio
    """With the 95 % interval, which tells a difference."""
    low: float
    """The 90 % interval: both tests at 5 % pass if it lies within the margin."""
    high: float


def equivalence(first: Arm, second: Arm, *, margin: float, seed: int) -> Equivalence | None:
    """Whether the arms differ by less than ``margin`` (0.05: 5 %), surely differ, or neither.

    Equivalent: the 90 % interval of the ratio lies within ``1 / (1 + margin) … 1 + margin``, so on
    the log scale within the same distance on both sides. Different: not equivalent, and the 95 %
    interval excludes 1. Anything else is undecided: "no difference was seen" is no proof that
    there is none. The intervals are those of ``ratio``. None: no pairs.
    """
    found = ratio(first, second, seed=seed)
    narrow = _ratio(first, second, seed, 1 - 2 * TEST_LEVEL)
    if found is None or narrow is None:
        return None
    if 1 / (1 + margin) < narrow.low and narrow.high < 1 + margin:
        answer = "equivalent"
    else:
        answer = "undecided" if found.low <= 1 <= found.high else "different"
    return Equivalence(answer, margin, found, narrow.low, narrow.high)


@dataclass(frozen=True, slots=True)
class NotSlower:
    """Whether the second arm is not slower than the first by more than a margin."""

    answer: str
    """``not slower``, ``slower`` or ``undecided``."""
    margin: float
    ratio: Ratio
    """The second arm's time over the first's, with its 95 % interval."""
    upper: float
    """The one-sided 95 % bound of the ratio, which the test looks at."""


def not_slower(first: Arm, second: Arm, *, margin: float, seed: int) -> NotSlower | None:
    """Whether the second arm takes at most ``margin`` longer than the first; None: no pairs.

    Not slower: the one-sided 95 % bound of the ratio is below ``1 + margin``. Slower: it is not,
    and the whole 95 % interval is above 1.
    """
    found = ratio(second, first, seed=seed)
    narrow = _ratio(second, first, seed, 1 - 2 * TEST_LEVEL)
    if found is None or narrow is None:
        return None
    if narrow.high < 1 + margin:
        answer = "not slower"
    else:
        answer = "slower" if found.low > 1 else "undecided"
    return NotSlower(answer, margin, found, narrow.high)


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


def _widening(units: int, confidence: float = CONFIDENCE) -> float:
    """How much a bootstrap interval over so few units is too short: 2.69 for 3, 1.09 for 16."""
    from scipy.special import ndtri, stdtrit

    level = (1 + confidence) / 2
    spread = math.sqrt(units / (units - 1))
    return float(spread * stdtrit(units - 1, level) / ndtri(level))
