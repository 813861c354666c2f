"""Servers that kvlab starts itself: in order, each healthy and ours, watched, stopped at the end.

What a server is – a process or a container – is for ``server`` and ``container``; everything that
is asked of it over HTTP or read from its log is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from kvlab import counters
from kvlab.errors import KvlabError, StackNotReady
from kvlab.profile import Profile
from kvlab.records import Event, Record, now_ns
from kvlab.rundir import RunDir, sha256_json
from kvlab.stack import Reading, ServiceState, logs, ports, ready, usage
from kvlab.stack.plan import Place, Plan, Service
from kvlab.stack.server import Server
from kvlab.stack.usage import Usage
from kvlab.units import NS_PER_S

SCRAPE_S = 10.0
PlanFor = Callable[[Place], Plan]
T = TypeVar("T")


class StartedDeployment:
    """One scenario's servers, started by kvlab: processes or containers."""

    def __init__(
        self,
        profile: Profile,
        steps: Plan,
        servers: Sequence[Server],
        *,
        repeat: int,
        run: RunDir,
        label: str | None = None,
        l2_path: Path | None = None,
    ):
        self.profile = profile
        self.steps = steps
        self.scenario = label or steps.scenario
        self.repeat = repeat
        self.model = profile.model.served_name
        self.l2_path = l2_path
        self.vllm_url = self.urls("vllm")[0]
        self.lmcache_url = next(iter(self.urls("lmcache")), None)
        self.facts: dict[str, Any] = {}
        self.hard_stop = False
        self._run = run
        self._web = httpx.AsyncClient(trust_env=False)
        self.servers = list(servers)

    def urls(self, role: str) -> list[str]:
        """The base URLs of every server in a role, in the plan's order."""
        return [service.url for service in self.steps.services if service.role == role]

    def names(self, role: str) -> list[str]:
        """The names of every server in a role, in the plan's order."""
        return [service.name for service in self.steps.services if service.role == role]

    def server(self, name: str) -> Server:
        """The server of that name."""
        return next(server for server in self.servers if server.name == name)

    def state(self) -> list[ServiceState]:
        """Every server as it is now."""
        return [server.state() for server in self.servers]

    def check_alive(self) -> None:
        """Raise StackNotReady, with the last log lines, when a server has stopped."""
        for server in self.servers:
            if server.pid is not None:
                server.check_alive()

    def read_logs(self) -> dict[str, Any]:
        """The facts of all logs as they are now; see ``logs.PATTERNS``."""
        return logs.merge(logs.read_file(server.log) for server in self.servers)

    def usage(self) -> list[Usage]:
        """What every process of every server uses now."""
        return [
            one
            for server in self.servers
            for one in usage.of(self._source(server), server.tree() or ())
        ]

    async def scrape(self, *, only: str | None = None) -> list[Reading]:
        """The counters of every server, or of the one source named."""
        chosen = [server for server in self.servers if only in (None, self._source(server))]
        return [await self._reading(server) for server in chosen]

    def _source(self, server: Server) -> str:
        """The role; further servers of one role go by their names."""
        first = next(s for s in self.servers if s.service.role == server.service.role)
        return server.service.role if server is first else server.name

    async def _reading(self, server: Server) -> Reading:
        source = self._source(server)
        try:
            answer = await self._web.get(f"{server.service.url}/metrics", timeout=SCRAPE_S)
            at_ns = now_ns()
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            reason = f"http {error.response.status_code}"
            return Reading(source=source, at_ns=now_ns(), error=reason)
        except httpx.HTTPError as error:
            return Reading(source=source, at_ns=now_ns(), error=f"{type(error).__name__}: {error}")
        samples, info = counters.parse(answer.text)
        return Reading(source=source, at_ns=at_ns, samples=samples, info=info)

    async def reset_local_cache(self) -> bool | None:
        """Whether every running vLLM emptied its own cache (L0); None: one offers no way to."""
        vllms = [s for s in self.servers if s.service.role == "vllm" and s.wanted]
        results = [await self._reset(server.service.url) for server in vllms]
        return None if None in results else all(results)

    async def _reset(self, url: str) -> bool | None:
        body = await self._post(f"{url}/reset_prefix_cache")
        # The status is 200 even when blocks are held and nothing was reset.
        return None if body is None else body.get("success") is True

    async def clear_memory_tier(self) -> bool | None:
        """Whether LMCache emptied L1, L2 untouched; None when it offers no way to."""
        if self.lmcache_url is None:
            return None
        body = await self._post(f"{self.lmcache_url}/cache/clear")
        return None if body is None else body.get("status") == "ok"

    async def _post(self, url: str) -> dict[str, Any] | None:
        """The JSON object of a 200; an empty one when it failed, None without that endpoint."""
        try:
            answer = await self._web.post(url, timeout=SCRAPE_S)
            if answer.status_code in (404, 405):
                return None
            body = answer.json()
        except (httpx.HTTPError, ValueError):
            return {}
        return body if answer.status_code == 200 and isinstance(body, dict) else {}

    async def stop(self, name: str, *, hard: bool = False) -> None:
        """Stop one server and go on with the others."""
        await self.server(name).stop(hard=hard)

    async def start(self) -> None:
        """Start every server in order, each healthy and ours before the next one starts."""
        began_ns = now_ns()
        self.event(
            "launching",
            services=[server.name for server in self.servers],
            memory_available_bytes=psutil.virtual_memory().available,
        )
        status: Any = None
        starts = {}
        for server in self.servers:
            from_ns = now_ns()
            await self._start(server)
            starts[server.name] = (now_ns() - from_ns) / NS_PER_S
            if server.service.role == "lmcache":
                status = await ready.fetch(self._web, f"{server.service.url}/status")
        workers, groups = await self._registered(status)
        facts = await self._learn()
        versions = await self._versions()
        facts["unknown_versions"] = logs.unknown_versions(facts, versions)
        self.facts = {
            "start_s": (now_ns() - began_ns) / NS_PER_S,
            "starts_s": starts,
            "facts": facts,
            "versions": versions,
            "registered_ids": workers,
            "object_groups": groups,
            "connector": facts.get("connector"),
            "model_sha256": _model_digest(self._run.manifest),
        }
        ready.refuse_contradictions(self.profile, facts, self.steps.connector)
        self.event("ready", **self.facts)

    async def probe(self, nonce: str) -> None:
        """Prove, before anything is measured, that a prompt is stored and restored."""
        groups = self.facts["object_groups"] or 1
        check = ready.Probe(self, self.profile, self._run.append, nonce=nonce, groups=groups)
        limit_s = 2 * self.profile.timeouts.request_s + self.profile.timeouts.drain_s + 60
        detail = await self._while_alive(self.servers, check.run(), limit_s, "the probe's end")
        self.event("probe", **detail)

    async def _start(self, server: Server) -> None:
        service = server.service
        await server.start(self.profile.timeouts.stop_s)
        wanted = f"a healthy answer at {service.url}{service.health}"
        started = [one for one in self.servers if one.pid is not None]
        try:
            await self._while_alive(
                started, ready.healthy(self._web, service), service.ready_s, wanted
            )
        except StackNotReady as error:
            # The log may already say why: a block size that the chunks do not fit, for example.
            facts = await self._learn(ask=False)
            found = [*ready.failures(facts), *ready.complaints(self.profile, facts)]
            for sentence, hint in found:
                error.message += f". In its log: {sentence}"
                error.hint = hint
            raise
        if (tree := server.tree()) is not None:
            ready.refuse_foreign(service, tree)
        await ready.refuse_stranger(self._web, service, self.profile)

    async def _while_alive(
        self, servers: Iterable[Server], work: Coroutine[Any, Any, T], limit_s: float, wanted: str
    ) -> T:
        """What the work gives back; StackNotReady at once when a server ends, or at the limit."""
        watched = list(servers)
        task = asyncio.ensure_future(work)
        exits = [asyncio.ensure_future(server.exited.wait()) for server in watched]
        try:
            done, _ = await asyncio.wait(
                {task, *exits}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if task in done:
                return task.result()
            for server in watched:
                server.check_alive(" while it was waited for")
            raise StackNotReady(
                f"{watched[-1].name} did not reach {wanted} within {limit_s:g} s",
                hint=f"see {watched[-1].log}; raise the limit in timeouts if it is only slow",
                log_tail=logs.tail(watched[-1].log),
            )
        finally:
            for future in (task, *exits):
                future.cancel()
            await asyncio.gather(task, *exits, return_exceptions=True)

    async def _registered(self, before: Any) -> tuple[list[ready.Worker], int | None]:
        """The workers that registered with LMCache, and the objects it keeps per chunk."""
        if self.lmcache_url is None:
            return [], None
        work = ready.registered(
            self._web,
            self.lmcache_url,
            before,
            self.profile.model.name,
            instances=len(self.urls("vllm")),
        )
        limit_s = 2 * ready.REGISTER_S
        workers, status = await self._while_alive(self.servers, work, limit_s, "registration")
        return workers, ready.object_groups(status, workers)

    async def _learn(self, *, ask: bool = True) -> dict[str, Any]:
        """What the logs state; where they do not, what vLLM's counters state."""
        facts = self.read_logs()
        config: dict[str, str] = {}
        if ask:
            for reading in await self.scrape(only="vllm"):
                config = reading.info.get("vllm:cache_config_info", {})
        known = {"block_tokens": facts.get("attention_block_tokens")}
        for name, label in (
            ("block_tokens", "block_size"),
            ("kv_cache_tokens", "kv_cache_size_tokens"),
            ("gpu_blocks", "num_gpu_blocks"),
        ):
            stated = known.get(name) or facts.get(name) or _whole(config.get(label))
            if stated is not None:
                facts[name] = stated
        return facts

    async def _versions(self) -> dict[str, str]:
        versions = {}
        for server in self.servers:
            said = await ready.fetch(self._web, f"{server.service.url}/version")
            version = said.get("version") if isinstance(said, dict) else said
            if isinstance(version, str):
                versions[server.service.role] = version
        return versions

    async def close(self) -> None:
        """Stop every server, the last one first, and keep what their logs say at the end."""
        begun = [server for server in reversed(self.servers) if server.begun]
        try:
            if begun:
                self.event("stopping")
        finally:
            # Also when the disk is full and the event could not be written.
            for server in begun:
                await server.stop(hard=self.hard_stop)
            await self._web.aclose()
        if begun:
            self.event("stopped", **self._stopped(begun))

    def _stopped(self, begun: list[Server]) -> dict[str, Any]:
        reports = {server.name: server.stop_report or {} for server in begun}
        removed = {one for report in reports.values() for one in report.get("shm_removed", ())}
        return {
            "stop_s": {name: report.get("seconds") for name, report in reports.items()},
            "exit_codes": {server.name: server.exit_code for server in begun},
            "left": {
                name: report["left"] for name, report in reports.items() if report.get("left")
            },
            "shm_removed": sorted(removed),
            "log_facts": {k: v for k, v in self.read_logs().items() if isinstance(v, dict)},
        }

    def event(self, kind: str, **detail: Any) -> None:
        """Write down that something happened to this launch."""
        self._append(
            Event(
                at_ns=now_ns(),
                kind=kind,
                scenario=self.scenario,
                repeat=self.repeat,
                detail=detail,
            )
        )

    def fail(self, error: KvlabError) -> None:
        """Write down why the servers did not become ready, or stopped."""
        detail: dict[str, Any] = {"error": error.message, "hint": error.hint}
        if error.log_tail:
            detail["log_tail"] = error.log_tail
        self.event("failure", **detail)

    async def scrape_launch(self) -> None:
        """Write down every counter as the launch left it."""
        for reading in await self.scrape():
            self._append(reading.recorded(self.scenario, self.repeat, "launch"))

    def _append(self, record: Record) -> None:
        self._run.append(record)


def refuse_taken(profile: Profile, steps: Plan) -> None:
    """Raise HostBusy when somebody listens where one of the services is to listen."""
    for service in steps.services:
        host = profile.cache.host if service.role == "lmcache" else profile.engine.host
        ports.refuse_taken([int(port) for port in service.ports], host)


def has_l2(profile: Profile, steps: Plan) -> bool:
    """Whether the plan's servers keep records on disk."""
    return profile.cache.l2 is not None and any(s.role == "lmcache" for s in steps.services)


def log_of(run: RunDir, repeat: int, label: str, service: Service) -> Path:
    """Where the service's log goes."""
    return run.logs / f"{repeat}-{label}-{service.name}.log"


@asynccontextmanager
async def running(
    stack: StartedDeployment, *, nonce: str, probe: bool, hard_stop: bool
) -> AsyncIterator[None]:
    """The block runs while the servers do: started and proven before it, stopped after it."""
    stack.hard_stop = hard_stop
    try:
        try:
            await stack.start()
            await stack.scrape_launch()
            if probe:
                await stack.probe(nonce)
        except KvlabError as error:
            stack.fail(error)
            raise
        yield
    finally:
        await _to_its_end(stack.close())


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await the work to its end, even when cancelled meanwhile; the cancellation comes after."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    task.result()
    if cancelled:
        raise cancelled


def _model_digest(manifest: Mapping[str, Any]) -> str | None:
    """One digest of all of the model's files; None where the run does not know them."""
    files = (manifest.get("model") or {}).get("sha256")
    return sha256_json(files) if files else None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
