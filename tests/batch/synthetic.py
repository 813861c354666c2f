"""Visits whose runs are synthetic, made at once, also in another process. Never in a report."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kvlab import summary
from kvlab.batch.sweep import Sweep, Visit
from kvlab.errors import KvlabError
from tests.builders import make_run

DEATH = "KVLAB_TEST_DEATH"
"""A file in the environment: the first visit that removes it takes its worker with it."""


def measure(sweep: Sweep, visit: Visit, *, folder: Path, runs: Path) -> Path:
    """A run whose restored TTFT follows from the cell's seed; seed 99 fails."""
    seed = int(visit.cell.settings["workload.seed"])
    if seed == 99:
        raise KvlabError("vLLM did not start")
    if (death := os.environ.get(DEATH)) and _removed(Path(death)):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    run = make_run(
        runs / visit.key.replace("/", "-"),
        restored_ms=80.0 + 10 * seed + visit.turn,
        run=f"20261130T1200{seed:02}Z-two-round-embedded-{visit.turn:08x}",
    )
    summary.conclude(run)
    return run.path


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
