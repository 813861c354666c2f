"""What both fake servers share: a log, a port, a start that can fail, and a death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NoReturn

from tests.fake_stack import lines
from tests.fake_stack.metrics import Series
from tests.fake_stack.settings import Fault, Role, Settings
from tests.fake_stack.wire import Handler, Listener, Reply, Request


class ExitedAtStart(Exception):
    """The server ended before it listened, as its fault says."""


class FakeServer:
    """One server: inside a test's event loop, or the whole of a process."""

    role: Role
    health = "/health"

    def __init__(self, settings: Settings, *, echo: bool = False):
        self.settings = settings
        self.series = Series(settings, self.role)
        self.log: list[str] = []
        self.url = ""
        self.started = time.time()
        self.exit_code: int | None = None
        self.kill: Callable[[int], None] = self._die_here
        """How it dies: a process really does."""
        self._echo = echo
        self._listener = Listener(
            {
                ("GET", self.health): self._health,
                ("GET", "/metrics"): self._metrics,
                **self.routes(),
            }
        )

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def heads(self) -> list[dict[str, str]]:
        """The headers of every request that did not come from the other fake server."""
        return [head for path, head in self._listener.heads if not path.startswith("/fake/")]

    def routes(self) -> dict[tuple[str, str], Handler]:
        raise NotImplementedError

    def fault(self, name: str) -> Fault | None:
        return self.settings.fault(self.role, name)

    def say(self, *texts: str) -> None:
        """Write log lines, as the real server words them."""
        for text in texts:
            self.log.append(text)
            if self._echo:
                print(text, flush=True)

    async def start(self, port: int = 0) -> None:
        """Listen; raises ExitedAtStart when a fault says so."""
        if slow := self.fault("slow_start"):
            await asyncio.sleep(slow.value or 0.3)
        if failed := self.fault("exit_at_start"):
            self.say(failed.value or "RuntimeError: Engine core initialization failed.")
            self.exit_code = 1
            raise ExitedAtStart(self.log[-1])
        if fallback := self.fault("fallback_lines"):
            self.say(*(fallback.value or lines.FALLBACKS))
        await self.before_listening()
        bound = await self._listener.start(port)
        self.url = f"http://127.0.0.1:{bound}"
        self.say(*lines.listening(self.role, self.url))

    async def before_listening(self) -> None:
        """Whatever the server does first."""

    async def stop(self) -> None:
        """An orderly end; nothing happens to a server that is dead already."""
        await self._listener.stop()
        if self.running:
            self.exit_code = 0
            self.say("INFO:     Application shutdown complete.")

    def die(self, code: int) -> NoReturn:
        """End at once; a negative code is the signal that did it."""
        self.kill(code)
        raise ConnectionResetError

    def _die_here(self, code: int) -> None:
        self.exit_code = code
        self._listener.cut()

    async def _health(self, request: Request, reply: Reply) -> None:
        if self.fault("unhealthy"):
            content: Any = {"status": "unhealthy", "reason": "engine not initialized"}
            await reply.json(content, 503)
        else:
            await self.send_health(reply)

    async def send_health(self, reply: Reply) -> None:
        await reply.send(b"")

    def refresh_gauges(self) -> None:
        """Bring the gauges up to date before a scrape."""

    async def _metrics(self, request: Request, reply: Reply) -> None:
        if self.fault("metrics_error"):
            await reply.json({"error": "metrics are broken"}, 500)
            return
        self.refresh_gauges()
        kind = "text/plain; version=1.0.0; charset=utf-8"
        await reply.send(self.series.text().encode(), content_type=kind)
