"""Figures that others published, kept apart from every measurement: shown as reference only."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any


@lru_cache(maxsize=1)
def dgx_spark() -> dict[str, Any]:
    """The round-2 figures of the DGX Spark report (Openzeka, October 2026), as printed there."""
    return dict(_published()["dgx_spark"])


@lru_cache(maxsize=1)
def fx100() -> dict[str, Any]:
    """Read rates of the FX100 article (Mingxin, July 2026), as printed there."""
    return dict(_published()["fx100"])


@lru_cache(maxsize=1)
def _published() -> dict[str, Any]:
    source = (resources.files("kvlab.report") / "published.json").read_text(encoding="utf-8")
    return dict(json.loads(source))
