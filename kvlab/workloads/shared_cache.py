"""Several vLLM instances on one LMCache server: does one reuse what another has computed?

kvlab itself spreads the requests over the instances: LMCache shares records and balances nothing.
Every instance but the first is called a guest. In order:

``cold:<n>``      guest n asks contexts that nobody asked before: what a visit without help costs
``fill:1``        instance 1 asks the contexts, cold
``first:<n>``     guest n asks the same contexts for the first time
``together:<n>``  all instances ask them at once, each starting elsewhere
``alone:<n>``     instance 1 has been stopped, and guest n asks again

Before each round that must be served by LMCache, every vLLM empties its own cache (L0).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager

from kvlab import client, prompts
from kvlab.client import Question
from kvlab.profile import Profile
from kvlab.stack import Deployment, Launch
from kvlab.workloads import Recorder
from kvlab.workloads.arm import Arm

RESET_TRIES = 20
RESET_POLL_S = 0.5
"""Blocks that a store still reads keep vLLM from emptying its cache for a moment."""


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """One launch holds every round."""
    return [(1, arm) for arm in arms]


def rounds(instances: int) -> list[str]:
    """The measured rounds of so many instances, in order."""
    guests = range(2, instances + 1)
    return [
        *(f"cold:{n}" for n in guests),
        "fill:1",
        *(f"first:{n}" for n in guests),
        *(f"together:{n}" for n in range(1, instances + 1)),
        *(f"alone:{n}" for n in guests),
    ]


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts: the launch, every request of every round, the drains, the stop."""
    count: Counter[str] = Counter()
    names = rounds(profile.experiments.shared_cache.instances)
    for arm in arms:
        count[f"launch:{arm}"] = count[f"stop:{arm}"] = 1
        for name in names:
            count[f"request:{arm}:{name}"] = profile.workload.contexts
        count[f"drain:{arm}"] = len(names)
    return count


async def shared_cache(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    arms: Sequence[str] = ("shared",),
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Every round on one launch of all instances, unless it is done."""
    for repeat, label in order(profile, arms):
        if (repeat, label) in done:
            continue
        async with (
            launch("shared", repeat, label=label) as stack,
            _instances(profile, stack, record, nonce) as instances,
        ):
            await _visits(profile, stack, instances, nonce)
            instances[0].event("arm_finished")


@asynccontextmanager
async def _instances(
    profile: Profile, stack: Deployment, record: Recorder, nonce: str
) -> AsyncIterator[list[Arm]]:
    """One arm per vLLM instance, in the order in which they started."""
    async with AsyncExitStack() as connections:
        senders = [
            await connections.enter_async_context(client.connect(url, model=stack.model, slots=1))
            for url in stack.urls("vllm")
        ]
        yield [Arm(profile, stack, record, nonce, sender) for sender in senders]


async def _visits(profile: Profile, stack: Deployment, instances: list[Arm], nonce: str) -> None:
    contexts = list(prompts.questions(profile, nonce, "fill"))
    first, guests = instances[0], list(enumerate(instances[1:], start=2))
    await _warm_up(profile, first, guests, nonce)
    for number, guest in guests:
        unseen = list(prompts.questions(profile, f"{nonce}:{number}", "fill"))
        await guest.round(f"cold:{number}", unseen)
    await first.round("fill:1", contexts)
    for number, guest in guests:
        await _reset(stack, guest, f"first:{number}")
        await guest.round(f"first:{number}", contexts)
    await _reset(stack, first, "together")
    await _together(instances, contexts)
    name = stack.names("vllm")[0]
    await stack.stop(name)
    first.event("instance_stopped", service=name)
    for number, guest in guests:
        await _reset(stack, guest, f"alone:{number}")
        await guest.round(f"alone:{number}", contexts)


async def _warm_up(
    profile: Profile, first: Arm, guests: Sequence[tuple[int, Arm]], nonce: str
) -> None:
    """Computing and restoring have both happened once on every instance before the clock."""
    await first.warm_up()
    await first.drain("warmup")
    seen = list(prompts.warmup(profile, nonce))
    for number, guest in guests:
        guest.deadline_s = first.deadline_s
        own = prompts.warmup(profile, f"{nonce}:{number}")
        await guest.round(f"warmup:{number}", [*own, *seen])


async def _together(instances: Sequence[Arm], contexts: Sequence[Question]) -> None:
    """All instances at once; LMCache's counts of it cannot be told apart, so they are summed."""
    await instances[0].scrape("together:start")
    share = len(contexts) // len(instances)
    tasks = []
    for place, instance in enumerate(instances):
        turned = [*contexts[place * share :], *contexts[: place * share]]
        tasks.append(asyncio.create_task(instance.round(f"together:{place + 1}", turned)))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    await instances[0].scrape("together:end")


async def _reset(stack: Deployment, arm: Arm, round_name: str) -> None:
    """Ask every vLLM to empty L0; the round's own counters prove later whether it did."""
    for _ in range(RESET_TRIES):
        done = await stack.reset_local_cache()
        if done is not False:
            break
        await asyncio.sleep(RESET_POLL_S)
    arm.event("local_reset", round_name, done=done)
