"""The questions that a buyer of memory and disks asks, each with its figures and a sentence. Pure.

``ask(case)`` answers them all; an answer that needs times, where none are known, says so. Figures
carry their units in their keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvlab.sizing import curve, time_model, trace
from kvlab.sizing.case import GB, Case, restores_scaled
from kvlab.sizing.prediction import Machine
from kvlab.sizing.time_model import Restore
from kvlab.sizing.trace import Trace
from kvlab.units import byte_size

Answer = dict[str, Any]
TARGETS = (0.5, 0.8, 0.9, 0.95)
FACTORS = (0.25, 0.5, 1, 2, 4, 8, 16)
VISITS_PER_CONTEXT = 20
"""How often a context is asked on average in the Zipf workload that stands beside the own one."""
MOST_VISITS = 20_000
DAY_S = 86_400
LENGTHS = 24
NO_TIMES = "The machine's times are not known: give a run of it with --run."


def ask(case: Case) -> dict[str, Answer]:
    """Every question's answer by its name, in the order in which they are told."""
    capacity = capacities(case)
    return {
        "capacity": capacity,
        "l1_size": l1_size(case, capacity),
        "break_even": break_even(case),
        "reuses": reuses(case),
        "chunk": chunk(case),
        "disk": disk(case),
        "faster_disk": faster_disk(case),
        "instances": instances(case),
    }


def capacities(case: Case) -> Answer:
    """Hit share by capacity, least recently used and at best, for two ways of coming back."""
    work = case.profile.workload
    visits = min(MOST_VISITS, VISITS_PER_CONTEXT * work.contexts)
    repeated = trace.zipf(
        requests=visits,
        contexts=work.contexts,
        context_tokens=work.context_tokens,
        chunk_tokens=case.chunk_tokens,
    )
    found = {
        "own": _curves(case, trace.of_profile(case.profile), "measure"),
        "zipf": _curves(case, repeated, "all"),
    }
    own, zipf = found["own"], found["zipf"]
    half = len(own["capacity_bytes"]) // 2 - 1
    return {
        **found,
        "sentence": (
            f"A cache of {byte_size(own['capacity_bytes'][half])}, half of what the workload "
            f"stores, hits {own['lru'][half]:.0%} of round 2 with LRU where contexts return in "
            f"order, and could hit {own['optimal'][half]:.0%} at best: LRU forgets each context "
            "right before it returns. Where some return more often than others (Zipf, "
            f"{visits:,} requests) it hits {zipf['lru'][half]:.0%} with "
            f"{byte_size(zipf['capacity_bytes'][half])}, at best {zipf['optimal'][half]:.0%}."
        ),
    }


def _curves(case: Case, requests: Trace, label: str) -> Answer:
    def measured(request: trace.Request) -> bool:
        return request.label == label

    lru = curve.lru(requests, measured=measured)
    best = curve.optimal(requests, lru.capacities, measured=measured)
    return {
        "capacity_bytes": [size * case.tiers.chunk_bytes for size in lru.capacities],
        "lru": list(lru.shares),
        "optimal": list(best.shares),
    }


def l1_size(case: Case, capacity: Answer) -> Answer:
    """L1 for a share of the hits that any size could have; eviction begins at the watermark."""
    mark = case.profile.cache.eviction_watermark
    found: Answer = {"watermark": mark}
    for name in ("own", "zipf"):
        one = capacity[name]
        most = one["lru"][-1]
        found[name] = {
            "most_share": most,
            "gib": {
                f"{target:.0%}": _first(one, target * most) / mark / (1 << 30) for target in TARGETS
            },
        }
    own, zipf = found["own"]["gib"], found["zipf"]["gib"]
    now = case.profile.cache.l1_size_gb
    found["sentence"] = (
        "For 80 % of the hits that any L1 could have, contexts that return in order need "
        f"{_gib(own['80%'])} of L1, Zipf reuse {_gib(zipf['80%'])}; for 95 % "
        f"{_gib(own['95%'])} and {_gib(zipf['95%'])}. The profile has {_gib(now)}; eviction "
        f"begins at {mark:.0%} of it."
    )
    return found


def _first(one: Mapping[str, Any], share: float) -> float:
    """The smallest capacity in bytes of the curve that reaches a share."""
    reached = [
        size
        for size, hits in zip(one["capacity_bytes"], one["lru"], strict=True)
        if hits >= share - 1e-12
    ]
    return float(reached[0] if reached else one["capacity_bytes"][-1])


def break_even(case: Case) -> Answer:
    """From which prefix length on restoring is faster than computing, by tier."""
    if case.machine is None:
        return {"sentence": NO_TIMES}
    chunk, size = case.chunk_tokens, case.tiers.chunk_bytes
    most = max(2 * case.profile.workload.context_tokens, 8 * chunk)
    prefill = case.machine.prefill
    step = max(1, math.ceil(most / chunk / LENGTHS))
    prefixes = [chunks * chunk for chunks in range(1, most // chunk + 1, step)]
    found: Answer = {
        "prefix_tokens": prefixes,
        "compute_ms": [float((prefill.ms(n + 1) - prefill.ms(n + 1, n))[0]) for n in prefixes],
        "restore_ms": {},
        "tokens": {},
    }
    for tier, restore in case.machine.restores.items():
        found["restore_ms"][tier] = [float(restore.ms(n // chunk * size)[0]) for n in prefixes]
        found["tokens"][tier] = time_model.break_even_tokens(
            prefill, restore, bytes_per_chunk=size, chunk=chunk, most=most
        )
    told = [
        f"from {tier} it pays from {tokens:,} tokens on"
        if tokens
        else f"from {tier} it does not pay up to {most:,} tokens"
        for tier, tokens in found["tokens"].items()
    ]
    found["sentence"] = (
        f"Restoring a prefix against computing it: {'; '.join(told)} (whole chunks of {chunk:,})."
    )
    return found


def reuses(case: Case) -> Answer:
    """How often a context must come back until the first visit's extra cost is earned."""
    extra = case.measured.first_visit_ms
    alone, cached = case.forecast_alone(), case.forecast()
    if alone is None or cached is None:
        return {"sentence": NO_TIMES}
    saving = float(alone.ttft_ms[0] - cached.ttft_ms[0])
    found: Answer = {"saving_ms": saving, "first_visit_ms": extra}
    if saving <= 0:
        return {**found, "sentence": "Later visits save nothing here, so reuse never pays."}
    if extra is None:
        return {
            **found,
            "sentence": (
                f"Each return saves {saving:,.1f} ms. What a first visit costs more with LMCache "
                "was not measured, so from which return on it pays is not known."
            ),
        }
    returns = max(1, math.ceil(extra / saving))
    return {
        **found,
        "returns": returns,
        "cumulated_ms": [saving * count - max(0.0, extra) for count in range(6)],
        "sentence": (
            f"A first visit takes {extra:,.1f} ms longer with LMCache and each return saves "
            f"{saving:,.1f} ms: it pays from return {returns} on."
        ),
    }


def chunk(case: Case) -> Answer:
    """What larger chunks and a larger batch budget leave of what returns."""
    work, block = case.profile.workload, case.sums.block_tokens
    sizes = [block * count for count in (1, 2, 3, 4)]
    restored = [work.restorable_tokens(size) for size in sizes]
    bounds = [work.context_tokens / (work.context_tokens - tokens) for tokens in restored]
    budgets = {}
    for name, tokens in (("2N-1", 2 * block - 1), ("2N", 2 * block), ("4N", 4 * block)):
        every = max(1, tokens // block) * block
        budgets[name] = min(work.prefix_tokens, work.context_tokens - 1) // every * every
    every = case.tiers.state_every
    return {
        "chunk_tokens": sizes,
        "restorable_tokens": restored,
        "speedup_bound": bounds,
        "restorable_by_budget": budgets,
        "sentence": (
            f"Of {work.prefix_tokens:,} returning tokens, chunks of N = {block:,} can restore "
            f"{restored[0]:,} (bound {_times(bounds[0])}), 2N {restored[1]:,} "
            f"({_times(bounds[1])}), 4N {restored[3]:,} ({_times(bounds[3])}). A hybrid model "
            "keeps a recurrent state where a "
            f"step ends: with a budget of 2N-1 that is every block ({budgets['2N-1']:,} tokens), "
            f"with 2N every second one ({budgets['2N']:,}); the profile keeps one in {every}."
        ),
    }


def disk(case: Case) -> Answer:
    """How fast new contexts fill L2 when every request is new, and until when that goes well."""
    alone = case.machine.prefill.ms(case.profile.workload.context_tokens) if case.machine else None
    if alone is None:
        return {"sentence": NO_TIMES}
    work = case.profile.workload
    context = case.sums.context_bytes(work.context_tokens, case.chunk_tokens)
    per_s = context / (float(alone[0]) / 1000)
    free = case.tiers.l2_bytes or case.measured.disk_free_bytes
    found: Answer = {
        "bytes_per_context": context,
        "bytes_per_s": per_s,
        "bytes_per_day": per_s * DAY_S,
        "hours_per_tb": 1000 * GB / per_s / 3600,
    }
    until = f"a terabyte lasts {_hours(found['hours_per_tb'])}"
    if free:
        found |= {"free_bytes": free, "days_until_full": free / per_s / DAY_S}
        until += f", the {byte_size(free)} that are free {_hours(24 * found['days_until_full'])}"
    return {
        **found,
        "sentence": (
            f"One instance that computes new contexts without pause writes {byte_size(context)} "
            f"each, {byte_size(per_s)}/s or {byte_size(per_s * DAY_S)} a day: {until}. LMCache's "
            "fs adapter deletes nothing by itself unless a capacity is set."
        ),
    }


def faster_disk(case: Case) -> Answer:
    """TTFT of round 2 with L2 so many times as fast, alone and as part of the workload."""
    if case.machine is None:
        return {"sentence": NO_TIMES}
    slow = case.machine.restores.get("L2")
    if slow is None or slow.bytes_per_s is None:
        return {"sentence": "The bandwidth of L2 was not measured."}
    rates, times = [], []
    for factor in FACTORS:
        machine = replace(case.machine, restores=restores_scaled(case.machine, factor))
        rates.append(float(slow.bytes_per_s[0]) * factor / GB)
        times.append(_from_l2(case, machine))
    without = _from_l2(
        case,
        replace(
            case.machine,
            restores={**case.machine.restores, "L2": Restore(latency_ms=time_model.certain(0))},
        ),
    )
    alone = float(case.machine.prefill.ms(case.profile.workload.context_tokens)[0])
    latency = float(slow.latency_ms[0])
    now, double = FACTORS.index(1), FACTORS.index(2)
    return {
        "gb_per_s": rates,
        "ttft_ms": times,
        "alone_ms": alone,
        "free_ms": without,
        "latency_ms": latency,
        "sentence": (
            f"A context that comes from L2 takes {times[now]:,.1f} ms at {rates[now]:.2f} GB/s, "
            f"{times[double]:,.1f} ms at twice that and {times[-1]:,.1f} ms at {FACTORS[-1]} "
            f"times; computing it takes {alone:,.1f} ms. {latency:,.1f} ms of it are latency, "
            "which no bandwidth changes. Reads in parallel help as a faster disk does, as far as "
            "the disk has bandwidth to spare."
        ),
    }


def _from_l2(case: Case, machine: Machine) -> float:
    """TTFT of one context of the workload that L2 restores as far as whole chunks go."""
    work = case.profile.workload
    return float(
        time_model.ttft_ms(
            machine.prefill,
            machine.restores,
            tokens=work.context_tokens,
            served_bytes={"L2": case.loaded_bytes},
            served_tokens=work.restorable_tokens(case.chunk_tokens),
        )[0]
    )


def instances(case: Case) -> Answer:
    """How many instances, each with one request in flight, one LMCache server can feed."""
    if case.machine is None:
        return {"sentence": NO_TIMES}
    ttft_ms = _from_l2(case, case.machine)
    each_per_s = 1000 / ttft_ms
    limits: dict[str, float] = {}
    slow = case.machine.restores.get("L2")
    if slow is not None and slow.bytes_per_s is not None and case.loaded_bytes:
        limits["L2 reads"] = float(slow.bytes_per_s[0]) / case.loaded_bytes
    if case.measured.server_cpu_ms:
        cores = case.measured.cores or 1
        limits["one core"] = 1000 / case.measured.server_cpu_ms
        limits["all cores"] = cores * 1000 / case.measured.server_cpu_ms
    if not limits:
        return {"sentence": "Neither L2's bandwidth nor the server's processor time was measured."}
    counts = {name: rate / each_per_s for name, rate in limits.items()}
    first = min(counts, key=lambda name: counts[name])
    return {
        "requests_per_s_each": each_per_s,
        "requests_per_s_limit": limits,
        "instances": counts,
        "saturates_first": first,
        "sentence": (
            f"An instance with one request in flight restores {each_per_s:,.1f} contexts a "
            f"second from L2. {LIMITS[first]} allows {limits[first]:,.1f} a second, so one server "
            f"feeds {counts[first]:,.1f} instances until that is the bottleneck. Not counted: "
            "stores, memory bandwidth and what the instances take from each other."
        ),
    }


LIMITS = {
    "L2 reads": "L2's read rate",
    "one core": "One core of the server's processor time",
    "all cores": "The server's processor time on all cores",
}


def _gib(size: float) -> str:
    return f"{size:.3g} GiB" if size >= 1 else f"{1024 * size:.3g} MiB"


def _times(bound: float) -> str:
    return f"{bound:,.0f}x" if bound >= 100 else f"{bound:.2f}x"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"


NAMES: dict[str, str] = {
    "capacity": "What does more capacity bring?",
    "l1_size": "How large must L1 be?",
    "break_even": "From which prefix length on does restoring pay?",
    "reuses": "How often must a context come back?",
    "chunk": "What do chunk size and 2N-1 change?",
    "disk": "How fast does L2 fill?",
    "faster_disk": "What would a faster disk, or parallel reads, give?",
    "instances": "How many vLLM instances can one LMCache server feed?",
}
"""Each question as it is asked."""
