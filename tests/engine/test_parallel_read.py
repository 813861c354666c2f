"""Cold reads on the real vLLM and LMCache: both adapters read the same files, all of it from L2.

Two starts of the servers, on an emulated network mount; no time is asserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab import verify
from kvlab.rundir import RunDir
from tests.engine.test_two_round import ours

pytestmark = pytest.mark.engine

PLACE = {"name": "slow", "mount_of": "local", "adapters": ["fs", "parallel_fs"]}
FAST = {
    "workload.contexts": 4,
    "storage.paths": [PLACE, {"name": "local", "adapters": []}],
    "storage.readers": [1, 16],
    "storage.runtime_s": 0.5,
    "experiments.two_round.warmup_requests": 1,
    "experiments.parallel_read.concurrency": [4],
    "experiments.parallel_read.recompute": False,
}


def test_both_adapters_serve_the_same_records_from_l2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlab.cli", "run", "parallel-read", "embedded"]
    # JSON is YAML, which is what the values of overrides are.
    changed = [w for k, value in FAST.items() for w in ("--set", f"{k}={json.dumps(value)}")]
    done = subprocess.run(
        [*command, "--runs", str(tmp_path), "--json", *changed],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert all(check["holds"] for check in found["invariants"]), found["invariants"]
    rows = {row["adapter"]: row for row in found["variants"]}
    assert rows.keys() == {"fs", "parallel_fs"}
    assert {row["l2_share"] for row in rows.values()} == {1}
    assert found["emulated"] is True
    assert found["correctness"]["verdict"] == "pass"
    (folder,) = tmp_path.iterdir()
    events = RunDir.open(folder).events()
    assert [e.detail["filled"] for e in events if e.kind == "variant"] == [True, False]
    assert not verify.verify(RunDir.open(folder))
    assert not (folder / "l2").exists()
    assert not ours()
