"""Each caution: what must be said beside a result, and silence where there is nothing to say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvlab import cautions, counters, summary
from kvlab.records import Event, RequestRecord
from kvlab.rundir import RunDir
from tests.builders import (
    Edit,
    both,
    count,
    detail,
    make_run,
    on_event,
    on_request,
    on_scrape,
    replace,
)

MS = 1_000_000


def said(tmp_path: Path, edit: Edit | None = None, **knobs: Any) -> dict[str, dict[str, Any]]:
    """The cautions of a run by id, but for the one that every run with disk hits carries."""
    found = summary.summarise(make_run(tmp_path, edit=edit, **knobs))["cautions"]
    return {row["id"]: row for row in found if row["id"] != "l2-source-unknown"}


def test_a_healthy_run_has_nothing_to_say(tmp_path: Path) -> None:
    assert said(tmp_path) == {}


def test_tokens_from_l2_say_that_their_source_was_not_measured(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path))["cautions"]
    assert [row["id"] for row in found] == ["l2-source-unknown"]
    assert found[0]["values"] == {"tokens": 3 * 3584}
    only_l1 = on_scrape(
        count(lookup_hit_l1_tokens=3584, lookup_hit_l2_tokens=-3584),
        source="lmcache",
        boundary="measure:end",
    )
    assert summary.summarise(make_run(tmp_path / "b", edit=only_l1))["cautions"] == []


def test_few_repeats(tmp_path: Path) -> None:
    assert "few-repeats" in said(tmp_path, repeats=2)


def test_a_baseline_that_drifts_within_its_noise(tmp_path: Path) -> None:
    def change(record: RequestRecord) -> RequestRecord:
        assert record.sent_ns
        ms = [640, 900, 600, 620][record.index] if record.round == "measure" else 700
        return dataclasses.replace(record, first_token_ns=record.sent_ns + ms * MS)

    found = said(tmp_path, on_request(change, scenario="baseline"), contexts=4)
    assert found["baseline-noisy"]["values"]["ratio"] == pytest.approx(0.9)
    assert "baseline-noisy" not in said(tmp_path / "b", on_request(_halve, round="measure"))


def _halve(record: RequestRecord) -> RequestRecord:
    assert record.sent_ns
    assert record.first_token_ns
    half = (record.first_token_ns - record.sent_ns) // 2
    return dataclasses.replace(record, first_token_ns=record.sent_ns + half)


def test_a_speedup_beyond_the_bound(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"shape": "prefix_suffix", "context_tokens": 1500}
    assert "bound-exceeded" in said(tmp_path, **shape)
    assert "bound-exceeded" not in said(tmp_path / "b", restored_ms=400, **shape)


def test_ties(tmp_path: Path) -> None:
    tie = on_request(replace(token="zosu"), scenario="lmcache", round="measure", index=1)
    assert said(tmp_path, tie)["tie"]["values"] == {"flipped": 3, "pairs": 18}


def test_a_late_sender(tmp_path: Path) -> None:
    late = on_request(lambda r: dataclasses.replace(r, queued_ns=r.queued_ns - 20 * MS))
    assert said(tmp_path, late)["sender-delay"]["values"]["p90_ms"] == pytest.approx(20.05)


def test_no_times_no_sender_delay(tmp_path: Path) -> None:
    assert "sender-delay" not in said(tmp_path, on_request(replace(sent_ns=None)))


def _sent_for(ms: float) -> Any:
    return lambda r: dataclasses.replace(r, written_ns=r.sent_ns + int(ms * MS))


def test_a_machine_too_busy_to_send(tmp_path: Path) -> None:
    """Two of six contexts, in one round of four: one request in twelve is not enough."""
    slow = _sent_for(40)  # of 700 ms
    one = on_request(slow, scenario="baseline", round="fill", index=0)
    assert "slow-send" not in said(tmp_path / "a", one)
    every = both(one, on_request(slow, scenario="baseline", round="measure", index=0))
    more = both(every, on_request(slow, scenario="baseline", round="measure", index=1))
    found = said(tmp_path / "b", more)["slow-send"]
    assert found["values"] == {"requests": 9, "total": 72}
    assert "the machine was busy" in found["text"]
    assert said(tmp_path / "c", on_request(_sent_for(3))) == {}
    assert said(tmp_path / "d", on_request(replace(written_ns=None))) == {}


def test_a_first_byte_long_before_the_first_event(tmp_path: Path) -> None:
    early = on_request(
        lambda r: dataclasses.replace(r, first_byte_ns=r.first_event_ns - 40 * MS),
        scenario="baseline",
        round="measure",
        index=2,
    )
    found = said(tmp_path, early)
    assert list(found) == ["first-byte-differs"]
    assert found["first-byte-differs"]["values"] == {"requests": 3}


def test_a_first_event_that_is_no_token(tmp_path: Path) -> None:
    role = on_request(
        lambda r: dataclasses.replace(r, first_event_ns=r.first_token_ns - 40 * MS),
        scenario="baseline",
        round="fill",
        index=0,
    )
    assert said(tmp_path, role)["first-event-differs"]["values"] == {"requests": 3}
    close = on_request(
        lambda r: dataclasses.replace(r, first_event_ns=r.first_token_ns - 30 * MS),
        scenario="baseline",
        round="fill",
    )
    assert said(tmp_path / "b", close) == {}


def _answer(tokens: int | None, span_ms: float | None) -> RequestRecord:
    return RequestRecord(
        scenario="baseline",
        repeat=1,
        round="fill",
        index=0,
        context_id="c",
        planned_tokens=10,
        asked_tokens=20,
        queued_ns=0,
        sent_ns=0,
        first_byte_ns=2000 * MS,
        last_byte_ns=None if span_ms is None else 2000 * MS + int(span_ms * MS),
        completion_tokens=tokens,
    )


@pytest.mark.parametrize(
    ("tokens", "span_ms", "held"),
    [
        (20, 1.0, True),
        (20, 0.0, True),
        (20, 400.0, False),
        (20, 4.0, False),
        (1, 0.0, False),
        (None, 0.0, False),
        (20, None, False),
    ],
)
def test_a_buffered_stream(tokens: int | None, span_ms: float | None, held: bool) -> None:
    assert cautions.is_buffered(_answer(tokens, span_ms)) is held


def test_buffered_streams_are_said(tmp_path: Path) -> None:
    held = on_request(
        lambda r: dataclasses.replace(r, completion_tokens=20, asked_tokens=20), index=0
    )
    assert "buffered" not in said(tmp_path, on_request(replace(completion_tokens=2)))
    assert said(tmp_path / "b", held)["buffered"]["values"] == {"requests": 12}


def test_odd_files(tmp_path: Path) -> None:
    odd = on_event(detail(odd_files=2), kind="drained", round="measure", repeat=2)
    assert said(tmp_path, odd)["odd-files"]["values"] == {"files": 2}
    assert said(tmp_path / "b", on_event(detail(odd_files=None), kind="drained")) == {}


def test_chunks_never_stored(tmp_path: Path) -> None:
    found = said(tmp_path, fault="chunks never stored")
    assert found["chunks-never-stored"]["text"] == "6 chunks never stored"


@pytest.mark.parametrize(
    ("series", "id"),
    [
        ("l1_allocation_failure_chunks", "l1-allocation-failures"),
        ("l1_read_failure_chunks", "l1-read-failures"),
        ("l2_prefetch_failure_chunks", "l2-load-failures"),
    ],
)
def test_failures_that_lmcache_counts(tmp_path: Path, series: str, id: str) -> None:
    failed = on_scrape(count(**{series: 4}), source="lmcache", boundary="measure:end")
    assert said(tmp_path, failed)[id]["values"] == {"chunks": 12}


def test_arms_that_differ_in_more_than_lmcache(tmp_path: Path) -> None:
    edit = both(
        on_event(
            detail(facts={"kv_cache_tokens": 10922, "max_num_batched_tokens": 2048, "dtype": "a"}),
            kind="ready",
            scenario="baseline",
        ),
        on_event(
            detail(
                facts={
                    "kv_cache_tokens": 10900,
                    "max_num_batched_tokens": 447,
                    "dtype": "b",
                    "start": 4.0,
                    "only_here": 1,
                    "prefix_caching": True,
                }
            ),
            kind="ready",
            scenario="lmcache",
        ),
    )
    assert said(tmp_path, edit)["arms-differ"]["values"]["differences"] == (
        "dtype a vs b; max num batched tokens 2,048 vs 447; prefix caching off vs on"
    )


def test_an_order_that_never_changes(tmp_path: Path) -> None:
    first = on_event(lambda _: None, kind="launching", repeat=2)
    found = said(tmp_path, both(first), repeats=3)
    assert found["fixed-order"]["values"] == {"arm": "baseline"}
    assert "fixed-order" not in said(tmp_path / "b", repeats=1)


def clocked(mhz: float, gpu_mhz: float | None = None, **where: Any) -> Event:
    gpus = [{"name": "G", "clock_mhz": gpu_mhz, "slowed": where.pop("slowed", None)}]
    values = {"moment": "end", "cpu_mhz": {"median": 1, "max": mhz}, "gpus": gpus}
    place = {"scenario": "lmcache", "repeat": 1, "round": "measure", **where}
    return Event(at_ns=1, kind="condition", detail=values, **place)


def conditions(tmp_path: Path, *events: Event) -> list[dict[str, Any]]:
    run = make_run(tmp_path)
    run.reopen()
    for event in events:
        run.append(event)
    run.seal()
    found = summary.summarise(RunDir.open(run.path))["cautions"]
    return [c for c in found if c["id"] in ("clock-dropped", "gpu-slowed")]


def test_a_clock_that_dropped_between_rounds(tmp_path: Path) -> None:
    (found,) = conditions(
        tmp_path,
        clocked(2600, 2400, scenario="baseline"),
        clocked(2500, 650),
        clocked(100, 100, round="warmup"),
    )
    assert found["values"] == {
        "name": "GPU 0",
        "low_mhz": 650.0,
        "high_mhz": 2400.0,
        "place": "lmcache, repeat 1, measure",
    }


def test_clocks_that_differ_little_or_are_unknown_are_no_caution(tmp_path: Path) -> None:
    assert conditions(tmp_path, clocked(2600, 2400), clocked(2350, None)) == []


def test_a_gpu_that_lowered_its_own_clock(tmp_path: Path) -> None:
    (found,) = conditions(tmp_path, clocked(2600, 2400, slowed=["power cap"]))
    assert found["id"] == "gpu-slowed"
    assert found["values"] == {"reasons": ["power cap"]}


def test_proxy_variables(tmp_path: Path) -> None:
    host = {"host": {"proxy_variables": ["https_proxy", "HTTP_PROXY"]}}
    found = said(tmp_path, manifest=host)["proxy-variables"]
    assert found["values"] == {"names": ["HTTP_PROXY", "https_proxy"]}
    assert said(tmp_path / "b", manifest={"host": None}) == {}
    only_exceptions = {"host": {"proxy_variables": ["NO_PROXY", "no_proxy"]}}
    assert said(tmp_path / "c", manifest=only_exceptions) == {}


def test_what_the_logs_complain_of(tmp_path: Path) -> None:
    facts = {"slow_paths": {"count": 2, "lines": ["skipping backend lmcache.c_ops"]}}
    more = {"slow_paths": {"count": 1, "lines": ["pickle"]}, "failed_retrieves": {"count": 3}}
    edit = both(
        on_event(detail(facts=facts), kind="ready", scenario="lmcache", repeat=1),
        on_event(detail(log_facts=more), kind="stopped", scenario="lmcache", repeat=1),
    )
    found = said(tmp_path, edit)
    assert found["slow-paths"]["values"] == {"count": 2, "line": "skipping backend lmcache.c_ops"}
    assert found["failed-retrieves"]["values"] == {"count": 3, "line": ""}


def test_logs_of_another_version(tmp_path: Path) -> None:
    facts = {"unknown_versions": ["vLLM 0.99"]}
    edit = on_event(detail(facts=facts), kind="ready", scenario="lmcache", repeat=1)
    assert said(tmp_path, edit)["unknown-versions"]["values"] == {"names": ["vLLM 0.99"]}


def test_counts_that_were_lost(tmp_path: Path) -> None:
    dropped = on_scrape(count(event_bus_dropped_events=5), source="lmcache", boundary="measure:end")
    assert said(tmp_path, dropped)["events-dropped"]["values"] == {"events": 5}

    def junk(scrape: Any) -> Any:
        return dataclasses.replace(scrape, samples={**scrape.samples, counters.SKIPPED: 2.0})

    found = said(tmp_path / "b", on_scrape(junk, source="vllm", boundary="launch"))
    assert found["metrics-lines-skipped"]["values"] == {"lines": 2}
