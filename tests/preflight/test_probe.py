"""What preflight tries on this machine: files, folders, ports, containers, and what it reads."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvlab import host, preflight, profile
from kvlab.disk import identity
from kvlab.disk.inventory import record_name
from kvlab.errors import UsageError
from kvlab.preflight import probe
from tests.preflight.cases import SPARK_CONFIG, SPARK_HOST


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runs, away from any model and any docker."""
    monkeypatch.setenv("KVLAB_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    folder = tmp_path / "data" / "runs"
    folder.mkdir(parents=True)
    return folder


def load(**settings: Any) -> profile.Profile:
    return profile.load("embedded", settings)


def with_l2(folder: Path, **adapter: Any) -> profile.Profile:
    return profile.load(
        "embedded",
        {"cache.l2": {"base_path": str(folder), "adapter": {"type": "fs", **adapter}}},
    )


def test_one_aligned_file_is_written_read_and_removed(tmp_path: Path) -> None:
    assert probe.try_direct_io(tmp_path) in ("", "open: Invalid argument")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["open", "write"])
def test_a_refused_o_direct_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    if step == "write":  # such file systems take the flag when the file is opened
        monkeypatch.setattr(os, "O_DIRECT", 0)
    monkeypatch.setattr(os, step, refuse)
    assert probe.try_direct_io(tmp_path) == f"{step}: Invalid argument"
    assert not list(tmp_path.iterdir())


def test_no_folder_is_made_for_a_trial(runs: Path, tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    case = preflight.gather(with_l2(missing, use_odirect=True), runs=runs)
    assert case.probe.direct_io is None
    assert case.probe.l2_writable
    assert not missing.parent.exists()


def test_records_that_lie_there_are_counted_and_compared(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "l2"
    folder.mkdir()
    chosen = with_l2(folder)
    (folder / record_name("hybrid")).write_bytes(b"x" * 10)
    identity.write(folder, {**identity.of(chosen), "kv_dtype": "fp8"})
    case = preflight.gather(chosen, runs=runs)
    assert (case.probe.l2_records, case.probe.l2_bytes) == (1, 10)
    found = [one for one in preflight.evaluate(case) if one.id == "KV060"]
    assert "kv_dtype fp8 there, auto here" in found[0].found


def test_a_port_that_is_taken_is_found(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        case = preflight.gather(load(**{"engine.port": port}), runs=runs)
    assert list(case.probe.ports) == [port]
    assert "KV080" in {one.id for one in preflight.evaluate(case)}


def test_the_models_configuration_is_found_beside_its_weights(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "hybrid-4l-s0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SPARK_CONFIG))
    assert preflight.gather(load(), runs=runs).probe.config == SPARK_CONFIG


def test_the_models_configuration_is_found_in_the_hubs_cache(runs: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--nvidia--Qwen3.6-35B-A3B-NVFP4/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SPARK_CONFIG))
    spark = profile.load("dgx-spark", {"engine.env.HF_HOME": str(tmp_path)})
    case = preflight.gather(spark, runs=runs)
    assert (case.block.tokens, case.block.source) == (2144, "computed")
    (snapshot / "config.json").write_text("{")
    assert preflight.gather(spark, runs=runs).block.source == "unknown"


def test_versions_inside_running_containers_are_asked(runs: Path, tmp_path: Path) -> None:
    docker = tmp_path / "bin" / "docker"
    docker.write_text(
        '#!/bin/sh\n[ "$2" = bench-lmcache ] && echo 0.5.3 && exit\n'
        '[ "$2" = bench-vllm-on ] && echo 0.4.5 && exit\nexit 1\n'
    )
    docker.chmod(0o755)
    case = preflight.gather(profile.load("dgx-spark"), runs=runs)
    assert case.probe.lmcache_versions == {"bench-lmcache": "0.5.3", "bench-vllm-on": "0.4.5"}
    docker.write_text("#!/bin/sh\nexit 1\n")
    assert not preflight.gather(profile.load("dgx-spark"), runs=runs).probe.lmcache_versions


def test_for_another_machine_nothing_is_tried_here(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        chosen = load(**{"engine.port": taken.getsockname()[1]})
        case = preflight.gather(chosen, host=SPARK_HOST, runs=runs)
    assert not case.probe.ports
    assert case.memory_gib == 121.0


def test_servers_that_are_only_attached_to_run_elsewhere(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "facts", lambda path: {**SPARK_HOST, "memory_gib": 0.5})
    urls = {"vllm": [{"url": "http://10.0.0.1:8000"}], "lmcache": [{"url": "http://10.0.0.1:8080"}]}
    attached = load(runtime="attach", attach=urls)
    found = {one.id for one in preflight.evaluate(preflight.gather(attached, runs=runs))}
    assert not found & {"KV001", "KV040", "KV041", "KV080"}


def test_host_facts_are_those_of_a_manifest_or_plain(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    for held in (SPARK_HOST, {"schema": 1, "host": SPARK_HOST}):
        path.write_text(json.dumps(held))
        assert probe.read_host(path) == SPARK_HOST
    path.write_text("[]")
    with pytest.raises(UsageError, match="holds no facts of a machine"):
        probe.read_host(path)


def test_this_machine_can_be_checked_for_every_profile(runs: Path) -> None:
    for name in profile.names():
        case = preflight.gather(profile.load(name), runs=runs)
        text = preflight.text(case, preflight.evaluate(case))
        assert f"for profile {name}" in text
