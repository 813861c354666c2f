"""Reading and writing whole records: in pieces, past the page cache where it can be, or not at all.

Plain files of raw bytes, as LMCache's ``fs`` adapter lays them out. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ALIGNED_BYTES = 4096
"""What O_DIRECT wants of address, offset and length, on every usual disk and file system."""
TEMPORARY = ".kvlab-"
"""Names of unfinished records begin so; none of LMCache's does."""


class WrongSize(Exception):
    """A file is not as long as its record, or ended early: it is not that record."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the file has {size:,} bytes")
        self.size = size


@dataclass(slots=True)
class DirectIO:
    """Whether O_DIRECT is used. File systems that refuse it, at open or later, switch it off."""

    wanted: bool
    refusals: int = field(default=0)

    def fits(self, view: memoryview) -> bool:
        """Whether a buffer can be filled and written past the page cache."""
        if not self.wanted or not view or len(view) % ALIGNED_BYTES:
            return False
        return address(view) % ALIGNED_BYTES == 0

    def refused(self) -> None:
        self.wanted = False
        self.refusals += 1


def address(view: memoryview) -> int:
    """Where a writable buffer begins in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def split(size: int, parts: int, smallest: int) -> list[tuple[int, int]]:
    """Offset and length of at most ``parts`` pieces; all but the last are multiples of smallest."""
    length = max(1, -(-size // (max(1, parts) * smallest))) * smallest
    return [(offset, min(length, size - offset)) for offset in range(0, size, length)]


def open_record(path: str, view: memoryview, direct: DirectIO) -> int:
    """A descriptor from which the record can be read into the buffer, in pieces, by many threads.

    Raises WrongSize, or OSError.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if direct.fits(view) else 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        direct.refused()
        fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size != len(view):
            raise WrongSize(size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_piece(fd: int, view: memoryview, offset: int, direct: DirectIO) -> None:
    """Fill the buffer from the file at that offset, or raise WrongSize or OSError."""
    done, again = 0, True
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not again:
                raise
            again = False
            _make_buffered(fd, direct)
            continue
        if not count:
            raise WrongSize(offset + done)
        done += count


def _make_buffered(fd: int, direct: DirectIO) -> None:
    """O_DIRECT was taken at open and refused at the transfer: go on through the page cache."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_DIRECT:  # else another thread has done it, or it is not the reason
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        direct.refused()


class Drafts:
    """Unfinished records of one folder: under names of their own until they are whole.

    A writer holds a lock on its file, so that what a killed one has left behind is told from what
    another process is writing just now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)

    def remove_abandoned(self) -> int:
        """How many files of killed writers were removed."""
        return sum(_remove_unless_locked(path) for path in list(self._files()))

    def _files(self) -> Iterator[str]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(TEMPORARY) and entry.is_file(follow_symlinks=False):
                    yield entry.path

    def write(self, view: memoryview, direct: DirectIO, *, sync: bool) -> str:
        """The name under which the record now lies whole; ``os.replace`` makes it the record.

        On any error nothing is left behind.
        """
        draft, fd = self._create(direct.fits(view))
        try:
            try:
                _write_all(fd, view, direct)
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
        return draft

    def _create(self, direct: bool) -> tuple[str, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        while True:
            draft = str(self.folder / f"{TEMPORARY}{os.getpid()}-{next(self._numbers)}.tmp")
            try:
                fd = os.open(draft, flags | (os.O_DIRECT if direct else 0), 0o644)
            except FileExistsError:
                continue  # of a process that had our number, in another container perhaps
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                Path(draft).unlink(missing_ok=True)  # some file systems create it all the same
                direct = False
                continue
            _try_lock(fd)
            return draft, fd


def _write_all(fd: int, view: memoryview, direct: DirectIO) -> None:
    done, again = 0, True
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], done)
        except OSError as error:
            if error.errno != errno.EINVAL or not again:
                raise
            again = False
            _make_buffered(fd, direct)


def _try_lock(fd: int) -> bool:
    """Whether the lock on the file is now ours; some file systems know none."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_unless_locked(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
        try:
            if not _try_lock(fd):
                return False
            Path(path).unlink()
        finally:
            os.close(fd)
    except FileNotFoundError:
        return False
    return True


def sync_folder(folder: str) -> None:
    """Return when the names in the folder are on the disk as well."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def size_of(path: str) -> int | None:
    """A file's length; None: there is no such file."""
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return None


def remove(path: str) -> bool:
    """Whether there was such a file; it is gone now."""
    try:
        Path(path).unlink()
    except FileNotFoundError:
        return False
    return True
