"""A run as tidy tables, for other programs: requests, counters, events, figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.errors import UsageError
from kvlab.rundir import RunDir
from kvlab.summary import summarise
from kvlab.units import ns_to_ms

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet")


def write(run: RunDir, folder: Path, fmt: str) -> list[Path]:
    """The files written into the folder, one for each table."""
    if fmt not in FORMATS:
        raise UsageError(f"there is no format {fmt!r}", hint=f"choose from {', '.join(FORMATS)}")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, table in tables(run).items():
        path = folder / f"{name}.{fmt}"
        if fmt == "csv":
            table.to_csv(path, index=False)
        else:
            table.to_parquet(path, index=False)
        written.append(path)
    return written


def tables(run: RunDir) -> dict[str, pd.DataFrame]:
    """The run's tables by name; each row starts with the run's id. Missing values are null.

    ``requests``: one row for each request, its record and ``ttft_ms``. ``counters``: one row for
    each series of each reading. ``events``: one row for each event, details as JSON. ``figures``:
    one row for each value of the summary, by its path, as number or as text.
    """
    import pandas as pd

    rows = {
        "requests": _requests(run),
        "counters": _counters(run),
        "events": _events(run),
        "figures": _figures(summarise(run)),
    }
    found = {}
    for name, lines in rows.items():
        table = pd.DataFrame(list(lines)).convert_dtypes()
        table.insert(0, "run", run.id)
        found[name] = table
    return found


def _requests(run: RunDir) -> Iterator[dict[str, Any]]:
    for record in run.requests():
        row = dataclasses.asdict(record)
        row["top_logprobs"] = row["top_logprobs"] and json.dumps(row["top_logprobs"])
        yield {**row, "ttft_ms": None if record.ttft_ns is None else ns_to_ms(record.ttft_ns)}


def _counters(run: RunDir) -> Iterator[dict[str, Any]]:
    for scrape in run.scrapes():
        where = {
            "scenario": scrape.scenario,
            "repeat": scrape.repeat,
            "boundary": scrape.boundary,
            "source": scrape.source,
            "at_ns": scrape.at_ns,
        }
        for series, value in (scrape.samples or {}).items():
            yield {**where, "series": series, "value": value, "error": None}
        if scrape.samples is None:
            yield {**where, "series": None, "value": None, "error": scrape.error}


def _events(run: RunDir) -> Iterator[dict[str, Any]]:
    for event in run.events():
        row = dataclasses.asdict(event)
        yield {**row, "detail": json.dumps(row["detail"], ensure_ascii=False)}


def _figures(value: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """The leaves of the summary; a list's places are part of the path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _figures(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _figures(inner, f"{path}[{place}]")
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        yield {
            "path": path,
            "value": float(value) if number else None,
            "text": None if number or value is None else str(value),
        }
