"""Which records lie in a folder, how large they are, and which was used least recently.

An index of keys in memory, so that a lookup asks no disk. It counts bytes, and where it has a
capacity it names the records that have to go before another may be written. It does no I/O.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")


class NoRoom(Exception):
    """A record cannot be had: the capacity is smaller, or all that could go is in use."""


@dataclass(slots=True)
class Record:
    """One file: its size, whether its contents can be trusted, and how many readers wait for it."""

    size: int
    trusted: bool = True
    locks: int = 0


class RecordIndex(Generic[Key]):
    """Records by key, least recently used first. Every method may be called from any thread."""

    def __init__(self, capacity_bytes: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        """0: no limit."""
        self._records: OrderedDict[Key, Record] = OrderedDict()
        self._bytes = 0
        self._reserved = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes(self) -> int:
        """What the records take, those included that cannot be trusted."""
        return self._bytes

    def snapshot(self) -> list[tuple[Key, int]]:
        """Every key with its size, least recently used first."""
        with self._lock:
            return [(key, record.size) for key, record in self._records.items()]

    def locked(self) -> int:
        """How many records somebody waits for."""
        with self._lock:
            return sum(record.locks > 0 for record in self._records.values())

    def holds(self, key: Key, size: int) -> bool:
        """Whether the record is there, to be trusted, and of that size."""
        with self._lock:
            record = self._records.get(key)
            return record is not None and record.trusted and record.size == size

    def lock(self, keys: Sequence[Key]) -> list[bool]:
        """For each key whether it is there; those that are stay until they are unlocked."""
        with self._lock:
            found = []
            for key in keys:
                record = self._records.get(key)
                there = record is not None and record.trusted
                if there and record is not None:
                    record.locks += 1
                found.append(there)
            return found

    def unlock(self, keys: Iterable[Key]) -> None:
        """Take one lock off each key that has any."""
        with self._lock:
            for key in keys:
                record = self._records.get(key)
                if record is not None and record.locks:
                    record.locks -= 1

    def touch(self, keys: Sequence[Key]) -> None:
        """Note that the keys were used just now.

        The first one becomes the most recent: without it the later ones of a prefix are of no use.
        """
        with self._lock:
            for key in reversed(keys):
                if key in self._records:
                    self._records.move_to_end(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def put(
        self, key: Key, size: int, *, reserved: bool = False, trusted: bool = True
    ) -> int | None:
        """The size of the record that this one replaces; None: there was none.

        ``reserved``: its bytes were, and the reservation ends.
        """
        with self._lock:
            self._reserved -= size if reserved else 0
            before = self._records.pop(key, None)
            locks = before.locks if before else 0
            self._records[key] = Record(size, trusted, locks)
            self._bytes += size - (before.size if before else 0)
            return before.size if before else None

    def drop(self, key: Key) -> int | None:
        """The size of the record that is taken out; None: there was none."""
        with self._lock:
            return self._drop(key)

    def drop_unlocked(self, key: Key) -> int | None:
        """The size of the record that is taken out; None: there was none, or somebody waits."""
        with self._lock:
            record = self._records.get(key)
            return None if record is None or record.locks else self._drop(key)

    def _drop(self, key: Key) -> int | None:
        record = self._records.pop(key, None)
        if record is None:
            return None
        self._bytes -= record.size
        return record.size

    def distrust(self, key: Key) -> None:
        """Find the key no more until it is written again; its file is still there and counted."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                record.trusted = False

    def reserve(self, size: int) -> list[tuple[Key, int]]:
        """The records, taken out already, whose files must go before ``size`` bytes are written.

        Raises NoRoom, and takes nothing out, when that cannot make enough room.
        """
        with self._lock:
            excess = self._bytes + self._reserved + size - self.capacity_bytes
            victims = self._oldest(excess) if self.capacity_bytes else []
            taken = [(key, self._drop(key) or 0) for key in victims]
            self._reserved += size
            return taken

    def release(self, size: int) -> None:
        """End a reservation whose bytes will not be written."""
        with self._lock:
            self._reserved -= size

    def _oldest(self, excess: int) -> list[Key]:
        """The least recently used keys that free so many bytes and that nobody waits for."""
        chosen: list[Key] = []
        for key, record in self._records.items():
            if excess <= 0:
                break
            if not record.locks:
                chosen.append(key)
                excess -= record.size
        if excess > 0:
            raise NoRoom
        return chosen
