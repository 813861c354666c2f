"""The machine: what it is, what it does now, and whether it is being measured already."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kvlab import __version__, gpu
from kvlab.errors import HostBusy
from kvlab.rundir import sha256_json
from kvlab.units import GIB

FLAGS = (
    *("avx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm", "sve", "sve2"),
)
"""Instructions that decide which kernels an engine runs."""

STABLE = ("system", "machine", "cpu", "memory_gib", "gpus", "limits")
"""The parts of the facts that make a host the same host; see ``fingerprint``."""

ENGINES = ("docker", "podman")
_SYS = Path("/sys")
_PROC = Path("/proc")
_PROXY = re.compile(r"(?:https?|ftp|all|no)_proxy", re.IGNORECASE)
_CGROUP = Path("/sys/fs/cgroup")


def facts(path: Path | None = None, l2: Path | None = None) -> dict[str, Any]:
    """What is known of the machine, as JSON values; a fact that it does not tell is None.

    ``path`` adds the disk that it lies on, ``l2`` the one of the L2 folder where that is set. No
    host name, serial number or address is among the facts, and of proxy variables only the names.
    """
    memory = psutil.virtual_memory()
    known: dict[str, Any] = {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "memory_gib": round(memory.total / GIB, 1),
        "gpus": gpu.facts(),
        "limits": _limits(),
        "numa": _numa(),
        "virtual": _virtual(),
        "container_engine": _container_engine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvlab": __version__,
        "proxy_variables": sorted(
            name for name, value in os.environ.items() if _PROXY.fullmatch(name) and value
        ),
        "now": {
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "memory_available_gib": round(memory.available / GIB, 1),
            "swap_used_gib": round(psutil.swap_memory().used / GIB, 1),
        },
    }
    for name, place in (("disk", path), ("l2_disk", l2)):
        if place is not None:
            known[name] = _disk(place)
    return known


def condition() -> dict[str, Any]:
    """How fast, hot and loaded the machine is now; what cannot be read is None.

    Keys: ``cpu_mhz`` (``median``, ``max`` over the cores), ``cpu_governor``, ``cpu_temperature_c``
    (the hottest sensor), ``cpu_energy_uj`` (counters of the packages, added up), and ``gpus``, see
    ``gpu.now``. Takes as long as the GPUs' own tools do.
    """
    clocks = _cpu_clocks()
    energies = [_whole(_read(one)) for one in _SYS.glob("class/powercap/*-rapl:?/energy_uj")]
    known = [energy for energy in energies if energy is not None]
    heats = [_whole(_read(one)) for one in _SYS.glob("class/thermal/thermal_zone*/temp")]
    return {
        "cpu_mhz": {"median": round(statistics.median(clocks)), "max": round(max(clocks))}
        if clocks
        else None,
        "cpu_governor": _read(_SYS / "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_temperature_c": max((h / 1000 for h in heats if h is not None), default=None),
        "cpu_energy_uj": sum(known) if known and len(known) == len(energies) else None,
        "gpus": gpu.now(),
    }


def fingerprint(known: dict[str, Any]) -> str:
    """Identity of a host by its hardware and limits: equal for two runs that may be compared."""
    stable = {name: known.get(name) for name in STABLE}
    # A kernel update moves the last digits of the memory that it leaves.
    stable["memory_gib"] = round(float(known.get("memory_gib") or 0))
    return sha256_json(stable)[:16]


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    for line in (_read(_PROC / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    present = set((fields.get("flags") or fields.get("features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or None,
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in present],
    }


def _limits() -> dict[str, Any]:
    """What a container or an affinity mask leaves of the machine; None where nothing limits."""
    memory = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    quota, _, period = (_cgroup("cpu.max") or "max").partition(" ")
    memory_bytes = int(memory) if memory and memory.isdigit() else None
    if memory_bytes is not None and memory_bytes >= psutil.virtual_memory().total:
        memory_bytes = None
    return {
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "cpu_quota": int(quota) / int(period) if quota.isdigit() and period.isdigit() else None,
        "memory_gib": round(memory_bytes / GIB, 1) if memory_bytes is not None else None,
    }


def _cgroup(*names: str) -> str | None:
    """The first of these files of our own control group, or of the root's."""
    own = ""
    with contextlib.suppress(OSError):
        entries = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((e.removeprefix("0::/") for e in entries if e.startswith("0::/")), "")
    for name in names:
        for folder in (_CGROUP / own, _CGROUP):
            with contextlib.suppress(OSError):
                return (folder / name).read_text().strip()
    return None


def _numa() -> list[dict[str, Any]] | None:
    """The memory nodes with their processors and size; None where the system does not tell."""
    folders = sorted(
        (_SYS / "devices/system/node").glob("node[0-9]*"), key=lambda one: int(one.name[4:])
    )
    nodes = []
    for folder in folders:
        total = re.search(r"MemTotal:\s*(\d+) kB", _read(folder / "meminfo") or "")
        nodes.append(
            {
                "node": int(folder.name[4:]),
                "cpus": _read(folder / "cpulist") or None,
                "memory_gib": round(int(total[1]) * 1024 / GIB, 1) if total else None,
            }
        )
    return nodes or None


def _virtual() -> bool | None:
    """Whether the processor says that it is a virtual machine's; None where it does not tell."""
    text = _read(_PROC / "cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", text or "", re.MULTILINE)
    return "hypervisor" in flags[1].split() if flags else None


def _container_engine() -> dict[str, str] | None:
    """Name and version of the container engine's client; None without one."""
    for name in ENGINES:
        said = gpu.run([name, "--version"])
        version = re.search(r"\d+\.\d+[\w.+-]*", said or "")
        if version:
            return {"name": name, "version": version[0].rstrip(".,")}
    return None


def _cpu_clocks() -> list[float]:
    """The clock of every core in MHz, as the governor reads it, else as the processor states it."""
    files = _SYS.glob("devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")
    scaled = [khz / 1000 for one in files if (khz := _whole(_read(one))) is not None]
    if scaled:
        return scaled
    text = _read(_PROC / "cpuinfo") or ""
    return [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.lstrip("-").isdigit() else None


def _disk(path: Path) -> dict[str, Any]:
    """The mount that holds a path: file system, device and its model, total and free space."""
    place = path.resolve()
    while not place.exists():
        place = place.parent
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if place.is_relative_to(mount.mountpoint)
    ]
    # The longest mount point is the nearest; of two on one point the later one is seen.
    found = max(enumerate(mounts), key=lambda m: (len(m[1].mountpoint), m[0]), default=None)
    usage = psutil.disk_usage(str(place))
    return {
        "filesystem": found[1].fstype if found else None,
        "device": found[1].device if found else None,
        **_drive(place),
        "total_gib": round(usage.total / GIB, 1),
        "free_gib": round(usage.free / GIB, 1),
    }


def _drive(place: Path) -> dict[str, Any]:
    """Model and kind of the block device below a path; None where there is none, or many."""
    number = place.stat().st_dev
    folder = _SYS / f"dev/block/{os.major(number)}:{os.minor(number)}"
    try:
        folder = folder.resolve(strict=True)
    except OSError:
        return {"model": None, "rotational": None}
    if (folder / "partition").exists():
        folder = folder.parent
    below = sorted((folder / "slaves").glob("*")) if (folder / "slaves").is_dir() else []
    if len(below) == 1:  # a mapped device on one drive
        mapped = below[0].resolve()
        folder = mapped.parent if (mapped / "partition").exists() else mapped
    rotational = _read(folder / "queue/rotational")
    return {
        "model": _read(folder / "device/model"),
        "rotational": {"0": False, "1": True}.get(rotational or ""),
    }


@contextlib.contextmanager
def exclusive(folder: Path | None = None) -> Iterator[None]:
    """Hold the machine for one measurement; HostBusy, naming the other run's pid, when it is held.

    The lock is the kernel's: it ends with the process that holds it, however that ends.
    """
    path = (folder or _lock_folder()) / "measuring.lock"
    with path.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            lock.seek(0)
            holder = lock.read().strip()
            raise HostBusy(
                f"another measurement is running on this machine (pid {holder or 'unknown'})",
                hint="wait until it ends: two at a time would measure each other",
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def _lock_folder() -> Path:
    """A folder of this user's own, the same one for every session on this machine."""
    folder = Path(tempfile.gettempdir()) / f"kvlab-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise HostBusy(
            f"{folder} belongs to another user, so runs cannot be kept apart",
            hint="remove it, or set TMPDIR to a folder of your own",
        )
    return folder
