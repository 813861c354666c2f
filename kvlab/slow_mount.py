"""A folder mounted again as if it lay behind a slow network: set latency, set bandwidth. Emulated.

A FUSE passthrough in a process of its own. The kernel cuts every read into requests of at most
``read_bytes``, one after another for one caller, and each request waits: for its turn on the link,
then for the latency. Nothing is cached on the way, so every read is a cold one. Writes pass at full
speed. What is measured on such a mount says how a reader deals with latency, not how fast a real
network is; the passthrough itself, Python, ends at some hundred MB/s per machine.

    with mounted(source, at, latency_s=0.010) as mount: ...

or, in a shell, until Ctrl-C:

    python -m kvlab.slow_mount SOURCE AT --latency-ms 10
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvlab.errors import HostBusy, UsageError
from kvlab.units import byte_size

READ_BYTES = 128 * 1024
"""What a kernel client of a network file system often asks for at once."""
SMALLEST_READ = 4096
LARGEST_READ = 1 << 20
"""libfuse takes no larger one."""
THREADS = 256
"""Requests that may wait at once; a reader with more in flight waits for a thread."""
READY_S = 20.0
STOP_S = 10.0
GRACE_S = 1.0
TICK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMount:
    """An emulated mount: where it is, and what it does to a read."""

    source: Path
    at: Path
    latency_s: float
    bandwidth_bytes_s: float | None = None
    """Of all reads together; None: not limited."""
    read_bytes: int = READ_BYTES

    @property
    def label(self) -> str:
        """The mount in words; they say that it is emulated."""
        link = (
            f"{byte_size(self.bandwidth_bytes_s)}/s"
            if self.bandwidth_bytes_s
            else "bandwidth not limited"
        )
        return (
            f"emulated network mount: {1000 * self.latency_s:g} ms per read of "
            f"{self.read_bytes // 1024} KiB, {link}"
        )


def missing() -> str | None:
    """What this machine lacks for an emulated mount; None: nothing."""
    if not Path("/dev/fuse").exists():
        return "the kernel offers no FUSE here: there is no /dev/fuse"
    if ctypes.util.find_library("fuse3") is None:
        return "libfuse3 is not installed (Debian: apt-get install fuse3)"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed (Debian: apt-get install fuse3)"
    return None


@contextlib.contextmanager
def mounted(
    source: Path,
    at: Path,
    *,
    latency_s: float,
    bandwidth_bytes_s: float | None = None,
    read_bytes: int = READ_BYTES,
) -> Iterator[SlowMount]:
    """The mount, ready for use; it is gone when the block ends, and when this process dies.

    Both folders are made when they are missing. ``at`` must be empty.
    """
    mount = SlowMount(
        source=source.absolute(),
        at=at.absolute(),
        latency_s=latency_s,
        bandwidth_bytes_s=bandwidth_bytes_s,
        read_bytes=read_bytes,
    )
    refuse_unusable(mount)
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            _command(mount), stdin=subprocess.PIPE, stderr=log, start_new_session=True
        ) as server,
    ):
        try:
            _await_ready(mount, server, log)
            yield mount
        finally:
            _stop(mount, server)


def refuse_unusable(mount: SlowMount) -> None:
    """Raise UsageError or HostBusy when the mount cannot be what it is asked to be."""
    if mount.latency_s < 0 or (
        mount.bandwidth_bytes_s is not None and mount.bandwidth_bytes_s <= 0
    ):
        raise UsageError(
            "an emulated mount needs a latency of 0 or more and a bandwidth above 0",
            hint="leave the bandwidth out for none",
        )
    if mount.read_bytes % SMALLEST_READ or not SMALLEST_READ <= mount.read_bytes <= LARGEST_READ:
        raise UsageError(
            f"an emulated mount cannot read {mount.read_bytes:,} bytes at once",
            hint=f"choose a multiple of {SMALLEST_READ:,}, at most {LARGEST_READ:,}",
        )
    if lack := missing():
        raise HostBusy(
            f"no emulated mount can be made: {lack}", hint="measure on a real path instead"
        )
    for folder in (mount.source, mount.at):
        folder.mkdir(parents=True, exist_ok=True)
    if os.path.ismount(mount.at) or any(mount.at.iterdir()):
        raise HostBusy(
            f"{mount.at} is not an empty folder: nothing can be mounted there",
            hint=f"name another folder, or `umount -l {mount.at}` when a mount was left behind",
        )


def _command(mount: SlowMount) -> list[str]:
    command = [sys.executable, "-m", __name__, str(mount.source), str(mount.at), "--held"]
    command += ["--latency-ms", repr(1000 * mount.latency_s)]
    command += ["--read-bytes", str(mount.read_bytes)]
    if mount.bandwidth_bytes_s is not None:
        command += ["--bandwidth-mb", repr(mount.bandwidth_bytes_s / 1e6)]
    return command


def _await_ready(mount: SlowMount, server: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    end = time.monotonic() + READY_S
    while not os.path.ismount(mount.at):
        if server.poll() is not None or time.monotonic() > end:
            log.seek(0)
            said = log.read().decode("utf-8", "replace").strip().splitlines()[-5:]
            raise HostBusy(
                f"the emulated mount at {mount.at} did not come up",
                hint="root, or a fusermount3 that may mount, is needed",
                log_tail="\n".join(said) or None,
            )
        time.sleep(0.02)


def _stop(mount: SlowMount, server: subprocess.Popen[bytes]) -> None:
    """End the passthrough, which unmounts; where it cannot, the mount is taken away."""
    assert server.stdin is not None
    server.stdin.close()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if os.path.ismount(mount.at) or not _answers(mount.at):
        unmount(mount.at)


def _answers(folder: Path) -> bool:
    """False when a mount is there whose server is gone."""
    try:
        folder.stat()
    except OSError:
        return False
    return True


def unmount(at: Path) -> None:
    """Return when the mount is out of the tree, whoever still has files of it open."""
    program = shutil.which("fusermount3") or "fusermount3"
    subprocess.run(
        [program, "-u", "-z", str(at)], check=False, stderr=subprocess.DEVNULL, timeout=STOP_S
    )


class Link:
    """When a read may be answered: transfers follow one another, then the latency passes."""

    def __init__(self, latency_s: float, bandwidth_bytes_s: float | None) -> None:
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def due_s(self, size: int, now_s: float) -> float:
        """The moment, on the clock of ``now_s``, at which ``size`` bytes have arrived."""
        if self.bandwidth_bytes_s is None:
            return now_s + self.latency_s
        with self._lock:
            self._free_s = max(self._free_s, now_s) + size / self.bandwidth_bytes_s
            return self._free_s + self.latency_s


def serve(mount: SlowMount, *, held: bool) -> None:
    """Return when the mount is gone again; ``held``: the end of standard input unmounts it."""
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    import mfusepy

    from kvlab.slow_files import Passthrough

    if held:
        threading.Thread(target=_unmount_at_end, args=(mount.at,), daemon=True).start()
    mfusepy.FUSE(
        Passthrough(mount.source, Link(mount.latency_s, mount.bandwidth_bytes_s), mount.read_bytes),
        str(mount.at),
        foreground=True,
        direct_io=True,  # no page cache: each read comes here
        max_read=mount.read_bytes,
        max_threads=THREADS,
        fsname="kvlab-emulated",
        subtype="kvlab",
        default_permissions=True,
    )


def _unmount_at_end(at: Path) -> None:
    """Wait until whoever started this process lets go of it or is gone, then unmount."""
    owner = os.getppid()
    while os.getppid() == owner:
        readable, _, _ = select.select([sys.stdin], [], [], TICK_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
    unmount(at)
    time.sleep(GRACE_S)
    os._exit(0)  # somebody has a file open, and libfuse would wait for that


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 when the mount was there and is gone again."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.slow_mount", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("at", type=Path)
    parser.add_argument("--latency-ms", type=float, default=10.0, help="per read request")
    parser.add_argument("--bandwidth-mb", type=float, help="MB/s of all reads together")
    parser.add_argument("--read-bytes", type=int, default=READ_BYTES, help="largest request")
    parser.add_argument("--held", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    mount = SlowMount(
        source=chosen.source.absolute(),
        at=chosen.at.absolute(),
        latency_s=chosen.latency_ms / 1000,
        bandwidth_bytes_s=chosen.bandwidth_mb and chosen.bandwidth_mb * 1e6,
        read_bytes=chosen.read_bytes,
    )
    try:
        refuse_unusable(mount)
    except (UsageError, HostBusy) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not chosen.held:
        print(f"{mount.at}: {mount.label}; Ctrl-C unmounts", file=sys.stderr)
    serve(mount, held=chosen.held)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
