"""Catalogues that say the same in three languages, and numbers as each language writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
import pytest
from markupsafe import Markup

from kvlab import i18n, notebook_page, report
from kvlab.errors import UsageError
from kvlab.i18n import TextError
from kvlab.report import batch_page, comparison, index, layout
from kvlab.report.layout import TEMPLATES
from kvlab.report.others import Other
from tests.report import cases

CODE = re.compile(r"`[^`]*`|\{\w+\}")
SAME_WORDS = {
    *("kvlab", "LMCache", "vLLM", "Python", "GPU", "Model", "TTFT", "L1", "L2"),
    *("disk", "ms", "token"),
}
"""Words that stand in every language as they are: names, units, and Turkish and English alike."""


@pytest.fixture(params=i18n.LANGUAGES)
def lang(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_catalogues_have_the_same_keys(lang: str) -> None:
    assert i18n.catalogue(lang).keys() == i18n.catalogue("en").keys()


def test_the_catalogues_need_the_same_values(lang: str) -> None:
    english = i18n.catalogue("en")
    for key, sentence in i18n.catalogue(lang).items():
        assert i18n.placeholders(sentence) == i18n.placeholders(english[key]), key


def test_no_sentence_is_empty_or_left_in_english(lang: str) -> None:
    english = i18n.catalogue("en")
    for key, sentence in i18n.catalogue(lang).items():
        assert sentence.strip(), key
        if lang != "en" and sentence == english[key]:
            words = set(re.findall(r"[^\W\d_]{2,}", CODE.sub("", sentence)))
            assert words <= SAME_WORDS, f"{lang}: {key} is still English: {sentence}"


def test_chinese_uses_its_own_punctuation() -> None:
    for key, sentence in i18n.catalogue("zh").items():
        plain = re.sub(r"ceil\(q × n\)|\(T − [^)]*\)", "", CODE.sub("X", sentence))
        assert not re.search(r"[;?!()]|,(?!\d)|:", plain), f"{key}: {sentence}"


def test_turkish_uses_its_own_apostrophe_and_percent_sign() -> None:
    for key, sentence in i18n.catalogue("tr").items():
        assert "'" not in sentence, key
        assert not re.search(r"\d\s?%", sentence), key


def test_marks_are_closed_and_no_markup_stands_in_a_sentence(lang: str) -> None:
    for key, sentence in i18n.catalogue(lang).items():
        assert sentence.count("**") % 2 == 0, key
        assert sentence.count("`") % 2 == 0, key
        assert not re.search(r"</?\w+>|https?://", sentence), key


def test_every_sentence_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    known = i18n.Text.sentence

    def noted(self: i18n.Text, key: str) -> str:
        used.add(key)
        return known(self, key)

    monkeypatch.setattr(i18n.Text, "sentence", noted)
    report.render(cases.summary(), lang="en")
    report.render(cases.every()["low bound"], lang="en")
    for summary in cases.others().values():
        report.render(summary, lang="en")  # the experiment by itself, with its figure
    monkeypatch.setattr(layout, "_figure", lambda *_: None)
    monkeypatch.setattr(Other, "drawn", lambda _: None)
    for summary in cases.every().values():
        for genre in ("technical", "article"):
            report.render(summary, genre=genre, lang="en")
    failed = [{"cell": 1, "what": what} for what in ("died", "never ran", "E: e")]
    notebook_page.of_notebook(_empty_notebook(), failed, "n", "en")
    compared = {"runs": ["a", "b"], "same_host": False, "verdicts": [{"status": "proven"}] * 2}
    figures = {
        "arms": [{"arms": ["baseline", "baseline"], "median_ms": [1.0, 2.0]}],
        "speedup": [{"value": 1.0}, None],
    }
    for more in ({"settings": {}}, {"settings": {"a": {"first": 1, "second": 2}}, **figures}):
        comparison.render({**compared, **more})
    for told in batches():
        batch_page.render(told)
    for told in ([], [index.Entry({"run": "r"}, {})]):
        index.render(told, Path())
    assert used == set(i18n.catalogue("en"))


def batches() -> Iterator[dict[str, Any]]:
    """What pages of batches tell: nothing at all, and everything that can be said."""
    plain = {"batch": "b", "title": "t", "experiment": "e", "profile": "p", "passes": 1, "seed": 0}
    none: dict[str, Any] = {
        "order": [],
        "rows": [],
        "effects": [],
        "varying": [],
        "hosts": [],
        "failed": {},
        "missing": [],
        "left_out": [],
        "unreadable": [],
        "until_ci": None,
        "max_passes": 10,
        "retried": [],
    }
    yield {**plain, **none}
    row = {
        "pass": 1,
        "cell": 1,
        "run": "r",
        "host": "h",
        "verdict": "proven",
        "speedup": 2.0,
        "speedup_low": 1.0,
        "speedup_high": 3.0,
        "ttft_ms": 1.0,
        "baseline_ttft_ms": 2.0,
        "served_l1": 0.5,
        "served_l2": 0.5,
        "a.b": 1,
    }
    effect = {"setting": "a.b", "first": 1, "second": 2, "measure": "ttft_ms", "pairs": 2}
    told = [
        {**effect, "host": "h", "ratio": 2.0, "ci95": [1.5, 3.0]},
        {**effect, "host": "h", "ratio": 2.0, "ci95": [0.5, 3.0], "measure": "speedup"},
        {**effect, "host": "h"},
    ]
    broken = {
        "failed": {"1/1": "e"},
        "missing": ["1/2"],
        "left_out": [3],
        "unreadable": [{"visit": "1/4", "why": "w"}],
    }
    shown = {"rows": [row], "effects": told, "varying": ["a.b"]}
    yield {**plain, **none, **shown, **broken, "hosts": ["h"]}
    more = {"until_ci": 0.05, "retried": ["1/1"]}
    yield {**plain, **none, **shown, **more, "hosts": ["h", "i"]}


def _empty_notebook() -> Any:
    import nbformat

    return nbformat.from_dict({"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_every_invariant_and_caution_of_a_run_has_a_sentence(lang: str) -> None:
    text = i18n.text(lang)
    for case in ("proven", "control"):
        for check in cases.summary(case)["invariants"]:
            assert text.has(f"invariant.{check['name'].replace('-', '_')}"), check["name"]
    for name in cases.CAUTIONS:
        assert text.has(f"caution.{name.replace('-', '_')}"), name


def test_templates_hold_no_words() -> None:
    environment = jinja2.Environment(autoescape=True)
    for path in TEMPLATES.rglob("*.j2"):
        for words in _words(environment, path):
            pytest.fail(f"{path.name} shows {words!r}; put it into the catalogues")


def _words(environment: jinja2.Environment, path: Path) -> Iterator[str]:
    """Every word that a template itself shows, in text or in an attribute that is read out."""
    tokens = environment.lex(path.read_text(encoding="utf-8"))
    source = "".join(
        value if kind == "data" else "\x00" for _, kind, value in tokens if kind != "comment"
    )
    source = re.sub(r"<pre.*?</pre>", "", source, flags=re.DOTALL)
    for attribute in re.findall(r'(?:title|alt|aria-label|placeholder)="([^"]*)"', source):
        yield from re.findall(r"[^\W\d_]+", attribute)
    yield from re.findall(r"[^\W\d_]+", re.sub(r"<[^>]*>", "", source, flags=re.DOTALL))


def test_no_sentence_of_a_report_lives_in_python() -> None:
    """Modules that make reports hold no sentence outside docstrings and error messages."""
    for path in [*TEMPLATES.parent.glob("*.py"), *TEMPLATES.parents[1].glob("*figures.py")]:
        source = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        source = re.sub(r"#.*|f?\"there is no report[^\n]*", "", source)
        for words in re.findall(r'"([^"\n]*)"', source):
            plain = re.sub(r"\{[^}]*\}", "", words)
            assert not re.search(r"[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}", plain), f"{path}: {words}"


@pytest.mark.parametrize(
    ("lang", "written"),
    [
        ("tr", ["1.279,1 ms", "%49", "%99,9", "1,95×", "1.121×", "30 Kasım 2026", "Kasım 2026"]),
        ("zh", ["1,279.1 ms", "49%", "99.9%", "1.95×", "1,121×", "2026年11月30日", "2026年11月"]),
        (
            "en",
            ["1,279.1 ms", "49%", "99.9%", "1.95×", "1,121×", "November 30, 2026", "November 2026"],
        ),
    ],
)
def test_numbers_and_dates(lang: str, written: list[str]) -> None:
    text = i18n.text(lang)
    day = date(2026, 11, 30)
    assert [
        text.milliseconds(1279.1),
        text.percent(0.488),
        text.percent(0.9991, 1),
        text.ratio(1.952),
        text.ratio(1121.0),
        text.day(day),
        text.month(day),
    ] == written


def test_more_numbers() -> None:
    text = i18n.text("tr")
    assert text.plain_number(0.006) == "0,006"
    assert text.plain_number(1121) == "1.121"
    assert text.seconds(2.61) == "2,6 s"
    assert text.span("1", "2") == "1–2"
    assert text.byte_size(71_680) == "70,0 KiB"
    assert text.byte_size(6_451_200) == "6,2 MiB"
    assert text.byte_size(32 * (1 << 30)) == "32,00 GiB"


def test_a_missing_key_and_a_missing_value_are_errors() -> None:
    text = i18n.text("zh")
    with pytest.raises(TextError, match=r"no text for 'none\.such'"):
        text("none.such")
    with pytest.raises(TextError, match="needs a value for 'share'"):
        text.html("results.lower")
    assert not text.has("none.such")


def test_html_marks_become_tags_and_values_are_escaped() -> None:
    text = i18n.text("en")
    shown = text.html(
        "article.results.platform", profile="<b>`x`**", contexts=1, tokens=2, repeats=3
    )
    assert isinstance(shown, Markup)
    assert "<code>&lt;b&gt;`x`**</code>" in shown
    assert text("technical.summary.unmeasured").count("*") == 0
    kept = text.html("results.lower", share=Markup("<i>1</i>"))
    assert kept == "<i>1</i> lower"


def test_an_unknown_language_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no report language 'de'") as error:
        i18n.text("de")
    assert error.value.hint == "choose from tr, zh, en"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("a: 1", "'a' is 1"), ("no: x", "the key False"), ("a: x\na: y", "stands twice")],
)
def test_a_catalogue_is_read_strictly(source: str, complaint: str) -> None:
    with pytest.raises(TextError, match=complaint):
        i18n.sentences(source)
