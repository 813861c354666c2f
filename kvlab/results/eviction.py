"""What a sweep of L1's eviction shows: what each setting keeps, and whether that matters. Pure.

The claim that is tested: with an eviction that removes the share ``ratio`` of L1 whenever it is
fuller than ``watermark``, what L1 keeps at rest lies between ``(1 - ratio) x watermark`` and
``watermark``. Whether that changes anything for a user depends on what is below L1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvlab import correctness, counters, evidence, verdict
from kvlab.counters import Change
from kvlab.evidence import Account, Key, Plan, Readings
from kvlab.invariants import Facts, Invariant, servers, stores, tokens
from kvlab.invariants import requests as conditions
from kvlab.invariants.facts import weigh
from kvlab.records import RequestRecord
from kvlab.results import entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.verdict import Verdict

REPEAT = 1
ROUNDING_SHARE = 0.01
"""One eviction removes whole records, so what is left may miss the band by a record."""
MATTERS_SHARE = 0.05
"""A hit share that differs by less than this over the sweep does not matter."""


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for an eviction run."""
    manifest, events = run.manifest, run.events()
    labels = [str(arm) for arm in manifest["arms"]]
    settings = {e.scenario: e.detail for e in events if e.kind == "setting"}
    plan = _plan(manifest, labels)
    readings = Readings(run.scrapes())
    latest = evidence.latest(run.requests())
    accounts = [
        _account((label, REPEAT, name), latest, readings, l2=settings.get(label, {}).get("l2"))
        for label in labels
        for name in evidence.ROUNDS
    ]
    facts = Facts(
        plan=plan,
        accounts=accounts,
        events=events,
        readings=readings,
        correctness=_correctness(plan, accounts, labels),
        false_gain=None,
    )
    rows = [_row(facts, label, settings.get(label, {})) for label in labels]
    held = check(facts, rows)
    reached = _reach(held, rows)
    figures = {
        "contexts": plan.contexts,
        "context_tokens": plan.context_tokens,
        "settings": rows,
        "matters": {
            "with_l2": _matters([row for row in rows if row.get("l2") is True]),
            "without_l2": _matters([row for row in rows if row.get("l2") is False]),
        },
        "correctness": facts.correctness,
        "time_s": entries.time_s(events, list(latest.values())),
    }
    return frame(run, reached, figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] != verdict.INVALID:
        for row in found["settings"]:
            low, high = row["predicted_share"]
            lines.append(
                f"{row['label']}: L1 keeps {row['retained_share']:.1%} (predicted {low:.1%} to "
                f"{high:.1%}), {row['evicted_chunks']} records evicted in "
                f"{row['triggered']} evictions; round 2: {row['hit_share']:.1%} from LMCache, "
                f"{row['l1_share']:.1%} from L1, median TTFT {row['ttft_ms']['median']:.1f} ms"
            )
    return "\n".join(lines)


def check(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> list[Invariant]:
    """Every condition of the sweep, in the order of a reader's interest."""
    return [
        conditions.correctness(facts),
        conditions.requests_complete(facts),
        conditions.prompt_length(facts),
        tokens.round_1_cold(facts),
        tokens.conservation(facts),
        tokens.local_share(facts),
        eviction_acts(rows),
        l1_had_room(facts),
        served(facts, rows),
        _merged(stores.stores_drained, facts, rows),
        servers.servers_up(facts),
        servers.kv_alike(
            facts, {row["label"]: servers.kv_tokens(facts, row["label"]) for row in rows}
        ),
    ]


def eviction_acts(rows: Sequence[Mapping[str, Any]]) -> Invariant:
    """Every setting did evict: otherwise the sweep compares nothing."""
    bad = [f"{row['label']}: L1 never evicted" for row in rows if row.get("triggered") == 0]
    unknown = [
        f"{row['label']}: evictions are not counted" for row in rows if row.get("triggered") is None
    ]
    fewest = min((row["triggered"] for row in rows if row.get("triggered")), default=0)
    return weigh("eviction-acts", f"at least {fewest} evictions with every setting", bad, unknown)


def l1_had_room(facts: Facts) -> Invariant:
    """No store was refused for want of room: then less is kept for another reason than eviction."""
    bad = []
    for account in facts.accounts:
        found = facts.readings.grown(account.key, "lmcache", "l1_allocation_failures").value
        if found:
            bad.append(f"{account.place}: L1 had no room for {found:,.0f} records")
    return weigh("l1-had-room", "no store was refused for want of room", bad, [])


def served(facts: Facts, rows: Sequence[Mapping[str, Any]]) -> Invariant:
    """With L2 below, whatever L1 evicted was still served."""
    bad, unknown, seen = [], [], []
    for row in rows:
        share = row.get("hit_share")
        if row.get("l2") is False:
            continue
        if share is None or row.get("l2") is None:
            unknown.append(f"{row['label']}: hits of round 2")
            continue
        seen.append(share)
        if share < facts.threshold("external_share_min"):
            bad.append(
                f"{row['label']}: external hits are {share:.1%} of what can be restored, although"
                " L2 holds every record"
            )
    good = f"with L2, LMCache served at least {min(seen, default=0):.1%} of what can be restored"
    return weigh("external-share", good, bad, unknown)


def _merged(
    condition: Callable[[Facts], Invariant], facts: Facts, rows: Iterable[Mapping[str, Any]]
) -> Invariant:
    """A condition that looks at one treated arm, for every setting."""
    found = []
    for row in rows:
        l2 = bool(row.get("l2"))
        plan = dataclasses.replace(
            facts.plan, arms=(facts.plan.arms[0], row["label"]), has_l2=l2, sees_l2=l2
        )
        found.append(condition(dataclasses.replace(facts, plan=plan)))
    bad = [one.detail for one in found if one.holds is False]
    unknown = [one.detail for one in found if one.holds is None]
    good = found[0] if found else Invariant(condition.__name__, None, "no setting ran")
    return weigh(good.name, good.detail, bad, unknown)


def _row(facts: Facts, label: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """What one setting kept, evicted and served."""
    plan, readings = facts.plan, facts.readings
    fill, measure = (a for a in facts.accounts if a.scenario == label)
    most = plan.restorable_tokens * plan.contexts
    at_rest = readings.samples(label, REPEAT, "lmcache", "measure:start")
    times = {name: evidence.times_ms(facts.accounts, label, name) for name in evidence.ROUNDS}
    labels = entries.labels(facts.accounts, label, readings)
    watermark, ratio = setting.get("watermark"), setting.get("ratio")
    return {
        "label": label,
        "watermark": watermark,
        "ratio": ratio,
        "l2": setting.get("l2"),
        "retained_share": counters.read(at_rest, "l1_usage_ratio"),
        "predicted_share": (
            [(1 - ratio) * watermark, watermark]
            if ratio is not None and watermark is not None
            else None
        ),
        "ticks": _grown(readings, fill, "eviction_ticks"),
        "triggered": _grown(readings, fill, "eviction_triggered"),
        "evicted_chunks": _count(fill.evicted.value),
        "evicted_chunks_round_2": _grown(readings, measure, "l1_evicted_chunks"),
        "triggered_round_2": _grown(readings, measure, "eviction_triggered"),
        "l1_share": _share(measure.l1.value, most),
        "l2_share": _share(measure.l2.value, most) if setting.get("l2") else None,
        "hit_share": _share(measure.external.value, most),
        "ttft_ms": {
            **entries.ttft(times["measure"], times["fill"], labels),
            "mean": _mean(times["measure"][REPEAT].values()),
        },
    }


def _account(
    key: Key,
    latest: Mapping[tuple[str, int, str, int], RequestRecord],
    readings: Readings,
    *,
    l2: bool | None,
) -> Account:
    """One round's account; without an L2 LMCache has no count of its hits, and there are none."""
    account = evidence.account(key, latest, readings, has_lmcache=True)
    if l2 is False and account.l2.value is None:
        return dataclasses.replace(account, l2=Change(0.0))
    return account


def _grown(readings: Readings, account: Account, name: str) -> int | None:
    """How much a counter of the eviction loop grew over a round.

    Evictions are counted from the first one on: where the loop's looks are counted and its
    evictions are not there yet, there were none.
    """
    value = readings.grown(account.key, "lmcache", name).value
    if value is None and readings.grown(account.key, "lmcache", "eviction_ticks").value is not None:
        end = readings.samples(*account.key[:2], "lmcache", f"{account.round}:end")
        value = 0.0 if counters.read(end, name) is None else None
    return _count(value)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def _share(value: float | None, most: int) -> float | None:
    return value / most if value is not None and most else None


def _count(value: float | None) -> int | None:
    return None if value is None else round(value)


def _plan(manifest: Mapping[str, Any], labels: Sequence[str]) -> Plan:
    plan = evidence.plan({**manifest, "arms": ["none", labels[-1]]})
    return dataclasses.replace(plan, repeats=REPEAT, concurrency=1, cached=tuple(labels))


def _correctness(plan: Plan, accounts: Sequence[Account], labels: Sequence[str]) -> dict[str, Any]:
    """Restored answers against cold ones; the settings' cold rounds give the noise floor."""
    rounds = {(a.scenario, a.round): a for a in accounts}
    cold = [
        pair
        for label in labels[1:]
        for pair in correctness.same_prompts(rounds[labels[0], "fill"], rounds[label, "fill"])
    ]
    restored = [
        (first, again)
        for label in labels
        for first, again in correctness.same_prompts(
            rounds[label, "fill"], rounds[label, "measure"]
        )
        if again.cached_tokens
    ]
    return correctness.weigh(cold, restored, plan.tolerance_nat, need_floor=len(labels) > 1)


def _reach(held: Sequence[Invariant], rows: Sequence[Mapping[str, Any]]) -> Verdict:
    """Proven when every setting keeps what is predicted; refuted when one does not."""
    reasons = verdict.blockers(held)
    missing = [
        row["label"]
        for row in rows
        if row["retained_share"] is None or row["predicted_share"] is None
    ]
    reasons += [f"retained: unknown for {label}" for label in missing]
    if reasons:
        return Verdict(verdict.INVALID, reasons)
    outside = [
        f"{row['label']}: L1 keeps {row['retained_share']:.1%}, predicted"
        f" {row['predicted_share'][0]:.1%} to {row['predicted_share'][1]:.1%}"
        for row in rows
        if not _within(row["retained_share"], *row["predicted_share"])
    ]
    if outside:
        return Verdict(verdict.REFUTED, outside)
    return Verdict(
        verdict.PROVEN,
        ["with every setting L1 keeps between (1 - ratio) x watermark and watermark"],
    )


def _within(share: float, low: float, high: float) -> bool:
    return low - ROUNDING_SHARE <= share <= high + ROUNDING_SHARE


def _matters(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How much the smallest and the largest ratio differ: in hits, in hits from L1, in TTFT.

    The mean, since the median of a round does not see hits of fewer than half of its requests.
    """
    known = [row for row in rows if row.get("hit_share") is not None]
    if len({row["ratio"] for row in known}) < 2:
        return {}
    small = min(known, key=lambda row: row["ratio"])
    large = max(known, key=lambda row: row["ratio"])
    hits = small["hit_share"] - large["hit_share"]
    l1 = _difference(small["l1_share"], large["l1_share"])
    means = [row["ttft_ms"].get("mean") for row in (large, small)]
    return {
        "ratios": [small["ratio"], large["ratio"]],
        "hit_share_difference": hits,
        "l1_share_difference": l1,
        "ttft_mean_ratio": means[0] / means[1] if all(means) else None,
        "hits": abs(hits) > MATTERS_SHARE,
        "tiers": None if l1 is None else abs(l1) > MATTERS_SHARE,
    }


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first - second
