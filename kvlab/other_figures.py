"""Figures of the experiments beside the A/B, in the same visual language as ``kvlab.figures``.

Each takes the experiment's own summary. What a run did not measure is left out of its figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvlab import canvas, figures
from kvlab.canvas import COLOURS, Width
from kvlab.i18n import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Summary = dict[str, Any]

ROW = 40
"""Height of a row of a chart of rows, in points."""
JUDGED = {"within": "b", "undecided": "l2", "beyond": "ref"}
PHASES = {"cold": "a", "fill": "a", "first": "b", "together": "l0", "alone": "l1"}


def restart(summary: Summary, text: Text, width: Width = "wide") -> str:
    """Seconds of the whole workload, cold and after the restart, and the published pair."""
    rows = [
        (f"{text(f'restart.stop.{stop}')} · {text(f'figure.restart.{name}')}", one[key], colour)
        for stop, one in summary["variants"].items()
        for name, key, colour in (("cold", "cold_s", "a"), ("restarted", "restarted_s", "b"))
        if one.get(key) is not None
    ]
    return _bars(
        "restart",
        [(label, value, text.seconds(value, 2), colour) for label, value, colour in rows],
        text,
        width,
    )


def shared_cache(summary: Summary, text: Text, width: Width = "wide") -> str:
    """The median TTFT of every round, in the order in which they ran."""
    rows = []
    for name, times in summary["ttft_ms"].items():
        phase, _, number = name.partition(":")
        if times.get("median") is not None:
            label = text(f"shared_cache.phase.{phase}", number=number)
            value = times["median"]
            rows.append((label, value, text.milliseconds(value), PHASES[phase]))
    return _bars("shared_cache", rows, text, width)


def _bars(name: str, rows: Sequence[tuple[str, float, str, str]], text: Text, width: Width) -> str:
    """Rows of label, value, the value in words, and colour, as bars below one another."""
    with canvas.sheet(name, width, 50 + (ROW + 6) * len(rows)) as (figure, finish):
        axes = canvas.axes(figure, left=8, right=16, top=4, bottom=40)
        longest = max((value for _, value, _, _ in rows), default=1.0)
        axes.set_xlim(0, longest * 1.3)
        axes.set_ylim(-0.45, len(rows) - 0.1)
        for place, (label, value, words, colour) in enumerate(reversed(rows)):
            axes.barh(place, value, height=0.36, color=COLOURS[colour], zorder=2)
            canvas.say(axes, 0, place + 0.22, label, "ink")
            end = value + 0.015 * longest
            canvas.say(axes, end, place, words, "ink", weight="bold", middle=True)
        canvas.ticks(axes, "x", text.plain_number)
        axes.set_xlabel(text(f"figure.{name}.axis"), loc="left")
        axes.set_yticks([])
        axes.grid(visible=False)
        return finish(text(f"figure.{name}.title"), text(f"figure.{name}.description"))


def object_groups(summary: Summary, text: Text, width: Width = "wide") -> str:
    """The ratio of both settings' TTFT with its intervals, and the margin of equivalence."""
    found = summary["equivalence"]
    ratio, margin = found["ratio"], found["margin"]
    band = (1 / (1 + margin), 1 + margin)
    ends = [*found["ci95"], *found["ci90"], *band]
    room = 0.12 * (max(ends) - min(ends))
    with canvas.sheet("object_groups", width, 170) as (figure, finish):
        axes = canvas.axes(figure, left=16, right=16, top=30, bottom=44)
        axes.set_xlim(max(0, min(ends) - room), max(ends) + room)
        axes.set_ylim(-1, 1)
        axes.axvspan(*band, color=COLOURS["l0"], alpha=0.25, linewidth=0)
        axes.axvline(1, color=COLOURS["muted"], linewidth=1, linestyle=(0, (2, 2)))
        axes.hlines(0, *found["ci95"], color=COLOURS["b"], linewidth=1.4)
        axes.hlines(0, *found["ci90"], color=COLOURS["b"], linewidth=5)
        axes.plot([ratio], [0], marker="o", markersize=9, color=COLOURS["ink"], zorder=4)
        axes.text(
            ratio, 0.3, text.number(ratio, 3), ha="center", fontweight="bold", color=COLOURS["ink"]
        )
        axes.text(
            1,
            1.1,
            text("figure.object_groups.margin", margin=text.percent(margin)),
            ha="center",
            color=COLOURS["muted"],
        )
        canvas.ticks(axes, "x", text.plain_number)
        axes.set_xlabel(text("figure.object_groups.axis"), loc="left")
        axes.set_yticks([])
        axes.grid(visible=False)
        description = text(
            "figure.object_groups.description",
            ratio=text.number(ratio, 3),
            narrow=text.span(*(text.number(end, 3) for end in found["ci90"])),
            wide=text.span(*(text.number(end, 3) for end in found["ci95"])),
            margin=text.percent(margin),
        )
        return finish(text("figure.object_groups.title"), description)


def eviction(summary: Summary, text: Text, width: Width = "wide") -> str:
    """What L1 keeps with each setting beside what was predicted, and who serves round 2."""
    rows = summary["settings"]
    narrow = width == "narrow"
    part = 46 + (ROW + 12) * len(rows)
    high = 70 + part * (2 if narrow else 1)
    with canvas.sheet("eviction", width, high) as (figure, finish):
        places = (
            (
                {"left": 8, "right": 24, "top": 70, "bottom": high - part - 44},
                {"left": 8, "right": 24, "top": part + 96, "bottom": 34},
            )
            if narrow
            else (
                {"left": 8, "right": 380, "top": 70, "bottom": 34},
                {"left": 372, "right": 24, "top": 70, "bottom": 34},
            )
        )
        kept, served = (canvas.axes(figure, **place) for place in places)
        for place, row in enumerate(reversed(rows)):
            label = text(
                f"eviction.setting.{'with' if row.get('l2') else 'without'}_l2",
                watermark=text.plain_number(row["watermark"]),
                ratio=text.plain_number(row["ratio"]),
            )
            for axes in (kept, served):
                canvas.say(axes, 0, place + 0.24, label, "ink")
            _draw_kept(kept, place, row)
            canvas.stack(served, place, _round_2(row), text, height=0.36)
        for axes, name in ((kept, "kept"), (served, "served")):
            canvas.title(axes, text(f"figure.eviction.{name}"))
            axes.set_xlim(0, 1)
            axes.set_ylim(-0.45, len(rows) - 0.1)
            canvas.ticks(axes, "x", text.percent)
            axes.set_yticks([])
            axes.grid(visible=False)
        most = max((row.get("predicted_share") or [0, 1])[1] for row in rows)
        kept.set_xlim(0, min(1, most * 1.2))
        beside = kept if narrow else served
        columns = 2 if narrow else 3
        canvas.legend_of_tiers(figure, beside, text, columns, ("L1", "L2", "recompute"))
        return finish(text("figure.eviction.title"), text("figure.eviction.description"))


def _draw_kept(axes: Axes, place: float, row: Mapping[str, Any]) -> None:
    """The share that was kept as a mark, on the band that was predicted."""
    if row.get("predicted_share"):
        low, high = row["predicted_share"]
        axes.barh(place, high - low, left=low, height=0.36, color=COLOURS["l0"], alpha=0.35)
    if row.get("retained_share") is not None:
        axes.plot([row["retained_share"]], [place], "o", markersize=8, color=COLOURS["ink"])


def _round_2(row: Mapping[str, Any]) -> dict[str, float]:
    """The shares of the restorable tokens by tier."""
    tiers = {"L1": row.get("l1_share") or 0.0, "L2": row.get("l2_share") or 0.0}
    return {**tiers, "recompute": max(0.0, 1 - sum(tiers.values()))}


def soak(summary: Summary, text: Text, width: Width = "wide") -> str:
    """Each quantity's change over the whole time with its interval, as a share of its limit."""
    rows = [one for one in summary["drift"] if one.get("limit_share") and one.get("ci95_share")]
    with canvas.sheet("soak", width, 56 + (ROW + 2) * len(rows)) as (figure, finish):
        axes = canvas.axes(figure, left=16, right=16, top=8, bottom=44)
        ends = [end / one["limit_share"] for one in rows for end in one["ci95_share"]]
        low, high = min([0.0, *ends]), max([1.0, *ends])
        room = 0.06 * (high - low)
        axes.set_xlim(low - room, high + room)
        axes.set_ylim(-0.45, len(rows) - 0.2)
        axes.axvline(0, color=COLOURS["grid"], linewidth=1.4, zorder=0)
        axes.axvline(1, color=COLOURS["ref"], linewidth=1.4, linestyle=(0, (4, 2)))
        for place, one in enumerate(reversed(rows)):
            colour = COLOURS[JUDGED[one["judged"]]]
            bounds = [end / one["limit_share"] for end in one["ci95_share"]]
            axes.hlines(place, *bounds, color=colour, linewidth=3)
            if one.get("total_share") is not None:
                axes.plot([one["total_share"] / one["limit_share"]], [place], "o", color=colour)
            quantity = text(f"soak.quantity.{one['quantity']}")
            words = f"{quantity} {one.get('process') or ''}".strip()
            canvas.say(axes, low - room, place + 0.16, words, "ink")
        canvas.ticks(axes, "x", text.percent)
        axes.set_xlabel(text("figure.soak.axis"), loc="left")
        axes.set_yticks([])
        axes.grid(visible=False)
        return finish(text("figure.soak.title"), text("figure.soak.description"))


def acceptance(summary: Summary, text: Text, width: Width = "wide") -> str:
    """The largest difference from cold answers by the tokens computed after restored ones."""
    control = summary.get("negative_control") or {}
    lines = [
        ("ours", summary.get("by_tail") or [], "b", "o"),
        ("control", control.get("by_tail") or [], "ref", "X"),
    ]
    top = 52 if width == "wide" else 84
    with canvas.sheet("acceptance", width, 240 + top) as (figure, finish):
        axes = canvas.axes(figure, left=54, right=14, top=top, bottom=42)
        tails = sorted({row["tail_tokens"] for _, rows, _, _ in lines for row in rows})
        worst = [summary["tolerance_nat"]]
        for name, rows, colour, mark in lines:
            known = [(tails.index(r["tail_tokens"]), r["max_nat"]) for r in rows if "max_nat" in r]
            if known:
                label = text(f"figure.acceptance.{name}")
                places, values = zip(*known, strict=True)
                axes.plot(
                    places, values, marker=mark, color=COLOURS[colour], linewidth=1.8, label=label
                )
                worst += values
        axes.axhline(
            summary["tolerance_nat"],
            color=COLOURS["muted"],
            linewidth=1.1,
            linestyle=(0, (2, 2)),
            label=text("figure.acceptance.allowed"),
        )
        axes.set_ylim(-0.04 * max(worst), 1.1 * max(worst))
        axes.set_xticks(range(len(tails)), [text.plain_number(tail) for tail in tails])
        canvas.ticks(axes, "y", text.plain_number)
        axes.set_xlabel(text("figure.acceptance.axis"), loc="left")
        canvas.title(axes, text("figure.acceptance.unit"))
        handles, _ = axes.get_legend_handles_labels()
        canvas.legend(figure, axes, handles, 3 if width == "wide" else 1)
        return finish(text("figure.acceptance.title"), text("figure.acceptance.description"))


OF_EXPERIMENTS: dict[str, Callable[[Summary, Text, Width], str]] = {
    "restart": restart,
    "object-groups": object_groups,
    "acceptance": acceptance,
    "shared-cache": shared_cache,
    "eviction": eviction,
    "soak": soak,
    "parallel-read": figures.parallel_read,
}
"""The figure of each experiment."""
