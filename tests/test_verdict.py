"""The verdict: a claim only on evidence, and never a bare number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import verdict
from kvlab.invariants import Invariant
from kvlab.stats import Ratio

GOOD = [Invariant("correctness", True, "all within 0 nat"), Invariant("conservation", True, "0")]
WRONG = Invariant("correctness", False, "restored answers differ by up to 6.9 nat")
FAILED = Invariant("external-share", False, "gain not from LMCache")
UNKNOWN = Invariant("conservation", None, "unknown: the server did not answer")


def ratio(low: float, high: float) -> Ratio:
    return Ratio(value=(low * high) ** 0.5, low=low, high=high, method="")


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [
        (1.9, 2.0, "proven"),
        (1.001, 9.0, "proven"),
        (1.0, 2.0, "not shown"),
        (0.97, 1.04, "not shown"),
        (0.5, 1.0, "not shown"),
        (0.5, 0.99, "refuted"),
    ],
)
def test_the_interval_decides(low: float, high: float, status: str) -> None:
    reached = verdict.reach(GOOD, ratio(low, high), control=False)
    assert reached.status == status
    assert len(reached.reasons) == 1


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [(0.97, 1.04, "not shown"), (1.1, 1.2, "invalid"), (0.8, 0.9, "invalid")],
)
def test_a_control_must_see_no_difference(low: float, high: float, status: str) -> None:
    reached = verdict.reach(GOOD, ratio(low, high), control=True)
    assert reached.status == status
    assert reached.reasons[0].startswith("control:")


def test_what_fails_comes_first_then_what_is_unknown() -> None:
    reached = verdict.reach([UNKNOWN, FAILED, *GOOD], ratio(8, 9), control=False)
    assert reached.status == "invalid"
    assert reached.reasons == (
        "external-share: gain not from LMCache",
        "conservation: unknown: the server did not answer",
    )


def test_fast_but_wrong_overrides_every_number() -> None:
    reached = verdict.reach([FAILED, WRONG, UNKNOWN], ratio(60, 90), control=False)
    assert reached.status == "invalid"
    assert reached.reasons[0] == "fast but wrong: restored answers differ by up to 6.9 nat"
    assert len(reached.reasons) == 3


def test_correctness_that_was_not_compared_is_unknown_not_wrong() -> None:
    reached = verdict.reach([Invariant("correctness", None, "nothing")], ratio(8, 9), control=False)
    assert reached.reasons == ("correctness: nothing",)


def test_without_a_speedup_there_is_no_claim() -> None:
    reached = verdict.reach(GOOD, None, control=False)
    assert reached.status == "invalid"
    assert "no two requests" in reached.reasons[0]


@given(
    st.lists(st.sampled_from([*GOOD, WRONG, FAILED, UNKNOWN])),
    st.none() | st.builds(ratio, st.floats(0.1, 10), st.floats(10, 20)),
    st.booleans(),
)
def test_a_claim_needs_every_invariant(
    found: list[Invariant], speedup: Ratio | None, control: bool
) -> None:
    reached = verdict.reach(found, speedup, control=control)
    assert reached.reasons
    if speedup is None or not all(invariant.holds for invariant in found):
        assert reached.status == "invalid"
