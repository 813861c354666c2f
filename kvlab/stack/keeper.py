"""The process that owns one container: when kvlab ends in any way, the container goes too.

Like ``guard``, one per server, and with the same pipes: an order on stdin, reports on stdout, the
container's output as raw bytes on stderr. It asks the engine every second whether the container
still runs, so that the measuring process is not disturbed by that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

from docker.errors import APIError, NotFound

from kvlab.errors import KvlabError
from kvlab.stack import containers, daemon, guard, refusals
from kvlab.stack.daemon import Daemon
from kvlab.stack.guard import KILL_PATIENCE_S, report

ORPHAN_S = 10.0
"""How long a server may take to stop in order when kvlab is gone."""
SILENT_S = 10.0
"""An engine that does not answer for so long counts as gone, and the container with it."""
SAMPLE_S = 10.0
WAIT_S = 30 * 24 * 3600
"""Longer than any run."""
LAST_OUTPUT_S = 2.0
"""How long the last output may take to arrive once the container has ended."""


class Order(guard.Order):
    """What the keeper is told on its standard input; ``argv`` and ``env`` stand in ``config``."""

    name: str
    image: str
    """As the profile names it."""
    config: dict[str, Any]
    """See ``containers.config``."""


class Keeper(guard.Guard):
    """One container, from its creation to its removal."""

    order: Order

    def __init__(self, order: Order):
        super().__init__(order)
        self.engine: Daemon | None = None
        self.id: str | None = None
        self._over = False
        self._started_at = ""
        self._answered = time.monotonic()
        self._sampled: float | None = None
        self._output: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        return self.id is not None and not self._over

    def tree(self) -> list[int]:
        """The container's processes, where they run on this machine."""
        return [] if self.id is None else pids_of(self.id)

    def _start(self) -> bool:
        try:
            self.engine = daemon.connect()
            self._create()
            self._follow()
            self.engine.api.start(self.id)
            state = self.engine.api.inspect_container(self.id)["State"]
        except KvlabError as error:
            report("failed", error=error.message, hint=error.hint)
        except APIError as error:
            machine = self.engine.machine if self.engine else None
            refusal = refusals.explain(
                daemon.said(error), image=self.order["image"], machine=machine
            )
            report("failed", error=refusal.sentence, hint=refusal.hint)
        except daemon.UNREACHABLE as error:
            report("failed", error=f"the container engine stopped answering: {error}")
        else:
            threading.Thread(target=self._await_end, daemon=True).start()
            self._started_at = state["StartedAt"]
            started = _epoch(self._started_at)
            report("started", pid=state["Pid"], started=started, id=self.id)
            self._sample()
            return True
        self._remove()
        return False

    def _create(self) -> None:
        assert self.engine is not None
        config = self.order["config"]
        labels = {**config["Labels"], containers.KEEPER: containers.this_process()}
        body = {**config, "Labels": labels}
        made = self.engine.api.create_container_from_config(body, self.order["name"])
        self.id = made["Id"]

    def _follow(self) -> None:
        """Pass the container's output on, from its first byte: asked for before it starts."""
        assert self.engine is not None
        stream = self.engine.api.attach(self.id, stdout=True, stderr=True, stream=True)
        self._output = threading.Thread(target=_pass_on, args=(stream,), daemon=True)
        self._output.start()

    def _await_end(self) -> None:
        """Wake the keeper when the container ends, before it would look again by itself."""
        assert self.engine is not None
        with contextlib.suppress(*daemon.UNREACHABLE):
            self.engine.api.wait(self.id, timeout=WAIT_S)
        with contextlib.suppress(OSError):
            os.write(self._woken, b".")

    def _reap(self) -> None:
        """Look whether the container still runs, and is the one that was started."""
        if not self.alive:
            return
        assert self.engine is not None
        try:
            state = self.engine.api.inspect_container(self.id)["State"]
        except NotFound:
            self._end({}, "its container was removed by somebody else")
            return
        except daemon.UNREACHABLE as error:
            if time.monotonic() - self._answered > SILENT_S:
                self._end({}, f"the container engine no longer answers: {error}")
            return
        self._answered = time.monotonic()
        if not state["Running"]:
            self._end(state)
        elif state["StartedAt"] != self._started_at:
            self._started_at = state["StartedAt"]
            report("restarted", pid=state["Pid"], started=_epoch(self._started_at))
        elif not self.stopping_since:
            self._sample()

    def _end(self, state: Mapping[str, Any], trouble: str | None = None) -> None:
        self._over = True
        self.exit_code = state.get("ExitCode")
        if self._output:  # the reason is often in the last lines
            self._output.join(LAST_OUTPUT_S)
        report(
            "exited",
            exit_code=self.exit_code,
            oom_killed=state.get("OOMKilled"),
            trouble=trouble or state.get("Error") or None,
        )

    def _sample(self) -> None:
        """Report, now and then, what the container uses."""
        now = time.monotonic()
        if self._sampled is not None and now - self._sampled < SAMPLE_S:
            return
        self._sampled = now
        assert self.engine is not None
        with contextlib.suppress(*daemon.UNREACHABLE):
            stats = self.engine.api.stats(self.id, stream=False, one_shot=True)
            report("usage", **used(stats))

    def _stop(self) -> None:
        self.shm.watch(again=True)
        stop_s = min(self.order["stop_s"], ORPHAN_S) if self.orphaned else self.order["stop_s"]
        if self.alive and not self.hard:
            self._signal("SIGTERM")
            self._wait(lambda: not self.alive, stop_s)
        if self.alive:
            self._signal("SIGKILL")
        end = time.monotonic() + KILL_PATIENCE_S
        while self.alive and time.monotonic() < end:
            time.sleep(containers.POLL_S)
            self._reap()
        self._remove()

    def _signal(self, name: str) -> None:
        assert self.engine is not None
        # Refused when it has just ended; an engine that does not answer is seen by ``_reap``.
        with contextlib.suppress(*daemon.UNREACHABLE):
            self.engine.api.kill(self.id, name)

    def _remove(self) -> None:
        """Remove the container, again and again while the engine does not answer."""
        end = time.monotonic() + KILL_PATIENCE_S
        while self.id is not None and self.engine is not None:
            try:
                containers.remove(self.engine, self.id)
                return
            except daemon.UNREACHABLE as error:
                if time.monotonic() > end:
                    report("left", container=self.order["name"], error=str(error))
                    return
            time.sleep(containers.POLL_S)


def pids_of(container_id: str) -> list[int]:
    """The pids of a container's processes on this machine: its id is the name of their group."""
    found = []
    for pid in guard.processes():
        with contextlib.suppress(OSError):
            if container_id in (guard.PROC / str(pid) / "cgroup").read_text():
                found.append(pid)
    return found


def used(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Memory, without pages of files that nobody uses now, and processor time since the start.

    As ``docker stats`` counts them; None for what this kernel does not tell.
    """
    memory = stats.get("memory_stats") or {}
    detail = memory.get("stats") or {}
    idle = detail.get("total_inactive_file", detail.get("inactive_file", 0))
    held = memory.get("usage")
    cpu_ns = ((stats.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage")
    return {
        "memory_bytes": None if held is None else max(0, held - idle),
        "memory_limit_bytes": memory.get("limit"),
        "cpu_s": None if cpu_ns is None else cpu_ns / 1e9,
    }


def _pass_on(stream: Any) -> None:
    """Write every piece to the log as it comes; it may end anywhere, even within a character."""
    with contextlib.suppress(*daemon.UNREACHABLE):
        for piece in stream:
            while piece:
                piece = piece[os.write(2, piece) :]


def _epoch(stamp: str) -> float:
    """Seconds since the epoch of the engine's own time stamps, which have nanoseconds."""
    return datetime.fromisoformat(stamp).timestamp()


def main() -> int:
    """Keep the container of the order on standard input; the exit code."""
    return Keeper(cast(Order, guard.read_order())).run()


if __name__ == "__main__":
    sys.exit(main())
