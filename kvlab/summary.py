"""The summary of a run: what its records mean, as one JSON object that ``verify`` can recompute.

Nothing in it depends on anything but the run folder: same records, same summary, to the last bit.
A figure that was not measured is absent, never 0 and never NaN.
"""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from kvlab import cautions, correctness, evidence, invariants, stats, verdict
from kvlab.errors import RunFolderError
from kvlab.evidence import ROUNDS, Account, Plan, Readings
from kvlab.invariants import Facts, servers, stores
from kvlab.invariants import requests as conditions
from kvlab.records import Event, RequestRecord
from kvlab.results import bill
from kvlab.rundir import RunDir
from kvlab.units import ns_to_s

SCHEMA = 1
EXPERIMENTS: tuple[str, ...] = (
    "acceptance",
    "restart",
    "object-groups",
    "shared-cache",
    "eviction",
    "soak",
)
"""Experiments beside ``two-round``; each has a module of its name in ``kvlab.results``."""


def conclude(run: RunDir) -> dict[str, Any]:
    """The run's summary, after writing it into the folder and sealing the folder."""
    summary = summarise(run)
    run.write_summary(summary)
    run.seal()
    return summary


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a run, complete or partial."""
    experiment = run.manifest.get("experiment")
    if experiment == "two-round":
        return two_round(run)
    return dict(_results(experiment, str(run.path)).summarise(run))


def _results(experiment: Any, place: str) -> ModuleType:
    """The module that knows what an experiment's records mean."""
    if experiment not in EXPERIMENTS:
        raise RunFolderError(
            f"{place} is a run of {experiment!r}, which this kvlab cannot summarise",
            hint="update kvlab: pip install --upgrade kvlab",
        )
    return importlib.import_module(f"kvlab.results.{experiment.replace('-', '_')}")


def two_round(run: RunDir) -> dict[str, Any]:
    """The summary of a two-round run."""
    manifest, events = run.manifest, run.events()
    plan = evidence.plan(manifest)
    scrapes = run.scrapes()
    readings = Readings(scrapes)
    asked = run.requests()
    accounts = evidence.accounts(plan, asked, scrapes)
    seed = int((manifest.get("seeds") or {}).get("bootstrap", 0))
    times = {
        (arm, name): evidence.times_ms(accounts, arm, name) for arm in plan.arms for name in ROUNDS
    }
    first, second = plan.arms
    speedup = stats.ratio(times[first, "measure"], times[second, "measure"], seed=seed)
    facts = Facts(
        plan=plan,
        accounts=accounts,
        events=events,
        readings=readings,
        correctness=correctness.judge(plan, accounts),
        false_gain=stats.ratio(times[first, "fill"], times[first, "measure"], seed=seed),
    )
    held = invariants.check(facts)
    reached = verdict.reach(held, speedup, control=plan.control)
    work = workload(facts)
    summary = {
        "schema": SCHEMA,
        "experiment": manifest["experiment"],
        "profile": manifest["profile"]["name"],
        "run": run.id,
        "status": manifest.get("status"),
        "verdict": {"status": reached.status, "reasons": list(reached.reasons)},
        "control": plan.control,
        "arms": list(plan.arms),
        "workload": work,
        "ttft_ms": {
            arm: ttft(times[arm, "measure"], times[arm, "fill"], labels(accounts, arm, readings))
            for arm in plan.arms
        },
        "ttft_series_ms": {
            arm: {name: series(plan, accounts, arm, name) for name in ROUNDS} for arm in plan.arms
        },
        "speedup": speedup_figures(speedup),
        "false_gain": {
            arm: false_gain(times[arm, "fill"], times[arm, "measure"]) for arm in plan.arms
        },
        "served_tokens": {
            arm: {name: served(accounts, arm, name) for name in ROUNDS} for arm in plan.arms
        },
        "conservation": conservation(accounts),
        "correctness": facts.correctness,
        "drain": drains(facts),
        "eviction": evictions(accounts, plan),
        "bill": bill.bill(
            plan, accounts, times, asked, events, readings, manifest["profile"], seed=seed
        ),
        "requests": {arm: requests(accounts, arm) for arm in plan.arms},
        "engine": engine(facts, manifest),
        "time_s": time_s(events, asked),
        "cautions": cautions.check(facts, manifest, speedup, work.get("speedup_bound", math.inf)),
        "invariants": [invariant.as_dict() for invariant in held],
    }
    return clean(summary)


def text(summary: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    if summary.get("experiment") != "two-round":
        return str(_results(summary.get("experiment"), "the summary").text(summary))
    status = summary["verdict"]["status"]
    lines = [f"verdict: {status}"]
    lines += [f"  - {reason}" for reason in summary["verdict"]["reasons"]]
    if status != verdict.INVALID:
        for arm in summary["arms"]:
            times = summary["ttft_ms"][arm]
            low, high = times["range"]
            lines.append(f"{arm}: median TTFT {times['median']:.1f} ms ({low:.1f} to {high:.1f})")
        speedup = summary["speedup"]
        low, high = speedup["ci95"]
        lines.append(f"speedup: {speedup['value']:.2f} ({low:.2f} to {high:.2f})")
        cold = (summary.get("bill") or {}).get("cold") or {}
        if "answer" in cold:
            low, high = cold["ci95"]
            lines.append(
                f"bill: round 1 with LMCache takes {cold['ratio']:.2f} times as long as without "
                f"({low:.2f} to {high:.2f}): {cold['answer']} (margin {cold['margin']:.0%})"
            )
    times = summary.get("time_s") or {}
    if times.get("overhead_share") is not None:
        lines.append(
            f"time: {times['total']:.0f} s, of which {times['overhead_share']:.1%} was neither "
            "server start nor request"
        )
    lines += [f"note: {caution['text']}" for caution in summary["cautions"]]
    return "\n".join(lines)


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


def false_gain(fill: stats.Arm, measure: stats.Arm) -> dict[str, Any]:
    """Round 1 over round 2 within one arm: in the baseline it is a gain without a cache."""
    top, bottom = stats.arm_median(fill), stats.arm_median(measure)
    both = [repeat for repeat in sorted(fill) if fill[repeat] and measure.get(repeat)]
    return {
        "value": top / bottom if top and bottom else None,
        "repeats": [
            a / b
            for a, b in zip(
                stats.repeat_medians({r: fill[r] for r in both}),
                stats.repeat_medians({r: measure[r] for r in both}),
                strict=True,
            )
        ],
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
                "vllm_local": _count(account.local.value),
                "vllm_external": _count(account.external.value),
                "l1": _count(account.l1.value),
                "l2": _count(account.l2.value),
                "residual": account.residual,
            }
            for account in accounts
        ],
    }


def drains(facts: Facts) -> list[dict[str, Any]]:
    """Each wait for stores, with the chunks that a fill should have stored."""
    fills = {a.key: stores.stored(facts, a) for a in facts.rounds("fill", arm="lmcache")}
    found = []
    for event in facts.events:
        key = (event.scenario or "", event.repeat or 0, event.round or "")
        if event.kind != "drained" or event.round not in ROUNDS:
            continue
        fill = fills.get(key)
        found.append(
            {
                "scenario": event.scenario,
                "repeat": event.repeat,
                "round": event.round,
                "waited_s": event.detail.get("waited_s"),
                "stable": event.detail.get("stable"),
                **{
                    name: _count(event.detail.get(name))
                    for name in ("submitted", "completed", "failed", "files", "bytes", "odd_files")
                },
                "expected_chunks": fill.least if fill else None,
                "stored_chunks": _count(fill.stored) if fill else None,
            }
        )
    return found


def evictions(accounts: Sequence[Account], plan: Plan) -> dict[str, Any]:
    """Chunks that L1 evicted, by round, over all repeats; absent where LMCache did not say."""
    if plan.control:
        return {}
    found = {}
    for name in ROUNDS:
        rounds = [a.evicted.value for a in accounts if a.has_lmcache and a.round == name]
        known = [value for value in rounds if value is not None]
        found[name] = round(sum(known)) if len(known) == len(rounds) else None
    return {"l1_chunks": found}


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


def clean(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without what was not measured, as the JSON that is written and read again."""
    cleaned: dict[str, Any] = json.loads(json.dumps(_known(summary), allow_nan=False))
    return cleaned


def _known(value: Any) -> Any:
    """A value without null entries; series keep theirs, as they mark failed requests."""
    if isinstance(value, Mapping):
        kept = {str(key): _known(item) for key, item in value.items() if item is not None}
        # Whether an invariant holds is null on purpose: unknown is one of three answers.
        return {**kept, "holds": value["holds"]} if "holds" in value else kept
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value


def _count(value: float | None) -> int | None:
    """A counter's value as the whole number that it is."""
    return None if value is None else round(value)
