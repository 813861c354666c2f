"""Hit curves: LRU against the simulator at every capacity, the ceiling against every policy."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.errors import UsageError
from kvlab.sizing import curve, simulator, trace
from kvlab.sizing.simulator import Tiers
from kvlab.sizing.stack_distance import COLD, StackDistances
from kvlab.sizing.trace import Request, Trace
from tests.sizing.traces import CHUNK, traces

UNTIMED = settings(deadline=None)


@UNTIMED
@given(st.lists(st.integers(0, 9), max_size=80), st.lists(st.integers(1, 80), max_size=6))
def test_distances_are_those_of_a_list_moved_by_hand(keys, cuts):
    """Whatever the batches are, and with ids numbered in the order of first sight."""
    ids = [list(dict.fromkeys(keys)).index(key) for key in keys]
    stack: list[int] = []
    expected = []
    for one in ids:
        expected.append(stack[::-1].index(one) if one in stack else COLD)
        stack = [other for other in stack if other != one] + [one]
    distances, found = StackDistances(), []
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    for start, end in itertools.pairwise(edges):
        found += distances.feed(np.array(ids[start:end], dtype=np.int64)).tolist()
    assert found == expected
    assert distances.keys == len(set(ids))


def test_many_accesses_are_counted_as_few_are():
    """Several batches of the usual size, more keys than the first table holds."""
    rng = np.random.default_rng(1)
    drawn = np.minimum(rng.zipf(1.3, 150_000), 20_000)
    _, ids = np.unique(drawn, return_inverse=True)
    whole, parts = StackDistances(), StackDistances()
    pieces = [parts.feed(piece) for piece in np.array_split(ids, 13)]
    assert (whole.feed(ids) == np.concatenate(pieces)).all()


@UNTIMED
@given(traces(most=40), st.booleans())
def test_lru_hits_what_the_simulator_serves(asked, all_count):
    def measured(request: Request) -> bool:
        return all_count or request.label != "l2"

    found = curve.lru(asked, range(12), measured=measured)
    for capacity, hits in zip(found.capacities, found.hit_tokens, strict=True):
        outcome = simulator.simulate(asked, Tiers(chunk_bytes=1, l0_chunks=capacity))
        rounds = [one for label, one in outcome.rounds.items() if all_count or label != "l2"]
        assert hits == sum(one.served["L0"] for one in rounds)
        assert found.tokens == sum(one.tokens for one in rounds)
        assert found.requests == sum(one.requests for one in rounds)


@UNTIMED
@given(traces(most=40), st.integers(0, 15), st.booleans())
def test_more_never_hits_less_and_nothing_beats_the_ceiling(asked, most, last):
    sizes = range(most + 1)
    least, best = (
        policy(asked, sizes, last_token_computed=last).hit_chunks
        for policy in (curve.lru, curve.optimal)
    )
    assert list(least) == sorted(least)
    assert list(best) == sorted(best)
    assert all(low <= high for low, high in zip(least, best, strict=True))
    everything = [policy(asked, [10_000]) for policy in (curve.lru, curve.optimal)]
    assert everything[0].hit_chunks == everything[1].hit_chunks


@UNTIMED
@given(traces(most=40), st.sampled_from([4, 17, 40]), st.sampled_from([0.2, 0.99]))
def test_the_tiers_never_beat_the_ceiling_of_all_their_room(asked, l1_bytes, ratio):
    tiers = Tiers(chunk_bytes=1, l0_chunks=3, l1_bytes=l1_bytes, ratio=ratio, l2=True, l2_bytes=9)
    total = simulator.simulate(asked, tiers).total
    room = 3 + l1_bytes + 9 + 5  # L2's loop lets one request run over
    (most,) = curve.optimal(asked, [room]).hit_tokens
    assert total.tokens - total.served["recompute"] <= most


def best_of_all(asked: Trace, capacity: int, last: bool) -> int:
    """The most hits of any policy: every content of the cache after every request is tried."""
    scores = {frozenset(): 0}
    for request in asked:
        keys = list(request.keys)
        usable = min(len(keys), (request.tokens - 1) // CHUNK) if last else len(keys)
        following: dict[frozenset, int] = {}
        for held, score in scores.items():
            hits = next((n for n, key in enumerate(keys[:usable]) if key not in held), usable)
            choice = held | set(keys)
            for size in range(min(capacity, len(choice)) + 1):
                for kept in map(frozenset, itertools.combinations(choice, size)):
                    following[kept] = max(following.get(kept, 0), score + hits)
        scores = following
    return max(scores.values())


@settings(max_examples=60, deadline=None)
@given(traces(most=6), st.integers(0, 3), st.booleans())
def test_the_ceiling_is_reached_by_some_policy(asked, capacity, last):
    if len({key for request in asked for key in request.keys}) > 9:
        return  # too many contents to try
    found = curve.optimal(asked, [capacity], last_token_computed=last)
    assert found.hit_chunks == (best_of_all(asked, capacity, last),)


def test_a_cyclic_scan_misses_until_everything_fits():
    """The overflow of the two-round experiment: LRU serves nothing, the ceiling most of it."""
    asked = trace.two_round(contexts=20, context_tokens=45, chunk_tokens=10)
    found = curve.lru(asked, measured=lambda request: request.label == "measure")
    assert found.unique_chunks == 80
    assert found.capacities == tuple(range(4, 81, 4))
    assert found.hit_chunks == (*[0] * 19, 80)
    assert found.shares[-1] == pytest.approx(40 / 45)
    assert found.capacity_for(0.5) == 80
    assert found.capacity_for(0.9) is None
    best = curve.optimal(asked, [76]).shares[0] * 2
    assert best > 0.8


def test_an_empty_trace_has_an_empty_curve():
    asked = Trace(title="empty", chunk_tokens=10, requests=lambda: iter(()))
    for policy in (curve.lru, curve.optimal):
        found = policy(asked)
        assert (found.capacities, found.tokens, found.unique_chunks) == ((), 0, 0)
        assert policy(asked, [3]).shares == (0.0,)


@pytest.mark.parametrize("second", [["b", "a"], ["c", "b"], ["b"], ["b", "b"]])
def test_keys_that_are_not_chained_are_refused(second):
    rows = [Request(25, ["a", "b"]), Request(25, second)]
    with pytest.raises(UsageError, match="not chained"):
        curve.lru(Trace(title="", chunk_tokens=10, requests=lambda: iter(rows)))


def test_a_negative_capacity_is_refused():
    asked = trace.two_round(contexts=2, context_tokens=45, chunk_tokens=10)
    with pytest.raises(UsageError, match="cache of -1 chunks"):
        curve.lru(asked, [3, -1])
