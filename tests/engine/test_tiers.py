"""Shared cache, eviction and soak on the real vLLM and LMCache. No time is asserted anywhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlab import verify
from kvlab.rundir import RunDir
from tests.engine.test_two_round import ours, wait_for

pytestmark = pytest.mark.engine


def run(runs: Path, experiment: str) -> dict[str, Any]:
    kvlab = [sys.executable, "-m", "kvlab.cli", "run", experiment, "smoke"]
    done = subprocess.run(
        [*kvlab, "--runs", str(runs), "--json"], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    (folder,) = runs.iterdir()
    assert not verify.verify(RunDir.open(folder))
    assert not ours()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_second_instance_restores_what_the_first_computed(tmp_path: Path) -> None:
    found = run(tmp_path, "shared-cache")
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert found["hit_share"]["first:2"] == found["hit_share"]["alone:2"] == 1
    assert len(set(found["worker_ids"])) == 2
    assert found["correctness"]["restored_nat"]["max"] == 0


def test_l1_keeps_what_the_ratio_leaves_and_l2_serves_the_rest(tmp_path: Path) -> None:
    found = run(tmp_path, "eviction")
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert [row["hit_share"] for row in found["settings"]] == [1, 1]
    assert all(row["triggered"] for row in found["settings"])
    assert found["matters"]["with_l2"]["hits"] is False


def test_a_soak_whose_kvlab_is_killed_keeps_its_stretches_and_goes_on(tmp_path: Path) -> None:
    """SIGKILL, so that nothing of kvlab can tidy up; at most the stretch that it cut is lost."""
    command = [sys.executable, "-m", "kvlab.cli", "run", "soak", "smoke", "--json"]
    lengths = {"duration_s": 18, "checkpoint_s": 6, "memory_drift_max": 1.0, "files_drift_max": 99}
    sets = [f"--set=experiments.soak.{key}={value}" for key, value in lengths.items()]
    with subprocess.Popen(
        [*command, *sets, "--runs", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as program:
        wait_for(lambda: bool(_finished(tmp_path)) or program.poll() is not None)
        program.send_signal(signal.SIGKILL)
        program.communicate()
    assert program.returncode == -signal.SIGKILL
    wait_for(lambda: not ours())
    (folder,) = tmp_path.iterdir()
    kept = _finished(tmp_path)
    assert kept
    done = subprocess.run(
        [*command, "--resume", str(folder), "--runs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"]["status"] != "invalid", found["verdict"]
    assert found["stretches"] == {"planned": 3, "finished": 3}
    assert found["launches"] == 2
    assert found["requests"]["failed"] == 0
    assert {drift["quantity"] for drift in found["drift"]} == {"ttft", "memory", "files", "l2"}
    assert kept <= RunDir.open(folder).finished_arms()
    assert not verify.verify(RunDir.open(folder))
    assert not ours()


def _finished(runs: Path) -> set[tuple[int, str]]:
    return {arm for folder in runs.glob("*-soak-*") for arm in RunDir.open(folder).finished_arms()}
