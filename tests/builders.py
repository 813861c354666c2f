"""Synthetic run folders: a healthy two-round run, and the same run with one thing wrong.

``make_run(tmp_path)`` writes what the measuring half would write: requests, counters, events.
``edit`` sees every record before it is written and may change it or drop it, so that any fault is
a few lines; ``FAULTS`` holds the usual ones by name.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvlab import profile
from kvlab.records import Event, Record, RequestRecord, Scrape
from kvlab.rundir import STREAMS, RunDir

Edit = Callable[[Record], Record | None]

RUN = "20261130T120000Z-two-round-embedded-0123abcd"
MS = 1_000_000
START_NS = 1_000_000_000_000
TOKENS = ["jujo", "zosu", "lisu", "ruvo", "rima"]


def make_run(
    tmp_path: Path,
    *,
    contexts: int = 6,
    repeats: int = 3,
    control: bool = False,
    shape: str = "identical",
    context_tokens: int = 1121,
    cold_ms: float = 700.0,
    restored_ms: float = 100.0,
    noise: float = 0.02,
    floor_nat: float = 0.0,
    restored_nat: float = 0.0,
    object_groups: int = 2,
    seed: int = 1,
    run: str = RUN,
    overrides: dict[str, Any] | None = None,
    manifest: dict[str, Any] | None = None,
    fault: str | None = None,
    edit: Edit | None = None,
    seal: bool = True,
) -> RunDir:
    """A run folder as the two-round experiment leaves it; ``fault`` names one of ``FAULTS``."""
    arms = ["baseline", "control" if control else "lmcache"]
    resolved = profile.load(
        "embedded",
        {
            "engine.kv_cache_tokens": None,
            "workload.contexts": contexts,
            "workload.context_tokens": context_tokens,
            "workload.shape": shape,
            "cache.separate_object_groups": object_groups > 1,
            "experiments.two_round.repeats": repeats,
            **(overrides or {}),
        },
    )
    folder = RunDir.create(
        tmp_path,
        {
            **manifest_of(resolved, run),
            "arms": arms,
            "control": control,
            "order": [[r, a] for r in range(1, repeats + 1) for a in arms[:: 1 if r % 2 else -1]],
            **(manifest or {}),
        },
    )
    edits = [e for e in (FAULTS[fault] if fault else None, edit) if e]
    story = Story(
        resolved, control, cold_ms, restored_ms, noise, floor_nat, restored_nat, object_groups, seed
    )
    write(folder, [kept for record in story.tell() if (kept := both(*edits)(record))])
    folder.update_manifest(status="complete")
    if seal:
        folder.seal()
    return folder


def manifest_of(resolved: profile.Profile, run: str) -> dict[str, Any]:
    """What every manifest holds; arms and order are the experiment's."""
    return {
        "run": run,
        "experiment": "two-round",
        "profile": resolved.as_dict(),
        "profile_sha256": resolved.sha256,
        "kvlab_version": "0.1.0",
        "control": False,
        "nonce": "c0ffee",
        "seeds": {"prompts": 42, "bootstrap": 0},
        "clocks": [{"monotonic_ns": START_NS, "utc": "2026-11-30T12:00:00+00:00"}],
        "host": {"cpu": "2 cores", "proxy_variables": []},
        "fingerprint": "f" * 16,
        "connector": {"name": "kvlab", "reason": "keeps recurrent state right on CPU"},
        "model": {"name": "hybrid-2l-s0", "source": "built"},
        "commands": {},
    }


def write(folder: RunDir, told: list[Record]) -> None:
    """What ``folder.append`` would write, record by record, but at once: tests make many runs."""
    for kind, name in STREAMS.items():
        lines = [
            json.dumps({f.name: getattr(record, f.name) for f in dataclasses.fields(record)})
            for record in told
            if type(record) is kind
        ]
        (folder.path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


class Story:
    """The records of one run, in the order in which they happen."""

    def __init__(
        self,
        resolved: profile.Profile,
        control: bool,
        cold_ms: float,
        restored_ms: float,
        noise: float,
        floor_nat: float,
        restored_nat: float,
        object_groups: int,
        seed: int,
    ):
        self.profile = resolved
        self.treated = "control" if control else "lmcache"
        self.cold_ms, self.restored_ms, self.noise = cold_ms, restored_ms, noise
        self.floor_nat, self.restored_nat = floor_nat, restored_nat
        self.groups = object_groups
        self.random = random.Random(seed)
        self.now = START_NS
        self.pid = 100
        self.vllm: dict[str, float] = {}
        self.lmcache: dict[str, float] = {}
        self.work = resolved.workload
        self.chunk = resolved.cache.chunk_tokens
        self.restorable = self.work.restorable_tokens(self.chunk)

    def tell(self) -> Iterator[Record]:
        yield self.event("run_started")
        for repeat in range(1, self.profile.experiments.two_round.repeats + 1):
            arms = ["baseline", self.treated]
            for scenario in arms if repeat % 2 else arms[::-1]:
                yield from self.deployment(scenario, repeat)
        yield self.event("run_finished", status="complete")

    def deployment(self, scenario: str, repeat: int) -> Iterator[Record]:
        where = (scenario, repeat)
        names = ["vllm"] if scenario != "lmcache" else ["lmcache", "vllm"]
        self.vllm = {"local_queries": 0, "local_hits": 0, "external_queries": 0, "external_hits": 0}
        self.lmcache = dict.fromkeys(
            ("requested", "hit", "l1", "l2", "write", "read", "submitted", "completed", "loaded"), 0
        )
        self.started = 1_796_059_487.0 + self.pid
        self.pid += 10
        yield self.event("launching", *where, services=names)
        self.now += 40_000 * MS
        yield self.ready(scenario, repeat, names)
        yield from self.scrapes(scenario, repeat, "launch")
        if scenario == "lmcache":
            yield self.ask(scenario, repeat, "probe", 0)
            yield self.ask(scenario, repeat, "probe", 1)
            yield self.event(
                "probe", *where, stored_chunks=5, external_cached=self.restorable, local_reset=True
            )
        for index in range(self.profile.experiments.two_round.warmup_requests):
            yield self.ask(scenario, repeat, "warmup", index)
        if scenario == "lmcache":
            yield self.drained(scenario, repeat, "warmup")
        yield from self.round(scenario, repeat, "fill", names)
        pause = self.profile.experiments.two_round.pause_s
        self.now += int(pause * 1000) * MS
        yield self.event("pause", *where, seconds=pause)
        yield from self.round(scenario, repeat, "measure", names)
        yield self.event("arm_finished", *where)
        yield self.event("stopping", *where)
        self.now += 2000 * MS
        yield self.event("stopped", *where)

    def ready(self, scenario: str, repeat: int, names: list[str]) -> Event:
        lmcache = scenario == "lmcache"
        return self.event(
            "ready",
            scenario,
            repeat,
            start_s=40.0,
            facts={"block_tokens": 224, "kv_cache_tokens": 10922, "max_num_batched_tokens": 447},
            versions={"vllm": "0.32.0", **({"lmcache": "0.5.6"} if lmcache else {})},
            registered_ids=[7] if lmcache else [],
            object_groups=self.groups if lmcache else None,
            connector="SharedStateMPConnector" if lmcache else None,
        )

    def round(self, scenario: str, repeat: int, name: str, services: list[str]) -> Iterator[Record]:
        where = (scenario, repeat, name)
        yield from self.scrapes(scenario, repeat, f"{name}:start")
        yield self.state(*where, services)
        yield self.event("round_started", *where, contexts=self.work.contexts)
        for index in range(self.work.contexts):
            yield self.ask(scenario, repeat, name, index)
            if scenario == "lmcache":
                yield self.scrape(scenario, repeat, f"{name}:{index}", "lmcache")
        yield self.event("round_ended", *where)
        if scenario == "lmcache":
            yield self.drained(*where)
        yield from self.scrapes(scenario, repeat, f"{name}:end")
        yield self.state(*where, services)

    def drained(self, scenario: str, repeat: int, name: str) -> Event:
        self.now += 1500 * MS
        stored = self.lmcache["completed"]
        return self.event(
            "drained",
            scenario,
            repeat,
            name,
            waited_s=1.5,
            stable=True,
            submitted=float(self.lmcache["submitted"]),
            completed=float(stored),
            failed=None,
            written_chunks=float(self.lmcache["write"]),
            files=stored,
            bytes=stored * 71_680,
            sizes={"71680": stored},
            groups=self.groups,
            empty=0,
            short=0,
            temporary=0,
            foreign=0,
            odd_files=0,
        )

    def ask(self, scenario: str, repeat: int, name: str, index: int) -> RequestRecord:
        tokens = self.work.context_tokens
        hit = scenario == "lmcache" and (name == "measure" or (name == "probe" and index == 1))
        cached = self.restorable if hit else 0
        self.count(scenario, tokens, cached, index)
        wanted = self.restored_ms if hit else self.cold_ms
        ttft = int(wanted * self.random.lognormvariate(0, self.noise) * MS)
        sent = self.now + 50_000
        first = sent + ttft
        self.now = first + 3 * MS
        return RequestRecord(
            scenario=scenario,
            repeat=repeat,
            round=name,
            index=index,
            context_id=f"{name if name in ('probe', 'warmup') else 'ctx'}-{repeat}-{index}",
            planned_tokens=tokens,
            asked_tokens=self.work.output_tokens,
            queued_ns=sent - 50_000,
            sent_ns=sent,
            written_ns=sent + 30_000,
            headers_ns=sent + 500_000,
            first_byte_ns=first - 20_000,
            first_event_ns=first,
            first_token_ns=first,
            last_byte_ns=first + MS,
            done_ns=first + MS,
            first_token_kind="text",
            prompt_tokens=tokens,
            completion_tokens=self.work.output_tokens,
            cached_tokens=cached,
            token=TOKENS[0],
            top_logprobs=self.logprobs(scenario, repeat, name, index, hit),
        )

    def logprobs(
        self, scenario: str, repeat: int, name: str, index: int, hit: bool
    ) -> dict[str, float]:
        """Cold answers depend on the context alone, but for the noise floor."""
        salt = name if self.work.shape == "prefix_suffix" else "same"
        source = random.Random(f"{repeat}-{index}-{salt}")
        top = -5.0 - source.random()
        shift = self.restored_nat if hit else self.floor_nat * (scenario != "baseline")
        others = sorted(source.uniform(0.5, 1.5) for _ in TOKENS[1:])
        return {
            token: top - gap - (shift if gap == 0 else 0)
            for token, gap in zip(TOKENS, [0.0, *others], strict=True)
        }

    def count(self, scenario: str, tokens: int, cached: int, index: int) -> None:
        vllm, lmcache, chunks = self.vllm, self.lmcache, tokens // self.chunk
        vllm["local_queries"] += tokens
        if scenario != "lmcache":
            return
        vllm["external_queries"] += tokens
        vllm["external_hits"] += cached
        lmcache["requested"] += chunks * self.chunk
        lmcache["hit"] += cached
        # Every third request comes from both tiers, the others from one of them in turn.
        from_l1 = {0: cached, 1: 0, 2: cached // self.chunk // 2 * self.chunk}[index % 3]
        lmcache["l1"] += from_l1
        lmcache["l2"] += cached - from_l1
        lmcache["loaded"] += cached // self.chunk * self.groups
        new = (chunks - cached // self.chunk) * self.groups
        for counter in ("write", "submitted", "completed"):
            lmcache[counter] += new
        lmcache["read"] += new + cached // self.chunk * self.groups

    def scrapes(self, scenario: str, repeat: int, boundary: str) -> Iterator[Scrape]:
        yield self.scrape(scenario, repeat, boundary, "vllm")
        if scenario == "lmcache":
            yield self.scrape(scenario, repeat, boundary, "lmcache")

    def scrape(self, scenario: str, repeat: int, boundary: str, source: str) -> Scrape:
        self.now += MS
        return Scrape(
            scenario=scenario,
            repeat=repeat,
            boundary=boundary,
            source=source,
            at_ns=self.now,
            samples=self.vllm_samples() if source == "vllm" else self.lmcache_samples(),
            info={"vllm:cache_config_info": {"kv_cache_size_tokens": "10922"}}
            if source == "vllm"
            else {},
        )

    def vllm_samples(self) -> dict[str, float]:
        return {
            "process_start_time_seconds": self.started,
            "vllm:prefix_cache_queries_total": float(self.vllm["local_queries"]),
            "vllm:prefix_cache_hits_total": float(self.vllm["local_hits"]),
            "vllm:external_prefix_cache_queries_total": float(self.vllm["external_queries"]),
            "vllm:external_prefix_cache_hits_total": float(self.vllm["external_hits"]),
        }

    def lmcache_samples(self) -> dict[str, float]:
        names = {
            "lookup_requested_tokens_total": "requested",
            "lookup_hit_tokens_total": "hit",
            "lookup_hit_l1_tokens_total": "l1",
            "lookup_hit_l2_tokens_total": "l2",
            "l1_write_chunks_total": "write",
            "l1_read_chunks_total": "read",
            "l2_store_submitted_objects_chunks_total": "submitted",
            "l2_store_completed_objects_chunks_total": "completed",
            "num_chunks_loaded_total": "loaded",
        }
        values = {f"lmcache_mp_{name}": float(self.lmcache[key]) for name, key in names.items()}
        # Like the real server, which makes a counter when it first counts.
        seen = {name: value for name, value in values.items() if self.lmcache["requested"]}
        return {"process_start_time_seconds": self.started - 20, **seen}

    def state(self, scenario: str, repeat: int, name: str, services: list[str]) -> Event:
        rows = [
            {
                "name": service,
                "pid": self.pid + place,
                "started": self.started + place,
                "running": True,
                "exit_code": None,
                "oom_killed": False,
            }
            for place, service in enumerate(services)
        ]
        return self.event("state", scenario, repeat, name, services=rows)

    def event(
        self,
        kind: str,
        scenario: str | None = None,
        repeat: int | None = None,
        round: str | None = None,
        **detail: Any,
    ) -> Event:
        self.now += MS
        return Event(
            at_ns=self.now, kind=kind, scenario=scenario, repeat=repeat, round=round, detail=detail
        )


def on_request(change: Callable[[RequestRecord], RequestRecord | None], **where: Any) -> Edit:
    """An edit of the requests whose fields equal ``where`` (scenario, repeat, round, index)."""
    return _on(RequestRecord, change, where)


def on_scrape(change: Callable[[Scrape], Scrape | None], **where: Any) -> Edit:
    """An edit of the scrapes whose fields equal ``where`` (scenario, repeat, boundary, source)."""
    return _on(Scrape, change, where)


def on_event(change: Callable[[Event], Event | None], **where: Any) -> Edit:
    """An edit of the events whose fields equal ``where`` (kind, scenario, repeat, round)."""
    return _on(Event, change, where)


def replace(**values: Any) -> Callable[[Any], Any]:
    """A change that sets fields of a record."""
    return lambda record: dataclasses.replace(record, **values)


def detail(**values: Any) -> Callable[[Event], Event]:
    """A change that sets keys of an event's detail."""
    return lambda event: dataclasses.replace(event, detail={**event.detail, **values})


def count(**values: float) -> Callable[[Scrape], Scrape]:
    """A change that adds to series of a scrape, named without ``lmcache_mp_`` and ``_total``."""

    def change(scrape: Scrape) -> Scrape:
        samples = dict(scrape.samples or {})
        for stem, value in values.items():
            prefix = "vllm:" if scrape.source == "vllm" else "lmcache_mp_"
            name = f"{prefix}{stem}_total"
            samples[name] = samples.get(name, 0.0) + value
        return dataclasses.replace(scrape, samples=samples)

    return change


def both(*edits: Edit) -> Edit:
    """All edits, one after the other."""

    def change(record: Record) -> Record | None:
        kept: Record | None = record
        for edit in edits:
            kept = edit(kept) if kept else None
        return kept

    return change


def _on(kind: type, change: Callable[[Any], Any], where: dict[str, Any]) -> Edit:
    def edit(record: Record) -> Record | None:
        if isinstance(record, kind) and all(getattr(record, k) == v for k, v in where.items()):
            changed: Record | None = change(record)
            return changed
        return record

    return edit


def _dead(event: Event) -> Event:
    rows = [
        {**row, "running": False, "exit_code": 137, "oom_killed": True}
        if row["name"] == "lmcache"
        else row
        for row in event.detail["services"]
    ]
    return dataclasses.replace(event, detail={"services": rows})


def _slower(record: RequestRecord) -> RequestRecord:
    assert record.first_token_ns
    assert record.sent_ns
    late = 4 * (record.first_token_ns - record.sent_ns)
    stamps = ("first_byte_ns", "first_event_ns", "first_token_ns", "last_byte_ns", "done_ns")
    return dataclasses.replace(record, **{name: getattr(record, name) + late for name in stamps})


def _wrong(record: RequestRecord) -> RequestRecord:
    assert record.top_logprobs
    moved = {
        token: value - 0.9 * (token == record.token) for token, value in record.top_logprobs.items()
    }
    return dataclasses.replace(record, top_logprobs=moved)


FAULTS: dict[str, Edit] = {
    "failed request": on_request(
        replace(error="truncated stream: the connection closed", first_token_ns=None, done_ns=None),
        scenario="lmcache",
        repeat=2,
        round="measure",
        index=3,
    ),
    "wrong length": on_request(
        replace(prompt_tokens=1122), scenario="lmcache", repeat=1, round="measure", index=0
    ),
    "fast but wrong": on_request(_wrong, scenario="lmcache", round="measure"),
    "warm round 1": both(
        on_scrape(
            count(lookup_hit_tokens=1120, lookup_hit_l1_tokens=1120),
            scenario="lmcache",
            repeat=1,
            boundary="fill:end",
            source="lmcache",
        ),
    ),
    "l0 answers round 2": both(
        on_request(replace(cached_tokens=1120), scenario="lmcache", repeat=1, round="measure"),
        on_scrape(
            count(prefix_cache_hits=6720, external_prefix_cache_hits=-6720),
            scenario="lmcache",
            repeat=1,
            boundary="measure:end",
            source="vllm",
        ),
        on_scrape(
            count(lookup_hit_tokens=-6720, lookup_hit_l1_tokens=-3136, lookup_hit_l2_tokens=-3584),
            scenario="lmcache",
            repeat=1,
            boundary="measure:end",
            source="lmcache",
        ),
    ),
    "oom kill": on_event(_dead, kind="state", scenario="lmcache", repeat=2, round="measure"),
    "not warmed up": on_request(_slower, scenario="baseline", repeat=1, round="fill", index=0),
    "chunks never stored": on_scrape(
        count(l1_write_chunks=-6),
        scenario="lmcache",
        repeat=1,
        boundary="fill:end",
        source="lmcache",
    ),
    "unequal kv": on_event(
        detail(facts={"block_tokens": 224, "kv_cache_tokens": 7000}),
        kind="ready",
        scenario="lmcache",
    ),
    "no counters": on_scrape(
        replace(samples=None, error="connection refused"), source="lmcache", boundary="measure:end"
    ),
}
"""What commonly goes wrong, by name."""
