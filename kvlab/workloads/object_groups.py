"""The ablation of ``--separate-object-groups``: the same prompts with the flag on and off.

Everything else is equal: both arms have LMCache, the same warm-up and both rounds. Each has an L2
folder of its own, since records of one layout cannot be read by the other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath

from kvlab.errors import UsageError
from kvlab.profile import Profile
from kvlab.stack import Launch
from kvlab.stack.plan import Place, Plan, plan
from kvlab.workloads import Recorder, two_round
from kvlab.workloads.arm import visit

SETTINGS = {"groups-off": False, "groups-on": True}
"""The arms, and what each sets ``cache.separate_object_groups`` to."""
ARMS = tuple(SETTINGS)
FLAGS = {True: "--separate-object-groups", False: "--no-separate-object-groups"}


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """(repeat, arm) pairs in ABBA order; UsageError when the ablation is not defined."""
    variants(profile)
    return two_round.order(arms, profile.experiments.object_groups.repeats)


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts, by kind and arm."""
    setup, contexts = profile.experiments.two_round, profile.workload.contexts
    repeats = profile.experiments.object_groups.repeats if repeats is None else repeats
    count: Counter[str] = Counter()
    for arm in arms:
        count[f"launch:{arm}"] += repeats
        count[f"request:{arm}:warmup"] += repeats * setup.warmup_requests
        count[f"request:{arm}:fill"] += repeats * contexts
        count[f"request:{arm}:measure"] += repeats * contexts
        count[f"drain:{arm}"] += repeats * 3
        count[f"stop:{arm}"] += repeats
    return count


async def object_groups(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    arms: Sequence[str] = ARMS,
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Both rounds in every missing arm of every repeat, on freshly started servers.

    Raises UsageError, before anything starts, when the arms would not differ in exactly the flag.
    """
    chosen = variants(profile)
    for repeat, arm in order(profile, arms):
        if (repeat, arm) in done:
            continue
        slots = profile.experiments.two_round.concurrency
        async with (
            launch("lmcache", repeat, variant=chosen[arm], label=arm) as stack,
            visit(chosen[arm], stack, record, nonce, concurrency=slots) as visitor,
        ):
            visitor.event(
                "ablation",
                flag=stated(plan(chosen[arm], "lmcache", _place(arm)))["flag"],
                l2_folder=stack.l2_path.name if stack.l2_path else None,
            )
            await two_round.both_rounds(visitor)
            visitor.event("arm_finished")


def variants(profile: Profile) -> dict[str, Profile]:
    """The profile of each arm: the flag on or off, and a place for L2 that is its own.

    Raises UsageError when the ablation is not defined, or when no cold answer could be compared.
    """
    if profile.workload.shape != "identical":
        raise UsageError(
            "object-groups compares restored answers with the other setting's cold ones, so the "
            f"same prompts must return; workload.shape is {profile.workload.shape}",
            hint="--set workload.shape=identical",
        )
    chosen = {arm: _variant(profile, arm) for arm in SETTINGS}
    refuse_undefined({arm: plan(one, "lmcache", _place(arm)) for arm, one in chosen.items()})
    return chosen


def _variant(profile: Profile, arm: str) -> Profile:
    cache = profile.cache
    l2 = cache.l2
    if l2 is not None and l2.base_path is not None:
        l2 = l2.model_copy(update={"base_path": str(PurePath(l2.base_path) / arm)})
    setting = {"separate_object_groups": SETTINGS[arm], "l2": l2}
    return profile.model_copy(update={"cache": cache.model_copy(update=setting)})


def _place(arm: str) -> Place:
    """Where an arm's plan is looked at: launches have L2 folders by their label."""
    return Place(l2=f"<l2 folder of {arm}>")


def refuse_undefined(plans: Mapping[str, Plan]) -> None:
    """Raise UsageError unless every arm passes its flag, and none shares its L2 folder."""
    found = {arm: stated(one) for arm, one in plans.items()}
    for arm, said in found.items():
        if said["flag"] is None:
            raise UsageError(
                f"ablation not defined: {arm} does not pass {FLAGS[True]} or {FLAGS[False]}, and "
                "its default differs between versions of LMCache",
                hint="remove separate-object-groups from cache.flags",
            )
    settings = [said["flag"] for said in found.values()]
    if len(set(settings)) != len(settings):
        raise UsageError(
            f"ablation not defined: {' and '.join(found)} both pass {settings[0]}",
            hint="remove separate-object-groups from cache.flags",
        )
    folders = [said["base_path"] for said in found.values() if said["base_path"] is not None]
    if len(set(folders)) != len(folders):
        raise UsageError(
            f"ablation not defined: {' and '.join(found)} share the L2 folder {folders[0]}, and "
            "records of one layout cannot be read with the other",
            hint="set cache.l2.base_path, not base_path inside cache.l2.adapter",
        )


def stated(steps: Plan) -> dict[str, str | None]:
    """The flag and the L2 folder that a plan's LMCache server gets; None: it gets none."""
    argv = next(service.argv for service in steps.services if service.role == "lmcache")
    given = [word for word in argv if word in FLAGS.values()]
    return {
        "flag": given[-1] if given else None,
        "base_path": _base_path(argv),
    }


def _base_path(argv: Sequence[str]) -> str | None:
    if "--l2-adapter" not in argv:
        return None
    adapter = json.loads(argv[argv.index("--l2-adapter") + 1])
    return str(adapter.get("adapter_params", adapter)["base_path"])
