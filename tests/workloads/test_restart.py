"""Restart on the fake stack: a healthy run is proven, and each fault is called by its name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab import experiment, runtime, summary, verify
from kvlab.disk import identity
from kvlab.errors import KvlabError, MeasurementError, UsageError
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Launch
from kvlab.workloads import drain, restart
from tests import fake_stack
from tests.fake_stack import Fault, Settings

FAST = {"workload.contexts": 6, "experiments.restart.control_contexts": 2}


def launcher(*faults: Fault, **settings: Any) -> runtime.Launcher:
    def make(chosen: Profile, folder: RunDir) -> Launch:
        return fake_stack.FakeLaunch(
            chosen,
            Settings(**settings).with_faults(*faults),
            folder=folder.path / "l2",
            record=folder.append,
            nonce=folder.manifest["nonce"],
        )

    return make


async def run(
    tmp_path: Path, *faults: Fault, resume: Path | None = None, **overrides: Any
) -> RunDir:
    path = tmp_path / "fake.yaml"
    chosen = fake_stack.profile({**FAST, **overrides})
    path.write_text(yaml.safe_dump(chosen.as_dict()), encoding="utf-8")
    return await experiment.run_async(
        "restart", path, runs=tmp_path / "runs", launcher=launcher(*faults), resume=resume
    )


@pytest.fixture(autouse=True)
def _drains_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake writes at once; a run drains 15 times."""
    monkeypatch.setattr(drain, "settled", partial(drain.settled, quiet_s=0.1))
    monkeypatch.setattr(drain, "POLL_S", 0.05)


def failing(found: dict[str, Any]) -> list[str]:
    """Conditions that fail or are unknown, but for the one that a busy machine can break."""
    broken = [one["name"] for one in found["invariants"] if one["holds"] is not True]
    return [name for name in broken if name != "warmed-up"]


async def test_a_healthy_run_holds_and_is_verified(tmp_path: Path) -> None:
    """P-29: both servers are stopped, LMCache starts first; P-12 before, P-16 after."""
    folder = await run(tmp_path)
    found = summary.conclude(folder)
    assert not failing(found), found["verdict"]
    assert found["verdict"]["status"] in ("proven", "invalid")
    assert found["speedup"]["value"] > 1
    for stop in restart.STOPS:
        one = found["variants"][stop]
        assert one["surviving_share"] == 1
        assert one["l2_share"] == 1
        assert one["records"] >= 6 * 4
        assert one["odd_files"] == 0
        assert one["first_hit_s"] > 0
        assert one["read_source"] in ("disk", "page cache", "unknown")
    assert [one["hit_tokens"] for one in found["controls"]] == [0, 0, 0]
    assert "chunk_tokens 16 there, 32 here" in found["controls"][1]["refused"]
    assert "model fake/model there, ./fake/model here" in found["controls"][2]["refused"]
    assert [one["batched_tokens"] for one in found["rule"]] == [31, 32]
    assert {one["restorable_tokens"] for one in found["rule"]} == {48}
    if found["verdict"]["status"] == "proven":
        assert "other-model: 0 hit tokens" in summary.text(found)
    assert not verify.verify(RunDir.open(folder.path))
    assert not list(folder.path.glob("l2/*sig*/*.data"))


async def test_the_restart_finds_what_another_process_wrote(tmp_path: Path) -> None:
    folder = await run(tmp_path)
    pids: dict[str, set[int]] = {}
    for event in folder.events():
        for service in event.detail.get("services", []) if event.kind == "state" else []:
            pids.setdefault(event.scenario or "", set()).add(service["pid"])
    assert not pids["sigterm"] & pids["sigterm-restarted"]
    assert set(pids) == {*restart.ARMS}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("zero_hits", tokens=70, scenario="sigterm-restarted"), "restored-from-l2"),
        (Fault("warm_start", tokens=70, scenario="sigkill"), "round 1 warm"),
        (Fault("cut_record", 2, scenario="sigterm"), "records-whole: sigterm"),
        (Fault("lost_records", scenario="sigkill"), "records-survive: sigkill"),
        (Fault("wrong_logprobs", 1.0, tokens=70, scenario="sigkill-restarted"), "fast but wrong"),
        (Fault("warm_start", tokens=70, scenario="other-chunk"), "controls-miss: other-chunk"),
        (Fault("stores_missing", 2, tokens=70, scenario="sigterm"), "never stored"),
        (Fault("soft_kill", scenario="sigkill"), "stopped-as-meant: sigkill"),
        (Fault("kv_cache_tokens", 192, scenario="sigkill-restarted"), "arms not comparable"),
    ],
    ids=lambda value: f"{value.name}-{value.scenario}" if isinstance(value, Fault) else "",
)
async def test_a_fault_is_called_by_its_name(fault: Fault, reason: str, tmp_path: Path) -> None:
    found = summary.conclude(await run(tmp_path, fault))
    assert found["verdict"]["status"] == "invalid"
    assert reason in " ".join(found["verdict"]["reasons"]), found["verdict"]
    assert "proven" not in summary.text(found)


async def test_records_of_another_version_are_refused(tmp_path: Path) -> None:
    newer = Fault("version", "0.6.0", server="lmcache", scenario="sigterm-restarted")
    with pytest.raises(MeasurementError, match=r"are foreign: .*lmcache .* there, 0\.6\.0 here"):
        await run(tmp_path, newer)


async def test_a_run_that_was_cut_short_starts_its_repeat_again(tmp_path: Path) -> None:
    with pytest.raises(KvlabError):
        await run(tmp_path, Fault("killed", tokens=70, scenario="sigkill", nth=3))
    (path,) = (tmp_path / "runs").iterdir()
    assert summary.conclude(RunDir.open(path))["verdict"]["status"] == "invalid"
    assert not list(path.glob("l2/*sig*/*.data"))
    folder = await run(tmp_path, resume=path)
    found = summary.conclude(folder)
    assert not failing(found), found["verdict"]
    assert not verify.verify(folder)


async def test_an_empty_disk_tier_is_said_before_the_restart(tmp_path: Path) -> None:
    every = Fault("store_fails", [*range(1, 200)], scenario="sigterm")
    with pytest.raises(MeasurementError, match="disk tier empty"):
        await run(tmp_path, every)
    (path,) = (tmp_path / "runs").iterdir()
    assert "sigterm-restarted" not in {event.scenario for event in RunDir.open(path).events()}


async def test_it_needs_a_disk_tier_and_prompts_that_return(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a disk tier"):
        await run(tmp_path, **{"cache.l2": None})
    suffix = {"workload.shape": "prefix_suffix", "workload.context_tokens": 120}
    with pytest.raises(UsageError, match="prefix_suffix"):
        await run(tmp_path, **suffix, **{"workload.breaker_tokens": 8})


async def test_a_folder_that_the_profile_names_is_left_as_it_was(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    folder = await run(tmp_path, **{"cache.l2.base_path": str(mine)})
    assert not failing(summary.conclude(folder))
    assert not [path for path in mine.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (Fault("reset_missing"), []),
        # The probe after the start was reset; the launch without a probe is reset once, too.
        (Fault("reset_not_done", 1), [32]),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_the_rule_is_not_shown_where_l0_was_not_emptied(
    fault: Fault, shown: list[int], tmp_path: Path
) -> None:
    """P-11: 200 and "success" are no proof; nothing else of the run needs a reset."""
    found = summary.conclude(await run(tmp_path, fault))
    assert [one["batched_tokens"] for one in found["rule"]] == shown
    assert not failing(found), found["verdict"]


def test_variants_take_turns_and_dense_models_have_no_rule() -> None:
    chosen = fake_stack.profile({"experiments.restart.repeats": 2})
    labels = [arm for _, arm in restart.order(chosen, restart.ARMS)]
    assert labels[0] == "sigterm"
    assert labels[len(restart.ARMS)] == "sigkill"
    dense = fake_stack.profile({"model.hybrid": False})
    assert "coarse-batches" not in {arm for _, arm in restart.order(dense, restart.ARMS)}
    assert restart.steps(dense, ["coarse-batches"]).total() == 0
    assert restart.steps(chosen, ["other-chunk"])["request:other-chunk:control"] == 8


def test_every_field_of_an_identity_is_recorded(tmp_path: Path) -> None:
    fields = identity.of(fake_stack.profile())
    assert {"model", "kv_dtype", "chunk_tokens", "object_groups", "hash_seed"} <= fields.keys()
