"""The A/B: ask every context twice, first with an empty cache, then with a full one.

Both scenarios get the same prompts, the same warm-up and both rounds; the baseline's own second
round against its first is the gain that has nothing to do with LMCache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from kvlab import prompts
from kvlab.profile import Profile
from kvlab.stack import Launch
from kvlab.workloads import Recorder, bill
from kvlab.workloads.arm import Arm, visit


def arms(profile: Profile) -> tuple[str, ...]:
    """The arms: both, but for an attached deployment that has no vLLM without LMCache."""
    alone = profile.attach is not None and profile.attach.baseline is None
    return ("lmcache",) if alone and not profile.fresh else ("baseline", "lmcache")


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
        if decoded := profile.experiments.bill.decode_requests:
            count[f"request:{arm}:decode"] += repeats * decoded
        if arm == "lmcache":
            count[f"drain:{arm}"] += repeats * (4 if decoded else 3)
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
        slots = profile.experiments.two_round.concurrency
        own = prompts.of_launch(profile, nonce, repeat)
        async with (
            launch(scenario, repeat) as stack,
            visit(profile, stack, record, own, concurrency=slots) as arm,
        ):
            await both_rounds(arm)
            await bill.decode(arm)
            arm.event("arm_finished")


async def both_rounds(arm: Arm) -> None:
    """One arm of one repeat: warm-up, fill, drain, pause, measure."""
    setup = arm.profile.experiments.two_round
    await arm.pause(setup.settle_s)
    await arm.warm_up()
    await arm.drain("warmup")
    await arm.round("fill")
    await arm.pause(setup.pause_s)
    await arm.round("measure")
