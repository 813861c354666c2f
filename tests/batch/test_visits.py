"""Visits are kept as they end; what failed or was cut is never hidden and can be made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab.batch import sweep as sweeps
from kvlab.batch import visits
from kvlab.batch.ledger import VISITS, Ledger
from kvlab.batch.sweep import Sweep, Visit
from kvlab.errors import KvlabError, RunFolderError

SWEEP = {
    "schema": 1,
    "name": "mine",
    "title": "Mine",
    "profile": "smoke",
    "cells": [{"workload.seed": number} for number in range(4)],
    "passes": 2,
    "seed": 1,
}


class Fake:
    """Measures at once; fails or is killed where it is told to."""

    def __init__(self, *, fails: str | None = None, killed: str | None = None):
        self.fails, self.killed = fails, killed
        self.made: list[str] = []

    def __call__(self, sweep: Sweep, visit: Visit, *, folder: Path, runs: Path) -> Path:
        self.made.append(visit.key)
        if visit.key == self.fails:
            raise KvlabError("vLLM did not start", hint="see its log")
        if visit.key == self.killed:
            raise SystemExit(9)
        run = runs / visit.key.replace("/", "-")
        run.mkdir(parents=True, exist_ok=True)
        return run


@pytest.fixture
def outcome(tmp_path: Path) -> visits.Outcome:
    sweep = sweeps.Sweep.model_validate(SWEEP)
    return visits.start(sweep, batches=tmp_path / "batches", runs=tmp_path / "runs")


def test_every_visit_is_made_once_in_the_recorded_order(
    outcome: visits.Outcome, tmp_path: Path
) -> None:
    fake = Fake()
    visits.carry_on(outcome, runs=tmp_path / "runs", measure=fake)
    assert fake.made == [f"{turn}/{cell}" for turn, cell in outcome.ledger.manifest["order"]]
    assert len(fake.made) == 8
    assert outcome.healthy
    assert len(outcome.ledger.runs()) == 8
    assert "8 of 8 visits finished, 0 failed" in outcome.text()


def test_a_visit_that_fails_is_reported_and_the_others_go_on(
    outcome: visits.Outcome, tmp_path: Path
) -> None:
    visits.carry_on(outcome, runs=tmp_path / "runs", measure=Fake(fails="1/3"))
    assert not outcome.healthy
    assert list(outcome.ledger.failed()) == ["1/3"]
    assert "visit 1/3: vLLM did not start" in outcome.text()
    again = Fake()
    visits.carry_on(outcome, runs=tmp_path / "runs", measure=again)
    assert again.made == ["1/3"]
    assert outcome.healthy


def test_a_batch_that_was_killed_goes_on_at_the_visit_that_was_cut(
    outcome: visits.Outcome, tmp_path: Path
) -> None:
    order = [f"{turn}/{cell}" for turn, cell in outcome.ledger.manifest["order"]]
    with pytest.raises(SystemExit):
        visits.carry_on(outcome, runs=tmp_path / "runs", measure=Fake(killed=order[4]))
    with (outcome.ledger.path / VISITS).open("a") as log:
        log.write('{"turn": 1, "ce')  # the line that the kill cut
    resumed = visits.Outcome(Ledger.open(outcome.ledger.path))
    assert len(resumed.ledger.finished()) == 4
    fake = Fake()
    visits.carry_on(resumed, runs=tmp_path / "runs", measure=fake)
    assert fake.made == order[4:]
    assert resumed.healthy
    assert len(Ledger.open(outcome.ledger.path).finished()) == 8


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 9}', '{"schema": 1}'])
def test_a_folder_that_is_no_batch_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunFolderError):
        Ledger.open(tmp_path)


def test_lines_that_say_something_else_are_left_out(outcome: visits.Outcome) -> None:
    path = outcome.ledger.path / VISITS
    path.write_text('{"a": 1}\n[]\n"x"\n' + json.dumps({"turn": 1, "cell": 1, "state": "failed"}))
    assert outcome.ledger.entries() == []
