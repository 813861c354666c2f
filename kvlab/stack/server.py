"""One server as a local process, with the guard that stops it when kvlab cannot any more."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import EngineMissing, StackNotReady
from kvlab.stack import ServiceState, guard, leftovers, logs
from kvlab.stack.plan import Service

KEPT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX"),
    *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    *("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"),
)
"""What servers inherit; everything else, proxies and tokens above all, stays outside."""

SET_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "INFO",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
    "PYTHONUNBUFFERED": "1",
}


LOADER_VARIABLES = ("PATH", "LD_LIBRARY_PATH")
"""What Python itself may need to start, all that a guard gets."""


LONGEST_FOLDER = 50


class Server:
    """One service under its guard."""

    def __init__(self, service: Service, run_id: str, log: Path):
        self.service = service
        self.name = service.name
        self.mark = f"{run_id}:{service.name}"
        self.log = log
        self.pid: int | None = None
        self.started: float | None = None
        self.exit_code: int | None = None
        self.oom_killed: bool | None = None
        self.stop_report: dict[str, Any] | None = None
        self.wanted = True
        """False once kvlab itself asked it to stop."""
        self.answered = asyncio.Event()
        """The guard has started the server, or said that it cannot."""
        self.exited = asyncio.Event()
        self.ended = asyncio.Event()
        """The guard is gone, and nothing of the server is left."""
        self.trouble: str | None = None
        self.remedy: str | None = None
        self.temporary: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._segments: list[str] = []

    @property
    def running(self) -> bool:
        return self.pid is not None and not self.exited.is_set()

    @property
    def begun(self) -> bool:
        """Whether there is anything to stop."""
        return self._guard is not None

    async def start(self, stop_s: float) -> None:
        """Start the guard, and through it the server; raises EngineMissing when it cannot run."""
        order = self._order(stop_s)
        with self.log.open("ab") as log:
            # Not asyncio's: that one kills its children when the loop is closed.
            self._guard = subprocess.Popen(  # noqa: ASYNC220
                self._program(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._variables(),
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        self._listener = asyncio.create_task(self._listen(), name=f"guard of {self.name}")
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(json.dumps(order).encode() + b"\n")
            self._guard.stdin.flush()
        await self.answered.wait()
        if self.pid is None:
            raise EngineMissing(
                f"{self.name} cannot be started: {self.trouble or 'its guard ended at once'}",
                hint=self.remedy or "run `make engine`, or check the paths in the profile",
            )

    def _program(self) -> list[str]:
        """The guard's own command."""
        return [sys.executable, "-I", guard.__file__]

    def _variables(self) -> dict[str, str]:
        """The guard's own environment."""
        return {key: os.environ[key] for key in LOADER_VARIABLES if key in os.environ}

    def _order(self, stop_s: float) -> Mapping[str, Any]:
        """What the guard is told to start."""
        self.temporary = Path(tempfile.mkdtemp(prefix=leftovers.FOLDER_PREFIX, dir=_short_folder()))
        return guard.Order(
            owner=os.getpid(),
            argv=list(self.service.argv),
            env={**environment_of(self.service, self.temporary), leftovers.MARK: self.mark},
            cwd=self.service.cwd,
            stop_s=stop_s,
            remove=[str(self.temporary)],
        )

    async def _listen(self) -> None:
        """Take in what the guard reports, until it ends."""
        assert self._guard is not None
        assert self._guard.stdout is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._guard.stdout
        )
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
            if self.pid is not None and self.stop_report is None:
                # The guard itself was killed: nobody else will clean up.
                self.trouble = "its guard was killed"
                await asyncio.to_thread(self._sweep)
                guard.remove_segments(self._segments)
            await asyncio.to_thread(self._guard.wait)
        finally:
            transport.close()
            self.answered.set()
            self.exited.set()
            self.ended.set()

    def _sweep(self) -> None:
        """Remove what a killed guard left behind."""
        leftovers.sweep_service(self.mark)
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _take(self, report: dict[str, Any]) -> None:
        match report["event"]:
            case "started":
                self.pid, self.started = report["pid"], report["started"]
                self.answered.set()
            case "failed":
                self.trouble, self.remedy = report["error"], report.get("hint")
            case "shm":
                self._segments = report["names"]
            case "exited":
                self.exit_code, self.oom_killed = report["exit_code"], report["oom_killed"]
                self.exited.set()
            case "stopped":
                self.stop_report = report

    async def stop(self, *, hard: bool = False) -> None:
        """Return when the server and all that it started is gone; ``hard`` is SIGKILL at once."""
        self.wanted = False
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if hard:
                self._guard.stdin.write(b"kill\n")
            self._guard.stdin.close()
        await self.ended.wait()
        if self._listener:
            await self._listener
        logs.mask_file(self.log)

    def tree(self) -> list[int] | None:
        """The pids of the server and of everything that it started; None: they are elsewhere."""
        return guard.descendants(self._guard.pid) if self._guard else []

    def state(self) -> ServiceState:
        """The server as it is now."""
        return ServiceState(
            name=self.name,
            pid=self.pid,
            started=self.started,
            running=self.running,
            exit_code=self.exit_code,
            oom_killed=False if self.running else self.oom_killed,
        )

    def check_alive(self, when: str = "") -> None:
        """Raise StackNotReady, with cause and last log lines, when the server has stopped."""
        if (self.running and not self.trouble) or not self.wanted:
            return
        try:
            reason = logs.cause(self.log.read_bytes())
        except OSError:
            reason = None
        ending = self.trouble or _ending(self.exit_code)
        hint = f"see {self.log}"
        if self.oom_killed:
            explained, hint = self._out_of_memory()
            ending += f", {explained}"
        raise StackNotReady(
            f"{self.name} ended{when} ({ending})" + (f": {reason}" if reason else ""),
            hint=hint,
            log_tail=logs.tail(self.log),
        )

    def _out_of_memory(self) -> tuple[str, str]:
        """What a kill for memory means here, and what to do about it."""
        return (
            "while the kernel was killing processes for memory",
            "free memory, or ask less of it",
        )


def _short_folder() -> str:
    """Where servers keep their sockets: the system refuses a socket's path of 108 letters or more.

    vLLM adds a name of 36 letters to the folder that it is given, which adds its own to this one.
    """
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes it ours


def environment_of(service: Service, temporary: Path) -> dict[str, str]:
    """The environment of a server: a clean base, then what its service sets."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return {
        **kept,
        **SET_VARIABLES,
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(_own_package(temporary)),
        # Compiled kernels outlive a launch; otherwise every start would pay for them.
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),
        **service.env,
    }


def _own_package(temporary: Path) -> Path:
    """A folder from which only kvlab can be imported, for its engine part.

    Not the folder that holds kvlab: where it is installed, all of the lab's packages are there.
    """
    folder = temporary / "python"
    folder.mkdir(exist_ok=True)
    link = folder / "kvlab"
    if not link.is_symlink():
        link.symlink_to(Path(__file__).resolve().parent.parent)
    return folder


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "how is unknown"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
