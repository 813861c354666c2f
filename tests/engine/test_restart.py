"""Restart on the real vLLM and LMCache: records outlive SIGTERM and SIGKILL.

Seven starts of the servers; no time is asserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab import storage, verify
from kvlab.rundir import RunDir
from tests.engine.test_two_round import ours

pytestmark = pytest.mark.engine

FAST = ("--set", "workload.contexts=15", "--set", "experiments.restart.rule_contexts=2")


def test_records_survive_and_are_read_from_the_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlab.cli", "run", "restart", "smoke"]
    done = subprocess.run(
        [*command, "--runs", str(tmp_path), "--json", *FAST],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    for variant in found["variants"].values():
        assert variant["surviving_share"] == 1
        assert variant["l2_share"] == 1
        if storage.device(tmp_path) is not None:
            assert variant["read_source"] == "disk"
    assert [control["hit_tokens"] for control in found["controls"]] == [0, 0, 0]
    kept, broken = found["rule"]
    assert kept["cached_tokens"] > broken["cached_tokens"]
    assert found["correctness"]["verdict"] == "pass"
    (folder,) = tmp_path.iterdir()
    assert not verify.verify(RunDir.open(folder))
    assert not (folder / "l2").exists()
    assert not ours()
