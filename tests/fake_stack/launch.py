"""The fake stack as kvlab sees it: a Profile, a Plan, and a Launch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import kvlab.profile
from kvlab import counters
from kvlab.errors import StackNotReady
from kvlab.profile import Profile
from kvlab.records import Event, Record, now_ns
from kvlab.stack import Reading, ServiceState, logs, ready
from kvlab.stack.plan import CONNECTORS, Place, Plan, Service, instances, plan
from kvlab.stack.usage import Usage
from kvlab.units import ns_to_s
from tests.fake_stack.base import ExitedAtStart, FakeServer
from tests.fake_stack.servers import Stack, start
from tests.fake_stack.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
TAIL = 20
MEMORY_BYTES = 500_000_000
_pids = itertools.count(1_000_001)
"""In-process servers have no pid of their own; these are too high to be anyone's."""

OVERRIDES: dict[str, Any] = {
    "name": "fake",
    "title": "Fake stack, for tests only",
    "description": "No report may come from it: nothing is computed and every delay is set.",
    "model.name": "fake/model",
    "model.served_name": "fake-model",
    "engine.block_tokens": 16,
    "engine.kv_cache_tokens": 256,
    "engine.max_model_len": 4096,
    "engine.max_num_batched_tokens": 31,
    "engine.connector": "stock",
    "engine.connector_config": {},
    "engine.flags": {},
    "engine.env": {},
    "cache.chunk_tokens": 16,
    "cache.l1_size_gb": 0.001,
    "cache.eviction_watermark": 0.8,
    "cache.eviction_ratio": 0.25,
    "cache.separate_object_groups": False,
    "cache.flags": {},
    "cache.env": {},
    "stand_ins": {},
    "workload.contexts": 8,
    # Five tokens more than the probe has, so that a fault can tell them apart.
    "workload.context_tokens": 70,
    "experiments.two_round.repeats": 2,
    "experiments.two_round.pause_s": 0,
    "experiments.two_round.settle_s": 0,
    "experiments.two_round.warmup_requests": 1,
    # Delays of 20 ms on a busy machine scatter more than a real engine's seconds do.
    "thresholds.baseline_drift_max": 0.5,
    "timeouts.lmcache_ready_s": 10,
    "timeouts.vllm_ready_s": 10,
    "timeouts.request_s": 5,
    "timeouts.round_s": 60,
    "timeouts.drain_s": 5,
    "timeouts.stop_s": 3,
}


def profile(overrides: dict[str, Any] | None = None, /, **sections: Any) -> Profile:
    """A small valid profile of the fake stack.

    ``profile({"workload.contexts": 6})`` and ``profile(workload__contexts=6)`` say the same.
    """
    named = {key.replace("__", "."): value for key, value in sections.items()}
    return kvlab.profile.load("embedded", {**OVERRIDES, **(overrides or {}), **named})


def settings_for(chosen: Profile, settings: Settings | None = None) -> Settings:
    """The settings with everything that the profile decides taken from it."""
    engine, cache = chosen.engine, chosen.cache
    settings = settings or Settings()
    return dataclasses.replace(
        settings,
        model=chosen.model.name,
        served_name=chosen.model.served_name,
        block_tokens=engine.block_tokens,
        chunk_tokens=cache.chunk_tokens,
        l0_tokens=engine.kv_cache_tokens or settings.l0_tokens,
        max_model_len=engine.max_model_len,
        max_batched_tokens=engine.max_num_batched_tokens,
        prefix_caching=engine.prefix_caching,
        prompt_tokens_details=engine.prompt_tokens_details,
        dev_endpoints=engine.dev_endpoints,
        object_groups=2 if cache.separate_object_groups else 1,
        connector=CONNECTORS[engine.connector]["kv_connector"],
        l1_watermark=cache.eviction_watermark,
        l1_ratio=cache.eviction_ratio,
        l2=cache.l2 is not None,
        l2_path=settings.l2_path or (cache.l2.base_path if cache.l2 else None),
    )


def fake_plan(
    chosen: Profile,
    scenario: str,
    place: Place,
    settings: Settings | None = None,
    *,
    repeat: int = 1,
) -> Plan:
    """kvlab's own plan with each command replaced by a fake server; the ports must be numbers."""
    real = plan(chosen, scenario, place)
    ours = dataclasses.replace(
        settings_for(chosen, settings).at(scenario, repeat), l2_path=str(place.l2)
    )
    cache = next((service for service in real.services if service.role == "lmcache"), None)
    services = tuple(_fake(service, cache, ours) for service in real.services)
    return dataclasses.replace(real, services=services)


def _fake(service: Service, cache: Service | None, settings: Settings) -> Service:
    module = (sys.executable, "-m", "tests.fake_stack", service.role)
    ports = [str(port) for port in service.ports]
    if service.role == "lmcache":
        own = ["--port", ports[0], "--http-port", ports[1]]
    else:
        own = ["--port", ports[0], "--model", settings.served_name]
        if cache is not None:
            own += ["--lmcache-url", cache.url]
    return dataclasses.replace(
        service,
        argv=(*module, *own, "--config", settings.to_json()),
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ.get("PATH", "")},
        cwd=str(ROOT),
    )


class FakeLaunch:
    """A ``kvlab.stack.Launch`` whose servers live in the caller's event loop.

    ``settings`` may be a function of scenario and repeat; faults that name either are dropped from
    the other launches. L2 is a folder of the launch's own below ``folder``, the same one when a
    scenario and repeat are launched again, unless profile or settings name another. With
    ``record`` the launch writes what kvlab's runtimes write: launching, ready, the first scrapes,
    the probe, stopping and stopped. ``prove`` refuses what they refuse: no new worker, a
    contradicted profile, a probe that is not restored; left out, it goes with ``record``.
    """

    def __init__(
        self,
        chosen: Profile | None = None,
        settings: Settings | Callable[[str, int], Settings] | None = None,
        *,
        folder: Path | None = None,
        record: Callable[[Record], None] | None = None,
        prove: bool | None = None,
        nonce: str = "fake",
    ):
        self.profile = chosen or profile()
        self.settings = settings
        self.folder = folder
        self.record = record
        self.prove = prove
        self.nonce = nonce
        self.launched: list[FakeDeployment] = []
        """Every deployment so far, also those that have ended."""

    def __call__(
        self,
        scenario: str,
        repeat: int,
        *,
        variant: Profile | None = None,
        label: str | None = None,
        l2_path: Path | None = None,
        keep_l2: bool = False,
        hard_stop: bool = False,
        probe: bool = True,
    ) -> AbstractAsyncContextManager[FakeDeployment]:
        chosen = variant or self.profile
        return self._launch(
            scenario, repeat, chosen, label or scenario, l2_path, probe=probe, hard=hard_stop
        )

    @asynccontextmanager
    async def _launch(
        self,
        scenario: str,
        repeat: int,
        chosen: Profile,
        label: str,
        l2_path: Path | None,
        *,
        probe: bool,
        hard: bool,
    ) -> AsyncIterator[FakeDeployment]:
        settings = self._settings_of(chosen, label, repeat, l2_path)
        try:
            count = instances(chosen, scenario)
            async with self._started(settings, scenario, label, repeat, count) as deployment:
                self.launched.append(deployment)
                await self._make_ready(deployment, chosen, probe=probe)
                try:
                    yield deployment
                finally:
                    self._event(deployment, "stopping")
            killed = hard and settings.fault("vllm", "soft_kill") is None
            codes = {state.name: -9 if killed else 0 for state in deployment.state()}
            self._event(deployment, "stopped", exit_codes=codes)
        except ExitedAtStart as error:
            raise StackNotReady(
                f"{scenario}: a fake server stopped while it started",
                hint="its fault is exit_at_start",
                log_tail=str(error),
            ) from error

    @asynccontextmanager
    async def _started(
        self, settings: Settings, scenario: str, label: str, repeat: int, count: int
    ) -> AsyncIterator[FakeDeployment]:
        with_cache = scenario in ("lmcache", "shared")
        async with (
            start(settings, lmcache=with_cache, instances=count) as stack,
            httpx.AsyncClient(trust_env=False, timeout=10) as http,
        ):
            yield FakeDeployment(stack, http, settings, label, repeat)

    def _settings_of(
        self, chosen: Profile, scenario: str, repeat: int, l2_path: Path | None
    ) -> Settings:
        given = self.settings(scenario, repeat) if callable(self.settings) else self.settings
        settings = settings_for(chosen, given).at(scenario, repeat)
        if settings.l2 and l2_path is not None:
            return dataclasses.replace(settings, l2_path=str(l2_path))
        if not settings.l2 or settings.l2_path is not None:
            return settings
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="fake-stack-"))
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        own = self.folder / f"l2-{scenario}-{repeat}"
        return dataclasses.replace(settings, l2_path=str(own))

    async def _make_ready(
        self, deployment: FakeDeployment, chosen: Profile, *, probe: bool
    ) -> None:
        """Write down, and prove if asked to, that the deployment may be measured."""
        self._event(deployment, "launching", services=[s.name for s in deployment.state()])
        prove = self.record is not None if self.prove is None else self.prove
        try:
            await deployment.learn(chosen, prove=prove)
            self._event(deployment, "ready", **deployment.facts)
            if self.record is not None:
                await self._write_scrapes(deployment)
            if prove and probe:
                record = self.record or (lambda _: None)
                groups = deployment.facts["object_groups"] or 1
                check = ready.Probe(deployment, chosen, record, nonce=self.nonce, groups=groups)
                self._event(deployment, "probe", **await check.run())
        except StackNotReady as error:
            self._event(deployment, "failure", error=error.message, hint=error.hint)
            raise

    async def _write_scrapes(self, deployment: FakeDeployment) -> None:
        assert self.record is not None
        for reading in await deployment.scrape():
            self.record(reading.recorded(deployment.scenario, deployment.repeat, "launch"))

    def _event(self, deployment: FakeDeployment, kind: str, **detail: Any) -> None:
        if self.record is not None:
            self.record(
                Event(
                    at_ns=now_ns(),
                    kind=kind,
                    scenario=deployment.scenario,
                    repeat=deployment.repeat,
                    detail=detail,
                )
            )


class FakeDeployment:
    """A ``kvlab.stack.Deployment`` on servers of this process."""

    def __init__(
        self, stack: Stack, http: httpx.AsyncClient, settings: Settings, scenario: str, repeat: int
    ):
        self.stack = stack
        self.settings = settings
        self.scenario = scenario
        self.repeat = repeat
        self.vllm_url = stack.vllm_url
        self.lmcache_url = stack.lmcache_url
        self.model = settings.served_name
        self.l2_path = stack.l2_path
        self.facts: dict[str, Any] = {}
        self._http = http
        self._names = _named(stack.servers)
        self._pids = {name: next(_pids) for name in self._names}
        self._stopped: set[str] = set()

    async def learn(self, chosen: Profile, *, prove: bool) -> None:
        """Fill ``facts`` from logs and answers; ``prove`` raises StackNotReady as kvlab does."""
        began_ns = now_ns()
        said = [line for server in self.stack.servers for line in server.log]
        facts = logs.read_facts("\n".join(said).encode())
        facts["block_tokens"] = facts["attention_block_tokens"]
        versions = {"vllm": (await self._get(self.vllm_url, "/version"))["version"]}
        workers: list[int] = []
        groups: int | None = None
        if self.lmcache_url is not None and self.stack.lmcache is not None:
            versions["lmcache"] = await self._get(self.lmcache_url, "/version")
            status = await self._get(self.lmcache_url, "/status")
            before = self.stack.lmcache.first_status
            workers = sorted(ready.worker_ids(status) - ready.worker_ids(before))
            if prove:
                workers = ready.new_workers(
                    before, status, chosen.model.name, instances=len(self.urls("vllm"))
                )
            groups = ready.object_groups(status, workers)
        self.facts = {
            "start_s": ns_to_s(now_ns() - began_ns),
            "facts": facts,
            "versions": versions,
            "registered_ids": workers,
            "object_groups": groups,
            "connector": facts.get("connector"),
        }
        if prove:
            ready.refuse_contradictions(chosen, facts, chosen.engine.connector)

    async def scrape(self, *, only: str | None = None) -> list[Reading]:
        """The counters of every server, or of the one source named."""
        return [
            await self._scrape(name, server)
            for name, server in self._names.items()
            if only in (None, name)
        ]

    async def _scrape(self, name: str, server: FakeServer) -> Reading:
        at_ns = now_ns()
        try:
            answer = await self._http.get(f"{server.url}/metrics")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            return Reading(source=name, at_ns=at_ns, error=f"{type(error).__name__}: {error}")
        samples, info = counters.parse(answer.text)
        return Reading(source=name, at_ns=at_ns, samples=samples, info=info)

    def urls(self, role: str) -> list[str]:
        """The base URLs of every server in a role, in the order in which they started."""
        return [server.url for server in self.stack.servers if server.role == role]

    def names(self, role: str) -> list[str]:
        """The names of every server in a role, in the order in which they started."""
        return [name for name, server in self._names.items() if server.role == role]

    def usage(self) -> list[Usage]:
        """What the settings say that each server uses now."""
        settings = self.settings
        found = []
        for name, server in self._names.items():
            age_s = time.time() - server.started
            found.append(
                Usage(
                    service=name,
                    name=f"fake-{server.role}",
                    pid=self._pids[name],
                    rss_bytes=round(MEMORY_BYTES + settings.leak_bytes_per_s * age_s),
                    cpu_s=age_s / 10,
                    files=round(30 + settings.leak_files_per_s * age_s),
                )
            )
        return found

    async def stop(self, name: str, *, hard: bool = False) -> None:
        """Stop one server and go on with the others."""
        self._stopped.add(name)
        await self._names[name].stop()

    def state(self) -> list[ServiceState]:
        """Every server as it is now."""
        return [
            ServiceState(
                name=name,
                pid=self._pids[name],
                started=server.started,
                running=server.running,
                exit_code=server.exit_code,
                oom_killed=self.settings.oom_killed and not server.running,
            )
            for name, server in self._names.items()
        ]

    def check_alive(self) -> None:
        """Raise StackNotReady, with the last log lines, when a server has stopped."""
        for name, server in self._names.items():
            if not server.running and name not in self._stopped:
                raise StackNotReady(
                    f"{server.role} stopped with exit code {server.exit_code}",
                    hint="its fault says so",
                    log_tail="\n".join(server.log[-TAIL:]),
                )

    async def reset_local_cache(self) -> bool | None:
        """Whether vLLM says that it emptied L0; None when it offers no way to."""
        results: list[bool | None] = []
        for server in self.stack.servers:
            if server.role == "vllm" and server.running:
                answer = await self._http.post(f"{server.url}/reset_prefix_cache")
                missing = answer.status_code == 404
                results.append(None if missing else bool(answer.json()["success"]))
        return None if None in results else all(results)

    async def clear_memory_tier(self) -> bool | None:
        """Whether LMCache says that it emptied L1; None without LMCache."""
        if self.lmcache_url is None:
            return None
        answer = await self._http.post(f"{self.lmcache_url}/cache/clear")
        return bool(answer.json()["status"] == "ok")

    async def _get(self, url: str, path: str) -> Any:
        answer = await self._http.get(f"{url}{path}")
        return json.loads(answer.text)


def _named(servers: Sequence[FakeServer]) -> dict[str, FakeServer]:
    """The servers by name, as kvlab's plan names them: further ones of a role are numbered."""
    named: dict[str, FakeServer] = {}
    for server in servers:
        number = sum(other.role == server.role for other in named.values()) + 1
        named[server.role if number == 1 else f"{server.role}-{number}"] = server
    return named
