"""Traces: the workloads' shapes, and what is read from logs and run folders."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import profile, prompts
from kvlab.errors import UsageError
from kvlab.sizing import trace
from tests.builders import make_run

UNTIMED = settings(deadline=None)


def reusable(asked: trace.Trace) -> list[int]:
    """Leading chunks of each request that some request before it had."""
    seen, found = set(), []
    for request in asked:
        keys = list(request.keys)
        found.append(next((n for n, key in enumerate(keys) if key not in seen), len(keys)))
        seen |= set(keys)
    return found


@pytest.mark.parametrize("shape", ["identical", "prefix_suffix"])
def test_two_rounds_share_what_the_real_prompts_share(shape):
    """The keys of the simulated rounds meet exactly where the token ids of the real ones do."""
    settings = profile.load(
        "embedded",
        {
            "workload.shape": shape,
            "engine.kv_cache_tokens": None,
            "workload.contexts": 4,
            "workload.context_tokens": 1500,
            "experiments.two_round.warmup_requests": 2,
        },
    )
    chunk = settings.cache.chunk_tokens
    real = []
    for name in ("fill", "measure"):
        for question in prompts.questions(settings, "0" * 16, name):
            ids = question.token_ids
            ends = range(chunk, len(ids) + 1, chunk)
            keys = [ids[:end] for end in ends]
            real.append(trace.Request(len(ids), keys, 0.0, name))
    expected = trace.Trace(title="real", chunk_tokens=chunk, requests=lambda: iter(real))
    simulated = trace.of_profile(settings)
    assert reusable(simulated) == [0] * 3 + reusable(expected)
    probe, warmup, *_ = simulated
    assert probe.tokens == len(prompts.probe(settings, "0" * 16).token_ids)
    assert warmup.tokens == len(next(prompts.warmup(settings, "0" * 16)).token_ids)
    rounds = [request for request in simulated if request.label in ("fill", "measure")]
    assert [request.tokens for request in rounds] == [request.tokens for request in expected]
    assert [request.drained for request in rounds] == [False] * 4 + [True] + [False] * 3


@UNTIMED
@given(
    st.integers(1, 6),
    st.integers(1, 100),
    st.integers(1, 30),
    st.sampled_from(["identical", "prefix_suffix"]),
    st.integers(0, 100),
)
def test_only_the_prefix_returns(contexts, tokens, chunk, shape, prefix):
    prefix = min(prefix, tokens)
    asked = trace.two_round(
        contexts=contexts,
        context_tokens=tokens,
        chunk_tokens=chunk,
        shape=shape,
        prefix_tokens=prefix,
    )
    same = (tokens if shape == "identical" else prefix) // chunk
    assert reusable(asked) == [0] * contexts + [same] * contexts
    assert list(asked) == list(asked)


def test_conversations_find_their_last_turn():
    asked = trace.multi_turn(
        users=2, turns=3, first_tokens=25, turn_tokens=12, chunk_tokens=10, think_s=4
    )
    assert [request.tokens for request in asked] == [25, 25, 37, 37, 49, 49]
    assert reusable(asked) == [0, 0, 2, 2, 3, 3]
    assert [request.at_s for request in asked] == [0, 0, 4, 4, 8, 8]


def test_a_zipf_trace_repeats_itself_and_prefers_the_first():
    asked = trace.zipf(
        requests=3000, contexts=50, context_tokens=35, chunk_tokens=10, rate_per_s=10, seed=3
    )
    first = [request.keys[0] for request in asked]
    assert first == [request.keys[0] for request in asked]
    assert first.count(0) > 1.5 * first.count(3) > 3 * first.count(3 * 20)
    assert len(set(first)) <= 50
    times = [request.at_s for request in asked]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(300, rel=0.1)


def lookup(at_s: float, *hashes: str, tail: int = 3, **other: object) -> dict:
    return {
        "timestamp": at_s,
        "request_id": "r",
        "model_name": "m",
        "chunk_size": 10,
        "seq_len": 10 * len(hashes) + tail,
        "dtypes": ["bfloat16"],
        "shapes": [[2, 10, 4]],
        "chunk_hashes": list(hashes),
        **other,
    }


def write(path: Path, *rows: dict, end: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end, encoding="utf-8")
    return path


def test_lookups_are_read_in_the_order_of_their_files(tmp_path):
    write(tmp_path / "lookup_hashes_20260401_150000_000001.jsonl", lookup(12.5, "0xa", "0xb"))
    write(
        tmp_path / "lookup_hashes_20260401_140000_000000.jsonl",
        lookup(10.0, "0xa"),
        lookup(11.0, "0xc", model_name="other"),
        end='{"timestamp": 11.5, "chu',
    )
    asked = trace.lookup_log([tmp_path], model="m")
    assert [(r.at_s, r.tokens, list(r.keys)) for r in asked] == [
        (0.0, 13, ["0xa"]),
        (2.5, 23, ["0xa", "0xb"]),
    ]
    assert len(list(trace.lookup_log([tmp_path]))) == 3


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no lookup is in"),
        ([{"hash_ids": [1]}], "line 1: no JSON object with sound chunk_size"),
        ([lookup(1, "0xa"), lookup(2, "0xb", chunk_size=20)], "chunks of 10 and of 20"),
        ([lookup(1, "0xa"), {"chunk_size": "10"}], "line 2"),
        ([lookup(1, "0xa"), lookup(float("nan"), "0xa")], "line 2"),
        ([lookup(1, "0xa", chunk_size=0)], "line 1"),
        ([lookup(1, "0xa", chunk_hashes=[["0xa"]])], "line 1"),
    ],
)
def test_what_is_no_lookup_log_is_refused(tmp_path, rows, says):
    path = write(tmp_path / "log.jsonl", *rows)
    with pytest.raises(UsageError, match=says):
        list(trace.lookup_log([path]))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"away\.jsonl cannot be read"):
        trace.lookup_log([tmp_path / "away.jsonl"])


def test_published_traces_are_read_plain_and_packed(tmp_path):
    rows = [
        {"timestamp": 5000, "input_length": 1024, "hash_ids": [1, 2], "output_length": 4},
        {"timestamp": 7500, "input_length": 1300, "hash_ids": [1, 2, 3]},
    ]
    path = write(tmp_path / "trace.jsonl", *rows)
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        asked = trace.hash_ids(file, block_tokens=512)
        assert [(r.at_s, r.tokens, r.keys) for r in asked] == [
            (0.0, 1024, [1, 2]),
            (2.5, 1300, [1, 2]),  # the third block is not whole: LMCache keeps none of it
        ]
    with pytest.raises(UsageError, match="does not state its block_size"):
        trace.hash_ids(path)
    rows[0]["block_size"] = 512
    assert len(list(trace.hash_ids(write(path, *rows)))) == 2
    rows[1]["block_size"] = 256
    with pytest.raises(UsageError, match="chunks of 512 and of 256"):
        list(trace.hash_ids(write(path, *rows)))
    with pytest.raises(UsageError, match="holds no request"):
        trace.hash_ids(write(path))


@pytest.mark.parametrize("shape", ["identical", "prefix_suffix"])
def test_a_run_is_read_as_it_was_asked(tmp_path, shape):
    run = make_run(tmp_path, contexts=3, repeats=2, shape=shape, context_tokens=1500)
    asked = trace.of_run(run, "lmcache", 2)
    settings = profile.Profile.model_validate(run.manifest["profile"])
    rounds = [request for request in asked if request.label in ("fill", "measure")]
    expected = [r for r in trace.of_profile(settings) if r.label in ("fill", "measure")]
    both = [
        reusable(trace.Trace(title="", chunk_tokens=224, requests=lambda rows=rows: iter(rows)))
        for rows in (rounds, expected)
    ]
    assert both[0] == both[1]
    assert [request.at_s for request in asked] == sorted(request.at_s for request in asked)
    with pytest.raises(UsageError, match="no answered request of lmcache, repeat 7"):
        trace.of_run(run, "lmcache", 7)
