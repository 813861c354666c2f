"""Judging one path against cold answers: the cases of traps P-22 and P-23, exactly."""

from __future__ import annotations

import pytest

from kvlab import continuation
from kvlab.records import RequestRecord

SET_NAT = 0.15


def record(top: dict[str, float] | None, token: str | None = None) -> RequestRecord:
    chosen = token or (max(top, key=lambda name: top[name]) if top else None)
    return RequestRecord(
        scenario="s",
        repeat=1,
        round="r",
        index=0,
        context_id="c0000+0",
        planned_tokens=1121,
        asked_tokens=1,
        queued_ns=0,
        token=chosen,
        top_logprobs=top,
    )


def moved(nat: float) -> continuation.Pair:
    """A cold answer, and one whose best token has lost so many nats."""
    return record({"a": -1.0, "b": -9.0}), record({"a": -1.0 - nat, "b": -9.0})


@pytest.mark.parametrize(
    ("nat", "verdict"), [(0.02, "pass"), (6.90, "fail"), (4.10, "fail")], ids=str
)
def test_p22_fast_and_wrong_is_seen(nat: float, verdict: str) -> None:
    found = continuation.judge([moved(nat)] * 5, tolerance_nat=SET_NAT)
    assert found["verdict"] == verdict
    assert found["median_nat"] == pytest.approx(nat)


def test_p22_a_corrupt_text_is_seen() -> None:
    assert continuation.is_corrupt("\ufffd\u30a2\u30ea inka\u1ee1 \u5982\u613f")
    assert not continuation.is_corrupt("A plain English answer, 42 % of it na\u00efve.")
    assert not continuation.is_corrupt("1 2 3")
    assert not continuation.is_corrupt("\u5982\u613f", scripts=("CJK",))


def test_p23_a_flip_within_the_noise_is_a_tie() -> None:
    cold = record({"a": -1.0, "b": -1.05})
    hit = record({"a": -1.08, "b": -1.03})
    allowed = continuation.tolerance(0.06, SET_NAT)
    assert allowed == pytest.approx(0.18)
    found = continuation.judge([(cold, hit)], tolerance_nat=allowed)
    assert found["verdict"] == "pass with ties"
    assert found["max_nat"] == pytest.approx(0.08)
    assert found["flips"][0]["margin_nat"] == pytest.approx(0.05)


def test_p23_beyond_the_noise_is_a_fail() -> None:
    allowed = continuation.tolerance(0.06, SET_NAT)
    found = continuation.judge([moved(0.9)], tolerance_nat=allowed)
    assert found["verdict"] == "fail"
    assert "1 of 1 answers differ by up to 0.9 nat; allowed 0.18" in found["reason"]


def test_a_token_that_rises_from_far_below_fails_although_the_cold_one_stayed() -> None:
    cold = record({"a": -1.0, "b": -3.0})
    hit = record({"a": -1.0, "b": -0.9})
    found = continuation.judge([(cold, hit)], tolerance_nat=SET_NAT)
    assert found["verdict"] == "fail"
    assert "preferred its own by up to 2 nat" in found["reason"]


def test_the_set_tolerance_is_the_least() -> None:
    assert continuation.tolerance(None, SET_NAT) == continuation.tolerance(0.01, SET_NAT) == 0.15


def test_what_cannot_be_compared_is_unknown() -> None:
    assert continuation.judge([], tolerance_nat=1)["verdict"] == "unknown"
    missing = (record({"a": -1.0}), record(None))
    found = continuation.judge([moved(0.0), missing], tolerance_nat=1)
    assert found["reason"] == "1 answers could not be compared with a cold one"
    unlisted = (record({"a": -1.0, "c": -1.2}), record({"b": -1.1, "c": -1.2}))
    found = continuation.judge([unlisted], tolerance_nat=1)
    assert found["verdict"] == "unknown"
    assert "does not list the cold token" in found["reason"]


def test_the_margin_of_what_is_not_listed_is_a_least_one() -> None:
    cold = record({"a": -1.0, "b": -2.0})
    assert continuation.margin(cold, record({"z": -1.0})) == pytest.approx(1.0)
    assert continuation.margin(cold, record(None)) is None
    assert continuation.margin(record(None), cold) is None
