"""What the visits of a batch show together: one row for each, and what each setting changed. Pure.

Settings are compared within one machine only, pair by pair: two visits are a pair when they are of
the same pass and differ in nothing but the one setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab import stats
from kvlab.report.source import publishable

Row = dict[str, Any]
MEASURES = ("ttft_ms", "speedup")
"""Measures whose change is told: the treated arm's median TTFT, and the speedup."""


def row(
    turn: int,
    cell: int,
    settings: Mapping[str, Any],
    summary: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> Row:
    """A visit as a row of the tidy table; what its verdict does not allow to tell is None.

    Keys: ``pass``, ``cell``, ``run``, ``host`` (fingerprint), ``verdict``, ``ttft_ms`` and
    ``baseline_ttft_ms``, ``speedup`` with ``speedup_low`` and ``speedup_high``, ``served_l1`` and
    ``served_l2`` (shares of round 2), and each setting by its dotted key.
    """
    told = publishable(dict(summary))
    arms = list(summary.get("arms") or ())
    found: Row = {
        "pass": turn,
        "cell": cell,
        "run": summary.get("run"),
        "host": manifest.get("fingerprint"),
        "verdict": (summary.get("verdict") or {}).get("status"),
        "baseline_ttft_ms": None,
        "ttft_ms": None,
        "speedup": None,
        "speedup_low": None,
        "speedup_high": None,
        "served_l1": None,
        "served_l2": None,
    }
    if told and len(arms) == 2 and "speedup" in summary:
        times, speedup = summary["ttft_ms"], summary["speedup"]
        low, high = speedup.get("ci95") or (None, None)
        found |= {
            "baseline_ttft_ms": times[arms[0]].get("median"),
            "ttft_ms": times[arms[1]].get("median"),
            "speedup": speedup.get("value"),
            "speedup_low": low,
            "speedup_high": high,
        }
        found |= _served(summary, arms[1])
    return {**found, **settings}


def _served(summary: Mapping[str, Any], arm: str) -> dict[str, float]:
    tiers = summary["served_tokens"][arm]["measure"]
    total = sum(tiers.values())
    return {
        f"served_{tier.lower()}": tiers[tier] / total
        for tier in ("L1", "L2")
        if tier in tiers and total
    }


def effects(rows: Sequence[Row], *, seed: int) -> list[dict[str, Any]]:
    """What each setting changes: every pair of its values, by machine and measure.

    Keys: ``host``, ``setting``, ``first`` and ``second`` (its values), ``measure``, ``ratio`` (the
    first's over the second's, median over passes of the median over the other settings), ``ci95``,
    ``method``, and ``pairs``. Without an interval (a single pair), ``ratio`` alone is absent too.
    """
    found: list[dict[str, Any]] = []
    for host in sorted({str(one["host"]) for one in rows}):
        here = [one for one in rows if str(one["host"]) == host]
        for setting in varying(here):
            values = list(dict.fromkeys(_plain(one[setting]) for one in here if setting in one))
            for place, first in enumerate(values):
                for second in values[place + 1 :]:
                    found += _pairs(here, host, setting, first, second, seed)
    return found


def _pairs(
    rows: Sequence[Row], host: str, setting: str, first: Any, second: Any, seed: int
) -> Iterator[dict[str, Any]]:
    for measure in MEASURES:
        one = _arm(rows, setting, first, measure)
        other = _arm(rows, setting, second, measure)
        pairs = sum(len(one[turn].keys() & other[turn].keys()) for turn in one.keys() & other)
        told: dict[str, Any] = {
            "host": host,
            "setting": setting,
            "first": first,
            "second": second,
            "measure": measure,
            "pairs": pairs,
        }
        ratio = stats.ratio(_common(one, other), _common(other, one), seed=seed)
        if ratio is not None:
            told |= {"ratio": ratio.value, "ci95": [ratio.low, ratio.high], "method": ratio.method}
        yield told


def _arm(
    rows: Sequence[Row], setting: str, value: Any, measure: str
) -> dict[int, dict[int, float]]:
    """The measure where the setting has the value: by pass, then by the other settings' place."""
    others = [name for name in varying(rows) if name != setting]
    places: dict[tuple[Any, ...], int] = {}
    for one in rows:
        places.setdefault(tuple(_plain(one.get(name)) for name in others), len(places))
    found: dict[int, dict[int, float]] = {}
    for one in rows:
        if setting in one and _plain(one[setting]) == value and one[measure] is not None:
            place = places[tuple(_plain(one.get(name)) for name in others)]
            found.setdefault(one["pass"], {})[place] = float(one[measure])
    return found


def _common(one: dict[int, dict[int, float]], other: dict[int, dict[int, float]]) -> stats.Arm:
    """The values of the first that have a partner in the second."""
    return {
        turn: {place: value for place, value in values.items() if place in other[turn]}
        for turn, values in one.items()
        if turn in other
    }


def varying(rows: Sequence[Row]) -> list[str]:
    """The dotted keys of the settings among the columns, in their order, that vary at all."""
    names = dict.fromkeys(name for one in rows for name in one if "." in name)
    return [name for name in names if len({_plain(one.get(name)) for one in rows}) > 1]


def _plain(value: Any) -> Any:
    """A value that can be compared and hashed; lists and mappings by their text."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
