"""A deployment that already runs: looked at, asked and counted, never started and never stopped.

Whoever started it decides what it is. So kvlab first asks every server what it is and refuses one
that is not what the profile says; then it measures what can be measured without a launch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import httpx

from kvlab import counters
from kvlab.errors import KvlabError, StackNotReady, UsageError
from kvlab.profile import Attach, Endpoint, Profile, l0_complaints
from kvlab.records import Event, now_ns
from kvlab.rundir import RunDir
from kvlab.stack import Reading, ServiceState, credentials, ready
from kvlab.stack.usage import Usage

ANSWER_S = 10.0
POSSIBLE = ("two-round", "acceptance")
REFUSED = {
    "restart": "stops both servers and starts them again on the same records",
    "object-groups": "starts LMCache with --separate-object-groups on and off",
    "eviction": "starts LMCache anew for every eviction setting",
    "shared-cache": "stops one vLLM while another one goes on",
    "soak": "follows the memory and the open files of the servers' processes",
    "parallel-read": "starts LMCache with one disk adapter after the other",
}
"""What an experiment needs that an attached deployment does not give."""

LARGEST = ("lmcache_mp_l1_memory_usage_bytes", "lmcache_mp_l1_usage_ratio")
"""How full one server's L1 is: of several servers the fullest counts, not the sum."""


def refuse(profile: Profile, experiment: str, control: bool) -> None:
    """Raise UsageError, before anything is sent, when the experiment needs a launch."""
    attach = _section(profile)
    if experiment not in POSSIBLE:
        need = REFUSED.get(experiment, "needs servers that kvlab starts itself")
        raise UsageError(
            f"{experiment} cannot be done on an attached deployment: it {need}",
            hint=f"attached deployments can do: {', '.join(POSSIBLE)}; for the others use a profile"
            " with runtime process or docker",
        )
    if control:
        raise UsageError(
            "an attached deployment has no control: its baseline would answer the second arm from"
            " what it kept of the first",
            hint="leave --control out",
        )
    if experiment == "acceptance" and attach.baseline is None:
        raise UsageError(
            "acceptance compares restored answers with those of a vLLM without LMCache, and"
            " attach.baseline names none",
            hint="set attach.baseline, or run two-round, which compares first and second visits",
        )
    if experiment == "acceptance" and not attach.may_clear:
        raise UsageError(
            "acceptance empties L0 and L1 between its requests, which everyone who uses the"
            " deployment would notice",
            hint="set attach.may_clear: true if nobody else does",
        )


def _section(profile: Profile) -> Attach:
    assert profile.attach is not None  # a profile with runtime attach is refused without it
    return profile.attach


@dataclass(slots=True)
class Server:
    """One server of the deployment, and what it answered last."""

    name: str
    """``vllm``, or ``vllm-1`` and so on where there are several."""
    role: str
    place: Endpoint
    reading: Reading | None = None
    said: dict[str, Any] = field(default_factory=dict)
    """What it says of itself: ``version``, and ``models`` or ``status``."""

    @property
    def labels(self) -> Mapping[str, str]:
        """vLLM's configuration as its counters state it."""
        return self.reading.info.get("vllm:cache_config_info", {}) if self.reading else {}


class AttachDeployment:
    """One scenario of a deployment that already runs."""

    hard_stop = False

    def __init__(
        self,
        profile: Profile,
        scenario: str,
        repeat: int,
        *,
        run: RunDir,
        label: str | None = None,
    ):
        self.profile = profile
        self.attach = _section(profile)
        self.scenario = label or scenario
        self.repeat = repeat
        self.model = profile.model.served_name
        self.servers = servers(self.attach, scenario)
        self.vllm_url = self.urls("vllm")[0]
        self.lmcache_url = next(iter(self.urls("lmcache")), None)
        self.l2_path = _visible_l2(profile) if self.lmcache_url else None
        self.facts: dict[str, Any] = {}
        self._run = run
        self._web = httpx.AsyncClient(
            trust_env=False, timeout=ANSWER_S, headers=credentials.headers(profile)
        )

    def urls(self, role: str) -> list[str]:
        """Where servers of a role are asked; of vLLM the entry, where the profile names one."""
        if role == "vllm" and self.attach.entry and self.of_role("lmcache"):
            return [self.attach.entry.base]
        return [server.place.base for server in self.of_role(role)]

    def names(self, role: str) -> list[str]:
        """The names of every server in a role, in the profile's order."""
        return [server.name for server in self.of_role(role)]

    def of_role(self, role: str) -> list[Server]:
        """Every server in a role, in the profile's order."""
        return [server for server in self.servers if server.role == role]

    def state(self) -> list[ServiceState]:
        """Every server as its counters showed it last; its process is not seen from here."""
        return [
            ServiceState(
                name=server.name,
                pid=None,
                started=_started(server.reading),
                running=server.reading is not None and server.reading.error is None,
            )
            for server in self.servers
        ]

    def check_alive(self) -> None:
        """Raise StackNotReady when a server took no connection the last time it was asked."""
        for server in self.servers:
            error = server.reading.error if server.reading else None
            if error and error.startswith("ConnectError"):
                raise StackNotReady(
                    f"{server.name} at {server.place.base} does not answer any more: {error}",
                    hint="look at the deployment; what was measured is kept",
                )

    def usage(self) -> list[Usage]:
        """Nothing: the servers' processes are not seen from here."""
        return []

    async def scrape(self, *, only: str | None = None) -> list[Reading]:
        """The counters by role, and of several servers of one role also those of each."""
        chosen = [server for server in self.servers if only in (None, server.role)]
        await asyncio.gather(*(self._read(server) for server in chosen))
        found = []
        for role in dict.fromkeys(server.role for server in chosen):
            readings = [s.reading for s in chosen if s.role == role and s.reading]
            found.append(total(role, readings))
            found += readings if len(readings) > 1 else []
        return found

    async def _read(self, server: Server) -> None:
        try:
            answer = await self._web.get(server.place.metrics_url)
            at_ns = now_ns()
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            reason = f"http {error.response.status_code}"
            server.reading = Reading(source=server.name, at_ns=now_ns(), error=reason)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
            server.reading = Reading(source=server.name, at_ns=now_ns(), error=reason)
        else:
            samples, info = counters.parse(answer.text)
            server.reading = Reading(source=server.name, at_ns=at_ns, samples=samples, info=info)

    async def reset_local_cache(self) -> bool | None:
        """Whether every vLLM emptied its own cache (L0); None: it may not, or offers no way to."""
        if not self.attach.may_clear:
            return None
        answers = [
            await self._post(f"{server.place.base}/reset_prefix_cache", "success", True)
            for server in self.of_role("vllm")
        ]
        return None if None in answers else all(answers)

    async def clear_memory_tier(self) -> bool | None:
        """Whether LMCache emptied L1, L2 untouched; None: it may not, or offers no way to."""
        if not self.attach.may_clear or self.lmcache_url is None:
            return None
        answers = [
            await self._post(f"{server.place.base}/cache/clear", "status", "ok")
            for server in self.of_role("lmcache")
        ]
        return None if None in answers else all(answers)

    async def _post(self, url: str, key: str, wanted: Any) -> bool | None:
        """Whether a POST answers so; None without that endpoint."""
        try:
            answer = await self._web.post(url)
            if answer.status_code in (404, 405):
                return None
            body = answer.json()
        except (httpx.HTTPError, ValueError):
            return False
        return isinstance(body, dict) and body.get(key) == wanted

    async def stop(self, name: str, *, hard: bool = False) -> None:
        """Raise UsageError: a server that kvlab did not start is not kvlab's to stop."""
        raise UsageError(
            f"{name} is part of an attached deployment, which kvlab does not stop",
            hint="use a profile with runtime process or docker",
        )

    async def look(self) -> None:
        """Ask every server what it is, and refuse a deployment that is not the profile's."""
        self._event("launching", services=[server.name for server in self.servers], attached=True)
        await asyncio.gather(*(self._ask(server) for server in self.servers))
        await self.scrape()
        for sentence, hint in complaints(self.profile, self.servers):
            raise StackNotReady(sentence, hint=hint)
        await self._expect_idle()
        self.facts = described(self.profile, self.servers)
        ready.refuse_contradictions(self.profile, self.facts["facts"])
        self._event("ready", **self.facts)

    async def _ask(self, server: Server) -> None:
        base = server.place.base
        said = await ready.fetch(self._web, f"{base}/version")
        server.said["version"] = said.get("version") if isinstance(said, dict) else said
        if server.role == "vllm":
            server.said["models"] = await ready.fetch(self._web, f"{base}/v1/models")
        else:
            server.said["status"] = await ready.fetch(self._web, f"{base}/status")

    async def _expect_idle(self) -> None:
        """Raise StackNotReady while somebody else is served: counters do not say for whom."""
        vllms = self.of_role("vllm")
        before = {server.name: _samples(server) for server in vllms}
        await asyncio.sleep(self.attach.idle_s)
        await asyncio.gather(*(self._read(server) for server in vllms))
        for server in vllms:
            grown = counters.delta(before[server.name], _samples(server), "prompt_tokens")
            running = _samples(server).get("vllm:num_requests_running")
            if grown or running:
                raise StackNotReady(
                    f"{server.name} at {server.place.base} is serving somebody else "
                    f"({grown or 0:,.0f} prompt tokens in {self.attach.idle_s:g} s, "
                    f"{running or 0:,.0f} requests running): its counters would not be this run's",
                    hint="keep other users away while kvlab measures",
                )

    async def probe(self, nonce: str) -> None:
        """Prove, before anything is measured, that a prompt is stored and restored."""
        groups = self.facts["object_groups"] or 1
        check = ready.Probe(self, self.profile, self._run.append, nonce=nonce, groups=groups)
        self._event("probe", **await check.run())

    async def scrape_launch(self) -> None:
        """Write down every counter as it is before anything is measured."""
        for reading in await self.scrape():
            self._run.append(reading.recorded(self.scenario, self.repeat, "launch"))

    async def leave(self) -> None:
        """Drop the connections; the servers go on."""
        await self._web.aclose()
        self._event("left")

    def fail(self, error: KvlabError) -> None:
        """Write down why the deployment is not measured."""
        self._event("failure", error=error.message, hint=error.hint)

    def _event(self, kind: str, **detail: Any) -> None:
        self._run.append(
            Event(
                at_ns=now_ns(),
                kind=kind,
                scenario=self.scenario,
                repeat=self.repeat,
                detail=detail,
            )
        )


def servers(attach: Attach, scenario: str) -> list[Server]:
    """The servers of a scenario, LMCache's first; UsageError when the deployment has none."""
    if scenario == "baseline" and attach.baseline is not None:
        return [Server("vllm", "vllm", attach.baseline)]
    if scenario != "lmcache":
        raise UsageError(
            f"the attached deployment has no scenario {scenario}",
            hint="set attach.baseline to a vLLM without LMCache"
            if scenario == "baseline"
            else "attached deployments have the scenarios baseline and lmcache",
        )
    return [*_named("lmcache", attach.lmcache), *_named("vllm", attach.vllm)]


def _named(role: str, places: Sequence[Endpoint]) -> list[Server]:
    if len(places) == 1:
        return [Server(role, role, places[0])]
    return [Server(f"{role}-{number}", role, place) for number, place in enumerate(places, 1)]


def total(role: str, readings: Sequence[Reading]) -> Reading:
    """The readings of a role's servers as one: counters summed, unknown when one is unknown.

    A counter that a server does not have yet adds nothing: servers make them at the first use.
    """
    at_ns = max((reading.at_ns for reading in readings), default=now_ns())
    if len(readings) == 1:
        (one,) = readings
        return Reading(
            source=role, at_ns=at_ns, samples=one.samples, info=one.info, error=one.error
        )
    missing = [reading for reading in readings if reading.samples is None]
    if missing or not readings:
        reasons = "; ".join(f"{reading.source}: {reading.error}" for reading in missing)
        return Reading(source=role, at_ns=at_ns, error=reasons or "no server was asked")
    summed: dict[str, float] = {}
    for reading in readings:
        for name, value in (reading.samples or {}).items():
            known = summed.get(name)
            if known is None:
                summed[name] = value
            else:
                summed[name] = max(known, value) if name in LARGEST else known + value
    return Reading(source=role, at_ns=at_ns, samples=summed, info=readings[0].info)


def complaints(profile: Profile, asked: Sequence[Server]) -> Iterator[tuple[str, str]]:
    """What servers say of themselves against the profile: a sentence and a hint each."""
    for server in asked:
        yield from _unreachable(server)
    for server in asked:
        if server.role == "vllm":
            yield from _wrong_vllm(profile, server)
        else:
            yield from _wrong_lmcache(profile, server, asked)
    yield from _wrong_versions(profile, asked)
    yield from _too_large_l0(profile, asked)


def _too_large_l0(profile: Profile, asked: Sequence[Server]) -> Iterator[tuple[str, str]]:
    """Every context has a vLLM of its own, so that the working set is to overflow all of them."""
    sizes = [server.labels.get("kv_cache_size_tokens", "") for server in asked]
    stated = [int(size) for size in sizes if size.isdigit()]
    for complaint in l0_complaints(profile, sum(stated)):
        sentence, _, hint = complaint.partition("; ")
        yield sentence, hint


def _unreachable(server: Server) -> Iterator[tuple[str, str]]:
    error = server.reading.error if server.reading else "it was not asked"
    prefix = "vllm:" if server.role == "vllm" else "lmcache_mp_"
    if error:
        hint = "check the address"
        if error.startswith("http 40"):
            hint = "name its key's variable in attach.api_key_env"
        yield f"the counters of {server.name} at {server.place.metrics_url}: {error}", hint
    elif not any(name.startswith(prefix) for name in _samples(server)):
        yield (
            f"{server.place.metrics_url} holds no counters of {_kind(server)} ({prefix}…)",
            f"does attach.{server.role} name a {_kind(server)} server? LMCache's counters are on "
            "its HTTP port",
        )


def _wrong_vllm(profile: Profile, server: Server) -> Iterator[tuple[str, str]]:
    try:
        cards = {str(card["id"]): card for card in server.said["models"]["data"]}
    except (TypeError, KeyError):
        cards = {}
    card = cards.get(profile.model.served_name)
    if card is None:
        yield (
            f"{server.name} at {server.place.base} serves {', '.join(cards) or 'no model'}, not "
            f"{profile.model.served_name}",
            "set model.served_name, or correct the URL",
        )
        return
    longest = card.get("max_model_len")
    needed = profile.workload.context_tokens + profile.workload.output_tokens
    if isinstance(longest, int) and longest < needed:
        yield (
            f"{server.name} takes at most {longest:,} tokens; the workload asks {needed:,}",
            "shorten workload.context_tokens",
        )
    block = server.labels.get("block_size", "")
    if block.isdigit() and int(block) != profile.engine.block_tokens:
        yield (
            f"{server.name} works in blocks of {block} tokens, the profile says "
            f"{profile.engine.block_tokens}",
            f"set engine.block_tokens: {block}",
        )
    caching = {"True": True, "False": False}.get(server.labels.get("enable_prefix_caching", ""))
    if caching is not None and caching != profile.engine.prefix_caching:
        yield (
            f"{server.name} runs with prefix caching {'on' if caching else 'off'}, the profile "
            f"says {'on' if profile.engine.prefix_caching else 'off'}",
            "LMCache restores nothing without it: start vLLM with --enable-prefix-caching"
            if not caching
            else "set engine.prefix_caching: true",
        )


def _wrong_lmcache(
    profile: Profile, server: Server, asked: Sequence[Server]
) -> Iterator[tuple[str, str]]:
    status = server.said.get("status")
    chunk = status.get("chunk_size") if isinstance(status, dict) else None
    if chunk != profile.cache.chunk_tokens:
        yield (
            f"{server.name} at {server.place.base} works in chunks of "
            f"{chunk or 'an unknown number of'} tokens, the profile says "
            f"{profile.cache.chunk_tokens}",
            f"set cache.chunk_tokens: {chunk}" if chunk else "correct the URL in attach.lmcache",
        )
    last = [one for one in asked if one.role == "lmcache"][-1]
    if server is last and not _workers(profile, asked):
        yield (
            f"no worker of {profile.model.name} is registered with LMCache: vLLM would compute"
            " everything itself",
            "is the connector set in vLLM, with LMCache's address, and is model.name the name that"
            " vLLM was started with?",
        )


def _workers(profile: Profile, asked: Sequence[Server]) -> list[ready.Worker]:
    """The workers that are registered for the profile's model, on any of the servers."""
    wanted = PurePosixPath(profile.model.name).name
    found: list[ready.Worker] = []
    for server in asked:
        if server.role == "lmcache":
            models = ready.worker_models(server.said.get("status"))
            found += [
                worker
                for worker, name in models.items()
                if name is None or PurePosixPath(name).name == wanted
            ]
    return found


def _wrong_versions(profile: Profile, asked: Sequence[Server]) -> Iterator[tuple[str, str]]:
    wanted: Mapping[Any, str] = _section(profile).versions
    for role in ("vllm", "lmcache"):
        said = {s.name: s.said.get("version") for s in asked if s.role == role}
        known = {version for version in said.values() if isinstance(version, str)}
        if len(known) > 1:
            shown = ", ".join(f"{name} {version}" for name, version in said.items())
            yield (
                f"the deployment mixes versions: {shown}",
                "measure servers of one version at a time",
            )
        for name, version in said.items():
            if role in wanted and version != wanted[role]:
                yield (
                    f"{name} is version {version or 'unknown'}, the profile says {wanted[role]}",
                    f"set attach.versions.{role}, or attach to the right deployment",
                )


def described(profile: Profile, asked: Sequence[Server]) -> dict[str, Any]:
    """The detail of the ``ready`` event: what the servers state of themselves."""
    facts: dict[str, Any] = {}
    vllms = [server for server in asked if server.role == "vllm"]
    for name, label in (
        ("block_tokens", "block_size"),
        ("kv_cache_tokens", "kv_cache_size_tokens"),
        ("gpu_blocks", "num_gpu_blocks"),
    ):
        stated = [server.labels.get(label, "") for server in vllms]
        if stated and all(text.isdigit() for text in stated):
            facts[name] = min(map(int, stated))
    caching = {server.labels.get("enable_prefix_caching") for server in vllms}
    if caching <= {"True", "False"} and len(caching) == 1:
        facts["prefix_caching"] = "on" if caching == {"True"} else "off"
    caches = [server for server in asked if server.role == "lmcache"]
    workers = _workers(profile, asked)
    groups = {ready.object_groups(server.said.get("status"), workers) for server in caches}
    versions = {
        server.role: version
        for server in asked
        if isinstance(version := server.said.get("version"), str)
    }
    return {
        "attached": True,
        "facts": facts,
        "versions": versions,
        "registered_ids": workers,
        "object_groups": max(groups) if groups else None,
        "servers": {server.name: server.place.base for server in asked},
    }


def _kind(server: Server) -> str:
    return "vLLM" if server.role == "vllm" else "LMCache"


def _samples(server: Server) -> dict[str, float]:
    return (server.reading.samples or {}) if server.reading else {}


def _started(reading: Reading | None) -> float | None:
    return (reading.samples or {}).get(counters.STARTED) if reading else None


def _visible_l2(profile: Profile) -> Path | None:
    """The deployment's L2 folder, where the profile names it and this machine sees it."""
    named = profile.cache.l2.base_path if profile.cache.l2 else None
    return Path(named) if named and Path(named).is_dir() else None


@asynccontextmanager
async def launch(
    profile: Profile,
    scenario: str,
    repeat: int,
    *,
    run: RunDir,
    nonce: str = "",
    variant: Profile | None = None,
    label: str | None = None,
    l2_path: Path | None = None,
    keep_l2: bool = False,
    hard_stop: bool = False,
    probe: bool = True,
) -> AsyncIterator[AttachDeployment]:
    """The scenario's servers as they run, found to be what the profile says.

    Nothing is started, so what asks for another start is refused; a ``variant`` counts for the
    requests alone, and ``keep_l2`` is always so.
    """
    if hard_stop or l2_path is not None:
        raise UsageError(
            "an attached deployment is not started again on other records",
            hint="use a profile with runtime process or docker",
        )
    stack = AttachDeployment(profile, scenario, repeat, run=run, label=label)
    try:
        try:
            await stack.look()
            await stack.scrape_launch()
            if probe:
                await stack.probe(nonce)
        except KvlabError as error:
            stack.fail(error)
            raise
        yield stack
    finally:
        await stack.leave()
