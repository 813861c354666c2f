"""Draining: waiting by evidence, and saying what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvlab.units import NS_PER_S
from kvlab.workloads.drain import Poll, settled

# P-12: one poll a second: (submitted, completed, failed, files)
P12 = [(40, 22, 0, 22), (40, 31, 0, 31), (40, 39, 1, 39), (40, 39, 1, 39)]


def polls(rows: Sequence[tuple[float | None, float | None, float | None, int]]) -> list[Poll]:
    return [
        Poll(
            at_ns=second * NS_PER_S,
            submitted=submitted,
            completed=completed,
            failed=failed,
            written=completed,
            files=files,
            bytes=files * 100,
        )
        for second, (submitted, completed, failed, files) in enumerate(rows)
    ]


def test_it_waits_until_everything_is_accounted_for_and_quiet() -> None:
    """P-12: submitted = completed + failed, and three polls without a change."""
    seen = polls(P12)
    assert [settled(seen[:n]) for n in range(1, 5)] == [False, False, False, True]


def test_failed_stores_end_the_wait_but_are_not_forgotten() -> None:
    assert polls(P12)[-1].failed == 1
    assert polls(P12)[-1].complete


def test_stores_that_never_finish_never_settle() -> None:
    assert not settled(polls([(40, 39, 0, 39)] * 20))


def test_a_failed_store_that_no_counter_names_ends_the_wait_once_nothing_is_under_way() -> None:
    def poll(second: int, inflight: float) -> Poll:
        return Poll(
            at_ns=second * NS_PER_S,
            submitted=40,
            completed=39,
            failed=None,
            inflight=inflight,
            written=40,
            files=39,
            bytes=39,
        )

    assert not settled([poll(0, 1), poll(1, 1), poll(2, 1)])
    assert settled([poll(0, 1), poll(1, 0), poll(2, 0)])


def test_files_that_still_grow_are_not_settled() -> None:
    assert not settled(polls([(4, 4, 0, files) for files in range(5)]))


def test_unknown_counters_leave_the_files_as_evidence() -> None:
    assert settled(polls([(None, None, None, 7)] * 2))
    assert not settled(polls([(None, None, None, 6), (None, None, None, 7)]))


def test_an_l1_above_its_watermark_is_still_evicting() -> None:
    def poll(second: int, l1_bytes: float) -> Poll:
        return Poll(
            at_ns=second * NS_PER_S,
            submitted=4,
            completed=4,
            failed=0,
            written=4,
            l1_bytes=l1_bytes,
            l1_limit_bytes=100,
            files=4,
            bytes=4,
        )

    assert not settled([poll(0, 150), poll(1, 150)])
    assert not settled([poll(0, 150), poll(1, 90)])
    assert settled([poll(0, 90), poll(1, 90)])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_a_single_change_at_the_end_is_never_quiet(rows: list[tuple[int, int, int]]) -> None:
    seen = polls([(s, c, 0, f) for s, c, f in rows])
    last = seen[-1]
    changed = Poll(
        at_ns=last.at_ns + NS_PER_S,
        submitted=last.submitted,
        completed=last.completed,
        failed=last.failed,
        written=last.written,
        files=last.files + 1,
        bytes=last.bytes,
    )
    assert not settled([*seen, changed])
