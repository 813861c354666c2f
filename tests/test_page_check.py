"""A page is checked against its runs: a number changed by hand is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlab import cli, page_check, report, summary
from kvlab.errors import UsageError
from tests.builders import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    summary.conclude(make_run(folder))
    return folder


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(report.load(runs), tmp_path_factory.mktemp("pages"), lang="tr")


def embedding(text: str) -> str:
    return f'<script type="application/json" id="kvlab-summary">{text}</script>'


def changed(page: Path, folder: Path, old: str, new: str) -> Path:
    text = page.read_text(encoding="utf-8")
    assert old in text
    copy = folder / page.name
    copy.write_text(text.replace(old, new, 1), encoding="utf-8")
    return copy


def test_an_untouched_page_has_no_difference(page: Path, runs: Path) -> None:
    assert page_check.check(page, runs) == []
    done = CliRunner().invoke(cli.app, ["verify", str(page), "--runs", str(runs)])
    assert (done.exit_code, "verified" in done.output) == (0, True)


def test_a_number_changed_in_the_text_is_found(page: Path, runs: Path, tmp_path: Path) -> None:
    touched = changed(page, tmp_path, "<h1>", "<h1>9,99× ")
    (found,) = page_check.check(touched, runs)
    assert "9,99×" in found.what
    done = CliRunner().invoke(cli.app, ["verify", str(touched), "--runs", str(runs)])
    assert done.exit_code == 1


def test_a_number_changed_in_the_embedded_summary_is_found(
    page: Path, runs: Path, tmp_path: Path
) -> None:
    told = json.loads(json.dumps(report.load(runs)))
    value = json.dumps(told["speedup"]["value"])
    found = page_check.check(changed(page, tmp_path, f'"value": {value}', '"value": 9.0'), runs)
    assert any("speedup.value: 9.0 stated" in str(difference) for difference in found)


def test_a_line_too_many_is_found(page: Path, runs: Path, tmp_path: Path) -> None:
    touched = changed(page, tmp_path, "</html>", "</html>\n<p>twice as fast</p>")
    assert page_check.check(touched, runs)


def test_a_run_that_is_not_there_is_named(page: Path, tmp_path: Path) -> None:
    (found,) = page_check.check(page, tmp_path)
    assert "is not below" in found.what


def test_the_sentences_of_another_version_are_not_compared(
    page: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = changed(page, tmp_path, "<h1>", "<h1>! ")
    monkeypatch.setattr(page_check, "__version__", "99.0")
    assert page_check.check(touched, runs) == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "<p>hello"),
        embedding("{"),
        embedding("[1]"),
        embedding('{"run": "../../etc"}'),
        embedding('{"run": "a", "others": [1]}'),
        embedding('{"run": "a", "others": {"b": 1}}'),
    ],
)
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(text)
    with pytest.raises(UsageError, match="no report"):
        page_check.check(page, tmp_path)
