"""An LMCache L2 adapter that reads in parallel: all keys of a request, and the parts of each.

Drop-in for LMCache's ``fs``: the same folder, the same file names, raw bytes. Where ``fs`` (0.5.6)
reads the keys of a request one after another and ``fs_native`` one key per thread, this one keeps
a bounded pool of readers busy whatever the request looks like. That matters where a read waits
longer than it transfers: network storage, disk arrays, one request at a time.

    lmcache server … --l2-adapter '{"type": "plugin",
        "module_path": "kvlab.engine.parallel_fs", "class_name": "ParallelFSL2Adapter",
        "adapter_params": {"base_path": "/mnt/kv"}}'

docs/parallel-fs.md has its settings, its counters, and what it does when something goes wrong.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.engine import parallel_settings, record_files
from kvlab.engine.record_index import NoRoom, RecordIndex
from kvlab.errors import KvlabError

try:
    from lmcache.lmcache_native import Bitmap
    from lmcache.logging import init_logger
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import (
        _filename_to_object_key,
        _object_key_to_filename,
    )
    from lmcache.v1.platform import create_event_notifier
    from opentelemetry import metrics
except ImportError as error:
    raise KvlabError(
        f"this LMCache does not have what kvlab's parallel adapter builds on: {error}",
        hint="it fits LMCache 0.5.6, which `make engine` installs",
    ) from error

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
    from lmcache.v1.memory_management import MemoryObj

logger = init_logger(__name__)

KINDS = ("store", "lookup", "load")
STRIPES = 64
COUNTERS = {
    "loaded": "records loaded whole",
    "loaded_bytes": "bytes of the records loaded whole",
    "pieces": "pieces into which records were split for reading",
    "missing": "records asked for whose file was not there",
    "wrong_size": "records asked for whose file had another length",
    "read_errors": "records that the storage failed to deliver",
    "stored": "records stored",
    "stored_bytes": "bytes of the records stored",
    "store_errors": "records that the storage failed to take",
    "no_room": "records not stored because nothing could be evicted for them",
    "deleted": "records deleted on demand of LMCache",
    "evicted": "records evicted by the adapter's own limit",
    "evicted_bytes": "bytes of the records evicted by the adapter's own limit",
}
"""In the status by these names, in Prometheus as ``kvlab_parallel_fs_<name>_total``."""


class ParallelFSL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The adapter's configuration as LMCache builds it from ``adapter_params``."""

    def __init__(self, settings: parallel_settings.Settings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> ParallelFSL2AdapterConfig:
        """The configuration, or ValueError with what is wrong and what every parameter means."""
        return cls(parallel_settings.check(d))

    @classmethod
    def help(cls) -> str:
        """What every parameter means."""
        return parallel_settings.explain()


@dataclass(slots=True)
class _Task:
    """A lookup, load or store under way, or its result."""

    id: int
    keys: Sequence[ObjectKey]
    left: int
    """Keys still under way."""
    succeeded: list[bool]
    written: int = 0
    """Bytes."""


@dataclass(slots=True)
class _Read:
    """One record on its way into its buffer, in pieces that share a descriptor."""

    task: _Task
    number: int
    view: memoryview
    fd: int = -1
    left: int = 0
    """Pieces still under way."""
    failure: str | None = None
    """The counter that says why."""

    @property
    def key(self) -> ObjectKey:
        return self.task.keys[self.number]


class ParallelFSL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Records as files, read in parallel pieces. What cannot be read whole is a miss."""

    def __init__(
        self, config: ParallelFSL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        settings = config.settings
        super().__init__(max_capacity_bytes=settings.capacity_bytes)
        self._settings = settings
        self._folder = Path(settings.base_path).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._drafts = record_files.Drafts(self._folder / (settings.relative_tmp_dir or "."))
        self._direct = record_files.DirectIO(settings.use_odirect)
        self._index: RecordIndex[ObjectKey] = RecordIndex(settings.capacity_bytes)
        self._pool = futures.ThreadPoolExecutor(settings.num_workers, "parallel-fs")
        self._stripes = [threading.Lock() for _ in range(STRIPES)]
        """By key: its file and its place in the index change together."""
        self._lock = threading.Lock()
        """Of everything below."""
        self._ids = itertools.count()
        self._notifiers = {kind: create_event_notifier() for kind in KINDS}
        self._open: dict[str, dict[int, _Task]] = {kind: {} for kind in KINDS}
        self._done: dict[str, dict[int, _Task]] = {kind: {} for kind in KINDS}
        self._descriptors: set[int] = set()
        self._reading = 0
        self._writing = 0
        self._writes: deque[tuple[_Task, int, memoryview]] = deque()
        self._closing = False
        self._totals: Counter[str] = Counter()
        meter = metrics.get_meter("kvlab.parallel_fs")
        self._counters = {
            name: meter.create_counter(f"kvlab_parallel_fs.{name}", description=meaning)
            for name, meaning in COUNTERS.items()
        }
        self._rebuild()

    # Descriptors that LMCache waits on.

    def get_store_event_fd(self) -> int:
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers["load"].fileno())

    # Lookup.

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """The task's number; the index answers at once.

        Only in a shared folder (LMCache's ``"shared": true``), where others write as well, what the
        index does not hold is looked for on the disk.
        """
        task = self._begin("lookup", keys)
        for number, there in enumerate(self._index.lock(keys)):
            if there or not self._shared:
                self._settle("lookup", task, number, there)
            else:
                self._submit(self._look_on_disk, task, number)
        return task.id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._take_bitmap("lookup", task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._index.unlock(keys)

    def _look_on_disk(self, task: _Task, number: int) -> None:
        key, there = task.keys[number], False
        try:
            size = record_files.size_of(self._path(key))
            if size is not None:
                with self._stripe(key):
                    new = key not in self._index
                    if new:
                        self._index.put(key, size)
                if new:
                    self._notify_keys_stored([key], [size])
                (there,) = self._index.lock([key])  # not one that could not be read before
        except OSError as error:
            logger.warning("%s is a miss: %s", self._path(key), error)
        finally:
            self._settle("lookup", task, number, there)

    # Load.

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """The task's number; all records are opened side by side and read in pieces."""
        views = [memory.byte_array for memory in objects]
        task = self._begin("load", keys)
        with self._lock:
            self._reading += len(views)
        for number, view in enumerate(views):
            self._submit(self._open_record, _Read(task, number, view))
        return task.id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._take_bitmap("load", task_id)

    def _open_record(self, read: _Read) -> None:
        fd, failure = None, "read_errors"
        try:
            fd = record_files.open_record(self._path(read.key), read.view, self._direct)
        except FileNotFoundError:
            failure = "missing"
        except record_files.WrongSize as error:
            failure = "wrong_size"
            logger.warning("%s is a miss: %s", self._path(read.key), error)
        except OSError as error:
            logger.warning("%s is a miss: %s", self._path(read.key), error)
        finally:
            if fd is None:
                read.failure = failure
                self._end(read)
        if fd is not None:
            self._read_in_pieces(read, fd)

    def _read_in_pieces(self, read: _Read, fd: int) -> None:
        """Hand all pieces but the first to other workers; read that one here.

        As many pieces as there are workers for each record under way: small ones when little is
        asked for, whole records when every worker has one anyway.
        """
        parts = self._settings.num_workers // max(1, self._reading)
        smallest = self._settings.smallest_bytes
        pieces = record_files.split(len(read.view), parts, smallest) or [(0, 0)]
        read.fd, read.left = fd, len(pieces)
        with self._lock:
            self._descriptors.add(fd)
        self._count(pieces=len(pieces))
        for piece in pieces[1:]:
            self._submit(self._read_piece, read, *piece)
        self._read_piece(read, *pieces[0])

    def _read_piece(self, read: _Read, offset: int, length: int) -> None:
        failure: str | None = "read_errors"
        try:
            if read.failure is None:  # else another piece failed, and this one is of no use
                piece = read.view[offset : offset + length]
                record_files.read_piece(read.fd, piece, offset, self._direct)
            failure = None
        except record_files.WrongSize as error:
            failure = "wrong_size"
            logger.warning("%s is a miss: %s", self._path(read.key), error)
        except OSError as error:
            logger.warning("%s is a miss: %s", self._path(read.key), error)
        finally:
            self._end_piece(read, failure)

    def _end_piece(self, read: _Read, failure: str | None) -> None:
        with self._lock:
            read.failure = read.failure or failure
            read.left -= 1
            if read.left:
                return
            self._descriptors.discard(read.fd)
        os.close(read.fd)
        self._end(read)

    def _end(self, read: _Read) -> None:
        """The record is in its buffer, or it is a miss."""
        with self._lock:
            self._reading -= 1
        if read.failure is None:
            self._count(loaded=1, loaded_bytes=len(read.view))
        else:
            self._count(**{read.failure: 1})
            self._forget(read)
        self._settle("load", read.task, read.number, read.failure is None)

    def _forget(self, read: _Read) -> None:
        """Find a record no more that could not be read, until it is stored again."""
        key, gone = read.key, None
        with self._stripe(key):
            try:
                size = record_files.size_of(self._path(key))
            except OSError:
                self._index.distrust(key)
                return
            if size is None:
                gone = self._index.drop(key)
            elif size != len(read.view) or read.failure == "read_errors":
                self._index.distrust(key)
            # Else it was stored anew meanwhile.
        if gone is not None:
            self._notify_keys_deleted([key], [gone])

    # Store.

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """The task's number; half of the workers at most write, the others are kept for reads."""
        views = [memory.byte_array for memory in objects]
        task = self._begin("store", keys)
        with self._lock:
            self._writes.extend((task, number, view) for number, view in enumerate(views))
        self._start_writes()
        return task.id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """By task whether all of it was stored, and the bytes that were written."""
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return {
            number: L2StoreResult(all(task.succeeded), task.written)
            for number, task in done.items()
        }

    def _start_writes(self) -> None:
        with self._lock:
            room = self._settings.writers - self._writing
            starting = [self._writes.popleft() for _ in range(min(room, len(self._writes)))]
            self._writing += len(starting)
        for write in starting:
            self._submit(self._write, *write)

    def _write(self, task: _Task, number: int, view: memoryview) -> None:
        key, written = task.keys[number], None
        try:
            written = self._store(key, view)
        except NoRoom:
            self._count(no_room=1)
            logger.warning("%s is not stored: nothing can be evicted for it", self._path(key))
        except OSError as error:
            self._count(store_errors=1)
            logger.warning("%s is not stored: %s", self._path(key), error)
        finally:
            with self._lock:
                self._writing -= 1
            self._settle("store", task, number, written is not None, written or 0)
            self._start_writes()

    def _store(self, key: ObjectKey, view: memoryview) -> int:
        """The bytes that were written: none when the record is there already."""
        size = len(view)
        if self._index.holds(key, size):
            return 0
        self._evict(self._index.reserve(size))
        try:
            draft = self._drafts.write(view, self._direct, sync=self._settings.fsync)
            before = self._publish(draft, key, size)
        except BaseException:
            self._index.release(size)
            raise
        if self._settings.fsync:
            record_files.sync_folder(str(self._folder))
        if before is not None:
            self._notify_keys_deleted([key], [before])
        self._notify_keys_stored([key], [size])
        self._count(stored=1, stored_bytes=size)
        return size

    def _publish(self, draft: str, key: ObjectKey, size: int) -> int | None:
        """The size of the record that the draft replaces; None: there was none."""
        try:
            with self._stripe(key):
                Path(draft).replace(self._path(key))
                return self._index.put(key, size, reserved=True)
        except OSError:
            record_files.remove(draft)
            raise

    # Delete and evict.

    def delete(self, keys: list[ObjectKey]) -> None:
        """Return when the files are gone, except those of keys that a reader has locked."""
        step = self._settings.writers
        for start in range(0, len(keys), step):
            some = keys[start : start + step]
            try:
                sizes = list(self._pool.map(self._delete, some))
            except (RuntimeError, futures.CancelledError):
                return  # closed
            gone = {key: size for key, size in zip(some, sizes, strict=True) if size is not None}
            self._count(deleted=len(gone))
            self._notify_keys_deleted(list(gone), list(gone.values()))

    def _delete(self, key: ObjectKey) -> int | None:
        with self._stripe(key):
            size = self._index.drop_unlocked(key)
            return size if size is not None and self._remove(key, size) else None

    def _evict(self, victims: Sequence[tuple[ObjectKey, int]]) -> None:
        for key, size in victims:
            with self._stripe(key):
                # One that was stored anew meanwhile has replaced the old file.
                if key not in self._index and not self._remove(key, size):
                    continue
            self._count(evicted=1, evicted_bytes=size)
            self._notify_keys_deleted([key], [size])

    def _remove(self, key: ObjectKey, size: int) -> bool:
        """Whether the file is gone; one that cannot be removed is counted on."""
        try:
            record_files.remove(self._path(key))
        except OSError as error:
            logger.warning("%s cannot be removed: %s", self._path(key), error)
            self._index.put(key, size)
            return False
        return True

    # Start, status, end.

    def _rebuild(self) -> None:
        """Learn what the folder holds; the oldest file is the least recently used record."""
        abandoned = self._drafts.remove_abandoned()
        paths = [path for path in self._folder.iterdir() if path.suffix == ".data"]
        held = []
        for path, found in zip(paths, self._pool.map(_stat, paths), strict=True):
            key = _filename_to_object_key(path.name)
            if key is not None and found is not None and stat.S_ISREG(found.st_mode):
                held.append((found.st_mtime_ns, path.name, key, found.st_size))
        for _, _, key, size in sorted(held, key=lambda record: record[:2]):
            self._index.put(key, size, trusted=size > 0)
            self._total_bytes_used += size
            salted = self._bytes_by_cache_salt.get(key.cache_salt, 0)
            self._bytes_by_cache_salt[key.cache_salt] = salted + size
        self._evict(self._index.reserve(0))  # the limit may have been lowered
        logger.info(
            "parallel fs adapter on %s: %d records, %d bytes; %d unfinished files removed",
            *(self._folder, len(self._index), self._index.bytes, abandoned),
        )

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Return when the listener knows the records that are there already."""
        super().register_listener(listener)
        held = self._index.snapshot()
        if held:
            held.reverse()  # listeners take the first key as the most recently used
            listener.on_l2_keys_stored([key for key, _ in held], [size for _, size in held])

    def report_status(self) -> dict[str, Any]:
        """What the adapter holds, does and has counted since its start."""
        with self._lock:
            now = {"reading": self._reading, "writing": self._writing + len(self._writes)}
            totals = {name: self._totals[name] for name in COUNTERS}
        return {
            "is_healthy": not self._closing,
            "type": "ParallelFSL2Adapter",
            "base_path": str(self._folder),
            "num_workers": self._settings.num_workers,
            "sub_block_kb": self._settings.sub_block_kb,
            "use_odirect": self._direct.wanted,
            "fsync": self._settings.fsync,
            "records": len(self._index),
            "bytes": self._index.bytes,
            "capacity_bytes": self._index.capacity_bytes or None,
            "locked": self._index.locked(),
            **now,
            **totals,
        }

    def close(self) -> None:
        """Return when nothing touches a buffer any more.

        Transfers that run come to their end; what had not begun is a miss, or not stored.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()
        self._writes.clear()
        for kind in KINDS:
            for task in list(self._open[kind].values()):
                self._finish(kind, task)
        for notifier in self._notifiers.values():
            notifier.close()

    # What tasks have in common.

    def _begin(self, kind: str, keys: Sequence[ObjectKey]) -> _Task:
        with self._lock:
            if self._closing:
                raise RuntimeError("the parallel fs adapter is closed")
            task = _Task(next(self._ids), list(keys), len(keys), [False] * len(keys))
            self._open[kind][task.id] = task
        if not keys:
            self._finish(kind, task)
        return task

    def _settle(
        self, kind: str, task: _Task, number: int, succeeded: bool, written: int = 0
    ) -> None:
        """Note what became of one key; the last one ends the task."""
        with self._lock:
            task.succeeded[number] = succeeded
            task.written += written
            task.left -= 1
            last = not task.left
        if last:
            self._finish(kind, task)

    def _finish(self, kind: str, task: _Task) -> None:
        done = [key for key, well in zip(task.keys, task.succeeded, strict=True) if well]
        if kind != "lookup":
            self._index.touch(done)
        if kind == "load" and done:
            self._notify_keys_accessed(done)
        with self._lock:
            del self._open[kind][task.id]
            self._done[kind][task.id] = task
        self._notifiers[kind].notify()

    def _take_bitmap(self, kind: str, task_id: int) -> Bitmap | None:
        with self._lock:
            task = self._done[kind].pop(task_id, None)
        if task is None:
            return None
        bitmap = Bitmap(len(task.keys))
        for number, succeeded in enumerate(task.succeeded):
            if succeeded:
                bitmap.set(number)
        return bitmap

    def _submit(self, job: Callable[..., None], *arguments: Any) -> None:
        """Run the job on a worker; after `close` it does not run, and close ends its task."""
        try:
            future = self._pool.submit(job, *arguments)
        except RuntimeError:
            return
        future.add_done_callback(_log_unexpected)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._totals.update(amounts)
        for name, amount in amounts.items():
            self._counters[name].add(amount)

    def _path(self, key: ObjectKey) -> str:
        return f"{self._folder}/{_object_key_to_filename(key)}"

    def _stripe(self, key: ObjectKey) -> threading.Lock:
        return self._stripes[hash(key) % STRIPES]


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _log_unexpected(future: futures.Future[None]) -> None:
    """A worker's error that no handler expected: its record is a miss by now, its cause is told."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("unexpected in the parallel fs adapter", exc_info=error)
