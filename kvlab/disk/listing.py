"""What ``kvlab disk`` does and prints: the inventory, a pruning, a watch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from kvlab import profile, units
from kvlab.disk import identity, users
from kvlab.disk import prune as pruning
from kvlab.disk.inventory import DAY_S, count, describe, entries
from kvlab.errors import UsageError
from kvlab.units import byte_size, duration

SHOWN = 20
"""So many removals are listed one by one; the JSON form has all of them."""


def tell(folder: Path) -> dict[str, Any]:
    """The inventory of the folder, and which profiles that come with kvlab its records fit."""
    _require(folder)
    told = describe(folder, entries(folder), now_s=time.time())
    known = [profile.load(name) for name in profile.names()]
    return {**told, "usable_by": identity.usable_by(told["identity"], known)}


def text(told: dict[str, Any]) -> str:
    """The inventory for a person."""
    lines = [
        f"{told['folder']}: {told['records']} records, {byte_size(told['bytes'])}, "
        f"{byte_size(told['free_bytes'])} free"
    ]
    if told["records"]:
        lines.append(f"written between {_ago(told['oldest_s'])} and {_ago(told['newest_s'])}")
    lines += [
        f"  {_class(ages):<18} {ages['records']:>8} records  {byte_size(ages['bytes']):>8}"
        for ages in told["ages"]
        if ages["records"]
    ]
    lines += [
        f"  {held['model']}, rank {held['rank']}, object group {held['group']}: {held['records']} "
        f"records, {byte_size(held['bytes'])}, usually {byte_size(held['record_bytes'])} each"
        for held in told["holdings"]
    ]
    odd = [f"{number} {kind}" for kind, number in told["odd"].items() if number]
    lines.append(f"odd files: {', '.join(odd) or 'none'}")
    lines.append(f"growth: {_growth(told['growth_bytes_per_day'], told['days_until_full'])}")
    if told["identity"] is None:
        lines.append(f"whose records: nothing says so ({identity.FILE} is missing)")
    else:
        fits = ", ".join(told["usable_by"]) or "no profile that comes with kvlab"
        lines.append(f"usable by: {fits}")
    return "\n".join(lines)


def prune(
    folder: Path,
    older_than: str | None,
    model: str | None,
    keep: str | None,
    *,
    odd: bool,
    yes: bool,
) -> dict[str, Any]:
    """What the rules choose, and with ``yes`` what was removed; HostBusy while it is in use."""
    _require(folder)
    rules = pruning.Rules(
        older_than_s=None if older_than is None else _seconds(older_than, "--older-than 9d"),
        model=model,
        keep_bytes=None if keep is None else _bytes(keep),
        odd=odd,
    )
    found, now_s = entries(folder), time.time()
    chosen = pruning.choose(found, rules, now_s=now_s)
    if yes:
        users.refuse_used(folder, found, now_s=now_s)
        chosen = pruning.remove(folder, chosen)
    before = count(found)
    return {
        "folder": str(folder),
        "removed": yes,
        "files": len(chosen),
        "bytes": sum(removal.entry.bytes for removal in chosen),
        "of_records": before.files,
        "of_bytes": before.bytes,
        "log": str(folder / pruning.LOG) if yes else None,
        "removals": [
            {
                "file": str(removal.entry.path.relative_to(folder)),
                "bytes": removal.entry.bytes,
                "reason": removal.reason,
            }
            for removal in chosen
        ],
    }


def pruned_text(outcome: dict[str, Any]) -> str:
    """A pruning for a person: what, why, and what to do next."""
    shown = outcome["removals"][:SHOWN]
    lines = [f"{byte_size(r['bytes']):>8}  {r['reason']:<28}  {r['file']}" for r in shown]
    if len(outcome["removals"]) > len(shown):
        lines.append(f"… and {len(outcome['removals']) - len(shown)} more (--json lists all)")
    verb = "removed" if outcome["removed"] else "would be removed"
    lines.append(
        f"{outcome['files']} files, {byte_size(outcome['bytes'])} {verb}, of "
        f"{outcome['of_records']} records, {byte_size(outcome['of_bytes'])}"
    )
    if outcome["removed"]:
        lines.append(f"log: {outcome['log']}")
    elif outcome["files"]:
        lines.append("nothing was touched; --yes removes them")
    return "\n".join(lines)


def watch(folder: Path, every: str, looks: int | None) -> Iterator[dict[str, Any]]:
    """One look at the folder after another; growth is since the first, None before the second."""
    pause_s = _seconds(every, "--every 1m")
    if pause_s <= 0:
        raise UsageError(f"{every!r} is no pause", hint="for example --every 1m")
    first: tuple[float, int] | None = None
    number = 0
    while looks is None or number < looks:
        if number:
            time.sleep(pause_s)
        _require(folder)
        number += 1
        counts, now = count(entries(folder)), time.monotonic()
        first = first or (now, counts.bytes)
        passed = now - first[0]
        growth = (counts.bytes - first[1]) * DAY_S / passed if passed > 0 else None
        free = shutil.disk_usage(folder).free
        yield {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "records": counts.files,
            "bytes": counts.bytes,
            "odd": counts.odd,
            "free_bytes": free,
            "growth_bytes_per_day": growth,
            "days_until_full": free / growth if growth and growth > 0 else None,
        }


def look_text(look: dict[str, Any]) -> str:
    """One line of a watch."""
    return (
        f"{look['at']}  {look['records']} records  {byte_size(look['bytes'])}  "
        f"{byte_size(look['free_bytes'])} free  odd {look['odd']}  "
        f"growth {_growth(look['growth_bytes_per_day'], look['days_until_full'])}"
    )


def _require(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is no folder", hint="give the base_path of the profile's L2 adapter"
        )


def _seconds(given: str, example: str) -> float:
    try:
        return units.seconds(given)
    except ValueError as error:
        raise UsageError(str(error), hint=f"for example {example}") from error


def _bytes(given: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(given))
    except (ValidationError, OverflowError) as error:
        raise UsageError(f"{given!r} is no size", hint="for example --keep 20GB") from error


def _ago(age_s: float) -> str:
    return f"{age_s / DAY_S:.1f} days ago" if age_s >= DAY_S else f"{duration(age_s)} ago"


def _class(ages: dict[str, Any]) -> str:
    if ages["below_s"] is None:
        return f"over {_span(ages['from_s'])}"
    return f"under {_span(ages['below_s'])}"


def _span(seconds: float) -> str:
    return f"{seconds / DAY_S:g} days" if seconds >= DAY_S else duration(seconds)


def _growth(per_day: float | None, days: float | None) -> str:
    if per_day is None:
        return "unknown"
    until = f", full in {days:.1f} days" if days is not None else ""
    return f"{byte_size(per_day)} a day{until}"
