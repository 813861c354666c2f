"""What a setting changed: pairs that differ in nothing else, on one machine, of valid runs only."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvlab import i18n, summary
from kvlab.batch import effects, results, visits
from kvlab.batch import sweep as sweeps
from kvlab.batch.ledger import Ledger
from kvlab.batch.sweep import Sweep, Visit
from kvlab.errors import KvlabError
from kvlab.report import batch_page
from tests.builders import make_run


def row(turn: int, chunk: int, shape: str, **more: Any) -> dict[str, Any]:
    """A visit in which a chunk of 448 takes twice the time, whatever else is set."""
    ttft = 100.0 * (2 if chunk == 448 else 1) * (1.5 if shape == "prefix_suffix" else 1) + turn
    settings = {"cache.chunk_tokens": chunk, "workload.shape": shape}
    return {
        "pass": turn,
        "host": "a",
        "ttft_ms": ttft,
        "speedup": 1000 / ttft,
        **more,
        **settings,
    }


def grid(**more: Any) -> list[dict[str, Any]]:
    shapes = ("identical", "prefix_suffix")
    return [row(*at, **more) for at in itertools.product((1, 2, 3), (224, 448), shapes)]


def found(rows: list[dict[str, Any]], setting: str, measure: str) -> list[dict[str, Any]]:
    told = effects.effects(rows, seed=0)
    return [one for one in told if (one["setting"], one["measure"]) == (setting, measure)]


def test_the_effect_of_a_setting_is_the_ratio_of_its_pairs() -> None:
    (one,) = found(grid(), "cache.chunk_tokens", "ttft_ms")
    assert (one["first"], one["second"], one["pairs"]) == (224, 448, 6)
    assert one["ratio"] == pytest.approx(0.5, rel=0.02)
    assert one["ci95"][0] <= one["ratio"] <= one["ci95"][1] < 1
    (speedup,) = found(grid(), "cache.chunk_tokens", "speedup")
    assert speedup["ratio"] == pytest.approx(2, rel=0.02)


def test_what_has_no_partner_is_in_no_ratio() -> None:
    rows = [one for one in grid() if (one["pass"], one["cache.chunk_tokens"]) != (2, 448)]
    rows += [row(9, 448, "identical", ttft_ms=9e9)]
    (one,) = found(rows, "cache.chunk_tokens", "ttft_ms")
    assert one["pairs"] == 4
    assert one["ratio"] == pytest.approx(0.5, rel=0.02)


def test_an_invalid_run_is_in_no_ratio() -> None:
    rows = grid()
    rows[0] = {**rows[0], "ttft_ms": None, "speedup": None}
    (one,) = found(rows, "cache.chunk_tokens", "ttft_ms")
    assert one["pairs"] == 5


def test_machines_are_never_pooled() -> None:
    rows = [*grid(), *grid(host="b")]
    told = found(rows, "cache.chunk_tokens", "ttft_ms")
    assert [one["host"] for one in told] == ["a", "b"]
    assert [one["pairs"] for one in told] == [6, 6]


def test_a_single_pair_has_no_interval_and_no_ratio() -> None:
    rows = [row(1, 224, "identical"), row(1, 448, "identical")]
    (one,) = found(rows, "cache.chunk_tokens", "ttft_ms")
    assert one["pairs"] == 1
    assert "ratio" not in one


class Made:
    """Visits whose runs are synthetic ones; a larger seed restores more slowly."""

    def __call__(self, sweep: Sweep, visit: Visit, *, folder: Path, runs: Path) -> Path:
        seed = int(visit.cell.settings["workload.seed"])
        if seed == 3:
            raise KvlabError("vLLM did not start")
        fault = "failed request" if seed == 2 else None
        run = make_run(
            runs / visit.key.replace("/", "-"), restored_ms=80.0 + 40 * seed, fault=fault
        )
        summary.conclude(run)
        return run.path


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    place = tmp_path_factory.mktemp("batch")
    sweep = sweeps.Sweep.model_validate(
        {
            "schema": 1,
            "name": "mine",
            "title": "Mine & <others>",
            "profile": "smoke",
            "cells": [{"workload.seed": number} for number in range(4)],
            "passes": 2,
        }
    )
    outcome = visits.start(sweep, batches=place / "batches", runs=place / "runs")
    visits.carry_on(outcome, runs=place / "runs", measure=Made())
    return outcome.ledger


def test_the_table_has_a_row_for_every_visit_that_finished(ledger: Ledger) -> None:
    told = results.conclude(ledger)
    assert len(told["rows"]) == 6
    assert sorted(told["failed"]) == ["1/4", "2/4"]
    invalid = [one for one in told["rows"] if one["verdict"] == "invalid"]
    assert [one["workload.seed"] for one in invalid] == [2, 2]
    assert all(one["speedup"] is None and one["ttft_ms"] is None for one in invalid)
    csv, parquet = results.write_tables(told, ledger.path)
    assert len(pd.read_csv(csv)) == len(pd.read_parquet(parquet)) == 6


@pytest.mark.parametrize("lang", i18n.LANGUAGES)
def test_the_page_shows_effects_visits_and_what_is_missing(ledger: Ledger, lang: str) -> None:
    told, text = results.conclude(ledger), i18n.text(lang)
    page = batch_page.write(told, ledger.path, lang=lang).read_text(encoding="utf-8")
    assert "Mine &amp; &lt;others&gt;" in page
    assert text("batch.incomplete") in page
    assert "vLLM did not start" in page
    assert page.count(text("word.withheld")) == 6
    for one in told["rows"]:
        if one["speedup"] is not None:
            assert text.ratio(one["speedup"]) in page
    assert "<svg" in page


def test_a_run_folder_that_vanished_is_said(ledger: Ledger, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("manifest.json", "visits.jsonl"):
        text = (ledger.path / name).read_text(encoding="utf-8")
        (copy / name).write_text(text.replace("/runs/1-1/", "/runs/none/"), encoding="utf-8")
    told = results.conclude(Ledger.open(copy))
    assert [one["visit"] for one in told["unreadable"]] == ["1/1"]
