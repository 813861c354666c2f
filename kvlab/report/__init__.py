"""Reports from one summary: two genres, three languages, pages that open anywhere.

``report.write(report.load(run), folder, lang="tr")`` writes a page; ``report.show(run, lang="tr")``
shows the same sections in a notebook.
"""

from __future__ import annotations

from kvlab.report.display import show
from kvlab.report.layout import Section, genre_of, page, render, sections, write
from kvlab.report.run_facts import load, load_all, with_manifest

__all__ = [
    "Section",
    "genre_of",
    "load",
    "load_all",
    "page",
    "render",
    "sections",
    "show",
    "with_manifest",
    "write",
]
