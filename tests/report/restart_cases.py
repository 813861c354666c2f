"""Summaries of restart with every answer that a report must be able to give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Summary = dict[str, Any]

VARIANT = {
    "cold_s": 3.21,
    "restarted_s": 0.96,
    "workload_ratio": 3.34,
    "ttft_ms": {"cold": {"median": 151.4}, "restarted": {"median": 36.8}},
    "speedup": {"value": 4.12, "ci95": [3.75, 4.82]},
    "ready_s": 28.7,
    "first_hit_s": 35.3,
    "records": 188,
    "surviving_share": 1.0,
    "odd_files": 0,
    "l2_share": 1.0,
    "loaded_bytes": 13_762_560.0,
    "device_bytes": 13_762_560,
    "resident_share": 0.0,
    "device": "vda",
    "read_source": "disk",
}
RESTART: Summary = {
    "schema": 1,
    "experiment": "restart",
    "profile": "embedded",
    "run": "20261130T120000Z-restart-embedded-0123abcd",
    "status": "complete",
    "verdict": {"status": "proven", "reasons": ["speedup 4.12 is above 1"]},
    "workload": {"contexts": 16, "context_tokens": 1121, "repeats": 1},
    "ttft_ms": {"cold": {"median": 151.4}, "restarted": {"median": 36.8}},
    "workload_s": {"cold": 3.21, "restarted": 0.96},
    "speedup": {"value": 4.12, "ci95": [3.75, 4.82]},
    "variants": {"sigterm": VARIANT, "sigkill": VARIANT},
    "read_source": "disk",
    "controls": [
        {"name": "other-folder", "contexts": 16, "hit_tokens": 0},
        {"name": "other-chunk", "contexts": 4, "hit_tokens": 0, "refused": "chunk_tokens differs"},
        {"name": "other-model", "contexts": 4, "hit_tokens": 0, "refused": "model differs"},
    ],
    "rule": [
        {
            "batched_tokens": tokens,
            "block_tokens": 224,
            "prompt_tokens": 896,
            "restorable_tokens": 672,
            "cached_tokens": cached,
            "cached_share": cached / 672,
            "contexts": 4,
        }
        for tokens, cached in ((447, 672), (448, 448))
    ],
    "invariants": [{"name": "restored-from-l2", "holds": True, "detail": "100.0%"}],
}


def cases(base: Summary) -> Iterator[tuple[str, Summary]]:
    """The A/B's summary with a restart beside it: read from everywhere, and with nothing to say."""
    for source in ("disk", "page cache", "unknown"):
        found = copy.deepcopy(RESTART)
        found["read_source"] = source
        for variant in found["variants"].values():
            variant["read_source"] = source
        yield f"restart, {source}", _beside(base, found)
    dense = copy.deepcopy(RESTART)
    dense["rule"] = []
    yield "restart, dense", _beside(base, dense)
    broken = copy.deepcopy(RESTART)
    broken["verdict"]["status"] = "invalid"
    broken["invariants"][0]["holds"] = None
    yield "restart, invalid", _beside(base, broken)
    bare = {key: RESTART[key] for key in ("experiment", "run", "verdict", "invariants")}
    yield "restart, bare", _beside(base, bare)


def _beside(base: Summary, found: Summary) -> Summary:
    return {**copy.deepcopy(base), "others": {"restart": copy.deepcopy(found)}}
