"""Attaching to the real vLLM and LMCache: started by one run, measured by another by their URLs.

Starts one pair of servers. No time is asserted anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab import experiment, profile, runtime, summary, verify
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Deployment
from tests.engine.test_two_round import ours

pytestmark = pytest.mark.engine

SMALL: dict[str, Any] = {
    "experiments.two_round.repeats": 2,
    "experiments.two_round.warmup_requests": 1,
    "experiments.bill.decode_requests": 0,
}


def attached(chosen: Profile, stack: Deployment, folder: Path) -> Path:
    """A profile that knows nothing but the URLs and the L2 folder of what runs."""
    tree = chosen.as_dict()
    tree |= {
        "name": "attached",
        "runtime": "attach",
        "attach": {"vllm": [stack.vllm_url], "lmcache": [stack.lmcache_url]},
    }
    tree["cache"]["l2"]["base_path"] = str(stack.l2_path)
    path = folder / "attached.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


async def test_a_deployment_that_another_run_started(tmp_path: Path) -> None:
    chosen = profile.load("smoke", SMALL)
    runtime.of(chosen).prepare(chosen, tmp_path)
    folder = RunDir.create(
        tmp_path,
        {"run": "started", "experiment": "two-round", "profile": chosen.as_dict(), "nonce": "a"},
    )
    launch = runtime.of(chosen).launcher(chosen, folder)
    async with launch("lmcache", 1) as stack:
        pids = {state.name: state.pid for state in stack.state()}
        path = attached(chosen, stack, tmp_path)
        run = await experiment.run_async("two-round", path, runs=tmp_path / "attached")
        stack.check_alive()
        assert {state.name: state.pid for state in stack.state()} == pids
    assert not ours()
    result = summary.conclude(run)
    held = {entry["name"]: entry for entry in result["invariants"]}
    noise = {"warmed-up"}  # of a busy machine
    assert all(one["holds"] for name, one in held.items() if name not in noise), held
    if held["warmed-up"]["holds"]:
        assert result["verdict"]["status"] == "not shown", result["verdict"]
        assert "no vLLM without LMCache" in result["verdict"]["reasons"][0]
        assert result["revisit"]["value"] > 1
    assert held["disk-holds-records"]["holds"] is True
    assert result["correctness"]["restored_nat"]["max"] == 0
    served = result["served_tokens"]["lmcache"]
    assert served["fill"] == {"L0": 0, "L1": 0, "L2": 0, "recompute": 2 * 16 * 1121}
    assert served["measure"]["L1"] + served["measure"]["L2"] == 2 * 16 * 1120
    assert result["engine"]["block_tokens"] == 224
    assert result["engine"]["vllm_version"]
    assert result["engine"]["lmcache_version"]
    assert not verify.verify(RunDir.open(run.path))
