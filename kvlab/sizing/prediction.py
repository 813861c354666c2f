"""What a workload would do on a machine: its tokens by tier, its TTFT, its speedup. Pure.

The tiers are simulated, the times come from the time model. LMCache's eviction loop looks about
once a second; when it looks decides what a small L1 keeps, and nobody knows it beforehand. So the
workload is simulated for several moments at which it may begin between two looks (``PHASES``): a
share is the mean over them, its interval their span.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvlab.sizing import time_model
from kvlab.sizing.simulator import TIERS, Served, Tiers, simulate
from kvlab.sizing.time_model import Draws, Estimate, Prefill, Restore
from kvlab.sizing.trace import Request, Trace

PHASES = 20
SIMULATED = 4000
"""Requests that the phases together may simulate; at least four are, but for very long rounds."""
LONG = 20_000
"""From so many requests on one phase has to do: the loop looks often during them anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How long a machine takes: to compute, and to restore from each tier."""

    prefill: Prefill
    restores: Mapping[str, Restore]

    def ttft_ms(self, served: Served) -> Draws:
        """TTFT of a simulated request."""
        return time_model.ttft_ms(
            self.prefill,
            self.restores,
            tokens=served.tokens,
            served_bytes={"L1": served.l1_bytes, "L2": served.l2_bytes},
            served_tokens=served.tokens - served.recompute,
        )

    def spread_ms(self, served: Served) -> NDArray[np.float64]:
        """How far requests that were served so lie from their median."""
        tier = "L2" if served.l2 else "L1" if served.l1 else None
        restore = self.restores.get(tier) if tier else None
        return np.zeros(1) if restore is None else restore.spread_ms

    def ttft_s(self) -> Callable[[Served], float]:
        """The estimate in seconds of each request; those served alike are computed once."""
        known: dict[Served, float] = {}

        def of(served: Served) -> float:
            kind = _kind(served)
            if kind not in known:
                known[kind] = float(self.ttft_ms(served)[0]) / 1000
            return known[kind]

        return of


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One round of one arm as predicted."""

    shares: Mapping[str, Estimate]
    """Of the round's prompt tokens by tier; the interval spans the moments of beginning."""
    ttft_ms: Draws
    """The median over the contexts."""
    phases: int
    """Moments of beginning that were simulated."""


def forecast(
    requests: Trace,
    tiers: Tiers,
    machine: Machine,
    *,
    label: str = "measure",
    phases: int | None = None,
) -> Forecast:
    """What one round would be served from, and how long its first tokens would take."""
    if phases is None:
        count = max(1, sum(1 for _ in requests))
        phases = 1 if count >= LONG else max(4, min(PHASES, SIMULATED // count))
    if tiers.l1_bytes is None:
        phases = 1  # vLLM alone has no loop
    ttft_s = machine.ttft_s()
    rounds = [
        once(later(requests, phase / phases * tiers.loop_s), tiers, ttft_s, label)
        for phase in range(phases)
    ]
    shares = [shares_of(served) for served in rounds]
    return Forecast(
        shares={
            tier: Estimate(
                float(np.mean([one[tier] for one in shares])),
                min(one[tier] for one in shares),
                max(one[tier] for one in shares),
            )
            for tier in TIERS
        },
        ttft_ms=_mixed([_median(served, machine) for served in rounds]),
        phases=phases,
    )


def later(requests: Trace, offset_s: float) -> Trace:
    """The same requests, begun so long after the eviction loop."""

    def shifted() -> Iterator[Request]:
        for place, request in enumerate(requests):
            yield request._replace(at_s=request.at_s + offset_s) if place == 0 else request

    return replace(requests, requests=shifted)


def once(
    requests: Trace, tiers: Tiers, ttft_s: Callable[[Served], float], label: str
) -> list[Served]:
    """The requests of a round as one simulation serves them."""
    kept: list[Served] = []

    def keep(served: Served, _: float) -> None:
        if served.label == label:
            kept.append(served)

    simulate(requests, tiers, ttft_s=ttft_s, each=keep)
    return kept


def shares_of(round_: Sequence[Served]) -> dict[str, float]:
    """The share of a round's prompt tokens that each tier served."""
    tokens = sum(served.tokens for served in round_)
    totals = {
        "L0": sum(served.l0 for served in round_),
        "L1": sum(served.l1 for served in round_),
        "L2": sum(served.l2 for served in round_),
        "recompute": sum(served.recompute for served in round_),
    }
    return {tier: total / tokens if tokens else 0.0 for tier, total in totals.items()}


def _median(round_: Sequence[Served], machine: Machine) -> Draws:
    """The median TTFT over the contexts, draw by draw.

    Requests that were served alike are one kind; the times of a kind spread as those did that
    calibrated its tier, or the median of a mixture would always be that of its larger part.
    """
    kinds = Counter(map(_kind, round_))
    rows, weights = [], []
    for kind, count in kinds.items():
        spread = machine.spread_ms(kind)
        rows.append(machine.ttft_ms(kind) + spread[:, None])
        weights.append(np.full(len(spread), count / len(spread)))
    return _weighted_median(np.concatenate(rows), np.concatenate(weights))


def _kind(served: Served) -> Served:
    """What requests that were served alike have in common."""
    return served._replace(number=0, start_s=0.0)


def _weighted_median(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> Draws:
    """The weighted median of each column."""
    order = np.argsort(rows, axis=0, kind="stable")
    below = np.cumsum(weights[order], axis=0)
    places = (below >= weights.sum() / 2 * (1 - 1e-12)).argmax(axis=0)
    columns = np.arange(rows.shape[1])
    medians: Draws = rows[order[places, columns], columns]
    return medians


def _mixed(phases: Sequence[Draws]) -> Draws:
    """One array for all phases: the median of their estimates, then a draw from each in turn."""
    stacked = np.stack(phases)
    draws = np.arange(1, stacked.shape[1])
    mixed: Draws = np.concatenate(
        [[np.median(stacked[:, 0])], stacked[draws % len(stacked), draws]]
    )
    return mixed
