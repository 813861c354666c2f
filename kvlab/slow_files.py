"""The file operations of the emulated mount: each passed on to the source, reads after a wait.

Imported only by the process that serves the mount (`kvlab.slow_mount`), because it needs libfuse.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mfusepy

if TYPE_CHECKING:
    from kvlab.slow_mount import Link

KEPT_FLAGS = os.O_ACCMODE | os.O_TRUNC | os.O_EXCL
"""Of an open. O_DIRECT stays with the caller's side: the buffers here are not aligned."""
STAT_FIELDS = (
    *("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize"),
)
TIME_FIELDS = ("st_atime", "st_mtime", "st_ctime")
STATVFS_FIELDS = (
    *("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"),
    *("f_flag", "f_namemax"),
)


class Passthrough(mfusepy.Operations):  # type: ignore[misc]
    """What libfuse calls, from many threads: paths begin with a slash and are below the source."""

    use_ns = True

    def __init__(self, source: Path, link: Link, read_bytes: int) -> None:
        self._source = os.fspath(source)
        self._link = link
        self._read_bytes = read_bytes

    def init_with_config(self, connection: Any, config: Any) -> None:
        """Tell the kernel what the mount option has told libfuse; the two must agree."""
        connection.max_read = self._read_bytes

    def _real(self, path: str) -> str:
        return self._source + path

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """The bytes, once the link would have brought them."""
        due_s = self._link.due_s(size, time.monotonic())
        data = os.pread(fh, size, offset)
        left_s = due_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        return data

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags & KEPT_FLAGS)

    def create(self, path: str, mode: int, flags: int) -> int:
        return os.open(self._real(path), (flags & KEPT_FLAGS) | os.O_CREAT, mode)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """A file's attributes, times in nanoseconds."""
        found = os.fstat(fh) if fh is not None else os.lstat(self._real(path))
        kept = {name: getattr(found, name) for name in STAT_FIELDS}
        return kept | {name: getattr(found, f"{name}_ns") for name in TIME_FIELDS}

    def opendir(self, path: str) -> int:
        return os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY)

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(fh)]

    def releasedir(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(fh if fh is not None else self._real(path), length)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._real(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._real(old), self._real(new))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._real(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._real(path), ns=times or (time.time_ns(),) * 2)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._source)
        return {name: getattr(found, name) for name in STATVFS_FIELDS}
