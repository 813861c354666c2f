"""Rules about memory and processors: L1 beside everything else, eviction, workers, GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.preflight.blocks import REPORT
from kvlab.preflight.case import Case
from kvlab.preflight.connection import flag, gib
from kvlab.preflight.rule import Example, Found, rule

EVICTION_RATIO_MAX = 0.9
"""From here on an eviction empties L1; LMCache's default is 0.2."""
CLOCK_SHARE_MIN = 0.5
BUSY_PERCENT = 90.0


@rule(
    "KV004",
    "note",
    "An eviction ratio for experiments",
    why="Such a ratio empties L1 at every eviction; it makes overflow plain in an experiment and "
    "is no setting for production, where the documented default is 0.2.",
    source=f"{REPORT}, section 2.1",
    example=Example(profile="dgx-spark"),
)
def eviction_ratio(case: Case) -> Iterator[Found]:
    ratio = case.profile.cache.eviction_ratio
    if ratio >= EVICTION_RATIO_MAX:
        yield Found(
            text=f"eviction-ratio {ratio:g} empties L1 at every eviction",
            settings={"cache.eviction_ratio": 0.2},
        )


@rule(
    "KV040",
    "error",
    "More memory than there is",
    why="L1, vLLM and the system share the memory; the kernel ends the largest process when it is "
    "used up, in the middle of a round.",
    source=f"{REPORT}, section 5.3; LMCache issue 4759",
    example=Example(
        profile="dgx-spark",
        settings={"cache.l1_size_gb": 80},
        host={"memory_gib": 121.0, "gpus": [{"name": "NVIDIA GB10"}]},
    ),
)
def memory(case: Case) -> Iterator[Found]:
    total = case.memory_gib
    if total is None:
        return
    others = case.engine_gib + case.cache_gib - case.profile.cache.l1_size_gb + case.reserve_gib
    size, room = case.profile.cache.l1_size_gb, total - others
    if size > room:
        yield Found(
            text=f"L1 {size:g} GiB, vLLM {case.engine_gib:.3g} GiB and the system's "
            f"{case.reserve_gib:.3g} GiB exceed the {total:g} GiB of this machine",
            settings={"cache.l1_size_gb": _below(room)} if room > 0.1 else {},
            do="" if room > 0.1 else "lower vLLM's share of the memory, or use a larger machine",
        )


@rule(
    "KV041",
    "warning",
    "Other processes hold the memory",
    why="What other processes use now is missing when L1 grows: it is pinned late, swaps, or is "
    "refused.",
    source=f"{REPORT}, section 5.3; LMCache issue 4980",
    example=Example(
        settings={"cache.l1_size_gb": 6},
        host={"memory_gib": 16.0, "now": {"memory_available_gib": 5.0}},
    ),
)
def memory_now(case: Case) -> Iterator[Found]:
    available = (case.host.get("now") or {}).get("memory_available_gib")
    need = case.engine_gib + case.cache_gib
    if available is not None and need > available:
        yield Found(
            text=f"about {need:.3g} GiB are needed and {available:g} GiB are available now",
            do="stop what holds the memory; `kvlab clean` ends left-over servers of kvlab",
        )


@rule(
    "KV042",
    "warning",
    "L1 starts larger than it may be",
    why="The initial size is the part of L1 that is taken at the start; above the size it means "
    "that one of the two is not what was intended.",
    source="LMCache's configuration reference",
    example=Example(profile="dgx-spark", settings={"cache.l1_init_size_gb": 40}),
)
def initial_size(case: Case) -> Iterator[Found]:
    cache = case.profile.cache
    if cache.l1_init_size_gb is not None and cache.l1_init_size_gb > cache.l1_size_gb:
        yield Found(
            text=f"l1-init-size-gb {cache.l1_init_size_gb} is above l1-size-gb "
            f"{cache.l1_size_gb:g}",
            settings={"cache.l1_init_size_gb": int(cache.l1_size_gb) or None},
        )


@rule(
    "KV043",
    "warning",
    "An eviction policy that stops evicting",
    why="IsolatedLRU was reported to end the eviction thread: L1 fills up and every later store is "
    "skipped.",
    source="LMCache issue 4817",
    example=Example(settings={"cache.eviction_policy": "IsolatedLRU"}),
)
def eviction_policy(case: Case) -> Iterator[Found]:
    if case.profile.cache.eviction_policy == "IsolatedLRU":
        yield Found(
            text="eviction-policy is IsolatedLRU", settings={"cache.eviction_policy": "LRU"}
        )


@rule(
    "KV044",
    "note",
    "One worker for several vLLM instances",
    why="LMCache's worker pools have one thread by default: stores and retrieves of several "
    "instances then wait for each other.",
    source=f"{REPORT}, section 5.3",
    example=Example(experiments=("shared-cache",)),
)
def workers(case: Case) -> Iterator[Found]:
    flags, wanted = case.profile.cache.flags, case.instances
    given = flag(flags, "max-gpu-workers") or flag(flags, "max-workers") or 1
    if wanted > 1 and int(given) < wanted:
        yield Found(
            text=f"{wanted} vLLM instances share {given} transfer worker(s) of LMCache",
            settings={"cache.flags.max-gpu-workers": wanted},
        )


@rule(
    "KV045",
    "error",
    "No GPU",
    why="The containers ask for GPUs, and this machine shows none.",
    source="NVIDIA's container toolkit",
    example=Example(profile="dgx-spark", host={"gpus": []}),
)
def gpu_present(case: Case) -> Iterator[Found]:
    container = case.profile.container
    if not (case.in_containers and container and container.gpus):
        return
    if "gpus" in case.host and not case.host["gpus"]:
        state = "nvidia-smi lists none" if case.host["gpus"] == [] else "nvidia-smi does not answer"
        yield Found(
            text=f"container.gpus is {container.gpus}, but {state}",
            do="run on the machine that has them, or try `kvlab check embedded`",
        )


@rule(
    "KV046",
    "warning",
    "A GPU below half its clock",
    why="A GPU that is throttled or capped is slow without any error: times then tell of the power "
    "supply, not of the cache.",
    source="reports on GB10 at 500 to 850 MHz: DGX Spark forum, spark-gpu-throttle-check",
    example=Example(
        profile="dgx-spark",
        probe={
            "gpus_now": (
                {
                    "name": "NVIDIA GB10",
                    "utilization_percent": 97.0,
                    "clock_mhz": 650.0,
                    "max_clock_mhz": 2411.0,
                },
            )
        },
    ),
)
def gpu_clock(case: Case) -> Iterator[Found]:
    remedy = "check power supply and cooling, then check again"
    for gpu in case.probe.gpus_now or ():
        clock, most = float(gpu.get("clock_mhz") or 0), float(gpu.get("max_clock_mhz") or 0)
        busy = float(gpu.get("utilization_percent") or 0)
        if gpu.get("slowed"):
            yield Found(text=f"{gpu['name']} is slowed: {', '.join(gpu['slowed'])}", do=remedy)
        elif clock and busy >= BUSY_PERCENT and clock < CLOCK_SHARE_MIN * most:
            yield Found(
                text=f"{gpu['name']} runs at {clock:g} of {most:g} MHz under full use", do=remedy
            )


@rule(
    "KV048",
    "error",
    "No container engine",
    why="The docker runtime starts every server in a container, and this machine has no docker.",
    source="docker/README.md",
    example=Example(profile="dgx-spark", host={"container_engine": None}),
)
def container_engine(case: Case) -> Iterator[Found]:
    if case.in_containers and case.host.get("container_engine", "unknown") is None:
        yield Found(
            text="runtime docker, and no docker was found",
            do="apt-get install docker.io, or use a profile of runtime process: embedded",
        )


@rule(
    "KV047",
    "error",
    "A container's limit below its need",
    why="The kernel ends a container that reaches its limit, in the middle of a round.",
    source="LMCache issue 4759",
    example=Example(
        profile="embedded-docker",
        settings={"cache.l1_size_gb": 8, "container.lmcache_limits.memory": "4g"},
    ),
)
def container_limits(case: Case) -> Iterator[Found]:
    container = case.profile.container
    if not case.in_containers or container is None:
        return
    needs = {
        "container.lmcache_limits.memory": (container.lmcache_limits.memory, case.cache_gib),
        "container.memory": (container.memory, case.engine_gib / case.instances),
    }
    for key, (limit, need) in needs.items():
        size = gib(limit) if limit else None
        if size is not None and need > size:
            enough = f"{int(need) + 1}g"
            swap = f"{key}_swap"  # docker refuses a swap limit below the memory limit
            yield Found(
                text=f"{key} is {limit}, about {need:.3g} GiB are needed",
                settings={key: enough, swap: enough},
            )


def _below(gib: float) -> float:
    """A round size a little below."""
    return float(int(gib)) if gib >= 2 else round(gib * 0.9, 2)
