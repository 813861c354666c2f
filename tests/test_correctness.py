"""Restored against cold: fast but wrong is caught, benign noise is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvlab import correctness, evidence
from kvlab.records import RequestRecord
from kvlab.rundir import RunDir
from tests.builders import Edit, both, make_run, on_request, replace


def judge(run: RunDir) -> dict[str, Any]:
    plan = evidence.plan(run.manifest)
    return correctness.judge(plan, evidence.accounts(plan, run.requests(), run.scrapes()))


def answer(token: str | None, **logprobs: float) -> RequestRecord:
    return RequestRecord(
        scenario="baseline",
        repeat=1,
        round="measure",
        index=0,
        context_id="c0",
        planned_tokens=1121,
        asked_tokens=1,
        queued_ns=0,
        cached_tokens=0,
        token=token,
        top_logprobs=logprobs or None,
    )


def test_the_difference_is_that_of_the_cold_token() -> None:
    found = correctness.compare(answer("a", a=-1.0, b=-1.05), answer("b", b=-1.0, a=-1.08))
    assert found is not None
    assert found.nat == pytest.approx(0.08)
    assert found.flipped
    assert found.exact


def test_a_token_that_is_not_listed_gives_a_lower_bound() -> None:
    found = correctness.compare(answer("a", a=-1.0), answer("x", x=-0.5, y=-7.9))
    assert found is not None
    assert found.nat == pytest.approx(6.9)
    assert (found.flipped, found.exact) == (True, False)
    low = correctness.compare(answer("a", a=-9.0), answer("x", x=-0.5))
    assert low is not None
    assert low.nat == 0.0


@pytest.mark.parametrize(
    ("cold", "other"),
    [
        (answer(None, a=-1.0), answer("a", a=-1.0)),
        (answer("a"), answer("a", a=-1.0)),
        (answer("a", a=-1.0), answer("a")),
        (answer("a", b=-1.0), answer("a", a=-1.0)),
    ],
)
def test_without_log_probabilities_there_is_no_difference(
    cold: RequestRecord, other: RequestRecord
) -> None:
    assert correctness.compare(cold, other) is None


def test_equal_answers_pass(tmp_path: Path) -> None:
    found = judge(make_run(tmp_path))
    assert found["verdict"] == "pass"
    assert found["pairs"] == 18
    assert found["floor_nat"] == 0.0
    assert found["restored_nat"] == {"median": 0.0, "max": 0.0}
    assert found["compared"] == [1121]


WIDE = {"correctness.tolerance_nat": 0.15}


@pytest.mark.parametrize(
    ("floor", "restored", "verdict"),
    [
        (0.0, 0.02, "pass"),
        (0.0, 6.90, "fail"),
        (0.0, 4.10, "fail"),
        (0.06, 0.17, "pass"),  # 3 x 0.06 allows it
        (0.06, 0.9, "fail"),
        (0.06, 0.19, "fail"),
        (0.0, 0.15, "pass"),
        (0.0, 0.16, "fail"),
    ],
)
def test_the_tolerance_is_three_floors_or_the_set_value(
    tmp_path: Path, floor: float, restored: float, verdict: str
) -> None:
    run = make_run(tmp_path, floor_nat=floor, restored_nat=restored, overrides=WIDE)
    assert judge(run)["verdict"] == verdict
    assert judge(run)["tolerance_nat"] == pytest.approx(max(3 * floor, 0.15))


def test_one_wrong_answer_is_enough(tmp_path: Path) -> None:
    wrong = on_request(_shifted(0.9), scenario="lmcache", repeat=2, round="measure", index=4)
    found = judge(make_run(tmp_path, edit=wrong, overrides=WIDE))
    assert found["verdict"] == "fail"
    assert found["restored_nat"]["max"] == pytest.approx(0.9)


def _shifted(by: float) -> Any:
    def change(record: RequestRecord) -> RequestRecord:
        assert record.top_logprobs
        moved = {t: v - by * (t == record.token) for t, v in record.top_logprobs.items()}
        return dataclasses.replace(record, top_logprobs=moved)

    return change


def test_a_flipped_token_of_nearly_the_same_probability_is_a_tie(tmp_path: Path) -> None:
    flipped = on_request(replace(token="zosu"), scenario="lmcache", round="measure", index=1)
    run = make_run(tmp_path, floor_nat=0.06, restored_nat=0.08, edit=flipped, overrides=WIDE)
    found = judge(run)
    assert found["verdict"] == "pass with ties"
    assert found["flipped"] == 3


def test_an_answer_that_does_not_list_the_cold_token_cannot_pass(tmp_path: Path) -> None:
    lost = on_request(
        replace(token="x", top_logprobs={"x": -0.2, "y": -9.0}),
        scenario="lmcache",
        round="measure",
        index=1,
    )
    assert judge(make_run(tmp_path / "far", edit=lost, overrides=WIDE))["verdict"] == "fail"
    near = on_request(
        replace(token="x", top_logprobs={"x": -0.2}), scenario="lmcache", round="measure", index=1
    )
    found = judge(make_run(tmp_path / "near", edit=near, overrides=WIDE))
    assert found["verdict"] == "unknown"
    assert "more log-probabilities" in found["reason"]


def test_a_model_that_ignores_its_context_proves_nothing(tmp_path: Path) -> None:
    blind = on_request(replace(token="a", top_logprobs={"a": -0.1, "b": -3.0}))
    found = judge(make_run(tmp_path, edit=blind))
    assert found["verdict"] == "unknown"
    assert "same answer" in found["reason"]


def test_no_log_probabilities_no_pass(tmp_path: Path) -> None:
    found = judge(make_run(tmp_path, edit=on_request(replace(top_logprobs=None))))
    assert found["verdict"] == "unknown"
    assert "restored_nat" not in found
    assert "floor_nat" not in found


def test_nothing_restored_no_pass(tmp_path: Path) -> None:
    nothing = on_request(replace(cached_tokens=0), scenario="lmcache", round="measure")
    assert judge(make_run(tmp_path, edit=nothing))["verdict"] == "unknown"


def test_without_a_floor_no_pass(tmp_path: Path) -> None:
    warm = on_request(replace(cached_tokens=224), scenario="lmcache", round="fill")
    found = judge(make_run(tmp_path, edit=warm))
    assert found["verdict"] == "unknown"
    assert "noise floor" in found["reason"]


WARM = on_request(replace(cached_tokens=1120), scenario="baseline", round="measure")


def test_a_warm_baseline_round_is_replaced_by_its_first_round(tmp_path: Path) -> None:
    poisoned = both(WARM, on_request(_shifted(5.0), scenario="baseline", round="measure"))
    found = judge(make_run(tmp_path, edit=poisoned))
    assert (found["verdict"], found["pairs"]) == ("pass", 18)


def test_prompts_that_do_not_return_cannot_be_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path, shape="prefix_suffix", context_tokens=1500, edit=WARM)
    assert judge(run)["pairs"] == 0


def test_prefixes_compare_round_2_with_round_2(tmp_path: Path) -> None:
    run = make_run(tmp_path, shape="prefix_suffix", context_tokens=1500)
    assert (judge(run)["verdict"], judge(run)["pairs"]) == ("pass", 18)


@pytest.mark.parametrize(
    "edit",
    [
        on_request(replace(context_id="other"), scenario="lmcache", round="measure"),
        on_request(lambda _: None, scenario="lmcache", round="measure"),
        both(WARM, on_request(lambda _: None, scenario="baseline", round="fill")),
    ],
)
def test_only_the_same_prompts_are_compared(tmp_path: Path, edit: Edit) -> None:
    assert judge(make_run(tmp_path, edit=edit))["pairs"] == 0


def test_a_control_compares_cold_with_cold(tmp_path: Path) -> None:
    found = judge(make_run(tmp_path, control=True, floor_nat=0.0001))
    assert (found["verdict"], found["pairs"]) == ("pass", 18)
