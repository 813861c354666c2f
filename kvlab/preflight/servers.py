"""Rules about the servers as programs: engine, image, addresses, ports, flags, versions."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.preflight.blocks import REPORT
from kvlab.preflight.case import Case
from kvlab.preflight.connection import flag, spelled
from kvlab.preflight.rule import Example, Found, rule

EVERYWHERE = ("0.0.0.0", "::", "[::]")  # noqa: S104 - the rule that finds it
MUTABLE = ("latest", "nightly", "main", "dev", "edge", "stable")


@rule(
    "KV001",
    "error",
    "No engine environment",
    why="The process runtime starts vLLM and LMCache from an environment of their own.",
    source="README.md",
    example=Example(
        probe={
            "engine_missing": "there is no engine environment in .venv-engine",
            "engine_hint": "run `make engine`",
        }
    ),
)
def engine(case: Case) -> Iterator[Found]:
    if case.profile.runtime == "process" and case.probe.engine_missing:
        yield Found(text=case.probe.engine_missing, do=case.probe.engine_hint or "make engine")


@rule(
    "KV003",
    "warning",
    "A server is open to the network",
    why="Neither vLLM's API nor LMCache's HTTP server asks for a password: on every address, with "
    "the host's network, anyone may use, read and clear them.",
    source="LMCache's --http-host help; vLLM's security guide",
    example=Example(profile="dgx-spark", settings={"engine.host": "0.0.0.0"}),  # noqa: S104
)
def open_to_the_network(case: Case) -> Iterator[Found]:
    cache = case.profile.cache
    if case.profile.engine.host in EVERYWHERE:
        yield Found(
            text=f"vLLM binds {case.profile.engine.host}",
            settings={"engine.host": "127.0.0.1"},
        )
    if cache.host in EVERYWHERE:
        yield Found(text=f"LMCache binds {cache.host}", settings={"cache.host": "127.0.0.1"})
    http = flag(cache.flags, "http-host")
    container = case.profile.container
    unsaid = http is None and case.in_containers and container and container.network == "host"
    if http in EVERYWHERE or unsaid:
        said = f"binds {http}" if http else "is given no address: some versions bind 0.0.0.0"
        yield Found(
            text=f"LMCache's HTTP server {said}", settings={"cache.flags.http-host": "127.0.0.1"}
        )


@rule(
    "KV005",
    "warning",
    "An image that may change under its name",
    why="Another day the same command starts other versions, and results cannot be repeated.",
    source=f"{REPORT}, section 6 (versions must be checked anew)",
    example=Example(profile="dgx-spark"),
)
def mutable_image(case: Case) -> Iterator[Found]:
    image, tag, digest = _image(case)
    if image and not digest and tag in MUTABLE:
        yield Found(text=f"image {image} may change under the same name", do=_pin(image))


@rule(
    "KV008",
    "note",
    "An image by its tag alone",
    why="A tag can be moved to other bytes; a digest cannot.",
    source="Docker's image documentation",
    example=Example(profile="dgx-spark", settings={"container.image": "vllm/vllm-openai:v0.25.1"}),
)
def tagged_image(case: Case) -> Iterator[Found]:
    image, tag, digest = _image(case)
    if image and not digest and tag and tag not in MUTABLE:
        yield Found(text=f"image {image} is named by its tag alone", do=_pin(image))


@rule(
    "KV009",
    "warning",
    "Code from the model's repository would run",
    why="`--trust-remote-code` runs the Python files that come with the weights, with all rights "
    "of the server.",
    source="vLLM's engine arguments",
    example=Example(
        profile="dgx-spark",
        probe={"config": {"auto_map": {"AutoModelForCausalLM": "modeling_custom.Model"}}},
    ),
)
def remote_code(case: Case) -> Iterator[Found]:
    trusted = flag(case.profile.engine.flags, "trust-remote-code")
    config = case.probe.config
    if not trusted or (config is not None and not config.get("auto_map")):
        return  # without auto_map there is no code to run, and the flag is idle
    known = (
        f"the model's config.json names code of its own: {', '.join(config['auto_map'].values())}"
        if config and isinstance(config.get("auto_map"), dict)
        else "its config.json is not on this machine, so nothing tells whether it has code"
    )
    yield Found(
        text=f"trust-remote-code is on for {case.profile.model.name}; {known}",
        settings={f"engine.flags.{spelled(case.profile.engine.flags, 'trust-remote-code')}": None},
        do="or read that code, and pin it with engine.flags.revision",
    )


@rule(
    "KV078",
    "note",
    "A metrics port that answers nothing",
    why="LMCache serves /metrics on its HTTP port, and only after the first traffic; a port 9090 "
    "that is open proves nothing.",
    source="LMCache pull request 3962",
    example=Example(settings={"cache.flags.prometheus-port": 9090}),
)
def metrics_port(case: Case) -> Iterator[Found]:
    port = flag(case.profile.cache.flags, "prometheus-port")
    if port is not None:
        yield Found(
            text=f"prometheus-port is {port}; kvlab reads /metrics on the HTTP port",
            settings={f"cache.flags.{spelled(case.profile.cache.flags, 'prometheus-port')}": None},
        )


@rule(
    "KV079",
    "error",
    "LMCache's counters are off",
    why="Without counters nothing proves which tier served a token, and no verdict is possible.",
    source="docs/metrics.md",
    example=Example(settings={"cache.flags.disable-metrics": True}),
)
def counters_off(case: Case) -> Iterator[Found]:
    for name in ("disable-metrics", "disable-observability"):
        if flag(case.profile.cache.flags, name):
            key = spelled(case.profile.cache.flags, name)
            yield Found(text=f"{name} is set", settings={f"cache.flags.{key}": None})


@rule(
    "KV080",
    "error",
    "A port is taken",
    why="The server cannot bind, and a health check may be answered by somebody else's.",
    source="vLLM issue 7514",
    example=Example(settings={"engine.port": 8100}, probe={"ports": {8100: "python (pid 4711)"}}),
)
def ports(case: Case) -> Iterator[Found]:
    engine, cache = case.profile.engine, case.profile.cache
    wanted = {
        "engine.port": engine.port,
        "cache.port": cache.port,
        "cache.http_port": cache.http_port,
    }
    for key, port in wanted.items():
        if port and port in case.probe.ports:
            yield Found(
                text=f"port {port} is in use by {case.probe.ports[port]}",
                settings={key: 0},
                do="(a free one is chosen), or stop that process",
            )


@rule(
    "KV081",
    "note",
    "Proxy variables are set",
    why="A proxy collects a stream before passing it on, which spoils TTFT; kvlab goes around it "
    "on this machine, other clients do not.",
    source="vLLM issue 22058",
    example=Example(host={"proxy_variables": ["HTTP_PROXY"]}),
)
def proxies(case: Case) -> Iterator[Found]:
    names = case.host.get("proxy_variables") or ()
    if names:
        yield Found(
            text=f"{', '.join(names)}: set here",
            do=f"for other clients: unset {' '.join(names)}, or NO_PROXY=127.0.0.1,localhost",
        )


@rule(
    "KV082",
    "warning",
    "Servers of a killed run are still there",
    why="They hold memory and ports, and their times mix with those of the new run.",
    source="LMCache issue 4980",
    example=Example(probe={"leftovers": 2}),
)
def leftover_servers(case: Case) -> Iterator[Found]:
    if case.probe.leftovers:
        yield Found(
            text=f"{case.probe.leftovers} processes of an earlier run of kvlab are alive",
            do="kvlab clean",
        )


@rule(
    "KV083",
    "error",
    "A flag that the engine does not know",
    why="The server ends at its start, after the imports; flags are renamed between versions.",
    source="the engine's own parsers (`kvlab check --against-engine`)",
    example=Example(
        settings={"engine.flags.max-num-seq": 4},
        probe={
            "parsed": (
                {
                    "service": "vllm",
                    "word": "--max-num-seq",
                    "problem": "unknown flag",
                    "nearest": "--max-num-seqs",
                },
            ),
            "parsers": "vLLM 0.32.0",
        },
    ),
)
def known_flags(case: Case) -> Iterator[Found]:
    for refused in case.probe.parsed or ():
        nearest = refused.get("nearest")
        yield Found(
            text=f"{refused['service']}: {refused['word']}: {refused['problem']} "
            f"({case.probe.parsers})",
            do=f"did you mean {nearest}?"
            if nearest
            else "leave it out, or see the server's --help",
        )


def _image(case: Case) -> tuple[str, str, str]:
    """The image's whole name, its tag and its digest; empty where there is none."""
    container = case.profile.container if case.in_containers else None
    image = container.image if container else ""
    name, _, digest = image.partition("@")
    last = name.rpartition("/")[2]  # a registry's port is no tag
    return image, last.partition(":")[2], digest


def _pin(image: str) -> str:
    name = image.partition("@")[0]
    host, slash, last = name.rpartition("/")
    bare = f"{host}{slash}{last.partition(':')[0]}"
    return (
        f"--set container.image={bare}@sha256:<digest>; the digest: "
        f"docker image inspect --format '{{{{index .RepoDigests 0}}}}' {image}"
    )
