"""The page of a comparison says what `kvlab compare` says."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlab import cli, compare, i18n
from kvlab.report import comparison
from tests.builders import make_run


@pytest.mark.parametrize("lang", i18n.LANGUAGES)
def test_medians_settings_and_speedups_stand_in_it(lang: str, tmp_path: Path) -> None:
    one = make_run(tmp_path / "a")
    other = make_run(tmp_path / "b", restored_ms=500.0, overrides={"cache.eviction_ratio": 0.2})
    result = compare.compare(one, other)
    page, text = comparison.render(result, lang=lang), i18n.text(lang)
    assert "cache.eviction_ratio" in page
    for arm in result["arms"]:
        for value in arm["median_ms"]:
            assert text.milliseconds(value) in page
    for speedup in result["speedup"]:
        assert text.ratio(speedup["value"]) in page
    assert text("compare.hosts") not in page


def test_an_invalid_run_is_compared_without_figures(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a")
    other = make_run(tmp_path / "b", fault="failed request")
    page = comparison.render(compare.compare(one, other))
    assert "no figures are compared" in page
    assert "ms</td>" not in page


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a")
    page = tmp_path / "pages" / "both.html"
    given = ["compare", str(one.path), str(one.path), "--html", str(page), "--lang", "tr"]
    done = CliRunner().invoke(cli.app, given)
    assert done.exit_code == 0
    assert '<html lang="tr"' in page.read_text(encoding="utf-8")
