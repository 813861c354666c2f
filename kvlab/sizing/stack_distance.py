"""How deep in an LRU stack each access finds its key: one pass answers for every capacity.

An LRU cache of any size holds the top of one and the same stack (Mattson et al., 1970), so an
access is a hit exactly where the capacity exceeds the number of other keys used since that key's
last use. That number is counted for a whole batch at once: between two uses of a key at ``p`` and
``t``, as many keys were used as there are accesses in between whose own last use is before ``p``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Depths = NDArray[np.int64]

LEAST_BATCH = 1 << 16
"""Accesses that are counted at a time, at least: what is done for every key is done so often."""
COLD = -1


class StackDistances:
    """The stack over all batches so far; its memory grows with the keys, not with the accesses."""

    def __init__(self) -> None:
        self._rank = np.full(1024, COLD, dtype=np.int64)
        """By id: the key's place in the stack, 0 the longest unused; COLD before its first use."""
        self._stack = np.empty(0, dtype=np.int64)
        """By place: the key's id."""

    @property
    def keys(self) -> int:
        """Keys seen so far."""
        return len(self._stack)

    def feed(self, ids: Ids) -> Depths:
        """For each access, how many other keys were used since the last use of its own; or COLD.

        Ids count up from 0 as they are first seen, though not in any order within the batch.
        """
        if not len(ids):
            return np.empty(0, dtype=np.int64)
        self._make_room(int(ids.max()) + 1)
        keys = self.keys
        last, newest = _last_uses(ids)
        inside = last >= 0
        places = self._rank[ids]
        places[inside] = keys + last[inside]
        earlier = _earlier_not_above(places)
        depths = np.where(inside, earlier - last - 1, earlier + keys - 1 - places)
        depths[places == COLD] = COLD
        self._restack(ids[newest])
        return depths

    def _make_room(self, ids: int) -> None:
        if ids > len(self._rank):
            longer = np.full(max(ids, 2 * len(self._rank)), COLD, dtype=np.int64)
            longer[: len(self._rank)] = self._rank
            self._rank = longer

    def _restack(self, used: Ids) -> None:
        """Put the batch's keys on top, in the order of their last use."""
        moved = self._rank[used]
        kept = np.ones(self.keys, dtype=bool)
        kept[moved[moved != COLD]] = False
        self._stack = np.concatenate((self._stack[kept], used))
        self._rank[self._stack] = np.arange(self.keys)


def _last_uses(ids: Ids) -> tuple[Ids, Ids]:
    """For each access the place of the last one of its key in the batch (-1: none), and the places
    of each key's newest access, rising."""
    order = np.argsort(ids, kind="stable")
    again = ids[order][1:] == ids[order][:-1]
    last = np.full(len(ids), -1, dtype=np.int64)
    last[order[1:][again]] = order[:-1][again]
    newest = np.ones(len(ids), dtype=bool)
    newest[order[:-1][again]] = False
    return last, np.flatnonzero(newest)


def _earlier_not_above(values: Ids) -> Depths:
    """For each value, how many before it are not above it.

    The values' ranks are split bit by bit from the top, as in a wavelet tree, keeping their order:
    every rank with a set bit counts the ranks before it in its group that lack it.
    """
    count = len(values)
    ranks = np.empty(count, dtype=np.int32)
    ranks[np.argsort(values, kind="stable")] = np.arange(count, dtype=np.int32)
    split = ranks.copy()
    below = np.zeros(count, dtype=np.int32)
    places = np.arange(count, dtype=np.int32)
    for bit in reversed(range(max(1, (count - 1).bit_length()))):
        ones = (split >> bit) & 1
        start = (split >> (bit + 1)) << (bit + 1)  # groups before it are full: half are zeros
        zeros = np.cumsum(1 - ones, dtype=np.int32) - (1 - ones) - (start >> 1)
        below += zeros * ones
        target = np.where(ones, places + (1 << bit) - zeros, start + zeros)
        moved, counted = np.empty_like(split), np.empty_like(below)
        moved[target], counted[target] = split, below
        split, below = moved, counted
    return below[ranks].astype(np.int64)
