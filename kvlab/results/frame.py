"""The frame of every summary: what it is of, the verdict, the figures, and the conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab import verdict
from kvlab.invariants import Invariant
from kvlab.rundir import RunDir

SCHEMA = 1


def frame(
    run: RunDir,
    reached: verdict.Verdict,
    figures: Mapping[str, Any],
    held: Sequence[Invariant],
) -> dict[str, Any]:
    """A run's summary as the JSON that is written and read again.

    ``figures`` are the experiment's own; those that are None were not measured, and are left out.
    """
    return clean(
        {
            "schema": SCHEMA,
            "experiment": run.manifest["experiment"],
            "profile": run.manifest["profile"]["name"],
            "run": run.id,
            "status": run.manifest.get("status"),
            "verdict": {"status": reached.status, "reasons": list(reached.reasons)},
            **figures,
            "invariants": [invariant.as_dict() for invariant in held],
        }
    )


def verdict_lines(found: Mapping[str, Any]) -> list[str]:
    """The first lines of a summary on a terminal: the verdict and its reasons."""
    reached = found["verdict"]
    return [f"verdict: {reached['status']}", *(f"  - {reason}" for reason in reached["reasons"])]


def clean(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without what was not measured, as the JSON that is written and read again."""
    cleaned: dict[str, Any] = json.loads(json.dumps(_known(summary), allow_nan=False))
    return cleaned


def _known(value: Any) -> Any:
    """A value without null entries; series keep theirs, as they mark failed requests."""
    if isinstance(value, Mapping):
        kept = {str(key): _known(item) for key, item in value.items() if item is not None}
        # Whether an invariant holds is null on purpose: unknown is one of three answers.
        return {**kept, "holds": value["holds"]} if "holds" in value else kept
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value
