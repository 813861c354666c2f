"""Each invariant: the fault that it must catch, and the healthy run that it must leave alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvlab import summary
from kvlab.invariants import Invariant
from kvlab.records import Event, RequestRecord
from tests.builders import (
    FAULTS,
    Edit,
    both,
    count,
    detail,
    make_run,
    on_event,
    on_request,
    on_scrape,
    replace,
)

ALL = [
    *("correctness", "requests-complete", "prompt-length", "round-1-cold", "conservation"),
    *("local-share", "baseline-steady", "warmed-up", "servers-up", "kv-equal"),
    *("external-share", "retrieves-complete", "chunks-stored", "stores-drained"),
    "disk-holds-records",
]


def check(tmp_path: Path, edit: Edit | None = None, **knobs: Any) -> dict[str, Invariant]:
    found = summary.summarise(make_run(tmp_path, edit=edit, **knobs))["invariants"]
    return {row["name"]: Invariant(**row) for row in found}


def off(found: dict[str, Invariant]) -> dict[str, bool | None]:
    """The invariants that do not hold."""
    return {name: i.holds for name, i in found.items() if i.holds is not True}


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"contexts": 16, "repeats": 1},
        {"noise": 0.1},
        {"object_groups": 1},
        {"shape": "prefix_suffix", "context_tokens": 1500},
        {"context_tokens": 1120},
        {"overrides": {"cache.separate_object_groups": None}},
    ],
)
def test_a_healthy_run_holds_them_all(tmp_path: Path, knobs: dict[str, Any]) -> None:
    found = check(tmp_path, **knobs)
    assert list(found) == ALL
    assert off(found) == {}


def test_a_healthy_control_holds_those_that_apply(tmp_path: Path) -> None:
    found = check(tmp_path, control=True)
    assert list(found) == ALL[:10]
    assert off(found) == {}


def test_without_a_disk_tier_no_records_are_expected(tmp_path: Path) -> None:
    no_counts = on_event(
        detail(files=None, bytes=None, submitted=None, completed=None), kind="drained"
    )
    found = check(tmp_path, no_counts, overrides={"cache.l2": None})
    assert list(found) == ALL[:-1]
    assert off(found) == {}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("failed request", "requests-complete"),
        ("wrong length", "prompt-length"),
        ("fast but wrong", "correctness"),
        ("warm round 1", "round-1-cold"),
        ("l0 answers round 2", "external-share"),
        ("oom kill", "servers-up"),
        ("not warmed up", "warmed-up"),
        ("chunks never stored", "chunks-stored"),
        ("unequal kv", "kv-equal"),
    ],
)
def test_each_fault_is_caught(tmp_path: Path, fault: str, name: str) -> None:
    assert check(tmp_path, fault=fault)[name].holds is False


def test_every_named_fault_makes_a_run_invalid(tmp_path: Path) -> None:
    for number, fault in enumerate(FAULTS):
        found = summary.summarise(make_run(tmp_path / str(number), fault=fault))
        assert found["verdict"]["status"] == "invalid", fault


# Requests


def test_a_missing_request(tmp_path: Path) -> None:
    lost = on_request(lambda _: None, scenario="baseline", repeat=3, round="fill", index=5)
    found = check(tmp_path, lost)["requests-complete"]
    assert found.holds is False
    assert "baseline, repeat 3, fill: 5 of 6 requests" in found.detail


def test_a_failed_request_is_named(tmp_path: Path) -> None:
    """P-30: "timeout at request k"."""
    hung = on_request(
        replace(error="timeout: not complete within 15 s (no response head)"),
        scenario="lmcache",
        repeat=1,
        round="measure",
        index=4,
    )
    found = check(tmp_path, hung)["requests-complete"]
    assert found.holds is False
    assert "measure: 1 of 6 failed (timeout), first at request 4" in found.detail


@pytest.mark.parametrize("early_ns", [0, 5_000_000])
def test_a_token_that_came_with_or_before_its_question(tmp_path: Path, early_ns: int) -> None:
    """P-03: no 0, and nothing below, is ever a time."""
    edit = on_request(
        lambda r: dataclasses.replace(r, first_token_ns=r.sent_ns - early_ns),
        scenario="lmcache",
        round="measure",
    )
    result = summary.summarise(make_run(tmp_path, edit=edit))
    assert result["verdict"]["status"] == "invalid"
    assert "request 0 has no time to first token" in " ".join(result["verdict"]["reasons"])
    assert "median" not in result["ttft_ms"]["lmcache"]


def test_an_answer_of_another_length(tmp_path: Path) -> None:
    short = on_request(replace(completion_tokens=0), scenario="baseline", repeat=1, index=2)
    found = check(tmp_path, short)["requests-complete"]
    assert found.holds is False
    assert "request 2 gave 0 tokens of 1" in found.detail


@pytest.mark.parametrize(
    ("seen", "by"), [(1227, "+106"), (1108, "-13"), (1122, "prefix shifted by 1")]
)
def test_a_context_of_another_length(tmp_path: Path, seen: int, by: str) -> None:
    other = on_request(replace(prompt_tokens=seen), scenario="lmcache", round="measure")
    found = check(tmp_path, other)["prompt-length"]
    assert found.holds is False
    assert by in found.detail


def test_a_server_that_does_not_count_the_prompt(tmp_path: Path) -> None:
    found = check(tmp_path, on_request(replace(prompt_tokens=None)))
    assert found["prompt-length"].holds is None


# Tokens


def test_a_warm_round_1_by_lmcaches_books(tmp_path: Path) -> None:
    found = check(tmp_path, fault="warm round 1")["round-1-cold"]
    assert "round 1 warm, result invalid: 1,120 hit tokens" in found.detail


def test_the_reported_warm_round_1(tmp_path: Path) -> None:
    """P-10: 8,192 of 81,920 tokens were hits in round 1."""

    def counters(requested: float, hit: float) -> Any:
        prefix = "lmcache_mp_lookup"
        values = {
            f"{prefix}_requested_tokens_total": requested,
            f"{prefix}_hit_tokens_total": hit,
            f"{prefix}_hit_l1_tokens_total": hit,
        }
        return lambda scrape: dataclasses.replace(scrape, samples={**scrape.samples, **values})

    edit = both(
        on_scrape(counters(0, 0), source="lmcache", boundary="fill:start"),
        on_scrape(counters(81_920, 8_192), source="lmcache", boundary="fill:end"),
    )
    found = check(tmp_path, edit, repeats=1)["round-1-cold"]
    assert found.holds is False
    assert "round 1 warm, result invalid: 8,192 hit tokens" in found.detail


def test_a_warm_round_1_by_vllms_books(tmp_path: Path) -> None:
    warm = on_scrape(
        count(prefix_cache_hits=224), scenario="baseline", boundary="fill:end", source="vllm"
    )
    assert check(tmp_path, warm)["round-1-cold"].holds is False


def test_a_warm_round_1_by_the_clients_books(tmp_path: Path) -> None:
    warm = on_request(replace(cached_tokens=224), scenario="baseline", round="fill", index=0)
    assert check(tmp_path, warm)["round-1-cold"].holds is False


def test_a_warm_round_1_where_other_books_are_unknown(tmp_path: Path) -> None:
    edit = both(FAULTS["warm round 1"], on_request(replace(cached_tokens=None), round="fill"))
    assert check(tmp_path, edit)["round-1-cold"].holds is False


def test_a_server_that_hides_cached_tokens(tmp_path: Path) -> None:
    found = check(tmp_path, on_request(replace(cached_tokens=None)))
    assert found["round-1-cold"].holds is None
    assert found["conservation"].holds is None
    assert "--enable-prompt-tokens-details" in found["conservation"].detail


def test_an_engine_without_the_external_counter_is_enough_for_the_baseline(tmp_path: Path) -> None:
    def without(scrape: Any) -> Any:
        kept = {k: v for k, v in scrape.samples.items() if "external" not in k}
        return dataclasses.replace(scrape, samples=kept)

    assert off(check(tmp_path / "a", on_scrape(without, scenario="baseline", source="vllm"))) == {}
    found = check(tmp_path / "b", on_scrape(without, scenario="lmcache", source="vllm"))
    assert off(found) == dict.fromkeys(
        ["round-1-cold", "conservation", "external-share", "retrieves-complete"]
    )


def test_a_scrape_that_failed_blocks_the_claims_that_rest_on_it(tmp_path: Path) -> None:
    found = check(
        tmp_path,
        on_scrape(replace(samples=None), source="vllm", boundary="measure:end"),
    )
    assert off(found) == dict.fromkeys(
        ["conservation", "local-share", "external-share", "retrieves-complete"]
    )
    assert "did not answer" in found["local-share"].detail


def test_tokens_that_nobody_explains(tmp_path: Path) -> None:
    lost = on_scrape(
        count(lookup_hit_l1_tokens=-224), repeat=2, source="lmcache", boundary="measure:end"
    )
    found = check(tmp_path / "a", lost)["conservation"]
    assert found.holds is False
    assert "lmcache, repeat 2, measure: 224 tokens unexplained" in found.detail
    allowed = {"thresholds.conservation_share_max": 0.05}
    assert check(tmp_path / "b", lost, overrides=allowed)["conservation"].holds is True


def test_a_baseline_whose_books_disagree(tmp_path: Path) -> None:
    lost = on_request(replace(cached_tokens=224), scenario="baseline", round="measure", index=0)
    found = check(tmp_path, lost)["conservation"]
    assert found.holds is False
    assert "LMCache" not in found.detail


def test_a_gain_that_is_not_lmcaches(tmp_path: Path) -> None:
    found = check(tmp_path, fault="l0 answers round 2")
    assert "gain not from LMCache" in found["external-share"].detail
    assert found["local-share"].holds is False
    assert found["conservation"].holds is True


def test_the_reported_gain_that_is_not_lmcaches(tmp_path: Path) -> None:
    """P-09: 10 x 15,444 tokens, all of them vLLM's own hits."""

    def counters(local: float, external: float) -> Any:
        names = ("prefix_cache_hits", "external_prefix_cache_hits")
        values = dict(zip((f"vllm:{name}_total" for name in names), (local, external), strict=True))
        return lambda scrape: dataclasses.replace(scrape, samples={**scrape.samples, **values})

    place = {"source": "vllm", "scenario": "lmcache"}
    found = check(
        tmp_path,
        both(
            on_scrape(counters(1000, 0), boundary="measure:start", **place),
            on_scrape(counters(155_400, 30), boundary="measure:end", **place),
        ),
        contexts=10,
        repeats=1,
        context_tokens=15_444,
        overrides={"engine.max_model_len": 16_384},
    )
    assert found["external-share"].holds is False
    assert "gain not from LMCache: external hits 30 of" in found["external-share"].detail
    assert "local hits 154,400" in found["external-share"].detail
    assert found["local-share"].holds is False


def test_some_misses_are_allowed(tmp_path: Path) -> None:
    def fewer(tokens: int) -> Edit:
        return on_scrape(
            count(external_prefix_cache_hits=-tokens), source="vllm", boundary="measure:end"
        )

    assert check(tmp_path / "a", fewer(672))["external-share"].holds is True
    assert check(tmp_path / "b", fewer(673))["external-share"].holds is False


def test_local_hits_in_the_baseline_are_no_cold_reference(tmp_path: Path) -> None:
    warm = on_scrape(
        count(prefix_cache_hits=1120), scenario="baseline", source="vllm", boundary="measure:end"
    )
    assert check(tmp_path, warm)["local-share"].holds is False


def test_a_retrieve_that_failed(tmp_path: Path) -> None:
    lost = on_scrape(
        count(num_chunks_loaded=-40), repeat=1, source="lmcache", boundary="measure:end"
    )
    found = check(tmp_path, lost)["retrieves-complete"]
    assert found.holds is False
    assert "30 chunks were hits, 20 objects were loaded" in found.detail


# Stores


def test_chunks_that_were_never_stored(tmp_path: Path) -> None:
    """50 contexts of 16 chunks: 763 of 800."""
    lost = on_scrape(
        count(l1_write_chunks=-37, l1_allocation_failure_chunks=37),
        source="lmcache",
        boundary="fill:end",
    )
    found = check(
        tmp_path,
        lost,
        contexts=50,
        repeats=1,
        object_groups=1,
        context_tokens=16 * 112 + 1,
        overrides={"cache.chunk_tokens": 112, "engine.block_tokens": 112},
    )
    assert found["chunks-stored"].holds is False
    assert "37 chunks never stored (763 of 800, L1 had no room for 37" in (
        found["chunks-stored"].detail
    )


def test_more_stores_than_the_prompts_hold(tmp_path: Path) -> None:
    more = on_scrape(
        count(l1_write_chunks=6), source="lmcache", boundary="fill:end", scenario="lmcache"
    )
    found = check(tmp_path, more, object_groups=1)["chunks-stored"]
    assert found.holds is False
    assert "more than the 30" in found.detail


def test_stores_that_are_not_counted(tmp_path: Path) -> None:
    def without(scrape: Any) -> Any:
        kept = {k: v for k, v in scrape.samples.items() if "l1_write" not in k}
        return dataclasses.replace(scrape, samples=kept)

    assert check(tmp_path, on_scrape(without, source="lmcache"))["chunks-stored"].holds is None


def test_object_groups_are_counted_where_the_disk_does_not_show_them(tmp_path: Path) -> None:
    silent = on_event(detail(object_groups=None), kind="ready")
    assert check(tmp_path / "c", silent)["chunks-stored"].holds is True
    found = check(tmp_path / "a", both(silent, on_event(detail(groups=None), kind="drained")))
    assert found["chunks-stored"].holds is True
    found = check(tmp_path / "d", on_event(lambda _: None, kind="ready"))
    assert found["chunks-stored"].holds is True
    found = check(tmp_path / "b", both(silent, on_event(lambda _: None, kind="drained")))
    assert found["chunks-stored"].holds is True
    assert found["stores-drained"].holds is None
    assert found["disk-holds-records"].holds is None


def test_every_rank_stores(tmp_path: Path) -> None:
    ranks = {"engine.flags.tensor-parallel-size": 2}
    found = check(tmp_path, object_groups=1, overrides=ranks)["chunks-stored"]
    assert found.holds is False
    assert "30 chunks never stored (30 of 60" in found.detail


@pytest.mark.parametrize(
    ("values", "holds", "text"),
    [
        ({"submitted": 40.0, "completed": 39.0, "failed": 1.0}, False, "39 of 40 stored, 1 failed"),
        ({"submitted": 40.0, "completed": 39.0}, False, "39 of 40 stored, 1 failed"),
        ({"stable": False, "waited_s": 120.0}, False, "not come to rest after 120 s"),
        ({"submitted": None}, None, "does not count its stores"),
        ({"waited_s": None}, True, "at rest after 0.0 s"),
    ],
)
def test_the_drain(tmp_path: Path, values: dict[str, Any], holds: bool | None, text: str) -> None:
    found = check(tmp_path, on_event(detail(**values), kind="drained"))["stores-drained"]
    assert found.holds is holds
    assert text in found.detail


@pytest.mark.parametrize(
    ("values", "holds", "text"),
    [
        ({"files": 0}, False, "disk tier empty"),
        ({"files": 99}, False, "99 of 100 records are on disk"),
        ({"files": 105}, True, "315 records on disk"),
        ({"completed": None}, None, "not counted"),
    ],
)
def test_the_disk(tmp_path: Path, values: dict[str, Any], holds: bool | None, text: str) -> None:
    edit = on_event(detail(**values), kind="drained", round="fill")
    found = check(tmp_path, edit)["disk-holds-records"]
    assert found.holds is holds
    assert text in found.detail


# Times


def times(fill: list[float], measure: list[float]) -> Edit:
    """An edit that gives the baseline these TTFTs in seconds."""

    def change(record: RequestRecord) -> RequestRecord:
        assert record.sent_ns
        values = fill if record.round == "fill" else measure
        first = record.sent_ns + int(values[record.index] * 1e9)
        return dataclasses.replace(record, first_token_ns=first)

    def edit(record: Any) -> Any:
        mine = isinstance(record, RequestRecord) and record.scenario == "baseline"
        return change(record) if mine and record.round in ("fill", "measure") else record

    return edit


STEADY = [0.70, 0.69, 0.69, 0.70]


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(
    ("fill", "warm"),
    [
        ([3.40, 0.70, 0.69, 0.70], False),
        ([0.70, 0.70, 0.69, 0.70], True),
        ([3.40, 3.10, 0.69, 0.70], False),
        ([1.30, 1.10, 0.69, 0.70], False),
        ([2.20, 0.70, 0.69, 0.70], False),
        ([1.40, 0.70, 0.69, 0.70], True),  # alone and below three times: a spike
        ([0.80, 0.70, 0.69, 0.70], True),
        ([2.40, 0.70, 2.00, 0.70], True),  # spikes anywhere are noise
    ],
)
def test_slow_first_requests(tmp_path: Path, repeats: int, fill: list[float], warm: bool) -> None:
    found = check(tmp_path, times(fill, STEADY), contexts=4, repeats=repeats)
    assert found["warmed-up"].holds is warm
    if not warm:
        assert "not warmed up: the first" in found["warmed-up"].detail


def test_a_run_without_times_does_not_know(tmp_path: Path) -> None:
    edit = on_request(replace(first_token_ns=None))
    found = check(tmp_path, edit)
    assert found["warmed-up"].holds is None
    assert found["baseline-steady"].holds is None


@pytest.mark.parametrize(
    ("measure", "holds"),
    [
        ([0.70, 0.69, 0.69, 0.70], True),
        ([0.68, 0.67, 0.67, 0.68], True),
        ([0.50, 0.49, 0.49, 0.50], False),
        ([0.95, 0.94, 0.94, 0.95], False),
        ([0.64, 0.90, 0.60, 0.62], True),  # 8 % apart, but so are its own requests
    ],
)
def test_the_baselines_own_gain(tmp_path: Path, measure: list[float], holds: bool) -> None:
    found = check(tmp_path, times([0.70, 0.69, 0.69, 0.70], measure), contexts=4)
    assert found["baseline-steady"].holds is holds


# Servers


def services(change: Any) -> Any:
    def edit(event: Event) -> Event:
        rows = [{**row, **change(row)} for row in event.detail["services"]]
        return dataclasses.replace(event, detail={"services": rows})

    return edit


@pytest.mark.parametrize(
    ("change", "holds", "text"),
    [
        (lambda row: {"oom_killed": True}, False, "OOM kill: vllm"),
        (
            lambda row: {"running": False, "exit_code": 137},
            False,
            "vllm stopped with exit code 137",
        ),
        (lambda row: {"started": row["started"] + 9}, False, "vllm was started again"),
        (lambda row: {"pid": 1}, False, "vllm was started again"),
        (lambda row: {"started": None}, None, "start of vllm"),
        (lambda row: {"oom_killed": None}, True, "ran through both rounds"),
    ],
)
def test_servers(tmp_path: Path, change: Any, holds: bool | None, text: str) -> None:
    edit = on_event(services(change), kind="state", scenario="baseline", repeat=2, round="measure")
    found = check(tmp_path, edit)["servers-up"]
    assert found.holds is holds
    assert text in found.detail


def test_states_that_nobody_looked_at(tmp_path: Path) -> None:
    found = check(tmp_path, on_event(lambda _: None, kind="state", round="measure"))["servers-up"]
    assert found.holds is None


def ready(scenario: str, **facts: Any) -> Edit:
    return on_event(detail(facts=facts), kind="ready", scenario=scenario)


def test_arms_of_unequal_size(tmp_path: Path) -> None:
    edit = both(
        ready("baseline", kv_cache_tokens=412160, block_tokens=224),
        ready("lmcache", kv_cache_tokens=268800, block_tokens=224, hybrid_manager_off=True),
    )
    found = check(tmp_path, edit)["kv-equal"]
    assert found.holds is False
    assert found.detail == (
        "arms not comparable: KV 412,160 vs 268,800 tokens; hybrid manager on vs off"
    )


@pytest.mark.parametrize(("tokens", "holds"), [(10922, True), (10710, True), (10700, False)])
def test_two_percent_are_allowed(tmp_path: Path, tokens: int, holds: bool) -> None:
    found = check(tmp_path, ready("lmcache", kv_cache_tokens=tokens))["kv-equal"]
    assert found.holds is holds


def test_where_the_log_is_silent_the_metrics_tell(tmp_path: Path) -> None:
    silent = both(ready("lmcache"), on_event(detail(facts=None), kind="ready", scenario="baseline"))
    assert check(tmp_path / "a", silent)["kv-equal"].holds is True
    mute = both(silent, on_scrape(replace(info={}), scenario="lmcache"))
    found = check(tmp_path / "b", mute)["kv-equal"]
    assert found.holds is None
    assert found.detail == "unknown: KV size of lmcache"
