"""What an L2 folder holds: its records and the files that are none, counted and described."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from kvlab.disk import identity

RECORD_NAME = re.compile(
    r"(?P<model>.+)@(?P<rank>0x[0-9a-f]+)@(?P<group>\d+)@(?P<hash>[0-9a-f]+)"
    r"(?P<suffix>\.data|\.tmp)",
    re.IGNORECASE,
)
"""What LMCache's ``fs`` adapter writes: model (/ as -SEP-), kv rank, object group, chunk hash."""
DAY_S = 86_400
OWN_FILES = (identity.FILE, "kvlab-pruned.jsonl")
"""Files that kvlab itself keeps in an L2 folder: whose records these are, and what was removed."""
AGES_S = (3600, DAY_S, 7 * DAY_S, 30 * DAY_S)
"""The ages, in seconds, between which ``describe`` counts."""

Kind = Literal["record", "empty", "short", "temporary", "foreign"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in an L2 folder. What only a record's name tells is None for a foreign file."""

    path: Path
    kind: Kind
    """``short``: of a size that its model and object group do not usually have."""
    bytes: int
    modified_s: float
    accessed_s: float
    """Seconds since 1970, as the file system keeps them."""
    model: str | None = None
    rank: str | None = None
    group: int | None = None

    @property
    def is_record(self) -> bool:
        """Whether it lies where records lie and is named as one, whole or not."""
        return self.kind in ("record", "empty", "short")


@dataclass(frozen=True, slots=True)
class Survey:
    """Counts over one L2 folder. ``odd`` counts empty, short, temporary and foreign files."""

    files: int
    bytes: int
    sizes: dict[int, int]
    """Records by size; a healthy folder has one size per object group."""
    groups: int
    empty: int
    short: int
    """Records of a size that hardly any other record of their group has."""
    temporary: int
    foreign: int

    @property
    def odd(self) -> int:
        return self.empty + self.short + self.temporary + self.foreign


def record_name(model: str) -> str:
    """A record's name as the ``fs`` adapter makes it, of the length that real ones have."""
    return f"{model.replace('/', '-SEP-')}@0x01000100@0@{'0' * 64}.data"


def entries(folder: Path) -> list[Entry]:
    """Every file in the folder now, by path, without links and kvlab's own files.

    Files that vanish meanwhile are left out.
    """
    found = []
    for file in _files(folder):
        inside = Path(os.path.relpath(file.path, folder))
        if str(inside) in OWN_FILES:
            continue
        try:
            about = file.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        name = RECORD_NAME.fullmatch(file.name)
        kind = _kind(inside, name, about.st_size)
        found.append(
            Entry(
                path=Path(file.path),
                kind=kind,
                bytes=about.st_size,
                modified_s=about.st_mtime,
                accessed_s=about.st_atime,
                model=name["model"].replace("-SEP-", "/") if name else None,
                rank=name["rank"].lower() if name else None,
                group=int(name["group"]) if name else None,
            )
        )
    return _with_short(found)


def survey(folder: Path) -> Survey:
    """What the folder holds now; files that vanish meanwhile are not counted."""
    return count(entries(folder))


def count(found: Sequence[Entry]) -> Survey:
    """The counts over the entries of a folder."""
    kinds = Counter(entry.kind for entry in found)
    records = [entry for entry in found if entry.is_record]
    return Survey(
        files=len(records),
        bytes=sum(entry.bytes for entry in records),
        sizes=dict(sorted(Counter(entry.bytes for entry in records).items())),
        groups=len({entry.group for entry in records}),
        empty=kinds["empty"],
        short=kinds["short"],
        temporary=kinds["temporary"],
        foreign=kinds["foreign"],
    )


def describe(folder: Path, found: Sequence[Entry], *, now_s: float) -> dict[str, Any]:
    """What a person asks of an L2 folder, for ``kvlab disk inventory``; unknown is None.

    Growth is the bytes of the records that were written in the last seven days, a day; what was
    removed meanwhile is not seen. ``days_until_full`` divides the free space of the file system by
    it. Records are taken as its own by their names alone: nothing is opened.
    """
    records = [entry for entry in found if entry.is_record]
    counts = count(found)
    growth = _growth(records, now_s)
    free = shutil.disk_usage(folder).free
    return {
        "folder": str(folder),
        "records": counts.files,
        "bytes": counts.bytes,
        "free_bytes": free,
        "oldest_s": now_s - min(entry.modified_s for entry in records) if records else None,
        "newest_s": now_s - max(entry.modified_s for entry in records) if records else None,
        "ages": _ages(records, now_s),
        "holdings": _holdings(records),
        "odd": {kind: getattr(counts, kind) for kind in ("empty", "short", "temporary", "foreign")},
        "growth_bytes_per_day": growth,
        "days_until_full": free / growth if growth else None,
        "identity": identity.read(folder),
    }


def _kind(inside: Path, name: re.Match[str] | None, size: int) -> Kind:
    hidden = any(part.startswith(".") for part in inside.parts)
    if hidden or (".tmp" in inside.name if name is None else name["suffix"].lower() == ".tmp"):
        return "temporary"
    if name is None:
        return "foreign"
    return "record" if size else "empty"


def _with_short(found: Sequence[Entry]) -> list[Entry]:
    """The entries, with records marked whose size is not the commonest of their own kind."""
    sizes: dict[tuple[str | None, int | None], Counter[int]] = {}
    for entry in found:
        if entry.kind == "record":
            sizes.setdefault((entry.model, entry.group), Counter())[entry.bytes] += 1
    usual = {kin: counter.most_common(1)[0][0] for kin, counter in sizes.items()}
    return [
        replace(entry, kind="short")
        if entry.kind == "record" and entry.bytes != usual[entry.model, entry.group]
        else entry
        for entry in found
    ]


def _ages(records: Sequence[Entry], now_s: float) -> list[dict[str, Any]]:
    """Records and bytes by age since they were written; the last class has no upper end."""
    ends: list[float | None] = [0, *AGES_S, None]
    found = []
    for low, high in pairwise(ends):
        assert low is not None
        inside = [
            entry
            for entry in records
            if (age := max(0.0, now_s - entry.modified_s)) >= low and (high is None or age < high)
        ]
        found.append(
            {
                "from_s": low,
                "below_s": high,
                "records": len(inside),
                "bytes": sum(entry.bytes for entry in inside),
            }
        )
    return found


def _holdings(records: Sequence[Entry]) -> list[dict[str, Any]]:
    """Records and bytes by model, rank and object group, with the usual size of a record."""
    kin: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in records:
        kin.setdefault((entry.model or "", entry.rank or "", entry.group or 0), []).append(entry)
    return [
        {
            "model": model,
            "rank": rank,
            "group": group,
            "records": len(members),
            "bytes": sum(entry.bytes for entry in members),
            "record_bytes": Counter(entry.bytes for entry in members).most_common(1)[0][0],
        }
        for (model, rank, group), members in sorted(kin.items())
    ]


def _growth(records: Sequence[Entry], now_s: float) -> float | None:
    """Bytes written a day over the last week, or since the first record if that is less ago."""
    recent = [entry for entry in records if now_s - 7 * DAY_S <= entry.modified_s <= now_s]
    if not recent:
        return None
    span_s = min(7 * DAY_S, now_s - min(entry.modified_s for entry in records))
    written = sum(entry.bytes for entry in recent)
    return written * DAY_S / span_s if span_s >= 1 else None


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield entry
