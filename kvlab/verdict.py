"""What a run may claim: proven, not shown, refuted, or invalid, always with reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab.invariants import Invariant
from kvlab.stats import Ratio

PROVEN, NOT_SHOWN, REFUTED, INVALID = "proven", "not shown", "refuted", "invalid"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The claim and why; the first reason is the one that decided."""

    status: str
    reasons: Sequence[str]


def reach(invariants: Sequence[Invariant], speedup: Ratio | None, *, control: bool) -> Verdict:
    """The verdict of an A/B, or of a control in which both arms are the same.

    Invalid before anything else: wrong answers first, since they make every time meaningless, then
    invariants that fail, then those that are unknown.
    """
    reasons = blockers(invariants)
    if speedup is None:
        reasons.append("speedup: no two requests of both arms can be compared")
    if reasons or speedup is None:
        return Verdict(INVALID, tuple(reasons))
    interval = f"{speedup.value:.2f} (95 % interval {speedup.low:.2f} to {speedup.high:.2f})"
    return _control(speedup, interval) if control else _claim(speedup, interval)


def alone(invariants: Sequence[Invariant], revisit: Ratio | None) -> Verdict:
    """The verdict of an A/B without its first arm: at best *not shown*, with what is missing.

    ``revisit`` is the time of first visits over that of second ones, on the same servers.
    """
    reasons = blockers(invariants)
    if revisit is None:
        reasons.append("first visits: no two requests of both rounds can be compared")
    if reasons or revisit is None:
        return Verdict(INVALID, tuple(reasons))
    return Verdict(
        NOT_SHOWN,
        (
            "no vLLM without LMCache was measured (attach.baseline names none), so whether LMCache"
            " makes the difference, and how much, is not shown",
            f"second visits, served by LMCache, were {revisit.value:.2f} times as fast as first"
            f" ones (95 % interval {revisit.low:.2f} to {revisit.high:.2f}) on the same servers",
        ),
    )


def blockers(invariants: Sequence[Invariant]) -> list[str]:
    """Why nothing may be claimed, wrong answers first; empty when every invariant holds."""
    wrong = [i for i in invariants if i.name == "correctness" and i.holds is False]
    failed = [i for i in invariants if i.holds is False and i not in wrong]
    unknown = [i for i in invariants if i.holds is None]
    reasons = [f"fast but wrong: {i.detail}" for i in wrong]
    return reasons + [f"{i.name}: {i.detail}" for i in (*failed, *unknown)]


def _claim(speedup: Ratio, interval: str) -> Verdict:
    if speedup.low > 1:
        return Verdict(PROVEN, (f"speedup {interval} is above 1 and every invariant holds",))
    if speedup.high < 1:
        return Verdict(REFUTED, (f"speedup {interval} is below 1: LMCache made it slower",))
    return Verdict(NOT_SHOWN, (f"speedup {interval} contains 1: no difference was shown",))


def _control(speedup: Ratio, interval: str) -> Verdict:
    if speedup.low <= 1 <= speedup.high:
        return Verdict(
            NOT_SHOWN,
            (
                f"control: ratio {interval} contains 1, as it must where both arms are the same;"
                " the method sees no difference where there is none",
            ),
        )
    return Verdict(
        INVALID,
        (
            f"control: ratio {interval} excludes 1 although both arms are the same; something"
            " other than LMCache differs between the arms, so no speedup measured here counts",
        ),
    )


def is_healthy(summary: Mapping[str, Any]) -> bool:
    """Whether a run came out as it should, which is what exit codes say.

    An A/B must be proven, and its control must show nothing. Object groups are asked whether they
    differ, so every valid answer is one. The others fail when they are invalid or refuted.
    """
    status, experiment = summary["verdict"]["status"], summary.get("experiment")
    if summary.get("control"):
        return bool(status == NOT_SHOWN)
    if "revisit" in summary:  # without a first arm nothing can be proven
        return bool(status != INVALID)
    if experiment == "two-round":
        return bool(status == PROVEN)
    if experiment == "object-groups":
        return bool(status != INVALID)
    return status not in (INVALID, REFUTED)
