"""Summaries with every answer that the section on predictions may have to give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Summary = dict[str, Any]

MISSING = ("profile", "concurrency", "record-size", "l0-size", "baseline", "restores", "new")
BROKE = ("loop", "policy", "l0", "prefill", "restore", "unheard of")
SHARES = {"L0": 0.0, "L1": 0.4, "L2": 0.5, "recompute": 0.1}
TIME = {"value": 90.0, "ci95": [80.0, 100.0], "measured": 95.0}
PREDICTED = {
    "calibration": {
        "prefill": {
            "lengths": [1, 1121],
            "constant_ms": {"value": 8.0, "ci95": [7.0, 9.0]},
            "ms_per_1000_tokens": {"value": 80.0, "ci95": [75.0, 85.0]},
            "origin": {"constant": "measured", "linear": "measured", "quadratic": "measured"},
        },
        "restore": {
            "L1": {"latency_ms": {"value": 12.0, "ci95": [10.0, 14.0]}, "gb_per_s": 0.5, "n": 3},
            "L2": {"latency_ms": {"value": 18.0, "ci95": [15.0, 21.0]}, "n": 5},
        },
        "repeats": [1, 2],
        "halved": False,
    },
    "served_share": {
        tier: {"value": share, "range": [share, share], "replayed": share, "measured": share}
        for tier, share in SHARES.items()
    },
    "ttft_ms": {"baseline": TIME, "lmcache": {**TIME, "measured": 94.0}},
    "speedup": {"value": 1.0, "ci95": [0.9, 1.1], "measured": 1.01},
    "phases": 20,
    "at_most": {"speedup": 9.0},
    "blind_points": 1.0,
    "checks": [
        *({"id": f"share-{tier}", "holds": True} for tier in SHARES),
        {"id": "speedup", "holds": True},
    ],
    "as_predicted": True,
}


def cases(summary: Summary) -> Iterator[tuple[str, Summary]]:
    """Name and summary of each: what is missing, what broke, and how it was calibrated."""
    for reason in MISSING:
        yield f"not predicted: {reason}", {**summary, "predicted": {"missing": reason}}
    yield "as predicted", {**summary, "predicted": copy.deepcopy(PREDICTED)}
    for origin in ("arithmetic", "not separable"):
        other: Any = copy.deepcopy(PREDICTED)
        other["calibration"]["prefill"]["origin"]["quadratic"] = origin
        other["calibration"]["halved"] = True
        other["blind_points"] = 10.6
        yield f"predicted by {origin}", {**summary, "predicted": other}
    wrong: Any = copy.deepcopy(PREDICTED)
    wrong["as_predicted"] = False
    wrong["checks"] = [{"id": "share-L1", "holds": False, "broke": broke} for broke in BROKE] + [
        {"id": "speedup", "holds": None}
    ]
    wrong["served_share"]["L1"].pop("replayed")
    yield "not as predicted", {**summary, "predicted": wrong}
