"""Several vLLM instances on one cache, end to end on the fake stack: proven, and what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvlab import evidence, experiment, summary, verify
from kvlab.errors import KvlabError
from kvlab.invariants import Facts, servers
from kvlab.records import Event, Scrape
from kvlab.results import shared_cache as results
from kvlab.rundir import RunDir
from tests import fake_stack
from tests.fake_stack import Fault
from tests.test_experiment import launcher, profile_file

__all__ = ["profile_file"]

TOKENS = 70
"""The fake profile's contexts; a probe is shorter."""


async def measure(path: Path, tmp_path: Path, *faults: Fault) -> RunDir:
    return await experiment.run_async(
        "shared-cache", path, runs=tmp_path / "runs", launcher=launcher(*faults)
    )


async def test_a_guest_restores_what_another_instance_computed(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    """P-32: B on A's contexts with B's L0 empty, then again after A has ended."""
    folder = await measure(profile_file(), tmp_path)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert found["hit_share"]["first:2"] == found["hit_share"]["alone:2"] == 1
    assert found["hit_share"]["cold:2"] == 0
    assert len(set(found["worker_ids"])) == 2
    assert found["together"]["requests"] == 12
    assert found["lmcache"]["together:1"]["memory_bytes"] > 0
    assert "alone:2" in summary.text(found)
    assert not verify.verify(RunDir.open(folder.path))


async def test_three_instances(profile_file: Callable[..., Path], tmp_path: Path) -> None:
    path = profile_file(**{"experiments.shared_cache.instances": 3})
    found = summary.conclude(await measure(path, tmp_path))
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert found["instances"] == 3
    assert found["hit_share"]["alone:3"] == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", tokens=TOKENS), "external-share"),
        (Fault("warm_local", tokens=TOKENS, visit="again"), "L0 was not empty"),
        (Fault("warm_start", tokens=TOKENS, visit="first"), "was warm"),
        (Fault("wrong_logprobs", 1.0, tokens=TOKENS), "fast but wrong"),
        (Fault("truncated", tokens=TOKENS, nth=9), "truncated stream"),
        (Fault("cached_tokens", 16, tokens=TOKENS, nth=9), "conservation"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_a_fault_makes_it_invalid_and_says_which(
    fault: Fault, reason: str, profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    folder = await measure(profile_file(), tmp_path, fault)
    verdict = summary.conclude(folder)["verdict"]
    assert verdict["status"] == "invalid"
    assert reason in " ".join(verdict["reasons"]), verdict["reasons"]


async def test_a_reset_that_did_not_reset_ends_the_run_before_anything_is_measured(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(KvlabError, match="its own cache, which then served"):
        await measure(profile_file(), tmp_path, Fault("reset_not_done"))


async def test_a_worker_that_dies_leaves_an_invalid_run(
    profile_file: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(KvlabError, match="stopped"):
        await measure(profile_file(), tmp_path, Fault("killed", tokens=TOKENS, visit="again"))
    (path,) = (tmp_path / "runs").iterdir()
    verdict = summary.conclude(RunDir.open(path))["verdict"]
    assert verdict["status"] == "invalid"
    assert "stopped with exit code" in " ".join(verdict["reasons"])


def ready(ids: list[int]) -> list[Event]:
    detail = {"registered_ids": ids}
    return [Event(at_ns=1, kind="ready", scenario="shared", repeat=1, detail=detail)]


def test_instances_must_be_different_workers() -> None:
    """P-32: as many distinct ids as instances."""
    assert results.workers_distinct(ready([1, 2]), 2).holds is True
    assert results.workers_distinct(ready([1, 1]), 2).holds is False
    assert results.workers_distinct(ready([1]), 2).holds is False
    assert results.workers_distinct([], 2).holds is None


def size(source: str, tokens: int) -> Scrape:
    info = {"vllm:cache_config_info": {"kv_cache_size_tokens": str(tokens)}}
    return Scrape(
        scenario="shared",
        repeat=1,
        boundary="launch",
        source=source,
        at_ns=1,
        info=info,
        samples={},
    )


@pytest.mark.parametrize(
    ("second", "holds"), [(256, True), (254, True), (200, False), (None, None)]
)
def test_every_instance_has_the_same_cache_of_its_own(
    second: int | None, holds: bool | None
) -> None:
    scrapes = [size("vllm", 256), *([size("vllm-2", second)] if second else [])]
    plan = evidence.plan(
        {"arms": ["baseline", "shared"], "profile": fake_stack.profile().as_dict()}
    )
    facts = Facts(
        plan=plan,
        accounts=[],
        events=[],
        readings=evidence.Readings(scrapes),
        correctness={},
        false_gain=None,
    )
    found = servers.kv_alike(facts, results._kv_sizes(facts, 2))
    assert found.holds is holds, found.detail
