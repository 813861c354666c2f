"""The parameters of the parallel adapter: what each means, and what is wrong with given ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
NUM_WORKERS = 64
SUB_BLOCK_KB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked parameters; ``HELP`` says what they mean."""

    base_path: str
    relative_tmp_dir: str | None = None
    num_workers: int = NUM_WORKERS
    sub_block_kb: int = SUB_BLOCK_KB
    use_odirect: bool = True
    fsync: bool = False
    max_capacity_gb: float = 0

    @property
    def smallest_bytes(self) -> int:
        """The smallest piece that a record is split into."""
        return self.sub_block_kb * 1024

    @property
    def capacity_bytes(self) -> int:
        """The limit of all records; 0: none."""
        return int(self.max_capacity_gb * GIB)

    @property
    def writers(self) -> int:
        """How many workers may write or delete at once: the others are kept for reads."""
        return max(1, self.num_workers // 2)


HELP = {
    "base_path": "folder of the records (required); made when it is missing",
    "relative_tmp_dir": "folder below base_path for unfinished records (default: base_path itself)",
    "num_workers": f"reads and writes at once, of all requests together (default {NUM_WORKERS})",
    "sub_block_kb": (
        "smallest piece that a record is split into, in KiB, a multiple of 4 (default "
        f"{SUB_BLOCK_KB}); pieces are larger when the workers are busy"
    ),
    "use_odirect": "read and write past the page cache where alignment allows (default true)",
    "fsync": "a store ends only when the record is on the disk (default false)",
    "max_capacity_gb": (
        "limit of all records in GiB, kept by evicting the least recently used (default 0: none)"
    ),
}


def check(given: Mapping[str, Any]) -> Settings:
    """The settings, or ValueError with what is wrong and the meaning of every parameter."""
    problem = next(_problems(given), None)
    if problem is not None:
        raise ValueError(f"{problem}\n{explain()}")
    return Settings(**given)


def explain() -> str:
    """Every parameter with its meaning."""
    lines = [f"- {name}: {meaning}" for name, meaning in HELP.items()]
    return "\n".join(["adapter_params of the parallel fs adapter:", *lines])


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(given.keys() - HELP.keys()):
        yield f"{name!r} is no parameter of the parallel fs adapter"
    if not isinstance(given.get("base_path"), str) or not given["base_path"]:
        yield "base_path must name a folder"
    folder = given.get("relative_tmp_dir")
    if folder is not None and not _is_below(folder):
        yield f"relative_tmp_dir must name a folder below base_path, not {folder!r}"
    for name, unit in (("num_workers", 1), ("sub_block_kb", 4)):
        value = given.get(name, unit)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % unit:
            multiple = "" if unit == 1 else f" and a multiple of {unit}"
            yield f"{name} must be a whole number above 0{multiple}, not {value!r}"
    for name in ("use_odirect", "fsync"):
        if not isinstance(given.get(name, False), bool):
            yield f"{name} must be true or false, not {given[name]!r}"
    limit = given.get("max_capacity_gb", 0)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit < math.inf:
        yield f"max_capacity_gb must be a number, 0 or more, not {limit!r}"


def _is_below(folder: object) -> bool:
    return (
        isinstance(folder, str)
        and bool(folder)
        and not Path(folder).is_absolute()
        and ".." not in Path(folder).parts
    )
