"""The guard by itself: whatever ends, nothing of the server is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlab.stack import guard
from tests.stack.conftest import DUMMY, alive, read_pids, until


class Guarded:
    """A guard with a dummy, as kvlab would start it."""

    def __init__(self, folder: Path, *options: str, stop_s: float = 10.0, owner: int | None = None):
        self.pids_path = folder / "pids"
        self.log = folder / "log"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        order = {
            "owner": os.getpid() if owner is None else owner,
            "argv": [sys.executable, str(DUMMY), "--pids", str(self.pids_path), *options],
            "env": {"KVLAB_SERVICE": "guard-test:dummy"},
            "cwd": None,
            "stop_s": stop_s,
            "remove": [str(self.temporary)],
        }
        assert self.process.stdin
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    @property
    def pids(self) -> list[int]:
        return read_pids(self.pids_path)

    def end(self, word: bytes = b"") -> list[dict[str, Any]]:
        """Everything that the guard reported, after its stdin was closed."""
        output, _ = self.process.communicate(word or None)
        return [json.loads(line) for line in output.splitlines()]

    def clear(self) -> None:
        self.process.kill()
        self.process.communicate()
        if self.pids_path.exists():
            for pid in read_pids(self.pids_path):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Any]:
    made: list[Guarded] = []

    def make(*options: str, **more: Any) -> Guarded:
        made.append(Guarded(tmp_path, *options, **more))
        return made[-1]

    yield make
    for one in made:
        one.clear()


def test_a_closed_pipe_stops_the_server_in_order(guarded: Any) -> None:
    one = guarded("--stopped", os.devnull)
    (pid,) = one.pids
    reports = one.end()
    assert [report["event"] for report in reports] == ["started", "exited", "stopped"]
    assert reports[0]["pid"] == pid
    assert reports[1] == {"event": "exited", "exit_code": 0, "oom_killed": False}
    assert reports[2]["left"] == []
    assert not alive(pid)
    assert not one.temporary.exists()
    assert one.log.read_bytes() == b"dummy starts\n"


def test_a_server_that_ignores_sigterm_is_killed_at_the_deadline(guarded: Any) -> None:
    one = guarded("--deaf", stop_s=0.3)
    (pid,) = one.pids
    assert one.end()[-1]["exit_code"] == -signal.SIGKILL
    assert not alive(pid)


def test_the_word_kill_does_not_ask(guarded: Any, tmp_path: Path) -> None:
    told = tmp_path / "told"
    one = guarded("--stopped", str(told), stop_s=600.0)
    (pid,) = one.pids
    assert one.end(b"kill\n")[-1]["exit_code"] == -signal.SIGKILL
    assert not alive(pid)
    assert not told.exists()


def test_grandchildren_in_sessions_of_their_own_are_found(guarded: Any) -> None:
    one = guarded("--children", "2", stop_s=0.5)
    pids = one.pids
    assert len(pids) == 3
    reports = one.end()
    assert reports[-1]["left"] == []
    assert not any(alive(pid) for pid in pids)


def test_a_server_that_exits_is_reported_and_its_children_go_too(guarded: Any) -> None:
    one = guarded("--children", "1", stop_s=0.5)
    server, child = one.pids
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(child), "the end of the child")
    reports = one.end()
    assert reports[1] == {"event": "exited", "exit_code": -9, "oom_killed": False}


def test_sigterm_stops_and_ctrl_c_does_not(guarded: Any) -> None:
    one = guarded()
    (pid,) = one.pids
    for number in (signal.SIGINT, signal.SIGHUP):
        one.process.send_signal(number)
    one.process.send_signal(signal.SIGTERM)
    until(lambda: not alive(pid), "the end of the server")
    assert one.end()[-1]["exit_code"] == 0


def test_the_server_can_be_interrupted_although_its_guard_cannot(guarded: Any) -> None:
    one = guarded()
    (pid,) = one.pids
    os.kill(pid, signal.SIGINT)
    assert one.process.wait() == 0
    assert any(report["event"] == "exited" for report in one.end())


def test_a_killed_guard_takes_the_server_along(guarded: Any) -> None:
    one = guarded()
    (pid,) = one.pids
    one.process.kill()
    until(lambda: not alive(pid), "the end of the server")


def test_a_guard_whose_owner_is_already_gone_stops(guarded: Any) -> None:
    one = guarded(owner=1)
    assert one.process.wait() == 0
    assert not one.temporary.exists()


def test_a_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    order = {
        "owner": os.getpid(),
        "argv": [str(tmp_path / "nothing")],
        "env": {},
        "cwd": None,
        "stop_s": 1.0,
        "remove": [],
    }
    done = subprocess.run(
        [sys.executable, "-I", guard.__file__],
        input=json.dumps(order).encode() + b"\n",
        capture_output=True,
    )
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["event"] == "failed"
    assert "No such file" in report["error"]


def test_a_segment_that_the_server_leaves_is_removed(guarded: Any, tmp_path: Path) -> None:
    named = tmp_path / "shm"
    one = guarded("--shm", str(named))
    assert one.pids
    name = named.read_text().lstrip("/")
    assert name in guard.segments()
    # Killed: Python's own tracker of segments is killed with it and cannot help.
    reports = one.end(b"kill\n")
    assert name not in guard.segments()
    assert reports[-1]["shm_removed"] == [name] or name not in guard.segments()


def test_a_segment_in_use_or_of_others_stays(tmp_path: Path) -> None:
    from multiprocessing import shared_memory

    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert guard.remove_segments([segment.name, "never-was"]) == []
        assert segment.name in guard.segments()
        watched = guard.Segments()
        assert watched.ours == set()
        assert not watched.watch()
    finally:
        segment.close()
        segment.unlink()


def test_a_worker_that_is_gone_is_known_by_the_name_of_its_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = {"psm_old"}
    monkeypatch.setattr(guard, "segments", lambda: set(present))
    monkeypatch.setattr(guard, "mapped_segments", lambda pids: set())
    monkeypatch.setattr(guard, "descendants", lambda root: [8347])
    watched = guard.Segments()
    present |= {"lmcache_kv_8347_0", "lmcache_kv_9_0", "psm_new"}
    assert watched.watch()
    assert watched.ours == {"lmcache_kv_8347_0"}
    assert not watched.watch()


def test_a_memory_kill_is_told_from_an_exit() -> None:
    one = guard.Guard({"owner": 0, "argv": [], "env": {}, "cwd": None, "stop_s": 1, "remove": []})
    one.exit_code = -9
    assert one._was_oom_killed() is False
    one._oom_kills = -1
    assert one._was_oom_killed() is True
    one.exit_code = 0
    assert one._was_oom_killed() is False
    one._oom_kills = None
    assert one._was_oom_killed() is None


ROOT = Path(__file__).resolve().parents[2]
ALL_GONE = """
import os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from kvlab.stack import guard
order = {"owner": os.getppid(), "argv": [], "env": {}, "cwd": None, "stop_s": 1, "remove": []}
own = guard.Guard(order)
own.hard, own.tree = True, lambda: []
own.server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
own._stop()
print(own.exit_code)
"""


def test_it_waits_for_the_exit_code_of_a_server_whose_threads_still_end() -> None:
    """A killed process is a zombie at once, but has no exit code before its last thread is gone."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_GONE, str(ROOT)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0"
