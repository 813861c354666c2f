"""Cold reads from L2 at several concurrencies: adapter by adapter, place by place.

The same contexts are asked in every arm. The first arm that finds no records of its kind in a place
fills them itself, and asks once more from L1: that is what a hit costs without any read. Before
each measured round L1 is emptied and the records' pages are dropped, so that every byte comes from
the place; the counters show whether it did. Beforehand fio reads the same places: the ceiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab import counters, fio, storage
from kvlab.disk import identity
from kvlab.disk.inventory import survey
from kvlab.errors import MeasurementError, UsageError
from kvlab.profile import Profile
from kvlab.stack import Launch
from kvlab.workloads import Recorder, two_round
from kvlab.workloads.arm import Arm, visit
from kvlab.workloads.places import Entered, Places

RECOMPUTE = "recompute"
SAME_NAMES = {"plugin": "fs"}
"""Adapter types whose records have the names of another type's, so that both read the same files.

``fs_native`` names its files otherwise. A plugin that does too finds no records, which shows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One arm: an adapter in a place, or vLLM alone."""

    label: str
    path: str | None = None
    adapter: str | None = None

    def applied(self, profile: Profile, folder: Path) -> Profile:
        """The profile with this adapter on that folder."""
        assert self.adapter is not None
        config = profile.experiments.parallel_read.adapters[self.adapter]
        assert profile.cache.l2 is not None
        l2 = profile.cache.l2.model_copy(update={"adapter": config, "base_path": str(folder)})
        cache = profile.cache.model_copy(update={"l2": l2})
        return profile.model_copy(update={"cache": cache})


def settings(profile: Profile) -> dict[str, Setting]:
    """Every arm by its label: place by place, then vLLM alone."""
    setup = profile.experiments.parallel_read
    found = [
        Setting(label=f"{place.name}-{adapter}", path=place.name, adapter=adapter)
        for place in profile.storage.paths
        for adapter in setup.adapters
        if place.adapters is None or adapter in place.adapters
    ]
    if setup.recompute:
        found.append(Setting(label=RECOMPUTE))
    return {setting.label: setting for setting in found}


def arms(profile: Profile) -> tuple[str, ...]:
    """The labels of the profile's arms."""
    return tuple(settings(profile))


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """(repeat, arm) pairs: forwards in odd repeats, backwards in even ones."""
    return two_round.order(arms, profile.experiments.parallel_read.repeats)


def rounds(profile: Profile, kind: str) -> list[tuple[str, int]]:
    """The names of the rounds of one kind, ``measure`` or ``memory``, each with its concurrency."""
    return [(f"{kind}-{slots}", slots) for slots in profile.experiments.parallel_read.concurrency]


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts, by kind and arm; the first arm on a kind of records fills them."""
    setup, contexts = profile.experiments.parallel_read, profile.workload.contexts
    repeats = setup.repeats if repeats is None else repeats
    measured, known, filled = rounds(profile, "measure"), settings(profile), set[Any]()
    count: Counter[str] = Counter()
    for arm in arms:
        count[f"launch:{arm}"] += repeats
        count[f"stop:{arm}"] += repeats
        warm = profile.experiments.two_round.warmup_requests
        count[f"request:{arm}:warmup"] += repeats * warm
        for name, _ in measured:
            count[f"request:{arm}:{name}"] += repeats * contexts
        if arm == RECOMPUTE:
            continue
        count[f"drain:{arm}"] += repeats * (1 + len(measured))
        if (records := _records(profile, known[arm])) not in filled:
            filled.add(records)
            for name in ("fill", *(name for name, _ in rounds(profile, "memory"))):
                count[f"request:{arm}:{name}"] += contexts
                count[f"drain:{arm}"] += 1
    return count


def _records(profile: Profile, setting: Setting) -> tuple[str, str]:
    """The place in which an arm's records lie, and the kind of their names."""
    assert setting.path is not None
    place = profile.storage.path_named(setting.path)
    return (place.mount_of or place.name, _names(profile, setting))


def _names(profile: Profile, setting: Setting) -> str:
    """How an arm's adapter names its files: by its type, or as another type does."""
    assert setting.adapter is not None
    kind = str(profile.experiments.parallel_read.adapters[setting.adapter].get("type"))
    return SAME_NAMES.get(kind, kind)


async def parallel_read(
    profile: Profile,
    launch: Launch,
    record: Recorder,
    *,
    nonce: str,
    folder: Path,
    arms: Sequence[str],
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Every missing arm, on freshly started servers; ``folder`` is the run's own.

    Raises MeasurementError when a fill left no records.
    """
    if profile.cache.l2 is None:
        raise UsageError(
            "parallel-read needs a disk tier, and cache.l2 is null",
            hint='--set cache.l2=\'{"adapter": {"type": "fs"}}\'',
        )
    if profile.workload.shape != "identical":
        raise UsageError(
            "parallel-read asks the same prompts again, to compare their answers with cold ones; "
            f"workload.shape is {profile.workload.shape}",
            hint="--set workload.shape=identical",
        )
    fio.refuse_missing()
    missing = [pair for pair in order(profile, arms) if pair not in done]
    if not missing:
        return
    with Places(profile, folder, nonce) as places:
        await places.ceilings(record)
        experiment = Experiment(profile, launch, record, nonce, places)
        for repeat, label in missing:
            await experiment.arm(repeat, settings(profile)[label])


class Experiment:
    """The arms of one run, with the records that they share."""

    def __init__(
        self, profile: Profile, launch: Launch, record: Recorder, nonce: str, places: Places
    ):
        self.profile = profile
        self.launch = launch
        self.record = record
        self.nonce = nonce
        self.places = places
        self.filled: set[Path] = set()

    async def arm(self, repeat: int, setting: Setting) -> None:
        """One arm, from start to stop."""
        if setting.path is None:
            await self._recompute(repeat, setting)
            return
        with self.places.entered(setting.path) as entered:
            await self._read(repeat, setting, entered)

    async def _recompute(self, repeat: int, setting: Setting) -> None:
        async with (
            self.launch("baseline", repeat, label=setting.label, probe=False) as stack,
            visit(
                self.profile, stack, self.record, self.nonce, concurrency=self._most_slots
            ) as arm,
        ):
            arm.event("variant", path=None, adapter=None, filled=False)
            await self._warmed_up(arm)
            for name, slots in rounds(self.profile, "measure"):
                arm.concurrency = slots
                await arm.round(name)
            arm.event("arm_finished")

    async def _read(self, repeat: int, setting: Setting, entered: Entered) -> None:
        assert setting.adapter is not None
        adapter = self.profile.experiments.parallel_read.adapters[setting.adapter]
        names = _names(self.profile, setting)
        source = entered.source / names
        source.mkdir(exist_ok=True)
        chosen = setting.applied(self.profile, entered.folder / names)
        async with (
            # A probe would leave records, and prove nothing that the rounds do not prove.
            self.launch(
                "lmcache",
                repeat,
                variant=chosen,
                label=setting.label,
                l2_path=entered.folder / names,
                probe=False,
            ) as stack,
            visit(chosen, stack, self.record, self.nonce, concurrency=self._most_slots) as arm,
        ):
            fills = source not in self.filled
            arm.event(
                "variant", **entered.described(), adapter=setting.adapter, config=adapter,
                records=names, filled=fills,
            )  # fmt: skip
            await self._warmed_up(arm)
            if fills:
                await self._fill(arm, source)
            for name, slots in rounds(self.profile, "measure"):
                await self._cold(arm, name, source)
                arm.concurrency = slots
                await arm.round(name)
                self._pages(arm, "pages_read", name, storage.residency(source), source)
            arm.event("arm_finished")

    @property
    def _most_slots(self) -> int:
        return max(self.profile.experiments.parallel_read.concurrency)

    async def _warmed_up(self, arm: Arm) -> None:
        """Warm up one at a time; requests that are computed together take as many times as long."""
        await arm.warm_up()
        limit_s = arm.profile.timeouts.request_s
        arm.deadline_s = min(limit_s, arm.deadline_s * self._most_slots)
        await arm.drain("warmup")

    async def _fill(self, arm: Arm, source: Path) -> None:
        """Compute and store every context, then ask them all from L1."""
        whose = {**identity.of(arm.profile), **identity.learnt(arm.stack.facts)}
        identity.refuse_unstable(whose)
        arm.event("identity", fields=whose)
        arm.concurrency = 1
        await arm.round("fill")
        if not survey(source).files:
            raise MeasurementError(
                f"disk tier empty: after the fill of {arm.stack.scenario} no record is in {source}",
                hint="see LMCache's log in the run folder for stores that failed",
            )
        self.filled.add(source)
        for name, slots in rounds(self.profile, "memory"):
            arm.concurrency = slots
            await arm.round(name)

    async def _cold(self, arm: Arm, name: str, source: Path) -> None:
        """Empty L1 and drop the pages of every record; both are written down."""
        cleared = await arm.stack.clear_memory_tier()
        held = [
            counters.read(reading.samples, "l1_memory_bytes")
            for reading in await arm.stack.scrape(only="lmcache")
        ]
        arm.event("l1_cleared", name, cleared=cleared, l1_bytes=held[0] if held else None)
        self._pages(arm, "pages_dropped", name, storage.drop_pages(source), source)

    def _pages(
        self, arm: Arm, kind: str, name: str, found: storage.Residency, source: Path
    ) -> None:
        detail: dict[str, Any] = {
            "files": found.files,
            "bytes": found.bytes,
            "resident_bytes": found.resident_bytes,
            "device": storage.device(source),
            "device_read_bytes": storage.device_read_bytes(source),
        }
        arm.event(kind, name, **detail)
