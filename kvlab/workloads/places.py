"""The places where records lie during a run: folders, and emulated mounts of them.

``with Places(...)`` removes what the run left there. ``entered(name)`` is the folder of one
place, mounted where the place is an emulated network mount; ``ceilings`` is what fio reads there.
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab import fio, storage
from kvlab.profile import Profile, StoragePath
from kvlab.records import Event, now_ns
from kvlab.units import KIB, MIB
from kvlab.workloads import Recorder

FIO = "fio"
"""The folder of fio's files in a place."""
FILE_BLOCKS = 8
"""Requests that fit into each of fio's files, before it begins again at the start."""


@dataclass(frozen=True, slots=True)
class Entered:
    """One place while it is in use."""

    place: StoragePath
    folder: Path
    source: Path
    """Where the bytes really lie: the folder itself, or that which is mounted there."""
    emulated: str | None
    """What the emulation does, in words; None: the place is what it is."""

    def described(self) -> dict[str, Any]:
        """The place as an event's detail keeps it."""
        return {
            "path": self.place.name,
            "emulated": self.emulated,
            "device": storage.device(self.source),
        }


class Places:
    """The places of a profile, each with a folder that belongs to this run."""

    def __init__(self, profile: Profile, run: Path, nonce: str):
        self.profile = profile
        self.setup = profile.storage
        self._run = run
        self._nonce = nonce

    def __enter__(self) -> Places:
        self.clear()  # what a killed run left
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove every folder of this run."""
        for place in self.setup.paths:
            if place.mount_of is None:
                shutil.rmtree(self.source(place), ignore_errors=True)

    def source(self, place: StoragePath) -> Path:
        """The folder in which the bytes of a place lie."""
        if place.mount_of is not None:
            return self.source(self.setup.path_named(place.mount_of))
        if place.path is None:
            return (self._run / "l2" / place.name).resolve()
        return Path(place.path).resolve() / f"kvlab-{self._nonce}"

    @contextmanager
    def entered(self, name: str) -> Iterator[Entered]:
        """The place, its folder made and, where it is emulated, mounted until the end."""
        place = self.setup.path_named(name)
        source = self.source(place)
        source.mkdir(parents=True, exist_ok=True)
        if place.mount_of is None:
            yield Entered(place, source, source, None)
            return
        slow_mount = importlib.import_module("kvlab.slow_mount")
        with ExitStack() as stack:
            at = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlab-mount-")))
            mount = stack.enter_context(
                slow_mount.mounted(
                    source,
                    at / "at",
                    latency_s=place.latency_ms / 1000,
                    bandwidth_bytes_s=place.bandwidth_mb_s and place.bandwidth_mb_s * 1e6,
                )
            )
            yield Entered(place, mount.at, source, mount.label)

    async def ceilings(self, record: Recorder) -> None:
        """Record what fio reads in every place at every number of readers."""
        for place in self.setup.paths:
            with self.entered(place.name) as entered:
                folder = entered.folder / FIO
                folder.mkdir(exist_ok=True)
                for readers in sorted(self.setup.readers):
                    await self._ceiling(entered, folder, readers, record)
                shutil.rmtree(folder)

    async def _ceiling(
        self, entered: Entered, folder: Path, readers: int, record: Recorder
    ) -> None:
        block = self.setup.block_kb * KIB
        job = fio.Job(
            kind="read",
            block_bytes=block,
            jobs=readers,
            file_bytes=max(FILE_BLOCKS * block, MIB),
            runtime_s=self.setup.runtime_s,
        )
        before = storage.device_read_bytes(entered.source)
        rate = await asyncio.to_thread(fio.run, job, folder, entered.source / FIO)
        after = storage.device_read_bytes(entered.source)
        detail = {
            **entered.described(),
            "readers": readers,
            "block_bytes": block,
            "direct": job.direct,
            "bytes": rate.bytes,
            "seconds": rate.seconds,
            "device_bytes": None if before is None or after is None else after - before,
        }
        record(Event(at_ns=now_ns(), kind="ceiling", detail=detail))
