"""Entries that several experiments' summaries share: times, tokens by tier, servers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab import cautions, evidence, stats
from kvlab.evidence import Account, Plan, Readings
from kvlab.invariants import Facts, servers
from kvlab.invariants import requests as conditions
from kvlab.records import Event, RequestRecord
from kvlab.units import ns_to_s


def workload(facts: Facts) -> dict[str, Any]:
    """What was asked, and the most that restoring whole chunks could save."""
    plan = facts.plan
    left = plan.context_tokens - plan.restorable_tokens
    return {
        "shape": plan.shape,
        "contexts": plan.contexts,
        "context_tokens": plan.context_tokens,
        "output_tokens": plan.output_tokens,
        "repeats": plan.repeats,
        "order": [arm for _, arm in cautions.launched(facts)],
        "pause_s": plan.pause_s,
        "concurrency": plan.concurrency,
        "chunk_tokens": plan.chunk_tokens,
        "block_tokens": plan.block_tokens,
        "restorable_tokens": plan.restorable_tokens,
        "ceiling_share": plan.restorable_tokens / plan.context_tokens,
        "speedup_bound": plan.context_tokens / left,
    }


def series(
    plan: Plan, accounts: Sequence[Account], arm: str, name: str
) -> list[list[float | None]]:
    """TTFT in ms by repeat and order of the requests; null where one failed or is missing."""
    times = evidence.times_ms(accounts, arm, name)
    return [[times[repeat].get(i) for i in range(plan.contexts)] for repeat in sorted(times)]


def labels(accounts: Sequence[Account], arm: str, readings: Readings) -> dict[int, dict[int, str]]:
    """The tier of each request of the measure round, by repeat and index."""
    return {
        account.repeat: evidence.tiers(account, readings)
        for account in accounts
        if account.scenario == arm and account.round == "measure"
    }


def ttft(
    measure: stats.Arm, fill: stats.Arm, labels: Mapping[int, Mapping[int, str]]
) -> dict[str, Any]:
    """The figures of one arm: of the measure round, but for ``fill_median``."""
    medians = stats.repeat_medians(measure)
    every = [value for repeat in sorted(measure) for value in measure[repeat].values()]
    by_tier: dict[str, list[float]] = {}
    for repeat, contexts in measure.items():
        for index, value in contexts.items():
            by_tier.setdefault(labels.get(repeat, {}).get(index, "unknown"), []).append(value)
    first_repeat = measure[min(measure)] if measure else {}
    return {
        "median": stats.arm_median(measure),
        "repeats": medians,
        "range": [min(medians), max(medians)] if medians else None,
        "first": first_repeat.get(0),
        "n": len(every),
        "p90": stats.percentile(every, 0.90),
        "p99": stats.percentile(every, 0.99),
        "fill_median": stats.arm_median(fill),
        "by_tier": {
            tier: {"median": stats.median(by_tier[tier]), "n": len(by_tier[tier])}
            for tier in (*evidence.TIERS, "mixed", "recompute", "unknown")
            if tier in by_tier
        },
    }


def speedup_figures(speedup: stats.Ratio | None) -> dict[str, Any]:
    """The speedup, its interval, and the same as "lower by so many percent"."""
    if speedup is None:
        return {}
    return {
        "value": speedup.value,
        "ci95": [speedup.low, speedup.high],
        "percent_lower": 100 * (1 - 1 / speedup.value),
        "method": speedup.method,
    }


def served(accounts: Sequence[Account], arm: str, name: str) -> dict[str, int]:
    """Tokens by tier over all repeats; a tier that is unknown in any repeat is absent."""
    rounds = [a.served for a in accounts if a.scenario == arm and a.round == name]
    return {
        tier: sum(tokens[tier] for tokens in rounds)
        for tier in (*evidence.TIERS, "recompute")
        if all(tier in tokens for tokens in rounds)
    }


def conservation(accounts: Sequence[Account]) -> dict[str, Any]:
    """The three books of every round, and what none of them explains."""
    residuals = [account.residual for account in accounts]
    known = [residual for residual in residuals if residual is not None]
    return {
        "residual_tokens": sum(known) if len(known) == len(residuals) else None,
        "detail": [
            {
                "scenario": account.scenario,
                "repeat": account.repeat,
                "round": account.round,
                "client": account.client,
                "vllm_local": count(account.local.value),
                "vllm_external": count(account.external.value),
                "l1": count(account.l1.value),
                "l2": count(account.l2.value),
                "residual": account.residual,
            }
            for account in accounts
        ],
    }


INSTANCE_COUNTS = {
    "vllm": ("prompt_tokens", "local_hits", "external_hits"),
    "lmcache": ("l1_hit_tokens", "l2_hit_tokens", "l1_write_chunks"),
}


def instances(plan: Plan, readings: Readings) -> dict[str, dict[str, Any]] | None:
    """What each server of an attached deployment counted, where there are several of a kind.

    By server and round, over all repeats of the treated arm; a count that is unknown in any of
    them is absent.
    """
    found: dict[str, dict[str, Any]] = {}
    for role, names in INSTANCE_COUNTS.items():
        for server in readings.instances(plan.treated, role):
            found[server] = {
                name: {
                    canonical: _over_repeats(plan, readings, server, name, canonical)
                    for canonical in names
                }
                for name in evidence.ROUNDS
            }
    return found or None


def _over_repeats(
    plan: Plan, readings: Readings, server: str, name: str, canonical: str
) -> int | None:
    grown = [
        readings.grown((plan.treated, repeat, name), server, canonical).value
        for repeat in range(1, plan.repeats + 1)
    ]
    known = [value for value in grown if value is not None]
    return round(sum(known)) if len(known) == len(grown) else None


def requests(accounts: Sequence[Account], arm: str) -> dict[str, Any]:
    """How many requests of the two rounds were sent, completed and failed, and why.

    Beside it the prompt lengths that were planned and that the server saw, and the fields that
    carried the first tokens, each with its number of answers.
    """
    every = [record for a in accounts if a.scenario == arm for record in a.requests]
    done = [record for record in every if record.error is None]
    fields = Counter(record.first_token_kind for record in done if record.first_token_kind)
    return {
        "planned_tokens": sorted({record.planned_tokens for record in every}),
        "prompt_tokens": sorted({r.prompt_tokens for r in done if r.prompt_tokens is not None}),
        "first_token_fields": dict(sorted(fields.items())),
        "sent": len(every),
        "completed": len(done),
        "failed": len(every) - len(done),
        "reasons": conditions.failures(every),
    }


def engine(facts: Facts, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, connector and what the logs state, from the treated arm's start."""
    ready = [event for event in facts.events if event.kind == "ready"]
    treated = next((e for e in ready if e.scenario == facts.plan.treated), None)
    detail = treated.detail if treated else {}
    chosen = manifest.get("connector") or {}
    versions = detail.get("versions") or {}
    return {
        **(detail.get("facts") or {}),
        "connector": None if facts.plan.control else detail.get("connector"),
        "connector_reason": None if facts.plan.control else chosen.get("reason"),
        "vllm_version": versions.get("vllm"),
        "lmcache_version": versions.get("lmcache"),
        "block_tokens": facts.plan.block_tokens,
        "kv_cache_tokens": {
            arm: sizes[0] for arm in facts.plan.arms if (sizes := servers.kv_tokens(facts, arm))
        },
    }


def time_s(events: Sequence[Event], asked: Sequence[RequestRecord]) -> dict[str, Any]:
    """Where the time of the run went, in seconds.

    ``overhead`` is what is neither server start nor request; ``other`` what no part accounts for.
    ``requests`` runs from the first to the last of each round, probe and warm-up included.
    Spans of a resumed run are added up: the time between its parts is not the run's.
    """
    total = _spans(events, "run_started", ("run_finished",))
    if total is None:
        return {}
    rounds: dict[tuple[str, int, str], list[RequestRecord]] = {}
    for record in asked:
        rounds.setdefault((record.scenario, record.repeat, record.round), []).append(record)
    parts = {
        "server_start": _spans(events, "launching", ("ready", "failure")) or 0.0,
        "requests": ns_to_s(sum(map(_busy_ns, rounds.values()))),
        "pause": sum(float(e.detail.get("seconds") or 0) for e in events if e.kind == "pause"),
        "drain": sum(float(e.detail.get("waited_s") or 0) for e in events if e.kind == "drained"),
        "stop": _spans(events, "stopping", ("stopped",)) or 0.0,
    }
    other = total - sum(parts.values())
    overhead = total - parts["server_start"] - parts["requests"]
    return {
        "total": total,
        **parts,
        "other": other,
        "other_share": other / total if total else None,
        "overhead": overhead,
        "overhead_share": overhead / total if total else None,
    }


def _spans(events: Sequence[Event], begin: str, ends: tuple[str, ...]) -> float | None:
    """Seconds from each begin to the end that follows it, added up; None: there is none."""
    total, started, found = 0, None, False
    for event in events:
        if event.kind == begin:
            started = event.at_ns
        elif event.kind in ends and started is not None:
            total, started, found = total + event.at_ns - started, None, True
    return ns_to_s(total) if found else None


def _busy_ns(requests: Sequence[RequestRecord]) -> int:
    """From the first request of a round to the last byte of its last."""
    ends = [r.last_byte_ns or r.sent_ns or r.queued_ns for r in requests]
    return max(ends) - min(r.queued_ns for r in requests)


def count(value: float | None) -> int | None:
    """A counter's value as the whole number that it is."""
    return None if value is None else round(value)
