"""Processes that outlived their guard: found by the mark in their environment, and ended.

The guards stop what they own. This is for the rare case that a guard itself was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvlab.stack import guard

MARK = "KVLAB_SERVICE"
"""Environment variable of every process that kvlab starts: ``<run id>:<service>``."""
FOLDER_PREFIX = "kvlab-"
"""How the temporary folders of servers are named."""
KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that some launch of kvlab started."""

    pid: int
    name: str
    run: str
    service: str
    guard: str
    temporary: str

    @property
    def orphan(self) -> bool:
        """Its guard is gone, so nobody will stop it."""
        pid, _, ticks = self.guard.partition(":")
        found = guard.stat(pid) if pid.isdigit() else None
        return found is None or found.state in "ZX" or str(found.start_ticks) != ticks


def find(run_id: str | None = None) -> list[Leftover]:
    """Every process that carries kvlab's mark, or only those of one run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            run, _, service = environ.get(MARK, "").rpartition(":")
            if not service or run_id not in (None, run) or process.pid == os.getpid():
                continue
            if _runs(process) and _is_near(process.pid):
                owner, folder = environ.get(guard.GUARD_VARIABLE, ""), environ.get("TMPDIR", "")
                found.append(Leftover(process.pid, process.name(), run, service, owner, folder))
    return found


def _is_near(pid: int) -> bool:
    """Whether a process counts pids as we do; a container's guard has another pid for us."""
    with contextlib.suppress(OSError):
        own = (guard.PROC / "self/ns/pid").readlink()
        return (guard.PROC / str(pid) / "ns/pid").readlink() == own
    return False


def sweep(run_id: str) -> list[int]:
    """The pids of the run's processes that were still there; they are gone now."""
    return _sweep(lambda one: one.run == run_id)


def sweep_service(mark: str) -> list[int]:
    """Like ``sweep``, for one service of a run."""
    return _sweep(lambda one: f"{one.run}:{one.service}" == mark)


def sweep_orphans() -> list[int]:
    """Like ``sweep``, for processes of any run whose guard is gone."""
    return _sweep(lambda one: one.orphan)


def _sweep(wanted: Callable[[Leftover], bool]) -> list[int]:
    swept: set[int] = set()
    segments: set[str] = set()
    folders: set[Path] = set()
    end = time.monotonic() + KILL_S
    # Again and again: one of them may start another while it is being killed.
    while (found := [one for one in find() if wanted(one)]) and time.monotonic() < end:
        segments |= guard.mapped_segments(one.pid for one in found)
        folders |= {Path(one.temporary) for one in found}
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)
            swept.add(one.pid)
        time.sleep(0.02)
    guard.remove_segments(segments)
    for folder in folders:
        if folder.name.startswith(FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(swept)


def _runs(process: psutil.Process) -> bool:
    """Whether it is there; a zombie that its new parent has not collected yet is not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
