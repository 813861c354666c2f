"""The machine: what it is, what it does now, and whether it is being measured already."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kvlab import __version__
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

GPU_QUERY_S = 5.0
_PROXY = re.compile(r"(?:https?|ftp|all|no)_proxy", re.IGNORECASE)
_CGROUP = Path("/sys/fs/cgroup")


def facts(path: Path | None = None) -> dict[str, Any]:
    """What is known of the machine, as JSON values; ``path`` adds the disk that it lies on.

    A fact that the machine does not tell is None. Of proxy variables only the names are kept.
    """
    memory = psutil.virtual_memory()
    known: dict[str, Any] = {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "memory_gib": round(memory.total / GIB, 1),
        "gpus": _gpus(),
        "limits": _limits(),
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
    if path is not None:
        known["disk"] = _disk(path)
    return known


def fingerprint(known: dict[str, Any]) -> str:
    """Identity of a host by its hardware and limits: equal for two runs that may be compared."""
    stable = {name: known.get(name) for name in STABLE}
    # A kernel update moves the last digits of the memory that it leaves.
    stable["memory_gib"] = round(float(known.get("memory_gib") or 0))
    return sha256_json(stable)[:16]


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
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


def _gpus() -> list[dict[str, Any]] | None:
    """The GPUs that nvidia-smi lists; an empty list without one, None when it does not answer."""
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(  # found on the user's own PATH
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=GPU_QUERY_S,
            check=True,
        )
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {"name": name, "memory_mib": int(mib) if mib.isdigit() else None, "driver": driver}
        for name, mib, driver in (row for row in rows if len(row) == 3)
    ]


def _disk(path: Path) -> dict[str, Any]:
    """The mount that holds a path: file system, device, total and free space."""
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
        "total_gib": round(usage.total / GIB, 1),
        "free_gib": round(usage.free / GIB, 1),
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
