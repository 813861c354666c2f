"""The places of a run and what fio read there: the ceiling of every other rate. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.records import Event


def places(manifest: Mapping[str, Any], events: Sequence[Event]) -> list[dict[str, Any]]:
    """The places that fio read, in the profile's order, with the rates by number of readers.

    Of a place that was read again, as a resumed run does, the last reading counts.
    """
    read: dict[str, dict[int, Mapping[str, Any]]] = {}
    for event in events:
        if event.kind == "ceiling":
            read.setdefault(str(event.detail["path"]), {})[event.detail["readers"]] = event.detail
    planned = manifest["profile"]["storage"]["paths"]
    return [_place(one, read[one["name"]]) for one in planned if one["name"] in read]


def _place(planned: Mapping[str, Any], read: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    rates = [
        {
            "readers": readers,
            "block_bytes": read[readers]["block_bytes"],
            "direct": read[readers]["direct"],
            "gb_per_s": read[readers]["bytes"] / read[readers]["seconds"] / 1e9,
        }
        for readers in sorted(read)
    ]
    last = read[max(read)]
    return {
        "name": planned["name"],
        "emulated": last.get("emulated"),
        **_delays(planned),
        "device": last.get("device"),
        "ceilings": rates,
        "ceiling_gb_per_s": max(one["gb_per_s"] for one in rates),
    }


def _delays(planned: Mapping[str, Any]) -> dict[str, Any]:
    """What an emulated mount was set to; empty for a place that is what it is."""
    if planned.get("mount_of") is None:
        return {}
    return {name: planned.get(name) for name in ("mount_of", "latency_ms", "bandwidth_mb_s")}
