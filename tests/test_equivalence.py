"""Two one-sided tests: equal within a margin, different, or undecided, on data of known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import stats
from kvlab.stats import Arm

MARGIN = 0.05


def arm(
    seed: int, *, ms: float = 100.0, noise: float = 0.02, repeats: int = 3, contexts: int = 16
) -> Arm:
    """Times around ``ms``, with noise between requests and a quarter of it between starts."""
    source = np.random.RandomState(seed % 2**32)
    made = {}
    for repeat in range(repeats):
        level = ms * math.exp(source.normal(0, noise / 4))
        made[repeat] = {c: level * math.exp(source.normal(0, noise)) for c in range(contexts)}
    return made


def answer(first: Arm, second: Arm, *, margin: float = MARGIN, seed: int = 0) -> str:
    found = stats.equivalence(first, second, margin=margin, seed=seed)
    assert found is not None
    return found.answer


def test_no_pairs_give_no_answer() -> None:
    assert stats.equivalence({}, {}, margin=MARGIN, seed=0) is None
    assert stats.not_slower({1: {0: 1.0}}, {1: {0: 1.0}}, margin=MARGIN, seed=0) is None


def test_equal_arms_without_noise_are_equivalent() -> None:
    flat = {r: dict.fromkeys(range(4), 100.0) for r in range(3)}
    found = stats.equivalence(flat, flat, margin=MARGIN, seed=0)
    assert found is not None
    assert found.answer == "equivalent"
    assert (found.low, found.ratio.value, found.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("ms", "noise", "expected"),
    [
        (100.0, 0.01, "equivalent"),
        (101.0, 0.01, "equivalent"),  # a difference, but too small to matter
        (130.0, 0.01, "different"),
        (75.0, 0.01, "different"),
        (103.0, 0.2, "undecided"),  # noise: "not seen" is no proof of "not there"
    ],
)
def test_the_three_answers(ms: float, noise: float, expected: str) -> None:
    assert answer(arm(1, noise=noise), arm(2, ms=ms, noise=noise)) == expected


def test_a_small_but_certain_difference_is_different_under_a_smaller_margin() -> None:
    steady = {r: {c: 100.0 + c / 100 for c in range(9)} for r in range(3)}
    slower = {r: {c: value * 1.03 for c, value in row.items()} for r, row in steady.items()}
    assert answer(steady, slower) == "equivalent"
    assert answer(steady, slower, margin=0.01) == "different"


def test_a_true_difference_at_the_margin_is_hardly_ever_called_equivalent() -> None:
    """The error that TOST bounds by 5 %: 100 pairs whose true ratio is the margin itself."""
    wrong = sum(
        answer(arm(2 * seed), arm(2 * seed + 1, ms=100 * (1 + MARGIN)), seed=seed) == "equivalent"
        for seed in range(100)
    )
    assert wrong <= 8


def test_equal_arms_are_hardly_ever_called_different() -> None:
    wrong = sum(
        answer(arm(2 * seed, noise=0.05), arm(2 * seed + 1, noise=0.05), seed=seed) == "different"
        for seed in range(100)
    )
    assert wrong <= 8


times = st.lists(
    st.lists(st.floats(min_value=1, max_value=1e5), min_size=2, max_size=5), min_size=1, max_size=4
)


@settings(max_examples=40)
@given(times, st.floats(min_value=0.5, max_value=2.0), st.floats(min_value=0.01, max_value=0.5))
def test_the_answer_follows_from_the_two_intervals(
    rows: list[list[float]], factor: float, margin: float
) -> None:
    first = {r: dict(enumerate(values)) for r, values in enumerate(rows)}
    second = {r: {c: v * factor for c, v in row.items()} for r, row in first.items()}
    found = stats.equivalence(first, second, margin=margin, seed=1)
    assert found is not None
    inside = 1 / (1 + margin) < found.low and found.high < 1 + margin
    assert (found.answer == "equivalent") == inside
    if found.answer == "different":
        assert not found.ratio.low <= 1 <= found.ratio.high
    # The 90 % interval is never wider than the 95 % one, so the answers cannot contradict.
    assert found.ratio.low <= found.low <= found.ratio.value <= found.high <= found.ratio.high


@settings(max_examples=40)
@given(times, st.floats(min_value=0.01, max_value=0.5))
def test_a_wider_margin_never_unmakes_an_equivalence(
    rows: list[list[float]], margin: float
) -> None:
    first = {r: dict(enumerate(values)) for r, values in enumerate(rows)}
    second = {r: {c: v + c for c, v in row.items()} for r, row in first.items()}
    narrow = stats.equivalence(first, second, margin=margin, seed=1)
    wide = stats.equivalence(first, second, margin=margin * 2, seed=1)
    assert narrow is not None
    assert wide is not None
    if narrow.answer == "equivalent":
        assert wide.answer == "equivalent"


@settings(max_examples=40)
@given(times, st.floats(min_value=0.01, max_value=0.5))
def test_equivalence_does_not_depend_on_which_arm_comes_first(
    rows: list[list[float]], margin: float
) -> None:
    """The margin is symmetric on the log scale; intervals of the mirrored ratio mirror."""
    flat = {r: dict.fromkeys(range(len(values)), values[0]) for r, values in enumerate(rows)}
    scaled = {r: {c: v * 1.02 for c, v in row.items()} for r, row in flat.items()}
    assert answer(flat, scaled, margin=margin) == answer(scaled, flat, margin=margin)


@pytest.mark.parametrize(
    ("ms", "noise", "expected"),
    [
        (100.0, 0.01, "not slower"),
        (80.0, 0.01, "not slower"),  # faster is not slower
        (80.0, 0.1, "not slower"),
        (130.0, 0.01, "slower"),
        (103.0, 0.2, "undecided"),
    ],
)
def test_not_slower_looks_at_one_side_only(ms: float, noise: float, expected: str) -> None:
    found = stats.not_slower(arm(1, noise=noise), arm(2, ms=ms, noise=noise), margin=MARGIN, seed=0)
    assert found is not None
    assert found.answer == expected
    assert found.ratio.value <= found.upper <= found.ratio.high
