"""The sheet that figures are drawn on: matplotlib set up once, and its SVG made fit for a page.

Text stays text, colours become CSS variables with a fallback, ids belong to one figure, nothing in
the bytes depends on the day or the machine's fonts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import escape

from kvlab.i18n import Text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Width = Literal["wide", "narrow"]

POINTS = {"wide": 720, "narrow": 340}
"""Width of a figure in CSS pixels; a page shows the one that fits."""

COLOURS = {
    "ink": "#1d242c",
    "muted": "#5d6771",
    "grid": "#d9dee3",
    "a": "#77828d",
    "b": "#0072b2",
    "ref": "#b3541e",
    "l0": "#56b4e9",
    "l1": "#0a6ba8",
    "l2": "#e69f00",
    "recompute": "#a3abb3",
    "paper": "#fffffe",
    "light": "#fefefe",
    "dark": "#11171c",
}
"""After Okabe and Ito: told apart by people with any common colour vision, and by lightness.

``light`` and ``dark`` stand on a bar's own colour and stay the same on dark screens.
"""

LOG_SPREAD = 12.0
"""A time axis turns logarithmic when the slowest request took this many times the fastest."""
TIERS = ("L0", "L1", "L2", "recompute")
HATCHES = {"L0": "", "L1": "", "L2": "//", "recompute": ""}
STAND_INS = range(0x2600, 0x27C0)


def axes(figure: Figure, *, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes with margins in points; only the lower line and a light grid are drawn."""
    wide, high = (size * 72 for size in figure.get_size_inches())
    drawn = figure.add_axes(
        (left / wide, bottom / high, (wide - left - right) / wide, (high - top - bottom) / high)
    )
    drawn.set_facecolor("none")
    for side in ("top", "right", "left"):
        drawn.spines[side].set_visible(False)
    drawn.set_axisbelow(True)
    return drawn


def title(axes: Axes, words: str) -> None:
    """Write a panel's title above it."""
    axes.text(0, 1.04, words, transform=axes.transAxes, color=COLOURS["ink"], fontweight="bold")


def say(
    axes: Axes,
    x: float,
    y: float,
    words: str,
    colour: str,
    *,
    weight: str = "normal",
    size: float | None = None,
    middle: bool = False,
) -> None:
    """Write words into a panel, at a place of its data."""
    axes.text(
        x,
        y,
        words,
        color=COLOURS[colour],
        fontweight=weight,
        fontsize=size,
        va="center" if middle else "bottom",
        zorder=4,
    )


def ticks(axes: Axes, which: Literal["x", "y"], label: Callable[[float], str]) -> None:
    """Write the numbers of an axis as ``label`` says."""
    from matplotlib.ticker import FuncFormatter

    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda tick, _: label(tick)))


def time_axis(
    axes: Axes, times: Sequence[float], text: Text, which: Literal["x", "y"] = "y"
) -> None:
    """Zero-based, or logarithmic when the times are far apart."""
    if times and min(times) > 0 and max(times) / min(times) > LOG_SPREAD:
        from matplotlib.ticker import LogLocator, NullLocator

        getattr(axes, f"set_{which}scale")("log")
        axis = getattr(axes, f"{which}axis")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        getattr(axes, f"set_{which}lim")(min(times) * 0.85, max(times) * 1.15)
    else:
        getattr(axes, f"set_{which}lim")(0, (max(times) if times else 1) * 1.08)
    ticks(axes, which, lambda tick: text.plain_number(tick))


def legend(figure: Figure, axes: Axes, handles: list[Any], columns: int) -> None:
    """Draw the legend above the panels, from the left edge of ``axes`` on."""
    left = axes.get_position().x0
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 1.0),
        ncols=columns,
        frameon=False,
        borderaxespad=0.2,
        borderpad=0,
        handlelength=1.5,
        handletextpad=0.5,
        columnspacing=1.2,
    )


def stack(
    axes: Axes, place: float, tiers: Mapping[str, float], text: Text, *, height: float = 0.44
) -> None:
    """One bar of the shares that each tier has in all of them."""
    total = sum(tiers.get(tier) or 0 for tier in TIERS)
    start = 0.0
    for tier in TIERS:
        share = (tiers.get(tier) or 0) / total if total else 0.0
        if share <= 0:
            continue
        axes.barh(
            place,
            share,
            left=start,
            height=height,
            color=COLOURS[tier.lower()],
            edgecolor=COLOURS["paper"],
            hatch=HATCHES[tier],
            linewidth=0.8,
        )
        if share >= 0.14:
            _say_inside(axes, start + share / 2, place, text.percent(share), tier)
        start += share


def _say_inside(axes: Axes, x: float, y: float, words: str, tier: str) -> None:
    """Words in the middle of a bar, on a patch of its colour so that no hatch crosses them."""
    axes.text(
        x,
        y,
        words,
        color=COLOURS["light" if tier == "L1" else "dark"],
        fontweight="bold",
        va="center",
        ha="center",
        zorder=4,
        bbox={"facecolor": COLOURS[tier.lower()], "edgecolor": "none", "pad": 2},
    )


def legend_of_tiers(
    figure: Figure, axes: Axes, text: Text, columns: int, tiers: Sequence[str] = TIERS
) -> None:
    """The colours of these tiers."""
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=COLOURS[tier.lower()],
            edgecolor=COLOURS["paper"],
            hatch=HATCHES[tier],
            label=text(f"tier.{tier}"),
        )
        for tier in tiers
    ]
    legend(figure, axes, handles, columns)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names at the left of rows 0, 1, …, as text that any font can show."""
    axes.set_yticks([])
    for row, name in enumerate(names):
        axes.text(
            *(-0.02, row, name),
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            color=COLOURS["ink"],
        )


def format_ticks(axes: Axes, which: Literal["x", "y"], label: Callable[[float], str]) -> None:
    """Write the ticks of an axis as ``label`` says."""
    from matplotlib.ticker import FuncFormatter

    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda tick, _: label(tick)))


@contextmanager
def sheet(
    name: str, width: Width, height: float
) -> Iterator[tuple[Figure, Callable[[str, str], str]]]:
    """A figure to draw on, and the function that makes SVG of it, given title and description."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"kvlab-{name}-{width}",
        "font.family": ["DejaVu Sans"],
        "font.size": 12 if width == "wide" else 11,
        "axes.labelcolor": COLOURS["muted"],
        "axes.edgecolor": COLOURS["muted"],
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "grid.color": COLOURS["grid"],
        "grid.linewidth": 0.7,
        "text.color": COLOURS["ink"],
        "xtick.color": COLOURS["muted"],
        "ytick.color": COLOURS["muted"],
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "hatch.linewidth": 0.8,
        "axes.unicode_minus": True,
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(POINTS[width] / 72, height / 72))
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure)

        def finish(title: str, description: str) -> str:
            return _svg(figure, f"{name}-{width}", title, description)

        yield figure, finish


def _svg(figure: Figure, name: str, title: str, description: str) -> str:
    import io

    from matplotlib.text import Text as Label

    cover = _Cover()
    for label in figure.findobj(Label):
        if isinstance(label, Label):
            label.set_text(cover.put_on(label.get_text()))
    written = io.StringIO()
    figure.savefig(
        written,
        format="svg",
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    return _clean(cover.take_off(written.getvalue()), name, title, description)


class _Cover:
    """Stand-ins for letters that matplotlib's own font lacks, so that it can measure every label.

    matplotlib warns about a glyph that its font lacks, though the text goes into the SVG as text
    and the reader's browser has the font. So each such letter is replaced by a sign of about the
    same width while matplotlib works, and put back in the finished SVG.
    """

    def __init__(self) -> None:
        self._stand_in: dict[str, str] = {}

    def put_on(self, words: str) -> str:
        return "".join(self._cover(letter) for letter in words)

    def take_off(self, svg: str) -> str:
        return svg.translate({ord(sign): letter for letter, sign in self._stand_in.items()})

    def _cover(self, letter: str) -> str:
        known = _known_glyphs()
        code = ord(letter)
        if (code in known and code not in STAND_INS) or letter == "\n":
            return letter
        if letter not in self._stand_in:
            free = [c for c in STAND_INS if c in known]
            if len(self._stand_in) >= len(free):
                raise ValueError(f"a figure has more than {len(free)} letters without a glyph")
            self._stand_in[letter] = chr(free[len(self._stand_in)])
        return self._stand_in[letter]


@lru_cache(maxsize=1)
def _known_glyphs() -> frozenset[int]:
    """The letters of the font that comes with matplotlib and measures every figure."""
    from matplotlib import font_manager, ft2font

    return frozenset(ft2font.FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap())


def _clean(svg: str, name: str, title: str, description: str) -> str:
    """The bare ``<svg>`` element: no prolog, no metadata, ids of its own, colours as variables."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    svg = re.sub(r"font: ([^;\"]*?px) [^;\"]*", _plain_font, svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{name}-', svg)
    for role, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--fig-{role}, {colour})")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None, "matplotlib always writes a viewBox"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img" '
        f'viewBox="0 0 {size[1]} {size[2]}" width="{size[1]}" height="{size[2]}" '
        f'aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-description">{escape(description)}</desc>'
    )
    body = svg[svg.index(">") + 1 :]
    body = re.sub(r"\n(?=[LCz])", " ", body)
    return head + "\n".join(line.strip() for line in body.splitlines() if line.strip())


def _plain_font(match: re.Match[str]) -> str:
    """``font: bold 12px 'DejaVu Sans'`` without the family: the page's own fonts are used."""
    *variants, size = match[1].split()
    weight = "font-weight: bold; " if {"bold", "700"} & set(variants) else ""
    return f"{weight}font-size: {size}"
