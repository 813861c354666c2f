"""The fake vLLM: an L0 of blocks, delays that are set, answers that are hashes of the prompt."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fake_stack import lines, wire
from tests.fake_stack.base import FakeServer
from tests.fake_stack.lmcache import chain
from tests.fake_stack.settings import Schedule, Settings
from tests.fake_stack.stream import Stream
from tests.fake_stack.wire import Handler, Reply, Request

TOP = 5
COUNTERS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Where a prompt's tokens came from."""

    local: int
    external: int
    hit_chunks: int
    """Whole chunks that LMCache holds already: they are not stored again."""


class FakeVllm(FakeServer):
    role = "vllm"

    def __init__(self, settings: Settings, lmcache_url: str | None, *, echo: bool = False):
        super().__init__(settings, echo=echo)
        self.lmcache_url = lmcache_url
        self.connected = False
        self.requests = 0
        self._resets = 0
        odd_size, odd_block = self.fault("kv_cache_tokens"), self.fault("block_tokens")
        self.kv_cache_tokens = int(odd_size.value) if odd_size else settings.l0_tokens
        self.stated_block = int(odd_block.value) if odd_block else settings.block_tokens
        self._l0: OrderedDict[str, None] = OrderedDict()
        self._seen: set[tuple[int, ...]] = set()
        self._schedule = Schedule(settings.faults)
        self._computing = asyncio.Lock()
        self._labels = {"engine": "0", "model_name": settings.served_name}
        for name in COUNTERS:
            self._count(name, 0)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self._count("prompt_tokens_by_source", 0, source=source)
        self.series.set("vllm:cache_config_info", 1, **self._cache_config())

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("GET", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/v1/completions"): self._complete,
        }

    async def before_listening(self) -> None:
        """Say how large the cache is, then register with LMCache."""
        self.say(*lines.vllm(self.settings, self.stated_block, self.kv_cache_tokens))
        if self.lmcache_url is None or self.fault("never_registered"):
            return
        instance_id = random.SystemRandom().getrandbits(60)
        self.say(*lines.connecting(self.settings, instance_id))
        body = {"id": instance_id, "model": self.settings.model}
        await wire.call(self.lmcache_url, "POST", "/fake/register", body)
        self.connected = True

    # Where tokens come from.

    async def _prefill(self, ids: list[int], faults: dict[str, Any]) -> Prefill:
        """Look the prompt up in L0, then in LMCache; restore, then compute the rest."""
        began = time.monotonic()
        settings = self.settings
        local = self._local_hit(ids, everything="warm_local" in faults)
        found = await self._look_up(ids, faults)
        l1, l2 = found["l1"], found["l2"]
        if found.get("damaged"):
            faults.setdefault("wrong_logprobs", None)
        external = max(0, l1 + l2 - local)
        from_l2 = min(external, l2)
        restoring_s = settings.ttft_s(external, l1=external - from_l2, l2=from_l2)
        await asyncio.sleep(max(0.0, restoring_s - (time.monotonic() - began)))
        async with self._computing:
            await asyncio.sleep(settings.token_s * (len(ids) - local - external))
        if "extra_delay" in faults:
            await asyncio.sleep(faults["extra_delay"] or 0.05)
        self._keep_in_l0(ids)
        self._count_prompt(len(ids), local, external)
        return Prefill(local, external, (l1 + l2) // settings.chunk_tokens)

    def _local_hit(self, ids: list[int], *, everything: bool) -> int:
        if not self.settings.prefix_caching:
            return 0
        blocks = chain(ids[:-1], self.settings.block_tokens)  # one token is always computed
        held = 0
        while held < len(blocks) and (everything or blocks[held] in self._l0):
            held += 1
        return held * self.settings.block_tokens

    def _keep_in_l0(self, ids: list[int]) -> None:
        """The prompt's blocks are the latest; of one prompt the last blocks go first."""
        for block in reversed(chain(ids, self.settings.block_tokens)):
            self._l0.pop(block, None)
            self._l0[block] = None
        while len(self._l0) > self.kv_cache_tokens // self.settings.block_tokens:
            self._l0.popitem(last=False)

    async def _look_up(self, ids: list[int], faults: dict[str, Any]) -> dict[str, int]:
        if not self.connected:
            return {"l1": 0, "l2": 0}
        if "lmcache_dies" in faults:
            await self._tell_lmcache("/fake/die", {"code": faults["lmcache_dies"] or -9})
        body = {"token_ids": ids, "miss": "zero_hits" in faults, "hit": "warm_start" in faults}
        return await self._tell_lmcache("/fake/lookup", body) or {"l1": 0, "l2": 0}

    async def _store(self, ids: list[int], prefill: Prefill, faults: dict[str, Any]) -> None:
        if self.connected:
            skip = (faults["stores_missing"] or 2) if "stores_missing" in faults else None
            body = {"token_ids": ids, "first_chunk": prefill.hit_chunks, "skip_every": skip}
            await self._tell_lmcache("/fake/store", body)

    async def _tell_lmcache(self, path: str, body: Any) -> Any:
        """LMCache's answer; None when it has gone, which vLLM survives."""
        assert self.lmcache_url is not None
        try:
            return await wire.call(self.lmcache_url, "POST", path, body)
        except OSError:
            self.say(lines.unhealthy())
            return None

    # What it counts.

    def _count(self, name: str, amount: int, **labels: str) -> None:
        self.series.add(f"vllm:{name}_total", amount, **self._labels, **labels)

    def _count_prompt(self, tokens: int, local: int, external: int) -> None:
        self._count("prefix_cache_queries", tokens)
        self._count("prefix_cache_hits", local)
        if self.connected:
            self._count("external_prefix_cache_queries", tokens - local)
            self._count("external_prefix_cache_hits", external)
        self._count("prompt_tokens", tokens)
        self._count("prompt_tokens_cached", local + external)
        for source, amount in (
            ("local_compute", tokens - local - external),
            ("local_cache_hit", local),
            ("external_kv_transfer", external),
        ):
            self._count("prompt_tokens_by_source", amount, source=source)

    def _cache_config(self) -> dict[str, Any]:
        return {
            **self._labels,
            "block_size": self.stated_block,
            "cache_dtype": "auto",
            "enable_prefix_caching": self.settings.prefix_caching,
            "kv_cache_size_tokens": self.kv_cache_tokens,
            "num_gpu_blocks": self.kv_cache_tokens // self.settings.block_tokens,
        }

    # What it answers.

    async def _version(self, request: Request, reply: Reply) -> None:
        version = self.fault("version")
        await reply.json({"version": version.value if version else lines.VERSION})

    async def _models(self, request: Request, reply: Reply) -> None:
        wrong = self.fault("wrong_model")
        name = (wrong.value or "someone-elses-model") if wrong else self.settings.served_name
        card = {
            "id": name,
            "object": "model",
            "owned_by": "fake",
            "root": self.settings.model,
            "max_model_len": self.settings.max_model_len,
        }
        await reply.json({"object": "list", "data": [card]})

    async def _reset(self, request: Request, reply: Reply) -> None:
        if not self.settings.dev_endpoints or self.fault("reset_missing"):
            await reply.json({"detail": "Not Found"}, 404)
            return
        if self.fault("reset_denied"):
            await reply.json({"success": False})
            return
        self._resets += 1
        broken = self.fault("reset_not_done")
        if not broken or self._resets <= (broken.value or 0):
            self._l0.clear()
        if request.query.get("reset_external") == "true" and self.connected:
            await self._tell_lmcache("/cache/clear", {})
        await reply.json({"success": True})

    async def _complete(self, request: Request, reply: Reply) -> None:
        body = request.json()
        ids = list(body["prompt"])
        if refusal := self._refusal(body, ids):
            await reply.json({"error": refusal}, refusal["code"])
            return
        self.requests += 1
        faults = self._schedule.next(len(ids), seen=tuple(ids) in self._seen)
        self._seen.add(tuple(ids))
        if "hang_before_headers" in faults:
            await reply.hang()
        if "connection_lost" in faults:
            reply.drop()
        if "http_error" in faults:
            code = faults["http_error"] or 500
            error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}
            await reply.json({"error": {**error, "param": None, "code": code}}, code)
            return
        await self._answer(body, ids, faults, reply)

    def _refusal(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any] | None:
        """vLLM's error for a request that it does not take."""
        if body.get("model") != self.settings.served_name:
            message = f"The model `{body.get('model')}` does not exist."
            return {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
        if len(ids) + int(body.get("max_tokens", 1)) > self.settings.max_model_len:
            message = (
                f"This model's maximum context length is {self.settings.max_model_len} tokens."
            )
            return {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        return None

    async def _answer(
        self, body: dict[str, Any], ids: list[int], faults: dict[str, Any], reply: Reply
    ) -> None:
        began = time.monotonic()
        stream = Stream(reply, faults, model=self.settings.served_name)
        await stream.begin()
        for fault, code in (("exits", 1), ("killed", -9)):
            if fault in faults:
                value = faults[fault] or code
                self.die(-abs(value) if fault == "killed" else value)
        prefill = await self._prefill(ids, faults)
        self.series.observe(
            "vllm:time_to_first_token_seconds", time.monotonic() - began, **self._labels
        )
        asked = int(body.get("max_tokens", 1))
        count = (faults["wrong_length"] or 2) if "wrong_length" in faults else asked
        if "error_before_token" not in faults and "no_token" not in faults:
            await self._generate(body, ids, count, prefill, faults, stream)
        if "error_before_token" in faults or "error_after_token" in faults:
            await stream.error()
        elif "no_token" not in faults:
            await self._store(ids, prefill, faults)
            await self._send_usage(body, len(ids), count, prefill, faults, stream)
        await stream.end()

    async def _generate(
        self,
        body: dict[str, Any],
        ids: list[int],
        count: int,
        prefill: Prefill,
        faults: dict[str, Any],
        stream: Stream,
    ) -> None:
        context = list(ids)
        for place in range(count):
            if place:
                await asyncio.sleep(self.settings.output_token_s)
            top = self._top(context, restored=prefill.external > 0, faults=faults)
            last = place == count - 1
            await stream.token(
                top,
                first=place == 0,
                last=last,
                logprobs=body.get("logprobs"),
                name_ids=bool(body.get("return_tokens_as_token_ids")),
                return_ids=bool(body.get("return_token_ids")),
                prompt=ids,
            )
            context.append(top[0][0])

    def _top(
        self, context: Sequence[int], *, restored: bool, faults: dict[str, Any]
    ) -> list[tuple[int, float]]:
        """The likeliest next tokens with their logprobs: a function of all tokens before."""
        digest = hashlib.blake2b(",".join(map(str, context)).encode()).digest()
        dice = random.Random(digest)
        ids = dice.sample(range(1, 4096), TOP)
        best = -4.5 - dice.random()
        gaps = [0.0, *sorted(dice.uniform(0.06, 1.5) for _ in ids[1:])]
        noise = random.Random(self.requests).uniform(-1, 1) * self.settings.noise_nat
        if restored and "wrong_logprobs" in faults:
            noise -= faults["wrong_logprobs"] or 0.4
        top = [(token, best - gap + noise) for token, gap in zip(ids, gaps, strict=True)]
        if restored and "flipped_token" in faults:
            margin = faults["flipped_token"] or 0.01
            top[:2] = [(ids[1], best), (ids[0], best - margin)]
        return top

    async def _send_usage(
        self,
        body: dict[str, Any],
        tokens: int,
        count: int,
        prefill: Prefill,
        faults: dict[str, Any],
        stream: Stream,
    ) -> None:
        self._count("generation_tokens", count)
        self._count("request_success", 1, finished_reason="length")
        wanted = (body.get("stream_options") or {}).get("include_usage")
        if not wanted or "no_usage" in faults:
            return
        seen = tokens + int(faults.get("prompt_tokens") or 0)
        cached = prefill.local + prefill.external + int(faults.get("cached_tokens") or 0)
        usage: dict[str, Any] = {
            "prompt_tokens": seen,
            "total_tokens": seen + count,
            "completion_tokens": count,
        }
        if "null_details" in faults:
            usage["prompt_tokens_details"] = None
        elif self.settings.prompt_tokens_details and "no_details" not in faults:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await stream.usage(usage)
