"""The A/B: ask every context twice, first with an empty cache, then with a full one.

Both scenarios get the same prompts, the same warm-up and both rounds; the baseline's own second
round against its first is the gain that has nothing to do with LMCache.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from kvlab import client, prompts
from kvlab.errors import MeasurementError
from kvlab.profile import Profile
from kvlab.records import Event, RequestRecord, Scrape, now_ns
from kvlab.stack import Deployment, Launch
from kvlab.units import NS_PER_S, ns_to_s
from kvlab.workloads import Recorder
from kvlab.workloads.drain import drain

ROUNDS = ("fill", "measure")
COLD_FACTOR = 3
"""A request may take this many times the slowest warm-up before it counts as hung."""
LEAST_DEADLINE_S = 15.0


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts: launches, requests, drains and stops, by kind and arm."""
    setup, contexts = profile.experiments.two_round, profile.workload.contexts
    repeats = setup.repeats if repeats is None else repeats
    count: Counter[str] = Counter()
    for arm in arms:
        count[f"launch:{arm}"] += repeats
        count[f"request:{arm}:warmup"] += repeats * setup.warmup_requests
        count[f"request:{arm}:fill"] += repeats * contexts
        count[f"request:{arm}:measure"] += repeats * contexts
        count[f"stop:{arm}"] += repeats
        if arm == "lmcache":
            count[f"drain:{arm}"] += repeats * 3
    return count


def order(arms: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """(repeat, scenario) pairs in ABBA order: A B, B A, A B, … so that drift cancels."""
    return [
        (repeat, scenario)
        for repeat in range(1, repeats + 1)
        for scenario in (arms if repeat % 2 else tuple(reversed(arms)))
    ]


async def two_round(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    arms: Sequence[str] = ("baseline", "lmcache"),
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Every missing arm of every repeat, on freshly started servers.

    ``done`` holds the (repeat, scenario) pairs that an earlier, interrupted run completed.
    Raises MeasurementError when a round exceeds its deadline, or when the server counts another
    number of prompt tokens than were sent; a failed request does not stop it.
    """
    for repeat, scenario in order(arms, profile.experiments.two_round.repeats):
        if (repeat, scenario) in done:
            continue
        async with launch(scenario, repeat) as stack:
            await Arm(profile, stack, record, nonce).run()


class Arm:
    """One scenario of one repeat: warm-up, fill, drain, pause, measure."""

    def __init__(self, profile: Profile, stack: Deployment, record: Recorder, nonce: str):
        self.profile = profile
        self.stack = stack
        self.record = record
        self.nonce = nonce
        self.setup = profile.experiments.two_round
        self.deadline_s = profile.timeouts.request_s

    async def run(self) -> None:
        """Both rounds, recorded, each with its counters before and after."""
        slots = self.setup.concurrency
        async with client.connect(
            self.stack.vllm_url, model=self.stack.model, slots=slots
        ) as sender:
            await self._pause(self.setup.settle_s)
            await self._warm_up(sender)
            await self._drain("warmup")
            for round_name in ROUNDS:
                await self._round(sender, round_name)
                if round_name == "fill":
                    await self._pause(self.setup.pause_s)
        self._event("arm_finished")

    async def _warm_up(self, sender: client.Sender) -> None:
        """Pay for compilation and pinning before the clock, and learn how long cold takes."""
        slowest_ns = 0
        for index, question in enumerate(prompts.warmup(self.profile, self.nonce)):
            reply = await self._ask(sender, question, "warmup", index)
            slowest_ns = max(slowest_ns, reply.ttft_ns or 0)
        if slowest_ns:
            patience_s = max(LEAST_DEADLINE_S, COLD_FACTOR * ns_to_s(slowest_ns))
            self.deadline_s = min(self.deadline_s, patience_s)

    async def _round(self, sender: client.Sender, round_name: str) -> None:
        await self._scrape(f"{round_name}:start")
        self._state(round_name)
        self._event("round_started", round_name, contexts=self.profile.workload.contexts)
        round_ends_ns = now_ns() + int(self.profile.timeouts.round_s * NS_PER_S)
        questions = enumerate(prompts.questions(self.profile, self.nonce, round_name))
        slots = [
            asyncio.create_task(self._slot(sender, questions, round_name, round_ends_ns))
            for _ in range(self.setup.concurrency)
        ]
        try:
            await asyncio.gather(*slots)
        except BaseException:
            self._state(round_name)  # who died, and how: the servers are stopped next
            raise
        finally:
            for slot in slots:
                slot.cancel()
            self._event("round_ended", round_name)
        await self._drain(round_name)
        await self._scrape(f"{round_name}:end")
        self._state(round_name)

    async def _slot(
        self,
        sender: client.Sender,
        questions: Iterator[tuple[int, client.Question]],
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
            await self._ask(sender, question, round_name, index)
            self.stack.check_alive()
            if self.setup.concurrency == 1 and self.stack.lmcache_url:
                await self._scrape(f"{round_name}:{index}", only="lmcache")

    async def _ask(
        self, sender: client.Sender, question: client.Question, round_name: str, index: int
    ) -> RequestRecord:
        reply = await sender.ask(
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

    async def _drain(self, round_name: str) -> None:
        if self.stack.lmcache_url:
            detail = await drain(self.stack, self.profile.cache, self.profile.timeouts.drain_s)
            self._event("drained", round_name, **detail)

    async def _pause(self, seconds: float) -> None:
        if seconds:
            self._event("pause", seconds=seconds)
            await asyncio.sleep(seconds)

    async def _scrape(self, boundary: str, only: str | None = None) -> None:
        for reading in await self.stack.scrape(only=only):
            self.record(
                Scrape(
                    scenario=self.stack.scenario,
                    repeat=self.stack.repeat,
                    boundary=boundary,
                    source=reading.source,
                    at_ns=reading.at_ns,
                    samples=reading.samples,
                    info=reading.info,
                    error=reading.error,
                )
            )

    def _state(self, round_name: str) -> None:
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
        self._event("state", round_name, services=services)

    def _event(self, kind: str, round_name: str | None = None, **detail: object) -> None:
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
