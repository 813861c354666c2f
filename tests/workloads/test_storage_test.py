"""Snapshots and model loads in a place: small real ones, and what makes a rate worthless."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvlab import experiment, fio, loading, storage, summary, verify
from kvlab.errors import MeasurementError
from kvlab.rundir import RunDir
from kvlab.units import MIB
from tests.test_experiment import profile_file

__all__ = ["profile_file"]

SMALL: dict[str, Any] = {
    "storage.readers": [1, 2],
    "experiments.storage.repeats": 2,
    "experiments.storage.writers": 2,
    "experiments.storage.snapshot_mb": 1,
    "experiments.storage.readers": [1, 2],
    "experiments.storage.model_mb": 1,
}


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that reads 1 GB/s, and says that it read whatever was asked for."""
    told = itertools.count(0, 10**8)
    monkeypatch.setattr(fio, "run", lambda job, *_: fio.Rate(bytes=10**9, seconds=1, requests=1))
    monkeypatch.setattr(storage, "device_read_bytes", lambda path: next(told))
    monkeypatch.setattr(
        loading,
        "load",
        lambda paths: loading.Loaded(readers=len(paths), bytes=MIB * len(paths), seconds=0.1),
    )


async def measure(path: Path, tmp_path: Path, **options: Any) -> RunDir:
    return await experiment.run_async("storage", path, runs=tmp_path / "runs", **options)


async def test_every_rate_is_kept_with_its_evidence(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(**SMALL), tmp_path)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert [row["gb_per_s"] for row in found["snapshots"]] == [1]
    loads = {row["readers"]: row for row in found["loads"]}
    assert loads[2]["bytes"] == 2 * MIB
    assert loads[2]["gb_per_s"] == pytest.approx(2 * MIB / 0.1 / 1e9)
    assert loads[1]["repeats"] == 2
    assert loads[1]["read_source"] == "disk"
    assert "models loaded at" in summary.text(found)
    assert not verify.verify(RunDir.open(folder.path))
    assert not (folder.path / "l2").exists()


async def test_an_interrupted_run_goes_on(
    profile_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, calls = profile_file(**SMALL), loading.load, itertools.count()

    def breaks(paths: list[Path]) -> loading.Loaded:
        if next(calls) == 3:
            raise MeasurementError("no memory")
        return real(paths)

    monkeypatch.setattr(loading, "load", breaks)
    with pytest.raises(MeasurementError):
        await measure(path, tmp_path)
    (partial,) = (tmp_path / "runs").iterdir()
    assert RunDir.open(partial).finished_arms() == {(1, "local")}
    folder = await measure(path, tmp_path, resume=partial)
    assert summary.conclude(folder)["verdict"]["status"] == "proven"
    assert not verify.verify(RunDir.open(folder.path))


@pytest.mark.parametrize(
    ("seconds", "device", "reason"),
    [(0.0001, 10**8, "not plausible"), (0.1, 0, "from the page cache")],
)
async def test_a_rate_that_is_none_of_the_device_makes_it_invalid(
    seconds: float,
    device: int,
    reason: str,
    profile_file: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = itertools.count(0, device)
    monkeypatch.setattr(storage, "device_read_bytes", lambda path: next(told))
    monkeypatch.setattr(
        loading,
        "load",
        lambda paths: loading.Loaded(readers=len(paths), bytes=MIB, seconds=seconds),
    )
    found = summary.conclude(await measure(profile_file(**SMALL), tmp_path))
    assert found["verdict"]["status"] == "invalid"
    assert reason in " ".join(found["verdict"]["reasons"])


async def test_a_repeat_that_is_missing_is_named(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(**SMALL), tmp_path)
    lines = (folder.path / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"snapshot"' not in line or '"repeat":2' not in line]
    assert len(kept) == len(lines) - 1
    (folder.path / "events.jsonl").write_text("".join(kept), encoding="utf-8")
    found = summary.summarise(RunDir.open(folder.path))
    assert found["verdict"]["reasons"] == ["whole: unknown: the snapshot in local, repeat 2"]
