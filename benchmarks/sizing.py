"""How fast kvlab's sizing is, and whether it hits as often as other simulators say.

One trace, every tool in a fresh process, from the file on disk to the answer; the order is reversed
in every second pass. Hit counts are compared as well as times: where they differ, the rule that
makes the difference is played here, and has to give the other tool's count exactly.

    python -m venv /tmp/others && /tmp/others/bin/pip install kvcache-simulator
    python benchmarks/sizing.py --kvcache-python /tmp/others/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL, BLOCK_TOKENS, BLOCK_BYTES = "llama-3.1-8b", 16, 16 * 131_072
"""What kvcache-simulator turns a memory budget into blocks with: 2 MiB each."""
SHARES = (0.1, 0.4)
"""The two capacities, as shares of the distinct blocks."""
POINTS = 20
CONTEXTS = 50_000
"""Contexts of the long trace, however many requests it has."""
TARGETS = {
    "two-round": "665 contexts x 2 rounds: under 0.2 s",
    "million": "1,000,000 requests x 5 blocks: under 20 s, memory as for a quarter of them",
    "curve": "20 capacities from one pass, faster than the C++ backend with 2",
}


# --- the trace ------------------------------------------------------------------------------------


def write_trace(folder: Path, requests: int, blocks: int) -> dict[str, Any]:
    """The same requests in both tools' forms; how many distinct blocks they have.

    Contexts return by Zipf's law, and each shares its first half with nine others.
    """
    folder.mkdir(exist_ok=True)
    rng = random.Random(7)
    contexts = max(1, requests // 10)
    weights = [1 / rank**0.8 for rank in range(1, contexts + 1)]
    asked = rng.choices(range(contexts), weights, k=requests)
    shared = blocks // 2
    with (
        (folder / "trace.jsonl").open("w") as plain,
        (folder / "lookup_hashes_0.jsonl").open("w") as log,
    ):
        for number, context in enumerate(asked):
            head = [(context // 10) * shared + depth for depth in range(shared)]
            tail = [2**30 + context * blocks + depth for depth in range(shared, blocks)]
            row = {
                "hash_ids": head + tail,
                "input_length": blocks * BLOCK_TOKENS,
                "block_size": BLOCK_TOKENS,
            }
            plain.write(json.dumps(row) + "\n")
            row = {
                "timestamp": float(number),
                "chunk_size": BLOCK_TOKENS,
                "seq_len": blocks * BLOCK_TOKENS,
                "chunk_hashes": [hex(one) for one in head + tail],
            }
            log.write(json.dumps(row) + "\n")
    seen = set(asked)
    unique = len({one // 10 for one in seen}) * shared + len(seen) * (blocks - shared)
    return {"requests": requests, "blocks": blocks, "unique": unique, "folder": str(folder)}


def capacities(trace: dict[str, Any]) -> list[int]:
    """The two capacities in blocks."""
    return [int(trace["unique"] * share) for share in SHARES]


# --- what runs in a process of its own ------------------------------------------------------------


def kvlab_curve(trace: dict[str, Any], second_half: bool) -> dict[str, Any]:
    """Twenty capacities and the two that are compared, from one pass."""
    from kvlab.sizing import curve
    from kvlab.sizing import trace as traces

    folder = Path(trace["folder"])
    if second_half:  # as kvcache-simulator counts
        asked, numbers = traces.hash_ids(folder / "trace.jsonl"), itertools.count()
        half = trace["requests"] // 2
        measured: Callable[[Any], bool] | None = lambda _: next(numbers) >= half  # noqa: E731
    else:
        asked, measured = traces.lookup_log([folder / "lookup_hashes_0.jsonl"]), None
    sizes = [*curve.even_capacities(trace["unique"], POINTS), *capacities(trace)]
    found = curve.lru(asked, sizes, measured=measured, last_token_computed=False)
    hits = dict(zip(found.capacities, found.hit_chunks, strict=True))
    return {"hits": [hits[size] for size in capacities(trace)], "points": len(found.capacities)}


def lmcache_simulator(trace: dict[str, Any]) -> dict[str, Any]:
    """LMCache's cache-simulator in its fast form, once for each capacity."""
    from lmcache.tools.cache_simulator import simulator

    path = Path(trace["folder"]) / "lookup_hashes_0.jsonl"
    events = simulator.load_lookup_events([path])
    results = [
        simulator.simulate(events, size * BLOCK_BYTES, BLOCK_BYTES, fast=True)
        for size in capacities(trace)
    ]
    hits = [result["total_hit_tokens"] // BLOCK_TOKENS for result in results]
    return {"hits": hits, "points": len(hits)}


def tiers(requests: int) -> dict[str, Any]:
    """A long trace through all three tiers, with the clock running."""
    from kvlab.sizing import simulator
    from kvlab.sizing import trace as traces

    asked = traces.zipf(
        requests=requests, contexts=CONTEXTS, context_tokens=1281, chunk_tokens=256, exponent=0.9
    )
    sizes = simulator.Tiers(
        chunk_bytes=10**6,
        l0_chunks=CONTEXTS // 10,
        l1_bytes=50e9,
        l2=True,
        l2_bytes=150e9,
        l2_write_bytes_per_s=2e9,
    )
    started = time.perf_counter()
    outcome = simulator.simulate(
        asked, sizes, ttft_s=lambda one: 1e-4 * one.recompute + one.l2_bytes / 3e9
    )
    return {"seconds": time.perf_counter() - started, "served": outcome.total.served}


def two_round() -> dict[str, Any]:
    """The report's two rounds through all three tiers, the median of nine."""
    from kvlab.sizing import simulator
    from kvlab.sizing import trace as traces

    asked = traces.two_round(contexts=665, context_tokens=8000, chunk_tokens=2144)
    sizes = simulator.Tiers(
        chunk_bytes=90_015_696,
        l0_chunks=614,
        l1_bytes=20 * 2**30,
        ratio=0.99,
        l2=True,
        l2_write_bytes_per_s=2e9,
    )
    spans = []
    for _ in range(9):
        started = time.perf_counter()
        simulator.simulate(
            asked, sizes, ttft_s=lambda one: 1.28 * one.recompute / 8000 + one.l2_bytes / 3e9
        )
        spans.append(time.perf_counter() - started)
    return {"seconds": statistics.median(spans)}


# --- running and comparing ------------------------------------------------------------------------


def run(command: list[str]) -> dict[str, Any]:
    """What a command printed as JSON, with its wall time and its peak memory."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as problems:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=problems)
        _, status, usage = os.wait4(child.pid, 0)
        wall_s = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), problems.seek(0)
        if child.returncode:
            last = problems.read().decode(errors="replace").strip().splitlines()
            return {"missing": last[-1] if last else f"exit code {child.returncode}"}
        answer = json.loads(out.read())
    cpu_s = usage.ru_utime + usage.ru_stime
    return {**answer, "wall_s": wall_s, "cpu_s": cpu_s, "peak_mb": usage.ru_maxrss / 1024}


def own(name: str, *arguments: Any, python: str = sys.executable) -> dict[str, Any]:
    """One of the functions above in a fresh process."""
    return run([python, __file__, "--worker", json.dumps([name, *arguments])])


def kvcache_simulator(trace: dict[str, Any], python: str, backend: str) -> dict[str, Any]:
    """PyPI's kvcache-simulator from its command line: LRU at the two capacities."""
    budgets = ",".join(repr((size + 0.5) * BLOCK_BYTES / 2**30) for size in capacities(trace))
    command = [python, "-m", "kvcache_sim", "run", "--trace", f"{trace['folder']}/trace.jsonl"]
    command += ["--model", MODEL, "--kv-precision", "bf16_fp16", "--budgets-gib", budgets]
    command += ["--policies", "lru", "--backend", backend, "--no-progress", "--format", "json"]
    found = run(command)
    if "missing" not in found:
        points = found["points"]
        assert [point["cacheBlocks"] for point in points] == capacities(trace)
        found["hits"] = [point["results"]["lru"]["hitTokens"] // BLOCK_TOKENS for point in points]
        found["points"] = len(points)
    return found


def forward_lru(trace: dict[str, Any]) -> list[int]:
    """LMCache's simulator's rule: a request's first block is the one used longest ago."""
    hits = []
    for capacity in capacities(trace):
        held: OrderedDict[int, None] = OrderedDict()
        count = 0
        for keys in _asked(trace):
            lead = next((n for n, key in enumerate(keys) if key not in held), len(keys))
            count += lead
            for key in keys:
                if key in held:
                    held.move_to_end(key)
                    continue
                if len(held) >= capacity:
                    held.popitem(last=False)
                held[key] = None
        hits.append(count)
    return hits


def _asked(trace: dict[str, Any]) -> Iterator[list[int]]:
    with (Path(trace["folder"]) / "trace.jsonl").open() as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every tool on one trace, pass by pass."""
    trace = write_trace(folder, options.requests, options.blocks)
    warm = write_trace(folder / "warm", 100, options.blocks)
    kvcache, engine = options.kvcache_python, options.engine_python
    tools: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "kvlab": lambda one: own("kvlab_curve", one, True),
        "kvcache-simulator c++": lambda one: kvcache_simulator(one, kvcache, "cpp"),
        "kvcache-simulator python": lambda one: kvcache_simulator(one, kvcache, "python"),
        "kvlab, whole trace": lambda one: own("kvlab_curve", one, False),
        "lmcache cache-simulator": lambda one: own("lmcache_simulator", one, python=engine),
    }
    for tool in tools.values():
        tool(warm)  # compiles what has to be compiled once, not on the clock
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in tools}
    for turn in range(options.passes):
        for name in list(tools) if turn % 2 == 0 else reversed(list(tools)):
            runs[name].append(tools[name](trace))
            print(f"  {name}: {runs[name][-1].get('wall_s', 'missing')}", file=sys.stderr)
    rows = {name: _row(found) for name, found in runs.items()}
    explained = None
    if "hits" in rows["lmcache cache-simulator"]:
        explained = forward_lru(trace) == rows["lmcache cache-simulator"]["hits"]
    return {"trace": trace, "capacities": capacities(trace), "tools": rows, "forward": explained}


def _row(found: list[dict[str, Any]]) -> dict[str, Any]:
    if missing := [one["missing"] for one in found if "missing" in one]:
        return {"missing": missing[0]}
    return {
        "wall_s": statistics.median(one["wall_s"] for one in found),
        "cpu_s": statistics.median(one["cpu_s"] for one in found),
        "passes_s": [one["wall_s"] for one in found],
        "peak_mb": max(one["peak_mb"] for one in found),
        "points": found[0]["points"],
        "hits": found[0]["hits"],
    }


def report(result: dict[str, Any]) -> None:
    """The result as a table."""
    trace, rows = result["compared"]["trace"], result["compared"]["tools"]
    print(
        f"\n{trace['requests']:,} requests x {trace['blocks']} blocks, {trace['unique']:,} "
        f"distinct; capacities {result['compared']['capacities']}"
    )
    base = rows["kvlab"]
    head = f"{'seconds':>9}{'x kvlab':>9}{'CPU s':>8}{'x kvlab':>9}{'MB':>7}{'points':>8}"
    print(f"{'':26}{head}  hits at the two capacities")
    for name, row in rows.items():
        if "missing" in row:
            print(f"{name:26} missing: {row['missing']}")
            continue
        print(
            f"{name:26}{row['wall_s']:9.2f}{row['wall_s'] / base['wall_s']:9.2f}"
            f"{row['cpu_s']:8.2f}{row['cpu_s'] / base['cpu_s']:9.2f}"
            f"{row['peak_mb']:7.0f}{row['points']:8}"
            f"  {', '.join(f'{hits:,}' for hits in row['hits'])}"
        )
    print("kvlab and kvcache-simulator count the second half of the requests, the last two all.")
    if result["compared"]["forward"] is not None:
        word = "gives" if result["compared"]["forward"] else "does NOT give"
        print(
            "lmcache's simulator counts a request's first block as used before its others, so it\n"
            "loses prefixes first (LMCache itself does the opposite within one call); that rule\n"
            f"{word} exactly its hits."
        )
    print(f"\n{TARGETS['two-round']}: {result['two_round']['seconds']:.3f} s")
    print(TARGETS["million"])
    for count, row in result["long"].items():
        print(f"  {int(count):>9,} requests: {row['seconds']:6.2f} s, peak {row['peak_mb']:.0f} MB")


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--long", type=int, default=1_000_000, help="requests of the long trace")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--kvcache-python", default=sys.executable, help="has kvcache-simulator")
    parser.add_argument("--engine-python", default=sys.executable, help="has lmcache")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    work.__name__: work for work in (kvlab_curve, lmcache_simulator, tiers, two_round)
}


def main(arguments: list[str]) -> None:
    """Run everything and print it."""
    options = options_of(arguments)
    if options.worker:
        name, *rest = json.loads(options.worker)
        print(json.dumps(WORKERS[name](*rest)))
        return
    if importlib.util.find_spec("kvlab") is None:
        raise SystemExit("kvlab is not importable: run this with the lab's Python")
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {"compared": compare(options, Path(folder))}
    result["two_round"] = own("two_round")
    result["long"] = {
        str(count): own("tiers", count) for count in (options.long // 4, options.long)
    }
    print(json.dumps(result)) if options.json else report(result)


if __name__ == "__main__":
    main(sys.argv[1:])
