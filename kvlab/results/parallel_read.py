"""What cold reads from L2 show, by adapter, place and concurrency. Pure.

The claim that is tested: in the first place the treated adapter gives a shorter time to first token
than the reference, at every concurrency. Every rate stands beside what fio read in the same place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab import correctness, evidence, stats, verdict
from kvlab.evidence import Account, Key, Plan, Readings
from kvlab.invariants import Facts, Invariant, servers, stores, tokens
from kvlab.invariants import requests as conditions
from kvlab.invariants.facts import weigh
from kvlab.records import RequestRecord
from kvlab.results import ceilings, entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.units import ns_to_ms, ns_to_s
from kvlab.verdict import Verdict

RECOMPUTE = "recompute"
COLD_SHARE = 0.05
"""Of the records this share may be in memory before a round that reads them."""

Rows = Sequence[Mapping[str, Any]]
Pair = tuple[RequestRecord, RequestRecord]


@dataclass(frozen=True, slots=True)
class Book:
    """What a run set out to do and what it wrote down, by arm."""

    facts: Facts
    setup: Mapping[str, Any]
    """The profile's ``experiments.parallel_read``."""
    variants: Mapping[tuple[str, int], Mapping[str, Any]]
    """The detail of each arm's ``variant`` event, by label and repeat."""
    places: Mapping[str, Mapping[str, Any]]
    """The places and what fio read there, by name, in the profile's order."""
    seed: int

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self.variants))

    @property
    def slots(self) -> list[int]:
        return [int(slots) for slots in self.setup["concurrency"]]

    @property
    def reference(self) -> str:
        return str(self.setup["reference"])

    @property
    def treated(self) -> str:
        return str(self.setup["treated"])

    def rounds(self, label: str, name: str) -> list[Account]:
        """The accounts of one round of an arm, over its repeats."""
        return [a for a in self.facts.accounts if (a.scenario, a.round) == (label, name)]

    def times(self, label: str, name: str) -> stats.Arm:
        """TTFT in ms by repeat and context."""
        return evidence.times_ms(self.facts.accounts, label, name)

    def place(self, label: str) -> Mapping[str, Any]:
        """An arm's place and adapter, as any of its repeats states them."""
        return next((one for (name, _), one in self.variants.items() if name == label), {})

    def event(self, kind: str, account: Account) -> Mapping[str, Any]:
        """The last event of a kind in a round; empty: there is none."""
        found = (
            event.detail
            for event in reversed(self.facts.events)
            if event.kind == kind and (event.scenario, event.repeat, event.round) == account.key
        )
        return next(found, {})


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a parallel-read run."""
    book = _book(run)
    facts = book.facts
    rows = [_row(book, label, slots) for label in book.labels for slots in book.slots]
    compared = [*_comparisons(book, rows)]
    held = check(book, rows)
    figures = {
        "workload": {
            "contexts": facts.plan.contexts,
            "context_tokens": facts.plan.context_tokens,
            "output_tokens": facts.plan.output_tokens,
            "restorable_tokens": facts.plan.restorable_tokens,
            "repeats": facts.plan.repeats,
            "concurrency": book.slots,
            "ttft_limit_s": book.setup["ttft_limit_s"],
        },
        "emulated": any(place["emulated"] for place in book.places.values()),
        "reference": book.reference,
        "treated": book.treated,
        "paths": [*book.places.values()],
        "variants": rows,
        "comparisons": compared,
        "correctness": facts.correctness,
        "conservation": entries.conservation(facts.accounts),
        "cautions": [*cautions(book, rows)],
        "time_s": entries.time_s(facts.events, run.requests()),
    }
    return frame(run, _reach(held, book, compared), figures, held)


def times(run: RunDir) -> dict[str, stats.Arm]:
    """TTFT in ms by arm and concurrency, as runs are compared: ``slow-mount-fs at 8``."""
    book = _book(run)
    return {
        f"{label} at {slots}": book.times(label, f"measure-{slots}")
        for label in book.labels
        for slots in book.slots
    }


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] != verdict.INVALID:
        for path in found["paths"]:
            best = ", ".join(
                f"{one['gb_per_s']:.3g} GB/s with {one['readers']}" for one in path["ceilings"]
            )
            said = f" ({path['emulated']})" if path.get("emulated") else ""
            lines.append(f"{path['name']}{said}: fio reads {best}")
        for row in found["variants"]:
            rate = row.get("l2_gb_per_s")
            lines.append(
                f"{row['label']} at {row['concurrency']}: TTFT {row['ttft_ms']['median']:.0f} ms "
                f"(p99 {row['ttft_ms']['p99']:.0f}), {row['output_tokens_per_s']:.1f} tokens/s"
                + ("" if rate is None else f", {rate:.3g} GB/s from L2")
            )
        for one in found["comparisons"]:
            low, high = one["speedup"]["ci95"]
            lines.append(
                f"{one['label']} over {one['over']} at {one['concurrency']}: "
                f"{one['speedup']['value']:.2f} ({low:.2f} to {high:.2f})"
            )
    lines += [f"note: {caution['text']}" for caution in found["cautions"]]
    return "\n".join(lines)


# What the run wrote down.


def _book(run: RunDir) -> Book:
    manifest, events = run.manifest, run.events()
    arms = [(str(arm), int(repeat)) for repeat, arm in manifest["order"]]
    variants = {
        (e.scenario, e.repeat): e.detail
        for e in events
        if e.kind == "variant" and e.scenario and e.repeat
    }
    setup = manifest["profile"]["experiments"]["parallel_read"]
    plan = _plan(manifest, arms, setup)
    readings = Readings(run.scrapes())
    asked = evidence.latest(run.requests())
    accounts = [
        evidence.account(key, asked, readings, has_lmcache=key[0] != RECOMPUTE)
        for key in _keys(arms, variants, setup)
    ]
    facts = Facts(
        plan=plan,
        accounts=accounts,
        events=events,
        readings=readings,
        correctness=correctness.weigh(
            _cold(accounts), _restored(accounts), plan.tolerance_nat, need_floor=False
        ),
        false_gain=None,
    )
    return Book(
        facts=facts,
        setup=setup,
        variants={pair: variants.get(pair, {}) for pair in arms},
        places={str(one["name"]): one for one in ceilings.places(manifest, events)},
        seed=run.bootstrap_seed,
    )


def _plan(
    manifest: Mapping[str, Any], arms: Sequence[tuple[str, int]], setup: Mapping[str, Any]
) -> Plan:
    cached = tuple(dict.fromkeys(label for label, _ in arms if label != RECOMPUTE))
    plan = evidence.plan({**manifest, "arms": ["none", *cached[:1]]})
    return dataclasses.replace(plan, repeats=int(setup["repeats"]), concurrency=1, cached=cached)


def _keys(
    arms: Sequence[tuple[str, int]],
    variants: Mapping[tuple[str, int], Mapping[str, Any]],
    setup: Mapping[str, Any],
) -> Iterator[Key]:
    """Every round of the run, in the order of the arms."""
    for label, repeat in arms:
        if variants.get((label, repeat), {}).get("filled"):
            yield (label, repeat, "fill")
            yield from ((label, repeat, f"memory-{slots}") for slots in setup["concurrency"])
        yield from ((label, repeat, f"measure-{slots}") for slots in setup["concurrency"])


# Correctness.


def _first_cold(accounts: Sequence[Account]) -> Account | None:
    """The first fill: every context computed by itself."""
    return next((a for a in accounts if a.round == "fill"), None)


def _cold(accounts: Sequence[Account]) -> Iterator[Pair]:
    """The first fill against everything else that was computed: other fills, and vLLM alone."""
    first = _first_cold(accounts)
    for other in accounts:
        if first and other is not first and (other.round == "fill" or other.scenario == RECOMPUTE):
            for one, again in correctness.same_prompts(first, other):
                if one.cached_tokens == 0 and again.cached_tokens == 0:
                    yield one, again


def _restored(accounts: Sequence[Account]) -> Iterator[Pair]:
    """The first fill against every answer that was restored, from L1 or L2."""
    first = _first_cold(accounts)
    for other in accounts:
        if first and other.round != "fill" and other.scenario != RECOMPUTE:
            for one, again in correctness.same_prompts(first, other):
                if one.cached_tokens == 0 and again.cached_tokens:
                    yield one, again


# Figures.


def _row(book: Book, label: str, slots: int) -> dict[str, Any]:
    """One arm at one concurrency, over its repeats; what is unknown is None."""
    name = f"measure-{slots}"
    accounts, place = book.rounds(label, name), book.place(label)
    times = book.times(label, name)
    every = [value for contexts in times.values() for value in contexts.values()]
    reads = [_read(book, account) for account in accounts] if place.get("adapter") else []
    best = _best(book, place.get("path"))
    rate = stats.median(one["gb_per_s"] for one in reads if one["gb_per_s"] is not None)
    most = book.facts.plan.restorable_tokens * book.facts.plan.contexts * len(accounts)
    memory = stats.arm_median(_memory_times(book, place.get("path"), slots))
    median = stats.arm_median(times)
    return {
        "label": label,
        "path": place.get("path"),
        "adapter": place.get("adapter"),
        "concurrency": slots,
        "ttft_ms": {
            "median": median,
            "p95": stats.percentile(every, 0.95),
            "p99": stats.percentile(every, 0.99),
            "n": len(every),
        },
        "end_to_end_ms": _spread(_end_to_end_ms(r) for a in accounts for r in a.completed),
        "per_output_token_ms": _spread(_per_token_ms(r) for a in accounts for r in a.completed),
        **_throughput(accounts, float(book.setup["ttft_limit_s"])),
        "l2_gb_per_s": rate,
        "per_load_gb_per_s": stats.median(
            value for a in accounts if (value := _per_load(book, a)) is not None
        ),
        "ceiling_share": rate / best if rate is not None and best else None,
        "plausible": _plausible(book, rate, best),
        "loaded_bytes": _total(one["loaded_bytes"] for one in reads),
        "device_bytes": _total(one["device_bytes"] for one in reads),
        "resident_share": max(
            (one["resident_share"] for one in reads if one["resident_share"] is not None),
            default=None,
        ),
        "read_source": _source([one["source"] for one in reads]),
        "l2_share": _over(_total(a.l2.value for a in accounts), most) if reads else None,
        "compute_share": min(1.0, memory / median) if reads and memory and median else None,
    }


def _memory_times(book: Book, path: Any, slots: int) -> stats.Arm:
    """TTFT from L1 at a concurrency: of this place's fill, else of any."""
    name = f"memory-{slots}"
    found = [a for a in book.facts.accounts if a.round == name]
    own = [a for a in found if book.place(a.scenario).get("path") == path] or found
    return evidence.times_ms(own[:1], own[0].scenario, name) if own else {}


def _end_to_end_ms(record: RequestRecord) -> float | None:
    if record.sent_ns is None or record.last_byte_ns is None:
        return None
    return ns_to_ms(record.last_byte_ns - record.sent_ns)


def _per_token_ms(record: RequestRecord) -> float | None:
    """``(end to end - TTFT) / (output tokens - 1)``; None: one token, or all in one piece."""
    whole, first, count = _end_to_end_ms(record), record.ttft_ns, record.completion_tokens
    if whole is None or first is None or not count or count < 2 or whole <= ns_to_ms(first):
        return None
    return (whole - ns_to_ms(first)) / (count - 1)


def _spread(values: Iterator[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {"median": stats.median(known), "p99": stats.percentile(known, 0.99)}


def _throughput(accounts: Sequence[Account], limit_s: float) -> dict[str, float | None]:
    """Output tokens per second over the whole round, and of those that began in time."""
    rates, good, shares = [], [], []
    for account in accounts:
        wall_s, done = _wall_s(account), account.completed
        if wall_s is None:
            continue
        prompt = [r for r in done if r.ttft_ns is not None and ns_to_s(r.ttft_ns) <= limit_s]
        rates.append(sum(r.completion_tokens or 0 for r in done) / wall_s)
        good.append(len(prompt) / wall_s)
        shares.append(len(prompt) / len(account.requests))
    return {
        "output_tokens_per_s": stats.median(rates),
        "goodput_requests_per_s": stats.median(good),
        "goodput_share": stats.median(shares),
    }


def _wall_s(account: Account) -> float | None:
    """From the first request sent to the last byte; None when there is no such span."""
    sent = [r.sent_ns for r in account.requests if r.sent_ns is not None]
    ends = [r.last_byte_ns for r in account.requests if r.last_byte_ns is not None]
    span = ns_to_s(max(ends) - min(sent)) if sent and ends else 0.0
    return span if span > 0 else None


def _reading_s(account: Account) -> float | None:
    """From the first request sent to the last first token: the reads lie in between."""
    sent = [r.sent_ns for r in account.completed if r.sent_ns is not None]
    ends = [r.first_token_ns for r in account.completed if r.first_token_ns is not None]
    span = ns_to_s(max(ends) - min(sent)) if sent and ends else 0.0
    return span if span > 0 else None


def _read(book: Book, account: Account) -> dict[str, Any]:
    """What L2 loaded in a round, how fast, and what the device read meanwhile."""
    before, after = book.event("pages_dropped", account), book.event("pages_read", account)
    loaded = book.facts.readings.grown(account.key, "lmcache", "l2_load_completed").value
    size = _over(before.get("bytes"), before.get("files"))
    loaded_bytes = loaded * size if loaded is not None and size else None
    first, last = before.get("device_read_bytes"), after.get("device_read_bytes")
    device_bytes = last - first if first is not None and last is not None else None
    resident = _over(before.get("resident_bytes"), before.get("bytes"))
    seconds = _reading_s(account)
    return {
        "loaded_bytes": loaded_bytes,
        "device_bytes": device_bytes,
        "resident_share": resident,
        "source": evidence.read_source(loaded_bytes, device_bytes, resident),
        "gb_per_s": loaded_bytes / seconds / 1e9 if loaded_bytes and seconds else None,
    }


def _per_load(book: Book, account: Account) -> float | None:
    """LMCache's own mean of the rate of one load, in GB/s."""
    total = book.facts.readings.grown(account.key, "lmcache", "l2_load_throughput_sum").value
    count = book.facts.readings.grown(account.key, "lmcache", "l2_load_throughput_count").value
    return _over(total, count)


def _source(sources: Sequence[str]) -> str | None:
    """The worst of the labels; None: nothing was read."""
    return min(sources, key=evidence.SOURCES.index, default=None)


def _total(values: Iterator[float | None]) -> float | None:
    """The total of values that are all known; None when one is missing, or all are."""
    every = list(values)
    known = [value for value in every if value is not None]
    return sum(known) if known and len(known) == len(every) else None


def _over(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def _best(book: Book, path: Any) -> float | None:
    """The most that fio read in a place, in GB/s."""
    return book.places.get(str(path), {}).get("ceiling_gb_per_s")


def _plausible(book: Book, rate: float | None, best: float | None) -> bool | None:
    """Whether a rate is within what the place can give; None: one of them is unknown."""
    if rate is None or best is None:
        return None
    return rate <= best * (1 + float(book.setup["ceiling_margin"]))


def _comparisons(book: Book, rows: Rows) -> Iterator[dict[str, Any]]:
    """Every arm over the reference of its place, over computing, and over the other places."""
    by_place = {(row["label"], row["concurrency"]): row for row in rows}
    arms = {label: book.place(label) for label in book.labels}
    for slots in book.slots:
        for label, place in arms.items():
            for over, other in arms.items():
                kind = _kind(book, place, other)
                if kind and label != over:
                    pair = by_place[label, slots], by_place[over, slots]
                    yield from _comparison(book, kind, *pair)


def _kind(book: Book, place: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What two arms that are compared differ in; None: they are not compared."""
    adapter, path = place.get("adapter"), place.get("path")
    if adapter is None:
        return None
    if other.get("adapter") is None:
        return "recompute" if "path" in other else None
    if other["path"] == path:
        return "adapter" if other["adapter"] == book.reference else None
    real = not place.get("emulated") and not other.get("emulated")
    last = [*book.places][-1] if book.places else None
    return "path" if real and adapter == other["adapter"] and other["path"] == last else None


def _comparison(
    book: Book, kind: str, row: Mapping[str, Any], over: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    name = f"measure-{row['concurrency']}"
    slower, faster = book.times(over["label"], name), book.times(row["label"], name)
    speedup = stats.ratio(slower, faster, seed=book.seed)
    if speedup is not None:
        yield {
            "kind": kind,
            "label": row["label"],
            "over": over["label"],
            "path": row["path"],
            "adapter": row["adapter"],
            "concurrency": row["concurrency"],
            "speedup": entries.speedup_figures(speedup),
            "throughput_ratio": _over(row["output_tokens_per_s"], over["output_tokens_per_s"]),
        }


# Conditions.


def check(book: Book, rows: Rows) -> list[Invariant]:
    """Every condition of the experiment, in the order of a reader's interest."""
    facts = book.facts
    return [
        conditions.correctness(facts),
        conditions.requests_complete(facts),
        conditions.prompt_length(facts),
        whole(book),
        tokens.round_1_cold(facts),
        computed(facts),
        tokens.conservation(facts),
        from_l2(book),
        pages_cold(rows),
        below_ceiling(book, rows),
        _filled(book, stores.chunks_stored),
        _filled(book, stores.stores_drained),
        servers.servers_up(facts),
        servers.kv_alike(facts, {label: servers.kv_tokens(facts, label) for label in book.labels}),
    ]


def whole(book: Book) -> Invariant:
    """Every planned arm ran, and fio read every place."""
    missing = [f"{label}, repeat {n}" for (label, n), one in book.variants.items() if not one]
    used = {str(one["path"]) for one in book.variants.values() if one.get("path")}
    unread = [f"the ceiling of {path}" for path in sorted(used - book.places.keys())]
    return weigh("whole", f"{len(book.variants)} arms", [], missing + unread)


def computed(facts: Facts) -> Invariant:
    """vLLM alone computed everything."""
    bad, unknown = [], []
    for account in facts.accounts:
        if account.scenario == RECOMPUTE:
            if account.client is None:
                unknown.append(f"{account.place}: cached tokens")
            elif account.client:
                bad.append(f"{account.place}: {account.client:,} tokens were cached")
    return weigh("recompute-cold", "vLLM alone computed every token", bad, unknown)


def from_l2(book: Book) -> Invariant:
    """What was measured came from L2: nothing from vLLM's own cache, nothing from L1."""
    facts, bad, unknown, seen = book.facts, [], [], []
    most = facts.plan.restorable_tokens * facts.plan.contexts
    for account in facts.accounts:
        if not account.has_lmcache or not account.round.startswith("measure"):
            continue
        l1, l2, local = account.l1.value, account.l2.value, account.local.value
        if l1 is None or l2 is None:
            unknown.append(f"{account.place}: {account.l1.reason or account.l2.reason}")
            continue
        share = l2 / most if most else 0.0
        seen.append(share)
        if l1:
            bad.append(f"{account.place}: {l1:,.0f} tokens came from L1, which was not empty")
        if local:
            bad.append(f"{account.place}: {local:,.0f} tokens came from vLLM's own cache")
        if share < facts.threshold("external_share_min"):
            bad.append(f"{account.place}: {share:.1%} of what can be restored came from L2")
    return weigh("from-l2", f"at least {min(seen, default=0):.1%} came from L2", bad, unknown)


def pages_cold(rows: Rows) -> Invariant:
    """The bytes came from the device, not from the page cache."""
    bad = [
        f"{row['label']} at {row['concurrency']}: read from the page cache"
        for row in rows
        if row["read_source"] == "page cache"
    ]
    bad += [
        f"{row['label']} at {row['concurrency']}: {row['resident_share']:.0%} of the records were"
        " in memory before the round"
        for row in rows
        if (row["resident_share"] or 0.0) >= COLD_SHARE
    ]
    worst = max((row["resident_share"] or 0.0 for row in rows), default=0.0)
    return weigh("pages-cold", f"at most {worst:.1%} in memory before a round", bad, [])


def below_ceiling(book: Book, rows: Rows) -> Invariant:
    """No rate exceeds what fio read in the same place, past the page cache."""
    bad, unknown = [], []
    for row in rows:
        if row["path"] is None:
            continue
        if row["plausible"] is None:
            unknown.append(f"{row['label']} at {row['concurrency']}: its rate, or the ceiling")
        elif not row["plausible"]:
            best = _best(book, row["path"])
            bad.append(
                f"{row['label']} at {row['concurrency']}: {row['l2_gb_per_s']:.3g} GB/s is not"
                f" plausible, fio reads {best:.3g} GB/s there"
            )
    top = max((row["ceiling_share"] or 0.0 for row in rows), default=0.0)
    return weigh("below-ceiling", f"at most {top:.0%} of what fio reads", bad, unknown)


def _filled(book: Book, condition: Any) -> Invariant:
    """A condition that looks at the fills of one treated arm, for every arm that filled."""
    labels = dict.fromkeys(label for (label, _), one in book.variants.items() if one.get("filled"))
    found = []
    for label in labels:
        plan = dataclasses.replace(book.facts.plan, arms=("none", label))
        found.append(condition(dataclasses.replace(book.facts, plan=plan)))
    name = str(condition.__name__).replace("_", "-")
    bad = [f"{one.detail}" for one in found if one.holds is False]
    unknown = [one.detail for one in found if one.holds is None]
    return weigh(name, found[0].detail if found else "", bad, unknown if found else ["no fill"])


def cautions(book: Book, rows: Rows) -> Iterator[dict[str, Any]]:
    """What a reader must be told beside the figures; each with a stable id."""
    if book.facts.plan.repeats < 2:
        yield {
            "id": "few-repeats",
            "text": "one start of each arm: the interval shows the contexts' spread, not that of "
            "starts, and the arms' order was not turned",
            "values": {"repeats": book.facts.plan.repeats},
        }
    for path in book.places.values():
        if path["emulated"]:
            yield {
                "id": "emulated",
                "text": f"{path['name']} is emulated: {path['emulated']}",
                "values": {"path": path["name"], "emulation": path["emulated"]},
            }
    unknown = [row for row in rows if row["read_source"] == "unknown"]
    if unknown:
        yield {
            "id": "read-source-unknown",
            "text": "the device does not say what it read, so that the page cache is excluded by "
            "the records' residency alone",
            "values": {"rows": len(unknown)},
        }


def _reach(held: Sequence[Invariant], book: Book, compared: Rows) -> Verdict:
    """Proven when the treated adapter is faster at every concurrency in the first place."""
    reasons = verdict.blockers(held)
    first = next(iter(book.places), None)
    kind = "recompute" if book.treated == book.reference else "adapter"
    found = [
        one
        for one in compared
        if (one["kind"], one["path"], one["adapter"]) == (kind, first, book.treated)
    ]
    if len(found) < len(book.slots):
        reasons.append("speedup: no two requests of both arms can be compared")
    if reasons:
        return Verdict(verdict.INVALID, reasons)
    said = [
        f"{one['label']} over {one['over']} at {one['concurrency']}: speedup "
        f"{one['speedup']['value']:.2f} (95 % interval {one['speedup']['ci95'][0]:.2f} to "
        f"{one['speedup']['ci95'][1]:.2f})"
        for one in found
    ]
    if any(one["speedup"]["ci95"][1] < 1 for one in found):
        return Verdict(verdict.REFUTED, said)
    if all(one["speedup"]["ci95"][0] > 1 for one in found):
        return Verdict(verdict.PROVEN, said)
    return Verdict(verdict.NOT_SHOWN, said)
