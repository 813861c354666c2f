"""Which tier serves which tokens: vLLM's cache (L0), LMCache in memory (L1) and on disk (L2).

The rules are those of vLLM 0.32 and LMCache 0.5.6, as far as they decide what is found where:

- A hit is a run of whole chunks from the start; the first missing chunk ends it, and the last
  token is always computed. What vLLM holds itself (L0) is not asked of LMCache.
- L0 forgets the least recently used block when it needs room, the deeper block of a request first.
- L1 takes what was computed. Once a second a loop compares it with the watermark and, above it,
  deletes ``int(ratio x objects)`` of the objects, least recently used first, except those that are
  still being written to L2. Without room a store fails: nothing is deleted for it.
- Every stored object is then written to L2, one after another; it can be read from there when its
  write has ended. What is loaded from L2 passes through L1 and does not stay.
- With separate object groups, K and V and the recurrent state of a chunk are two objects, and of
  the states a hit needs only the one at its end (LMCache: a window of one chunk).
- LMCache counts as L1 the leading chunks found there; the rest of a hit that needs L2 is L2's.

Not simulated: the time that lookups and copies take from each other, and requests that start while
another is running see what that one will store. Memory grows with what the tiers hold, not with
the trace; an L2 without a limit holds every chunk ever stored, as ``fs`` does.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

from kvlab.profile import Profile
from kvlab.sizing.distribution import Distribution
from kvlab.sizing.model import Arithmetic
from kvlab.sizing.trace import Request, Trace
from kvlab.units import GIB

TIERS = ("L0", "L1", "L2", "recompute")
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """How large the tiers are and how they let go of what they hold."""

    chunk_bytes: int
    """One chunk in LMCache, states included, over all workers."""
    state_bytes: int = 0
    """The part of it that is an object of its own (separate object groups); 0: one object."""
    l0_chunks: int | None
    """Chunks that vLLM's own cache holds; None = no limit, 0 = it reuses nothing."""
    l1_bytes: float | None = None
    """None: vLLM alone."""
    watermark: float = 0.8
    ratio: float = 0.2
    loop_s: float = 1.0
    """Seconds between two looks of the eviction loop."""
    first_look_s: float = 1.0
    """When it looks first: which chunks are left in L1 depends on it, and no setting decides it."""
    l2: bool = False
    l2_bytes: float | None = None
    """None: it is never emptied."""
    l2_watermark: float = 0.8
    l2_ratio: float = 0.2
    l2_write_bytes_per_s: float | None = None
    """None: a store is on L2 at once."""
    state_every: int = 1
    """Chunks between two kept recurrent states; 1 also where there are none."""


class Served(NamedTuple):
    """Where the tokens of one request came from."""

    number: int
    """Its place in the trace, from 0."""
    label: str
    tokens: int
    l0: int
    l1: int
    l2: int
    recompute: int
    l1_bytes: int
    """Bytes copied from L1 to vLLM without having been loaded from L2."""
    l2_bytes: int
    """Bytes loaded from L2."""
    start_s: float


Times = Callable[[Served], float]
"""Seconds from a request's start to its first token."""


@dataclass(slots=True)
class RoundOutcome:
    """The requests of one round, summed."""

    requests: int = 0
    tokens: int = 0
    served: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    """Tokens by tier; they sum to ``tokens``."""
    ttft: Distribution = field(default_factory=Distribution)
    """Seconds, where a time function was given."""

    @property
    def hit_share(self) -> float | None:
        """Share of the tokens that were not computed; None without tokens."""
        return 1 - self.served["recompute"] / self.tokens if self.tokens else None

    def share(self, tier: str) -> float | None:
        """Share of the tokens that a tier served; None without tokens."""
        return self.served[tier] / self.tokens if self.tokens else None


@dataclass(slots=True)
class Counts:
    """What the tiers did, in LMCache's terms."""

    l1_written_bytes: int = 0
    l1_read_bytes: int = 0
    l2_written_bytes: int = 0
    l2_read_bytes: int = 0
    l1_evicted_objects: int = 0
    l2_evicted_objects: int = 0
    failed_stores: int = 0
    """Objects that found no room in L1."""
    failed_loads: int = 0
    """Objects on L2 that found no room in L1 to pass through."""
    loop_ticks: int = 0
    loop_triggered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trace did to the tiers."""

    rounds: dict[str, RoundOutcome]
    """By label, in the order in which they first appeared."""
    counts: Counts
    seconds: float
    """From the start to the last first token; 0 without a time function."""
    l1_resident_bytes: int
    l2_resident_bytes: int
    l2_backlog_bytes: int
    """Stored, and not yet written to L2 at the end."""

    @property
    def total(self) -> RoundOutcome:
        """All rounds together, without their times."""
        whole = RoundOutcome()
        for one in self.rounds.values():
            whole.requests += one.requests
            whole.tokens += one.tokens
            for tier in TIERS:
                whole.served[tier] += one.served[tier]
        return whole

    @property
    def l2_growth_bytes_per_day(self) -> float | None:
        """Bytes that stay on L2 per day at the trace's pace; None when no time passed."""
        kept = self.l2_resident_bytes + self.l2_backlog_bytes
        return kept / self.seconds * SECONDS_PER_DAY if self.seconds else None


def tiers_of(
    profile: Profile,
    sizes: Arithmetic,
    scenario: Literal["baseline", "lmcache"] = "lmcache",
    *,
    l0_chunks: int | None = None,
    l2_write_bytes_per_s: float | None = None,
) -> Tiers:
    """The tiers that a profile sets up for a model of these sizes.

    L0 is ``l0_chunks`` where that is known from a log; else the pool of
    ``num-gpu-blocks-override``, shared out between K and V and the states of every block; else
    ``engine.kv_cache_tokens``; else it has no limit.
    """
    cache = profile.cache
    with_lmcache = scenario == "lmcache"
    apart = bool(cache.separate_object_groups) and sizes.is_hybrid
    records = sizes.record_bytes(cache.chunk_tokens, apart)
    limit = cache.l2.adapter.get("max_capacity_gb") if cache.l2 else None
    return Tiers(
        chunk_bytes=sum(records) * sizes.workers,
        state_bytes=records[1] * sizes.workers if apart else 0,
        l0_chunks=_l0_chunks(profile, sizes) if l0_chunks is None else l0_chunks,
        l1_bytes=cache.l1_size_gb * GIB if with_lmcache else None,
        watermark=cache.eviction_watermark,
        ratio=cache.eviction_ratio,
        l2=with_lmcache and cache.l2 is not None,
        l2_bytes=float(limit) * GIB if limit else None,
        l2_write_bytes_per_s=l2_write_bytes_per_s,
        state_every=_state_every(profile, sizes) if sizes.is_hybrid else 1,
    )


def _state_every(profile: Profile, sizes: Arithmetic) -> int:
    """Chunks between two that end where a scheduler step of whole blocks ends: 1 with 2N-1."""
    step = max(1, profile.engine.max_num_batched_tokens // sizes.block_tokens)
    chunk = max(1, profile.cache.chunk_tokens // sizes.block_tokens)
    return step // math.gcd(step, chunk)


def _l0_chunks(profile: Profile, sizes: Arithmetic) -> int | None:
    engine, chunk = profile.engine, profile.cache.chunk_tokens
    if not engine.prefix_caching:
        return 0
    if pool := engine.flags.get("num-gpu-blocks-override"):
        blocks = int(pool) // (sizes.attention_groups + sizes.state_groups)
        return blocks * sizes.block_tokens // chunk
    return engine.kv_cache_tokens // chunk if engine.kv_cache_tokens else None


def simulate(
    trace: Trace,
    tiers: Tiers,
    *,
    ttft_s: Times | None = None,
    concurrency: int = 1,
    each: Callable[[Served, float], None] | None = None,
) -> Outcome:
    """What the tiers serve of a trace, and what that moves.

    ``ttft_s`` gives each request its time: with it there is a clock, ``concurrency`` requests are
    in flight, and the loop and the writes to L2 take their time. Without it the loop looks once
    between any two requests and writes end at once. ``each`` is told of every request and its TTFT.
    """
    clock = _Clock(concurrency) if ttft_s else None
    stack = _Tiers(tiers, trace.chunk_tokens, timed=clock is not None)
    rounds: dict[str, RoundOutcome] = {}
    for number, request in enumerate(trace):
        start_s = clock.start(request, stack) if clock else stack.settle(request.drained)
        served, found = stack.look_up(number, request, start_s)
        took_s = 0.0
        if clock and ttft_s:
            took_s = ttft_s(served)
            clock.finish(start_s + took_s)
        stack.store(request, served, found, start_s + took_s)
        outcome = rounds.get(request.label)
        if outcome is None:
            outcome = rounds[request.label] = RoundOutcome()
        _add(outcome, served)
        if ttft_s:
            outcome.ttft.add(took_s)
        if each:
            each(served, took_s)
    return Outcome(
        rounds=rounds,
        counts=stack.counts,
        seconds=clock.last_s if clock else 0.0,
        l1_resident_bytes=stack.l1_used,
        l2_resident_bytes=stack.l2_used,
        l2_backlog_bytes=sum(size for _, _, size in stack.writing),
    )


def _add(outcome: RoundOutcome, served: Served) -> None:
    outcome.requests += 1
    outcome.tokens += served.tokens
    by_tier = outcome.served
    by_tier["L0"] += served.l0
    by_tier["L1"] += served.l1
    by_tier["L2"] += served.l2
    by_tier["recompute"] += served.recompute


class _Clock:
    """When requests start, with so many in flight."""

    def __init__(self, concurrency: int):
        self.free_s = [0.0] * concurrency
        self.last_s = 0.0

    def start(self, request: Request, tiers: _Tiers) -> float:
        """When the request starts; what the tiers do until then has been done.

        One before it is done, its moment has come, and drain and pause are over.
        """
        start_s = heapq.heappop(self.free_s)
        if request.drained or request.gap_s:
            start_s = max(start_s, self.last_s)  # a round begins when all of the last one is done
        if request.drained:
            start_s = tiers.drain(start_s)
        start_s = max(start_s + request.gap_s, request.at_s)
        tiers.advance(start_s)
        return start_s

    def finish(self, done_s: float) -> None:
        heapq.heappush(self.free_s, done_s)
        self.last_s = max(self.last_s, done_s)


class _State(NamedTuple):
    """The key of the recurrent state of a chunk, where it is an object of its own."""

    key: Hashable


class _Tiers:
    """The contents of the tiers. Dictionaries are in the order of last use, the oldest first."""

    def __init__(self, tiers: Tiers, chunk_tokens: int, *, timed: bool):
        self.set = tiers
        self.write_bytes_per_s = tiers.l2_write_bytes_per_s if timed else None
        self.chunk_tokens = chunk_tokens
        self.apart = tiers.state_bytes > 0
        self.size = tiers.chunk_bytes - tiers.state_bytes
        self.l0: OrderedDict[Hashable, bool] = OrderedDict()
        """Chunks, and whether the recurrent state at their end was kept."""
        self.l1: OrderedDict[Hashable, bool] = OrderedDict()
        self.l2: OrderedDict[Hashable, bool] = OrderedDict()
        self.l1_used = self.l2_used = 0
        self.writing: deque[tuple[float, Hashable, int]] = deque()
        """Objects on their way to L2: when they will be there, and their bytes."""
        self.pinned: dict[Hashable, bool] = {}
        """The same by key: L1 keeps them meanwhile."""
        self.next_tick_s = tiers.first_look_s
        self.written_s = 0.0
        self.counts = Counts()

    # Time

    def advance(self, now_s: float) -> None:
        """Let the loop and the writes do what falls before ``now_s``."""
        if self.set.l1_bytes is None:
            return
        while self.next_tick_s <= now_s:
            self._write_until(self.next_tick_s)
            if not self.tick() and not self.writing:
                idle = int((now_s - self.next_tick_s) // self.set.loop_s)
                self.counts.loop_ticks += idle
                self.next_tick_s += idle * self.set.loop_s
            self.next_tick_s += self.set.loop_s
        self._write_until(now_s)

    def settle(self, drained: bool) -> float:
        """One look of the loop without a clock, or as many as it takes; the time is 0."""
        while self.tick() and drained:
            pass
        return 0.0

    def drain(self, now_s: float) -> float:
        """When all writes have ended and L1 is below its watermark, from ``now_s`` on."""
        if self.writing:
            now_s = max(now_s, self.writing[-1][0])
            self.advance(now_s)
        while self._above(self.l1_used, self.set.l1_bytes, self.set.watermark):
            before = len(self.l1)
            now_s = max(now_s, self.next_tick_s)
            self.advance(now_s)
            if len(self.l1) == before:
                break
        return now_s

    def tick(self) -> bool:
        """One look of the eviction loops; True when one of them deleted something."""
        if self.set.l1_bytes is None:
            return False
        self.counts.loop_ticks += 1
        fired = False
        if self._above(self.l1_used, self.set.l1_bytes, self.set.watermark):
            self.counts.loop_triggered += 1
            fired = True
            victims = self._oldest(self.l1, self.set.ratio, self.pinned)
            for key in victims:
                del self.l1[key]
                self.l1_used -= self._size(key)
            self.counts.l1_evicted_objects += len(victims)
        if self._above(self.l2_used, self.set.l2_bytes, self.set.l2_watermark):
            fired = True
            victims = self._oldest(self.l2, self.set.l2_ratio, {})
            for key in victims:
                del self.l2[key]
                self.l2_used -= self._size(key)
            self.counts.l2_evicted_objects += len(victims)
        return fired

    @staticmethod
    def _above(used: int, size: float | None, watermark: float) -> bool:
        return bool(used) and size is not None and used >= watermark * size

    @staticmethod
    def _oldest(
        held: OrderedDict[Hashable, bool], ratio: float, pinned: dict[Hashable, bool]
    ) -> list[Hashable]:
        count = max(1, int(len(held) * ratio))
        free: Iterator[Hashable] = (
            (key for key in held if key not in pinned) if pinned else iter(held)
        )
        return list(islice(free, count))

    def _write_until(self, now_s: float) -> None:
        while self.writing and self.writing[0][0] <= now_s:
            _, key, size = self.writing.popleft()
            self._arrive(key, self.pinned.pop(key), size)

    def _arrive(self, key: Hashable, state: bool, size: int) -> None:
        self.l2[key] = state
        self.l2_used += size
        self.counts.l2_written_bytes += size

    # Lookup

    def look_up(self, number: int, request: Request, start_s: float) -> tuple[Served, int]:
        """What each tier serves of a request, and how many of its chunks LMCache has."""
        keys, chunk = request.keys, self.chunk_tokens
        usable = min(len(keys), (request.tokens - 1) // chunk)
        own = self._own(keys, usable)
        found = leading = l1_bytes = l2_bytes = 0
        if self.set.l1_bytes is not None:
            found, leading, l1_bytes, l2_bytes = self._restore(keys, usable, own)
        hit = max(own, found)
        l1 = max(0, min(leading, hit) - own)
        served = Served(
            number,
            request.label,
            request.tokens,
            own * chunk,
            l1 * chunk,
            (hit - own - l1) * chunk,
            request.tokens - hit * chunk,
            l1_bytes,
            l2_bytes,
            start_s,
        )
        self._keep(keys, hit)
        return served, found

    def _own(self, keys: Sequence[Hashable], usable: int) -> int:
        """Leading chunks in L0, up to the last one whose state was kept."""
        held, hit = self.l0, 0
        for depth in range(usable):
            state = held.get(keys[depth])
            if state is None:
                break
            if state:
                hit = depth + 1
        return hit

    def _keep(self, keys: Sequence[Hashable], hit: int) -> None:
        """Put all chunks of a request into L0, the deepest as the oldest of them."""
        held, limit = self.l0, self.set.l0_chunks
        if limit == 0:
            return
        states = self._states(len(keys), hit)
        for depth in range(len(keys) - 1, -1, -1):
            key = keys[depth]
            if key in held:
                held.move_to_end(key)
                if states[depth]:
                    held[key] = True
            else:
                held[key] = states[depth]
        if limit is not None:
            for _ in range(len(held) - limit):
                held.popitem(last=False)

    def _restore(
        self, keys: Sequence[Hashable], usable: int, own: int
    ) -> tuple[int, int, int, int]:
        """Chunks that LMCache has, how many of them lead in L1, and the bytes read of each tier."""
        l1, l2 = self.l1, self.l2
        found = depth = 0
        for depth in range(usable):
            key = keys[depth]
            state = l1.get(key)
            if state is None:
                state = l2.get(key)
                if state is None:
                    break
            if self.apart:
                end = _State(key)
                state = end in l1 or end in l2
            if state:
                found = depth + 1
        if not found:
            return 0, 0, 0, 0
        needed = list(keys[:found])
        if self.apart:
            needed.append(_State(keys[found - 1]))
        from_l1 = [key for key in needed if key in l1]
        for key in reversed(from_l1):
            l1.move_to_end(key)
        if found <= own:
            return found, found, 0, 0
        return self._load(needed, len(from_l1), found, own)

    def _load(
        self, needed: list[Hashable], in_l1: int, found: int, own: int
    ) -> tuple[int, int, int, int]:
        """Read what vLLM lacks; objects on L2 need room in L1 to pass through."""
        l1 = self.l1
        if in_l1 == len(needed):
            leading = found
        else:
            leading = next(n for n, key in enumerate(needed) if key not in l1)
        l1_bytes = l2_bytes = 0
        for key in needed[own:]:
            if key in l1:
                l1_bytes += self._size(key)
                continue
            l2_bytes += self._size(key)
            if self.set.l2_bytes is not None:
                self.l2.move_to_end(key)
        assert self.set.l1_bytes is not None
        if l2_bytes > self.set.l1_bytes - self.l1_used:
            self.counts.failed_loads += len(needed) - in_l1
            return self._only_l1(needed, leading, own)
        self.counts.l1_read_bytes += l1_bytes + l2_bytes
        self.counts.l2_read_bytes += l2_bytes
        return found, min(leading, found), l1_bytes, l2_bytes

    def _only_l1(self, needed: list[Hashable], leading: int, own: int) -> tuple[int, int, int, int]:
        """What is left of a hit when nothing can be loaded from L2."""
        depth = min(leading, len(needed) - self.apart)
        while depth and not (
            _State(needed[depth - 1]) in self.l1 if self.apart else self.l1[needed[depth - 1]]
        ):
            depth -= 1
        read = max(0, depth - own) * self.size + (self.set.state_bytes if depth > own else 0)
        self.counts.l1_read_bytes += read
        return depth, depth, read, 0

    # Store

    def store(self, request: Request, served: Served, found: int, now_s: float) -> None:
        """Give LMCache what it did not have of a request, K and V before the states."""
        keys = request.keys
        if self.set.l1_bytes is None or found >= len(keys):
            return
        hit = (served.tokens - served.recompute) // self.chunk_tokens
        states = self._states(len(keys), hit)
        for depth in range(found, len(keys)):
            self._put(keys[depth], states[depth], self.size, now_s)
        if self.apart:
            for depth in range(found, len(keys)):
                if states[depth]:
                    self._put(_State(keys[depth]), True, self.set.state_bytes, now_s)

    def _states(self, count: int, hit: int) -> Sequence[bool]:
        """At which chunks' ends the state is kept: at the steps' ends and the last whole one's."""
        every = self.set.state_every
        if every == 1:
            return [True] * count
        return [depth + 1 == count or (depth + 1 - hit) % every == 0 for depth in range(count)]

    def _put(self, key: Hashable, state: bool, size: int, now_s: float) -> None:
        if key in self.l1:
            self.l1[key] = self.l1[key] or state
            return
        assert self.set.l1_bytes is not None
        if self.l1_used + size > self.set.l1_bytes:
            self.counts.failed_stores += 1
            return
        self.l1[key] = state
        self.l1_used += size
        self.counts.l1_written_bytes += size
        if not self.set.l2 or key in self.l2:
            return
        if self.write_bytes_per_s is None:
            self._arrive(key, state, size)
            return
        self.written_s = max(self.written_s, now_s) + size / self.write_bytes_per_s
        self.writing.append((self.written_s, key, size))
        self.pinned[key] = state

    def _size(self, key: Hashable) -> int:
        return self.set.state_bytes if type(key) is _State else self.size
