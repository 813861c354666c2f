"""The answers of sizing inside a notebook: a sentence and its figure, in the order of asking."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvlab.errors import RunFolderError
from kvlab.sizing import explanation, figures


def show(found: Mapping[str, Any], *names: str) -> None:
    """Display the answers to these questions, each a sentence and, where it has one, its figure."""
    for name in names:
        answer = found["questions"][name]
        _publish(answer["sentence"], figures.of_question(name, dict(answer)))


def show_explanation(found: Mapping[str, Any]) -> None:
    """Display why 1.95x was published, with the figure of both shapes."""
    for sentence in filter(None, explanation.sentences(found["published"])):
        _publish(sentence, None)
    _publish("", figures.explanation(dict(found["published"])))


def run_below(folder: Path | str) -> Path:
    """The run folder itself, or the newest two-round run in a folder of runs."""
    folder = Path(folder)
    if (folder / "manifest.json").is_file():
        return folder
    runs = sorted(path.parent for path in folder.glob("*two-round*/manifest.json"))
    if not runs:
        raise RunFolderError(
            f"{folder} holds no two-round run", hint="give a run folder below data/runs"
        )
    return runs[-1]


def _publish(sentence: str, figure: str | None) -> None:
    from IPython.display import publish_display_data

    publish: Any = publish_display_data
    html = Markup("<p>{}</p>").format(sentence) if sentence else Markup("")
    html += Markup(figure or "")  # noqa: S704 - our own figure
    publish({"text/html": str(html), "text/plain": sentence or "figure"})
