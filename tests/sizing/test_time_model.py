"""The time model: what it recovers, what it cannot tell, and what must always hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.sizing import time_model
from kvlab.sizing.time_model import Prefill, Restore, certain

FEW = settings(max_examples=25, deadline=None)
terms = st.tuples(
    st.floats(0.5, 100), st.floats(0.01, 2), st.floats(1e-7, 1e-4)
)  # constant, linear, quadratic


def prefill(constant: float, linear: float, quadratic: float) -> Prefill:
    return Prefill(
        constant_ms=certain(constant), linear_ms=certain(linear), quadratic_ms=certain(quadratic)
    )


@given(terms)
@FEW
def test_three_lengths_give_all_three_terms_back(true: tuple[float, float, float]) -> None:
    machine = prefill(*true)
    times = {n: [[float(machine.ms(n)[0])] * 3] for n in (200, 1000, 4000, 9000)}
    found = time_model.fit_prefill(times, seed=1)
    assert found is not None
    assert set(found.origin.values()) == {"measured"}
    for n in (300, 2500, 12000):
        assert found.ms(n)[0] == pytest.approx(machine.ms(n)[0], rel=1e-4)
    assert found.covers(1000)
    assert not found.covers(12000)


def test_one_length_gives_one_term_and_says_so() -> None:
    found = time_model.fit_prefill({1000: [[90.0, 100.0, 110.0]]}, seed=1)
    assert found is not None
    assert found.origin == {
        "constant": "not separable",
        "linear": "measured",
        "quadratic": "not separable",
    }
    assert found.ms(500)[0] == pytest.approx(50)


def test_two_lengths_give_the_constant_and_the_shape_gives_the_rest() -> None:
    machine = prefill(8, 0.05, 0.05 * 2e-5)
    times = {n: [[float(machine.ms(n)[0])]] for n in (1, 2000)}
    found = time_model.fit_prefill(times, attention=2e-5, seed=1)
    assert found is not None
    assert found.origin["quadratic"] == "arithmetic"
    assert found.ms(1000)[0] == pytest.approx(machine.ms(1000)[0])


def test_nothing_measured_is_no_model() -> None:
    assert time_model.fit_prefill({}, seed=1) is None
    assert time_model.fit_prefill({100: [[]]}, seed=1) is None
    none = time_model.calibrate_restore(
        [], prefill(1, 1, 0), tokens=2, restored=1, size=1, bytes_per_s=None, seed=1
    )
    assert none is None
    assert time_model.fit_restore({10.0: [[1.0]]}, seed=1) is None


@given(terms, st.integers(2, 50_000), st.floats(0, 1))
@FEW
def test_restored_tokens_never_cost_more_and_the_late_ones_cost_most(
    true: tuple[float, float, float], tokens: int, share: float
) -> None:
    machine, cached = prefill(*true), tokens * share
    whole, rest = machine.ms(tokens)[0], machine.ms(tokens, cached)[0]
    assert rest <= whole
    # By attention the rest costs at least its share of the tokens.
    assert rest >= whole * (1 - share) - 1e-9 * whole


@given(
    st.lists(st.floats(1, 1000), min_size=1, max_size=30),
    st.lists(st.floats(1, 1000), min_size=1, max_size=30),
    st.integers(0, 2**40),
)
@FEW
def test_an_interval_holds_its_value_and_is_the_same_every_time(
    short: list[float], long: list[float], seed: int
) -> None:
    times = {100: [short, long], 1000: [long]}
    one, other = (time_model.fit_prefill(times, seed=seed) for _ in range(2))
    assert one is not None
    assert other is not None
    found = time_model.estimate(one.ms(700, 200))
    assert found == time_model.estimate(other.ms(700, 200))
    assert 0 <= found.low <= found.value <= found.high


@given(st.floats(0.1, 100), st.floats(0.1, 100))
@FEW
def test_two_lengths_never_give_a_term_below_zero(low: float, high: float) -> None:
    found = time_model.fit_prefill({1: [[low]], 1000: [[high]]}, seed=0)
    assert found is not None
    assert found.constant_ms[0] >= 0
    assert found.linear_ms[0] >= 0
    if low <= high <= 1000 * low:
        assert found.ms(1)[0] == pytest.approx(low)
        assert found.ms(1000)[0] == pytest.approx(high)


def test_repeats_that_differ_widen_the_interval() -> None:
    same = time_model.resampled_median([[20.0, 21, 22]] * 4, 0)
    apart = time_model.resampled_median([[30.0, 31, 32], [10, 11, 12]] * 2, 0)
    assert same[0] == apart[0] == 21
    narrow, wide = time_model.estimate(same), time_model.estimate(apart)
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)


def test_more_spread_gives_a_wider_interval() -> None:
    steady = time_model.fit_prefill({1000: [[99, 100, 101] * 5]}, seed=3)
    noisy = time_model.fit_prefill({1000: [[50, 100, 150] * 5]}, seed=3)
    assert steady is not None
    assert noisy is not None
    widths = [e.high - e.low for e in (time_model.estimate(m.ms(1000)) for m in (steady, noisy))]
    assert widths[0] < widths[1]


@given(terms, st.floats(0, 50), st.floats(1e6, 1e10))
@FEW
def test_a_calibrated_restore_explains_its_own_times(
    true: tuple[float, float, float], latency: float, bandwidth: float
) -> None:
    machine, size = prefill(*true), 1.4e6
    took = float(machine.ms(1121, 1120)[0]) + latency + 1000 * size / bandwidth
    found = time_model.calibrate_restore(
        [[took]], machine, tokens=1121, restored=1120, size=size, bytes_per_s=bandwidth, seed=0
    )
    assert found is not None
    assert found.latency_ms[0] == pytest.approx(latency, abs=1e-6 * took)
    again = time_model.ttft_ms(
        machine, {"L2": found}, tokens=1121, served_bytes={"L2": size}, served_tokens=1120
    )
    assert again[0] == pytest.approx(took)


def test_latency_and_bandwidth_are_told_apart_by_two_sizes() -> None:
    found = time_model.fit_restore({1e6: [[5.0]], 3e6: [[9.0]]}, seed=0)
    assert found is not None
    assert found.latency_ms[0] == pytest.approx(3)
    assert found.bytes_per_s is not None
    assert found.bytes_per_s[0] == pytest.approx(5e8)
    flat = time_model.fit_restore({1e6: [[5.0]], 3e6: [[5.0]]}, seed=0)
    assert flat is not None
    assert flat.bytes_per_s is None


def test_two_tiers_are_asked_at_once_and_transfer_one_after_the_other() -> None:
    fast = Restore(latency_ms=certain(1), bytes_per_s=certain(1e9))
    slow = Restore(latency_ms=certain(10), bytes_per_s=certain(1e8))
    machine = prefill(5, 0.1, 0)
    took = time_model.ttft_ms(
        machine,
        {"L1": fast, "L2": slow},
        tokens=100,
        served_bytes={"L1": 1e6, "L2": 1e6, "L0": 5e6},
        served_tokens=90,
    )
    assert took[0] == pytest.approx(5 + 1 + 10 + 1 + 10)
    assert np.array_equal(fast.ms(0), certain(0))


def test_break_even_is_the_shortest_prefix_that_pays() -> None:
    machine = prefill(5, 0.1, 0)
    slow = Restore(latency_ms=certain(40), bytes_per_s=certain(1e9))
    found = time_model.break_even_tokens(machine, slow, bytes_per_chunk=1e6, chunk=100, most=2000)
    assert found == 500  # 45 ms against 50; with 400 tokens 44 against 40
    assert (
        time_model.break_even_tokens(machine, slow, bytes_per_chunk=1e9, chunk=100, most=2000)
        is None
    )


def test_attention_of_a_model_by_its_shape() -> None:
    # 3 G active parameters, 10 attention layers of 16 heads x 256: an eighth dearer at 8,000.
    ratio = time_model.attention_ratio(
        active_parameters=3e9, attention_layers=10, heads=16, head_dim=256
    )
    assert ratio * 8000 == pytest.approx(0.109, abs=0.001)
