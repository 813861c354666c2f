"""A number as a report shows it: written by the language's rules, and bound to its source."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from kvlab.i18n import Text


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
    row: str = ""

    def __str__(self) -> str:
        return self.value

    def __bool__(self) -> bool:
        return False

    def __html__(self) -> Markup:
        return Markup('<span class="missing">{}</span>').format(self.value)


Shown = Number | Missing


class Numbers:
    """Makes the numbers of one page, each with its row, its formula and its run."""

    def __init__(self, text: Text, run: str, count: str):
        self.text = text
        self.run = run
        self.count = count

    def show(self, written: str | None, row: str, formula: str) -> Shown:
        """The number as written; "not measured" when there is none."""
        if written is None:
            return Missing(self.text("word.not_measured"))
        title = self.text(
            "number.title",
            formula=self.text(f"formula.{formula}"),
            count=self.count,
            run=self.run,
        )
        return Number(written, row, title)

    def withheld(self) -> Missing:
        """What stands in the place of a number that the evidence does not allow."""
        return Missing(self.text("word.withheld"))

    def tag(self, row: str) -> Markup:
        """The mark after a number of the article: it names the run and links to the row."""
        return Markup('<a class="source" href="#{}">{}</a>').format(
            row, self.text("article.tag", run=self.run)
        )
