"""Whole pages: what they say, what they keep back, and that they need nothing but themselves."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvlab import i18n, report
from kvlab.errors import UsageError
from kvlab.report import layout
from kvlab.report.layout import SECTIONS
from kvlab.report.others import Other
from kvlab.report.published import dgx_spark
from tests.builders import make_run
from tests.report import cases

VOID = {"meta", "link", "br", "col", "hr", "img", "input"}
HEADLINE_KEYS = ("speedup", "ttft_ms", "ttft_series_ms", "false_gain")


class Page(HTMLParser):
    """A page taken apart: its elements in order, its shown text, and whether every tag closes."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.summary = ""
        self.script = ""
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append("data" if dict(attrs).get("type") == "application/json" else tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        open_tag = "script" if self._open[-1] == "data" else self._open[-1]
        assert open_tag == tag, f"</{tag}> closes <{open_tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if "data" in self._open:
            self.summary += data
        elif "script" in self._open:
            self.script += data
        elif "style" not in self._open:
            self.text += data

    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.elements if attrs.get("id")]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def page(case: str = "proven", genre: str = "technical", lang: str = "tr") -> Page:
    return Page(cases.html(case, genre, lang))


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, which have tests of their own and take most of the time."""
    monkeypatch.setattr(layout, "_figure", lambda *_: None)
    monkeypatch.setattr(Other, "drawn", lambda _: None)


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
@pytest.mark.parametrize("case", cases.every())
@pytest.mark.usefixtures("no_figures")
def test_every_summary_renders_well_formed(case: str, genre: str, lang: str) -> None:
    seen = Page(report.render(cases.every()[case], genre=genre, lang=lang))
    ids = seen.ids()
    assert len(ids) == len(set(ids)), "an id stands twice"
    targets = {str(a["href"])[1:] for a in seen.all("a") if str(a["href"]).startswith("#")}
    assert targets <= set(ids), f"links lead nowhere: {sorted(targets - set(ids))}"
    levels = [int(tag[1]) for tag, _ in seen.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert "None" not in seen.text
    assert "{" not in seen.text


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
def test_a_page_asks_for_nothing_from_anywhere(genre: str, lang: str) -> None:
    html = cases.html("proven", genre, lang)
    assert len(html.encode()) < 3_000_000
    seen = Page(html)
    assert len(seen.ids()) == len(set(seen.ids())), "an id stands twice"
    assert len(seen.all("figure")) == 5
    for _, attrs in seen.elements:
        for name in ("src", "href", "action", "poster", "data", "xlink:href"):
            assert not re.match(r"(https?:)?//", attrs.get(name) or ""), attrs
    assert not re.search(r"@import|url\((?!#)", html)
    scripts = seen.all("script")
    assert [script.get("type") for script in scripts] == ["application/json", None]
    assert seen.script == layout.script()
    (policy,) = [m for m in seen.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(seen.script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy["content"])
    assert seen.all("html")[0]["lang"] == i18n.TAGS[lang]


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
def test_the_same_summary_gives_the_same_bytes(genre: str, lang: str) -> None:
    first = cases.html("proven", genre, lang)
    assert first == report.render(cases.summary(), genre=genre, lang=lang)


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
@pytest.mark.parametrize("case", ["wrong", "unknown", "failed", "partial", "unchecked"])
def test_an_invalid_run_shows_a_banner_and_no_headline_anywhere(
    case: str, genre: str, lang: str
) -> None:
    summary, html = cases.every()[case], cases.html(case, genre, lang)
    seen, text = Page(html), i18n.text(lang)
    assert text("verdict.invalid.name") in seen.text
    assert text("word.withheld") in seen.text
    head = re.search(r"<title>(.*?)</title>", html)
    assert head is not None
    assert not re.search(r"\d", head[1])
    figures = [summary["speedup"]["value"], *summary["speedup"]["ci95"]]
    figures += [summary["false_gain"]["lmcache"]["value"]]
    for value in figures:
        assert text.ratio(value) not in html
    for arm in summary["arms"]:
        for key in ("median", "first", "p90", "p99"):
            assert text.milliseconds(summary["ttft_ms"][arm][key]) not in html
    kept = json.loads(seen.summary)
    assert not set(HEADLINE_KEYS) & set(kept)


def test_an_invalid_run_names_what_fails() -> None:
    seen = page("wrong", lang="en")
    assert "Restored answers are right" in seen.text
    assert "restored answers differ by up to 0.5 nat" in seen.text
    assert "no TTFT figure of this run counts" in seen.text


def test_a_proven_run_states_its_number_in_the_title_and_in_the_box() -> None:
    summary = cases.summary()
    for lang in i18n.LANGUAGES:
        written = i18n.text(lang).ratio(summary["speedup"]["value"])
        html = cases.html("proven", "technical", lang)
        title = re.search(r"<title>(.*?)</title>", html)
        assert title is not None
        assert written in title[1]
        assert f'<p class="big"><a class="number" href="#r-median"' in html  # noqa: F541


def test_numbers_link_to_their_row_and_say_formula_sample_and_run() -> None:
    seen = page(lang="en")
    numbers = [a for a in seen.all("a") if a.get("class") == "number" and a.get("title")]
    assert len(numbers) > 10
    for number in numbers:
        assert "run 20261130T120000Z-two-round-embedded-0123abcd" in str(number["title"])
        assert "n = 18 requests" in str(number["title"])


def test_the_published_figures_stand_beside_ours_and_are_marked() -> None:
    html = cases.html("proven", "technical", "tr")
    row = re.search(r'<tr id="r-median".*?</tr>', html, re.DOTALL)
    assert row is not None
    cells = re.findall(r'<td role="cell"[^>]*?(class="reference[^"]*")?>(.*?)</td>', row[0])
    assert [bool(mark) for mark, _ in cells] == [False, False, False, True, True, True]
    assert [value for _, value in cells[3:]] == ["1.279,1 ms", "655,2 ms", "1,95×"]
    assert "DGX Spark raporu (Openzeka, Ekim 2026)" in html
    assert dgx_spark()["repeats"] == 3


def test_a_control_run_claims_no_gain_and_shows_no_reference() -> None:
    for lang in i18n.LANGUAGES:
        text = i18n.text(lang)
        html = cases.html("control", "technical", lang)
        assert text("verdict.control.not_shown") in html
        assert text.milliseconds(655.2) not in html
        assert text("technical.discussion.ttft.title.drop") not in html


def test_a_control_that_sees_a_difference_is_invalid() -> None:
    summary = cases.summary("control")
    summary["verdict"]["status"] = "proven"
    assert "Invalid" in Page(report.render(summary, lang="en")).text


def test_the_turkish_report_keeps_its_titles() -> None:
    html = cases.html("proven", "technical", "tr")
    titles = [section.title for section in report.sections(cases.summary(), lang="tr")]
    assert titles[3:11] == [
        "Yönetici Özeti",
        "1. Amaç ve Yöntem",
        "2. Kurulum ve Önbellek Mimarisi",
        "3. Sonuçlar",
        "4. Değerlendirme",
        "5. LMCache kurulumu: Doğrulanması gereken ayarlar ve üretim önerileri",
        "6. Deneyin sınırları ve sonuçların genellenebilirliği",
        "7. Kaynaklar",
    ]
    for words in ("Yayın tarihi:", "Kapsam:", "Not:", "Hazırlayan:", "İçindekiler", "Soru."):
        assert words in html


def test_the_chinese_article_tags_its_numbers_with_the_run() -> None:
    summary = cases.summary()
    html = report.render(summary, lang="zh")
    tag = i18n.text("zh")("article.tag", run=summary["run"])
    assert html.count(tag) >= 8
    assert not re.search(r"出处.R\d", html)
    titles = [section.title for section in report.sections(summary, lang="zh")]
    assert "直接答案" in titles
    assert "本文要点问答" in titles


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
def test_what_was_not_measured_is_said(genre: str, lang: str) -> None:
    assert i18n.text(lang)("unmeasured.text").split("`")[0] in page("proven", genre, lang).text


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
def test_a_built_model_is_said_plainly_and_a_real_one_is_not_called_tiny(
    genre: str, lang: str
) -> None:
    tiny = i18n.text(lang)("embedded.what")
    assert tiny in page("proven", genre, lang).text
    assert tiny not in page("stock", genre, lang).text


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="a()">&{{ 7*7 }}`**'


def poisoned(value: Any) -> Any:
    """A summary in which every string that is no key, status or id attacks the page."""
    keep = {"status", "holds", "scenario", "round", "verdict", "shape", "arms", "schema"}
    if isinstance(value, dict):
        return {k: v if k in keep and isinstance(v, str) else poisoned(v) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
@pytest.mark.parametrize("case", ["proven", "wrong"])
@pytest.mark.usefixtures("no_figures")
def test_nothing_of_a_run_becomes_markup(case: str, genre: str, lang: str) -> None:
    summary = {**poisoned(cases.summary(case)), "arms": ["baseline", "lmcache"]}
    html = report.render(summary, genre=genre, lang=lang)
    seen = Page(html)
    assert len(seen.all("script")) == 2
    assert seen.script == layout.script()
    assert not seen.all("img")
    assert not any(name.startswith("on") for _, attrs in seen.elements for name in attrs)
    assert HOSTILE in seen.text
    json.loads(seen.summary)


def test_the_embedded_summary_is_the_summary() -> None:
    summary = cases.summary()
    assert json.loads(page().summary) == json.loads(json.dumps(summary))


@pytest.mark.usefixtures("no_figures")
def test_sections_join_to_the_page() -> None:
    summary = cases.summary()
    for genre, lang in cases.ALL:
        parts = report.sections(summary, genre=genre, lang=lang)
        assert tuple(part.id for part in parts) == SECTIONS[genre]
        html = report.render(summary, genre=genre, lang=lang)
        assert "\n".join(part.html for part in parts) in html


def test_write_names_the_file_by_language_and_genre(tmp_path: Path) -> None:
    summary = cases.summary()
    assert report.write(summary, tmp_path / "new", lang="tr").name == "report-tr.html"
    assert report.write(summary, tmp_path, lang="zh", genre="article").name == "report-zh.html"
    other = report.write(summary, tmp_path, lang="zh", genre="technical")
    assert other.name == "report-zh-technical.html"
    assert other.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_an_unknown_genre_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no report genre 'poem'") as error:
        report.render(cases.summary(), genre="poem")
    assert error.value.hint == "choose from technical, article"


def test_load_rebuilds_the_summary_from_the_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path, manifest=cases.MANIFEST)
    loaded = report.load(folder.path)
    assert loaded["verdict"]["status"] == "proven"
    assert loaded["about"]["host"]["python"] == "3.11.7"
    assert "clocks" not in loaded["about"]
    assert report.load(folder) == loaded


def test_a_folder_of_runs_is_read_as_one_reproduction(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert report.load(tmp_path)["run"] == run.id
    assert [one["run"] for one in report.load_all([tmp_path])] == [run.id]
    assert report.load(run.path) == report.load(tmp_path)


@pytest.mark.parametrize("lang", i18n.LANGUAGES)
def test_the_image_of_containers_is_named_with_its_digest(lang: str) -> None:
    summary = cases.summary()
    image = {"id": f"sha256:{'a' * 64}", "digest": f"org/engine@sha256:{'0123456789ab' * 5}abcd"}
    summary["about"]["images"] = {"org/engine:1": image, "odd": None}
    page = Page(report.render(summary, genre="technical", lang=lang))
    assert "org/engine:1 (sha256:0123456789ab), odd" in page.text


@pytest.mark.usefixtures("no_figures")
def test_an_experiment_shows_its_conditions_also_when_all_of_them_hold() -> None:
    restart = cases.others()["restart"]
    seen = Page(report.render(restart, lang="en"))
    assert "1 conditions, all of them hold" in seen.text
    assert "restored-from-l2" in seen.text
    failed = [{"name": "controls-miss", "holds": False, "detail": "7 tokens were found"}]
    broken = Page(report.render({**restart, "invariants": failed}, lang="en"))
    assert "all of them hold" not in broken.text
    assert "7 tokens were found" in broken.text
