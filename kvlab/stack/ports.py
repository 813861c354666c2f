"""Ports of this machine: which are free, and who holds the others."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import psutil

from kvlab.errors import HostBusy


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that listens on a port; the pid is None where the system does not tell."""

    pid: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.pid is None else f"{self.name} (pid {self.pid})"


def free(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports on which nothing listens now."""
    with contextlib.ExitStack() as stack:
        chosen = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind((host, 0))
            chosen.append(int(listener.getsockname()[1]))
        return chosen


def refuse_taken(ports: Collection[int], host: str) -> None:
    """Raise HostBusy, naming the holder, when something listens on one of the ports."""
    for port in sorted(ports):
        if (holder := holder_of(port)) or not _can_bind(host, port):
            raise HostBusy(
                f"port {port} is in use by {holder or 'another process'}",
                hint="stop it, or set the port to 0 in the profile so that a free one is chosen",
            )


def holder_of(port: int) -> Holder | None:
    """Who listens on a port; None when nobody does, as far as the system tells."""
    return next(iter(holders(port)), None)


def holders(port: int) -> Iterator[Holder]:
    """Everyone who listens on a port of this machine."""
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,):
            yield Holder(connection.pid, _name(connection.pid))


def _name(pid: int | None) -> str:
    if pid is None:
        return "another user's process"
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "a process that has just ended"


def _can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise HostBusy(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="set the host to an address of this machine, or the port to 0",
            ) from error
    return True
