"""What a page shows of a summary: every value already written, every row already labelled. Pure.

Templates only place things. Whether a headline may be shown at all is decided here, once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from kvlab.i18n import Text
from kvlab.report import published
from kvlab.report.load import day_of
from kvlab.report.numbers import Missing, Numbers, Shown

Summary = dict[str, Any]
TIERS = ("L0", "L1", "L2", "recompute")
ROUNDS = ("fill", "measure")
STATUSES = ("proven", "not shown", "refuted", "invalid")
EMBEDDED = ("embedded", "embedded-665", "smoke")
COMPLETE = (None, "complete")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One row of the results table: ours in three cells, the published ones in three more."""

    id: str
    label: str
    ours: tuple[Any, Any, Any]
    reference: tuple[str | None, str | None, str | None]
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An invariant, or a caution, in the page's language as far as the catalogue knows it."""

    label: str
    known: bool
    """Whether the label is from the catalogue; otherwise it is the run's own English."""
    detail: str
    state: str


def get(tree: Any, *path: Any) -> Any:
    """The value at a path of keys, or None where the run has none."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, (list, tuple)) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def publishable(summary: Summary) -> bool:
    """Whether a headline number may be shown: every invariant is known and holds."""
    checks = summary.get("invariants") or []
    return (
        bool(checks)
        and all(check.get("holds") is True for check in checks)
        and status(summary) != "invalid"
        and get(summary, "about", "status") in COMPLETE
        and get(summary, "speedup", "value") is not None
    )


def status(summary: Summary) -> str:
    """The verdict's status; what is no verdict counts as invalid."""
    found = get(summary, "verdict", "status")
    return found if found in STATUSES else "invalid"


def without_headline(summary: Summary) -> Summary:
    """The summary as the page may embed it: an unproven headline is not in there either."""
    if publishable(summary):
        return summary
    return {key: value for key, value in summary.items() if key not in ("speedup", "ttft_ms")}


@dataclass
class View:
    """Everything that templates read; made by ``build``."""

    summary: Summary
    text: Text
    genre: str
    numbers: Numbers = field(init=False)
    n: dict[str, Shown] = field(init=False)
    results: list[ResultRow] = field(init=False)

    def __post_init__(self) -> None:
        self.arms = [str(arm) for arm in self.summary.get("arms") or ("baseline", "lmcache")]
        self.control = bool(self.summary.get("control"))
        self.status = status(self.summary)
        self.publishable = publishable(self.summary)
        if not self.publishable:
            self.status = "invalid"
        self.run = str(self.summary.get("run", ""))
        self.profile = str(self.summary.get("profile", ""))
        self.numbers = Numbers(self.text, self.run, self._count())
        self.n = self._numbers()
        self.results = self._results()

    def at(self, *path: Any) -> Any:
        """The summary's value at a path of keys, or None."""
        return get(self.summary, *path)

    def _count(self) -> str:
        repeats, contexts = self.at("workload", "repeats"), self.at("workload", "contexts")
        if repeats is None or contexts is None:
            return self.text("word.not_recorded")
        return self.text(
            "number.count",
            repeats=self.text.number(repeats),
            contexts=self.text.number(contexts),
            total=self.text.number(repeats * contexts),
        )

    # Numbers by name

    def _numbers(self) -> dict[str, Shown]:
        made: dict[str, Shown] = {}
        value = self.at("speedup", "value")
        made["speedup"] = self._headline(value, self.text.ratio, "r-median", "speedup")
        made["ci"] = self._headline(
            self.at("speedup", "ci95"), self._ratio_span, "r-interval", "interval"
        )
        lower = self.at("speedup", "percent_lower")
        made["lower"] = self._headline(
            None if lower is None else abs(lower) / 100, self.text.percent, "r-lower", "lower"
        )
        for letter, arm in zip("ab", self.arms, strict=False):
            made |= self._arm_numbers(letter, arm)
        bound = self.at("workload", "speedup_bound")
        made["bound"] = self.numbers.show(self._as(self.text.ratio, bound), "e-bound", "bound")
        share = self.at("workload", "ceiling_share")
        made["ceiling"] = self.numbers.show(
            self._as(lambda v: self.text.percent(v, 1), share), "e-bound", "ceiling"
        )
        residual = self.at("conservation", "residual_tokens")
        made["residual"] = self.numbers.show(
            self._as(self.text.number, residual), "e-residual", "residual"
        )
        for name, path in (
            ("floor", ("floor_nat",)),
            ("restored", ("restored_nat", "median")),
            ("restored_max", ("restored_nat", "max")),
            ("tolerance", ("tolerance_nat",)),
        ):
            found = self.at("correctness", *path)
            made[name] = self.numbers.show(
                self._as(self._nats, found), f"c-{name.split('_')[0]}", name.split("_")[0]
            )
        return made

    def _arm_numbers(self, letter: str, arm: str) -> dict[str, Shown]:
        ms, show = self.text.milliseconds, self.numbers.show
        times = self.at("ttft_ms", arm) or {}
        gain = self.at("false_gain", arm, "value")
        return {
            f"median_{letter}": self._headline(times.get("median"), ms, "r-median", "median"),
            f"first_{letter}": self._headline(times.get("first"), ms, "r-first", "first"),
            f"range_{letter}": self._headline(
                times.get("range"), self._ms_span, "r-range", "range"
            ),
            f"p90_{letter}": self._headline(times.get("p90"), ms, "r-p90", "percentile"),
            f"p99_{letter}": self._headline(times.get("p99"), ms, "r-p99", "percentile"),
            f"fill_{letter}": self._headline(times.get("fill_median"), ms, "e-gain", "median"),
            f"gain_{letter}": show(self._as(self.text.ratio, gain), "e-gain", "false_gain"),
        }

    def _headline(
        self, value: Any, write: Callable[[Any], str], row: str, formula: str
    ) -> Shown:
        """A number that is shown only when the evidence allows it."""
        if not self.publishable:
            return self.numbers.withheld()
        return self.numbers.show(self._as(write, value), row, formula)

    @staticmethod
    def _as(write: Callable[[Any], str], value: Any) -> str | None:
        return None if value is None else write(value)

    def _ratio_span(self, pair: Any) -> str:
        return self.text.span(self.text.ratio(pair[0]), self.text.ratio(pair[1]))

    def _ms_span(self, pair: Any) -> str:
        low, high = (self.text.number(value, 1) for value in pair)
        return f"{self.text.span(low, high)} ms"

    def _nats(self, value: float) -> str:
        return f"{self.text.number(value, 4)} nat"

    def plain(self, *path: Any) -> str:
        """A number of the setup, written without a link; "not recorded" when the run has none."""
        value = self.at(*path)
        if not isinstance(value, (int, float)):
            return self.text("word.not_recorded")
        return self.text.plain_number(value)

    # The results table

    def _results(self) -> list[ResultRow]:
        n, repeats = self.n, self.at("workload", "repeats")
        ref = published.dgx_spark()
        count = self.text.number(repeats) if repeats is not None else ""
        first = self._first_ratio()
        none = (None, None, None)
        rows: list[tuple[str, str, tuple[Any, Any, Any], tuple[Any, Any, Any], str]] = [
            (
                "median",
                self.text("results.row.median", repeats=count),
                (n["median_a"], n["median_b"], n["speedup"]),
                (*self._reference("median"), self.text.ratio(ref["speedup"])),
                "speedup",
            ),
            ("interval", "", (None, None, n["ci"]), none, "interval"),
            (
                "lower",
                "",
                (None, None, self.change),
                (None, None, self._lower(ref["lower_share"], faster=True)),
                "lower",
            ),
            (
                "first",
                "",
                (n["first_a"], n["first_b"], first),
                (*self._reference("first"), self.text.ratio(ref["first_speedup"])),
                "first",
            ),
            (
                "range",
                self.text("results.row.range", repeats=count),
                (n["range_a"], n["range_b"], None),
                (*self._reference("range"), None),
                "range",
            ),
            ("p90", "", (n["p90_a"], n["p90_b"], None), none, "percentile"),
            ("p99", "", (n["p99_a"], n["p99_b"], None), none, "percentile"),
        ]
        return [
            ResultRow(
                id=f"r-{name}",
                label=label or self.text(f"results.row.{name}"),
                ours=ours,
                reference=none if self.control else reference,
                formula=self.text(f"formula.{formula}"),
            )
            for name, label, ours, reference, formula in rows
        ]

    def _reference(self, name: str) -> tuple[str, str]:
        arms = published.dgx_spark()["ttft_ms"]
        if name == "range":
            return tuple(self._whole_span(arms[a][name]) for a in ("baseline", "lmcache"))  # type: ignore[return-value]
        return tuple(self.text.milliseconds(arms[a][name]) for a in ("baseline", "lmcache"))  # type: ignore[return-value]

    def _whole_span(self, pair: list[float]) -> str:
        return f"{self.text.span(*(self.text.number(value) for value in pair))} ms"

    def _first_ratio(self) -> Shown:
        a, b = (self.at("ttft_ms", arm, "first") for arm in self.arms)
        ratio = a / b if a and b else None
        return self._headline(ratio, self.text.ratio, "r-first", "first")

    @property
    def faster(self) -> bool:
        """Whether the treated arm's median is below the other's."""
        return (self.at("speedup", "value") or 1.0) >= 1.0

    @property
    def change(self) -> Any:
        """How far the treated arm's median lies below or above the other's, in words."""
        lower = self.n["lower"]
        if isinstance(lower, Missing):
            return lower
        key = "results.lower" if self.faster else "results.higher"
        return self.text.html(key, share=lower)

    def _lower(self, share: float, *, faster: bool) -> str:
        return self.text(
            "results.lower" if faster else "results.higher", share=self.text.percent(share)
        )

    # Names

    def arm(self, arm: str) -> str:
        """An arm's name with its letter."""
        return self.text(f"arm.{'control' if arm == 'control' else 'ab'[self.arms.index(arm)]}")

    @property
    def headline(self) -> str:
        """The page's title; it holds numbers only when they may be published."""
        case = "control" if self.control else self.case
        keys = {
            "speedup": str(self.n["speedup"]),
            "before": str(self.n.get("median_a", "")),
            "after": str(self.n.get("median_b", "")),
            "profile": self.profile,
        }
        if self.control and not self.publishable:
            case = "invalid"
        return self.text(f"{self.genre}.headline.{case}", **keys)

    @property
    def case(self) -> str:
        """The status as a key of the catalogue."""
        return self.status.replace(" ", "_")

    @property
    def month(self) -> str:
        day = day_of(self.run)
        return self.text.month(day) if day else self.text("word.not_recorded")

    @property
    def day(self) -> str:
        day = day_of(self.run)
        return self.text.day(day) if day else self.text("word.not_recorded")

    @property
    def built_model(self) -> bool:
        """Whether a small model with random weights was served, as in the embedded profile."""
        source = self.at("about", "profile", "model", "source")
        return source == "built" if source is not None else self.profile in EMBEDDED

    def tag(self, row: str) -> Markup:
        """The article's source mark for a table row."""
        return self.numbers.tag(row)

    @property
    def unfinished(self) -> bool:
        """Whether the run did not reach its end."""
        return self.at("about", "status") not in COMPLETE

    @property
    def shape(self) -> str:
        found = self.at("workload", "shape")
        return found if found in ("identical", "prefix_suffix") else "unknown"

    @property
    def pause(self) -> str:
        pause = self.at("workload", "pause_s")
        return self.text("word.not_recorded") if pause is None else self.text.seconds(pause)

    @property
    def correctness_case(self) -> str:
        """The correctness verdict as a key of the catalogue."""
        found = str(self.at("correctness", "verdict") or "unknown")
        case = slug(found)
        return case if case in ("pass", "pass_with_ties", "fail") else "unknown"

    @property
    def correctness_word(self) -> str:
        return self.text(f"correctness.word.{self.correctness_case}")

    # Evidence

    @property
    def checks(self) -> list[Check]:
        """Every invariant with its state: holds, fails or unknown."""
        states = {True: "holds", False: "fails", None: "unknown"}
        return [
            self._check("invariant", str(c.get("name", "")), c, states.get(c.get("holds"), "unknown"))
            for c in self.summary.get("invariants") or []
        ]

    @property
    def broken(self) -> list[Check]:
        """The invariants that fail or are unknown."""
        return [check for check in self.checks if check.state != "holds"]

    @property
    def cautions(self) -> list[Check]:
        """What does not fail a run but must be known to its reader."""
        return [
            self._check("caution", str(c.get("id", "")), {"detail": c.get("text", "")}, "caution")
            for c in self.summary.get("cautions") or []
        ]

    def _check(self, kind: str, name: str, source: dict[str, Any], state: str) -> Check:
        key = f"{kind}.{slug(name)}"
        known = self.text.has(key)
        return Check(
            label=self.text(key) if known else name,
            known=known,
            detail=str(source.get("detail") or ""),
            state=state,
        )

    @property
    def reasons(self) -> list[str]:
        """The verdict's reasons as the run recorded them, in English."""
        reasons = self.at("verdict", "reasons") or []
        return [str(r.get("text", r) if isinstance(r, dict) else r) for r in reasons]

    @property
    def served(self) -> list[dict[str, Any]]:
        """Tokens by tier, one row per arm and round, with shares."""
        rows = []
        for arm in self.arms:
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
            "label": self.text("figure.served.row", arm=self.arm(arm), round=self.text(f"name.{name}")),
            "cells": cells,
        }

    @property
    def lmcache_share(self) -> str | None:
        """The share of round 2's prompt tokens that L1 and L2 served in the treated arm."""
        tiers = self.at("served_tokens", self.arms[-1], "measure") or {}
        total = sum(value or 0 for value in tiers.values())
        if not total or tiers.get("L1") is None or tiers.get("L2") is None:
            return None
        return self.text.percent((tiers["L1"] + tiers["L2"]) / total, 1)

    @property
    def by_tier(self) -> list[tuple[str, Any, str]]:
        """Round 2 of the treated arm by serving tier: name, median TTFT, number of requests."""
        found = self.at("ttft_ms", self.arms[-1], "by_tier") or {}
        rows = []
        for tier, facts in found.items():
            key = f"tier.{tier}"
            label = self.text(key) if self.text.has(key) else str(tier)
            time = self._headline(
                facts.get("median"), self.text.milliseconds, f"t-{slug(str(tier))}", "by_tier"
            )
            rows.append((label, time, self.text.number(facts.get("n") or 0)))
        return rows

    @property
    def gain(self) -> list[dict[str, Any]]:
        """Round 1 against round 2 inside each arm."""
        return [
            {"arm": self.arm(arm), "fill": self.n[f"fill_{x}"], "measure": self.n[f"median_{x}"],
             "value": self.n[f"gain_{x}"]}
            for x, arm in zip("ab", self.arms, strict=False)
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
                arm=self.arm(arm) if arm in self.arms else str(arm),
                repeat=self.text.number(entry.get("repeat") or 0),
                round=self.text(f"name.{name}") if name in ROUNDS else str(name),
            )
            rows.append([label, *(self._tokens(entry.get(column)) for column in columns)])
        return rows

    def _tokens(self, value: Any) -> str:
        return self.text("word.unknown") if value is None else self.text.number(value)

    @property
    def requests(self) -> list[list[str]]:
        """Requests per arm: sent, completed, failed, and why."""
        rows = []
        for arm in self.arms:
            facts = self.at("requests", arm)
            if facts:
                reasons = facts.get("reasons") or {}
                why = "; ".join(f"{reason}: {count}" for reason, count in reasons.items())
                counts = [self._tokens(facts.get(k)) for k in ("sent", "completed", "failed")]
                rows.append([self.arm(arm), *counts, why or "–"])
        return rows

    @property
    def drains(self) -> list[list[str]]:
        """What LMCache had written when a round was over: one row per drain."""
        return [self._drain(entry) for entry in self.summary.get("drain") or []]

    def _drain(self, entry: dict[str, Any]) -> list[str]:
        name = entry.get("round")
        place = self.text(
            "drain.place",
            repeat=self._tokens(entry.get("repeat")),
            round=self.text(f"name.{name}") if name in ROUNDS else str(name),
        )
        size, waited = entry.get("bytes"), entry.get("waited_s")
        return [
            place,
            self._tokens(entry.get("stored_chunks")),
            self._tokens(entry.get("expected_chunks")),
            self._tokens(entry.get("failed")),
            self._tokens(entry.get("files")),
            self.text("word.unknown") if size is None else self.text.byte_size(size),
            self.text("word.unknown") if waited is None else self.text.seconds(waited),
        ]

    @property
    def times(self) -> list[tuple[str, str, str]]:
        """Where the run's time went: part, seconds, share of the total."""
        parts = self.summary.get("time_s") or {}
        total = parts.get("total")
        rows = []
        for name in ("server_start", "requests", "pause", "drain", "stop", "other", "total"):
            value = parts.get(name)
            if value is not None:
                share = self.text.percent(value / total, 1) if total else "–"
                rows.append((self.text(f"time.{name}"), self.text.seconds(value), share))
        return rows

    # Setup

    @property
    def connector(self) -> str:
        """Which connector ran: kvlab, stock, or None where none did."""
        found = self.at("engine", "connector") or self.at("about", "connector", "name")
        if found in (None, "stock", "LMCacheMPConnector"):
            return "stock" if found else "unknown"
        return "kvlab"

    @property
    def connector_reason(self) -> str:
        """Why that connector ran, in the run's own English."""
        reason = self.at("engine", "connector_reason") or self.at("about", "connector", "reason")
        return str(reason or "")

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Arm name and shell text of everything that was started, in order."""
        found = self.at("about", "commands") or {}
        return [
            (self.arm(arm), "\n\n".join(str(c) for c in texts))
            for arm, texts in found.items()
            if arm in self.arms
        ]

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The settings held fixed, as label and value."""
        profile = self.at("about", "profile")
        work, engine = self.summary.get("workload") or {}, self.summary.get("engine") or {}
        raw: list[tuple[str, Any]] = [
            ("block", engine.get("block_tokens") or get(profile, "engine", "block_tokens")),
            ("chunk", work.get("chunk_tokens") or get(profile, "cache", "chunk_tokens")),
            ("batched", get(profile, "engine", "max_num_batched_tokens")),
            ("mamba", get(profile, "engine", "mamba_cache_mode")),
            ("prefix_caching", get(profile, "engine", "prefix_caching")),
            ("dtype", get(profile, "engine", "flags", "dtype")),
            ("kv_dtype", get(profile, "engine", "flags", "kv-cache-dtype")),
            ("eviction", get(profile, "cache", "eviction_policy")),
            ("watermark", get(profile, "cache", "eviction_watermark")),
            ("ratio", get(profile, "cache", "eviction_ratio")),
            ("groups", get(profile, "cache", "separate_object_groups")),
            ("transfer", get(profile, "cache", "transfer_mode")),
            ("pause", work.get("pause_s")),
            ("output", work.get("output_tokens")),
        ]
        return [
            (self.text(f"setting.{name}"), self._value(value))
            for name, value in raw
            if value is not None
        ]

    @property
    def tier_capacities(self) -> list[tuple[str, str, str]]:
        """Tier, capacity and role, for the table of tiers."""
        unknown = self.text("word.not_recorded")
        l0 = self.at("engine", "kv_cache_tokens", self.arms[0])
        l1 = self.at("about", "profile", "cache", "l1_size_gb")
        l2 = self.at("about", "profile", "cache", "l2", "adapter", "type")
        return [
            (
                self.text("tier.L0"),
                unknown if l0 is None else self.text("tiers.tokens", count=self.text.number(l0)),
                self.text("tiers.role.L0"),
            ),
            (
                self.text("tier.L1"),
                unknown if l1 is None else f"{self.text.plain_number(l1)} GB",
                self.text("tiers.role.L1"),
            ),
            (
                self.text("tier.L2"),
                unknown if l2 is None else self.text("tiers.adapter", adapter=l2),
                self.text("tiers.role.L2"),
            ),
        ]

    @property
    def machine(self) -> list[tuple[str, str]]:
        """Machine, model and versions, as label and value."""
        host, about = self.at("about", "host") or {}, self.at("about") or {}
        memory = host.get("memory_bytes")
        raw: list[tuple[str, Any]] = [
            ("cpu", host.get("cpu") or host.get("cpu_model")),
            ("cores", host.get("cores") or host.get("cpu_count")),
            ("memory", None if memory is None else self.text.byte_size(memory)),
            ("gpu", _joined(host.get("gpu") or host.get("gpus"))),
            ("os", host.get("os")),
            ("kernel", host.get("kernel")),
            ("python", host.get("python")),
            ("model", get(about, "profile", "model", "name")),
            ("vllm", self.at("engine", "vllm_version")),
            ("lmcache", self.at("engine", "lmcache_version")),
            ("kvlab", about.get("kvlab_version")),
        ]
        return [
            (self.text(f"machine.{name}"), self._value(value))
            for name, value in raw
            if value not in (None, "")
        ]

    def _value(self, value: Any) -> str:
        if isinstance(value, bool):
            return self.text("word.yes" if value else "word.no")
        if isinstance(value, (int, float)):
            return self.text.plain_number(value)
        return str(value)

    @property
    def order(self) -> str:
        """The order of the arms over the run, as letters: A B B A A B."""
        sequence = self.at("workload", "order") or []
        letters = dict(zip(self.arms, "AB", strict=False))
        names = [item[-1] if isinstance(item, (list, tuple)) else item for item in sequence]
        return " ".join(letters.get(name, "?") for name in names)

    @property
    def reproduce(self) -> str:
        """The command that repeats this run."""
        experiment = self.summary.get("experiment", "two-round")
        control = " --control" if self.control else ""
        return f"kvlab run {experiment} {self.profile}{control}"

    @property
    def embedded_json(self) -> Markup:
        """The machine-readable summary, safe inside a script element."""
        written = json.dumps(
            without_headline(self.summary), ensure_ascii=False, indent=1, sort_keys=True
        )
        return Markup(written.replace("<", "\\u003c").replace("&", "\\u0026"))


def build(summary: Summary, text: Text, genre: str) -> View:
    """The view of a summary for one genre and language."""
    return View(summary, text, genre)


def slug(name: str) -> str:
    """A name that a run gave, as the last part of a catalogue key or of an id."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _joined(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, (str, dict)):
        return ", ".join(str(item) for item in value)
    return value
