"""The other experiments of a reproduction, and the A/B's own bill: a section each. Pure.

A template ``experiments/<name>.html.j2`` reads one ``Other`` as ``x``; its texts stand in the
catalogue's file of the same name. A number is shown only when the experiment's own evidence allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from kvlab.i18n import Text
from kvlab.report.numbers import Missing, Number, Shown, sample
from kvlab.report.published import dgx_spark
from kvlab.report.source import EXPERIMENTS, Source, Summary, slug


class Other(Source):
    """One experiment's summary, with its numbers written and bound to the rows of its table."""

    def __init__(self, summary: Summary, text: Text):
        super().__init__(summary, text)
        self.experiment = str(summary.get("experiment", ""))
        self.key = "revisit" if "revisit" in summary else slug(self.experiment)
        self.template = f"experiments/{self.key}.html.j2"

    @property
    def case(self) -> str:
        """The status as a key of the catalogue."""
        return slug(self.status)

    @property
    def checks(self) -> list[dict[str, Any]]:
        """The invariants, failing and unknown ones first."""
        rank = {False: 0, None: 1, True: 2}
        found = [dict(check) for check in self.at("invariants") or []]
        for check in found:
            check["state"] = {False: "fails", None: "unknown", True: "holds"}[check.get("holds")]
        return sorted(found, key=lambda check: rank[check.get("holds")])

    @property
    def published(self) -> dict[str, Any]:
        """The figures of the DGX Spark report, which stand beside a run's own as reference."""
        return dgx_spark()

    def said(self, prefix: str, *path: Any, **values: Any) -> Markup:
        """The sentence for a word of the summary, such as an answer; "unknown" for a new one."""
        return self.named(prefix, str(self.at(*path)), **values)

    def named(self, prefix: str, name: str, **values: Any) -> Markup:
        """The sentence for a name, such as an arm's; "unknown" for one without a sentence."""
        key = f"{prefix}.{slug(name)}"
        return self.text.html(key if self.text.has(key) else "word.unknown", **values)

    def ms(self, *path: Any) -> Shown:
        """Milliseconds at a path of the summary."""
        return self._show(path, self.text.milliseconds)

    def s(self, *path: Any) -> Shown:
        """Seconds at a path of the summary."""
        return self._show(path, self.text.seconds)

    def short_s(self, *path: Any) -> Shown:
        """A few seconds at a path of the summary, with two decimals."""
        return self._show(path, lambda value: self.text.seconds(value, 2))

    def ratio(self, *path: Any) -> Shown:
        """A ratio, as ``3.26×``."""
        return self._show(path, self.text.ratio)

    def share(self, *path: Any) -> Shown:
        """A share of 1 as a percentage with one digit."""
        return self._show(path, lambda value: self.text.percent(value, 1))

    def count(self, *path: Any) -> Shown:
        """A whole number."""
        return self._show(path, self.text.number)

    def nat(self, *path: Any) -> Shown:
        """A difference of log-probabilities."""
        return self._show(path, lambda v: f"{self.text.number(v, 4 if v else 0)} nat")

    def size(self, *path: Any) -> Shown:
        """A number of bytes."""
        return self._show(path, self.text.byte_size)

    def rate(self, *path: Any) -> Shown:
        """Bytes per second, in 10^9 of them."""
        return self._show(path, lambda value: f"{self.text.number(value, 3)} GB/s")

    def per_second(self, *path: Any) -> Shown:
        """Something per second, with one digit."""
        return self._show(path, lambda value: self.text.number(value, 1))

    def drawn(self) -> dict[str, Markup] | None:
        """The experiment's figure in both widths; None where it has none, or may not show it."""
        from kvlab import other_figures

        draw = other_figures.OF_EXPERIMENTS.get(self.experiment)
        if draw is None or not self.publishable:
            return None
        return {
            "wide": Markup(draw(self.summary, self.text, "wide")),  # noqa: S704 - our own SVG
            "narrow": Markup(draw(self.summary, self.text, "narrow")),  # noqa: S704 - our own SVG
        }

    def span(self, write: str, *path: Any) -> Shown:
        """A pair, such as an interval or a range, written by the method named ``write``."""
        one: Callable[..., Shown] = getattr(self, write)
        if not isinstance(self.at(*path), list | tuple):
            return one(*path)
        low, high = one(*path, 0), one(*path, 1)
        if isinstance(low, Missing) or isinstance(high, Missing):
            return low
        return Number(self.text.span(low.value, high.value), low.row, low.title)

    def _show(self, path: tuple[Any, ...], write: Callable[[Any], str]) -> Shown:
        if not self.publishable:
            return Missing(self.text("word.withheld"))
        value = self.at(*path)
        if value is None:
            return Missing(self.text("word.not_measured"))
        return Number(write(value), f"x-{self.key}", self._title(".".join(map(str, path))))

    def _title(self, path: str) -> str:
        """Where a number comes from, shown on hover."""
        return self.text("other.number", path=path, run=self.run)


class Bill(Other):
    """The bill of the A/B itself: part of its summary, withheld together with its headline."""

    def __init__(self, summary: Summary, text: Text):
        super().__init__({**summary, "experiment": "bill"}, text)

    def _title(self, path: str) -> str:
        return self.text("number.title", formula=path, count=sample(self), run=self.run)


def others(summary: Summary, text: Text) -> dict[str, Other]:
    """The other experiments that came with a summary, by name, in the reports' order."""
    given = summary.get("others") or {}
    return {name: Other(given[name], text) for name in EXPERIMENTS if name in given}
