"""The sample in the checkout: a real run that verifies, and the reports made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab import report, verify
from kvlab.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("/home/", "/root/", "/work/", "/tmp/")
RUNS = sorted(path.parent for path in (ROOT / "data" / "sample").glob("*/manifest.json"))


def test_there_is_a_sample() -> None:
    assert RUNS


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_sample_run_is_real_complete_and_verified(path: Path) -> None:
    run = RunDir.open(path)
    assert run.manifest["status"] == "complete"
    assert "fake" not in run.manifest["profile"]["model"]["name"]
    assert not verify.verify(run)


@pytest.mark.parametrize("lang", ["tr", "zh", "en"])
def test_the_sample_reports_are_those_of_the_sample_run(lang: str) -> None:
    page = (ROOT / "reports" / "sample" / f"report-{lang}.html").read_text(encoding="utf-8")
    summary = report.load(ROOT / "data" / "sample")
    assert summary["run"] in page
    assert report.render(summary, lang=lang) == page


def test_the_sample_names_no_place_of_the_machine_that_measured() -> None:
    for path in [*RUNS, ROOT / "reports" / "sample"]:
        for file in path.rglob("*"):
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                assert not any(
                    place in text for place in ("/home/", "/root/", "/work/", "/tmp/")
                ), file
