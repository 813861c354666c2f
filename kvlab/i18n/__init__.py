"""Text by key in Turkish, Chinese and English, and numbers as each language writes them.

``text = i18n.text("tr")``, then ``text("verdict.title")`` and ``text.percent(0.49)``. Every word
that a report shows stands in the catalogue files beside this one; a missing key is an error, never
silent English. Two marks are read in a catalogue string: ``**strong**`` and `` `code` ``.
"""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache
from importlib import resources
from typing import Any

from babel import Locale
from babel.dates import format_date
from babel.numbers import format_decimal, format_percent, get_decimal_symbol
from markupsafe import Markup, escape

from kvlab import plain_yaml
from kvlab.errors import UsageError
from kvlab.units import GIB

LANGUAGES = ("tr", "zh", "en")
LOCALES = {"tr": "tr", "zh": "zh_Hans_CN", "en": "en"}
TAGS = {"tr": "tr", "zh": "zh-Hans", "en": "en"}
"""What the page's ``lang`` attribute says."""

PLACEHOLDER = re.compile(r"\{(\w+)\}")
_MARKS = (
    (re.compile(r"\*\*(.+?)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"`(.+?)`"), r"<code>\1</code>"),
)


class TextError(LookupError):
    """A key, or a value that its sentence needs, is missing: a fault of kvlab, not of its user."""


class Text:
    """One language: sentences by key, numbers by the language's own rules."""

    def __init__(self, lang: str):
        if lang not in LANGUAGES:
            raise UsageError(
                f"there is no report language {lang!r}", hint=f"choose from {', '.join(LANGUAGES)}"
            )
        self.lang = lang
        self.tag = TAGS[lang]
        self.gap = "" if lang == "zh" else " "
        """What stands between two sentences."""
        self.stop = "\u3002" if lang == "zh" else "."
        """What ends a sentence."""
        self._locale = Locale.parse(LOCALES[lang])
        self.decimal_sign = get_decimal_symbol(self._locale)
        self._sentences = catalogue(lang)

    def __call__(self, key: str, **values: Any) -> str:
        """The sentence as plain text."""
        plain = self.sentence(key).replace("**", "").replace("`", "")
        return _fill(key, plain, {name: str(value) for name, value in values.items()})

    def html(self, key: str, **values: Any) -> Markup:
        """The sentence as HTML: its marks become tags, its values are escaped."""
        marked = str(escape(self.sentence(key)))
        for pattern, tag in _MARKS:
            marked = pattern.sub(tag, marked)
        escaped = {name: str(escape(value)) for name, value in values.items()}
        return Markup(_fill(key, marked, escaped))  # noqa: S704 - every part was escaped above

    def has(self, key: str) -> bool:
        """Whether the catalogue knows the key; for names that come from a run."""
        return key in self._sentences

    def sentence(self, key: str) -> str:
        """The sentence as the catalogue holds it."""
        try:
            return self._sentences[key]
        except KeyError:
            raise TextError(f"the {self.lang} catalogue has no text for {key!r}") from None

    def number(self, value: float, digits: int = 0) -> str:
        """A decimal number with exactly ``digits`` decimals, grouped by thousands."""
        decimals = f".{'0' * digits}" if digits else ""
        return str(format_decimal(value, f"#,##0{decimals}", locale=self._locale))

    def plain_number(self, value: float) -> str:
        """A setting's value with no more decimals than it has."""
        return str(format_decimal(value, "#,##0.######", locale=self._locale))

    def percent(self, share: float, digits: int = 0) -> str:
        """A share of one as a percentage: %49 in Turkish, 49% in Chinese and English."""
        pattern = self._locale.percent_formats[None].pattern.partition(";")[0]
        if digits:
            pattern = pattern.replace("#,##0", f"#,##0.{'0' * digits}")
        return str(format_percent(share, pattern, locale=self._locale))

    def ratio(self, value: float) -> str:
        """A ratio with two decimals, 1,95× or 1.95×; a large one without."""
        return f"{self.number(value, 2 if abs(value) < 100 else 0)}×"

    def span(self, low: str, high: str) -> str:
        """Two values that bound a range."""
        return f"{low}–{high}"

    def milliseconds(self, value: float) -> str:
        """A time in milliseconds with one decimal, and its unit."""
        return f"{self.number(value, 1)} ms"

    def seconds(self, value: float, digits: int = 1) -> str:
        """A time in seconds with its decimals, and its unit."""
        return f"{self.number(value, digits)} s"

    def byte_size(self, count: float) -> str:
        """A byte count in the binary unit that keeps it short."""
        if count < 1 << 20:
            return f"{self.number(count / (1 << 10), 1)} KiB"
        if count < GIB:
            return f"{self.number(count / (1 << 20), 1)} MiB"
        return f"{self.number(count / GIB, 2)} GiB"

    def day(self, day: date) -> str:
        """A date with its month in words."""
        return str(format_date(day, "long", locale=self._locale))

    def month(self, day: date) -> str:
        """Month and year, as a publication date says them."""
        pattern = "y年M月" if self.lang == "zh" else "MMMM y"
        return str(format_date(day, pattern, locale=self._locale))


@lru_cache(maxsize=len(LANGUAGES))
def text(lang: str) -> Text:
    """The texts of one language."""
    return Text(lang)


@lru_cache(maxsize=len(LANGUAGES))
def catalogue(lang: str) -> dict[str, str]:
    """Every sentence of a language by its dotted key."""
    said: dict[str, str] = {}
    folder = resources.files("kvlab.i18n") / lang
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        found = sentences(path.read_text(encoding="utf-8"))
        if twice := said.keys() & found.keys():
            raise TextError(f"{path.name} says {min(twice)!r} again")
        said |= found
    return said


def sentences(source: str) -> dict[str, str]:
    """The sentences of one file by their dotted keys; TextError when it holds anything else."""
    try:
        return dict(_flatten(plain_yaml.load(source)))
    except ValueError as error:
        raise TextError(str(error)) from error


def placeholders(sentence: str) -> set[str]:
    """The names of the values that a sentence needs."""
    return set(PLACEHOLDER.findall(sentence))


def _fill(key: str, sentence: str, values: dict[str, str]) -> str:
    try:
        return PLACEHOLDER.sub(lambda match: values[match[1]], sentence)
    except KeyError as error:
        raise TextError(f"the text {key!r} needs a value for {error.args[0]!r}") from None


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(tree, str):
        return [(prefix, tree.strip())]
    if not isinstance(tree, dict):
        raise TextError(f"the text {prefix!r} is {tree!r}; quote it")
    pairs: list[tuple[str, str]] = []
    for name, branch in tree.items():
        if not isinstance(name, str):
            raise TextError(f"the key {name!r} below {prefix!r} is not a word; quote it")
        pairs += _flatten(branch, f"{prefix}.{name}" if prefix else str(name))
    return pairs
