"""Shared cache, eviction and soak on the real vLLM and LMCache. No time is asserted anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlab import verify
from kvlab.rundir import RunDir
from tests.engine.test_two_round import ours

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


def test_a_short_soak_has_no_error_and_every_sample(tmp_path: Path) -> None:
    found = run(tmp_path, "soak")
    assert found["verdict"]["status"] != "invalid", found["verdict"]
    assert found["requests"]["failed"] == 0
    kinds = {drift["quantity"] for drift in found["drift"]}
    assert kinds == {"ttft", "memory", "files", "l2"}
