"""The summary of a run: what its records mean, as one JSON object that ``verify`` can recompute.

Nothing in it depends on anything but the run folder: same records, same summary, to the last bit.
A figure that was not measured is absent, never 0 and never NaN. What an experiment's records mean
is for its module in ``kvlab.results``; this one only finds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kvlab import stats
from kvlab.errors import RunFolderError
from kvlab.rundir import RunDir

EXPERIMENTS: tuple[str, ...] = (
    "two-round",
    "acceptance",
    "restart",
    "object-groups",
    "shared-cache",
    "eviction",
    "parallel-read",
    "storage",
    "soak",
)
"""Each has a module of its name in ``kvlab.results``, with ``summarise`` and ``text``."""


def conclude(run: RunDir) -> dict[str, Any]:
    """The run's summary, after writing it into the folder and sealing the folder."""
    summary = summarise(run)
    run.write_summary(summary)
    run.seal()
    return summary


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a run, complete or partial."""
    return dict(_results(run.manifest.get("experiment"), str(run.path)).summarise(run))


def text(summary: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    return str(_results(summary.get("experiment"), "the summary").text(summary))


def times(run: RunDir) -> dict[str, stats.Arm]:
    """TTFT in ms of every arm that runs can be compared by; empty where an experiment has none."""
    module = _results(run.manifest.get("experiment"), str(run.path))
    found: dict[str, stats.Arm] = module.times(run) if hasattr(module, "times") else {}
    return found


def _results(experiment: Any, place: str) -> ModuleType:
    """The module that knows what an experiment's records mean."""
    if experiment not in EXPERIMENTS:
        raise RunFolderError(
            f"{place} is a run of {experiment!r}, which this kvlab cannot summarise",
            hint="update kvlab: pip install --upgrade kvlab",
        )
    return importlib.import_module(f"kvlab.results.{experiment.replace('-', '_')}")
