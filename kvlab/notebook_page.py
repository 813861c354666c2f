"""From an executed notebook to its page. The shell is the reports' own, and no code is shown."""

from __future__ import annotations

import copy
import re
from typing import Any

from kvlab import i18n, report
from kvlab.report.display import FRAME, MARK
from kvlab.report.layout import TEMPLATES

Notebook = Any


def of_notebook(
    notebook: Notebook, failures: list[dict[str, Any]], name: str, lang: str | None
) -> str:
    """The page of an executed notebook: a banner if it failed, a report, or text and outputs."""
    if failures:
        return _failed(notebook, failures, name, lang or _language(notebook))
    marks = [mark for mark, _ in _marked(notebook)]
    front: dict[str, Any] = next((mark["page"] for mark in marks if "page" in mark), {})
    if front:
        parts = [html for mark, html in _marked(notebook) if "section" in mark]
        return report.page("\n".join(map(_unframed, parts)), **front)
    body = _export(notebook, results=True)
    return report.page(body, title=_title(notebook, name), lang=lang or "en", genre="notebook")


def _failed(notebook: Notebook, failures: list[dict[str, Any]], name: str, lang: str) -> str:
    """The page of a notebook that did not reach its end: what happened, and no result at all."""
    text = i18n.text(lang)
    title = text("notebook.failed.title", name=name)
    lines = [
        text.html("notebook.failed.cell", number=failure["cell"], what=_what(failure, text))
        for failure in failures
    ]
    body = _export(_only_failed(notebook), results=False, banner=title, lines=lines, text=text)
    return report.page(body, title=title, lang=lang, genre="notebook")


def _only_failed(notebook: Notebook) -> Notebook:
    """The notebook with the outputs of the failed cells alone: what others say is no result."""
    kept = copy.deepcopy(notebook)
    for cell in kept.cells:
        outputs = cell.get("outputs", [])
        died = cell.metadata.get(MARK, {}).get("died")
        if outputs and not died and not any(out.output_type == "error" for out in outputs):
            cell.outputs = []
    return kept


def _what(failure: dict[str, Any], text: i18n.Text) -> str:
    known = {"died": "notebook.failed.died", "never ran": "notebook.failed.never_ran"}
    key = known.get(failure["what"])
    return text(key) if key else str(failure["what"])


def _export(notebook: Notebook, **values: Any) -> str:
    """The notebook's body by our own nbconvert template."""
    from nbconvert import HTMLExporter

    make: Any = HTMLExporter
    exporter = make(
        template_name="notebook",
        extra_template_basedirs=[str(TEMPLATES)],
        exclude_anchor_links=True,
    )
    resources = {"kvlab": {"mark": MARK, **values}}
    body, _ = exporter.from_notebook_node(notebook, resources=resources)
    return str(body).strip()


def _marked(notebook: Notebook) -> list[tuple[dict[str, Any], str]]:
    """The outputs that a report wrote: their marks and their HTML."""
    return [
        (output["metadata"][MARK], output["data"].get("text/html", ""))
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if MARK in output.get("metadata", {})
    ]


def _unframed(html: str) -> str:
    """A section without the frame that gives it its style inside a notebook."""
    return FRAME.sub(r"\1", html)


def _language(notebook: Notebook) -> str:
    """The language that a notebook was asked for, or English."""
    asked = notebook.metadata.get("papermill", {}).get("parameters", {}).get("lang")
    for mark, _ in _marked(notebook):
        asked = mark.get("page", {}).get("lang", asked)
    return asked if asked in i18n.LANGUAGES else "en"


def _title(notebook: Notebook, name: str) -> str:
    """The first heading of a notebook."""
    for cell in notebook.cells:
        heading = re.search(r"^#\s+(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown" and heading:
            return heading[1].strip()
    return name
