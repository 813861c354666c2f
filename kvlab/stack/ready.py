"""Whether the servers may be measured: healthy, ours, registered, as the profile says, and caching.

A green health check proves little: another server may answer on the port, no worker may be
registered, and every request may succeed while nothing is cached. So each of these is asked.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import httpx

from kvlab import client, counters, prompts
from kvlab.errors import StackNotReady
from kvlab.profile import MIN_CHUNKS, Profile, l0_complaints
from kvlab.records import Record, RequestRecord
from kvlab.stack import Deployment, credentials, ports
from kvlab.stack.plan import CONNECTORS, Service

POLL_S = 0.2
ANSWER_S = 5.0
"""A health endpoint that takes longer than this is asked again."""
REGISTER_S = 20.0
RESET_S = 10.0
"""Blocks that a store still reads keep vLLM from emptying its cache for a moment."""

_IDS = re.compile(r"registered_\w*ids")
_META = re.compile(r"\w*context_meta")


async def healthy(web: httpx.AsyncClient, service: Service) -> None:
    """Return once the service's health endpoint says that it is well."""
    while not await _is_healthy(web, service.url + service.health):  # noqa: ASYNC110 - polled
        await asyncio.sleep(POLL_S)


async def _is_healthy(web: httpx.AsyncClient, url: str) -> bool:
    try:
        answer = await web.get(url, timeout=ANSWER_S)
    except httpx.HTTPError:
        return False
    if answer.status_code != 200:
        return False
    try:
        body = answer.json()
    except ValueError:
        return True  # vLLM's answer is empty
    return not isinstance(body, dict) or body.get("status", "healthy") in ("healthy", "ok")


async def fetch(web: httpx.AsyncClient, url: str) -> Any:
    """The JSON that a URL answers; None when it answers none."""
    try:
        answer = await web.get(url, timeout=ANSWER_S)
        return answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def refuse_foreign(service: Service, tree: Collection[int]) -> None:
    """Raise StackNotReady when a process outside ``tree`` listens on one of the service's ports.

    Where the system does not show who listens, this stays open; what the server says of itself is
    compared as well.
    """
    for port in service.ports:
        for holder in ports.holders(int(port)):
            if holder.pid is not None and holder.pid not in tree:
                raise StackNotReady(
                    f"port {port} is in use by {holder}, which is not the {service.name} that "
                    "was started: its answers are not measured",
                    hint="stop that process, or set the port to 0 in the profile",
                )


async def refuse_stranger(web: httpx.AsyncClient, service: Service, profile: Profile) -> None:
    """Raise StackNotReady when the server says of itself that it is another one."""
    if service.role == "lmcache":
        status = await fetch(web, f"{service.url}/status")
        chunk = status.get("chunk_size") if isinstance(status, dict) else None
        if chunk != profile.cache.chunk_tokens:
            raise StackNotReady(
                f"the server at {service.url} works in chunks of {chunk or 'an unknown number of'} "
                f"tokens, not {profile.cache.chunk_tokens}: it is not the one that was started",
                hint="is another LMCache server using the port? stop it",
            )
        return
    listed = await fetch(web, f"{service.url}/v1/models")
    try:
        names = [str(entry["id"]) for entry in listed["data"]]
    except (TypeError, KeyError):
        names = []
    if profile.model.served_name not in names:
        raise StackNotReady(
            f"the server at {service.url} serves {', '.join(names) or 'no model'}, not "
            f"{profile.model.served_name}: it is not the one that was started",
            hint="is another vLLM using the port? stop it",
        )


Worker = int | str
"""The id of a worker: LMCache's are numbers; another version's may be names."""


def worker_ids(status: Any) -> set[Worker]:
    """The ids of registered workers in LMCache's /status, under any of its names."""
    if not isinstance(status, Mapping):
        return set()
    ids: set[Worker] = set()
    for key, value in status.items():
        if _IDS.fullmatch(key) and isinstance(value, list):
            ids.update(map(_id, value))
    return ids or set(map(_id, _meta(status)))


def _id(entry: Any) -> Worker:
    text = str(entry)
    return int(text) if text.isdecimal() else text


def _meta(status: Mapping[str, Any]) -> dict[str, Any]:
    """What LMCache knows of each worker, by id."""
    for key, value in status.items():
        if _META.fullmatch(key) and isinstance(value, dict) and value:
            return value
    return {}


def worker_models(status: Any) -> dict[Worker, str | None]:
    """The registered workers, each with the model that it serves; None where it is not said."""
    meta = _meta(status) if isinstance(status, Mapping) else {}
    models: dict[Worker, str | None] = {}
    for worker in sorted(worker_ids(status), key=str):
        entry = meta.get(str(worker))
        name = entry.get("model_name") if isinstance(entry, dict) else None
        models[worker] = str(name) if name else None
    return models


def new_workers(
    before: Any, after: Any, model: str | None = None, *, instances: int = 1
) -> list[Worker]:
    """The ids that are registered now and were not before, every one with the right model.

    Raises StackNotReady when there are fewer than the vLLM instances with their world size ask
    for. A dead worker stays listed for minutes, so an id alone proves nothing.
    """
    listed = worker_ids(after)
    new = sorted(listed - worker_ids(before), key=str)
    hint = "see vLLM's log for lines of LMCache; is the connector given, and its address right?"
    if not listed:
        raise StackNotReady("no worker is registered with LMCache", hint=hint)
    if not new:
        stale = ", ".join(sorted(map(str, listed)))
        raise StackNotReady(
            f"no new worker is registered with LMCache, only stale id {stale}", hint=hint
        )
    meta = _meta(after)
    known = [meta[str(worker)] for worker in new if isinstance(meta.get(str(worker)), dict)]
    for entry in known:
        name = entry.get("model_name")
        if model and name and PurePosixPath(str(name)).name != PurePosixPath(model).name:
            raise StackNotReady(
                f"the new worker registered the model {name}, not {model}",
                hint="does another vLLM use this LMCache server? stop it",
            )
    sizes = [entry.get("world_size") for entry in known]
    world = max((size for size in sizes if isinstance(size, int)), default=1)
    expected = instances * world
    if len(new) < expected:
        raise StackNotReady(
            f"{len(new)} of {expected} workers are registered with LMCache", hint=hint
        )
    return new


def object_groups(status: Any, workers: Collection[Worker]) -> int:
    """How many objects LMCache keeps per chunk for these workers; 1 when it does not say."""
    groups = {0}
    for worker in workers:
        entry = _meta(status).get(str(worker)) if isinstance(status, Mapping) else None
        layout = entry.get("kv_cache_layout") if isinstance(entry, dict) else None
        for kernel in (layout or {}).get("kernel_groups", ()):
            groups.add(int(kernel.get("object_group_idx") or 0))
    return len(groups)


async def registered(
    web: httpx.AsyncClient, url: str, before: Any, model: str, *, instances: int = 1
) -> tuple[list[Worker], Any]:
    """The new workers' ids and LMCache's status, once they are registered."""
    end = asyncio.get_running_loop().time() + REGISTER_S
    while True:
        status = await fetch(web, f"{url}/status")
        try:
            return new_workers(before, status, model, instances=instances), status
        except StackNotReady:
            if asyncio.get_running_loop().time() > end:
                raise
        await asyncio.sleep(POLL_S)


def complaints(
    profile: Profile, facts: Mapping[str, Any], connector: str | None = None
) -> Iterator[tuple[str, str]]:
    """What the servers say against the profile: a sentence and a hint each."""
    block, chunk = facts.get("block_tokens"), profile.cache.chunk_tokens
    if block is not None and block != profile.engine.block_tokens:
        fits = " or a multiple"
        if chunk % block == 0:
            fits += f" ({chunk} is one)"
        remedy = ""
        if facts.get("ssm_state_reset"):
            remedy = (
                f"vLLM keeps recurrent state as {facts['ssm_state_reset']} on this CPU unless "
                "engine.flags.mamba-ssm-cache-dtype says otherwise; set it, or "
            )
        yield (
            f"vLLM works in blocks of {block} tokens, the profile says "
            f"{profile.engine.block_tokens} with chunks of {chunk}",
            f"{remedy}set engine.block_tokens: {block}; for cache.chunk_tokens use {block}{fits}, "
            f"and for a hybrid model engine.max_num_batched_tokens: {2 * block - 1}",
        )
    if facts.get("kv_cache_tokens"):
        for complaint in l0_complaints(profile, facts["kv_cache_tokens"]):
            sentence, _, hint = complaint.partition("; ")
            yield sentence, hint
    wanted = CONNECTORS[connector]["kv_connector"] if connector in CONNECTORS else None
    if wanted and facts.get("connector") not in (None, wanted):
        yield (
            f"vLLM runs the connector {facts['connector']}, not {wanted}",
            "is another connector set in engine.flags?",
        )


def failures(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why servers that did not start say so in their logs: a sentence and a hint each."""
    if flags := facts.get("unknown_flags"):
        yield (
            f"the server does not know {flags}",
            "correct the name in engine.flags or cache.flags, or use a version that has it",
        )
    if flag := facts.get("refused_flag"):
        yield f"the server refuses the flag {flag}", "correct its value in the profile"
    if blocks := facts.get("mamba_blocks_exceeded"):
        most = blocks.rpartition("(")[2].rstrip(")")
        yield (
            f"{blocks}: every sequence of a hybrid model keeps its state in a block of its own",
            f"set engine.max_num_seqs: {most} or less, or leave vLLM more memory",
        )
    if fits := facts.get("fitting_model_len"):
        yield (
            f"vLLM's memory fits requests of at most {fits:,} tokens",
            f"set engine.max_model_len: {fits} or less, or leave vLLM more memory",
        )
    if memory := facts.get("out_of_memory"):
        yield (
            f"a server ran out of memory: {memory['lines'][0]}",
            "leave it more memory: a smaller model, L0 or L1, or fewer other processes",
        )
    if shared := facts.get("ipc_errors"):
        yield (
            f"GPU memory cannot be shared between the servers: {shared['lines'][0]}",
            "this is IPC, not the network: give both containers --ipc host and the same GPUs in "
            "the same order, or isolated IPC on both sides",
        )


def refuse_contradictions(
    profile: Profile, facts: Mapping[str, Any], connector: str | None = None
) -> None:
    """Raise StackNotReady when the servers' own words contradict the profile."""
    for sentence, hint in complaints(profile, facts, connector):
        raise StackNotReady(sentence, hint=hint)


class Probe:
    """One prompt of four chunks, asked twice: it must be stored, and then restored.

    Every scenario is asked the same, so that all of them are treated alike; only where LMCache
    runs, something is expected. ``run`` gives back the detail of a ``probe`` event.
    """

    def __init__(
        self,
        stack: Deployment,
        profile: Profile,
        record: Callable[[Record], None],
        *,
        nonce: str,
        groups: int = 1,
    ):
        self.stack = stack
        self.profile = profile
        self.record = record
        self.groups = groups
        # New tokens at every launch: an L2 that is kept would hold those of the last one.
        self.nonce = f"{nonce}:{secrets.token_hex(4)}"
        self.question = prompts.probe(profile, self.nonce)
        self.ceiling = MIN_CHUNKS * profile.cache.chunk_tokens

    async def run(self) -> dict[str, Any]:
        """What was stored and restored; raises StackNotReady when it was too little."""
        cached = self.stack.lmcache_url is not None
        secret = credentials.headers(self.profile)
        url, model = self.stack.vllm_url, self.stack.model
        async with client.connect(url, model=model, slots=1, headers=secret) as sender:
            before = await self._samples("lmcache") if cached else None
            await self._ask(sender, 0)
            stored = await self._stored(before) if cached else None
            reset = await self._reset()
            middle = await self._samples("vllm")
            again = await self._ask(sender, 1)
            after = await self._samples("vllm")
        restored = counters.delta(middle, after, "external_hits")
        local = counters.delta(middle, after, "local_hits")
        if cached and reset:
            self._expect_restored(again, restored, local)
        detail = {
            "prompt_tokens": len(self.question.token_ids),
            "nonce": self.nonce,
            "stored_chunks": stored,
            "expected_chunks": MIN_CHUNKS if cached else None,
            "external_cached": restored if cached and reset else None,
            "ceiling_tokens": self.ceiling if cached else None,
            "local_cached": local,
            "local_reset": reset,
        }
        if cached and reset is None:
            detail["not_checked"] = "restoring: vLLM has no endpoint that empties its own cache"
        return detail

    async def _ask(self, sender: client.Sender, index: int) -> RequestRecord:
        reply = await sender.ask(
            self.question,
            scenario=self.stack.scenario,
            repeat=self.stack.repeat,
            round="probe",
            index=index,
            deadline_s=self.profile.timeouts.request_s,
        )
        self.record(reply)
        self.stack.check_alive()
        if reply.error:
            raise StackNotReady(
                f"the probe of {len(self.question.token_ids)} tokens failed: {reply.error}",
                hint="see vLLM's log in the run folder",
            )
        if reply.shift:
            raise StackNotReady(
                f"vLLM counts another number of tokens in the probe: {reply.shift_text}",
                hint="does something between kvlab and the engine add or cut tokens?",
            )
        return reply

    async def _samples(self, source: str) -> Mapping[str, float] | None:
        readings = await self.stack.scrape(only=source)
        return readings[0].samples if readings else None

    async def _stored(self, before: Mapping[str, float] | None) -> float:
        """Chunks stored, once they are all there."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.profile.timeouts.drain_s
        expected = MIN_CHUNKS * self.groups
        while True:
            now = await self._samples("lmcache")
            objects = counters.since_start(before, now, "l1_write_chunks").value
            if objects is not None and objects >= expected:
                return objects / self.groups
            self.stack.check_alive()
            if loop.time() > end:
                raise StackNotReady(
                    f"LMCache stored {_chunks(objects, self.groups)} of the {MIN_CHUNKS} chunks "
                    f"of the probe in {self.profile.timeouts.drain_s:g} s",
                    hint="see LMCache's log; is max_num_batched_tokens below two blocks, and L1 "
                    "large enough?",
                )
            await asyncio.sleep(POLL_S)

    async def _reset(self) -> bool | None:
        """Whether L0 was emptied; None when vLLM offers no way to."""
        if not self.profile.engine.dev_endpoints:
            return None
        end = asyncio.get_running_loop().time() + RESET_S
        while (reset := await self.stack.reset_local_cache()) is False:
            if asyncio.get_running_loop().time() > end:
                raise StackNotReady(
                    "vLLM refuses to empty its own prefix cache (success: false)",
                    hint="a request may be stuck; see vLLM's log",
                )
            await asyncio.sleep(POLL_S)
        return reset

    def _expect_restored(
        self, again: RequestRecord, restored: float | None, local: float | None
    ) -> None:
        seen = f"expected {self.ceiling} tokens from LMCache, seen {_number(restored)} by vLLM's "
        seen += f"counters and {_number(again.cached_tokens)} cached by its answer"
        if local:
            raise StackNotReady(
                f"vLLM said that it emptied its own cache, which then served {local:g} tokens of "
                f"the probe: {seen}",
                hint="use a vLLM whose /reset_prefix_cache works, or set engine.dev_endpoints: no",
            )
        known = [value for value in (restored, again.cached_tokens) if value is not None]
        if not known or any(value != self.ceiling for value in known):
            raise StackNotReady(
                f"the probe was stored and not restored: {seen}",
                hint="see both logs: is the prefix cache on, and for a hybrid model align mode?",
            )


def _number(value: float | None) -> str:
    return "an unknown number" if value is None else f"{value:g}"


def _chunks(objects: float | None, groups: int) -> str:
    return "an unknown number" if objects is None else f"{math.floor(objects / groups)}"
