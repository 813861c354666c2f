"""Statistics: medians as defined, intervals that are honest about few repeats."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import stats
from kvlab.stats import Arm

milliseconds = st.floats(min_value=0.1, max_value=1e6)


def arm(
    seed: int, *, repeats: int = 3, contexts: int = 12, ms: float = 700.0, own: float = 0.03
) -> Arm:
    """Times with 5 % noise between requests and ``own`` between starts of the servers."""
    source = np.random.RandomState(seed)
    made = {}
    for repeat in range(1, repeats + 1):
        level = ms * math.exp(source.normal(0, own))
        made[repeat] = {c: level * math.exp(source.normal(0, 0.05)) for c in range(contexts)}
    return made


def test_median() -> None:
    assert stats.median([]) is None
    assert stats.median([3.0, 1.0, 2.0]) == 2.0
    assert stats.median(iter([4.0, 1.0])) == 2.5


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1), (0.01, 1), (0.5, 5), (0.9, 9), (0.91, 10), (0.99, 10), (1.0, 10)]
)
def test_percentiles_are_values_that_were_measured(share: float, value: int) -> None:
    assert stats.percentile([*range(10, 0, -1)], share) == value


def test_no_values_have_no_percentile() -> None:
    assert stats.percentile([], 0.9) is None


def test_the_median_of_repeats_is_not_the_median_of_all_requests() -> None:
    uneven = {1: {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, 2: {0: 5.0}, 3: {0: 7.0}, 4: {}}
    assert stats.repeat_medians(uneven) == [1.0, 5.0, 7.0]
    assert stats.arm_median(uneven) == 5.0
    assert stats.arm_median({}) is None


def test_the_published_speedup() -> None:
    a = {1: {0: 1276.0}, 2: {0: 1279.1}, 3: {0: 1289.0}}
    b = {1: {0: 653.0}, 2: {0: 655.2}, 3: {0: 656.0}}
    found = stats.ratio(a, b, seed=0)
    assert found is not None
    assert round(found.value, 2) == 1.95
    assert 1.9 < found.low <= found.value < found.high < 2.1
    assert "3 repeats" in found.method


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_time_that_is_not_positive_has_no_ratio(value: float) -> None:
    whole = {1: {0: 2.0, 1: 3.0}, 2: {0: 2.5, 1: 3.5}}
    broken = {1: {0: value, 1: 3.0}, 2: {0: 2.5, 1: 3.5}}
    assert stats.ratio(whole, broken, seed=0) is None
    assert stats.ratio(broken, whole, seed=0) is None
    assert stats.ratio(whole, whole, seed=0) is not None


def test_a_ratio_needs_two_pairs() -> None:
    assert stats.ratio({}, {}, seed=0) is None
    assert stats.ratio({1: {0: 1.0}}, {1: {0: 1.0}}, seed=0) is None
    assert stats.ratio({1: {0: 1.0, 1: 1.0}}, {1: {2: 1.0, 3: 1.0}}, seed=0) is None
    assert stats.ratio({1: {0: 1.0, 1: 2.0}}, {2: {0: 1.0, 1: 2.0}}, seed=0) is None
    assert stats.ratio({1: {0: 1.0, 1: 1.0}}, {1: {0: 1.0, 1: 1.0}}, seed=0) is not None


def test_one_repeat_says_so() -> None:
    found = stats.ratio(arm(1, repeats=1), arm(2, repeats=1), seed=0)
    assert found is not None
    assert "there is one repeat" in found.method


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = arm(1), arm(2, ms=100)
    assert stats.ratio(first, second, seed=7) == stats.ratio(first, second, seed=7)
    assert stats.ratio(first, second, seed=7) != stats.ratio(first, second, seed=8)


def test_the_random_stream_is_frozen() -> None:
    found = stats.ratio(
        {1: {0: 10.0, 1: 11.0, 2: 14.0}, 2: {0: 12.0, 1: 12.5, 2: 10.5}},
        {1: {0: 5.0, 1: 6.0, 2: 5.5}, 2: {0: 5.2, 1: 5.1, 2: 7.0}},
        seed=42,
    )
    assert found is not None
    assert found.value == pytest.approx(2.1495327102803738, rel=1e-12)
    assert (found.low, found.high) == pytest.approx(
        (0.1943378026608402, 8.584974672529453), rel=1e-9
    )


def test_no_noise_gives_an_interval_without_width() -> None:
    flat = {r: dict.fromkeys(range(4), 700.0) for r in range(3)}
    half = {r: dict.fromkeys(range(4), 350.0) for r in range(3)}
    found = stats.ratio(flat, half, seed=0)
    assert found is not None
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)


def test_a_control_hardly_ever_sees_a_difference() -> None:
    """120 controls whose starts differ by 3 %: three repeats' plain bootstrap would miss 30."""
    missed = 0
    for seed in range(120):
        found = stats.ratio(arm(2 * seed), arm(2 * seed + 1), seed=seed)
        assert found is not None
        missed += not found.low <= 1 <= found.high
    assert missed <= 6


def test_a_real_gain_is_seen() -> None:
    for seed in range(20):
        found = stats.ratio(arm(seed), arm(seed + 100, ms=350), seed=seed)
        assert found is not None
        assert 1.2 < found.low < 2 < found.high * 1.2


def test_drift_between_starts_is_not_mistaken_for_precision() -> None:
    """Many contexts do not make three starts of the servers more."""
    shaky = stats.ratio(arm(1, own=0.2, contexts=300), arm(2, own=0.2, contexts=300), seed=0)
    steady = stats.ratio(arm(1, own=0.0, contexts=300), arm(2, own=0.0, contexts=300), seed=0)
    assert shaky is not None
    assert steady is not None
    assert shaky.high / shaky.low > 1.2 > steady.high / steady.low


@settings(max_examples=30)
@given(
    st.lists(st.lists(milliseconds, min_size=2, max_size=5), min_size=1, max_size=4),
    st.integers(min_value=-(2**70), max_value=2**70),
)
def test_an_interval_contains_its_value(times: list[list[float]], seed: int) -> None:
    first = {r: dict(enumerate(values)) for r, values in enumerate(times)}
    second = {r: {c: v * 1.5 + 1 for c, v in contexts.items()} for r, contexts in first.items()}
    found = stats.ratio(first, second, seed=seed)
    assert found is not None
    assert 0 < found.low <= found.value <= found.high < math.inf
    assert found.value == pytest.approx(
        statistics.median(stats.repeat_medians(first))
        / statistics.median(stats.repeat_medians(second))
    )
