"""What a restart run shows: records that outlive their servers, and where they are read from. Pure.

Labels and rounds are those of ``kvlab.workloads.restart``: each variant fills under its own name
and is measured again as ``<variant>-restarted``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlab import correctness, counters, evidence, stats, verdict
from kvlab.evidence import Account, Plan, Readings
from kvlab.invariants import Facts, Invariant, servers, stores, tokens
from kvlab.invariants import requests as conditions
from kvlab.invariants.facts import weigh
from kvlab.records import Event, RequestRecord
from kvlab.results import entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.units import ns_to_s

STOPS = ("sigterm", "sigkill")
CONTROLS = ("other-folder", "other-chunk", "other-model")
COARSE = "coarse-batches"
RULE_AGAIN = "rule-again"
KILLED = (-9, 137)
"""Exit codes of what SIGKILL ended: a process, and a container."""


Latest = Mapping[tuple[str, int, str, int], RequestRecord]
"""Each request by scenario, repeat, round and index."""


def restarted(stop: str) -> str:
    """The label of the launch that starts on the records of a variant."""
    return f"{stop}-restarted"


LABELS = tuple(label for stop in STOPS for label in (stop, restarted(stop)))


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a restart run, complete or partial."""
    manifest, events = run.manifest, run.events()
    asked = run.requests()
    plan = _plan(manifest)
    readings = Readings(run.scrapes())
    latest = evidence.latest(asked)
    accounts = [
        evidence.account(key, latest, readings, has_lmcache=True)
        for repeat in range(1, plan.repeats + 1)
        for stop in STOPS
        for key in ((stop, repeat, "fill"), (restarted(stop), repeat, "measure"))
    ]
    facts = Facts(
        plan=plan,
        accounts=accounts,
        events=events,
        readings=readings,
        correctness=correctness.weigh(_cold(accounts), _restored(accounts), plan.tolerance_nat),
        false_gain=None,
    )
    controls = [_control(name, facts, latest) for name in CONTROLS]
    held = check(facts, controls)
    seed = run.bootstrap_seed
    speedup = stats.ratio(_times(accounts, "fill"), _times(accounts, "measure"), seed=seed)
    reached = verdict.reach(held, speedup, control=False)
    variants = {stop: variant(facts, stop, latest, seed) for stop in STOPS}
    labels = [one.get("read_source", "unknown") for one in variants.values()]
    figures = {
        "workload": {
            "shape": plan.shape,
            "contexts": plan.contexts,
            "context_tokens": plan.context_tokens,
            "restorable_tokens": plan.restorable_tokens,
            "chunk_tokens": plan.chunk_tokens,
            "repeats": plan.repeats,
        },
        "ttft_ms": {
            "cold": _ttft(accounts, "fill"),
            "restarted": _ttft(accounts, "measure"),
        },
        "workload_s": {
            "cold": _median_of(variants, "cold_s"),
            "restarted": _median_of(variants, "restarted_s"),
        },
        "speedup": entries.speedup_figures(speedup),
        "variants": variants,
        "read_source": min(labels, key=evidence.SOURCES.index),
        "controls": controls,
        "rule": rule(latest, facts),
        "correctness": facts.correctness,
        "conservation": entries.conservation(accounts),
        "time_s": entries.time_s(events, asked),
    }
    return frame(run, reached, figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] == verdict.INVALID:
        return "\n".join(lines)
    times, ttft = found["workload_s"], found["ttft_ms"]
    lines.append(
        f"workload: {times['cold']:.2f} s cold, {times['restarted']:.2f} s after the restart; "
        f"median TTFT {ttft['cold']['median']:.1f} ms, {ttft['restarted']['median']:.1f} ms"
    )
    for stop, one in found["variants"].items():
        lines.append(
            f"{stop}: {one['surviving_share']:.0%} of {one['records']:,} records survive, "
            f"{one['l2_share']:.1%} of the restorable tokens from L2 ({one['read_source']}), "
            f"first hit {one['first_hit_s']:.1f} s after the start"
        )
    for control in found["controls"]:
        lines.append(f"control {control['name']}: {control['hit_tokens']:,} hit tokens")
    lines += [
        f"batches of {one['batched_tokens']} tokens: {one['cached_tokens']} of "
        f"{one['restorable_tokens']} restorable tokens cached on the second visit"
        for one in found["rule"]
    ]
    return "\n".join(lines)


def _plan(manifest: Mapping[str, Any]) -> Plan:
    plan = evidence.plan({**manifest, "arms": [STOPS[0], restarted(STOPS[0])]})
    setup = manifest["profile"]["experiments"].get("restart") or {}
    return replace(plan, repeats=int(setup.get("repeats", 1)), cached=LABELS, concurrency=1)


# Pairs and times.


def _books(accounts: Sequence[Account]) -> dict[tuple[str, int, str], Account]:
    return {account.key: account for account in accounts}


def _times(accounts: Sequence[Account], name: str) -> stats.Arm:
    """TTFT in ms by repeat, then by variant and context: pairs before and after are one context's.

    Both variants of a repeat go into one: their servers are the same, only their ends differ.
    """
    times: dict[int, dict[int, float]] = {}
    for account in accounts:
        if account.round == name:
            place = STOPS.index(account.scenario.removesuffix(restarted("")))
            found = evidence.times_ms([account], account.scenario, name)[account.repeat]
            row = times.setdefault(account.repeat, {})
            row.update({len(STOPS) * index + place: ms for index, ms in found.items()})
    return times


def _cold(accounts: Sequence[Account]) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """The fills of both variants: the same prompts, cold, in different processes."""
    books = _books(accounts)
    for repeat in sorted({account.repeat for account in accounts}):
        first, second = (books[stop, repeat, "fill"] for stop in STOPS)
        for one, other in correctness.same_prompts(first, second):
            if one.cached_tokens == 0 and other.cached_tokens == 0:
                yield one, other


def _restored(accounts: Sequence[Account]) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """What a variant answered cold, and from its records after the restart."""
    books = _books(accounts)
    for account in accounts:
        if account.round == "fill":
            after = books[restarted(account.scenario), account.repeat, "measure"]
            for one, other in correctness.same_prompts(account, after):
                if one.cached_tokens == 0 and other.cached_tokens:
                    yield one, other


def _ttft(accounts: Sequence[Account], name: str) -> dict[str, Any]:
    """Median over the repeats of the median over the contexts, and the repeats' range."""
    times = _times(accounts, name)
    medians = stats.repeat_medians(times)
    return {
        "median": stats.arm_median(times),
        "range": [min(medians), max(medians)] if medians else None,
        "n": sum(len(unit) for unit in times.values()),
    }


def _median_of(variants: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    return stats.median(one[name] for one in variants.values() if one.get(name) is not None)


# One variant.


def variant(facts: Facts, stop: str, latest: Latest, seed: int) -> dict[str, Any]:
    """The figures of one way of stopping, medians over the repeats; what is unknown is None."""
    plan = facts.plan
    cold = [a for a in facts.accounts if a.scenario == stop]
    after = [a for a in facts.accounts if a.scenario == restarted(stop)]
    before = [_last(facts.events, "l2_survey", stop, a.repeat) for a in cold]
    found = [_last(facts.events, "l2_survey", restarted(stop), a.repeat) for a in after]
    reads = [_read(facts, account) for account in after]
    most = plan.restorable_tokens * plan.contexts * len(after)
    served = [account.l2.value for account in after]
    cold_s = stats.median(s for a in cold if (s := _workload_s(a)) is not None)
    restarted_s = stats.median(s for a in after if (s := _workload_s(a)) is not None)
    return {
        "cold_s": cold_s,
        "restarted_s": restarted_s,
        "workload_ratio": _over(cold_s, restarted_s),
        "ttft_ms": {"cold": _ttft(cold, "fill"), "restarted": _ttft(after, "measure")},
        "speedup": entries.speedup_figures(
            stats.ratio(_times(cold, "fill"), _times(after, "measure"), seed=seed)
        ),
        "ready_s": stats.median(s for a in after if (s := _ready_s(facts, a)) is not None),
        "first_hit_s": stats.median(
            s for a in after if (s := _first_hit_s(facts, a, latest)) is not None
        ),
        "records": _total(before, "kept"),
        "surviving_share": _over(_total(found, "surviving"), _total(found, "kept")),
        "odd_files": _total(before, "odd_files"),
        "l2_share": _over(_sum(served), most),
        "loaded_bytes": _sum([one["loaded_bytes"] for one in reads]),
        "device_bytes": _sum([one["device_bytes"] for one in reads]),
        "resident_share": max(
            (one["resident_share"] for one in reads if one["resident_share"] is not None),
            default=None,
        ),
        "device": next((one["device"] for one in reads if one["device"]), None),
        "read_source": min(
            (one["source"] for one in reads), key=evidence.SOURCES.index, default="unknown"
        ),
    }


def _last(events: Sequence[Event], kind: str, scenario: str, repeat: int) -> Mapping[str, Any]:
    """The last event of that kind of a launch; empty: there is none."""
    return next(
        (
            event.detail
            for event in reversed(events)
            if (event.kind, event.scenario, event.repeat) == (kind, scenario, repeat)
        ),
        {},
    )


def _sum(values: Sequence[float | None]) -> float | None:
    """The total of values that are all known; None when one is missing, or all are."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _total(details: Sequence[Mapping[str, Any]], name: str) -> int | None:
    total = _sum([detail.get(name) for detail in details])
    return None if total is None else round(total)


def _over(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def _workload_s(account: Account) -> float | None:
    """Seconds that the requests of a round took together; None when one failed."""
    spans = [
        record.last_byte_ns - record.sent_ns
        for record in account.completed
        if record.last_byte_ns is not None and record.sent_ns is not None
    ]
    whole = spans and len(spans) == len(account.requests)
    return ns_to_s(sum(spans)) if whole else None


def _ready_s(facts: Facts, account: Account) -> float | None:
    """Seconds from the start of the first server until both were ready."""
    found = _last(facts.events, "ready", account.scenario, account.repeat).get("start_s")
    return None if found is None else float(found)


def _first_hit_s(facts: Facts, account: Account, latest: Latest) -> float | None:
    """Seconds from the start of the first server to the first token of a prompt from L2.

    The probe comes between: it proves that the servers store and restore at all.
    """
    key = (account.scenario, account.repeat, "first")
    hits = facts.readings.grown(key, "lmcache", "l2_hit_tokens").value
    started = [e.at_ns for e in facts.events if e.kind == "launching" and _at(e) == key[:2]]
    asked = latest.get((*key, 0))
    if not hits or not started or asked is None or asked.error or asked.first_token_ns is None:
        return None
    return ns_to_s(asked.first_token_ns - started[-1])


def _at(event: Event) -> tuple[str | None, int | None]:
    return (event.scenario, event.repeat)


def _read(facts: Facts, account: Account) -> dict[str, Any]:
    """What L2 loaded in the measured round, what the device read meanwhile, and the label."""
    before = _last(facts.events, "pages_dropped", account.scenario, account.repeat)
    after = _last(facts.events, "pages_read", account.scenario, account.repeat)
    loaded = facts.readings.grown(account.key, "lmcache", "l2_load_completed").value
    records = _last(facts.events, "l2_survey", account.scenario, account.repeat)
    size = _over(records.get("bytes"), records.get("files"))
    loaded_bytes = loaded * size if loaded is not None and size else None
    first, last = before.get("device_read_bytes"), after.get("device_read_bytes")
    device_bytes = last - first if first is not None and last is not None else None
    resident = _over(before.get("resident_bytes"), before.get("bytes"))
    return {
        "loaded_bytes": loaded_bytes,
        "device_bytes": device_bytes,
        "resident_share": resident,
        "device": before.get("device"),
        "source": evidence.read_source(loaded_bytes, device_bytes, resident),
    }


# Controls and the 2N-1 rule.


def _control(name: str, facts: Facts, latest: Latest) -> dict[str, Any]:
    """How many tokens a configuration found that must find none; None: unknown."""
    said = [e for e in facts.events if e.kind == "control" and e.detail.get("kind_of") == name]
    round_name = "fill" if name == "other-folder" else "control"
    asked, hits = 0, []
    for event in said:
        key = (event.scenario or "", event.repeat or 0, round_name)
        account = evidence.account(key, latest, facts.readings, has_lmcache=True)
        asked += len(account.completed)
        hits.append(_most(account))
    return {
        "name": name,
        "contexts": asked,
        "hit_tokens": _total([{"hits": value} for value in hits], "hits"),
        "refused": next((e.detail["refused"] for e in said if e.detail.get("refused")), None),
    }


def _most(account: Account) -> float | None:
    """The most hit tokens that any party counted; None when one of them does not say."""
    books = [account.client, account.external.value, account.lookup_hit.value]
    known = [value for value in books if value is not None]
    return max(known) if len(known) == len(books) else None


def rule(
    latest: Latest,
    facts: Facts,
) -> list[dict[str, Any]]:
    """Cached tokens of the second visit by size of a batch, the 2N-1 rule kept first.

    Empty when the model is no hybrid one, or nothing was asked. What vLLM's own cache served, or
    may have, shows nothing: its reset is believed only by the counters of the visit after it.
    """
    found, plan = [], facts.plan
    for event in facts.events:
        place = (event.scenario or "", event.repeat or 0, RULE_AGAIN)
        if event.kind != "rule" or facts.readings.grown(place, "vllm", "local_hits").value != 0:
            continue
        again = [r for k, r in latest.items() if k[:3] == (*_at(event), RULE_AGAIN) and not r.error]
        cached = [r.cached_tokens for r in again if r.cached_tokens is not None]
        if cached and len(cached) == len(again):
            tokens, typical = again[0].planned_tokens, round(stats.median(cached) or 0)
            most = event.detail.get("shared_tokens")
            found.append(
                {
                    "batched_tokens": event.detail.get("batched_tokens"),
                    "block_tokens": plan.block_tokens,
                    "prompt_tokens": tokens,
                    "restorable_tokens": most,
                    "cached_tokens": typical,
                    "cached_share": _over(typical, most),
                    "contexts": len(again),
                }
            )
    return sorted(found, key=lambda one: one["batched_tokens"] or 0)


# Conditions.


def check(facts: Facts, controls: Sequence[Mapping[str, Any]]) -> list[Invariant]:
    """Every condition of a restart run, in the order of a reader's interest."""
    after = tuple(map(restarted, STOPS))
    return [
        conditions.correctness(facts),
        conditions.requests_complete(facts),
        conditions.prompt_length(facts),
        tokens.round_1_cold(facts),
        l1_empty(facts),
        restored_from_l2(facts),
        tokens.conservation(facts),
        _of_each(facts, after, tokens.retrieves_complete),
        _of_each(facts, STOPS, stores.chunks_stored),
        _of_each(facts, STOPS, stores.stores_drained),
        _of_each(facts, STOPS, stores.disk_holds_records),
        records_survive(facts),
        records_whole(facts),
        same_configuration(facts),
        stopped_as_meant(facts),
        controls_miss(controls),
        conditions.warmed_up(facts),
        servers.servers_up(facts),
        _of_pairs(facts),
    ]


def _of_each(
    facts: Facts, labels: Sequence[str], condition: Callable[[Facts], Invariant]
) -> Invariant:
    """A condition of the A/B's treated arm, of each of these launches."""
    return _merged(
        [condition(replace(facts, plan=replace(facts.plan, arms=("", one)))) for one in labels]
    )


def _of_pairs(facts: Facts) -> Invariant:
    """vLLM's own cache is as large after the restart as before."""
    plans = [replace(facts.plan, arms=(stop, restarted(stop))) for stop in STOPS]
    return _merged([servers.kv_equal(replace(facts, plan=plan)) for plan in plans])


def _merged(found: Sequence[Invariant]) -> Invariant:
    """One condition of several launches: what is wrong with any, else the details of all."""
    bad = [one.detail for one in found if one.holds is False]
    unknown = [one.detail.removeprefix("unknown: ") for one in found if one.holds is None]
    good = "; ".join(dict.fromkeys(one.detail for one in found))
    return weigh(found[0].name, good, bad, unknown)


def l1_empty(facts: Facts) -> Invariant:
    """LMCache's memory was empty when it had started again: nothing there could serve a hit."""
    bad, unknown = [], []
    for account in facts.rounds("measure"):
        samples = facts.readings.samples(account.scenario, account.repeat, "lmcache", "launch")
        held = counters.read(samples, "l1_memory_bytes")
        if held is None:
            unknown.append(f"{account.place}: memory in use when it had started")
        elif held:
            bad.append(f"{account.place}: L1 held {held:,.0f} bytes when it had started")
    return weigh("l1-empty-at-restart", "L1 was empty after every restart", bad, unknown)


def restored_from_l2(facts: Facts) -> Invariant:
    """After the restart, L2 served what whole chunks can restore; no other tier served any."""
    plan, bad, unknown, seen = facts.plan, [], [], []
    most = plan.restorable_tokens * plan.contexts
    for account in facts.rounds("measure"):
        books = {"L0": account.local, "L1": account.l1, "L2": account.l2}
        unknown += [f"{account.place}: {c.reason}" for c in books.values() if c.value is None]
        if unknown:
            continue
        share = (account.l2.value or 0) / most
        seen.append(share)
        if share < facts.threshold("external_share_min"):
            bad.append(
                f"{account.place}: L2 served {account.l2.value:,.0f} of {most:,} restorable tokens"
                f" ({share:.1%})"
            )
        for tier in ("L0", "L1"):
            value = books[tier].value or 0
            if value > facts.threshold("local_share_max") * most:
                bad.append(f"{account.place}: {tier} served {value:,.0f} tokens, not L2")
    good = f"L2 served {min(seen, default=0):.1%} of the restorable tokens or more"
    return weigh("restored-from-l2", good, bad, unknown)


def _surveys(facts: Facts, when: str) -> Iterator[tuple[Account, Mapping[str, Any] | None]]:
    """The survey of each variant's L2 folder at one moment; None: nobody looked."""
    name = "fill" if when == "stopped" else "measure"
    for account in facts.rounds(name):
        detail = _last(facts.events, "l2_survey", account.scenario, account.repeat)
        yield account, detail if detail.get("when") == when else None


def records_survive(facts: Facts) -> Invariant:
    """Every record of the fill was there, with its size, when the servers had started again."""
    bad, unknown, count = [], [], 0
    for account, found in _surveys(facts, "started"):
        kept = found.get("kept") if found else None
        surviving = found.get("surviving") if found else None
        if kept is None or surviving is None:
            unknown.append(f"{account.place}: records were not counted")
        elif surviving < kept or not kept:
            bad.append(f"{account.place}: {surviving:,} of {kept:,} records survived")
        else:
            count += surviving
    return weigh("records-survive", f"all {count:,} records survived", bad, unknown)


def records_whole(facts: Facts) -> Invariant:
    """No record was empty, or of another size than its group's, before it was read again."""
    bad, unknown, left = [], [], 0
    for account, found in _surveys(facts, "stopped"):
        if found is None:
            unknown.append(f"{account.place}: nobody looked")
            continue
        left += (found.get("temporary") or 0) + (found.get("foreign") or 0)
        for kind in ("empty", "short"):
            if found.get(kind):
                bad.append(f"{account.place}: {found[kind]} {kind} records")
    good = "every record is whole" + (f"; {left} other files lie beside them" if left else "")
    return weigh("records-whole", good, bad, unknown)


def same_configuration(facts: Facts) -> Invariant:
    """The servers that read the records are configured as those that wrote them."""
    bad, unknown = [], []
    for account in facts.rounds("fill"):
        pair = (account.scenario, restarted(account.scenario))
        before, after = (
            _last(facts.events, "identity", one, account.repeat).get("fields") for one in pair
        )
        if not before or not after:
            unknown.append(f"{account.scenario}: configuration not recorded")
            continue
        differ = [name for name in before if before[name] != after.get(name)]
        if differ:
            bad.append(f"{account.scenario}: {', '.join(differ)} changed over the restart")
        unknown += [
            f"{account.scenario}: {name}"
            for name in ("hash_algorithm", "lmcache", "vllm")
            if before.get(name) is None
        ]
    return weigh("same-configuration", "the configuration is the same", bad, unknown)


def stopped_as_meant(facts: Facts) -> Invariant:
    """By their exit codes, one variant's servers were killed and the other's were not."""
    bad, unknown, seen = [], [], []
    for account in facts.rounds("fill"):
        place = f"{account.scenario}, repeat {account.repeat}"
        codes = _last(facts.events, "stopped", account.scenario, account.repeat).get("exit_codes")
        if not codes or None in codes.values():
            unknown.append(f"{place}: exit codes of the servers")
            continue
        by_force = account.scenario == "sigkill"
        seen.append(f"{account.scenario}: {', '.join(f'{n} {code}' for n, code in codes.items())}")
        bad += [
            f"{place}: {name} ended with exit code {code}, "
            + ("not by SIGKILL" if by_force else "by SIGKILL: it did not stop in order")
            for name, code in codes.items()
            if (code in KILLED) != by_force
        ]
    return weigh("stopped-as-meant", f"exit codes: {'; '.join(seen)}", bad, unknown)


def controls_miss(controls: Sequence[Mapping[str, Any]]) -> Invariant:
    """Configurations that the records are not for found none of them, and are refused."""
    bad, unknown = [], []
    for control in controls:
        name, hits = control["name"], control["hit_tokens"]
        if hits is None or not control["contexts"]:
            unknown.append(f"{name}: not measured")
        elif hits:
            bad.append(f"{name}: {hits:,} tokens were found in records that are not its own")
        if name != "other-folder" and hits is not None and control["refused"] is None:
            bad.append(f"{name}: the manifest in the L2 folder does not refuse it")
    return weigh("controls-miss", "0 tokens found by every control", bad, unknown)
