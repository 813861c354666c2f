"""The numbers of a report: written by the language's rules, and bound to where they came from.

A headline number is shown only when the evidence allows it; ``Numbers.headline`` is the one place
that knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from kvlab.report.source import Source


@dataclass(frozen=True, slots=True)
class Number:
    """A shown value with the table row that holds it, and how it was computed."""

    value: str
    row: str
    """The id of the table row that the number links to."""
    title: str
    """Formula and sample size, shown on hover."""

    def __str__(self) -> str:
        return self.value

    def __html__(self) -> Markup:
        return Markup('<a class="number" href="#{}" title="{}">{}</a>').format(
            self.row, self.title, self.value
        )


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands where a value was not measured, or may not be published."""

    value: str

    def __str__(self) -> str:
        return self.value

    def __html__(self) -> Markup:
        return Markup('<span class="missing">{}</span>').format(self.value)


Shown = Number | Missing
Write = Callable[[Any], str]


class Numbers:
    """Every number of one page by its name: ``numbers["speedup"]``."""

    def __init__(self, source: Source):
        self.source = source
        self.text = source.text
        self.count = sample(source)
        self._named = {**self._of_both_arms(), **self._of_the_evidence()}
        for letter, arm in zip("ab", source.arms, strict=False):
            self._named |= self._of_one_arm(letter, arm)

    def __getitem__(self, name: str) -> Shown:
        return self._named[name]

    def show(self, value: Any, write: Write, row: str, formula: str) -> Shown:
        """The number as ``write`` writes it; "not measured" when there is none."""
        if value is None:
            return Missing(self.text("word.not_measured"))
        title = self.text(
            "number.title",
            formula=self.text(f"formula.{formula}"),
            count=self.count,
            run=self.source.run,
        )
        return Number(write(value), row, title)

    def headline(self, value: Any, write: Write, row: str, formula: str) -> Shown:
        """The number when the evidence allows it, otherwise "not published"."""
        if not self.source.publishable:
            return Missing(self.text("word.withheld"))
        return self.show(value, write, row, formula)

    def tag(self, row: str) -> Markup:
        """The mark after a number of the article: it names the run and links to the row."""
        return Markup('<a class="source" href="#{}">{}</a>').format(
            row, self.text("article.tag", run=self.source.run)
        )

    def _of_both_arms(self) -> dict[str, Shown]:
        at, headline = self.source.at, self.headline
        first_a, first_b = (at("ttft_ms", arm, "first") for arm in self.source.arms[:2])
        first = first_a / first_b if first_a and first_b else None
        lower = at("speedup", "percent_lower")
        share = None if lower is None else abs(lower) / 100
        return {
            "speedup": headline(at("speedup", "value"), self.text.ratio, "r-median", "speedup"),
            "ci": headline(at("speedup", "ci95"), self._ratios, "r-interval", "interval"),
            "lower": headline(share, self.text.percent, "r-lower", "lower"),
            "first": headline(first, self.text.ratio, "r-first", "first"),
        }

    def _of_one_arm(self, letter: str, arm: str) -> dict[str, Shown]:
        ms, headline = self.text.milliseconds, self.headline
        times = self.source.at("ttft_ms", arm) or {}
        # Round 1 over round 2 of the treated arm is nearly the headline: it is withheld with it.
        show_gain = self.show if letter == "a" else headline
        gain = self.source.at("false_gain", arm, "value")
        return {
            f"median_{letter}": headline(times.get("median"), ms, "r-median", "median"),
            f"first_{letter}": headline(times.get("first"), ms, "r-first", "first"),
            f"range_{letter}": headline(times.get("range"), self._span_ms, "r-range", "range"),
            f"p90_{letter}": headline(times.get("p90"), ms, "r-p90", "percentile"),
            f"p99_{letter}": headline(times.get("p99"), ms, "r-p99", "percentile"),
            f"fill_{letter}": headline(times.get("fill_median"), ms, "e-gain", "median"),
            f"gain_{letter}": show_gain(gain, self.text.ratio, "e-gain", "false_gain"),
        }

    def _of_the_evidence(self) -> dict[str, Shown]:
        at, show = self.source.at, self.show
        restored = ("correctness", "restored_nat")
        return {
            "bound": show(at("workload", "speedup_bound"), self.text.ratio, "e-bound", "bound"),
            "ceiling": show(at("workload", "ceiling_share"), self._share, "e-bound", "ceiling"),
            "residual": show(
                at("conservation", "residual_tokens"), self.text.number, "e-residual", "residual"
            ),
            "floor": show(at("correctness", "floor_nat"), self._nats, "c-floor", "floor"),
            "restored": show(at(*restored, "median"), self._nats, "c-restored", "restored"),
            "restored_max": show(at(*restored, "max"), self._nats, "c-restored", "restored"),
            "tolerance": show(
                at("correctness", "tolerance_nat"), self._nats, "c-tolerance", "tolerance"
            ),
        }

    def _share(self, share: float) -> str:
        return self.text.percent(share, 1)

    def _ratios(self, pair: Any) -> str:
        return self.text.span(self.text.ratio(pair[0]), self.text.ratio(pair[1]))

    def _span_ms(self, pair: Any) -> str:
        low, high = (self.text.number(value, 1) for value in pair)
        return f"{self.text.span(low, high)} ms"

    def _nats(self, value: float) -> str:
        return f"{self.text.number(value, 4 if value else 0)} nat"


def sample(source: Source) -> str:
    """The sample behind the figures of an arm, in words."""
    repeats, contexts = source.at("workload", "repeats"), source.at("workload", "contexts")
    if repeats is None or contexts is None:
        return source.text("word.not_recorded")
    return source.text(
        "number.count",
        repeats=source.text.number(repeats),
        contexts=source.text.number(contexts),
        total=source.text.number(repeats * contexts),
    )
