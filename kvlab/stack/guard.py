"""The process that owns one server: when kvlab ends in any way, the server's whole tree ends too.

Run by path with an isolated interpreter, one per server. Standard library only: it must start fast
and depend on nothing that could fail with kvlab.

    stdin   one line of JSON (see ``Order``), then a pipe that kvlab holds open. Its end, a changed
            parent or SIGTERM stops the server in order; the word ``kill`` stops it at once.
    stdout  one JSON object per line: started, exited, shm, stopped, or failed.
    stderr  the server's log: what the server writes goes there as raw bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

TICK_S = 1.0
LAST_GRACE_S = 5.0
"""What the server leaves behind after its own end may take this long to stop in order."""
KILL_PATIENCE_S = 10.0
"""How long SIGKILL is repeated; what is still there then hangs in the kernel."""
GUARD_VARIABLE = "KVLAB_GUARD"
PROC = Path("/proc")
SHM = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
SHM_NAME = re.compile(r"lmcache_kv_(\d+)_\d+")
"""LMCache on CPU names its segments after the worker's pid, and leaves them when it is stopped."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Order(TypedDict):
    """What the guard is told on its standard input."""

    owner: int
    argv: list[str]
    env: dict[str, str]
    cwd: str | None
    stop_s: float
    remove: list[str]
    """Folders that are removed once the server is gone."""


class Stat(NamedTuple):
    """What /proc says of one process."""

    state: str
    parent: int
    start_ticks: int


def stat(pid: int | str) -> Stat | None:
    """State, parent and start of a process; None when there is none."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return Stat(fields[0].decode(), int(fields[1]), int(fields[19]))


def start_epoch(pid: int) -> float | None:
    """When a process started, in seconds since the epoch; None when it is gone."""
    found = stat(pid)
    if found is None:
        return None
    lines = (PROC / "stat").read_text().splitlines()
    boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    return boot + found.start_ticks / os.sysconf("SC_CLK_TCK")


def processes() -> list[int]:
    """The pids of every process that /proc shows."""
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def descendants(root: int) -> list[int]:
    """Every living process below ``root``, those that left its session included."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        if (found := stat(pid)) and found.state not in "ZX":
            children.setdefault(found.parent, []).append(pid)
    tree, level = [], [root]
    while level:
        level = [child for pid in level for child in children.get(pid, ())]
        tree += level
    return tree


def mapped_segments(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that any of the processes has mapped."""
    names = set()
    for pid in pids:
        try:
            with (PROC / str(pid) / "maps").open("rb") as stream:
                for line in stream:
                    _, found, path = line.partition(b" /dev/shm/")
                    if found:
                        names.add(path.rstrip(b"\n").decode("utf-8", "replace"))
        except OSError:
            continue
    return names


def segments() -> set[str]:
    """Names in /dev/shm."""
    try:
        return {entry.name for entry in SHM.iterdir()}
    except OSError:
        return set()


def remove_segments(names: Iterable[str]) -> list[str]:
    """The segments among ``names`` that were removed: those that are ours and nobody has mapped."""
    names = set(names) & segments()
    if not names:
        return []
    names -= mapped_segments(processes())
    removed = []
    for name in sorted(names):
        path = SHM / name
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()
                removed.append(name)
    return removed


class Segments:
    """The shared-memory segments that the server's processes made."""

    def __init__(self, tree: Callable[[], list[int]] | None = None) -> None:
        self._tree = tree or (lambda: descendants(os.getpid()))
        self._before = segments()
        self._seen = set(self._before)
        self._pids: set[int] = set()
        self.ours: set[str] = set()

    def watch(self, *, again: bool = False) -> bool:
        """Whether segments of ours were found. Cheap unless /dev/shm changed."""
        present = segments()
        if present == self._seen and not again:
            return False
        self._seen = present
        tree = self._tree()
        self._pids.update(tree)
        new = present - self._before - self.ours
        found = new & mapped_segments(tree)
        # A process that is gone has nothing mapped; its segments still carry its pid.
        for name in new - found:
            match = SHM_NAME.fullmatch(name)
            if match and int(match.group(1)) in self._pids:
                found.add(name)
        self.ours |= found
        return bool(found)


class Guard:
    """One server, from its start to the end of the last process that it left behind."""

    def __init__(self, order: Order):
        self.order = order
        self.shm = Segments(self.tree)
        self.server: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        self.hard = False
        self._held = True
        self.stopping_since: float | None = None
        self._oom_kills = _oom_kills()
        self._wake, self._woken = os.pipe()

    def tree(self) -> list[int]:
        """The pids of the server and of all that it started."""
        return descendants(os.getpid())

    def run(self) -> int:
        """Start the server, wait for its end or the order to end it, leave nothing behind."""
        self._listen()
        if not self._start():
            self._remove_folders()
            return 1
        while self.alive and not self.stopping_since:
            self._turn(TICK_S)
            if self.shm.watch():
                report("shm", names=sorted(self.shm.ours))
        began = self.stopping_since or time.monotonic()
        self._stop()
        report(
            "stopped",
            seconds=round(time.monotonic() - began, 3),
            exit_code=self.exit_code,
            left=self.tree(),
            shm_removed=remove_segments(self.shm.ours),
        )
        self._remove_folders()
        return 0

    @property
    def alive(self) -> bool:
        return self.server is not None and self.exit_code is None

    def _listen(self) -> None:
        """Adopt orphans of the server, and turn signals into wake-ups."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for end in (self._wake, self._woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._ask_to_stop())
        # Ctrl-C reaches kvlab, which stops its servers in order; the closing terminal likewise.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def _start(self) -> bool:
        me = os.getpid()
        own = stat(me)
        env = {**self.order["env"], GUARD_VARIABLE: f"{me}:{own.start_ticks if own else 0}"}
        libc = ctypes.CDLL(None)

        def in_child() -> None:
            # Not SIGKILL: killed like that, vLLM leaves its engine and workers running.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if os.getppid() != me:  # the guard died before the line above could count
                os._exit(1)

        try:
            self.server = subprocess.Popen(
                self.order["argv"],
                env=env,
                cwd=self.order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=2,
                stderr=2,
                start_new_session=True,
                preexec_fn=in_child,
            )
        except OSError as error:
            report("failed", error=f"{error.strerror}: {error.filename or self.order['argv'][0]}")
            return False
        report("started", pid=self.server.pid, started=start_epoch(self.server.pid))
        return True

    @property
    def orphaned(self) -> bool:
        """Whether kvlab is gone. A forked child of it may hold the pipe open after its death."""
        return os.getppid() != self.order["owner"]

    def _turn(self, seconds: float) -> None:
        """Wait for something to happen, at most so long, and take note of it."""
        watched = [0, self._wake] if self._held else [self._wake]
        readable, _, _ = select.select(watched, [], [], seconds)
        if self._wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if 0 in readable:
            word = os.read(0, 4096)
            self._held = word != b""
            self.hard = self.hard or b"kill" in word
            self._ask_to_stop()
        if self.orphaned:
            self._ask_to_stop()
        self._reap()

    def _ask_to_stop(self) -> None:
        self.stopping_since = self.stopping_since or time.monotonic()

    def _reap(self) -> None:
        """Collect every child that ended, adopted ones too, so that none stays a zombie."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.server and pid == self.server.pid:
                self.exit_code = self.server.returncode = os.waitstatus_to_exitcode(status)
                report("exited", exit_code=self.exit_code, oom_killed=self._was_oom_killed())

    def _was_oom_killed(self) -> bool | None:
        """Whether the kernel killed for memory while the server ran and it did not end by order."""
        now = _oom_kills()
        if now is None or self._oom_kills is None:
            return None
        return self.stopping_since is None and self.exit_code != 0 and now > self._oom_kills

    def _stop(self) -> None:
        self.shm.watch(again=True)
        if self.alive and not self.hard:
            assert self.server is not None
            # The main process alone: servers stop their own workers in the right order.
            os.kill(self.server.pid, signal.SIGTERM)
            self._wait(lambda: not self.alive, self.order["stop_s"])
        rest = self.tree()
        if rest and not self.alive and not self.hard:
            self.shm.watch(again=True)
            _signal(rest, signal.SIGTERM)
            grace_s = min(LAST_GRACE_S, self.order["stop_s"])
            self._wait(lambda: not self.tree(), grace_s)
        end = time.monotonic() + KILL_PATIENCE_S
        # A killed server may be a zombie whose threads still end: its exit code comes only then.
        while ((rest := self.tree()) or self.alive) and time.monotonic() < end:
            _signal(rest, signal.SIGKILL)
            time.sleep(0.02)
            self._reap()
        self._reap()

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and not self.hard and (left := end - time.monotonic()) > 0:
            self._turn(min(left, 0.1))

    def _remove_folders(self) -> None:
        for folder in self.order["remove"]:
            shutil.rmtree(folder, ignore_errors=True)


def report(event: str, **values: Any) -> None:
    """Tell kvlab; it may be gone, and then nobody needs to know."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **values}).encode() + b"\n")


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _oom_kills() -> int | None:
    """How many processes the kernel has killed for memory since it started."""
    try:
        lines = (PROC / "vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def read_order() -> Any:
    """The first line of standard input, read bytewise so that nothing after it is swallowed."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit(1)
        line += piece
    return json.loads(line)


if __name__ == "__main__":
    sys.exit(Guard(read_order()).run())
