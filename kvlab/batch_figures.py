"""The figure of a batch: small multiples, a panel for each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvlab import canvas
from kvlab.canvas import COLOURS, Width
from kvlab.i18n import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
PER_LINE = {"wide": 3, "narrow": 1}
HIGH = 190
GAP = 26


def settings(rows: Sequence[Row], names: Sequence[str], text: Text, width: Width = "wide") -> str:
    """The speedup by the values of each setting; a line joins what differs in nothing else."""
    per_line = min(PER_LINE[width], len(names))
    lines = -(-len(names) // per_line)
    top = max(float(row["speedup"]) for row in rows) * 1.12
    total = canvas.POINTS[width]
    wide = (total - 16) / per_line
    with canvas.sheet("batch", width, lines * HIGH) as (figure, finish):
        for place, name in enumerate(names):
            line, column = divmod(place, per_line)
            axes = canvas.axes(
                figure,
                left=8 + column * wide + 34,
                right=total - 8 - (column + 1) * wide + GAP,
                top=line * HIGH + 34,
                bottom=(lines - line - 1) * HIGH + 32,
            )
            _panel(axes, rows, name, text)
            axes.set_ylim(0, top)
            canvas.title(axes, name)
        return finish(text("batch.figure.title"), text("batch.figure.description"))


def _panel(axes: Axes, rows: Sequence[Row], name: str, text: Text) -> None:
    levels = list(dict.fromkeys(str(row.get(name)) for row in rows))
    alike: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for row in rows:
        rest = tuple(
            str(value)
            for key, value in row.items()
            if key == "pass" or ("." in key and key != name)
        )
        point = (levels.index(str(row.get(name))), float(row["speedup"]))
        alike.setdefault(rest, []).append(point)
    for points in alike.values():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, color=COLOURS["a"], linewidth=1, zorder=2)
        axes.plot(x, y, "o", color=COLOURS["b"], markersize=6, zorder=3)
    axes.axhline(1, color=COLOURS["muted"], linewidth=1, linestyle=(0, (2, 2)))
    axes.set_xlim(-0.5, len(levels) - 0.5)
    axes.set_xticks(range(len(levels)), levels)
    canvas.ticks(axes, "y", lambda tick: f"{text.plain_number(tick)}×")
