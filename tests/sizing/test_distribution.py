"""Quantiles from logarithmic buckets against those of the sorted values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import stats
from kvlab.sizing.distribution import STEP, Distribution

UNTIMED = settings(deadline=None)


@UNTIMED
@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e4)), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_a_quantile_is_right_to_half_a_bucket(values, share):
    held = Distribution()
    for value in values:
        held.add(value)
    exact = stats.percentile(values, share)
    assert held.quantile(share) == pytest.approx(exact, rel=STEP / 2 + 1e-9)
    assert held.mean == pytest.approx(math.fsum(values) / len(values))
    assert (held.smallest, held.largest) == (min(values), max(values))
    steps = held.steps()
    assert steps == sorted(steps)
    assert steps[-1][1] == 1


def test_nothing_seen_has_no_quantile():
    assert Distribution().median is None
    assert Distribution().mean is None
    with pytest.raises(ValueError, match="negative"):
        Distribution().add(-1.0)
