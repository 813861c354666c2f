"""The servers: the same ones from begin to end, and the same engine in both arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.invariants.facts import Facts, Invariant, weigh


def servers_up(facts: Facts) -> Invariant:
    """The servers that began a round ended it: same start, still running, not killed."""
    bad, unknown = [], []
    first: dict[tuple[str | None, int | None, str], tuple[Any, Any]] = {}
    seen: dict[tuple[str | None, int | None, str | None], int] = {}
    for event in facts.events:
        if event.kind != "state":
            continue
        seen[event.scenario, event.repeat, event.round] = (
            seen.get((event.scenario, event.repeat, event.round), 0) + 1
        )
        place = f"{event.scenario}, repeat {event.repeat}, {event.round}"
        for service in event.detail.get("services", []):
            name, born = service["name"], (service.get("pid"), service.get("started"))
            if complaint := _dead(service):
                bad.append(f"{complaint} ({place})")
            elif born[1] is None:
                unknown.append(f"{place}: start of {name}")
            elif first.setdefault((event.scenario, event.repeat, name), born) != born:
                bad.append(f"{name} was started again ({place})")
    unknown += [
        f"{a.place}: state of the servers" for a in facts.accounts if seen.get(a.key, 0) < 2
    ]
    return weigh("servers-up", "every server ran through both rounds", bad, unknown)


def _dead(service: Mapping[str, Any]) -> str | None:
    """What is wrong with a server; None when it runs."""
    name = service["name"]
    if service.get("oom_killed"):
        return f"OOM kill: {name}"
    if not service.get("running") and service.get("pid") is None:
        return f"{name} did not answer"
    if not service.get("running"):
        return f"{name} stopped with exit code {service.get('exit_code')}"
    return None


def kv_equal(facts: Facts) -> Invariant:
    """vLLM's own cache has the same size in both arms, or they do not compare."""
    found = kv_alike(facts, {arm: kv_tokens(facts, arm) for arm in facts.plan.arms})
    if found.holds is False:
        others = [text for key, text in arm_differences(facts) if key != "kv_cache_tokens"]
        return Invariant(found.name, False, "; ".join([found.detail, *others]))
    return found


def kv_alike(facts: Facts, sizes: Mapping[str, Sequence[int]]) -> Invariant:
    """vLLM's own cache has about the same size in every launch or instance, given by its name."""
    missing = [name for name, found in sizes.items() if not found]
    every = [size for found in sizes.values() for size in found]
    if missing or not every:
        return Invariant("kv-equal", None, f"unknown: KV size of {', '.join(missing) or 'any'}")
    shown = " vs ".join("/".join(f"{s:,}" for s in found) for found in sizes.values())
    if (max(every) - min(every)) / max(every) > facts.threshold("kv_size_diff_max"):
        return Invariant("kv-equal", False, f"arms not comparable: KV {shown} tokens")
    return Invariant("kv-equal", True, f"KV {shown} tokens")


def kv_tokens(facts: Facts, arm: str) -> list[int]:
    """The different sizes of vLLM's own cache in one arm, by its log or its metrics."""
    logged = [ready.get("kv_cache_tokens") for ready in _ready_facts(facts, arm)]
    found = [int(size) for size in logged if size]
    return sorted(set(found or facts.readings.kv_tokens(arm)))


def _ready_facts(facts: Facts, arm: str) -> list[Mapping[str, Any]]:
    return [
        event.detail.get("facts") or {}
        for event in facts.events
        if event.kind == "ready" and event.scenario == arm
    ]


def arm_differences(facts: Facts) -> list[tuple[str, str]]:
    """Facts of the engine's log in which the arms differ: the fact, and both values in words.

    Only what both arms state is compared, and no times: floats differ from start to start.
    """
    first, second = (
        (_ready_facts(facts, arm) or [{}])[0] for arm in (facts.plan.arms[0], facts.plan.treated)
    )
    found = []
    for key in sorted(first.keys() | second.keys()):
        a, b = first.get(key), second.get(key)
        if a is True or b is True:  # a flag is a fact only where it was seen
            a, b = bool(a), bool(b)
        if a != b and isinstance(a, int | str) and isinstance(b, int | str):
            found.append((key, _differing(key, a, b)))
    return found


def _differing(key: str, a: int | str, b: int | str) -> str:
    """One fact and its two values: ``hybrid manager on vs off``."""
    name = key.replace("_", " ")
    if isinstance(a, bool) and isinstance(b, bool) and key.endswith("_off"):
        name, a, b = name.removesuffix(" off"), not a, not b
    return f"{name} {_word(a)} vs {_word(b)}"


def _word(value: int | str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else value
