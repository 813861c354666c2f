"""Summaries to render: synthetic runs of every verdict, and summaries with unusual contents."""

from __future__ import annotations

import copy
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlab import cautions, i18n, report
from tests.builders import make_run
from tests.report import (
    acceptance_cases,
    groups_cases,
    predicted_cases,
    read_cases,
    restart_cases,
    storage_cases,
    tier_cases,
)

Summary = dict[str, Any]

MACHINE = {
    "cpu": {"model": "Test CPU", "cores": 2, "threads": 4},
    "memory_gib": 23.5,
    "gpus": [{"name": "Test GPU", "memory_mib": 1, "driver": "1"}],
    "disk": {"filesystem": "ext4", "device": "/dev/x", "model": "Test NVMe"},
    "system": "Linux",
    "machine": "x86_64",
    "kernel": "6.1.0",
    "python": "3.11.7",
}
MANIFEST = {
    "host": MACHINE,
    "kvlab_version": "0.1.0",
    "commands": {"baseline": ["server --port 1"], "lmcache": ["cache", "server --port 1"]},
    "profile_sha256": "ab" * 32,
    "images": {"org/engine:1": {"id": f"sha256:{'a' * 64}", "digest": None}},
}
RUNS: dict[str, dict[str, Any]] = {
    "proven": {},
    "not shown": {"restored_ms": 700.0},
    "refuted": {"restored_ms": 1200.0},
    "wrong": {"restored_nat": 0.5},
    "unknown": {"fault": "no counters"},
    "failed": {"fault": "failed request"},
    "control": {"control": True, "restored_ms": 700.0},
    "prefix_suffix": {
        "shape": "prefix_suffix",
        "context_tokens": 2000,
        "overrides": {"engine.max_model_len": 4096},
    },
}
CAUTIONS = {
    "few-repeats": {"repeats": 2},
    "baseline-noisy": {"ratio": 1.061},
    "bound-exceeded": {"speedup": 9.5, "bound": 5.0},
    "tie": {"flipped": 1, "pairs": 18},
    "sender-delay": {"p90_ms": 3.2},
    "slow-send": {"requests": 9, "total": 72},
    "first-byte-differs": {"requests": 2},
    "first-event-differs": {"requests": 2},
    "buffered": {"requests": 2},
    "odd-files": {"files": 1},
    "chunks-never-stored": {"chunks": 6},
    "l1-allocation-failures": {"chunks": 6.0},
    "l1-read-failures": {"chunks": 6.0},
    "l2-load-failures": {"chunks": 6.0},
    "l2-source-unknown": {"tokens": 1120.0},
    "arms-differ": {"differences": "seed 0 vs 1"},
    "fixed-order": {"arm": "baseline"},
    "proxy-variables": {"names": ["HTTP_PROXY", "NO_PROXY"]},
    "attached": {},
    "clock-dropped": {"name": "CPU", "low_mhz": 900.0, "high_mhz": 2600.0, "place": "lmcache"},
    "gpu-slowed": {"reasons": ["power cap"]},
    "l2-not-seen": {},
    "events-dropped": {"events": 4.0},
    "metrics-lines-skipped": {"lines": 4.0},
    **{
        name.replace("_", "-"): {"count": 2, "line": "falling back to pickle"}
        for name in cautions.LOGGED
    },
    "unknown-versions": {"names": ["vLLM 0.99"]},
}
ALL = [(genre, lang) for genre in ("technical", "article") for lang in i18n.LANGUAGES]


@lru_cache
def _run(case: str) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        return report.load(make_run(Path(folder), manifest=MANIFEST, **RUNS[case]))


def summary(case: str = "proven") -> Summary:
    """A summary of its own for each caller."""
    return copy.deepcopy(_run(case))


@lru_cache
def html(case: str, genre: str, lang: str) -> str:
    """The page of one of ``every``."""
    return report.render(every()[case], genre=genre, lang=lang)


def others() -> dict[str, Summary]:
    """A healthy summary of each experiment beside the A/B, by its name."""
    return {
        "restart": restart_cases.RESTART,
        "object-groups": groups_cases.groups(),
        "acceptance": acceptance_cases.acceptance(),
        "shared-cache": tier_cases.SHARED,
        "eviction": tier_cases.EVICTION,
        "soak": tier_cases.SOAK,
        "parallel-read": read_cases.READS,
    }


def every() -> dict[str, Summary]:
    """Every kind of summary that a report must be able to show, by name."""
    found = {case: summary(case) for case in RUNS}
    found["partial"] = {**summary(), "status": "partial"}
    found["unchecked"] = {**summary(), "invariants": []}
    found["bare"] = {"run": "unnamed", "profile": "mine", "experiment": "two-round"}
    found["cautions"] = {
        **summary(),
        "cautions": [{"id": i, "text": "as recorded", "values": v} for i, v in CAUTIONS.items()],
    }
    found["no baseline"] = {
        **summary(),
        "arms": ["lmcache"],
        "verdict": {"status": "not shown", "reasons": ["no vLLM without LMCache was measured"]},
        "speedup": {},
        "revisit": {"value": 6.5, "ci95": [6.1, 6.9]},
    }
    found["foreign caution"] = {**summary(), "cautions": [{"id": "new", "text": "said so"}]}
    found["foreign invariant"] = summary()
    found["foreign invariant"]["invariants"].append({"name": "new", "holds": None, "detail": "?"})
    found["ties"] = summary()
    found["ties"]["correctness"]["verdict"] = "pass with ties"
    found["stock"] = summary()
    found["stock"]["engine"]["connector"] = "LMCacheMPConnector"
    found["stock"]["about"]["profile"]["model"]["source"] = "hub"
    found["stock"]["about"]["profile"]["engine"]["flags"]["kv-cache-dtype"] = "fp8"
    found["stock"]["about"]["profile"]["cache"]["separate_object_groups"] = False
    found["tiers unknown"] = summary()
    found["tiers unknown"]["served_tokens"] = {}
    found["half of the tiers"] = summary()
    for rounds in found["half of the tiers"]["served_tokens"].values():
        for tiers in rounds.values():
            tiers.pop("L2", None)
    found["unlabelled"] = summary()
    found["unlabelled"]["ttft_ms"]["lmcache"]["by_tier"] = {"unknown": {"median": 1.0, "n": 1}}
    found["recomputed"] = summary()
    found["recomputed"]["ttft_ms"]["lmcache"]["by_tier"] = {"recompute": {"median": 1.0, "n": 1}}
    found["low bound"] = summary()
    found["low bound"]["workload"]["speedup_bound"] = 7.2
    found |= dict(groups_cases.cases(summary()))
    found |= dict(acceptance_cases.cases(summary()))
    found |= dict(tier_cases.cases(summary()))
    found |= dict(restart_cases.cases(summary()))
    found |= dict(read_cases.cases(summary()))
    found |= dict(predicted_cases.cases(summary()))
    found |= dict(storage_cases.cases(summary()))
    return found
