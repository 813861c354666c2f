"""What would be started for a profile and a scenario: pure, and compared by equality in tests."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import UsageError
from kvlab.profile import Container, Profile

SCENARIOS = ("baseline", "lmcache", "control", "shared")
"""``control`` is the baseline launched again under another name, for the A/A test; ``shared`` is
several vLLM instances on one LMCache server."""
FREE = "<free port>"
CONNECTORS = {
    "stock": {"kv_connector": "LMCacheMPConnector"},
    "kvlab": {
        "kv_connector": "SharedStateMPConnector",
        "kv_connector_module_path": "kvlab.engine.connector",
    },
}
CONNECTOR_REASONS = {
    "stock": "LMCache's own connector.",
    "kvlab": (
        "LMCache's connector with recurrent layers bound again to shared memory: in its "
        "lmcache_driven mode on CPU the stock one stores a copy of the recurrent state that "
        "vLLM no longer writes."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plan is carried out: ports, folders and interpreter. Strings stand in a preview."""

    engine_python: str = "<engine python>"
    models: str = "<models>"
    l2: str = "<l2 folder>"
    vllm_port: int | str = FREE
    lmcache_port: int | str = FREE
    lmcache_http_port: int | str = FREE
    more_vllm_ports: tuple[int | str, ...] = ()
    """Of further vLLM instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One server: its command, its environment, and how it says that it is ready."""

    name: str
    role: str
    """``vllm`` or ``lmcache``: also the source name of its counters."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    ports: tuple[int | str, ...] = ()
    url: str = ""
    health: str = "/health"
    ready_s: float = 600
    container: Container | None = None
    volumes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Services in the order in which they start; each is healthy before the next one starts."""

    scenario: str
    services: tuple[Service, ...]
    connector: str | None
    settle_s: float


def plan(profile: Profile, scenario: str, place: Place | None = None) -> Plan:
    """What the scenario starts, in order: LMCache's server first where there is one, then vLLM."""
    if scenario not in SCENARIOS:
        raise UsageError(
            f"there is no scenario {scenario!r}", hint=f"known: {', '.join(SCENARIOS)}"
        )
    place = place or Place()
    with_cache = scenario in ("lmcache", "shared")
    services = [
        _vllm(profile, place, with_cache=with_cache, number=number)
        for number in range(1, instances(profile, scenario) + 1)
    ]
    if with_cache:
        services.insert(0, _lmcache(profile, place))
    return Plan(
        scenario=scenario,
        services=tuple(services),
        connector=profile.engine.connector if with_cache else None,
        settle_s=profile.experiments.two_round.settle_s,
    )


def instances(profile: Profile, scenario: str) -> int:
    """How many vLLM servers a scenario starts."""
    return profile.experiments.shared_cache.instances if scenario == "shared" else 1


def _lmcache(profile: Profile, place: Place) -> Service:
    cache = profile.cache
    port = cache.port or place.lmcache_port
    http_port = cache.http_port or place.lmcache_http_port
    flags: dict[str, Any] = {
        "host": cache.host,
        "port": port,
        "http-port": http_port,
        "chunk-size": cache.chunk_tokens,
        "l1-size-gb": cache.l1_size_gb,
        "l1-init-size-gb": cache.l1_init_size_gb,
        "eviction-policy": cache.eviction_policy,
        "eviction-trigger-watermark": cache.eviction_watermark,
        "eviction-ratio": cache.eviction_ratio,
        "supported-transfer-mode": cache.transfer_mode,
        "separate-object-groups": cache.separate_object_groups,
    }
    volumes: tuple[str, ...] = ()
    if cache.l2 is not None:
        base_path = cache.l2.base_path or place.l2
        flags["l2-adapter"] = l2_adapter(cache.l2.adapter, base_path)
        volumes = (base_path,)
    container = profile.container
    program = (
        (container.lmcache_entrypoint,)
        if container
        else (place.engine_python, "-m", "lmcache.cli.main")
    )
    return Service(
        name=container.names["lmcache_server"] if container else "lmcache",
        role="lmcache",
        argv=(*program, "server", *render_flags({**flags, **cache.flags})),
        env=dict(cache.env),
        ports=(port, http_port),
        url=f"http://{cache.host}:{http_port}",
        health="/healthcheck",
        ready_s=profile.timeouts.lmcache_ready_s,
        container=container,
        volumes=volumes,
    )


def l2_adapter(adapter: Mapping[str, Any], base_path: str) -> dict[str, Any]:
    """LMCache's ``--l2-adapter``: the profile's JSON, with the folder where its type reads it.

    A plugin is handed its ``adapter_params`` and nothing else.
    """
    kind = {"type": adapter.get("type", "fs")}
    if kind["type"] != "plugin":
        return {**kind, "base_path": base_path, **adapter}
    params = {"base_path": base_path, **adapter.get("adapter_params", {})}
    return {**kind, **adapter, "adapter_params": params}


def _vllm(profile: Profile, place: Place, *, with_cache: bool, number: int = 1) -> Service:
    """The vLLM with that number: the first has the role's own name, others ``vllm-2`` and so on."""
    engine = profile.engine
    port = _vllm_port(profile, place, number)
    flags: dict[str, Any] = {
        "host": engine.host,
        "port": port,
        "served-model-name": profile.model.served_name,
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "mamba-cache-mode": engine.mamba_cache_mode,
        "enable-prompt-tokens-details": engine.prompt_tokens_details or None,
        "enable-prefix-caching": engine.prefix_caching,
        **engine.flags,
    }
    if with_cache:
        flags["kv-transfer-config"] = kv_transfer_config(profile, place)
    env = dict(engine.env)
    if engine.dev_endpoints:
        env["VLLM_SERVER_DEV_MODE"] = "1"
    container = profile.container
    program: tuple[str, ...] = (profile.model.name,)
    if container is None:
        module = "vllm.entrypoints.openai.api_server"
        program = (place.engine_python, "-m", module, "--model", profile.model.name)
    return Service(
        name=(container.names["lmcache" if with_cache else "baseline"] if container else "vllm")
        + (f"-{number}" if number > 1 else ""),
        role="vllm",
        argv=(*program, *render_flags(flags)),
        env=env,
        cwd=None if container else place.models,
        ports=(port,),
        url=f"http://{_reachable(engine.host)}:{port}",
        ready_s=profile.timeouts.vllm_ready_s,
        container=container,
        volumes=tuple(container.volumes) if container else (),
    )


def _vllm_port(profile: Profile, place: Place, number: int) -> int | str:
    """The port of one instance: counted up from a set one, else one that is free."""
    if profile.engine.port:
        return profile.engine.port + number - 1
    return [place.vllm_port, *place.more_vllm_ports, *[FREE] * number][number - 1]


def kv_transfer_config(profile: Profile, place: Place) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config``: which connector runs, and where LMCache's server is."""
    cache = profile.cache
    extra = {
        "lmcache.mp.host": cache.host,
        "lmcache.mp.port": cache.port or place.lmcache_port,
        **profile.engine.connector_config,
    }
    return {
        **CONNECTORS[profile.engine.connector],
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def render_flags(flags: Mapping[str, Any]) -> Iterator[str]:
    """``--key value`` words: true is ``--key``, false ``--no-key``, null nothing, a map JSON."""
    for key, value in flags.items():
        if value is None:
            continue
        if value is True:
            yield f"--{key}"
        elif value is False:
            yield f"--no-{key}"
        else:
            yield from (f"--{key}", _word(value))


def _word(value: Any) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":"))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _reachable(host: str) -> str:
    """Where a client finds a server that binds ``host``."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - read, not bound


def shell_command(service: Service) -> str:
    """The service as one shell command: docker run for a container, else env and argv."""
    words = _docker_words(service) if service.container else _process_words(service)
    return " \\\n    ".join(" ".join(map(_quote, group)) for group in words)


def _process_words(service: Service) -> Iterator[list[str]]:
    if service.cwd:
        yield ["cd", service.cwd, "&&"]
    for key, value in service.env.items():
        yield [f"{key}={value}"]
    yield from _flag_groups(service.argv)


def _docker_words(service: Service) -> Iterator[list[str]]:
    container = service.container
    assert container is not None
    yield ["docker", "run", "-d", "--name", service.name]
    if container.gpus:
        yield ["--gpus", container.gpus]
    yield [f"--ipc={container.ipc}"]
    yield ["--network", container.network]
    argv = service.argv
    if service.role == "vllm":
        for flag in ("shm_size", "memory", "memory_swap"):
            if (value := getattr(container, flag)) is not None:
                yield [f"--{flag.replace('_', '-')}", value]
    for path in service.volumes:
        yield ["-v", f"{path}:{path}"]
    for key, value in service.env.items():
        yield ["-e", f"{key}={value}"]
    if service.role == "lmcache":
        yield ["--entrypoint", argv[0]]
        argv = argv[1:]
    yield [container.image]
    yield from _flag_groups(argv)


def _flag_groups(argv: Iterable[str]) -> Iterator[list[str]]:
    """The words of a command, a flag and its value together."""
    group: list[str] = []
    for word in argv:
        if word.startswith("-") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _quote(word: str) -> str:
    return word if word == "&&" or word.startswith("<") else shlex.quote(word)


def describe(profile: Profile, scenarios: Iterable[str], place: Place | None = None) -> str:
    """The plan as people read it: order, commands, waits, and what differs from published ones."""
    lines: list[str] = []
    for scenario in scenarios:
        steps = plan(profile, scenario, place)
        lines += [f"# scenario {scenario}", ""]
        for number, service in enumerate(steps.services, start=1):
            lines += [
                f"# {number}. {service.name}",
                shell_command(service),
                f"#    wait until {service.url}{service.health} answers healthy "
                f"(at most {service.ready_s:g} s; an exit ends the wait at once)",
                "",
            ]
        if steps.connector:
            lines.append(f"# connector: {steps.connector}. {CONNECTOR_REASONS[steps.connector]}")
            lines.append("#    wait until the worker is registered, then probe: 4 chunks stored")
            lines.append("#    and found again")
        if steps.settle_s:
            lines.append(f"#    then wait {steps.settle_s:g} s")
        stop = " ".join(service.name for service in reversed(steps.services))
        lines += [f"# afterwards stop: {stop}", ""]
    for deviation in profile.deviations:
        lines.append(
            f"# deviates from the published {deviation.setting} = {deviation.published}: "
            f"{deviation.reason}"
        )
    return "\n".join(lines).rstrip() + "\n"


def shell_text(profile: Profile, scenarios: Iterable[str], place: Place | None = None) -> str:
    """Only the commands, in order, ready for a shell."""
    return "".join(
        shell_command(service) + "\n\n"
        for scenario in scenarios
        for service in plan(profile, scenario, place).services
    )
