"""Whether the answers of one path equal the cold ones, position by position. Pure.

A path is a way for a context's cache to come back: from L0, L1, L2, or L2 after a restart. Its
answers are paired with those of a cold engine to the same tokens; how far each may be from it
follows from how far two cold engines are from each other (the noise floor).
"""

from __future__ import annotations

import statistics
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvlab import stats
from kvlab.correctness import FLOOR_FACTOR, ROUNDING, compare
from kvlab.records import RequestRecord

Pair = tuple[RequestRecord, RequestRecord]
"""A cold answer, and another one to the same tokens."""

MARGIN_FACTOR = 2
"""Two tokens that each move by the tolerance change places if they are so many of it apart."""
CORRUPT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Flip:
    """A position at which another token was chosen."""

    context_id: str
    nat: float
    """How far the log-probability of the cold token moved."""
    margin_nat: float
    """By how much the cold engine preferred its own token over the other one, at least."""


def tolerance(floor_nat: float | None, set_nat: float) -> float:
    """How far an answer may be from the cold one: three times the floor, or the set value."""
    return max(FLOOR_FACTOR * (floor_nat or 0.0), set_nat)


def margin(cold: RequestRecord, other: RequestRecord) -> float | None:
    """By how much the cold engine preferred its token over the other one's; None: it is unknown.

    A token that the cold answer does not list was below the least that it lists.
    """
    listed = cold.top_logprobs or {}
    own = listed.get(cold.token or "")
    if own is None or other.token is None:
        return None
    return own - listed.get(other.token, min(listed.values()))


def judge(pairs: Sequence[Pair], *, tolerance_nat: float) -> dict[str, Any]:
    """One path's figures and verdict: pass, pass with ties, fail or unknown, with the reason.

    The figures are the distribution of the absolute difference in the log-probability of the token
    that the cold engine chose. A token that flips is a tie when the cold engine's preference for
    its own is no more than two tokens within the tolerance can make up; otherwise it is an error,
    also where the cold token itself hardly moved.
    """
    compared = [(pair, found) for pair in pairs if (found := compare(*pair)) is not None]
    nats = [difference.nat for _, difference in compared]
    flips = [
        Flip(cold.context_id, difference.nat, margin(cold, other) or 0.0)
        for (cold, other), difference in compared
        if difference.flipped
    ]
    inexact = sum(not difference.exact for _, difference in compared)
    result: dict[str, Any] = {"pairs": len(compared), "flipped": len(flips)}
    if nats:
        result |= {
            "median_nat": statistics.median(nats),
            "p90_nat": stats.percentile(nats, 0.90),
            "max_nat": max(nats),
        }
    result["flips"] = [
        {"context": flip.context_id, "nat": flip.nat, "margin_nat": flip.margin_nat}
        for flip in flips
    ]
    missing = len(pairs) - len(compared)
    result["verdict"], result["reason"] = _verdict(nats, flips, inexact, missing, tolerance_nat)
    return result


def _verdict(
    nats: Sequence[float], flips: Sequence[Flip], inexact: int, missing: int, allowed: float
) -> tuple[str, str]:
    far = [nat for nat in nats if nat > allowed + ROUNDING]
    if far:
        return "fail", (
            f"{len(far)} of {len(nats)} answers differ by up to {max(far):.3g} nat;"
            f" allowed {allowed:.3g}"
        )
    wide = [f for f in flips if f.margin_nat > MARGIN_FACTOR * allowed + ROUNDING]
    if wide:
        return "fail", (
            f"{len(wide)} of {len(nats)} answers chose another token although the cold engine"
            f" preferred its own by up to {max(f.margin_nat for f in wide):.3g} nat"
        )
    if not nats:
        return "unknown", "no answer could be compared with a cold one"
    if missing:
        return "unknown", f"{missing} answers could not be compared with a cold one"
    if inexact:
        return "unknown", "an answer does not list the cold token; ask for more log-probabilities"
    found = f"{len(nats)} answers within {max(nats):.3g} nat; allowed {allowed:.3g}"
    if flips:
        widest = max(f.margin_nat for f in flips)
        return "pass with ties", f"{found}; {len(flips)} ties, {widest:.3g} nat apart at most"
    return "pass", found


def foreign_share(text: str, scripts: Collection[str] = ("LATIN",)) -> float:
    """The share of characters that no answer in these scripts holds, of all letters and U+FFFD.

    Scripts are named as Unicode names its letters: LATIN, CJK, HIRAGANA, …
    """
    letters = [char for char in text if char.isalpha() or char == "\ufffd"]
    known = sum(unicodedata.name(char, "").partition(" ")[0] in scripts for char in letters)
    return 1 - known / len(letters) if letters else 0.0


def is_corrupt(text: str, scripts: Collection[str] = ("LATIN",)) -> bool:
    """Whether a text that should be in these scripts is visibly none: a wrong cache's rubbish.

    For models that write language. One with random weights answers rubbish even when it is right.
    """
    return foreign_share(text, scripts) > CORRUPT_SHARE
