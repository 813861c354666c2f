"""The fake must behave as it says, or the tests that stand on it prove nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvlab import client, counters
from kvlab.disk.inventory import survey
from kvlab.errors import StackNotReady
from kvlab.records import Event, Record, RequestRecord
from kvlab.stack import logs
from kvlab.stack.plan import Place
from tests import fake_stack
from tests.fake_stack import FAULTS, Fault, Settings, Stack, launch, settings
from tests.fake_stack.base import ExitedAtStart

FAST = Settings(base_s=0, token_s=0, l2_token_s=0, output_token_s=0)
PATIENCE_S = 30
TOKENS = 70
WHOLE = 64
"""Tokens of a prompt that whole chunks of 16 can restore."""


def prompt(number: int, tokens: int = TOKENS) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(256, 4096), k=tokens))


async def ask(
    sender: client.Sender, number: int, *, max_tokens: int = 1, deadline_s: float = 5.0
) -> RequestRecord:
    question = client.Question(f"c{number}", prompt(number), max_tokens)
    return await sender.ask(
        question, scenario="lmcache", repeat=1, round="fill", index=number, deadline_s=deadline_s
    )


@asynccontextmanager
async def running(
    *faults: Fault | str, config: Settings = FAST, lmcache: bool = True
) -> AsyncIterator[tuple[Stack, client.Sender]]:
    async with (
        fake_stack.start(config.with_faults(*faults), lmcache=lmcache) as stack,
        client.connect(stack.vllm_url, model=config.served_name, slots=1) as sender,
    ):
        yield stack, sender


async def get(url: str | None, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.get(f"{url}{path}")


async def samples(url: str | None) -> dict[str, float]:
    return counters.parse((await get(url, "/metrics")).text)[0]


async def l2_written(stack: Stack) -> None:
    """Wait until every L2 store that was submitted has been tried."""
    assert stack.lmcache is not None
    store: dict[str, int] = {"in_flight_task_count": 1}
    async with asyncio.timeout(PATIENCE_S):
        while any(store[key] for key in store if key.endswith("_count")):
            await asyncio.sleep(0.001)
            store = stack.lmcache.status()["storage_manager"]["store_controller"]


# The healthy stack


async def test_a_prompt_is_cold_then_comes_from_l0_then_from_l1_then_from_l2() -> None:
    async with running() as (stack, sender):
        assert (await ask(sender, 1)).cached_tokens == 0
        again = await ask(sender, 1)
        assert (again.error, again.cached_tokens, again.prompt_tokens) == (None, WHOLE, TOKENS)
        vllm = await samples(stack.vllm_url)
        assert counters.read(vllm, "local_hits") == WHOLE
        async with httpx.AsyncClient(trust_env=False) as http:
            await l2_written(stack)
            reset = await http.post(f"{stack.vllm_url}/reset_prefix_cache")
            assert reset.json() == {"success": True}
            before = await samples(stack.lmcache_url)
            await ask(sender, 1)
            between = await samples(stack.lmcache_url)
            await http.post(f"{stack.vllm_url}/reset_prefix_cache")
            await http.post(f"{stack.lmcache_url}/cache/clear")
            await ask(sender, 1)
        after = await samples(stack.lmcache_url)
        assert counters.delta(before, between, "l1_hit_tokens") == WHOLE
        assert counters.delta(between, after, "l2_hit_tokens") == WHOLE


async def test_delays_are_those_of_the_settings() -> None:
    config = Settings(token_s=0.001)
    async with running(config=config) as (_, sender):
        cold, warm = await ask(sender, 1), await ask(sender, 1)
        assert cold.ttft_ns is not None
        assert warm.ttft_ns is not None
        assert cold.ttft_ns >= config.ttft_s(TOKENS) * 1e9
        assert warm.ttft_ns >= config.ttft_s(TOKENS, local=WHOLE) * 1e9
        assert config.ttft_s(TOKENS, l2=WHOLE) < config.ttft_s(TOKENS)


async def test_an_answer_depends_on_the_prompt_alone() -> None:
    async with running() as (_, sender):
        cold, other, warm = await ask(sender, 1), await ask(sender, 2), await ask(sender, 1)
    async with running(lmcache=False) as (_, sender):
        elsewhere = await ask(sender, 1)
    assert cold.top_logprobs == warm.top_logprobs == elsewhere.top_logprobs
    assert cold.top_logprobs != other.top_logprobs
    assert len(cold.top_logprobs or {}) == 5


async def test_the_stream_has_the_real_servers_shape() -> None:
    body = {
        "model": "fake-model",
        "prompt": list(prompt(1)),
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 5,
        "return_token_ids": True,
    }
    async with running() as (stack, _), httpx.AsyncClient(trust_env=False) as http:
        text = (await http.post(f"{stack.vllm_url}/v1/completions", json=body)).text
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    first, second, usage = (json.loads(event.removeprefix("data: ")) for event in events)
    choice = first["choices"][0]
    assert list(choice) == [
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "prompt_token_ids",
        "token_ids",
    ]
    assert choice["prompt_token_ids"] == list(prompt(1))
    assert list(choice["logprobs"]) == [
        "text_offset",
        "token_logprobs",
        "tokens",
        "top_logprobs",
    ]
    assert (choice["finish_reason"], second["choices"][0]["finish_reason"]) == (None, "length")
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": TOKENS,
        "total_tokens": TOKENS + 2,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "fake" in usage["system_fingerprint"]


async def test_everything_that_names_itself_says_fake() -> None:
    async with running() as (stack, _):
        assert "fake" in (await get(stack.vllm_url, "/version")).json()["version"]
        assert "fake" in (await get(stack.lmcache_url, "/version")).json()
        card = (await get(stack.vllm_url, "/v1/models")).json()["data"][0]
        assert "fake" in card["id"]
        assert "fake" in card["root"]
    assert "fake" in fake_stack.profile().name


async def test_counters_appear_when_they_first_count() -> None:
    async with running() as (stack, sender):
        assert counters.read(await samples(stack.lmcache_url), "lookup_hit_tokens") is None
        assert counters.read(await samples(stack.vllm_url), "external_hits") == 0
        await ask(sender, 1)
        assert counters.read(await samples(stack.lmcache_url), "lookup_hit_tokens") == 0


async def test_a_new_worker_is_registered_and_the_log_says_so() -> None:
    async with running("stale_id") as (stack, _):
        status = (await get(stack.lmcache_url, "/status")).json()
        assert status["registered_gpu_ids"][0] == 11
        assert len(status["registered_gpu_ids"]) == 2
        said = [line for server in stack.servers for line in server.log]
    facts = logs.read_facts("\n".join(said).encode())
    assert facts["attention_block_tokens"] == 16
    assert facts["kv_cache_tokens"] == 256
    assert facts["max_num_batched_tokens"] == 31
    assert facts["chunk_tokens"] == 16
    assert facts["connector"] == "LMCacheMPConnector"
    assert "slow_paths" not in facts


async def test_records_on_disk_survive_a_restart_of_both(tmp_path: Path) -> None:
    config = Settings(
        base_s=0, token_s=0, l2_path=str(tmp_path), object_groups=2, model="some/fake"
    )
    async with running(config=config) as (stack, sender):
        await ask(sender, 1)
        await l2_written(stack)
    found = survey(tmp_path)
    assert (found.files, found.groups, found.odd, found.bytes) == (8, 2, 0, 8 * 256)
    assert all(path.name.startswith("some-SEP-fake@0x") for path in tmp_path.glob("*.data"))
    async with running(config=config) as (stack, sender):
        assert (await ask(sender, 1)).cached_tokens == WHOLE
        assert counters.read(await samples(stack.lmcache_url), "l2_hit_tokens") == WHOLE
    for path in tmp_path.glob("*@1@*.data"):
        path.unlink()
    async with running(config=config) as (_, sender):
        assert (await ask(sender, 1)).cached_tokens == 0


async def test_tiers_evict_the_least_recently_used(tmp_path: Path) -> None:
    config = Settings(
        base_s=0, token_s=0, l0_tokens=64, l1_chunks=8, l1_ratio=0.5, l2_chunks=8,
        l2_path=str(tmp_path),
    )  # fmt: skip
    async with running(config=config) as (stack, sender):
        for number in range(4):
            await ask(sender, number)
        await l2_written(stack)
        lmcache = await samples(stack.lmcache_url)
        assert counters.read(lmcache, "l1_evicted_chunks") > 0
        assert counters.read(lmcache, "l2_evicted_chunks") == 8
        assert survey(tmp_path).files == 8
        assert (await ask(sender, 0)).cached_tokens == 0
        assert (await ask(sender, 3)).cached_tokens == WHOLE


@hypothesis_settings(max_examples=15, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 6), min_size=1, max_size=20),
    l0_tokens=st.sampled_from([0, 64, 256]),
    l1_chunks=st.integers(2, 40),
    keeps=st.booleans(),
    groups=st.integers(1, 2),
)
async def test_tokens_are_conserved(
    numbers: list[int], l0_tokens: int, l1_chunks: int, keeps: bool, groups: int
) -> None:
    """What the client is told, what vLLM counts and what LMCache counts are one number."""
    config = Settings(
        base_s=0, token_s=0, l2_token_s=0, l0_tokens=l0_tokens, l1_chunks=l1_chunks,
        l1_keeps_loaded=keeps, object_groups=groups,
    )  # fmt: skip
    async with running(config=config) as (stack, sender):
        told = 0
        for number in numbers:
            reply = await ask(sender, number)
            assert reply.error is None
            told += reply.cached_tokens or 0
        await l2_written(stack)
        vllm, lmcache = await samples(stack.vllm_url), await samples(stack.lmcache_url)
    local, external = counters.read(vllm, "local_hits"), counters.read(vllm, "external_hits")
    l1, l2 = counters.read(lmcache, "l1_hit_tokens"), counters.read(lmcache, "l2_hit_tokens")
    assert told == local + external
    assert l1 + l2 == counters.read(lmcache, "lookup_hit_tokens")
    # LMCache also counts what L0 held as well, as the real one does.
    assert l1 + l2 >= external
    if l0_tokens == 0:
        assert l1 + l2 == external
    submitted = counters.read(lmcache, "l2_store_submitted")
    assert submitted == counters.read(lmcache, "l2_store_completed")
    assert counters.read(vllm, "prompt_tokens") == TOKENS * len(numbers)


# Faults of one request


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("error_before_token", "in-band error"),
        ("error_after_token", "error after token"),
        ("no_token", "no token"),
        ("truncated", "truncated stream"),
        (Fault("truncated", "clean"), "truncated stream"),
        ("connection_lost", "connection lost"),
        ("http_error", "http 500"),
        (Fault("http_error", 404), "http 404"),
        ("wrong_length", "wrong output length"),
        ("killed", "truncated stream"),
        ("exits", "truncated stream"),
    ],
)
async def test_a_fault_fails_its_request_only(fault: Fault | str, reason: str) -> None:
    name = fault if isinstance(fault, str) else fault.name
    value = None if isinstance(fault, str) else fault.value
    async with running(Fault(name, value, nth=2)) as (stack, sender):
        assert (await ask(sender, 1)).error is None
        failed = await ask(sender, 2)
        assert failed.error is not None
        assert failed.error.startswith(reason)
        assert failed.ttft_ns is None
        if name in ("killed", "exits"):
            assert not stack.vllm.running
            assert stack.vllm.exit_code == (-9 if name == "killed" else 1)
            assert (await ask(sender, 3)).error.startswith("connection refused")
        else:
            assert (await ask(sender, 3)).error is None


@pytest.mark.parametrize("name", ["hang_before_headers", "hang_after_headers", "hang_after_token"])
async def test_a_hang_lasts_until_the_client_gives_up(name: str) -> None:
    async with running(Fault(name, nth=1)) as (_, sender):
        assert (await ask(sender, 1, deadline_s=0.05)).error.startswith("timeout")
        assert (await ask(sender, 2)).error is None


@pytest.mark.parametrize(
    "name",
    [
        "role_chunk", "empty_chunk", "keep_alive", "coalesced", "split", "crlf",
        "split_data_lines", "line_separators", "empty_text", "slow_loris",
    ],
)  # fmt: skip
async def test_odd_streams_are_still_whole(name: str) -> None:
    config = Settings(base_s=0, token_s=0.0001, output_token_s=0)
    async with running(config=config) as (_, sender):
        plain = await ask(sender, 1, max_tokens=3)
    fault = Fault(name, 0 if name == "slow_loris" else None)
    async with running(fault, config=config) as (_, sender):
        odd = await ask(sender, 1, max_tokens=3)
    assert odd.error is None
    assert (odd.prompt_tokens, odd.completion_tokens) == (TOKENS, 3)
    assert odd.top_logprobs == plain.top_logprobs
    if name in ("role_chunk", "empty_chunk"):
        assert odd.first_event_ns < odd.first_token_ns
    if name == "keep_alive":
        assert odd.first_byte_ns < odd.first_event_ns
    if name == "coalesced":
        assert odd.first_byte_ns == odd.last_byte_ns
    if name == "empty_text":
        assert odd.first_token_kind in ("token_ids", "logprobs")


@pytest.mark.parametrize(
    ("fault", "field", "expected"),
    [
        (Fault("prompt_tokens", 106), "prompt_tokens", TOKENS + 106),
        (Fault("prompt_tokens", -13), "prompt_tokens", TOKENS - 13),
        (Fault("prompt_tokens", 1), "prompt_tokens", TOKENS + 1),
        (Fault("cached_tokens", 16), "cached_tokens", 16),
        (Fault("null_details"), "cached_tokens", None),
        (Fault("no_details"), "cached_tokens", None),
        (Fault("no_usage"), "prompt_tokens", None),
        (Fault("reasoning"), "first_token_kind", "reasoning"),
        (Fault("reasoning", "reasoning_content"), "first_token_kind", "reasoning"),
    ],
)
async def test_what_usage_says(fault: Fault, field: str, expected: Any) -> None:
    async with running(fault) as (_, sender):
        assert getattr(await ask(sender, 1), field) == expected


async def test_faults_choose_their_requests() -> None:
    chosen = settings.Schedule(
        [Fault("no_token", nth=2, visit="again"), Fault("extra_delay", 0.1, tokens=65)]
    )
    assert chosen.next(70, seen=False) == {}
    assert chosen.next(70, seen=True) == {}
    assert chosen.next(65, seen=False) == {"extra_delay": 0.1}
    assert chosen.next(70, seen=True) == {"no_token": None}
    assert chosen.next(70, seen=True) == {}
    with pytest.raises(ValueError, match="no fault 'no_tokens'"):
        Fault("no_tokens")


# Faults of the cache


@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        (None, 0, WHOLE),
        ("zero_hits", 0, 0),
        ("never_registered", 0, 0),
        (Fault("warm_start", visit="first"), WHOLE, 0),
        ("warm_local", WHOLE, WHOLE),
        (Fault("stores_missing", 3), 0, 32),
        (Fault("l1_full", 1), 0, 0),
        ("load_fails", 0, WHOLE),
        (Fault("lmcache_dies", nth=2), 0, 0),
    ],
)
async def test_hits_under_a_fault(fault: Fault | str | None, first: int, second: int) -> None:
    config = Settings(base_s=0, token_s=0, l2_token_s=0, l0_tokens=0)
    async with running(*([fault] if fault else []), config=config) as (stack, sender):
        assert (await ask(sender, 1)).cached_tokens == first
        reply = await ask(sender, 1)
        assert (reply.error, reply.cached_tokens) == (None, second)
        vllm = await samples(stack.vllm_url)
        told = counters.read(vllm, "local_hits") + counters.read(vllm, "external_hits")
        assert told == first + second
        if isinstance(fault, Fault) and fault.name == "lmcache_dies":
            assert [server.running for server in stack.servers] == [False, True]


async def test_restored_answers_can_be_fast_but_wrong() -> None:
    config = Settings(base_s=0, token_s=0, l0_tokens=0)
    async with running(Fault("wrong_logprobs", 0.5), config=config) as (_, sender):
        cold, restored = await ask(sender, 1), await ask(sender, 1)
        assert restored.token == cold.token
        difference = cold.top_logprobs[cold.token] - restored.top_logprobs[cold.token]
        assert difference == pytest.approx(0.5)
    async with running("flipped_token", config=config) as (_, sender):
        cold, restored = await ask(sender, 1), await ask(sender, 1)
        assert restored.token != cold.token
        assert restored.token in cold.top_logprobs
    async with running(config=Settings(base_s=0, token_s=0, noise_nat=0.1)) as (_, sender):
        first, second = await ask(sender, 1), await ask(sender, 1)
        assert first.top_logprobs != second.top_logprobs
        assert first.token == second.token


@pytest.mark.parametrize(
    ("fault", "submitted", "completed"),
    [
        (Fault("stores_hang", 3), 4, 3),
        (Fault("store_fails", [2]), 4, 3),
    ],
)
async def test_stores_that_do_not_arrive(fault: Fault, submitted: int, completed: int) -> None:
    async with running(fault) as (stack, sender):
        await ask(sender, 1)
        lmcache: dict[str, float] = {}
        async with asyncio.timeout(PATIENCE_S):
            while counters.read(lmcache, "l2_store_completed") != completed:
                lmcache = await samples(stack.lmcache_url)
        assert counters.read(lmcache, "l2_store_submitted") == submitted
        await asyncio.sleep(0.01)
        lmcache = await samples(stack.lmcache_url)
        assert counters.read(lmcache, "l2_store_completed") == completed
        assert survey(stack.l2_path).files == completed
        tried = counters.read(lmcache, "l2_store_completed_requests")
        assert tried == (4 if fault.name == "store_fails" else 3)


async def test_stores_take_their_time() -> None:
    async with running(config=Settings(base_s=0, token_s=0, l2_store_s=0.02)) as (stack, sender):
        await ask(sender, 1)
        lmcache = await samples(stack.lmcache_url)
        done = counters.read(lmcache, "l2_store_completed") or 0
        assert done < counters.read(lmcache, "l2_store_submitted") == 4
        await l2_written(stack)
        assert counters.read(await samples(stack.lmcache_url), "l2_store_completed") == 4


@pytest.mark.parametrize(
    ("fault", "success", "cached"),
    [
        (None, True, 0),
        ("reset_not_done", True, WHOLE),
        ("reset_denied", False, WHOLE),
        ("reset_missing", None, WHOLE),
    ],
)
async def test_a_reset_may_not_have_reset(
    fault: str | None, success: bool | None, cached: int
) -> None:
    async with running(*([fault] if fault else []), lmcache=False) as (stack, sender):
        await ask(sender, 1)
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.post(f"{stack.vllm_url}/reset_prefix_cache")
        assert answer.status_code == (404 if success is None else 200)
        assert answer.json().get("success") == success
        assert (await ask(sender, 1)).cached_tokens == cached


# Faults of the servers


async def test_counters_go_missing_or_start_again() -> None:
    reset = Fault("counters_reset", 2, server="lmcache")
    missing = Fault("counters_missing", ["external"])
    async with running(reset, missing) as (stack, sender):
        await ask(sender, 1)
        before = await samples(stack.lmcache_url)
        after = await samples(stack.lmcache_url)
        assert counters.read(before, "lookup_requested_tokens") == WHOLE
        assert counters.read(after, "lookup_requested_tokens") == 0
        assert after[counters.STARTED] > before[counters.STARTED]
        vllm = await samples(stack.vllm_url)
        assert counters.read(vllm, "external_hits") is None
        assert counters.read(vllm, "local_hits") == 0


async def test_what_else_a_server_may_say() -> None:
    faults = (
        Fault("kv_cache_tokens", 128), Fault("block_tokens", 32), Fault("wrong_model"),
        Fault("version", "9.9"), Fault("version", "0.4.5", server="lmcache"),
        Fault("unhealthy", server="lmcache"), Fault("metrics_error"), Fault("old_status"),
        Fault("fallback_lines", server="lmcache"), Fault("odd_file"),
    )  # fmt: skip
    async with fake_stack.start(FAST.with_faults(*faults)) as stack:
        said = "\n".join(line for server in stack.servers for line in server.log).encode()
        facts = logs.read_facts(said)
        assert (facts["kv_cache_tokens"], facts["attention_block_tokens"]) == (128, 32)
        assert facts["slow_paths"]["count"] == 2
        assert "fake" not in (await get(stack.vllm_url, "/v1/models")).json()["data"][0]["id"]
        assert (await get(stack.vllm_url, "/version")).json() == {"version": "9.9"}
        assert (await get(stack.lmcache_url, "/version")).json() == "0.4.5"
        assert (await get(stack.lmcache_url, "/healthcheck")).status_code == 503
        assert (await get(stack.vllm_url, "/metrics")).status_code == 500
        assert (await get(stack.lmcache_url, "/nothing")).status_code == 404
        status = (await get(stack.lmcache_url, "/status")).json()
        assert len(status["gpu_context_meta"]) == 1
        assert survey(stack.l2_path).foreign == 1


async def test_a_server_may_not_start() -> None:
    with pytest.raises(ExitedAtStart, match="no room"):
        async with fake_stack.start(FAST.with_faults(Fault("exit_at_start", "no room"))):
            pass


async def test_a_refused_request_says_why() -> None:
    async with running() as (stack, _), httpx.AsyncClient(trust_env=False) as http:
        url = f"{stack.vllm_url}/v1/completions"
        other = await http.post(url, json={"model": "other", "prompt": [1]})
        assert (other.status_code, other.json()["error"]["type"]) == (404, "NotFoundError")
        long = await http.post(url, json={"model": "fake-model", "prompt": [1] * 5000})
        assert (long.status_code, long.json()["error"]["type"]) == (400, "BadRequestError")


# As kvlab sees it


def test_the_profile_is_valid_and_the_settings_follow_it() -> None:
    chosen = fake_stack.profile(
        {"workload.contexts": 7, "cache.chunk_tokens": 32, "workload.context_tokens": 140},
        cache__separate_object_groups=True,
    )
    assert chosen.workload.contexts == 7
    config = fake_stack.settings_for(chosen)
    assert (config.block_tokens, config.chunk_tokens, config.object_groups) == (16, 32, 2)
    assert config.l0_tokens == chosen.engine.kv_cache_tokens
    assert Settings.from_json(config.with_faults("no_token").to_json()).faults == (
        Fault("no_token"),
    )


async def test_a_launch_is_what_workloads_expect(tmp_path: Path) -> None:
    written: list[Record] = []
    config = FAST.with_faults(
        Fault("kv_cache_tokens", 128, scenario="lmcache"), Fault("warm_local", repeat=2)
    )
    start = fake_stack.FakeLaunch(
        fake_stack.profile(), config, folder=tmp_path, record=written.append
    )
    async with start("lmcache", 1) as deployment:
        assert deployment.facts["facts"]["kv_cache_tokens"] == 128
        assert len(deployment.facts["registered_ids"]) == 1
        readings = await deployment.scrape()
        assert [reading.source for reading in readings] == ["lmcache", "vllm"]
        only = await deployment.scrape(only="lmcache")
        assert counters.read(only[0].samples, "l2_store_submitted") == 4
        assert [state.running for state in deployment.state()] == [True, True]
        deployment.check_alive()
        assert await deployment.reset_local_cache() is True
        assert await deployment.clear_memory_tier() is True
    kinds = [record.kind for record in written if isinstance(record, Event)]
    assert kinds == ["launching", "ready", "probe", "stopping", "stopped"]
    probe = next(r for r in written if isinstance(r, Event) and r.kind == "probe")
    assert probe.detail["stored_chunks"] == 4
    assert probe.detail["external_cached"] == WHOLE
    assert probe.detail["local_reset"] is True
    async with start("baseline", 2) as deployment:
        assert deployment.lmcache_url is None
        assert await deployment.clear_memory_tier() is None
        assert deployment.l2_path is None
        assert deployment.facts["facts"]["kv_cache_tokens"] == 256


async def test_a_launch_notices_the_dead(tmp_path: Path) -> None:
    config = Settings(oom_killed=True).with_faults(Fault("lmcache_dies"))
    async with (
        fake_stack.FakeLaunch(settings=config, folder=tmp_path)("lmcache", 1) as deployment,
        client.connect(deployment.vllm_url, model=deployment.model) as sender,
    ):
        assert (await ask(sender, 1)).error is None
        cache, vllm = deployment.state()
        assert (cache.running, cache.exit_code, cache.oom_killed) == (False, -9, True)
        assert (vllm.running, vllm.oom_killed) == (True, False)
        assert (await deployment.scrape(only="lmcache"))[0].error is not None
        with pytest.raises(StackNotReady, match="lmcache stopped"):
            deployment.check_alive()
    failing = FAST.with_faults(Fault("exit_at_start", "boom", server="lmcache"))
    with pytest.raises(StackNotReady, match="boom"):
        async with fake_stack.FakeLaunch(settings=failing, folder=tmp_path)("lmcache", 1):
            pass


def test_every_fault_is_described_once() -> None:
    parts = (
        settings.REQUEST_FAULTS,
        settings.VLLM_FAULTS,
        settings.LMCACHE_FAULTS,
        settings.SHARED_FAULTS,
    )
    assert sum(len(part) for part in parts) == len(FAULTS)


# As processes


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports


async def healthy(process: subprocess.Popen[str], url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(PATIENCE_S):
        while True:
            assert process.poll() is None
            try:
                if (await http.get(url)).status_code == 200:
                    return
            except httpx.ConnectError:
                await asyncio.sleep(0.02)


async def test_processes_run_and_stop_as_the_plan_says(tmp_path: Path) -> None:
    vllm_port, port, http_port = free_ports(3)
    place = Place(
        vllm_port=vllm_port, lmcache_port=port, lmcache_http_port=http_port, l2=str(tmp_path)
    )
    plan = fake_stack.fake_plan(
        fake_stack.profile(), "lmcache", place, FAST.with_faults(Fault("killed", nth=2))
    )
    assert [service.role for service in plan.services] == ["lmcache", "vllm"]
    running: list[subprocess.Popen[str]] = []
    try:
        for service in plan.services:
            process = subprocess.Popen(
                service.argv, env=dict(service.env), cwd=service.cwd, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            running.append(process)
            await healthy(process, service.url + service.health)
        cache, vllm = running
        async with client.connect(plan.services[1].url, model="fake-model") as sender:
            assert (await ask(sender, 1)).error is None
            assert (await ask(sender, 2)).error.startswith("truncated stream")
        assert await asyncio.to_thread(vllm.wait, 10) == -9
        cache.terminate()
        said, _ = await asyncio.to_thread(cache.communicate, timeout=10)
        assert cache.returncode == 0
        facts = logs.read_facts(said.encode())
        assert facts["chunk_tokens"] == 16
        assert survey(tmp_path).odd == 0
    finally:
        for process in running:
            process.kill()
            process.communicate()


async def test_a_process_may_ignore_sigterm() -> None:
    (port,) = free_ports(1)
    config = FAST.with_faults("ignores_sigterm")
    arguments = ["vllm", "--port", str(port), "--config", config.to_json()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_stack", *arguments],
        stdout=subprocess.DEVNULL,
        cwd=launch.ROOT,
        text=True,
    )
    try:
        await healthy(process, f"http://127.0.0.1:{port}/health")
        process.terminate()
        await healthy(process, f"http://127.0.0.1:{port}/health")
    finally:
        process.kill()
        process.wait()


def test_a_process_exits_at_start_with_its_last_line() -> None:
    config = Settings().with_faults(Fault("exit_at_start", "ValueError: no room"))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fake_stack", "vllm", "--port", "0", "--config",
         config.to_json()],
        capture_output=True, text=True, check=False, cwd=launch.ROOT, timeout=30,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "ValueError: no room" in ended.stdout
    assert ended.stderr == ""
