"""The gates: what passes, what fails, and above all what was not measured."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvlab import gates
from kvlab.errors import UsageError
from kvlab.profile import Gates
from tests.builders import make_run
from tests.report.read_cases import READS
from tests.report.storage_cases import STORAGE
from tests.report.tier_cases import SOAK

REAL = {"name": "array", "ceilings": [], "ceiling_gb_per_s": 10.2}


def measured(found: dict[str, Any], **demands: Any) -> gates.Measured:
    return gates.Measured("r", found, {**Gates().model_dump(mode="json"), **demands})


def reads(value: float, low: float, gain: float, **place: Any) -> dict[str, Any]:
    found = copy.deepcopy(READS)
    found["paths"] = [{**REAL, **place}]
    found["comparisons"] = [
        {
            "kind": "adapter",
            "path": "array",
            "adapter": "parallel_fs",
            "concurrency": 16,
            "speedup": {"value": value, "ci95": [low, 9.0]},
            "throughput_ratio": gain,
        }
    ]
    return found


def status(name: str, *runs: gates.Measured) -> str:
    return str(gates._gate(name, gates.RULES[name](runs))["status"])


@pytest.mark.parametrize(
    ("value", "low", "gain", "expected"),
    [
        (1.5, 1.4, 1.35, "pass"),
        (4.1, 3.5, 3.0, "pass"),
        (1.5, 1.2, 1.35, "fail"),
        (1.5, 1.4, 1.1, "fail"),
        (1.4, 1 / 0.75, 1.29, "pass"),
    ],
)
def test_the_gain_must_be_sure_and_in_the_band(
    value: float, low: float, gain: float, expected: str
) -> None:
    assert status("G3", measured(reads(value, low, gain))) == expected


def test_an_emulated_place_passes_no_gate() -> None:
    run = measured(reads(4.1, 3.5, 3.0, emulated="10 ms"), read_gb_per_s_min=1)
    assert status("G3", run) == "not measured"
    assert status("G1", run) == "not measured"


@pytest.mark.parametrize(
    ("least", "expected"), [(None, "not measured"), (1.0, "pass"), (20.0, "fail")]
)
def test_storage_is_held_against_the_profile(least: float | None, expected: str) -> None:
    found = copy.deepcopy(STORAGE)
    found["paths"] = [{**REAL, "name": "local"}]
    run = measured(found, read_gb_per_s_min=least, write_gb_per_s_min=1.0)
    assert status("G1", run) == expected


def test_storage_without_a_snapshot_is_half_a_gate() -> None:
    assert status("G1", measured(reads(2, 2, 2), read_gb_per_s_min=1)) == "not measured"


@pytest.mark.parametrize(
    ("seconds", "verdict", "expected"),
    [
        (259_200, "proven", "pass"),
        (259_200, "not shown", "not measured"),
        (60, "proven", "not measured"),
        (60, "refuted", "fail"),
        (259_200, "invalid", "fail"),
    ],
)
def test_the_soak_must_last(seconds: float, verdict: str, expected: str) -> None:
    found = {
        **SOAK,
        "measured_s": seconds,
        "verdict": {"status": verdict, "reasons": ["as recorded"]},
    }
    assert status("G4", measured(found)) == expected


def test_an_a_b_and_its_control_from_run_folders(tmp_path: Path) -> None:
    first = make_run(tmp_path / "1", run="a")
    second = make_run(tmp_path / "2", run="b", control=True)
    result = gates.judge([first, second])
    by_name = {gate["gate"]: gate for gate in result["gates"]}
    assert by_name["G2"]["status"] == "pass", by_name["G2"]
    assert by_name["G2"]["runs"] == [first.id, second.id]
    for name in ("G1", "G3", "G4"):
        assert by_name[name]["status"] == "not measured"
    assert "G2 single-machine baseline: pass" in gates.text(result)
    alone = gates.judge([first])
    assert alone["gates"][1]["status"] == "not measured"
    assert "A/A control" in alone["gates"][1]["reasons"][-1]


def test_a_partial_run_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.update_manifest(status="partial")
    result = gates.judge([run])
    assert result["left_out"] == [run.id]
    assert result["gates"][1]["status"] == "not measured"


def test_runs_of_two_machines_are_refused(tmp_path: Path) -> None:
    first = make_run(tmp_path / "1")
    second = make_run(tmp_path / "2", manifest={"fingerprint": "another"})
    with pytest.raises(UsageError, match="different machines"):
        gates.judge([first, second])
