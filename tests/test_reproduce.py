"""Reproducing without an engine: the failure is said, shown on a page, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab import notebook, reproduce
from kvlab.errors import NotebookFailed, ProfileError


def test_a_failed_notebook_is_an_error_and_its_page_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLAB_ENGINE", str(tmp_path / "none"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a lock of its own, like every test
    with pytest.raises(NotebookFailed, match="10_two_round") as caught:
        reproduce.reproduce("smoke", runs=tmp_path / "runs", reports=tmp_path / "reports")
    (page,) = (tmp_path / "reports").glob("*/10_two_round.html")
    assert str(page) in (caught.value.hint or "")
    html = page.read_text(encoding="utf-8")
    assert "make engine" in html
    assert "<html" in html
    assert not list((tmp_path / "runs").glob("*"))
    assert "10_two_round" in capsys.readouterr().out


def test_a_wrong_profile_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no profile"):
        reproduce.reproduce("smoek", runs=tmp_path / "runs", reports=tmp_path / "reports")
    assert not list(tmp_path.iterdir())


def test_every_experiment_has_its_notebook() -> None:
    for name in (*reproduce.MEASURING.values(), reproduce.SIZING, *reproduce.REPORTS.values()):
        assert notebook.find(name).is_file()


def test_the_outcome_names_verdicts_reasons_folders_and_pages() -> None:
    outcome = reproduce.Outcome(
        summaries={
            "two-round": {
                "experiment": "two-round",
                "verdict": {"status": "invalid", "reasons": ["conservation: 3 tokens"]},
            }
        },
        runs={"two-round": Path("r")},
        failures={"soak": "65_soak did not run to its end"},
        pages=[Path("p.html")],
    )
    assert not outcome.healthy
    assert outcome.text().splitlines() == [
        "two-round: invalid",
        "  - conservation: 3 tokens",
        "  run folder: r",
        "soak: failed",
        "  - 65_soak did not run to its end",
        "page: p.html",
    ]
