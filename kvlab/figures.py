"""Figures of a run as SVG text: one visual language, text kept as text, the same bytes every time.

Each function takes a summary, the texts of a language and a width, and returns ``<svg>…</svg>`` to
stand inside a page. matplotlib is imported when the first figure is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvlab import canvas
from kvlab.canvas import COLOURS, Width
from kvlab.i18n import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Summary = dict[str, Any]

_BESIDE = (
    {"left": 54, "right": 372, "top": 62, "bottom": 42},
    {"left": 396, "right": 12, "top": 62, "bottom": 42},
)
_STACKED = (
    {"left": 50, "right": 8, "top": 62, "bottom": 242},
    {"left": 50, "right": 8, "top": 252, "bottom": 42},
)
"""Margins of the two rounds' panels, in points."""
MARKED_POINTS = 240
"""Above this many requests in a panel the single requests are drawn as a line, not as marks."""


def speedup(summary: Summary, text: Text, published: float, width: Width = "wide") -> str:
    """The speedup with its interval, and the published one beside it, marked as reference."""
    value = summary["speedup"]["value"]
    low, high = summary["speedup"].get("ci95") or (value, value)
    bound = summary.get("workload", {}).get("speedup_bound")
    with canvas.sheet("speedup", width, 190 if width == "wide" else 230) as (figure, finish):
        axes = canvas.axes(figure, left=8, right=16, top=18, bottom=38)
        largest = max(high, published, 1.0)
        axes.set_xlim(0, largest * 1.28)
        axes.set_ylim(-0.55, 2.1)
        axes.barh(1.1, value, height=0.42, color=COLOURS["b"], zorder=2)
        axes.errorbar(
            value,
            1.1,
            xerr=[[max(0, value - low)], [max(0, high - value)]],
            color=COLOURS["ink"],
            capsize=5,
            linewidth=1.6,
            zorder=3,
        )
        axes.barh(
            0,
            published,
            height=0.42,
            facecolor="none",
            edgecolor=COLOURS["ref"],
            hatch="////",
            linewidth=1.2,
            zorder=2,
        )
        for place in (1.1, 0):
            axes.vlines(
                1, place - 0.3, place + 0.3, COLOURS["ink"], linestyles=(0, (2, 2)), zorder=3
            )
        if bound and bound < largest * 1.2:
            axes.axvline(bound, color=COLOURS["muted"], linewidth=1, zorder=1)
            canvas.say(axes, bound, 1.75, f" {text('figure.speedup.bound')}", "muted")
        canvas.say(axes, 0, 1.45, text("figure.speedup.ours"), "ink", weight="bold")
        between = " · " if width == "wide" else "\n"
        source = f"{text('figure.speedup.reference')}{between}{text('source.dgx_spark')}"
        canvas.say(axes, 0, 0.32, source, "ref")
        pad = largest * 0.02
        canvas.say(
            axes, high + pad, 1.1, text.ratio(value), "ink", weight="bold", size=13, middle=True
        )
        canvas.say(axes, published + pad, 0, text.ratio(published), "ref", middle=True)
        axes.set_xlabel(text("figure.speedup.axis"), loc="left")
        canvas.ticks(axes, "x", lambda tick: f"{text.plain_number(tick)}×")
        axes.set_yticks([])
        axes.grid(visible=False)
        return finish(
            text("figure.speedup.title"),
            text(
                "figure.speedup.description",
                value=text.ratio(value),
                ci=text.span(text.ratio(low), text.ratio(high)),
                reference=text.ratio(published),
            ),
        )


def ttft_by_order(summary: Summary, text: Text, width: Width = "wide") -> str:
    """TTFT of every request in its order, one panel per round, both arms in each."""
    series, arms = summary["ttft_series_ms"], summary["arms"]
    narrow = width == "narrow"
    with canvas.sheet("order", width, 420 if narrow else 290) as (figure, finish):
        places = _STACKED if narrow else _BESIDE
        panels = [canvas.axes(figure, **place) for place in places]
        times = _times(series, arms, ("fill", "measure"))
        for axes, name in zip(panels, ("fill", "measure"), strict=True):
            for arm, style in zip(arms, _arm_styles(arms, text), strict=True):
                _draw_order(axes, series.get(arm, {}).get(name, []), style)
            canvas.time_axis(axes, times, text)
            canvas.title(axes, text(f"round.{name}"))
            axes.set_xlabel(text("figure.order.axis"), loc="left")
            axes.margins(x=0.03)
            _whole_ticks(axes, text)
        if not narrow:
            panels[1].tick_params(labelleft=False)
        _legend(figure, panels[0], arms, text)
        return finish(text("figure.order.title"), text("figure.order.description"))


def ecdf(summary: Summary, text: Text, width: Width = "wide") -> str:
    """The share of measured requests that were answered within a time, per arm."""
    series, arms = summary["ttft_series_ms"], summary["arms"]
    with canvas.sheet("ecdf", width, 280) as (figure, finish):
        axes = canvas.axes(figure, left=50, right=14, top=52, bottom=42)
        for arm, style in zip(arms, _arm_styles(arms, text), strict=True):
            values = sorted(_flat(series.get(arm, {}).get("measure", [])))
            if values:
                shares = [(i + 1) / len(values) for i in range(len(values))]
                axes.step(
                    [values[0], *values],
                    [0, *shares],
                    where="post",
                    color=style["color"],
                    linewidth=2.2,
                    linestyle=style["linestyle"],
                )
        axes.axhline(0.5, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (2, 3)))
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        canvas.ticks(axes, "y", lambda tick: text.percent(tick))
        times = _times(series, arms, ("measure",))
        canvas.time_axis(axes, times, text, which="x")
        axes.set_xlabel(text("figure.ecdf.axis"), loc="left")
        _legend(figure, axes, arms, text)
        return finish(text("figure.ecdf.title"), text("figure.ecdf.description"))


def served(summary: Summary, text: Text, width: Width = "wide") -> str:
    """Which tier served the prompt tokens, as one bar per arm and round."""
    arms, tokens = summary["arms"], summary["served_tokens"]
    rows = [(arm, name) for arm in arms for name in ("fill", "measure")]
    top = 38 if width == "wide" else 54
    with canvas.sheet("served", width, top + 36 + 48 * len(rows)) as (figure, finish):
        axes = canvas.axes(figure, left=20, right=24, top=top, bottom=32)
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.45, len(rows) - 0.1)
        for place, (arm, name) in enumerate(reversed(rows)):
            label = text(
                "figure.served.row",
                arm=text(f"arm.{_letter(arms, arm)}"),
                round=text(f"name.{name}"),
            )
            canvas.say(axes, 0, place + 0.26, label, "ink")
            canvas.stack(axes, place, tokens.get(arm, {}).get(name, {}), text)
        canvas.ticks(axes, "x", lambda tick: text.percent(tick))
        axes.set_yticks([])
        axes.grid(visible=False)
        canvas.legend_of_tiers(figure, axes, text, columns=4 if width == "wide" else 2)
        return finish(text("figure.served.title"), text("figure.served.description"))


READ_COLOURS = ("a", "b", "l2", "ref", "l0")
"""Of the adapters: the reference, the treated one, then the others in their order."""
READ_MARKS = ("o", "^", "s", "D")
"""Of the places, in their order."""


def parallel_read(summary: Summary, text: Text, width: Width = "wide") -> str:
    """TTFT and the rate of reading by concurrency, with what fio reads in the same place."""
    narrow = width == "narrow"
    with canvas.sheet("parallel_read", width, 600 if narrow else 360) as (figure, finish):
        top = 150 if narrow else 104
        places = (
            (
                {"left": 50, "right": 8, "top": top, "bottom": 280},
                {"left": 50, "right": 8, "top": 600 - 212, "bottom": 42},
            )
            if narrow
            else (
                {"left": 54, "right": 376, "top": top, "bottom": 42},
                {"left": 404, "right": 12, "top": top, "bottom": 42},
            )
        )
        times, rates = (canvas.axes(figure, **place) for place in places)
        lines = _read_lines(summary, text)
        for line in lines:
            _draw_reads(times, line, "seconds", summary)
            _draw_reads(rates, line, "rates", summary)
        ceilings = _draw_ceilings(rates, summary)
        every = [value for line in lines for value in line["seconds"] if value is not None]
        canvas.time_axis(times, every, text)
        every = [value for line in lines for value in line["rates"] if value is not None]
        canvas.time_axis(rates, [*every, *ceilings], text)
        for axes, name in ((times, "ttft"), (rates, "rate")):
            canvas.title(axes, text(f"figure.parallel_read.{name}"))
            axes.set_xlabel(text("figure.parallel_read.axis"), loc="left")
            axes.margins(x=0.08)
            slots = summary["workload"]["concurrency"]
            axes.set_xticks(range(len(slots)), [text.plain_number(one) for one in slots])
        _legend_of_reads(figure, times, lines, text, columns=2 if narrow else 4)
        return finish(text("figure.parallel_read.title"), text("figure.parallel_read.description"))


def _read_lines(summary: Summary, text: Text) -> list[dict[str, Any]]:
    """One line per arm: its look, and its values by concurrency."""
    rows = summary["variants"]
    others = dict.fromkeys(row["adapter"] for row in rows if row.get("adapter"))
    ranked = dict.fromkeys((summary["reference"], summary["treated"], *others))
    colours = dict(zip(ranked, READ_COLOURS, strict=False))
    marks = dict(zip((path["name"] for path in summary["paths"]), READ_MARKS, strict=False))
    lines = []
    recompute = text("figure.parallel_read.recompute")
    for label in dict.fromkeys(row["label"] for row in rows):
        own = {row["concurrency"]: row for row in rows if row["label"] == label}
        first = next(iter(own.values()))
        path = first.get("path")
        found = [own.get(slots, {}) for slots in summary["workload"]["concurrency"]]
        medians = [row.get("ttft_ms", {}).get("median") for row in found]
        lines.append(
            {
                "label": f"{path} · {first['adapter']}" if path else recompute,
                "color": COLOURS[colours.get(first.get("adapter"), "recompute")],
                "marker": marks.get(path, "x"),
                "linestyle": "-" if path and marks.get(path) == READ_MARKS[0] else (0, (4, 1.5)),
                "seconds": [None if value is None else value / 1000 for value in medians],
                "rates": [row.get("l2_gb_per_s") for row in found],
            }
        )
    return lines


def _draw_reads(axes: Axes, line: dict[str, Any], values: str, summary: Summary) -> None:
    known = [(place, value) for place, value in enumerate(line[values]) if value is not None]
    if known:
        style = {name: line[name] for name in ("color", "marker", "linestyle")}
        axes.plot(*zip(*known, strict=True), linewidth=1.8, markersize=5, **style)


def _draw_ceilings(axes: Axes, summary: Summary) -> list[float]:
    """A line for the most that fio read in each place, and its height."""
    found = []
    for path in summary["paths"]:
        if (value := path.get("ceiling_gb_per_s")) is not None:
            axes.axhline(value, color=COLOURS["ink"], linewidth=1.1, linestyle=(0, (1, 2)))
            canvas.say(axes, 0, value, f"fio · {path['name']}", "muted", size=9)
            found.append(value)
    return found


def _legend_of_reads(
    figure: Figure, axes: Axes, lines: Sequence[dict[str, Any]], text: Text, columns: int
) -> None:
    from matplotlib.lines import Line2D

    names = ("label", "color", "marker", "linestyle")
    handles = [
        Line2D([], [], linewidth=1.8, markersize=5, **{name: line[name] for name in names})
        for line in lines
    ]
    ceiling: dict[str, Any] = {"color": COLOURS["ink"], "linestyle": (0, (1, 2)), "linewidth": 1.1}
    handles.append(Line2D([], [], label=text("figure.parallel_read.ceiling"), **ceiling))
    canvas.legend(figure, axes, handles, columns)


def _draw_order(
    axes: Axes, repeats: Sequence[Sequence[float | None]], style: dict[str, Any]
) -> None:
    if not any(repeats):
        return
    marks = sum(len(values) for values in repeats) <= MARKED_POINTS
    for values in repeats:
        places = [i + 1 for i, value in enumerate(values) if value is not None]
        times = [value for value in values if value is not None]
        if marks:
            axes.plot(
                places,
                times,
                linestyle="none",
                marker=style["marker"],
                markersize=4.4,
                color=style["color"],
                alpha=0.55,
            )
        else:
            axes.plot(places, times, color=style["color"], linewidth=0.7, alpha=0.45)
    middle = [_median([r[i] for r in repeats if i < len(r)]) for i in range(len(repeats[0]))]
    places = [i + 1 for i, value in enumerate(middle) if value is not None]
    axes.plot(
        places,
        [value for value in middle if value is not None],
        color=style["color"],
        linewidth=1.8,
        linestyle=style["linestyle"],
    )


def _arm_styles(arms: Sequence[str], text: Text) -> list[dict[str, Any]]:
    return [
        {
            "color": COLOURS[letter],
            "marker": "o" if letter == "a" else "^",
            "linestyle": "-" if letter == "b" else (0, (4, 1.5)),
            "label": text(f"arm.{'control' if arm == 'control' else letter}"),
        }
        for letter, arm in zip("ab", arms, strict=False)
    ]


def _letter(arms: Sequence[str], arm: str) -> str:
    if arm == "control":
        return "control"
    return "ab"[list(arms).index(arm)]


def _legend(figure: Figure, axes: Axes, arms: Sequence[str], text: Text) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linewidth=1.8, markersize=5, **style) for style in _arm_styles(arms, text)
    ]
    canvas.legend(figure, axes, handles, len(handles))


def _whole_ticks(axes: Axes, text: Text) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    canvas.ticks(axes, "x", lambda tick: text.plain_number(tick))


def _flat(repeats: Sequence[Sequence[float | None]]) -> list[float]:
    return [value for values in repeats for value in values if value is not None]


def _times(series: dict[str, Any], arms: Sequence[str], rounds: Sequence[str]) -> list[float]:
    return [t for arm in arms for name in rounds for t in _flat(series.get(arm, {}).get(name, []))]


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    half = len(known) // 2
    return known[half] if len(known) % 2 else (known[half - 1] + known[half]) / 2
