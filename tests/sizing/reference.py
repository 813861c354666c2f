"""The tiers once more, written to be read and not to be fast: what the simulator is held against.

Everything is a list from the oldest to the newest, looked through from the start; nothing is
counted along. Only its rules, which stand in the simulator's docstring, are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.sizing.simulator import Served, Tiers
from kvlab.sizing.trace import Trace


@dataclass
class Object:
    key: object
    part: str  # "chunk", or "kv" and "state" where they are apart
    size: int
    state: bool
    written_s: float = -1.0

    @property
    def name(self):
        return (self.key, self.part)


@dataclass
class Reference:
    tiers: Tiers
    chunk: int
    l0: list = field(default_factory=list)
    l1: list = field(default_factory=list)
    l2: list = field(default_factory=list)
    on_the_way: list = field(default_factory=list)
    looks: int = 0
    ticks: int = 0
    evicted: int = 0
    failed_stores: int = 0
    failed_loads: int = 0

    def parts(self, key, state):
        t = self.tiers
        if not t.state_bytes:
            return [Object(key, "chunk", t.chunk_bytes, state)]
        kv = Object(key, "kv", t.chunk_bytes - t.state_bytes, True)
        return [kv, Object(key, "state", t.state_bytes, True)] if state else [kv]

    def used(self, tier):
        return sum(one.size for one in tier)

    def find(self, tier, key, part):
        return next((one for one in tier if one.name == (key, part)), None)

    def land(self, now_s):
        for one in list(self.on_the_way):
            if one.written_s <= now_s:
                self.on_the_way.remove(one)
                self.l2.append(one)

    def look(self):
        t = self.tiers
        if t.l1_bytes is None:
            return
        self.ticks += 1
        for tier, size, mark, ratio in (
            (self.l1, t.l1_bytes, t.watermark, t.ratio),
            (self.l2, t.l2_bytes, t.l2_watermark, t.l2_ratio),
        ):
            if size is None or not tier or self.used(tier) < mark * size:
                continue
            busy = [one.name for one in self.on_the_way] if tier is self.l1 else []
            victims = [one for one in tier if one.name not in busy]
            for one in victims[: max(1, int(len(tier) * ratio))]:
                tier.remove(one)
                self.evicted += 1

    def advance(self, now_s):
        first_s, every_s = self.tiers.first_look_s, self.tiers.loop_s
        while first_s + self.looks * every_s <= now_s:
            self.land(first_s + self.looks * every_s)
            self.looks += 1
            self.look()
        self.land(now_s)

    def serve(self, number, request, start_s):
        t = self.tiers
        usable = min(len(request.keys), (request.tokens - 1) // self.chunk)
        own = seen = 0
        for depth, key in enumerate(request.keys[:usable], 1):
            if (key, "chunk") not in self.l0:
                break
            seen = depth
            own = depth if not t.l0_state_chunks or (key, "state") in self.l0 else own
        found = leading = l1_bytes = l2_bytes = 0
        if t.l1_bytes is not None:
            found, leading, l1_bytes, l2_bytes = self.restore(request.keys, usable, own)
        hit = max(own, found)
        l1 = max(0, min(leading, hit) - own)
        self.keep(request.keys, own, hit, seen, usable)
        c = self.chunk
        served = Served(
            number, request.label, request.tokens, own * c, l1 * c, (hit - own - l1) * c,
            request.tokens - hit * c, l1_bytes, l2_bytes, start_s,
        )  # fmt: skip
        return served, found, hit

    def has_state(self, depth, count, hit):
        every = self.tiers.state_every
        return depth == count or (depth - hit) % every == 0

    def keep(self, keys, own, hit, seen, usable):
        t = self.tiers
        if t.l0_chunks == 0:
            return
        names = [(key, "chunk") for key in reversed(keys)]
        if t.l0_state_chunks:
            parted = [seen] if seen > hit and (seen - hit) % t.state_every == 0 else []
            names += [(keys[n - 1], "state") for n in (own, *parted, usable) if n]
        for name in names:
            self.l0 = [other for other in self.l0 if other != name] + [name]
        weights = {"chunk": 1, "state": t.l0_state_chunks}
        while t.l0_chunks is not None and sum(weights[p] for _, p in self.l0) > t.l0_chunks:
            self.l0.pop(0)

    def restore(self, keys, usable, own):
        main = "kv" if self.tiers.state_bytes else "chunk"
        found = 0
        for depth, key in enumerate(keys[:usable], 1):
            one = self.find(self.l1, key, main) or self.find(self.l2, key, main)
            if one is None:
                break
            state = one.state
            if main == "kv":
                state = self.find(self.l1 + self.l2, key, "state") is not None
            found = depth if state else found
        if not found:
            return 0, 0, 0, 0
        needed = [(key, main) for key in keys[:found]]
        if main == "kv":
            needed.append((keys[found - 1], "state"))
        for name in reversed(needed):
            one = self.find(self.l1, *name)
            if one:
                self.l1.remove(one)
                self.l1.append(one)
        if found <= own:
            return found, found, 0, 0
        leading = 0
        while leading < found and self.find(self.l1, *needed[leading]):
            leading += 1
        read = needed[own:]
        l1_bytes = sum(one.size for one in (self.find(self.l1, *name) for name in read) if one)
        disk = [name for name in read if not self.find(self.l1, *name)]
        for name in disk:
            if self.tiers.l2_bytes is not None:
                one = self.find(self.l2, *name)
                self.l2.remove(one)
                self.l2.append(one)
        l2_bytes = sum(self.find(self.l2, *name).size for name in disk)
        if l2_bytes <= self.tiers.l1_bytes - self.used(self.l1):
            return found, leading, l1_bytes, l2_bytes
        self.failed_loads += sum(1 for name in needed if not self.find(self.l1, *name))
        while leading:
            key = keys[leading - 1]
            whole = self.find(self.l1, key, main).state
            if whole if main == "chunk" else self.find(self.l1, key, "state"):
                break
            leading -= 1
        t = self.tiers
        kv_bytes = max(0, leading - own) * (t.chunk_bytes - t.state_bytes)
        return leading, leading, kv_bytes + (t.state_bytes if leading > own else 0), 0

    def store(self, keys, found, hit, now_s):
        t = self.tiers
        if t.l1_bytes is None:
            return
        pieces = [
            piece
            for depth, key in enumerate(keys, 1)
            if depth > found
            for piece in self.parts(key, self.has_state(depth, len(keys), hit))
        ]
        for piece in sorted(pieces, key=lambda one: one.part == "state"):
            held = self.find(self.l1, *piece.name)
            if held:
                held.state = held.state or piece.state
                continue
            if self.used(self.l1) + piece.size > t.l1_bytes:
                self.failed_stores += 1
                continue
            self.l1.append(piece)
            if not t.l2 or self.find(self.l2, *piece.name):
                continue
            copy = Object(piece.key, piece.part, piece.size, piece.state)
            last_s = max([one.written_s for one in self.on_the_way], default=now_s)
            rate = t.l2_write_bytes_per_s
            copy.written_s = max(last_s, now_s) + (piece.size / rate if rate else 0.0)
            self.on_the_way.append(copy)
        if not t.l2_write_bytes_per_s:
            self.land(float("inf"))


def run(trace: Trace, tiers: Tiers, ttft_s):
    """Every request as served, and the reference as it was left; one request at a time."""
    reference = Reference(tiers, trace.chunk_tokens)
    done_s, served = 0.0, []
    for number, request in enumerate(trace):
        start_s = max(done_s + request.gap_s, request.at_s)
        reference.advance(start_s)
        one, found, hit = reference.serve(number, request, start_s)
        done_s = start_s + ttft_s(one)
        reference.store(request.keys, found, hit, done_s)
        served.append(one)
    return served, reference
