"""Passes are added until each cell's speedup is known well enough, or the cap is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.batch import precision, results, visits
from kvlab.batch import sweep as sweeps
from kvlab.batch.ledger import Ledger
from kvlab.batch.sweep import Sweep, Visit
from kvlab.errors import UsageError
from kvlab.stats import Ratio
from tests.batch import synthetic
from tests.builders import make_run

SWEEP = {
    "schema": 1,
    "name": "mine",
    "title": "Mine",
    "profile": "smoke",
    "cells": [{"workload.seed": number} for number in (1, 2)],
}


def start(folder: Path, until: float, most: int, **more: object) -> visits.Outcome:
    sweep = sweeps.Sweep.model_validate({**SWEEP, **more})
    return visits.start(
        sweep,
        batches=folder / "batches",
        runs=folder / "runs",
        until_ci=until,
        max_passes=most,
    )


def test_the_half_width_is_the_larger_side() -> None:
    assert precision.half_width(Ratio(2.0, 1.6, 2.2, "")) == pytest.approx(0.25)
    assert precision.half_width(None) is None


def test_the_repeats_of_several_runs_are_one_measurement(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), seed=n, repeats=2, noise=0.1) for n in range(4)]
    one, all_ = precision.speedup(runs[:1], seed=0), precision.speedup(runs, seed=0)
    assert one is not None
    assert all_ is not None
    assert "8 repeats" in all_.method
    assert (precision.half_width(all_) or 9) < (precision.half_width(one) or 0)


def test_invalid_runs_and_other_machines_are_left_out(tmp_path: Path) -> None:
    sound = make_run(tmp_path / "a", repeats=2)
    broken = make_run(tmp_path / "b", repeats=2, fault="failed request")
    elsewhere = make_run(tmp_path / "c", repeats=2, manifest={"fingerprint": "other"})
    found = precision.speedup([sound, broken, elsewhere], seed=0)
    assert found == precision.speedup([sound], seed=0)


def test_a_cell_that_is_known_well_is_visited_no_more(tmp_path: Path) -> None:
    outcome = start(tmp_path, until=0.5, most=5)
    visits.carry_on(outcome, runs=tmp_path / "runs", measure=synthetic.measure)
    assert outcome.ledger.manifest["order"][2:] == []
    assert results.conclude(outcome.ledger)["passes"] == 1


def test_passes_are_added_up_to_the_cap_and_survive_a_resume(tmp_path: Path) -> None:
    outcome = start(tmp_path, until=1e-9, most=3)
    made: list[str] = []

    def cut(sweep: Sweep, visit: Visit, *, folder: Path, runs: Path) -> Path:
        if len(made) == 3:
            raise SystemExit(9)
        made.append(visit.key)
        return synthetic.measure(sweep, visit, folder=folder, runs=runs)

    with pytest.raises(SystemExit):
        visits.carry_on(outcome, runs=tmp_path / "runs", measure=cut)
    resumed = visits.Outcome(Ledger.open(outcome.ledger.path))
    visits.carry_on(resumed, runs=tmp_path / "runs", measure=synthetic.measure)
    assert [turn for turn, _ in resumed.ledger.manifest["order"]] == [1, 1, 2, 2, 3, 3]
    assert resumed.healthy


def test_a_cell_that_fails_asks_for_no_further_pass(tmp_path: Path) -> None:
    outcome = start(tmp_path, until=1e-9, most=2, cells=[{"workload.seed": 99}])
    visits.carry_on(outcome, runs=tmp_path / "runs", measure=synthetic.measure)
    assert outcome.ledger.manifest["order"] == [[1, 1]]
    assert not outcome.healthy


@pytest.mark.parametrize(("until", "experiment"), [(0.0, "two-round"), (0.05, "soak")])
def test_a_rule_that_cannot_be_met_is_refused(
    until: float, experiment: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="--until-ci"):
        start(tmp_path, until=until, most=2, experiment=experiment)
