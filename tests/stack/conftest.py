"""Plans of dummy servers, and waiting for what must come true."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvlab.rundir import RunDir
from kvlab.stack.plan import Place, Plan, Service

DUMMY = Path(__file__).with_name("dummy_server.py")
DEADLINE_S = 30.0


def dummy(name: str, port: int | str, *options: str, role: str = "vllm") -> Service:
    """A dummy server as a service."""
    return Service(
        name=name,
        role=role,
        argv=(sys.executable, str(DUMMY), "--port", str(port), "--name", name, *options),
        env={"PATH": os.environ.get("PATH", "")},
        ports=(port,),
        url=f"http://127.0.0.1:{port}",
        ready_s=20,
    )


def dummy_plan(*options: str, scenario: str = "baseline") -> Callable[[Place], Plan]:
    """A plan with one dummy in vLLM's place."""

    def make(place: Place) -> Plan:
        services = (dummy("vllm", place.vllm_port, *options),)
        return Plan(scenario=scenario, services=services, connector=None, settle_s=0)

    return make


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return once the condition holds; the test fails if it does not for 30 s."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pids(path: Path) -> list[int]:
    """The pids that a dummy has written, once it has."""
    until(path.exists, f"{path.name}")
    return list(json.loads(path.read_text()))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder."""
    return RunDir.create(tmp_path / "runs", {"run": f"test-{os.getpid()}-{tmp_path.name}"})


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask dummies more often than real servers need."""
    monkeypatch.setattr("kvlab.stack.ready.POLL_S", 0.02)
