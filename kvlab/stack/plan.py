"""What would be started for a profile and a scenario: pure, and compared by equality in tests."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvlab.errors import UsageError
from kvlab.profile import Attach, Container, Limits, Profile

SCENARIOS = ("baseline", "lmcache", "control", "shared")
"""``control`` is the baseline launched again under another name, for the A/A test; ``shared`` is
several vLLM instances on one LMCache server."""
FREE = "<free port>"
PACKAGE_ROOT = "/opt/kvlab"
"""Where a container finds kvlab."""
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
    package: str | None = "<kvlab package>"
    """What a container imports as kvlab; None: the copy in its image."""
    user: str = "<uid>:<gid>"
    """Whoever runs kvlab."""


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
    entrypoint: bool = False
    """Of a container: whether ``argv[0]`` takes the place of the image's entrypoint."""
    volumes: tuple[str, ...] = ()
    """Of a container: ``source:target`` or ``source:target:ro``."""
    limits: Limits = field(default_factory=Limits)
    user: str | None = None


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
    if not profile.fresh:
        raise UsageError(
            f"profile {profile.name} attaches to servers that already run: nothing is started",
            hint=f"see what is asked of them: kvlab plan {profile.name}",
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
        volumes = (f"{base_path}:{base_path}",)
    container = _container(profile)
    program = _interpreted("lmcache.cli.main", container, place)
    if container and not program:
        program = (container.lmcache_entrypoint,)
    service = Service(
        name="lmcache",
        role="lmcache",
        argv=(*program, "server", *render_flags({**flags, **cache.flags})),
        env=dict(cache.env),
        ports=(port, http_port),
        url=f"http://{cache.host}:{http_port}",
        health="/healthcheck",
        ready_s=profile.timeouts.lmcache_ready_s,
    )
    if container is None:
        return service
    shared = _both_sides(container.volumes) if container.python else ()
    return replace(
        _contained(service, container, place, (*volumes, *shared)),
        name=_named(container, "lmcache_server"),
        entrypoint=True,
        limits=container.lmcache_limits,
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
    container = _container(profile)
    program = _interpreted("vllm.entrypoints.openai.api_server", container, place)
    program = (*program, "--model", profile.model.name) if program else (profile.model.name,)
    more = f"-{number}" if number > 1 else ""
    service = Service(
        name=f"vllm{more}",
        role="vllm",
        argv=(*program, *render_flags(flags)),
        env=env,
        cwd=place.models,
        ports=(port,),
        url=f"http://{_reachable(engine.host)}:{port}",
        ready_s=profile.timeouts.vllm_ready_s,
    )
    if container is None:
        return service
    built = profile.model.source == "built"
    models = (f"{place.models}:{place.models}:ro",) if built else ()
    return replace(
        _contained(service, container, place, (*_both_sides(container.volumes), *models)),
        name=_named(container, "lmcache" if with_cache else "baseline") + more,
        entrypoint=container.python is not None,
        cwd=place.models if built else None,
        limits=Limits(**{name: getattr(container, name) for name in Limits.model_fields}),
    )


def _container(profile: Profile) -> Container | None:
    """How services become containers; None where they are processes."""
    return profile.container if profile.runtime == "docker" else None


def _interpreted(module: str, container: Container | None, place: Place) -> tuple[str, ...]:
    """A module's command; empty where the image's own entrypoint runs it."""
    python = container.python if container else place.engine_python
    return () if python is None else (python, "-m", module)


def _named(container: Container, role: Literal["baseline", "lmcache_server", "lmcache"]) -> str:
    return f"{container.prefix}{container.names[role]}{container.suffix}"


def _contained(
    service: Service, container: Container, place: Place, volumes: tuple[str, ...]
) -> Service:
    """The service in a container, as far as both roles are alike."""
    env = dict(service.env)
    if container.python and place.package:  # it runs kvlab's engine part
        env["PYTHONPATH"] = PACKAGE_ROOT
        volumes = (*volumes, f"{place.package}:{PACKAGE_ROOT}/kvlab:ro")
    user = place.user if container.user == "caller" else container.user
    return replace(service, container=container, env=env, volumes=volumes, user=user)


def _both_sides(volumes: Iterable[str]) -> Iterator[str]:
    """Volumes in full: a path alone is the same on both sides."""
    for volume in volumes:
        yield volume if ":" in volume else f"{volume}:{volume}"


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
    yield from flag_groups(service.argv)


def _docker_words(service: Service) -> Iterator[list[str]]:
    container = service.container
    assert container is not None
    yield ["docker", "run", "-d", "--name", service.name]
    if container.gpus:
        yield ["--device" if is_cdi(container.gpus) else "--gpus", container.gpus]
    yield [f"--ipc={container.ipc}"]
    yield ["--network", container.network]
    if container.pid:
        yield [f"--pid={container.pid}"]
    if service.user:
        yield ["--user", service.user]
    for flag, value in service.limits.model_dump(exclude_none=True).items():
        yield [f"--{flag.replace('_', '-')}", value]
    for volume in service.volumes:
        yield ["-v", volume]
    for key, value in service.env.items():
        yield ["-e", f"{key}={value}"]
    if service.cwd:
        yield ["-w", service.cwd]
    argv = service.argv
    if service.entrypoint:
        yield ["--entrypoint", argv[0]]
        argv = argv[1:]
    yield [container.image]
    yield from flag_groups(argv)


def is_cdi(gpus: str) -> bool:
    """Whether GPUs are named as the Container Device Interface does: ``vendor.com/class=name``."""
    return "/" in gpus.partition("=")[0]


def flag_groups(argv: Iterable[str]) -> Iterator[list[str]]:
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
    if not profile.fresh and profile.attach is not None:
        return "\n".join(_looks(profile.attach)) + "\n"
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


def _looks(attach: Attach) -> Iterator[str]:
    """What is asked of a deployment that already runs."""
    yield "# nothing is started or stopped: the deployment already runs"
    groups = (
        ("vLLM without LMCache", [attach.baseline] if attach.baseline else []),
        ("vLLM with LMCache", attach.vllm),
        ("LMCache", attach.lmcache),
    )
    for name, places in groups:
        for place in places:
            yield f"# {name}: {place.base} (counters: {place.metrics_url})"
    if attach.baseline is None:
        yield "# no vLLM without LMCache: a speedup cannot be proven"
    if attach.entry:
        yield f"# requests go to {attach.entry.base}"
    yield "# each is asked what it is, and refused where it is not what the profile says"


def shell_text(profile: Profile, scenarios: Iterable[str], place: Place | None = None) -> str:
    """Only the commands, in order, ready for a shell."""
    return "".join(
        shell_command(service) + "\n\n"
        for scenario in scenarios
        for service in plan(profile, scenario, place).services
    )
