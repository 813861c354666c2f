"""What a run of acceptance means: which tier served each path, and whether it was right. Pure.

The claim is that answers from every tier equal cold ones. It is refuted by one path whose answers
do not, and invalid when the evidence does not show which tier a path was served from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvlab import continuation, evidence, stats, verdict
from kvlab.continuation import Pair
from kvlab.counters import Change
from kvlab.errors import RunFolderError
from kvlab.evidence import Readings
from kvlab.invariants import Invariant
from kvlab.invariants.facts import weigh
from kvlab.records import Event, RequestRecord
from kvlab.results import entries
from kvlab.results.frame import frame, verdict_lines
from kvlab.rundir import RunDir
from kvlab.units import ns_to_ms
from kvlab.verdict import Verdict

FIXED = ("block_tokens", "kv_cache_tokens", "max_num_batched_tokens", "hybrid_manager_off")
"""What every launch must state alike, beside the version of vLLM."""
RIGHT = ("pass", "pass with ties")


@dataclass(frozen=True, slots=True)
class Path:
    """One way in which answers are served, and where it is recorded."""

    name: str
    scenario: str
    round: str
    tier: str | None
    """The only tier that may serve it; None: nothing may be restored."""
    span: str
    """The round between whose two readings it lies."""


PATHS = (
    Path("fill", "lmcache", "fill", None, "fill"),
    Path("l0", "lmcache", "l0", "L0", "fill"),
    Path("l1", "lmcache", "l1", "L1", "l1"),
    Path("l2", "lmcache", "l2", "L2", "l2"),
    Path("restarted", "restarted", "restarted", "L2", "restarted"),
)
CONTROL = Path("control", "stock", "l1", "L1", "l1")
COLD = Path("cold", "cold", "cold", None, "cold")
RECOLD = Path("recold", "recold", "cold", None, "cold")


class Facts:
    """Everything that a run of acceptance recorded, by path."""

    def __init__(self, run: RunDir):
        manifest = run.manifest
        try:
            self.profile: Mapping[str, Any] = manifest["profile"]
            self.arms = [str(arm) for _, arm in manifest["order"]]
            self.chunk = int(self.profile["cache"]["chunk_tokens"])
            self.tokens = int(self.profile["workload"]["context_tokens"])
            self.has_l2 = self.profile["cache"].get("l2") is not None
            self.sees_l2 = evidence.sees_l2(self.profile)
            self.set_nat = float((self.profile.get("correctness") or {})["tolerance_nat"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"the manifest of run {run.id} is not whole: {error!r}",
                hint="restore manifest.json from a copy, or measure again",
            ) from error
        self.events = run.events()
        self.readings = Readings(run.scrapes())
        self._records: dict[tuple[str, str], dict[str, RequestRecord]] = {}
        for record in run.requests():
            self._records.setdefault((record.scenario, record.round), {})[record.context_id] = (
                record
            )

    @property
    def restorable(self) -> int:
        """The tokens of a context that whole chunks can restore."""
        return (self.tokens - 1) // self.chunk * self.chunk

    @property
    def resets(self) -> bool:
        """Whether L0 could be emptied through an endpoint, not only by a restart."""
        return any(
            event.kind == "reset_method" and event.detail.get("method") == "endpoint"
            for event in self.events
        )

    @cached_property
    def paths(self) -> list[Path]:
        """The paths that this run set out to measure."""
        return [
            path
            for path in PATHS
            if path.scenario in self.arms
            and (self.resets or path.name not in ("l1", "l2"))
            and (self.has_l2 or path.name != "l2")
        ]

    @property
    def has_control(self) -> bool:
        return "stock" in self.arms and self.resets

    def planned(self, path: Path) -> list[str]:
        """The ids of every request of a path: the context and the position after it."""
        cases: dict[str, Any] = {}
        for event in self.events:
            if event.kind == "cases" and event.scenario == path.scenario:
                cases = event.detail.get("cases") or {}
        first_only = path.round == "fill"
        return [
            f"{case}+{position}"
            for case, positions in cases.items()
            for position in range(1 if first_only else int(positions))
        ]

    def records(self, path: Path) -> list[RequestRecord]:
        """The requests of a path, failed ones too, in their order."""
        found = self._records.get((path.scenario, path.round), {})
        return sorted(found.values(), key=lambda record: record.index)

    def completed(self, path: Path) -> list[RequestRecord]:
        return [record for record in self.records(path) if record.error is None]

    def pairs(self, path: Path) -> list[Pair]:
        """Cold answers and this path's, to the same tokens."""
        cold = {record.context_id: record for record in self.completed(COLD)}
        return [
            (cold[record.context_id], record)
            for record in self.completed(path)
            if record.context_id in cold
        ]

    def grown(self, path: Path, source: str, canonical: str) -> Change:
        """How much a counter grew over the round in which the path lies."""
        return self.readings.grown((path.scenario, 1, path.span), source, canonical)

    def has_cache(self, path: Path) -> bool:
        return path.scenario not in ("cold", "recold")

    def served(self, path: Path) -> dict[str, int]:
        """Prompt tokens of a path by the tier that served them; an unknown tier is absent."""
        done = self.completed(path)
        cached = [record.cached_tokens for record in done]
        known = [value for value in cached if value is not None]
        found: dict[str, float | None] = {}
        if len(known) == len(cached):
            prompt = sum(record.planned_tokens for record in done)
            found["recompute"] = prompt - sum(known)
        if path.round == "fill":  # the answers from L0 lie in the same span
            return {tier: round(value) for tier, value in found.items() if value is not None}
        found["L0"] = self.grown(path, "vllm", "local_hits").value
        if path.round == "l0":
            found |= {"L1": 0.0, "L2": 0.0}
            external = self.grown(path, "vllm", "external_hits").value
            if external != 0:
                found |= {"L1": None, "L2": None}
        elif self.has_cache(path):
            found["L1"] = self.grown(path, "lmcache", "l1_hit_tokens").value
            found["L2"] = self.grown(path, "lmcache", "l2_hit_tokens").value
        order = ("L0", "L1", "L2", "recompute")
        return {tier: round(value) for tier in order if (value := found.get(tier)) is not None}


def summarise(run: RunDir) -> dict[str, Any]:
    """What summary.json holds for a run of acceptance, complete or partial."""
    facts = Facts(run)
    floors = continuation.judge(facts.pairs(RECOLD), tolerance_nat=facts.set_nat)
    floor = floors.get("max_nat")
    allowed = continuation.tolerance(floor, facts.set_nat)
    paths = {path.name: judge(facts, path, allowed) for path in facts.paths}
    control = judge(facts, CONTROL, allowed) if facts.has_control else None
    held = conditions(facts, floors, paths, control)
    reached = reach(held, paths)
    figures = {
        "workload": workload(facts),
        "connector": facts.profile["engine"].get("connector"),
        "floor": {key: floors.get(key) for key in ("pairs", "median_nat", "max_nat")},
        "tolerance_nat": allowed,
        "paths": paths,
        "cold": {"ttft_ms": times(facts, COLD), "served_tokens": facts.served(COLD)},
        "resets": resets(facts),
        "stores": stores(facts),
        "negative_control": control and {**control, "by_tail": by_tail(facts, CONTROL, allowed)},
        "by_tail": by_tail(facts, _tail_path(facts), allowed),
        "steps": steps(held, paths),
        "needles": {"used": False, "reason": "random weights write no language to look in"}
        if facts.profile["model"].get("source") == "built"
        else None,
        "time_s": entries.time_s(facts.events, run.requests()),
    }
    return frame(run, reached, figures, held)


def text(found: Mapping[str, Any]) -> str:
    """The summary for a terminal: the verdict first, numbers only below a valid one."""
    lines = verdict_lines(found)
    lines += [
        f"step {step['step']}, {step['name']}: {_word(step.get('holds'))}"
        for step in found["steps"]
    ]
    if found["verdict"]["status"] == verdict.INVALID:
        return "\n".join(lines)
    lines.append(
        f"cold against cold: {found['floor']['max_nat']:.3g} nat at most;"
        f" allowed: {found['tolerance_nat']:.3g}"
    )
    for name, path in found["paths"].items():
        lines.append(
            f"{name}: {path['verdict']}, {path['pairs']} answers, median {path['median_nat']:.3g},"
            f" p90 {path['p90_nat']:.3g}, max {path['max_nat']:.3g} nat, {path['flipped']} flipped"
        )
    for row in (found.get("negative_control") or {}).get("by_tail", []):
        lines.append(
            f"negative control, {row['tail_tokens']} tokens after the restored blocks:"
            f" max {row['max_nat']:.3g} nat, {row['flipped']} of {row['pairs']} flipped"
        )
    return "\n".join(lines)


def _word(holds: bool | None) -> str:
    return {True: "passed", False: "failed", None: "unknown"}[holds]


def workload(facts: Facts) -> dict[str, Any]:
    """What was asked on every path."""
    planned = facts.planned(COLD)
    setup = (facts.profile.get("experiments") or {}).get("acceptance") or {}
    return {
        "contexts": setup.get("contexts"),
        "context_tokens": facts.tokens,
        "chunk_tokens": facts.chunk,
        "restorable_tokens": facts.restorable,
        "positions": max((int(name.rpartition("+")[2]) + 1 for name in planned), default=None),
        "requests": len(planned),
    }


def judge(facts: Facts, path: Path, allowed: float) -> dict[str, Any]:
    """One path: its differences and verdict, the tiers that served it, its times.

    A path whose answers are wrong has no time: fast and wrong is no gain.
    """
    found = continuation.judge(facts.pairs(path), tolerance_nat=allowed)
    done = facts.completed(path)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    prompt = sum(record.planned_tokens for record in done)
    return {
        **found,
        "tier": path.tier,
        "served_tokens": facts.served(path),
        "hit_share": sum(cached) / prompt if prompt and len(cached) == len(done) else None,
        "ttft_ms": times(facts, path) if found["verdict"] != "fail" else None,
    }


def times(facts: Facts, path: Path) -> dict[str, Any] | None:
    """TTFT of the whole contexts of the measured length, in ms."""
    every = [
        ns_to_ms(record.ttft_ns)
        for record in facts.completed(path)
        if record.planned_tokens == facts.tokens
        and record.context_id.endswith("+0")
        and record.ttft_ns is not None
    ]
    return {"median": stats.median(every), "n": len(every)} if every else None


def by_tail(facts: Facts, path: Path | None, allowed: float) -> list[dict[str, Any]]:
    """The differences by the number of tokens that were computed after the restored ones."""
    groups: dict[int, list[Pair]] = {}
    for cold, other in facts.pairs(path) if path else []:
        if other.cached_tokens is not None:
            groups.setdefault(other.planned_tokens - other.cached_tokens, []).append((cold, other))
    rows = []
    for tail in sorted(groups):
        found = continuation.judge(groups[tail], tolerance_nat=allowed)
        keys = ("pairs", "flipped", "median_nat", "max_nat")
        rows.append({"tail_tokens": tail, **{key: found.get(key) for key in keys}})
    return rows


def _tail_path(facts: Facts) -> Path | None:
    """The path that the tails are shown of: from L1 where it was measured."""
    found = {path.name: path for path in facts.paths}
    return found.get("l1") or found.get("restarted")


def resets(facts: Facts) -> dict[str, Any]:
    """How L0 was emptied, how often, and what the probe after the first reset found."""
    counts: dict[str, int] = {}
    for event in facts.events:
        if event.kind == "round_ended":
            for name, count in (event.detail.get("resets") or {}).items():
                counts[name] = counts.get(name, 0) + int(count)
    probe = Path("reset", "lmcache", "reset", "L1", "reset")
    local = facts.grown(probe, "vllm", "local_hits").value
    external = facts.grown(probe, "vllm", "external_hits").value
    method = next((e.detail.get("method") for e in facts.events if e.kind == "reset_method"), None)
    return {
        "method": method,
        **counts,
        "probe": {
            "local_tokens": None if local is None else round(local),
            "external_tokens": None if external is None else round(external),
        }
        if method == "endpoint"
        else None,
    }


def stores(facts: Facts) -> dict[str, Any]:
    """What the first run left in LMCache: objects in L1, and records on the disk."""
    drained = [e for e in facts.events if e.kind == "drained" and e.scenario == "lmcache"]
    last = drained[-1].detail if drained else {}
    written = facts.grown(PATHS[0], "lmcache", "l1_write_chunks").value
    names = ("submitted", "completed", "failed", "files", "bytes", "stable")
    return {
        "written_objects": None if written is None else round(written),
        **{name: last.get(name) for name in names},
    }


def reach(held: Sequence[Invariant], paths: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """The verdict and its reasons."""
    wrong = [
        f"fast but wrong: {name}: {path['reason']}"
        for name, path in paths.items()
        if path["verdict"] == "fail"
    ]
    reasons = verdict.blockers(held)
    if reasons:
        return Verdict(verdict.INVALID, [*wrong, *reasons])
    if wrong:
        return Verdict(verdict.REFUTED, wrong)
    ties = sum(path["flipped"] for path in paths.values())
    claim = f"on {', '.join(paths)} every answer equals the cold one within the tolerance"
    return Verdict(
        verdict.PROVEN, [f"{claim}; {ties} near ties chose another token" if ties else claim]
    )


# The conditions.


def conditions(
    facts: Facts,
    floors: Mapping[str, Any],
    paths: Mapping[str, Mapping[str, Any]],
    control: Mapping[str, Any] | None,
) -> list[Invariant]:
    """Everything that must hold before the verdict counts."""
    found = [
        requests_complete(facts),
        fixed_settings(facts),
        cold_is_cold(facts),
        compared(facts, floors, paths),
        records_stored(facts),
        tiers_served(facts),
        servers_up(facts),
    ]
    if facts.resets:
        found.insert(5, reset_proven(facts))
    if facts.has_control:
        found.append(control_caught(control or {}))
    return found


def _every_path(facts: Facts) -> list[Path]:
    return [COLD, RECOLD, *facts.paths, *([CONTROL] if facts.has_control else [])]


def requests_complete(facts: Facts) -> Invariant:
    """Every path holds every request of its plan, answered with one token."""
    bad, total = [], 0
    for path in _every_path(facts):
        planned, done = set(facts.planned(path)), facts.completed(path)
        total += len(done)
        failed = [record for record in facts.records(path) if record.error is not None]
        if failed:
            bad.append(f"{path.name}: {len(failed)} failed, first {failed[0].error}")
        if not planned or {record.context_id for record in facts.records(path)} != planned:
            bad.append(f"{path.name}: {len(facts.records(path))} of {len(planned)} requests")
        shifted = [record for record in done if record.shift]
        if shifted:
            bad.append(f"{path.name}: {shifted[0].shift_text}")
    return weigh("requests-complete", f"{total} of {total} requests completed", bad, [])


def fixed_settings(facts: Facts) -> Invariant:
    """Every launch states the same engine: step 1 of the test."""
    stated: dict[str, dict[str, Any]] = {}
    for event in facts.events:
        if event.kind == "ready" and event.scenario:
            said = event.detail.get("facts") or {}
            stated[event.scenario] = {
                **{key: said[key] for key in FIXED if key in said},
                "vllm": (event.detail.get("versions") or {}).get("vllm"),
            }
    unknown = [f"start of {arm}" for arm in facts.arms if arm not in stated]
    first = next(iter(stated.values()), {})
    bad = [
        f"{arm}: {key} {said.get(key)}, elsewhere {first.get(key)}"
        for arm, said in stated.items()
        for key in sorted(said.keys() | first.keys())
        if said.get(key) != first.get(key)
    ]
    shown = ", ".join(f"{key} {value}" for key, value in first.items())
    return weigh("fixed-settings", f"alike in every launch: {shown}", bad, unknown)


def cold_is_cold(facts: Facts) -> Invariant:
    """What every path is compared with was computed from nothing, and so was the first run."""
    bad, unknown = [], []
    for path in (COLD, RECOLD, PATHS[0]):
        for record in facts.completed(path):
            if record.cached_tokens is None:
                unknown.append(f"{path.name}: the server hides cached tokens")
            elif record.cached_tokens:
                bad.append(f"{path.name}: {record.cached_tokens:,} cached tokens")
    for path in (COLD, RECOLD):
        local = facts.grown(path, "vllm", "local_hits")
        if local.value is None:
            unknown.append(f"{path.name}: {local.reason}")
        elif local.value:
            bad.append(f"{path.name}: L0 served {local.value:,.0f} tokens")
    return weigh("cold-is-cold", "no cached token in two cold engines and the fill", bad, unknown)


def compared(
    facts: Facts, floors: Mapping[str, Any], paths: Mapping[str, Mapping[str, Any]]
) -> Invariant:
    """The floor is known, every path could be compared, and a wrong cache would show."""
    unknown = []
    if floors.get("max_nat") is None:
        unknown.append("no two cold answers could be compared: the noise floor")
    unknown += [
        f"{name}: {path['reason']}" for name, path in paths.items() if path["verdict"] == "unknown"
    ]
    answers = {
        (record.token, (record.top_logprobs or {}).get(record.token or ""))
        for record in facts.completed(COLD)
    }
    bad = []
    if len(answers) == 1 and len(facts.completed(COLD)) > 1:
        bad.append("every context has the same answer, so a wrong cache would not show")
    total = sum(path["pairs"] for path in paths.values())
    return weigh("compared", f"{total:,} answers compared with cold ones", bad, unknown)


def records_stored(facts: Facts) -> Invariant:
    """The first run left every whole chunk in LMCache, and on the disk: step 3 of the test."""
    found, bad, unknown = stores(facts), [], []
    fill = facts.completed(PATHS[0])
    least = sum((record.planned_tokens - 1) // facts.chunk for record in fill)
    written = found["written_objects"]
    if written is None:
        unknown.append("LMCache does not count what it writes to L1")
    elif written < least or not written:
        bad.append(f"{written:,} of {least:,} chunks stored")
    if found["stable"] is not True:
        (unknown if found["stable"] is None else bad).append("the stores had not come to rest")
    good = f"{written or 0:,} objects in L1, {found['files'] or 0:,} files on the disk"
    if facts.has_l2:
        completed, files, failed = found["completed"], found["files"], found["failed"]
        if not facts.sees_l2:  # then LMCache's own count is all there is
            files = None if completed is None else round(completed)
            good = f"{written or 0:,} objects in L1, {files or 0:,} on the disk by LMCache's count"
        if completed is None or files is None:
            unknown.append("records on the disk were not counted")
        elif failed or not files or files < completed:
            bad.append(f"{files:,} files for {completed:,.0f} stores, {failed or 0:,.0f} failed")
    return weigh("records-stored", good, bad, unknown)


def reset_proven(facts: Facts) -> Invariant:
    """After a reset L0 held nothing and LMCache everything: step 4, proven by a request."""
    found = resets(facts)
    refused = {name: n for name, n in found.items() if name.endswith("_refused")}
    bad = [f"{name.removesuffix('_refused')} was refused {n} times" for name, n in refused.items()]
    local, external = found["probe"]["local_tokens"], found["probe"]["external_tokens"]
    if local is None or external is None:
        return weigh("reset-proven", "", bad, ["what the request after the reset was served from"])
    if local:
        bad.append(f"the reset did not reset: L0 then served {local:,} tokens")
    if external < facts.restorable:
        bad.append(f"LMCache then held {external:,} of {facts.restorable:,} tokens")
    good = f"after a reset: {local} tokens from L0, {external:,} from LMCache"
    return weigh("reset-proven", good, bad, [])


def tiers_served(facts: Facts) -> Invariant:
    """Every restored answer came from the tier under test, and the books agree: step 5."""
    bad, unknown, shown = [], [], []
    for path in [*facts.paths, *([CONTROL] if facts.has_control else [])]:
        if path.tier is None:
            continue
        wrong, missing = _served_elsewhere(facts, path)
        bad += [f"{path.name}: {text}" for text in wrong]
        unknown += [f"{path.name}: {text}" for text in missing]
        shown.append(f"{path.name} {facts.served(path).get(path.tier, 0):,} from {path.tier}")
    return weigh("tiers-served", "; ".join(shown), bad, unknown)


def _served_elsewhere(facts: Facts, path: Path) -> tuple[list[str], list[str]]:
    """What contradicts that the path's tier, and no other, served all that could be restored."""
    done = facts.completed(path)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    if not done or len(cached) < len(done):
        return [], ["the answers do not say what was cached"]
    bad = []
    short = [
        record
        for record in done
        if (record.cached_tokens or 0) < (record.planned_tokens - 1) // facts.chunk * facts.chunk
    ]
    if short:
        bad.append(
            f"{len(short)} of {len(done)} answers were not restored whole,"
            f" first {short[0].context_id} with {short[0].cached_tokens:,} tokens"
        )
    books = {"L0": facts.grown(path, "vllm", "local_hits")}
    external = facts.grown(path, "vllm", "external_hits")
    if path.tier != "L0":
        books["L1"] = facts.grown(path, "lmcache", "l1_hit_tokens")
        books["L2"] = facts.grown(path, "lmcache", "l2_hit_tokens")
    unknown = [str(change.reason) for change in (*books.values(), external) if change.reason]
    if unknown:
        return bad, unknown
    total = sum(cached)
    for tier, change in books.items():
        wanted = total if tier == path.tier else 0
        if round(change.value or 0) != wanted:
            bad.append(f"{tier} served {change.value:,.0f} tokens, not {wanted:,}")
    wanted = 0 if path.tier == "L0" else total
    if round(external.value or 0) != wanted:
        bad.append(f"vLLM counts {external.value:,.0f} external tokens, not {wanted:,}")
    return bad, []


def servers_up(facts: Facts) -> Invariant:
    """The servers that began a round ended it: same start, still running, not killed."""
    bad: list[str] = []
    unknown: list[str] = []
    first: dict[tuple[str | None, str], Any] = {}
    seen: set[str | None] = set()
    for event in (e for e in facts.events if e.kind == "state"):
        seen.add(event.scenario)
        bad += _lost(event, first)
        unknown += [
            f"{event.scenario}, {event.round}: start of {service['name']}"
            for service in event.detail.get("services", [])
            if service.get("running") and service.get("started") is None
        ]
    unknown += [f"state of the servers of {arm}" for arm in facts.arms if arm not in seen]
    return weigh("servers-up", "every server ran through its rounds", bad, unknown)


def _lost(event: Event, first: dict[tuple[str | None, str], Any]) -> Iterator[str]:
    for service in event.detail.get("services", []):
        name, born = service["name"], (service.get("pid"), service.get("started"))
        place = f"{event.scenario}, {event.round}"
        if service.get("oom_killed"):
            yield f"OOM kill: {name} ({place})"
        elif not service.get("running") and service.get("pid") is None:
            yield f"{name} did not answer ({place})"
        elif not service.get("running"):
            yield f"{name} stopped with exit code {service.get('exit_code')} ({place})"
        elif first.setdefault((event.scenario, name), born) != born:
            yield f"{name} was started again ({place})"


def control_caught(control: Mapping[str, Any]) -> Invariant:
    """The negative control fails, as it must: the test sees a wrong cache."""
    found = control.get("verdict", "unknown")
    holds = {"fail": True, "unknown": None}.get(found, False)
    detail = f"stock connector: {control.get('reason', 'not measured')}"
    if holds is False:
        detail += (
            "; the stock connector is right here, or this test does not see a wrong cache: look"
            " which, then set experiments.acceptance.control: false"
        )
    return Invariant("control-caught", holds, detail)


# The seven steps.


def steps(
    held: Sequence[Invariant], paths: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The seven steps of an acceptance test, each with its outcome and the evidence for it."""
    known = {invariant.name: invariant for invariant in held}
    outcomes = [
        ("fixed-settings", known["fixed-settings"]),
        ("first-run", known["requests-complete"]),
        ("records", known["records-stored"]),
        ("local-reset", known.get("reset-proven", _NO_RESET)),
        ("retrieves", known["tiers-served"]),
        ("times", _timed(paths)),
        ("repeated", _repeated(paths)),
    ]
    return [
        {"step": number, "name": name, "holds": found.holds, "detail": found.detail}
        for number, (name, found) in enumerate(outcomes, start=1)
    ]


_NO_RESET = Invariant("reset-proven", None, "vLLM offers no reset; a restart emptied L0")


def _timed(paths: Mapping[str, Mapping[str, Any]]) -> Invariant:
    """Step 6: TTFT and hit rate are recorded for every path; a wrong one has no time."""
    timed = {name: path for name, path in paths.items() if path.get("ttft_ms")}
    shown = "; ".join(
        f"{name} {path['ttft_ms']['median']:.1f} ms, {path.get('hit_share') or 0:.1%} hits"
        for name, path in timed.items()
    )
    return Invariant("times", True if len(timed) == len(paths) else None, shown)


def _repeated(paths: Mapping[str, Mapping[str, Any]]) -> Invariant:
    """Step 7: cold, warm and restarted give the same answers."""
    verdicts = {path["verdict"] for path in paths.values()}
    holds: bool | None = verdicts <= set(RIGHT)
    if "fail" not in verdicts and ("unknown" in verdicts or "restarted" not in paths):
        holds = None
    shown = "; ".join(f"{name}: {path['reason']}" for name, path in paths.items())
    return Invariant("repeated", holds, shown)
