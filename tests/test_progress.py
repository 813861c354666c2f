"""Progress: the forecast learns, and the lines say what they should."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvlab import profile, progress
from kvlab.records import Event, RequestRecord
from kvlab.workloads import two_round


def test_a_forecast_learns_from_what_it_saw() -> None:
    forecast = progress.Forecast(Counter({"launch:baseline": 1, "launch:lmcache": 1, "x": 2}))
    assert forecast.share == 0
    forecast.finish("launch:baseline", 30)
    assert forecast.step_s("launch:lmcache") == 30  # of its family
    assert forecast.remaining_s == 30 + 2 * 1.0
    forecast.finish("x", 4)
    assert forecast.remaining_s == 30 + 4
    forecast.finish("launch:lmcache", 50)
    forecast.finish("x", 4)
    assert forecast.remaining_s == 0
    assert forecast.share == 1


def test_more_steps_than_planned_never_exceed_the_whole() -> None:
    forecast = progress.Forecast(Counter({"x": 1}))
    for _ in range(3):
        forecast.finish("x", 1)
    assert forecast.share == 1


def test_an_empty_plan_is_done() -> None:
    assert progress.Forecast(Counter()).share == 1


def test_steps_of_a_two_round_run() -> None:
    chosen = profile.load("embedded", {"experiments.two_round.repeats": 3})
    steps = two_round.steps(chosen, ("baseline", "lmcache"))
    assert steps["launch:baseline"] == 3
    assert steps["request:lmcache:measure"] == 48
    assert steps["drain:baseline"] == 0
    assert steps["request:lmcache:decode"] == 9
    assert steps["drain:lmcache"] == 12


def test_a_watcher_counts_records_and_tells_where_the_run_is() -> None:
    shown: list[str] = []
    forecast = progress.Forecast(two_round.steps(profile.load("smoke"), ("baseline",)))
    watcher = progress.Watcher(forecast, "run", lambda text, outlook: shown.append(text))
    record = RequestRecord(
        scenario="baseline",
        repeat=1,
        round="fill",
        index=0,
        context_id="c",
        planned_tokens=1,
        asked_tokens=1,
        queued_ns=0,
    )
    watcher(Event(at_ns=0, kind="launching", scenario="baseline", repeat=1))
    watcher(Event(at_ns=0, kind="ready", scenario="baseline", repeat=1))
    watcher(Event(at_ns=0, kind="pause", scenario="baseline", repeat=1))
    watcher(record)
    assert forecast.done == {"launch:baseline": 1, "request:baseline:fill": 1}
    assert shown[-1] == "run: repeat 1, baseline, fill 1"


def test_a_parent_is_told_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    monkeypatch.setenv(progress.FILE_VARIABLE, str(path))
    with progress.display() as show:
        show("here", progress.Forecast(Counter()))
    assert json.loads(path.read_text()) == {"text": "here", "share": 1.0, "remaining_s": 0}


def test_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(progress.FILE_VARIABLE, raising=False)
    with progress.console() as show:
        show("first", progress.Forecast(Counter()))
        show("second, at once", progress.Forecast(Counter()))
    assert capsys.readouterr().err == "100% · ETA 0 s · first\n"
