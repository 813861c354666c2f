"""What a place gives beside the cache: snapshots written and models loaded by several at once.

No server is started. In each place, several writers write a snapshot to its end on the device, then
processes load models whose pages are not in memory: one alone, and several together.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from kvlab import fio, loading, storage
from kvlab.profile import Profile
from kvlab.records import Event, now_ns
from kvlab.stack import Launch
from kvlab.units import MIB
from kvlab.workloads import Recorder, two_round
from kvlab.workloads.places import Entered, Places

SNAPSHOT_BLOCK = MIB
SNAPSHOT, MODELS = "snapshot", "models"
"""Folders in a place."""


def arms(profile: Profile) -> tuple[str, ...]:
    """The names of the places."""
    return tuple(place.name for place in profile.storage.paths)


def order(profile: Profile, arms: Sequence[str]) -> list[tuple[int, str]]:
    """(repeat, place) pairs: forwards in odd repeats, backwards in even ones."""
    return two_round.order(arms, profile.experiments.storage.repeats)


def steps(profile: Profile, arms: Sequence[str], repeats: int | None = None) -> Counter[str]:
    """What ``progress`` counts: nothing that takes long enough to be told."""
    return Counter()


async def storage_test(
    profile: Profile,
    launch: Launch | None,
    record: Recorder,
    *,
    nonce: str,
    folder: Path,
    arms: Sequence[str],
    done: AbstractSet[tuple[int, str]] = frozenset(),
) -> None:
    """Every missing place of every repeat; ``folder`` is the run's own, ``launch`` not needed."""
    fio.refuse_missing()
    missing = [pair for pair in order(profile, arms) if pair not in done]
    if not missing:
        return
    with Places(profile, folder, nonce) as places:
        await places.ceilings(record)
        for repeat, name in missing:
            with places.entered(name) as entered:
                visit = Visit(profile, record, repeat, entered)
                visit.event("place", **entered.described())
                await visit.snapshot()
                await visit.models()
                visit.event("arm_finished")


class Visit:
    """One place in one repeat."""

    def __init__(self, profile: Profile, record: Recorder, repeat: int, entered: Entered):
        self.setup = profile.experiments.storage
        self.record = record
        self.repeat = repeat
        self.entered = entered

    async def snapshot(self) -> None:
        """Several writers at once, each a file of its own, until all of it is on the device."""
        folder = self._fresh(SNAPSHOT)
        job = fio.Job(
            kind="write",
            block_bytes=SNAPSHOT_BLOCK,
            jobs=self.setup.writers,
            file_bytes=self.setup.snapshot_mb * MIB,
            fsync=True,
        )
        rate = await asyncio.to_thread(fio.run, job, folder)
        self.event(
            "snapshot", writers=job.jobs, bytes=rate.bytes, seconds=rate.seconds, direct=job.direct
        )
        shutil.rmtree(folder)

    async def models(self) -> None:
        """Cold loads by each number of readers, every reader a model of its own."""
        folder = self._fresh(MODELS)
        paths = [folder / f"{number}.safetensors" for number in range(max(self.setup.readers))]
        for number, path in enumerate(paths):
            await asyncio.to_thread(loading.write, path, self.setup.model_mb * MIB, number)
        for readers in sorted(self.setup.readers):
            await self._load(paths[:readers])
        shutil.rmtree(folder)

    async def _load(self, paths: Sequence[Path]) -> None:
        source = self.entered.source / MODELS
        held = storage.drop_pages(source)
        before = storage.device_read_bytes(source)
        found = await asyncio.to_thread(loading.load, paths)
        after = storage.device_read_bytes(source)
        self.event(
            "model_load",
            readers=found.readers,
            bytes=found.bytes,
            seconds=found.seconds,
            resident_bytes=held.resident_bytes,
            held_bytes=held.bytes,
            device_bytes=None if before is None or after is None else after - before,
        )

    def _fresh(self, name: str) -> Path:
        """An empty folder in the place; what an interrupted visit left is removed."""
        shutil.rmtree(self.entered.source / name, ignore_errors=True)
        folder = self.entered.folder / name
        folder.mkdir()
        return folder

    def event(self, kind: str, **detail: Any) -> None:
        """Write down that something happened in this place."""
        self.record(
            Event(
                at_ns=now_ns(),
                kind=kind,
                scenario=self.entered.place.name,
                repeat=self.repeat,
                detail=detail,
            )
        )
