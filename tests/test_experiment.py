"""Experiments end to end on the fake stack: what a run folder holds, and what faults come to.

The fake stack is for tests only; nothing of it is ever reported.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab import client, experiment, profile, runtime, summary, verify
from kvlab.errors import EngineMissing, KvlabError, MeasurementError, RunFolderError
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Launch
from tests import fake_stack
from tests.fake_stack import Fault, Settings

FAST = {"experiments.two_round.repeats": 1, "workload.contexts": 6}
MEASURED = {"tokens": 70, "visit": "again", "scenario": "lmcache"}
"""A fault that touches only the lmcache arm's measure round."""


def launcher(*faults: Fault, **settings: Any) -> runtime.Launcher:
    def make(chosen: Profile, folder: RunDir) -> Launch:
        base = fake_stack.settings_for(chosen, Settings(**settings))
        return fake_stack.FakeLaunch(
            chosen,
            base.with_faults(*faults),
            folder=folder.path / "l2",
            record=folder.append,
            nonce=folder.manifest["nonce"],
        )

    return make


@pytest.fixture
def profile_file(tmp_path: Path) -> Callable[..., Path]:
    """A fake profile as a file, since experiments take profiles by name or path."""

    def write(**overrides: Any) -> Path:
        import yaml

        chosen = fake_stack.profile({**FAST, **overrides})
        path = tmp_path / "fake.yaml"
        path.write_text(yaml.safe_dump(chosen.as_dict()), encoding="utf-8")
        return path

    return write


async def run(
    path: Path, tmp_path: Path, *faults: Fault, settings: Any = None, **options: Any
) -> RunDir:
    return await experiment.run_async(
        "two-round",
        path,
        runs=tmp_path / "runs",
        launcher=launcher(*faults, **(settings or {})),
        **options,
    )


async def test_a_healthy_run_is_proven_and_verified(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await run(profile_file(), tmp_path)
    result = summary.conclude(folder)
    assert result["verdict"]["status"] == "proven", result["verdict"]
    assert result["speedup"]["ci95"][0] > 1
    assert result["conservation"]["residual_tokens"] == 0
    measured = result["served_tokens"]["lmcache"]["measure"]
    assert measured["L1"] + measured["L2"] == 6 * 64
    assert result["served_tokens"]["baseline"]["measure"]["L0"] == 0
    again = RunDir.open(folder.path)
    assert again.manifest["status"] == "complete"
    assert not verify.verify(again)


async def test_prefix_suffix_restores_only_the_prefix(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    overrides = {"workload.shape": "prefix_suffix", "workload.context_tokens": 120}
    path = profile_file(**overrides, **{"workload.breaker_tokens": 8, "workload.contexts": 4})
    folder = await run(path, tmp_path)
    result = summary.conclude(folder)
    restorable = 96 // 16 * 16
    assert result["workload"]["restorable_tokens"] == restorable
    measured = result["served_tokens"]["lmcache"]["measure"]
    assert measured["L1"] + measured["L2"] == 4 * restorable


async def test_the_control_claims_no_gain(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await run(profile_file(), tmp_path, control=True)
    result = summary.conclude(folder)
    assert result["arms"] == ["baseline", "control"]
    first, second = (result["served_tokens"][arm]["measure"] for arm in result["arms"])
    assert first == second
    assert first["L1"] == first["L2"] == 0
    # Its times are those of a busy machine; whatever else is said of them, none is called a gain.
    assert result["verdict"]["status"] in ("not shown", "invalid")
    doubts = {reason.partition(":")[0] for reason in result["verdict"]["reasons"]}
    assert doubts <= {"control", "baseline-steady", "warmed-up"}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", **MEASURED), "external"),
        (Fault("wrong_logprobs", 1.0, **MEASURED), "fast but wrong"),
        (Fault("warm_start", tokens=70, visit="first", scenario="lmcache"), "round 1"),
        (Fault("error_before_token", **MEASURED, nth=2), "in-band error"),
        (Fault("truncated", **MEASURED, nth=1), "truncated stream"),
        (Fault("cached_tokens", 16, **MEASURED, nth=1), "conservation"),
        (Fault("stores_missing", 1, tokens=70, visit="first", scenario="lmcache"), "stored"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_a_fault_makes_the_run_invalid_and_says_which(
    fault: Fault, reason: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await run(profile_file(), tmp_path, fault)
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "invalid"
    assert reason in " ".join(verdict["reasons"]).lower(), verdict["reasons"]


async def test_a_server_that_dies_ends_the_run_and_keeps_what_was_measured(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    death = Fault("killed", **MEASURED, nth=3)
    with pytest.raises(KvlabError):
        await run(profile_file(), tmp_path, death)
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunDir.open(path)
    assert folder.manifest["status"] == "partial"
    assert folder.finished_arms() == {(1, "baseline")}
    assert summary.conclude(folder)["verdict"]["status"] == "invalid"
    assert [e for e in folder.events() if e.kind == "failure"]


async def test_an_interrupted_run_resumes_at_the_missing_arm(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(KvlabError):
        await run(profile_file(), tmp_path, Fault("killed", **MEASURED, nth=3))
    (path,) = (tmp_path / "runs").iterdir()
    first = [r for r in RunDir.open(path).requests() if r.scenario == "baseline"]
    nonce = RunDir.open(path).manifest["nonce"]
    folder = await run(path, tmp_path, resume=path)
    result = summary.conclude(folder)
    assert result["verdict"]["status"] == "proven", result["verdict"]
    assert folder.manifest["nonce"] == nonce
    assert [r for r in folder.requests() if r.scenario == "baseline"] == first
    assert (path / "aside" / "requests.jsonl").exists()
    assert not verify.verify(folder)
    with pytest.raises(RunFolderError, match="nothing to resume"):
        await run(path, tmp_path, resume=path)


@pytest.mark.parametrize("by", [106, -13, 1])
@pytest.mark.parametrize("visit", ["first", "again"])
async def test_another_prompt_length_stops_the_run(
    by: int, visit: Any, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-05, P-06: every later request would be wrong as well."""
    other = Fault("prompt_tokens", by, tokens=70, visit=visit, scenario="lmcache")
    told = f"planned 70, seen {70 + by} ({by:+d}): prefix shifted by {abs(by)}"
    with pytest.raises(MeasurementError, match=re.escape(told)):
        await run(profile_file(), tmp_path, other)
    (path,) = (tmp_path / "runs").iterdir()
    folder = RunDir.open(path)
    assert folder.manifest["status"] == "partial"
    assert folder.finished_arms() == {(1, "baseline")}
    reasons = " ".join(summary.summarise(folder)["verdict"]["reasons"])
    if visit == "again":
        assert f"prefix shifted by {abs(by)}" in reasons


@pytest.mark.parametrize("how", ["hang_before_headers", "hang_after_headers", "hang_after_token"])
async def test_a_hang_fails_its_request_and_the_run_ends_in_order(
    how: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-30: after the deadline, without a second try, and what was measured is kept."""
    path = profile_file(**{"timeouts.request_s": 0.7})
    folder = await run(path, tmp_path, Fault(how, **MEASURED, nth=3), Fault("keep_alive"))
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "invalid"
    text = " ".join(verdict["reasons"])
    assert "lmcache, repeat 1, measure: 1 of 6 failed (timeout), first at request 2" in text
    asked = [r for r in folder.requests() if r.scenario == "lmcache" and r.round == "measure"]
    assert [r.index for r in asked] == [0, 1, 2, 3, 4, 5]
    assert [e.kind for e in folder.events()][-2:] == ["stopped", "run_finished"]
    assert not verify.verify(RunDir.open(folder.path))


@pytest.mark.parametrize(("oom", "said"), [(True, "OOM kill: lmcache"), (False, "lmcache stopped")])
async def test_a_cache_server_that_dies_in_round_2_is_named(
    oom: bool, said: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-29: the engine sails on, and the run does not."""
    death = Fault("lmcache_dies", **MEASURED, nth=2)
    with pytest.raises(KvlabError, match="lmcache stopped"):
        await run(profile_file(), tmp_path, death, settings={"oom_killed": oom})
    (path,) = (tmp_path / "runs").iterdir()
    verdict = summary.summarise(RunDir.open(path))["verdict"]
    assert verdict["status"] == "invalid"
    assert said in " ".join(verdict["reasons"])


async def _broken_off(profile_file: Callable[..., Path], tmp_path: Path) -> Path:
    with pytest.raises(KvlabError):
        await run(profile_file(), tmp_path, Fault("killed", **MEASURED, nth=3))
    (path,) = (tmp_path / "runs").iterdir()
    return path


def _contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


async def test_a_run_that_is_going_on_cannot_be_resumed_and_is_not_touched(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    from kvlab import host

    path = await _broken_off(profile_file, tmp_path)
    RunDir.open(path).update_manifest(status="running")
    before = _contents(path)
    with host.exclusive(), pytest.raises(KvlabError, match="another measurement"):
        await run(path, tmp_path, resume=path)
    assert _contents(path) == before


async def test_a_run_of_another_machine_or_experiment_cannot_be_resumed(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = await _broken_off(profile_file, tmp_path)
    folder = RunDir.open(path)
    for change, said in (
        ({"fingerprint": "0" * 16}, "another machine"),
        ({"experiment": "soak"}, "is a run of soak, not of two-round"),
        ({"nonce": None}, "lacks nonce"),
    ):
        kept = dict(folder.manifest)
        folder.update_manifest(**change)
        before = _contents(path)
        with pytest.raises(RunFolderError, match=said):
            await run(path, tmp_path, resume=path)
        assert _contents(path) == before
        folder.update_manifest(**kept)


async def test_a_killed_run_is_marked_partial_by_the_next_one(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-49: what is killed by force cannot mark itself."""
    path = await _broken_off(profile_file, tmp_path)
    RunDir.open(path).update_manifest(status="running")
    foreign = shutil.copytree(path, tmp_path / "runs" / "foreign")
    RunDir.open(foreign).update_manifest(fingerprint="0" * 16)
    (tmp_path / "runs" / "junk").mkdir()
    (tmp_path / "runs" / "junk" / "manifest.json").write_text("{")
    await run(profile_file(**{"workload.contexts": 7}), tmp_path)
    assert RunDir.open(path).manifest["status"] == "partial"
    assert RunDir.open(foreign).manifest["status"] == "running"


async def test_a_resumed_run_that_is_killed_again_verifies_as_far_as_it_goes(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = await _broken_off(profile_file, tmp_path)
    summary.conclude(RunDir.open(path))
    with pytest.raises(KvlabError):
        await run(path, tmp_path, Fault("killed", **MEASURED, nth=2), resume=path)
    # A kill by force leaves neither checksums nor a summary of this part.
    RunDir.open(path).reopen()
    RunDir.open(path).update_manifest(status="running")
    assert not verify.verify(RunDir.open(path))


async def test_a_request_may_take_three_times_the_slowest_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P-30: then it counts as hung."""
    from kvlab.workloads import arm

    monkeypatch.setattr("kvlab.workloads.arm.LEAST_DEADLINE_S", 0.0)
    chosen = fake_stack.profile(timeouts__request_s=60)
    written: list[Any] = []
    async with (
        fake_stack.FakeLaunch(chosen, Settings(base_s=0.1))("baseline", 1) as stack,
        client.connect(stack.vllm_url, model=stack.model) as sender,
    ):
        visitor = arm.Arm(chosen, stack, written.append, "n", sender)
        await visitor.warm_up()
    slowest_s = max(r.ttft_ns for r in written) / 1e9
    assert slowest_s > 0.1
    assert visitor.deadline_s == pytest.approx(3 * slowest_s)


async def test_a_second_run_on_the_same_machine_is_refused(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    from kvlab import host

    with host.exclusive(), pytest.raises(KvlabError, match="another"):
        await run(profile_file(), tmp_path)
    assert not (tmp_path / "runs").exists()


async def test_without_a_container_engine_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EngineMissing, match="no container engine answers"):
        await experiment.run_async("two-round", "dgx-spark", runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_arms_alternate_abba() -> None:
    from kvlab.workloads.two_round import order

    assert order(("a", "b"), 3) == [
        *((1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")),
    ]


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """P-35: need, free space, and what to do."""
    chosen = profile.load("embedded")
    with pytest.raises(KvlabError, match="records of one repeat need about"):
        runtime.check_disk(chosen, {"chunk_bytes": 10**15}, tmp_path / "runs")
    runtime.check_disk(chosen, {"chunk_bytes": 1000}, tmp_path / "runs")
    runtime.check_disk(chosen, {}, tmp_path / "runs")
