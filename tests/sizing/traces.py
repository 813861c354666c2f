"""Random traces whose keys are chained as LMCache's hashes are: a key is the path to it."""

from __future__ import annotations

from hypothesis import strategies as st

from kvlab.sizing.trace import Request, Trace

CHUNK = 10


@st.composite
def traces(draw: st.DrawFn, *, most: int = 25, timed: bool = False) -> Trace:
    """Requests of up to five chunks over a small tree, with a tail that is no whole chunk."""
    paths = draw(
        st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=most), label="paths"
    )
    asked = []
    at_s = 0.0
    for path in paths:
        tail = draw(st.integers(0 if path else 1, CHUNK - 1))
        gap_s = draw(st.sampled_from([0.0, 0.0, 0.3, 2.5])) if timed else 0.0
        at_s += draw(st.sampled_from([0.0, 0.0, 0.7])) if timed else 0.0
        keys = [tuple(path[:depth]) for depth in range(1, len(path) + 1)]
        asked.append(Request(len(path) * CHUNK + tail, keys, at_s, f"l{len(path)}", gap_s))
    return Trace(title="random", chunk_tokens=CHUNK, requests=lambda: iter(asked))
