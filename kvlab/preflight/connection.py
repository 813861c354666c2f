"""Rules about how vLLM and LMCache find each other: connector, network, IPC, transfer mode."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.preflight.blocks import REPORT
from kvlab.preflight.case import LOOPBACK, Case
from kvlab.preflight.rule import Example, Found, rule
from kvlab.profile import Profile
from kvlab.stack.plan import CONNECTORS

GUIDE = "LMCache's deployment guide"
MP_CONNECTORS = {entry["kv_connector"] for entry in CONNECTORS.values()}
TRANSFER_CONFIG = "kv-transfer-config"
ISOLATED = "lmcache.mp.isolated_ipc"
MODE = "lmcache.mp.mp_transfer_mode"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def spelled(flags: Mapping[str, Any], name: str) -> str | None:
    """The key under which a flag stands, however it is spelled; None without it."""
    for key in flags:
        if key.replace("_", "-").lstrip("-").removeprefix("no-") == name.removeprefix("no-"):
            return key
    return None


def flag(flags: Mapping[str, Any], name: str) -> Any:
    """A flag's value however it is spelled, None without it; ``no-`` in front turns it round."""
    key = spelled(flags, name)
    if key is None:
        return None
    negated = key.replace("_", "-").lstrip("-").startswith("no-")
    return not flags[key] if negated and flags[key] is not None else flags[key]


def connector_setting(profile: Profile, key: str, value: Any) -> dict[str, Any]:
    """The override that sets one entry of the connector's configuration, whose keys have dots."""
    return {"engine.connector_config": {**profile.engine.connector_config, key: value}}


@rule(
    "KV020",
    "error",
    "The wrong connector, or the wrong role",
    why="Only the multi-process connector speaks with an LMCache server, and only the role "
    "`kv_both` both stores and retrieves.",
    source=f"{GUIDE}; LMCache issue 4213",
    example=Example(log="Creating v1 connector with name: LMCacheConnectorV1 and engine_id: 1"),
)
def connector(case: Case) -> Iterator[Found]:
    own = "remove it; kvlab passes the multi-process connector with kv_both itself"
    if (said := case.fact("connector")) is not None and said not in MP_CONNECTORS:
        yield Found(
            text=f"vLLM's log says that it runs the connector {said}", do=f"see KV022; {own}"
        )
    given = _transfer_config(case.profile)
    if given is None:
        return
    name, role = given.get("kv_connector"), given.get("kv_role")
    if name not in MP_CONNECTORS:
        yield Found(text=f"engine.flags.{TRANSFER_CONFIG} names the connector {name}", do=own)
    if role != "kv_both":
        yield Found(text=f"engine.flags.{TRANSFER_CONFIG} has the role {role}", do=own)


@rule(
    "KV021",
    "error",
    "The connector looks for LMCache elsewhere",
    why="An entry of engine.connector_config replaces the address that kvlab fills in: vLLM then "
    "waits for a server that is not there, or uses a stranger's.",
    source=GUIDE,
    example=Example(
        profile="dgx-spark", settings={"engine.connector_config": {"lmcache.mp.port": 6555}}
    ),
)
def address(case: Case) -> Iterator[Found]:
    config, cache = case.profile.engine.connector_config, case.profile.cache
    given = {
        "lmcache.mp.host": (cache.host, str(cache.host)),
        "lmcache.mp.port": (cache.port or "chosen at the start", str(cache.port)),
    }
    for key, (shown, own) in given.items():
        if key in config and str(config[key]).removeprefix("tcp://") != own:
            rest = {name: value for name, value in config.items() if name != key}
            yield Found(
                text=f"the connector's {key} is {config[key]}, LMCache's server is at {shown}",
                settings={"engine.connector_config": rest},
            )


@rule(
    "KV022",
    "error",
    "A connector among vLLM's own flags",
    why="What stands in engine.flags is passed in both scenarios: the baseline would run with "
    "LMCache too, and show no difference.",
    source=REPORT + ", section 2.3 (scenario A runs vLLM alone)",
    example=Example(
        settings={
            "engine.flags.kv-transfer-config": {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
            }
        }
    ),
)
def baseline_with_cache(case: Case) -> Iterator[Found]:
    flags = case.profile.engine.flags
    if flag(flags, TRANSFER_CONFIG) is not None:
        yield Found(
            text=f"engine.flags holds {TRANSFER_CONFIG}, which the baseline would get as well",
            settings={f"engine.flags.{spelled(flags, TRANSFER_CONFIG)}": None},
        )


ENGINE_FIELDS = {
    "host": "host",
    "port": "port",
    "max-model-len": "max_model_len",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "mamba-cache-mode": "mamba_cache_mode",
    "enable-prompt-tokens-details": "prompt_tokens_details",
    "enable-prefix-caching": "prefix_caching",
}
CACHE_FIELDS = {
    "host": "host",
    "port": "port",
    "http-port": "http_port",
    "chunk-size": "chunk_tokens",
    "l1-size-gb": "l1_size_gb",
    "l1-init-size-gb": "l1_init_size_gb",
    "eviction-policy": "eviction_policy",
    "eviction-trigger-watermark": "eviction_watermark",
    "eviction-ratio": "eviction_ratio",
    "supported-transfer-mode": "transfer_mode",
    "separate-object-groups": "separate_object_groups",
    "l2-adapter": "l2",
}


@rule(
    "KV023",
    "error",
    "A setting given twice",
    why="The flag wins over the profile's own key, so the server runs with one value while every "
    "check and every count uses the other.",
    source="docs/profiles.md",
    example=Example(settings={"engine.flags.max-num-batched-tokens": 8192}),
)
def given_twice(case: Case) -> Iterator[Found]:
    parts: tuple[tuple[str, Mapping[str, Any], dict[str, str]], ...] = (
        ("engine", case.profile.engine.flags, ENGINE_FIELDS),
        ("cache", case.profile.cache.flags, CACHE_FIELDS),
    )
    for part, flags, fields in parts:
        for name, key in fields.items():
            if (given := spelled(flags, name)) is not None:
                yield Found(
                    text=f"{part}.flags holds {given}, which {part}.{key} sets already",
                    do=f"remove {given} from {part}.flags; {part}.{key} is the place for it",
                )


@rule(
    "KV024",
    "error",
    "Isolated IPC on one side only",
    why="Server and connector must use the same kind of CUDA IPC: a mismatch makes transfers fail.",
    source=GUIDE,
    example=Example(profile="dgx-spark", settings={"cache.flags.isolated-ipc": True}),
)
def isolated_on_one_side(case: Case) -> Iterator[Found]:
    server, worker = _isolated(case.profile)
    if server != worker:
        has, lacks = ("LMCache's server", "vLLM's connector")[:: 1 if server else -1]
        both: dict[str, Any] = {"cache.flags.isolated-ipc": True}
        yield Found(
            text=f"{has} uses isolated IPC, {lacks} does not",
            settings=both | connector_setting(case.profile, ISOLATED, True),
            do="or leave it out on both sides, as the published experiment does",
        )


@rule(
    "KV025",
    "error",
    "Containers without a shared /dev/shm",
    why="Classic CUDA IPC passes memory through one shared /dev/shm; sharing the network does not "
    "replace it.",
    source=f"{GUIDE}; LMCache issue 4394",
    example=Example(profile="dgx-spark", settings={"container.ipc": "private"}),
)
def shared_ipc(case: Case) -> Iterator[Found]:
    container = case.profile.container
    if not case.in_containers or container is None or all(_isolated(case.profile)):
        return
    if container.ipc != "host" and not container.ipc.startswith("container:"):
        yield Found(
            text=f"the containers run with ipc {container.ipc}: neither sees the other's memory",
            settings={"container.ipc": "host"},
            do="or use isolated IPC on both sides",
        )


@rule(
    "KV026",
    "warning",
    "Isolated IPC with a special allocator or sleep mode",
    why="Isolated IPC exports memory in another way, which expandable segments and vLLM's sleep "
    "mode may not support; it has to be tried.",
    source=GUIDE,
    example=Example(
        profile="dgx-spark",
        settings={
            "cache.flags.isolated-ipc": True,
            "engine.connector_config": {ISOLATED: True},
            "engine.flags.enable-sleep-mode": True,
        },
    ),
)
def isolated_with_allocator(case: Case) -> Iterator[Found]:
    engine = case.profile.engine
    if not any(_isolated(case.profile)):
        return
    if flag(engine.flags, "enable-sleep-mode"):
        yield Found(
            text="isolated IPC together with vLLM's sleep mode",
            settings={f"engine.flags.{spelled(engine.flags, 'enable-sleep-mode')}": None},
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in engine.env.get(name, "").lower():
            yield Found(
                text=f"isolated IPC together with {name}={engine.env[name]}",
                settings={f"engine.env.{name}": "expandable_segments:False"},
            )


@rule(
    "KV027",
    "error",
    "127.0.0.1 between two network namespaces",
    why="In a network of its own each container's 127.0.0.1 is itself: vLLM cannot reach LMCache, "
    "whatever IPC they share.",
    source=GUIDE,
    example=Example(profile="dgx-spark", settings={"container.network": "bridge"}),
)
def network(case: Case) -> Iterator[Found]:
    container = case.profile.container
    if not case.in_containers or container is None:
        return
    shared = container.network == "host" or container.network.startswith("container:")
    if not shared and case.profile.cache.host in LOOPBACK:
        yield Found(
            text=f"LMCache listens on {case.profile.cache.host} in the container network "
            f"{container.network}",
            settings={"container.network": "host"},
        )


@rule(
    "KV028",
    "warning",
    "Shared memory is smaller than L1",
    why="Engine-driven transfer keeps L1 in /dev/shm: where it does not fit, LMCache falls back to "
    "copies by pickle, which work and are slow.",
    source="LMCache issue 4812",
    example=Example(
        profile="dgx-spark",
        settings={"cache.transfer_mode": "auto", "model.hybrid": False},
        probe={"shm_gib": 0.064},
    ),
)
def shared_memory(case: Case) -> Iterator[Found]:
    cache, container = case.profile.cache, case.profile.container
    if cache.transfer_mode == "lmcache_driven":
        return
    own = case.in_containers and container is not None and container.ipc != "host"
    size = gib(container.shm_size or "64m") if own and container else case.probe.shm_gib
    if size is not None and size < cache.l1_size_gb:
        yield Found(
            text=f"shared memory has {size:.3g} GiB, L1 {cache.l1_size_gb:g} GiB, in transfer mode "
            f"{cache.transfer_mode}",
            settings={"container.shm_size": f"{cache.l1_size_gb + 1:.0f}g"} if own else {},
            do="" if own else f"mount -o remount,size={cache.l1_size_gb + 1:.0f}G /dev/shm",
        )


@rule(
    "KV029",
    "warning",
    "A transfer mode for other devices",
    why="`engine_driven` is meant for CPUs and accelerators without CUDA; with CUDA the server "
    "moves the data itself in `lmcache_driven`, the default.",
    source="LMCache's configuration reference",
    example=Example(
        profile="dgx-spark",
        settings={"cache.transfer_mode": "engine_driven", "model.hybrid": False},
    ),
)
def transfer_device(case: Case) -> Iterator[Found]:
    container = case.profile.container
    with_gpu = bool(case.in_containers and container and container.gpus)
    if with_gpu and case.profile.cache.transfer_mode == "engine_driven":
        yield Found(
            text="supported-transfer-mode is engine_driven on a GPU",
            settings={"cache.transfer_mode": "lmcache_driven"},
        )


@rule(
    "KV030",
    "error",
    "Engine-driven transfer of a hybrid model",
    why="Engine-driven transfer supports exactly one KV group; a hybrid model has several, and its "
    "worker is refused when it registers.",
    source="LMCache 0.5, worker_transfer.py",
    example=Example(settings={"cache.transfer_mode": "engine_driven"}),
)
def transfer_groups(case: Case) -> Iterator[Found]:
    if not case.profile.model.hybrid:
        return
    mode = case.profile.cache.transfer_mode
    asked = case.profile.engine.connector_config.get(MODE)
    settings: dict[str, Any] = {"cache.transfer_mode": "lmcache_driven"}
    if case.on_cpu:  # left to itself, a worker without CUDA chooses engine_driven
        settings |= connector_setting(case.profile, MODE, "lmcache_driven")
    if mode == "engine_driven" or asked == "engine_driven":
        yield Found(
            text="engine_driven is set for a hybrid model",
            settings=settings | connector_setting(case.profile, MODE, "lmcache_driven"),
        )
    elif case.on_cpu and asked != "lmcache_driven":
        yield Found(
            text=f"the connector's {MODE} is {asked or 'not set'}: on CPU it becomes engine_driven",
            settings=settings,
        )


@rule(
    "KV031",
    "warning",
    "LMCache's own connector with a hybrid model on CPU",
    why="It stores a copy of the recurrent state that vLLM no longer writes: restored answers come "
    "fast and are wrong, while every counter says full hit.",
    source="docs/findings.md",
    example=Example(settings={"engine.connector": "stock"}),
)
def stock_connector(case: Case) -> Iterator[Found]:
    if case.on_cpu and case.profile.model.hybrid and case.profile.engine.connector == "stock":
        yield Found(
            text="engine.connector is stock for a hybrid model on CPU",
            settings={"engine.connector": "kvlab"},
        )


@rule(
    "KV032",
    "error",
    "Server and engine see different GPUs",
    why="A handle of CUDA IPC is opened on the GPU of the same number: both sides must see the "
    "same GPUs in the same order.",
    source=GUIDE,
    example=Example(profile="dgx-spark", settings={"engine.env.CUDA_VISIBLE_DEVICES": "1"}),
)
def visible_gpus(case: Case) -> Iterator[Found]:
    engine, cache = case.profile.engine.env, case.profile.cache.env
    for name in VISIBLE:
        if engine.get(name) != cache.get(name):
            yield Found(
                text=f"{name} is {engine.get(name, 'not set')} for vLLM and "
                f"{cache.get(name, 'not set')} for LMCache",
                settings={f"cache.env.{name}": engine[name]}
                if name in engine
                else {f"engine.env.{name}": cache[name]},
            )


def _transfer_config(profile: Profile) -> Mapping[str, Any] | None:
    """The connector that the profile gives among vLLM's own flags."""
    given = flag(profile.engine.flags, TRANSFER_CONFIG)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = {"kv_connector": given}
    return given if isinstance(given, Mapping) else None


def _isolated(profile: Profile) -> tuple[bool, bool]:
    """Whether LMCache's server and vLLM's connector use isolated IPC."""
    worker = profile.engine.connector_config.get(ISOLATED)
    return bool(flag(profile.cache.flags, "isolated-ipc")), str(worker).lower() in ("true", "1")


_SHARES = {"k": 1 / 1024**2, "m": 1 / 1024, "g": 1.0}


def gib(size: str) -> float | None:
    """Docker's ``32g`` or ``64m`` in GiB; None when it is written otherwise."""
    number, unit = size[:-1], size[-1:].lower()
    try:
        return float(number) * _SHARES[unit]
    except (ValueError, KeyError):
        return None
