"""Healthy is not enough: registration, contradictions and the probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvlab.errors import StackNotReady
from kvlab.records import Record
from kvlab.stack import logs, ready
from kvlab.stack.plan import Service
from tests import fake_stack
from tests.fake_stack import FakeLaunch, Fault, Settings

Make = Callable[..., FakeLaunch]


def status(*ids: int, **more: Any) -> dict[str, Any]:
    return {"is_healthy": True, "chunk_size": 256, "registered_gpu_ids": list(ids), **more}


def meta(*ids: int, name: str = "m", world_size: int = 1) -> dict[str, Any]:
    return {str(one): {"model_name": name, "world_size": world_size} for one in ids}


# Why a server did not start


@pytest.mark.parametrize(
    ("line", "sentence", "hint"),
    [
        ("x: error: unrecognized arguments: --foo", "does not know --foo", "correct the name"),
        ("x: error: argument --port: invalid", "refuses the flag --port", "correct its value"),
        (
            "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (64). Each",
            "a block of its own",
            "engine.max_num_seqs: 64 or less",
        ),
        ("estimated maximum model length is 4096.", "at most 4,096", "engine.max_model_len: 4096"),
        ("torch.OutOfMemoryError: CUDA out", "ran out of memory", "more memory"),
        ("E RuntimeError: cudaIpcOpenMemHandle failed: 1", "cannot be shared", "IPC, not the net"),
    ],
)
def test_a_log_that_says_why_a_server_did_not_start(line: str, sentence: str, hint: str) -> None:
    ((said, remedy),) = ready.failures(logs.read_facts(line.encode()))
    assert sentence in said
    assert hint in remedy


def test_a_healthy_log_has_no_failure() -> None:
    facts = {"block_tokens": 224, "slow_paths": {"count": 1, "lines": ["x"]}}
    assert list(ready.failures(facts)) == []


# Registration


def test_nobody_is_registered() -> None:
    with pytest.raises(StackNotReady, match="no worker"):
        ready.new_workers(status(), status(), "m")


def test_only_a_stale_id_is_registered() -> None:
    with pytest.raises(StackNotReady, match="only stale id 11"):
        ready.new_workers(status(11), status(11), "m")


def test_a_new_id_beside_a_stale_one_is_a_worker() -> None:
    after = status(11, 907, cache_context_meta=meta(907))
    assert ready.new_workers(status(11), after, "m") == [907]


@pytest.mark.parametrize("field", ["gpu_context_meta", "cache_context_meta"])
def test_the_meta_field_has_had_two_names(field: str) -> None:
    after = status(907, **{field: meta(907, name="other")})
    with pytest.raises(StackNotReady, match="registered the model other, not m"):
        ready.new_workers(status(), after, "m")


def test_a_model_is_known_by_the_last_part_of_its_path() -> None:
    after = status(907, cache_context_meta=meta(907, name="/somewhere/models/m"))
    assert ready.new_workers(status(), after, "m") == [907]


@pytest.mark.parametrize("field", ["registered_instance_ids", "registered_ids"])
def test_the_ids_may_have_another_name_or_only_stand_in_the_meta(field: str) -> None:
    assert ready.new_workers({}, {field: [5]}) == [5]
    assert ready.new_workers(None, {"cache_context_meta": meta(5)}) == [5]


def test_ids_may_be_names() -> None:
    before = {"registered_instance_ids": ["vllm-b"]}
    after = {"registered_instance_ids": ["vllm-b", "vllm-a", "7"]}
    assert ready.new_workers(before, after) == [7, "vllm-a"]
    with pytest.raises(StackNotReady, match="only stale id vllm-b"):
        ready.new_workers(before, before)
    odd = {"registered_ids": [5], "cache_context_meta": {"5": {"model_name": 3, "world_size": "x"}}}
    assert ready.new_workers({}, odd) == [5]


def test_fewer_workers_than_their_world_is_not_enough() -> None:
    after = status(1, cache_context_meta=meta(1, world_size=2))
    with pytest.raises(StackNotReady, match="1 of 2 workers"):
        ready.new_workers(status(), after, "m")
    after = status(1, 2, cache_context_meta=meta(1, 2, world_size=2))
    assert ready.new_workers(status(), after, "m") == [1, 2]


def test_two_instances_are_two_workers() -> None:
    with pytest.raises(StackNotReady, match="1 of 2 workers"):
        ready.new_workers(status(), status(1), instances=2)
    assert ready.new_workers(status(), status(1, 2), instances=2) == [1, 2]


def test_a_status_that_was_not_answered_has_no_workers() -> None:
    with pytest.raises(StackNotReady, match="no worker"):
        ready.new_workers(None, None)


def test_object_groups_are_read_from_the_layout() -> None:
    layout = {"kernel_groups": [{"object_group_idx": 0}, {"object_group_idx": 1}]}
    known = status(7, cache_context_meta={"7": {"kv_cache_layout": layout}})
    assert ready.object_groups(known, [7]) == 2
    assert ready.object_groups(status(7), [7]) == 1
    assert ready.object_groups(None, [7]) == 1


# What the servers say against the profile


@pytest.mark.parametrize("block", [784, 816])
def test_another_block_size_is_refused_with_the_sizes_that_fit(block: int) -> None:
    """P-21: the engine's own N decides, not the one that was planned for."""
    profile = fake_stack.profile(
        {
            "engine.block_tokens": 256,
            "cache.chunk_tokens": 256,
            "workload.context_tokens": 2000,
            "engine.max_num_batched_tokens": 511,
        }
    )
    with pytest.raises(StackNotReady) as caught:
        ready.refuse_contradictions(profile, {"block_tokens": block})
    assert f"use {block} or a multiple" in str(caught.value.hint)
    assert f"max_num_batched_tokens: {2 * block - 1}" in str(caught.value.hint)


def test_a_chunk_that_fits_by_chance_is_said() -> None:
    profile = fake_stack.profile()
    ((_, hint),) = ready.complaints(profile, {"block_tokens": 8})
    assert "use 8 or a multiple (16 is one)" in hint


def test_a_state_type_that_doubles_the_block_is_named() -> None:
    facts = {"block_tokens": 448, "ssm_state_reset": "float32"}
    ((_, hint),) = ready.complaints(fake_stack.profile(), facts)
    assert "mamba-ssm-cache-dtype" in hint
    assert "use 448 or a multiple" in hint


def test_a_working_set_that_fits_in_l0_is_refused() -> None:
    with pytest.raises(StackNotReady, match="fits too well in L0"):
        ready.refuse_contradictions(fake_stack.profile(), {"kv_cache_tokens": 5000})


def test_another_connector_is_refused() -> None:
    facts = {"connector": "LMCacheConnectorV1"}
    with pytest.raises(StackNotReady, match="LMCacheConnectorV1, not LMCacheMPConnector"):
        ready.refuse_contradictions(fake_stack.profile(), facts, "stock")
    ready.refuse_contradictions(fake_stack.profile(), facts, None)


def test_what_is_not_stated_is_no_contradiction() -> None:
    assert list(ready.complaints(fake_stack.profile(), {}, "kvlab")) == []


# Health and identity


def answering(body: dict[str, httpx.Response]) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(lambda request: body[request.url.path]))


@pytest.mark.parametrize(
    ("answer", "well"),
    [
        (httpx.Response(200), True),
        (httpx.Response(200, json={"status": "healthy"}), True),
        (httpx.Response(200, json={"status": "unhealthy"}), False),
        (httpx.Response(200, json=["odd"]), True),
        (httpx.Response(503, json={"status": "healthy"}), False),
    ],
)
async def test_health(answer: httpx.Response, well: bool) -> None:
    async with answering({"/health": answer}) as web:
        assert await ready._is_healthy(web, "http://x/health") is well


async def test_a_server_with_another_chunk_size_is_a_stranger() -> None:
    service = Service(name="lmcache", role="lmcache", argv=(), url="http://x")
    async with answering({"/status": httpx.Response(200, json=status())}) as web:
        with pytest.raises(StackNotReady, match="chunks of 256 tokens, not 16"):
            await ready.refuse_stranger(web, service, fake_stack.profile())
    async with answering({"/status": httpx.Response(500)}) as web:
        with pytest.raises(StackNotReady, match="an unknown number of tokens"):
            await ready.refuse_stranger(web, service, fake_stack.profile())


async def test_what_is_no_json_is_no_answer() -> None:
    async with answering({"/version": httpx.Response(200, text="hello")}) as web:
        assert await ready.fetch(web, "http://x/version") is None


# The probe, on servers of this process


async def probe(
    make: Make, *faults: Fault | str, scenario: str = "lmcache", **overrides: Any
) -> tuple[dict[str, Any], list[Record]]:
    profile = fake_stack.profile(timeouts__drain_s=0.5, **overrides)
    written: list[Record] = []
    async with make(profile, Settings().with_faults(*faults))(scenario, 1) as stack:
        detail = await ready.Probe(stack, profile, written.append, nonce="n").run()
    return detail, written


async def test_a_probe_that_is_stored_and_restored(fake_launch: Make) -> None:
    detail, written = await probe(fake_launch)
    assert detail["stored_chunks"] == detail["expected_chunks"] == 4
    assert detail["external_cached"] == detail["ceiling_tokens"] == 64
    assert detail["local_reset"] is True
    assert detail["local_cached"] == 0
    assert len(written) == 2


async def test_the_baseline_is_asked_the_same_and_nothing_is_expected(fake_launch: Make) -> None:
    detail, written = await probe(fake_launch, scenario="baseline")
    assert detail["stored_chunks"] is detail["external_cached"] is None
    assert detail["local_reset"] is True
    assert len(written) == 2


@pytest.mark.parametrize("options", [{"engine__dev_endpoints": False}, {}])
async def test_without_a_way_to_reset_only_storing_is_proven(
    fake_launch: Make, options: dict[str, Any]
) -> None:
    detail, _ = await probe(fake_launch, "reset_missing", **options)
    assert detail["stored_chunks"] == 4
    assert detail["local_reset"] is detail["external_cached"] is None
    assert "no endpoint" in detail["not_checked"]


@pytest.mark.parametrize("fault", ["null_details", "no_details", "no_usage"])
async def test_a_count_that_is_not_answered_is_unknown_and_not_zero(
    fake_launch: Make, fault: str
) -> None:
    detail, _ = await probe(fake_launch, fault)
    assert detail["external_cached"] == 64


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("zero_hits"), "expected 64 tokens from LMCache, seen 0 by vLLM's counters and 0"),
        (Fault("cached_tokens", -16, visit="again"), "stored and not restored"),
        (Fault("reset_not_done"), "which then served 64 tokens"),
        (Fault("reset_denied"), "refuses to empty"),
        (Fault("stores_missing"), "stored 2 of the 4 chunks"),
        (Fault("never_registered"), "stored an unknown number of the 4 chunks"),
        (Fault("error_before_token"), "the probe of 65 tokens failed: in-band error"),
        (Fault("prompt_tokens", 1), r"planned 65, seen 66 \(\+1\): prefix shifted by 1"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_a_probe_that_fails_says_what_was_expected_and_seen(
    fake_launch: Make, monkeypatch: pytest.MonkeyPatch, fault: Fault, said: str
) -> None:
    monkeypatch.setattr(ready, "RESET_S", 0.2)
    with pytest.raises(StackNotReady, match=said):
        await probe(fake_launch, fault)


async def test_every_launch_has_tokens_of_its_own(fake_launch: Make) -> None:
    profile = fake_stack.profile()
    async with fake_launch(profile)("lmcache", 1) as stack:
        one = ready.Probe(stack, profile, lambda record: None, nonce="n")
        two = ready.Probe(stack, profile, lambda record: None, nonce="n")
    assert one.question.token_ids != two.question.token_ids
