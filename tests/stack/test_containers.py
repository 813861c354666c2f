"""What a container engine is asked for and what its answers mean, without an engine."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound, NotFound

from kvlab import profile
from kvlab.errors import EngineMissing, HostBusy, ProfileError, UsageError
from kvlab.stack import containers, daemon, docker, gpus, images, keeper, plan, refusals
from kvlab.stack.daemon import Daemon
from kvlab.stack.images import Image

IMAGE = Image(
    reference="vllm/vllm-openai:latest",
    id="sha256:aa",
    digest="vllm/vllm-openai@sha256:bb",
    created=None,
    architecture="arm64",
)
HF, TRITON = "/home/nvidia/.cache/huggingface", "/home/nvidia/.triton"


def body(scenario: str, number: int, **overrides: Any) -> dict[str, Any]:
    chosen = profile.load("dgx-spark", {k.replace("__", "."): v for k, v in overrides.items()})
    service = plan.plan(chosen, scenario).services[number]
    return containers.config(service, IMAGE, "run-1:vllm")


def engine(address: str = "unix:///var/run/docker.sock", **calls: Any) -> Daemon:
    return Daemon(SimpleNamespace(api=SimpleNamespace(**calls)), address)  # type: ignore[arg-type]


def refusal(message: str, status: int = 500) -> APIError:
    response = SimpleNamespace(status_code=status, reason="", url="")
    return APIError("refused", response=response, explanation=message)


# What is asked for


def test_vllm_s_container_is_the_published_command_as_the_engine_s_api_takes_it() -> None:
    asked = body("baseline", 0)
    assert asked["Image"] == IMAGE.id
    assert asked["Entrypoint"] is None
    assert asked["Cmd"][0] == "nvidia/Qwen3.6-35B-A3B-NVFP4"
    assert f"HF_HOME={HF}" in asked["Env"]
    host = asked["HostConfig"]
    assert host["NetworkMode"] == host["IpcMode"] == "host"
    assert host["PidMode"] == ""
    assert host["ShmSize"] == 32 << 30
    assert host["Memory"] == host["MemorySwap"] == 112 << 30
    assert host["DeviceRequests"] == [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]
    assert host["RestartPolicy"] == {"Name": "no"}
    assert [(m["Source"], m["Target"], m["ReadOnly"]) for m in host["Mounts"]] == [
        (HF, HF, False),
        (TRITON, TRITON, False),
    ]
    labels = asked["Labels"]
    assert (labels[containers.RUN], labels[containers.ROLE]) == ("run-1", "vllm")
    assert labels[containers.HOST] == containers.this_host()


def test_lmcache_s_container_has_its_entrypoint_and_no_limit() -> None:
    asked = body("lmcache", 0)
    assert asked["Entrypoint"] == ["/usr/local/bin/lmcache"]
    assert asked["Cmd"][0] == "server"
    host = asked["HostConfig"]
    assert (host["ShmSize"], host["Memory"], host["MemorySwap"]) == (0, 0, 0)
    assert [mount["Source"] for mount in host["Mounts"]] == ["/home/nvidia/kv-cash-exp/lmcache-l2"]


def test_both_containers_share_ipc_network_and_gpus() -> None:
    """P-28: what LMCache maps is vLLM's memory, so both see one /dev/shm and the same GPUs."""
    server, vllm = (body("lmcache", n, container__gpus="nvidia.com/gpu=all") for n in (0, 1))
    for name in ("IpcMode", "NetworkMode", "PidMode", "DeviceRequests"):
        assert server["HostConfig"][name] == vllm["HostConfig"][name]


@pytest.mark.parametrize(
    ("gpus_", "expected"),
    [
        (None, []),
        ("all", [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]),
        ("2", [{"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}]),
        (
            "device=0,GPU-1",
            [{"Driver": "", "DeviceIDs": ["0", "GPU-1"], "Capabilities": [["gpu"]]}],
        ),
        ("nvidia.com/gpu=all", [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]),
        (
            "amd.com/gpu=0,amd.com/gpu=1",
            [{"Driver": "cdi", "DeviceIDs": ["amd.com/gpu=0", "amd.com/gpu=1"]}],
        ),
    ],
)
def test_gpus_are_asked_for_by_number_id_or_cdi_name(gpus_: str | None, expected: Any) -> None:
    assert containers.device_requests(gpus_) == expected


def test_a_folder_on_another_machine_is_made_by_its_engine() -> None:
    chosen = profile.load("embedded-docker")
    service = plan.plan(chosen, "lmcache", plan.Place(l2="/far", package=None)).services[0]
    host = containers.config(service, IMAGE, "r:lmcache", made="/far:/far")["HostConfig"]
    assert (host["Binds"], host["Mounts"]) == (["/far:/far"], [])


# Profiles


@pytest.mark.parametrize("name", ["lmcache/standalone", "registry:5000/vllm"])
def test_an_image_needs_a_tag_or_a_digest(name: str) -> None:
    """P-43: without a tag an engine may fetch every version there is."""
    with pytest.raises(ProfileError, match="a tag or digest is needed"):
        profile.load("embedded-docker", {"container.image": name})
    for good in (f"{name}:1", f"{name}@sha256:{'a' * 64}"):
        profile.load("embedded-docker", {"container.image": good})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("container.memory", "lots"),
        ("container.prefix", "-x"),
        ("container.names.lmcache", "a b"),
        ("container.names.lmcache", "bench-lmcache"),
    ],
)
def test_what_docker_would_refuse_is_refused_with_the_profile(key: str, value: str) -> None:
    with pytest.raises(ProfileError):
        profile.load("embedded-docker", {key: value})


# Images


def test_an_image_is_resolved_to_what_cannot_move() -> None:
    found = {"Id": "sha256:aa", "RepoDigests": ["mirror/x@sha256:1", "org/x@sha256:2"]}
    here = engine(inspect_image=lambda _: found)
    assert images.resolve(here, "org/x:latest").digest == "org/x@sha256:2"
    found["RepoDigests"] = []
    assert images.resolve(here, "org/x:latest").digest is None


def missing(_: str) -> Any:
    raise ImageNotFound("no such image")


def test_a_missing_image_says_where_it_is_missing() -> None:
    with pytest.raises(EngineMissing, match="not on spark, where the engine runs") as caught:
        images.resolve(engine("ssh://me@spark", inspect_image=missing), "org/x:1")
    assert "--pull" in str(caught.value.hint)


def test_a_pull_that_fails_in_its_stream_fails() -> None:
    """P-43: the engine answers 200 and reports the error in the stream, where nobody looks."""
    said = [{"status": "Pulling"}, {"error": "dial tcp: lookup registry: no such host"}]
    here = engine(pull=lambda *_, **__: iter(said), inspect_image=missing)
    with pytest.raises(EngineMissing, match=r"org/x:1 cannot be pulled .*no such host"):
        images.pull(here, "org/x:1")


@pytest.mark.parametrize(
    ("reference", "asked"),
    [
        ("org/x:1", ("org/x", "1")),
        ("host:5000/x:1", ("host:5000/x", "1")),
        ("org/x@sha256:ab", ("org/x", "sha256:ab")),
    ],
)
def test_one_version_is_pulled_never_all(reference: str, asked: tuple[str, str]) -> None:
    seen = []

    def pull(name: str, tag: str | None = None, **_: Any) -> Any:
        seen.append((name, tag))
        return iter(())

    images.pull(engine(pull=pull, inspect_image=lambda _: {"Id": "sha256:aa"}), reference)
    assert seen == [asked]


# The engine


@pytest.mark.parametrize(
    ("address", "machine"),
    [
        ("unix:///var/run/docker.sock", None),
        ("http+unix:///var/run/docker.sock", None),
        ("tcp://127.0.0.1:2375", None),
        ("tcp://10.0.0.7:2376", "10.0.0.7"),
        ("ssh://me@spark", "spark"),
    ],
)
def test_where_the_engine_runs_follows_from_its_address(address: str, machine: str | None) -> None:
    assert engine(address).machine == machine


def test_no_engine_is_one_sentence_and_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(
        EngineMissing, match=r"no container engine answers at unix://.*none\.sock: "
    ):
        daemon.connect()


def test_docker_s_context_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    context = tmp_path / "contexts/meta" / hashlib.sha256(b"spark").hexdigest()
    context.mkdir(parents=True)
    described = {
        "Name": "spark",
        "Metadata": {},
        "Endpoints": {"docker": {"Host": f"unix://{tmp_path}/far.sock", "SkipTLSVerify": False}},
    }
    (context / "meta.json").write_text(json.dumps(described))
    (tmp_path / "config.json").write_text('{"currentContext": "spark"}')
    with pytest.raises(EngineMissing, match=r"far\.sock"):
        daemon.connect()
    monkeypatch.setenv("DOCKER_CONTEXT", "nowhere")
    with pytest.raises(EngineMissing, match="no docker context nowhere"):
        daemon.connect()


def test_another_machine_s_servers_must_be_reachable() -> None:
    far = engine("tcp://10.0.0.7:2376")
    with pytest.raises(UsageError, match=r"runs on 10\.0\.0\.7.*engine\.host and cache\.host"):
        docker._refuse_unreachable(profile.load("embedded-docker"), far)
    reachable = profile.load(
        "embedded-docker", {"engine.host": "10.0.0.7", "cache.host": "10.0.0.7"}
    )
    docker._refuse_unreachable(reachable, far)
    with pytest.raises(UsageError, match="cannot be kept or counted from here"):
        docker._refuse_unreachable(reachable, far, records=True)
    docker._refuse_unreachable(profile.load("embedded-docker"), engine(), records=True)


def test_an_engine_s_words_are_kept_on_one_line() -> None:
    assert daemon.said(refusal('{"message": "no\\nsuch thing."}')) == "no such thing"
    assert daemon.said(refusal("plain words")) == "plain words"


@pytest.mark.parametrize(
    ("said", "sentence", "hint"),
    [
        (
            'could not select device driver "" with capabilities: [[gpu]]',
            "the container engine has no runtime that gives GPUs to containers",
            "nvidia-ctk cdi generate",
        ),
        (
            "nvidia-container-cli: invoking the NVIDIA Container Runtime Hook directly (e.g. "
            "specifying the docker --gpus flag) is not supported",
            "the container engine gives GPUs by CDI only, not by --gpus",
            "container.gpus: nvidia.com/gpu=all",
        ),
        (
            "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all",
            "the container engine knows no CDI device nvidia.com/gpu=all",
            "nvidia-ctk cdi generate",
        ),
        (
            "invalid mount config for type bind: bind source path does not exist: /data/models",
            "there is no /data/models on spark, where the engine runs",
            "paths of a profile are those of the machine",
        ),
        (
            'OCI runtime create failed: exec: "/usr/local/bin/lmcache": stat '
            "/usr/local/bin/lmcache: no such file or directory: unknown",
            "the image org/x:1 has no program /usr/local/bin/lmcache",
            "container.lmcache_entrypoint",
        ),
        ("something new", "something new", "own reason"),
    ],
)
def test_an_engine_s_refusal_becomes_a_sentence_and_a_remedy(
    said: str, sentence: str, hint: str
) -> None:
    """P-42 among them: one plain sentence, no stack trace."""
    found = refusals.explain(said, image="org/x:1", machine="spark")
    assert found.sentence == sentence
    assert hint in found.hint


# Whose containers


def found(**other: str) -> containers.Found:
    values = {
        **dict.fromkeys(("id", "name", "run", "role", "mark", "status"), "x"),
        "host": containers.this_host(),
        "keeper": containers.this_process(),
        **other,
    }
    return containers.Found(**values)


def test_only_what_nobody_keeps_on_this_machine_is_an_orphan() -> None:
    node = containers.this_host().partition(" ")[0]
    assert not found().orphan
    assert found(keeper=f"{os.getpid()}:1").orphan  # another process had this pid then
    assert found(keeper="").orphan
    assert found(host=f"{node} earlier-boot").orphan
    other = found(host="elsewhere boot", keeper="1:1")
    assert not other.near
    assert not other.orphan


def test_a_name_of_another_machine_s_run_is_refused() -> None:
    labels = {containers.MARK: "r:vllm", containers.RUN: "r", containers.HOST: "spark boot"}
    entry = {"Id": "1", "Name": "/bench-lmcache", "Config": {"Labels": labels}}
    with pytest.raises(HostBusy, match="belongs to run r of kvlab on spark"):
        containers.clear_names(engine(inspect_container=lambda _: entry), ["bench-lmcache"])


# What they use, and what holds GPUs


def test_memory_is_counted_as_docker_counts_it() -> None:
    cpu = {"cpu_usage": {"total_usage": 2_500_000_000}}
    first = {"usage": 100, "limit": 1000, "stats": {"total_inactive_file": 30}}
    second = {"usage": 100, "limit": 1000, "stats": {"inactive_file": 40}}
    assert keeper.used({"memory_stats": first, "cpu_stats": cpu}) == {
        "memory_bytes": 70,
        "memory_limit_bytes": 1000,
        "cpu_s": 2.5,
    }
    assert keeper.used({"memory_stats": second, "cpu_stats": cpu})["memory_bytes"] == 60
    assert set(keeper.used({}).values()) == {None}


def test_a_process_that_kept_gpu_memory_stops_the_next_launch() -> None:
    """P-31: a crashed server may hold the memory that the next one needs."""
    rows = gpus.parse_holders("742, 112252 MiB\n9, [N/A]\n\n")
    assert rows == [gpus.Holder(742, 112252), gpus.Holder(9, None)]
    gpus.refuse_held("lmcache", [742, 9], rows)
    with pytest.raises(HostBusy, match=r"lmcache not started: .*\(pid 742\) holds 112252 MiB"):
        gpus.refuse_held("lmcache", [9], rows)


def test_a_removal_that_somebody_else_has_begun_is_waited_for() -> None:
    """P-41: 409 while it goes on, then the name is free."""
    answers = [refusal("removal of container x is already in progress", 409)] * 2

    def remove_container(*_: Any, **__: Any) -> None:
        if answers:
            raise answers.pop()
        raise NotFound("gone")

    containers.remove(engine(remove_container=remove_container), "x")
    assert not answers


def test_what_the_engine_will_not_remove_is_not_hidden() -> None:
    def remove_container(*_: Any, **__: Any) -> None:
        raise refusal("forbidden", 403)

    with pytest.raises(APIError, match="forbidden"):
        containers.remove(engine(remove_container=remove_container), "x")
