"""Predictions of whole rounds: simulated tiers, modelled times, and what must always hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.sizing import prediction, time_model, trace
from kvlab.sizing.prediction import Machine
from kvlab.sizing.simulator import Tiers
from kvlab.sizing.time_model import Prefill, Restore, certain

FEW = settings(max_examples=15, deadline=None)


def machine(restores: Mapping[str, float], spread: tuple[float, ...] = (0.0,)) -> Machine:
    return Machine(
        prefill=Prefill(constant_ms=certain(10), linear_ms=certain(0.1), quadratic_ms=certain(0)),
        restores={
            tier: Restore(latency_ms=certain(ms), spread_ms=np.array(spread))
            for tier, ms in restores.items()
        },
    )


def rounds(contexts: int, pause_s: float = 0.0) -> trace.Trace:
    return trace.two_round(contexts=contexts, context_tokens=501, chunk_tokens=100, pause_s=pause_s)


@given(
    st.integers(1, 30), st.integers(0, 200), st.floats(0, 2), st.floats(0.1, 1), st.floats(0.1, 1)
)
@FEW
def test_shares_are_shares_and_their_span_holds_the_mean(
    contexts: int, l0: int, l1_contexts: float, watermark: float, ratio: float
) -> None:
    tiers = Tiers(
        chunk_bytes=1000,
        l0_chunks=l0,
        l1_bytes=l1_contexts * contexts * 5000,
        l2=True,
        watermark=watermark,
        ratio=ratio,
    )
    found = prediction.forecast(rounds(contexts), tiers, machine({"L1": 5, "L2": 20}))
    assert sum(share.value for share in found.shares.values()) == pytest.approx(1)
    for share in found.shares.values():
        assert -1e-12 <= share.low <= share.value + 1e-12
        assert share.value <= share.high + 1e-12 <= 1 + 2e-12
    assert found.phases >= 4


def test_vllm_alone_computes_everything_that_it_does_not_hold() -> None:
    alone = Tiers(chunk_bytes=1000, l0_chunks=0)
    found = prediction.forecast(rounds(4), alone, machine({}))
    assert found.phases == 1
    assert found.shares["recompute"].value == 1
    assert found.ttft_ms[0] == pytest.approx(10 + 0.1 * 501)


def test_a_restored_round_takes_the_rest_and_the_restore() -> None:
    tiers = Tiers(chunk_bytes=1000, l0_chunks=0, l1_bytes=1e9)
    found = prediction.forecast(rounds(4), tiers, machine({"L1": 5}))
    assert found.shares["L1"].value == pytest.approx(500 / 501)
    assert found.ttft_ms[0] == pytest.approx(10 + 0.1 + 5)


def test_the_median_of_two_tiers_is_that_of_their_mixture() -> None:
    """Six requests from the fast tier and ten from the slow one, which overlap."""
    from kvlab.sizing.simulator import Served

    def served(l1: int, l2: int) -> Served:
        return Served(0, "measure", 501, 0, l1, l2, 1, l1, l2, 0.0)

    spread = tuple(np.linspace(-12, 12, 25))
    told = machine({"L1": 20, "L2": 30}, spread)
    found = prediction._median([served(500, 0)] * 6 + [served(0, 500)] * 10, told)
    slow_alone = prediction._median([served(0, 500)] * 10, told)
    assert found[0] < slow_alone[0]
    assert 10.1 + 20 < found[0] < 10.1 + 30


def test_beginning_later_moves_the_loop_and_nothing_else() -> None:
    requests = rounds(3)
    moved = list(prediction.later(requests, 0.5))
    assert moved[0].at_s == 0.5
    assert moved[1:] == list(requests)[1:]


def test_the_interval_of_a_prediction_carries_the_restores() -> None:
    draws = certain(5)
    draws[1:] = np.linspace(0, 50, time_model.RESAMPLES)
    told = machine({"L1": 5})
    unsure = Machine(prefill=told.prefill, restores={"L1": Restore(latency_ms=draws)})
    tiers = Tiers(chunk_bytes=1000, l0_chunks=0, l1_bytes=1e9)
    sure, wide = (
        time_model.estimate(prediction.forecast(rounds(4), tiers, one).ttft_ms)
        for one in (told, unsure)
    )
    assert sure.value == wide.value
    assert sure.high - sure.low == pytest.approx(0)
    assert wide.high - wide.low > 40
