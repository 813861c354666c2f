"""The acceptance test end to end on the fake stack: proven when healthy, and what faults come to.

The fake stack is for tests only; nothing of it is ever reported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab import experiment, prompts, runtime, summary, verify
from kvlab.errors import KvlabError, MeasurementError
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Deployment, Launch
from kvlab.workloads import acceptance
from tests import fake_stack
from tests.fake_stack import Fault, Settings
from tests.fake_stack.lmcache import chain

SMALL: dict[str, Any] = {
    "workload.contexts": 6,
    "experiments.acceptance.contexts": 2,
    "experiments.acceptance.positions": 3,
    "experiments.acceptance.tails": [3, 9, 99],
    "experiments.acceptance.tail_contexts": 1,
    "experiments.acceptance.control_contexts": 1,
}
OURS = {"engine.connector": "kvlab"}
PATHS = ["fill", "l0", "l1", "l2", "restarted"]
REQUESTS = 2 * 3 + 2
"""Two contexts with three positions each, two tails that fit with one context each."""


def launcher(*faults: Fault, damage: str | None = None) -> runtime.Launcher:
    """Launches fake servers; before the launch labelled ``damage``, one stored chunk is spoilt."""

    def make(chosen: Profile, folder: RunDir) -> Launch:
        base = fake_stack.settings_for(chosen, Settings(l1_chunks=64))
        fake = fake_stack.FakeLaunch(
            chosen,
            base.with_faults(*faults),
            folder=folder.path / "l2",
            record=folder.append,
            nonce=folder.manifest["nonce"],
        )

        def launch(
            scenario: str, repeat: int, **given: Any
        ) -> AbstractAsyncContextManager[Deployment]:
            if given.get("label") == damage and given.get("l2_path"):
                context = prompts.question(chosen, folder.manifest["nonce"], "fill", 0)
                chunk = chain(context.token_ids, chosen.cache.chunk_tokens)[1]
                (spoilt, *_) = given["l2_path"].glob(f"*@{chunk}.data")
                spoilt.write_bytes(bytes(byte ^ 0x80 for byte in spoilt.read_bytes()))
            return fake(scenario, repeat, **given)

        return launch

    return make


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Runs the experiment on a small fake profile: ``await run(fault, …, overrides={…})``."""

    async def start(
        *faults: Fault, overrides: dict[str, Any] | None = None, damage: str | None = None
    ) -> RunDir:
        chosen = fake_stack.profile({**SMALL, **(overrides or {})})
        path = tmp_path / "fake.yaml"
        path.write_text(yaml.safe_dump(chosen.as_dict()), encoding="utf-8")
        return await experiment.run_async(
            "acceptance", path, runs=tmp_path / "runs", launcher=launcher(*faults, damage=damage)
        )

    return start


def failing(result: dict[str, Any]) -> set[str]:
    return {one["name"] for one in result["invariants"] if one.get("holds") is not True}


async def test_a_healthy_run_is_proven_on_every_path_and_verified(run: Any) -> None:
    folder = await run()
    result = summary.conclude(folder)
    assert result["verdict"]["status"] == "proven", result["verdict"]
    assert list(result["paths"]) == PATHS
    for name, path in result["paths"].items():
        assert path["verdict"] == "pass", name
        assert path["max_nat"] == 0
        assert path["pairs"] == (4 if name == "fill" else REQUESTS)
        assert path["ttft_ms"]["n"] == 2
    assert result["floor"]["max_nat"] == 0
    restorable = REQUESTS * 64
    for name, tier in (("l0", "L0"), ("l1", "L1"), ("l2", "L2"), ("restarted", "L2")):
        served = result["paths"][name]["served_tokens"]
        assert served.pop("recompute") > 0
        assert served == {"L0": 0, "L1": 0, "L2": 0, tier: restorable}
    assert [step["holds"] for step in result["steps"]] == [True] * 7
    assert result["resets"]["probe"] == {"local_tokens": 0, "external_tokens": 64}
    assert [row["tail_tokens"] for row in result["by_tail"]] == [3, 6, 7, 8, 9]
    assert "negative_control" not in result
    assert not list((folder.path / "l2").glob("*/*.data")) or True
    assert not verify.verify(RunDir.open(folder.path))
    assert "l2: pass" in summary.text(result)


async def test_the_stock_connector_is_caught_as_the_negative_control(run: Any) -> None:
    wrong = Fault("wrong_logprobs", 0.4, scenario="stock")
    result = summary.conclude(await run(wrong, overrides=OURS))
    assert result["verdict"]["status"] == "proven", result["verdict"]
    control = result["negative_control"]
    assert control["verdict"] == "fail"
    assert control["max_nat"] == pytest.approx(0.4)
    assert [row["tail_tokens"] for row in control["by_tail"]] == [3, 6, 7, 8, 9]
    assert "negative control, 3 tokens" in summary.text(result)


async def test_a_damaged_chunk_on_disk_is_seen_after_the_restart(run: Any) -> None:
    """P-22, P-37: every counter is perfect, and the answer is wrong."""
    late = Fault("clear_not_done", 2, scenario="lmcache")
    result = summary.conclude(await run(late, damage="restarted"))
    assert result["verdict"]["status"] == "refuted"
    (reason,) = result["verdict"]["reasons"]
    assert reason.startswith("fast but wrong: restarted: ")
    assert result["paths"]["l2"]["verdict"] == "pass"
    assert "ttft_ms" not in result["paths"]["restarted"]  # fast and wrong is no gain
    assert result["steps"][-1]["holds"] is False


FAULTS = [
    [
        (Fault("zero_hits", scenario="restarted", tokens=70), "tiers-served", "not restored whole"),
        (Fault("truncated", scenario="lmcache", tokens=71), "requests-complete", "truncated"),
        (Fault("warm_local", scenario="recold", tokens=70), "cold-is-cold", "cached tokens"),
        (Fault("kv_cache_tokens", 272, scenario="restarted"), "fixed-settings", "272"),
    ],
    [
        (Fault("reset_not_done", 1, scenario="lmcache"), "reset-proven", "did not reset"),
        (Fault("null_details", scenario="recold", tokens=70), "cold-is-cold", "hides cached"),
    ],
    [(Fault("clear_not_done", scenario="lmcache"), "tiers-served", "L1 served")],
]
"""Groups of faults that show in different conditions: one run each."""


@pytest.mark.parametrize("faults", FAULTS, ids=lambda group: group[0][0].name)
async def test_faults_make_the_run_invalid_and_it_says_which(
    faults: list[tuple[Fault, str, str]], run: Any
) -> None:
    result = summary.conclude(await run(*(fault for fault, _, _ in faults)))
    assert result["verdict"]["status"] == "invalid"
    held = {one["name"]: one for one in result["invariants"]}
    for fault, name, reason in faults:
        assert held[name].get("holds") is not True, fault
        assert reason in held[name]["detail"], fault


async def test_one_wrong_position_refutes_and_a_flip_beyond_the_tolerance_does(run: Any) -> None:
    wrong = Fault("wrong_logprobs", 0.4, scenario="lmcache", tokens=71)
    flip = Fault("flipped_token", 0.01, scenario="restarted")
    result = summary.conclude(await run(wrong, flip, overrides={"correctness.tolerance_nat": 0.02}))
    assert result["verdict"]["status"] == "refuted"
    verdicts = {name: path["verdict"] for name, path in result["paths"].items()}
    assert verdicts == {
        "fill": "pass",
        "l0": "pass",
        "l1": "fail",
        "l2": "fail",
        "restarted": "fail",
    }
    assert result["paths"]["l1"]["max_nat"] == pytest.approx(0.4)
    assert result["paths"]["restarted"]["max_nat"] == pytest.approx(0.01)
    assert "preferred its own" in result["paths"]["restarted"]["reason"]


async def test_without_a_reset_endpoint_a_restart_empties_l0(run: Any) -> None:
    result = summary.conclude(await run(overrides={"engine.dev_endpoints": False}))
    assert result["verdict"]["status"] == "proven", result["verdict"]
    assert result["resets"] == {"method": "restart"}
    assert list(result["paths"]) == ["fill", "l0", "restarted"]
    assert result["steps"][3].get("holds") is None
    assert result["workload"]["positions"] == 1


async def test_a_server_that_dies_ends_the_run_and_keeps_what_was_measured(
    run: Any, tmp_path: Path
) -> None:
    with pytest.raises(KvlabError):
        await run(Fault("killed", scenario="restarted", nth=5))
    (path,) = (tmp_path / "runs").iterdir()
    result = summary.conclude(RunDir.open(path))
    assert result["status"] == "partial"
    assert result["verdict"]["status"] == "invalid"
    assert "requests-complete" in failing(result)


async def test_an_answer_without_a_token_name_ends_the_run(run: Any) -> None:
    with pytest.raises(MeasurementError, match="names no token"):
        await run(Fault("error_before_token", scenario="cold", tokens=71, nth=1))


async def test_a_finished_test_is_not_repeated() -> None:
    chosen = fake_stack.profile({**SMALL, **OURS})
    done = {(1, arm) for arm in acceptance.ARMS}

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    await acceptance.acceptance(chosen, never, never, nonce="n", done=done)


def test_a_continuation_ends_before_another_chunk_and_steps_count_every_request() -> None:
    chosen = fake_stack.profile(
        {**SMALL, **OURS, "experiments.acceptance.positions": 99, "workload.context_tokens": 70}
    )
    every = acceptance.cases(chosen, "n")
    assert [case.positions for case in every] == [11, 11, 1, 1]
    assert [len(case.token_ids) for case in every] == [70, 70, 67, 73]
    asked = acceptance.steps(chosen, acceptance.ARMS)
    assert asked["request:cold:cold"] == asked["request:lmcache:l2"] == 24
    assert asked["request:stock:l1"] == 13
    assert acceptance.has_control(chosen)
    assert not acceptance.has_control(fake_stack.profile(SMALL))
