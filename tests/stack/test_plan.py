"""Plans: pure, exact, and equal to the published commands where they claim to be."""

from __future__ import annotations

import itertools
import json
import shlex

import pytest

from kvlab import profile
from kvlab.errors import UsageError
from kvlab.stack import plan

L2 = "/home/nvidia/kv-cash-exp/lmcache-l2"
HF = "/home/nvidia/.cache/huggingface"
TRITON = "/home/nvidia/.triton"

# The three commands of the DGX Spark report (Openzeka, October 2026), section 1.4 of the facts.
VLLM_FLAGS = f"""
    --gpus all --ipc=host --network host --shm-size 32g --memory 112g --memory-swap 112g
    -v {HF}:{HF} -v {TRITON}:{TRITON}
    -e HF_HOME={HF} -e HF_HUB_OFFLINE=1 -e VLLM_USE_RUST_FRONTEND=1
    vllm/vllm-openai:latest nvidia/Qwen3.6-35B-A3B-NVFP4
    --host 0.0.0.0 --port 8100 --served-model-name qwen3.6-35b-a3b
    --trust-remote-code --tensor-parallel-size 1
    --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3
    --mm-encoder-tp-mode data --language-model-only
    --kv-cache-dtype fp8 --attention-backend flashinfer --moe-backend marlin
    --gpu-memory-utilization 0.5 --max-model-len 262144
    --max-num-seqs 16 --max-num-batched-tokens 4287
    --enable-chunked-prefill --async-scheduling --enable-prompt-tokens-details
    --mamba-cache-mode align --load-format fastsafetensors
    --speculative-config
    '{{"method":"mtp","num_speculative_tokens":3,"moe_backend":"triton"}}'
    --enable-prefix-caching
"""
LMCACHE = f"""
    docker run -d --name bench-lmcache --gpus all --ipc=host --network host
    -v {L2}:{L2} --entrypoint /usr/local/bin/lmcache vllm/vllm-openai:latest
    server --host 127.0.0.1 --port 5555 --http-port 8080 --chunk-size 2144
    --l1-size-gb 20 --l1-init-size-gb 4
    --eviction-policy LRU --eviction-trigger-watermark 0.80 --eviction-ratio 0.99
    --supported-transfer-mode lmcache_driven
    --l2-adapter
    '{{"type":"fs","base_path":"{L2}","relative_tmp_dir":".tmp","use_odirect":true}}'
"""
CONNECTOR = {
    "kv_connector": "LMCacheMPConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "lmcache.mp.host": "127.0.0.1",
        "lmcache.mp.port": 5555,
        "lmcache.mp.mq_timeout": 300,
    },
}


def groups(command: str) -> list[tuple[str, ...]]:
    """A command as its flags with their values, order set aside; numbers and JSON by value."""
    words = shlex.split(command.replace("\\\n", " "))
    return sorted(tuple(map(_value, group)) for group in plan.flag_groups(words))


def _value(word: str) -> str:
    try:
        return json.dumps(json.loads(word), sort_keys=True)
    except ValueError:
        pass
    try:
        return f"{float(word):g}"
    except ValueError:
        return word


def published(scenario: str) -> list[plan.Service]:
    chosen = profile.as_published(profile.load("dgx-spark"))
    return list(plan.plan(chosen, scenario).services)


def test_baseline_equals_the_published_command_flag_by_flag() -> None:
    (service,) = published("baseline")
    expected = f"docker run -d --name bench-vllm-off {VLLM_FLAGS}"
    assert groups(plan.shell_command(service)) == groups(expected)


def test_lmcache_equals_the_published_commands_flag_by_flag() -> None:
    server, vllm = published("lmcache")
    assert groups(plan.shell_command(server)) == groups(LMCACHE)
    expected = (
        f"docker run -d --name bench-vllm-on {VLLM_FLAGS} "
        f"--kv-transfer-config '{json.dumps(CONNECTOR)}'"
    )
    assert groups(plan.shell_command(vllm)) == groups(expected)


def test_our_own_plan_differs_only_by_the_listed_deviations() -> None:
    ours = profile.load("dgx-spark")
    for scenario, expected in (
        ("baseline", {"--host 127.0.0.1", "-e VLLM_NO_USAGE_STATS=1", "-e DO_NOT_TRACK=1"}),
        ("lmcache", {"--http-host 127.0.0.1", "-e LMCACHE_TRACK_USAGE=false"}),
    ):
        mine = options(plan.shell_command(plan.plan(ours, scenario).services[0]))
        theirs = options(plan.shell_command(published(scenario)[0]))
        assert mine - theirs == expected
        assert theirs - mine == ({"--host 0.0.0.0"} if scenario == "baseline" else set())
    text = plan.describe(ours, ["baseline"])
    for deviation in ours.deviations:
        assert f"deviates from the published {deviation.setting} = " in text


def options(command: str) -> set[str]:
    """A docker command as its options with their values."""
    words = shlex.split(command.replace("\\\n", " "))
    return {
        f"{word} {after}" if not after.startswith("-") else word
        for word, after in itertools.pairwise([*words, "-"])
        if word.startswith("-")
    }


def test_a_container_s_plan_says_everything_that_the_engine_is_asked_for() -> None:
    chosen = profile.load(
        "embedded-docker",
        {
            "container.image": "engine:1",
            "container.prefix": "a-",
            "container.suffix": ".1",
            "container.gpus": "nvidia.com/gpu=all",
            "container.memory": "6g",
            "container.lmcache_limits.memory": "2g",
            "container.volumes": ["/opt/python:/opt/python:ro", "/data"],
            "container.user": "caller",
        },
    )
    place = plan.Place(models="/m", l2="/l2", package="/src/kvlab", user="7:8")
    server, vllm = plan.plan(chosen, "lmcache", place).services
    cache, engine = (options(plan.shell_command(service)) for service in (server, vllm))
    for found, name in ((cache, "a-bench-lmcache.1"), (engine, "a-bench-vllm-on.1")):
        assert {
            *(f"--name {name}", "--device nvidia.com/gpu=all", "--ipc=host", "--network host"),
            *("--pid=host", "--user 7:8", "-v /opt/python:/opt/python:ro", "-v /data:/data"),
            *("-v /src/kvlab:/opt/kvlab/kvlab:ro", "-e PYTHONPATH=/opt/kvlab"),
            f"--entrypoint {chosen.container and chosen.container.python}",
        } <= found
    assert {"--memory 2g", "-v /l2:/l2"} <= cache
    assert {"--memory 6g", "-v /m:/m:ro", "-w /m", f"--model {chosen.model.name}"} <= engine


def test_the_embedded_engine_is_the_same_in_containers() -> None:
    process, docker = profile.load("embedded"), profile.load("embedded-docker")
    place = plan.Place(engine_python="/opt/engine/bin/python")
    for scenario in ("baseline", "lmcache"):
        for one, other in zip(
            plan.plan(process, scenario, place).services,
            plan.plan(docker, scenario, place).services,
            strict=True,
        ):
            assert other.argv == one.argv
            assert other.role == one.role
            assert one.env.items() <= other.env.items()
            assert one.container is None


def test_the_cache_server_starts_first_and_vllm_stops_first() -> None:
    text = plan.describe(profile.load("embedded"), ["lmcache"])
    assert text.index("# 1. lmcache") < text.index("# 2. vllm")
    assert "# afterwards stop: vllm lmcache" in text
    assert "connector: kvlab" in text


def test_baseline_knows_nothing_of_the_cache() -> None:
    chosen = profile.load("embedded")
    for scenario in ("baseline", "control"):
        steps = plan.plan(chosen, scenario)
        assert [s.role for s in steps.services] == ["vllm"]
        assert steps.connector is None
        assert "kv-transfer" not in " ".join(steps.services[0].argv)


def test_both_arms_start_vllm_alike_but_for_the_connector() -> None:
    chosen = profile.load("embedded")
    (alone,) = plan.plan(chosen, "baseline").services
    _, cached = plan.plan(chosen, "lmcache").services
    assert cached.argv[: len(alone.argv)] == alone.argv
    assert cached.argv[len(alone.argv)] == "--kv-transfer-config"
    assert cached.env == alone.env


@pytest.mark.parametrize(("name", "module"), [("kvlab", "kvlab.engine.connector"), ("stock", None)])
def test_the_profile_chooses_the_connector(name: str, module: str | None) -> None:
    chosen = profile.load("embedded", {"engine.connector": name})
    place = plan.Place(lmcache_port=7001)
    config = plan.kv_transfer_config(chosen, place)
    assert config.get("kv_connector_module_path") == module
    assert config["kv_connector_extra_config"]["lmcache.mp.port"] == 7001


def test_object_groups_are_passed_yes_or_no() -> None:
    for value, flag in ((True, "--separate-object-groups"), (False, "--no-separate-object-groups")):
        chosen = profile.load("embedded", {"cache.separate_object_groups": value})
        server, _ = plan.plan(chosen, "lmcache").services
        assert flag in server.argv


def test_an_adapter_of_our_own_is_handed_the_folder_among_its_parameters() -> None:
    adapter = {
        "type": "plugin",
        "module_path": "kvlab.engine.parallel_fs",
        "class_name": "ParallelFSL2Adapter",
        "adapter_params": {"num_workers": 8},
    }
    chosen = profile.load("embedded", {"cache.l2.adapter": adapter, "cache.l2.base_path": L2})
    argv = plan.plan(chosen, "lmcache").services[0].argv
    assert json.loads(argv[argv.index("--l2-adapter") + 1]) == {
        **adapter,
        "adapter_params": {"base_path": L2, "num_workers": 8},
    }


def test_flags_render_by_kind() -> None:
    flags = {"a": True, "b": False, "c": None, "d": 1, "e": 0.8, "f": "x y", "g": {"k": [1]}}
    assert list(plan.render_flags(flags)) == [
        *("--a", "--no-b", "--d", "1", "--e", "0.8", "--f", "x y", "--g", '{"k":[1]}')
    ]


def test_shell_text_survives_a_shell() -> None:
    chosen = profile.load("embedded", {"engine.flags.note": "it's $HOME; `x`"})
    (service,) = plan.plan(chosen, "baseline", plan.Place(engine_python="/p y/python")).services
    words = shlex.split(plan.shell_command(service).replace("\\\n", " "))
    assert "it's $HOME; `x`" in words
    assert "/p y/python" in words


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(UsageError, match="no scenario 'b'"):
        plan.plan(profile.load("embedded"), "b")


def test_shared_starts_several_vllm_on_one_lmcache() -> None:
    chosen = profile.load("embedded", {"experiments.shared_cache.instances": 3})
    place = plan.Place(vllm_port=1, more_vllm_ports=(2, 3), lmcache_port=4, lmcache_http_port=5)
    steps = plan.plan(chosen, "shared", place)
    assert [service.name for service in steps.services] == ["lmcache", "vllm", "vllm-2", "vllm-3"]
    assert [service.ports for service in steps.services[1:]] == [(1,), (2,), (3,)]
    configs = {
        service.argv[service.argv.index("--kv-transfer-config") + 1]
        for service in steps.services[1:]
    }
    assert len(configs) == 1


def test_instances_count_up_from_a_set_port() -> None:
    chosen = profile.load("embedded", {"engine.port": 8100})
    assert [service.ports for service in plan.plan(chosen, "shared").services[1:]] == [
        (8100,),
        (8101,),
    ]


def test_an_attached_deployment_has_nothing_to_start() -> None:
    chosen = profile.load("attach")
    with pytest.raises(UsageError, match="nothing is started"):
        plan.plan(chosen, "lmcache")
    told = plan.describe(chosen, ["baseline", "lmcache"])
    assert (
        "vLLM with LMCache: http://127.0.0.1:8200 (counters: http://127.0.0.1:8200/metrics)" in told
    )
    alone = profile.load("attach", {"attach.baseline": None, "attach.entry": "http://router:1/"})
    told = plan.describe(alone, ["lmcache"])
    assert "a speedup cannot be proven" in told
    assert "requests go to http://router:1\n" in told
