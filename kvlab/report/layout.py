"""From one summary to sections, and from sections to a page that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jinja2
from markupsafe import Markup

from kvlab import __version__, i18n
from kvlab.errors import UsageError
from kvlab.i18n import Text
from kvlab.report.evidence_rows import TIERS
from kvlab.report.others import Other
from kvlab.report.published import dgx_spark
from kvlab.report.source import is_other
from kvlab.report.view import View

Genre = Literal["technical", "article"]
Summary = dict[str, Any]

TEMPLATES = Path(__file__).parent / "templates"
SECTIONS: dict[str, tuple[str, ...]] = {
    "technical": (
        "head",
        "verdict",
        "contents",
        "summary",
        "method",
        "setup",
        "results",
        "discussion",
        "checks",
        "limits",
        "sources",
        "bill",
        "predicted",
        "data",
    ),
    "article": (
        "head",
        "verdict",
        "contents",
        "answer",
        "why",
        "how",
        "results",
        "evidence",
        "bill",
        "predicted",
        "storage",
        "limits",
        "reproduce",
        "questions",
        "provenance",
        "data",
    ),
}
SHARED = ("verdict", "contents", "bill", "predicted", "data")
"""Sections that both genres take from ``parts``."""
NUMBERED = ("method", "setup", "results", "discussion", "checks", "limits", "sources")
"""The sections that the technical report numbers, from 1."""
DEFAULT_GENRE = {"tr": "technical", "zh": "article", "en": "technical"}


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report: its anchor, its heading as plain text, and its HTML."""

    id: str
    title: str
    html: str


def genre_of(lang: str, genre: str | None) -> str:
    """The genre asked for, or the one that a language's readers expect."""
    chosen = genre or DEFAULT_GENRE.get(lang, "technical")
    if chosen not in SECTIONS:
        raise UsageError(
            f"there is no report genre {chosen!r}", hint=f"choose from {', '.join(SECTIONS)}"
        )
    return chosen


def sections(summary: Summary, genre: str | None = None, lang: str = "en") -> list[Section]:
    """The parts of the report in their order; each stands for itself."""
    text, genre = i18n.text(lang), genre_of(lang, genre)
    if is_other(summary):
        return [_alone(summary, text)]
    seen = View(summary, text, genre)
    titles = {name: _title(name, genre, seen) for name in SECTIONS[genre]}
    contents = [(n, title) for n, title in titles.items() if n not in ("head", "contents", "data")]
    return [
        Section(name, titles[name], _section(name, genre, seen, titles[name], contents))
        for name in SECTIONS[genre]
    ]


def render(summary: Summary, genre: str | None = None, lang: str = "en") -> str:
    """The whole report as one HTML page that asks for nothing from anywhere."""
    parts = sections(summary, genre=genre, lang=lang)
    return page(
        "\n".join(part.html for part in parts),
        title=parts[0].title,
        lang=lang,
        genre=genre_of(lang, genre),
    )


def write(summary: Summary, folder: Path, *, lang: str = "en", genre: str | None = None) -> Path:
    """The path of the page that was written into the folder: ``report-<lang>[-<genre>].html``."""
    suffix = "" if genre in (None, DEFAULT_GENRE.get(lang)) else f"-{genre}"
    path = folder / f"report-{lang}{suffix}.html"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(render(summary, genre=genre, lang=lang), encoding="utf-8")
    return path


def page(body: str, *, title: str, lang: str, genre: str) -> str:
    """The page shell around HTML that is already safe."""
    text = i18n.text(lang)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            body=Markup(body),  # noqa: S704 - built by autoescaping templates
            title=title,
            description=text("page.description"),
            text=text,
            genre=genre,
            css=Markup(css()),  # noqa: S704 - our own file
            script=Markup(script()),  # noqa: S704 - our own file
            script_hash=Markup(f"'sha256-{_digest(script())}'"),  # noqa: S704
            version=__version__,
        )
    )


def template(name: str) -> jinja2.Template:
    """A template of a page's body, which escapes every value."""
    return _environment().get_template(name)


@lru_cache(maxsize=1)
def css() -> str:
    """The style sheet of every page."""
    return (TEMPLATES / "page.css").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def script() -> str:
    """The script of every page; the page allows no other, by its hash."""
    return (TEMPLATES / "page.js").read_text(encoding="utf-8")


def _digest(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _alone(summary: Summary, text: Text) -> Section:
    """The section of an experiment whose run is shown by itself."""
    one = Other(summary, text)
    title = text(f"{one.key}.title")
    html = (
        _environment()
        .get_template("parts/alone.html.j2")
        .render(x=one, v=one, t=text.html, p=text, title=title, version=__version__)
    )
    return Section(one.key, title, html.strip())


def _title(name: str, genre: str, seen: View) -> str:
    if name == "head":
        return seen.headline
    if name in SHARED:
        return seen.text(f"{'page' if name == 'contents' else name}.{_shared_key(name)}")
    title = seen.text(_title_key(name, genre, seen), speedup=str(seen.n["speedup"]))
    if genre == "technical" and name in NUMBERED:
        return f"{NUMBERED.index(name) + 1}. {title}"
    return title


def _shared_key(name: str) -> str:
    return "contents" if name == "contents" else "title"


def _title_key(name: str, genre: str, seen: View) -> str:
    """A heading that states a gain is used only when the gain was proven."""
    key = f"{genre}.{name}.title"
    if seen.text.has(f"{key}.neutral"):
        return f"{key}.{'proven' if seen.gain_proven else 'neutral'}"
    return key


def _section(name: str, genre: str, seen: View, title: str, contents: list[tuple[str, str]]) -> str:
    folder = "parts" if name in SHARED else genre
    return (
        _environment()
        .get_template(f"{folder}/{name}.html.j2")
        .render(
            v=seen,
            t=seen.text.html,
            p=seen.text,
            title=title,
            contents=contents,
            tiers=TIERS,
            version=__version__,
            draw=_drawer(seen),
        )
        .strip()
    )


def _drawer(seen: View) -> Callable[[str], dict[str, Markup] | None]:
    """Draws a figure by name in both widths; None when the run has no data for it."""

    def draw(name: str) -> dict[str, Markup] | None:
        make = _figure(name, seen.summary, seen.text)
        if make is None or (seen.control and name == "speedup"):
            return None
        return {width: Markup(make(width)) for width in ("wide", "narrow")}  # noqa: S704

    return draw


def _figure(name: str, summary: Summary, text: Text) -> Callable[[str], str] | None:
    from kvlab import figures, sizing_figures

    if name == "predicted":
        return lambda width: sizing_figures.predicted(summary, text, width)  # type: ignore[arg-type]
    needs = {"speedup": "speedup", "served": "served_tokens"}.get(name, "ttft_series_ms")
    if not summary.get(needs):
        return None
    if name == "speedup":
        reference = dgx_spark()["speedup"]
        return lambda width: figures.speedup(summary, text, reference, width)  # type: ignore[arg-type]
    draw = {"order": figures.ttft_by_order, "ecdf": figures.ecdf, "served": figures.served}[name]
    return lambda width: draw(summary, text, width)  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
    )
