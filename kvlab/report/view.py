"""What templates read: a summary's values already written, its rows already labelled. Pure."""

from __future__ import annotations

from typing import Any

from kvlab.i18n import Text
from kvlab.report.evidence_rows import EvidenceRows
from kvlab.report.numbers import Numbers
from kvlab.report.others import Bill, others
from kvlab.report.predicted import Predicted
from kvlab.report.result_rows import change, results
from kvlab.report.run_facts import day_of
from kvlab.report.setup_rows import SetupRows
from kvlab.report.source import COMPLETE, EXPERIMENTS, Source, Summary, slug


class View(Source):
    """One page's view of a summary: ``n`` its numbers, ``e`` its evidence, ``s`` its setup."""

    def __init__(self, summary: Summary, text: Text, genre: str):
        super().__init__(summary, text)
        self.genre = genre
        self.n = Numbers(self)
        self.e = EvidenceRows(self, self.n)
        self.s = SetupRows(self)
        self.results = results(self, self.n)
        self.change: Any = change(self, self.n)
        self.tag = self.n.tag
        self.others = others(summary, text)
        self.bill = Bill(summary, text)
        self.predicted = Predicted(summary, text)
        missing = [slug(name) for name in EXPERIMENTS if name not in self.others]
        self.unmeasured = [*missing, "concurrency"]

    @property
    def gain_proven(self) -> bool:
        """Whether a heading may state that LMCache made it faster."""
        return self.publishable and self.status == "proven" and not self.control

    @property
    def case(self) -> str:
        """The status as a key of the catalogue."""
        return slug(self.status)

    @property
    def headline(self) -> str:
        """The page's title; it holds numbers only when they may be published."""
        case = "control" if self.control and self.publishable else self.case
        return self.text(
            f"{self.genre}.headline.{case}",
            speedup=self.n["speedup"],
            before=self.n["median_a"],
            after=self.n["median_b"],
            profile=self.profile,
        )

    @property
    def month(self) -> str:
        """Month and year in which the run began."""
        day = day_of(self.run)
        return self.text.month(day) if day else self.text("word.not_recorded")

    @property
    def day(self) -> str:
        """The day on which the run began."""
        day = day_of(self.run)
        return self.text.day(day) if day else self.text("word.not_recorded")

    @property
    def unfinished(self) -> bool:
        """Whether the run did not reach its end."""
        return self.at("status") not in COMPLETE

    @property
    def correctness_case(self) -> str:
        """The correctness verdict as a key of the catalogue."""
        case = slug(str(self.at("correctness", "verdict") or "unknown"))
        return case if case in ("pass", "pass_with_ties", "fail") else "unknown"

    @property
    def correctness_word(self) -> str:
        """The correctness verdict of a run whose numbers are shown, in a word."""
        key = f"correctness.word.{self.correctness_case}"
        return self.text(key if self.text.has(key) else "word.unknown")
