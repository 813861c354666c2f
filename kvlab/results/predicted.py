"""Predicted against measured: what the A/B should have shown, from little of it. Pure.

Prefill is calibrated from round 1 of the baseline arm (and the time of one token from its long
answers), the cost of restoring from the first half of the lmcache arm's repeats – from every other
context where there is one repeat. What they predict is then compared with the rest: round 2 of
the baseline arm, the later repeats, the other contexts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from kvlab import counters, evidence, profile, stats
from kvlab.errors import ProfileError
from kvlab.evidence import Account, Plan, Readings
from kvlab.records import RequestRecord, Scrape
from kvlab.results import bill
from kvlab.rundir import RunDir
from kvlab.sizing import prediction, sizes, time_model, trace
from kvlab.sizing.prediction import Machine
from kvlab.sizing.simulator import TIERS, Served, Tiers
from kvlab.sizing.time_model import Draws, Prefill, Restore
from kvlab.sizing.trace import Request, Trace
from kvlab.units import GIB, NS_PER_MS, NS_PER_S, ns_to_ms

SHARE_ALLOWED = 0.02
"""A tier's share is as predicted within 2 points."""
SPEEDUP_ALLOWED = 0.20
GB = 1e9
RATES = {"L1": "l1_load_throughput", "L2": "l2_load_throughput"}
"""LMCache's own counters of how fast a tier gives its bytes."""


def predicted(
    plan: Plan,
    accounts: Sequence[Account],
    requests: Sequence[RequestRecord],
    scrapes: Sequence[Scrape],
    manifest: Mapping[str, Any],
    writes: Mapping[str, Any],
    *,
    seed: int,
) -> dict[str, Any] | None:
    """The summary's ``predicted``; None for a control. ``missing`` says why nothing could be.

    ``writes`` is that of the bill: it holds the bytes of a context where the manifest does not.
    """
    if plan.control:
        return None
    if plan.alone:
        return {"missing": "baseline"}
    readings = Readings(scrapes)
    setup = _setup(plan, manifest, writes, readings)
    if isinstance(setup, str):
        return {"missing": setup}
    known = calibrate(plan, accounts, requests, readings, setup, seed=seed)
    if isinstance(known, str):
        return {"missing": known}
    expected = _expect(plan, setup, known)
    found = _measured(plan, accounts, known)
    replayed = _replayed(plan, accounts, scrapes, setup)
    checks = _checks(expected, found, replayed)
    return {
        "calibration": known.as_dict(),
        "served_share": {
            tier: {
                "value": share.value,
                "range": [share.low, share.high],
                "replayed": replayed.get(tier),
                "measured": found["served_share"].get(tier),
            }
            for tier, share in expected.shares.items()
        },
        "ttft_ms": {
            arm: {
                **_figure(expected.ttft_ms[arm]),
                "measured": found["ttft_ms"].get(arm),
            }
            for arm in plan.arms
        },
        "speedup": {**_figure(expected.speedup), "measured": found.get("speedup")},
        "phases": expected.phases,
        "at_most": {"speedup": float(expected.bandwidth_only[0])},
        "blind_points": _blind_points(expected, found),
        "checks": checks,
        "as_predicted": all(check["holds"] for check in checks),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """The prediction in a line of the terminal; none where nothing was predicted or compared."""
    speedup = found.get("speedup") or {}
    if "measured" not in speedup:
        return []
    low, high = speedup["ci95"]
    broken = sorted({one["broke"] for one in found["checks"] if one.get("broke")})
    answer = "as predicted" if found["as_predicted"] else f"not as predicted: {', '.join(broken)}"
    return [
        f"predicted: speedup {speedup['value']:.2f} ({low:.2f} to {high:.2f}), of the part "
        f"compared {speedup['measured']:.2f}; {answer} (docs/sizing.md)"
    ]


def machine_of(run: RunDir) -> tuple[Calibration, Setup] | str:
    """What a two-round run says about its machine, and its tiers; or what it does not say."""
    manifest = run.manifest
    plan = evidence.plan(manifest)
    if plan.control or plan.alone:
        return "baseline" if plan.alone else "restores"
    requests, scrapes = run.requests(), run.scrapes()
    readings = Readings(scrapes)
    accounts = evidence.accounts(plan, requests, scrapes)
    setup = _setup(plan, manifest, bill.writes(plan, accounts, run.events()), readings)
    if isinstance(setup, str):
        return setup
    known = calibrate(plan, accounts, requests, readings, setup, seed=run.bootstrap_seed)
    return known if isinstance(known, str) else (known, setup)


def _figure(draws: Draws) -> dict[str, Any]:
    found = time_model.estimate(draws)
    return {"value": found.value, "ci95": [found.low, found.high]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the run was, as the simulation needs it."""

    profile: profile.Profile
    tiers: Tiers
    baseline: Tiers
    trace: Trace

    def bytes_of(self, tokens: int) -> float:
        """Bytes loaded to restore so many tokens: whole chunks, of separate states the last."""
        chunks, states = tokens // self.trace.chunk_tokens, self.tiers.state_bytes
        return chunks * (self.tiers.chunk_bytes - states) + (states if chunks else 0)


def _setup(
    plan: Plan, manifest: Mapping[str, Any], writes: Mapping[str, Any], readings: Readings
) -> Setup | str:
    """The run's tiers and requests, or what is not known of them."""
    if plan.concurrency != 1:
        return "concurrency"
    try:
        resolved = profile.from_dict(dict(manifest["profile"]))
    except ProfileError:
        return "profile"
    size, token_bytes = _record(resolved, manifest.get("model") or {}, plan, writes)
    if not size:
        return "record-size"
    stated = readings.kv_tokens(plan.arms[0])
    l0 = stated[0] if stated else resolved.engine.kv_cache_tokens
    if l0 is None:
        return "l0-size"
    cache, engine = resolved.cache, resolved.engine
    states = size - token_bytes * plan.chunk_tokens if token_bytes else 0
    shared: dict[str, Any] = {
        "chunk_bytes": size,
        "state_bytes": states if cache.separate_object_groups and states > 0 else 0,
        # vLLM states its pool in tokens of K and V; a chunk takes its states out of it as well.
        "l0_chunks": round(l0 * token_bytes / size) if token_bytes else l0 // plan.chunk_tokens,
        "state_every": max(1, engine.max_num_batched_tokens // engine.block_tokens)
        if resolved.model.hybrid
        else 1,
    }
    return Setup(
        profile=resolved,
        tiers=Tiers(
            **shared,
            l1_bytes=cache.l1_size_gb * GIB,
            l2=cache.l2 is not None,
            watermark=cache.eviction_watermark,
            ratio=cache.eviction_ratio,
        ),
        baseline=Tiers(**shared),
        trace=trace.of_profile(resolved),
    )


def _record(
    resolved: profile.Profile, model: Mapping[str, Any], plan: Plan, writes: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """Bytes of a chunk, and of one token's K and V: as built, by the model's shape, as written."""
    built = model.get("chunk_bytes"), model.get("kv_bytes_per_token")
    if all(isinstance(value, int) and value > 0 for value in built):
        return built
    config = sizes.known_config(resolved.model.name)
    if config is not None:
        sums = sizes.arithmetic_of(resolved, config)
        return sums.chunk_bytes(plan.chunk_tokens), sums.kv_bytes_per_token
    chunks, written = plan.context_tokens // plan.chunk_tokens, writes.get("bytes_per_context")
    return (round(written / chunks), None) if written and chunks else (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the run says about its machine, and which part of the run said it."""

    prefill: Prefill
    restores: Mapping[str, Restore]
    counts: Mapping[str, int]
    """Requests behind each restore."""
    repeats: tuple[int, ...]
    """The repeats of the lmcache arm that were used."""
    halved: bool
    """Whether only every other context of it was, because there is no other repeat."""

    def tests(self, repeat: int, index: int) -> bool:
        """Whether a request of the lmcache arm was left out of the calibration."""
        return index % 2 == 1 if self.halved else repeat not in self.repeats

    def as_dict(self) -> dict[str, Any]:
        """The calibration as the summary keeps it."""
        prefill = self.prefill
        return {
            "prefill": {
                "lengths": list(prefill.lengths),
                "constant_ms": _figure(prefill.constant_ms),
                "ms_per_1000_tokens": _figure(1000 * prefill.linear_ms),
                "origin": dict(prefill.origin),
            },
            "restore": {
                tier: {
                    "latency_ms": _figure(restore.latency_ms),
                    "gb_per_s": None
                    if restore.bytes_per_s is None
                    else float(restore.bytes_per_s[0]) / GB,
                    "n": self.counts.get(tier, 0),
                }
                for tier, restore in self.restores.items()
            },
            "repeats": list(self.repeats),
            "halved": self.halved,
        }


def calibrate(
    plan: Plan,
    accounts: Sequence[Account],
    requests: Sequence[RequestRecord],
    readings: Readings,
    setup: Setup,
    *,
    seed: int,
) -> Calibration | str:
    """What the run says about its machine, or the part of it that says nothing."""
    first, second = plan.arms
    cold = evidence.times_ms(accounts, first, "fill")
    lengths = {plan.context_tokens: _repeats(cold)}
    steps = bill.per_token_ms(
        plan, [record for record in requests if record.round == bill.DECODE], first
    )
    if steps:
        lengths[1] = _repeats(steps)
    prefill = time_model.fit_prefill(lengths, seed=seed)
    if prefill is None or plan.context_tokens not in prefill.lengths:
        return "baseline"
    rounds = [a for a in accounts if a.scenario == second and a.round == "measure" and a.completed]
    halved = len(rounds) == 1
    used = rounds if halved else rounds[: len(rounds) // 2]
    labels = {account.repeat: evidence.tiers(account, readings) for account in used}
    restores, counts = {}, {}
    for tier in RATES:
        chosen = [
            [
                record
                for record in account.completed
                if labels[account.repeat].get(record.index) == tier
                and not (halved and record.index % 2)
            ]
            for account in used
        ]
        restore = _restore(chosen, _rate(tier, used, readings), prefill, setup, seed)
        if restore is not None:
            restores[tier], counts[tier] = restore, sum(map(len, chosen))
    if not restores:
        return "restores"
    for tier in RATES:  # a tier that served nothing there is taken to be like the other
        restores.setdefault(tier, next(iter(restores.values())))
    return Calibration(
        prefill=prefill,
        restores=restores,
        counts=counts,
        repeats=tuple(account.repeat for account in used),
        halved=halved,
    )


def _repeats(arm: stats.Arm) -> list[list[float]]:
    return [list(contexts.values()) for contexts in arm.values()]


def _restore(
    chosen: Sequence[Sequence[RequestRecord]],
    bytes_per_s: float | None,
    prefill: Prefill,
    setup: Setup,
    seed: int,
) -> Restore | None:
    """One tier's cost by the requests, by repeat, that it alone served."""
    every = [record for records in chosen for record in records]
    restored = {record.cached_tokens or 0 for record in every}
    if len(restored) != 1:
        return None
    (tokens,) = restored
    return time_model.calibrate_restore(
        [[ns_to_ms(ns) for r in records if (ns := r.ttft_ns) is not None] for records in chosen],
        prefill,
        tokens=every[0].planned_tokens,
        restored=tokens,
        size=setup.bytes_of(tokens),
        bytes_per_s=bytes_per_s,
        seed=seed,
    )


def _rate(tier: str, used: Sequence[Account], readings: Readings) -> float | None:
    """Bytes per second that LMCache counted for a tier in these rounds; None: it does not say."""
    total = loads = 0.0
    for account in used:
        total += readings.grown(account.key, "lmcache", f"{RATES[tier]}_sum").value or 0.0
        loads += readings.grown(account.key, "lmcache", f"{RATES[tier]}_count").value or 0.0
    return GB * total / loads if total and loads else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the calibration predicts."""

    phases: int
    shares: Mapping[str, time_model.Estimate]
    ttft_ms: Mapping[str, Draws]
    speedup: Draws
    bandwidth_only: Draws
    """The speedup if restoring took no more than its transfer: no latency, so at most this."""


def _expect(plan: Plan, setup: Setup, known: Calibration) -> Expected:
    machine = Machine(prefill=known.prefill, restores=known.restores)
    free = {
        tier: Restore(latency_ms=time_model.certain(0), bytes_per_s=restore.bytes_per_s)
        for tier, restore in known.restores.items()
    }
    free = {tier: one for tier, one in free.items() if one.bytes_per_s is not None}
    first, second = plan.arms
    alone = prediction.forecast(setup.trace, setup.baseline, machine)
    cached = prediction.forecast(setup.trace, setup.tiers, machine)
    without = prediction.forecast(
        setup.trace, setup.tiers, Machine(prefill=known.prefill, restores=free), phases=1
    )
    return Expected(
        phases=cached.phases,
        shares=cached.shares,
        ttft_ms={first: alone.ttft_ms, second: cached.ttft_ms},
        speedup=alone.ttft_ms / cached.ttft_ms,
        bandwidth_only=alone.ttft_ms / without.ttft_ms,
    )


def _measured(plan: Plan, accounts: Sequence[Account], known: Calibration) -> dict[str, Any]:
    """What the run measured in the part that calibrated nothing; shares are those of all of it."""
    first, second = plan.arms
    alone = stats.arm_median(evidence.times_ms(accounts, first, "measure"))
    tested = {
        repeat: {index: ms for index, ms in contexts.items() if known.tests(repeat, index)}
        for repeat, contexts in evidence.times_ms(accounts, second, "measure").items()
    }
    cached = stats.arm_median(tested)
    rounds = [a.served for a in accounts if a.scenario == second and a.round == "measure"]
    totals = {
        tier: sum(tokens[tier] for tokens in rounds)
        for tier in TIERS
        if all(tier in tokens for tokens in rounds)
    }
    whole = len(totals) == len(TIERS) and sum(totals.values()) > 0
    every = sum(totals.values())
    return {
        "served_share": {tier: total / every for tier, total in totals.items()} if whole else {},
        "ttft_ms": {first: alone, second: cached},
        "speedup": alone / cached if alone and cached else None,
    }


def _replayed(
    plan: Plan, accounts: Sequence[Account], scrapes: Sequence[Scrape], setup: Setup
) -> dict[str, float]:
    """Shares by tier when the simulation is told when each request came and when the loop looked.

    It says nothing of what was hit: only whether the policy is the simulated one. Empty when
    LMCache's counters do not show the loop in every repeat.
    """
    shares = []
    for repeat in range(1, plan.repeats + 1):
        rounds = [
            next((a for a in accounts if a.key == (plan.treated, repeat, name)), None)
            for name in evidence.ROUNDS
        ]
        asked = [r for account in rounds if account for r in account.requests]
        times = [record.sent_ns for record in asked]
        looks = loop_looks(scrapes, plan.treated, repeat)
        if not looks or len(asked) != 2 * plan.contexts or None in times:
            return {}
        shares.append(_replay(asked, looks, setup))
    return {tier: float(np.mean([one[tier] for one in shares])) for tier in TIERS}


def _replay(
    asked: Sequence[RequestRecord], looks: Sequence[Look], setup: Setup
) -> dict[str, float]:
    look_ns, period_ns = loop_rhythm(looks)
    # The simulated loop looks after every whole period; its time begins LOOKS_BEFORE looks earlier.
    begin_ns = look_ns - LOOKS_BEFORE * period_ns
    records, replayed, took_s = iter(asked), [], {}
    for request in setup.trace:
        if request.label not in evidence.ROUNDS:
            replayed.append(request)
            continue
        record = next(records)
        sent_s = ((record.sent_ns or 0) - begin_ns) / NS_PER_S
        ttft_s = (record.ttft_ns or 0) / NS_PER_S
        if not record.cached_tokens:
            replayed += _pieces(request, setup.trace.chunk_tokens, sent_s, ttft_s)
            continue
        took_s[len(replayed)] = ttft_s
        replayed.append(request._replace(at_s=sent_s, gap_s=0.0, drained=False))
    told = replace(setup.trace, requests=lambda: iter(replayed))

    def ttft_of(served: Served) -> float:
        return took_s.get(served.number, 0.0)

    tiers = replace(setup.tiers, loop_s=period_ns / NS_PER_S, first_look_s=period_ns / NS_PER_S)
    return prediction.shares_of(prediction.once(told, tiers, ttft_of, "measure"))


def _pieces(request: Request, chunk_tokens: int, sent_s: float, ttft_s: float) -> list[Request]:
    """A cold request as it is stored: each chunk by itself while the prompt is computed."""
    chunks = len(request.keys)
    label = request.label if request.label == "measure" else "piece"
    return [
        Request(
            tokens=chunk_tokens if place < chunks - 1 else request.tokens - place * chunk_tokens,
            keys=[key],
            at_s=sent_s + ttft_s * (place + 1) / (chunks + 1),
            label=label,
        )
        for place, key in enumerate(request.keys)
    ]


LOOKS_BEFORE = 10
"""So often has the simulated loop looked before the first look that was seen."""
STEPS = 200
MOST_LOOKS = 60
LONGEST_WORK_MS = 20
"""How much longer than its second of sleep the loop may take."""


@dataclass(frozen=True, slots=True)
class Look:
    """A span of time in which the eviction loop looked once: for the how manieth time, and when."""

    number: int
    begin_ns: int
    end_ns: int


def loop_looks(scrapes: Sequence[Scrape], scenario: str, repeat: int) -> list[Look]:
    """Spans of time in which LMCache's eviction loop looked exactly once, about both rounds."""
    read = sorted(
        (scrape.at_ns, ticks)
        for scrape in scrapes
        if (scrape.scenario, scrape.repeat, scrape.source) == (scenario, repeat, "lmcache")
        and scrape.boundary.partition(":")[0] in evidence.ROUNDS
        if (ticks := counters.read(scrape.samples, "eviction_ticks")) is not None
    )
    found = [
        Look(round(other), before, after)
        for (before, one), (after, other) in pairwise(read)
        if other - one == 1 and after - before < NS_PER_S
    ]
    return found[:MOST_LOOKS]


def loop_rhythm(looks: Sequence[Look]) -> tuple[float, float]:
    """When the first of these looks was, in ns, and the nanoseconds from one look to the next.

    The loop sleeps a second and then works for some milliseconds, so its period is a little longer
    than that. Of all moments and periods the ones inside most spans are taken; of equally good
    moments the middle one, with the shortest period.
    """
    first = looks[0]
    moments = first.begin_ns + (first.end_ns - first.begin_ns) * (np.arange(STEPS) + 0.5) / STEPS
    best, chosen = -1.0, (float(moments[STEPS // 2]), float(NS_PER_S))
    for extra in range(LONGEST_WORK_MS + 1):
        period = NS_PER_S + extra * NS_PER_MS
        hits = np.zeros(STEPS)
        for look in looks:
            at = moments + (look.number - first.number) * period
            hits += (look.begin_ns <= at) & (at <= look.end_ns)
        if hits.max() > best:
            best = float(hits.max())
            fitting = np.flatnonzero(hits == best)
            chosen = float(moments[fitting[len(fitting) // 2]]), float(period)
    return chosen


def _checks(
    expected: Expected, found: Mapping[str, Any], replayed: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Whether each figure came out as predicted and, where not, which assumption broke.

    A share is compared as replayed where the loop's looks are known, else as predicted.
    """
    checks: list[dict[str, Any]] = []
    for tier in TIERS:
        measured = found["served_share"].get(tier)
        share = expected.shares[tier]
        told = replayed.get(tier, share.value)
        holds = None if measured is None else abs(told - measured) <= SHARE_ALLOWED
        within = measured is not None and (
            share.low - SHARE_ALLOWED <= measured <= share.high + SHARE_ALLOWED
        )
        broke = None
        if holds is False:
            broke = "l0" if tier == "L0" else "loop" if within and not replayed else "policy"
        checks.append(
            {
                "id": f"share-{tier}",
                "predicted": told,
                "measured": measured,
                "allowed": SHARE_ALLOWED,
                "within_range": within,
                "holds": holds,
                "broke": broke,
            }
        )
    told, measured = float(expected.speedup[0]), found.get("speedup")
    holds = None if measured is None else abs(told / measured - 1) <= SPEEDUP_ALLOWED
    checks.append(
        {
            "id": "speedup",
            "predicted": told,
            "measured": measured,
            "allowed": SPEEDUP_ALLOWED,
            "holds": holds,
            "broke": _broke(expected, found) if holds is False else None,
        }
    )
    return checks


def _blind_points(expected: Expected, found: Mapping[str, Any]) -> float | None:
    """By how many points a share is off at most when nobody knows when the loop looks."""
    measured = found["served_share"]
    off = [abs(share.value - measured[t]) for t, share in expected.shares.items() if t in measured]
    return 100 * max(off) if off else None


def _broke(expected: Expected, found: Mapping[str, Any]) -> str:
    """Which assumption made the speedup differ: the arm whose own TTFT is farther off."""
    off = {
        arm: abs(np.log(float(draws[0]) / found["ttft_ms"][arm]))
        for arm, draws in expected.ttft_ms.items()
    }
    first = next(iter(expected.ttft_ms))
    return "prefill" if max(off, key=lambda arm: off[arm]) == first else "restore"
