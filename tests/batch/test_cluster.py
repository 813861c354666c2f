"""A batch on a Dask cluster of two worker processes, one of which is killed in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from kvlab import verify
from kvlab.batch import cluster, visits
from kvlab.batch import sweep as sweeps
from kvlab.errors import HostBusy, RunFolderError, UsageError
from kvlab.rundir import RunDir
from tests.batch import synthetic
from tests.builders import make_run

SWEEP = {
    "schema": 1,
    "name": "mine",
    "title": "Mine",
    "profile": "smoke",
    "cells": [{"workload.seed": number} for number in range(6)],
}
LOCAL = ("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
pytestmark = [pytest.mark.filterwarnings(each) for each in LOCAL]


def outcome(folder: Path, **more: object) -> visits.Outcome:
    sweep = sweeps.Sweep.model_validate({**SWEEP, **more})
    return visits.start(sweep, batches=folder / "batches", runs=folder / "runs")


def each_its_own_host(worker: Mapping[str, Any]) -> str:
    return str(worker["id"])


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(synthetic.DEATH, str(tmp_path / "death"))
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        resources={cluster.RESOURCE: 1},
        local_directory=str(tmp_path / "dask"),
        silence_logs=50,
    ) as made:
        yield made


def test_a_worker_that_is_killed_loses_only_its_visit_which_is_made_again(
    workers: Any, tmp_path: Path
) -> None:
    (tmp_path / "death").touch()
    done = cluster.carry_on(
        outcome(tmp_path),
        workers.scheduler_address,
        runs=tmp_path / "runs",
        measure=synthetic.measure,
        host_of=each_its_own_host,
    )
    assert done.healthy, done.text()
    assert not (tmp_path / "death").exists()
    entries = list(done.ledger.finished().values())
    assert len(entries) == 6
    assert [entry.attempt for entry in entries].count(2) == 1
    assert len({entry.host for entry in entries}) >= 2
    for path in done.ledger.runs().values():
        assert path.parent == tmp_path / "runs"
        assert not verify.verify(RunDir.open(path))


def test_two_workers_of_one_host_never_measure_at_once(workers: Any, tmp_path: Path) -> None:
    done = cluster.carry_on(
        outcome(tmp_path, cells=[{"workload.seed": number} for number in (1, 2, 99)]),
        workers.scheduler_address,
        runs=tmp_path / "runs",
        measure=synthetic.measure,
    )
    states = [entry.state for entry in done.ledger.entries()]
    assert states[::2] == ["started"] * 3  # each began when the one before had ended
    assert sorted(states[1::2]) == ["failed", "finished", "finished"]
    (failed,) = done.ledger.failed().values()
    assert failed.error == "vLLM did not start"


def test_without_a_worker_that_offers_the_resource_nothing_is_measured(tmp_path: Path) -> None:
    with (
        LocalCluster(
            n_workers=0,
            dashboard_address=None,
            local_directory=str(tmp_path / "dask"),
            silence_logs=50,
        ) as empty,
        pytest.raises(HostBusy, match="no worker"),
    ):
        cluster.carry_on(outcome(tmp_path), empty.scheduler_address, runs=tmp_path / "runs")


def test_no_scheduler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_S", 0.5)
    with pytest.raises(UsageError, match="no Dask scheduler"):
        cluster.carry_on(outcome(tmp_path), "tcp://127.0.0.1:9", runs=tmp_path / "runs")


def test_a_run_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    run = make_run(tmp_path / "there")
    (tmp_path / "here").mkdir()
    back = cluster.unpack(cluster.pack(run.path), tmp_path / "here")
    assert RunDir.open(back).checksums() == run.checksums()
    with pytest.raises(RunFolderError, match="there already"):
        cluster.unpack(cluster.pack(run.path), tmp_path / "here")


def test_a_run_folder_that_was_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "there")
    (tmp_path / "here").mkdir()
    with (run.path / "requests.jsonl").open("a") as records:
        records.write("{}\n")
    with pytest.raises(RunFolderError, match="did not arrive as it was sealed"):
        cluster.unpack(cluster.pack(run.path), tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []
