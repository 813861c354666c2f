"""What an A/B shows: what LMCache saves when contexts come back, and what it costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab import cautions, correctness, evidence, invariants, stats, verdict
from kvlab.evidence import ROUNDS, Account, Plan, Readings
from kvlab.invariants import Facts, stores
from kvlab.results import bill, entries, predicted
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for an A/B, complete or partial."""
    manifest, events = run.manifest, run.events()
    plan = evidence.plan(manifest)
    scrapes = run.scrapes()
    readings = Readings(scrapes)
    asked = run.requests()
    accounts = evidence.accounts(plan, asked, scrapes)
    seed = run.bootstrap_seed
    times = {
        (arm, name): evidence.times_ms(accounts, arm, name) for arm in plan.arms for name in ROUNDS
    }
    first, second = plan.arms[0], plan.treated
    speedup = revisit = false = None
    if plan.alone:
        revisit = stats.ratio(times[second, "fill"], times[second, "measure"], seed=seed)
    else:
        speedup = stats.ratio(times[first, "measure"], times[second, "measure"], seed=seed)
        false = stats.ratio(times[first, "fill"], times[first, "measure"], seed=seed)
    facts = Facts(
        plan=plan,
        accounts=accounts,
        events=events,
        readings=readings,
        correctness=correctness.judge(plan, accounts),
        false_gain=false,
    )
    held = invariants.check(facts)
    cost = bill.bill(plan, accounts, times, asked, events, readings, manifest["profile"], seed=seed)
    if plan.alone:
        reached = verdict.alone(held, revisit)
    else:
        reached = verdict.reach(held, speedup, control=plan.control)
    work = entries.workload(facts)
    figures = {
        "control": plan.control,
        "arms": list(plan.arms),
        "workload": work,
        "ttft_ms": {
            arm: entries.ttft(
                times[arm, "measure"], times[arm, "fill"], entries.labels(accounts, arm, readings)
            )
            for arm in plan.arms
        },
        "ttft_series_ms": {
            arm: {name: entries.series(plan, accounts, arm, name) for name in ROUNDS}
            for arm in plan.arms
        },
        "speedup": entries.speedup_figures(speedup),
        "revisit": entries.speedup_figures(revisit) if plan.alone else None,
        "false_gain": {
            arm: false_gain(times[arm, "fill"], times[arm, "measure"]) for arm in plan.arms
        },
        "served_tokens": {
            arm: {name: entries.served(accounts, arm, name) for name in ROUNDS} for arm in plan.arms
        },
        "instances": entries.instances(plan, readings) if plan.attached else None,
        "conservation": entries.conservation(accounts),
        "correctness": facts.correctness,
        "drain": drains(facts),
        "eviction": evictions(accounts, plan),
        "bill": cost,
        "predicted": predicted.predicted(
            plan, accounts, asked, scrapes, manifest, (cost or {}).get("writes") or {}, seed=seed
        ),
        "requests": {arm: entries.requests(accounts, arm) for arm in plan.arms},
        "engine": entries.engine(facts, manifest),
        "time_s": entries.time_s(events, asked),
        "cautions": cautions.check(facts, manifest, speedup, work.get("speedup_bound", math.inf)),
    }
    return frame(run, reached, figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] != verdict.INVALID:
        for arm in found["arms"]:
            times = found["ttft_ms"][arm]
            low, high = times["range"]
            lines.append(f"{arm}: median TTFT {times['median']:.1f} ms ({low:.1f} to {high:.1f})")
        for name, words in (("speedup", "speedup"), ("revisit", "first visit / second visit")):
            if ratio := found.get(name):
                low, high = ratio["ci95"]
                lines.append(f"{words}: {ratio['value']:.2f} ({low:.2f} to {high:.2f})")
        lines += predicted.lines(found.get("predicted") or {})
        cold = (found.get("bill") or {}).get("cold") or {}
        if "answer" in cold:
            low, high = cold["ci95"]
            lines.append(
                f"bill: round 1 with LMCache takes {cold['ratio']:.2f} times as long as without "
                f"({low:.2f} to {high:.2f}): {cold['answer']} (margin {cold['margin']:.0%})"
            )
    for server, rounds in (found.get("instances") or {}).items():
        counts = ", ".join(
            f"{name.replace('_', ' ')} {n:,}" for name, n in rounds["measure"].items()
        )
        lines.append(f"{server}, round 2: {counts}")
    times = found.get("time_s") or {}
    if times.get("overhead_share") is not None:
        lines.append(
            f"time: {times['total']:.0f} s, of which {times['overhead_share']:.1%} was neither "
            "server start nor request"
        )
    lines += [f"note: {caution['text']}" for caution in found["cautions"]]
    return "\n".join(lines)


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
                    name: entries.count(event.detail.get(name))
                    for name in ("submitted", "completed", "failed", "files", "bytes", "odd_files")
                },
                "expected_chunks": fill.least if fill else None,
                "stored_chunks": entries.count(fill.stored) if fill else None,
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
