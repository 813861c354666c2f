"""The machine's facts, its identity, and one measurement at a time."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Iterator
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
    assert host.facts(None, tmp_path)["l2_disk"]["filesystem"]


def test_the_fingerprint_knows_the_machine_and_not_the_moment() -> None:
    known = host.facts()
    same = {**known, "now": {}, "kernel": "9.9", "python": "4", "disk": {"free_gib": 1}}
    assert host.fingerprint(same) == host.fingerprint(known)
    other = {**known, "cpu": {**known["cpu"], "cores": 999}}
    assert host.fingerprint(other) != host.fingerprint(known)
    slightly = {**known, "memory_gib": known["memory_gib"] // 1 + 0.1}
    barely = {**known, "memory_gib": known["memory_gib"] // 1 + 0.3}
    assert host.fingerprint(slightly) == host.fingerprint(barely)


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


IDENTIFYING = {"hostname", "serial", "uuid", "id", "mac", "address", "node_name"}


def keys(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key)
            yield from keys(value)
    elif isinstance(tree, list):
        for one in tree:
            yield from keys(one)


def test_nothing_in_the_facts_names_this_very_machine(tmp_path: Path) -> None:
    known = host.facts(tmp_path, tmp_path)
    assert not {k for k in keys(known) if set(k.lower().split("_")) & IDENTIFYING}
    shown = json.dumps(known)
    for place in ("/etc/machine-id", "/sys/class/dmi/id/product_uuid"):
        if Path(place).exists():
            secret = Path(place).read_text().strip()
            assert not secret or secret not in shown
    name = socket.gethostname()
    assert len(name) < 8 or name not in shown


def test_the_fingerprint_survives_a_reboot_and_an_update_of_kvlab() -> None:
    """It is made of the same facts as in runs of earlier versions."""
    manifest = json.loads(
        next((Path(__file__).parents[1] / "data/sample").rglob("manifest.json")).read_text()
    )
    assert host.fingerprint(manifest["host"]) == manifest["fingerprint"]
    later = {
        **manifest["host"],
        "kernel": "99",
        "numa": [{"node": 0}],
        "container_engine": {"name": "docker", "version": "99"},
        "virtual": True,
        "l2_disk": {"model": "another"},
    }
    assert host.fingerprint(later) == manifest["fingerprint"]


# What the system's files say


def system(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def sys_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    return tmp_path


def test_memory_nodes(sys_: Path) -> None:
    assert host._numa() is None
    meminfo = "Node 0 MemTotal:       16307348 kB\nNode 0 MemFree:         1 kB\n"
    system(
        sys_ / "sys/devices/system/node",
        {
            "node0/meminfo": meminfo,
            "node0/cpulist": "0-9\n",
            "node10/meminfo": "",
            "node10/cpulist": "\n",
            "node2/cpulist": "10-19",
        },
    )
    assert host._numa() == [
        {"node": 0, "cpus": "0-9", "memory_gib": 15.6},
        {"node": 2, "cpus": "10-19", "memory_gib": None},
        {"node": 10, "cpus": None, "memory_gib": None},
    ]


def test_what_the_machine_does_now(sys_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.gpu.now", list)
    nothing = {"cpu_mhz": None, "cpu_governor": None, "cpu_temperature_c": None}
    assert host.condition() == {**nothing, "cpu_energy_uj": None, "gpus": []}
    system(sys_ / "proc", {"cpuinfo": "cpu MHz\t\t: 2596.0\ncpu MHz\t\t: 2600.4\n"})
    assert host.condition()["cpu_mhz"] == {"median": 2598, "max": 2600}
    system(
        sys_ / "sys",
        {
            "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "800000",
            "devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "3400000",
            "devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
            "class/thermal/thermal_zone0/temp": "41000",
            "class/thermal/thermal_zone1/temp": "63500",
            "class/powercap/intel-rapl:0/energy_uj": "100",
            "class/powercap/intel-rapl:1/energy_uj": "23",
        },
    )
    assert host.condition() == {
        "cpu_mhz": {"median": 2100, "max": 3400},
        "cpu_governor": "schedutil",
        "cpu_temperature_c": 63.5,
        "cpu_energy_uj": 123,
        "gpus": [],
    }


def test_the_drive_below_a_folder(sys_: Path, tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    link = sys_ / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    assert host._drive(tmp_path) == {"model": None, "rotational": None}
    system(
        sys_ / "sys/devices/nvme0n1",
        {
            "device/model": "Samsung SSD 9100 PRO 2TB    \n",
            "queue/rotational": "0\n",
            "nvme0n1p2/partition": "2",
        },
    )
    link.parent.mkdir(parents=True)
    link.symlink_to(sys_ / "sys/devices/nvme0n1/nvme0n1p2")
    found = {"model": "Samsung SSD 9100 PRO 2TB", "rotational": False}
    assert host._drive(tmp_path) == found
    system(sys_ / "sys/devices/dm-0", {"dm/name": "root", "queue/rotational": "0"})
    (sys_ / "sys/devices/dm-0/slaves").mkdir()
    (sys_ / "sys/devices/dm-0/slaves/nvme0n1p2").symlink_to(sys_ / "sys/devices/nvme0n1/nvme0n1p2")
    link.unlink()
    link.symlink_to(sys_ / "sys/devices/dm-0")
    assert host._drive(tmp_path) == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (
            "Docker version 28.2.2, build e6534b4",
            {"name": "docker", "version": "28.2.2"},
        ),
        (
            "Docker version 20.10.24+dfsg1, build 297e128",
            {"name": "docker", "version": "20.10.24+dfsg1"},
        ),
        ("", None),
    ],
)
def test_the_container_engine(said: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlab.gpu.run", lambda command: said if command[0] == "docker" else "")
    assert host._container_engine() == found


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
