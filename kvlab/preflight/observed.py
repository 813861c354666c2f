"""Rules about what logs show of a start or a run that was."""

from __future__ import annotations

from collections.abc import Iterator

from kvlab.preflight.blocks import REPORT
from kvlab.preflight.case import Case
from kvlab.preflight.rule import Example, Found, rule

UNSTATED = "(unstated)"


@rule(
    "KV090",
    "warning",
    "A slow path was taken",
    why="Without compiled operators or shared memory transfers still work, by Python and pickle, "
    "and the gain of caching goes into copies.",
    source="LMCache issues 3957 and 4447",
    example=Example(log="WARN  /dev/shm too small: need 68719476736 have 67108864, using pickle"),
)
def slow_paths(case: Case) -> Iterator[Found]:
    yield from _lines(case, "slow_paths", "install the wheel for this CUDA, enlarge /dev/shm")


@rule(
    "KV091",
    "warning",
    "Stores or retrieves failed",
    why="Requests still succeed, by recomputing; what was not stored is missing later, above all "
    "after a restart.",
    source="LMCache issues 3388 and 4364",
    example=Example(log="Store task 3 to adapter 0 failed"),
)
def failed_transfers(case: Case) -> Iterator[Found]:
    for name in ("failed_stores", "failed_retrieves"):
        yield from _lines(case, name, "see the lines around it; check free disk and L1's size")


@rule(
    "KV092",
    "warning",
    "vLLM worked without the cache",
    why="The server is healthy and answers, but no worker is registered with it or requests go "
    "around it: everything is computed.",
    source="LMCache issues 5164 and 3206",
    example=Example(log="ERROR No registered context for instance 7"),
)
def not_registered(case: Case) -> Iterator[Found]:
    for name in ("unregistered", "recomputed", "reaped_workers"):
        yield from _lines(
            case, name, "compare connector address, IPC mode and versions of both sides"
        )


@rule(
    "KV093",
    "error",
    "The hybrid cache manager is off",
    why="Without it every layer kind takes full blocks: L0 shrinks in one arm only, and recurrent "
    "state is not kept by blocks.",
    source="vLLM issue 41830",
    example=Example(log="Turning off hybrid kv cache manager because of the connector"),
)
def hybrid_manager(case: Case) -> Iterator[Found]:
    if case.profile.model.hybrid and case.fact("hybrid_manager_off"):
        yield Found(
            text="the log says: turning off hybrid kv cache manager",
            settings={"engine.flags.disable-hybrid-kv-cache-manager": False},
        )


@rule(
    "KV094",
    "warning",
    "The arms have unequal L0",
    why="Two vLLM logs state different cache sizes: then the arms differ in more than LMCache.",
    source="vLLM issue 41830; LMCache issue 4287",
    example=Example(
        settings={"engine.kv_cache_tokens": None, "workload.contexts": 800},
        log="GPU KV cache size: 412,160 tokens\n---\nGPU KV cache size: 268,800 tokens",
    ),
)
def unequal_arms(case: Case) -> Iterator[Found]:
    sizes = list(case.said("kv_cache_tokens"))
    allowed = case.profile.thresholds.kv_size_diff_max
    if len(sizes) > 1 and max(sizes) - min(sizes) > allowed * max(sizes):
        yield Found(
            text=f"arms not comparable: KV {' vs '.join(f'{size:,}' for size in sizes)} tokens",
            settings={"engine.flags.num-gpu-blocks-override": min(sizes) // case.n},
            do="so that both arms get the same",
        )


@rule(
    "KV095",
    "error",
    "LMCache differs between the two sides",
    why="Connector and server speak a protocol that changes between versions: a mismatch fails in "
    "odd ways, or not at all until a retrieve.",
    source="LMCache issue 4711",
    example=Example(
        profile="dgx-spark",
        probe={"lmcache_versions": {"bench-lmcache": "0.5.3", "bench-vllm-on": "0.4.5"}},
    ),
)
def lmcache_versions(case: Case) -> Iterator[Found]:
    versions = case.probe.lmcache_versions
    if len(set(versions.values())) > 1:
        named = ", ".join(f"{version} in {name}" for name, version in versions.items())
        yield Found(
            text=f"LMCache {named}",
            do="use one image for both containers, or install one version of lmcache in both",
        )


@rule(
    "KV096",
    "note",
    "Versions that kvlab has not read before",
    why="Log lines and counters are recognised by the wording of known versions; in others a fact "
    "may go unnoticed.",
    source=f"{REPORT}, section 7 (settings may change between versions)",
    example=Example(log="Initializing a V1 LLM engine (v0.41.0) with config: model='m'"),
)
def unknown_version(case: Case) -> Iterator[Found]:
    every = {name for names in case.said("unknown_versions") for name in names}
    for name in sorted(every):
        if UNSTATED not in name:
            yield Found(
                text=f"the log is of {name}, whose wording was not looked up",
                do="look at the log yourself for block size, connector and failures",
            )


@rule(
    "KV098",
    "error",
    "CUDA IPC failed",
    why="The control channel was up, so the network is right: it is the memory of the other "
    "process that cannot be opened.",
    source="LMCache issue 4534",
    example=Example(
        profile="dgx-spark", log="RuntimeError: cudaIpcOpenMemHandle failed: invalid argument"
    ),
)
def ipc_errors(case: Case) -> Iterator[Found]:
    yield from _lines(
        case, "ipc_errors", "start both containers with ipc: host, or both with isolated IPC"
    )


@rule(
    "KV097",
    "error",
    "Memory ran out",
    why="A server that was short of memory has dropped stores, or was ended by the kernel in the "
    "middle of a round.",
    source="LMCache issue 4759",
    example=Example(log="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
)
def out_of_memory(case: Case) -> Iterator[Found]:
    yield from _lines(case, "out_of_memory", "lower gpu-memory-utilization or cache.l1_size_gb")


def _lines(case: Case, name: str, remedy: str) -> Iterator[Found]:
    """A finding for each log that has lines of this kind, with the first of them."""
    for entry in case.said(name):
        count, first = entry["count"], entry["lines"][0]
        times = f"{count} lines, the first: " if count > 1 else ""
        yield Found(text=f"{times}{first}", do=remedy)
