"""A container engine of the tests' own: its own socket, its own data folder, gone at the end.

The base image is a plain Debian without Python; the interpreter, the lab, the engine environment
and this checkout are mounted read-only where they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvlab.profile import Container, Limits, Profile
from kvlab.rundir import RunDir
from kvlab.stack import containers, daemon
from kvlab.stack.daemon import Daemon
from kvlab.stack.plan import Place, Plan, Service
from tests import fake_stack
from tests.fake_stack import Settings
from tests.stack.conftest import dummy, until

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "kvlab-test-base:1"
PACKAGES = (
    # what the interpreter's own modules and vLLM's operators are linked with
    *("libnuma1", "libgomp1", "libstdc++6", "libssl3", "libffi8", "libsqlite3-0", "libexpat1"),
    *("libreadline8", "libncursesw6", "libuuid1", "zlib1g", "libbz2-1.0", "liblzma5"),
)
STOP_S = 60


@pytest.fixture(scope="session")
def dockerd() -> Iterator[str]:
    """The address of a container engine that was started for these tests."""
    folder = Path(tempfile.mkdtemp(prefix="kvlab-dockerd-", dir="/tmp"))
    address = f"unix://{folder}/docker.sock"
    before = links()
    command = ["dockerd", "--host", address, "--data-root", str(folder / "data")]
    command += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
    command += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none"]
    with (folder / "log").open("wb") as log:
        program = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until_it_answers(program, address, folder / "log")
        yield address
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(STOP_S)
        for mount in mounts_below(folder):  # its own network namespace stays bound
            subprocess.run(["umount", mount], check=True)
    assert leftovers(folder) == []
    assert links() == before
    shutil.rmtree(folder)


def wait_until_it_answers(program: subprocess.Popen[bytes], address: str, log: Path) -> None:
    socket = Path(address.removeprefix("unix://"))
    until(lambda: socket.exists() or program.poll() is not None, "the engine's socket")
    assert program.poll() is None, log.read_text(encoding="utf-8", errors="replace")


def mounts_below(folder: Path) -> list[str]:
    """The mount points below a folder, the innermost first."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


def leftovers(folder: Path) -> list[str]:
    """Mounts and processes of the engine that are still there."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if str(folder) in command and process.pid != os.getpid():
                processes.append(command)
    return mounts_below(folder) + processes


def links() -> set[str]:
    """The network devices of this machine; an engine with a bridge would add one."""
    return {device.name for device in Path("/sys/class/net").iterdir()}


@pytest.fixture(scope="session")
def image(dockerd: str) -> str:
    """The base image in that engine: Debian's minimal system, unpacked and not configured."""
    folder = Path(tempfile.mkdtemp(prefix="kvlab-base-", dir="/tmp"))
    try:
        root = folder / "root"
        bootstrap(root, folder / "log")
        docker = ["docker", "--host", dockerd, "import", "-", IMAGE]
        with subprocess.Popen(
            ["tar", "--numeric-owner", "--exclude=./var/cache", "-C", str(root), "-c", "."],
            stdout=subprocess.PIPE,
        ) as tar:
            subprocess.run(docker, stdin=tar.stdout, check=True, stdout=subprocess.DEVNULL)
    finally:
        shutil.rmtree(folder)
    return IMAGE


def bootstrap(root: Path, log: Path) -> None:
    """Unpack a minimal Debian and the packages; their scripts are not run, nothing needs them."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    )
    suite = release["VERSION_CODENAME"].strip('"')
    with log.open("wb") as stream:
        done = subprocess.run(
            [
                *("debootstrap", "--variant=minbase", "--foreign"),
                *(f"--include={','.join(PACKAGES)}", suite, str(root), mirror(suite)),
            ],
            stdout=stream,
            stderr=stream,
            check=False,
        )
    assert done.returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-2000:]
    for package in (root / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)


def mirror(suite: str) -> str:
    """Where this machine gets Debian's packages from."""
    listed = subprocess.run(
        [
            *("apt-get", "indextargets", "--format", "$(SUITE) $(CODENAME) $(REPO_URI)"),
            "Created-By: Packages",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in listed.splitlines():
        _, name, place = line.split()
        if name == suite:
            return place
    raise AssertionError(f"apt knows no source of {suite}: {listed}")


@pytest.fixture
def engine(dockerd: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """The tests' engine as kvlab finds it; no container is left there afterwards."""
    monkeypatch.setenv("DOCKER_HOST", dockerd)
    found = daemon.connect()
    yield found
    left = found.api.containers(all=True)
    for one in left:  # so that the next test is not disturbed
        containers.remove(found, one["Id"])
    found.client.close()
    assert [one["Names"] for one in left] == []


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder."""
    return RunDir.create(tmp_path / "runs", {"run": f"test-{os.getpid()}-{tmp_path.name}"})


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask fake servers more often than real ones need."""
    monkeypatch.setattr("kvlab.stack.ready.POLL_S", 0.02)


def mounts() -> list[str]:
    """What a container needs to run this interpreter with the lab and this checkout."""
    places = {
        ROOT,
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path(sys.executable).resolve().parents[1],
    }
    outer = [
        one for one in places if not any(one != two and one.is_relative_to(two) for two in places)
    ]
    return [f"{place}:{place}:ro" for place in sorted(outer)]


def contained(service: Service, **limits: Any) -> Service:
    """A service of the fake stack, or a dummy, as a container of the base image."""
    names = {
        "baseline": "bench-vllm-off",
        "lmcache_server": "bench-lmcache",
        "lmcache": "bench-vllm-on",
    }
    container = Container(image=IMAGE, names=names)  # type: ignore[arg-type]
    name = names["lmcache_server"] if service.role == "lmcache" else names["lmcache"]
    folders = []
    if service.role == "lmcache":
        config = json.loads(service.argv[-1])
        folders = [f"{config['l2_path']}:{config['l2_path']}"]
    return dataclasses.replace(
        service,
        name=name,
        container=container,
        entrypoint=True,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        volumes=(*mounts(), *folders),
        limits=Limits(**limits),
    )


def fake(
    profile: Profile, scenario: str, settings: Settings | None = None
) -> Callable[[Place], Plan]:
    """A ``plan_for`` whose services are the fake stack's, in containers."""

    def make(place: Place) -> Plan:
        steps = fake_stack.fake_plan(profile, scenario, place, settings)
        services = tuple(contained(service) for service in steps.services)
        return dataclasses.replace(steps, services=services)

    return make


def dummy_plan(*options: str, **limits: Any) -> Callable[[Place], Plan]:
    """A plan with one dummy in vLLM's place, in a container."""

    def make(place: Place) -> Plan:
        service = contained(dummy("vllm", place.vllm_port, *options), **limits)
        return Plan(scenario="baseline", services=(service,), connector=None, settle_s=0)

    return make


def command_plan(*argv: str, **limits: Any) -> Callable[[Place], Plan]:
    """Like ``dummy_plan``, with a command of the image's own."""

    def make(place: Place) -> Plan:
        service = dataclasses.replace(
            contained(dummy("vllm", place.vllm_port), **limits), argv=argv, env={}, volumes=()
        )
        return Plan(scenario="baseline", services=(service,), connector=None, settle_s=0)

    return make


def wait_gone(engine: Daemon, seconds: float = 30) -> None:
    """Return when no container of kvlab is left; the test fails when one is after that time."""
    end = time.monotonic() + seconds
    while found := containers.find(engine):
        assert time.monotonic() < end, [one.name for one in found]
        time.sleep(0.2)
