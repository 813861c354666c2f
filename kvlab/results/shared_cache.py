"""What a shared-cache run shows: one vLLM instance restores what another one computed. Pure.

Rounds are named by phase and instance (``first:2``), see ``kvlab.workloads.shared_cache``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvlab import correctness, evidence, stats, verdict
from kvlab.evidence import Account, Plan, Readings
from kvlab.invariants import Facts, Invariant, servers
from kvlab.invariants import requests as conditions
from kvlab.invariants.facts import weigh
from kvlab.records import Event, RequestRecord
from kvlab.results import entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.units import ns_to_s

LABEL, REPEAT = "shared", 1
GUEST_STRIDE = 1_000_000
"""Keeps the requests of different guests apart."""
SERVED = ("first", "together", "alone")
"""The phases that LMCache must serve."""


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a shared-cache run."""
    manifest = run.manifest
    plan = _plan(manifest)
    count = int(manifest["profile"]["experiments"]["shared_cache"]["instances"])
    readings, events = Readings(run.scrapes()), run.events()
    latest = evidence.latest(run.requests())
    accounts = [
        evidence.account(
            (LABEL, REPEAT, name),
            latest,
            readings,
            has_lmcache=True,
            engine=source(int(name.partition(":")[2])),
        )
        for name in rounds(count)
    ]
    facts = Facts(
        plan=plan,
        accounts=accounts,
        events=_without_stopped(events),
        readings=readings,
        correctness=_correctness(plan, accounts),
        false_gain=None,
    )
    seed = run.bootstrap_seed
    gains = {
        phase: stats.ratio(_times(accounts, "cold"), _times(accounts, phase), seed=seed)
        for phase in ("first", "alone")
    }
    held = check(facts, count)
    reached = verdict.reach(held, gains["first"], control=False)
    figures = {
        "instances": count,
        "contexts": plan.contexts,
        "context_tokens": plan.context_tokens,
        "ttft_ms": {
            account.round: {
                "median": stats.median(_round_times(account).values()),
                "n": len(account.completed),
            }
            for account in accounts
        },
        "speedup": {name: entries.speedup_figures(gain) for name, gain in gains.items()},
        "served_tokens": {account.round: _served(account) for account in accounts},
        "hit_share": {account.round: _hit_share(plan, account) for account in accounts},
        "together": _together(plan, accounts, readings),
        "lmcache": {account.round: usage(events, account.round) for account in accounts},
        "worker_ids": [str(worker) for worker in _workers(events)],
        "correctness": facts.correctness,
        "time_s": entries.time_s(events, _at_once(latest.values())),
    }
    return frame(run, reached, figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] != verdict.INVALID:
        for name, times in found["ttft_ms"].items():
            share = found["hit_share"].get(name)
            shown = "unknown" if share is None else f"{share:.1%}"
            lines.append(
                f"{name}: median TTFT {times['median']:.1f} ms, {shown} of the restorable tokens"
                " from LMCache"
            )
    return "\n".join(lines)


def rounds(instances: int) -> list[str]:
    """The measured rounds of so many instances, in the order in which they ran."""
    guests = range(2, instances + 1)
    return [
        *(f"cold:{n}" for n in guests),
        "fill:1",
        *(f"first:{n}" for n in guests),
        *(f"together:{n}" for n in range(1, instances + 1)),
        *(f"alone:{n}" for n in guests),
    ]


def check(facts: Facts, instances: int) -> list[Invariant]:
    """Every condition of a shared-cache run, in the order of a reader's interest."""
    return [
        conditions.correctness(facts),
        conditions.requests_complete(facts),
        conditions.prompt_length(facts),
        workers_distinct(facts.events, instances),
        cold(facts),
        local_empty(facts),
        served(facts),
        conservation(facts),
        first_stopped(facts),
        servers.servers_up(facts),
        servers.kv_alike(facts, _kv_sizes(facts, instances)),
        drained(facts),
    ]


def _kv_sizes(facts: Facts, instances: int) -> dict[str, list[int]]:
    """The sizes of every instance's own cache, as its metrics state them."""
    names = [source(number) for number in range(1, instances + 1)]
    return {name: sorted(set(facts.readings.kv_tokens(LABEL, name))) for name in names}


def source(number: int) -> str:
    """The name under which an instance's counters are recorded."""
    return "vllm" if number == 1 else f"vllm-{number}"


def workers_distinct(events: Sequence[Event], instances: int) -> Invariant:
    """As many different workers are registered with LMCache as there are instances."""
    ids = _workers(events)
    if not ids:
        return Invariant("workers-distinct", None, "unknown: no worker was seen")
    detail = f"{len(set(ids))} different workers of {instances} instances"
    return Invariant("workers-distinct", len(set(ids)) >= instances == len(ids), detail)


def cold(facts: Facts) -> Invariant:
    """Contexts that nobody had asked before were served by no tier."""
    bad, unknown = [], []
    for account in _of(facts.accounts, "cold", "fill"):
        books = [account.local, account.external, account.l1, account.l2]
        unknown += [f"{account.round}: {change.reason}" for change in books if change.reason]
        hits = max([*(c.value for c in books if c.value is not None), account.client or 0])
        if hits:
            bad.append(f"{account.round} was warm: {hits:,.0f} hit tokens")
    return weigh("round-1-cold", "0 hit tokens in every tier", bad, unknown)


def local_empty(facts: Facts) -> Invariant:
    """L0 of the asked instance was empty, so nothing else than LMCache could serve it."""
    most = facts.plan.restorable_tokens * facts.plan.contexts
    bad, unknown = [], []
    for account in _of(facts.accounts, *SERVED):
        local = account.local.value
        if local is None:
            unknown.append(f"{account.round}: {account.local.reason}")
        elif local > facts.threshold("local_share_max") * most:
            bad.append(
                f"{account.round}: L0 was not empty, it served {local:,.0f} tokens: its reset did"
                " not reset"
            )
    return weigh("local-empty", "vLLM's own caches served next to nothing", bad, unknown)


def served(facts: Facts) -> Invariant:
    """LMCache served every instance what it could serve."""
    bad, unknown, seen = [], [], []
    for account in _of(facts.accounts, *SERVED):
        share = _hit_share(facts.plan, account)
        if share is None:
            unknown.append(f"{account.round}: {account.external.reason}")
            continue
        seen.append(share)
        if share < facts.threshold("external_share_min"):
            bad.append(
                f"{account.round}: external hits {account.external.value or 0:,.0f} tokens,"
                f" {share:.1%} of what can be restored"
            )
    good = f"at least {min(seen, default=0):.1%} of the restorable tokens came from LMCache"
    return weigh("external-share", good, bad, unknown)


def conservation(facts: Facts) -> Invariant:
    """Client, vLLM and LMCache count the same tokens; of all instances at once, their sum."""
    bad, unknown = [], []
    for account in facts.accounts:
        if account.round.startswith("together"):
            continue
        if account.residual is None:
            unknown.append(f"{account.round}: a counter is missing")
        elif account.residual:
            bad.append(f"{account.round}: {account.residual:,} tokens unexplained")
    both = _of(facts.accounts, "together")
    client, external, lmcache = _sums(both, facts.readings)
    if client is None or external is None or lmcache is None:
        unknown.append("together: a counter is missing")
    else:
        local = sum(account.local.value or 0 for account in both)
        gap = max(abs(client - local - external), external - lmcache, lmcache - external - local, 0)
        if gap:
            bad.append(f"together: {gap:,.0f} tokens unexplained")
    return weigh("conservation", "0 tokens unexplained", bad, unknown)


def first_stopped(facts: Facts) -> Invariant:
    """Instance 1 had ended before the others asked alone."""
    stop = next((e for e in facts.events if e.kind == "instance_stopped"), None)
    later = [
        event
        for event in facts.events
        if event.kind == "round_started" and (event.round or "").startswith("alone:")
    ]
    if stop is None or not later:
        return Invariant("first-stopped", None, "unknown: instance 1 was not seen to stop")
    holds = all(event.at_ns > stop.at_ns for event in later)
    return Invariant("first-stopped", holds, f"{stop.detail.get('service')} had ended")


def drained(facts: Facts) -> Invariant:
    """Nothing was still being written when another instance began to read."""
    bad, unknown = [], []
    for name in [a.round for a in _of(facts.accounts, "cold", "fill")]:
        event = next((e for e in facts.events if e.kind == "drained" and e.round == name), None)
        if event is None:
            unknown.append(f"{name}: nobody waited for the stores")
        elif event.detail.get("stable") is not True:
            bad.append(f"{name}: stores had not come to rest")
    return weigh("stores-drained", "every store had ended", bad, unknown)


def usage(events: Iterable[Event], name: str) -> dict[str, Any]:
    """What LMCache's server used over one round: seconds of processor, share of a core, memory."""
    found = [e for e in events if e.kind == "usage" and e.round == name]
    if len(found) < 2:
        return {}
    before, after = (_lmcache(event) for event in (found[0], found[-1]))
    if not before or not after:
        return {}
    wall_s = ns_to_s(found[-1].at_ns - found[0].at_ns)
    cpu_s = sum(p["cpu_s"] for p in after) - sum(p["cpu_s"] for p in before)
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "cpu_share": cpu_s / wall_s if wall_s > 0 else None,
        "memory_bytes": sum(p["rss_bytes"] for p in after),
    }


def _lmcache(event: Event) -> list[Mapping[str, Any]]:
    processes = event.detail.get("processes") or []
    return [p for p in processes if str(p["service"]).startswith("lmcache")]


def _plan(manifest: Mapping[str, Any]) -> Plan:
    plan = evidence.plan({**manifest, "arms": ["baseline", LABEL]})
    return dataclasses.replace(plan, cached=(LABEL,))


def _of(accounts: Iterable[Account], *phases: str) -> list[Account]:
    return [account for account in accounts if account.round.partition(":")[0] in phases]


def _workers(events: Iterable[Event]) -> list[Any]:
    ready = next((e for e in events if e.kind == "ready" and e.scenario == LABEL), None)
    return list(ready.detail.get("registered_ids") or []) if ready else []


def _without_stopped(events: Sequence[Event]) -> list[Event]:
    """The events, without the states of a server after it was stopped on purpose."""
    kept, stopped = [], set()
    for event in events:
        if event.kind == "instance_stopped":
            stopped.add(event.detail.get("service"))
        if event.kind == "state" and stopped:
            services = [s for s in event.detail["services"] if s["name"] not in stopped]
            event = dataclasses.replace(event, detail={**event.detail, "services": services})
        kept.append(event)
    return kept


def _correctness(plan: Plan, accounts: Sequence[Account]) -> dict[str, Any]:
    """Restored answers of every guest against instance 1's cold ones to the same contexts."""
    asked = {r.context_id: r for a in _of(accounts, "fill") for r in a.completed}
    pairs = [
        (asked[record.context_id], record)
        for account in _of(accounts, *SERVED)
        for record in account.completed
        if record.context_id in asked
    ]
    return correctness.weigh([], pairs, plan.tolerance_nat, need_floor=False)


def _at_once(asked: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests, those of all instances at once as one round: their times overlap."""
    return [
        dataclasses.replace(r, round="together") if r.round.startswith("together:") else r
        for r in asked
    ]


def _round_times(account: Account) -> dict[int, float]:
    return evidence.times_ms([account], account.scenario, account.round)[account.repeat]


def _times(accounts: Iterable[Account], phase: str) -> dict[int, dict[int, float]]:
    """TTFT in ms of a phase: one launch, so one repeat; by guest and place in its round."""
    return {
        REPEAT: {
            guest * GUEST_STRIDE + place: value
            for guest, account in enumerate(_of(accounts, phase))
            for place, value in _round_times(account).items()
        }
    }


def _hit_share(plan: Plan, account: Account) -> float | None:
    most = plan.restorable_tokens * plan.contexts
    return None if account.external.value is None or not most else account.external.value / most


def _served(account: Account) -> dict[str, int]:
    """Tokens by tier; of a round that ran beside others LMCache's tiers cannot be told apart."""
    tokens = account.served
    if account.round.startswith("together"):
        tokens = {tier: n for tier, n in tokens.items() if tier not in ("L1", "L2")}
        if account.external.value is not None:
            tokens["LMCache"] = round(account.external.value)
    return tokens


def _sums(
    both: Sequence[Account], readings: Readings
) -> tuple[int | None, float | None, float | None]:
    """Cached tokens of all instances at once, by client, vLLM and LMCache."""
    client = [account.client for account in both]
    external = [account.external.value for account in both]
    tiers = [
        readings.grown((LABEL, REPEAT, "together"), "lmcache", name).value
        for name in ("l1_hit_tokens", "l2_hit_tokens")
    ]
    return _total(client), _total(external), _total(tiers)


def _total(values: Sequence[Any]) -> Any:
    return None if not values or None in values else sum(values)


def _together(plan: Plan, accounts: Sequence[Account], readings: Readings) -> dict[str, Any]:
    """The load of all instances at once: how long it took, and what LMCache served."""
    records = [record for account in _of(accounts, "together") for record in account.completed]
    ends = [r.last_byte_ns for r in records if r.last_byte_ns is not None]
    if not ends:
        return {}
    wall_s = ns_to_s(max(ends) - min(r.queued_ns for r in records))
    key = (LABEL, REPEAT, "together")
    grown = {
        name: readings.grown(key, "lmcache", f"{name.lower()}_hit_tokens").value
        for name in ("L1", "L2")
    }
    restored = _total(list(grown.values()))
    return {
        "requests": len(records),
        "wall_s": wall_s,
        "requests_per_s": len(records) / wall_s if wall_s > 0 else None,
        "ttft_median_ms": stats.median(
            value for a in _of(accounts, "together") for value in _round_times(a).values()
        ),
        "served_tokens": {
            name: None if tokens is None else round(tokens) for name, tokens in grown.items()
        },
        "restored_tokens_per_s": restored / wall_s if restored and wall_s > 0 else None,
    }
