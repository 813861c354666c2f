"""One launch, measured: what every experiment does to servers that have just become ready.

``async with visit(profile, stack, record, nonce) as arm`` opens the connections; then ``warm_up``,
``round``, ``drain`` and the rest are recorded under the launch's own scenario and repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

from kvlab import client, host, prompts
from kvlab.client import Question
from kvlab.errors import MeasurementError
from kvlab.profile import Profile
from kvlab.records import Event, RequestRecord, now_ns
from kvlab.stack import Deployment, credentials
from kvlab.units import NS_PER_S, ns_to_s
from kvlab.workloads import Recorder
from kvlab.workloads.drain import drain

COLD_FACTOR = 3
"""A request may take this many times the slowest warm-up before it counts as hung."""
LEAST_DEADLINE_S = 15.0


@asynccontextmanager
async def visit(
    profile: Profile, stack: Deployment, record: Recorder, nonce: str, *, concurrency: int = 1
) -> AsyncIterator[Arm]:
    """The launch with its connections open, one per request in flight.

    Where an attached deployment has several vLLMs, every context has one of them as its own.
    """
    urls = [stack.vllm_url] if profile.fresh else stack.urls("vllm")
    secret = credentials.headers(profile)
    async with AsyncExitStack() as connections:
        senders = [
            await connections.enter_async_context(
                client.connect(url, model=stack.model, slots=concurrency, headers=secret)
            )
            for url in urls
        ]
        sender = senders[0] if len(senders) == 1 else Spread(senders)
        yield Arm(profile, stack, record, nonce, sender, concurrency)


class Spread:
    """Several servers that are asked in turn, by the number of the request in its round."""

    def __init__(self, senders: Sequence[client.Sender]):
        self.senders = senders

    async def ask(self, question: Question, *, index: int, **rest: Any) -> RequestRecord:
        """One answer, from the server whose turn it is."""
        chosen = self.senders[index % len(self.senders)]
        return await chosen.ask(question, index=index, **rest)


class Arm:
    """One launch: asked, counted, drained, and all of it recorded."""

    def __init__(
        self,
        profile: Profile,
        stack: Deployment,
        record: Recorder,
        nonce: str,
        sender: client.Sender | Spread,
        concurrency: int = 1,
    ):
        self.profile = profile
        self.stack = stack
        self.record = record
        self.nonce = nonce
        self.sender = sender
        self.concurrency = concurrency
        self.deadline_s = profile.timeouts.request_s

    async def warm_up(self) -> None:
        """Pay for compilation and pinning before the clock, and learn how long cold takes."""
        slowest_ns = 0
        for index, question in enumerate(prompts.warmup(self.profile, self.nonce)):
            reply = await self.ask(question, "warmup", index)
            slowest_ns = max(slowest_ns, reply.ttft_ns or 0)
        if slowest_ns:
            patience_s = max(LEAST_DEADLINE_S, COLD_FACTOR * ns_to_s(slowest_ns))
            self.deadline_s = min(self.deadline_s, patience_s)

    async def round(self, round_name: str, questions: Sequence[Question] | None = None) -> None:
        """Ask every question of the round, those of the workload unless others are given.

        Counters and the servers' state are read before and after, and after it the stores drain.
        """
        asked = questions or prompts.questions(self.profile, self.nonce, round_name)
        count = len(questions) if questions else self.profile.workload.contexts
        await self.scrape(f"{round_name}:start")
        self.state(round_name)
        self.usage(round_name)
        await self.condition(round_name, "start")
        self.event("round_started", round_name, contexts=count)
        round_ends_ns = now_ns() + int(self.profile.timeouts.round_s * NS_PER_S)
        numbered = iter(enumerate(asked))
        slots = [
            asyncio.create_task(self._slot(numbered, round_name, round_ends_ns))
            for _ in range(self.concurrency)
        ]
        try:
            await asyncio.gather(*slots)
        except BaseException:
            self.state(round_name)  # who died, and how: the servers are stopped next
            raise
        finally:
            for slot in slots:
                slot.cancel()
            self.event("round_ended", round_name)
        await self.condition(round_name, "end")
        await self.drain(round_name)
        await self.scrape(f"{round_name}:end")
        self.usage(round_name)
        self.state(round_name)

    async def _slot(
        self,
        questions: Iterator[tuple[int, Question]],
        round_name: str,
        round_ends_ns: int,
    ) -> None:
        """Ask the next question until none is left; slots share the iterator."""
        for index, question in questions:
            if now_ns() > round_ends_ns:
                raise MeasurementError(
                    f"the {round_name} round of {self.stack.scenario} exceeded its deadline of "
                    f"{self.profile.timeouts.round_s:g} s at request {index}",
                    hint="raise timeouts.round_s, or ask fewer contexts; continue with --resume",
                )
            await self.ask(question, round_name, index)
            self.stack.check_alive()
            if self.concurrency == 1 and self.stack.lmcache_url:
                await self.scrape(f"{round_name}:{index}", only="lmcache")

    async def ask(self, question: Question, round_name: str, index: int) -> RequestRecord:
        """One answer, recorded; a request that failed is a record too."""
        reply = await self.sender.ask(
            question,
            scenario=self.stack.scenario,
            repeat=self.stack.repeat,
            round=round_name,
            index=index,
            deadline_s=self.deadline_s,
        )
        self.record(reply)
        if reply.shift and reply.error is None:
            raise MeasurementError(
                f"{reply.scenario}, repeat {reply.repeat}, {round_name}, request {index}: the "
                f"server counts another number of prompt tokens: {reply.shift_text}",
                hint="does something between kvlab and the engine add or cut tokens?",
            )
        return reply

    async def drain(self, round_name: str) -> None:
        """Wait until LMCache has written what it was given; nothing to do without one."""
        if self.stack.lmcache_url:
            detail = await drain(self.stack, self.profile.cache, self.profile.timeouts.drain_s)
            self.event("drained", round_name, **detail)

    async def pause(self, seconds: float) -> None:
        """Do nothing for so long."""
        if seconds:
            self.event("pause", seconds=seconds)
            await asyncio.sleep(seconds)

    async def scrape(self, boundary: str, only: str | None = None) -> None:
        """Write down the counters of every server, or of the one source named."""
        for reading in await self.stack.scrape(only=only):
            self.record(reading.recorded(self.stack.scenario, self.stack.repeat, boundary))

    def state(self, round_name: str) -> None:
        """Write down whether every server is the one that was started."""
        services = [
            {
                "name": state.name,
                "pid": state.pid,
                "started": state.started,
                "running": state.running,
                "exit_code": state.exit_code,
                "oom_killed": state.oom_killed,
            }
            for state in self.stack.state()
        ]
        self.event("state", round_name, services=services)

    def usage(self, round_name: str) -> None:
        """Write down the memory and processor time of every server's processes."""
        processes = [asdict(one) for one in self.stack.usage()]
        self.event("usage", round_name, processes=processes)

    async def condition(self, round_name: str, moment: str) -> None:
        """Write down clocks, power and heat of the machine, unless the servers run elsewhere."""
        if self.profile.fresh:
            detail = await asyncio.to_thread(host.condition)
            self.event("condition", round_name, moment=moment, **detail)

    def event(self, kind: str, round_name: str | None = None, **detail: object) -> None:
        """Write down that something happened to this launch."""
        self.record(
            Event(
                at_ns=now_ns(),
                kind=kind,
                scenario=self.stack.scenario,
                repeat=self.stack.repeat,
                round=round_name,
                detail=detail,
            )
        )
