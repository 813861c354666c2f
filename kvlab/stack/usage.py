"""What the processes of a server use: memory, processor time, open files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One process of one server at one moment."""

    service: str
    name: str
    """The process's own name: a server consists of several."""
    pid: int
    rss_bytes: int
    """Memory that it holds; pages that it shares with another process count for both."""
    cpu_s: float
    """Processor time since it started."""
    files: int | None
    """Open file descriptors; None for a process of another user."""


def of(service: str, pids: Iterable[int]) -> list[Usage]:
    """What each of these processes uses; one that has ended meanwhile is not there."""
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                found.append(
                    Usage(
                        service=service,
                        name=process.name(),
                        pid=pid,
                        rss_bytes=process.memory_info().rss,
                        cpu_s=times.user + times.system,
                        files=_files(process),
                    )
                )
        except psutil.Error:
            continue
    return found


def _files(process: psutil.Process) -> int | None:
    try:
        return process.num_fds()
    except psutil.AccessDenied:
        return None
