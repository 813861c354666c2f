"""Summaries of acceptance with every answer that a report must be able to give."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlab import report
from tests.acceptance_runs import make_acceptance_run

Summary = dict[str, Any]


@lru_cache
def _acceptance(**options: Any) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        off = {"stock": 0.4}
        return report.load(make_acceptance_run(Path(folder), off=off, **options))


def acceptance(**options: Any) -> Summary:
    """A summary of acceptance of its own for each caller."""
    return copy.deepcopy(_acceptance(**options))


def cases(base: Summary) -> Iterator[tuple[str, Summary]]:
    """The A/B's summary with an acceptance run beside it, by name."""
    for verdict in ("pass", "pass with ties", "fail", "unknown"):
        one = acceptance()
        one["paths"]["l2"]["verdict"] = verdict
        yield f"acceptance {verdict}", {**base, "others": {"acceptance": one}}
    restarted = acceptance(connector="stock", resets=False)
    yield "acceptance after restarts only", {**base, "others": {"acceptance": restarted}}
    wrong = acceptance()
    wrong["verdict"]["status"] = "invalid"
    wrong["invariants"][0] |= {"holds": False, "detail": "l2: 3 of 8 requests"}
    wrong["steps"][1]["holds"] = False
    yield "acceptance invalid", {**base, "others": {"acceptance": wrong}}
