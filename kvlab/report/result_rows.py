"""The rows of the results table: this run's figures, and the published ones kept beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from kvlab.report.numbers import Missing, Numbers
from kvlab.report.published import dgx_spark
from kvlab.report.source import Source

ARMS = ("baseline", "lmcache")
Three = tuple[Any, Any, Any]
NONE: Three = (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One row: ours in three cells, the published ones in three more. None: there is none."""

    id: str
    label: str
    ours: Three
    reference: Three
    formula: str


def results(source: Source, numbers: Numbers) -> list[ResultRow]:
    """Every row of the results table; a control has no published counterpart."""
    n, repeats = numbers, source.plain("workload", "repeats")
    reference = {} if source.control else _published(source)
    ours: list[tuple[str, Three, str]] = [
        ("median", (n["median_a"], n["median_b"], n["speedup"]), "speedup"),
        ("interval", (None, None, n["ci"]), "interval"),
        ("lower", (None, None, change(source, numbers)), "lower"),
        ("first", (n["first_a"], n["first_b"], n["first"]), "first"),
        ("range", (n["range_a"], n["range_b"], None), "range"),
        ("p90", (n["p90_a"], n["p90_b"], None), "percentile"),
        ("p99", (n["p99_a"], n["p99_b"], None), "percentile"),
    ]
    return [
        ResultRow(
            id=f"r-{name}",
            label=source.text(f"results.row.{name}", repeats=repeats),
            ours=cells,
            reference=reference.get(name, NONE),
            formula=source.text(f"formula.{formula}"),
        )
        for name, cells, formula in ours
    ]


def change(source: Source, numbers: Numbers) -> Missing | Markup:
    """How far the treated arm's median lies below or above the other's, in words."""
    lower = numbers["lower"]
    if isinstance(lower, Missing):
        return lower
    faster = (source.at("speedup", "value") or 1.0) >= 1.0
    return source.text.html("results.lower" if faster else "results.higher", share=lower)


def _published(source: Source) -> dict[str, Three]:
    """The published figures by row, written in the page's language."""
    text, figures = source.text, dgx_spark()
    a, b = (figures["ttft_ms"][arm] for arm in ARMS)
    ms = text.milliseconds

    def span(pair: list[float]) -> str:
        return f"{text.span(text.number(pair[0]), text.number(pair[1]))} ms"

    lower = text("results.lower", share=text.percent(figures["lower_share"]))
    return {
        "median": (ms(a["median"]), ms(b["median"]), text.ratio(figures["speedup"])),
        "lower": (None, None, lower),
        "first": (ms(a["first"]), ms(b["first"]), text.ratio(figures["first_speedup"])),
        "range": (span(a["range"]), span(b["range"]), None),
    }
