"""Files on a disk, as a measurement of reads needs them: out of the page cache, and counted.

Nothing here needs root: a file's own pages are dropped by ``posix_fadvise``, what the kernel still
holds of it is asked with ``mincore``, and the device's reads stand in ``/proc/diskstats``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import HostBusy

SECTOR_BYTES = 512
"""The unit of diskstats, whatever the device's own is."""
READ_SECTORS = 5
"""Its column, counted from 0: device numbers and name, then reads, merged reads, sectors read."""
NAME_BYTES = 255
"""The longest file name that common file systems take."""
ALIGNED_BYTES = 4096
DISKSTATS = Path("/proc/diskstats")
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of some files the kernel holds in memory."""

    files: int
    bytes: int
    resident_bytes: int | None
    """None: the kernel does not tell."""

    @property
    def share(self) -> float | None:
        if self.resident_bytes is None:
            return None
        return self.resident_bytes / self.bytes if self.bytes else 0.0


def files(folder: Path) -> Iterator[Path]:
    """Every regular file below a folder; links are not followed."""
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(root) / name
            if path.is_file() and not path.is_symlink():
                yield path


def drop_pages(folder: Path) -> Residency:
    """Write every file below a folder to the device and drop its pages; what is left of them."""
    for path in files(folder):
        with _opened(path) as fd:
            os.fsync(fd)  # pages that were not written yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return residency(folder)


def residency(folder: Path) -> Residency:
    """How much of the files below a folder is in memory; asking does not bring it there."""
    count = total = 0
    resident: int | None = 0
    for path in files(folder):
        with _opened(path) as fd:
            size = os.fstat(fd).st_size
            held = _resident_bytes(fd, size)
        count, total = count + 1, total + size
        resident = None if resident is None or held is None else resident + held
    return Residency(count, total, resident)


class _opened:
    """A file opened for reading, as a descriptor."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> int:
        self._fd = os.open(self._path, os.O_RDONLY)
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _resident_bytes(fd: int, size: int) -> int | None:
    """Bytes of a file that are in memory, by whole pages; None where mincore is not there."""
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    # Python's own mmap does not give its address for a read-only map.
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        if libc.mincore(address, size, ctypes.addressof(pages)):
            return None
    finally:
        libc.munmap(address, size)
    return min(size, sum(page & 1 for page in pages) * mmap.PAGESIZE)


def device(path: Path) -> str | None:
    """The block device below a path as diskstats names it; None: memory, or a network's."""
    row = _row(path)
    return row[2] if row else None


def device_read_bytes(path: Path) -> int | None:
    """Bytes that the device below a path has read since the machine started; None: unknown."""
    row = _row(path)
    return int(row[READ_SECTORS]) * SECTOR_BYTES if row else None


def _row(path: Path) -> list[str] | None:
    """The device's line of diskstats."""
    rows = {tuple(row[:2]): row for row in map(str.split, DISKSTATS.read_text().splitlines())}
    return next((rows[numbers] for numbers in _device_numbers(path) if numbers in rows), None)


def _device_numbers(path: Path) -> Iterator[tuple[str, str]]:
    """Major and minor of the device: the file system's own, else those of what is mounted."""
    number = path.stat().st_dev
    own = (str(os.major(number)), str(os.minor(number)))
    yield own
    # Some file systems (btrfs, for one) have a number that no device has.
    for line in MOUNTS.read_text().splitlines():
        place, _, kind = line.partition(" - ")
        source = kind.split()[1] if len(kind.split()) > 1 else ""
        if place.split()[2] == ":".join(own) and source.startswith("/dev/"):
            node = Path(source).stat().st_rdev
            yield str(os.major(node)), str(os.minor(node))


def refuse_unwritable(folder: Path, name: str, size: int, *, direct: bool) -> None:
    """Raise HostBusy unless a record of that name and size can be written there, and read again.

    ``direct`` opens it as LMCache does with ``use_odirect``: some file systems take the flag and
    then refuse every write, which only shows when nothing is found after a restart.
    """
    if len(name.encode()) > NAME_BYTES:
        raise HostBusy(
            f"records in {folder} would have names of {len(name.encode())} bytes, and "
            f"{NAME_BYTES} are allowed: every store would fail",
            hint="serve the model from a shorter path",
        )
    path = folder / ".kvlab-trial"
    flags = os.O_DIRECT if direct else 0
    length = -(-size // ALIGNED_BYTES) * ALIGNED_BYTES
    with mmap.mmap(-1, length) as block:  # aligned to a page, as O_DIRECT demands
        block.write(b"k" * length)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
            try:
                written = os.pwrite(fd, block, 0)
                read = os.preadv(fd, [block], 0)
            finally:
                os.close(fd)
        except OSError as error:
            raise HostBusy(
                f"a record of {size:,} bytes cannot be written to {folder}"
                f"{' with O_DIRECT' if direct else ''}: {error.strerror}",
                hint="set cache.l2.base_path to another disk, or use_odirect to false",
            ) from error
        finally:
            path.unlink(missing_ok=True)
    if (written, read) != (length, length):
        raise HostBusy(
            f"of a record of {length:,} bytes {written:,} were written to {folder} and {read:,} "
            "read",
            hint="set cache.l2.base_path to another disk",
        )
