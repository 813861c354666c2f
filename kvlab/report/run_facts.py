"""From a run folder to the one dictionary that a report is made of."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from kvlab.rundir import RunDir

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
)
"""What a report takes from the manifest, beside the summary."""


def load(run: RunDir | Path | str) -> Summary:
    """The summary of a run, rebuilt from its records, with ``about``: what the manifest knows."""
    from kvlab import summary

    folder = run if isinstance(run, RunDir) else RunDir.open(run)
    return with_manifest(summary.summarise(folder), folder.manifest)


def with_manifest(summary: Summary, manifest: dict[str, Any]) -> Summary:
    """The summary with the facts of the manifest that a report shows, under ``about``."""
    return {**summary, "about": {key: manifest[key] for key in ABOUT if key in manifest}}


def day_of(run: str) -> date | None:
    """The UTC day on which a run began, which its name states."""
    stamp = re.match(r"(\d{8}T\d{6})Z", run)
    if stamp is None:
        return None
    return datetime.strptime(stamp[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).date()
