"""Starting the servers: what would run (plan), how it is started and watched, and what it logs.

Workloads see only ``Launch`` and ``Deployment``; processes, containers and the tests' fake stack
all provide them.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvlab.profile import Profile
from kvlab.records import Scrape
from kvlab.stack.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One server's counters at one moment: samples summed over labels, or why there are none."""

    source: str
    at_ns: int
    samples: dict[str, float] | None = None
    info: dict[str, dict[str, str]] = field(default_factory=dict)
    error: str | None = None

    def recorded(self, scenario: str, repeat: int, boundary: str) -> Scrape:
        """The reading as a run writes it down: of which launch it is, and where in it."""
        return Scrape(
            scenario=scenario,
            repeat=repeat,
            boundary=boundary,
            source=self.source,
            at_ns=self.at_ns,
            samples=self.samples,
            info=self.info,
            error=self.error,
        )


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

    def urls(self, role: str) -> list[str]:
        """The base URLs of every server in a role, in the order in which they started."""
        ...

    def names(self, role: str) -> list[str]:
        """The names of every server in a role, in the order in which they started."""
        ...

    def state(self) -> list[ServiceState]:
        """Every server as it is now."""
        ...

    def usage(self) -> list[Usage]:
        """What every process of every server uses now."""
        ...

    async def stop(self, name: str, *, hard: bool = False) -> None:
        """Stop one server and go on with the others."""
        ...

    def check_alive(self) -> None:
        """Raise StackNotReady, with the last log lines, when a server has stopped."""
        ...

    async def reset_local_cache(self) -> bool | None:
        """Whether every running vLLM emptied its own cache (L0); None: one offers no way to."""
        ...

    async def clear_memory_tier(self) -> bool | None:
        """Whether LMCache emptied L1, L2 untouched; None when it offers no way to."""
        ...


class Launch(Protocol):
    """Starts a scenario's servers, fresh; they are stopped again when the context ends."""

    def __call__(
        self,
        scenario: str,
        repeat: int,
        *,
        variant: Profile | None = None,
        label: str | None = None,
        l2_path: Path | None = None,
        keep_l2: bool = False,
        hard_stop: bool = False,
        probe: bool = True,
    ) -> AbstractAsyncContextManager[Deployment]:
        """The servers of ``scenario`` (see ``stack.plan``), ready to be asked.

        ``variant`` is another profile for this launch only. ``label`` is the name under which
        everything is recorded, the scenario's own unless given. ``l2_path`` is an L2 folder that
        may hold records; without it L2 starts empty, and goes with the launch unless ``keep_l2``.
        ``hard_stop`` ends the servers by SIGKILL. Without ``probe`` nothing proves beforehand that
        chunks are stored and restored: for settings that are known not to.
        """
        ...
