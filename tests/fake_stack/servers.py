"""Both servers inside the caller's event loop, or one of them as this whole process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.fake_stack.base import ExitedAtStart, FakeServer
from tests.fake_stack.lmcache import FakeLmcache
from tests.fake_stack.settings import Settings
from tests.fake_stack.vllm import FakeVllm

CHILD_LIVES_S = 120


@dataclass(frozen=True, slots=True)
class Stack:
    """Running servers, with everything about them open to a test."""

    vllm: FakeVllm
    lmcache: FakeLmcache | None
    more: tuple[FakeVllm, ...] = ()
    """Further vLLM instances on the same LMCache server."""

    @property
    def vllm_url(self) -> str:
        return self.vllm.url

    @property
    def lmcache_url(self) -> str | None:
        return self.lmcache.url if self.lmcache else None

    @property
    def l2_path(self) -> Path | None:
        return self.lmcache.l2_path if self.lmcache else None

    @property
    def servers(self) -> list[FakeServer]:
        """The servers in the order in which they started."""
        return [*([self.lmcache] if self.lmcache else []), self.vllm, *self.more]


@asynccontextmanager
async def start(
    settings: Settings | None = None, *, lmcache: bool = True, instances: int = 1
) -> AsyncIterator[Stack]:
    """Servers that answer, stopped again at the end; raises ExitedAtStart."""
    settings = settings or Settings()
    async with AsyncExitStack() as exits:
        cache = None
        if lmcache:
            folder = None
            if settings.l2:
                given = settings.l2_path
                fresh = given or exits.enter_context(tempfile.TemporaryDirectory(prefix="fake-l2-"))
                folder = Path(fresh)
            cache = FakeLmcache(settings, folder)
            exits.push_async_callback(cache.stop)
            await cache.start()
        vllms = []
        for _ in range(instances):
            vllms.append(FakeVllm(settings, cache.url if cache else None))
            exits.push_async_callback(vllms[-1].stop)
            await vllms[-1].start()
        yield Stack(vllms[0], cache, tuple(vllms[1:]))


async def serve(server: FakeServer, port: int) -> int:
    """The exit code of a process that is this server, until it is told to stop."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    ignored = server.fault("ignores_sigterm") is not None
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if ignored else stopping.set)
    server.kill = _end_process
    children = [_start_child() for _ in range(server.settings.children)]
    try:
        await server.start(port)
        await stopping.wait()
    except ExitedAtStart:
        return server.exit_code or 1
    finally:
        await server.stop()
        for child in children:
            child.kill()
            child.wait()
    return 0


def _end_process(code: int) -> NoReturn:
    """Die as asked: by that signal, or with that exit code; children stay behind."""
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _start_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({CHILD_LIVES_S})"])
