"""What a restart's records come to, figure by figure and condition by condition."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab import profile
from kvlab.evidence import Plan, Readings
from kvlab.invariants import Facts, Invariant
from kvlab.records import Event, RequestRecord, Scrape
from kvlab.results import restart

CONTEXTS = 16
MANIFEST = {
    "arms": [*restart.LABELS],
    "run": "r",
    "experiment": "restart",
    "profile": profile.load("embedded", {"workload.contexts": CONTEXTS}).as_dict(),
}
CEILING = CONTEXTS * 1120
RECORD = 1000


def plan() -> Plan:
    return restart._plan(MANIFEST)


def scrape(label: str, boundary: str, source: str = "lmcache", **values: float) -> Scrape:
    names = {
        "l1": "lmcache_mp_lookup_hit_l1_tokens_total",
        "l2": "lmcache_mp_lookup_hit_l2_tokens_total",
        "loads": "lmcache_mp_l2_prefetch_load_completed_chunks_total",
        "used": "lmcache_mp_l1_memory_usage_bytes",
        "local": "vllm:prefix_cache_hits_total",
        "external": "vllm:external_prefix_cache_hits_total",
    }
    samples = {names[name]: value for name, value in values.items()}
    return Scrape(
        scenario=label, repeat=1, boundary=boundary, source=source, at_ns=1, samples=samples
    )


def rounds(**ends: float) -> list[Scrape]:
    """Counters around the measured round of both variants."""
    found = []
    for stop in restart.STOPS:
        label = restart.restarted(stop)
        found.append(scrape(label, "launch", used=ends.get("used", 0.0)))
        for boundary in ("start", "end"):
            at_end = boundary == "end"
            lmcache = {n: ends[n] if at_end else 0.0 for n in ("l1", "l2", "loads") if n in ends}
            found.append(scrape(label, f"measure:{boundary}", **lmcache))
            local = ends.get("local", 0.0) if at_end else 0.0
            found.append(scrape(label, f"measure:{boundary}", "vllm", local=local, external=0.0))
    return found


def event(kind: str, label: str, at_ns: int = 0, **detail: Any) -> Event:
    return Event(at_ns=at_ns, kind=kind, scenario=label, repeat=1, detail=detail)


def facts(scrapes: list[Scrape], events: list[Event] = [], latest: Any = None) -> Facts:  # noqa: B006
    from kvlab import evidence

    readings = Readings(scrapes)
    accounts = [
        evidence.account(key, latest or {}, readings, has_lmcache=True)
        for stop in restart.STOPS
        for key in ((stop, 1, "fill"), (restart.restarted(stop), 1, "measure"))
    ]
    return Facts(
        plan=plan(),
        accounts=accounts,
        events=events,
        readings=readings,
        correctness={"verdict": "pass", "reason": ""},
        false_gain=None,
    )


def test_l2_must_have_served_what_can_be_restored() -> None:
    held = restart.restored_from_l2(facts(rounds(l1=0.0, l2=CEILING)))
    assert held.holds is True
    short = restart.restored_from_l2(facts(rounds(l1=0.0, l2=0.5 * CEILING)))
    assert (short.holds, "(50.0%)" in short.detail) == (False, True)
    memory = restart.restored_from_l2(facts(rounds(l1=0.2 * CEILING, l2=CEILING)))
    assert (memory.holds, "L1 served" in memory.detail) == (False, True)
    own = restart.restored_from_l2(facts(rounds(l1=0.0, l2=CEILING, local=0.2 * CEILING)))
    assert (own.holds, "L0 served" in own.detail) == (False, True)
    assert restart.restored_from_l2(facts([])).holds is None


def test_memory_must_be_empty_when_the_server_has_started() -> None:
    assert restart.l1_empty(facts(rounds())).holds is True
    full = restart.l1_empty(facts(rounds(used=4096.0)))
    assert (full.holds, "4,096 bytes" in full.detail) == (False, True)
    assert restart.l1_empty(facts([])).holds is None


def surveyed(kept: int | None, surviving: int | None, **odd: int) -> list[Event]:
    found = []
    for stop in restart.STOPS:
        detail = {"kept": kept, "surviving": surviving, "files": 10, "bytes": 10 * RECORD, **odd}
        found.append(event("l2_survey", stop, when="stopped", **detail))
        found.append(event("l2_survey", restart.restarted(stop), when="started", **detail))
    return found


def test_records_must_survive_whole() -> None:
    assert restart.records_survive(facts([], surveyed(10, 10))).holds is True
    lost = restart.records_survive(facts([], surveyed(10, 9)))
    assert (lost.holds, "9 of 10 records survived" in lost.detail) == (False, True)
    assert restart.records_survive(facts([], surveyed(0, 0))).holds is False
    assert restart.records_survive(facts([])).holds is None
    assert restart.records_whole(facts([], surveyed(10, 10, temporary=1))).holds is True
    cut = restart.records_whole(facts([], surveyed(10, 10, short=2)))
    assert (cut.holds, "2 short records" in cut.detail) == (False, True)
    assert restart.records_whole(facts([])).holds is None


def stopped(**codes: Any) -> list[Event]:
    """The servers' ends; both variants' exit codes unless others are given."""
    kept = {"sigterm": {"vllm": 0, "lmcache": -15}, "sigkill": {"vllm": -9, "lmcache": 137}}
    return [event("stopped", label, exit_codes=found) for label, found in {**kept, **codes}.items()]


def test_sigkill_must_really_have_happened_and_sigterm_must_have_sufficed() -> None:
    held = restart.stopped_as_meant(facts([], stopped()))
    assert held.holds is True
    assert held.detail.endswith("sigkill: vllm -9, lmcache 137")
    soft = restart.stopped_as_meant(facts([], stopped(sigkill={"vllm": 0, "lmcache": -9})))
    assert (soft.holds, soft.detail) == (
        False,
        "sigkill, repeat 1: vllm ended with exit code 0, not by SIGKILL",
    )
    deaf = restart.stopped_as_meant(facts([], stopped(sigterm={"vllm": -9, "lmcache": -15})))
    assert (deaf.holds, "did not stop in order" in deaf.detail) == (False, True)
    for codes in ({}, {"vllm": None}):
        assert restart.stopped_as_meant(facts([], stopped(sigkill=codes))).holds is None
    assert restart.stopped_as_meant(facts([])).holds is None


def configured(**after: Any) -> list[Event]:
    fields = {"chunk_tokens": 224, "hash_algorithm": "blake3", "vllm": "1", "lmcache": "2"}
    return [
        event("identity", label, fields={**fields, **(after if "-" in label else {})})
        for label in restart.LABELS
    ]


def test_the_reading_servers_must_be_configured_as_the_writing_ones() -> None:
    assert restart.same_configuration(facts([], configured())).holds is True
    other = restart.same_configuration(facts([], configured(lmcache="3")))
    assert (other.holds, "lmcache changed" in other.detail) == (False, True)
    assert restart.same_configuration(facts([])).holds is None


@pytest.mark.parametrize(
    ("hits", "refused", "holds"),
    [(0, "chunk_tokens differs", True), (7, "x", False), (0, None, False), (None, None, None)],
)
def test_a_control_must_find_nothing_and_be_refused(
    hits: int | None, refused: str | None, holds: bool | None
) -> None:
    control = {"name": "other-chunk", "contexts": 4, "hit_tokens": hits, "refused": refused}
    assert restart.controls_miss([control]).holds is holds


def read(device_bytes: int, resident: int, scale: float = 1.0) -> dict[str, Any]:
    events = surveyed(10, 10)
    for stop in restart.STOPS:
        label = restart.restarted(stop)
        before = {"bytes": 10_000, "resident_bytes": resident, "device": "vda"}
        events.append(event("pages_dropped", label, device_read_bytes=500, **before))
        events.append(event("pages_read", label, device_read_bytes=500 + device_bytes))
    found = facts(rounds(l1=0.0, l2=CEILING, loads=10 * scale), events)
    return restart.variant(found, "sigterm", {}, seed=0)


def test_bytes_are_from_disk_only_when_the_device_read_them_and_memory_held_none() -> None:
    disk = read(10_000, 100)
    assert disk["read_source"] == "disk"
    assert (disk["loaded_bytes"], disk["device_bytes"]) == (10_000, 10_000)
    assert disk["resident_share"] == 0.01
    assert read(300, 9_700)["read_source"] == "page cache"
    assert read(10_000, 9_700)["read_source"] == "page cache"
    nothing = restart.variant(facts([]), "sigterm", {}, seed=0)
    assert nothing["read_source"] == "unknown"
    assert nothing["loaded_bytes"] is None
    assert nothing["l2_share"] is None
    assert nothing["surviving_share"] is None


def request(label: str, name: str, index: int = 0, **values: Any) -> RequestRecord:
    given = {"sent_ns": 1, "first_token_ns": 9_000_000_000, "last_byte_ns": 9_500_000_001}
    return RequestRecord(
        scenario=label,
        repeat=1,
        round=name,
        index=index,
        context_id="c",
        planned_tokens=1121,
        asked_tokens=1,
        queued_ns=0,
        **{**given, **values},
    )


def test_the_first_hit_counts_from_the_start_of_the_servers() -> None:
    label = "sigterm-restarted"
    scrapes = [scrape(label, "first:start", l2=0.0), scrape(label, "first:end", l2=1120.0)]
    found = facts(scrapes, [event("launching", label, at_ns=1_000_000_000)])
    latest = {(label, 1, "first", 0): request(label, "first")}
    assert restart.variant(found, "sigterm", latest, seed=0)["first_hit_s"] == 8.0
    missed = facts([], [event("launching", label)])
    assert restart.variant(missed, "sigterm", latest, seed=0)["first_hit_s"] is None


def test_workload_time_is_unknown_when_a_request_failed() -> None:
    good = {("sigterm", 1, "fill", i): request("sigterm", "fill", i) for i in range(2)}
    assert restart.variant(facts([], latest=good), "sigterm", good, seed=0)["cold_s"] == 19.0
    bad = {**good, ("sigterm", 1, "fill", 2): request("sigterm", "fill", 2, error="timeout")}
    assert restart.variant(facts([], latest=bad), "sigterm", bad, seed=0)["cold_s"] is None


def scrape_rule(label: str, local: float) -> list[Scrape]:
    """The counters of vLLM around the second visit; ``local`` tokens came from its own cache."""
    return [
        scrape(label, f"rule-again:{boundary}", "vllm", local=value)
        for boundary, value in (("start", 0.0), ("end", local))
    ]


def test_the_rule_tells_batches_apart() -> None:
    events, latest = [], {}
    for label, tokens, cached in (("coarse-batches", 448, 896), ("sigkill-restarted", 447, 1120)):
        events.append(event("rule", label, batched_tokens=tokens, shared_tokens=1120))
        for index in range(2):
            latest[label, 1, "rule-again", index] = request(
                label, "rule-again", index, cached_tokens=cached
            )
    coarse, fine = (scrape_rule(one, 0.0) for one in ("coarse-batches", "sigkill-restarted"))
    cold = [*coarse, *fine]
    found = restart.rule(latest, facts(cold, events))
    assert [(one["batched_tokens"], one["cached_tokens"]) for one in found] == [
        (447, 1120),
        (448, 896),
    ]
    assert restart.rule({}, facts(cold, events)) == []
    assert restart.rule(latest, facts([], events)) == []
    warm = [*coarse, *scrape_rule("sigkill-restarted", 224.0)]
    assert [one["batched_tokens"] for one in restart.rule(latest, facts(warm, events))] == [448]


def test_conditions_of_several_launches_become_one() -> None:
    good, bad = Invariant("a", True, "fine"), Invariant("a", False, "broken")
    unknown = Invariant("a", None, "unknown: x")
    assert restart._merged([good, good]) == good
    assert restart._merged([good, unknown]).holds is None
    assert restart._merged([unknown, bad]).detail == "broken"
