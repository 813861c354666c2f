"""Object-groups and the bill end to end on the fake stack."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab import experiment, summary, verify
from kvlab.errors import KvlabError, UsageError
from kvlab.rundir import RunDir
from kvlab.workloads import drain
from tests import fake_stack
from tests.fake_stack import Fault
from tests.test_experiment import launcher

OFF, ON = "groups-off", "groups-on"
FAST = {
    "workload.contexts": 6,
    "experiments.object_groups.repeats": 1,
    "experiments.two_round.repeats": 1,
}
AGAIN = {"tokens": 70, "visit": "again", "scenario": ON}
FIRST = {"tokens": 70, "visit": "first", "scenario": ON}


@pytest.fixture(autouse=True)
def short_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake stack is at rest at once; real servers need the full quiet time."""
    monkeypatch.setattr(drain, "settled", partial(drain.settled, quiet_s=0.05))
    monkeypatch.setattr(drain, "POLL_S", 0.02)


async def run(
    tmp_path: Path,
    *faults: Fault,
    name: str = "object-groups",
    resume: Path | None = None,
    **overrides: Any,
) -> RunDir:
    chosen = fake_stack.profile({**FAST, **overrides})
    path = tmp_path / "fake.yaml"
    path.write_text(yaml.safe_dump(chosen.as_dict()), encoding="utf-8")
    return await experiment.run_async(
        name, path, runs=tmp_path / "runs", launcher=launcher(*faults), resume=resume
    )


async def test_a_healthy_run_has_an_answer_and_verifies(tmp_path: Path) -> None:
    folder = await run(tmp_path, **{"experiments.object_groups.repeats": 2})
    found = summary.conclude(folder)
    assert found["verdict"]["status"] != "invalid", found["verdict"]
    assert found["workload"]["order"] == [OFF, ON, ON, OFF]
    assert found["records"][OFF]["files_per_context"] == 4
    assert found["records"][ON]["files_per_context"] == 8
    assert found["hit_share"] == {OFF: 1.0, ON: 1.0}
    assert [found["correctness"][arm]["verdict"] for arm in (OFF, ON)] == ["pass", "pass"]
    assert not verify.verify(RunDir.open(folder.path))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", **AGAIN), "gain not from lmcache"),
        (Fault("wrong_logprobs", 1.0, **AGAIN), "fast but wrong: groups-off"),
        (Fault("warm_start", **FIRST), "round 1 warm"),
        (Fault("truncated", **AGAIN, nth=1), "truncated stream"),
        (Fault("stores_missing", 1, **FIRST), "chunks never stored"),
        (Fault("cached_tokens", 16, **AGAIN, nth=1), "conservation"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_a_fault_in_one_setting_makes_the_run_invalid(
    fault: Fault, reason: str, tmp_path: Path
) -> None:
    found = summary.conclude(await run(tmp_path, fault))
    assert found["verdict"]["status"] == "invalid"
    assert reason in " ".join(found["verdict"]["reasons"]).lower(), found["verdict"]


async def test_wrong_answers_of_the_faster_setting_are_not_recommended(tmp_path: Path) -> None:
    found = summary.conclude(await run(tmp_path, Fault("wrong_logprobs", 1.0, **AGAIN)))
    assert found["recommendation"]["setting"] == OFF


async def test_a_dead_worker_ends_the_run_which_resumes_at_the_missing_arm(
    tmp_path: Path,
) -> None:
    with pytest.raises(KvlabError):
        await run(tmp_path, Fault("killed", **AGAIN, nth=2))
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunDir.open(path)
    assert folder.finished_arms() == {(1, OFF)}
    assert summary.conclude(folder)["verdict"]["status"] == "invalid"
    found = summary.conclude(await run(tmp_path, resume=path))
    assert found["verdict"]["status"] != "invalid", found["verdict"]


async def test_an_undefined_ablation_starts_nothing_and_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ablation not defined"):
        await run(tmp_path, **{"cache.flags": {"separate-object-groups": None}})
    assert not list((tmp_path / "runs").glob("*"))


async def test_a_two_round_run_brings_its_bill(tmp_path: Path) -> None:
    folder = await run(tmp_path, name="two-round")
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    bill = found["bill"]
    assert bill["decode"]["output_tokens"] == 32
    assert bill["decode"]["requests"] == {"baseline": 3, "lmcache": 3}
    assert bill["decode"]["stored_objects"] == 3 * 4
    assert bill["writes"]["writes_per_useful_read"] == 1
    assert bill["server"]["memory_bytes"]["max"] > 0
    assert bill["break_even"]["visits"] == 2
    assert len([r for r in folder.requests() if r.round == "decode"]) == 6


async def test_without_long_answers_the_step_is_left_out(tmp_path: Path) -> None:
    overrides = {"experiments.bill.decode_requests": 0}
    folder = await run(tmp_path, name="two-round", **overrides)
    assert not [r for r in folder.requests() if r.round == "decode"]
    assert "time_per_output_token_ms" not in summary.conclude(folder)["bill"]["decode"]


async def test_a_long_answer_that_fails_leaves_the_verdict_alone(tmp_path: Path) -> None:
    cut = Fault("truncated", tokens=70, visit="first", scenario="lmcache", nth=8)
    found = summary.conclude(await run(tmp_path, cut, name="two-round"))
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert "time_per_output_token_ms" not in found["bill"]["decode"]
