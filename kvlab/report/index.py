"""The page that lists the reports of a folder: what was measured, with which verdict, and where."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab import i18n
from kvlab.report import layout
from kvlab.report.run_facts import day_of
from kvlab.report.source import get, is_other, publishable, slug, status

NAME = "index.html"
EMBEDDED = re.compile(
    r'<script type="application/json" id="kvlab-summary">(.*?)</script>', re.DOTALL
)
PAGE = re.compile(r"report-(?P<lang>[a-z]{2})(?:-(?P<genre>[a-z]+))?\.html")


@dataclass(frozen=True, slots=True)
class Entry:
    """One report: the summary that its pages hold, and the pages by name."""

    summary: dict[str, Any]
    pages: dict[str, Path]


def write(folder: Path, *, lang: str = "en") -> Path:
    """The path of the folder's index, which lists the reports in it and in the folders below."""
    path = folder / NAME
    path.write_text(render(entries(folder), folder, lang=lang), encoding="utf-8")
    return path


def entries(folder: Path) -> list[Entry]:
    """The reports below the folder, the newest first; a page without a summary is none."""
    found: dict[Path, Entry] = {}
    for page in sorted(folder.rglob("report-*.html")):
        name = PAGE.fullmatch(page.name)
        summary = _embedded(page) if name else None
        if name is None or summary is None:
            continue
        entry = found.setdefault(page.parent, Entry(summary, {}))
        entry.pages[" ".join(filter(None, (name["lang"], name["genre"])))] = page
    return sorted(found.values(), key=lambda entry: str(entry.summary.get("run")), reverse=True)


def render(found: list[Entry], folder: Path, *, lang: str = "en") -> str:
    """The index as an HTML page; links are relative to the folder."""
    text = i18n.text(lang)
    body = layout.template("index.html.j2").render(
        rows=[_row(entry, folder, text) for entry in found], t=text.html, p=text
    )
    return layout.page(body, title=text("index.title"), lang=lang, genre="index")


def _row(entry: Entry, folder: Path, text: i18n.Text) -> dict[str, Any]:
    told = entry.summary
    runs = [told, *(told.get("others") or {}).values()]
    day = day_of(str(told.get("run", "")))
    return {
        "day": text.day(day) if day else text("word.unknown"),
        "run": str(told.get("run", "")),
        "profile": str(told.get("profile", "")),
        "speedup": _speedup(told, text),
        "verdicts": [
            {
                "experiment": str(one.get("experiment", "")),
                "status": slug(status(one)),
                "name": text(f"verdict.{slug(status(one))}.name"),
            }
            for one in runs
        ],
        "pages": [
            {"name": name, "href": page.relative_to(folder).as_posix()}
            for name, page in sorted(entry.pages.items())
        ],
    }


def _speedup(told: dict[str, Any], text: i18n.Text) -> str:
    """The speedup, where it may be published at all; an experiment alone has none."""
    value = get(told, "speedup", "value")
    if is_other(told) or not publishable(told) or not isinstance(value, float | int):
        return text("word.withheld")
    return text.ratio(value)


def _embedded(page: Path) -> dict[str, Any] | None:
    """The summary inside a page; None when it holds none."""
    found = EMBEDDED.search(page.read_text(encoding="utf-8", errors="replace"))
    try:
        summary = json.loads(found[1]) if found else None
    except ValueError:
        return None
    return summary if isinstance(summary, dict) and "run" in summary else None
