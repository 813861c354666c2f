"""The questions of sizing: their figures by hand where that can be done, and what must hold."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kvlab import notebook, profile
from kvlab.errors import RunFolderError, UsageError
from kvlab.sizing import answers, case, display, figures, questions, sizes, time_model
from kvlab.sizing.case import Case, Measured
from kvlab.sizing.prediction import Machine
from kvlab.sizing.time_model import Prefill, Restore, certain
from tests.builders import make_run

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "data" / "sample"
NOWHERE = Path("no-models-here")


def machine(gb_per_s: float | None = 1.0, latency_ms: float = 5.0) -> Machine:
    rate = None if gb_per_s is None else certain(gb_per_s * 1e9)
    return Machine(
        prefill=Prefill(constant_ms=certain(10), linear_ms=certain(0.1), quadratic_ms=certain(0)),
        restores={
            "L1": Restore(latency_ms=certain(1)),
            "L2": Restore(latency_ms=certain(latency_ms), bytes_per_s=rate),
        },
    )


def of(name: str = "embedded", known: Machine | None = None, **measured: Any) -> Case:
    chosen = profile.load(name)
    config = sizes.config_of(chosen, NOWHERE)
    assert config is not None
    sums = sizes.arithmetic_of(chosen, config)
    return case.case_of(chosen, sums, machine=known, measured=Measured(**measured))


@pytest.fixture(scope="module")
def asked() -> dict[str, questions.Answer]:
    full = of(known=machine(), first_visit_ms=150.0, server_cpu_ms=20.0, cores=2)
    return questions.ask(full)


def test_every_question_has_a_sentence_a_name_and_a_figure(
    asked: dict[str, questions.Answer],
) -> None:
    assert list(asked) == list(questions.NAMES) == list(figures.QUESTIONS)
    for name, answer in asked.items():
        assert answer["sentence"].endswith(".")
        for width in ("wide", "narrow"):
            svg = figures.of_question(name, answer, width)  # type: ignore[arg-type]
            assert svg is not None, name
            assert ET.fromstring(svg).tag.endswith("svg")


def test_without_times_they_are_asked_for_and_the_rest_is_answered() -> None:
    answers_ = questions.ask(of())
    for name in ("break_even", "reuses", "disk", "faster_disk", "instances"):
        assert answers_[name] == {"sentence": questions.NO_TIMES}
        assert figures.of_question(name, answers_[name]) is None
    for name in ("capacity", "l1_size", "chunk"):
        assert figures.of_question(name, answers_[name]) is not None


def test_lru_never_hits_more_than_the_ceiling(asked: dict[str, questions.Answer]) -> None:
    for name in ("own", "zipf"):
        one = asked["capacity"][name]
        for lru, best in zip(one["lru"], one["optimal"], strict=True):
            assert lru <= best + 1e-12
        assert one["lru"] == sorted(one["lru"])


def test_more_hits_need_more_l1(asked: dict[str, questions.Answer]) -> None:
    for name in ("own", "zipf"):
        needed = list(asked["l1_size"][name]["gib"].values())
        assert needed == sorted(needed)
    # All 16 contexts, probe and warm-up in between, over the watermark of 30 %.
    chunks = 16 * 5
    least = chunks * of().tiers.chunk_bytes / 0.3 / (1 << 30)
    assert asked["l1_size"]["own"]["gib"]["95%"] >= least * 0.999


def test_break_even_and_returns_by_hand(asked: dict[str, questions.Answer]) -> None:
    # 224 tokens cost 22.4 ms; L2: 5 ms and 286,720 bytes at 1 GB/s; L1: 1 ms.
    assert asked["break_even"]["tokens"] == {"L1": 224, "L2": 224}
    slow = questions.break_even(of(known=machine(latency_ms=50.0)))
    assert slow["tokens"]["L2"] == 672  # 67.2 ms against 50.9; with 448: 44.8 against 50.6
    returns = asked["reuses"]
    assert returns["returns"] == -(-150 // returns["saving_ms"])
    assert questions.reuses(of(known=machine()))["first_visit_ms"] is None
    never = questions.reuses(of(known=machine(latency_ms=5000), first_visit_ms=1.0))
    assert "never pays" in never["sentence"] or never["saving_ms"] > 0


def test_chunks_and_budgets_by_hand() -> None:
    published = questions.chunk(of("dgx-spark"))
    assert published["restorable_tokens"] == [4288, 4288, 0, 0]
    assert published["restorable_by_budget"] == {"2N-1": 4288, "2N": 4288, "4N": 0}
    embedded = questions.chunk(of())
    assert embedded["restorable_tokens"][0] == 1120
    assert embedded["restorable_by_budget"]["2N"] == 896


def test_the_disk_by_hand() -> None:
    found = questions.disk(of(known=machine(), disk_free_bytes=1e12))
    assert found["bytes_per_context"] == 1_433_600
    assert found["bytes_per_s"] == pytest.approx(1_433_600 / 0.1221)
    assert found["days_until_full"] == pytest.approx(1e12 / found["bytes_per_day"])


def test_a_faster_disk_helps_down_to_its_latency() -> None:
    found = questions.faster_disk(of(known=machine()))
    times = found["ttft_ms"]
    assert times == sorted(times, reverse=True)
    assert times[-1] > found["free_ms"] + found["latency_ms"]
    assert "not measured" in questions.faster_disk(of(known=machine(None)))["sentence"]


def test_the_first_resource_to_saturate_limits_the_instances() -> None:
    found = questions.instances(of(known=machine(), server_cpu_ms=20.0, cores=2))
    assert found["requests_per_s_limit"]["one core"] == 50
    assert found["saturates_first"] == min(found["instances"], key=found["instances"].get)
    nothing = questions.instances(of(known=machine(None)))
    assert "Neither" in nothing["sentence"]


def test_the_published_machine_spans_its_two_ranges() -> None:
    known = case.published_machine(8000, 1.4e-5)
    assert time_model.estimate(known.prefill.ms(8000)).value == pytest.approx(1279.1)
    rate = known.restores["L2"].bytes_per_s
    assert rate is not None
    assert 0.98e9 <= rate.min() < rate.max() <= 7e9


def test_a_run_lends_its_times() -> None:
    (run,) = SAMPLE.glob("*two-round*")
    found = answers.answer(profile.load("smoke"), models=NOWHERE, run=run)
    assert found["times_from"] == run.name
    assert found["workload"]["speedup"]["value"] > 1
    told = answers.text(found)
    assert run.name in told
    for name in questions.NAMES.values():
        assert name in told
    assert "published" not in found


@pytest.mark.parametrize(
    ("options", "asked_for", "said"),
    [
        ({"control": True}, "embedded", "does not say how fast"),
        ({}, "dgx-spark", "another model's"),
        ({"manifest": {"experiment": "restart"}}, "embedded", "is not a two-round run"),
    ],
)
def test_a_run_that_cannot_lend_them_is_named(
    tmp_path: Path, options: dict[str, Any], asked_for: str, said: str
) -> None:
    run = make_run(tmp_path, contexts=4, repeats=1, **options)
    with pytest.raises(UsageError, match=said):
        answers.answer(profile.load(asked_for), models=NOWHERE, run=run.path)


def test_a_run_is_found_in_a_folder_of_runs(tmp_path: Path) -> None:
    (run,) = SAMPLE.glob("*two-round*")
    assert display.run_below(SAMPLE) == run == display.run_below(run)
    with pytest.raises(RunFolderError, match="holds no two-round run"):
        display.run_below(tmp_path)


def test_the_notebook_of_sizing_runs_on_the_sample(tmp_path: Path) -> None:
    done = notebook.execute(
        notebook.find("70_sizing"), tmp_path / "done.ipynb", {"run": str(SAMPLE)}
    )
    page = notebook.to_html(done, tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") >= 11
    assert "The published 655.2 ms (1.95x) lies within this range" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
