"""Run by the engine's Python: prints as JSON what the parallel adapter does, scenario by scenario.

Payloads are random and carry their own digest, so that a record that is not exactly one that was
stored is noticed, whatever it is.
"""

import argparse
import contextlib
import errno
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from unittest import mock

from lmcache.cli.commands.bench.l2_adapter_bench.data import make_aligned_tensor
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_controllers.eviction_controller import (
    L2AdapterEvictionState,
    L2EvictionController,
)
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.mp_observability.otel_init import init_otel_metrics
from lmcache.v1.platform import consume_fd
from prometheus_client import generate_latest

from kvlab.engine import record_files

KIB, MIB = 1 << 10, 1 << 20
PLUGIN = {
    "type": "plugin",
    "module_path": "kvlab.engine.parallel_fs",
    "class_name": "ParallelFSL2Adapter",
    "config_class_name": "ParallelFSL2AdapterConfig",
}
DIGEST_BYTES = 16
PATIENCE_S = 60


def make(spec):
    """An adapter from its JSON, by LMCache's own way."""
    arguments = argparse.Namespace(l2_adapter=[json.dumps(spec)])
    (config,) = parse_args_to_l2_adapters_config(arguments).adapters
    return create_l2_adapter(config)


@contextlib.contextmanager
def opened(folder, kind="plugin", **parameters):
    """An adapter on the folder: ours, or one of LMCache's."""
    spec = {"type": kind, "base_path": str(folder), **parameters}
    if kind == "plugin":
        spec = {**PLUGIN, "adapter_params": {"base_path": str(folder), **parameters}}
    adapter = make(spec)
    try:
        yield adapter
    finally:
        adapter.close()


def key(number, **fields):
    return ObjectKey(
        chunk_hash=number.to_bytes(32, "big"), model_name="org/model", kv_rank=0x1000100, **fields
    )


def memory(size, data=None, offset=0):
    """A buffer like one of L1, aligned but for ``offset``; random bytes before a load."""
    import torch

    tensor = make_aligned_tensor(size + offset, 4096)[offset:]
    described = MemoryObjMetadata(
        shape=torch.Size([size]),
        dtype=torch.uint8,
        address=0,
        phy_size=size,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    made = TensorMemoryObj(raw_data=tensor, metadata=described, parent_allocator=None)
    tensor.numpy().data[:] = os.urandom(size) if data is None else data
    return made


def payload(size):
    body = os.urandom(size - DIGEST_BYTES)
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def is_whole(data):
    digest = hashlib.blake2b(data[DIGEST_BYTES:], digest_size=DIGEST_BYTES).digest()
    return digest == data[:DIGEST_BYTES]


def wait(fd):
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(1000 * PATIENCE_S):
        raise TimeoutError("the adapter did not answer")
    consume_fd(fd)


def store(adapter, keys, datas, offset=0):
    """Whether all of it was stored, and the bytes written."""
    buffers = [memory(len(data), data, offset) for data in datas]  # kept alive, as in L1
    task = adapter.submit_store_task(keys, buffers)
    results = {}
    while task not in results:
        wait(adapter.get_store_event_fd())
        results |= adapter.pop_completed_store_tasks()
    return results[task].is_successful(), results[task].bytes_transferred()


def result(fd, query, task, count):
    while (bitmap := query(task)) is None:
        wait(fd)
    return [bitmap.test(number) for number in range(count)]


def lookup(adapter, keys):
    task = adapter.submit_lookup_and_lock_task(keys, {})
    fd = adapter.get_lookup_and_lock_event_fd()
    return result(fd, adapter.query_lookup_and_lock_result, task, len(keys))


def find(adapter, keys):
    """As lookup, and the locks are given back."""
    found = lookup(adapter, keys)
    adapter.submit_unlock([k for k, there in zip(keys, found, strict=True) if there])
    return found


def load(adapter, keys, sizes, offset=0):
    """For each key its bytes, or None for a miss."""
    buffers = [memory(size, offset=offset) for size in sizes]
    task = adapter.submit_load_task(keys, buffers)
    fd = adapter.get_load_event_fd()
    arrived = result(fd, adapter.query_load_result, task, len(keys))
    return [bytes(b.byte_array) if ok else None for b, ok in zip(buffers, arrived, strict=True)]


def records(folder):
    return sorted(path for path in Path(folder).iterdir() if path.suffix == ".data")


def others(folder):
    return sorted(p.name for p in Path(folder).rglob("*") if p.is_file() and p.suffix != ".data")


def descriptors_held():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# --- scenarios ------------------------------------------------------------------------------------


def round_trip(folder):
    """Every size and alignment, past the page cache and through it."""
    sizes = [2 * MIB, 3 * 4096, 4096, 5000, 100_001, 17]
    keys = [key(n, object_group_id=n % 2, cache_salt="s" * (n % 3)) for n in range(len(sizes))]
    datas = [payload(size) for size in sizes]
    facts = {}
    for name, direct, offset in (("direct", True, 0), ("buffered", False, 0), ("odd", True, 512)):
        place = folder / name
        with opened(place, use_odirect=direct, relative_tmp_dir=".tmp") as adapter:
            stored = store(adapter, keys, datas, offset)
            again = store(adapter, keys, datas, offset)
            facts[name] = {
                "stored": stored == (True, sum(sizes)),
                "again": again == (True, 0),
                "found": find(adapter, [*keys, key(99)]),
                "equal": load(adapter, keys, sizes, offset) == datas,
                "stays_direct": adapter.report_status()["use_odirect"],
            }
        with opened(place, use_odirect=direct) as adapter:
            facts[name]["found_again"] = find(adapter, keys)
            facts[name]["equal_again"] = load(adapter, keys, sizes, offset) == datas
            facts[name]["left"] = others(place)
    return facts


def exchange(folder):
    """Records of LMCache's own adapters are read, and they read ours."""
    sizes = [2 * MIB, 8192]
    keys = [key(1), key(2, object_group_id=11, cache_salt="salt")]
    facts, names = {}, {}
    for kind in ("fs", "fs_native"):
        for writer, reader in ((kind, "plugin"), ("plugin", kind)):
            place = folder / f"{writer}-{reader}"
            place.mkdir(parents=True)
            datas = [payload(size) for size in sizes]
            with opened(place, writer) as adapter:
                facts[f"{writer} stores"] = store(adapter, keys, datas)[0]
            with opened(place, reader) as adapter:
                found = find(adapter, keys)
                facts[f"{writer} to {reader}"] = [found, load(adapter, keys, sizes) == datas]
            names[writer] = [path.name for path in records(place)]
    return {**facts, "same_names": len(set(map(tuple, names.values()))) == 1}


def storm(folder):
    """Stores, loads and deletes of the same few keys at once, for a while."""
    sizes = [MIB, 256 * KIB, 4096, 30_000]
    keys = [key(n) for n in range(16)]
    seen, wrong = Counter(), []
    with opened(folder, num_workers=16, sub_block_kb=64) as adapter:
        end = time.monotonic() + 4

        def sizes_of(some):
            return [sizes[int.from_bytes(k.chunk_hash[-2:], "big") % len(sizes)] for k in some]

        def choose(dice):
            return dice.sample(keys, dice.randint(1, 4))

        def writing(dice):
            while time.monotonic() < end:
                some = choose(dice)
                buffers = [memory(size, payload(size)) for size in sizes_of(some)]
                task = adapter.submit_store_task(some, buffers)
                while task not in stored:
                    time.sleep(0.001)
                seen["stores"] += stored.pop(task).is_successful()

        def reading(dice):
            while time.monotonic() < end:
                some = choose(dice)
                buffers = [memory(size) for size in sizes_of(some)]
                task = adapter.submit_load_task(some, buffers)
                while (bitmap := adapter.query_load_result(task)) is None:
                    time.sleep(0.001)
                for number, buffer in enumerate(buffers):
                    if bitmap.test(number):
                        seen["loads"] += 1
                        if not is_whole(bytes(buffer.byte_array)):
                            wrong.append(number)

        def deleting(dice):
            while time.monotonic() < end:
                adapter.delete(choose(dice))
                seen["deletes"] += 1
                time.sleep(0.005)

        stored = {}

        def collecting():
            while time.monotonic() < end + 5 and any(t.is_alive() for t in threads):
                stored.update(adapter.pop_completed_store_tasks())
                time.sleep(0.001)

        jobs = [writing, writing, reading, reading, reading, deleting]
        threads = [
            threading.Thread(target=job, args=(random.Random(n),)) for n, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        collecting()
        for thread in threads:
            thread.join()
        status, usage = adapter.report_status(), adapter.get_usage()
    on_disk = sum(path.stat().st_size for path in records(folder))
    return {
        **seen,
        "wrong": len(wrong),
        "bytes": [status["bytes"] - on_disk, usage.total_bytes_used - on_disk],
        "locked": status["locked"],
        "reading": status["reading"],
        "left": others(folder),
    }


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import probe_parallel_fs as probe
with probe.opened(sys.argv[2], relative_tmp_dir=".tmp") as adapter:
    number = 0
    while True:
        keys = [probe.key(number + n) for n in range(4)]
        probe.store(adapter, keys, [probe.payload(8 * probe.MIB) for _ in keys])
        number = (number + 4) % 32
        adapter.delete([probe.key(number + n) for n in range(4)])
"""


def killed(folder):
    """What is found after kill -9 while records were being written."""
    command = [sys.executable, "-c", WRITER, str(Path(__file__).parent), str(folder)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as writer:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and not (
            len(records(folder)) > 8 and any("tmp" in name for name in others(folder))
        ):
            time.sleep(0.001)
        writer.send_signal(signal.SIGKILL)
    unfinished = others(folder)
    # Somebody else is writing just now: a lock is held.
    alive = folder / ".tmp" / f"{record_files.TEMPORARY}other.tmp"
    with alive.open("wb") as held:
        record_files._try_lock(held.fileno())
        with opened(folder, relative_tmp_dir=".tmp") as adapter:
            keys = [k for k in map(key, range(40)) if find(adapter, [k])[0]]
            datas = load(adapter, keys, [8 * MIB] * len(keys))
            return {
                "unfinished": len(unfinished),
                "records": len(records(folder)),
                "found": len(keys),
                "whole": sum(data is not None and is_whole(data) for data in datas),
                "left": others(folder) == [alive.name],
            }


def full(folder):
    """A file system without room: that store fails, the rest goes on, and room is used again."""
    if os.geteuid():
        return None  # only root mounts
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], check=True)
    try:
        keys = [key(n) for n in range(6)]
        datas = [payload(2 * MIB) for _ in keys]
        with opened(folder, num_workers=1) as adapter:
            stored = [store(adapter, [k], [d])[0] for k, d in zip(keys, datas, strict=True)]
            left = others(folder)
            whole = load(adapter, keys, [2 * MIB] * 6)
            adapter.delete(keys[:1])
            after = store(adapter, keys[5:], datas[5:])[0]
            return {
                "stored": stored,
                "left": left,
                "equal": [d == w for d, w in zip(datas, whole, strict=True)],
                "after_a_delete": after and load(adapter, keys[5:], [2 * MIB]) == datas[5:],
                "store_errors": adapter.report_status()["store_errors"],
            }
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def damaged(folder):
    """Files that are not what they should be, one kind each; the others of the request arrive."""
    names = ["whole", "truncated", "longer", "missing", "empty", "folder", "io_error"]
    keys = [key(n) for n in range(len(names))]
    datas = [payload(MIB) for _ in keys]
    facts = {}
    with opened(folder) as adapter:
        store(adapter, keys, datas)
        paths = dict(zip(names, (adapter._path(k) for k in keys), strict=True))
        os.truncate(paths["truncated"], MIB - 4096)
        os.truncate(paths["longer"], MIB + 4096)
        os.truncate(paths["empty"], 0)
        for name in ("missing", "folder"):
            Path(paths[name]).unlink()
        Path(paths["folder"]).mkdir()
        inode = Path(paths["io_error"]).stat().st_ino
        real = os.preadv

        def failing(fd, buffers, offset):
            if os.fstat(fd).st_ino == inode and offset:  # only in the middle of the record
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        with mock.patch.object(record_files.os, "preadv", failing):
            loaded = load(adapter, keys, [MIB] * len(keys))
        facts["arrived"] = [
            name for name, data, want in zip(names, loaded, datas, strict=True) if data == want
        ]
        facts["missed"] = [name for name, data in zip(names, loaded, strict=True) if data is None]
        facts["found"] = dict(zip(names, find(adapter, keys), strict=True))
        Path(paths["folder"]).rmdir()
        store(adapter, keys, datas)
        healed = load(adapter, keys, [MIB] * len(keys))
        facts["healed"] = [name for name, a, b in zip(names, healed, datas, strict=True) if a == b]
        status = adapter.report_status()
        facts["counted"] = {k: status[k] for k in ("missing", "wrong_size", "read_errors")}
        on_disk = sum(path.stat().st_size for path in records(folder))
        facts["bytes"] = [status["bytes"] - on_disk, adapter.get_usage().total_bytes_used - on_disk]
        facts["descriptors"] = len(adapter._descriptors)
    return facts


def without_direct(folder):
    """File systems that refuse O_DIRECT at open, and those that take it and refuse the transfer."""
    real_open, real_read, real_write = os.open, os.preadv, os.pwrite

    def refusing_open(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **named)

    def refusing(transfer):
        import fcntl

        def call(fd, *rest):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return transfer(fd, *rest)

        return call

    patches = {
        "open": {"open": refusing_open},
        "transfer": {"preadv": refusing(real_read), "pwrite": refusing(real_write)},
    }
    facts = {}
    for name, patch in patches.items():
        data = payload(MIB)
        with mock.patch.multiple(record_files.os, **patch):
            with opened(folder / name) as adapter:
                facts[f"{name} write"] = store(adapter, [key(1)], [data])[0]
            with opened(folder / name) as adapter:
                facts[f"{name} read"] = load(adapter, [key(1)], [MIB]) == [data]
                facts[f"{name} direct"] = adapter.report_status()["use_odirect"]
                facts[f"{name} left"] = others(folder / name)
    return facts


def limited(folder):
    """The limit holds on the disk, the least recently used go first, and the start knows it all."""
    size = MIB
    keys = [key(n) for n in range(24)]
    limit = {"max_capacity_gb": 8 * size / (1 << 30)}
    data = payload(size)
    facts = {"most": 0}
    with opened(folder, **limit) as adapter:
        for number, each in enumerate(keys[:12]):
            assert store(adapter, [each], [data])[0]
            facts["most"] = max(facts["most"], len(records(folder)))
            if number == 7:
                load(adapter, keys[:1], [size])  # the oldest one is used
        facts["kept"] = [n for n, there in enumerate(find(adapter, keys)) if there]
        held = lookup(adapter, keys[5:6])
        for each in keys[12:20]:
            store(adapter, [each], [data])
        facts["locked_kept"] = held == find(adapter, keys[5:6]) == [True]
        adapter.delete(keys[5:6])
        facts["locked_undeleted"] = find(adapter, keys[5:6])
        lookup(adapter, keys)
        facts["all_locked"] = store(adapter, keys[20:21], [data])
        adapter.submit_unlock([*keys, keys[5]])
        facts["too_large"] = store(adapter, keys[21:22], [payload(9 * size)])
        status, usage = adapter.report_status(), adapter.get_usage()
        facts["no_room"] = status["no_room"]
        facts["bytes"] = [status["bytes"], usage.total_bytes_used, usage.total_capacity_bytes]
        facts["evicted"] = [status["evicted"], status["evicted_bytes"]]
        before = sorted(n for n, there in enumerate(find(adapter, keys)) if there)
    with opened(folder, **limit) as adapter:
        facts["same_after_restart"] = before == [
            n for n, there in enumerate(find(adapter, keys)) if there
        ]
        facts["usage_after_restart"] = adapter.get_usage().total_bytes_used
    with opened(folder, max_capacity_gb=3 * size / (1 << 30)) as adapter:
        facts["lower_limit"] = [len(records(folder)), adapter.get_usage().total_bytes_used]
    return facts


def evicted_by_lmcache(folder):
    """LMCache's own eviction of an adapter frees space, of records from before the start too."""
    keys, size = [key(n) for n in range(10)], 64 * KIB
    with opened(folder) as adapter:
        for number, each in enumerate(keys):
            store(adapter, [each], [payload(size)])
            os.utime(adapter._path(each), ns=(number, number))
    with opened(folder, max_capacity_gb=10 * size / (1 << 30)) as adapter:
        config = EvictionConfig("LRU", trigger_watermark=0.8, eviction_ratio=0.3)
        state = L2AdapterEvictionState(0, adapter, config)
        L2EvictionController([state])._check_and_evict(state)
        return {
            "kept": [n for n, there in enumerate(find(adapter, keys)) if there],
            "files": len(records(folder)),
            "usage": adapter.get_usage().total_bytes_used // size,
            "deleted": adapter.report_status()["deleted"],
        }


def shared(folder):
    """Records that another server writes are found where the folder is said to be shared."""
    facts = {}
    for name in (False, True):
        place = folder / str(name)
        with opened(place) as ours, opened(place) as theirs:
            ours.set_backend_identity("plugin", shared=name)
            data = payload(4096)
            store(theirs, [key(1)], [data])
            facts[str(name)] = [
                find(ours, [key(1), key(2)]),
                load(ours, [key(1)], [4096]) == [data],
            ]
            facts[f"{name} usage"] = ours.get_usage().total_bytes_used
            os.truncate(ours._path(key(1)), 100)
            facts[f"{name} damaged"] = [load(ours, [key(1)], [4096]), find(ours, [key(1)])]
    return facts


def endurance(folder):
    """Threads and descriptors before and after 10,000 operations."""

    def held():
        return [threading.active_count(), descriptors_held()]

    keys = [key(n) for n in range(8)]
    missing = [key(n) for n in range(100, 104)]
    data = payload(8192)
    with opened(folder, num_workers=8, sub_block_kb=4) as adapter:

        def turn():
            store(adapter, keys, [data] * len(keys))
            find(adapter, [*keys, *missing])
            arrived = load(adapter, [*keys, *missing], [8192] * 12)
            adapter.delete(keys[:4])
            return len(keys) + 12 + 12 + 4, arrived[:8] == [data] * 8

        for _ in range(5):  # until every worker has been started
            turn()
        before, operations, right = held(), 0, True
        while operations < 10_000:
            count, well = turn()
            operations, right = operations + count, right and well
        after = held()
        facts = {"before": before, "after": after, "operations": operations, "right": right}
        facts["open_tasks"] = [len(tasks) for tasks in adapter._open.values()]
        facts["done_tasks"] = [len(tasks) for tasks in adapter._done.values()]
    return facts


def closed_in_flight(folder):
    """Closing while reads and writes run: it ends, and afterwards nothing touches a buffer."""
    keys = [key(n) for n in range(16)]
    datas = [payload(MIB) for _ in keys]
    with opened(folder) as adapter:
        store(adapter, keys, datas)
    threads, descriptors = threading.active_count(), descriptors_held()
    slow = threading.Event()
    real = os.preadv

    def slowly(*arguments):
        slow.set()
        time.sleep(0.05)
        return real(*arguments)

    with mock.patch.object(record_files.os, "preadv", slowly):
        with opened(folder, num_workers=4, sub_block_kb=64) as adapter:
            buffers = [memory(MIB) for _ in keys]
            for number in range(0, 16, 4):
                adapter.submit_load_task(keys[number : number + 4], buffers[number : number + 4])
            writes = [memory(MIB)] * 30
            adapter.submit_store_task([key(n) for n in range(50, 80)], writes)
            slow.wait(PATIENCE_S)
        after = [bytes(buffer.byte_array) for buffer in buffers]
        open_tasks = sum(len(tasks) for tasks in adapter._open.values())
        results = [adapter.query_load_result(n) for n in range(4)]
        reported = [[bits.test(n) for n in range(4)] for bits in results]
        stores = adapter.pop_completed_store_tasks()
        time.sleep(0.2)
        refused = None
        try:
            adapter.submit_load_task(keys[:1], buffers[:1])
        except RuntimeError as error:
            refused = str(error)
        return {
            "untouched": after == [bytes(buffer.byte_array) for buffer in buffers],
            "open_tasks": open_tasks,
            "threads": threading.active_count() - threads,
            "descriptors": descriptors_held() - descriptors,
            "right": all(
                not ok or after[4 * task + n] == datas[4 * task + n]
                for task, bits in enumerate(reported)
                for n, ok in enumerate(bits)
            ),
            "missed": sum(not ok for bits in reported for ok in bits),
            "stores_ended": [result.is_successful() for result in stores.values()],
            "left": others(folder),
            "refused": refused,
        }


def configured(folder):
    """What LMCache says to a wrong parameter, and what it takes."""
    facts = {}
    for name, wrong in {
        "unknown": {"base_path": str(folder), "worker": 3},
        "no_folder": {},
        "workers": {"base_path": str(folder), "num_workers": 0},
    }.items():
        try:
            make({**PLUGIN, "adapter_params": wrong}).close()
        except ValueError as error:
            facts[name] = str(error)
    without = {name: value for name, value in PLUGIN.items() if name != "config_class_name"}
    adapter = make({**without, "adapter_params": {"base_path": str(folder)}})
    facts["by_convention"] = adapter.report_status()["is_healthy"]
    adapter.close()
    facts["closed"] = adapter.report_status()["is_healthy"]
    return facts


def counted(folder):
    """The adapter's counters in LMCache's own Prometheus page."""
    init_otel_metrics(start_http_server=False)
    with opened(folder) as adapter:
        data = payload(256 * KIB)
        store(adapter, [key(1)], [data])
        load(adapter, [key(1), key(2)], [len(data)] * 2)
        status = adapter.report_status()
    lines = generate_latest().decode().splitlines()
    shown = {
        line.split("{")[0].split()[0].removeprefix("kvlab_parallel_fs_"): float(line.split()[-1])
        for line in lines
        if line.startswith("kvlab_parallel_fs_")
    }
    names = ("loaded", "loaded_bytes", "missing", "stored", "stored_bytes", "pieces")
    return {name: [status[name], shown.get(f"{name}_total")] for name in names}


SCENARIOS = [
    *(round_trip, exchange, storm, killed, full, damaged, without_direct, limited),
    *(evicted_by_lmcache, shared, endurance, closed_in_flight, configured, counted),
]


def main(chosen):
    facts = {}
    with tempfile.TemporaryDirectory(dir=chosen[0]) as root:
        for scenario in SCENARIOS:
            if chosen[1:] and scenario.__name__ not in chosen[1:]:
                continue
            began = time.monotonic()
            folder = Path(root) / scenario.__name__
            folder.mkdir()
            facts[scenario.__name__] = scenario(folder)
            print(f"{scenario.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
