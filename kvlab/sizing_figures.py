"""The figure of what was predicted and what was measured, in the language of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab import canvas
from kvlab.canvas import COLOURS, Width
from kvlab.i18n import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIERS = ("L0", "L1", "L2", "recompute")
_PLACES = {
    "wide": (
        {"left": 54, "right": 372, "top": 50, "bottom": 42},
        {"left": 406, "right": 14, "top": 50, "bottom": 42},
    ),
    "narrow": (
        {"left": 44, "right": 14, "top": 54, "bottom": 230},
        {"left": 44, "right": 14, "top": 240, "bottom": 42},
    ),
}
"""Margins of two panels in points: beside each other, or one above the other."""


def predicted(summary: dict[str, Any], text: Text, width: Width = "wide") -> str:
    """TTFT of both arms and the tiers' shares: predictions with their span, and what came."""
    told, arms = summary["predicted"], summary["arms"]
    with canvas.sheet("predicted", width, 250 if width == "wide" else 400) as (figure, finish):
        left, right = (canvas.axes(figure, **place) for place in _PLACES[width])
        for row, (letter, arm) in enumerate(zip("ba", reversed(arms), strict=True)):
            one = told["ttft_ms"][arm]
            _pair(left, row, one["value"], one["ci95"], one.get("measured"), COLOURS[letter])
        canvas.name_rows(left, [text("figure.predicted.b"), text("figure.predicted.a")])
        canvas.format_ticks(left, "x", lambda tick: text.plain_number(tick))
        left.set_xlim(left=0)
        left.set_xlabel(text("figure.predicted.times"), loc="left")
        for row, tier in enumerate(reversed(TIERS)):
            one = told["served_share"][tier]
            colour = COLOURS["ink" if tier == "recompute" else tier.lower()]
            _pair(right, row, one["value"], one["range"], one.get("measured"), colour)
        canvas.name_rows(right, [text("figure.predicted.recompute"), *reversed(TIERS[:3])])
        right.set_xlim(-0.03, 1.03)
        canvas.format_ticks(right, "x", lambda tick: text.percent(tick))
        right.set_xlabel(text("figure.predicted.shares"), loc="left")
        for axes in (left, right):
            axes.margins(y=0.2)
            axes.grid(visible=False, axis="y")
        _legend(figure, left, text("figure.predicted.predicted"), text("figure.predicted.measured"))
        return finish(text("figure.predicted.title"), text("figure.predicted.description"))


def _pair(
    axes: Axes,
    row: int,
    value: float,
    span: Sequence[float],
    measured: float | None,
    colour: str,
) -> None:
    """One prediction with its span, and below it what was measured."""
    axes.plot(span, [row + 0.13] * 2, color=colour, linewidth=3, solid_capstyle="butt", alpha=0.45)
    axes.plot(
        [value],
        [row + 0.13],
        marker="o",
        markersize=8,
        markerfacecolor=COLOURS["paper"],
        markeredgecolor=colour,
        markeredgewidth=1.8,
        linestyle="none",
    )
    if measured is not None:
        axes.plot(
            [measured], [row - 0.17], marker="D", markersize=7, color=colour, linestyle="none"
        )


def _legend(figure: Any, axes: Axes, predicted: str, measured: str) -> None:
    from matplotlib.lines import Line2D

    ink, paper = COLOURS["ink"], COLOURS["paper"]
    handles = [
        Line2D([], [], color=ink, marker="o", markersize=8, markerfacecolor=paper, label=predicted),
        Line2D([], [], color=ink, marker="D", linestyle="none", markersize=7, label=measured),
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(axes.get_position().x0, 1.0),
        ncols=2,
        frameon=False,
        borderaxespad=0.2,
        borderpad=0,
        handletextpad=0.5,
        columnspacing=1.2,
    )
