"""The tier simulator: held against a slow reference, and against what the engine was seen to do."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import profile
from kvlab.rundir import RunDir
from kvlab.sizing import model, simulator, trace
from kvlab.sizing.simulator import Served, Tiers
from tests.sizing import reference
from tests.sizing.traces import CHUNK, traces

UNTIMED = settings(deadline=None)

SAMPLE = next((Path(__file__).parents[2] / "data" / "sample").iterdir())
CONFIGS = Path(__file__).parent / "configs"
WHOLE, STATE = 5, 2


@st.composite
def tier_settings(draw) -> Tiers:
    l1_bytes = draw(st.sampled_from([None, 4, 17, 40, 10_000]))
    return Tiers(
        chunk_bytes=WHOLE,
        state_bytes=draw(st.sampled_from([0, STATE])),
        l0_chunks=draw(st.sampled_from([None, 0, 1, 3, 8])),
        l0_state_chunks=draw(st.sampled_from([0.0, 0.0, 1.0, 0.5])),
        l1_bytes=l1_bytes,
        watermark=draw(st.sampled_from([0.3, 0.8])),
        ratio=draw(st.sampled_from([0.01, 0.2, 0.5, 0.99])),
        first_look_s=draw(st.sampled_from([0.25, 1.0])),
        l2=draw(st.booleans()) if l1_bytes else False,
        l2_bytes=draw(st.sampled_from([None, 12, 60])),
        l2_ratio=draw(st.sampled_from([0.2, 0.7])),
        l2_write_bytes_per_s=draw(st.sampled_from([None, 2.0, 20.0, 1000.0])),
        state_every=draw(st.sampled_from([1, 1, 2, 3])),
    )


def seconds(served: Served) -> float:
    return 0.04 * served.recompute + 0.01 * served.l2_bytes


@UNTIMED
@given(traces(timed=True), tier_settings())
def test_it_is_the_slow_reference(asked, tiers):
    seen: list[Served] = []
    outcome = simulator.simulate(
        asked, tiers, ttft_s=seconds, each=lambda served, _: seen.append(served)
    )
    expected, left = reference.run(asked, tiers, seconds)
    assert seen == expected
    counts = outcome.counts
    assert counts.loop_ticks == left.ticks
    assert counts.l1_evicted_objects + counts.l2_evicted_objects == left.evicted
    assert counts.failed_stores == left.failed_stores
    assert counts.failed_loads == left.failed_loads
    assert outcome.l1_resident_bytes == left.used(left.l1)
    assert outcome.l2_resident_bytes == left.used(left.l2)
    assert outcome.l2_backlog_bytes == left.used(left.on_the_way)


@UNTIMED
@given(traces(timed=True), tier_settings(), st.integers(1, 3), st.booleans())
def test_no_token_and_no_byte_is_lost(asked, tiers, concurrency, timed):
    seen: list[Served] = []
    outcome = simulator.simulate(
        asked,
        tiers,
        ttft_s=seconds if timed else None,
        concurrency=concurrency,
        each=lambda served, _: seen.append(served),
    )
    total, counts = outcome.total, outcome.counts
    assert total.requests == len(seen) == len(list(asked))
    assert total.tokens == sum(request.tokens for request in asked) == sum(total.served.values())
    for one in seen:
        assert one.tokens == one.l0 + one.l1 + one.l2 + one.recompute
        assert one.recompute >= 1
        assert (one.tokens - one.recompute) % CHUNK == 0
    assert counts.l2_read_bytes == sum(one.l2_bytes for one in seen)
    assert counts.l1_read_bytes == sum(one.l1_bytes + one.l2_bytes for one in seen)
    assert 0 <= outcome.l1_resident_bytes <= (tiers.l1_bytes or 0)
    on_l2 = outcome.l2_resident_bytes + outcome.l2_backlog_bytes
    assert on_l2 <= counts.l2_written_bytes + outcome.l2_backlog_bytes <= counts.l1_written_bytes
    if not tiers.l2:
        assert on_l2 == total.served["L2"] == 0


@UNTIMED
@given(traces(most=40), st.integers(0, 12))
def test_a_larger_l0_never_serves_fewer_tokens(asked, chunks):
    small, large = (
        simulator.simulate(asked, Tiers(chunk_bytes=1, l0_chunks=size)).total.served["L0"]
        for size in (chunks, chunks + 1)
    )
    assert large >= small


def test_a_clock_runs_only_with_a_time_function():
    asked = trace.two_round(contexts=3, context_tokens=45, chunk_tokens=10)
    still = simulator.simulate(asked, Tiers(chunk_bytes=1, l0_chunks=None))
    assert still.seconds == 0
    assert still.l2_growth_bytes_per_day is None
    assert still.rounds["measure"].ttft.count == 0
    timed = simulator.simulate(
        asked, Tiers(chunk_bytes=10, l0_chunks=0, l1_bytes=1e6, l2=True), ttft_s=lambda _: 2.0
    )
    assert timed.seconds == 6 * 2 + 5
    assert timed.l2_growth_bytes_per_day == pytest.approx(12 * 10 / 17 * 86_400)
    assert timed.rounds["measure"].ttft.median == pytest.approx(2.0)


def test_requests_in_flight_share_the_clock():
    asked = trace.two_round(contexts=8, context_tokens=45, chunk_tokens=10, pause_s=0)
    tiers = Tiers(chunk_bytes=1, l0_chunks=0)
    for concurrency, ends in ((1, 16), (4, 4)):
        assert simulator.simulate(
            asked, tiers, ttft_s=lambda _: 1.0, concurrency=concurrency
        ).seconds == pytest.approx(ends)


def spark(shape: str, **changes: object) -> simulator.Outcome:
    """The DGX Spark report's run: derived sizes, and a disk of 2 GB/s that is only assumed."""
    config = json.loads((CONFIGS / "qwen3.6-35b-a3b-like.json").read_text(encoding="utf-8"))
    sizes = model.arithmetic(config, cache_dtype="fp8", speculative_tokens=3)
    tiers = simulator.tiers_of(
        profile.load("dgx-spark"), sizes, l0_chunks=0, l2_write_bytes_per_s=2e9
    )
    return simulator.simulate(
        trace.two_round(contexts=200, context_tokens=8000, chunk_tokens=2144, shape=shape),
        dataclasses.replace(tiers, **changes),
        ttft_s=lambda served: 1.28 * served.recompute / 8000 + served.l2_bytes / 3e9,
    )


def test_the_reports_shapes_reach_their_ceilings():
    """Two whole blocks of 2,144 tokens return with prefix_suffix, three with equal contexts."""
    for shape, blocks in (("prefix_suffix", 2), ("identical", 3)):
        measured = spark(shape).rounds["measure"]
        assert measured.tokens - measured.served["recompute"] == 200 * blocks * 2144


def test_the_published_eviction_ratio_leaves_round_two_to_the_disk():
    """At 0.99 L1 is all but emptied; at the default 0.20 the newest contexts stay in it."""
    harsh, mild = spark("identical"), spark("identical", ratio=0.2)
    assert harsh.rounds["measure"].share("L1") < mild.rounds["measure"].share("L1")
    assert harsh.counts.loop_triggered > 0
    assert harsh.counts.failed_stores == mild.counts.failed_stores == 0


def test_the_sample_run_is_what_its_counters_say():
    """The committed run's round 2, from its own settings and times.

    When the loop looks first is no setting: L1's part lies between those of four such moments,
    what L1 and L2 serve together is the same in all of them.
    """
    run = RunDir.open(SAMPLE)
    settings = profile.Profile.model_validate(run.manifest["profile"])
    summary = json.loads((SAMPLE / "summary.json").read_text(encoding="utf-8"))
    seen = summary["served_tokens"]["lmcache"]["measure"]
    times = [
        (record.ttft_ns or 0) / 1e9
        for record in run.requests()
        if (record.scenario, record.repeat) == ("lmcache", 1)
        if record.round in ("warmup", "fill", "measure")
    ]
    tiers = simulator.tiers_of(settings, embedded(), l2_write_bytes_per_s=1e9)
    found = []
    for first_look_s in (0.25, 0.5, 0.75, 1.0):
        took_s = iter(times)
        outcome = simulator.simulate(
            trace.of_profile(settings),
            dataclasses.replace(tiers, first_look_s=first_look_s),
            ttft_s=lambda served, took_s=took_s: 0.1 if served.label == "probe" else next(took_s),
        )
        found.append(outcome.rounds["measure"].served)
        chunks = sum(len(request.keys) for request in trace.of_profile(settings))
        assert outcome.l2_resident_bytes == tiers.chunk_bytes * (
            chunks - settings.workload.contexts * 5
        )
    repeats = settings.experiments.two_round.repeats
    parts = [one["L1"] for one in found]
    assert min(parts) <= seen["L1"] / repeats <= max(parts)
    for one in found:
        assert (one["L1"] + one["L2"]) * repeats == seen["L1"] + seen["L2"]
        assert (one["L0"], one["recompute"] * repeats) == (seen["L0"], seen["recompute"])


def embedded() -> model.Arithmetic:
    config = json.loads((CONFIGS / "embedded-hybrid.json").read_text(encoding="utf-8"))
    return model.arithmetic(config, kernel_block_tokens=32)


@pytest.mark.parametrize(("tokens", "fit"), [(1121, 10), (1130, 10), (700, 15)])
def test_vllm_holds_as_many_contexts_as_it_was_seen_to(tokens, fit):
    """vLLM 0.32 (CPU), 64 blocks, asked N contexts twice: all cached up to this N, then none."""
    tiers = simulator.tiers_of(profile.load("embedded"), embedded(), "baseline")
    for contexts in (fit, fit + 1):
        asked = trace.two_round(contexts=contexts, context_tokens=tokens, chunk_tokens=224)
        served = simulator.simulate(asked, tiers).rounds["measure"].served["L0"]
        assert served == (contexts * (tokens // 224) * 224 if contexts == fit else 0)


@pytest.mark.parametrize("contexts", [1, 3, 6])
def test_vllm_finds_a_shared_prefix_only_the_third_time_as_it_was_seen_to(contexts):
    """vLLM 0.32 (CPU): 1,130 of 1,600 tokens return. Cached: 0, then 0, then 1,120 of each."""
    tiers = simulator.tiers_of(profile.load("embedded"), embedded(), "baseline")

    def requests():
        for turn in ("first", "second", "third"):
            for context in range(contexts):
                keys = [(context, n) if n < 5 else (context, turn, n) for n in range(7)]
                yield trace.Request(1600, keys, label=turn)

    asked = trace.Trace(title="parted", chunk_tokens=224, requests=requests)
    rounds = simulator.simulate(asked, tiers).rounds
    assert [one.served["L0"] for one in rounds.values()] == [0, 0, contexts * 1120]


def test_vllm_follows_a_growing_conversation_as_it_was_seen_to():
    asked = trace.multi_turn(users=5, turns=5, first_tokens=300, turn_tokens=250, chunk_tokens=224)
    tiers = simulator.tiers_of(profile.load("embedded"), embedded(), "baseline")
    rounds = simulator.simulate(asked, tiers).rounds
    assert [one.served["L0"] // 5 for one in rounds.values()] == [0, 224, 448, 672, 896]


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, 60),  # 64 blocks, less those of a request at work and one that stands for none
        ({"engine.flags.num-gpu-blocks-override": None}, 60),  # by the log's 10,922 tokens
        ({"engine.flags.num-gpu-blocks-override": None, "engine.kv_cache_tokens": None}, None),
        ({"engine.prefix_caching": False}, 0),
    ],
)
def test_l0_is_as_large_as_is_known(changes, chunks):
    tiers = simulator.tiers_of(profile.load("embedded", changes), embedded())
    assert tiers.l0_chunks == chunks
    assert tiers.l0_state_chunks == 1
    assert (tiers.chunk_bytes, tiers.state_bytes) == (4 * 71_680, 2 * 71_680)


@pytest.mark.parametrize(("budget", "every"), [(447, 1), (448, 2), (2048, 9)])
def test_a_larger_budget_keeps_states_more_rarely(budget, every):
    settings = profile.load("embedded", {"engine.max_num_batched_tokens": budget})
    assert simulator.tiers_of(settings, embedded(), "baseline").state_every == every
