"""What a run of object-groups may claim, from synthetic runs with one thing wrong each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvlab import summary, verify
from kvlab.errors import RunFolderError
from kvlab.records import Event, Record, RequestRecord, Scrape
from kvlab.results import object_groups as results
from kvlab.stats import Equivalence, Ratio
from tests.builders import Edit
from tests.group_runs import OFF, ON, make_groups_run


def conclude(tmp_path: Path, **options: Any) -> dict[str, Any]:
    return summary.conclude(make_groups_run(tmp_path, **options))


def invariant(found: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(next(one for one in found["invariants"] if one["name"] == name))


def events(kind: str, change: Callable[[Event], Event | None]) -> Edit:
    def edit(record: Record) -> Record | None:
        return change(record) if isinstance(record, Event) and record.kind == kind else record

    return edit


def test_equal_settings_are_equivalent_and_the_run_verifies(tmp_path: Path) -> None:
    folder = make_groups_run(tmp_path)
    found = summary.conclude(folder)
    assert found["verdict"]["status"] == "proven", found["verdict"]
    assert found["equivalence"]["answer"] == "equivalent"
    assert found["hit_share"] == {OFF: 1.0, ON: 1.0}
    assert found["records"][OFF]["files_per_context"] == 5
    assert found["records"][ON]["files_per_context"] == 10
    assert found["recommendation"] == {"setting": ON, "reason": "recipe"}
    assert found["conservation"]["residual_tokens"] == 0
    assert not verify.verify(folder)
    assert "equivalent within 5%" in summary.text(found)


def test_a_clear_difference_refutes_the_claim_and_the_faster_one_is_advised(
    tmp_path: Path,
) -> None:
    found = conclude(tmp_path, restored_ms={OFF: 80.0})
    assert found["verdict"]["status"] == "refuted"
    assert found["equivalence"]["answer"] == "different"
    assert found["equivalence"]["ratio"] < 0.85
    assert found["recommendation"] == {"setting": OFF, "reason": "faster"}


def test_noise_decides_nothing(tmp_path: Path) -> None:
    found = conclude(tmp_path, noise=0.4)
    assert found["verdict"]["status"] == "not shown"
    assert found["equivalence"]["answer"] == "undecided"
    assert "more repeats" in found["verdict"]["reasons"][0]


@pytest.mark.parametrize("faster_ms", [100.0, 50.0])
def test_one_start_of_each_setting_decides_nothing(faster_ms: float, tmp_path: Path) -> None:
    found = conclude(tmp_path, repeats=1, restored_ms={OFF: faster_ms})
    assert found["verdict"]["status"] == "not shown"
    assert found["equivalence"]["answer"] == "undecided"


def test_the_faster_setting_is_not_recommended_when_its_answers_are_wrong(tmp_path: Path) -> None:
    found = conclude(tmp_path, restored_ms={OFF: 50.0}, restored_nat={OFF: 0.5})
    assert found["verdict"]["status"] == "invalid"
    assert found["verdict"]["reasons"][0].startswith("fast but wrong")
    assert OFF in found["verdict"]["reasons"][0]
    assert found["correctness"][OFF]["verdict"] == "fail"
    assert found["correctness"][ON]["verdict"] == "pass"
    assert found["recommendation"] == {"setting": ON, "reason": "faster is worse"}
    assert "TTFT" not in summary.text(found).replace("fast but wrong", "")


def test_both_settings_wrong_recommend_neither(tmp_path: Path) -> None:
    found = conclude(tmp_path, restored_nat={OFF: 0.5, ON: 0.7})
    assert found["recommendation"] == {"reason": "both wrong"}


def test_a_launch_without_its_flag_is_no_ablation(tmp_path: Path) -> None:
    unflagged = events("ablation", lambda e: replace(e, detail={**e.detail, "flag": None}))
    found = conclude(tmp_path, edit=unflagged)
    assert found["verdict"]["status"] == "invalid"
    assert "ablation not defined" in found["verdict"]["reasons"][0]


def test_a_flag_that_nobody_recorded_is_unknown_and_blocks(tmp_path: Path) -> None:
    found = conclude(tmp_path, edit=events("ablation", lambda e: None))
    assert invariant(found, "ablation-defined")["holds"] is None
    assert found["verdict"]["status"] == "invalid"


def test_a_shared_folder_is_no_ablation(tmp_path: Path) -> None:
    shared = events("ablation", lambda e: replace(e, detail={**e.detail, "l2_folder": "l2"}))
    found = conclude(tmp_path, edit=shared)
    assert "both settings used the L2 folder l2" in found["verdict"]["reasons"][0]


def test_a_setting_that_changed_nothing_is_said(tmp_path: Path) -> None:
    found = conclude(tmp_path, groups={OFF: 1, ON: 1})
    assert invariant(found, "setting-took-effect")["holds"] is False
    assert found["verdict"]["status"] == "invalid"


def test_groups_that_lmcache_does_not_state_are_unknown(tmp_path: Path) -> None:
    silent = events("ready", lambda e: replace(e, detail={**e.detail, "object_groups": None}))
    found = conclude(tmp_path, edit=silent)
    assert invariant(found, "setting-took-effect")["holds"] is None


@pytest.mark.parametrize("arm", [OFF, ON])
def test_a_condition_of_the_ab_holds_for_each_setting(arm: str, tmp_path: Path) -> None:
    """Zero hits, a failed request, and a dead server, in either setting."""

    def no_hits(record: Record) -> Record:
        if isinstance(record, RequestRecord) and record.scenario == arm:
            return replace(record, cached_tokens=0) if record.round == "measure" else record
        if isinstance(record, Scrape) and record.scenario == arm and record.samples:
            hits = {k: (0.0 if "hit" in k else v) for k, v in record.samples.items()}
            return replace(record, samples=hits)
        return record

    found = conclude(tmp_path, edit=no_hits)
    share = invariant(found, "external-share")
    assert share["holds"] is False
    assert arm in share["detail"]
    assert found["correctness"][arm]["verdict"] == "unknown"


def test_a_failed_request_and_an_oom_kill_invalidate(tmp_path: Path) -> None:
    def fail(record: Record) -> Record:
        if isinstance(record, RequestRecord) and record.scenario == ON:
            last = record.round == "measure" and record.index == 5
            return replace(record, error="timeout: 9 s") if last else record
        return record

    found = conclude(tmp_path / "a", edit=fail)
    assert "timeout" in invariant(found, "requests-complete")["detail"]
    killed = events(
        "state",
        lambda e: replace(
            e,
            detail={
                "services": [
                    {**s, "running": False, "oom_killed": True} for s in e.detail["services"]
                ]
            },
        ),
    )
    found = conclude(tmp_path / "b", edit=killed)
    assert "OOM kill" in invariant(found, "servers-up")["detail"]


def test_load_times_come_from_lmcaches_own_counters(tmp_path: Path) -> None:
    def loads(record: Record) -> Record:
        if not isinstance(record, Scrape) or record.source != "lmcache" or not record.samples:
            return record
        done = record.boundary == "measure:end"
        more = {
            "lmcache_mp_l2_prefetch_load_completed_chunks_total": 100.0 if done else 0.0,
            "lmcache_mp_l2_load_throughput_GB_per_second_sum": 2.0 if done else 0.0,
            "lmcache_mp_l2_load_throughput_GB_per_second_count": 4.0 if done else 0.0,
        }
        return replace(record, samples={**record.samples, **more})

    found = conclude(tmp_path, edit=loads)
    assert found["l2_load"][ON]["objects"] == 300
    assert found["l2_load"][ON]["gb_per_s"] == 0.5
    contexts = found["served_tokens"][ON]["measure"]["L2"] / 1120
    assert found["l2_load"][ON]["bytes_per_context"] == 300 * 71_680 / contexts
    spent_ms = 1000 * 300 * 71_680 / 0.5e9
    assert found["l2_load"][ON]["ms_per_context"] == pytest.approx(spent_ms / contexts)
    assert conclude(tmp_path / "none")["l2_load"] == {OFF: {}, ON: {}}


RIGHT, TIES, WRONG = ({"verdict": v} for v in ("pass", "pass with ties", "fail"))


def ratio(answer: str, value: float) -> Equivalence:
    return Equivalence(answer, 0.05, Ratio(value, value, value, ""), value, value)


@pytest.mark.parametrize(
    ("off", "on", "found", "hybrid", "expected"),
    [
        (RIGHT, RIGHT, ratio("different", 1.2), True, {"setting": ON, "reason": "faster"}),
        (RIGHT, RIGHT, ratio("different", 0.8), True, {"setting": OFF, "reason": "faster"}),
        (RIGHT, RIGHT, ratio("undecided", 0.8), True, {"setting": ON, "reason": "recipe"}),
        (RIGHT, RIGHT, ratio("equivalent", 1), False, {"setting": None, "reason": "no difference"}),
        (TIES, RIGHT, ratio("different", 0.8), True, {"setting": ON, "reason": "faster is worse"}),
        (TIES, RIGHT, ratio("different", 1.2), True, {"setting": ON, "reason": "correctness"}),
        (RIGHT, WRONG, None, True, {"setting": OFF, "reason": "correctness"}),
        (WRONG, WRONG, ratio("different", 2), True, {"setting": None, "reason": "both wrong"}),
        (
            {"verdict": "unknown"},
            WRONG,
            ratio("different", 2),
            True,
            {"setting": None, "reason": "unknown"},
        ),
    ],
)
def test_right_answers_come_before_fast_ones(
    off: dict[str, str],
    on: dict[str, str],
    found: Equivalence | None,
    hybrid: bool,
    expected: dict[str, Any],
) -> None:
    assert results.recommend({OFF: off, ON: on}, found, hybrid=hybrid) == expected


@pytest.mark.parametrize(
    "change",
    [{"repeats": 0}, {"repeats": 10**9}, {"margin": "5 %"}, {"margin": 0}, {"repeats": None}],
)
def test_a_manifest_that_no_run_wrote_is_refused_in_a_sentence(
    change: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_groups_run(tmp_path)
    folder.manifest["profile"]["experiments"]["object_groups"] |= change
    with pytest.raises(RunFolderError, match="is not whole"):
        summary.summarise(folder)
