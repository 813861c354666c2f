"""Figures as SVG: deterministic, labelled, free of fonts and of the network."""

from __future__ import annotations

import copy
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest

from kvlab import canvas, figures, i18n, other_figures, sizing_figures
from kvlab.report import others
from kvlab.report.source import EXPERIMENTS
from tests.report import cases

Draw = Callable[[dict[str, Any], i18n.Text, canvas.Width], str]
SVG = "{http://www.w3.org/2000/svg}"


def speedup(summary: dict[str, Any], text: i18n.Text, width: canvas.Width) -> str:
    return figures.speedup(summary, text, 1.95, width)


def of_experiment(name: str) -> Draw:
    """Draws the figure of an experiment beside the A/B, whatever summary it is given."""

    def draw(_: dict[str, Any], text: i18n.Text, width: canvas.Width) -> str:
        return other_figures.OF_EXPERIMENTS[name](cases.others()[name], text, width)

    draw.__name__ = name
    return draw


DRAWS: list[Draw] = [speedup, figures.ttft_by_order, figures.ecdf, figures.served]
DRAWS.append(sizing_figures.predicted)
DRAWS += map(of_experiment, other_figures.OF_EXPERIMENTS)


@pytest.fixture(params=DRAWS, ids=lambda draw: draw.__name__)
def draw(request: pytest.FixtureRequest) -> Draw:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("lang", i18n.LANGUAGES)
@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_a_figure_is_clean_svg_with_a_title_and_text(
    draw: Draw, lang: str, width: canvas.Width
) -> None:
    svg = draw(cases.summary(), i18n.text(lang), width)
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert all(
        i.startswith(str(root.get("aria-labelledby")).partition("-title")[0]) for i in ids if i
    )
    assert set(str(root.get("aria-labelledby")).split()) <= set(ids)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    assert used <= set(ids)
    assert root.find(f"{SVG}title").text  # type: ignore[union-attr]
    assert root.find(f"{SVG}desc").text  # type: ignore[union-attr]
    assert len(root.findall(f".//{SVG}text")) > 3
    assert "font-family" not in svg
    assert "<metadata" not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_a_figure_is_the_same_every_time(draw: Draw) -> None:
    text = i18n.text("zh")
    assert draw(cases.summary(), text, "wide") == draw(cases.summary(), text, "wide")


def test_chinese_labels_need_no_chinese_font(draw: Draw) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = draw(cases.summary(), i18n.text("zh"), "wide")
    shown = "".join(ET.fromstring(svg).itertext())
    assert re.search(r"[\u4e00-\u9fff]", shown)
    assert not any(ord(letter) in canvas.STAND_INS for letter in shown)


def test_labels_with_markup_are_escaped() -> None:
    class Hostile(i18n.Text):
        def sentence(self, key: str) -> str:
            return f"<b>&{super().sentence(key)}"

    root = ET.fromstring(figures.served(cases.summary(), Hostile("zh")))
    assert "<b>&" in "".join(root.itertext())


def test_colours_are_variables_with_a_fallback(draw: Draw) -> None:
    svg = draw(cases.summary(), i18n.text("en"), "wide")
    assert "var(--fig-ink, #1d242c)" in svg
    for colour in canvas.COLOURS.values():
        assert f": {colour}" not in svg


def test_many_requests_become_lines_and_gaps_are_left_out() -> None:
    summary = cases.summary()
    series = summary["ttft_series_ms"]
    for arm in summary["arms"]:
        for name in ("fill", "measure"):
            values = [700.0 + i % 7 for i in range(665)]
            series[arm][name] = [[None, *values[1:]], values, values]
    svg = figures.ttft_by_order(summary, i18n.text("en"))
    assert len(svg) < 300_000
    series["lmcache"]["measure"] = [[None, None]]
    figures.ttft_by_order(summary, i18n.text("en"))
    series["lmcache"]["measure"] = []
    assert "<svg" in figures.ecdf(summary, i18n.text("en"))


def test_times_far_apart_get_a_logarithmic_axis() -> None:
    summary = cases.summary()
    for values in summary["ttft_series_ms"]["lmcache"]["measure"]:
        values[:] = [value / 20 for value in values]
    svg = figures.ecdf(summary, i18n.text("en"))
    labels = re.findall(r">([\d,.]+)</text>", svg)
    assert {"10", "100"} <= set(labels)


def test_more_letters_than_stand_ins_is_an_error() -> None:
    cover = canvas._Cover()
    with pytest.raises(ValueError, match="letters without a glyph"):
        cover.put_on("".join(chr(0x4E00 + i) for i in range(1000)))


def test_published_reference_is_marked_in_the_figure() -> None:
    svg = figures.speedup(cases.summary(), i18n.text("tr"), 1.95)
    assert "DGX Spark raporu (Openzeka, Ekim 2026)" in svg
    assert "1,95×" in svg
    assert canvas.COLOURS["ref"] in svg


def words(svg: str) -> list[str]:
    """Every label of a figure."""
    return [str(one.text) for one in ET.fromstring(svg).iter(f"{SVG}text")]


def test_every_experiment_but_the_storage_s_tables_has_its_figure() -> None:
    assert set(other_figures.OF_EXPERIMENTS) == set(EXPERIMENTS) - {"storage"}


def test_the_equivalence_plot_names_ratio_margin_and_both_intervals() -> None:
    summary = cases.others()["object-groups"]
    summary["equivalence"] |= {"ratio": 1.01, "ci95": [0.95, 1.07], "ci90": [0.96, 1.06]}
    svg = other_figures.object_groups(summary, i18n.text("tr"))
    assert {"1,010", "± %5: eşdeğer"} <= set(words(svg))
    assert "0,960–1,060" in svg
    assert "0,950–1,070" in svg


def test_a_drift_that_was_not_bounded_has_no_row() -> None:
    summary = copy.deepcopy(cases.others()["soak"])
    before = len(words(other_figures.soak(summary, i18n.text("en"))))
    del summary["drift"][0]["ci95_share"]
    assert len(words(other_figures.soak(summary, i18n.text("en")))) == before - 1


def test_acceptance_without_a_control_shows_our_own_line_only() -> None:
    summary = cases.others()["acceptance"]
    both = words(other_figures.acceptance(summary, i18n.text("en")))
    summary.pop("negative_control")
    alone = words(other_figures.acceptance(summary, i18n.text("en")))
    assert "negative control" in both
    assert "negative control" not in alone
    assert "this connector" in alone


def test_a_section_shows_its_figure_only_when_its_evidence_holds() -> None:
    restart = cases.others()["restart"]
    text = i18n.text("en")
    assert set(others.Other(restart, text).drawn() or {}) == {"wide", "narrow"}
    failed = [{"name": "restored-from-l2", "holds": False, "detail": "12 %"}]
    assert others.Other({**restart, "invariants": failed}, text).drawn() is None
