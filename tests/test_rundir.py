"""The run folder: nothing measured is lost, nothing foreign is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import records
from kvlab.errors import HostBusy, RunFolderError
from kvlab.records import Event, RequestRecord, Scrape
from kvlab.rundir import RunDir, run_id, sha256_json


def make(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, {"run": "r1", "experiment": "two-round"})


def request(index: int = 0, **values: object) -> RequestRecord:
    fields = {
        "scenario": "baseline",
        "repeat": 1,
        "round": "fill",
        "index": index,
        "context_id": f"c{index}",
        "planned_tokens": 10,
        "asked_tokens": 1,
        "queued_ns": 1,
    }
    return RequestRecord(**{**fields, **values})  # type: ignore[arg-type]


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    run = make(tmp_path)
    scrape = Scrape(
        scenario="lmcache",
        repeat=1,
        boundary="fill:start",
        source="lmcache",
        at_ns=5,
        samples={"a_total": 1.5},
        info={"x_info": {"k": "v"}},
    )
    event = Event(at_ns=7, kind="run_started", detail={"a": [1, None]})
    for record in (request(), scrape, event, request(1, top_logprobs={"a\u2028b": -0.1})):
        run.append(record)
    again = RunDir.open(run.path)
    assert again.requests() == [request(), request(1, top_logprobs={"a\u2028b": -0.1})]
    assert again.scrapes() == [scrape]
    assert again.events() == [event]
    assert again.manifest["status"] == "running"


def test_a_record_is_on_disk_before_append_returns(tmp_path: Path) -> None:
    run = make(tmp_path)
    seen: list[str] = []
    run.on_append = lambda record: seen.append((run.path / "requests.jsonl").read_text())
    run.append(request())
    assert json.loads(seen[0])["context_id"] == "c0"


def test_a_line_cut_by_a_kill_is_passed_over_and_never_glued_to_the_next(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append(request(0))
    run.append(request(1))
    path = run.path / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [r.index for r in RunDir.open(run.path).requests()] == [0]
    again = RunDir.open(run.path)
    again.append(request(2))
    assert [r.index for r in RunDir.open(run.path).requests()] == [0, 2]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = make(tmp_path)
    for index in range(3):
        run.append(request(index))
    path = run.path / "requests.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:-5]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(RunFolderError, match="line 2"):
        RunDir.open(run.path).requests()


def test_unfinished_arms_are_set_aside_and_kept(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append(request(0))
    run.append(Event(at_ns=1, kind="arm_finished", scenario="baseline", repeat=1))
    run.append(request(0, scenario="lmcache"))
    run.append(Event(at_ns=2, kind="failure", detail={}))
    assert run.set_aside_unfinished() == 1
    assert [r.scenario for r in run.requests()] == ["baseline"]
    assert [e.kind for e in run.events()] == ["arm_finished", "failure"]
    aside = (run.path / "aside" / "requests.jsonl").read_text().splitlines()
    assert json.loads(aside[0])["scenario"] == "lmcache"
    assert run.set_aside_unfinished() == 0


def test_a_torn_line_does_not_outlive_the_resumption(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append(request(0))
    run.append(Event(at_ns=1, kind="arm_finished", scenario="baseline", repeat=1))
    run.seal()
    run.write_summary({"old": 1})
    with (run.path / "events.jsonl").open("ab") as stream:
        stream.write(b'{"at_ns":2,"kind":"laun')
    again = RunDir.open(run.path)
    again.reopen()
    assert again.set_aside_unfinished() == 0
    assert again.sealed_checksums() is None
    assert again.read_summary() is None
    again.append(Event(at_ns=3, kind="run_started"))
    lines = (run.path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["arm_finished", "run_started"]


def test_half_a_character_from_a_server_does_not_end_the_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append(Event(at_ns=1, kind="failure", detail={"error": "bad \ud83d"}))
    run.update_manifest(note="\udcff")
    again = RunDir.open(run.path)
    assert again.events()[0].detail == {"error": "bad ?"}
    assert again.manifest["note"] == "?"


def test_sealing_notices_any_changed_byte(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append(request())
    (run.path / "l2").mkdir()
    (run.path / "l2" / "x.data").write_bytes(b"kv")
    run.seal()
    sealed = run.sealed_checksums()
    assert sealed == run.checksums()
    assert set(sealed) == {"manifest.json", "requests.jsonl"}
    path = run.path / "requests.jsonl"
    changed = bytearray(path.read_bytes())
    changed[5] ^= 1
    path.write_bytes(changed)
    assert run.checksums() != sealed


@pytest.mark.parametrize("text", [None, "", "[1]", "{}", '{"schema": "1"}', "\xff"])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunFolderError) as caught:
        RunDir.open(tmp_path)
    assert caught.value.hint


def test_a_newer_schema_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema": 99, "run": "x"}')
    with pytest.raises(RunFolderError, match="newer kvlab") as caught:
        RunDir.open(tmp_path)
    assert "update kvlab" in (caught.value.hint or "")


def test_an_existing_folder_is_never_reused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(RunFolderError, match="exists already"):
        make(tmp_path)


def test_a_full_disk_is_one_sentence_and_keeps_what_is_written(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.append(request(0))
    (run.path / "events.jsonl").symlink_to("/dev/full")
    with pytest.raises(HostBusy, match="No space left") as caught:
        run.append(Event(at_ns=1, kind="run_started"))
    assert "--resume" in (caught.value.hint or "")
    assert [r.index for r in RunDir.open(run.path).requests()] == [0]


def test_relative_paths_start_at_home_where_one_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.setenv("KVLAB_HOME", str(tmp_path))
    assert RunDir.open("r1").id == "r1"
    assert RunDir.open(tmp_path / "r1").id == "r1"
    monkeypatch.delenv("KVLAB_HOME")
    with pytest.raises(RunFolderError):
        RunDir.open("r1")


def test_run_ids_name_time_experiment_profile_and_hash() -> None:
    from datetime import UTC, datetime

    at = datetime(2026, 11, 30, 17, 5, 9, tzinfo=UTC)
    assert run_id("two-round", "embedded", "a" * 64, at) == (
        "20261130T170509Z-two-round-embedded-aaaaaaaa"
    )


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_the_hash_of_a_value_does_not_depend_on_key_order(value: dict[str, object]) -> None:
    assert sha256_json(value) == sha256_json(dict(reversed(value.items())))


def test_unknown_fields_of_a_later_minor_version_are_dropped() -> None:
    row = {**records.to_json(request()), "new_field": 1}
    assert records.from_json(RequestRecord, row) == request()
