"""A batch on the real engine that is killed in its second visit, and goes on there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvlab import verify
from kvlab.batch import results
from kvlab.batch.ledger import Ledger
from kvlab.rundir import RunDir
from tests.engine.test_two_round import ours, wait_for

pytestmark = pytest.mark.engine

SWEEP = {
    "schema": 1,
    "name": "seeds",
    "title": "Two seeds",
    "profile": "smoke",
    "grid": {"workload.seed": [1, 2]},
}


def kvlab(folder: Path, *words: str) -> list[str]:
    places = ["--runs", str(folder / "runs"), "--batches", str(folder / "batches")]
    return [sys.executable, "-m", "kvlab.cli", "batch", *words, *places]


def test_a_batch_that_is_killed_goes_on_with_the_visit_that_was_cut(tmp_path: Path) -> None:
    sweep = tmp_path / "seeds.yaml"
    sweep.write_text(yaml.safe_dump(SWEEP))
    with subprocess.Popen(kvlab(tmp_path, str(sweep)), stdout=subprocess.DEVNULL) as batch:
        wait_for(lambda: len(list((tmp_path / "runs").glob("*/manifest.json"))) == 2)
        wait_for(lambda: bool(ours()))
        batch.send_signal(signal.SIGKILL)
    wait_for(lambda: not ours())
    (folder,) = (tmp_path / "batches").iterdir()
    assert len(Ledger.open(folder).finished()) == 1
    done = subprocess.run(
        kvlab(tmp_path, "--resume", str(folder)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ledger = Ledger.open(folder)
    assert len(ledger.finished()) == 2
    assert not ledger.failed()
    for path in ledger.runs().values():
        assert not verify.verify(RunDir.open(path))
        assert list((path / "notebooks").glob("10_two_round.ipynb"))
    statuses = [
        RunDir.open(path.parent).manifest["status"]
        for path in (tmp_path / "runs").glob("*/manifest.json")
    ]
    assert sorted(statuses) == ["complete", "complete", "partial"]
    told = results.conclude(ledger)
    assert [row["workload.seed"] for row in told["rows"]] in ([1, 2], [2, 1])
    assert (folder / "batch-tr.html").is_file()
