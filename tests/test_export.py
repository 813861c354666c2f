"""A run as tables: every record is a row, and what is missing stays missing."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from kvlab import cli, export, summary
from kvlab.errors import UsageError
from kvlab.rundir import RunDir
from tests.builders import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("fmt", export.FORMATS)
def test_every_record_is_a_row(run: RunDir, fmt: str, tmp_path: Path) -> None:
    paths = export.write(run, tmp_path, fmt)
    read = {"csv": pd.read_csv, "parquet": pd.read_parquet}[fmt]
    tables = {path.stem: read(path) for path in paths}
    assert len(tables["requests"]) == len(run.requests())
    assert len(tables["events"]) == len(run.events())
    assert len(tables["counters"]) == sum(len(s.samples or {"": 0}) for s in run.scrapes())
    assert all((table["run"] == run.id).all() for table in tables.values())
    first, record = tables["requests"].iloc[0], run.requests()[0]
    assert first["ttft_ms"] == pytest.approx((record.ttft_ns or 0) / 1e6)


def test_every_number_of_the_summary_is_a_figure(run: RunDir) -> None:
    figures = export.tables(run)["figures"].set_index("path")
    told = summary.summarise(run)
    assert figures.loc["speedup.value", "value"] == told["speedup"]["value"]
    assert figures.loc["speedup.ci95[1]", "value"] == told["speedup"]["ci95"][1]
    assert figures.loc["verdict.status", "text"] == told["verdict"]["status"]
    assert pd.isna(figures.loc["verdict.status", "value"])


def test_stamps_stay_whole_numbers_where_some_are_missing(run: RunDir) -> None:
    table = export.tables(run)["requests"]
    assert str(table["sent_ns"].dtype) == "Int64"
    assert table["error"].isna().all()


def test_another_format_is_refused(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="xlsx"):
        export.write(run, tmp_path, "xlsx")


def test_the_command_names_its_files(run: RunDir, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["export", str(run.path), "--out", str(tmp_path / "t")])
    assert done.exit_code == 0
    assert [Path(line).name for line in done.output.split()] == [
        *("requests.csv", "counters.csv", "events.csv", "figures.csv")
    ]
