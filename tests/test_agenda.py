"""Several runs in a row: the estimate is corrected by what was seen, and says where it stands."""

from __future__ import annotations

from collections import Counter

import pytest

from kvlab import agenda, experiment, profile, reproduce, units
from kvlab.agenda import Agenda
from kvlab.progress import Forecast


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in nanoseconds, to be set."""
    now = [0]
    monkeypatch.setattr(agenda, "now_ns", lambda: now[0])
    return now


def two() -> Agenda:
    planned = {"two-round": Counter({"launch:a": 2}), "restart": Counter({"launch:b": 3})}
    return Agenda({name: Forecast(steps) for name, steps in planned.items()}, more_notebooks=1)


def test_before_anything_was_seen_the_plan_is_priced_at_the_priors(clock: list[int]) -> None:
    whole = two()
    assert whole.remaining_s == 5 * 30 + 3 * 10
    assert whole.standing().text == "0 of 2 experiments done, about 3 min left in all"
    assert whole.standing().share == 0


def test_what_the_first_one_took_corrects_the_next_one(clock: list[int]) -> None:
    whole = two()
    whole.begin("two-round")
    whole.learn({"launch:a": (1, 90.0)})
    assert whole.remaining_s == 90 + 3 * 90 + 30
    assert whole.place == "experiment 1 of 2"
    clock[0] = 90 * 10**9
    assert whole.standing().share == pytest.approx(90 / (90 + 390))
    assert whole.standing(silent_s=30).text == "experiment 1 of 2, about 6 min left in all"


def test_the_time_of_a_notebook_beside_its_run_is_learnt_too() -> None:
    whole = two()
    whole.begin("two-round")
    whole.learn({"launch:a": (2, 60.0)})
    whole.end(64.0)
    assert whole.remaining_s == 3 * 30 + 2 * 4
    assert whole.place == "1 of 2 experiments done"


def test_a_run_that_broke_off_is_over() -> None:
    whole = two()
    whole.begin("two-round")
    whole.learn({"launch:a": (1, 30.0)})
    whole.end(40.0)
    whole.begin("restart")
    assert whole.place == "experiment 2 of 2"
    assert whole.remaining_s == 3 * 30 + 2 * 10


def test_at_the_end_nothing_is_left(clock: list[int]) -> None:
    whole = Agenda({"soak": Forecast(Counter({"launch:soak": 1}))})
    whole.begin("soak")
    whole.learn({"launch:soak": (1, 20.0)})
    whole.end(25.0)
    clock[0] = 25 * 10**9
    text = "1 of 1 experiments done, less than a minute left in all"
    assert whole.standing() == agenda.Standing(1.0, text)


def test_every_experiment_of_a_reproduction_is_foreseen() -> None:
    chosen = profile.load("embedded")
    minutes = {
        name: experiment.forecast(name, chosen).remaining_s / 60 for name in reproduce.MEASURING
    }
    assert all(0.5 < value < 20 for value in minutes.values())
    longer = profile.load("embedded", {"experiments.soak.duration_s": 3600})
    # Its visits come at a set rate, whatever a request takes.
    assert experiment.forecast("soak", longer).remaining_s > 3600


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "less than a minute"),
        (29, "less than a minute"),
        (31, "about 1 min"),
        (1631, "about 27 min"),
        (3900, "about 1 h 05 min"),
    ],
)
def test_about(seconds: float, text: str) -> None:
    assert units.about(seconds) == text
