"""The published result, explained from its settings; and the page that tells it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvlab import profile
from kvlab.errors import UsageError
from kvlab.sizing import answers, explanation, sizes

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = Path("no-models-here")


def found(**overrides: Any) -> dict[str, Any]:
    answer = answers.answer(profile.load("dgx-spark", overrides), models=NOWHERE)
    published: dict[str, Any] = answer["published"]
    return published


def test_two_whole_blocks_fit_the_published_speedup_and_identical_contexts_do_not() -> None:
    shapes = found()["shapes"]
    fits, does_not = shapes["prefix_suffix"], shapes["identical"]
    assert (fits["whole_blocks"], fits["restored_tokens"], fits["computed_tokens"]) == (
        *(2, 4288, 3712),
    )
    assert fits["speedup_bound"] == pytest.approx(8000 / 3712)
    assert fits["holds_published"]
    assert fits["speedup"][0] < 1.95 < fits["speedup"][1] < fits["speedup_bound"]
    assert (does_not["whole_blocks"], does_not["computed_tokens"]) == (3, 1568)
    assert not does_not["holds_published"]
    assert does_not["speedup"][0] > 1.96
    assert does_not["read_gb_per_s_needed"][1] < found()["assumed"]["read_gb_per_s"][0]


def test_the_figure_of_the_lmcache_arm_is_compared_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another published figure changes what is said of it, and nothing of what is predicted."""
    before = found()["shapes"]["prefix_suffix"]
    other = {**explanation.dgx_spark()}
    other["ttft_ms"] = {**other["ttft_ms"], "lmcache": {"median": 300.0}}
    monkeypatch.setattr(explanation, "dgx_spark", lambda: other)
    after = found()["shapes"]["prefix_suffix"]
    for key in ("computed_ms", "ttft_ms", "speedup", "restored_bytes"):
        assert before[key] == after[key]
    assert before["holds_published"]
    assert not after["holds_published"]


def test_other_profiles_are_not_explained() -> None:
    assert not explanation.applies_to(profile.load("embedded"))
    shorter = profile.load("dgx-spark", {"workload.context_tokens": 9000})
    assert not explanation.applies_to(shorter)


def test_the_shape_of_the_model_gives_the_stated_sizes() -> None:
    chosen = profile.load("dgx-spark")
    config = sizes.config_of(chosen, NOWHERE)
    assert config is not None
    sums = sizes.arithmetic_of(chosen, config)
    held = sizes.sizes(chosen, sums)
    assert held["block_tokens"] == chosen.engine.block_tokens
    assert held["records_per_context"] == 3
    low, high = found()["given"]["record_bytes"]
    assert low < held["chunk_bytes"] < high
    assert held["l0_working_set_bytes"] == pytest.approx(63e9, rel=0.03)


def test_a_model_without_a_shape_is_named() -> None:
    with pytest.raises(UsageError, match="my-model is not known"):
        answers.answer(profile.load("embedded", {"model.name": "my-model"}), models=NOWHERE)


def test_the_built_model_is_known_before_it_is_built() -> None:
    """What stands in shapes.json is what the builder writes: N and the chunk of a real run."""
    (manifest,) = (ROOT / "data" / "sample").glob("*two-round*/manifest.json")
    built = json.loads(manifest.read_text(encoding="utf-8"))["model"]
    chosen = profile.load("embedded")
    config = sizes.config_of(chosen, NOWHERE)
    assert config is not None
    sums = sizes.arithmetic_of(chosen, config)
    assert sums.block_tokens == built["block_tokens"]
    assert sums.chunk_bytes(chosen.cache.chunk_tokens) == built["chunk_bytes"]
    assert sums.kv_bytes_per_token == built["kv_bytes_per_token"]


def test_the_eviction_ratio_decides_nothing_while_l2_holds_all() -> None:
    eviction = found()["eviction"]
    for shape in eviction.values():
        low, high = shape["0.20"], shape["0.99"]
        assert low["L1"] + low["L2"] == pytest.approx(high["L1"] + high["L2"])
    fits = eviction["prefix_suffix"]
    assert fits["0.20"] == fits["0.99"]
    assert fits["0.99"]["L1"] == 0
    assert fits["0.99"]["ci95"][0] < 1.95 < fits["0.99"]["ci95"][1]
    other = eviction["identical"]
    assert other["0.20"]["L1"] > other["0.99"]["L1"]
    assert other["0.99"]["ci95"][0] > 1.95


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "hybrid-4l-s0").mkdir()
    (tmp_path / "hybrid-4l-s0" / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        answers.answer(profile.load("embedded"), models=tmp_path)


def test_the_page_says_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- kvlab predict dgx-spark -->\n```text\n(.*?)```", page, re.DOTALL)
    assert block
    answer = answers.answer(profile.load("dgx-spark"), models=NOWHERE)
    assert block[1].strip() == answers.text(answer).strip()
    assert "derived" in block[1]
