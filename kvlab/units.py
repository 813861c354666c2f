"""Conversions between the units that records keep and the units that people read."""

from __future__ import annotations

import re

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
_SPANS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def ns_to_ms(ns: int) -> float:
    """Milliseconds of a span in nanoseconds."""
    return ns / NS_PER_MS


def ns_to_s(ns: int) -> float:
    """Seconds of a span in nanoseconds."""
    return ns / NS_PER_S


def duration(seconds: float) -> str:
    """A span as people say it in a progress line: ``45 s``, ``3 min 05 s``, ``1 h 02 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def about(seconds: float) -> str:
    """A span that is only estimated, in whole minutes: ``about 27 min``, ``about 1 h 05 min``."""
    minutes = max(0, round(seconds / 60))
    if minutes == 0:
        return "less than a minute"
    return f"about {minutes} min" if minutes < 60 else f"about {duration(60 * minutes)}"


def seconds(text: str) -> float:
    """The seconds of a span as people type it: ``90s``, ``15m``, ``36h``, ``7d``, ``2w``.

    ValueError when it is none.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*([smhdw])\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no span of time; write it as 90s, 15m, 36h, 7d or 2w")
    return float(match[1]) * _SPANS_S[match[2]]


def byte_size(count: float) -> str:
    """A byte count with a decimal unit, three digits at most: ``71.7 kB``, ``6.02 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
