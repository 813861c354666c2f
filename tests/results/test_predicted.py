"""Predicted against measured: what calibrates, what is compared, and which assumption broke."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import summary
from kvlab.records import Record, RequestRecord, Scrape
from kvlab.results import predicted
from kvlab.rundir import RunDir
from tests.builders import make_run

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "sample"
ENOUGH = 60
"""Contexts that overflow the builder's L0, as a run's contexts must."""


def told(tmp_path: Path, **options: Any) -> dict[str, Any]:
    run = make_run(tmp_path, **{"contexts": ENOUGH, "repeats": 2, **options})
    found: dict[str, Any] = summary.summarise(run)["predicted"]
    return found


def slower(factor: float, **where: Any) -> Any:
    """An edit: requests with these fields take so many times as long."""

    def edit(record: Record) -> Record:
        if (
            isinstance(record, RequestRecord)
            and all(getattr(record, name) == value for name, value in where.items())
            and record.sent_ns
            and record.first_token_ns
        ):
            span = int((record.first_token_ns - record.sent_ns) * factor)
            late = record.sent_ns + span
            return replace(
                record,
                first_byte_ns=late,
                first_event_ns=late,
                first_token_ns=late,
                last_byte_ns=late,
                done_ns=late,
            )
        return record

    return edit


def check(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [one for one in found["checks"] if one["id"] == name]
    return dict(one)


def test_a_run_that_repeats_itself_is_as_predicted(tmp_path: Path) -> None:
    found = told(tmp_path)
    assert found["calibration"]["repeats"] == [1]
    assert not found["calibration"]["halved"]
    speedup = check(found, "speedup")
    assert speedup["holds"]
    assert found["speedup"]["value"] == pytest.approx(7, rel=0.1)
    assert found["speedup"]["ci95"][0] <= found["speedup"]["value"] <= found["speedup"]["ci95"][1]
    assert found["at_most"]["speedup"] >= found["speedup"]["value"]
    # The builder deals its hits out in turn, which no LRU does: that is said, not hidden.
    assert check(found, "share-L0")["holds"]
    assert check(found, "share-L1")["holds"] is False
    assert check(found, "share-L1")["broke"] == "policy"
    assert not found["as_predicted"]


def test_the_terminal_says_whether_it_came_as_predicted(tmp_path: Path) -> None:
    run = make_run(tmp_path, contexts=ENOUGH, repeats=2)
    line = next(x for x in summary.text(summary.summarise(run)).splitlines() if "predicted" in x)
    assert line.startswith("predicted: speedup 6.93 (6.85 to 7.01)")
    assert "not as predicted: policy" in line
    assert predicted.lines({"missing": "baseline"}) == []


def test_nothing_of_the_compared_part_enters_the_prediction(tmp_path: Path) -> None:
    plain = told(tmp_path / "a")
    edits = {"scenario": "lmcache", "repeat": 2, "round": "measure"}
    other = told(tmp_path / "b", edit=slower(2.0, **edits))
    assert plain["calibration"] == other["calibration"]
    for key in ("value", "ci95"):
        assert plain["speedup"][key] == other["speedup"][key]
        for arm in plain["ttft_ms"]:
            assert plain["ttft_ms"][arm][key] == other["ttft_ms"][arm][key]
    assert check(other, "speedup")["holds"] is False
    assert check(other, "speedup")["broke"] == "restore"


def test_a_baseline_that_changes_its_pace_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, edit=slower(0.5, scenario="baseline", round="measure"))
    assert check(found, "speedup")["broke"] == "prefill"


def test_one_repeat_is_halved_by_context(tmp_path: Path) -> None:
    found = told(tmp_path, repeats=1)
    assert found["calibration"]["halved"]
    used = sum(restore["n"] for restore in found["calibration"]["restore"].values())
    assert 0 < used <= ENOUGH / 2
    odd = told(
        tmp_path / "b",
        repeats=1,
        edit=lambda r: (
            slower(2.0, scenario="lmcache", round="measure")(r)
            if isinstance(r, RequestRecord) and r.index % 2
            else r
        ),
    )
    assert odd["speedup"]["value"] == found["speedup"]["value"]
    assert odd["speedup"]["measured"] < found["speedup"]["measured"]


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"overrides": {"experiments.two_round.concurrency": 2}}, "concurrency"),
        (
            {
                "edit": lambda r: None if getattr(r, "kind", "") == "drained" else r,
                "overrides": {"model.name": "of-no-known-shape"},
            },
            "record-size",
        ),
        (
            {"edit": lambda r: replace(r, info={}) if isinstance(r, Scrape) else r},
            "l0-size",
        ),
        (
            {
                "edit": lambda r: (
                    None if isinstance(r, RequestRecord) and r.scenario == "baseline" else r
                )
            },
            "baseline",
        ),
        (
            {
                "edit": lambda r: (
                    None
                    if isinstance(r, RequestRecord)
                    and (r.scenario, r.round) == ("lmcache", "measure")
                    else r
                )
            },
            "restores",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, options: dict[str, Any], missing: str) -> None:
    found = told(tmp_path, contexts=6, **options)
    assert found == {"missing": missing}


def test_a_control_has_no_prediction(tmp_path: Path) -> None:
    run = make_run(tmp_path, contexts=3, repeats=1, control=True)
    assert "predicted" not in summary.summarise(run)


def test_the_sample_is_predicted_to_the_token_once_the_looks_are_known() -> None:
    (path,) = [manifest.parent for manifest in SAMPLE.glob("*two-round*/manifest.json")]
    found = summary.summarise(RunDir.open(path))["predicted"]
    for share in found["served_share"].values():
        assert share["replayed"] == pytest.approx(share["measured"], abs=1e-9)
        low, high = share["range"]
        assert low - 1e-9 <= share["measured"] <= high + 1e-9
    assert check(found, "speedup")["holds"]
    assert found["as_predicted"]


@given(st.floats(0, 1), st.integers(0, 20), st.integers(3, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_rhythm_of_the_loop_is_found(
    phase: float, extra_ms: int, count: int, seed: int
) -> None:
    """From spans of a tenth of a second that hold a look each: no look is farther off than that."""
    stream = np.random.RandomState(seed)
    period = 1e9 + extra_ms * 1e6
    truth = [1e12 + phase * 1e9 + look * period for look in range(count)]
    looks = []
    for number, at in enumerate(truth):
        begin = at - stream.uniform(0, 1e8)
        looks.append(predicted.Look(number, round(begin), round(begin + 1e8)))
    first, found = predicted.loop_rhythm(looks)
    for number, at in enumerate(truth):
        assert abs(first + number * found - at) <= 1e8 + 1


def test_the_last_rhythm_that_fits_is_the_shortest() -> None:
    looks = [predicted.Look(n, n * 10**9, n * 10**9 + 10**8) for n in range(3)]
    _, period = predicted.loop_rhythm(looks)
    assert period == 1e9
