"""Which tier served which tokens: the accounts of every round, the tier of every request. Pure.

Three books are kept by three parties: the client's (what each answer says was cached), vLLM's
(local and external hits) and LMCache's (L1 and L2 hits). They must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab import counters, shapes
from kvlab.counters import Change
from kvlab.errors import RunFolderError
from kvlab.records import RequestRecord, Scrape
from kvlab.units import ns_to_ms

ROUNDS = ("fill", "measure")
TIERS = ("L0", "L1", "L2")
SOURCES = ("page cache", "unknown", "disk")
"""Where bytes that came from disk may have come from, the worst first."""

Key = tuple[str, int, str]
"""Scenario, repeat, round."""


def ceiling(tokens: int, chunk_tokens: int, *, prefix_tokens: int | None = None) -> int:
    """The most tokens that whole chunks can restore: at least one token is always computed."""
    reusable = tokens - 1 if prefix_tokens is None else min(prefix_tokens, tokens - 1)
    return max(0, reusable) // chunk_tokens * chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the run set out to do, read from its manifest."""

    arms: tuple[str, ...]
    """The untreated arm, then the treated one; the treated one alone where there is no other."""
    repeats: int
    contexts: int
    context_tokens: int
    output_tokens: int
    shape: str
    chunk_tokens: int
    block_tokens: int
    restorable_tokens: int
    pause_s: float
    concurrency: int
    has_l2: bool
    attached: bool
    """Whether the servers already ran and kvlab started none of them."""
    sees_l2: bool
    """Whether kvlab could look into the L2 folder: not into that of an attached deployment."""
    object_groups: bool | None
    """Whether records are split by object group; None: the version decides."""
    kv_ranks: int
    tolerance_nat: float
    thresholds: Mapping[str, float] = field(default_factory=dict)
    cached: tuple[str, ...] = ("lmcache",)
    """The arms that have an LMCache server."""

    @property
    def treated(self) -> str:
        return self.arms[-1]

    @property
    def alone(self) -> bool:
        """Whether there was no untreated arm, so that nothing is compared with it."""
        return len(self.arms) == 1

    @property
    def control(self) -> bool:
        """Whether both arms are the same: then no difference is the healthy result."""
        return self.treated not in self.cached

    @property
    def keys(self) -> list[Key]:
        """Every round that the run holds when it is complete."""
        return [
            (arm, repeat, name)
            for repeat in range(1, self.repeats + 1)
            for arm in self.arms
            for name in ROUNDS
        ]


def plan(manifest: Mapping[str, Any]) -> Plan:
    """The plan that a two-round run's manifest holds; RunFolderError when it is not whole."""
    profile, arms = manifest.get("profile"), manifest.get("arms")
    if not isinstance(profile, dict):
        complaint: str | None = "it holds no profile"
    elif not isinstance(arms, list) or not _are_arms(arms, profile):
        complaint = "it does not name two arms"
    else:
        complaint = shapes.manifest_complaint(manifest) or shapes.profile_complaint(profile)
    if complaint is None:
        try:
            return _plan(manifest)
        except (KeyError, TypeError, ValueError) as error:
            complaint = repr(error)
    raise RunFolderError(
        f"the manifest of run {manifest.get('run')} is not whole: {complaint}",
        hint="restore manifest.json from a copy, or measure again",
    )


def _are_arms(arms: Sequence[Any], profile: Mapping[str, Any]) -> bool:
    """Two different arms, or the treated one of an attached deployment."""
    alone = profile.get("runtime") == "attach" and arms == ["lmcache"]
    return alone or (len(arms) == 2 and arms[0] != arms[1])


def _plan(manifest: Mapping[str, Any]) -> Plan:
    profile = manifest["profile"]
    work, cache = profile["workload"], profile["cache"]
    two_round = profile["experiments"]["two_round"]
    tokens, chunk = work["context_tokens"], cache["chunk_tokens"]
    prefix = None
    if work["shape"] == "prefix_suffix":
        prefix = round(tokens * work["prefix_ratio"])
    return Plan(
        arms=tuple(manifest["arms"]),
        repeats=two_round["repeats"],
        contexts=work["contexts"],
        context_tokens=tokens,
        output_tokens=work["output_tokens"],
        shape=work["shape"],
        chunk_tokens=chunk,
        block_tokens=profile["engine"]["block_tokens"],
        restorable_tokens=ceiling(tokens, chunk, prefix_tokens=prefix),
        pause_s=two_round["pause_s"],
        concurrency=two_round.get("concurrency") or 1,
        has_l2=cache.get("l2") is not None,
        attached=profile.get("runtime") == "attach",
        sees_l2=sees_l2(profile),
        object_groups=cache.get("separate_object_groups"),
        kv_ranks=max(1, int((profile["engine"].get("flags") or {}).get("tensor-parallel-size", 1))),
        tolerance_nat=(profile.get("correctness") or {}).get("tolerance_nat", 0.15),
        thresholds=profile.get("thresholds") or {},
    )


def sees_l2(profile: Mapping[str, Any]) -> bool:
    """Whether a run of this profile could look into the L2 folder."""
    l2 = profile["cache"].get("l2")
    return l2 is not None and (profile.get("runtime") != "attach" or bool(l2.get("base_path")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One round of one arm in one repeat: its requests and what each party counted."""

    scenario: str
    repeat: int
    round: str
    requests: tuple[RequestRecord, ...] = ()
    """In the order of their index."""
    local: Change
    external: Change
    lookup_hit: Change
    l1: Change
    l2: Change
    written: Change
    """Objects that LMCache wrote into L1."""
    loaded: Change
    """Objects that LMCache handed to the engine."""
    evicted: Change
    has_lmcache: bool

    @property
    def key(self) -> Key:
        return (self.scenario, self.repeat, self.round)

    @property
    def place(self) -> str:
        """The round as a reader names it: ``lmcache, repeat 2, measure``."""
        return f"{self.scenario}, repeat {self.repeat}, {self.round}"

    @property
    def completed(self) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.requests if record.error is None)

    @property
    def client(self) -> int | None:
        """Tokens that the answers say were cached; None when one of them does not say."""
        return _sum([record.cached_tokens for record in self.completed])

    @property
    def prompt(self) -> int | None:
        """Prompt tokens that the server counted; None when an answer does not say."""
        return _sum([record.prompt_tokens for record in self.completed])

    @property
    def residual(self) -> int | None:
        """The largest disagreement between two books, in tokens; None when one is unknown."""
        local, external = self.local.value, self.external.value
        if not self.has_lmcache and external is None:
            external = 0.0  # an engine without a connector need not have the counter
        client = self.client
        if client is None or local is None or external is None:
            return None
        gaps = [abs(client - local - external)]
        if self.has_lmcache:
            if self.l1.value is None or self.l2.value is None:
                return None
            # LMCache looks up, and counts, also what vLLM then takes from its own cache.
            found = self.l1.value + self.l2.value
            gaps += [external - found, found - external - local]
        return round(max(gaps))

    @property
    def served(self) -> dict[str, int]:
        """Tokens by the tier that served them; a tier that is unknown is absent."""
        tiers = {"L0": self.local.value, "L1": self.l1.value, "L2": self.l2.value}
        external = self.external.value
        if not self.has_lmcache and not external:
            tiers |= {"L1": 0.0, "L2": 0.0}
        cached = self.client
        if cached is None and self.local.value is not None and external is not None:
            cached = round(self.local.value + external)
        if cached is not None and self.prompt is not None:
            tiers["recompute"] = float(self.prompt - cached)
        return {tier: round(tokens) for tier, tokens in tiers.items() if tokens is not None}


def _sum(values: Sequence[int | None]) -> int | None:
    """The total of values that are all known; None when one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


class Readings:
    """The scrapes of a run by where they were taken; of one taken again, the last counts."""

    def __init__(self, scrapes: Sequence[Scrape]):
        self._by_place = {(s.scenario, s.repeat, s.source, s.boundary): s for s in scrapes}

    def instances(self, scenario: str, role: str) -> list[str]:
        """The names of a role's servers where there are several, each counted by itself."""
        names = {place[2] for place in self._by_place if place[0] == scenario}
        return sorted(
            (name for name in names if name.rpartition("-")[0] == role and name[-1].isdigit()),
            key=lambda name: (len(name), name),
        )

    def kv_tokens(self, scenario: str, source: str | None = None) -> list[int]:
        """The size of vLLM's own cache as its metrics state it, one entry per scrape.

        Of every server of the launch, or of the one source named.
        """
        labels = [
            scrape.info.get("vllm:cache_config_info", {})
            for scrape in self._by_place.values()
            if scrape.scenario == scenario and source in (None, scrape.source)
        ]
        stated = [label.get("kv_cache_size_tokens", "") for label in labels]
        return [int(size) for size in stated if size.isdecimal()]

    def most_of(self, series: str) -> float:
        """The largest value of a series in any scrape; 0 when it is in none."""
        return max(((s.samples or {}).get(series, 0.0) for s in self._by_place.values()), default=0)

    def most(self, canonical: str) -> float:
        """The largest value of a counter in any scrape; 0 when it is in none."""
        return max(self.most_of(name) for name in counters.ALIASES[canonical])

    def samples(
        self, scenario: str, repeat: int, source: str, boundary: str
    ) -> Mapping[str, float] | None:
        """What was read there; None: nothing."""
        scrape = self._by_place.get((scenario, repeat, source, boundary))
        return scrape.samples if scrape else None

    def grown(self, key: Key, source: str, canonical: str) -> Change:
        """How much a counter grew over a round."""
        scenario, repeat, name = key
        return counters.since_start(
            self.samples(scenario, repeat, source, f"{name}:start"),
            self.samples(scenario, repeat, source, f"{name}:end"),
            canonical,
        )


def accounts(
    plan: Plan, requests: Sequence[RequestRecord], scrapes: Sequence[Scrape]
) -> list[Account]:
    """One account per round of the plan, also of those in which nothing was recorded."""
    readings, asked = Readings(scrapes), latest(requests)
    return [account(key, asked, readings, has_lmcache=key[0] in plan.cached) for key in plan.keys]


def latest(requests: Sequence[RequestRecord]) -> dict[tuple[str, int, str, int], RequestRecord]:
    """Requests by scenario, repeat, round and index; of one asked again, the last counts."""
    return {(r.scenario, r.repeat, r.round, r.index): r for r in requests}


def account(
    key: Key,
    asked: Mapping[tuple[str, int, str, int], RequestRecord],
    readings: Readings,
    *,
    has_lmcache: bool,
    engine: str = "vllm",
) -> Account:
    """One round's account; ``engine`` is the source of the counters of the vLLM that was asked."""

    def vllm(canonical: str) -> Change:
        return readings.grown(key, engine, canonical)

    def lmcache(canonical: str) -> Change:
        return readings.grown(key, "lmcache", canonical)

    ordered = sorted((k[3], record) for k, record in asked.items() if k[:3] == key)
    return Account(
        scenario=key[0],
        repeat=key[1],
        round=key[2],
        requests=tuple(record for _, record in ordered),
        local=vllm("local_hits"),
        external=vllm("external_hits"),
        lookup_hit=lmcache("lookup_hit_tokens"),
        l1=lmcache("l1_hit_tokens"),
        l2=lmcache("l2_hit_tokens"),
        written=lmcache("l1_write_chunks"),
        loaded=lmcache("chunks_loaded"),
        evicted=lmcache("l1_evicted_chunks"),
        has_lmcache=has_lmcache,
    )


def times_ms(accounts: Sequence[Account], arm: str, name: str) -> dict[int, dict[int, float]]:
    """TTFT in ms of one round of one arm, by repeat and index; failed requests are not there."""
    return {
        account.repeat: {
            record.index: ns_to_ms(record.ttft_ns)
            for record in account.completed
            if record.ttft_ns is not None
        }
        for account in accounts
        if account.scenario == arm and account.round == name
    }


def tiers(account: Account, readings: Readings) -> dict[int, str]:
    """The tier of each request by index: L0, L1, L2, mixed, recompute, or unknown.

    LMCache counts after a queue, so a scrape taken right after a request may not show its hits
    yet. Requests therefore wait until LMCache's hits equal what the answers say was cached; when
    several waited together they share a label only if a single tier served them all.
    """
    labels = {r.index: _without_lmcache(r, account) for r in account.completed}
    if not account.has_lmcache or account.external.value == 0:
        return labels
    before = _hits(account, readings, "start")
    waiting: list[RequestRecord] = []
    for record in account.completed:
        waiting.append(record)
        after = _hits(account, readings, str(record.index))
        if before and after and _settled(waiting, before, after):
            labels |= _label(waiting, before, after)
            before, waiting = after, []
    after = _hits(account, readings, "end")
    if before and after and _settled(waiting, before, after):
        labels |= _label(waiting, before, after)
    return labels


def _without_lmcache(record: RequestRecord, account: Account) -> str:
    """The label as far as it is known without LMCache's own counters."""
    if record.cached_tokens == 0:
        return "recompute"
    if record.cached_tokens is not None and account.external.value == 0:
        return "L0"
    return "unknown"


def _hits(account: Account, readings: Readings, where: str) -> tuple[float, float] | None:
    samples = readings.samples(
        account.scenario, account.repeat, "lmcache", f"{account.round}:{where}"
    )
    l1, l2 = counters.read(samples, "l1_hit_tokens"), counters.read(samples, "l2_hit_tokens")
    return None if l1 is None or l2 is None else (l1, l2)


def _restored(record: RequestRecord) -> int:
    """Tokens that came from outside vLLM, as far as the answer says."""
    if record.external_cached_tokens is not None:
        return record.external_cached_tokens
    return (record.cached_tokens or 0) - (record.local_cached_tokens or 0)


def _settled(
    waiting: Sequence[RequestRecord], before: tuple[float, float], after: tuple[float, float]
) -> bool:
    grown = after[0] - before[0] + after[1] - before[1]
    return grown == sum(_restored(record) for record in waiting)


def _label(
    waiting: Sequence[RequestRecord], before: tuple[float, float], after: tuple[float, float]
) -> dict[int, str]:
    hit = [t for t, old, new in zip(("L1", "L2"), before, after, strict=True) if new > old]
    labels = {}
    for record in waiting:
        cached = record.cached_tokens
        if cached is None or (cached and len(hit) > 1 and len(waiting) > 1):
            labels[record.index] = "unknown"
            continue
        used = (["L0"] if cached > _restored(record) else []) + (hit if _restored(record) else [])
        labels[record.index] = {0: "recompute", 1: "".join(used)}.get(len(used), "mixed")
    return labels


def read_source(
    loaded_bytes: float | None, device_bytes: float | None, resident_share: float | None
) -> str:
    """Where bytes that "came from disk" came from: ``disk``, ``page cache`` or ``unknown``.

    Disk: the device read at least 80 % of what L2 says it loaded, and less than 5 % of the files
    was in memory before.
    """
    if not loaded_bytes or device_bytes is None:
        return "unknown"
    if device_bytes < 0.8 * loaded_bytes:
        return "page cache"
    if resident_share is None:
        return "unknown"
    return "disk" if resident_share < 0.05 else "page cache"
