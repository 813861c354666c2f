"""What a sweep file says, and the order of its visits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlab.batch import sweep as sweeps
from kvlab.batch import visits
from kvlab.errors import ProfileError, UsageError

PLAIN = {"schema": 1, "name": "mine", "title": "Mine", "profile": "smoke"}


def written(folder: Path, **more: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, **more}))
    return path


def test_the_shipped_sweep_has_eight_cells_that_can_run(tmp_path: Path) -> None:
    sweep = sweeps.load("embedded-8")
    found = visits.prospects(sweep, runs=tmp_path)
    assert len(found) == 8
    assert [one.problem for one in found] == [None] * 8
    assert all((one.seconds or 0) > 0 for one in found)
    told = visits.describe(sweep, found)
    assert sorted(number for _, number in told["order"]) == list(range(1, 9))
    assert "8" in visits.text(told)


def test_a_grid_gives_every_combination_and_listed_cells_follow(tmp_path: Path) -> None:
    grid = {"workload.contexts": [20, 30], "cache.l1_size_gb": [0.05, 0.1, 0.2]}
    sweep = sweeps.load(written(tmp_path, grid=grid, cells=[{"workload.seed": 3}]))
    found = [dict(cell.settings) for cell in sweeps.cells(sweep)]
    assert len(found) == 7
    assert found[0] == {"workload.contexts": 20, "cache.l1_size_gb": 0.05}
    assert found[-1] == {"workload.seed": 3}


def test_without_a_grid_the_profile_itself_is_the_only_cell(tmp_path: Path) -> None:
    sweep = sweeps.load(written(tmp_path, set={"workload.seed": 3}))
    (cell,) = sweeps.cells(sweep)
    assert sweeps.profile_of(sweep, cell).workload.seed == 3


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 1000))
def test_passes_visit_every_cell_once_each_and_the_seed_decides_the_order(
    passes: int, count: int, seed: int
) -> None:
    cells = [{"workload.seed": number} for number in range(count)]
    sweep = sweeps.Sweep.model_validate({**PLAIN, "cells": cells, "passes": passes, "seed": seed})
    order = sweeps.visits(sweep, sweeps.cells(sweep))
    assert [visit.turn for visit in order] == sorted(visit.turn for visit in order)
    assert Counter(visit.key for visit in order) == Counter(
        f"{turn}/{number}" for turn in range(1, passes + 1) for number in range(1, count + 1)
    )
    assert order == sweeps.visits(sweep, sweeps.cells(sweep))


def test_cells_are_not_measured_in_blocks() -> None:
    cells = [{"workload.seed": number} for number in range(8)]
    sweep = sweeps.Sweep.model_validate({**PLAIN, "cells": cells, "passes": 6})
    order = [visit.cell.number for visit in sweeps.visits(sweep, sweeps.cells(sweep))]
    assert len({tuple(order[at : at + 8]) for at in range(0, 48, 8)}) > 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"girds": {}}, "did you mean 'grid'"),
        ({"passes": 0}, "passes"),
        ({"grid": {"workload.seed": []}}, "no value for workload.seed"),
        ({"grid": {f"a{n}": list(range(10)) for n in range(9)}}, "more than 1000 cells"),
        ({"name": "../x"}, "name"),
        ({"schema": 2}, "schema"),
    ],
)
def test_a_wrong_sweep_is_one_sentence(more: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        sweeps.load(written(tmp_path, **more))
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["- a", "a: [", ""])
def test_a_file_that_is_no_sweep_is_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError):
        sweeps.load(path)


def test_an_unknown_name_is_near_a_known_one() -> None:
    with pytest.raises(UsageError, match="no sweep") as caught:
        sweeps.load("embedded8")
    assert "embedded-8" in str(caught.value)


def test_cells_that_cannot_run_stop_the_batch_before_it_starts(tmp_path: Path) -> None:
    grid = {"cache.chunk_tokens": [224, 100]}
    sweep = sweeps.load(written(tmp_path, grid=grid))
    with pytest.raises(ProfileError, match="1 of 2 cells cannot run; cell 2"):
        visits.start(sweep, batches=tmp_path / "batches", runs=tmp_path / "runs")
    assert not (tmp_path / "batches").exists()
    outcome = visits.start(
        sweep, batches=tmp_path / "batches", runs=tmp_path / "runs", keep_going=True
    )
    assert [cell.number for cell in outcome.ledger.cells] == [1]
    assert outcome.ledger.manifest["left_out"] == [2]
    assert not outcome.healthy


def test_an_experiment_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no experiment"):
        visits.prospects(sweeps.load(written(tmp_path, experiment="three-round")))
