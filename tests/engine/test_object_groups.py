"""The ablation of object groups on the real vLLM and LMCache. No time is asserted anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab import verify
from kvlab.rundir import RunDir

pytestmark = pytest.mark.engine


def test_both_settings_restore_right_answers_from_records_of_their_own(tmp_path: Path) -> None:
    words = ["run", "object-groups", "smoke", "--repeats", "1", "--runs", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "kvlab.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    failing = {one["name"] for one in found["invariants"] if one["holds"] is not True}
    assert failing <= {"warmed-up"}, found["verdict"]  # which a busy machine may break
    off, on = (found["records"][arm] for arm in ("groups-off", "groups-on"))
    assert on["files_per_context"] == 2 * off["files_per_context"]
    assert on["bytes_per_context"] == off["bytes_per_context"]
    assert set(found["hit_share"].values()) == {1.0}
    assert {one["verdict"] for one in found["correctness"].values()} == {"pass"}
    # Of a recurrent layer only the last state is needed: separate groups load less than they store.
    loaded = found["l2_load"]
    assert loaded["groups-on"]["bytes_per_context"] < loaded["groups-off"]["bytes_per_context"]
    (folder,) = tmp_path.iterdir()
    assert not verify.verify(RunDir.open(folder))
