"""One server as a container, with the keeper that removes it when kvlab cannot any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlab.stack import containers, daemon, keeper
from kvlab.stack.daemon import Daemon
from kvlab.stack.images import Image
from kvlab.stack.plan import Service
from kvlab.stack.server import Server

IMPORT_ROOT = Path(__file__).resolve().parents[2]


class ContainerServer(Server):
    """One service as a container under its keeper."""

    def __init__(
        self,
        service: Service,
        run_id: str,
        log: Path,
        *,
        engine: Daemon,
        image: Image,
        tell: Callable[..., None],
        made: str | None = None,
    ):
        """``tell(kind, **detail)`` writes an event; ``made`` is that of ``containers.config``."""
        super().__init__(service, run_id, log)
        self.engine = engine
        self.image = image
        self.id: str | None = None
        self._tell = tell
        self._made = made

    def _program(self) -> list[str]:
        return [sys.executable, "-P", "-m", keeper.__name__]

    def _variables(self) -> dict[str, str]:
        return {**daemon.variables(), "PYTHONPATH": str(IMPORT_ROOT)}

    def _order(self, stop_s: float) -> Mapping[str, Any]:
        return keeper.Order(
            owner=os.getpid(),
            argv=[],
            env={},
            cwd=None,
            stop_s=stop_s,
            remove=[],
            name=self.name,
            image=self.image.reference,
            config=containers.config(self.service, self.image, self.mark, made=self._made),
        )

    def _sweep(self) -> None:
        containers.sweep_service(self.engine, self.mark)

    def _take(self, report: dict[str, Any]) -> None:
        super()._take(report)
        match report["event"]:
            case "started":
                self.id = report["id"]
                self._tell("container_started", name=self.name, **self.facts())
            case "restarted":
                self.pid, self.started = report["pid"], report["started"]
                self.trouble = "the container engine has started it again"
            case "exited":
                self.trouble = report["trouble"] or self.trouble
            case "usage":
                used = {key: value for key, value in report.items() if key != "event"}
                self._tell("container_usage", name=self.name, **used)
            case "left":
                self._tell("left_behind", container=report["container"], error=report["error"])

    def tree(self) -> list[int] | None:
        """The pids of the container's processes; None where the engine runs elsewhere."""
        if self.engine.machine or self.id is None:
            return None
        return keeper.pids_of(self.id)

    def _out_of_memory(self) -> tuple[str, str]:
        limits = self.service.limits
        of = f" of {limits.memory}" if limits.memory else ""
        section = "container.lmcache_limits" if self.service.role == "lmcache" else "container"
        return (
            f"out of memory: its container has a limit{of}" if of else "out of memory",
            f"raise {section}.memory, or ask less of it" if of else "free memory",
        )

    def facts(self) -> dict[str, Any]:
        """What a run keeps of the container."""
        container = self.service.container
        assert container is not None
        return {
            "id": self.id,
            "image": self.image.id,
            "network": container.network,
            "ipc": container.ipc,
            "pid": container.pid,
            "user": self.service.user,
            **self.service.limits.model_dump(),
        }
