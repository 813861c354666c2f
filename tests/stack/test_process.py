"""Launching on processes: ready and proven, or an error that says why; and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvlab.errors import EngineMissing, HostBusy, StackNotReady
from kvlab.profile import Profile
from kvlab.rundir import RunDir
from kvlab.stack import guard, leftovers, process, server
from kvlab.stack.plan import Place, Plan, Service
from tests import fake_stack
from tests.fake_stack import Fault, Settings
from tests.stack.conftest import alive, dummy, dummy_plan, read_pids, until

ROOT = Path(__file__).resolve().parents[2]


def fake(profile: Profile, scenario: str, settings: Settings | None = None) -> Any:
    """A ``plan_for`` whose services are the fake stack's."""
    return lambda place: fake_stack.fake_plan(profile, scenario, place, settings)


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event.detail for event in run.events() if event.kind == kind]


async def start(run: RunDir, make: Callable[[Place], Plan], **options: Any) -> None:
    """Launch in the baseline's place, without a probe, and stop at once."""
    profile = options.pop("profile", None) or fake_stack.profile()
    options = {"probe": False, **options}
    async with process.launch(
        profile, "baseline", repeat=1, run=run, plan_for=make, **options
    ) as stack:
        stack.check_alive()


async def start_fake(run: RunDir, *faults: Fault | str, **overrides: Any) -> dict[str, Any]:
    """Launch the fake stack with its probe; the probe's detail."""
    profile = fake_stack.profile(**overrides)
    make = fake(profile, "lmcache", Settings().with_faults(*faults))
    async with process.launch(profile, "lmcache", repeat=1, run=run, nonce="n", plan_for=make):
        pass
    return events(run, "probe")[0]


@pytest.fixture
def foreign() -> Iterator[Callable[[int], int]]:
    """Opens an HTTP server of somebody else, which says that it is healthy, on a port."""
    opened: list[HTTPServer] = []

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status":"healthy"}')

        def log_message(self, *_: object) -> None:
            pass

    def listen(port: int = 0) -> int:
        opened.append(HTTPServer(("127.0.0.1", port), Healthy))
        threading.Thread(target=opened[-1].serve_forever, args=(0.05,), daemon=True).start()
        return int(opened[-1].server_address[1])

    yield listen
    for one in opened:
        one.shutdown()
        one.server_close()


# Ready and proven


async def test_a_launch_is_ready_proven_and_gone_afterwards(run: RunDir) -> None:
    profile = fake_stack.profile()
    make = fake(profile, "lmcache", Settings(children=1))
    async with process.launch(
        profile, "lmcache", repeat=2, run=run, nonce="n", plan_for=make
    ) as stack:
        assert (stack.scenario, stack.repeat, stack.model) == ("lmcache", 2, "fake-model")
        assert stack.l2_path == (run.path / "l2" / "2-lmcache").resolve()
        states = stack.state()
        assert [(state.name, state.running) for state in states] == [
            ("lmcache", True),
            ("vllm", True),
        ]
        assert all(state.started and state.exit_code is None for state in states)
        assert [reading.source for reading in await stack.scrape()] == ["lmcache", "vllm"]
        (reading,) = await stack.scrape(only="lmcache")
        assert reading.error is None
        assert await stack.reset_local_cache() is True
        assert await stack.clear_memory_tier() is True
        trees = [pid for one in stack.servers for pid in one.tree()]
        assert len(trees) >= 4
        stack.check_alive()
    assert not any(alive(pid) for pid in trees)
    assert leftovers.find(run.id) == []
    assert not (run.path / "l2").exists()
    assert sorted(path.name for path in run.logs.iterdir()) == [
        "2-lmcache-lmcache.log",
        "2-lmcache-vllm.log",
    ]
    kinds = [event.kind for event in run.events()]
    assert kinds == ["launching", "ready", "probe", "stopping", "stopped"]
    (ready,) = events(run, "ready")
    assert ready == stack.facts
    assert ready["facts"]["block_tokens"] == 16
    assert ready["facts"]["kv_cache_tokens"] == 256
    assert len(ready["registered_ids"]) == 1
    assert set(ready["versions"]) == {"vllm", "lmcache"}
    (probe,) = events(run, "probe")
    assert probe["stored_chunks"] == 4
    assert probe["external_cached"] == probe["ceiling_tokens"] == 64
    assert probe["local_reset"] is True
    (stopped,) = events(run, "stopped")
    assert list(stopped["exit_codes"]) == ["vllm", "lmcache"]
    assert [scrape.boundary for scrape in run.scrapes()] == ["launch", "launch"]
    assert [(r.round, r.index, r.cached_tokens) for r in run.requests()] == [
        ("probe", 0, 0),
        ("probe", 1, 64),
    ]


@pytest.mark.parametrize("scenario", ["baseline", "control"])
async def test_the_baseline_is_treated_alike_and_nothing_is_expected(
    run: RunDir, scenario: str
) -> None:
    profile = fake_stack.profile()
    make = fake(profile, scenario)
    async with process.launch(
        profile, scenario, repeat=1, run=run, nonce="n", plan_for=make
    ) as stack:
        assert stack.l2_path is None
        assert stack.lmcache_url is None
    (probe,) = events(run, "probe")
    assert (probe["stored_chunks"], probe["external_cached"]) == (None, None)
    assert probe["local_reset"] is True
    assert len(run.requests()) == 2


async def test_object_groups_are_counted_by_chunk(run: RunDir) -> None:
    detail = await start_fake(run, cache__separate_object_groups=True)
    assert detail["stored_chunks"] == 4
    assert events(run, "ready")[0]["object_groups"] == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("never_registered"), "no worker is registered"),
        (Fault("wrong_model"), "serves someone-elses-model, not fake-model"),
        (Fault("kv_cache_tokens", 100_000), "fits too well in L0"),
        (Fault("zero_hits"), "stored and not restored"),
        (Fault("old_status", server="lmcache"), None),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_what_is_refused_before_anything_is_measured(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, fault: Fault, said: str | None
) -> None:
    monkeypatch.setattr("kvlab.stack.ready.REGISTER_S", 0.5)
    if said is None:
        await start_fake(run, fault)
        return
    with pytest.raises(StackNotReady, match=said):
        await start_fake(run, fault, timeouts__drain_s=1)
    assert said in events(run, "failure")[0]["error"]
    assert leftovers.find(run.id) == []


async def test_a_stale_id_alone_is_no_worker(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.stack.ready.REGISTER_S", 0.5)
    with pytest.raises(StackNotReady, match="only stale id 11"):
        await start_fake(run, Fault("stale_id"), Fault("never_registered"))


async def test_another_block_size_names_what_fits(run: RunDir) -> None:
    with pytest.raises(StackNotReady) as caught:
        await start_fake(run, Fault("block_tokens", 784))
    assert "784" in caught.value.message
    assert "use 784 or a multiple" in str(caught.value.hint)


# Starting


async def test_an_exit_at_start_quotes_the_log_at_once(run: RunDir) -> None:
    make = dummy_plan("--exit", "1", "--line", "ValueError: bad flag")
    with pytest.raises(StackNotReady) as caught:
        await start(run, make)
    assert caught.value.message.endswith("(exit code 1): ValueError: bad flag")
    assert caught.value.log_tail == "ValueError: bad flag"
    failure = events(run, "failure")[0]
    assert failure["log_tail"] == "ValueError: bad flag"
    assert events(run, "stopped")[0]["exit_codes"] == {"vllm": 1}


async def test_a_log_that_names_the_block_size_gives_the_remedy(run: RunDir) -> None:
    line = "Setting attention block size to 784 tokens to ensure"
    with pytest.raises(StackNotReady) as caught:
        await start(run, dummy_plan("--exit", "1", "--line", line))
    assert "use 784 or a multiple" in str(caught.value.hint)


async def test_a_server_that_never_gets_healthy_is_given_up(run: RunDir) -> None:
    def make(place: Place) -> Plan:
        service = dummy("vllm", place.vllm_port, "--never-listen")
        slow = Service(**{**{f: getattr(service, f) for f in service.__slots__}, "ready_s": 0.5})
        return Plan(scenario="baseline", services=(slow,), connector=None, settle_s=0)

    with pytest.raises(StackNotReady, match=r"within 0\.5 s") as caught:
        await start(run, make)
    assert caught.value.log_tail == "dummy starts"


async def test_a_command_that_does_not_exist_is_one_sentence(run: RunDir) -> None:
    def make(place: Place) -> Plan:
        service = Service(name="vllm", role="vllm", argv=("/nonexistent/python",), ports=())
        return Plan(scenario="baseline", services=(service,), connector=None, settle_s=0)

    with pytest.raises(EngineMissing, match="vllm cannot be started: No such file"):
        await start(run, make)


async def test_cancelling_a_start_cleans_up(run: RunDir, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    make = dummy_plan("--never-listen", "--children", "1", "--pids", str(pids))
    profile = fake_stack.profile(timeouts__stop_s=0.5)
    task = asyncio.create_task(start(run, make, profile=profile))
    found = await asyncio.to_thread(read_pids, pids)
    task.cancel()
    await asyncio.sleep(0.1)
    task.cancel()  # impatience must not leave servers behind
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(alive(pid) for pid in found)


async def test_an_error_in_the_body_stops_in_reverse_order(run: RunDir, tmp_path: Path) -> None:
    told = tmp_path / "told"

    def make(place: Place) -> Plan:
        services = (
            dummy("first", place.lmcache_http_port, "--stopped", str(told), role="other"),
            dummy("second", place.lmcache_port, "--stopped", str(told), role="other"),
            dummy("vllm", place.vllm_port, "--stopped", str(told)),
        )
        return Plan(scenario="baseline", services=services, connector=None, settle_s=0)

    with pytest.raises(RuntimeError, match="in the round"):
        async with process.launch(
            fake_stack.profile(), "baseline", repeat=1, run=run, plan_for=make, probe=False
        ):
            raise RuntimeError("in the round")
    assert told.read_text().split() == ["vllm", "second", "first"]


async def test_a_failing_second_server_stops_the_first(run: RunDir, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def make(place: Place) -> Plan:
        services = (
            dummy("first", place.lmcache_port, "--pids", str(pids), role="other"),
            dummy("vllm", place.vllm_port, "--exit", "3"),
        )
        return Plan(scenario="baseline", services=services, connector=None, settle_s=0)

    with pytest.raises(StackNotReady, match="exit code 3"):
        await start(run, make)
    assert not any(alive(pid) for pid in read_pids(pids))


# While it runs


async def test_a_server_that_dies_is_seen(run: RunDir) -> None:
    async with process.launch(
        fake_stack.profile(), "baseline", repeat=1, run=run, plan_for=dummy_plan(), probe=False
    ) as stack:
        (state,) = stack.state()
        assert state.pid
        os.kill(state.pid, signal.SIGKILL)
        await stack.servers[0].exited.wait()
        (state,) = stack.state()
        assert (state.running, state.exit_code, state.oom_killed) == (False, -9, False)
        with pytest.raises(StackNotReady, match=r"vllm ended \(signal 9\)"):
            stack.check_alive()
        (reading,) = await stack.scrape()
        assert reading.samples is None
        assert reading.error


async def test_a_killed_guard_is_noticed_and_its_server_ended(run: RunDir, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    make = dummy_plan("--deaf", "--children", "1", "--pids", str(pids))
    async with process.launch(
        fake_stack.profile(), "baseline", repeat=1, run=run, plan_for=make, probe=False
    ) as stack:
        (one,) = stack.servers
        found = read_pids(pids)
        assert sorted(one.tree()) == sorted(found)
        assert one._guard
        one._guard.kill()
        await one.ended.wait()
        assert not any(alive(pid) for pid in found)
        with pytest.raises(StackNotReady, match="its guard was killed"):
            stack.check_alive()


async def test_one_server_may_be_stopped_on_purpose(run: RunDir) -> None:
    profile = fake_stack.profile()
    make = fake(profile, "lmcache")
    async with process.launch(
        profile, "lmcache", repeat=1, run=run, nonce="n", plan_for=make, probe=False
    ) as stack:
        await stack.stop("vllm", hard=True)
        stack.check_alive()
        assert [state.running for state in stack.state()] == [True, False]
    assert events(run, "stopped")[0]["exit_codes"]["vllm"] == -9


async def test_a_hard_stop_is_sigkill(run: RunDir, tmp_path: Path) -> None:
    told = tmp_path / "told"
    await start(run, dummy_plan("--stopped", str(told)), hard_stop=True)
    assert not told.exists()
    assert events(run, "stopped")[0]["exit_codes"] == {"vllm": -9}


async def test_a_deaf_server_is_killed_at_the_deadline(run: RunDir) -> None:
    await start(run, dummy_plan("--deaf"), profile=fake_stack.profile(timeouts__stop_s=0.3))
    assert events(run, "stopped")[0]["exit_codes"] == {"vllm": -9}


async def test_secrets_do_not_stay_in_saved_logs(run: RunDir) -> None:
    await start(run, dummy_plan("--line", "token hf_abcdefghijklmnopqrstuvwx seen"))
    assert (run.logs / "1-baseline-vllm.log").read_text() == "token hf_*** seen\n"


# However kvlab ends


def owner(folder: Path, mode: str, *options: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stack.owner", str(folder), mode, *options],
        cwd=ROOT,
        env=environment,
    )


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("ready", signal.SIGKILL),
        ("ready", signal.SIGINT),
        ("ready", signal.SIGTERM),
        ("start", signal.SIGKILL),
        ("start", signal.SIGINT),
    ],
)
def test_no_server_outlives_kvlab(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    pids = tmp_path / "pids"
    options = ["--children", "1", "--pids", str(pids)]
    if moment == "start":
        options.append("--never-listen")
    kvlab = owner(tmp_path / "owner", "plain", *options)
    found = read_pids(pids)
    if moment == "ready":
        until((tmp_path / "owner" / "ready").exists, "the launch")
    kvlab.send_signal(number)
    until(lambda: not any(alive(pid) for pid in found), "the end of every process")
    assert kvlab.wait() != 0


def test_a_forked_child_that_holds_the_pipes_does_not_keep_servers(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    kvlab = owner(tmp_path / "owner", "fork", "--pids", str(pids))
    found = read_pids(pids)
    until((tmp_path / "owner" / "ready").exists, "the launch")
    (child,) = [pid for pid in guard.descendants(kvlab.pid) if _command(pid) == _command(kvlab.pid)]
    kvlab.kill()
    kvlab.wait()
    until(lambda: not any(alive(pid) for pid in found), "the end of every process")
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_what_a_killed_guard_left_is_found_by_its_mark(tmp_path: Path) -> None:
    """P-31: what a killed run left holds memory until the next launch sweeps it."""
    pids = tmp_path / "pids"
    kvlab = owner(tmp_path / "owner", "plain", "--deaf", "--children", "1", "--pids", str(pids))
    found = read_pids(pids)
    until((tmp_path / "owner" / "ready").exists, "the launch")
    run_id = f"owned-{kvlab.pid}"
    marked = leftovers.find(run_id)
    assert {one.pid for one in marked} == set(found)
    assert not any(one.orphan for one in marked)
    (keeper,) = [pid for pid in guard.descendants(kvlab.pid) if b"guard.py" in _command(pid)]
    kvlab.send_signal(signal.SIGSTOP)  # so that it cannot clean up itself
    os.kill(keeper, signal.SIGKILL)
    kvlab.kill()
    kvlab.wait()
    until(lambda: all(one.orphan for one in leftovers.find(run_id)), "the end of the guard")
    assert {one.service for one in leftovers.find(run_id)} == {"vllm"}
    assert Path(marked[0].temporary).is_dir()
    assert set(process.sweep()) >= set(found)
    assert not Path(marked[0].temporary).exists()
    assert leftovers.find(run_id) == []
    assert leftovers.sweep(run_id) == []
    assert not any(alive(pid) for pid in found)


# Ports, folders, environment


async def test_a_taken_port_is_refused_before_anything_starts(
    run: RunDir, foreign: Callable[[int], int]
) -> None:
    port = foreign(0)

    def make(place: Place) -> Plan:
        return Plan(
            scenario="baseline", services=(dummy("vllm", port),), connector=None, settle_s=0
        )

    with pytest.raises(HostBusy, match=rf"port {port} is in use by .*pid {os.getpid()}"):
        await start(run, make)
    assert run.events() == []


async def test_a_healthy_answer_of_somebody_else_is_refused(
    run: RunDir, foreign: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = server.Server.start

    async def start_after_the_thief(self: server.Server, stop_s: float) -> None:
        foreign(int(self.service.ports[0]))
        await begin(self, stop_s)

    monkeypatch.setattr(server.Server, "start", start_after_the_thief)
    with pytest.raises(StackNotReady, match=rf"port \d+ is in use by .*pid {os.getpid()}"):
        await start(run, dummy_plan("--never-listen"))


async def test_a_stranger_behind_a_hidden_port_is_refused(
    run: RunDir, foreign: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = foreign(0)
    monkeypatch.setattr("kvlab.stack.ports.holders", lambda port: iter(()))
    monkeypatch.setattr("kvlab.stack.ports.refuse_taken", lambda ports, host: None)

    def make(place: Place) -> Plan:
        services = (dummy("vllm", port, "--never-listen"),)
        return Plan(scenario="baseline", services=services, connector=None, settle_s=0)

    with pytest.raises(StackNotReady, match="serves no model, not fake-model"):
        await start(run, make)


async def test_an_l2_folder_that_is_not_empty_is_refused(run: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    folder.mkdir()
    (folder / "x.data").write_bytes(b"x" * 100)
    profile = fake_stack.profile(cache__l2__base_path=str(folder))
    with pytest.raises(HostBusy, match=r"not empty \(it holds x.data\)"):
        async with process.launch(
            profile, "lmcache", repeat=1, run=run, plan_for=fake(profile, "lmcache")
        ):
            pass
    assert (folder / "x.data").exists()


async def test_a_named_l2_folder_is_emptied_and_kept(run: RunDir, tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    profile = fake_stack.profile(cache__l2__base_path=str(folder))
    async with process.launch(
        profile, "lmcache", repeat=1, run=run, nonce="n", plan_for=fake(profile, "lmcache")
    ) as stack:
        assert stack.l2_path == folder
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


async def test_l2_survives_a_restart_when_asked_to(run: RunDir) -> None:
    profile = fake_stack.profile()
    make = fake(profile, "lmcache")
    options: dict[str, Any] = {"repeat": 1, "run": run, "nonce": "n", "plan_for": make}
    async with process.launch(profile, "lmcache", keep_l2=True, **options) as stack:
        folder = stack.l2_path
    assert folder
    kept = {path for path in folder.rglob("*") if path.is_file()}
    assert kept
    async with process.launch(profile, "lmcache", l2_path=folder, **options):
        # The probe has new tokens at every launch, else the kept L2 would answer it.
        assert {path for path in folder.rglob("*") if path.is_file()} > kept
    assert folder.exists()


def test_servers_inherit_neither_proxies_nor_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "https_proxy", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHONHOME"):
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("LANG", "C.UTF-8")
    service = Service(name="vllm", role="vllm", argv=(), env={"OMP_NUM_THREADS": "2"})
    made = server.environment_of(service, tmp_path)
    assert "secret" not in json.dumps(made)
    assert made["LANG"] == "C.UTF-8"
    assert made["OMP_NUM_THREADS"] == "2"
    assert made["VLLM_NO_USAGE_STATS"] == made["DO_NOT_TRACK"] == made["HF_HUB_OFFLINE"] == "1"
    assert made["TMPDIR"] == str(tmp_path)
    assert [path.name for path in Path(made["PYTHONPATH"]).iterdir()] == ["kvlab"]


async def test_a_proxy_variable_does_not_catch_loopback(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    await start_fake(run)


def test_free_ports_are_distinct_and_can_be_bound() -> None:
    from kvlab.stack import ports

    found = ports.free(5)
    assert len(set(found)) == 5
    ports.refuse_taken(found, "127.0.0.1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", found[0]))
        with pytest.raises(HostBusy, match="in use by another process"):
            ports.refuse_taken([found[0]], "127.0.0.1")
    with pytest.raises(HostBusy, match=r"cannot listen on 192\.0\.2\.1"):
        ports.refuse_taken([found[1]], "192.0.2.1")


async def test_instances_share_one_lmcache_and_stop_one_by_one(run: RunDir) -> None:
    """P-32: stopping one leaves the others' cache alone."""
    profile = fake_stack.profile()
    make = fake(profile, "shared")
    async with process.launch(
        profile, "shared", repeat=1, run=run, nonce="n", plan_for=make, probe=False
    ) as stack:
        assert stack.names("vllm") == ["vllm", "vllm-2"]
        assert len(set(stack.facts["registered_ids"])) == 2
        assert [reading.source for reading in await stack.scrape()] == ["lmcache", "vllm", "vllm-2"]
        used = stack.usage()
        assert {one.service for one in used} == {"lmcache", "vllm", "vllm-2"}
        assert all(one.rss_bytes > 0 and one.files > 0 for one in used)
        await stack.stop("vllm")
        stack.check_alive()
        assert await stack.reset_local_cache() is True
        assert {one.service for one in stack.usage()} == {"lmcache", "vllm-2"}
