"""Progress: the forecast learns, and the lines say what they should."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path
from unittest import mock

import nbformat
import pytest
from nbclient import NotebookClient

from kvlab import profile, progress
from kvlab.records import Event, RequestRecord
from kvlab.workloads import two_round

ROOT = Path(__file__).resolve().parents[1]


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


def test_a_step_not_seen_here_takes_what_it_took_elsewhere_or_what_its_pace_says() -> None:
    planned = Counter({"launch:a": 1, "request:soak": 10, "request:fill": 1})
    forecast = progress.Forecast(planned, {"request:soak": 3.0})
    assert forecast.remaining_s == 30 + 10 * 3 + 0.5
    forecast.elsewhere = {"launch:b": (2, 40.0), "request:fill": (4, 8.0)}
    assert forecast.remaining_s == 20 + 10 * 3 + 2
    forecast.finish("request:soak", 4)
    assert forecast.step_s("request:soak") == 4
    assert forecast.step_s("request:other") == 2  # a paced step says nothing about others


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
    told = {"text": "here", "share": 1.0, "remaining_s": 0, "steps": {}}
    assert json.loads(path.read_text()) == told


def test_what_was_done_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    monkeypatch.setenv(progress.FILE_VARIABLE, str(path))
    forecast = progress.Forecast(Counter({"launch:a": 2}))
    forecast.finish("launch:a", 20)
    with progress.display() as show:
        show("here", forecast)
    assert json.loads(path.read_text())["steps"] == {"launch:a": [1, 20]}


def test_plain_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(progress.FILE_VARIABLE, raising=False)
    with progress.console() as show:
        show("first", progress.Forecast(Counter()))
        show("second, at once", progress.Forecast(Counter()))
    assert capsys.readouterr().err == "100% · ETA 0 s · first\n"


class Whole:
    share, text = 0.25, "experiment 2 of 7, about 27 min left in all"


def test_a_plain_line_ends_with_the_whole() -> None:
    forecast = progress.Forecast(Counter({"launch:a": 1}))
    assert progress.line("restart: launching", forecast, Whole()) == (
        "  0% · ETA 30 s · restart: launching · experiment 2 of 7, about 27 min left in all"
    )


BARS = """
from collections import Counter
from kvlab import progress
from tests.test_progress import Whole
forecast = progress.Forecast(Counter({"launch:a": 1}))
with progress.console() as show:
    show("restart: repeat 1, sigkill-restarted, longer than a terminal is wide " * 2, forecast)
    show("restart: repeat 1", forecast, Whole())
"""


def test_on_a_terminal_two_bars_stand_and_no_line_is_longer_than_it(tmp_path: Path) -> None:
    script = tmp_path / "bars.py"
    script.write_text(BARS, encoding="utf-8")
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        subprocess.run(
            [sys.executable, str(script)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
            check=True,
        )
        os.close(terminal)
        said = _read_all(ours)
    finally:
        os.close(ours)
    assert "25% |" in said
    assert "experiment 2 of 7, about 27 min left in all" in said
    drawn = re.split(r"[\r\n]|\x1b\[[A-Z]", said)
    assert max(map(len, drawn)) <= 80


def _read_all(descriptor: int) -> str:
    """What a terminal was told until its program closed it."""
    parts = []
    with contextlib.suppress(OSError):  # on Linux a closed terminal ends with EIO
        while part := os.read(descriptor, 4096):
            parts.append(part)
    return b"".join(parts).decode()


def test_in_a_notebook_both_are_widgets_with_their_texts() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BARS)])
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    (state,) = notebook.metadata.widgets.values()
    texts = [
        " ".join(widget["state"]["value"].split())  # tqdm sets spaces of its own
        for widget in state["state"].values()
        if isinstance(widget["state"].get("value"), str)
    ]
    assert any("experiment 2 of 7" in text for text in texts)
    assert any("restart: repeat 1" in text for text in texts)
