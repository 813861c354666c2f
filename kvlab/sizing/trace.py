"""Requests as the tiers see them: how long, and which whole chunks, each known by its prefix.

A chunk's key stands for everything up to its end, as in LMCache, whose hashes are chained: equal
keys mean equal prefixes. A trace can be gone through again and again, and is made or read one
request at a time, so that its length costs no memory.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from kvlab import shapes
from kvlab.errors import UsageError
from kvlab.units import ns_to_s

if TYPE_CHECKING:  # a trace from a file needs none of them, and they take longer than reading it
    from kvlab.profile import Profile
    from kvlab.records import RequestRecord
    from kvlab.rundir import RunDir

Shape = Literal["identical", "prefix_suffix"]
BATCH = 65_536
"""Requests that are drawn at a time from a distribution."""
LOOKUP_LOGS = "lookup_hashes_*.jsonl"
"""LMCache's rotated files; their names sort by time."""
PROBE_CHUNKS = 4
"""Whole chunks of the prompt that kvlab probes a deployment with."""
ROUNDS = ("probe", "warmup", "fill", "measure")


class Request(NamedTuple):
    """One request of a trace."""

    tokens: int
    """Length of the prompt; what exceeds the whole chunks is always computed."""
    keys: Sequence[Hashable]
    """One for each whole chunk, in order; equal keys stand for equal prefixes."""
    at_s: float = 0.0
    """It is not sent before this moment."""
    label: str = "all"
    """The round that it counts in."""
    gap_s: float = 0.0
    """Pause after the answer before it."""
    drained: bool = False
    """It waits until all stores are written and L1 is below the watermark, as kvlab's rounds do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order, and the length of the chunks that they are cut into."""

    title: str
    chunk_tokens: int
    requests: Callable[[], Iterator[Request]]

    def __iter__(self) -> Iterator[Request]:
        return self.requests()


def two_round(
    *,
    contexts: int,
    context_tokens: int,
    chunk_tokens: int,
    shape: Shape = "identical",
    prefix_tokens: int | None = None,
    pause_s: float = 5.0,
    drained: bool = False,
) -> Trace:
    """Every context once to fill the caches, and once more, in the same order, to measure.

    In ``prefix_suffix`` only the first ``prefix_tokens`` return (None: 80 % of them): the breaker
    behind them is fresh each time and makes every chunk after it new.
    """
    reused = context_tokens
    if shape == "prefix_suffix":
        reused = round(context_tokens * 0.8) if prefix_tokens is None else prefix_tokens
    chunks = context_tokens // chunk_tokens
    same = min(reused // chunk_tokens, chunks)

    def requests() -> Iterator[Request]:
        for context in range(contexts):
            yield Request(
                context_tokens, range(context * chunks, (context + 1) * chunks), 0.0, "fill"
            )
        fresh = contexts * chunks
        for context in range(contexts):
            first = context * chunks
            end = fresh + chunks - same
            keys = (*range(first, first + same), *range(fresh, end))
            fresh = end
            wait, rest = (pause_s, drained) if context == 0 else (0.0, False)
            yield Request(context_tokens, keys, 0.0, "measure", wait, rest)

    title = f"{contexts} contexts of {context_tokens} tokens, two rounds, {shape}"
    return Trace(title=title, chunk_tokens=chunk_tokens, requests=requests)


def of_profile(profile: Profile) -> Trace:
    """The profile's own two rounds, with the probe and the warm-up that come before them."""
    work, plan = profile.workload, profile.experiments.two_round
    chunk = profile.cache.chunk_tokens
    rounds = two_round(
        contexts=work.contexts,
        context_tokens=work.context_tokens,
        chunk_tokens=chunk,
        shape=work.shape,
        prefix_tokens=work.prefix_tokens,
        pause_s=plan.pause_s,
        drained=True,
    )

    def requests() -> Iterator[Request]:
        probe = [("probe", index) for index in range(PROBE_CHUNKS)]
        yield Request(PROBE_CHUNKS * chunk + 1, probe, 0.0, "probe")
        for context in range(plan.warmup_requests):
            keys = [("warmup", context, index) for index in range(work.context_tokens // chunk)]
            yield Request(work.context_tokens, keys, 0.0, "warmup")
        yield from rounds

    return Trace(title=f"{profile.name}: {rounds.title}", chunk_tokens=chunk, requests=requests)


def multi_turn(
    *,
    users: int,
    turns: int,
    first_tokens: int,
    turn_tokens: int,
    chunk_tokens: int,
    think_s: float = 0.0,
) -> Trace:
    """Conversations that grow: every turn asks all that was said and ``turn_tokens`` more.

    The users take turns; a user's next turn comes ``think_s`` after the last one at the earliest.
    """
    longest = (first_tokens + (turns - 1) * turn_tokens) // chunk_tokens

    def requests() -> Iterator[Request]:
        for turn, user in itertools.product(range(turns), range(users)):
            tokens = first_tokens + turn * turn_tokens
            first = user * longest
            keys = range(first, first + tokens // chunk_tokens)
            yield Request(tokens, keys, turn * think_s, f"turn {turn + 1}")

    title = f"{users} users, {turns} turns, {first_tokens} tokens growing by {turn_tokens}"
    return Trace(title=title, chunk_tokens=chunk_tokens, requests=requests)


def zipf(
    *,
    requests: int,
    contexts: int,
    context_tokens: int,
    chunk_tokens: int,
    exponent: float = 1.0,
    rate_per_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """Contexts asked as often as their rank says: the k-th with a weight of ``1 / k^exponent``.

    With ``rate_per_s`` they arrive at random (Poisson), else each when the one before is answered.
    """
    chunks = context_tokens // chunk_tokens

    def drawn() -> Iterator[Request]:
        rng = np.random.default_rng(seed)
        weights = np.arange(1, contexts + 1) ** -float(exponent)
        edges = np.cumsum(weights) / weights.sum()
        at_s = 0.0
        for start in range(0, requests, BATCH):
            count = min(BATCH, requests - start)
            picks = np.minimum(np.searchsorted(edges, rng.random(count)), contexts - 1)
            waits = rng.exponential(1 / rate_per_s, count).tolist() if rate_per_s else [0.0] * count
            for pick, wait in zip(picks.tolist(), waits, strict=True):
                at_s += wait
                yield Request(context_tokens, range(pick * chunks, (pick + 1) * chunks), at_s)

    title = f"{requests} requests for {contexts} contexts of {context_tokens}, Zipf {exponent:g}"
    return Trace(title=title, chunk_tokens=chunk_tokens, requests=drawn)


def lookup_log(paths: Iterable[Path], model: str | None = None) -> Trace:
    """The lookups that LMCache logged (``lookup_hashes_*.jsonl``): files, or folders of them.

    With ``model`` only that model's. UsageError for a file that is no such log, for none at all,
    and for chunks of more than one size.
    """
    files = [file for path in paths for file in _log_files(path)]
    first = next(_lookups(files, model), None)
    if first is None:
        raise UsageError(
            "no lookup is in " + (", ".join(map(str, files)) or "the given folders"),
            hint="LMCache logs them with --lookup-hash-log-dir DIR; is the model named as there?",
        )
    chunk, began = int(first["chunk_size"]), float(first["timestamp"])

    def requests() -> Iterator[Request]:
        for row in _lookups(files, model):
            _same_size(chunk, row["chunk_size"], "the log")
            yield Request(row["seq_len"], row["chunk_hashes"], row["timestamp"] - began)

    title = f"lookups of {first.get('model_name') or 'an unnamed model'}"
    return Trace(title=title, chunk_tokens=chunk, requests=requests)


def hash_ids(path: Path, block_tokens: int | None = None) -> Trace:
    """A trace of ``hash_ids`` and ``input_length``, one JSON object a line, ``.gz`` too.

    The published traces (Mooncake's, and what kvcache-simulator reads) have this form; their ids
    are chained. ``timestamp`` is in milliseconds. ``block_tokens`` is needed where no line states
    its ``block_size``. UsageError for a file that is no such trace.
    """
    first = next(_rows(path, _TRACE), None)
    if first is None:
        raise UsageError(f"{path} holds no request", hint="one JSON object a line is expected")
    block: int | None = first.get("block_size") or block_tokens
    if not block:
        raise UsageError(
            f"{path} does not state its block_size", hint="give the tokens of one block"
        )
    began = first.get("timestamp") or 0

    def requests() -> Iterator[Request]:
        for row in _rows(path, _TRACE):
            _same_size(block, row.get("block_size") or block, str(path))
            keys = row["hash_ids"][: row["input_length"] // block]
            yield Request(row["input_length"], keys, ((row.get("timestamp") or 0) - began) / 1000)

    return Trace(title=path.name, chunk_tokens=block, requests=requests)


def of_run(run: RunDir, scenario: str, repeat: int) -> Trace:
    """The requests that one launch of a run answered, with the pauses that it made.

    The keys follow from the workload's shape and the names of the contexts.
    """
    settings = run.manifest["profile"]
    work, chunk = settings["workload"], settings["cache"]["chunk_tokens"]
    reused = work["context_tokens"]
    if work["shape"] == "prefix_suffix":
        reused = round(work["context_tokens"] * work["prefix_ratio"])
    asked = [
        record
        for record in run.requests()
        if (record.scenario, record.repeat) == (scenario, repeat) and record.error is None
        if record.round in ROUNDS and record.sent_ns is not None
    ]
    if not asked:
        raise UsageError(
            f"run {run.id} holds no answered request of {scenario}, repeat {repeat}",
            hint="`kvlab report` names the scenarios and repeats of a run",
        )
    began = asked[0].sent_ns or 0

    def requests() -> Iterator[Request]:
        for record in asked:
            at_s = ns_to_s((record.sent_ns or began) - began)
            tokens = record.planned_tokens
            yield Request(
                tokens, _keys(record, tokens // chunk, reused // chunk), at_s, record.round
            )

    title = f"{run.id}, {scenario}, repeat {repeat}"
    return Trace(title=title, chunk_tokens=chunk, requests=requests)


def _keys(record: RequestRecord, chunks: int, reused: int) -> list[Hashable]:
    """What returns belongs to the context, what does not to the one request."""
    same = reused if record.context_id.startswith("c") else chunks
    return [
        (record.context_id, index)
        if index < same
        else (record.context_id, record.round, record.index, index)
        for index in range(chunks)
    ]


def _count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < shapes.LARGEST_FLOAT


def _key_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int, str}


def _maybe(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


Fields = dict[str, Callable[[Any], bool]]
_LOOKUP: Fields = {
    "chunk_size": _count,
    "seq_len": _count,
    "timestamp": _time,
    "chunk_hashes": _key_list,
}
_TRACE: Fields = {
    "input_length": _count,
    "hash_ids": _key_list,
    "block_size": _maybe(_count),
    "timestamp": _maybe(_time),
}
"""What a line of each kind of file holds."""


def _same_size(expected: int, found: int, where: str) -> None:
    if found != expected:
        raise UsageError(
            f"{where} has chunks of {expected} and of {found} tokens",
            hint="give the requests of one configuration at a time",
        )


def _log_files(path: Path) -> list[Path]:
    return sorted(path.glob(LOOKUP_LOGS)) if path.is_dir() else [path]


def _lookups(files: Sequence[Path], model: str | None) -> Iterator[dict[str, Any]]:
    for file in files:
        for row in _rows(file, _LOOKUP):
            if model is None or row.get("model_name") == model:
                yield row


def _rows(path: Path, wanted: Fields) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a last line that was cut off is left out."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    if not line.endswith("\n"):
                        return
                    row = None
                wrong = (
                    [name for name, holds in wanted.items() if not holds(row.get(name))]
                    if isinstance(row, dict)
                    else list(wanted)
                )
                if wrong:
                    raise UsageError(
                        f"{path}, line {number}: no JSON object with sound {', '.join(wrong)}",
                        hint="is it the right kind of file?",
                    )
                yield row
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be read: {reason}", hint="check the path") from error
