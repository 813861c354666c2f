"""The fake LMCache server: chunks by hash chain in L1 (memory) and L2 (files), both LRU."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fake_stack import lines
from tests.fake_stack.base import FakeServer
from tests.fake_stack.settings import Settings
from tests.fake_stack.wire import Handler, Reply, Request

P = "lmcache_mp_"
RANK = "0x01000100"
_NAME = re.compile(r"(?P<model>.+)@0x[0-9a-f]+@0@(?P<hash>[0-9a-f]+)\.data")


def chain(token_ids: Sequence[int], size: int) -> list[str]:
    """A hash for each whole piece of ``size`` tokens; each covers all tokens before it too."""
    hashes: list[str] = []
    above = b""
    for start in range(0, len(token_ids) - size + 1, size):
        piece = ",".join(map(str, token_ids[start : start + size])).encode()
        above = hashlib.blake2b(above + b"|" + piece, digest_size=32).digest()
        hashes.append(above.hex())
    return hashes


class FakeLmcache(FakeServer):
    role = "lmcache"
    health = "/healthcheck"

    def __init__(self, settings: Settings, l2_path: Path | None, *, echo: bool = False):
        super().__init__(settings, echo=echo)
        self.l2_path = l2_path
        self.registered: dict[int, str] = {}
        if stale := self.fault("stale_id"):
            self.registered[int(stale.value or 11)] = settings.model
        self._l1: OrderedDict[str, None] = OrderedDict()
        self._l2: OrderedDict[str, None] = OrderedDict()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._pending = 0
        self._stores = 0
        self._clears = 0
        self._damaged = False
        """Whether the last lookup read a file whose bytes are not those written."""
        self._full = 0
        if full := self.fault("l1_full"):
            self._full = int(full.value or 1)
        self._writer: asyncio.Task[None] | None = None
        self.first_status = self.status()
        """What /status says before any worker has come."""

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("GET", "/"): self._root,
            ("GET", "/status"): self._status,
            ("GET", "/version"): self._version,
            ("GET", "/config"): self._config,
            ("POST", "/cache/clear"): self._clear,
            ("POST", "/fake/register"): self._register,
            ("POST", "/fake/lookup"): self._lookup,
            ("POST", "/fake/store"): self._store,
            ("POST", "/fake/die"): self._die,
        }

    async def before_listening(self) -> None:
        """Find what earlier servers left on disk, and begin to write."""
        self.say(*lines.lmcache(self.settings, str(self.l2_path) if self.l2_path else None))
        if self.l2_path is None:
            return
        (self.l2_path / ".tmp").mkdir(parents=True, exist_ok=True)
        found = sorted(self.l2_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for path in found:
            match = _NAME.fullmatch(path.name)
            if match and match["model"] == self._model_in_names:
                self._l2[match["hash"]] = None
        if odd := self.fault("odd_file"):
            (self.l2_path / (odd.value or "x.data")).write_bytes(b"\0" * 50)
        self._writer = asyncio.create_task(self._write_l2())

    async def stop(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        if self.running:
            self._spoil_records()
        await super().stop()

    def _spoil_records(self) -> None:
        """Leave the disk as an unclean end does, if a fault says so."""
        written = sorted(self.l2_path.glob("*.data")) if self.l2_path else []
        if cut := self.fault("cut_record"):
            for path in written[: cut.value or 1]:
                path.write_bytes(path.read_bytes()[: self.settings.chunk_bytes // 2])
        if lost := self.fault("lost_records"):
            for path in written[: lost.value or 1]:
                path.unlink()

    def _die_here(self, code: int) -> None:
        if self._writer is not None:
            self._writer.cancel()
        super()._die_here(code)

    # The cache.

    def lookup(self, token_ids: Sequence[int], *, miss: bool, hit: bool) -> tuple[int, int]:
        """Tokens of the prefix that L1 holds, and that L2 adds; they are loaded and counted."""
        size, groups = self.settings.chunk_tokens, self.settings.object_groups
        hashes = chain(token_ids[:-1], size)  # the last token is always computed
        l1 = l2 = 0
        self._damaged = False
        if not miss:
            l1 = _leading(hashes, self._l1)
            for key in hashes[:l1]:
                self._l1.move_to_end(key)
            l2 = len(hashes) - l1 if hit else self._load_l2(hashes[l1:])
        self._count("lookup_requested_tokens", len(hashes) * size)
        self._count("lookup_hit_tokens", (l1 + l2) * size)
        self._count("lookups_requests", 1)
        self._count("lookup_hit_l1_tokens", l1 * size)
        self._count("lookup_hit_l2_tokens", l2 * size)
        self._count("lookup_hit_l1_keys", l1 * groups)
        self._count("lookup_hit_l2_keys", l2 * groups)
        if l1 + l2:
            for name in ("num_submitted_retrieves", "num_finished_retrieves"):
                self.series.add(f"{P}{name}_total", 1, device="cpu")
            self._count("num_chunks_loaded", (l1 + l2) * groups)
            self.series.add(f"{P}l1_read_chunks_total", (l1 + l2) * groups, l1_tag="_default")
        return l1 * size, l2 * size

    def _load_l2(self, hashes: Sequence[str]) -> int:
        """How many of these L2 gives; L1 keeps them only if it is set to."""
        if self.l2_path is None or not hashes:
            return 0
        groups = self.settings.object_groups
        self.series.add(f"{P}l2_prefetch_lookup_requests_total", 1)
        self.series.add(f"{P}l2_prefetch_lookup_objects_chunks_total", len(hashes) * groups)
        wanted = [key for key in hashes if key in self._l1 or key in self._l2]
        wanted = wanted[: _leading(hashes, wanted)]
        from_l2 = [key for key in wanted if key not in self._l1]
        if not from_l2:
            return len(wanted)
        self.series.add(f"{P}l2_prefetch_load_submitted_requests_total", 1)
        self.series.add(
            f"{P}l2_prefetch_load_submitted_objects_chunks_total", len(from_l2) * groups
        )
        loaded = [key for key in from_l2 if self._read_files(key)]
        if lost := len(from_l2) - len(loaded):
            self.series.add(
                f"{P}l2_prefetch_failure_chunks_total",
                lost * groups,
                model_name=self.settings.model,
                reason="load_failed",
            )
        self.series.add(f"{P}l2_load_completed_requests_total", 1, l2_name="fs")
        self.series.add(f"{P}l2_prefetch_load_completed_chunks_total", len(loaded) * groups)
        self.series.observe(f"{P}l2_load_throughput_GB_per_second", 0.1, l2_name="fs")
        for key in loaded:
            self._l2.move_to_end(key)
            if self.settings.l1_keeps_loaded:
                self._keep_in_l1(key)
        return _leading(wanted, [key for key in wanted if key in loaded or key in self._l1])

    def store(self, token_ids: Sequence[int], first_chunk: int, skip_every: int | None) -> None:
        """Keep the chunks that no tier has, from ``first_chunk`` on."""
        size = self.settings.chunk_tokens
        new = 0
        for place, key in enumerate(chain(token_ids, size)):
            skipped = skip_every is not None and place % skip_every == skip_every - 1
            if place < first_chunk or skipped or key in self._l1 or key in self._l2:
                continue
            if self._keep_in_l1(key):
                new += 1
                self._submit(key)
        if new:
            for name in ("num_submitted_stores", "num_finished_stores"):
                self.series.add(f"{P}{name}_total", 1, device="cpu")
            self.say(lines.stored(new * size))

    def _keep_in_l1(self, key: str) -> bool:
        """Whether there was room; then the least recently used go, if the watermark is passed."""
        settings, groups = self.settings, self.settings.object_groups
        if self._full > 0 or len(self._l1) >= settings.l1_chunks:
            self._full -= 1
            self.series.add(
                f"{P}l1_allocation_failure_chunks_total",
                groups,
                during="l1_store",
                model_name=settings.model,
            )
            return False
        self._l1[key] = None
        self.series.add(f"{P}l1_write_chunks_total", groups, l1_tag="_default")
        self.series.add(f"{P}l1_eviction_loop_ticks_total", 1)
        if len(self._l1) > settings.l1_watermark * settings.l1_chunks:
            count = min(len(self._l1), math.ceil(settings.l1_ratio * len(self._l1)))
            for _ in range(count):
                self._l1.popitem(last=False)
            self.series.add(f"{P}l1_eviction_loop_triggered_total", 1)
            self.series.add(f"{P}l1_evicted_chunks_total", count * groups, l1_tag="_default")
        return True

    def _submit(self, key: str) -> None:
        if self.l2_path is None:
            return
        groups = self.settings.object_groups
        self.series.add(f"{P}l2_store_submitted_requests_total", 1)
        self.series.add(f"{P}l2_store_submitted_objects_chunks_total", groups)
        self._pending += 1
        self._queue.put_nowait(key)

    async def _write_l2(self) -> None:
        """Write what was submitted, one chunk after the other."""
        hang, fails = self.fault("stores_hang"), self.fault("store_fails")
        failing = (fails.value or [1]) if fails else []
        while True:
            key = await self._queue.get()
            await asyncio.sleep(self.settings.l2_store_s)
            if hang and self._stores >= (hang.value or 0):
                await asyncio.Event().wait()
            self._stores += 1
            if self._stores not in failing:
                self._write_files(key)
                self.series.add(
                    f"{P}l2_store_completed_objects_chunks_total", self.settings.object_groups
                )
            self.series.add(f"{P}l2_store_completed_requests_total", 1, l2_name="fs")
            self._pending -= 1

    # Files.

    @property
    def _model_in_names(self) -> str:
        return self.settings.model.replace("/", "-SEP-")

    def _files(self, key: str) -> list[Path]:
        assert self.l2_path is not None
        return [
            self.l2_path / f"{self._model_in_names}@{RANK}@{group}@{key}.data"
            for group in range(self.settings.object_groups)
        ]

    def _write_files(self, key: str) -> None:
        for path in self._files(key):
            temporary = path.parent / ".tmp" / path.name
            temporary.write_bytes(self._content(key))
            temporary.replace(path)
        self._l2[key] = None
        while self.settings.l2_chunks is not None and len(self._l2) > self.settings.l2_chunks:
            old, _ = self._l2.popitem(last=False)
            for path in self._files(old):
                path.unlink(missing_ok=True)
            self.series.add(
                f"{P}l2_evicted_objects_chunks_total", self.settings.object_groups, l2_name="fs"
            )

    def _content(self, key: str) -> bytes:
        return bytes.fromhex(key)[:1] * self.settings.chunk_bytes

    def _read_files(self, key: str) -> bool:
        """Whether the chunk is there; its bytes are not checked, as the real adapter does not."""
        with contextlib.suppress(FileNotFoundError):
            if not self.fault("load_fails"):
                for path in self._files(key):
                    self._damaged |= path.read_bytes() != self._content(key)
                return True
        self._l2.pop(key, None)
        return False

    def _count(self, name: str, amount: int) -> None:
        self.series.add(f"{P}{name}_total", amount, cache_salt="", model_name=self.settings.model)

    def refresh_gauges(self) -> None:
        settings, groups = self.settings, self.settings.object_groups
        share = len(self._l1) / settings.l1_chunks
        used = len(self._l1) * groups * settings.chunk_bytes
        labels = {"backend": "dram", "l1_tag": "_default"}
        self.series.set(f"{P}l1_memory_usage_bytes", used, **labels)
        self.series.set(f"{P}l1_usage_ratio", share, **labels)
        if self.l2_path is not None:
            held = len(self._l2) * groups * settings.chunk_bytes
            self.series.set(f"{P}l2_usage_bytes", held, l2_name="fs")

    # What it answers.

    async def send_health(self, reply: Reply) -> None:
        await reply.json({"status": "healthy"})

    async def _root(self, request: Request, reply: Reply) -> None:
        await reply.json({"status": "ok", "service": "LMCache HTTP API"})

    async def _version(self, request: Request, reply: Reply) -> None:
        version = self.fault("version")
        await reply.json(version.value if version else lines.VERSION)

    async def _config(self, request: Request, reply: Reply) -> None:
        settings = self.settings
        await reply.json(
            {
                "mp": {"chunk_size": settings.chunk_tokens, "hash_algorithm": "blake3"},
                "storage_manager": {
                    "eviction_config": {
                        "trigger_watermark": settings.l1_watermark,
                        "eviction_ratio": settings.l1_ratio,
                    }
                },
            }
        )

    async def _clear(self, request: Request, reply: Reply) -> None:
        self._clears += 1
        broken = self.fault("clear_not_done")
        if not broken or (broken.value and self._clears > broken.value):
            self._l1.clear()
        await reply.json({"status": "ok", "cleared": {"tier": "l1"}})

    async def _register(self, request: Request, reply: Reply) -> None:
        asked = request.json()
        self.registered[asked["id"]] = asked["model"]
        self.say(lines.registered(asked["id"]))
        await reply.json({"chunk_tokens": self.settings.chunk_tokens})

    async def _lookup(self, request: Request, reply: Reply) -> None:
        asked = request.json()
        l1, l2 = self.lookup(asked["token_ids"], miss=asked["miss"], hit=asked["hit"])
        await reply.json({"l1": l1, "l2": l2, "damaged": self._damaged})

    async def _store(self, request: Request, reply: Reply) -> None:
        asked = request.json()
        self.store(asked["token_ids"], asked["first_chunk"], asked["skip_every"])
        await reply.json({})

    async def _die(self, request: Request, reply: Reply) -> None:
        self.die(request.json()["code"])

    async def _status(self, request: Request, reply: Reply) -> None:
        await reply.json(self.status())

    def status(self) -> dict[str, Any]:
        """The part of LMCache's /status that anyone reads."""
        settings = self.settings
        used = len(self._l1) * settings.chunk_bytes * settings.object_groups
        total = settings.l1_chunks * settings.chunk_bytes * settings.object_groups
        l1 = {
            "is_healthy": True,
            "total_object_count": len(self._l1) * settings.object_groups,
            "memory_used_bytes": used,
            "memory_total_bytes": total,
            "memory_usage_ratio": used / total,
        }
        store = {
            "is_healthy": True,
            "pending_keys_count": self._queue.qsize(),
            "in_flight_task_count": self._pending - self._queue.qsize(),
            "num_l2_adapters": int(self.l2_path is not None),
        }
        adapters = [
            {"is_healthy": True, "type": "FSL2Adapter", "base_path": str(self.l2_path)}
        ] * int(self.l2_path is not None)
        layers = [
            {"kernel_group_idx": group, "engine_group_idx": group, "object_group_idx": group}
            for group in range(settings.object_groups)
        ]
        meta = {
            str(known): {
                "model_name": model,
                "world_size": 1,
                "kv_cache_layout": {"kernel_groups": layers},
            }
            for known, model in self.registered.items()
        }
        old = self.fault("old_status") is not None
        return {
            "is_healthy": True,
            "engine_type": "MPCacheServer",
            "chunk_size": settings.chunk_tokens,
            "hash_algorithm": "blake3",
            "active_sessions": 0,
            "storage_manager": {
                "is_healthy": True,
                "l1_manager": l1,
                "store_controller": store,
                "l2_adapters": adapters,
            },
            "active_prefetch_jobs": 0,
            "worker_liveness": {"enabled": True, "tracked_instances": len(self.registered)},
            "registered_gpu_ids": list(self.registered),
            ("gpu_context_meta" if old else "cache_context_meta"): meta,
        }


def _leading(hashes: Sequence[str], held: Any) -> int:
    """How many of the first hashes are held, without a gap."""
    count = 0
    while count < len(hashes) and hashes[count] in held:
        count += 1
    return count
