"""What a place gives beside the cache: the rates of snapshots and of cold model loads. Pure.

There is no claim but that the rates are what they seem: of the device, not of the page cache, and
not above what fio reads in the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab import evidence, stats, verdict
from kvlab.invariants.facts import Invariant, weigh
from kvlab.records import Event
from kvlab.results import ceilings, entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.verdict import Verdict

COLD_SHARE = 0.05

Rows = Sequence[Mapping[str, Any]]


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a storage run."""
    manifest, events = run.manifest, run.events()
    places, setup = ceilings.places(manifest, events), manifest["profile"]["experiments"]
    planned = [(str(place), int(repeat)) for repeat, place in manifest["order"]]
    names = list(dict.fromkeys(place for place, _ in planned))
    snapshots = [_snapshot(events, name) for name in names]
    loads = [
        _load(events, place, int(readers))
        for place in (next((p for p in places if p["name"] == n), {"name": n}) for n in names)
        for readers in sorted(setup["storage"]["readers"])
    ]
    margin = float(setup["parallel_read"]["ceiling_margin"])
    held = [
        whole(events, planned, setup["storage"], names, places),
        pages_cold(loads),
        below_ceiling(loads, margin),
    ]
    figures = {
        "emulated": any(place.get("emulated") for place in places),
        "repeats": setup["storage"]["repeats"],
        "paths": places,
        "snapshots": snapshots,
        "loads": loads,
        "time_s": entries.time_s(events, []),
    }
    return frame(run, _reach(held, snapshots, loads), figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    if found["verdict"]["status"] == verdict.INVALID:
        return "\n".join(lines)
    for place in found["paths"]:
        said = f" ({place['emulated']})" if place.get("emulated") else ""
        rates = ", ".join(
            f"{one['gb_per_s']:.3g} GB/s with {one['readers']}" for one in place["ceilings"]
        )
        lines.append(f"{place['name']}{said}: fio reads {rates}")
    for row in found["snapshots"]:
        lines.append(
            f"{row['path']}: snapshot by {row['writers']} writers {row['gb_per_s']:.3g} GB/s, "
            f"{row['seconds']:.2f} s"
        )
    for row in found["loads"]:
        lines.append(
            f"{row['path']}: {row['readers']} models loaded at {row['gb_per_s']:.3g} GB/s, "
            f"{row['seconds']:.2f} s ({row['read_source']})"
        )
    return "\n".join(lines)


def _of(events: Sequence[Event], kind: str, place: str) -> list[Event]:
    """The events of a kind in a place, one per repeat and number of readers: the last counts."""
    found = {
        (event.repeat, event.detail.get("readers")): event
        for event in events
        if event.kind == kind and event.scenario == place
    }
    return list(found.values())


def _rates(events: Sequence[Event]) -> dict[str, Any]:
    """Bytes per second and seconds: median over the repeats, and the range of the rates."""
    rates = [
        event.detail["bytes"] / event.detail["seconds"] / 1e9
        for event in events
        if event.detail.get("bytes") and event.detail.get("seconds")
    ]
    return {
        "gb_per_s": stats.median(rates),
        "range_gb_per_s": [min(rates), max(rates)] if rates else None,
        "seconds": stats.median(e.detail["seconds"] for e in events if e.detail.get("seconds")),
        "repeats": len(rates),
    }


def _snapshot(events: Sequence[Event], place: str) -> dict[str, Any]:
    found = _of(events, "snapshot", place)
    first = found[0].detail if found else {}
    named = {name: first.get(name) for name in ("writers", "bytes", "direct")}
    return {"path": place, **named, **_rates(found)}


def _load(events: Sequence[Event], place: Mapping[str, Any], readers: int) -> dict[str, Any]:
    name = str(place["name"])
    found = [e for e in _of(events, "model_load", name) if e.detail.get("readers") == readers]
    rates = _rates(found)
    best = place.get("ceiling_gb_per_s")
    resident = [share for event in found if (share := _resident(event)) is not None]
    return {
        "path": name,
        "readers": readers,
        "bytes": found[0].detail.get("bytes") if found else None,
        **rates,
        "ceiling_share": rates["gb_per_s"] / best if rates["gb_per_s"] and best else None,
        "resident_share": max(resident, default=None),
        "read_source": min(map(_source, found), key=evidence.SOURCES.index, default=None),
    }


def _resident(event: Event) -> float | None:
    """The share of the models' bytes that was in memory before a load."""
    held, total = event.detail.get("resident_bytes"), event.detail.get("held_bytes")
    return held / total if held is not None and total else None


def _source(event: Event) -> str:
    return evidence.read_source(
        event.detail.get("bytes"), event.detail.get("device_bytes"), _resident(event)
    )


def whole(
    events: Sequence[Event],
    planned: Sequence[tuple[str, int]],
    setup: Mapping[str, Any],
    names: Sequence[str],
    places: Rows,
) -> Invariant:
    """Every planned snapshot and load was measured, and every place has a ceiling."""
    missing = [*_missing(events, planned, [int(one) for one in setup["readers"]])]
    known = {place["name"] for place in places if place.get("ceiling_gb_per_s")}
    missing += [f"the ceiling of {name}" for name in names if name not in known]
    return weigh("whole", f"{len(planned)} visits of {len(names)} places", [], missing)


def _missing(
    events: Sequence[Event], planned: Sequence[tuple[str, int]], readers: Sequence[int]
) -> Iterator[str]:
    for place, repeat in planned:
        if not any(e.repeat == repeat for e in _of(events, "snapshot", place)):
            yield f"the snapshot in {place}, repeat {repeat}"
        loaded = {e.detail.get("readers") for e in _of(events, "model_load", place)
                  if e.repeat == repeat}  # fmt: skip
        for count in sorted(set(readers) - loaded):
            yield f"the load by {count} in {place}, repeat {repeat}"


def pages_cold(loads: Rows) -> Invariant:
    """Models were read from the device, not from the page cache."""
    bad = [
        f"{row['path']}, {row['readers']} readers: loaded from the page cache"
        for row in loads
        if row["read_source"] == "page cache" or (row["resident_share"] or 0.0) >= COLD_SHARE
    ]
    worst = max((row["resident_share"] or 0.0 for row in loads), default=0.0)
    return weigh("pages-cold", f"at most {worst:.1%} in memory before a load", bad, [])


def below_ceiling(loads: Rows, margin: float) -> Invariant:
    """No load is faster than what fio reads in the same place, past the page cache."""
    bad = [
        f"{row['path']}, {row['readers']} readers: {row['gb_per_s']:.3g} GB/s is not plausible,"
        f" {row['ceiling_share']:.2f} of what fio reads there"
        for row in loads
        if (row["ceiling_share"] or 0.0) > 1 + margin
    ]
    unknown = [
        f"{row['path']}, {row['readers']} readers: its rate, or the ceiling"
        for row in loads
        if row["ceiling_share"] is None
    ]
    top = max((row["ceiling_share"] or 0.0 for row in loads), default=0.0)
    return weigh("below-ceiling", f"at most {top:.0%} of what fio reads", bad, unknown)


def _reach(held: Sequence[Invariant], snapshots: Rows, loads: Rows) -> Verdict:
    reasons = verdict.blockers(held)
    if reasons:
        return Verdict(verdict.INVALID, reasons)
    count = sum(row["repeats"] for row in (*snapshots, *loads))
    return Verdict(verdict.PROVEN, [f"{count} rates, each of the device and none above fio's"])
