"""Counters: any text is read, nothing unknown becomes 0, no twin is added to its successor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvlab import counters
from kvlab.counters import STARTED

LMCACHE = """\
# HELP lmcache_mp_l1_write_chunks_total Total chunks written to L1
# TYPE lmcache_mp_l1_write_chunks_total counter
python_info{implementation="CPython",major="3",minor="11",version="3.11.7"} 1.0
process_start_time_seconds 1.7960594874e+09
target_info{service_name="unknown_service",telemetry_sdk_language="python"} 1.0
lmcache_mp_l1_eviction_loop_ticks_total 127.0
lmcache_mp_l1_eviction_loop_triggered_total 4.0
lmcache_mp_l1_write_chunks_total{l1_tag="_default"} 169.0
lmcache_mp_l1_read_chunks_total{l1_tag="_default"} 219.0
lmcache_mp_l1_evicted_chunks_total{l1_tag="_default"} 112.0
lmcache_mp_l1_chunk_lifetime_seconds_bucket{l1_tag="_default",le="5.0"} 2.0
lmcache_mp_l1_chunk_lifetime_seconds_count{l1_tag="_default"} 2.0
lmcache_mp_l2_store_submitted_requests_total 66.0
lmcache_mp_l2_store_submitted_objects_chunks_total 130.0
lmcache_mp_l2_store_completed_requests_total{l2_name="fs"} 66.0
lmcache_mp_l2_store_completed_objects_chunks_total 130.0
lmcache_mp_l2_usage_bytes{l2_name="fs"} 9.3184e+06
lmcache_mp_l2_load_completed_requests_total{l2_name="fs"} 7.0
lmcache_mp_l2_prefetch_load_completed_chunks_total 39.0
lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="m"} 28000.0
lmcache_mp_lookup_hit_tokens_total{cache_salt="",model_name="m"} 12544.0
lmcache_mp_lookup_hit_l1_tokens_total{cache_salt="",model_name="m"} 4704.0
lmcache_mp_lookup_hit_l2_tokens_total{cache_salt="",model_name="m"} 7840.0
lmcache_mp_l2_load_throughput_GB_per_second_count{l2_name="fs"} 7.0
lmcache_mp_l2_load_throughput_GB_per_second_sum{l2_name="fs"} 1.8333440041862779
lmcache_mp_l1_memory_usage_bytes{backend="dram",l1_tag="_default"} 4.202496e+06
lmcache_mp_l1_allocation_failure_chunks_total{during="l1_store",model_name="m"} 7.0
lmcache_mp_num_chunks_loaded_total{cache_salt="",model_name="m",worker_id="9647"} 68.0
lmcache_mp_event_bus_dropped_events_total 0.0
"""

VLLM = """\
vllm:prefix_cache_queries_total{engine="0",model_name="k"} 20000.0
vllm:prefix_cache_queries_total{engine="1",model_name="k"} 8025.0
vllm:prefix_cache_queries_created{engine="0",model_name="k"} 1.7960595786079652e+09
vllm:prefix_cache_hits_total{engine="0",model_name="k"} 3.0
vllm:prefix_cache_hits_total{engine="1",model_name="k"} 4.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="k"} 28025.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="k"} 12544.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="k"} 20.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="k"} 25.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="k"} 17.781881093978882
vllm:cache_config_info{block_size="224",engine="0",kv_cache_size_tokens="10922"} 1.0
"""


def test_reads_what_lmcache_0_5_shows() -> None:
    samples, info = counters.parse(LMCACHE)
    seen = {
        "lookup_requested_tokens": 28000,
        "lookup_hit_tokens": 12544,
        "l1_hit_tokens": 4704,
        "l2_hit_tokens": 7840,
        "l1_read_chunks": 219,
        "l1_write_chunks": 169,
        "l1_evicted_chunks": 112,
        "eviction_ticks": 127,
        "eviction_triggered": 4,
        "l1_memory_bytes": 4_202_496,
        "l2_store_submitted": 130,
        "l2_store_completed": 130,
        "l2_load_completed": 39,
        "l2_usage_bytes": 9_318_400,
        "l2_load_throughput_count": 7,
        "l1_allocation_failures": 7,
        "chunks_loaded": 68,
        "events_dropped": 0,
    }
    assert {name: counters.read(samples, name) for name in seen} == seen
    assert counters.read(samples, "l2_store_failed") is None
    assert set(info) == {"python_info", "target_info"}
    assert not [name for name in samples if name.endswith(("_bucket", "_info"))]
    assert counters.SKIPPED not in samples


def test_reads_what_vllm_shows_and_sums_over_engines() -> None:
    samples, info = counters.parse(VLLM)
    assert counters.read(samples, "local_queries") == 28025
    assert counters.read(samples, "local_hits") == 7
    assert counters.read(samples, "external_hits") == 12544
    assert counters.read(samples, "ttft_count") == 25
    assert counters.read(samples, "ttft_sum") == pytest.approx(17.78, abs=0.01)
    assert info["vllm:cache_config_info"]["kv_cache_size_tokens"] == "10922"
    assert not [name for name in samples if name.endswith("_created")]


def test_agrees_with_the_reference_parser() -> None:
    for text in (LMCACHE, VLLM):
        expected: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created", "_info")):
                    expected[sample.name] = expected.get(sample.name, 0.0) + sample.value
        assert counters.parse(text)[0] == expected


@pytest.mark.parametrize(
    ("canonical", "name"),
    [
        ("l1_read_chunks", "lmcache_mp_l1_read_keys_total"),
        ("l1_read_chunks", "lmcache_mp_l1_read_objects_chunks_total"),
        ("l1_read_chunks", "lmcache_mp_l1_read_total"),
        ("l2_store_submitted", "lmcache_mp_l2_store_submitted_keys_total"),
        ("l2_store_submitted", "lmcache_mp_l2_store_submitted_chunks_total"),
        ("l2_store_failed", "lmcache_mp_l2_store_failed_keys_total"),
        ("l2_store_completed_requests", "lmcache_mp_l2_store_completed_requests_total"),
        ("lookups", "lmcache_mp_lookups_requests_total"),
        ("local_hits", "vllm:gpu_prefix_cache_hits_total"),
        ("local_hits", "vllm_prefix_cache_hits_total"),
        ("external_hits", "vllm:external_prefix_cache_hits"),
    ],
)
def test_knows_the_names_of_other_versions(canonical: str, name: str) -> None:
    samples, _ = counters.parse(f"{name} 5\n")
    assert counters.read(samples, canonical) == 5


def test_a_task_count_is_not_an_object_count() -> None:
    samples, _ = counters.parse("lmcache_mp_l2_store_completed_requests_total 66\n")
    assert counters.read(samples, "l2_store_completed") is None


def test_no_series_has_two_meanings() -> None:
    names = [name for aliases in counters.ALIASES.values() for name in aliases]
    assert len(names) == len(set(names))


def test_deprecated_twins_are_not_added() -> None:
    samples, _ = counters.parse(
        'vllm:gpu_prefix_cache_hits_total{engine="0"} 70\nvllm:prefix_cache_hits_total 7\n'
    )
    assert counters.read(samples, "local_hits") == 7


def test_a_twin_that_appears_later_is_not_compared_with_its_predecessor() -> None:
    before = {"vllm:gpu_prefix_cache_hits_total": 70.0}
    after = {"vllm:gpu_prefix_cache_hits_total": 75.0, "vllm:prefix_cache_hits_total": 2.0}
    assert counters.delta(before, after, "local_hits") == 5


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('m{a="x"} 1', 1.0),
        ('m{a="x",} 1', 1.0),
        ("m{} 1", 1.0),
        ("m{ } 1", 1.0),
        ('m{ a = "x" , b="y" }1', 1.0),
        (r'm{a="q\"uo}te\\",b="line\nbreak"} 2.5', 2.5),
        ('m{a="{not} a } label"} 3', 3.0),
        ('m{a="line\u2028separator\x0b\x85"} 3', 3.0),
        ("m 4 1700000000123", 4.0),
        ("m 4 1.7e9", 4.0),
        ('m_total 17 # {trace_id="KOO5S4vxi0o"} 0.67 1520879607.789', 17.0),
        ("m +5", 5.0),
        ("m -5e-1", -0.5),
        ("m .5", 0.5),
        ("m 5.", 5.0),
        ("\tm 6\t\r", 6.0),
    ],
)
def test_reads_valid_lines(line: str, value: float) -> None:
    samples, _ = counters.parse(line)
    assert list(samples.values()) == [value]


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "-Inf", "Inf", "infinity", "1e999"])
def test_a_value_that_is_no_finite_number_is_unknown(value: str) -> None:
    samples, _ = counters.parse(f'm{{engine="0"}} 1\nm{{engine="1"}} {value}\nother 2\n')
    assert samples == {"other": 2.0}


@pytest.mark.parametrize(
    "line",
    [
        "m",
        "m ",
        "m1.5",
        "m+5",
        "m 1_000",
        "m 0x10",
        "m one",
        "m 1 2 3",
        'm{a="x" 1',
        'm{a="x"b="y"} 1',
        "m{a=x} 1",
        'm{="x"} 1',
        'm{a="unclosed} 1',
        "9m 1",
        "<html><body>502 Bad Gateway</body></html>",
        "{} 1",
        "m ١",
    ],
)
def test_junk_is_skipped_and_counted(line: str) -> None:
    samples, info = counters.parse(f"good 1\n{line}\n# a comment\n\nalso_good 2\n")
    assert samples == {"good": 1.0, "also_good": 2.0, counters.SKIPPED: 1.0}
    assert info == {}


def test_escapes_in_labels_are_undone() -> None:
    _, info = counters.parse(r'build_info{path="C:\\dir\"x\"\nend",odd="\q"} 1')
    assert info == {"build_info": {"path": 'C:\\dir"x"\nend', "odd": "\\q"}}


def test_of_two_info_series_the_first_is_kept() -> None:
    _, info = counters.parse('b_info{engine="0"} 1\nb_info{engine="1"} 1\n')
    assert info == {"b_info": {"engine": "0"}}


@given(st.text())
def test_no_text_is_too_strange(text: str) -> None:
    samples, info = counters.parse(text)
    assert all(math.isfinite(value) for value in samples.values())
    assert all(isinstance(labels, dict) for labels in info.values())


pieces = st.sampled_from(
    [
        *("m", "_total", "{", "}", "a", "=", '"', "\\", ",", " ", "\t", "1", "-2.5e3", "NaN"),
        *("+Inf", "#", "\n", "\r\n", "_info", "_bucket", "\u2028", "\x00", "é"),
    ]
)


@given(st.lists(pieces, max_size=40).map("".join))
def test_no_metrics_like_text_is_too_strange(text: str) -> None:
    samples, _ = counters.parse(text)
    lines = [line.strip(" \t\r") for line in text.split("\n")]
    worth = [line for line in lines if line and not line.startswith("#")]
    assert samples.get(counters.SKIPPED, 0) <= len(worth)


names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,8}x", fullmatch=True)
labels = st.dictionaries(st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True), st.text())
values = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e15, max_value=1e15)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(st.lists(st.tuples(names, labels, values), max_size=6))
def test_every_well_formed_exposition_is_read(
    series: list[tuple[str, dict[str, str], float]],
) -> None:
    expected: dict[str, float] = {}
    lines = []
    for name, pairs, value in series:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs.items())
        lines.append(f"{name}{{{shown}}} {value!r} 1700000000000")
        expected[name] = expected.get(name, 0.0) + value
    assert counters.parse("\n".join(lines))[0] == expected


@given(labels)
def test_labels_survive_the_way(pairs: dict[str, str]) -> None:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in pairs.items())
    assert counters.parse(f"x_info{{{shown}}} 1")[1] == {"x_info": pairs}


HITS = "vllm:prefix_cache_hits_total"


def test_growth() -> None:
    assert counters.delta({HITS: 1000.0}, {HITS: 155400.0}, "local_hits") == 154400
    assert counters.delta({HITS: 7.0}, {HITS: 7.0}, "local_hits") == 0


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (None, {HITS: 1.0}, "did not answer"),
        ({HITS: 1.0}, None, "did not answer"),
        ({}, {HITS: 1.0}, "not in the first reading"),
        ({HITS: 1.0}, {}, "not in the second reading"),
        ({}, {}, "not in the first reading"),
        ({HITS: 9.0}, {HITS: 3.0}, "went back from 9 to 3, so the server was started again"),
        ({HITS: 1.0, STARTED: 5.0}, {HITS: 3.0, STARTED: 6.0}, "was started again"),
    ],
)
def test_growth_is_unknown_never_zero(
    before: dict[str, float] | None, after: dict[str, float] | None, reason: str
) -> None:
    change = counters.change(before, after, "local_hits")
    assert change.value is None
    assert change.reason is not None
    assert reason in change.reason
    assert counters.delta(before, after, "local_hits") is None


def test_an_unanswered_scrape_has_no_counters() -> None:
    assert counters.read(None, "local_hits") is None


LOADED = "lmcache_mp_num_chunks_loaded_total"


def test_a_counter_that_appears_has_counted_all_of_it_since() -> None:
    before = {STARTED: 1.0, "lmcache_mp_l1_write_chunks_total": 3.0}
    after = {STARTED: 1.0, LOADED: 5.0}
    assert counters.since_start(before, after, "chunks_loaded").value == 5
    assert counters.since_start({**before, LOADED: 2.0}, after, "chunks_loaded").value == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {LOADED: 5.0}),
        ({}, {LOADED: 5.0}),
        ({"other": 1.0}, {"other": 1.0}),
        ({"other": 1.0}, None),
        ({STARTED: 1.0}, {STARTED: 2.0, LOADED: 5.0}),
        ({LOADED: 9.0}, {LOADED: 5.0}),
        ({LOADED: 9.0}, {"other": 5.0}),
    ],
)
def test_it_stays_unknown_when_the_first_reading_tells_nothing(
    before: dict[str, float] | None, after: dict[str, float] | None
) -> None:
    change = counters.since_start(before, after, "chunks_loaded")
    assert change.value is None
    assert change.reason
