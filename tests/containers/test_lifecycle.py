"""Launching in real containers: ready, proven and gone; or one sentence that says why not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from docker.errors import APIError
from jupyter_client.manager import KernelManager

from kvlab import experiment, summary
from kvlab.disk.inventory import survey
from kvlab.errors import EngineMissing, HostBusy, KvlabError, StackNotReady
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import Deployment, Launch, containers, docker, gpus, images
from kvlab.stack.daemon import Daemon
from kvlab.stack.plan import Place, Plan
from tests import fake_stack
from tests.containers.conftest import (
    IMAGE,
    ROOT,
    command_plan,
    dummy_plan,
    fake,
    wait_gone,
)
from tests.fake_stack import Settings
from tests.stack.conftest import alive, until

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event.detail for event in run.events() if event.kind == kind]


async def start(run: RunDir, make: Callable[[Place], Plan], **options: Any) -> None:
    """Launch in the baseline's place, without a probe, and stop at once."""
    options = {"probe": False, **options}
    async with docker.launch(
        options.pop("profile", None) or fake_stack.profile(),
        "baseline",
        repeat=1,
        run=run,
        plan_for=make,
        **options,
    ) as stack:
        stack.check_alive()


# Ready and proven


async def test_a_launch_is_ready_proven_and_gone_afterwards(
    engine: Daemon, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = fake_stack.profile()
    async with docker.launch(
        profile, "lmcache", repeat=2, run=run, nonce="n", plan_for=fake(profile, "lmcache")
    ) as stack:
        names = ["bench-lmcache", "bench-vllm-on"]
        assert [one.name for one in containers.find(engine)] == names
        assert [one.role for one in containers.find(engine, {containers.RUN: run.id})] == [
            "lmcache",
            "vllm",
        ]
        assert not any(one.orphan for one in containers.find(engine))
        states = stack.state()
        assert [state.name for state in states] == names
        for state, one in zip(states, stack.servers, strict=True):
            assert state.running
            assert state.exit_code is None
            assert state.started
            assert abs(state.started - psutil.Process(state.pid).create_time()) < 60
            assert state.pid in (one.tree() or [])
        assert {used.service for used in stack.usage()} == {"lmcache", "vllm"}
        assert all(used.rss_bytes > 0 for used in stack.usage())
        assert [reading.source for reading in await stack.scrape()] == ["lmcache", "vllm"]
        assert await stack.reset_local_cache() is True
        assert await stack.clear_memory_tier() is True
        assert stack.l2_path is not None
        assert survey(stack.l2_path).files > 0
        stack.check_alive()
    assert containers.find(engine) == []
    assert not (run.path / "l2").exists()
    kinds = [event.kind for event in run.events() if event.kind != "container_usage"]
    assert kinds == [
        *("launching", "container_started", "container_started"),
        *("ready", "probe", "stopping", "stopped"),
    ]
    started = events(run, "container_started")
    assert {one["image"] for one in started} == {images.resolve(engine, IMAGE).id}
    assert {one["network"] for one in started} == {one["ipc"] for one in started} == {"host"}
    used = events(run, "container_usage")
    assert {one["name"] for one in used} == {"bench-lmcache", "bench-vllm-on"}
    assert all(one["memory_bytes"] > 0 and one["cpu_s"] > 0 for one in used)
    (stopped,) = events(run, "stopped")
    assert stopped["exit_codes"] == {"bench-vllm-on": 0, "bench-lmcache": 0}
    assert not stopped["left"]
    log = (run.logs / "2-lmcache-bench-vllm-on.log").read_text()
    assert "Application startup complete" in log
    assert "Application shutdown complete" in log


async def test_output_is_kept_byte_by_byte(engine: Daemon, run: RunDir) -> None:
    script = r"printf 'half \303'; sleep 1; printf '\251 a\rb\377'; printf 'err' >&2; exit 3"
    with pytest.raises(StackNotReady, match=r"bench-vllm-on ended .*\(exit code 3\)"):
        await start(run, command_plan("/bin/sh", "-c", script))
    assert (run.logs / "1-baseline-bench-vllm-on.log").read_bytes() == b"half \xc3\xa9 a\rb\xfferr"


async def test_records_are_kept_for_a_second_launch_and_killed_servers(
    engine: Daemon, run: RunDir
) -> None:
    profile = fake_stack.profile()
    options: dict[str, Any] = {"repeat": 1, "run": run, "plan_for": fake(profile, "lmcache")}
    async with docker.launch(
        profile, "lmcache", label="first", keep_l2=True, hard_stop=True, **options
    ) as stack:
        folder = stack.l2_path
    assert folder is not None
    kept = survey(folder).files
    assert kept > 0
    (stopped,) = events(run, "stopped")
    assert set(stopped["exit_codes"].values()) == {137}
    async with docker.launch(
        profile, "lmcache", label="second", l2_path=folder, **options
    ) as stack:
        await stack.stop("bench-vllm-on")
        assert [one.name for one in containers.find(engine)] == ["bench-lmcache"]
    assert survey(folder).files >= kept


async def test_a_port_that_somebody_has_is_refused_before_anything_starts(
    engine: Daemon, run: RunDir
) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        with pytest.raises(HostBusy, match=f"port {port} is in use by"):
            await start(run, lambda place: dummy_plan()(dataclasses.replace(place, vllm_port=port)))
    assert events(run, "launching") == []


async def test_the_engine_is_found_through_docker_s_context(
    engine: Daemon, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "docker/contexts/meta" / hashlib.sha256(b"own").hexdigest()
    folder.mkdir(parents=True)
    endpoint = {"Host": engine.address, "SkipTLSVerify": False}
    described = {"Name": "own", "Metadata": {}, "Endpoints": {"docker": endpoint}}
    (folder / "meta.json").write_text(json.dumps(described))
    (tmp_path / "docker/config.json").write_text("{}")
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("DOCKER_CONTEXT", "own")
    await start(run, dummy_plan())
    assert len(events(run, "container_started")) == 1


async def test_an_engine_on_another_machine_keeps_l2_there(
    engine: Daemon, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine plays the other one: nothing of its files or processes is looked at."""
    monkeypatch.setattr(Daemon, "machine", "spark")
    monkeypatch.setattr(docker, "_refuse_unreachable", lambda *_, **__: None)
    profile = fake_stack.profile()
    far = Path(docker.FAR_L2) / run.id / "1-lmcache"
    async with docker.launch(
        profile, "lmcache", repeat=1, run=run, nonce="n", plan_for=fake(profile, "lmcache")
    ) as stack:
        assert stack.l2_path is None
        assert survey(far).files > 0
        assert stack.usage() == []
        stack.check_alive()
    assert not far.exists()
    assert {one["name"] for one in events(run, "container_usage")} == {
        *("bench-lmcache", "bench-vllm-on")
    }
    shutil.rmtree(far.parent)


# What the engine refuses, in one sentence


async def test_a_missing_image_is_never_pulled(engine: Daemon, run: RunDir) -> None:
    with pytest.raises(EngineMissing, match=r"image lmcache/standalone:1 is not on this machine"):
        images.resolve(engine, "lmcache/standalone:1")
    with pytest.raises(EngineMissing) as caught:
        images.resolve(engine, "kvlab-engine-cpu:none")
    assert caught.value.hint == "build it with `make image`"


def test_a_pull_without_a_network_says_so(engine: Daemon) -> None:
    with pytest.raises(EngineMissing, match=r"cannot be pulled to this machine: .*refused"):
        images.pull(engine, "127.0.0.1:9/none:1")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("/bin/sh", "-c", "echo 'ValueError: bad flag'; exit 1"), r"exit code 1\): ValueError"),
        (("/usr/local/bin/lmcache", "server"), r"has no program /usr/local/bin/lmcache"),
    ],
)
async def test_a_command_that_ends_at_once_is_told_with_its_reason(
    engine: Daemon, run: RunDir, argv: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(KvlabError, match=expected):
        await start(run, command_plan(*argv))
    (failure,) = events(run, "failure")
    assert "bench-vllm-on" in failure["error"]


async def test_a_folder_that_is_missing_is_named(engine: Daemon, run: RunDir) -> None:
    def make(place: Place) -> Plan:
        steps = dummy_plan()(place)
        service = dataclasses.replace(steps.services[0], volumes=("/no/such:/no/such:ro",))
        return dataclasses.replace(steps, services=(service,))

    with pytest.raises(EngineMissing, match=r"there is no /no/such on this machine"):
        await start(run, make)
    assert not Path("/no/such").exists()


async def test_a_memory_limit_that_is_too_small_is_named(engine: Daemon, run: RunDir) -> None:
    fill = ("/bin/sh", "-c", "x=0123456789; while :; do x=$x$x; done")
    with pytest.raises(StackNotReady, match=r"out of memory: .* limit of 64m") as caught:
        await start(run, command_plan(*fill, memory="64m", memory_swap="64m"))
    assert caught.value.hint == "raise container.memory, or ask less of it"


def test_an_engine_without_gpus_is_asked_once_and_says_what_to_do(engine: Daemon) -> None:
    with pytest.raises(EngineMissing, match="no runtime that gives GPUs") as caught:
        gpus.listed(engine, images.resolve(engine, IMAGE), "all")
    assert "nvidia-ctk cdi generate" in str(caught.value.hint)


# Names


async def test_a_foreign_container_of_the_name_is_left_alone(engine: Daemon, run: RunDir) -> None:
    body = {"Image": IMAGE, "Cmd": ["/bin/sleep", "600"], "HostConfig": {"NetworkMode": "none"}}
    made = engine.api.create_container_from_config(body, "bench-vllm-on")["Id"]
    engine.api.start(made)
    try:
        with pytest.raises(HostBusy, match="named bench-vllm-on exists that is not kvlab's"):
            await start(run, dummy_plan())
        assert engine.api.inspect_container(made)["State"]["Running"]
    finally:
        containers.remove(engine, made)


async def test_our_own_left_over_of_the_name_is_removed(engine: Daemon, run: RunDir) -> None:
    _left_over(engine, "bench-vllm-on", keeper="1:1")
    await start(run, dummy_plan())


async def test_a_container_of_a_run_that_goes_on_is_left_alone(engine: Daemon, run: RunDir) -> None:
    made = _left_over(engine, "bench-vllm-on", keeper=containers.this_process())
    with pytest.raises(HostBusy, match="belongs to run other of kvlab, which is still going on"):
        await start(run, dummy_plan())
    assert [one.id for one in containers.find(engine)] == [made]
    containers.remove(engine, made)


def _left_over(engine: Daemon, name: str, *, keeper: str) -> str:
    body = {
        "Image": IMAGE,
        "Cmd": ["/bin/sleep", "600"],
        "Labels": {
            containers.MARK: "other:vllm",
            containers.RUN: "other",
            containers.ROLE: "vllm",
            containers.HOST: containers.this_host(),
            containers.KEEPER: keeper,
        },
        "HostConfig": {"NetworkMode": "none"},
    }
    made: str = engine.api.create_container_from_config(body, name)["Id"]
    engine.api.start(made)
    return made


# What happens meanwhile


def killing(engine: Daemon, name: str, signal_name: str) -> Callable[[Profile, RunDir], Launch]:
    """A launcher on containers; in the measure round of the lmcache arm one of them is killed."""

    def make(chosen: Profile, folder: RunDir) -> Launch:
        append = folder.append

        def watched(record: Any) -> None:
            append(record)
            place = getattr(record, "round", None), record.scenario, getattr(record, "index", None)
            if place == ("measure", "lmcache", 2):
                engine.api.kill(name, signal_name)

        folder.append = watched  # type: ignore[method-assign]

        def launch(scenario: str, repeat: int, **given: Any) -> Any:
            return docker.launch(
                chosen,
                scenario,
                repeat,
                run=folder,
                nonce=folder.manifest["nonce"],
                plan_for=fake(chosen, scenario, fake_stack.settings_for(chosen, Settings())),
                **given,
            )

        return launch

    return make


@pytest.mark.parametrize("name", ["bench-vllm-on", "bench-lmcache"])
async def test_a_container_killed_in_round_2_makes_the_run_invalid(
    engine: Daemon, tmp_path: Path, name: str
) -> None:
    overrides = {"experiments.two_round.repeats": 1, "workload.contexts": 8}
    path = tmp_path / "fake.yaml"
    path.write_text(yaml.safe_dump(fake_stack.profile(overrides).as_dict()), encoding="utf-8")
    with pytest.raises(KvlabError, match=rf"{name} ended \(exit code 137\)"):
        await experiment.run_async(
            "two-round", path, runs=tmp_path / "runs", launcher=killing(engine, name, "SIGKILL")
        )
    (folder,) = (tmp_path / "runs").iterdir()
    run = RunDir.open(folder)
    assert run.manifest["status"] == "partial"
    found = summary.conclude(run)
    assert found["verdict"]["status"] == "invalid"
    assert any(f"{name} stopped with exit code 137" in why for why in found["verdict"]["reasons"])


async def test_a_container_that_somebody_starts_again_is_noticed(
    engine: Daemon, run: RunDir
) -> None:
    async with docker.launch(
        fake_stack.profile(), "baseline", repeat=1, run=run, plan_for=dummy_plan(), probe=False
    ) as stack:
        await asyncio.to_thread(_restart, engine)
        with pytest.raises(StackNotReady, match="bench-vllm-on ended"):
            await noticed(stack)


def _restart(engine: Daemon) -> None:
    with contextlib.suppress(APIError):  # its keeper may have removed it in between
        engine.api.restart("bench-vllm-on", timeout=1)


async def noticed(stack: Deployment) -> None:
    """Raises what the deployment has to say; the test fails when it says nothing for 10 s."""
    for _ in range(100):
        stack.check_alive()
        await asyncio.sleep(0.1)


# However kvlab ends


def owner(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.containers.owner", str(folder)], cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_container_outlives_kvlab(
    engine: Daemon, tmp_path: Path, number: signal.Signals
) -> None:
    kvlab = owner(tmp_path)
    until((tmp_path / "ready").exists, "the launch")
    assert [one.name for one in containers.find(engine)] == ["bench-vllm-on"]
    kvlab.send_signal(number)
    wait_gone(engine)
    assert kvlab.wait() != 0


def test_no_container_outlives_a_notebook_s_kernel(engine: Daemon, tmp_path: Path) -> None:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(ROOT), env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        client.execute(
            "from pathlib import Path; from tests.containers import owner\n"
            f"await owner.own(Path({str(tmp_path)!r}))"
        )
        until((tmp_path / "ready").exists, "the launch")
        assert manager.provisioner is not None
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        wait_gone(engine)
        client.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)


def test_what_killed_keepers_left_is_listed_and_removed_by_clean(
    engine: Daemon, tmp_path: Path
) -> None:
    kvlab = owner(tmp_path)
    until((tmp_path / "ready").exists, "the launch")
    (own,) = containers.find(engine)
    keeper_pid = int(own.keeper.partition(":")[0])
    kvlab.send_signal(signal.SIGSTOP)  # so that it cannot clean up itself
    os.kill(keeper_pid, signal.SIGKILL)
    kvlab.kill()
    kvlab.wait()
    until(lambda: not alive(keeper_pid), "the keeper's end")
    for words, left in ((["--dry-run"], 1), ([], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "kvlab.cli", "clean", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "bench-vllm-on" in done.stdout
        assert len(containers.find(engine)) == left


async def test_a_killed_keeper_is_noticed_and_its_container_removed(
    engine: Daemon, run: RunDir
) -> None:
    async with docker.launch(
        fake_stack.profile(), "baseline", repeat=1, run=run, plan_for=dummy_plan(), probe=False
    ) as stack:
        (own,) = containers.find(engine)
        os.kill(int(own.keeper.partition(":")[0]), signal.SIGKILL)
        with pytest.raises(StackNotReady, match="its guard was killed"):
            await noticed(stack)
    assert containers.find(engine) == []


# Files of root


async def test_files_of_root_are_removed_through_a_container(
    engine: Daemon, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a caller that is not root sees it: what it cannot remove itself goes all the same."""
    profile = fake_stack.profile()
    monkeypatch.setattr(docker.l2, "empty", lambda path: sorted(path.iterdir()))
    async with docker.launch(
        profile, "lmcache", repeat=1, run=run, nonce="n", plan_for=fake(profile, "lmcache")
    ) as stack:
        assert stack.l2_path is not None
        assert survey(stack.l2_path).files > 0
    assert not (run.path / "l2").exists()
    assert events(run, "left_behind") == []


async def test_a_folder_that_stays_behind_is_told_and_fails_nothing(
    engine: Daemon, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = fake_stack.profile()
    monkeypatch.setattr(docker.l2, "empty", lambda path: sorted(path.iterdir()))
    monkeypatch.setattr(docker.containers, "empty_through", lambda *_: None)
    async with docker.launch(
        profile, "lmcache", repeat=1, run=run, nonce="n", plan_for=fake(profile, "lmcache")
    ) as stack:
        folder = stack.l2_path
    (left,) = events(run, "left_behind")
    assert left["folder"] == str(folder)
