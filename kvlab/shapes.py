"""What the files of a run folder may hold. Whatever else stands in them was not written by a run.

Folders are copied, edited and cut short. Their JSON is therefore read strictly: numbers that no
clock and no counter can have, and fields of another kind, are refused where they are read, with
one sentence, so that no figure is computed from them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LARGEST = 1 << 63
"""Whole numbers stay below this: nanoseconds, tokens and bytes all fit into 64 bits."""
LARGEST_FLOAT = 1e30
"""Far above what any counter reaches, and far from where sums become infinite."""
MOST_REQUESTS = 1_000_000
"""Requests that a plan may hold per arm and round, over all repeats."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def loads(text: bytes | str) -> Any:
    """The value that a JSON text holds.

    ValueError for what is no JSON, and for what JSON can carry but no run writes: NaN, infinities,
    numbers beyond 64 bits, nesting without end and halves of characters.
    """
    try:
        value = json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_refuse)
        if ("\\u" if isinstance(text, str) else b"\\u") in text:  # type: ignore[operator]
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("holds half a character") from None
    return value


def _int(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) >= LARGEST:
        raise ValueError(f"the number {text[:20]}… is too large")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not abs(value) < LARGEST_FLOAT:
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no number")


# Kinds, named as the annotations of the records name them.


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _holds(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(kind, value.values()))


def _lists(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_service(value: Any) -> bool:
    """One row of a ``state`` event."""
    return (
        isinstance(value, dict)
        and _is_text(value.get("name"))
        and all(value.get(n) is None or _is_number(value[n]) for n in ("pid", "started"))
    )


def _is_process(value: Any) -> bool:
    """One process of a ``usage`` event."""
    return (
        isinstance(value, dict)
        and _is_text(value.get("service"))
        and all(_is_number(value.get(name)) for name in ("rss_bytes", "cpu_s"))
    )


def _is_fact(value: Any) -> bool:
    """What a log states: a value, a list of values, or the lines of one kind, counted."""
    if isinstance(value, dict):
        return _is_whole(value.get("count", 0)) and _lists(_is_text)(value.get("lines", []))
    return value is None or _is_value(value) or _lists(_is_value)(value)


def _is_value(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _is_facts(value: Any) -> bool:
    sizes = isinstance(value, dict) and value.get("kv_cache_tokens")
    return _holds(_is_fact)(value) and (sizes is None or _is_whole(sizes))


def _is_host(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    names, memory = value.get("proxy_variables"), value.get("memory_gib")
    return (names is None or _lists(_is_text)(names)) and (memory is None or _is_number(memory))


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"),
    "count": (lambda value: _is_whole(value) and value >= 1, "a count of 1 or more"),
    "float": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (_is_text, "text"),
    "name": (lambda value: _is_text(value) and bool(_NAME.fullmatch(value)), "a plain name"),
    "dict[str, Any]": (_is_object, "an object"),
    "dict[str, str]": (_holds(_is_text), "an object of texts"),
    "dict[str, float]": (_holds(_is_number), "an object of numbers"),
    "dict[str, int]": (_holds(_is_whole), "an object of whole numbers"),
    "dict[str, dict[str, str]]": (_holds(_holds(_is_text)), "an object of labels"),
    "dict[str, list[str]]": (_holds(_lists(_is_text)), "an object of lists of texts"),
    "list": (lambda value: isinstance(value, list), "a list"),
    "list[str]": (_lists(_is_text), "a list of texts"),
    "services": (_lists(_is_service), "a list of servers"),
    "processes": (_lists(_is_process), "a list of processes"),
    "share": (lambda value: _is_number(value) and 0 < value < 1, "a share of 1"),
    "facts": (_is_facts, "what a log states"),
    "host": (_is_host, "the facts of a host"),
}

DETAILS = {
    **dict.fromkeys(("facts", "log_facts"), "facts"),
    **dict.fromkeys(("object_groups", "files", "bytes", "odd_files", "groups"), "int"),
    **dict.fromkeys(("waited_s", "seconds", "submitted", "completed", "failed"), "float"),
    "versions": "dict[str, str]",
    "connector": "str",
    "stable": "bool",
    "processes": "processes",
    **dict.fromkeys(("flag", "l2_folder"), "str"),
}
"""What the detail of an event may say, where a figure is computed from it; each may be null."""

MANIFEST = {
    "run": "name",
    "experiment": "str",
    "profile": "dict[str, Any]",
    "arms": "list[str]",
    "status": "str | None",
    "profile_sha256": "str | None",
    "fingerprint": "str | None",
    "nonce": "str | None",
    "kvlab_version": "str | None",
    "resumed": "int | None",
    "seeds": "dict[str, int] | None",
    "clocks": "list | None",
    "order": "list | None",
    "host": "host | None",
    "model": "dict[str, Any] | None",
    "connector": "dict[str, Any] | None",
    "commands": "dict[str, list[str]] | None",
    "images": "dict[str, Any] | None",
}

PROFILE = {
    "name": "str",
    "workload.contexts": "count",
    "workload.context_tokens": "count",
    "workload.output_tokens": "count",
    "workload.shape": "str",
    "workload.prefix_ratio": "float | None",
    "cache.chunk_tokens": "count",
    "cache.l1_size_gb": "float | None",
    "cache.separate_object_groups": "bool | None",
    "engine.block_tokens": "count",
    "engine.flags": "dict[str, Any] | None",
    "experiments.two_round.repeats": "count",
    "experiments.two_round.pause_s": "float",
    "experiments.two_round.concurrency": "count | None",
    "experiments.object_groups.repeats": "count",
    "experiments.object_groups.margin": "share",
    "experiments.bill.margin": "share",
    "correctness.tolerance_nat": "float",
    "thresholds": "dict[str, float] | None",
}
"""The settings from which figures are computed, by dotted key."""
UNSET = (
    "correctness.tolerance_nat",
    *("experiments.object_groups.repeats", "experiments.object_groups.margin"),
    "experiments.bill.margin",
)
"""Settings whose whole section an old or a small profile may lack."""


def record_complaint(kind: type, row: Any) -> str | None:
    """What keeps a line from being a record of that kind; None when it is one."""
    if not isinstance(row, dict):
        return "is not a JSON object"
    fields = dataclasses.fields(kind)
    missing = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name not in row
    ]
    if missing:
        return f"lacks {', '.join(missing)}"
    wanted = {field.name: str(field.type) for field in fields if field.name in row}
    found = [*_misfits(row, wanted)]
    if not found and "detail" in wanted and "detail" in row:
        found = [*_misfits(row["detail"], {k: f"{v} | None" for k, v in DETAILS.items()})]
        if row.get("kind") == "state":
            found += _misfits(row["detail"], {"services": "services"})
    return found[0] if found else None


def manifest_complaint(tree: Mapping[str, Any]) -> str | None:
    """What keeps a manifest from being that of a run; None when it is one.

    Only what stands in it is looked at; whether it is whole depends on what is asked of it.
    """
    return next(_misfits(tree, MANIFEST), None)


def profile_complaint(profile: Mapping[str, Any]) -> str | None:
    """What keeps a manifest's profile from being one that was run; None when it is one."""
    for key, wanted in PROFILE.items():
        *parents, last = key.split(".")
        section: Any = profile
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if key in UNSET and section in (None, {}):
            continue
        if not isinstance(section, dict):
            return f"{'.'.join(parents)} is not an object"
        if found := next(_misfits({key: section.get(last)}, {key: wanted}), None):
            return found
    experiments = profile["experiments"]
    repeats = (experiments.get("object_groups") or {}).get("repeats", 0)
    asked = profile["workload"]["contexts"] * max(experiments["two_round"]["repeats"], repeats)
    if asked > MOST_REQUESTS:
        return f"{asked:,} requests per arm and round are more than any run holds"
    return None


def _misfits(row: Mapping[str, Any], wanted: Mapping[str, str]) -> Iterator[str]:
    """The fields that are there and of another kind than wanted, in words."""
    for name, kind in wanted.items():
        base = kind.removesuffix(" | None")
        if name not in row or (base != kind and row[name] is None):
            continue
        fits, what = KINDS[base]
        if not fits(row[name]):
            yield f"{name} is not {what}"
