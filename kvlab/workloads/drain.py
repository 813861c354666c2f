"""Waiting until the cache has written what it was given: by evidence, not by sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlab import counters
from kvlab.disk.inventory import Survey, survey
from kvlab.profile import Cache
from kvlab.records import now_ns
from kvlab.stack import Deployment
from kvlab.units import GIB, NS_PER_S, ns_to_s

POLL_S = 0.25
QUIET_S = 0.75
"""Nothing may have changed for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What the cache had written at one moment; None where it does not say."""

    at_ns: int
    submitted: float | None
    completed: float | None
    failed: float | None
    inflight: float | None = None
    """Stores to L2 under way; a store that failed is in none of the counts of objects."""
    written: float | None
    """Chunks written to L1."""
    l1_bytes: float | None = None
    l1_limit_bytes: float | None = None
    """Above this much LMCache evicts, about once a second."""
    files: int
    bytes: int

    @property
    def complete(self) -> bool:
        """Nothing is under way, no store and no eviction, as far as the counters say."""
        if None not in (self.l1_bytes, self.l1_limit_bytes):
            assert self.l1_bytes is not None
            assert self.l1_limit_bytes is not None
            if self.l1_bytes > self.l1_limit_bytes:
                return False
        if self.inflight:
            return False
        if self.inflight == 0 or self.submitted is None:
            return True
        return (self.completed or 0) + (self.failed or 0) >= self.submitted

    @property
    def work(self) -> tuple[Any, ...]:
        return (
            *(self.submitted, self.completed, self.failed, self.inflight, self.written),
            *(self.l1_bytes, self.files, self.bytes),
        )


def settled(polls: Sequence[Poll], quiet_s: float = QUIET_S) -> bool:
    """Whether the last polls show everything written and nothing changing for ``quiet_s``."""
    last = polls[-1]
    if not last.complete:
        return False
    since = last.at_ns
    for poll in reversed(polls):
        if poll.work != last.work:
            break
        since = poll.at_ns
    return last.at_ns - since >= quiet_s * NS_PER_S


async def drain(stack: Deployment, cache: Cache, deadline_s: float) -> dict[str, Any]:
    """What the cache had written when it came to rest, or at the deadline (``stable`` is False).

    The detail of a ``drained`` event: seconds waited, objects submitted, completed and failed,
    files and bytes in the L2 folder, and its odd files.
    """
    started_ns = now_ns()
    polls: list[Poll] = []
    limit_bytes = cache.eviction_watermark * cache.l1_size_gb * GIB
    while True:
        stack.check_alive()
        poll, found = await _poll(stack, limit_bytes)
        polls.append(poll)
        stable = settled(polls)
        waited_s = ns_to_s(poll.at_ns - started_ns)
        if stable or waited_s >= deadline_s:
            return {
                "waited_s": waited_s,
                "stable": stable,
                "submitted": poll.submitted,
                "completed": poll.completed,
                "failed": poll.failed,
                "written_chunks": poll.written,
                "l1_bytes": poll.l1_bytes,
                **_found(found),
            }
        await asyncio.sleep(POLL_S)


async def _poll(stack: Deployment, l1_limit_bytes: float) -> tuple[Poll, Survey | None]:
    readings = await stack.scrape(only="lmcache")
    samples = readings[0].samples if readings else None
    found = survey(stack.l2_path) if stack.l2_path else None

    def read(name: str) -> float | None:
        return counters.read(samples, name) if samples is not None else None

    poll = Poll(
        at_ns=now_ns(),
        submitted=read("l2_store_submitted"),
        completed=read("l2_store_completed"),
        failed=read("l2_store_failed"),
        inflight=read("l2_store_inflight"),
        written=read("l1_write_chunks"),
        l1_bytes=read("l1_memory_bytes"),
        l1_limit_bytes=l1_limit_bytes,
        files=found.files if found else 0,
        bytes=found.bytes if found else 0,
    )
    return poll, found


def _found(found: Survey | None) -> dict[str, Any]:
    if found is None:
        return {"files": None, "bytes": None, "odd_files": None}
    detail = asdict(found)
    detail["sizes"] = {str(size): count for size, count in found.sizes.items()}
    return {**detail, "odd_files": found.odd}
