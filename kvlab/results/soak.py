"""What a soak shows: whether time, memory, files or disk drift, and whether anything failed. Pure.

Drift is the robust slope of Theil and Sen with its 95 % interval, over the longest stretch of time
on one launch: servers that were started again begin anew.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab import correctness, evidence, stats, verdict
from kvlab.evidence import Account, Plan, Readings
from kvlab.invariants import Facts, Invariant, servers, tokens
from kvlab.invariants import requests as conditions
from kvlab.invariants.facts import weigh
from kvlab.records import Event, RequestRecord
from kvlab.results import entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.units import ns_to_ms, ns_to_s
from kvlab.verdict import Verdict

LABEL = "soak"
LEAST_POINTS = 8
"""A slope over fewer points says nothing."""
HOUR_S = 3600.0

Series = list[tuple[float, float]]
"""Seconds and values."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How a quantity changes with time, and how much that is over the whole time."""

    name: str
    unit: str
    median: float
    slope_per_s: float
    low_per_s: float
    high_per_s: float
    span_s: float
    limit: float
    """The most that it may grow over the whole time, in its own unit."""

    @property
    def total(self) -> float:
        return self.slope_per_s * self.span_s

    @property
    def judged(self) -> str:
        """``within``: even the interval's upper end; ``beyond``: even its lower end is too much."""
        if self.high_per_s * self.span_s <= self.limit:
            return "within"
        return "beyond" if self.low_per_s * self.span_s > self.limit else "undecided"

    def as_dict(self) -> dict[str, Any]:
        """The drift with the unit in each key."""
        quantity, _, process = self.name.partition(":")
        bounds = [self.low_per_s * self.span_s, self.high_per_s * self.span_s]
        return {
            "name": self.name,
            "quantity": quantity,
            "process": process or None,
            f"median_{self.unit}": self.median,
            f"slope_{self.unit}_per_h": self.slope_per_s * HOUR_S,
            f"ci95_{self.unit}_per_h": [self.low_per_s * HOUR_S, self.high_per_s * HOUR_S],
            f"total_{self.unit}": self.total,
            f"limit_{self.unit}": self.limit,
            "total_share": self.total / self.median if self.median else None,
            "slope_share_per_h": self.slope_per_s * HOUR_S / self.median if self.median else None,
            "ci95_share": [bound / self.median for bound in bounds] if self.median else None,
            "limit_share": self.limit / self.median if self.median else None,
            "judged": self.judged,
        }


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a soak."""
    manifest, events, asked = run.manifest, run.events(), run.requests()
    planned = [(int(repeat), str(arm)) for repeat, arm in manifest.get("order") or []]
    plan = _plan(manifest)
    readings = Readings(run.scrapes())
    latest = evidence.latest(asked)
    finished = sorted(run.finished_arms())
    accounts = [
        evidence.account((LABEL, repeat, "measure"), latest, readings, has_lmcache=True)
        for repeat, _ in finished
    ]
    fills = [
        evidence.account((LABEL, repeat, "fill"), latest, readings, has_lmcache=True)
        for repeat in sorted({r.repeat for r in asked if r.round == "fill"})
    ]
    facts = Facts(
        plan=plan,
        accounts=[*fills, *accounts],
        events=events,
        readings=readings,
        correctness=_correctness(plan, fills, accounts),
        false_gain=None,
    )
    start_ns, end_ns = _longest(events, accounts)
    drifts = _drifts(manifest, accounts, events, start_ns, end_ns)
    held = check(facts, finished, planned, drifts)
    failures = conditions.failures([r for a in accounts for r in a.requests])
    reached = _reach(held, drifts, failures, sum(len(a.requests) for a in accounts))
    times = [ns_to_ms(r.ttft_ns) for a in accounts for r in a.completed if r.ttft_ns is not None]
    figures = {
        "planned_s": manifest["profile"]["experiments"]["soak"]["duration_s"],
        "measured_s": sum(_span_s(account) for account in accounts),
        "fitted_s": ns_to_s(end_ns - start_ns),
        "stretches": {"planned": len(planned), "finished": len(finished)},
        "launches": len([e for e in events if e.kind == "ready"]),
        "requests": {
            "sent": sum(len(a.requests) for a in accounts),
            "failed": sum(failures.values()),
            "reasons": failures,
        },
        "ttft_ms": {
            "median": stats.median(times),
            "p99": stats.percentile(times, 0.99),
            "largest": max(times, default=None),
        },
        "hit_share": _hit_share(plan, accounts),
        "drift": [drift.as_dict() for drift in drifts],
        "correctness": facts.correctness,
        "time_s": entries.time_s(events, asked),
    }
    return frame(run, reached, figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] != verdict.INVALID:
        sent, failed = found["requests"]["sent"], found["requests"]["failed"]
        lines.append(f"{found['measured_s']:.0f} s, {sent} visits, {failed} failed")
        for drift in found["drift"]:
            share = drift.get("total_share")
            shown = "" if share is None else f" {share:+.2%} over the whole time,"
            lines.append(f"{drift['name']}:{shown} {drift['judged']} its limit")
    return "\n".join(lines)


def check(
    facts: Facts,
    finished: Sequence[tuple[int, str]],
    planned: Sequence[tuple[int, str]],
    drifts: Sequence[Drift],
) -> list[Invariant]:
    """Every condition of a soak. Failed requests are no such condition: they refute it."""
    return [
        conditions.correctness(facts),
        conditions.prompt_length(facts),
        whole_time(finished, planned),
        tokens.round_1_cold(facts),
        tokens.conservation(_without_failures(facts)),
        served(facts),
        servers.servers_up(_states_of_finished(facts, finished)),
        servers.kv_alike(facts, {LABEL: servers.kv_tokens(facts, LABEL)}),
        sampled(drifts),
    ]


def whole_time(
    finished: Sequence[tuple[int, str]], planned: Sequence[tuple[int, str]]
) -> Invariant:
    """The soak lasted as long as it was to last."""
    missing = len(set(planned) - set(finished))
    detail = f"{len(planned) - missing} of {len(planned)} stretches"
    return Invariant("whole-time", bool(planned) and not missing, detail)


def served(facts: Facts) -> Invariant:
    """The visits were served by LMCache: a soak of recomputation would prove nothing about it."""
    bad, unknown, seen = [], [], []
    for account in facts.rounds("measure"):
        share = _hit_share(facts.plan, [account])
        if share is None:
            unknown.append(f"{account.place}: {account.external.reason or 'no visits'}")
            continue
        seen.append(share)
        if share < facts.threshold("external_share_min"):
            bad.append(f"{account.place}: external hits are {share:.1%} of what can be restored")
    good = f"LMCache served at least {min(seen, default=0):.1%} of what can be restored"
    return weigh("external-share", good, bad, unknown)


def sampled(drifts: Sequence[Drift]) -> Invariant:
    """Time, memory, files and disk were all sampled often enough for a slope."""
    names = {drift.name.partition(":")[0] for drift in drifts}
    missing = [name for name in ("ttft", "memory", "files") if name not in names]
    good = f"{len(drifts)} quantities"
    return weigh("sampled", good, [], [f"too few samples of {name}" for name in missing])


def _without_failures(facts: Facts) -> Facts:
    """The facts without stretches in which a visit failed: its tokens may be counted or not."""
    clean = [a for a in facts.accounts if len(a.completed) == len(a.requests)]
    return dataclasses.replace(facts, accounts=clean)


def _states_of_finished(facts: Facts, finished: Sequence[tuple[int, str]]) -> Facts:
    """The facts whose states are those of finished stretches."""
    kept = [
        event
        for event in facts.events
        if event.kind != "state" or (event.repeat, event.scenario) in finished
    ]
    return dataclasses.replace(facts, events=kept)


def _plan(manifest: Mapping[str, Any]) -> Plan:
    plan = evidence.plan({**manifest, "arms": ["none", LABEL]})
    return dataclasses.replace(plan, concurrency=1, cached=(LABEL,))


def _correctness(
    plan: Plan, fills: Sequence[Account], accounts: Sequence[Account]
) -> dict[str, Any]:
    """Every visit's answer against the cold one to the same context."""
    cold: dict[str, RequestRecord] = {}
    for account in fills:
        for record in account.completed:
            cold.setdefault(record.context_id, record)
    pairs = [
        (cold[record.context_id], record)
        for account in accounts
        for record in account.completed
        if record.context_id in cold and record.cached_tokens
    ]
    return correctness.weigh([], pairs, plan.tolerance_nat, need_floor=False)


def _hit_share(plan: Plan, accounts: Sequence[Account]) -> float | None:
    values = [account.external.value for account in accounts]
    most = plan.restorable_tokens * sum(len(account.completed) for account in accounts)
    known = [value for value in values if value is not None]
    return sum(known) / most if most and len(known) == len(values) else None


def _span_s(account: Account) -> float:
    """From the first visit of a stretch to the end of its last."""
    sent = [record.queued_ns for record in account.requests]
    ends = [record.last_byte_ns or record.queued_ns for record in account.requests]
    return ns_to_s(max(ends) - min(sent)) if sent else 0.0


def _longest(events: Sequence[Event], accounts: Sequence[Account]) -> tuple[int, int]:
    """Begin and end of the longest time on one launch, in which visits were made."""
    starts = [event.at_ns for event in events if event.kind == "ready"]
    visits = sorted(record.queued_ns for account in accounts for record in account.requests)
    spans = []
    for place, start in enumerate(starts):
        end = starts[place + 1] if place + 1 < len(starts) else None
        inside = [at for at in visits if at >= start and (end is None or at < end)]
        if inside:
            spans.append((inside[0], inside[-1]))
    return max(spans, key=lambda span: span[1] - span[0], default=(0, 0))


def _drifts(
    manifest: Mapping[str, Any],
    accounts: Sequence[Account],
    events: Sequence[Event],
    start_ns: int,
    end_ns: int,
) -> list[Drift]:
    """The drift of every quantity that was sampled often enough."""
    limits = manifest["profile"]["experiments"]["soak"]
    ttft: Series = [
        (ns_to_s(r.queued_ns - start_ns), ns_to_ms(r.ttft_ns))
        for account in accounts
        for r in account.completed
        if r.ttft_ns is not None and start_ns <= r.queued_ns <= end_ns
    ]
    samples = [e for e in events if e.kind == "sample" and start_ns <= e.at_ns]
    found = [_drift("ttft", "ms", ttft, share=limits["ttft_drift_max"])]
    for name in _processes(samples):
        memory = _series(samples, start_ns, name, "rss_bytes")
        files = _series(samples, start_ns, name, "files")
        found.append(_drift(f"memory:{name}", "bytes", memory, share=limits["memory_drift_max"]))
        found.append(_drift(f"files:{name}", "files", files, most=limits["files_drift_max"]))
    disk: Series = [
        (ns_to_s(e.at_ns - start_ns), float(e.detail["l2_bytes"]))
        for e in samples
        if e.detail.get("l2_bytes") is not None
    ]
    found.append(_drift("l2", "bytes", disk, share=limits["l2_drift_max"]))
    return [drift for drift in found if drift is not None]


def _processes(samples: Sequence[Event]) -> list[str]:
    """Service and name of every process that was seen in most of the samples."""
    seen = Counter(
        name for event in samples for name in {_name(p) for p in event.detail["processes"]}
    )
    return sorted(name for name, count in seen.items() if count > len(samples) / 2)


def _name(process: Mapping[str, Any]) -> str:
    return f"{process['service']}/{process['name']}"


def _series(samples: Sequence[Event], start_ns: int, name: str, key: str) -> Series:
    """One figure of all processes of a name, at every sample."""
    return [
        (
            ns_to_s(event.at_ns - start_ns),
            float(sum(p[key] for p in event.detail["processes"] if _name(p) == name)),
        )
        for event in samples
        if any(_name(p) == name for p in event.detail["processes"])
    ]


def _drift(
    name: str, unit: str, series: Series, *, share: float | None = None, most: float = 0.0
) -> Drift | None:
    """The drift of one quantity; it may grow by ``share`` of its median, or by ``most``."""
    if len(series) < LEAST_POINTS:
        return None
    from scipy.stats import theilslopes

    times, values = zip(*_thinned(series), strict=True)
    slope, _, low, high = theilslopes(values, times, 0.95)
    middle = stats.median(value for _, value in series) or 0.0
    return Drift(
        name=name,
        unit=unit,
        median=middle,
        slope_per_s=float(slope),
        low_per_s=float(low),
        high_per_s=float(high),
        span_s=series[-1][0] - series[0][0],
        limit=share * middle if share is not None else most,
    )


def _thinned(series: Series, most: int = 1000) -> Series:
    """At most so many points, evenly spread: the slope looks at every pair of them."""
    step = -(-len(series) // most)
    return series[::step]


def _reach(
    held: Sequence[Invariant], drifts: Sequence[Drift], failures: Mapping[str, int], sent: int
) -> Verdict:
    reasons = verdict.blockers(held)
    if reasons:
        return Verdict(verdict.INVALID, reasons)
    if failures:
        why = ", ".join(f"{reason} ({count})" for reason, count in failures.items())
        return Verdict(
            verdict.REFUTED, [f"{sum(failures.values())} of {sent} visits failed: {why}"]
        )
    beyond = [_sentence(drift) for drift in drifts if drift.judged == "beyond"]
    if beyond:
        return Verdict(verdict.REFUTED, beyond)
    open_ones = [_sentence(drift) for drift in drifts if drift.judged == "undecided"]
    if open_ones:
        return Verdict(verdict.NOT_SHOWN, open_ones)
    return Verdict(verdict.PROVEN, [f"no error in {sent} visits, and every drift within its limit"])


def _sentence(drift: Drift) -> str:
    low, high = drift.low_per_s * drift.span_s, drift.high_per_s * drift.span_s
    return (
        f"{drift.name} drifts by {drift.total:,.4g} {drift.unit} over {drift.span_s:.0f} s"
        f" (95 % interval {low:,.4g} to {high:,.4g}); at most {drift.limit:,.4g} is allowed"
    )
