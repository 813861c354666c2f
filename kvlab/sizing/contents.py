"""What is in vLLM's cache (L0), in LMCache's memory (L1) and on its disk (L2), and what is found.

The rules are those of vLLM 0.32 and LMCache 0.5.6, as far as they decide what is found where:

- A hit is a run of whole chunks from the start; the first missing chunk ends it, and the last
  token is always computed. What vLLM holds itself (L0) is not asked of LMCache.
- L0 forgets the least recently used block when it needs room, the deeper block of a request first.
  Of a hybrid's states it keeps few: the one where the same prompt would go on, and one where a
  request parted from an earlier one (``prefix_cache_retention_interval`` 0, vLLM's default).
- L1 takes what was computed. Once a second a loop compares it with the watermark and, above it,
  deletes ``int(ratio x objects)`` of the objects, least recently used first, except those that are
  still being written to L2. Without room a store fails: nothing is deleted for it.
- Every stored object is then written to L2, one after another; it can be read from there when its
  write has ended. What is loaded from L2 passes through L1 and does not stay.
- With separate object groups, K and V and the recurrent state of a chunk are two objects, and of
  the states a hit needs only the one at its end (LMCache: a window of one chunk).
- LMCache counts as L1 the leading chunks found there; the rest of a hit that needs L2 is L2's.

Dictionaries are in the order of last use, the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvlab.sizing.tiers import Tiers
from kvlab.sizing.trace import Request


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


class _State(NamedTuple):
    """The key of the recurrent state of a chunk, where it is an object of its own."""

    key: Hashable


class Contents:
    """What the tiers hold while a trace is played."""

    def __init__(self, tiers: Tiers, chunk_tokens: int, *, timed: bool):
        self.set = tiers
        self.write_bytes_per_s = tiers.l2_write_bytes_per_s if timed else None
        self.chunk_tokens = chunk_tokens
        self.apart = tiers.state_bytes > 0
        self.size = tiers.chunk_bytes - tiers.state_bytes
        self.l0: OrderedDict[Hashable, bool] = OrderedDict()
        self.l0_used = 0.0
        self.l1: OrderedDict[Hashable, bool] = OrderedDict()
        """Objects, and whether they hold the recurrent state at the end of their chunk."""
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
        free: Iterable[Hashable] = (key for key in held if key not in pinned) if pinned else held
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
        own, seen = self._own(keys, usable)
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
        if self.set.l0_chunks != 0:
            self._keep(keys, [own, *self._saved(hit, seen, usable)])
        return served, found

    def _own(self, keys: Sequence[Hashable], usable: int) -> tuple[int, int]:
        """Leading chunks that vLLM can use of its own, and those whose K and V it holds."""
        held = self.l0
        seen = 0
        for key in keys[:usable]:
            if key not in held:
                break
            seen += 1
        if not self.set.l0_state_chunks:
            return seen, seen
        depths = range(seen, 0, -1)
        return next((n for n in depths if _State(keys[n - 1]) in held), 0), seen

    def _saved(self, hit: int, seen: int, usable: int) -> list[int]:
        """The depths at which vLLM keeps the state that a request leaves there.

        That is where the same prompt would go on, and where a request first parted from one that
        was there before: only from then on can that prefix be a hit.
        """
        if seen > hit and (seen - hit) % self.set.state_every == 0:
            return [seen, usable]
        return [usable]

    def _keep(self, keys: Sequence[Hashable], states: list[int]) -> None:
        """Put all chunks of a request into L0, the deepest as the oldest of them, then states."""
        held, limit, weight = self.l0, self.set.l0_chunks, self.set.l0_state_chunks
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = True
                self.l0_used += 1
        for depth in states if weight else ():
            if depth:
                end = _State(keys[depth - 1])
                self.l0_used += 0 if end in held else weight
                held[end] = True
                held.move_to_end(end)
        if limit is not None:
            while self.l0_used > limit:
                gone, _ = held.popitem(last=False)
                self.l0_used -= weight if type(gone) is _State else 1

    def _restore(
        self, keys: Sequence[Hashable], usable: int, own: int
    ) -> tuple[int, int, int, int]:
        """Chunks that LMCache has, how many of them lead in L1, and the bytes read of each tier."""
        l1, l2 = self.l1, self.l2
        found = 0
        for depth, key in enumerate(keys[:usable], 1):
            state = l1.get(key)
            if state is None:
                state = l2.get(key)
                if state is None:
                    break
            if self.apart:
                end = _State(key)
                state = end in l1 or end in l2
            if state:
                found = depth
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
        new = list(zip(keys, states, strict=True))[found:]
        for key, state in new:
            self._put(key, state, self.size, now_s)
        if self.apart:
            for key, state in new:
                if state:
                    self._put(_State(key), True, self.set.state_bytes, now_s)

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
