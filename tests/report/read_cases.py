"""Summaries of parallel-read with every answer that a report must give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Summary = dict[str, Any]
SLOTS = (8, 16)
HOLDS = [{"name": "correctness", "holds": True, "detail": "240 restored answers within 0.01 nat"}]


def _row(path: str | None, adapter: str | None, slots: int, ms: float, source: str) -> Summary:
    row: Summary = {
        "label": f"{path}-{adapter}" if path else "recompute",
        "concurrency": slots,
        "ttft_ms": {"median": ms, "p95": 1.2 * ms, "p99": 1.3 * ms, "n": 24},
        "end_to_end_ms": {"median": 1.5 * ms, "p99": 2 * ms},
        "per_output_token_ms": {"median": 12.5, "p99": 20.0},
        "output_tokens_per_s": 8000 / ms,
        "goodput_requests_per_s": 3.0,
        "goodput_share": 0.5,
    }
    if path:
        rate = 60.0 / ms
        row |= {
            "path": path,
            "adapter": adapter,
            "l2_gb_per_s": rate,
            "ceiling_share": rate / 0.5,
            "plausible": True,
            "l2_share": 1.0,
            "compute_share": 0.1,
            "read_source": source,
        }
    return row


def _compared(kind: str, label: str, over: str, slots: int, value: float) -> Summary:
    path, _, adapter = label.rpartition("-")
    return {
        "kind": kind,
        "label": label,
        "over": over,
        "path": path,
        "adapter": adapter,
        "concurrency": slots,
        "speedup": {"value": value, "ci95": [0.9 * value, 1.1 * value]},
        "throughput_ratio": 2.0,
    }


def _ceilings(best: float) -> list[Summary]:
    return [
        {"readers": readers, "block_bytes": 4 << 20, "direct": True, "gb_per_s": rate}
        for readers, rate in ((1, best / 10), (32, best))
    ]


READS: Summary = {
    "schema": 1,
    "experiment": "parallel-read",
    "profile": "test",
    "run": "r",
    "status": "complete",
    "verdict": {"status": "proven", "reasons": ["as recorded"]},
    "invariants": HOLDS,
    "workload": {
        "contexts": 24,
        "context_tokens": 1030,
        "output_tokens": 8,
        "concurrency": list(SLOTS),
        "ttft_limit_s": 1.0,
    },
    "reference": "fs",
    "treated": "parallel_fs",
    "paths": [
        {
            "name": "slow-mount",
            "emulated": "10 ms per read",
            "mount_of": "local",
            "latency_ms": 10.0,
            "ceilings": _ceilings(0.5),
            "ceiling_gb_per_s": 0.5,
        },
        {"name": "local", "ceilings": _ceilings(2.0), "ceiling_gb_per_s": 2.0},
    ],
    "variants": [
        *(_row("slow-mount", "fs", slots, 250.0 * slots, "unknown") for slots in SLOTS),
        *(_row("slow-mount", "parallel_fs", slots, 60.0 * slots, "disk") for slots in SLOTS),
        *(_row("local", "parallel_fs", slots, 50.0 * slots, "page cache") for slots in SLOTS),
        *(_row(None, None, slots, 700.0 * slots, "") for slots in SLOTS),
    ],
    "comparisons": [
        *(
            _compared("adapter", "slow-mount-parallel_fs", "slow-mount-fs", slots, 4.1)
            for slots in SLOTS
        ),
        _compared("recompute", "slow-mount-fs", "recompute", 8, 2.8),
    ],
    "cautions": [
        {"id": "few-repeats", "text": "as recorded", "values": {}},
        {"id": "emulated", "text": "as recorded", "values": {}},
        {"id": "read-source-unknown", "text": "as recorded", "values": {}},
    ],
}


def cases(base: Summary) -> Iterator[tuple[str, Summary]]:
    """The A/B's summary with the experiment beside it, by name."""
    yield "reads", {**base, "others": {"parallel-read": copy.deepcopy(READS)}}
    broken = copy.deepcopy(READS)
    broken["verdict"] = {"status": "invalid", "reasons": ["from-l2: 0.0%"]}
    broken["invariants"] = [{"name": "from-l2", "holds": False, "detail": "0.0%"}]
    yield "reads invalid", {**base, "others": {"parallel-read": broken}}
