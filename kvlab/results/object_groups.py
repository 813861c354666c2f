"""What a run of object-groups means: is there a difference, and are both settings right? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlab import correctness, evidence, invariants, stats, verdict
from kvlab.evidence import ROUNDS, Account, Plan, Readings
from kvlab.invariants import Facts, Invariant
from kvlab.invariants.facts import weigh
from kvlab.records import RequestRecord
from kvlab.results import entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.verdict import Verdict

ON, OFF = "groups-on", "groups-off"
FLAGS = {ON: "--separate-object-groups", OFF: "--no-separate-object-groups"}
MARGIN = 0.05
GB = 1e9
"""LMCache's throughput counters are in so many bytes per second."""
RANK = {"fail": 0, "unknown": 1, "pass with ties": 2, "pass": 3}
"""Verdicts of correctness, from worst to best."""
NEEDLESS = ("baseline-steady",)
"""Conditions of the A/B that speak of an arm without LMCache."""


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a run of object-groups, complete or partial."""
    manifest, events, scrapes = run.manifest, run.events(), run.scrapes()
    plan = _plan(manifest)
    accounts = evidence.accounts(plan, run.requests(), scrapes)
    readings = Readings(scrapes)
    seed = run.bootstrap_seed
    judged = {arm: _judge(plan, accounts, arm) for arm in plan.arms}
    facts = Facts(
        plan=plan,
        accounts=accounts,
        events=events,
        readings=readings,
        correctness=_worst(judged),
        false_gain=None,
    )
    times = {
        (arm, name): evidence.times_ms(accounts, arm, name) for arm in plan.arms for name in ROUNDS
    }
    found = stats.equivalence(
        times[OFF, "measure"], times[ON, "measure"], margin=_margin(manifest), seed=seed
    )
    if found is not None and plan.repeats < 2:
        found = replace(found, answer="undecided")  # one start each: whose difference is it?
    held = [defined(facts), took_effect(facts), *_conditions(facts)]
    reached = reach(held, found, plan.repeats)
    figures = {
        "arms": list(plan.arms),
        "workload": entries.workload(facts),
        "ttft_ms": {
            arm: entries.ttft(
                times[arm, "measure"],
                times[arm, "fill"],
                entries.labels(accounts, arm, readings),
            )
            for arm in plan.arms
        },
        "ttft_series_ms": {
            arm: {name: entries.series(plan, accounts, arm, name) for name in ROUNDS}
            for arm in plan.arms
        },
        "equivalence": equivalence_figures(found),
        "served_tokens": {
            arm: {name: entries.served(accounts, arm, name) for name in ROUNDS} for arm in plan.arms
        },
        "hit_share": {arm: hit_share(plan, accounts, arm) for arm in plan.arms},
        "records": {arm: records(facts, arm) for arm in plan.arms},
        "l2_load": {arm: l2_load(facts, arm) for arm in plan.arms},
        "correctness": judged,
        "recommendation": recommend(judged, found, hybrid=_hybrid(manifest)),
        "conservation": entries.conservation(accounts),
        "requests": {arm: entries.requests(accounts, arm) for arm in plan.arms},
        "engine": entries.engine(facts, manifest),
        "time_s": entries.time_s(events, run.requests()),
    }
    return frame(run, reached, figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] != verdict.INVALID:
        for arm in found["arms"]:
            times, kept = found["ttft_ms"][arm], found["records"][arm]
            shown = f"{arm}: median TTFT {times['median']:.1f} ms"
            if "bytes_per_context" in kept:
                shown += (
                    f", {kept['files_per_context']:g} files and "
                    f"{kept['bytes_per_context']:,.0f} bytes per context"
                )
            lines.append(f"{shown}, correctness: {found['correctness'][arm]['verdict']}")
        answer = found["equivalence"]
        low, high = answer["ci90"]
        lines.append(
            f"TTFT off / on: {answer['ratio']:.3f} (90 % interval {low:.3f} to {high:.3f}): "
            f"{answer['answer']} within {answer['margin']:.0%}"
        )
    advice = found["recommendation"]
    lines.append(f"recommended: {advice.get('setting', 'neither')} ({advice['reason']})")
    return "\n".join(lines)


def _plan(manifest: Mapping[str, Any]) -> Plan:
    plan = evidence.plan(manifest)
    setup = manifest["profile"]["experiments"].get("object_groups") or {}
    return replace(plan, repeats=int(setup.get("repeats", 3)), cached=plan.arms)


def _margin(manifest: Mapping[str, Any]) -> float:
    setup = manifest["profile"]["experiments"].get("object_groups") or {}
    return float(setup.get("margin", MARGIN))


def _hybrid(manifest: Mapping[str, Any]) -> bool:
    return bool((manifest["profile"].get("model") or {}).get("hybrid"))


def _other(plan: Plan, arm: str) -> str:
    return next(one for one in plan.arms if one != arm)


def _judge(plan: Plan, accounts: Sequence[Account], arm: str) -> dict[str, Any]:
    """Whether one setting's restored answers equal the cold ones of the other setting."""
    books = {account.key: account for account in accounts}
    cold: list[tuple[RequestRecord, RequestRecord]] = []
    restored: list[tuple[RequestRecord, RequestRecord]] = []
    for repeat in range(1, plan.repeats + 1):
        own = books[arm, repeat, "fill"]
        measured = books[arm, repeat, "measure"]
        other = books[_other(plan, arm), repeat, "fill"]
        cold += [
            (a, b)
            for a, b in correctness.same_prompts(other, own)
            if a.cached_tokens == 0 and b.cached_tokens == 0
        ]
        restored += [
            (a, b)
            for a, b in correctness.same_prompts(other, measured)
            if a.cached_tokens == 0 and b.cached_tokens
        ]
    return correctness.weigh(cold, restored, plan.tolerance_nat)


def _worst(judged: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict of the worse setting, with the reason of both."""
    worst = min(judged.values(), key=lambda one: RANK[one["verdict"]])
    reasons = "; ".join(f"{arm}: {one['reason']}" for arm, one in judged.items())
    return {**worst, "reason": reasons}


def _conditions(facts: Facts) -> list[Invariant]:
    """The conditions of the A/B, of both settings: each of them is a treated arm."""
    merged: dict[str, list[Invariant]] = {}
    for arm, flag in ((OFF, False), (ON, True)):
        plan = replace(facts.plan, arms=(_other(facts.plan, arm), arm), object_groups=flag)
        for one in invariants.check(replace(facts, plan=plan)):
            if one.name not in NEEDLESS:
                merged.setdefault(one.name, []).append(one)
    return [_both(name, found) for name, found in merged.items()]


def _both(name: str, found: Sequence[Invariant]) -> Invariant:
    """One condition in both settings: what is wrong with either, else the details of both."""
    for holds in (False, None):
        worse = [one.detail for one in found if one.holds is holds]
        if worse:
            return Invariant(name, holds, "; ".join(dict.fromkeys(worse)))
    return Invariant(name, True, "; ".join(dict.fromkeys(one.detail for one in found)))


def defined(facts: Facts) -> Invariant:
    """Each launch was told its setting, and had an L2 folder that no other setting used."""
    bad, unknown = [], []
    folders: dict[str, set[str]] = {}
    for arm in facts.plan.arms:
        for repeat in range(1, facts.plan.repeats + 1):
            said = next(
                (
                    event.detail
                    for event in facts.events
                    if event.kind == "ablation" and (event.scenario, event.repeat) == (arm, repeat)
                ),
                None,
            )
            if said is None:
                unknown.append(f"{arm}, repeat {repeat}: its flag was not recorded")
            elif said.get("flag") != FLAGS[arm]:
                bad.append(f"ablation not defined: {arm} was started with {said.get('flag')}")
            if said and said.get("l2_folder"):
                folders.setdefault(arm, set()).add(str(said["l2_folder"]))
    shared = set.intersection(*folders.values()) if len(folders) == len(facts.plan.arms) else set()
    if shared:
        bad.append(f"ablation not defined: both settings used the L2 folder {sorted(shared)[0]}")
    good = "each setting was passed by its flag, with L2 folders of its own"
    return weigh("ablation-defined", good, bad, unknown)


def took_effect(facts: Facts) -> Invariant:
    """LMCache kept more objects per chunk with the setting on than with it off."""
    stated: dict[str, set[int]] = {arm: set() for arm in facts.plan.arms}
    unknown = []
    for account in facts.rounds("fill"):
        groups = facts.object_groups(account)
        if groups is None:
            unknown.append(f"{account.place}: LMCache did not state its object groups")
        else:
            stated[account.scenario].add(groups)
    bad = []
    if not unknown and not min(stated[ON]) > max(stated[OFF]):
        bad.append(
            f"the setting changed nothing: {max(stated[OFF])} object group(s) with it off, "
            f"{min(stated[ON])} with it on; this model may have only one kind of layer"
        )
    good = "; ".join(
        f"{arm}: {max(found)} object group(s)" for arm, found in stated.items() if found
    )
    return weigh("setting-took-effect", good, bad, unknown)


def reach(held: Sequence[Invariant], found: stats.Equivalence | None, repeats: int) -> Verdict:
    """The verdict on the claim that the setting makes no difference to TTFT.

    Proven: equivalent. Refuted: different. Not shown: neither.
    """
    reasons = verdict.blockers(held)
    if found is None:
        reasons.append("difference: no two requests of both settings can be compared")
    if reasons or found is None:
        return Verdict(verdict.INVALID, reasons)
    interval = f"{found.ratio.value:.3f} (90 % interval {found.low:.3f} to {found.high:.3f})"
    margin = f"{found.margin:.0%}"
    if found.answer == "equivalent":
        return Verdict(verdict.PROVEN, [f"TTFT off / on {interval}: equivalent within {margin}"])
    if found.answer == "different":
        return Verdict(verdict.REFUTED, [f"TTFT off / on {interval}: the settings differ"])
    if repeats < 2:
        return Verdict(
            verdict.NOT_SHOWN, [f"TTFT off / on {interval}: one start of each decides nothing"]
        )
    return Verdict(
        verdict.NOT_SHOWN,
        [
            f"TTFT off / on {interval}: neither equivalent within {margin} nor different; "
            "more repeats would tell"
        ],
    )


def recommend(
    judged: Mapping[str, Mapping[str, Any]], found: stats.Equivalence | None, *, hybrid: bool
) -> dict[str, Any]:
    """The setting to use and why; right answers come before fast ones.

    Without a difference in TTFT the recipe for hybrid models decides, which separates groups.
    """
    ranks = {arm: RANK[one["verdict"]] for arm, one in judged.items()}
    best = max(ranks, key=lambda arm: ranks[arm])
    if ranks[best] < RANK["pass with ties"]:
        both = all(rank == RANK["fail"] for rank in ranks.values())
        return {"setting": None, "reason": "both wrong" if both else "unknown"}
    faster = None
    if found is not None and found.answer == "different":
        faster = ON if found.ratio.value > 1 else OFF
    if len(set(ranks.values())) > 1:
        slower = faster is not None and faster != best
        return {"setting": best, "reason": "faster is worse" if slower else "correctness"}
    if faster is not None:
        return {"setting": faster, "reason": "faster"}
    return {"setting": ON if hybrid else None, "reason": "recipe" if hybrid else "no difference"}


def equivalence_figures(found: stats.Equivalence | None) -> dict[str, Any]:
    """The answer, the ratio off / on with both intervals, and how they were computed."""
    if found is None:
        return {}
    return {
        "answer": found.answer,
        "margin": found.margin,
        "ratio": found.ratio.value,
        "ci95": [found.ratio.low, found.ratio.high],
        "ci90": [found.low, found.high],
        "difference_share": found.ratio.value - 1,
        "method": found.ratio.method,
    }


def hit_share(plan: Plan, accounts: Sequence[Account], arm: str) -> float | None:
    """Tokens from LMCache in round 2 over those that whole chunks can restore; None: unknown."""
    hits = [a.external.value for a in accounts if a.scenario == arm and a.round == "measure"]
    known = [value for value in hits if value is not None]
    most = plan.restorable_tokens * plan.contexts * len(hits)
    return sum(known) / most if most and len(known) == len(hits) else None


def records(facts: Facts, arm: str) -> dict[str, float | None]:
    """Files and bytes per context that round 1 left on the disk, warm-up not counted."""
    grown: dict[str, list[float]] = {"files": [], "bytes": []}
    for repeat in range(1, facts.plan.repeats + 1):
        before, after = (_drained(facts, arm, repeat, name) for name in ("warmup", "fill"))
        for name, values in grown.items():
            if before.get(name) is not None and after.get(name) is not None:
                values.append(after[name] - before[name])
    contexts = facts.plan.contexts
    files = stats.median(n / contexts for n in grown["files"])
    size = stats.median(n / contexts for n in grown["bytes"])
    return {
        "files_per_context": files,
        "bytes_per_context": size,
        "bytes_per_file": size / files if size and files else None,
    }


def _drained(facts: Facts, arm: str, repeat: int, name: str) -> Mapping[str, Any]:
    """The last wait for the stores of a round; empty: there is none."""
    return next(
        (
            event.detail
            for event in reversed(facts.events)
            if event.kind == "drained"
            and (event.scenario, event.repeat, event.round) == (arm, repeat, name)
        ),
        {},
    )


def l2_load(facts: Facts, arm: str) -> dict[str, float | None]:
    """What round 2 loaded from the disk, from LMCache's own counters, over all repeats.

    Of a recurrent layer only the last state is needed, so separate groups may load fewer objects
    than they store. LMCache counts the throughput of each load, not its time. The milliseconds are
    the loaded bytes over the mean throughput: a lower bound where loads differ, with LMCache's own
    queue in it. Both are given per context, as many as the tokens from L2 amount to.
    """
    totals = dict.fromkeys(
        ("l2_load_completed", "l2_load_throughput_sum", "l2_load_throughput_count"), 0.0
    )
    tokens = 0.0
    for account in facts.rounds("measure", arm=arm):
        for name in totals:
            grown = facts.readings.grown(account.key, "lmcache", name).value
            if grown is None or account.l2.value is None:
                return {}
            totals[name] += grown
        tokens += account.l2.value or 0.0
    objects, throughput, loads = totals.values()
    rate = throughput / loads if loads else None
    size = records(facts, arm)["bytes_per_file"]
    loaded = objects * size if size else None
    contexts = tokens / facts.plan.restorable_tokens
    each = loaded / contexts if loaded is not None and contexts else None
    return {
        "objects": objects,
        "gb_per_s": rate,
        "bytes": loaded,
        "bytes_per_context": each,
        "ms_per_context": 1000 * each / GB / rate if each is not None and rate else None,
    }
