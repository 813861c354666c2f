"""A deployment that already runs: what it must be, what it can prove, what it is not asked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlab import experiment, profile, report, runtime, summary, verdict, verify
from kvlab.errors import KvlabError, ProfileError, StackNotReady, UsageError
from kvlab.profile import Endpoint, Profile
from kvlab.rundir import RunDir
from kvlab.stack import Reading, attach
from tests import fake_stack
from tests.fake_stack import Fault, Settings
from tests.fake_stack.servers import Stack, start

FAST = {
    "name": "attached",
    "runtime": "attach",
    "workload.contexts": 6,
    "experiments.two_round.repeats": 1,
    "experiments.bill.decode_requests": 0,
}
SECRET = "s3cret-key-of-somebody"


@dataclasses.dataclass(slots=True)
class Running:
    """Fake servers that a test attaches to, and the profile that names them."""

    cached: Stack
    alone: Stack | None
    chosen: Profile
    path: Path


Attach = Callable[..., Any]


@pytest.fixture
def running(tmp_path: Path) -> Attach:
    """Servers with LMCache, one without unless told, and a profile of their URLs."""

    @asynccontextmanager
    async def make(
        *faults: Fault, baseline: bool = True, instances: int = 1, **overrides: Any
    ) -> AsyncIterator[Running]:
        base = fake_stack.settings_for(
            fake_stack.profile(overrides.pop("deployed", None)), Settings(l1_chunks=64)
        ).with_faults(*faults)
        async with (
            start(base, instances=instances) as cached,
            start(base.at("baseline", 0), lmcache=False) as alone,
        ):
            vllms = [server.url for server in cached.servers if server.role == "vllm"]
            assert cached.lmcache_url
            section = {
                "baseline": alone.vllm_url if baseline else None,
                "vllm": vllms,
                "lmcache": [cached.lmcache_url],
                "idle_s": 0.05,
                **overrides.pop("attach", {}),
            }
            chosen = fake_stack.profile({**FAST, "attach": section, **overrides})
            path = tmp_path / "attached.yaml"
            path.write_text(yaml.safe_dump(chosen.as_dict()), encoding="utf-8")
            yield Running(cached, alone if baseline else None, chosen, path)

    return make


async def measure(one: Running, tmp_path: Path, name: str = "two-round", **options: Any) -> RunDir:
    return await experiment.run_async(name, one.path, runs=tmp_path / "runs", **options)


async def test_both_arms_of_a_running_deployment_are_proven(
    running: Attach, tmp_path: Path
) -> None:
    async with running() as one:
        folder = await measure(one, tmp_path)
        assert all(server.running for server in one.cached.servers)
    result = summary.conclude(folder)
    assert result["verdict"]["status"] == "proven", result["verdict"]
    assert result["speedup"]["ci95"][0] > 1
    assert result["conservation"]["residual_tokens"] == 0
    held = {i["name"]: i["holds"] for i in result["invariants"]}
    assert held["servers-up"] is True
    assert held["round-1-cold"] is True
    assert "disk-holds-records" not in held  # the folder is not kvlab's to look into
    assert {c["id"] for c in result["cautions"]} >= {"attached", "l2-not-seen"}
    assert not verify.verify(RunDir.open(folder.path))
    kinds = [event.kind for event in folder.events()]
    assert "stopped" not in kinds
    assert kinds.count("left") == 2


async def test_round_1_of_every_repeat_is_cold_without_a_restart(
    running: Attach, tmp_path: Path
) -> None:
    async with running(baseline=False, **{"experiments.two_round.repeats": 2}) as one:
        folder = await measure(one, tmp_path)
    held = {i["name"]: i["holds"] for i in summary.summarise(folder)["invariants"]}
    assert held["round-1-cold"] is True
    assert held["correctness"] is True


async def test_without_a_baseline_the_verdict_says_what_is_missing(
    running: Attach, tmp_path: Path
) -> None:
    async with running(baseline=False) as one:
        folder = await measure(one, tmp_path)
    result = summary.conclude(folder)
    assert result["verdict"]["status"] == "not shown", result["verdict"]
    first, second = result["verdict"]["reasons"]
    assert "no vLLM without LMCache was measured" in first
    assert "second visits" in second
    assert result["revisit"]["ci95"][0] > 1
    assert result["speedup"] == {}
    assert "bill" not in result
    assert verdict.is_healthy(result)
    assert "first visit / second visit" in summary.text(result)
    for genre in ("technical", "article"):
        for lang in ("tr", "zh", "en"):
            page = report.render(report.load(folder), genre=genre, lang=lang)
            assert f'lang="{"zh" if lang == "zh" else lang}' in page
    assert not verify.verify(RunDir.open(folder.path))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault("wrong_logprobs", 1.0, tokens=70, visit="again"), "fast but wrong"),
        (Fault("zero_hits", tokens=70, visit="again"), "gain not from LMCache"),
        (Fault("warm_start", tokens=70, visit="first"), "round 1 warm"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
async def test_without_a_baseline_a_fault_still_makes_it_invalid(
    fault: Fault, reason: str, running: Attach, tmp_path: Path
) -> None:
    async with running(fault, baseline=False) as one:
        folder = await measure(one, tmp_path)
    result = summary.summarise(folder)
    assert result["verdict"]["status"] == "invalid"
    assert reason in " ".join(result["verdict"]["reasons"])
    assert not verdict.is_healthy(result)


async def test_a_start_time_that_no_server_states_is_unknown(
    running: Attach, tmp_path: Path
) -> None:
    missing = Fault("counters_missing", ["process_start_time"], server="lmcache")
    async with running(missing) as one:
        folder = await measure(one, tmp_path)
    held = {i["name"]: i for i in summary.summarise(folder)["invariants"]}
    assert held["servers-up"]["holds"] is None
    assert "start of lmcache" in held["servers-up"]["detail"]


async def test_counters_are_summed_and_shown_by_instance(running: Attach, tmp_path: Path) -> None:
    async with running(instances=2, **{"workload.contexts": 12}) as one:
        folder = await measure(one, tmp_path)
        vllms = [one.cached.vllm, *one.cached.more]
    assert min(server.requests for server in vllms) > 0
    result = summary.conclude(folder)
    assert result["verdict"]["status"] == "proven", result["verdict"]
    last = {
        s.source: s.samples
        for s in folder.scrapes()
        if (s.scenario, s.repeat, s.boundary) == ("lmcache", 1, "measure:end")
    }
    assert set(last) == {"vllm", "vllm-1", "vllm-2", "lmcache"}
    shown = result["instances"]
    assert list(shown) == ["vllm-1", "vllm-2"]
    counted = [server["measure"]["external_hits"] for server in shown.values()]
    assert min(counted) > 0
    assert sum(counted) == 12 * 64
    assert "vllm-2, round 2: prompt tokens 420" in summary.text(result)
    name = "vllm:external_prefix_cache_hits_total"
    assert last["vllm"][name] == last["vllm-1"][name] + last["vllm-2"][name]
    assert last["vllm-1"][name] > 0


async def test_acceptance_proves_every_tier_that_can_be_emptied(
    running: Attach, tmp_path: Path
) -> None:
    small = {
        "experiments.acceptance.contexts": 2,
        "experiments.acceptance.positions": 3,
        "experiments.acceptance.tails": [9],
        "experiments.acceptance.tail_contexts": 1,
    }
    async with running(attach={"may_clear": True}, **small) as one:
        folder = await measure(one, tmp_path, "acceptance")
    result = summary.conclude(folder)
    assert result["verdict"]["status"] == "proven", result["verdict"]
    assert set(result["paths"]) == {"fill", "l0", "l1", "l2"}
    repeated = next(step for step in result["steps"] if step["name"] == "repeated")
    assert repeated.get("holds") is None  # nothing was restarted
    assert not verify.verify(RunDir.open(folder.path))


async def test_an_interrupted_run_asks_other_prompts_when_it_is_resumed(
    running: Attach, tmp_path: Path
) -> None:
    hang = Fault("prompt_tokens", 5, tokens=70, visit="again", nth=3)
    async with running(hang, baseline=False) as one:
        with pytest.raises(KvlabError):
            await measure(one, tmp_path)
        (path,) = (tmp_path / "runs").iterdir()
        folder = await experiment.run_async("two-round", one.path, runs=path.parent, resume=path)
    held = {i["name"]: i["holds"] for i in summary.summarise(folder)["invariants"]}
    assert held["round-1-cold"] is True


def test_what_a_runtime_can_do() -> None:
    chosen = profile.load("attach")
    assert [n for n in experiment.RECIPES if runtime.can(chosen, n)] == ["two-round"]
    clearing = profile.load("attach", {"attach.may_clear": True})
    assert runtime.can(clearing, "acceptance")
    assert runtime.can(profile.load("embedded"), "restart")


# What is refused, and when


@pytest.mark.parametrize("name", ["restart", "object-groups", "eviction", "shared-cache", "soak"])
async def test_what_needs_a_launch_is_refused_before_anything_is_sent(
    name: str, running: Attach, tmp_path: Path
) -> None:
    async with running() as one:
        with pytest.raises(UsageError, match=f"{name} cannot be done on an attached deployment"):
            await measure(one, tmp_path, name)
        assert not any(server.heads for server in one.cached.servers)
    assert not (tmp_path / "runs").exists()


async def test_a_control_and_half_an_acceptance_are_refused(
    running: Attach, tmp_path: Path
) -> None:
    async with running() as one:
        with pytest.raises(UsageError, match="no control"):
            await measure(one, tmp_path, control=True)
        with pytest.raises(UsageError, match="empties L0 and L1"):
            await measure(one, tmp_path, "acceptance")
    async with running(baseline=False) as one:
        with pytest.raises(UsageError, match=r"attach\.baseline names none"):
            await measure(one, tmp_path, "acceptance")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"model.served_name": "other"}, "serves fake-model, not other"),
        ({"engine.block_tokens": 8}, "works in blocks of 16 tokens, the profile says 8"),
        ({"cache.chunk_tokens": 32, "workload.context_tokens": 140}, "in chunks of 16 tokens"),
        (
            {"engine.prefix_caching": False, "model.hybrid": False},
            "prefix caching on, the profile says off",
        ),
        ({"model.name": "someone/else"}, "no worker of someone/else is registered"),
        ({"attach.versions": {"vllm": "0.99"}}, "vllm is version 0.0.0.fake, the profile says"),
        ({"engine.max_model_len": 9000, "workload.context_tokens": 4097}, "takes at most 4,096"),
        ({"workload.contexts": 2}, "fits too well in L0"),
    ],
)
async def test_a_deployment_that_is_another_one_is_refused(
    override: dict[str, Any], said: str, running: Attach, tmp_path: Path
) -> None:
    versions = override.pop("attach.versions", None)
    section = {"attach": {"versions": versions}} if versions else {}
    l0 = {"engine.kv_cache_tokens": None}
    async with running(baseline=False, **section, **l0, **override) as one:
        with pytest.raises(StackNotReady, match=said):
            await measure(one, tmp_path)


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("vllm", r"holds no counters of vLLM \(vllm:…\)"),
        ("lmcache", "holds no counters of LMCache"),
    ],
)
async def test_a_url_of_another_kind_of_server_is_refused(
    role: str, said: str, running: Attach, tmp_path: Path
) -> None:
    async with running(baseline=False) as one:
        assert one.cached.lmcache_url
        swapped = {"vllm": one.cached.lmcache_url, "lmcache": one.cached.vllm_url}
        section = {"vllm": [one.cached.vllm_url], "lmcache": [one.cached.lmcache_url]}
        section[role] = [{"url": section[role][0], "metrics": f"{swapped[role]}/metrics"}]
        tree = yaml.safe_load(one.path.read_text())
        tree["attach"] |= section
        one.path.write_text(yaml.safe_dump(tree))
        with pytest.raises(StackNotReady, match=said):
            await measure(one, tmp_path)


async def test_a_server_that_is_gone_is_named(running: Attach, tmp_path: Path) -> None:
    async with running(attach={"lmcache": ["http://127.0.0.1:9"]}) as one:
        with pytest.raises(StackNotReady, match=r"lmcache at http://127\.0\.0\.1:9"):
            await measure(one, tmp_path)


async def test_a_cache_server_that_goes_in_round_2_ends_the_run(
    running: Attach, tmp_path: Path
) -> None:
    death = Fault("lmcache_dies", tokens=70, visit="again", nth=2)
    async with running(death, baseline=False) as one:
        with pytest.raises(StackNotReady, match=r"lmcache at .* does not answer any more"):
            await measure(one, tmp_path)
    (path,) = (tmp_path / "runs").iterdir()
    reasons = " ".join(summary.summarise(RunDir.open(path))["verdict"]["reasons"])
    assert "lmcache did not answer" in reasons


async def test_a_deployment_that_serves_others_is_refused(running: Attach, tmp_path: Path) -> None:
    async with running(baseline=False) as one:
        one.cached.vllm.series.set("vllm:num_requests_running", 2.0)
        with pytest.raises(StackNotReady, match="serving somebody else"):
            await measure(one, tmp_path)


# Secrets


async def test_a_key_goes_from_the_environment_to_the_servers_and_nowhere_else(
    running: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEPLOYMENT_KEY", SECRET)
    monkeypatch.setenv("GATEWAY", f"{SECRET}-2")
    section = {"api_key_env": "DEPLOYMENT_KEY", "headers_env": {"X-Gateway": "GATEWAY"}}
    async with running(attach=section, baseline=False) as one:
        folder = await measure(one, tmp_path)
        seen = [head for server in one.cached.servers for head in server.heads]
    assert {head.get("authorization") for head in seen} == {f"Bearer {SECRET}"}
    assert {head.get("x-gateway") for head in seen} == {f"{SECRET}-2"}
    summary.conclude(folder)
    for path in folder.path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


async def test_a_key_that_is_not_set_is_named_before_anything_is_sent(
    running: Attach, tmp_path: Path
) -> None:
    async with running(attach={"api_key_env": "NOT_SET_ANYWHERE"}) as one:
        with pytest.raises(UsageError, match="NOT_SET_ANYWHERE"):
            await measure(one, tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@host:1",
        f"http://host:1?key={SECRET}",
        "host:1",
        "ftp://host",
        "http://[::1",
    ],
)
def test_a_url_with_a_secret_or_none_at_all_is_refused(url: str) -> None:
    section = {"vllm": [url], "lmcache": ["http://127.0.0.1:1"]}
    with pytest.raises(ProfileError) as caught:
        fake_stack.profile({**FAST, "attach": section})
    assert SECRET not in str(caught.value)


def test_two_servers_need_two_urls_and_the_runtime_its_section() -> None:
    same = {"vllm": ["http://h:1"], "lmcache": ["http://h:1/"]}
    with pytest.raises(ProfileError, match="http://h:1 is named twice"):
        fake_stack.profile({**FAST, "attach": same})
    with pytest.raises(ProfileError, match="needs an attach section"):
        fake_stack.profile({"runtime": "attach"})


def test_the_shipped_profile_is_whole() -> None:
    chosen = profile.load("attach")
    assert not chosen.fresh
    assert chosen.attach
    assert chosen.attach.vllm[0] == Endpoint(url="http://127.0.0.1:8200")


# Sums


def reading(source: str, **samples: float) -> Reading:
    return Reading(source=source, at_ns=1, samples=samples)


def test_a_sum_is_unknown_when_one_server_did_not_answer() -> None:
    dead = Reading(source="lmcache-2", at_ns=2, error="http 500")
    both = attach.total("lmcache", [reading("lmcache-1", a=1.0), dead])
    assert both.samples is None
    assert both.error == "lmcache-2: http 500"
    full = "lmcache_mp_l1_memory_usage_bytes"
    one, two = {"a": 1.0, full: 5.0}, {"b": 2.0, "a": 3.0, full: 7.0}
    found = attach.total("lmcache", [reading("x", **one), reading("y", **two)])
    assert found.samples == {"a": 4.0, "b": 2.0, full: 7.0}
    assert json.dumps(found.info) == "{}"
