"""The list of reports, and pages as PDF."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvlab import printing, report
from kvlab.errors import UsageError
from kvlab.report import index
from tests.report import cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reports")
    for name, case in (("a", "proven"), ("b", "wrong")):
        for lang in ("tr", "en"):
            report.write(cases.every()[case], place / name, lang=lang)
    (place / "report-en.html").write_text("no report of ours")
    return place


def test_every_report_is_listed_with_its_verdict_and_pages(folder: Path) -> None:
    found = index.entries(folder)
    assert [sorted(entry.pages) for entry in found] == [["en", "tr"], ["en", "tr"]]
    page = index.write(folder, lang="en").read_text(encoding="utf-8")
    assert 'href="a/report-tr.html"' in page
    assert "Proven" in page
    assert "Invalid" in page
    assert page.count(index.i18n.text("en")("word.withheld")) == 1


def test_an_invalid_run_has_no_speedup_in_the_list(folder: Path) -> None:
    summary = cases.every()["wrong"]
    row = index._row(index.Entry(summary, {}), folder, index.i18n.text("en"))
    assert row["speedup"] == "not published"


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    told = {"run": "<img src=x>", "profile": "</code><b>", "experiment": "two-round"}
    page = index.render([index.Entry(told, {})], tmp_path)
    assert "<img" not in page
    assert "</code><b>" not in page


def test_without_a_browser_a_pdf_is_refused_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="no Chromium"):
        printing.to_pdf(folder / "a" / "report-tr.html")


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_page_is_printed(folder: Path) -> None:
    pdf = printing.to_pdf(folder / "a" / "report-tr.html").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type/Page") > 1
