"""What the conditions of a run look at, and the form of their answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlab import stats
from kvlab.evidence import Account, Plan, Readings
from kvlab.records import Event

DEFAULTS = {
    "external_share_min": 0.90,
    "local_share_max": 0.01,
    "baseline_drift_max": 0.05,
    "kv_size_diff_max": 0.02,
    "conservation_share_max": 0.0,
}
"""The thresholds of a profile that does not state them."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """One condition, whether it holds (None: unknown), and the figures behind it."""

    name: str
    holds: bool | None
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the conditions of a two-round run look at."""

    plan: Plan
    accounts: Sequence[Account]
    events: Sequence[Event]
    readings: Readings
    correctness: Mapping[str, Any]
    false_gain: stats.Ratio | None
    """The baseline's round 1 over its round 2."""

    def rounds(self, name: str, *, arm: str | None = None) -> list[Account]:
        """The accounts of one round, of both arms or of one."""
        return [a for a in self.accounts if a.round == name and arm in (None, a.scenario)]

    def object_groups(self, account: Account) -> int | None:
        """How many objects LMCache keeps per chunk, as it stated when it started."""
        for event in self.events:
            if event.kind == "ready" and (event.scenario, event.repeat) == account.key[:2]:
                stated = event.detail.get("object_groups")
                return int(stated) if stated else None
        return None

    def threshold(self, name: str) -> float:
        return float(self.plan.thresholds.get(name, DEFAULTS[name]))


def weigh(name: str, good: str, bad: Sequence[str], unknown: Sequence[str]) -> Invariant:
    """False when anything is bad, else None when anything is unknown, else True."""
    if bad:
        return Invariant(name, False, "; ".join(dict.fromkeys(bad)))
    if unknown:
        return Invariant(name, None, f"unknown: {'; '.join(dict.fromkeys(unknown))}")
    return Invariant(name, True, good)
