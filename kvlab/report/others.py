"""The other experiments of a reproduction: a section each, beside the two-round A/B. Pure.

A template ``experiments/<name>.html.j2`` reads one ``Other`` as ``x``; its texts stand in the
catalogue's file of the same name. A number is shown only when the experiment's own evidence allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvlab.i18n import Text
from kvlab.report.numbers import Missing, Number, Shown
from kvlab.report.source import EXPERIMENTS, Source, Summary, slug


class Other(Source):
    """One experiment's summary, with its numbers written and bound to the rows of its table."""

    def __init__(self, summary: Summary, text: Text):
        super().__init__(summary, text)
        self.experiment = str(summary.get("experiment", ""))
        self.key = slug(self.experiment)
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

    def ms(self, *path: Any) -> Shown:
        """Milliseconds at a path of the summary."""
        return self._show(path, self.text.milliseconds)

    def s(self, *path: Any) -> Shown:
        """Seconds at a path of the summary."""
        return self._show(path, self.text.seconds)

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
        title = self.text("other.number", path=".".join(map(str, path)), run=self.run)
        return Number(write(value), f"x-{self.key}", title)


def others(summary: Summary, text: Text) -> dict[str, Other]:
    """The other experiments that came with a summary, by name, in the reports' order."""
    given = summary.get("others") or {}
    return {name: Other(given[name], text) for name in EXPERIMENTS if name in given}
