"""Processes that outlived their guard: found by the mark in their environment, and ended.

The guards stop what they own. This is for the rare case that a guard itself was killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from kvlab.stack import guard

MARK = "KVLAB_SERVICE"
"""Environment variable of every process that kvlab starts: ``<run id>:<service>``."""
KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that some launch of kvlab started."""

    pid: int
    name: str
    run: str
    service: str
    guard: str

    @property
    def orphan(self) -> bool:
        """Its guard is gone, so nobody will stop it."""
        pid, _, ticks = self.guard.partition(":")
        found = guard.stat(pid) if pid.isdigit() else None
        return found is None or str(found.start_ticks) != ticks


def find(run_id: str | None = None) -> list[Leftover]:
    """Every process that carries kvlab's mark, or only those of one run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            run, _, service = environ.get(MARK, "").rpartition(":")
            if not service or not _runs(process):
                continue
            if run_id in (None, run) and process.pid != os.getpid():
                owner = environ.get(guard.GUARD_VARIABLE, "")
                found.append(Leftover(process.pid, process.name(), run, service, owner))
    return found


def sweep(run_id: str) -> list[int]:
    """The pids of the run's processes that were still there; they are gone now."""
    return _kill(find(run_id))


def sweep_service(mark: str) -> list[int]:
    """Like ``sweep``, for one service of a run."""
    run, _, service = mark.rpartition(":")
    return _kill(one for one in find(run) if one.service == service)


def sweep_orphans() -> list[int]:
    """Like ``sweep``, for processes of any run whose guard is gone."""
    return _kill(one for one in find() if one.orphan)


def _kill(found: Iterable[Leftover]) -> list[int]:
    processes = []
    for one in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(one.pid))
    segments = guard.mapped_segments(process.pid for process in processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    end = time.monotonic() + KILL_S
    while any(map(_runs, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    guard.remove_segments(segments)
    return [process.pid for process in processes]


def _runs(process: psutil.Process) -> bool:
    """Whether it is there; a zombie that its new parent has not collected yet is not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
