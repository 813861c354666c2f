"""The rows of a report's evidence: conditions, tiers, books, drains, times. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.i18n import placeholders
from kvlab.report.numbers import Numbers
from kvlab.report.source import Source, slug

TIERS = ("L0", "L1", "L2", "recompute")
ROUNDS = ("fill", "measure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An invariant, or a caution, in the page's language as far as the catalogue knows it."""

    label: str
    known: bool
    """Whether the label is from the catalogue; otherwise it is the run's own English."""
    detail: str
    state: str


class EvidenceRows:
    """What the run can show for its claim, row by row, in the page's language."""

    def __init__(self, source: Source, numbers: Numbers):
        self.source = source
        self.text = source.text
        self.at = source.at
        self.numbers = numbers

    @property
    def checks(self) -> list[Check]:
        """Every invariant with its state: holds, fails or unknown."""
        states = {True: "holds", False: "fails", None: "unknown"}
        return [
            self._check(
                "invariant", str(c.get("name", "")), c, states.get(c.get("holds"), "unknown")
            )
            for c in self.source.summary.get("invariants") or []
        ]

    @property
    def broken(self) -> list[Check]:
        """The invariants that fail or are unknown."""
        return [check for check in self.checks if check.state != "holds"]

    @property
    def cautions(self) -> list[Check]:
        """What does not fail a run but must be known to its reader."""
        return [
            self._check("caution", str(c.get("id", "")), c, "caution")
            for c in self.source.summary.get("cautions") or []
            if self.source.publishable or "speedup" not in (c.get("values") or {})
        ]

    def _check(self, kind: str, name: str, source: dict[str, Any], state: str) -> Check:
        """The catalogue's sentence if it has one and the run recorded all its values."""
        key = f"{kind}.{slug(name)}"
        values = {k: self._spelled(v) for k, v in (source.get("values") or {}).items()}
        known = self.text.has(key) and placeholders(self.text.sentence(key)) <= set(values)
        return Check(
            label=self.text(key, **values) if known else name,
            known=known,
            detail=str(source.get("detail") or source.get("text") or ""),
            state=state,
        )

    def _spelled(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return ", ".join(str(item) for item in value)
        if isinstance(value, float) and not value.is_integer():
            return self.text.number(value, 2)
        return self.text.number(value) if isinstance(value, (int, float)) else str(value)

    @property
    def reasons(self) -> list[str]:
        """The verdict's reasons as the run recorded them, in English."""
        reasons = self.at("verdict", "reasons") or []
        return [str(r.get("text", r) if isinstance(r, dict) else r) for r in reasons]

    @property
    def served(self) -> list[dict[str, Any]]:
        """Tokens by tier, one row per arm and round, with shares."""
        rows = []
        for arm in self.source.arms:
            for name in ROUNDS:
                tiers = self.at("served_tokens", arm, name)
                if tiers:
                    rows.append(self._served_row(arm, name, tiers))
        return rows

    def _served_row(self, arm: str, name: str, tiers: dict[str, float]) -> dict[str, Any]:
        total = sum(value or 0 for value in tiers.values())
        cells = []
        for tier in TIERS:
            value = tiers.get(tier)
            if value is None:
                cells.append(self.text("word.unknown"))
                continue
            share = self.text.percent(value / total, 1) if total else self.text.percent(0)
            cells.append(self.text("served.cell", tokens=self.text.number(value), share=share))
        return {
            "id": f"s-{arm}-{name}",
            "label": self.text(
                "figure.served.row", arm=self.source.arm(arm), round=self.text(f"name.{name}")
            ),
            "cells": cells,
        }

    @property
    def lmcache_share(self) -> str | None:
        """The share of round 2's prompt tokens that L1 and L2 served in the treated arm."""
        tiers = self.at("served_tokens", self.source.arms[-1], "measure") or {}
        total = sum(value or 0 for value in tiers.values())
        if not total or tiers.get("L1") is None or tiers.get("L2") is None:
            return None
        return self.text.percent((tiers["L1"] + tiers["L2"]) / total, 1)

    @property
    def by_tier(self) -> list[tuple[str, Any, str]]:
        """Round 2 of the treated arm by serving tier: name, median TTFT, number of requests."""
        found = self.at("ttft_ms", self.source.arms[-1], "by_tier") or {}
        rows = []
        for tier, facts in found.items():
            key = f"tier.{tier}"
            label = self.text(key) if self.text.has(key) else str(tier)
            time = self.numbers.headline(
                facts.get("median"), self.text.milliseconds, f"t-{slug(str(tier))}", "by_tier"
            )
            rows.append((label, time, self.text.number(facts.get("n") or 0)))
        return rows

    @property
    def gain(self) -> list[dict[str, Any]]:
        """Round 1 against round 2 inside each arm."""
        return [
            {
                "arm": self.source.arm(arm),
                "fill": self.numbers[f"fill_{x}"],
                "measure": self.numbers[f"median_{x}"],
                "value": self.numbers[f"gain_{x}"],
            }
            for x, arm in zip("ab", self.source.arms, strict=False)
        ]

    @property
    def conservation(self) -> list[list[str]]:
        """The books of every round: client, vLLM local and external, L1, L2, residual."""
        columns = ("client", "vllm_local", "vllm_external", "l1", "l2", "residual")
        rows = []
        for entry in self.at("conservation", "detail") or []:
            arm, name = entry.get("arm") or entry.get("scenario"), entry.get("round")
            label = self.text(
                "conservation.place",
                arm=self.source.arm(arm) if arm in self.source.arms else str(arm),
                repeat=self.text.number(entry.get("repeat") or 0),
                round=self.text(f"name.{name}") if name in ROUNDS else str(name),
            )
            rows.append([label, *(self.source.tokens(entry.get(column)) for column in columns)])
        return rows

    @property
    def requests(self) -> list[list[str]]:
        """Requests per arm: sent, completed, failed, and why."""
        rows = []
        for arm in self.source.arms:
            facts = self.at("requests", arm)
            if facts:
                reasons = facts.get("reasons") or {}
                why = "; ".join(f"{reason}: {count}" for reason, count in reasons.items())
                counts = [self.source.tokens(facts.get(k)) for k in ("sent", "completed", "failed")]
                rows.append([self.source.arm(arm), *counts, why or "–"])
        return rows

    @property
    def drains(self) -> list[list[str]]:
        """What LMCache had written when a round was over: one row per drain."""
        return [self._drain(entry) for entry in self.source.summary.get("drain") or []]

    def _drain(self, entry: dict[str, Any]) -> list[str]:
        name = entry.get("round")
        place = self.text(
            "drain.place",
            repeat=self.source.tokens(entry.get("repeat")),
            round=self.text(f"name.{name}") if name in ROUNDS else str(name),
        )
        size, waited = entry.get("bytes"), entry.get("waited_s")
        # Only a fill has an expectation: what round 2 adds depends on the workload's shape.
        chunks = [entry.get("stored_chunks"), entry.get("expected_chunks")]
        return [
            place,
            *(
                "–" if value is None and name != "fill" else self.source.tokens(value)
                for value in chunks
            ),
            self.source.tokens(entry.get("failed")),
            self.source.tokens(entry.get("files")),
            self.text("word.unknown") if size is None else self.text.byte_size(size),
            self.text("word.unknown") if waited is None else self.text.seconds(waited),
        ]

    @property
    def times(self) -> list[tuple[str, str, str]]:
        """Where the run's time went: part, seconds, share of the total."""
        parts = self.source.summary.get("time_s") or {}
        total = parts.get("total")
        rows = []
        for name in ("server_start", "requests", "pause", "drain", "stop", "other", "total"):
            value = parts.get(name)
            if value is not None:
                share = self.text.percent(value / total, 1) if total else "–"
                rows.append((self.text(f"time.{name}"), self.text.seconds(value), share))
        return rows
