"""Counters in Prometheus text, under the names and labels of the real servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from tests.fake_stack.settings import Role, Settings

Labels = tuple[tuple[str, str], ...]


class Series:
    """One server's counters and gauges, as its /metrics shows them."""

    def __init__(self, settings: Settings, role: Role):
        self._missing: list[str] = []
        if missing := settings.fault(role, "counters_missing"):
            self._missing = list(missing.value or ["hit"])
        reset = settings.fault(role, "counters_reset")
        self._reset_at: int | None = (reset.value or 2) if reset else None
        self._scrapes = 0
        self._values: dict[str, dict[Labels, float]] = {}
        self._floor: dict[tuple[str, Labels], float] = {}
        self.set("process_start_time_seconds", time.time())

    def add(self, name: str, amount: float, **labels: Any) -> None:
        """Count; a series exists from its first count on, even if that is 0."""
        series = self._values.setdefault(name, {})
        key = _key(labels)
        series[key] = series.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: Any) -> None:
        self._values.setdefault(name, {})[_key(labels)] = float(value)

    def observe(self, name: str, value: float, **labels: Any) -> None:
        """Count one value into a histogram."""
        for edge in (0.001, 0.01, 0.1, 1.0):
            self.add(f"{name}_bucket", float(value <= edge), **labels, le=str(edge))
        self.add(f"{name}_bucket", 1, **labels, le="+Inf")
        self.add(f"{name}_count", 1, **labels)
        self.add(f"{name}_sum", value, **labels)

    def value(self, name: str) -> float:
        """The sum of a series over its labels, as the server knows it."""
        return sum(self._values.get(name, {}).values())

    def text(self) -> str:
        """One scrape; it counts towards the fault that resets the counters."""
        self._scrapes += 1
        if self._scrapes == self._reset_at:
            self._restart()
        return "".join(self.lines())

    def _restart(self) -> None:
        self._floor = {
            (name, key): value
            for name, series in self._values.items()
            if name.endswith(("_total", "_count", "_sum", "_bucket"))
            for key, value in series.items()
        }
        self.set("process_start_time_seconds", time.time())

    def lines(self) -> Iterator[str]:
        described = None
        for name, series in self._values.items():
            if any(word in name for word in self._missing):
                continue
            family, kind = _family(name)
            if family != described:
                yield f"# HELP {family} Fake {family}.\n# TYPE {family} {kind}\n"
                described = family
            for key, value in series.items():
                shown = value - self._floor.get((name, key), 0.0)
                labels = ",".join(f'{label}="{text}"' for label, text in key)
                yield f"{name}{{{labels}}} {shown}\n" if labels else f"{name} {shown}\n"


def _family(name: str) -> tuple[str, str]:
    """The name and the type under which a series is described."""
    for suffix in ("_bucket", "_count", "_sum"):
        if name.endswith(suffix):
            return name.removesuffix(suffix), "histogram"
    return name, "counter" if name.endswith("_total") else "gauge"


def _key(labels: dict[str, Any]) -> Labels:
    return tuple(sorted((name, str(value)) for name, value in labels.items()))
