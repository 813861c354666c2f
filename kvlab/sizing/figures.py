"""Figures of the answers of ``kvlab predict``, for a notebook: in English, as the notebook is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvlab import canvas
from kvlab.canvas import COLOURS, Width

GB = 1e9
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


def capacity(answer: dict[str, Any], width: Width = "wide") -> str:
    """Hit share by capacity: what LRU hits, and the most that any policy could."""
    with canvas.sheet("capacity", width, 250 if width == "wide" else 400) as (figure, finish):
        for name, words, place in zip(
            ("own", "zipf"), ("in order", "Zipf reuse"), _PLACES[width], strict=True
        ):
            axes, one = canvas.axes(figure, **place), answer[name]
            unit, of_unit = ("GB", GB) if one["capacity_bytes"][-1] >= GB else ("MB", 1e6)
            sizes = [size / of_unit for size in one["capacity_bytes"]]
            for key, colour, style in (("optimal", "ref", (0, (4, 2))), ("lru", "b", "-")):
                axes.step(
                    [0, *sizes],
                    [0, *one[key]],
                    where="post",
                    color=COLOURS[colour],
                    linestyle=style,
                    linewidth=2,
                    label={"optimal": "optimal, the ceiling", "lru": "LRU"}[key],
                )
            axes.set_ylim(0, 1.02)
            axes.set_xlim(left=0)
            canvas.format_ticks(axes, "y", lambda tick: f"{tick:.0%}")
            axes.set_xlabel(f"capacity ({unit}), {words}", loc="left")
        _lines_legend(figure, 2)
        return finish("Hit share by capacity", answer["sentence"])


def l1_size(answer: dict[str, Any], width: Width = "wide") -> str:
    """L1 that each share of the reachable hits takes, for both ways of coming back."""
    with canvas.sheet("l1-size", width, 220) as (figure, finish):
        axes = canvas.axes(figure, left=96, right=20, top=34, bottom=42)
        targets = list(answer["own"]["gib"])
        small = max(*answer["own"]["gib"].values(), *answer["zipf"]["gib"].values()) < 1
        for shift, (name, colour, words) in zip(
            (0.18, -0.18), (("own", "b", "in order"), ("zipf", "l2", "Zipf reuse")), strict=True
        ):
            sizes = [answer[name]["gib"][target] * (1024 if small else 1) for target in targets]
            places = [row + shift for row in range(len(targets))]
            axes.barh(places, sizes, height=0.32, color=COLOURS[colour], label=words)
        canvas.name_rows(axes, [f"{target} of hits" for target in targets])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"L1 ({'MiB' if small else 'GiB'})", loc="left")
        _lines_legend(figure, 2)
        return finish("L1 for a share of the hits", answer["sentence"])


def break_even(answer: dict[str, Any], width: Width = "wide") -> str:
    """Computing a prefix against restoring it, by its length."""
    series = {"computing": answer["compute_ms"]}
    series |= {f"restoring from {tier}": ms for tier, ms in answer["restore_ms"].items()}
    return _curves(
        "break-even",
        "Computing and restoring a prefix",
        answer["prefix_tokens"],
        series,
        ("prefix (tokens)", "ms"),
        answer["sentence"],
        width,
    )


def reuses(answer: dict[str, Any], width: Width = "wide") -> str:
    """What has been saved after so many returns, the first visit's extra cost included."""
    saved = answer["cumulated_ms"]
    return _curves(
        "reuses",
        "Saved after so many returns",
        list(range(len(saved))),
        {"saved in all": saved},
        ("returns of one context", "ms"),
        answer["sentence"],
        width,
    )


def chunk(answer: dict[str, Any], width: Width = "wide") -> str:
    """Tokens that whole chunks can restore, by the size of a chunk."""
    with canvas.sheet("chunk", width, 200) as (figure, finish):
        axes = canvas.axes(figure, left=60, right=20, top=14, bottom=42)
        tokens = list(reversed(answer["restorable_tokens"]))
        sizes = list(reversed(answer["chunk_tokens"]))
        axes.barh(range(len(tokens)), tokens, height=0.5, color=COLOURS["b"])
        canvas.name_rows(axes, [f"{size:,}" for size in sizes])
        axes.grid(visible=False, axis="y")
        canvas.format_ticks(axes, "x", lambda tick: f"{tick:,.0f}")
        axes.set_xlabel("restorable tokens, by tokens of a chunk", loc="left")
        return finish("Restorable tokens by chunk size", answer["sentence"])


def disk(answer: dict[str, Any], width: Width = "wide") -> str:
    """How much L2 holds after so many days of new contexts."""
    days = [step / 4 for step in range(29)]
    return _curves(
        "disk",
        "L2 after days of new contexts",
        days,
        {"written": [day * answer["bytes_per_day"] / (1000 * GB) for day in days]},
        ("days", "TB"),
        answer["sentence"],
        width,
    )


def faster_disk(answer: dict[str, Any], width: Width = "wide") -> str:
    """TTFT of a context from L2 by the rate at which it is read."""
    rates = answer["gb_per_s"]
    return _curves(
        "faster-disk",
        "TTFT from L2 by read rate",
        rates,
        {
            "computing": [answer["alone_ms"]] * len(rates),
            "restoring from L2": answer["ttft_ms"],
            "restoring at no cost": [answer["free_ms"]] * len(rates),
        },
        ("read rate (GB/s)", "TTFT (ms)"),
        answer["sentence"],
        width,
        logarithmic=True,
    )


def instances(answer: dict[str, Any], width: Width = "wide") -> str:
    """How many instances each resource of one LMCache server can feed."""
    names = list(reversed(answer["instances"]))
    with canvas.sheet("instances", width, 90 + 40 * len(names)) as (figure, finish):
        axes = canvas.axes(figure, left=90, right=30, top=14, bottom=42)
        axes.barh(
            range(len(names)),
            [answer["instances"][name] for name in names],
            height=0.5,
            color=COLOURS["b"],
        )
        canvas.name_rows(axes, names)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("instances with one request in flight", loc="left")
        return finish("Instances until a resource is used up", answer["sentence"])


def explanation(found: dict[str, Any], width: Width = "wide") -> str:
    """The published arm with LMCache as predicted for both shapes, and the published figure."""
    published = found["published"]
    with canvas.sheet("explanation", width, 190) as (figure, finish):
        axes = canvas.axes(figure, left=104, right=20, top=14, bottom=42)
        shapes = list(reversed(found["shapes"].items()))
        for row, (_, shape) in enumerate(shapes):
            low, high = shape["speedup"]
            axes.barh(row, high - low, left=low, height=0.45, color=COLOURS["b"], alpha=0.6)
            axes.vlines(shape["speedup_bound"], row - 0.3, row + 0.3, COLOURS["muted"], "dashed")
        axes.axvline(published["speedup"], color=COLOURS["ref"], linewidth=2)
        axes.text(published["speedup"], 1.45, " published 1.95x", color=COLOURS["ref"], va="bottom")
        axes.set_ylim(-0.5, 1.9)
        canvas.name_rows(axes, [name.replace("_", " + ") for name, _ in shapes])
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0)
        axes.set_xlabel("speedup, derived; dashed: bound of whole blocks", loc="left")
        return finish(
            "The published speedup, explained",
            "Ranges derived from the published settings, for both shapes of the workload.",
        )


QUESTIONS: dict[str, Callable[..., str]] = {
    "capacity": capacity,
    "l1_size": l1_size,
    "break_even": break_even,
    "reuses": reuses,
    "chunk": chunk,
    "disk": disk,
    "faster_disk": faster_disk,
    "instances": instances,
}
"""The figure of each question of ``kvlab.sizing.questions``."""
NEEDS = {
    "break_even": "compute_ms",
    "reuses": "cumulated_ms",
    "disk": "bytes_per_day",
    "faster_disk": "ttft_ms",
    "instances": "instances",
}
"""The key without which an answer has no figure."""


def of_question(name: str, answer: dict[str, Any], width: Width = "wide") -> str | None:
    """The figure of an answer; None where its figures are not known."""
    if NEEDS.get(name, "sentence") not in answer:
        return None
    return QUESTIONS[name](answer, width)


def _curves(
    name: str,
    title: str,
    across: Sequence[float],
    series: dict[str, Sequence[float]],
    labels: tuple[str, str],
    description: str,
    width: Width,
    *,
    logarithmic: bool = False,
) -> str:
    """Some curves over one axis, with a legend above them."""
    with canvas.sheet(name, width, 250) as (figure, finish):
        axes = canvas.axes(figure, left=62, right=16, top=40, bottom=42)
        colours = ("a", "b", "l2", "ref")
        styles = ("-", "-", (0, (4, 2)), (0, (1, 1)))
        for (words, values), colour, style in zip(
            series.items(),
            colours[1:] if len(series) == 1 else colours,
            styles,
            strict=False,
        ):
            axes.plot(
                across, values, color=COLOURS[colour], linestyle=style, linewidth=2, label=words
            )
        if logarithmic:
            axes.set_xscale("log", base=2)
        else:
            axes.set_xlim(left=0)
        axes.set_ylim(bottom=min(0.0, *(min(values) for values in series.values())))
        canvas.format_ticks(
            axes, "x", lambda tick: f"{tick:,.3g}" if tick < 1000 else f"{tick:,.0f}"
        )
        canvas.format_ticks(
            axes, "y", lambda tick: f"{tick:,.0f}" if abs(tick) >= 10 else f"{tick:g}"
        )
        axes.set_xlabel(labels[0], loc="left")
        axes.set_ylabel(labels[1])
        _lines_legend(figure, min(3, len(series)) if width == "wide" else 1)
        return finish(title, description)


def _lines_legend(figure: Any, columns: int) -> None:
    axes = figure.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(axes.get_position().x0, 1.0),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
        handletextpad=0.5,
    )
