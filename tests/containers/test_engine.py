"""The A/B on the real vLLM and LMCache in real containers, as on a machine with Docker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlab import environment, verify
from kvlab.rundir import RunDir
from kvlab.stack import containers
from kvlab.stack.daemon import Daemon
from tests.containers.conftest import ROOT
from tests.engine.test_two_round import TRIES, is_noise

pytestmark = [pytest.mark.docker, pytest.mark.engine]


def settings(image: str) -> list[str]:
    """The engine environment of this machine in place of the image that `make image` builds."""
    python = environment.engine_python()
    folders = {environment.engine_home(), python.resolve().parents[1]}
    chosen: dict[str, Any] = {
        "container.image": image,
        "container.python": str(python),
        "container.volumes": [f"{folder}:{folder}:ro" for folder in sorted(folders)],
        "experiments.two_round.repeats": 1,
        "experiments.two_round.pause_s": 0,
    }
    return [
        word for key, value in chosen.items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]


def test_the_gain_is_proven_in_containers_as_in_processes(
    engine: Daemon, image: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvlab.cli", "run", "two-round", "embedded-docker", "--json"]
    for attempt in range(TRIES):
        runs = tmp_path / str(attempt)
        done = subprocess.run(
            [*command, "--runs", str(runs), *settings(image)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        found = json.loads(done.stdout)
        if not is_noise(found["verdict"]):
            break
    assert found["verdict"]["status"] == "proven", found["verdict"]
    served = found["served_tokens"]["lmcache"]["measure"]
    assert served["L1"] > 0
    assert served["L2"] > 0
    assert served["L0"] == 0
    assert found["correctness"]["verdict"] == "pass"
    (folder,) = runs.iterdir()
    run = RunDir.open(folder)
    assert not verify.verify(run)
    (kept,) = run.manifest["images"].values()
    assert kept["id"].startswith("sha256:")
    started = [event for event in run.events() if event.kind == "container_started"]
    assert [event.detail["name"] for event in started] == [
        *("bench-vllm-off", "bench-lmcache", "bench-vllm-on")
    ]
    assert {event.detail["image"] for event in started} == {kept["id"]}
    assert [event.kind for event in run.events()].count("container_usage") > 3
    assert containers.find(engine) == []
    assert not list(Path("/dev/shm").glob("lmcache*"))
