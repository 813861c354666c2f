"""The machine's facts, its identity, and one measurement at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvlab import host
from kvlab.errors import HostBusy


def test_facts_are_json_and_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    known = host.facts(tmp_path / "not" / "yet")
    assert json.loads(json.dumps(known)) == known
    assert set(host.STABLE) <= set(known)
    assert known["cpu"]["threads"] >= 1
    assert known["memory_gib"] > 0
    assert known["limits"]["cpus_allowed"] >= 1
    assert known["disk"]["total_gib"] >= known["disk"]["free_gib"] > 0
    assert known["disk"]["filesystem"]
    assert known["proxy_variables"] == ["HTTPS_PROXY"]
    assert "secret" not in json.dumps(known)
    assert len(known["now"]["load_average"]) == 3
    assert "disk" not in host.facts()


def test_the_fingerprint_knows_the_machine_and_not_the_moment() -> None:
    known = host.facts()
    same = {**known, "now": {}, "kernel": "9.9", "python": "4", "disk": {"free_gib": 1}}
    assert host.fingerprint(same) == host.fingerprint(known)
    other = {**known, "cpu": {**known["cpu"], "cores": 999}}
    assert host.fingerprint(other) != host.fingerprint(known)
    slightly = {**known, "memory_gib": known["memory_gib"] // 1 + 0.1}
    barely = {**known, "memory_gib": known["memory_gib"] // 1 + 0.3}
    assert host.fingerprint(slightly) == host.fingerprint(barely)


def smi(folder: Path, body: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("body", "gpus"),
    [
        (
            "echo 'NVIDIA GB10, [N/A], 580.95'\necho 'NVIDIA X, 81559, 580.95'",
            [
                {"name": "NVIDIA GB10", "memory_mib": None, "driver": "580.95"},
                {"name": "NVIDIA X", "memory_mib": 81559, "driver": "580.95"},
            ],
        ),
        ("exit 9", None),
        ("exec sleep 60", None),
    ],
)
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, gpus: Any) -> None:
    smi(tmp_path, body)
    monkeypatch.setattr(host, "GPU_QUERY_S", 2.0 if "sleep" not in body else 0.2)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert host._gpus() == gpus


def test_no_gpu_is_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host._gpus() == []


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    none = host._limits()
    assert none["cpu_quota"] is None
    assert none["memory_gib"] is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    limited = host._limits()
    assert limited["cpu_quota"] == 1.5
    assert limited["memory_gib"] == 1.0
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("9223372036854771712\n")
    assert host._limits()["cpu_quota"] is None
    assert host._limits()["memory_gib"] is None


def test_two_measurements_at_a_time_are_refused(tmp_path: Path) -> None:
    with host.exclusive(tmp_path):
        with pytest.raises(HostBusy, match=rf"\(pid {os.getpid()}\)"), host.exclusive(tmp_path):
            pass
        # The refused one must not have taken the name of the holder away.
        with pytest.raises(HostBusy, match=rf"\(pid {os.getpid()}\)"), host.exclusive(tmp_path):
            pass
    with host.exclusive(tmp_path):
        pass


def test_an_error_in_the_measurement_frees_the_machine(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), host.exclusive(tmp_path):
        raise RuntimeError
    with host.exclusive(tmp_path):
        pass


def _hold(folder: Path, held: Any) -> None:
    with host.exclusive(folder):
        held.set()
        multiprocessing.Event().wait()


def test_a_killed_holder_frees_the_machine(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, held), daemon=True)
    holder.start()
    assert held.wait(30)
    with pytest.raises(HostBusy, match=str(holder.pid)), host.exclusive(tmp_path):
        pass
    holder.kill()
    holder.join()
    with host.exclusive(tmp_path):
        pass


def test_servers_do_not_hold_the_machine(tmp_path: Path) -> None:
    with host.exclusive(tmp_path):
        child = subprocess.Popen(["sleep", "60"])
    try:
        with host.exclusive(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()


def test_the_lock_lies_in_a_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with host.exclusive():
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    folder_of_another = tmp_path / "other"
    folder_of_another.mkdir()
    (folder / "measuring.lock").unlink()
    folder.rmdir()
    folder.symlink_to(folder_of_another)
    with pytest.raises(HostBusy, match="another user"), host.exclusive():
        pass
