"""Whether a run folder still says what its records say: everything recomputed, nothing trusted."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvlab import evidence, summary
from kvlab.errors import RunFolderError
from kvlab.records import Event, RequestRecord, Scrape
from kvlab.rundir import STREAMS, RunDir, sha256_json

RELATIVE = 1e-9
"""Floats may differ by this share: sums of the same values on another machine."""

STAMPS = (
    "queued_ns",
    "sent_ns",
    "headers_ns",
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "last_byte_ns",
)
"""The stamps of one request, in the order in which they can happen."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where a run folder is not what it should be."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def verify(run: RunDir) -> list[Difference]:
    """Every difference between a run folder and what can be recomputed from it.

    A run that did not finish is checked as far as it goes: it need not be sealed or summarised, and
    may lack rounds.
    """
    found = [*_sealed(run), *_profile(run)]
    broken = [*_lines(run)]
    if broken:
        return found + broken  # numbers from damaged records would only repeat the damage
    return [*found, *_records(run), *_summary(run)]


def _complete(run: RunDir) -> bool:
    return bool(run.manifest.get("status") == "complete")


def _sealed(run: RunDir) -> Iterator[Difference]:
    """Files that are not as SHA256SUMS states."""
    stated = run.sealed_checksums()
    if stated is None:
        if _complete(run):
            yield Difference("SHA256SUMS", "is missing, the run was never sealed")
        return
    real = run.checksums()
    for name in sorted(stated.keys() | real.keys()):
        if name not in real:
            yield Difference(name, "is missing")
        elif name not in stated:
            yield Difference(name, "is not listed in SHA256SUMS")
        elif stated[name] != real[name]:
            yield Difference(
                name, f"was changed: SHA-256 {real[name][:12]}…, {stated[name][:12]}… stated"
            )


def _profile(run: RunDir) -> Iterator[Difference]:
    """A profile that is not the one the run was started with."""
    stated = run.manifest.get("profile_sha256")
    if stated is not None and sha256_json(run.manifest.get("profile")) != stated:
        yield Difference("manifest.json", "the profile does not have the SHA-256 that is stated")


def _lines(run: RunDir) -> Iterator[Difference]:
    """Lines that hold no record."""
    for kind, name in STREAMS.items():
        if _complete(run) and not (run.path / name).exists():
            yield Difference(name, "is missing")
        for line in run.lines(kind):
            if line.complaint and (_complete(run) or not line.torn):
                yield Difference(f"{name}, line {line.number}", line.complaint)


def _records(run: RunDir) -> Iterator[Difference]:
    """Records that cannot have happened as written, that are there twice, or that are missing."""
    requests = run.requests()
    for record in requests:
        yield from _stamps(record)
    yield from _twice(requests, run.scrapes())
    if run.manifest.get("experiment") == "two-round":
        yield from _planned(run, requests)
    yield from _events(run.events())


def _planned(run: RunDir, requests: Sequence[RequestRecord]) -> Iterator[Difference]:
    """Rounds of the A/B that were not planned, or that are not whole."""
    plan = evidence.plan(run.manifest)
    found = Counter((r.scenario, r.repeat, r.round) for r in requests if r.round in evidence.ROUNDS)
    for key in sorted(found.keys() - set(plan.keys)):
        yield Difference("requests.jsonl", f"{_place(key)} is not in the plan")
    for key in plan.keys:
        if found[key] != plan.contexts and (_complete(run) or found[key] > plan.contexts):
            yield Difference(
                "requests.jsonl", f"{_place(key)}: {found[key]} requests, {plan.contexts} planned"
            )


def _place(key: tuple[str, int, str]) -> str:
    return f"{key[0]}, repeat {key[1]}, {key[2]}"


def _stamps(record: RequestRecord) -> Iterator[Difference]:
    """Stamps out of their order; a server may refuse a request before it has left as a whole."""
    if record.error is not None:
        return
    known = [(name, at) for name in STAMPS if (at := getattr(record, name)) is not None]
    pairs = [*pairwise(known)]
    if record.sent_ns is not None and record.written_ns is not None:
        # Where the processor was taken away, the answer may be there before the call returns.
        pairs.append((("sent_ns", record.sent_ns), ("written_ns", record.written_ns)))
    for (earlier, first), (later, second) in pairs:
        if second < first:
            key = (record.scenario, record.repeat, record.round)
            yield Difference(
                "requests.jsonl",
                f"{_place(key)}, request {record.index}: {later} is before {earlier}",
            )


def _twice(requests: Sequence[RequestRecord], scrapes: Sequence[Scrape]) -> Iterator[Difference]:
    """Requests of the two rounds and scrapes that are recorded more than once."""
    asked = Counter(
        ((r.scenario, r.repeat, r.round), r.index) for r in requests if r.round in evidence.ROUNDS
    )
    for (key, index), count in asked.items():
        if count > 1:
            yield Difference(
                "requests.jsonl", f"{_place(key)}, request {index} is there {count} times"
            )
    read = Counter((s.scenario, s.repeat, s.boundary, s.source) for s in scrapes)
    for (scenario, repeat, boundary, source), count in read.items():
        if count > 1:
            yield Difference(
                "counters.jsonl",
                f"{scenario}, repeat {repeat}, {boundary} of {source} is there {count} times",
            )


def _events(events: Sequence[Event]) -> Iterator[Difference]:
    """Events out of the order of their clock; each start of the run has a clock of its own."""
    for earlier, later in pairwise(events):
        if later.at_ns < earlier.at_ns and later.kind != "run_started":
            yield Difference("events.jsonl", f"{later.kind} is before {earlier.kind}")


def _summary(run: RunDir) -> Iterator[Difference]:
    """Figures of summary.json that the records do not give."""
    try:
        stated = run.read_summary()
    except RunFolderError as error:
        yield Difference("summary.json", error.message)
        return
    if stated is None:
        if _complete(run):
            yield Difference("summary.json", "is missing")
        return
    for where, what in compare(stated, summary.summarise(run)):
        yield Difference(f"summary.json, {where}", what)


def compare(stated: Any, computed: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Where two JSON values differ and how; floats may differ by ``RELATIVE``."""
    if isinstance(stated, Mapping) and isinstance(computed, Mapping):
        for key in sorted(stated.keys() | computed.keys()):
            place = f"{where}.{key}" if where else str(key)
            if key not in computed:
                yield place, f"{_shown(stated[key])} stated, not in the records"
            elif key not in stated:
                yield place, f"missing, the records give {_shown(computed[key])}"
            else:
                yield from compare(stated[key], computed[key], place)
    elif isinstance(stated, list) and isinstance(computed, list) and len(stated) == len(computed):
        for number, (one, other) in enumerate(zip(stated, computed, strict=True)):
            yield from compare(one, other, f"{where}[{number}]")
    elif not _same(stated, computed):
        yield where, f"{_shown(stated)} stated, the records give {_shown(computed)}"


def _same(stated: Any, computed: Any) -> bool:
    numbers = all(type(value) in (int, float) for value in (stated, computed))
    if numbers and float in (type(stated), type(computed)):
        return math.isclose(stated, computed, rel_tol=RELATIVE)
    return type(stated) is type(computed) and bool(stated == computed)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
