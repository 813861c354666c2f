"""A report inside a notebook: one HTML output per section, marked so that a page can be made."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from kvlab.report.layout import css, genre_of, sections
from kvlab.report.run_facts import load
from kvlab.rundir import RunDir

MARK = "kvlab"
"""The key of an output's metadata that says which part of a report it is."""
FRAME = re.compile(r'\A<div class="kvlab-report \w+">(.*)</div>\Z', re.DOTALL)


def show(
    run: RunDir | Path | str | dict[str, Any],
    *,
    others: Iterable[Path | str] = (),
    lang: str = "en",
    genre: str | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Display a run's report section by section, or ``only`` some sections of it by their ids.

    ``others`` are runs of other experiments. A summary may be given instead of a run. A notebook
    that shows a whole report becomes, as a page, that report.
    """
    from IPython.display import publish_display_data

    publish: Any = publish_display_data
    summary = run if isinstance(run, dict) else load(run, others)
    chosen = genre_of(lang, genre)
    parts = sections(summary, genre=chosen, lang=lang)
    front = {"title": parts[0].title, "lang": lang, "genre": chosen}
    publish(
        {"text/html": f"<style>{css()}</style>", "text/plain": parts[0].title},
        {MARK: {"style": True} if only else {"style": True, "page": front}},
    )
    for part in parts:
        if only and part.id not in only:
            continue
        framed = f'<div class="kvlab-report {chosen}">{part.html}</div>'
        mark = {"part": part.id} if only else {"section": part.id}
        publish({"text/html": framed, "text/plain": part.title}, {MARK: mark})
