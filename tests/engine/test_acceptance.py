"""The acceptance test on the real vLLM and LMCache: right on every path, and what it must catch.

Each test starts servers; together they take some minutes. No time is asserted anywhere.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvlab import experiment, model, profile, runtime, summary, verify
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Deployment, Launch
from tests.engine.test_two_round import ours

pytestmark = pytest.mark.engine

SMALL: dict[str, Any] = {
    "experiments.acceptance.contexts": 2,
    "experiments.acceptance.positions": 3,
    "experiments.acceptance.tails": [100],
    "experiments.acceptance.tail_contexts": 1,
    "experiments.acceptance.control_contexts": 2,
}


def spoiling(chosen: Profile, folder: RunDir) -> Launch:
    """The real launcher; before the restart it spoils one stored object.

    The newest one: of the last chunk of the last context, on which the next token surely depends,
    whether it holds attention's keys and values or the recurrent state.
    """
    start = runtime.of(chosen).launcher(chosen, folder)

    def launch(scenario: str, repeat: int, **given: Any) -> AbstractAsyncContextManager[Deployment]:
        if given.get("label") == "restarted":
            files = given["l2_path"].glob("*.data")
            newest = max(files, key=lambda path: path.stat().st_mtime_ns)
            # Signs and lowest exponent bits: wrong numbers, but numbers.
            newest.write_bytes(bytes(byte ^ 0x80 for byte in newest.read_bytes()))
        return start(scenario, repeat, **given)

    return launch


async def test_every_path_is_right_and_the_control_is_caught(tmp_path: Path) -> None:
    run = await experiment.run_async("acceptance", "embedded", overrides=SMALL, runs=tmp_path)
    result = summary.conclude(run)
    assert result["verdict"]["status"] == "proven", result["verdict"]
    assert [step["holds"] for step in result["steps"]] == [True] * 7
    for name, path in result["paths"].items():
        assert path["verdict"] == "pass", name
        assert path["max_nat"] == 0, name
    assert result["floor"]["max_nat"] == 0
    tails = {row["tail_tokens"]: row for row in result["negative_control"]["by_tail"]}
    assert tails[1]["max_nat"] > result["tolerance_nat"]
    assert tails[1]["max_nat"] > tails[100]["max_nat"]
    assert not verify.verify(RunDir.open(run.path))
    assert not ours()


async def test_one_damaged_chunk_on_disk_is_caught(tmp_path: Path) -> None:
    overrides = {
        **SMALL,
        "experiments.acceptance.control": False,
        "experiments.acceptance.tails": [],
    }
    model.ensure(profile.load("embedded", overrides), runtime.models_folder(tmp_path))
    run = await experiment.run_async(
        "acceptance", "embedded", overrides=overrides, runs=tmp_path, launcher=spoiling
    )
    result = summary.conclude(run)
    assert result["verdict"]["status"] == "refuted", result["verdict"]
    assert result["verdict"]["reasons"][0].startswith("fast but wrong: restarted")
    assert result["paths"]["l2"]["verdict"] == "pass"
    # Every counter looks as it should.
    assert not [one for one in result["invariants"] if one["holds"] is not True]
