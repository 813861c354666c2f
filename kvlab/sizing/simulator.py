"""Which tier serves which tokens of a trace, how long that takes, and what it moves.

What is found where follows the rules in ``kvlab.sizing.contents``; a time function gives each
request its time, and with it the clock on which LMCache's eviction loop and its writes run.

Not simulated: the time that lookups and copies take from each other; and a request sees what one
that started before it will have stored. Memory grows with what the tiers hold, not with the trace;
an L2 without a limit holds every chunk ever stored, as ``fs`` does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kvlab.sizing.contents import Contents, Counts, Served
from kvlab.sizing.distribution import Distribution
from kvlab.sizing.tiers import Tiers, tiers_of
from kvlab.sizing.trace import Request, Trace

__all__ = ["TIERS", "Counts", "Outcome", "RoundOutcome", "Served", "Tiers", "simulate", "tiers_of"]

TIERS = ("L0", "L1", "L2", "recompute")
SECONDS_PER_DAY = 86_400

Times = Callable[[Served], float]
"""Seconds from a request's start to its first token."""


@dataclass(slots=True)
class RoundOutcome:
    """The requests of one round, summed."""

    requests: int = 0
    tokens: int = 0
    served: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Tokens by tier; they sum to ``tokens``."""
    ttft: Distribution = field(default_factory=Distribution)
    """Seconds, where a time function was given."""

    @property
    def hit_share(self) -> float | None:
        """Share of the tokens that were not computed; None without tokens."""
        return 1 - self.served["recompute"] / self.tokens if self.tokens else None

    def share(self, tier: str) -> float | None:
        """Share of the tokens that a tier served; None without tokens."""
        return self.served[tier] / self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trace did to the tiers."""

    rounds: dict[str, RoundOutcome]
    """By label, in the order in which they first appeared."""
    counts: Counts
    seconds: float
    """From the start to the last first token; 0 without a time function."""
    l1_resident_bytes: int
    l2_resident_bytes: int
    l2_backlog_bytes: int
    """Stored, and not yet written to L2 at the end."""

    @property
    def total(self) -> RoundOutcome:
        """All rounds together, without their times."""
        whole = RoundOutcome()
        for one in self.rounds.values():
            whole.requests += one.requests
            whole.tokens += one.tokens
            for tier in TIERS:
                whole.served[tier] += one.served[tier]
        return whole

    @property
    def l2_growth_bytes_per_day(self) -> float | None:
        """Bytes that stay on L2 per day at the trace's pace; None when no time passed."""
        kept = self.l2_resident_bytes + self.l2_backlog_bytes
        return kept / self.seconds * SECONDS_PER_DAY if self.seconds else None


def simulate(
    trace: Trace,
    tiers: Tiers,
    *,
    ttft_s: Times | None = None,
    concurrency: int = 1,
    each: Callable[[Served, float], None] | None = None,
) -> Outcome:
    """What the tiers serve of a trace, and what that moves.

    ``ttft_s`` gives each request its time: with it there is a clock, ``concurrency`` requests are
    in flight, and the loop and the writes to L2 take their time. Without it the loop looks once
    between any two requests and writes end at once. ``each`` is told of every request and its TTFT.
    """
    clock = _Clock(concurrency) if ttft_s else None
    stack = Contents(tiers, trace.chunk_tokens, timed=clock is not None)
    rounds: dict[str, RoundOutcome] = {}
    for number, request in enumerate(trace):
        start_s = clock.start(request, stack) if clock else stack.settle(request.drained)
        served, found = stack.look_up(number, request, start_s)
        took_s = 0.0
        if clock and ttft_s:
            took_s = ttft_s(served)
            clock.finish(start_s + took_s)
        stack.store(request, served, found, start_s + took_s)
        outcome = rounds.get(request.label)
        if outcome is None:
            outcome = rounds[request.label] = RoundOutcome()
        _add(outcome, served)
        if ttft_s:
            outcome.ttft.add(took_s)
        if each:
            each(served, took_s)
    return Outcome(
        rounds=rounds,
        counts=stack.counts,
        seconds=clock.last_s if clock else 0.0,
        l1_resident_bytes=stack.l1_used,
        l2_resident_bytes=stack.l2_used,
        l2_backlog_bytes=sum(size for _, _, size in stack.writing),
    )


def _add(outcome: RoundOutcome, served: Served) -> None:
    outcome.requests += 1
    outcome.tokens += served.tokens
    by_tier = outcome.served
    by_tier["L0"] += served.l0
    by_tier["L1"] += served.l1
    by_tier["L2"] += served.l2
    by_tier["recompute"] += served.recompute


class _Clock:
    """When requests start, with so many in flight."""

    def __init__(self, concurrency: int):
        self.free_s = [0.0] * concurrency
        self.last_s = 0.0

    def start(self, request: Request, tiers: Contents) -> float:
        """When the request starts; what the tiers do until then has been done.

        One before it is done, its moment has come, and drain and pause are over.
        """
        start_s = heapq.heappop(self.free_s)
        if request.drained or request.gap_s:
            start_s = max(start_s, self.last_s)  # a round begins when all of the last one is done
        if request.drained:
            start_s = tiers.drain(start_s)
        start_s = max(start_s + request.gap_s, request.at_s)
        tiers.advance(start_s)
        return start_s

    def finish(self, done_s: float) -> None:
        heapq.heappush(self.free_s, done_s)
        self.last_s = max(self.last_s, done_s)
