"""What a run of acceptance is said to mean: paths, steps, control, and what spoils it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlab import report, summary
from kvlab.errors import RunFolderError
from kvlab.results import acceptance
from kvlab.rundir import RunDir
from tests.acceptance_runs import make_acceptance_run

STOCK = {"stock": 0.4}


def conclude(folder: Path, **options: Any) -> dict[str, Any]:
    return summary.conclude(make_acceptance_run(folder, **options))


def test_a_healthy_run_is_proven_and_shows_its_control(tmp_path: Path) -> None:
    result = conclude(tmp_path, off=STOCK)
    assert result["verdict"] == {
        "status": "proven",
        "reasons": [
            "on fill, l0, l1, l2, restarted every answer equals the cold one within the tolerance"
        ],
    }
    assert [step["holds"] for step in result["steps"]] == [True] * 7
    assert result["negative_control"]["verdict"] == "fail"
    control = result["negative_control"]
    assert [row["tail_tokens"] for row in control["by_tail"]] == [1, 2, 3, 10, 100]
    assert [row["max_nat"] for row in result["by_tail"]] == [0.0] * 5
    assert result["needles"]["used"] is False
    assert result["paths"]["l2"]["ttft_ms"] == {"median": 34.0, "n": 2}
    assert result["cold"]["ttft_ms"]["median"] == 150.0


def test_a_wrong_path_refutes_and_has_no_time(tmp_path: Path) -> None:
    result = conclude(tmp_path, off={**STOCK, "restarted": 0.3})
    assert result["verdict"]["status"] == "refuted"
    assert "ttft_ms" not in result["paths"]["restarted"]
    assert "ttft_ms" in result["paths"]["l2"]
    assert "restarted: fail" in summary.text(result)


def test_a_near_tie_passes_and_is_counted(tmp_path: Path) -> None:
    result = conclude(tmp_path, off=STOCK, flips={"l2": 0.0005})
    assert result["verdict"]["status"] == "proven"
    assert "near ties" in result["verdict"]["reasons"][0]
    assert result["paths"]["l2"]["verdict"] == "pass with ties"
    assert result["paths"]["l2"]["flips"][0]["margin_nat"] == pytest.approx(0.0005)


def test_without_a_reset_only_what_a_restart_reaches_is_claimed(tmp_path: Path) -> None:
    result = conclude(tmp_path, connector="stock", resets=False)
    assert result["verdict"]["status"] == "proven"
    assert list(result["paths"]) == ["fill", "l0", "restarted"]
    assert result["steps"][3].get("holds") is None


@pytest.mark.parametrize(
    ("kind", "where", "change", "name"),
    [
        ("events", {"kind": "cases"}, None, "requests-complete"),
        ("events", {"kind": "ready", "scenario": "restarted"}, None, "fixed-settings"),
        ("events", {"kind": "state", "scenario": "stock"}, None, "servers-up"),
        ("events", {"kind": "drained"}, None, "records-stored"),
        ("requests", {"scenario": "recold"}, None, "compared"),
        ("requests", {"scenario": "lmcache", "round": "l1", "index": 2}, None, "requests-complete"),
        ("requests", {"scenario": "cold"}, {"cached_tokens": None}, "cold-is-cold"),
        ("requests", {"round": "l2"}, {"cached_tokens": None}, "tiers-served"),
        ("requests", {"round": "l2"}, {"top_logprobs": {"x": -1.0}}, "compared"),
        ("requests", {"round": "l2"}, {"top_logprobs": None}, "compared"),
        ("requests", {"round": "l1"}, {"prompt_tokens": 7}, "requests-complete"),
        ("counters", {"source": "lmcache"}, {"samples": {}}, "tiers-served"),
        ("counters", {"source": "lmcache"}, {"samples": {}}, "records-stored"),
        ("counters", {"scenario": "cold"}, {"samples": None}, "cold-is-cold"),
        ("counters", {"boundary": "reset:end"}, {"samples": None}, "reset-proven"),
    ],
)
def test_what_is_missing_blocks_the_verdict(
    kind: str, where: dict[str, Any], change: dict[str, Any] | None, name: str, tmp_path: Path
) -> None:
    run = make_acceptance_run(tmp_path, off=STOCK)
    edit(run, kind, where, change)
    result = summary.conclude(run)
    assert result["verdict"]["status"] == "invalid"
    (found,) = [one for one in result["invariants"] if one["name"] == name]
    assert found.get("holds") is not True, found
    assert summary.text(result)


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        ({"running": False, "exit_code": -9}, "exit code -9"),
        ({"running": False, "oom_killed": True}, "OOM kill"),
        ({"running": True, "started": 9.0}, "started again"),
    ],
)
def test_a_server_that_did_not_last_makes_it_invalid(
    service: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = make_acceptance_run(tmp_path, off=STOCK)
    services = {"services": [{"name": "vllm", "pid": 1, **service}]}
    edit(run, "events", {"kind": "state", "round": "l2"}, {"detail": services})
    (found,) = [i for i in summary.conclude(run)["invariants"] if i["name"] == "servers-up"]
    assert found["holds"] is False
    assert reason in found["detail"]


def test_a_control_that_is_not_caught_makes_the_run_invalid(tmp_path: Path) -> None:
    result = conclude(tmp_path)
    assert result["verdict"]["status"] == "invalid"
    assert [one["name"] for one in result["invariants"] if one["holds"] is not True] == [
        "control-caught"
    ]
    assert "acceptance.control: false" in result["verdict"]["reasons"][0]


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ({"stable": False, "completed": 40.0, "failed": 0.0, "files": 40}, "not come to rest"),
        ({"stable": True, "completed": 39.0, "failed": 1.0, "files": 39}, "1 failed"),
        ({"stable": True, "completed": 40.0, "failed": 0.0, "files": 0}, "0 files"),
    ],
)
def test_stores_that_are_not_all_on_disk_make_it_invalid(
    detail: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = make_acceptance_run(tmp_path, off=STOCK)
    edit(run, "events", {"kind": "drained", "scenario": "lmcache"}, {"detail": detail})
    (found,) = [i for i in summary.conclude(run)["invariants"] if i["name"] == "records-stored"]
    assert found["holds"] is False
    assert reason in found["detail"]


def test_equal_answers_everywhere_show_nothing(tmp_path: Path) -> None:
    run = make_acceptance_run(tmp_path, off=STOCK)
    edit(run, "requests", {}, {"token": "token_id:1", "top_logprobs": {"token_id:1": -1.0}})
    result = summary.conclude(run)
    (found,) = [one for one in result["invariants"] if one["name"] == "compared"]
    assert "same answer" in found["detail"]


def test_a_manifest_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    run = make_acceptance_run(tmp_path)
    del run.manifest["order"]
    with pytest.raises(RunFolderError, match="not whole"):
        acceptance.summarise(run)


def edit(run: RunDir, kind: str, where: dict[str, Any], change: dict[str, Any] | None) -> None:
    """Change fields of the rows that match, or drop them (``change`` None)."""
    import json

    path = run.path / f"{kind}.jsonl"
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if all(row.get(key) == value for key, value in where.items()):
            if change is None:
                continue
            row |= change
        kept.append(json.dumps(row))
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


@pytest.mark.parametrize(
    ("lang", "shown"), [("tr", "0,4000 nat"), ("zh", "0.4000 nat"), ("en", "0.4000 nat")]
)
def test_the_report_shows_paths_and_control(lang: str, shown: str, tmp_path: Path) -> None:
    run = make_acceptance_run(tmp_path, off=STOCK)
    page = report.render(report.load(run), lang=lang)
    assert shown in page
    assert f"34{shown[1]}0 ms" in page
