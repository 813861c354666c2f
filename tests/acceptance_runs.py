"""Synthetic runs of acceptance: a healthy one, and the same with answers or counters changed.

The fake stack's runs show that the experiment writes this; here a run takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab import profile
from kvlab.records import Event, RequestRecord, Scrape
from kvlab.rundir import RunDir

RUN = "20261130T120000Z-acceptance-embedded-0123abcd"
MS = 1_000_000
CHUNK, TOKENS, RESTORABLE = 224, 1121, 1120
CASES = {"c0000": 3, "c0001": 3, "t0010-0": 1, "t0100-0": 1}
"""Positions by context; those with a t have so many tokens after the restored ones."""
LAUNCHES = {
    "cold": ["cold"],
    "recold": ["cold"],
    "lmcache": ["fill", "reset", "l1", "l2"],
    "restarted": ["restarted"],
    "stock": ["fill", "l1"],
}
TIERS = {"l0": "L0", "reset": "L1", "l1": "L1", "l2": "L2", "restarted": "L2"}
TTFT_MS = {"cold": 150, "fill": 152, "l0": 20, "reset": 30, "l1": 30, "l2": 34, "restarted": 36}
Shift = Mapping[str, float]
"""Nats by which answers of a round are off; ``flip`` in its name swaps the two best tokens."""


def make_acceptance_run(
    folder: Path,
    *,
    connector: str = "kvlab",
    off: Mapping[str, float] | None = None,
    flips: Mapping[str, float] | None = None,
    resets: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> RunDir:
    """A run folder as the experiment leaves it.

    ``off``: nats by which the answers of a round of a launch are wrong, as ``{"restarted": 0.4}``,
    or ``{"stock": 0.4}`` for the control. ``flips``: rounds in which the two best tokens, so many
    nats apart in the cold engine, change places.
    """
    chosen = profile.load("embedded", {"engine.connector": connector, **(overrides or {})})
    arms = [arm for arm in LAUNCHES if arm != "stock" or connector == "kvlab"]
    manifest = {
        "run": RUN,
        "experiment": "acceptance",
        "profile": chosen.as_dict(),
        "profile_sha256": chosen.sha256,
        "kvlab_version": "0.1.0",
        "arms": arms,
        "order": [[1, arm] for arm in arms],
        "nonce": "c0ffee",
        "host": {},
        "fingerprint": "f" * 16,
        "clocks": [{"monotonic_ns": 0, "utc": "2026-11-30T12:00:00+00:00"}],
    }
    run = RunDir.create(folder, manifest)
    writer = _Writer(run, off or {}, flips or {}, resets=resets)
    writer.event("run_started")
    for arm in arms:
        writer.launch(arm)
    writer.event("run_finished", status="complete")
    run.update_manifest(status="complete")
    run.seal()
    return run


class _Writer:
    """Writes what each launch would, with counters that agree with the answers."""

    def __init__(self, run: RunDir, off: Shift, flips: Shift, *, resets: bool):
        self.run = run
        self.off = off
        self.flips = flips
        self.resets = resets
        self.now = 1_000_000_000
        self.counts: dict[str, float] = {}

    def event(
        self, kind: str, arm: str | None = None, name: str | None = None, **detail: Any
    ) -> None:
        self.now += MS
        self.run.append(
            Event(
                at_ns=self.now,
                kind=kind,
                scenario=arm,
                repeat=1 if arm else None,
                round=name,
                detail=detail,
            )
        )

    def launch(self, arm: str) -> None:
        self.counts = {"local": 0.0, "external": 0.0, "L1": 0.0, "L2": 0.0, "write": 8.0}
        facts = {"block_tokens": CHUNK, "kv_cache_tokens": 10_922}
        self.event("ready", arm, facts=facts, versions={"vllm": "0.32.0"}, start_s=20.0)
        if arm == "cold":
            method = "endpoint" if self.resets else "restart"
            self.event("reset_method", arm, method=method)
        positions = 99 if self.resets else 1
        cases = {name: min(count, positions) for name, count in CASES.items()}
        self.event("cases", arm, cases=cases)
        for name in LAUNCHES[arm]:
            if self.resets or name not in ("reset", "l1", "l2"):
                self.round(arm, name, cases)
        self.event("arm_finished", arm)

    def round(self, arm: str, name: str, cases: dict[str, int]) -> None:
        self.scrape(arm, f"{name}:start")
        self.state(arm, name)
        asked = {"reset": {"c0000": 1}}.get(name, cases)
        for case, count in asked.items():
            for position in range(1 if name == "fill" else count):
                self.ask(arm, name, case, position)
            if name == "fill" and arm == "lmcache":
                for position in range(count):
                    self.ask(arm, "l0", case, position)
        done = {} if name == "fill" or not self.resets else {"reset_done": sum(asked.values())}
        self.event("round_ended", arm, name, resets=done)
        if name == "fill":
            self.counts["write"] += 10 * len(cases)
            stored = 10.0 * len(cases)
            self.event(
                "drained",
                arm,
                name,
                submitted=stored,
                completed=stored,
                failed=0.0,
                stable=True,
                files=int(stored),
                bytes=int(stored) * 143_360,
                waited_s=0.8,
            )
        self.state(arm, name)
        self.scrape(arm, f"{name}:end")

    def ask(self, arm: str, name: str, case: str, position: int) -> None:
        tail = int(case[1:5]) if case.startswith("t") else TOKENS - RESTORABLE
        planned = RESTORABLE + tail + position
        tier = TIERS.get(name)
        cached = RESTORABLE if tier else 0
        if tier == "L0":
            self.counts["local"] += cached
        elif tier:
            self.counts["external"] += cached
            self.counts[tier] += cached
        self.now += 200 * MS
        sent = self.now
        first = sent + TTFT_MS[name] * MS
        chosen, top = self.answer(arm, name, case, position)
        index = sum(r.round == name and r.scenario == arm for r in self.run.requests())
        self.run.append(
            RequestRecord(
                scenario=arm,
                repeat=1,
                round=name,
                index=index,
                context_id=f"{case}+{position}",
                planned_tokens=planned,
                asked_tokens=1,
                queued_ns=sent,
                sent_ns=sent,
                first_token_ns=first,
                done_ns=first + MS,
                prompt_tokens=planned,
                completion_tokens=1,
                cached_tokens=cached,
                token=chosen,
                top_logprobs=top,
            )
        )

    def answer(self, arm: str, name: str, case: str, position: int) -> tuple[str, dict[str, float]]:
        """The token chosen and the likeliest ones: the same on every path unless it is changed."""
        seed = 7 * position + 31 * int(case[-1]) + 3 * int(case[1:5])
        gap = self.flips.get(name, max(self.flips.values(), default=0.5))
        first, second = f"token_id:{seed + 300}", f"token_id:{seed + 301}"
        top = {first: -4.0 - seed / 1000, second: -4.0 - seed / 1000 - gap, "token_id:9": -9.0}
        if name in self.flips:
            top[first], top[second] = top[second], top[first]
        wrong = self.off.get("stock" if arm == "stock" else name, 0.0)
        if arm == "stock" and name == "fill":
            wrong = 0.0
        top = {token: value - wrong for token, value in top.items()}
        return max(top, key=lambda token: top[token]), top

    def scrape(self, arm: str, boundary: str) -> None:
        started = 1.7e9
        counts = self.counts
        vllm = {
            "process_start_time_seconds": started,
            "vllm:prefix_cache_hits_total": counts["local"],
            "vllm:external_prefix_cache_hits_total": counts["external"],
        }
        lmcache = {
            "process_start_time_seconds": started,
            "lmcache_mp_lookup_hit_l1_tokens_total": counts["L1"],
            "lmcache_mp_lookup_hit_l2_tokens_total": counts["L2"],
            "lmcache_mp_l1_write_chunks_total": counts["write"],
        }
        for source, samples in (("vllm", vllm), ("lmcache", lmcache)):
            if source == "vllm" or arm not in ("cold", "recold"):
                self.run.append(
                    Scrape(
                        scenario=arm,
                        repeat=1,
                        boundary=boundary,
                        source=source,
                        at_ns=self.now,
                        samples=samples,
                    )
                )

    def state(self, arm: str, name: str) -> None:
        service = {"name": "vllm", "pid": 1, "started": 1.0, "running": True, "exit_code": None}
        self.event("state", arm, name, services=[service])
