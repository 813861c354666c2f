"""What a reader must be told beside a result that otherwise holds. Pure.

A caution never blocks a verdict. Each has a stable id, a sentence, and the values in it, so that a
report can say the same in another language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvlab import counters, evidence, stats
from kvlab.invariants import Facts, servers, stores
from kvlab.invariants import requests as conditions
from kvlab.records import Event, RequestRecord
from kvlab.units import ns_to_ms

Caution = dict[str, Any]

FIRST_EVENT_MAX = 0.05
"""First event and first token may differ by this share before it is said."""
SENDER_SHARE_MAX = 0.01
"""The sender's own delay may be this share of the TTFT before it is said."""
SLOW_SEND = 0.05
"""Handing a request to the socket may take this share of its TTFT …"""
SLOW_SENDS_MAX = 0.1
"""… in fewer than this share of the requests."""
CLOCK_DROP = 0.1
"""A clock may be lower by this share between two rounds before it is said."""
BUFFERED_TOKENS = 8
BUFFERED_MS = 0.2
"""No engine makes so many tokens at less than this distance: something held them back."""


def check(
    facts: Facts, manifest: Mapping[str, Any], speedup: stats.Ratio | None, bound: float
) -> list[Caution]:
    """Every caution of a two-round run, in a fixed order."""
    found: list[Caution] = []
    for source in (
        few_repeats(facts),
        noisy_baseline(facts),
        bound_exceeded(speedup, bound),
        ties(facts),
        sender_delay(facts),
        slow_send(facts),
        first_event(facts),
        first_byte(facts),
        buffered(facts),
        odd_files(facts),
        never_stored(facts),
        l1_failures(facts),
        l2_source(facts),
        arms_differ(facts),
        fixed_order(facts),
        proxies(manifest),
        clock_dropped(facts),
        slowed(facts),
        attached(facts, manifest),
        logged(facts),
        unknown_versions(facts),
        lost_counts(facts),
    ):
        found += source
    return found


def _caution(id: str, text: str, **values: Any) -> Caution:
    return {"id": id, "text": text, "values": values}


def _measured(facts: Facts) -> list[RequestRecord]:
    return [record for account in facts.accounts for record in account.completed]


def few_repeats(facts: Facts) -> Iterator[Caution]:
    """Fewer than three repeats say little about how results vary between starts."""
    repeats = facts.plan.repeats
    if repeats < 3:
        yield _caution(
            "few-repeats",
            f"{repeats} repeat(s): the interval shows the contexts' spread, hardly that of starts",
            repeats=repeats,
        )


def noisy_baseline(facts: Facts) -> Iterator[Caution]:
    """The baseline's rounds differ by more than allowed, within the machine's noise."""
    gain = facts.false_gain
    if gain is not None and conditions.drifts(facts) and gain.low <= 1 <= gain.high:
        yield _caution(
            "baseline-noisy",
            f"baseline round 2 / round 1 is {1 / gain.value:.3f}, which this machine's noise"
            " explains; more repeats would tell",
            ratio=1 / gain.value,
        )


def bound_exceeded(speedup: stats.Ratio | None, bound: float) -> Iterator[Caution]:
    """A speedup above what skipping the restorable tokens can give, were prefill linear."""
    if speedup is not None and speedup.value > bound:
        yield _caution(
            "bound-exceeded",
            f"speedup {speedup.value:.2f} exceeds {bound:.2f}, the bound for prefill that is"
            " linear in tokens; prefill is not linear here, or something else saves time",
            speedup=speedup.value,
            bound=bound,
        )


def ties(facts: Facts) -> Iterator[Caution]:
    """Restored answers that chose another token of nearly the same probability."""
    flipped = facts.correctness["flipped"]
    if flipped:
        yield _caution(
            "tie",
            f"{flipped} restored answers chose another first token",
            flipped=flipped,
            pairs=facts.correctness["pairs"],
        )


def sender_delay(facts: Facts) -> Iterator[Caution]:
    """Requests that left late: the time is not in TTFT, but the machine was busy."""
    late = [
        (ns_to_ms(r.sent_ns - r.queued_ns), ns_to_ms(r.ttft_ns))
        for r in _measured(facts)
        if r.sent_ns is not None and r.ttft_ns is not None
    ]
    delay = stats.percentile([d for d, _ in late], 0.9) or 0.0
    usual = stats.median(ttft for _, ttft in late) or 0.0
    if delay > SENDER_SHARE_MAX * usual:
        yield _caution(
            "sender-delay",
            f"one request in ten left {delay:.1f} ms or more after it was due",
            p90_ms=delay,
        )


def slow_send(facts: Facts) -> Iterator[Caution]:
    """Requests during whose sending the processor was taken away: it is part of their TTFT."""
    shares = [
        (r.written_ns - r.sent_ns) / r.ttft_ns
        for r in _measured(facts)
        if r.written_ns is not None and r.sent_ns is not None and r.ttft_ns
    ]
    slow = sum(share > SLOW_SEND for share in shares)
    if slow and slow >= SLOW_SENDS_MAX * len(shares):
        yield _caution(
            "slow-send",
            f"handing {slow} of {len(shares)} requests to the socket took more than 5 % of their"
            " TTFT: the machine was busy",
            requests=slow,
            total=len(shares),
        )


def first_event(facts: Facts) -> Iterator[Caution]:
    """Streams whose first event came well before their first token."""
    differing = [
        r
        for r in _measured(facts)
        if r.ttft_ns and r.first_event_ns is not None and r.first_token_ns is not None
        if r.first_token_ns - r.first_event_ns > FIRST_EVENT_MAX * r.ttft_ns
    ]
    if differing:
        yield _caution(
            "first-event-differs",
            f"in {len(differing)} answers the first event came more than 5 % before the first"
            " token; TTFT is that of the token",
            requests=len(differing),
        )


def first_byte(facts: Facts) -> Iterator[Caution]:
    """Streams that began well before their first event, as those with keep-alives do."""
    differing = [
        r
        for r in _measured(facts)
        if r.ttft_ns and r.first_byte_ns is not None and r.first_event_ns is not None
        if r.first_event_ns - r.first_byte_ns > FIRST_EVENT_MAX * r.ttft_ns
    ]
    if differing:
        yield _caution(
            "first-byte-differs",
            f"in {len(differing)} answers the first byte came more than 5 % before the first"
            " event, as keep-alives do; TTFT is that of the token",
            requests=len(differing),
        )


def buffered(facts: Facts) -> Iterator[Caution]:
    """Answers of many tokens that arrived all at once: TTFT is then the time of the last token."""
    held = [r for r in _measured(facts) if is_buffered(r)]
    if held:
        yield _caution(
            "buffered",
            f"{len(held)} streams were buffered: all their events arrived at once",
            requests=len(held),
        )


def is_buffered(record: RequestRecord) -> bool:
    """Whether an answer of many tokens arrived faster than tokens can be made."""
    tokens = record.completion_tokens or 0
    if tokens < BUFFERED_TOKENS or record.first_byte_ns is None or record.last_byte_ns is None:
        return False
    return ns_to_ms(record.last_byte_ns - record.first_byte_ns) < BUFFERED_MS * (tokens - 1)


def odd_files(facts: Facts) -> Iterator[Caution]:
    """Empty, short, temporary or foreign files in the L2 folder."""
    odd = max(
        (int(e.detail.get("odd_files") or 0) for e in facts.events if e.kind == "drained"),
        default=0,
    )
    if odd:
        yield _caution(
            "odd-files",
            f"{odd} files in the L2 folder are empty, short, temporary or foreign",
            files=odd,
        )


def never_stored(facts: Facts) -> Iterator[Caution]:
    """Chunks that round 1 computed and LMCache did not store."""
    fills = facts.rounds("fill", arm="lmcache")
    missing = sum(stores.stored(facts, account).missing for account in fills)
    if missing:
        yield _caution("chunks-never-stored", f"{missing} chunks never stored", chunks=missing)


def l1_failures(facts: Facts) -> Iterator[Caution]:
    """Reads and writes of L1 and L2 that LMCache itself counts as failed."""
    for canonical in ("l1_allocation_failures", "l1_read_failures", "l2_load_failures"):
        grown = (
            facts.readings.grown(account.key, "lmcache", canonical).value or 0.0
            for account in facts.accounts
        )
        failed = sum(grown)
        if failed:
            name = canonical.replace("_", " ")
            yield _caution(
                canonical.replace("_", "-"),
                f"LMCache counted {failed:,.0f} {name} in the measured rounds",
                chunks=failed,
            )


def l2_source(facts: Facts) -> Iterator[Caution]:
    """Tokens served from L2 whose bytes may have come from the page cache."""
    tokens = sum(a.l2.value or 0.0 for a in facts.rounds("measure", arm="lmcache"))
    if tokens and evidence.read_source(tokens, None, None) == "unknown":
        yield _caution(
            "l2-source-unknown",
            f"{tokens:,.0f} tokens came from L2; whether from the disk or from the page cache"
            " was not measured",
            tokens=tokens,
        )


def arms_differ(facts: Facts) -> Iterator[Caution]:
    """Settings other than the size of the KV cache that the logs of both arms state differently."""
    texts = [text for key, text in servers.arm_differences(facts) if key != "kv_cache_tokens"]
    if texts:
        yield _caution(
            "arms-differ", f"the arms differ in {'; '.join(texts)}", differences="; ".join(texts)
        )


def fixed_order(facts: Facts) -> Iterator[Caution]:
    """The same arm always ran first, so that drift of the machine looks like a gain."""
    order = launched(facts)
    first = {arm for place, (_, arm) in enumerate(order) if place % 2 == 0}
    if len(order) > 3 and len(first) == 1:
        arm = order[0][1]
        yield _caution("fixed-order", f"{arm} always ran before the other arm", arm=arm)


def launched(facts: Facts) -> list[tuple[int, str]]:
    """The arms in the order in which they were measured."""
    return [
        (event.repeat, event.scenario)
        for event in facts.events
        if event.kind == "launching" and event.repeat and event.scenario
    ]


def proxies(manifest: Mapping[str, Any]) -> Iterator[Caution]:
    """Proxy variables of the machine; kvlab itself never uses them for its own servers."""
    found = (manifest.get("host") or {}).get("proxy_variables") or []
    names = [name for name in found if name.lower() != "no_proxy"]
    if names:
        yield _caution(
            "proxy-variables",
            f"proxy variables are set ({', '.join(sorted(names))}); kvlab ignored them",
            names=sorted(names),
        )


def clock_dropped(facts: Facts) -> Iterator[Caution]:
    """A processor or GPU that was slower at the end of one round than at the end of another.

    Only ends are compared: there the machine has just been busy.
    """
    ends: dict[str, list[tuple[float, str]]] = {}
    for event in _conditions(facts):
        place = f"{event.scenario}, repeat {event.repeat}, {event.round}"
        for name, clock in _clocks(event.detail):
            if event.detail.get("moment") == "end" and event.round in evidence.ROUNDS:
                ends.setdefault(name, []).append((clock, place))
    for name, seen in ends.items():
        (low, place), (high, _) = min(seen), max(seen)
        if low < (1 - CLOCK_DROP) * high:
            yield _caution(
                "clock-dropped",
                f"{name} ran at {low:,.0f} MHz at the end of {place}, and at up to {high:,.0f} MHz"
                " at the end of other rounds: times of these rounds may differ for that reason",
                name=name,
                low_mhz=low,
                high_mhz=high,
                place=place,
            )


def _conditions(facts: Facts) -> list[Event]:
    return [event for event in facts.events if event.kind == "condition"]


def _clocks(detail: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The clock of the fastest core, and of every GPU, as far as they are known."""
    cpu = detail.get("cpu_mhz") or {}
    if cpu.get("max"):
        yield "CPU", float(cpu["max"])
    for number, one in enumerate(detail.get("gpus") or []):
        if one.get("clock_mhz"):
            yield f"GPU {number}", float(one["clock_mhz"])


def slowed(facts: Facts) -> Iterator[Caution]:
    """GPUs that said why they were slower than they can be."""
    reasons = {
        reason
        for event in _conditions(facts)
        for one in event.detail.get("gpus") or []
        for reason in one.get("slowed") or []
    }
    if reasons:
        named = ", ".join(sorted(reasons))
        yield _caution("gpu-slowed", f"a GPU lowered its clock: {named}", reasons=sorted(reasons))


def attached(facts: Facts, manifest: Mapping[str, Any]) -> Iterator[Caution]:
    """Servers that somebody else started, and a disk that kvlab could not look into."""
    if (manifest.get("profile") or {}).get("runtime") != "attach":
        return
    yield _caution(
        "attached",
        "kvlab did not start the servers: settings that they do not state are not known, and the"
        " facts of the machine are of the one on which kvlab ran",
    )
    if facts.plan.has_l2 and not facts.plan.sees_l2:
        yield _caution(
            "l2-not-seen",
            "the records on the disk were not counted: kvlab cannot look into the L2 folder of"
            " this deployment",
        )


LOGGED = {
    "slow_paths": "took a slow path",
    "failed_stores": "reported a failed store",
    "failed_retrieves": "reported a failed retrieve",
    "unregistered": "met a worker that is not registered",
    "recomputed": "bypassed the cache",
    "reaped_workers": "dropped a worker",
    "ipc_errors": "could not share GPU memory",
    "out_of_memory": "ran out of memory",
}
"""Lines of the servers' logs that a healthy run does not have; see ``kvlab.stack.logs``."""


def logged(facts: Facts) -> Iterator[Caution]:
    """What the servers' own logs complain of."""
    stated = [
        event.detail.get(name) or {} for event in facts.events for name in ("facts", "log_facts")
    ]
    for name, what in LOGGED.items():
        entries = [fact[name] for fact in stated if isinstance(fact.get(name), dict)]
        if entries:
            worst = max(entries, key=lambda entry: int(entry.get("count", 0)))
            line = next(iter(worst.get("lines") or [""]))
            yield _caution(
                name.replace("_", "-"),
                f"a server {what}, {worst.get('count', 0)} times in one log: {line}",
                count=worst.get("count", 0),
                line=line,
            )


def unknown_versions(facts: Facts) -> Iterator[Caution]:
    """Servers of versions whose logs may word differently what kvlab looks for in them."""
    names = {
        name
        for event in facts.events
        if event.kind == "ready"
        for name in (event.detail.get("facts") or {}).get("unknown_versions") or ()
    }
    if names:
        yield _caution(
            "unknown-versions",
            f"the logs of {', '.join(sorted(names))} may word differently what kvlab looks for in"
            " them: what they do not state may only be unknown",
            names=sorted(names),
        )


def lost_counts(facts: Facts) -> Iterator[Caution]:
    """Counts that were dropped or could not be read: LMCache's counters are then lower bounds."""
    dropped = facts.readings.most("events_dropped")
    if dropped:
        yield _caution(
            "events-dropped",
            f"LMCache dropped {dropped:,.0f} of its own events: its counters are lower bounds",
            events=dropped,
        )
    skipped = facts.readings.most_of(counters.SKIPPED)
    if skipped:
        yield _caution(
            "metrics-lines-skipped",
            f"up to {skipped:,.0f} lines of a metrics page were no metrics and were skipped",
            lines=skipped,
        )
