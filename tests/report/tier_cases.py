"""Summaries of shared-cache, eviction and soak with every answer that a report must give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Summary = dict[str, Any]

HOLDS = [{"name": "correctness", "holds": True, "detail": "64 restored answers within 0 nat"}]
HEAD = {"schema": 1, "profile": "test", "run": "r", "status": "complete", "invariants": HOLDS}
PROVEN = {"status": "proven", "reasons": ["as recorded"]}
ROUNDS = ("cold:2", "fill:1", "first:2", "together:1", "together:2", "alone:2")

SHARED: Summary = {
    **HEAD,
    "experiment": "shared-cache",
    "verdict": PROVEN,
    "instances": 2,
    "ttft_ms": {name: {"median": 150.0 if "1" in name else 30.0, "n": 16} for name in ROUNDS},
    "hit_share": {name: float(name.startswith(("first", "al", "to"))) for name in ROUNDS},
    "speedup": {
        "first": {"value": 5.0, "ci95": [4.0, 6.0]},
        "alone": {"value": 4.5, "ci95": [3.5, 5.5]},
    },
    "together": {
        "requests": 32,
        "wall_s": 4.0,
        "ttft_median_ms": 79.3,
        "restored_tokens_per_s": 8867.2,
    },
    "lmcache": {name: {"cpu_share": 0.09, "memory_bytes": 550_000_000} for name in ROUNDS},
}


def _setting(ratio: float, hits: float, *, l2: bool) -> Summary:
    return {
        "label": f"w0.3-r{ratio:g}",
        "watermark": 0.3,
        "ratio": ratio,
        "l2": l2,
        "retained_share": 0.3 - 0.2 * ratio,
        "predicted_share": [(1 - ratio) * 0.3, 0.3],
        "ticks": 9,
        "triggered": 2,
        "evicted_chunks": 60,
        "l1_share": hits / 2,
        "l2_share": hits / 2 if l2 else None,
        "hit_share": hits,
        "ttft_ms": {"median": 30.0},
    }


EVICTION: Summary = {
    **HEAD,
    "experiment": "eviction",
    "verdict": PROVEN,
    "settings": [
        _setting(0.2, 1.0, l2=True),
        _setting(0.99, 1.0, l2=True),
        _setting(0.2, 0.4, l2=False),
        _setting(0.99, 0.0, l2=False),
    ],
    "matters": {
        below: {
            "ratios": [0.2, 0.99],
            "hit_share_difference": 0.4,
            "l1_share_difference": 0.2,
            "ttft_mean_ratio": 1.1,
            "hits": below == "without_l2",
        }
        for below in ("with_l2", "without_l2")
    },
}


def _drift(name: str, unit: str, judged: str) -> Summary:
    quantity, _, process = name.partition(":")
    drift: Summary = {
        "name": name,
        "quantity": quantity,
        f"median_{unit}": 30.0,
        "total_share": 0.01,
        "slope_share_per_h": 0.6,
        "ci95_share": [-0.01, 0.03],
        "limit_share": 0.05,
        "judged": judged,
    }
    return {**drift, "process": process} if process else drift


SOAK: Summary = {
    **HEAD,
    "experiment": "soak",
    "verdict": PROVEN,
    "measured_s": 60.0,
    "launches": 1,
    "requests": {"sent": 120, "failed": 0},
    "ttft_ms": {"median": 30.0, "p99": 44.0},
    "hit_share": 1.0,
    "drift": [
        _drift("ttft", "ms", "undecided"),
        _drift("memory:vllm/VLLM::Worker", "bytes", "within"),
        _drift("files:lmcache/lmcache", "files", "beyond"),
        _drift("l2", "bytes", "within"),
    ],
}


def cases(base: Summary) -> Iterator[tuple[str, Summary]]:
    """The A/B's summary with the three experiments beside it, by name."""
    every = {"shared-cache": SHARED, "eviction": EVICTION, "soak": SOAK}
    yield "tiers", {**base, "others": copy.deepcopy(every)}
    turned = copy.deepcopy(EVICTION)
    for found in turned["matters"].values():
        found["hits"] = not found["hits"]
    yield "eviction turned", {**base, "others": {"eviction": turned}}
    broken = copy.deepcopy(every)
    for one in broken.values():
        one["verdict"] = {"status": "invalid", "reasons": ["external-share: 0.0%"]}
        one["invariants"] = [{"name": "external-share", "holds": False, "detail": "0.0%"}]
    yield "tiers invalid", {**base, "others": broken}
