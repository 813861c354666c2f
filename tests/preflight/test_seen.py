"""N as runs saw it: kept beside the runs, and found again only for the same configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvlab import preflight, profile
from kvlab.preflight import seen
from kvlab.preflight.seen import Seen
from tests.preflight.cases import MTP, SPARK_HOST


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def spark(**settings: Any) -> profile.Profile:
    return profile.load("dgx-spark", settings)


def test_what_a_run_saw_is_found_by_the_next_check(runs: Path) -> None:
    assert seen.find(runs, spark(), SPARK_HOST) is None
    seen.keep(runs, spark(), SPARK_HOST, Seen(2160, "20261130T1-two-round"))
    assert seen.find(runs, spark(), SPARK_HOST) == Seen(2160, "20261130T1-two-round")
    case = preflight.gather(spark(), host=SPARK_HOST, runs=runs)
    assert (case.block.tokens, case.block.source) == (2160, "cache")
    found = next(one for one in preflight.evaluate(case) if one.id == "KV011")
    assert "an earlier run saw it: 20261130T1-two-round" in found.found


@pytest.mark.parametrize(
    "settings",
    [
        {"container.image": "vllm/vllm-openai:v0.26.0"},
        {"model.name": "nvidia/other"},
        {"engine.flags.kv-cache-dtype": "auto"},
        {"engine.flags.speculative-config": None},
        {"engine.flags.speculative-config": {**MTP, "num_speculative_tokens": 1}},
        {"engine.flags.tensor-parallel-size": 2},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_another_configuration_has_another_n(runs: Path, settings: dict[str, Any]) -> None:
    seen.keep(runs, spark(), SPARK_HOST, Seen(2144, "a run"))
    assert seen.find(runs, spark(**settings), SPARK_HOST) is None
    seen.keep(runs, spark(**settings), SPARK_HOST, Seen(1616, "another"))
    assert seen.find(runs, spark(), SPARK_HOST) == Seen(2144, "a run")


def test_what_does_not_decide_n_does_not_hide_it(runs: Path) -> None:
    seen.keep(runs, spark(), SPARK_HOST, Seen(2144, "a run"))
    other = spark(**{"workload.contexts": 20, "cache.l1_size_gb": 4, "engine.max_num_seqs": 2})
    assert seen.find(runs, other, {}) == Seen(2144, "a run")


def test_on_cpu_the_processor_decides_as_well(runs: Path) -> None:
    chosen = profile.load("embedded")
    seen.keep(runs, chosen, SPARK_HOST, Seen(224, "a run"))
    assert seen.find(runs, chosen, SPARK_HOST)
    assert seen.find(runs, chosen, {**SPARK_HOST, "cpu": {"flags": ["avx512_bf16"]}}) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 9, "blocks": {}}', '{"schema": 1, "blocks": []}']
)
def test_a_damaged_cache_is_as_good_as_none(runs: Path, text: str) -> None:
    (runs.parent / seen.FILE).write_text(text)
    assert seen.find(runs, spark(), SPARK_HOST) is None
    seen.keep(runs, spark(), SPARK_HOST, Seen(2144, "a run"))
    assert seen.find(runs, spark(), SPARK_HOST) == Seen(2144, "a run")


def test_an_entry_of_another_kind_is_not_believed(runs: Path) -> None:
    seen.keep(runs, spark(), SPARK_HOST, Seen("many", "a run"))  # type: ignore[arg-type]
    assert seen.find(runs, spark(), SPARK_HOST) is None
