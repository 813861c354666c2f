"""A summary of a storage run, in a real place and in an emulated one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.report.read_cases import READS

Summary = dict[str, Any]

STORAGE: Summary = {
    "schema": 1,
    "experiment": "storage",
    "profile": "test",
    "run": "r",
    "status": "complete",
    "verdict": {"status": "proven", "reasons": ["as recorded"]},
    "invariants": [{"name": "whole", "holds": True, "detail": "3 visits of 1 places"}],
    "paths": READS["paths"],
    "snapshots": [
        {
            "path": "local",
            "writers": 8,
            "bytes": 512 << 20,
            "gb_per_s": 1.2,
            "range_gb_per_s": [1.1, 1.3],
            "seconds": 0.45,
            "repeats": 3,
        },
        {"path": "slow-mount", "repeats": 0},
    ],
    "loads": [
        {
            "path": "local",
            "readers": readers,
            "bytes": readers << 26,
            "gb_per_s": 1.0,
            "range_gb_per_s": [0.9, 1.1],
            "seconds": 0.5,
            "ceiling_share": 0.5,
            "read_source": "disk",
            "repeats": 3,
        }
        for readers in (1, 8)
    ],
}


def cases(base: Summary) -> Iterator[tuple[str, Summary]]:
    """The A/B's summary with the experiment beside it."""
    yield "storage", {**base, "others": {"storage": copy.deepcopy(STORAGE)}}
