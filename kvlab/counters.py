"""What the servers count: Prometheus text in, values by canonical name out.

Three rules hold everywhere. A series that is not there is unknown, never 0: LMCache makes its
counters when they are first used. A counter that is lower than before belongs to a restarted
server, so its growth is unknown. And of the names that one counter had over the versions exactly
one is read: a deprecated twin is never added to its successor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

Samples = Mapping[str, float]

SKIPPED = "kvlab:skipped_lines"
"""Series that ``parse`` adds when a text holds lines that are no metric: how many."""

STARTED = "process_start_time_seconds"
"""Gauge of prometheus_client: differs when another process answers than before."""

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_.:]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,?)', re.DOTALL)
_CLOSE = re.compile(r"\s*}")
_VALUE = re.compile(
    r"[ \t]*([+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|(?i:inf(?:inity)?|nan)))"
    r"(?:[ \t]+[+-]?[\d.]+(?:[eE][+-]?\d+)?)?[ \t]*(?:#.*)?$",
    re.ASCII | re.DOTALL,
)
_ESCAPE = re.compile(r'\\([\\"n])')


def parse(text: str) -> tuple[dict[str, float], dict[str, dict[str, str]]]:
    """Each series summed over its labels, and the labels of the first series of each ``*_info``.

    ``_bucket`` and ``_created`` series are left out. A sum that is not a finite number is unknown
    and left out as well. Lines that are no metric are skipped and counted under ``SKIPPED``.
    """
    samples: dict[str, float] = {}
    info: dict[str, dict[str, str]] = {}
    skipped = 0
    # Label values may hold any other line separator, so only LF ends a line.
    for line in text.split("\n"):
        line = line.strip(" \t\r")
        if not line or line.startswith("#"):
            continue
        sample = _sample(line)
        if sample is None:
            skipped += 1
            continue
        name, labels, value = sample
        if name.endswith("_info"):
            info.setdefault(name, labels)
        elif not name.endswith(("_bucket", "_created")):
            samples[name] = samples.get(name, 0.0) + value
    samples = {name: value for name, value in samples.items() if math.isfinite(value)}
    if skipped:
        samples[SKIPPED] = float(skipped)
    return samples, info


def _sample(line: str) -> tuple[str, dict[str, str], float] | None:
    """Name, labels and value of one line; None when it is no sample."""
    name = _NAME.match(line)
    if name is None:
        return None
    labels, at = _labels(line, name.end())
    value = _VALUE.match(line, at) if at >= 0 else None
    if value is None or at == name.end() == value.start(1):
        return None
    return name.group(), labels, float(value.group(1))


def _labels(line: str, at: int) -> tuple[dict[str, str], int]:
    """The labels that start at a place and where they end; -1 when they are malformed."""
    labels: dict[str, str] = {}
    if not line.startswith("{", at):
        return labels, at
    at += 1
    more = True
    while more and (label := _LABEL.match(line, at)):
        labels[label.group(1)] = _ESCAPE.sub(_unescape, label.group(2))
        at, more = label.end(), bool(label.group(3))
    close = _CLOSE.match(line, at)
    return labels, close.end() if close else -1


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match.group(1) == "n" else match.group(1)


def _lmcache(stem: str, *units: str) -> tuple[str, ...]:
    """The names of one LMCache counter: newest unit first, then without a unit."""
    return (*(f"lmcache_mp_{stem}_{unit}_total" for unit in units), f"lmcache_mp_{stem}_total")


def _vllm(*stems: str) -> tuple[str, ...]:
    """The names of one vLLM counter, as exposed and as collectors rewrite them."""
    return tuple(
        f"vllm{mark}{stem}{end}" for stem in stems for end in ("_total", "") for mark in (":", "_")
    )


_OBJECTS = ("chunks", "objects_chunks", "objects", "keys")
"""Units under which versions of LMCache count the same stored objects."""

_STORED = ("objects_chunks", "chunks", "objects", "keys")

ALIASES: dict[str, tuple[str, ...]] = {
    # vLLM
    "local_queries": _vllm("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "local_hits": _vllm("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "external_queries": _vllm("external_prefix_cache_queries"),
    "external_hits": _vllm("external_prefix_cache_hits"),
    "prompt_tokens": _vllm("prompt_tokens"),
    "preemptions": _vllm("num_preemptions"),
    "ttft_sum": ("vllm:time_to_first_token_seconds_sum", "vllm_time_to_first_token_seconds_sum"),
    "ttft_count": (
        "vllm:time_to_first_token_seconds_count",
        "vllm_time_to_first_token_seconds_count",
    ),
    # LMCache: lookups, in tokens
    "lookups": _lmcache("lookups", "requests"),
    "lookup_early_exits": _lmcache("lookup_early_exit", "requests"),
    "lookup_requested_tokens": _lmcache("lookup_requested", "tokens"),
    "lookup_hit_tokens": _lmcache("lookup_hit", "tokens"),
    "l1_hit_tokens": (*_lmcache("lookup_hit_l1", "tokens"), *_lmcache("lookup_l1_hit", "tokens")),
    "l2_hit_tokens": (*_lmcache("lookup_hit_l2", "tokens"), *_lmcache("lookup_l2_hit", "tokens")),
    # LMCache: L1, in stored objects
    "l1_read_chunks": _lmcache("l1_read", *_OBJECTS),
    "l1_write_chunks": _lmcache("l1_write", *_OBJECTS),
    "l1_evicted_chunks": _lmcache("l1_evicted", *_OBJECTS),
    "eviction_ticks": _lmcache("l1_eviction_loop_ticks"),
    "eviction_triggered": _lmcache("l1_eviction_loop_triggered"),
    "l1_memory_bytes": ("lmcache_mp_l1_memory_usage_bytes",),
    "l1_staging_bytes": ("lmcache_mp_l1_staging_bytes",),
    "l1_usage_ratio": ("lmcache_mp_l1_usage_ratio",),
    "l1_allocation_failures": _lmcache("l1_allocation_failure", *_OBJECTS),
    "l1_read_failures": _lmcache("l1_read_failure", *_OBJECTS),
    # LMCache: L2, in stored objects; the ``_requests`` twins count tasks, also failed ones
    "l2_store_submitted": _lmcache("l2_store_submitted", *_STORED),
    "l2_store_completed": _lmcache("l2_store_completed", *_STORED),
    "l2_store_failed": _lmcache("l2_store_failed", *_STORED),
    "l2_store_submitted_requests": ("lmcache_mp_l2_store_submitted_requests_total",),
    "l2_store_completed_requests": ("lmcache_mp_l2_store_completed_requests_total",),
    "l2_store_inflight": ("lmcache_mp_num_inflight_l2_stores",),
    "l2_load_submitted": _lmcache("l2_prefetch_load_submitted", *_STORED),
    "l2_load_completed": _lmcache("l2_prefetch_load_completed", *_OBJECTS),
    "l2_load_failures": _lmcache("l2_prefetch_failure", *_OBJECTS),
    "l2_evicted_chunks": _lmcache("l2_evicted", *_STORED),
    "l2_usage_bytes": ("lmcache_mp_l2_usage_bytes",),
    "l2_load_throughput_sum": ("lmcache_mp_l2_load_throughput_GB_per_second_sum",),
    "l2_load_throughput_count": ("lmcache_mp_l2_load_throughput_GB_per_second_count",),
    "l1_load_throughput_sum": ("lmcache_mp_l0_l1_load_throughput_GB_per_second_sum",),
    "l1_load_throughput_count": ("lmcache_mp_l0_l1_load_throughput_GB_per_second_count",),
    "l2_store_throughput_sum": ("lmcache_mp_l2_store_throughput_GB_per_second_sum",),
    "l2_store_throughput_count": ("lmcache_mp_l2_store_throughput_GB_per_second_count",),
    # LMCache: between engine and server
    "stores_submitted": _lmcache("num_submitted_stores"),
    "stores_finished": _lmcache("num_finished_stores"),
    "retrieves_submitted": _lmcache("num_submitted_retrieves"),
    "retrieves_finished": _lmcache("num_finished_retrieves"),
    "chunks_loaded": _lmcache("num_chunks_loaded"),
    "events_dropped": ("lmcache_mp_event_bus_dropped_events_total",),
}
"""Canonical name -> the names it has had, newest first."""


def read(samples: Samples | None, canonical: str) -> float | None:
    """The value under the first of a counter's names that is there; None: unknown."""
    if samples is None:
        return None
    return next((samples[name] for name in ALIASES[canonical] if name in samples), None)


@dataclass(frozen=True, slots=True)
class Change:
    """How much a counter grew, or why that is unknown."""

    value: float | None
    reason: str | None = None


def delta(before: Samples | None, after: Samples | None, canonical: str) -> float | None:
    """How much a counter grew; None: it is unknown, or the server was started again."""
    return change(before, after, canonical).value


def change(before: Samples | None, after: Samples | None, canonical: str) -> Change:
    """How much a counter grew between two readings of one server, with the reason of an unknown."""
    names = ALIASES[canonical]
    if before is None or after is None:
        return Change(None, f"{canonical}: the server did not answer")
    if _restarted(before, after):
        return Change(None, f"{canonical}: the server was started again between two readings")
    # A name that is in both readings: a twin that appeared in between counts from elsewhere.
    name = next((name for name in names if name in before and name in after), None)
    if name is None:
        when = "first" if read(before, canonical) is None else "second"
        return Change(None, f"{canonical}: the counter is not in the {when} reading")
    if after[name] < before[name]:
        return Change(
            None,
            f"{canonical}: the counter went back from {before[name]:g} to {after[name]:g},"
            " so the server was started again",
        )
    return Change(after[name] - before[name])


def since_start(before: Samples | None, after: Samples | None, canonical: str) -> Change:
    """Like ``change``, for a counter that its server makes when it first counts something.

    LMCache shows a counter only after its first use. When a reading that did succeed does not
    have it and the next one of the same process does, then all of it was counted in between.
    """
    grown = change(before, after, canonical)
    if grown.value is None and before and after and not _restarted(before, after):
        value = read(after, canonical)
        if value is not None and read(before, canonical) is None:
            return Change(value)
    return grown


def _restarted(before: Samples, after: Samples) -> bool:
    """Whether another process answered the second time; False when the servers do not tell."""
    return STARTED in before and STARTED in after and before[STARTED] != after[STARTED]
