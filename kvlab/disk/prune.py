"""Which records of an L2 folder to remove, and their removal.

LMCache's ``fs`` adapter never frees space. Only files whose names parse as records are ever
touched, through descriptors of their folders, so that no link leads elsewhere.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvlab.disk.inventory import OWN_FILES, Entry
from kvlab.errors import UsageError
from kvlab.units import duration

LOG = OWN_FILES[1]
IN_FLIGHT_S = 3600.0
"""A temporary file younger than this may still be being written."""
ODD = ("empty", "short", "temporary")


@dataclass(frozen=True, slots=True)
class Rules:
    """What to remove: records to which every given rule applies, and odd files if wanted."""

    older_than_s: float | None = None
    model: str | None = None
    keep_bytes: int | None = None
    """Remove the least recently used until the folder's records take no more than this."""
    odd: bool = False

    @property
    def for_records(self) -> bool:
        return not (self.older_than_s is None and self.model is None and self.keep_bytes is None)


@dataclass(frozen=True, slots=True)
class Removal:
    """A file to remove, and why."""

    entry: Entry
    reason: str


def choose(found: Sequence[Entry], rules: Rules, *, now_s: float) -> list[Removal]:
    """The files to which the rules apply, the least recently used first.

    Use is the later of the times of writing and of access; on a file system mounted ``noatime`` the
    former, on ``relatime`` known to a day. Without any rule nothing is chosen: UsageError.
    """
    if not rules.for_records and not rules.odd:
        raise UsageError(
            "no rule says what to prune",
            hint="give one or more of --older-than, --model, --keep and --odd",
        )
    chosen = list(_records(found, rules, now_s)) if rules.for_records else []
    if rules.odd:
        taken = {removal.entry.path for removal in chosen}
        chosen += [
            Removal(entry, entry.kind)
            for entry in found
            if entry.kind in ODD and _is_removable(entry, now_s) and entry.path not in taken
        ]
    return sorted(chosen, key=lambda removal: (_used_s(removal.entry), removal.entry.path))


def remove(folder: Path, removals: Sequence[Removal]) -> list[Removal]:
    """What was removed, after it was; each file is a line in the folder's ``kvlab-pruned.jsonl``.

    A file that changed or vanished since it was listed is left alone.
    """
    removed = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with os.fdopen(os.open(folder / LOG, flags, 0o644), "w", encoding="utf-8") as log:
        for removal in removals:
            if _unlink(folder, removal.entry):
                removed.append(removal)
                log.write(_line(folder, removal))
                log.flush()
    return removed


def _records(found: Sequence[Entry], rules: Rules, now_s: float) -> Iterator[Removal]:
    ours = [entry for entry in found if entry.is_record]
    surplus = sum(entry.bytes for entry in ours) - (rules.keep_bytes or 0)
    for entry in sorted(ours, key=lambda entry: (_used_s(entry), entry.path)):
        age_s = now_s - entry.modified_s
        if rules.model is not None and entry.model != rules.model:
            continue
        if rules.older_than_s is not None and age_s < rules.older_than_s:
            continue
        if rules.keep_bytes is not None and surplus <= 0:
            break
        surplus -= entry.bytes
        yield Removal(entry, _reason(rules, age_s))


def _reason(rules: Rules, age_s: float) -> str:
    reasons = []
    if rules.model is not None:
        reasons.append(f"of {rules.model}")
    if rules.older_than_s is not None:
        reasons.append(f"written {_age(age_s)} ago")
    if rules.keep_bytes is not None:
        reasons.append("least recently used")
    return ", ".join(reasons)


def _age(seconds: float) -> str:
    return f"{seconds / 86_400:.1f} days" if seconds >= 86_400 else duration(seconds)


def _is_removable(entry: Entry, now_s: float) -> bool:
    """Whether an odd file is a record by its name, and surely no write in flight."""
    in_flight = entry.kind == "temporary" and now_s - entry.modified_s < IN_FLIGHT_S
    return entry.model is not None and not in_flight


def _used_s(entry: Entry) -> float:
    return max(entry.modified_s, entry.accessed_s)


def _unlink(folder: Path, entry: Entry) -> bool:
    """Whether the file was removed; it is not when it is no longer what was listed."""
    try:
        with _parent(folder, entry.path) as parent:
            now = os.stat(entry.path.name, dir_fd=parent, follow_symlinks=False)
            same = (now.st_size, now.st_mtime) == (entry.bytes, entry.modified_s)
            if not stat.S_ISREG(now.st_mode) or not same:
                return False
            os.unlink(entry.path.name, dir_fd=parent)
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _parent(folder: Path, path: Path) -> Iterator[int]:
    """A descriptor of the file's folder, reached without following a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in path.relative_to(folder).parts[:-1]:
            inner = os.open(part, flags, dir_fd=held)
            os.close(held)
            held = inner
        yield held
    finally:
        os.close(held)


def _line(folder: Path, removal: Removal) -> str:
    entry = removal.entry
    about = {
        "file": str(entry.path.relative_to(folder)),
        "bytes": entry.bytes,
        "modified_s": entry.modified_s,
        "reason": removal.reason,
    }
    return f"{json.dumps(about)}\n"
