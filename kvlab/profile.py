"""A profile: everything that a run needs, in one YAML file, checked whole before anything starts.

This is the only reader of profiles. An unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlab import plain_yaml, shapes
from kvlab.errors import ProfileError
from kvlab.rundir import sha256_json

SCHEMA = 1
MIN_CHUNKS = 4
"""A context shorter than this many chunks says little: its uncached tail weighs too much."""

CONTAINER_ROLES = ("baseline", "lmcache_server", "lmcache")

Scalar = str | int | float | bool | None


class Part(BaseModel):
    """Every part of a profile: frozen, and strict about unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class Model(Part):
    """What is served: a model that kvlab builds itself, or one named by its hub id."""

    source: Literal["built", "hub"]
    name: str = Field(min_length=1)
    """``built``: the folder's name below data/models; ``hub``: the id, e.g. ``org/model``."""
    preset: Literal["hybrid", "dense", "wide"] | None = None
    seed: int = 0
    layers: int | None = Field(default=None, ge=1)
    served_name: str = Field(min_length=1)
    vocabulary: tuple[int, int] = (256, 4096)
    """Token ids are drawn from this half-open range: ordinary tokens, none of them special."""
    hybrid: bool = False
    """Recurrent (Mamba or GDN) layers beside attention: state is cached per block."""

    @model_validator(mode="after")
    def _complete(self) -> Model:
        if self.source == "built" and self.preset is None:
            raise ValueError("a built model needs a preset: hybrid, dense or wide")
        if self.vocabulary[1] - self.vocabulary[0] < 1024 or self.vocabulary[0] < 0:
            raise ValueError("the vocabulary range must span at least 1,024 token ids")
        return self


class Engine(Part):
    """vLLM: the settings that kvlab reasons about, then every other flag as vLLM names it."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free one is chosen."""
    block_tokens: int = Field(ge=1)
    """N, the attention block size as vLLM's log must state it."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """The size of L0 that the log is expected to state, where known beforehand."""
    max_model_len: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    max_num_seqs: int = Field(default=16, ge=1)
    mamba_cache_mode: Literal["align", "all", "none"] | None = None
    prefix_caching: bool = True
    prompt_tokens_details: bool = True
    flags: dict[str, Any] = {}
    env: dict[str, str] = {}
    connector: Literal["kvlab", "stock"] = "stock"
    """kvlab: the CPU connector that keeps recurrent state right; stock: LMCache's own."""
    connector_config: dict[str, Any] = {}
    dev_endpoints: bool = False
    """Start vLLM with its development endpoints, so that L0 can be reset between probes."""


class L2(Part):
    """The disk tier: one LMCache adapter as its JSON configuration; base_path is set per launch."""

    adapter: dict[str, Any] = {"type": "fs", "relative_tmp_dir": ".tmp"}
    base_path: str | None = None
    """None: a fresh folder inside the run's own."""


class Cache(Part):
    """LMCache's multi-process server."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    http_port: int = Field(default=0, ge=0, le=65535)
    chunk_tokens: int = Field(ge=1)
    l1_size_gb: float = Field(gt=0)
    l1_init_size_gb: int | None = Field(default=None, ge=0)
    eviction_policy: Literal["LRU", "IsolatedLRU"] = "LRU"
    eviction_watermark: float = Field(default=0.8, gt=0, le=1)
    eviction_ratio: float = Field(default=0.2, gt=0, le=1)
    transfer_mode: Literal["lmcache_driven", "engine_driven", "auto"] = "lmcache_driven"
    separate_object_groups: bool | None = False
    """Always passed, yes or no; null leaves it to the version's default (the published command)."""
    l2: L2 | None = L2()
    flags: dict[str, Any] = {}
    env: dict[str, str] = {}


Size = Annotated[str, Field(pattern=r"^\d+[bkmg]?$")]
"""As docker writes sizes: ``512m``, ``32g``."""
ContainerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Limits(Part):
    """What a container may use; null: no limit of its own."""

    shm_size: Size | None = None
    memory: Size | None = None
    memory_swap: Size | None = None


class Container(Limits):
    """How a service becomes a container; used by the docker runtime and by ``plan --shell``.

    The limits are vLLM's.
    """

    image: str = Field(min_length=1)
    names: dict[Literal["baseline", "lmcache_server", "lmcache"], ContainerName]
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$")
    suffix: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """Set around every name, so that two users of one engine do not meet."""
    python: str | None = None
    """The interpreter in the image that runs both servers; null: the image's own entrypoint."""
    gpus: str | None = None
    """``all``, a number, ``device=0,1``, or a CDI device such as ``nvidia.com/gpu=all``."""
    network: str = "host"
    ipc: str = "host"
    pid: str | None = None
    """``host``: no process ids of its own. LMCache on CPU names shared memory after them."""
    user: str | None = None
    """``caller``: whoever runs kvlab; null: the image's own."""
    lmcache_limits: Limits = Limits()
    volumes: list[str] = []
    """``path`` (the same inside), ``path:path`` or ``path:path:ro``."""
    lmcache_entrypoint: str = "/usr/local/bin/lmcache"


class Endpoint(Part):
    """One server that already runs; a plain URL says the same as ``{url: …}``."""

    url: str
    """Its base URL, without ``/v1``; secrets belong into ``attach.api_key_env``."""
    metrics: str | None = None
    """Where its counters are; None: ``/metrics`` below the URL."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _safe(self) -> Endpoint:
        for url in filter(None, (self.url, self.metrics)):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("a URL of the form http://host:port is needed")
            if "@" in parts.netloc or parts.query or parts.fragment:
                raise ValueError(
                    "the URL holds a user, a password or a query, which run folders would keep;"
                    " name a variable in attach.api_key_env or attach.headers_env instead"
                )
        return self

    @property
    def base(self) -> str:
        """The URL without its last slash."""
        return self.url.rstrip("/")

    @property
    def metrics_url(self) -> str:
        return self.metrics or f"{self.base}/metrics"


class Attach(Part):
    """A deployment that already runs: kvlab starts and stops nothing of it."""

    baseline: Endpoint | None = None
    """vLLM without LMCache; without it nothing is compared, and the verdict says so."""
    vllm: list[Endpoint] = Field(min_length=1)
    """Every vLLM with LMCache: their counters are summed."""
    lmcache: list[Endpoint] = Field(min_length=1)
    """Every LMCache server that they use, by its HTTP port."""
    entry: Endpoint | None = None
    """Where requests go, a router for example; None: to each vLLM in its turn."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """The environment variable whose value is sent as ``Authorization: Bearer``."""
    headers_env: dict[str, str] = {}
    """Further headers, each with the environment variable that holds its value."""
    versions: dict[Literal["vllm", "lmcache"], str] = {}
    """What the servers must answer; absent: any, but the same in all of one kind."""
    may_clear: bool = False
    """Whether L0 and L1 may be emptied: everyone who uses the deployment loses them."""
    idle_s: float = Field(default=1.0, ge=0)
    """For so long nobody else may be served before a measurement begins."""

    @model_validator(mode="after")
    def _distinct(self) -> Attach:
        bases = [one.base for one in (*self.vllm, *self.lmcache)]
        bases += [self.baseline.base] if self.baseline else []
        twice = next((base for base in bases if bases.count(base) > 1), None)
        if twice:
            raise ValueError(f"{twice} is named twice; every server has a URL of its own")
        return self


class Workload(Part):
    """What is asked: how many contexts, how long, in which shape."""

    shape: Literal["identical", "prefix_suffix"] = "identical"
    contexts: int = Field(ge=1)
    context_tokens: int = Field(ge=1)
    output_tokens: int = Field(default=1, ge=1)
    prefix_ratio: float = Field(default=0.8, gt=0, lt=1)
    breaker_tokens: int = Field(default=32, ge=1)
    seed: int = 42
    nonce: str | None = None
    """None: fresh for every run, and recorded; set it to repeat a run's exact prompts."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens that return unchanged: all of them, or the prefix of ``prefix_suffix``."""
        if self.shape == "identical":
            return self.context_tokens
        return round(self.context_tokens * self.prefix_ratio)

    def restorable_tokens(self, chunk_tokens: int) -> int:
        """Tokens that whole chunks can restore; the last token is always computed."""
        reusable = min(self.prefix_tokens, self.context_tokens - 1)
        return reusable // chunk_tokens * chunk_tokens


class StoragePath(Part):
    """A place where records may lie: a folder, or an emulated network mount of another place's."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    path: str | None = None
    """None: a folder inside the run's own."""
    mount_of: str | None = None
    """The place whose folder is mounted, with the delays below. Such a mount is emulated."""
    latency_ms: float = Field(default=10.0, gt=0)
    """Of each 128 KiB that the emulated mount reads."""
    bandwidth_mb_s: float | None = Field(default=None, gt=0)
    """All readers together, in 10^6 bytes; null: no limit but its own."""
    adapters: list[str] | None = None
    """The adapters that parallel-read measures here; null: all."""


class Storage(Part):
    """The places that are compared, and how fio measures what they give."""

    paths: list[StoragePath] = Field(default=[StoragePath(name="local")], min_length=1)
    readers: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 16], min_length=1)
    """Jobs of fio at once, each with one request in flight."""
    block_kb: int = Field(default=4096, ge=4, multiple_of=4)
    """Size of one request in KiB: that of a record."""
    runtime_s: float = Field(default=2.0, gt=0)
    """How long fio reads at each number of readers."""

    def path_named(self, name: str) -> StoragePath:
        """The place of that name."""
        return next(one for one in self.paths if one.name == name)


class TwoRound(Part):
    """The A/B: a fill round and a measure round in each scenario."""

    repeats: int = Field(default=3, ge=1)
    pause_s: float = Field(default=5.0, ge=0)
    warmup_requests: int = Field(default=2, ge=1)
    settle_s: float = Field(default=0.0, ge=0)
    """Wait after the servers are ready (the published run waits 10 s)."""
    concurrency: int = Field(default=1, ge=1)


class ObjectGroups(Part):
    """``--separate-object-groups`` on against off, each with an L2 folder of its own."""

    repeats: int = Field(default=3, ge=1)
    """Two starts of each setting hardly ever decide: their interval is widened by 5.4."""
    margin: float = Field(default=0.05, gt=0, lt=1)
    """The settings are equivalent when their TTFT surely differs by less than this share."""


class Bill(Part):
    """What LMCache costs where it does not help, measured within the A/B."""

    margin: float = Field(default=0.05, gt=0, lt=1)
    """Round 1 with LMCache is not slower when it surely takes at most this share longer."""
    decode_requests: int = Field(default=3, ge=0)
    """Cold requests after the measured rounds, answered at length while stores run; 0: none."""
    decode_tokens: int = Field(default=32, ge=2)
    """Output tokens of each of them."""


class SharedCache(Part):
    """Several vLLM instances on one LMCache server."""

    instances: int = Field(default=2, ge=2)


class Eviction(Part):
    """A sweep of how much of L1 one eviction frees; every setting is launched by itself."""

    ratios: list[Annotated[float, Field(gt=0, le=1)]] = [0.2, 0.5, 0.99]
    """Values of ``--eviction-ratio``."""
    watermarks: list[Annotated[float, Field(gt=0, lt=1)]] = []
    """Values of the watermark; empty: the cache's own."""
    ratios_without_l2: list[Annotated[float, Field(gt=0, le=1)]] = [0.2, 0.99]
    """Ratios that are also measured with L1 alone, where what is evicted is lost."""


class Soak(Part):
    """Repeat visits at a low rate for a long time."""

    duration_s: float = Field(default=60.0, gt=0)
    interval_s: float = Field(default=0.5, ge=0)
    """From the start of one visit to the start of the next."""
    checkpoint_s: float = Field(default=20.0, gt=0, le=60)
    """What an interruption loses at most."""
    ttft_drift_max: float = Field(default=0.25, gt=0)
    """Change of TTFT over the whole time, as a share of its median."""
    memory_drift_max: float = Field(default=0.05, gt=0)
    """Growth of a process's memory over the whole time, as a share of its median."""
    files_drift_max: float = Field(default=4.0, gt=0)
    """Growth of a process's open file descriptors over the whole time."""
    l2_drift_max: float = Field(default=0.05, gt=0)
    """Growth of L2's bytes over the whole time, as a share of their median."""


class Acceptance(Part):
    """Storing, restoring and correctness, tier by tier, by a forced continuation."""

    contexts: int = Field(default=6, ge=2)
    """Contexts of the measured length."""
    positions: int = Field(default=8, ge=1)
    """Generated tokens that are forced and compared in each of them."""
    tails: tuple[Annotated[int, Field(ge=1)], ...] = (10, 100, 180)
    """Further contexts have so many tokens after their last whole chunk; those that fit count."""
    tail_contexts: int = Field(default=4, ge=1)
    """Contexts of each tail."""
    control: bool = True
    """Repeat with ``engine.connector: stock`` where it is known to be wrong: hybrid on CPU."""
    control_contexts: int = Field(default=4, ge=1)


class Restart(Part):
    """Records that outlive their servers: fill, stop both, start again on the same L2."""

    repeats: int = Field(default=1, ge=1)
    """Each fills twice: once the servers are stopped by SIGTERM, once by SIGKILL."""
    control_contexts: int = Field(default=4, ge=1)
    """Contexts asked of a configuration that must not find the records."""
    rule_contexts: int = Field(default=4, ge=1)
    """Contexts of the 2N-1 demonstration."""
    coarse_batched_tokens: int | None = Field(default=None, ge=1)
    """``max_num_batched_tokens`` that breaks the 2N-1 rule; null: 2N."""


ADAPTERS: dict[str, dict[str, Any]] = {
    "fs": {"type": "fs", "relative_tmp_dir": ".tmp", "use_odirect": True},
    "fs_native": {
        "type": "fs_native",
        "relative_tmp_dir": ".tmp",
        "use_odirect": True,
        "num_workers": 32,
    },
    "parallel_fs": {
        "type": "plugin",
        "module_path": "kvlab.engine.parallel_fs",
        "class_name": "ParallelFSL2Adapter",
        "config_class_name": "ParallelFSL2AdapterConfig",
        "adapter_params": {"relative_tmp_dir": ".tmp"},
    },
}
"""The L2 adapters that are compared: as LMCache's server takes them, but for base_path."""


class ParallelRead(Part):
    """Cold reads from L2 at several concurrencies, adapter by adapter, place by place."""

    repeats: int = Field(default=1, ge=1)
    """Each starts every arm once; even ones in the opposite order."""
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(default=[8, 16, 32], min_length=1)
    """Requests in flight; each of them is a round of its own over all contexts."""
    adapters: dict[str, dict[str, Any]] = Field(default=ADAPTERS, min_length=1)
    """By name."""
    reference: str = "fs"
    """The adapter that the others are compared with."""
    treated: str = "parallel_fs"
    """The adapter that is claimed to be faster; the reference itself: than computing."""
    recompute: bool = True
    """Whether vLLM alone, which computes everything, is an arm too."""
    ttft_limit_s: float = Field(default=5.0, gt=0)
    """Goodput counts the requests whose first token came within it."""
    ceiling_margin: float = Field(default=0.1, ge=0)
    """A rate may exceed fio's best by this share before it is called not plausible."""

    @model_validator(mode="after")
    def _known(self) -> ParallelRead:
        for name in (self.reference, self.treated):
            if name not in self.adapters:
                raise ValueError(f"no adapter is named {name!r}; known: {', '.join(self.adapters)}")
        return self


class StorageTest(Part):
    """Two workloads beside the cache: a snapshot written by several, models loaded by several."""

    repeats: int = Field(default=3, ge=1)
    writers: int = Field(default=8, ge=1)
    snapshot_mb: int = Field(default=64, ge=1)
    """Written by each writer, in MiB."""
    readers: list[Annotated[int, Field(ge=1)]] = Field(default=[1, 8], min_length=1)
    """Processes that load a model at once; each has a file of its own."""
    model_mb: int = Field(default=64, ge=1)
    """Size of each model's safetensors file, in MiB."""


class Gates(Part):
    """What `kvlab gates` demands; null: the gate cannot be measured on this machine."""

    read_gb_per_s_min: float | None = Field(default=None, gt=0)
    """G1: what fio must read on the first place with the most readers."""
    write_gb_per_s_min: float | None = Field(default=None, gt=0)
    """G1: what the snapshot must write there."""
    ttft_reduction_min: float = Field(default=0.25, gt=0, lt=1)
    """G3: the share by which TTFT must fall, with its whole interval."""
    throughput_gain: tuple[float, float] = (0.29, 0.40)
    """G3: the published band of the gain in output tokens per second; its lower end is demanded."""
    soak_s: float = Field(default=259_200, gt=0)
    """G4: 72 hours."""


class Experiments(Part):
    storage: StorageTest = StorageTest()
    parallel_read: ParallelRead = ParallelRead()
    two_round: TwoRound = TwoRound()
    restart: Restart = Restart()
    acceptance: Acceptance = Acceptance()
    shared_cache: SharedCache = SharedCache()
    eviction: Eviction = Eviction()
    soak: Soak = Soak()
    bill: Bill = Bill()
    object_groups: ObjectGroups = ObjectGroups()


class Correctness(Part):
    """Restored answers may differ from cold ones by max(3 x cold-cold floor, tolerance_nat)."""

    tolerance_nat: float = Field(default=0.15, ge=0)


class Thresholds(Part):
    """What the evidence must reach before a number is published."""

    external_share_min: float = Field(default=0.90, ge=0, le=1)
    local_share_max: float = Field(default=0.01, ge=0, le=1)
    baseline_drift_max: float = Field(default=0.05, gt=0)
    kv_size_diff_max: float = Field(default=0.02, ge=0)
    l0_overflow_min: float = Field(default=1.5, ge=0)
    """The working set must exceed L0 by this factor; otherwise L0 answers round 2."""
    conservation_share_max: float = Field(default=0.0, ge=0, le=1)


class Timeouts(Part):
    """Deadlines in seconds. A request's own is ``request_cold_factor`` x the slowest warm-up."""

    lmcache_ready_s: float = Field(default=120, gt=0)
    vllm_ready_s: float = Field(default=600, gt=0)
    request_s: float = Field(default=120, gt=0)
    round_s: float = Field(default=7200, gt=0)
    drain_s: float = Field(default=120, gt=0)
    stop_s: float = Field(default=30, gt=0)


class Deviation(Part):
    """A setting in which this profile differs from the published one on purpose."""

    setting: str
    published: Any
    reason: str


class Profile(Part):
    """One machine, one model, one engine, one cache, one workload."""

    schema_version: int = Field(alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    title: str
    description: str = ""
    runtime: Literal["process", "docker", "attach"] = "process"
    model: Model
    engine: Engine
    cache: Cache
    container: Container | None = None
    attach: Attach | None = None
    workload: Workload
    storage: Storage = Storage()
    experiments: Experiments = Experiments()
    stand_ins: dict[str, str] = {}
    """Experiments that run on another profile of the same machine, by its name."""
    gates: Gates = Gates()
    correctness: Correctness = Correctness()
    thresholds: Thresholds = Thresholds()
    timeouts: Timeouts = Timeouts()
    deviations: list[Deviation] = []

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        for complaint in _contradictions(self):
            raise ValueError(complaint)
        return self

    def as_dict(self) -> dict[str, Any]:
        """The resolved profile as plain JSON values, the form that manifests keep."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def sha256(self) -> str:
        """Identity of the resolved profile, overrides included."""
        return sha256_json(self.as_dict())

    @property
    def fresh(self) -> bool:
        """Whether every launch starts new servers, which hold nothing of an earlier one."""
        return self.runtime != "attach"

    @property
    def working_set_tokens(self) -> int:
        return self.workload.contexts * self.workload.context_tokens


def _contradictions(profile: Profile) -> Iterable[str]:
    engine, cache, work = profile.engine, profile.cache, profile.workload
    chunk, block = cache.chunk_tokens, engine.block_tokens
    if chunk % block:
        above = math.ceil(chunk / block) * block
        yield (
            f"cache.chunk_tokens {chunk} is not a multiple of engine.block_tokens {block}; "
            f"use {block}, or another multiple such as {max(above, 2 * block)}"
        )
    if profile.model.hybrid and engine.max_num_batched_tokens < block:
        yield (
            f"engine.max_num_batched_tokens {engine.max_num_batched_tokens} is smaller than one "
            f"block of {block} tokens; use {2 * block - 1} (2N-1)"
        )
    minimum = MIN_CHUNKS * chunk + 1
    if work.prefix_tokens < minimum and work.shape == "identical":
        yield (
            f"workload.context_tokens {work.context_tokens} is shorter than {MIN_CHUNKS} chunks "
            f"of {chunk} tokens; use at least {minimum}"
        )
    if work.restorable_tokens(chunk) == 0:
        yield (
            f"no whole chunk of {chunk} tokens fits in the {work.prefix_tokens} tokens that "
            f"return; lengthen workload.context_tokens or raise workload.prefix_ratio"
        )
    if work.shape == "prefix_suffix":
        suffix = work.context_tokens - work.prefix_tokens - work.breaker_tokens
        if suffix < 1:
            yield (
                f"prefix ({work.prefix_tokens}) and breaker ({work.breaker_tokens}) leave no "
                f"suffix in {work.context_tokens} tokens; lower workload.prefix_ratio"
            )
    asked = work.contexts * profile.experiments.two_round.repeats
    if asked > shapes.MOST_REQUESTS:
        yield (
            f"{asked:,} requests per arm and round are more than the {shapes.MOST_REQUESTS:,} that "
            "a run may hold; lower workload.contexts or experiments.two_round.repeats"
        )
    if work.context_tokens + work.output_tokens > engine.max_model_len:
        yield (
            f"workload.context_tokens {work.context_tokens} plus {work.output_tokens} output "
            f"exceeds engine.max_model_len {engine.max_model_len}; shorten it"
        )
    bill = profile.experiments.bill
    if bill.decode_requests and work.context_tokens + bill.decode_tokens > engine.max_model_len:
        yield (
            f"workload.context_tokens {work.context_tokens} plus experiments.bill.decode_tokens "
            f"{bill.decode_tokens} exceeds engine.max_model_len {engine.max_model_len}; lower "
            "experiments.bill.decode_tokens, or set experiments.bill.decode_requests to 0"
        )
    if engine.kv_cache_tokens:
        yield from l0_complaints(profile, engine.kv_cache_tokens)
    yield from _storage_complaints(profile)
    if profile.runtime == "docker" and profile.container is None:
        yield "runtime docker needs a container section: image, names"
    if profile.runtime == "attach" and profile.attach is None:
        yield "runtime attach needs an attach section: vllm, lmcache"
    if profile.container:
        yield from _container_complaints(profile.container)


def _container_complaints(container: Container) -> Iterable[str]:
    image = container.image
    if "@" not in image and ":" not in image.rpartition("/")[2]:
        yield (
            f"container.image {image} has no tag or digest: a tag or digest is needed, or the "
            f"engine would take any version; use {image}:<tag> or {image}@sha256:<digest>"
        )
    missing = [role for role in CONTAINER_ROLES if role not in container.names]
    if missing:
        yield f"container.names lacks {', '.join(missing)}; name all three"
    same = len(set(container.names.values())) < len(container.names)
    if same:
        yield "two of container.names are the same; give each container a name of its own"


def _storage_complaints(profile: Profile) -> Iterable[str]:
    names = [one.name for one in profile.storage.paths]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"storage.paths names {name} twice; give each place a name of its own"
    folders = [one.name for one in profile.storage.paths if one.mount_of is None]
    known = profile.experiments.parallel_read.adapters
    for one in profile.storage.paths:
        if one.mount_of is not None and one.mount_of not in folders:
            yield (
                f"storage.paths: {one.name} mounts {one.mount_of!r}, which is no folder there; "
                f"known: {', '.join(folders)}"
            )
        for adapter in one.adapters or ():
            if adapter not in known:
                yield (
                    f"storage.paths: {one.name} names the adapter {adapter!r}; known: "
                    f"{', '.join(known)}"
                )


def l0_complaints(profile: Profile, kv_cache_tokens: int) -> Iterable[str]:
    """The complaint, if any, that the working set does not overflow L0 enough to test LMCache."""
    if not profile.engine.prefix_caching:
        return  # vLLM keeps nothing between requests
    least = profile.thresholds.l0_overflow_min * kv_cache_tokens
    if profile.working_set_tokens < least:
        needed = math.ceil(least / profile.workload.context_tokens)
        yield (
            f"the working set of {profile.working_set_tokens:,} tokens fits too well in L0 "
            f"({kv_cache_tokens:,} tokens): vLLM's own cache would answer round 2; "
            f"use workload.contexts {needed} or more, or a smaller L0"
        )


def names() -> list[str]:
    """The names of the profiles that come with kvlab, sorted."""
    folder = resources.files("kvlab") / "profiles"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if _is_yaml(p.name))


def load(
    name_or_path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    experiment: str | None = None,
) -> Profile:
    """The profile of that name or file, with dotted-key overrides applied, checked whole.

    With ``experiment``, the profile that stands in for it there, if one does: the overrides are
    then those of that one.
    """
    origin, tree = _read(str(name_or_path), seen=())
    stand_ins = tree.get("stand_ins")
    other = stand_ins.get(experiment or "") if isinstance(stand_ins, dict) else None
    if isinstance(other, str):
        return load(other, overrides)
    for key, value in (overrides or {}).items():
        _set(tree, key, value)
    return _validate(tree, origin)


def from_dict(tree: dict[str, Any], origin: str = "profile") -> Profile:
    """The profile that a manifest keeps, checked like any other."""
    return _validate(tree, origin)


def as_published(profile: Profile) -> Profile:
    """The profile with every deviation taken back: the settings exactly as published."""
    tree = profile.as_dict()
    for deviation in profile.deviations:
        if deviation.published is None:
            _drop(tree, deviation.setting)
        else:
            _set(tree, deviation.setting, deviation.published)
    return _validate({**tree, "deviations": []}, f"profile {profile.name} as published")


def with_settings(profile: Profile, settings: Mapping[str, Any]) -> Profile:
    """The profile with dotted-key settings applied, checked whole again."""
    tree = profile.as_dict()
    for key, value in settings.items():
        _set(tree, key, value)
    return _validate(tree, f"profile {profile.name} with {', '.join(settings)}")


def parse_override(text: str) -> tuple[str, Any]:
    """``a.b=c`` as its key and its value; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.-]*", key.strip()):
        raise ProfileError(
            f"override {text!r} is not of the form key=value",
            hint="for example --set workload.contexts=8",
        )
    try:
        return key.strip(), plain_yaml.load(value)
    except ValueError as error:
        raise ProfileError(
            f"the value of override {key} is not valid YAML: {error}",
            hint="quote it, for example --set 'model.name=\"a: b\"'",
        ) from error


def _read(name_or_path: str, seen: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    if name_or_path in seen:
        raise ProfileError(
            f"profiles extend each other in a circle: {' -> '.join((*seen, name_or_path))}",
            hint="remove one `extends`",
        )
    origin, text = _text(name_or_path)
    try:
        tree = plain_yaml.load(text)
    except ValueError as error:
        raise ProfileError(
            f"{origin} is not valid YAML: {error}", hint="check the indentation there"
        ) from error
    if not isinstance(tree, dict):
        raise ProfileError(
            f"{origin} holds no settings", hint="start from `kvlab profiles --show embedded`"
        )
    parent = tree.pop("extends", None)
    if parent is not None:
        _, base = _read(str(parent), (*seen, name_or_path))
        tree = _merge(base, tree)
    return origin, tree


def _text(name_or_path: str) -> tuple[str, str]:
    packaged = resources.files("kvlab") / "profiles" / f"{name_or_path}.yaml"
    if re.fullmatch(r"[a-z0-9-]+", name_or_path) and packaged.is_file():
        return f"profile {name_or_path}", packaged.read_text(encoding="utf-8")
    path = Path(name_or_path)
    if _is_yaml(path.name):
        try:
            return str(path), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ProfileError(
                f"cannot read the profile {path}: {reason}", hint="check the path"
            ) from error
    raise ProfileError(
        f"there is no profile {name_or_path!r}",
        hint=_nearest(name_or_path, names())
        or f"known: {', '.join(names())}; or give a .yaml file",
    )


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[key] = _merge(known, value)
        else:
            merged[key] = value
    return merged


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node: Any = tree
    for part in parents:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ProfileError(
                f"override {dotted}: {part} is a single value, not a section",
                hint=f"set {dotted[: dotted.index(part) + len(part)]} itself",
            )
        node = child
    node[last] = value


def _drop(tree: dict[str, Any], dotted: str) -> None:
    """Leave a setting out, so that its default counts."""
    *parents, last = dotted.split(".")
    for part in parents:
        tree = tree.get(part) or {}
    tree.pop(last, None)


def _validate(tree: dict[str, Any], origin: str) -> Profile:
    try:
        profile = Profile.model_validate(tree)
    except ValidationError as error:
        raise _profile_error(error, origin) from error
    try:  # flags may hold any value; a manifest must be able to hold it, and to be read again
        held = json.dumps(profile.model_dump(by_alias=True), ensure_ascii=False, default=str)
        shapes.loads(held.encode())
    except ValueError as error:
        raise ProfileError(
            f"{origin} holds a value that no run folder can keep: {error}",
            hint="give flags plain text, numbers or lists",
        ) from error
    if profile.schema_version != SCHEMA:
        raise ProfileError(
            f"{origin} has schema {profile.schema_version}; this kvlab reads {SCHEMA}",
            hint="update kvlab, or see docs/profiles.md for what changed",
        )
    return profile


def _profile_error(error: ValidationError, origin: str) -> ProfileError:
    """The first complaint that names a cause: unknown keys come before missing ones."""
    complaints = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = complaints[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        *section, key = (str(part) for part in first["loc"])
        hint = _nearest(key, _keys_of(section)) or f"known here: {', '.join(_keys_of(section))}"
        return ProfileError(f"{origin}: unknown key {where!r}", hint=hint)
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not where:
        sentence, _, hint = message.partition("; ")
        return ProfileError(f"{origin}: {sentence}", hint=hint or "see docs/profiles.md")
    found = first.get("input")
    hidden = first["type"] == "missing" or isinstance(found, dict) or where.startswith("attach")
    shown = "" if hidden else f", found {found!r}"
    return ProfileError(f"{origin}: {where}: {message}{shown}", hint="see docs/profiles.md")


def _keys_of(section: list[str]) -> list[str]:
    """The keys that a section of a profile may hold."""
    kind: Any = Profile
    for part in section:
        field = getattr(kind, "model_fields", {}).get(part)
        if field is None:
            return []
        options = getattr(field.annotation, "__args__", (field.annotation,))
        kind = next((o for o in options if hasattr(o, "model_fields")), None)
    fields = getattr(kind, "model_fields", {})
    return sorted(field.alias or name for name, field in fields.items())


def _nearest(word: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {found[0]!r}?" if found else None
