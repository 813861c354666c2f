"""Experiments end to end on the fake stack: what a run folder holds, and what faults come to.

The fake stack is for tests only; nothing of it is ever reported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab import experiment, profile, summary, verify
from kvlab.errors import KvlabError, RunFolderError, UsageError
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Launch
from tests import fake_stack
from tests.fake_stack import Fault, Settings

FAST = {"experiments.two_round.repeats": 1, "workload.contexts": 6}
MEASURED = {"tokens": 70, "visit": "again", "scenario": "lmcache"}
"""A fault that touches only the lmcache arm's measure round."""


def launcher(*faults: Fault, **settings: Any) -> experiment.Launcher:
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


async def test_the_control_shows_no_difference(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await run(profile_file(), tmp_path, control=True)
    result = summary.conclude(folder)
    assert result["arms"] == ["baseline", "control"]
    assert result["verdict"]["status"] in ("not shown", "refuted", "proven")
    low, high = result["speedup"]["ci95"]
    assert high / low < 2  # nothing like the gain of a cache


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", **MEASURED), "external"),
        (Fault("wrong_logprobs", 1.0, **MEASURED), "fast but wrong"),
        (Fault("warm_start", tokens=70, visit="first", scenario="lmcache"), "round 1"),
        (Fault("error_before_token", **MEASURED, nth=2), "in-band error"),
        (Fault("truncated", **MEASURED, nth=1), "truncated stream"),
        (Fault("prompt_tokens", 13, **MEASURED, nth=1), "prompt"),
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


async def test_a_second_run_on_the_same_machine_is_refused(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    from kvlab import host

    with host.exclusive(), pytest.raises(KvlabError, match="another"):
        await run(profile_file(), tmp_path)
    assert not (tmp_path / "runs").exists()


async def test_runtimes_that_are_not_there_yet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="runtime docker"):
        await experiment.run_async("two-round", "dgx-spark", runs=tmp_path / "runs")


def test_arms_alternate_abba() -> None:
    from kvlab.workloads.two_round import order

    assert order(("a", "b"), 3) == [
        *((1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")),
    ]


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    chosen = profile.load("embedded")
    with pytest.raises(KvlabError, match="records of one repeat need about"):
        experiment._check_disk(chosen, {"chunk_bytes": 10**15}, tmp_path / "runs")
    experiment._check_disk(chosen, {"chunk_bytes": 1000}, tmp_path / "runs")
    experiment._check_disk(chosen, {}, tmp_path / "runs")
