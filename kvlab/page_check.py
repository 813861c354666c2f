"""Whether a report's page still says what its runs say: the numbers in it, and every byte of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from kvlab import __version__, report, verify
from kvlab.errors import RunFolderError, UsageError
from kvlab.report.source import without_headline
from kvlab.rundir import RunDir, from_home
from kvlab.verify import Difference

RUN_NAME = re.compile(r"\w[\w.-]*")


def check(page: Path, runs: Path) -> list[Difference]:
    """Every difference between a page and what the runs below ``runs`` give.

    The runs are verified as well. The sentences are compared only with those of the kvlab that made
    the page: another version may say them otherwise. UsageError when the page is no report.
    """
    seen = _read(page)
    missing, folders = _folders(seen.summary, from_home(runs))
    if missing:
        return [Difference(page.name, f"{one} is not below {runs}") for one in missing]
    found = [
        Difference(f"{folder.id} {difference.where}", difference.what)
        for folder in folders
        for difference in verify.verify(folder)
    ]
    main, *others = folders
    told = report.load(main, others)
    computed = json.loads(json.dumps(without_headline(told)))
    found += [
        Difference(f"{page.name} {where}", what)
        for where, what in verify.compare(seen.summary, computed)
    ]
    if seen.version == __version__:
        found += _text(page, report.render(told, genre=seen.genre, lang=seen.lang))
    return found


def _folders(summary: dict[str, Any], runs: Path) -> tuple[list[str], list[RunDir]]:
    """The runs that a page names and that are not there, and the folders of the others."""
    names = _names(summary)
    missing = [name for name in names if not (runs / name / "manifest.json").is_file()]
    return missing, [RunDir.open(runs / name) for name in names if name not in missing]


def _names(summary: dict[str, Any]) -> list[str]:
    others = summary.get("others") or {}
    return [str(one.get("run")) for one in (summary, *others.values())]


def _text(page: Path, rendered: str) -> Iterator[Difference]:
    """The first line in which the page differs from the report of its runs."""
    stands = page.read_text(encoding="utf-8").splitlines()
    given = rendered.splitlines()
    for number, (one, other) in enumerate(zip(stands, given, strict=False), start=1):
        if one != other:
            yield Difference(f"{page.name} line {number}", f"says {_cut(one)}, not {_cut(other)}")
            return
    if len(stands) != len(given):
        yield Difference(page.name, f"has {len(stands)} lines, the report has {len(given)}")


def _cut(line: str) -> str:
    plain = line.strip()
    return repr(plain if len(plain) <= 60 else f"{plain[:60]}…")


class _Page(HTMLParser):
    """What a page says of itself: language, genre, version of kvlab, and the summary in it."""

    def __init__(self) -> None:
        super().__init__()
        self.lang = ""
        self.genre = ""
        self.version = ""
        self.json = ""
        self._inside = False

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.json)
        return found

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "html":
            self.lang = given.get("lang", "").split("-")[0]
        elif tag == "main":
            self.genre = given.get("class", "").removeprefix("kvlab-report").strip()
        elif tag == "meta" and given.get("name") == "generator":
            self.version = given.get("content", "").removeprefix("kvlab").strip()
        self._inside = tag == "script" and given.get("id") == "kvlab-summary"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.json += data


def _read(page: Path) -> _Page:
    seen = _Page()
    try:
        seen.feed(page.read_text(encoding="utf-8"))
        names = _names(seen.summary)
    except OSError as error:
        raise RunFolderError(
            f"cannot read {page}: {error.strerror}", hint="check the path"
        ) from error
    except (ValueError, AttributeError):
        names = []
    if not names or not all(RUN_NAME.fullmatch(name) for name in names):
        raise UsageError(
            f"{page} is no report of kvlab: no summary of a run is embedded in it",
            hint="give a page that `kvlab report` or `make reproduce` wrote",
        )
    return seen
