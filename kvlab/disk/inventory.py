"""A survey of an L2 folder: how many records, how many bytes, and which files look wrong."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.disk import identity

RECORD_NAME = re.compile(
    r"(?P<model>.+)@(?P<rank>0x[0-9a-f]+)@(?P<group>\d+)@(?P<hash>[0-9a-f]+)\.data", re.IGNORECASE
)
"""What LMCache's ``fs`` adapter writes: model (/ as -SEP-), kv rank, object group, chunk hash."""


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


def survey(folder: Path) -> Survey:
    """What the folder holds now; files that vanish meanwhile are not counted."""
    sizes_by_group: dict[str, Counter[int]] = {}
    temporary = foreign = 0
    for entry in _files(folder):
        try:
            size = entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
        match = RECORD_NAME.fullmatch(entry.name)
        inside = os.path.relpath(entry.path, folder)
        if inside == identity.FILE:
            continue  # kvlab's own: whose records these are
        if match and not any(part.startswith(".") for part in Path(inside).parts):
            group = sizes_by_group.setdefault(match["group"], Counter())
            group[size] += 1
        elif any(part.startswith(".") for part in Path(inside).parts) or ".tmp" in entry.name:
            temporary += 1
        else:
            foreign += 1
    sizes: Counter[int] = sum(sizes_by_group.values(), Counter())
    return Survey(
        files=sizes.total(),
        bytes=sum(size * count for size, count in sizes.items()),
        sizes=dict(sorted(sizes.items())),
        groups=len(sizes_by_group),
        empty=sizes[0],
        short=sum(_outliers(group) for group in sizes_by_group.values()),
        temporary=temporary,
        foreign=foreign,
    )


def _outliers(sizes: Counter[int]) -> int:
    """Records, not empty, whose size differs from the commonest one of their group."""
    ranked = sizes.most_common(1)
    usual = ranked[0][0] if ranked else 0
    return sum(count for size, count in sizes.items() if size not in (0, usual))


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield entry
