"""The bill of the A/B: what LMCache costs where it does not help, and when it pays. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab import stats
from kvlab.evidence import Account, Key, Plan, Readings
from kvlab.records import Event, RequestRecord
from kvlab.units import ns_to_ms

MARGIN = 0.05
DECODE = "decode"
ROUNDS = ("fill", "measure", DECODE)


def bill(
    plan: Plan,
    accounts: Sequence[Account],
    times: Mapping[tuple[str, str], stats.Arm],
    requests: Sequence[RequestRecord],
    events: Sequence[Event],
    readings: Readings,
    profile: Mapping[str, Any],
    *,
    seed: int,
) -> dict[str, Any] | None:
    """The summary's ``bill``; None for a control, which has no LMCache to pay for, and for one arm.

    ``times`` holds the TTFTs in ms by arm and round. Each figure is absent where it was not
    measured.
    """
    if plan.control or plan.alone:
        return None
    setup = (profile.get("experiments") or {}).get("bill") or {}
    cold = not_slower(plan, times, margin=float(setup.get("margin", MARGIN)), seed=seed)
    return {
        "cold": cold,
        "decode": decode(plan, requests, readings, seed=seed),
        "server": server(plan, events),
        "writes": writes(plan, accounts, events),
        "break_even": break_even(plan, times),
    }


def not_slower(
    plan: Plan, times: Mapping[tuple[str, str], stats.Arm], *, margin: float, seed: int
) -> dict[str, Any]:
    """Round 1, where nothing can be restored: LMCache's TTFT over the baseline's, and the test."""
    first, second = plan.arms
    found = stats.not_slower(times[first, "fill"], times[second, "fill"], margin=margin, seed=seed)
    shown: dict[str, Any] = {
        "ttft_ms": {arm: stats.arm_median(times[arm, "fill"]) for arm in plan.arms}
    }
    if found is not None:
        shown |= {
            "answer": found.answer,
            "margin": found.margin,
            "ratio": found.ratio.value,
            "ci95": [found.ratio.low, found.ratio.high],
            "upper95": found.upper,
            "method": found.ratio.method,
        }
    return shown


def decode(
    plan: Plan, requests: Sequence[RequestRecord], readings: Readings, *, seed: int
) -> dict[str, Any]:
    """Time per output token of the long answers, in both arms, and the stores beneath them.

    It is known only where every one of the answers came in full. The stores are LMCache's own
    count over the round; without one, nothing was running.
    """
    asked = [record for record in requests if record.round == DECODE]
    per_token = {arm: per_token_ms(plan, asked, arm) for arm in plan.arms}
    lengths = {record.asked_tokens for record in asked}
    found: dict[str, Any] = {
        "output_tokens": lengths.pop() if len(lengths) == 1 else None,
        "requests": {arm: sum(r.scenario == arm for r in asked) for arm in plan.arms},
        "stored_objects": _total(
            plan,
            lambda repeat: (
                readings.grown((plan.treated, repeat, DECODE), "lmcache", "l1_write_chunks").value
            ),
        ),
    }
    if not all(stats.repeat_medians(values) for values in per_token.values()):
        return found
    found["time_per_output_token_ms"] = {
        arm: {
            "median": stats.arm_median(values),
            "repeats": stats.repeat_medians(values),
            "n": sum(map(len, values.values())),
        }
        for arm, values in per_token.items()
    }
    ratio = stats.ratio(per_token[plan.treated], per_token[plan.arms[0]], seed=seed)
    if ratio is not None:
        found |= {"ratio": ratio.value, "ci95": [ratio.low, ratio.high]}
    return found


def per_token_ms(
    plan: Plan, asked: Sequence[RequestRecord], arm: str
) -> dict[int, dict[int, float]]:
    """ms per output token after the first, by repeat and index; empty when an answer failed.

    An answer that came whole in one piece, as a busy server's may, shows no time between its
    tokens: it is left out, so ``n`` may be smaller than the requests.
    """
    found: dict[int, dict[int, float]] = {}
    for record in asked:
        if record.scenario != arm:
            continue
        more = (record.completion_tokens or 0) - 1
        whole = record.error is None and record.completion_tokens == record.asked_tokens
        if not whole or more < 1 or record.first_token_ns is None or record.last_byte_ns is None:
            return {}
        times = found.setdefault(record.repeat, {})
        if record.last_byte_ns > record.first_token_ns:
            span_ms = ns_to_ms(record.last_byte_ns - record.first_token_ns)
            times[record.index] = span_ms / more
    return found if len(found) == plan.repeats else {}


def server(plan: Plan, events: Sequence[Event]) -> dict[str, Any]:
    """Processor time and memory of LMCache's server, as sampled around every round.

    Processor seconds are those of the two measured rounds and their drains; per request they
    are divided by the requests of both. Memory is the largest and the smallest sample.
    """
    memory: list[float] = []
    seconds: list[float] = []
    for repeat in range(1, plan.repeats + 1):
        for name in ("fill", "measure"):
            samples = _used(events, (plan.treated, repeat, name))
            memory += [resident for resident, _ in samples]
            if len(samples) >= 2:
                seconds.append(samples[-1][1] - samples[0][1])
    rounds = 2 * plan.repeats
    total = sum(seconds) if len(seconds) == rounds else None
    return {
        "memory_bytes": {"min": min(memory), "max": max(memory)} if memory else None,
        "cpu_s": total,
        "cpu_ms_per_request": None if total is None else 1000 * total / (rounds * plan.contexts),
    }


def _used(events: Sequence[Event], key: Key) -> list[tuple[float, float]]:
    """Resident bytes and processor seconds of LMCache's server at each sample of a round."""
    found = []
    for event in events:
        if event.kind != "usage" or (event.scenario, event.repeat, event.round) != key:
            continue
        own = [p for p in event.detail.get("processes") or [] if p.get("service") == "lmcache"]
        if own:
            found.append((sum(p["rss_bytes"] for p in own), sum(p["cpu_s"] for p in own)))
    return found


def writes(
    plan: Plan, accounts: Sequence[Account], events: Sequence[Event]
) -> dict[str, float | None]:
    """What was written to the disk, per context, per token served, and per useful read.

    Over all repeats: bytes of records that round 1 left on the disk, tokens that L1 and L2 served
    in round 2, objects written in round 1 over objects handed to the engine in round 2.
    """
    size = _total(plan, lambda repeat: _written(events, plan.treated, repeat))
    served = loaded = written = None
    measured = [a for a in accounts if a.scenario == plan.treated and a.round == "measure"]
    filled = [a for a in accounts if a.scenario == plan.treated and a.round == "fill"]
    if all(a.external.value is not None for a in measured):
        served = sum(a.external.value or 0.0 for a in measured)
    if all(a.loaded.value is not None for a in measured):
        loaded = sum(a.loaded.value or 0.0 for a in measured)
    if all(a.written.value is not None for a in filled):
        written = sum(a.written.value or 0.0 for a in filled)
    return {
        "bytes": size,
        "bytes_per_context": _over(size, plan.contexts * plan.repeats),
        "bytes_per_prompt_token": _over(size, plan.contexts * plan.repeats * plan.context_tokens),
        "bytes_per_served_token": _over(size, served),
        "writes_per_useful_read": _over(written, loaded),
    }


def _written(events: Sequence[Event], arm: str, repeat: int) -> float | None:
    """Bytes of records that round 1 added to the L2 folder; None where it was not surveyed."""
    sizes = {
        event.round: event.detail.get("bytes")
        for event in events
        if event.kind == "drained" and (event.scenario, event.repeat) == (arm, repeat)
    }
    before, after = sizes.get("warmup"), sizes.get("fill")
    return None if before is None or after is None else float(after - before)


def break_even(plan: Plan, times: Mapping[tuple[str, str], stats.Arm]) -> dict[str, Any]:
    """From which visit on a context has cost less time with LMCache than without.

    The first visit may cost more (round 1), every later one saves the difference of round 2:
    ``1 + cost / saving``, rounded up, 2 at least. ``never`` when later visits save nothing.
    """
    fill_a, fill_b = (stats.arm_median(times[arm, "fill"]) for arm in plan.arms)
    again_a, again_b = (stats.arm_median(times[arm, "measure"]) for arm in plan.arms)
    if fill_a is None or fill_b is None or again_a is None or again_b is None:
        return {}
    cost, saving = fill_b - fill_a, again_a - again_b
    found: dict[str, Any] = {"cost_ms": cost, "saving_ms": saving, "never": saving <= 0}
    if saving > 0:
        found["visits"] = 1 + max(1, math.ceil(cost / saving))
    return found


def _over(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def _total(plan: Plan, of: Callable[[int], float | None]) -> float | None:
    """The sum over the repeats; None when one is unknown."""
    values = [of(repeat) for repeat in range(1, plan.repeats + 1)]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
