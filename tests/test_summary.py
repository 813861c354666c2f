"""The summary: the keys that other programs rely on, from records alone, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlab import summary
from kvlab.errors import RunFolderError
from kvlab.records import Event
from kvlab.rundir import RunDir
from tests.builders import (
    FAULTS,
    detail,
    make_run,
    on_event,
    on_request,
    on_scrape,
    replace,
)

KEYS = {
    *("schema", "experiment", "profile", "run", "status", "verdict", "control", "arms"),
    *("workload", "ttft_ms", "ttft_series_ms", "speedup", "false_gain", "served_tokens"),
    *("conservation", "correctness", "drain", "eviction", "requests", "engine", "time_s"),
    *("bill", "predicted", "cautions", "invariants"),
}


def test_a_healthy_run_is_proven(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path))
    assert set(found) == KEYS
    assert found["schema"] == 1
    assert found["experiment"] == "two-round"
    assert found["profile"] == "embedded"
    assert found["verdict"]["status"] == "proven"
    assert found["arms"] == ["baseline", "lmcache"]
    assert found["speedup"]["value"] == pytest.approx(7, rel=0.05)
    low, high = found["speedup"]["ci95"]
    assert 6 < low < found["speedup"]["value"] < high < 8
    assert found["speedup"]["percent_lower"] == pytest.approx(85.7, abs=1)
    assert "bootstrap" in found["speedup"]["method"]


def test_workload_and_bound(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path))["workload"]
    assert found["order"] == ["baseline", "lmcache", "lmcache", "baseline", "baseline", "lmcache"]
    assert found["restorable_tokens"] == 1120
    assert found["ceiling_share"] == pytest.approx(1120 / 1121)
    assert found["speedup_bound"] == 1121


def test_the_published_bound(tmp_path: Path) -> None:
    """6,400 of 8,000 tokens return: two blocks of 2,144, so at most 2.16 times."""
    published: dict[str, Any] = {
        "workload.context_tokens": 8000,
        "engine.max_model_len": 9000,
        "cache.chunk_tokens": 2144,
        "engine.block_tokens": 2144,
        "engine.max_num_batched_tokens": 4287,
    }
    run = make_run(
        tmp_path, shape="prefix_suffix", context_tokens=8000, repeats=1, overrides=published
    )
    found = summary.summarise(run)["workload"]
    assert found["restorable_tokens"] == 4288
    assert found["speedup_bound"] == pytest.approx(2.155, abs=0.001)


def test_times_of_the_measure_round(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path))
    times, series = found["ttft_ms"]["lmcache"], found["ttft_series_ms"]["lmcache"]
    assert len(times["repeats"]) == 3
    assert times["range"] == [min(times["repeats"]), max(times["repeats"])]
    assert sorted(times["repeats"])[1] == times["median"]
    assert times["first"] == series["measure"][0][0]
    assert times["n"] == 18
    assert times["median"] <= times["p90"] <= times["p99"]
    assert times["fill_median"] == pytest.approx(700, rel=0.05)
    assert {tier: row["n"] for tier, row in times["by_tier"].items()} == {
        "L1": 6,
        "L2": 6,
        "mixed": 6,
    }
    assert list(found["ttft_ms"]["baseline"]["by_tier"]) == ["recompute"]
    assert [len(repeat) for repeat in series["fill"]] == [6, 6, 6]


def test_the_false_gain_is_told_for_both_arms(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path))["false_gain"]
    assert found["baseline"]["value"] == pytest.approx(1, rel=0.05)
    assert found["lmcache"]["value"] == pytest.approx(7, rel=0.05)
    assert len(found["lmcache"]["repeats"]) == 3


def test_tokens_and_books(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path))
    assert found["served_tokens"]["lmcache"]["measure"] == {
        "L0": 0,
        "L1": 9408,
        "L2": 10752,
        "recompute": 18,
    }
    assert found["served_tokens"]["baseline"]["fill"]["recompute"] == 18 * 1121
    assert found["conservation"]["residual_tokens"] == 0
    assert found["conservation"]["detail"][3] == {
        "scenario": "lmcache",
        "repeat": 1,
        "round": "measure",
        "client": 6720,
        "vllm_local": 0,
        "vllm_external": 6720,
        "l1": 3136,
        "l2": 3584,
        "residual": 0,
    }


def test_what_is_unknown_is_absent(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path, fault="no counters"))
    assert "residual_tokens" not in found["conservation"]
    assert set(found["served_tokens"]["lmcache"]["measure"]) == {"L0", "recompute"}
    assert "measure" not in found["eviction"]["l1_chunks"]


def test_drains_and_evictions(tmp_path: Path) -> None:
    evicted = on_scrape(
        lambda s: replace(samples={**s.samples, "lmcache_mp_l1_evicted_chunks_total": 7.0})(s),
        source="lmcache",
    )
    found = summary.summarise(make_run(tmp_path, edit=evicted))
    assert [row["round"] for row in found["drain"]] == ["fill", "measure"] * 3
    assert found["drain"][0]["expected_chunks"] == found["drain"][0]["stored_chunks"] == 60
    assert "expected_chunks" not in found["drain"][1]
    assert found["eviction"] == {"l1_chunks": {"fill": 0, "measure": 0}}


def test_engine_and_time(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path))
    engine, time_s = found["engine"], found["time_s"]
    assert engine["connector"] == "SharedStateMPConnector"
    assert engine["kv_cache_tokens"] == {"baseline": 10922, "lmcache": 10922}
    assert (engine["vllm_version"], engine["lmcache_version"]) == ("0.32.0", "0.5.6")
    parts = [time_s[p] for p in ("server_start", "requests", "pause", "drain", "stop", "other")]
    assert sum(parts) == pytest.approx(time_s["total"])
    assert time_s["server_start"] == pytest.approx(240, rel=0.01)
    assert time_s["pause"] == 30
    assert 0 < time_s["other_share"] < 0.1


def test_the_time_between_the_parts_of_a_resumed_run_is_not_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, repeats=1)
    whole = summary.summarise(run)["time_s"]["total"]
    run.append(Event(at_ns=5, kind="run_started"))
    run.append(Event(at_ns=2_000_000_005, kind="run_finished"))
    assert summary.summarise(run)["time_s"]["total"] == pytest.approx(whole + 2)


def test_failed_requests_stay_visible(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path, fault="failed request"))
    assert found["requests"]["lmcache"] == {
        "sent": 36,
        "completed": 35,
        "failed": 1,
        "reasons": {"truncated stream": 1},
        "planned_tokens": [1121],
        "prompt_tokens": [1121],
        "first_token_fields": {"text": 35},
    }
    assert found["ttft_series_ms"]["lmcache"]["measure"][1][3] is None
    assert found["ttft_ms"]["lmcache"]["n"] == 17
    assert found["verdict"]["status"] == "invalid"
    assert "1 of 6 failed (truncated stream)" in found["verdict"]["reasons"][0]


def test_a_slow_first_request_never_becomes_a_headline(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path, fault="not warmed up"))
    assert found["verdict"]["status"] == "invalid"
    assert "not warmed up" in found["verdict"]["reasons"][0]
    assert "speedup:" not in summary.text(found)


def test_a_control_is_healthy_when_it_shows_nothing(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path, control=True))
    assert found["control"] is True
    assert found["verdict"]["status"] == "not shown"
    assert found["verdict"]["reasons"][0].startswith("control:")
    assert found["eviction"] == {}
    assert "connector" not in found["engine"]


def test_a_refuted_run(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path, restored_ms=1400.0))
    assert found["verdict"]["status"] == "refuted"
    assert found["speedup"]["percent_lower"] == pytest.approx(-100, abs=10)


def test_a_partial_run_is_summarised_as_far_as_it_goes(tmp_path: Path) -> None:
    late = on_request(lambda _: None, repeat=2)
    found = summary.summarise(make_run(tmp_path, repeats=2, edit=late))
    assert found["verdict"]["status"] == "invalid"
    assert len(found["ttft_ms"]["baseline"]["repeats"]) == 1
    assert len(found["false_gain"]["baseline"]["repeats"]) == 1


def test_a_run_that_died_at_once(tmp_path: Path) -> None:
    found = summary.summarise(make_run(tmp_path, edit=lambda _: None))
    assert found["verdict"]["status"] == "invalid"
    assert found["speedup"] == {}
    assert found["time_s"] == {}
    assert "median" not in found["ttft_ms"]["baseline"]
    assert "kv_cache_tokens" in found["engine"]


def test_a_run_of_no_length(tmp_path: Path) -> None:
    run = make_run(tmp_path, edit=lambda _: None)
    run.append(Event(at_ns=5, kind="run_finished"))
    run.append(Event(at_ns=5, kind="run_started"))
    run.append(Event(at_ns=5, kind="run_finished"))
    assert summary.summarise(run)["time_s"]["total"] == 0
    assert "other_share" not in summary.summarise(run)["time_s"]


def test_without_bootstrap_seed_connector_and_versions(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        manifest={"seeds": None, "connector": None},
        edit=on_event(detail(versions=None), kind="ready"),
    )
    found = summary.summarise(run)
    assert "seed 0" in found["speedup"]["method"]
    assert "connector_reason" not in found["engine"]
    assert "vllm_version" not in found["engine"]


def test_the_bootstrap_is_seeded_by_the_manifest(tmp_path: Path) -> None:
    first = summary.summarise(make_run(tmp_path / "a", manifest={"seeds": {"bootstrap": 1}}))
    second = summary.summarise(make_run(tmp_path / "b", manifest={"seeds": {"bootstrap": 2}}))
    assert first["speedup"]["value"] == second["speedup"]["value"]
    assert first["speedup"]["ci95"] != second["speedup"]["ci95"]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_it_is_json_and_the_same_every_time(tmp_path: Path, fault: str | None) -> None:
    run = make_run(tmp_path, fault=fault)
    first, again = summary.summarise(run), summary.summarise(RunDir.open(run.path))
    assert json.dumps(first, allow_nan=False) == json.dumps(again, allow_nan=False)
    assert json.loads(json.dumps(first)) == first
    left = [path for path in _nulls(first) if "ttft_series_ms" not in path]
    assert set(left) <= {".invariants.holds", ".predicted.checks.holds"}


def _nulls(value: Any, path: str = "") -> list[str]:
    if value is None:
        return [path]
    if isinstance(value, dict):
        return [p for key, item in value.items() for p in _nulls(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [p for item in value for p in _nulls(item, path)]
    return []


def test_conclude_writes_and_seals(tmp_path: Path) -> None:
    run = make_run(tmp_path, seal=False)
    found = summary.conclude(run)
    assert run.read_summary() == found
    sealed = run.sealed_checksums()
    assert sealed is not None
    assert "summary.json" in sealed


def test_an_unknown_experiment(tmp_path: Path) -> None:
    run = make_run(tmp_path, manifest={"experiment": "nap"})
    with pytest.raises(RunFolderError, match="run of 'nap'"):
        summary.summarise(run)


def test_text_for_a_terminal(tmp_path: Path) -> None:
    shown = summary.text(summary.summarise(make_run(tmp_path)))
    assert shown.startswith("verdict: proven\n  - speedup ")
    assert "baseline: median TTFT " in shown
    assert "note: 10,752 tokens came from L2" in shown
