"""Who uses an L2 folder: servers that were given it, open files in it, and fresh writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from kvlab.disk.inventory import Entry
from kvlab.errors import HostBusy

SERVERS = ("lmcache", "vllm")
"""Words in the command line of a server that may have been given the folder."""
FRESH_S = 60.0
"""So soon after a write, its writer may still be there: in a container, or on another machine."""


def refuse_used(folder: Path, found: Sequence[Entry], *, now_s: float) -> None:
    """Raise HostBusy, naming who it is, when something uses the folder or just wrote to it."""
    for reason in uses(folder):
        raise HostBusy(
            f"{folder} is in use: {reason}", hint="stop the server first, then prune its records"
        )
    newest = max((entry.modified_s for entry in found), default=None)
    if newest is not None and now_s - newest < FRESH_S:
        raise HostBusy(
            f"{folder} is in use: a file was written {max(0.0, now_s - newest):.0f} s ago",
            hint=f"stop what writes there and wait {FRESH_S:.0f} s",
        )


def uses(folder: Path) -> Iterator[str]:
    """Each sign that a process of this machine uses the folder, in words.

    A process of another user shows its command line but not its files, and one in a container may
    know the folder by another name: no sign is no proof.
    """
    place = folder.resolve()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if _was_given(process.cmdline(), place):
                yield f"{process.name()} (pid {process.pid}) was started with it"
            elif any(Path(file.path).is_relative_to(place) for file in process.open_files()):
                yield f"{process.name()} (pid {process.pid}) has a file open in it"


def _was_given(command: Sequence[str], place: Path) -> bool:
    """Whether a server's command line names the folder, or one below it."""
    if not any(word in argument.lower() for argument in command for word in SERVERS):
        return False
    return any(
        part == str(place) or part.startswith(f"{place}/")
        for argument in command
        for part in argument.replace("'", '"').split('"')
    )
