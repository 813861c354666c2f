"""The page of a comparison: two runs side by side, with what differs in their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab import i18n
from kvlab.i18n import Text
from kvlab.report import layout
from kvlab.report.source import STATUSES, slug

Result = Mapping[str, Any]


def write(result: Result, path: Path, *, lang: str = "en") -> Path:
    """The path of the page that was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(result, lang=lang), encoding="utf-8")
    return path


def render(result: Result, *, lang: str = "en") -> str:
    """The comparison as an HTML page; without figures when a run is invalid."""
    text = i18n.text(lang)
    body = layout.template("comparison.html.j2").render(
        runs=list(zip(result["runs"], _verdicts(result, text), strict=True)),
        same_host=result["same_host"],
        settings=[
            {"name": key, "first": str(both["first"]), "second": str(both["second"])}
            for key, both in result["settings"].items()
        ],
        rows=list(_rows(result, text)),
        t=text.html,
        p=text,
    )
    return layout.page(body, title=text("compare.title"), lang=lang, genre="comparison")


def _verdicts(result: Result, text: Text) -> list[dict[str, str]]:
    found = [one["status"] for one in result["verdicts"]]
    known = [status if status in STATUSES else "invalid" for status in found]
    return [
        {"case": slug(status), "name": text(f"verdict.{slug(status)}.name")} for status in known
    ]


def _rows(result: Result, text: Text) -> Iterator[dict[str, str]]:
    """The medians of each arm and the speedups; nothing for an invalid run."""
    for arm in result.get("arms", ()):
        first, second = arm["median_ms"]
        name = " / ".join(dict.fromkeys(_arm(one, text) for one in arm["arms"]))
        yield {
            "name": text("compare.median", arm=name),
            "first": text.milliseconds(first),
            "second": text.milliseconds(second),
            "ratio": _interval(arm.get("ratio"), text),
        }
    speedups: Sequence[Any] = result.get("speedup", ())
    if speedups:
        one, other = (_interval(speedup, text) for speedup in speedups)
        yield {"name": text("compare.speedup"), "first": one, "second": other, "ratio": "–"}


def _arm(name: str, text: Text) -> str:
    key = {"baseline": "arm.a", "lmcache": "arm.b", "control": "arm.control"}.get(name)
    return text(key) if key else name


def _interval(found: Any, text: Text) -> str:
    if not found or found.get("value") is None:
        return text("word.not_measured")
    if not found.get("ci95"):
        return text.ratio(found["value"])
    low, high = map(text.ratio, found["ci95"])
    return f"{text.ratio(found['value'])} [{text.span(low, high)}]"
