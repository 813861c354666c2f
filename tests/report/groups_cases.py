"""Summaries of object-groups and of the bill, with every answer that a report may have to give."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlab import report
from tests.group_runs import OFF, ON, make_groups_run

Summary = dict[str, Any]

REASONS = (
    *("both wrong", "unknown", "faster is worse", "correctness", "faster", "recipe"),
    "no difference",
)
BILL = {
    "cold": {
        "ttft_ms": {"baseline": 150.0, "lmcache": 153.0},
        "answer": "not slower",
        "margin": 0.05,
        "ratio": 1.02,
        "ci95": [1.0, 1.04],
        "upper95": 1.03,
    },
    "decode": {
        "output_tokens": 32,
        "requests": {"baseline": 9, "lmcache": 9},
        "stored_objects": 90.0,
        "time_per_output_token_ms": {"baseline": {"median": 9.1}, "lmcache": {"median": 9.4}},
        "ratio": 1.03,
        "ci95": [0.99, 1.08],
    },
    "server": {"memory_bytes": {"min": 480e6, "max": 500e6}, "cpu_ms_per_request": 12.5},
    "writes": {
        "bytes_per_context": 1_433_600.0,
        "bytes_per_served_token": 1280.0,
        "writes_per_useful_read": 1.0,
    },
    "break_even": {"cost_ms": 3.0, "saving_ms": 120.0, "never": False, "visits": 2},
}


@lru_cache
def _groups() -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        return report.load(make_groups_run(Path(folder)))


def groups() -> Summary:
    """A summary of object-groups of its own for each caller."""
    return copy.deepcopy(_groups())


def cases(base: Summary) -> Iterator[tuple[str, Summary]]:
    """The A/B's summary with an object-groups run beside it, and with a bill, by name."""
    for answer in ("equivalent", "different", "undecided"):
        one = groups()
        one["equivalence"]["answer"] = answer
        yield f"groups {answer}", {**base, "others": {"object-groups": one}}
    for reason in REASONS:
        one = groups()
        one["recommendation"] = {"setting": OFF, "reason": reason}
        yield f"groups for {reason}", {**base, "others": {"object-groups": one}}
    for verdict in ("pass with ties", "fail", "unknown"):
        one = groups()
        one["correctness"][ON]["verdict"] = verdict
        yield f"groups {verdict}", {**base, "others": {"object-groups": one}}
    for answer in ("not slower", "slower", "undecided"):
        bill = copy.deepcopy(BILL)
        bill["cold"]["answer"] = answer  # type: ignore[index]
        bill["break_even"]["never"] = answer == "slower"  # type: ignore[index]
        yield f"bill {answer}", {**base, "bill": bill}
    once = groups()
    once["workload"]["repeats"] = 1
    yield "groups alone", groups()
    yield "groups once", {**base, "others": {"object-groups": once}}
    wrong = groups()
    wrong["verdict"]["status"] = "invalid"
    wrong["invariants"][0] |= {"holds": False, "detail": "ablation not defined"}
    yield "groups invalid", {**base, "others": {"object-groups": wrong}}
