"""The sweep of L1's eviction, end to end on the fake stack: proven, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvlab import evidence, experiment, profile, summary, verify
from kvlab.errors import KvlabError
from kvlab.invariants import Facts
from kvlab.records import Scrape
from kvlab.results import eviction as results
from kvlab.rundir import RunDir
from kvlab.workloads import eviction
from tests.fake_stack import Fault
from tests.test_experiment import launcher, profile_file

__all__ = ["profile_file"]

PLAN = evidence.plan({"arms": ["none", "w"], "profile": profile.load("embedded").as_dict()})
MEASURED = {"tokens": 70, "visit": "again"}
SWEEP = {
    "experiments.eviction.ratios": [0.25, 0.99],
    "experiments.eviction.ratios_without_l2": [0.25],
    "cache.eviction_watermark": 0.5,
    "cache.eviction_ratio": 0.25,
}

ONE = {
    **SWEEP,
    "experiments.eviction.ratios": [0.25],
    "experiments.eviction.ratios_without_l2": [],
}


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "REST_S", 0.1)


async def measure(path: Path, tmp_path: Path, *faults: Fault, l1_chunks: int = 24) -> RunDir:
    return await experiment.run_async(
        "eviction", path, runs=tmp_path / "runs", launcher=launcher(*faults, l1_chunks=l1_chunks)
    )


async def test_every_setting_keeps_what_is_predicted(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(**SWEEP), tmp_path)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    rows = {row["label"]: row for row in found["settings"]}
    assert list(rows) == ["w0.5-r0.25", "w0.5-r0.99", "w0.5-r0.25-no-l2"]
    assert rows["w0.5-r0.25"]["hit_share"] == rows["w0.5-r0.99"]["hit_share"] == 1
    assert rows["w0.5-r0.25"]["l1_share"] > rows["w0.5-r0.99"]["l1_share"]
    assert rows["w0.5-r0.25-no-l2"]["hit_share"] < 1
    assert found["matters"]["with_l2"]["tiers"] is True
    assert found["matters"]["with_l2"]["hits"] is False
    assert "w0.5-r0.99: L1 keeps" in summary.text(found)
    assert not verify.verify(RunDir.open(folder.path))


async def test_an_l1_that_never_evicts_compares_nothing(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-17: eviction that acts never, or too late, is said."""
    folder = await measure(profile_file(**ONE), tmp_path, l1_chunks=1000)
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "invalid"
    assert "L1 never evicted" in " ".join(verdict["reasons"])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", **MEASURED), "external-share"),
        (Fault("wrong_logprobs", 1.0, **MEASURED), "fast but wrong"),
        (Fault("warm_start", tokens=70, visit="first"), "round 1 warm"),
        (Fault("truncated", **MEASURED, nth=1), "truncated stream"),
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


async def test_a_worker_that_dies_leaves_an_invalid_run(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(KvlabError, match="stopped"):
        await measure(profile_file(**ONE), tmp_path, Fault("killed", **MEASURED, nth=2))
    (path,) = (tmp_path / "runs").iterdir()
    verdict = summary.conclude(RunDir.open(path))["verdict"]
    assert verdict["status"] == "invalid"
    assert "stopped with exit code" in " ".join(verdict["reasons"])


async def test_settings_on_caches_of_different_size_do_not_compare(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-18: the engine's own cache, not the ratio, would be what differs."""
    two = {**ONE, "experiments.eviction.ratios": [0.25, 0.99]}
    smaller = Fault("kv_cache_tokens", 192, scenario="w0.5-r0.99")
    verdict = summary.conclude(await measure(profile_file(**two), tmp_path, smaller))["verdict"]
    assert verdict["status"] == "invalid"
    assert "arms not comparable: KV 256 vs 192 tokens" in " ".join(verdict["reasons"])


def test_settings_follow_from_the_profile() -> None:
    chosen = profile.load("embedded", {"experiments.eviction.watermarks": [0.2, 0.3]})
    found = eviction.settings(chosen)
    assert len(found) == 10
    without = found["w0.2-r0.99-no-l2"].applied(chosen)
    assert (without.cache.l2, without.cache.eviction_ratio) == (None, 0.99)
    assert without.cache.eviction_watermark == 0.2


def test_refused_stores_are_no_eviction() -> None:
    """P-17: an allocation that failed is no eviction."""
    name = "lmcache_mp_l1_allocation_failure_chunks_total"
    account = evidence.account(("w", 1, "fill"), {}, evidence.Readings([]), has_lmcache=True)
    for count, holds in ((0.0, True), (7.0, False)):
        scrapes = [
            Scrape(
                scenario="w",
                repeat=1,
                boundary=f"fill:{where}",
                source="lmcache",
                at_ns=1,
                samples={name: value},
            )
            for where, value in (("start", 0.0), ("end", count))
        ]
        facts = Facts(
            plan=PLAN,
            accounts=[account],
            events=[],
            readings=evidence.Readings(scrapes),
            correctness={},
            false_gain=None,
        )
        assert results.l1_had_room(facts).holds is holds


@pytest.mark.parametrize(
    ("retained", "status"),
    [(0.25, "proven"), (0.1, "refuted"), (0.4, "refuted"), (None, "invalid")],
)
def test_what_is_kept_decides(retained: float | None, status: str) -> None:
    row = {"label": "w", "retained_share": retained, "predicted_share": [0.24, 0.3]}
    assert results._reach([], [row]).status == status


def test_the_ratio_matters_where_hits_differ() -> None:
    rows = [
        {"ratio": ratio, "hit_share": hit, "l1_share": hit, "ttft_ms": {"mean": ms}}
        for ratio, hit, ms in ((0.2, 0.5, 50.0), (0.99, 0.0, 100.0))
    ]
    found = results._matters(rows)
    assert (found["hits"], found["hit_share_difference"], found["ttft_mean_ratio"]) == (
        True,
        0.5,
        2.0,
    )
    assert results._matters(rows[:1]) == {}
