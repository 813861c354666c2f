"""The requests: all there, all of the planned length, all right, and none slower at the start."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import takewhile

from kvlab.evidence import Account
from kvlab.invariants.facts import Facts, Invariant, weigh
from kvlab.records import RequestRecord
from kvlab.units import ns_to_ms

SLOW_START = 1.5
"""First requests this many times slower than the later ones of their round are slow …"""
LONE_SLOW_START = 3.0
"""… a single one this many times; fewer is what a spike of a busy machine looks like …"""
SLOW_MARGIN = 4.0
"""… if it also exceeds them by this many times what any other request of the run does."""


def correctness(facts: Facts) -> Invariant:
    """Restored answers equal cold ones within the tolerance."""
    verdict = facts.correctness["verdict"]
    holds = {"fail": False, "unknown": None}.get(verdict, True)
    return Invariant("correctness", holds, str(facts.correctness["reason"]))


def requests_complete(facts: Facts) -> Invariant:
    """Every planned request was sent once and answered with the length that was asked for."""
    plan, bad = facts.plan, []
    for account in facts.accounts:
        sent, done = len(account.requests), len(account.completed)
        if sent != plan.contexts:
            bad.append(f"{account.place}: {sent} of {plan.contexts} requests")
        if done != sent:
            reasons = ", ".join(failures(account.requests))
            first = next(r for r in account.requests if r.error is not None)
            bad.append(
                f"{account.place}: {sent - done} of {sent} failed ({reasons}),"
                f" first at request {first.index}"
            )
        timeless = [r for r in account.completed if r.ttft_ns is None]
        if timeless:
            bad.append(f"{account.place}: request {timeless[0].index} has no time to first token")
        short = [r for r in account.completed if r.completion_tokens != r.asked_tokens]
        if short:
            bad.append(
                f"{account.place}: request {short[0].index} gave {short[0].completion_tokens}"
                f" tokens of {short[0].asked_tokens}"
            )
    total = sum(len(account.completed) for account in facts.accounts)
    return weigh("requests-complete", f"{total} of {total} requests completed", bad, [])


def failures(requests: Iterable[RequestRecord]) -> dict[str, int]:
    """How many requests failed for each reason; what follows the colon is detail."""
    reasons = [r.error.partition(":")[0] for r in requests if r.error is not None]
    return {reason: reasons.count(reason) for reason in sorted(set(reasons))}


def prompt_length(facts: Facts) -> Invariant:
    """The server counts exactly the planned prompt tokens; one more shifts the whole prefix."""
    bad, unknown = [], []
    for account in facts.accounts:
        if any(r.prompt_tokens is None for r in account.completed):
            unknown.append(f"{account.place}: the server did not count the prompt's tokens")
        shifted = [r for r in account.completed if r.shift]
        if shifted:
            bad.append(
                f"{account.place}: {len(shifted)} requests differ, first {shifted[0].shift_text}"
            )
    return weigh("prompt-length", "every prompt has its planned length", bad, unknown)


def baseline_steady(facts: Facts) -> Invariant:
    """The baseline's round 2 takes as long as its round 1: no warm-up or drift in the figures.

    On a small machine single rounds differ by more than the 5 % that are allowed. A ratio outside
    the allowed band therefore counts only if its 95 % interval also excludes 1, that is if the
    machine's own noise cannot explain it; otherwise the report carries a caution. A ratio without
    noise has an interval of no width, and is judged by the band alone.
    """
    gain = facts.false_gain
    if gain is None:
        return Invariant("baseline-steady", None, "unknown: too few requests in both rounds")
    value, low, high = 1 / gain.value, 1 / gain.high, 1 / gain.low
    detail = f"baseline round 2 / round 1 = {value:.3f} [{low:.3f}, {high:.3f}]"
    return Invariant("baseline-steady", not drifts(facts) or low <= 1 <= high, detail)


def drifts(facts: Facts) -> bool:
    """Whether the baseline's rounds differ by more than allowed, noise or not."""
    allowed = facts.threshold("baseline_drift_max")
    return facts.false_gain is not None and abs(1 / facts.false_gain.value - 1) > allowed


def warmed_up(facts: Facts) -> Invariant:
    """The first requests of round 1 are not slower than the later ones, in either arm.

    The median hides one slow request, and a slow first request is exactly what compilation and
    memory pinning leave. Slow means 1.5 times the median of the round's second half, or 3 times
    where it is the first request alone, and later than it by four times what any other request of
    the run was: spikes that come anywhere are the machine's noise.
    """
    rounds = {account.key: ttft for account in facts.accounts if (ttft := _ttft_ms(account))}
    noise = max(
        (late for ttft in rounds.values() for late in _late(ttft)[_slow(ttft) :]), default=0
    )
    bad, unknown = [], []
    for account in facts.rounds("fill"):
        ttft = rounds.get(account.key, [])
        if not ttft:
            unknown.append(f"{account.place}: no times")
        elif (slow := _late(ttft)[: _slow(ttft)]) and max(slow) > max(
            SLOW_MARGIN * noise, _least(slow, ttft)
        ):
            bad.append(
                f"not warmed up: the first {len(slow)} of {len(ttft)} requests took up to"
                f" {1 + max(slow) / _steady(ttft):.1f} times as long as the later ones"
                f" ({account.place})"
            )
    return weigh("warmed-up", "no slow start in round 1", bad, unknown)


def _least(slow: Sequence[float], ttft: Sequence[float]) -> float:
    """How late the slowest must be at least: a lone one may be a spike of the machine."""
    return ((LONE_SLOW_START if len(slow) == 1 else SLOW_START) - 1) * _steady(ttft)


def _ttft_ms(account: Account) -> list[float]:
    return [ns_to_ms(r.ttft_ns) for r in account.completed if r.ttft_ns is not None]


def _steady(ttft: Sequence[float]) -> float:
    """The median of the second half of a round."""
    return statistics.median(ttft[len(ttft) // 2 :])


def _late(ttft: Sequence[float]) -> list[float]:
    """How far each time is above the steady one."""
    return [value - _steady(ttft) for value in ttft]


def _slow(ttft: Sequence[float]) -> int:
    """How many requests at the start of a round are slow."""
    return len(list(takewhile(lambda value: value > SLOW_START * _steady(ttft), ttft)))
