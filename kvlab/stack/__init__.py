"""Starting the servers: what would run (plan), how it is started and watched, and what it logs.

Workloads see only ``Launch`` and ``Deployment``; processes, containers and the tests' fake stack
all provide them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One server's counters at one moment: samples summed over labels, or why there are none."""

    source: str
    at_ns: int
    samples: dict[str, float] | None = None
    info: dict[str, dict[str, str]] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """Whether a server is the one that was started, and still running."""

    name: str
    pid: int | None
    started: float | None
    """Start time in seconds since the epoch: a different one is a different server."""
    running: bool
    exit_code: int | None = None
    oom_killed: bool | None = None


class Deployment(Protocol):
    """One scenario's servers, ready to be asked."""

    scenario: str
    repeat: int
    vllm_url: str
    lmcache_url: str | None
    model: str
    """The served name, as requests must give it."""
    l2_path: Path | None
    facts: dict[str, Any]
    """What the logs and the servers say of themselves; the detail of the ``ready`` event."""

    async def scrape(self, *, only: str | None = None) -> list[Reading]:
        """The counters of every server, or of the one source named."""
        ...

    def state(self) -> list[ServiceState]:
        """Every server as it is now."""
        ...

    def check_alive(self) -> None:
        """Raise StackNotReady, with the last log lines, when a server has stopped."""
        ...

    async def reset_local_cache(self) -> bool | None:
        """Whether vLLM emptied its own cache (L0); None when it offers no way to."""
        ...


Launch = Callable[[str, int], AbstractAsyncContextManager[Deployment]]
"""``launch(scenario, repeat)``: fresh servers, stopped again when the context ends."""
