"""Verification: a sound folder has no differences, and every tampering is found."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvlab import summary, verify
from kvlab.records import RequestRecord
from kvlab.rundir import RunDir
from tests.builders import make_run, on_event, on_request, on_scrape, replace


def concluded(tmp_path: Path, **knobs: Any) -> RunDir:
    run = make_run(tmp_path, repeats=1, **knobs)
    summary.conclude(run)
    return RunDir.open(run.path)


def found(run: RunDir) -> list[str]:
    return [str(difference) for difference in verify.verify(RunDir.open(run.path))]


def resealed(run: RunDir) -> list[str]:
    """Differences that remain when whoever changed the folder also wrote the checksums anew."""
    RunDir.open(run.path).seal()
    return found(run)


@pytest.mark.parametrize("fault", [None, "failed request", "no counters"])
def test_a_sound_folder_has_no_differences(tmp_path: Path, fault: str | None) -> None:
    assert found(concluded(tmp_path, fault=fault)) == []


def test_a_sound_control(tmp_path: Path) -> None:
    assert found(concluded(tmp_path, control=True)) == []


@pytest.mark.parametrize("name", ["requests.jsonl", "counters.jsonl", "events.jsonl"])
def test_any_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    run = concluded(tmp_path)
    path = run.path / name
    whole = path.read_bytes()
    source = random.Random(1)
    for _ in range(25):
        place = source.randrange(len(whole))
        changed = bytes([whole[place] ^ (1 << source.randrange(8))])
        path.write_bytes(whole[:place] + changed + whole[place + 1 :])
        assert any(name in line for line in found(run))
    path.write_bytes(whole)
    assert found(run) == []


def test_a_changed_time_is_found_although_the_checksums_were_made_anew(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    path = run.path / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    row = next(r for r in rows if r["scenario"] == "lmcache" and r["round"] == "measure")
    row["first_token_ns"] -= 50_000_000
    row["first_event_ns"] = row["first_byte_ns"] = row["first_token_ns"]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines = resealed(run)
    assert any("ttft_series_ms.lmcache.measure[0][0]" in line for line in lines)


def test_files_that_vanish_appear_or_change(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    (run.path / "events.jsonl").rename(run.path / "events.bak")
    manifest = run.path / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    lines = found(run)
    assert "events.jsonl: is missing" in lines
    assert "events.bak: is not listed in SHA256SUMS" in lines
    assert any(line.startswith("manifest.json: was changed") for line in lines)


def test_a_changed_profile(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    run.manifest["profile"]["workload"]["seed"] = 7
    run.write_manifest()
    assert resealed(run) == ["manifest.json: the profile does not have the SHA-256 that is stated"]
    run.manifest.pop("profile_sha256")
    run.write_manifest()
    assert resealed(run) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{half", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"scenario": "baseline"}', "lacks repeat, round, index"),
    ],
)
def test_lines_that_are_no_records(tmp_path: Path, line: bytes, complaint: str) -> None:
    run = concluded(tmp_path)
    path = run.path / "requests.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    (difference,) = resealed(run)
    assert difference.startswith(f"requests.jsonl, line 1: {complaint}")


def test_a_stamp_that_is_no_whole_number(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    path = run.path / "requests.jsonl"
    text = path.read_text()
    start = text.index('"sent_ns": ') + len('"sent_ns": ')
    path.write_text(text[:start] + '"soon"' + text[text.index(",", start) :])
    assert resealed(run) == ["requests.jsonl, line 1: sent_ns is not a whole number"]


def test_a_line_that_its_writers_death_cut(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    path = run.path / "requests.jsonl"
    path.write_bytes(path.read_bytes() + b'{"scenario": "lmc')
    assert any("is not JSON" in line for line in resealed(run))
    run.update_manifest(status="partial")
    assert not any("is not JSON" in line for line in resealed(run))


def test_stamps_out_of_order(tmp_path: Path) -> None:
    early = on_request(
        lambda r: dataclasses.replace(r, first_token_ns=r.first_event_ns - 10_000),
        scenario="baseline",
        round="fill",
        index=2,
    )
    assert found(concluded(tmp_path, edit=early)) == [
        "requests.jsonl: baseline, repeat 1, fill, request 2: first_token_ns is before"
        " first_event_ns"
    ]


def test_a_call_that_returned_before_it_began(tmp_path: Path) -> None:
    odd = on_request(
        lambda r: dataclasses.replace(r, written_ns=r.sent_ns - 1),
        scenario="baseline",
        round="fill",
        index=2,
    )
    assert found(concluded(tmp_path / "a", edit=odd)) == [
        "requests.jsonl: baseline, repeat 1, fill, request 2: written_ns is before sent_ns"
    ]
    late = on_request(lambda r: dataclasses.replace(r, written_ns=r.first_token_ns + 1))
    assert found(concluded(tmp_path / "b", edit=late)) == []


def test_a_refused_request_may_end_before_it_was_sent(tmp_path: Path) -> None:
    refused = on_request(replace(error="http 400", sent_ns=10**15), index=2, round="fill")
    assert found(concluded(tmp_path, edit=refused)) == []


def _double(run: RunDir, name: str) -> None:
    path = run.path / name
    lines = path.read_text().splitlines(keepends=True)
    wanted = next(line for line in lines if '"round": "fill"' in line or '"fill:end"' in line)
    path.write_text("".join([*lines, wanted]))


def test_records_that_are_there_twice(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    _double(run, "requests.jsonl")
    _double(run, "counters.jsonl")
    lines = resealed(run)
    assert "requests.jsonl: baseline, repeat 1, fill, request 0 is there 2 times" in lines
    assert "requests.jsonl: baseline, repeat 1, fill: 7 requests, 6 planned" in lines
    assert "counters.jsonl: baseline, repeat 1, fill:end of vllm is there 2 times" in lines


def test_records_that_are_missing_or_were_never_planned(tmp_path: Path) -> None:
    lost = on_request(lambda _: None, scenario="lmcache", round="measure")
    stray = on_request(replace(scenario="other"), scenario="baseline", round="measure")
    assert found(concluded(tmp_path / "a", edit=lost)) == [
        "requests.jsonl: lmcache, repeat 1, measure: 0 requests, 6 planned"
    ]
    lines = found(concluded(tmp_path / "b", edit=stray))
    assert "requests.jsonl: other, repeat 1, measure is not in the plan" in lines


def test_events_out_of_order(tmp_path: Path) -> None:
    early = on_event(replace(at_ns=5), kind="stopped", scenario="lmcache")
    assert found(concluded(tmp_path, edit=early)) == ["events.jsonl: stopped is before stopping"]


def test_a_resumed_run_has_a_new_clock(tmp_path: Path) -> None:
    again = on_event(replace(kind="run_started", at_ns=5), kind="launching", scenario="lmcache")
    assert found(concluded(tmp_path, edit=again)) == []


def test_a_complete_run_must_be_sealed_and_summarised(tmp_path: Path) -> None:
    run = make_run(tmp_path, repeats=1, seal=False)
    (run.path / "counters.jsonl").unlink()
    assert found(run) == [
        "SHA256SUMS: is missing, the run was never sealed",
        "counters.jsonl: is missing",
    ]
    run = make_run(tmp_path / "b", repeats=1)
    assert found(run) == ["summary.json: is missing"]


def test_a_partial_run_is_checked_as_far_as_it_goes(tmp_path: Path) -> None:
    cut = on_request(lambda _: None, scenario="lmcache", round="measure")
    run = make_run(tmp_path, repeats=1, edit=cut, seal=False)
    (run.path / "counters.jsonl").unlink()
    run.update_manifest(status="partial")
    assert found(run) == []


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("verdict", {"status": "proven", "reasons": []}, "summary.json, verdict.reasons"),
        ("speedup", {}, "missing, the records give"),
        ("invented", 7, "summary.json, invented: 7 stated, not in the records"),
        ("schema", 1.5, "summary.json, schema: 1.5 stated, the records give 1"),
        ("control", 0, "summary.json, control: 0 stated, the records give false"),
    ],
)
def test_a_summary_that_says_something_else(
    tmp_path: Path, key: str, value: Any, text: str
) -> None:
    run = concluded(tmp_path)
    run.write_summary({**(run.read_summary() or {}), key: value})
    assert any(text in line for line in resealed(run))


def test_a_damaged_summary(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    (run.path / "summary.json").write_text("{")
    assert any("summary.json" in line and "damaged" in line for line in resealed(run))


@pytest.mark.parametrize(
    ("stated", "computed", "same"),
    [
        (1, 1, True),
        (1, 2, False),
        (1.0, 1, True),
        (1, 1.0 + 1e-12, True),
        (0.1 + 0.2, 0.3, True),
        (1.0, 1.0 + 1e-8, False),
        (0.0, 0.0, True),
        (1, True, False),
        (None, None, True),
        (None, 0, False),
        ("a", "a", True),
        ("1", 1, False),
        ([1, 2], [1, 2], True),
        ([1, 2], [1], False),
        ({"a": [{"b": 1.0}]}, {"a": [{"b": 1}]}, True),
        ({"a": 1}, [1], False),
    ],
)
def test_values_are_compared_exactly_but_for_the_last_bits(
    stated: Any, computed: Any, same: bool
) -> None:
    assert (list(verify.compare(stated, computed)) == []) is same


def test_long_values_are_shown_in_part() -> None:
    ((_, what),) = verify.compare("x" * 100, "y")
    assert len(what) < 120


def test_scrapes_that_failed_are_no_difference(tmp_path: Path) -> None:
    failed = on_scrape(replace(samples=None, error="connection refused"), boundary="launch")
    assert found(concluded(tmp_path, edit=failed)) == []


def test_records_of_a_later_minor_version(tmp_path: Path) -> None:
    run = concluded(tmp_path)
    path = run.path / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "new_field": 1}) + "\n" for row in rows))
    assert resealed(run) == []
    assert isinstance(RunDir.open(run.path).requests()[0], RequestRecord)
