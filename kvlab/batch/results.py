"""What a batch came to, read from its run folders: table, effects, and what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlab import summary
from kvlab.batch import effects, visits
from kvlab.batch.ledger import Ledger
from kvlab.errors import KvlabError
from kvlab.rundir import RunDir


def conclude(ledger: Ledger) -> dict[str, Any]:
    """Everything that the batch's page tells; nothing of it depends on anything but the folders.

    Keys: ``batch``, ``title``, ``experiment``, ``profile``, ``passes``, ``seed``, ``order``,
    ``until_ci`` and ``max_passes`` (the stopping rule, if any), ``rows``, ``effects``, ``varying``,
    ``hosts``, ``failed``, ``missing``, ``left_out``, ``unreadable``, ``retried``.
    """
    sweep = ledger.sweep
    rows, unreadable = [], []
    for visit in ledger.order():
        path = ledger.runs().get(visit.key)
        if path is None:
            continue
        try:
            run = RunDir.open(path)
            told = run.read_summary() or summary.summarise(run)
        except KvlabError as error:
            unreadable.append({"visit": visit.key, "why": error.message})
            continue
        settings = dict(visit.cell.settings)
        rows.append(effects.row(visit.turn, visit.cell.number, settings, told, run.manifest))
    return {
        "batch": ledger.manifest["batch"],
        "title": sweep.title,
        "experiment": sweep.experiment,
        "profile": sweep.profile,
        "passes": max((visit.turn for visit in ledger.order()), default=0),
        "seed": sweep.seed,
        "until_ci": ledger.manifest.get("until_ci"),
        "max_passes": ledger.manifest.get("max_passes") or visits.MAX_PASSES,
        "order": [visit.key for visit in ledger.order()],
        "rows": rows,
        "effects": effects.effects(rows, seed=sweep.seed),
        "varying": effects.varying(rows),
        "hosts": sorted({str(row["host"]) for row in rows}),
        "failed": {key: entry.error for key, entry in ledger.failed().items()},
        "missing": [visit.key for visit in ledger.missing()],
        "left_out": ledger.manifest["left_out"],
        "unreadable": unreadable,
        "retried": sorted(e.key for e in ledger.finished().values() if e.attempt > 1),
    }


def write_tables(told: dict[str, Any], folder: Path) -> list[Path]:
    """The tidy table of the visits, as CSV and as Parquet."""
    import pandas as pd

    table = pd.DataFrame(told["rows"])
    for name in table.columns:
        if table[name].map(lambda value: isinstance(value, list | dict)).any():
            table[name] = table[name].map(str)
    paths = [folder / "table.csv", folder / "table.parquet"]
    table.to_csv(paths[0], index=False)
    table.astype({n: str for n in table.columns if table[n].map(type).nunique() > 1}).to_parquet(
        paths[1], index=False
    )
    return paths
