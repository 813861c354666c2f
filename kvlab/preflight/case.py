"""What the rules look at: a profile, and whatever is known of host, logs and disk. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from kvlab.errors import UsageError
from kvlab.profile import Profile
from kvlab.sizing.model import DEFAULT_BLOCK_TOKENS, Arithmetic, arithmetic
from kvlab.units import GIB

CPU_WORKER_GIB = 2.0
"""Memory of one server process before its cache: measured with vLLM 0.32 and LMCache 0.5 on CPU."""
RESERVE_SHARE = 0.05
"""Share of the memory that stays with the system, but at least one GiB."""
DISK_MARGIN = 1.3
"""L2 is given this much more than the records need."""
UNIFIED = ("GB10", "GH200", "GB200", "GB300", "Tegra", "Orin", "Thor")
"""GPUs whose memory is the host's, by a part of their name."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was tried on this machine before the rules run; None: not tried, or not to be known."""

    engine_missing: str | None = None
    """Why the engine environment cannot be used."""
    engine_hint: str | None = None
    l2_path: str | None = None
    l2_writable: bool | None = None
    l2_records: int | None = None
    l2_bytes: int | None = None
    l2_foreign: str | None = None
    """How the records' own manifest contradicts the profile."""
    direct_io: str | None = None
    """Why one aligned file could not be written and read with O_DIRECT; empty: it could."""
    name_limit: int | None = None
    """Bytes that a file name may have there."""
    shm_gib: float | None = None
    ports: Mapping[int, str] = field(default_factory=dict)
    """Ports of the profile that are in use, and by whom."""
    gpus_now: tuple[Mapping[str, Any], ...] | None = None
    """Clock, use and throttling of every GPU, as ``kvlab.gpu.now`` gives them."""
    leftovers: int | None = None
    """Servers that killed runs of kvlab left behind."""
    config: Mapping[str, Any] | None = None
    """The model's config.json, where it is on this machine."""
    cached_block: int | None = None
    """N as an earlier run of the same image, model, number types and speculation saw it."""
    cached_run: str | None = None
    lmcache_versions: Mapping[str, str] = field(default_factory=dict)
    """LMCache's version in each running container of the profile, by its name."""
    parsed: tuple[Mapping[str, Any], ...] | None = None
    """What the engine's own parsers refuse: ``service``, ``word``, ``problem``, ``nearest``."""
    parsers: str | None = None
    """Whose parsers they were, with versions."""


@dataclass(frozen=True, slots=True)
class Block:
    """N, vLLM's attention block size, and how it is known."""

    tokens: int | None
    source: Literal["log", "cache", "computed", "unknown"]
    detail: str = ""

    @property
    def text(self) -> str:
        said = {
            "log": "vLLM's log says so",
            "cache": f"an earlier run saw it: {self.detail}",
            "computed": "computed from the model's configuration",
            "unknown": "no log, no earlier run and no model configuration says it",
        }
        return said[self.source]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One profile on one machine, for the experiments that are about to run."""

    profile: Profile
    host: Mapping[str, Any] = field(default_factory=dict)
    """As ``kvlab.host.facts`` gives it; a fact that is missing is unknown."""
    logs: tuple[Mapping[str, Any], ...] = ()
    """One mapping of facts per log, as ``kvlab.stack.logs`` reads it."""
    probe: Probe = field(default_factory=Probe)
    experiments: tuple[str, ...] = ("two-round",)

    # What the logs say

    def said(self, name: str) -> Iterator[Any]:
        """A fact as each log states it, in the order in which the logs were given."""
        for facts in self.logs:
            if facts.get(name) is not None:
                yield facts[name]

    def fact(self, name: str) -> Any:
        """The fact as the last log states it; None when none does."""
        return next(iter(reversed(list(self.said(name)))), None)

    # N

    @cached_property
    def block(self) -> Block:
        """N: from a log, else from an earlier run, else computed, else unknown."""
        if (stated := self.fact("attention_block_tokens")) is not None:
            return Block(stated, "log")
        if self.probe.cached_block is not None:
            return Block(self.probe.cached_block, "cache", self.probe.cached_run or "")
        computed = sizes(self.profile, self.probe.config)
        if computed:
            return Block(computed.block_tokens, "computed")
        return Block(None, "unknown")

    @cached_property
    def sizes(self) -> Arithmetic | None:
        """The model's cache sizes at the N in use; None where its configuration is not known."""
        return sizes(self.profile, self.probe.config, block_tokens=self.n)

    @property
    def n(self) -> int:
        """N where a log or an earlier run knows it, else what the profile says."""
        known = self.block.source in ("log", "cache")
        return (
            self.block.tokens if known and self.block.tokens else self.profile.engine.block_tokens
        )

    @property
    def groups(self) -> dict[str, int]:
        """The block of every KV group by name, as far as a log or an earlier run tells."""
        known = {"attention": self.n}
        if (scheduler := self.fact("cache_block_tokens")) is not None:
            known["scheduler"] = scheduler
        for number, tokens in enumerate(self.fact("group_block_tokens") or ()):
            known[f"group {number}"] = tokens
        return known

    # Where it runs

    @property
    def in_containers(self) -> bool:
        return self.profile.runtime == "docker" and self.profile.container is not None

    @property
    def on_cpu(self) -> bool:
        """The engine computes on the CPU, as far as the profile shows it."""
        return computes_on_cpu(self.profile)

    @property
    def gpus(self) -> list[Mapping[str, Any]] | None:
        """The host's GPUs; None when they are not known."""
        return self.host.get("gpus")

    @property
    def instances(self) -> int:
        """The most vLLM servers that run at once."""
        shared = self.profile.experiments.shared_cache.instances
        return shared if "shared-cache" in self.experiments else 1

    # Memory, in GiB

    @property
    def memory_gib(self) -> float | None:
        """The memory that may be used: the host's, or what a limit leaves of it."""
        limit = (self.host.get("limits") or {}).get("memory_gib")
        return limit or self.host.get("memory_gib")

    @property
    def engine_gib(self) -> float:
        """Host memory that vLLM takes, as far as settings tell; 0 where its GPU has its own."""
        engine = self.profile.engine
        if self.on_cpu:
            space = float(engine.env.get("VLLM_CPU_KVCACHE_SPACE") or 4)
            return self.instances * (space + CPU_WORKER_GIB)
        if self.gpus and self.is_unified and self.memory_gib:
            share = float(engine.flags.get("gpu-memory-utilization", 0.9))
            return self.instances * share * self.memory_gib
        return 0.0

    @property
    def is_unified(self) -> bool:
        """CPU and GPU share one memory."""
        names = [str(gpu.get("name")) for gpu in self.gpus or ()]
        return any(part in name for name in names for part in UNIFIED)

    @property
    def cache_gib(self) -> float:
        """Host memory of LMCache's server."""
        return self.profile.cache.l1_size_gb + (CPU_WORKER_GIB if self.on_cpu else 0.0)

    @property
    def reserve_gib(self) -> float:
        return max(1.0, RESERVE_SHARE * (self.memory_gib or 0.0))

    # The working set

    @property
    def ceiling_tokens(self) -> int:
        """Tokens of one context that whole chunks can restore."""
        return self.profile.workload.restorable_tokens(self.profile.cache.chunk_tokens)

    @property
    def chunk_bytes(self) -> int | None:
        """Bytes that one chunk takes in L1 and L2; None where the model's sizes are unknown."""
        if self.sizes is None:
            return None
        return self.sizes.chunk_bytes(self.profile.cache.chunk_tokens) * self.sizes.workers

    @property
    def fill_bytes(self) -> int | None:
        """Bytes of all whole chunks after the fill round."""
        work = self.profile.workload
        chunks = work.context_tokens // self.profile.cache.chunk_tokens
        return None if self.chunk_bytes is None else work.contexts * chunks * self.chunk_bytes

    @property
    def l2_need_bytes(self) -> int | None:
        """Bytes on L2 after both rounds of one launch, with a margin.

        The measure round stores the chunks behind what it restored once more, unless they return.
        """
        if self.fill_bytes is None or self.chunk_bytes is None:
            return None
        work, chunk = self.profile.workload, self.profile.cache.chunk_tokens
        again = 0
        if work.shape == "prefix_suffix":
            again = (work.context_tokens - self.ceiling_tokens) // chunk
        more = work.contexts * again * self.chunk_bytes
        return math.ceil((self.fill_bytes + more) * DISK_MARGIN)

    @property
    def l1_bytes(self) -> float:
        return self.profile.cache.l1_size_gb * GIB

    @property
    def disk(self) -> Mapping[str, Any]:
        """The mount that holds L2; empty when it is not known."""
        return self.host.get("disk") or {}

    @property
    def l2_named(self) -> bool:
        """The profile names L2's folder, which then outlives a run."""
        return self.profile.cache.l2 is not None and self.profile.cache.l2.base_path is not None


def sizes(
    profile: Profile, config: Mapping[str, Any] | None, *, block_tokens: int | None = None
) -> Arithmetic | None:
    """The cache sizes of the profile's model by its config.json; None where none follow.

    ``block_tokens`` is N where it is known; None computes it as vLLM does.
    """
    if config is None:
        return None
    flags = profile.engine.flags
    text = config.get("text_config") or config
    model_type = flags.get("dtype", "auto")
    if model_type == "auto":
        model_type = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    state_type = flags.get("mamba-ssm-cache-dtype")
    try:
        return arithmetic(
            config,
            dtype=str(model_type),
            state_dtype=None if state_type == "auto" else state_type,
            cache_dtype=flags.get("kv-cache-dtype"),
            tensor_parallel=int(flags.get("tensor-parallel-size") or 1),
            block_tokens=block_tokens,
            kernel_block_tokens=int(flags.get("block-size") or DEFAULT_BLOCK_TOKENS),
            speculative_tokens=speculative_tokens(profile),
        )
    except UsageError:  # another kind of model, or a block that does not hold its state
        return None


def computes_on_cpu(profile: Profile) -> bool:
    """Whether the servers that kvlab starts for the profile use no GPU, by its settings.

    A share of a GPU's memory is asked for in profiles of one alone.
    """
    container = profile.container
    if profile.runtime == "docker" and container is not None:
        return container.gpus is None
    return profile.runtime == "process" and "gpu-memory-utilization" not in profile.engine.flags


def speculative_tokens(profile: Profile) -> int:
    """Tokens that speculative decoding drafts; 0 without it."""
    given = profile.engine.flags.get("speculative-config")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            return 0
    return int(given.get("num_speculative_tokens") or 1) if isinstance(given, Mapping) else 0


def summary(case: Case) -> dict[str, Any]:
    """What the rules took as given, as JSON values; None: not known."""
    profile = case.profile
    return {
        "block_tokens": case.block.tokens,
        "block_source": case.block.source,
        "block_detail": case.block.detail or None,
        "chunk_tokens": profile.cache.chunk_tokens,
        "context_tokens": profile.workload.context_tokens,
        "ceiling_tokens": case.ceiling_tokens,
        "working_set_tokens": profile.working_set_tokens,
        "l0_tokens": case.fact("kv_cache_tokens") or profile.engine.kv_cache_tokens,
        "chunk_bytes": case.chunk_bytes,
        "fill_bytes": case.fill_bytes,
        "l1_bytes": round(case.l1_bytes),
        "l2_need_bytes": case.l2_need_bytes if profile.cache.l2 else None,
        "l2_free_gib": case.disk.get("free_gib"),
    }
