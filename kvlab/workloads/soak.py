"""Repeat visits at a low rate for a long time: does anything grow, slow down, or fail?

The time is cut into stretches of at most a minute. Each one that ends is kept for good, so an
interruption loses the stretch that it cut short, and ``--resume`` goes on with the next one, on
fresh servers. Within a stretch every visit is written down as it happens, with what the servers'
processes use and what lies in the L2 folder.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict

from kvlab import prompts
from kvlab.client import Question
from kvlab.disk.inventory import survey
from kvlab.profile import Profile
from kvlab.records import now_ns
from kvlab.stack import Deployment, Launch
from kvlab.units import NS_PER_S, ns_to_s
from kvlab.workloads import Recorder
from kvlab.workloads.arm import Arm, visit

LABEL = "soak"


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """Every stretch of the whole time, numbered from 1."""
    setup = profile.experiments.soak
    count = math.ceil(setup.duration_s / setup.checkpoint_s)
    return [(number, arm) for number in range(1, count + 1) for arm in arms]


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts: one launch, and the visits of every stretch."""
    stretches = len(order(profile, arms)) if repeats is None else repeats
    count: Counter[str] = Counter()
    for arm in arms:
        if repeats is None:
            count[f"launch:{arm}"] = count[f"stop:{arm}"] = 1
            count[f"request:{arm}:fill"] = profile.workload.contexts
            count[f"request:{arm}:settle"] = profile.workload.contexts
        count[f"request:{arm}:measure"] = stretches * _visits(profile)
    return count


def pace_s(profile: Profile) -> dict[str, float]:
    """The seconds from visit to visit, which the profile sets."""
    return {f"request:{LABEL}:measure": profile.experiments.soak.interval_s}


def _visits(profile: Profile) -> int:
    """About how many visits a stretch holds."""
    setup = profile.experiments.soak
    return max(1, int(setup.checkpoint_s / max(setup.interval_s, 0.1)))


async def soak(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    arms: Sequence[str] = (LABEL,),
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Every missing stretch, on one launch."""
    missing = [stretch for stretch in order(profile, arms) if stretch not in done]
    if not missing:
        return
    async with (
        launch("lmcache", missing[0][0], label=missing[0][1]) as stack,
        visit(profile, stack, record, nonce) as arm,
    ):
        await arm.warm_up()
        await arm.drain("warmup")
        await arm.round("fill")
        await arm.round("settle", list(prompts.questions(profile, nonce, "fill")))
        turns = itertools.cycle(range(profile.workload.contexts))
        for repeat, _ in missing:
            stack.repeat = repeat
            await _stretch(profile, arm, nonce, turns)
            arm.event("arm_finished")


async def _stretch(profile: Profile, arm: Arm, nonce: str, turns: Iterator[int]) -> None:
    """One stretch of visits, each at its time; one that is late is followed at once.

    ``turns`` goes on from stretch to stretch: the context that comes next is the one that was
    asked longest ago, which L0 no longer holds.
    """
    setup = profile.experiments.soak
    await arm.scrape("measure:start")
    arm.state("measure")
    began_ns = now_ns()
    index = 0
    while ns_to_s(now_ns() - began_ns) < _length_s(profile, arm.stack.repeat):
        due_ns = began_ns + int(index * setup.interval_s * NS_PER_S)
        await asyncio.sleep(max(0.0, ns_to_s(due_ns - now_ns())))
        question = prompts.question(profile, nonce, "fill", next(turns))
        await _visit(arm, question, index)
        index += 1
    await arm.scrape("measure:end")
    arm.state("measure")


def _length_s(profile: Profile, number: int) -> float:
    """How long a stretch lasts: the last one is what is left."""
    setup = profile.experiments.soak
    return min(setup.checkpoint_s, setup.duration_s - (number - 1) * setup.checkpoint_s)


async def _visit(arm: Arm, question: Question, index: int) -> None:
    await arm.ask(question, "measure", index)
    arm.stack.check_alive()
    arm.event("sample", "measure", index=index, **_sample(arm.stack))


def _sample(stack: Deployment) -> dict[str, object]:
    """What the servers' processes use and what L2 holds, now."""
    found = survey(stack.l2_path) if stack.l2_path else None
    return {
        "processes": [asdict(one) for one in stack.usage()],
        "l2_files": found.files if found else None,
        "l2_bytes": found.bytes if found else None,
    }
