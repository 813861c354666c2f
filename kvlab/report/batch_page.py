"""The page of a batch: what each setting changed, every visit, and what did not come to its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvlab import batch_figures, i18n
from kvlab.i18n import Text
from kvlab.report import layout
from kvlab.report.source import STATUSES, slug

Told = Mapping[str, Any]


def write(told: Told, folder: Path, *, lang: str = "en") -> Path:
    """The path of the page in the batch's folder."""
    path = folder / f"batch-{lang}.html"
    path.write_text(render(told, lang=lang), encoding="utf-8")
    return path


def render(told: Told, *, lang: str = "en") -> str:
    """The batch as an HTML page."""
    text = i18n.text(lang)
    body = layout.template("batch.html.j2").render(
        b=told,
        effects=[_effect(one, text) for one in told["effects"]],
        rows=[_row(one, told["varying"], text) for one in told["rows"]],
        drawn=_drawn(told, text),
        t=text.html,
        p=text,
    )
    return layout.page(body, title=told["title"], lang=lang, genre="batch")


def _drawn(told: Told, text: Text) -> dict[str, Markup] | None:
    """The figure of one machine's visits in both widths; None without a speedup to show."""
    rows = [row for row in told["rows"] if row["speedup"] is not None]
    if not rows or not told["varying"] or len(told["hosts"]) != 1:
        return None
    return {
        "wide": Markup(batch_figures.settings(rows, told["varying"], text, "wide")),  # noqa: S704
        "narrow": Markup(batch_figures.settings(rows, told["varying"], text, "narrow")),  # noqa: S704
    }


def _effect(one: Told, text: Text) -> dict[str, str]:
    ratio = one.get("ratio")
    shown = text("word.not_measured")
    answer = text("batch.answer.unknown")
    if ratio is not None:
        low, high = one["ci95"]
        shown = f"{text.ratio(ratio)} [{text.span(text.ratio(low), text.ratio(high))}]"
        answer = text("batch.answer.open" if low <= 1 <= high else "batch.answer.differs")
    return {
        "setting": one["setting"],
        "values": f"{one['first']} / {one['second']}",
        "measure": text(f"batch.measure.{one['measure']}"),
        "ratio": shown,
        "pairs": text.number(one["pairs"]),
        "answer": answer,
        "host": str(one["host"])[:12],
    }


def _row(one: Told, varying: list[str], text: Text) -> dict[str, Any]:
    status = one["verdict"] if one["verdict"] in STATUSES else "invalid"
    withheld = text("word.withheld")
    low, high = one["speedup_low"], one["speedup_high"]
    return {
        "turn": text.number(one["pass"]),
        "cell": text.number(one["cell"]),
        "settings": [str(one.get(name, "–")) for name in varying],
        "case": slug(status),
        "verdict": text(f"verdict.{slug(status)}.name"),
        "baseline": _or(one["baseline_ttft_ms"], text.milliseconds, withheld),
        "treated": _or(one["ttft_ms"], text.milliseconds, withheld),
        "speedup": _or(one["speedup"], text.ratio, withheld),
        "interval": "–"
        if low is None or high is None
        else text.span(text.ratio(low), text.ratio(high)),
        "l1": _or(one["served_l1"], text.percent, "–"),
        "l2": _or(one["served_l2"], text.percent, "–"),
        "run": str(one["run"]),
        "host": str(one["host"])[:12],
    }


def _or(value: Any, write: Any, otherwise: str) -> str:
    return otherwise if value is None else str(write(value))
