"""A report inside a notebook: one HTML output per section, marked so that a page can be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvlab.report.load import load
from kvlab.report.render import css, genre_of, sections
from kvlab.rundir import RunDir

MARK = "kvlab"
"""The key of an output's metadata that says which part of a report it is."""


def show(
    run: RunDir | Path | str | dict[str, Any], *, lang: str = "en", genre: str | None = None
) -> None:
    """Display a run's report, section by section; a summary may be given instead of a run."""
    from IPython.display import publish_display_data

    publish: Any = publish_display_data

    summary = run if isinstance(run, dict) else load(run)
    chosen = genre_of(lang, genre)
    parts = sections(summary, genre=chosen, lang=lang)
    publish(
        {"text/html": f"<style>{css()}</style>", "text/plain": parts[0].title},
        {MARK: {"page": {"title": parts[0].title, "lang": lang, "genre": chosen}}},
    )
    for part in parts:
        framed = f'<div class="kvlab-report {chosen}">{part.html}</div>'
        publish(
            {"text/html": framed, "text/plain": part.title}, {MARK: {"section": part.id}}
        )
