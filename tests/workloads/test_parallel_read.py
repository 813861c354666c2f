"""Cold reads adapter by adapter, end to end on the fake stack: proven, and what breaks it.

fio is replaced: what it says is tested with it, and here it would only measure the test machine.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvlab import compare, experiment, fio, profile, storage, summary, verify
from kvlab.errors import KvlabError, UsageError
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Launch
from kvlab.workloads import drain, parallel_read
from tests import fake_stack
from tests.fake_stack import Fault, Settings
from tests.test_experiment import profile_file

__all__ = ["profile_file"]

PLACES = [{"name": "local"}]
SMALL: dict[str, Any] = {
    "engine.prefix_caching": False,
    "workload.output_tokens": 3,
    "storage.paths": PLACES,
    "storage.readers": [1, 4],
    "experiments.parallel_read.concurrency": [2, 4],
    "experiments.parallel_read.adapters": {
        "fs": profile.ADAPTERS["fs"],
        "parallel_fs": profile.ADAPTERS["parallel_fs"],
    },
}
SLOW_S = 0.003
"""Per token from L2 with ``fs``: far more than the other adapter needs, on a busy machine too."""

ONE = {**SMALL, "experiments.parallel_read.concurrency": [2]}
SECOND = {"tokens": 70, "scenario": "local-parallel_fs"}


def launcher(*faults: Fault) -> experiment.Launcher:
    def make(chosen: Profile, folder: RunDir) -> Launch:
        def settings(label: str, repeat: int) -> Settings:
            base = fake_stack.settings_for(chosen, Settings(l1_chunks=200, token_s=0.002))
            slow = SLOW_S if label == "local-fs" else base.l2_token_s
            return dataclasses.replace(base, l2_token_s=slow).with_faults(*faults)

        return fake_stack.FakeLaunch(
            chosen,
            settings,
            folder=folder.path / "l2",
            record=folder.append,
            nonce=folder.manifest["nonce"],
        )

    return make


@pytest.fixture(autouse=True)
def _short_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake cache is at rest at once."""
    monkeypatch.setattr(drain, "POLL_S", 0.01)
    monkeypatch.setattr(drain, "settled", partial(drain.settled, quiet_s=0.03))


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that reads 1 GB/s by one reader, and tells everything it reads from here on."""
    told = iter(range(0, 10**12, 10**7))
    monkeypatch.setattr(
        fio, "run", lambda job, *_: fio.Rate(bytes=job.jobs * 10**9, seconds=1.0, requests=1)
    )
    monkeypatch.setattr(storage, "device_read_bytes", lambda path: next(told))
    monkeypatch.setattr(storage, "device", lambda path: "vda")


async def measure(path: Path, tmp_path: Path, *faults: Fault, **options: Any) -> RunDir:
    return await experiment.run_async(
        "parallel-read", path, runs=tmp_path / "runs", launcher=launcher(*faults), **options
    )


async def test_the_faster_adapter_is_proven_at_every_concurrency(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(**SMALL), tmp_path)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    rows = {(row["label"], row["concurrency"]): row for row in found["variants"]}
    assert len(rows) == 6
    for slots in (2, 4):
        slow, fast = rows["local-fs", slots], rows["local-parallel_fs", slots]
        assert slow["l2_share"] == fast["l2_share"] == 1
        assert slow["read_source"] == "disk"
        assert slow["plausible"] is True
        assert slow["per_output_token_ms"]["median"] > 0
        assert slow["output_tokens_per_s"] < fast["output_tokens_per_s"]
        assert fast["compute_share"] > slow["compute_share"] > 0
        assert "l2_gb_per_s" not in rows["recompute", slots]
    kinds = {(one["kind"], one["label"], one["over"]) for one in found["comparisons"]}
    assert kinds == {
        ("adapter", "local-parallel_fs", "local-fs"),
        ("recompute", "local-fs", "recompute"),
        ("recompute", "local-parallel_fs", "recompute"),
    }
    assert [one["gb_per_s"] for one in found["paths"][0]["ceilings"]] == [1, 4]
    assert "local-parallel_fs over local-fs at 4" in summary.text(found)
    assert not verify.verify(RunDir.open(folder.path))
    assert not (folder.path / "l2").exists()
    asked = Counter(f"request:{r.scenario}:{r.round}" for r in folder.requests())
    chosen = profile.from_dict(folder.manifest["profile"])
    steps = parallel_read.steps(chosen, folder.manifest["arms"])
    assert {k: n for k, n in steps.items() if k.startswith("request")} == asked
    again = compare.compare(folder, folder)
    assert [arm["ratio"]["value"] for arm in again["arms"]] == [1] * 6
    assert "local-fs at 2: median TTFT" in compare.text(again)


async def test_records_are_filled_once_and_shared_by_adapters_with_the_same_names(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    adapters = {**SMALL["experiments.parallel_read.adapters"], "fs_native": {"type": "fs_native"}}
    path = profile_file(
        **{
            **SMALL,
            "experiments.parallel_read.adapters": adapters,
            "experiments.parallel_read.recompute": False,
            "experiments.parallel_read.repeats": 2,
            "experiments.parallel_read.concurrency": [4],
        }
    )
    folder = await measure(path, tmp_path)
    filled = {(e.scenario, e.repeat): e.detail["filled"] for e in folder.events()
              if e.kind == "variant"}  # fmt: skip
    assert {pair for pair, fills in filled.items() if fills} == {
        ("local-fs", 1),
        ("local-fs_native", 1),
    }
    ran = [e.scenario for e in folder.events() if e.kind == "variant"]
    assert ran[:3] == ran[:2:-1]


async def test_an_interrupted_run_fills_again_and_goes_on(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = profile_file(**SMALL)
    with pytest.raises(KvlabError):
        await measure(path, tmp_path, Fault("exit_at_start", scenario="local-parallel_fs"))
    (partial,) = (tmp_path / "runs").iterdir()
    folder = await measure(path, tmp_path, resume=partial)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert not verify.verify(RunDir.open(folder.path))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", **SECOND), "from-l2"),
        (Fault("wrong_logprobs", 1.0, **SECOND), "fast but wrong"),
        (Fault("clear_not_done", scenario="local-fs"), "which was not empty"),
        (Fault("cached_tokens", 16, tokens=70, scenario="local-fs", nth=2), "round 1 warm"),
        (Fault("truncated", **SECOND, nth=3), "truncated stream"),
        (Fault("kv_cache_tokens", 128, scenario="recompute"), "arms not comparable"),
        (Fault("wrong_length", 2, **SECOND, nth=3), "wrong output length"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_a_fault_makes_it_invalid_and_says_which(
    fault: Fault, reason: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(**ONE), tmp_path, fault)
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "invalid"
    assert reason in " ".join(verdict["reasons"]), verdict["reasons"]


async def test_a_rate_above_the_ceiling_is_not_plausible(
    profile_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-38, P-16: faster than fio on the same path is no disk."""
    monkeypatch.setattr(fio, "run", lambda *_: fio.Rate(bytes=100, seconds=1.0, requests=1))
    found = summary.conclude(await measure(profile_file(**ONE), tmp_path))
    assert found["verdict"]["status"] == "invalid"
    assert "not plausible, fio reads" in " ".join(found["verdict"]["reasons"])


async def test_bytes_that_the_device_did_not_read_came_from_the_page_cache(
    profile_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "device_read_bytes", lambda path: 0)
    found = summary.conclude(await measure(profile_file(**ONE), tmp_path))
    assert found["verdict"]["status"] == "invalid"
    assert "read from the page cache" in " ".join(found["verdict"]["reasons"])


async def test_a_silent_device_is_told_beside_the_result(
    profile_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "device_read_bytes", lambda path: None)
    found = summary.conclude(await measure(profile_file(**ONE), tmp_path))
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert "read-source-unknown" in [caution["id"] for caution in found["cautions"]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cache.l2": None}, "needs a disk tier"),
        ({"workload.shape": "prefix_suffix", "workload.breaker_tokens": 1}, "asks the same"),
    ],
)
async def test_what_cannot_be_measured_is_refused(
    change: dict[str, Any], sentence: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        await measure(profile_file(**{**SMALL, **change}), tmp_path)


def test_the_steps_are_those_that_come() -> None:
    chosen = profile.load("embedded", experiment="parallel-read")
    count = parallel_read.steps(chosen, parallel_read.arms(chosen))
    assert count["request:slow-mount-fs:measure-16"] == 24
    fills = {kind.split(":")[1] for kind in count if kind.endswith(":fill")}
    assert fills == {"slow-mount-fs", "slow-mount-fs_native"}


def test_arms_follow_from_places_and_adapters() -> None:
    chosen = profile.load("embedded", experiment="parallel-read")
    assert chosen.name == "embedded-read"
    assert parallel_read.arms(chosen) == (
        *("slow-mount-fs", "slow-mount-fs_native", "slow-mount-parallel_fs"),
        *("local-fs", "local-fs_native", "local-parallel_fs", "recompute"),
    )
