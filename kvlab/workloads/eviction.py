"""A sweep of L1's eviction: how much one eviction frees, and at which fill level it starts.

Every setting is launched by itself and asks the same contexts twice, like the A/B. Between the
rounds nothing is asked until the eviction loop, which looks about once a second, has come to rest.
Some settings run without L2: there, what is evicted is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass

from kvlab.profile import Profile
from kvlab.stack import Launch
from kvlab.workloads import Recorder
from kvlab.workloads.arm import visit

REST_S = 3.0
"""Three looks of the eviction loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One point of the sweep."""

    watermark: float
    """L1's fill level above which it evicts."""
    ratio: float
    """The share of L1's records that one eviction removes."""
    l2: bool

    @property
    def label(self) -> str:
        """The name under which the setting is recorded: ``w0.3-r0.99``, ``w0.3-r0.99-no-l2``."""
        return f"w{self.watermark:g}-r{self.ratio:g}" + ("" if self.l2 else "-no-l2")

    def applied(self, profile: Profile) -> Profile:
        """The profile with this setting."""
        change: dict[str, object] = {
            "eviction_watermark": self.watermark,
            "eviction_ratio": self.ratio,
        }
        if not self.l2:
            change["l2"] = None
        return profile.model_copy(update={"cache": profile.cache.model_copy(update=change)})


def settings(profile: Profile) -> dict[str, Setting]:
    """Every setting of the profile's sweep by its label, in the order in which they run."""
    setup, cache = profile.experiments.eviction, profile.cache
    tiers = [(ratio, True) for ratio in setup.ratios if cache.l2 is not None]
    tiers += [(ratio, False) for ratio in setup.ratios_without_l2]
    found = [
        Setting(watermark=watermark, ratio=ratio, l2=l2)
        for watermark in setup.watermarks or [cache.eviction_watermark]
        for ratio, l2 in tiers
    ]
    return {setting.label: setting for setting in found}


def arms(profile: Profile) -> tuple[str, ...]:
    """The labels of the profile's sweep."""
    return tuple(settings(profile))


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """Each setting once, one after the other."""
    return [(1, arm) for arm in arms]


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts, by kind and arm."""
    setup, contexts = profile.experiments.two_round, profile.workload.contexts
    count: Counter[str] = Counter()
    for arm in arms:
        count[f"launch:{arm}"] = count[f"stop:{arm}"] = 1
        count[f"request:{arm}:warmup"] = setup.warmup_requests
        count[f"request:{arm}:fill"] = count[f"request:{arm}:measure"] = contexts
        count[f"drain:{arm}"] = 3
    return count


async def eviction(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    arms: Sequence[str],
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Both rounds with every missing setting, on freshly started servers."""
    sweep = settings(profile)
    for repeat, label in order(profile, arms):
        if (repeat, label) in done:
            continue
        chosen = sweep[label].applied(profile)
        async with (
            launch("lmcache", repeat, variant=chosen, label=label) as stack,
            visit(chosen, stack, record, nonce) as arm,
        ):
            arm.event("setting", **asdict(sweep[label]), l1_size_gb=chosen.cache.l1_size_gb)
            await arm.warm_up()
            await arm.drain("warmup")
            await arm.round("fill")
            await arm.pause(REST_S)
            await arm.round("measure")
            arm.event("arm_finished")
