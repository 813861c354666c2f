"""From a run folder to the one dictionary that a report is made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from kvlab.rundir import RunDir, from_home

Summary = dict[str, Any]

ABOUT = (
    "kvlab_version",
    "profile",
    "profile_sha256",
    "host",
    "fingerprint",
    "model",
    "connector",
    "commands",
    "nonce",
    "seeds",
    "resumed",
    "order",
    "versions",
    "images",
)
"""What a report takes from the manifest, beside the summary."""


def load(run: RunDir | Path | str, others: Iterable[RunDir | Path | str] = ()) -> Summary:
    """The summary of a run, rebuilt from its records, with ``about``: what the manifest knows.

    ``others`` are runs of other experiments, which become sections of the same report. The path of
    a folder that holds the runs of one reproduction stands for all of them.
    """
    from kvlab import summary

    if not isinstance(run, RunDir) and (below := runs_below(run)):
        (whole,) = load_all(below)[:1]
        return whole
    folder = run if isinstance(run, RunDir) else RunDir.open(run)
    found = with_manifest(summary.summarise(folder), folder.manifest)
    beside = [load(other) for other in others]
    return {**found, "others": {one["experiment"]: one for one in beside}} if beside else found


def runs_below(path: Path | str) -> list[Path]:
    """The run folders right below a folder that is no run itself, in the order of their time."""
    place = from_home(path)
    if (place / "manifest.json").exists():
        return []
    return sorted(manifest.parent for manifest in place.glob("*/manifest.json"))


def load_all(runs: Sequence[Path | str]) -> list[Summary]:
    """One summary per report: runs of other experiments join the only two-round run among them."""
    folders = [RunDir.open(one) for run in runs for one in (runs_below(run) or [Path(run)])]
    whole = [folder for folder in folders if folder.manifest.get("experiment") == "two-round"]
    if len(whole) != 1:
        return [load(folder) for folder in folders]
    return [load(whole[0], [folder for folder in folders if folder is not whole[0]])]


def with_manifest(summary: Summary, manifest: dict[str, Any]) -> Summary:
    """The summary with the facts of the manifest that a report shows, under ``about``."""
    return {**summary, "about": {key: manifest[key] for key in ABOUT if key in manifest}}


def day_of(run: str) -> date | None:
    """The UTC day on which a run began, which its name states."""
    stamp = re.match(r"(\d{8}T\d{6})Z", run)
    if stamp is None:
        return None
    return datetime.strptime(stamp[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).date()
