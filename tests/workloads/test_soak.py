"""A soak, end to end on the fake stack: proven, refuted by growth and errors, resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab import experiment, profile, summary, verify
from kvlab.errors import KvlabError
from kvlab.results import soak as results
from kvlab.rundir import RunDir
from kvlab.workloads import soak
from tests.fake_stack import Fault
from tests.test_experiment import launcher, profile_file

__all__ = ["profile_file"]

MEASURED = {"tokens": 70, "visit": "again"}
SHORT = {
    "experiments.soak.duration_s": 2.4,
    "experiments.soak.checkpoint_s": 0.8,
    "experiments.soak.interval_s": 0.04,
    # Delays of a few milliseconds on a busy machine say nothing about drift.
    "experiments.soak.ttft_drift_max": 100.0,
}


async def measure(path: Path, tmp_path: Path, *faults: Fault, **options: Any) -> RunDir:
    settings = options.pop("settings", {})
    return await experiment.run_async(
        "soak", path, runs=tmp_path / "runs", launcher=launcher(*faults, **settings), **options
    )


async def test_a_healthy_soak_is_proven(profile_file: Callable[..., Path], tmp_path: Path) -> None:
    folder = await measure(profile_file(**SHORT), tmp_path)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert found["stretches"] == {"planned": 3, "finished": 3}
    assert found["launches"] == 1
    assert found["requests"]["failed"] == 0
    assert {d["name"].partition(":")[0] for d in found["drift"]} == {
        "ttft",
        "memory",
        "files",
        "l2",
    }
    assert "0 failed" in summary.text(found)
    assert not verify.verify(RunDir.open(folder.path))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"leak_bytes_per_s": 5e7}, "memory:"),
        ({"leak_files_per_s": 20.0}, "files:"),
    ],
    ids=["memory", "files"],
)
async def test_what_grows_refutes_it(
    settings: dict[str, float], reason: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(**SHORT), tmp_path, settings=settings)
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "refuted"
    assert reason in verdict["reasons"][0]


async def test_a_failed_visit_refutes_it(profile_file: Callable[..., Path], tmp_path: Path) -> None:
    fault = Fault("error_before_token", **MEASURED, nth=20)
    verdict = summary.conclude(await measure(profile_file(**SHORT), tmp_path, fault))["verdict"]
    assert verdict["status"] == "refuted"
    assert "in-band error (1)" in verdict["reasons"][0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", **MEASURED), "external-share"),
        (Fault("wrong_logprobs", 1.0, **MEASURED), "fast but wrong"),
        (Fault("warm_start", tokens=70, visit="first"), "round 1 warm"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_a_fault_makes_it_invalid_and_says_which(
    fault: Fault, reason: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(**SHORT), tmp_path, fault)
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "invalid"
    assert reason in " ".join(verdict["reasons"]), verdict["reasons"]


async def test_a_killed_soak_keeps_its_finished_stretches_and_goes_on(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = profile_file(**SHORT)
    death = Fault("killed", **MEASURED, nth=6 + 30)  # after the first stretch of 20 visits
    with pytest.raises(KvlabError):
        await measure(path, tmp_path, death)
    (place,) = (tmp_path / "runs").iterdir()
    kept = RunDir.open(place).finished_arms()
    assert kept == {(1, "soak")}
    assert summary.conclude(RunDir.open(place))["verdict"]["status"] == "invalid"
    folder = await measure(path, tmp_path, resume=place)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    (alike,) = [one for one in found["invariants"] if one["name"] == "kv-equal"]
    assert alike["holds"] is True
    assert found["launches"] == 2
    assert found["measured_s"] > 2
    assert not verify.verify(folder)


async def test_a_soak_that_goes_on_with_another_cache_size_is_none(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-18 over a resume: two engines of different size are not one soak."""
    path = profile_file(**SHORT)
    with pytest.raises(KvlabError):
        await measure(path, tmp_path, Fault("killed", **MEASURED, nth=6 + 30))
    (place,) = (tmp_path / "runs").iterdir()
    folder = await measure(path, tmp_path, Fault("kv_cache_tokens", 192), resume=place)
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "invalid"
    assert "kv-equal: arms not comparable" in " ".join(verdict["reasons"])


def test_the_last_stretch_is_what_is_left() -> None:
    chosen = profile.load(
        "embedded", {"experiments.soak.duration_s": 130, "experiments.soak.checkpoint_s": 60}
    )
    assert soak.order(chosen, ["soak"]) == [(1, "soak"), (2, "soak"), (3, "soak")]
    assert [soak._length_s(chosen, number) for number in (1, 2, 3)] == [60, 60, 10]
    assert profile.load("dgx-spark").experiments.soak.duration_s == 72 * 3600


def test_drift_is_robust_against_single_spikes() -> None:
    series = [(float(t), 100.0 + (900.0 if t == 50 else 0.0)) for t in range(100)]
    drift = results._drift("ttft", "ms", series, share=0.1)
    assert drift is not None
    assert drift.total == pytest.approx(0.0)
    assert drift.judged == "within"


def test_growth_is_told_from_noise() -> None:
    grown = results._drift("l2", "bytes", [(float(t), 100.0 + t) for t in range(50)], share=0.1)
    assert grown is not None
    assert grown.judged == "beyond"
    assert grown.as_dict()["slope_bytes_per_h"] == pytest.approx(3600)
    assert results._drift("l2", "bytes", [(0.0, 1.0)], share=0.1) is None
