"""How much a cache of each size would hit: least recently used, and the best that is possible.

Hits are leading whole chunks of a request: the first missing one ends them. Since a chunk's key
stands for its whole prefix, and a request uses its deepest chunk first, a chunk is never longer
unused than those behind it; so the leading hits are simply all hits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import UsageError
from kvlab.sizing.stack_distance import COLD, LEAST_BATCH, StackDistances
from kvlab.sizing.trace import Request, Trace

POINTS = 20
UNKNOWN, FIRST = -2, -1

Measured = Callable[[Request], bool]
"""Which requests count; all of them are played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Hits by capacity, over the requests that count."""

    policy: str
    capacities: tuple[int, ...]
    """Chunks, rising."""
    hit_chunks: tuple[int, ...]
    chunk_tokens: int
    tokens: int
    requests: int
    unique_chunks: int
    """In the whole trace: with room for them nothing is ever lost."""

    @property
    def hit_tokens(self) -> tuple[int, ...]:
        """Tokens that were not computed, by capacity."""
        return tuple(chunks * self.chunk_tokens for chunks in self.hit_chunks)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the tokens that were not computed, by capacity."""
        return tuple(hits / self.tokens if self.tokens else 0.0 for hits in self.hit_tokens)

    def capacity_for(self, share: float) -> int | None:
        """The smallest of the capacities that reaches this share; None when none does."""
        reached = (c for c, s in zip(self.capacities, self.shares, strict=True) if s >= share)
        return next(reached, None)


def even_capacities(unique_chunks: int, points: int = POINTS) -> tuple[int, ...]:
    """Capacities at even steps up to room for everything, without repeating one."""
    steps = (-(-unique_chunks * step // points) for step in range(1, points + 1))
    return tuple(sorted(set(steps) - {0}))


def lru(
    trace: Trace,
    capacities: Sequence[int] | None = None,
    *,
    measured: Measured | None = None,
    last_token_computed: bool = True,
) -> Curve:
    """Hits of a least-recently-used cache at every capacity, from one pass over the trace.

    ``capacities`` are chunks; None takes twenty up to room for everything. A chunk that holds a
    prompt's last token is computed in any case, unless ``last_token_computed`` is False. Memory
    grows with the distinct chunks. UsageError for keys that are not chained.
    """
    distances, chain = StackDistances(), _Chain()
    histogram = np.zeros(1, dtype=np.int64)
    tokens = requests = 0
    for batch in _batches(trace, distances, measured, last_token_computed):
        tokens, requests = tokens + batch.tokens, requests + batch.requests
        chain.check(batch.ids, batch.before)
        depths = distances.feed(batch.ids)
        seen = depths != COLD
        depths -= batch.deeper  # a request is looked up before it is put on the stack
        hits = np.bincount(depths[seen & batch.counts])
        if len(hits) > len(histogram):
            histogram = np.pad(histogram, (0, len(hits) - len(histogram)))
        histogram[: len(hits)] += hits
    chosen = _capacities(capacities, distances.keys)
    reached = np.concatenate(([0], np.cumsum(histogram)))
    return Curve(
        policy="lru",
        capacities=chosen,
        hit_chunks=tuple(int(reached[min(size, len(histogram))]) for size in chosen),
        chunk_tokens=trace.chunk_tokens,
        tokens=tokens,
        requests=requests,
        unique_chunks=distances.keys,
    )


def optimal(
    trace: Trace,
    capacities: Sequence[int] | None = None,
    *,
    measured: Measured | None = None,
    last_token_computed: bool = True,
) -> Curve:
    """The most that any policy could hit at every capacity, knowing the whole trace.

    Keeping a chunk from one use to the next is worth one hit and takes one place meanwhile; where
    more chunks are wanted than there are places, the one used last is let go (Belady, 1966), or
    never taken in. Memory grows with the trace: about 50 bytes for each chunk of each request.
    """
    ids, starts, counts, tokens = _flat(trace, measured, last_token_computed)
    requests = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = np.argsort(ids, kind="stable")
    again = ids[order][1:] == ids[order][:-1]
    first, second = order[:-1][again], order[1:][again]
    worth = counts[second]
    begin, end = requests[first][worth], requests[second][worth]
    by_begin = np.argsort(begin, kind="stable")
    wanted = [
        part.tolist()
        for part in np.split(
            end[by_begin], np.searchsorted(begin[by_begin], np.arange(1, len(starts) - 1))
        )
    ]
    unique = int(ids.max()) + 1 if len(ids) else 0
    chosen = _capacities(capacities, unique)
    return Curve(
        policy="optimal",
        capacities=chosen,
        hit_chunks=tuple(_kept(wanted, size) for size in chosen),
        chunk_tokens=trace.chunk_tokens,
        tokens=tokens[0],
        requests=tokens[1],
        unique_chunks=unique,
    )


def _kept(wanted: list[list[int]], capacity: int) -> int:
    """How many chunks can be kept until their next use, request by request.

    ``wanted`` names for each request the next uses of its chunks. The heap also holds uses that are
    past; they are nearer than all others, so they never come out of it.
    """
    ending = [0] * (len(wanted) + 1)
    heap: list[int] = []
    held = hits = 0
    for request, ends in enumerate(wanted):
        hits += ending[request]
        held -= ending[request]
        for end in ends:
            heapq.heappush(heap, -end)
            ending[end] += 1
        held += len(ends)
        while held > capacity:
            ending[-heapq.heappop(heap)] -= 1
            held -= 1
        if len(heap) > 4 * (held + 1024):
            heap = [end for end in heap if -end > request]
            heapq.heapify(heap)
    return hits


def _capacities(given: Sequence[int] | None, unique: int) -> tuple[int, ...]:
    if given is None:
        return even_capacities(unique)
    if any(size < 0 for size in given):
        raise UsageError(
            f"a cache of {min(given)} chunks cannot be", hint="give capacities of 0 or more"
        )
    return tuple(sorted(given))


class _Ids(dict[Hashable, int]):
    """Keys to numbers, counted up as they are first seen."""

    def __missing__(self, key: Hashable) -> int:
        number = self[key] = len(self)
        return number


@dataclass(frozen=True, slots=True)
class _Batch:
    """Whole requests, each with its deepest chunk first."""

    ids: NDArray[np.int64]
    deeper: NDArray[np.int64]
    """Chunks of the same request behind it."""
    before: NDArray[np.int64]
    """The chunk before it in its request, or FIRST."""
    counts: NDArray[np.bool_]
    """Whether a hit of it counts."""
    tokens: int
    requests: int


def _batches(
    trace: Trace, distances: StackDistances, measured: Measured | None, last_token_computed: bool
) -> Iterator[_Batch]:
    number = _Ids().__getitem__
    ids: list[int] = []
    lengths: list[int] = []
    usable: list[int] = []
    tokens = requests = 0
    for request in trace:
        keys = request.keys
        ids.extend(map(number, reversed(keys)))
        lengths.append(len(keys))
        if measured is None or measured(request):
            tokens += request.tokens
            requests += 1
            usable.append(_usable(request, trace.chunk_tokens, last_token_computed))
        else:
            usable.append(0)
        if len(ids) >= max(LEAST_BATCH, distances.keys // 4):
            yield _batch(ids, lengths, usable, tokens, requests)
            ids, lengths, usable, tokens, requests = [], [], [], 0, 0
    yield _batch(ids, lengths, usable, tokens, requests)


def _batch(
    ids: list[int], lengths: list[int], usable: list[int], tokens: int, requests: int
) -> _Batch:
    sizes = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    deeper = np.arange(len(ids)) - np.repeat(ends - sizes, sizes)
    depth = np.repeat(sizes, sizes) - deeper  # counts from 1
    counts = depth <= np.repeat(np.array(usable, dtype=np.int64), sizes)
    numbers = np.array(ids, dtype=np.int64)
    before = np.where(depth == 1, FIRST, np.append(numbers[1:], FIRST))
    return _Batch(numbers, deeper, before, counts, tokens, requests)


def _usable(request: Request, chunk_tokens: int, last_token_computed: bool) -> int:
    chunks = len(request.keys)
    return min(chunks, (request.tokens - 1) // chunk_tokens) if last_token_computed else chunks


class _Chain:
    """Which chunk comes before each: it is always the same one, or the keys are no prefixes."""

    def __init__(self) -> None:
        self._before = np.empty(0, dtype=np.int64)

    def check(self, ids: NDArray[np.int64], before: NDArray[np.int64]) -> None:
        """UsageError where a chunk comes after another one than before. FIRST: after none."""
        missing = int(ids.max(initial=-1)) + 1 - len(self._before)
        if missing > 0:
            room = np.full(max(missing, len(self._before)), UNKNOWN, dtype=np.int64)
            self._before = np.concatenate((self._before, room))
        new = self._before[ids] == UNKNOWN
        self._before[ids[new]] = before[new]
        if (self._before[ids] != before).any():
            raise UsageError(
                "the trace's keys are not chained: a chunk follows on different ones",
                hint="a key must stand for the whole prefix, as LMCache's chunk hashes do",
            )


def _flat(
    trace: Trace, measured: Measured | None, last_token_computed: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], tuple[int, int]]:
    """All chunks of all requests in order, where each request begins, and which hits count."""
    number = _Ids().__getitem__
    ids: list[NDArray[np.int64]] = []
    lengths: list[int] = []
    usable: list[int] = []
    tokens = requests = 0
    for request in trace:
        ids.append(np.fromiter(map(number, request.keys), np.int64, len(request.keys)))
        lengths.append(len(request.keys))
        if measured is None or measured(request):
            tokens += request.tokens
            requests += 1
            usable.append(_usable(request, trace.chunk_tokens, last_token_computed))
        else:
            usable.append(0)
    sizes = np.array(lengths, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    flat = np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)
    depth = np.arange(len(flat)) - np.repeat(starts[:-1], sizes) + 1
    counts = depth <= np.repeat(np.array(usable, dtype=np.int64), sizes)
    return flat, starts, counts, (tokens, requests)
